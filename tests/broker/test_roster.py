"""The roster: which consumers are ready, in what order, and how much of a round each may have."""

from __future__ import annotations

import pytest

from tests.broker.columns import make_consumer, make_leased
from timeline.broker.dispatch.roster import ConnectedConsumer, ConsumerHealth, Outboxes, Roster, grants_for
from timeline.broker.limits import Limits
from timeline.model import LeavingReason


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


def test_leases_that_end_in_one_moment_count_once_however_many_rounds_find_them():
    limits = Limits()
    consumer = make_consumer("a", limits=limits)
    for round_ms in (10_000, 10_020, 13_000):  # the last round comes late to what had ended long before
        consumer.lapsed(10_000, round_ms, 0.0)
    consumer.lapsed(10_000 + limits.heartbeat_ms // 2, 13_000, 0.0)
    assert (consumer.lapses, consumer.health(0.0)) == (1, ConsumerHealth.HEALTHY)


def test_taking_over_an_id_leaves_the_new_one_on_the_roster():
    roster = Roster(Limits())
    old, new = make_consumer("a"), make_consumer("a")
    assert roster.join(old) is None
    assert roster.join(new) is old
    roster.leave(old)
    assert roster.consumers[b"a"] is new


async def test_leaving_hands_back_leased_batches_and_still_sends_answers_and_the_word_to_leave():
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


def test_grants_share_a_round_and_let_an_idle_consumer_take_one_large_message():
    busy, idle = make_consumer("busy", 3, 10), make_consumer("idle", 1_000_000, 1 << 40)
    busy.spend(1, 4)
    grants = grants_for([busy, idle], Limits(), most=50)
    assert [(g.holder, g.count, g.alone) for g in grants] == [(b"busy", 2, False), (b"idle", 48, True)]
    assert grants[0].max_bytes == 6
    assert grants[1].max_bytes == Limits().lease_bytes // 2


def test_a_round_is_bounded_over_all_and_shared_evenly():
    consumers = [make_consumer(f"c{at}", messages) for at, messages in enumerate((1_000, 1, 1_000))]
    assert [grant.count for grant in grants_for(consumers, Limits(), most=11)] == [5, 1, 5]
    assert [grant.count for grant in grants_for(consumers, Limits(), most=10)] == [5, 1, 4]
    assert [grant.holder for grant in grants_for(consumers, Limits(), most=2)] == [b"c0", b"c1"]
    consumers[0].spend(2_000, 0)
    assert grants_for(consumers[:1], Limits(), most=5) == []
