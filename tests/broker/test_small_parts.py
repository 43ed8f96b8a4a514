"""The broker's parts by themselves: roster, held, rate, causes, the late ring, batches, metrics, logs."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from tests.broker.columns import make_consumer, make_leased
from timeline.broker.dispatch.leased_batch import LeaseAheadBuffer
from timeline.broker.dispatch.roster import ConnectedConsumer, ConsumerHealth, Outboxes, Roster, grants_for
from timeline.broker.dispatch.rounds import RateLimit
from timeline.broker.late import PART_ROWS, LatenessCauses, LateRing, LateRows
from timeline.broker.limits import Limits
from timeline.columns import Ragged
from timeline.logs import JsonLines, TextLines
from timeline.metrics import CATALOG, Metrics
from timeline.model import LateCause, LeavingReason
from timeline.wire.frames import AIM_BYTES


def test_roster_starts_each_round_after_the_last_dealt():
    roster = Roster(Limits())
    for name in ("a", "b", "c"):
        roster.join(make_consumer(name))
    assert [c.id for c in roster.ready(0.0)] == [b"a", b"b", b"c"]
    roster.dealt_last(roster.consumers[b"a"])
    assert [c.id for c in roster.ready(0.0)] == [b"b", b"c", b"a"]
    roster.dealt_last(roster.consumers[b"c"])
    assert [c.id for c in roster.ready(0.0)] == [b"a", b"b", b"c"]


def test_a_consumer_without_credit_or_silent_or_gone_is_not_ready():
    limits = Limits()
    roster = Roster(limits)
    consumer = make_consumer("a", messages=1)
    roster.join(consumer)
    assert roster.ready(0.0) == [consumer]
    consumer.spend(1, 1)
    assert roster.ready(0.0) == []
    consumer.add_credit(1, 1)
    silent_ms = limits.heartbeat_ms * limits.heartbeats_missed + 1
    assert consumer.health(silent_ms) is ConsumerHealth.SILENT
    assert roster.ready(silent_ms) == []
    consumer.heard_ms = silent_ms
    assert roster.ready(silent_ms) == [consumer]
    consumer.withdraw()
    assert roster.ready(silent_ms) == []


def test_a_consumer_whose_leases_run_out_one_after_another_is_set_aside_longer_each_time():
    limits = Limits()
    consumer = make_consumer("a", limits=limits)
    moment_ms = limits.heartbeat_ms
    for at in range(limits.lapses_tolerated - 1):
        consumer.lapsed(3 * at * moment_ms + 1, 3 * at * moment_ms + 1, 0.0)
    assert consumer.health(0.0) is ConsumerHealth.HEALTHY
    consumer.lapsed(9 * moment_ms, 9 * moment_ms, 0.0)
    assert consumer.health(0.0) is ConsumerHealth.SET_ASIDE
    first_ms = consumer.set_aside_until_ms
    assert consumer.health(first_ms) is ConsumerHealth.HEALTHY
    consumer.lapsed(99 * moment_ms, 99 * moment_ms, first_ms)
    assert consumer.set_aside_until_ms - first_ms == 2 * limits.set_aside_first_ms
    consumer.settled()
    assert consumer.health(first_ms) is ConsumerHealth.HEALTHY


def test_taking_over_an_id_leaves_the_new_one_on_the_roster():
    roster = Roster(Limits())
    old, new = make_consumer("a"), make_consumer("a")
    assert roster.join(old) is None
    assert roster.join(new) is old
    roster.leave(old)
    assert roster.consumers[b"a"] is new


async def test_leaving_hands_back_parcels_and_still_sends_answers_and_the_word_to_leave():
    consumer = make_consumer("a")
    batch = make_leased([5])
    consumer.push(batch)
    assert consumer.outbox_bytes == batch.frame_bytes > 1
    assert consumer.leave(LeavingReason.DRAINING, "drain") == [batch]
    assert consumer.outbox_bytes == 0
    word = await consumer.next()
    assert word is consumer.leaving
    consumer.finish()
    assert await consumer.next() is None


def test_grants_share_a_round_and_let_an_idle_consumer_take_one_large_message():
    busy, idle = make_consumer("busy", 3, 10), make_consumer("idle", 1_000_000, 1 << 40)
    busy.spend(1, 4)
    grants = grants_for([busy, idle], Limits(), most=50)
    assert [(g.holder, g.count, g.alone) for g in grants] == [(b"busy", 2, False), (b"idle", 48, True)]
    assert grants[0].max_bytes == 6
    assert grants[1].max_bytes == Limits().lease_bytes // 2


def test_held_gives_out_at_the_due_and_never_before():
    held = LeaseAheadBuffer()
    first, second = make_consumer("a"), make_consumer("b")
    held.add(first, make_leased([30, 10, 20]))
    held.add(second, make_leased([10]))
    assert held.next_due_ms() == 10
    assert held.due(9) == []
    given_out = {consumer.id: batch.rows.ids.tolist() for consumer, batch in held.due(20)}
    assert given_out == {b"a": [b"m1", b"m2"], b"b": [b"m0"]}
    assert len(held) == 1
    assert [batch.rows.ids.tolist() for batch in held.of(first)] == [[b"m0"]]
    assert held.next_due_ms() is None
    assert held.everything() == []


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 50), min_size=1, max_size=8)), max_size=8))
def test_held_loses_nothing_and_doubles_nothing(adds):
    held, consumers = LeaseAheadBuffer(), [make_consumer("a"), make_consumer("b")]
    for who, dues in adds:
        held.add(consumers[who], make_leased(dues))
    seen = []
    for now in range(0, 51, 5):
        for _, batch in held.due(now):
            assert all(now - 5 < due <= now for due in batch.was_due_ms.tolist())
            seen += batch.was_due_ms.tolist()
    assert sorted(seen) == sorted(due for _, dues in adds for due in dues)


def test_rate_is_even_and_bounded():
    rate = RateLimit()
    assert rate.wait_ms(0, 0.0) == 0.0
    assert rate.allowance(100, 0.0, 1_000) == 10
    rate.took(100, 10)
    assert rate.wait_ms(100, 0.0) == pytest.approx(10.0)
    assert rate.allowance(100, 50.0, 1_000) == 5
    assert rate.allowance(100, 60_000.0, 1_000) == 10  # no burst is saved up


def test_causes_name_the_cause_that_covered_most():
    causes = LatenessCauses(started_ms=1_000)
    causes.now(LateCause.NO_CONSUMER, 1_100)
    causes.now(LateCause.NO_CREDIT, 1_400)
    causes.now(None, 1_500)
    causes.span(LateCause.STORE_SLOW, 1_500, 1_600)
    late, covered = causes.why(np.array([1_100, 1_500, 200, 1_650]), 1_600)
    assert covered.tolist() == [300, 100, 1_200, 0]
    assert late.tolist() == [LateCause.NO_CONSUMER, LateCause.STORE_SLOW, LateCause.BROKER_DOWN, LateCause.UNEXPLAINED]
    assert causes.why(np.array([1_380]), 1_500)[0].tolist() == [LateCause.NO_CREDIT]


def test_what_is_not_delivered_is_kept_by_what_hinders_now():
    causes = LatenessCauses(started_ms=0)
    causes.now(LateCause.PAUSED, 0)
    causes.now(LateCause.NO_CONSUMER, 10_000)
    assert causes.still(100, 10_001) is LateCause.NO_CONSUMER
    causes.now(None, 11_000)
    assert causes.still(100, 11_001) is LateCause.PAUSED  # nothing hinders any more: it goes at once
    restarted = LatenessCauses(started_ms=60_000)
    restarted.now(LateCause.NO_CONSUMER, 60_000)
    assert restarted.still(100, 61_000) is LateCause.BROKER_DOWN
    assert restarted.still(100, 66_000) is LateCause.NO_CONSUMER


def test_a_flickering_hindrance_does_not_push_out_the_past():
    causes = LatenessCauses(started_ms=0)
    causes.span(LateCause.STORE_SLOW, 0, 1_000)
    for at in range(1_000, 4_000, 2):
        causes.now(LateCause.NO_CREDIT, at)
        causes.now(None, at + 1)
    assert causes.why(np.array([100]), 1_100)[0].tolist() == [LateCause.STORE_SLOW]


def test_a_round_is_bounded_over_all_and_shared_evenly():
    consumers = [make_consumer(f"c{at}", messages) for at, messages in enumerate((1_000, 1, 1_000))]
    assert [grant.count for grant in grants_for(consumers, Limits(), most=11)] == [5, 1, 5]
    assert [grant.count for grant in grants_for(consumers, Limits(), most=10)] == [5, 1, 4]
    assert [grant.holder for grant in grants_for(consumers, Limits(), most=2)] == [b"c0", b"c1"]
    consumers[0].spend(2_000, 0)
    assert grants_for(consumers[:1], Limits(), most=5) == []


def test_a_consumer_wakes_its_dealer_when_it_is_well_again_or_takes_what_waits():
    limits, woken, freed = Limits(outbox_bytes=100), [], []
    consumer = make_consumer("a", limits=limits)
    consumer.wake, consumer.outboxes = lambda: woken.append(1), Outboxes(150, lambda: freed.append(1))
    consumer.heard(1.0)
    assert not woken
    consumer.heard(limits.heartbeat_ms * limits.heartbeats_missed + 2.0)
    assert woken == [1]
    consumer.sending_since_ms = consumer.heard_ms
    consumer.sent(consumer.heard_ms + limits.heartbeat_ms + 1)
    assert woken == [1, 1]
    for moment in range(1, 4):
        consumer.lapsed(moment * 10_000, moment * 10_000, 0.0)
    consumer.settled()
    assert woken == [1, 1, 1]
    for _ in range(2):
        consumer.push(make_leased([0]))
    assert (consumer.outbox_bytes > 150, consumer.outboxes.admits(consumer.host)) == (True, False)
    assert consumer.withdraw()
    assert (woken, freed, consumer.outboxes.bytes) == ([1] * 4, [1], 0)


def test_late_ring_is_bounded_and_filters():
    ring = LateRing(kept=3)
    causes = np.full(2, LateCause.PAUSED, dtype=np.uint8)
    dues = np.array([1, 2], dtype=np.int64)
    both = {1: "t", 2: "u"}
    ring.add(1, b"c", Ragged.of([b"a", b"b"]), dues, causes, 100)
    ring.add(2, b"c", Ragged.of([b"a", b"d"]), dues, causes, 200)
    assert ring.dropped == 1

    def told(*asked: Any, **limit: int) -> LateRows:
        return LateRows.concat([LateRows.blank(0), *ring.since(*asked, **limit)])

    found = told(0, both)
    assert (found.topics.tolist(), found.ids.tolist()) == ([b"t", b"u", b"u"], [b"b", b"a", b"d"])
    assert (found.delivered_ms.tolist(), found.cause.tolist()) == ([100, 200, 200], [LateCause.PAUSED] * 3)
    assert found.consumers.tolist() == [b"c"] * 3
    assert told(0, {2: "u"}, b"d").due_ms.tolist() == [2]
    assert told(150, both).ids.tolist() == told(0, {2: "u"}).ids.tolist() == [b"a", b"d"]
    assert len(told(0, {3: "t"})) == len(told(201, both)) == 0
    assert told(0, both, limit=1).ids.tolist() == [b"d"]
    ring.add(1, b"c", Ragged.of([b"1", b"2", b"3", b"4"]), np.arange(4), np.zeros(4, dtype=np.uint8), 300)
    assert told(0, both).ids.tolist() == [b"2", b"3", b"4"]


def test_late_deliveries_that_are_forgotten_while_they_are_read_are_left_out():
    kept = 2 * PART_ROWS
    ring, many = LateRing(kept), Ragged.of([b"%d" % at for at in range(kept)])
    ring.add(1, b"c", many, np.arange(kept), np.zeros(kept, dtype=np.uint8), 100)
    parts = ring.since(0, {1: "t"})
    assert next(parts).ids.tolist() == many[:PART_ROWS].tolist()
    newer = PART_ROWS + 10
    ring.add(2, b"c", many[:newer], np.arange(newer), np.zeros(newer, dtype=np.uint8), 200)
    assert next(parts).ids.tolist() == many[newer:].tolist()
    assert next(parts, None) is None


@pytest.mark.slow
@given(st.lists(st.integers(0, 700_000), min_size=1, max_size=12), st.integers(1, 5))
def test_a_parcel_is_cut_into_frames_of_bounded_size(sizes, most):
    batch = make_leased([0] * len(sizes), [b"x" * size for size in sizes])
    parts = list(batch.frames(most, AIM_BYTES))
    assert [id for part in parts for id in part.rows.ids.tolist()] == batch.rows.ids.tolist()
    for part in parts:
        assert 1 <= len(part) <= most
        assert len(part) == 1 or int(part.sizes.sum()) <= AIM_BYTES


def test_every_metric_of_the_catalog_is_exposed_and_topics_are_capped():
    metrics = Metrics(topics_shown=1)
    assert metrics.topic("first") == "first"
    assert metrics.topic("second") == "…"
    metrics.lateness.observe("first", np.array([0.0005, 0.004, 7.0]))
    text = generate_latest(metrics.registry).decode()
    for name in [name for name, one in CATALOG.items() if not one.always]:
        assert name not in text
        metrics.gauge(name, 1.0)
    text = generate_latest(metrics.registry).decode()
    for name, one in CATALOG.items():
        assert f"# TYPE {name.removesuffix('_total') if one.kind == 'counter' else name}" in text or name in text
        assert all(label.isidentifier() for label in one.labels)
    assert 'timeline_delivery_lateness_seconds_bucket{le="0.001",topic="first"} 1.0' in text
    assert 'timeline_delivery_lateness_seconds_count{topic="first"} 3.0' in text
    metrics.forget_topic("first")
    assert 'topic="first"' not in generate_latest(metrics.registry).decode()


def test_a_scrape_may_come_while_a_series_comes_or_goes():
    """It runs in a thread of its own: between the two notes of a batch, and between the two of a series forgotten."""
    metrics = Metrics()

    class Meanwhile(dict):
        def items(self):
            for item in list(super().items()):
                metrics.lateness.forget(item[0])
                yield item

    metrics.lateness.observe("first", np.array([0.0005]))
    metrics.lateness.counts = Meanwhile(metrics.lateness.counts)
    assert 'timeline_delivery_lateness_seconds_count{topic="first"} 1.0' in generate_latest(metrics.registry).decode()
    assert 'topic="first"' not in generate_latest(metrics.registry).decode()


def test_logs_are_one_object_a_line_with_their_fields():
    record = logging.makeLogRecord({"msg": "ready", "levelno": 20, "levelname": "INFO", "name": "timeline", "port": 1})
    line = json.loads(JsonLines().format(record))
    assert (line["event"], line["level"], line["port"]) == ("ready", "info", 1)
    assert TextLines().format(record).endswith("ready port=1")


def test_leases_that_end_in_one_moment_count_once_however_many_rounds_find_them():
    limits = Limits()
    consumer = make_consumer("a", limits=limits)
    for round_ms in (10_000, 10_020, 13_000):  # the last round comes late to what had ended long before
        consumer.lapsed(10_000, round_ms, 0.0)
    consumer.lapsed(10_000 + limits.heartbeat_ms // 2, 13_000, 0.0)
    assert (consumer.lapses, consumer.health(0.0)) == (1, ConsumerHealth.HEALTHY)


def test_a_clock_that_jumped_is_the_cause_of_what_came_due_in_between_and_nothing_else_is():
    causes = LatenessCauses(started_ms=0)
    causes.now(LateCause.NO_CONSUMER, 900)
    causes.jumped(1_000, 3_601_000)
    causes.now(None, 3_601_500)
    late, _ = causes.why(np.array([1_800_000, 100, 3_601_100]), 3_601_600)
    assert late.tolist() == [LateCause.CLOCK, LateCause.CLOCK, LateCause.NO_CONSUMER]


def test_what_came_due_while_the_broker_was_down_waits_for_it_until_its_consumers_are_back():
    causes = LatenessCauses(started_ms=1_000)
    causes.now(LateCause.NO_CONSUMER, 1_000)
    assert causes.why(np.array([900, 1_001]), 2_500)[0].tolist() == [LateCause.BROKER_DOWN, LateCause.NO_CONSUMER]
    causes.now(None, 2_500)
    assert causes.why(np.array([900, 1_001]), 2_600)[0].tolist() == [LateCause.BROKER_DOWN, LateCause.NO_CONSUMER]
    never_back = LatenessCauses(started_ms=1_000)
    never_back.now(LateCause.NO_CONSUMER, 1_000)
    assert never_back.why(np.array([900]), 60_000)[0].tolist() == [LateCause.NO_CONSUMER]


def test_a_round_looks_at_those_with_credit_alone_and_the_next_one_goes_on_behind_them(
    monkeypatch: pytest.MonkeyPatch,
):
    limits = Limits(consumers_dealt=2)
    roster, looked = Roster(limits), []
    for at in range(1_000):
        roster.join(make_consumer(f"busy{at}", messages=0, limits=limits))
    for name in ("a", "b", "z"):
        roster.join(make_consumer(name, limits=limits))
    health = ConnectedConsumer.health
    monkeypatch.setattr(
        ConnectedConsumer, "health", lambda self, now_ms: (looked.append(self.id), health(self, now_ms))[1]
    )
    assert [c.id for c in roster.ready(0.0)] == [b"a", b"b"]
    roster.dealt_last(roster.consumers[b"b"])
    roster.consumers[b"busy7"].add_credit(1, 1)
    assert [c.id for c in roster.ready(0.0)] == [b"busy7", b"z"]
    roster.consumers[b"busy7"].spend(1, 1)
    roster.leave(roster.consumers[b"z"])
    assert [c.id for c in roster.ready(0.0)] == [b"a", b"b"]
    assert len(looked) == 6
