"""Where a look for what may be leased begins: never beyond what may be due."""

from __future__ import annotations

from collections.abc import Sequence

from timeline.model import Topic, TopicSettings
from timeline.storage_plugins.postgresql.store import NEVER_MS, SLACK_MS, WHOLE_EVERY_MS, LeaseLook, ScanFloors

TOPIC, OTHER = (Topic(name, uid, TopicSettings()) for name, uid in (("t", 7), ("u", 8)))
WHOLE = (-1, -1)


def begun(
    floors: ScanFloors, now_ms: int, topic: Topic = TOPIC, buckets: Sequence[int] | None = None
) -> tuple[int, int]:
    """From which due, and from which end of a lease, a look begins."""
    look = floors.look(topic, buckets, now_ms)
    return look.due_ms, look.end_ms


def looked(
    floors: ScanFloors, now_ms: int, next_due_ms: int | None = None, end_ms: int | None = None, backoff_ms: int = 0,
    topic: Topic = TOPIC, buckets: Sequence[int] | None = None,
) -> LeaseLook:  # fmt: skip
    """A look that left this."""
    with floors.look(topic, buckets, now_ms) as look:
        look.left(next_due_ms, end_ms, backoff_ms)
    return look


def test_a_look_begins_a_little_before_what_the_last_one_left() -> None:
    floors = ScanFloors()
    assert begun(floors, 100_000) == WHOLE
    looked(floors, 100_000, 99_500, 120_000)
    assert begun(floors, 100_010) == (99_500 - SLACK_MS, 120_000)
    looked(floors, 100_010, 120_000, 130_000)
    assert begun(floors, 100_020) == (100_010 - SLACK_MS, 130_000), "what is due from now on may be put at any time"
    assert begun(floors, 100_020, buckets=[1, 2]) == WHOLE
    assert begun(floors, 100_020, OTHER) == WHOLE


def test_a_look_is_whole_once_a_second_and_when_the_clock_went_back() -> None:
    floors = ScanFloors()
    looked(floors, 100_000, buckets=[2, 1])
    assert begun(floors, 100_000 + WHOLE_EVERY_MS - 1, buckets=[1, 2]) != WHOLE
    assert begun(floors, 100_000 + WHOLE_EVERY_MS, buckets=[1, 2]) == WHOLE
    assert begun(floors, 99_999, buckets=[1, 2]) == WHOLE
    looked(floors, 100_500, buckets=[1, 2])
    assert begun(floors, 101_000, buckets=[1, 2]) == WHOLE, "only a look from the beginning puts that off"


def test_a_look_that_found_nothing_begins_again() -> None:
    floors = ScanFloors()
    looked(floors, 100_000)
    with floors.look(TOPIC, None, 100_500) as look:
        assert look.begins_again() and (look.due_ms, look.end_ms) == WHOLE
        assert not look.begins_again()
        look.left(None, None, 0)
    assert begun(floors, 101_400) == (100_500 - SLACK_MS, NEVER_MS), "and puts the next whole one off"


def test_what_this_store_writes_further_back_is_looked_for() -> None:
    floors = ScanFloors()
    for topic in (TOPIC, OTHER):
        looked(floors, 100_000, end_ms=130_000, topic=topic)
    floors.lower(TOPIC, 99_500)
    assert begun(floors, 100_001) == (99_000, 130_000)
    floors.lower(TOPIC, 98_000, 110_000)
    assert begun(floors, 100_001) == (98_000, 110_000)
    floors.lower(TOPIC, -1)
    assert begun(floors, 100_001)[0] == -1
    assert begun(floors, 100_001, OTHER) == (99_000, 130_000)
    floors.forget()
    assert begun(floors, 100_001, OTHER) == WHOLE


def test_what_is_written_while_a_look_is_under_way_is_not_missed() -> None:
    """Neither by a look from the beginning, nor by one that began at a floor, nor where that floor is forgotten."""
    floors = ScanFloors()
    with floors.look(TOPIC, None, 100_000) as look:
        floors.lower(OTHER, 1, 1)
        floors.lower(TOPIC, 95_000, 105_000)
        look.left(None, None, 0)
    assert begun(floors, 100_001) == (95_000 - SLACK_MS, 105_000)
    with floors.look(TOPIC, None, 100_002) as look:
        floors.lower(TOPIC, 90_000)
        look.left(None, None, 0)
    assert begun(floors, 100_003)[0] == 90_000 - SLACK_MS
    with floors.look(TOPIC, None, 100_004) as look:
        floors.forget()
        look.left(None, None, 0)
    assert begun(floors, 100_005) == WHOLE
    assert not floors.under_way


def test_a_lease_that_ran_out_waits_for_its_backoff_above_the_floor() -> None:
    floors = ScanFloors()
    looked(floors, 100_000, 104_000, 99_000, backoff_ms=5_000)
    assert begun(floors, 100_001) == (100_000 - 5_000 - SLACK_MS, 99_000)


def test_floors_that_nobody_looks_from_any_more_are_dropped() -> None:
    floors = ScanFloors()
    for at in range(100):
        looked(floors, 100_000 + 100 * at, buckets=[at])
    assert len(floors.standing) == WHOLE_EVERY_MS // 100
