"""Looks at schedules by example: what is put, what is missed, and when the next look comes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from typing import Any

import pytest

from tests.schedules.samples import spec
from tests.schedules.world import BEGIN_MS, World
from timeline.model import Status
from timeline.recurrence import Occurrence
from timeline.schedules import Overlap, looks
from timeline.schedules.edits import created
from timeline.schedules.looks import DAY_MS, YEAR_MS, due_of, plan, watched
from timeline.schedules.record import ScheduleRecord, occurrence_id

MINUTE = 60_000
HOUR = 60 * MINUTE


def world(work_ms: int = 0, **fields: Any) -> World:
    made = World(random.Random(1), work_ms)
    made.begin(spec(**{"name": "each", "cron": "* * * * *"} | fields))
    return made


def newest(here: World) -> ScheduleRecord:
    record = here.newest()
    assert record is not None
    return record


def times(here: World) -> list[int]:
    """Minutes since the world began, of what was delivered."""
    return [(one.at_ms - BEGIN_MS) // MINUTE for one in here.delivered]


def counts(here: World) -> dict[str, int]:
    record = newest(here)
    names = ("produced", "caught_up", "missed", "skipped", "failed")
    return {name: getattr(record, name) for name in names if getattr(record, name)}


def late(here: World) -> list[int]:
    return [one.when_ms - one.due_ms for one in here.delivered]


def test_each_occurrence_is_put_before_its_time_and_delivered_at_it() -> None:
    here = world(payload=b"{sequence} at {occurrence}", headers={"n": "{sequence}"})
    here.run_until(BEGIN_MS + HOUR)
    assert times(here) == list(range(60))
    assert set(late(here)) == {0}
    assert here.delivered[2].payload == b"3 at 2026-11-18T11:09:00Z"
    assert here.delivered[2].id == "each@2026-11-18T11:09:00Z"


@pytest.mark.slow
def test_an_outage_of_a_minute_makes_nothing_late() -> None:
    for seconds in range(0, 120, 7):
        here = world()
        here.run_until(BEGIN_MS + 5 * MINUTE + seconds * 1_000)
        here.outage(59 * 1_000)
        here.run_until(BEGIN_MS + 10 * MINUTE)
        assert set(late(here)) == {0}
        assert times(here) == list(range(10))


@pytest.mark.parametrize(
    ("catch_up", "window_ms", "delivered", "said"),
    [
        ("none", HOUR, [], {"missed": 28}),
        ("latest", HOUR, [39], {"missed": 27, "caught_up": 1}),
        ("latest", MINUTE, [39], {"missed": 27, "caught_up": 1}),
        ("latest", 10_000, [], {"missed": 28}),
        ("all", HOUR, list(range(12, 40)), {"caught_up": 28}),
        ("all", 10 * MINUTE, list(range(30, 40)), {"missed": 18, "caught_up": 10}),
    ],
)
def test_what_was_missed_is_caught_up_as_asked(
    catch_up: str, window_ms: int, delivered: list[int], said: dict[str, int]
) -> None:
    here = world(catch_up=catch_up, window_ms=window_ms)
    here.run_until(BEGIN_MS + 10 * MINUTE)
    # The brokers come back 50 s after minute 39. Meanwhile, minutes 10 and 11 were delivered, which were put before.
    here.outage(30 * MINUTE + 10_000)
    before = times(here)
    here.run_until(here.now_ms + 1_000)
    assert before == list(range(12))
    assert times(here)[len(before) :] == delivered
    here.run_until(here.now_ms + 5 * MINUTE)
    record = newest(here)
    assert {name: getattr(record, name) for name in said} == said
    assert record.missed + record.caught_up == 28
    assert times(here)[len(before) + len(delivered) :] == [40, 41, 42, 43, 44]


def test_what_is_only_late_is_produced_whatever_catch_up_says() -> None:
    for catch_up in ("none", "latest", "all"):
        here = world(cron="*/5 * * * * *", catch_up=catch_up)
        here.run_until(BEGIN_MS + 2 * MINUTE)
        last = max(here.topic.values(), key=lambda one: one.message.at_ms).message.at_ms
        here.outage(last - here.now_ms + 21_000)  # 16 s, 11 s, 6 s and 1 s after the next ones
        here.run_until(here.now_ms + MINUTE)
        at = [one.at_ms for one in here.delivered]
        if catch_up == "none":
            assert [two - one for one, two in pairwise(at) if two - one != 5_000] == [10_000]
            assert counts(here)["missed"] == 1
        else:
            assert {two - one for one, two in pairwise(at)} == {5_000}
            assert counts(here)["caught_up"] == 1


def test_an_occurrence_that_has_expired_is_missed() -> None:
    here = world(catch_up="all", expires_ms=5 * MINUTE)
    here.run_until(BEGIN_MS + 10 * MINUTE)
    here.outage(30 * MINUTE)
    here.run_until(here.now_ms + 10_000)
    assert counts(here)["missed"] == 23
    assert times(here)[-5:] == [35, 36, 37, 38, 39]


@pytest.mark.slow
def test_walks_of_a_long_outage_are_bounded_and_miss_nothing() -> None:
    here = world(cron="* * * * * *", catch_up="latest")
    here.run_until(BEGIN_MS + MINUTE)
    here.outage(6 * HOUR)
    looked = len(here.history)
    here.run_until(here.now_ms + 1_000)
    record = newest(here)
    assert record.caught_up == 1
    assert record.sequence == record.produced + record.caught_up + record.missed
    assert 6 * 3_600 - 300 < record.missed < 6 * 3_600
    assert 4 <= len(here.history) - looked <= 12


def test_overlap_skips_while_the_previous_one_is_unfinished() -> None:
    here = world(work_ms=150_000, overlap="skip")
    here.run_until(BEGIN_MS + 9 * MINUTE + 30_000)
    assert times(here) == [0, 3, 6, 9]
    assert counts(here) == {"produced": 4, "skipped": 6}
    assert set(late(here)) == {0}


@pytest.mark.slow
def test_overlap_queues_and_loses_nothing() -> None:
    here = world(work_ms=90_000, overlap="queue", catch_up="none")
    here.run_until(BEGIN_MS + 20 * MINUTE)
    waiting = newest(here).queue
    assert sum(span.length for span in waiting) == 20 - len(here.delivered)
    assert len(waiting) == 1
    assert times(here) == list(range(len(here.delivered)))
    gaps = [two.when_ms - one.when_ms for one, two in pairwise(here.delivered)]
    assert all(90_000 <= gap < 95_500 for gap in gaps[1:])
    assert newest(here).missed == 0


def test_a_queue_catches_up_quickly() -> None:
    here = world(work_ms=10 * MINUTE, overlap="queue")
    here.run_until(BEGIN_MS + 9 * MINUTE)
    here.work_ms = 100
    here.run_until(BEGIN_MS + 10 * MINUTE + 45_000)
    assert not newest(here).queue
    assert times(here) == list(range(11))


@pytest.mark.slow
@pytest.mark.parametrize(("catch_up", "missed"), [("none", 30), ("latest", 29), ("all", 0)])
def test_what_waits_in_a_queue_is_not_missed_but_what_an_outage_hid_is(catch_up: str, missed: int) -> None:
    here = world(work_ms=3 * HOUR, overlap="queue", catch_up=catch_up)
    here.run_until(BEGIN_MS + 10 * MINUTE)
    here.outage(30 * MINUTE)
    here.run_until(here.now_ms + 10 * MINUTE)
    here.work_ms = 100
    here.run_until(BEGIN_MS + 4 * HOUR)
    record = newest(here)
    assert record.missed == missed
    at = times(here)
    assert at == sorted(set(at))
    assert len(at) + missed == 240
    assert not set(range(10)) - set(at)


@pytest.mark.slow
def test_overlap_looks_a_second_before_or_a_tenth_of_the_period() -> None:
    for cron, lead in (("* * * * *", 1_000), ("*/5 * * * * *", 500), ("* * * * * *", 100)):
        here = world(cron=cron, overlap="skip")
        here.run_until(BEGIN_MS + 5 * MINUTE)
        puts = [one for one in here.history if one.record.decided]
        assert {one.record.decided[0].at_ms - one.now_ms for one in puts[1:]} <= set(range(lead - 20, lead + 1))
        assert max(late(here)) < 50


def test_count_ends_it() -> None:
    here = world(start_ms=BEGIN_MS - 5 * MINUTE, count=8)
    here.run_until(BEGIN_MS + HOUR)
    assert times(here) == [0, 1, 2]
    record = newest(here)
    assert (record.ended, record.sequence) == (True, 8)
    assert min(held.due_ms for held in here.records.values()) > here.now_ms + YEAR_MS - 2 * HOUR


@pytest.mark.slow
def test_excluded_times_in_a_row_end_nothing() -> None:
    here = world(cron="* * * * * *", exclude=["cron:* * 12-23 * * *"], start_ms=0, zone="UTC")
    here.run_until(BEGIN_MS + HOUR)
    produced = len(here.delivered)
    assert produced == 3_200  # until noon
    here.run_until(BEGIN_MS + 14 * HOUR)
    record = newest(here)
    assert not record.ended
    assert len(here.delivered) - produced in (4_000, 4_001)  # from midnight on
    assert set(late(here)[1:]) == {0}


@pytest.mark.slow
def test_a_schedule_whose_every_time_is_excluded_rests_and_never_ends() -> None:
    here = world(cron="* * * * * *", exclude=["cron:* * * * * *"])
    here.run_until(BEGIN_MS + DAY_MS)
    assert not newest(here).ended
    assert len(here.history) < 40


def test_a_rule_that_is_never_met_ends_it() -> None:
    here = world(cron=(), rrule="FREQ=YEARLY;BYMONTH=2;BYYEARDAY=100")
    here.run_until(BEGIN_MS + HOUR)
    assert newest(here).ended


@pytest.mark.slow
def test_a_rare_occurrence_is_looked_for_each_day_without_a_new_record() -> None:
    here = world(cron="0 0 29 2 *")
    here.run_until(BEGIN_MS + 10 * DAY_MS)
    assert len(here.history) == 1
    assert here.records[1].due_ms <= here.now_ms + DAY_MS
    here.run_until(BEGIN_MS + 470 * DAY_MS)
    assert len(here.delivered) == 1
    assert late(here) == [0]


def test_jitter_is_added_and_stays_the_same() -> None:
    here = world(jitter_ms=10 * MINUTE, catch_up="none")
    said = newest(here).specification
    here.run_until(BEGIN_MS + 2 * HOUR)
    assert set(late(here)) == {0}
    assert len({one.due_ms - one.at_ms for one in here.delivered}) > 100
    assert all(0 <= one.due_ms - one.at_ms < 10 * MINUTE for one in here.delivered)
    assert all(one.due_ms == due_of(said, one.at_ms) for one in here.delivered)
    here.outage(30 * MINUTE)
    back_ms = here.now_ms
    here.run_until(back_ms + 20 * MINUTE)
    every = range(BEGIN_MS + 20_000, back_ms + 10 * MINUTE, MINUTE)
    lost = {at_ms for at_ms in every if due_of(said, at_ms) + 15_000 < back_ms} - {one.at_ms for one in here.delivered}
    assert newest(here).missed == len(lost) > 10
    assert {at_ms for at_ms in every if due_of(said, at_ms) >= back_ms} <= {one.at_ms for one in here.delivered}


def test_a_clock_that_is_set_back_repeats_nothing() -> None:
    here = world()
    here.run_until(BEGIN_MS + 30 * MINUTE)
    record = newest(here)
    back_ms = here.now_ms - HOUR
    look = plan(record, back_ms)
    assert not look.messages
    assert look.successor is None
    assert back_ms < look.due_ms <= here.now_ms + 2 * MINUTE


def test_the_end_of_all_time() -> None:
    last_ms = 253_370_764_800_000
    specification = spec(name="each", cron="* * * * * *", jitter_ms=DAY_MS, expires_ms=36_600 * DAY_MS)
    edit = created(specification, last_ms - 5_000)
    look = plan(edit.record, last_ms - 5_000)
    assert look.successor is not None
    assert len(look.successor.decided) == 5
    assert look.successor.ended
    then = plan(look.successor, last_ms - 5_000)
    assert len(then.messages) == 5
    assert all(one.due_ms < one.expires_ms <= 253_402_300_799_999 for one in then.messages)
    assert plan(created(specification, last_ms + 5).record, last_ms + 5).successor is not None


def test_answers_are_counted() -> None:
    here = world(cron="* * * * * *", expires_ms=MINUTE)
    record = newest(here)
    look = plan(record, here.now_ms)
    assert look.successor is not None
    look = plan(look.successor, here.now_ms)
    statuses = [Status.OK] * len(look.messages)
    for status in (Status.THROTTLED, Status.UNAVAILABLE, Status.UNKNOWN):
        assert look.must_repeat([status, *statuses[1:]])
    statuses[0:5] = [Status.DUPLICATE, Status.INVALID, Status.EXISTS, Status.TOO_LARGE, Status.FORBIDDEN]
    assert not look.must_repeat(statuses)
    made = look.completed(statuses)
    assert made is not None
    assert (made.failed, made.produced) == (4, len(statuses) - 4)
    assert made.last_id == occurrence_id("each", look.messages[-1].at_ms)
    # What has expired meanwhile was missed, not wrong.
    late_look = plan(look.successor or record, here.now_ms)
    assert late_look.must_repeat([Status.UNKNOWN])
    gone = plan(record, here.now_ms)
    assert gone.successor is not None
    gone = plan(gone.successor, here.now_ms + HOUR)
    ended = gone.completed([Status.INVALID] * len(gone.messages))
    assert ended is not None
    assert ended.failed == 0
    assert ended.missed >= len(gone.messages)


def test_it_watches_the_previous_one_where_they_may_not_overlap() -> None:
    here = world(overlap=Overlap.SKIP)
    here.run_until(BEGIN_MS + 5 * MINUTE)
    assert watched(newest(here)) == here.delivered[-1].id
    here = world()
    here.run_until(BEGIN_MS + 5 * MINUTE)
    assert watched(newest(here)) == ""


def test_a_topic_that_is_busy_holds_it_up_and_loses_nothing() -> None:
    here = world()
    here.run_until(BEGIN_MS + 5 * MINUTE)
    here.busy = True
    here.run_until(BEGIN_MS + 15 * MINUTE)
    here.busy = False
    here.run_until(BEGIN_MS + 20 * MINUTE)
    assert times(here) == list(range(20))
    assert counts(here)["produced"] == newest(here).sequence


def test_the_lead_before_an_overlap_is_short_where_a_walk_reports_between_two_times() -> None:
    """The next occurrence may be near. A report never lies behind it."""

    class Reporting:
        recurrence: Any

        def walk(self, position_ms: int, sequence: int) -> Iterator[Occurrence | int]:
            wall = datetime(2026, 1, 1)
            yield from (Occurrence(1_000, wall), 1_500, Occurrence(2_000, wall))

    said: Any = Reporting()
    said.recurrence = said
    coming = looks._Coming(said, 0, 0)
    assert coming.take() == Occurrence(1_000, datetime(2026, 1, 1))
    assert coming.overlap_lead(1_000) == 50
    assert coming.take() == 1_500
