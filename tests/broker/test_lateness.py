"""How late deliveries are, why, and which of them are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from tests.broker.columns import make_leased
from timeline.broker.late import PART_ROWS, LatenessCauses, LateRing, LateRows, TopicLateness, Traces
from timeline.broker.limits import Limits
from timeline.columns import Ragged
from timeline.metrics import Metrics
from timeline.model import LateCause, Topic, TopicSettings


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.one_of(st.integers(-3, 120), st.sampled_from([0, 1, 2, 3, 5, 10, 20, 50, 51])),
            st.integers(0, 60),
            st.booleans(),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_a_message_is_noted_alone_as_it_is_among_others(dealt: list[tuple[int, int, bool]]):
    """Of each: how late it is, by how much it was scheduled before it was due last, whether it is leased again."""
    whole = make_leased([10_000 - late_ms for late_ms, _, _ in dealt])
    whole.rows.scheduled_ms = whole.was_due_ms - np.array([before_ms for _, before_ms, _ in dealt])
    whole.again = np.array([again for _, _, again in dealt])
    told = []
    for batches in ([whole], [whole.slice(at, at + 1) for at in range(len(whole))]):
        metrics, ring = Metrics(), LateRing(100)
        lateness = TopicLateness(LatenessCauses(0), ring, metrics, Limits(), Traces("b1"))
        for batch in batches:
            lateness.note(Topic("t", 1, TopicSettings()), b"c", batch, 10_000)
        found = LateRows.concat([LateRows.blank(0), *ring.since(0, {1: "t"})])
        late = sorted(zip(found.ids, found.due_ms.tolist(), found.cause.tolist(), strict=True))
        exposed = [line for line in generate_latest(metrics.registry).decode().splitlines() if 'topic="t"' in line]
        counts = [line for line in exposed if "_sum" not in line and "_created" not in line]
        told.append((lateness.delivered, lateness.redelivered, late, counts))
        sums = [float(line.split()[1]) for line in exposed if "_sum" in line]
        seconds = [max(0, late_ms + before_ms) / 1000.0 for late_ms, before_ms, again in dealt if not again]
        assert sums == ([pytest.approx(sum(seconds))] if seconds else [])
    assert told[0] == told[1]
    assert told[0][0] == len(dealt)


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
