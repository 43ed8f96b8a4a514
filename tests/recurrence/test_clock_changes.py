"""Cron across changes of clocks, against an oracle that looks at each minute of UTC, and against two libraries."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise, takewhile
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim

from tests.recurrence.oracle import BEGIN, MINUTE, Minute, PlainCron, changes, distinct_zones, minutes
from timeline.recurrence import FoldPolicy, GapPolicy, Occurrence, Recurrence, WallChange

CRONS = (
    PlainCron("30 2 * * *", frozenset({30}), frozenset({2})),
    PlainCron("0,59 0-3 * * *", frozenset({0, 59}), frozenset(range(4))),
    PlainCron("15 23 * * *", frozenset({15}), frozenset({23})),
    PlainCron("*/15 * * * *", frozenset({0, 15, 30, 45})),
    PlainCron("45 1 * * 0", frozenset({45}), frozenset({1}), weekdays=frozenset({7})),
    PlainCron("20 * 25-31 * *", frozenset({20}), days=frozenset(range(25, 32))),
)
AROUND = timedelta(hours=30)
SAMPLE = (
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",  # by half an hour
    "America/Santiago",  # at midnight
    "Africa/Casablanca",  # four times a year
    "Antarctica/Troll",  # by two hours
    "Asia/Tehran",
    "UTC",
)
HISTORY = (
    ("Pacific/Apia", datetime(2011, 12, 30, tzinfo=UTC)),  # a whole day was skipped
    ("America/Juneau", datetime(1983, 10, 30, tzinfo=UTC)),  # two hours twice
)


def ms(when: datetime) -> int:
    return int(when.timestamp()) * 1_000


def found(asked: Recurrence, begin: datetime, end: datetime) -> list[int]:
    return [one.at_ms for one in takewhile(lambda one: one.at_ms < ms(end), asked.occurrences(ms(begin)))]


class Watched:
    """What a wall shows in each minute of UTC, from somewhat before `begin` to somewhat after `end`: what is skipped
    there comes later, and what is shown twice may have been shown before."""

    def __init__(self, name: str, begin: datetime, end: datetime) -> None:
        self.begin_ms, self.end_ms = ms(begin), ms(end)
        self._seen = list(minutes(ZoneInfo(name), begin - timedelta(hours=25), end + timedelta(hours=25)))
        self.twice = {minute.wall for minute in self._seen if minute.again}
        self.skipped = [
            Minute(before.utc + n * MINUTE, before.wall + n * MINUTE, again=False)
            for before, after in pairwise(self._seen)
            for n in range(1, (after.wall - before.wall) // MINUTE)
        ]

    def expected(self, cron: PlainCron) -> Iterator[tuple[GapPolicy, FoldPolicy, list[int]]]:
        """The times of `cron`, for each way to treat changes."""
        named = [minute for minute in self._seen if cron.names(minute.wall)]
        late = {ms(minute.utc) for minute in self.skipped if cron.names(minute.wall)}
        for fold in FoldPolicy:
            times = {
                ms(minute.utc)
                for minute in named
                if minute.wall not in self.twice
                or fold is FoldPolicy.BOTH
                or (fold is FoldPolicy.SECOND) is minute.again
            }
            for gap, all_times in ((GapPolicy.SKIP, times), (GapPolicy.LATER, times | late)):
                yield gap, fold, sorted(at for at in all_times if self.begin_ms <= at < self.end_ms)


def check(name: str, begin: datetime, end: datetime) -> int:
    """Compares all rules from `begin` on. Returns how many occurrences were the same."""
    count, watched = 0, Watched(name, begin, end)
    for cron in CRONS:
        for gap, fold, right in watched.expected(cron):
            asked = Recurrence(cron=[cron.text], zone=name, gap=gap, fold=fold)
            assert found(asked, begin, end) == right, (name, cron.text, gap, fold, begin)
            count += len(right)
    return count


def windows(name: str, every: int = 1) -> Iterator[tuple[datetime, datetime]]:
    """The hours around changes of its clocks; of a zone without any, some days."""
    for at in changes(ZoneInfo(name))[::every] or [BEGIN + AROUND]:
        yield at - AROUND, at + AROUND


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_cron_names_what_a_minute_by_minute_look_at_the_wall_finds(name: str) -> None:
    begin, end = next(windows(name))
    # From each hour on: whatever an occurrence waits for may lie on either side.
    assert sum(check(name, begin + timedelta(hours=n), end) for n in range(0, 60, 7)) > 0
    assert sum(check(name, *window) for window in windows(name, every=8)) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "at"), HISTORY)
def test_clocks_that_were_set_by_more_than_an_hour(name: str, at: datetime) -> None:
    assert (
        sum(check(name, at - timedelta(days=1) + timedelta(hours=n), at + timedelta(days=2)) for n in (0, 11, 25)) > 0
    )


SHARDS = 8


@pytest.mark.prove
@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_zone_at_every_change_of_its_clocks(shard: int) -> None:
    zones = sorted(distinct_zones().values())
    assert len(zones) > 50
    assert sum(check(name, *window) for name in zones[shard::SHARDS] for window in windows(name)) > 10_000


LIBRARY = ("0 9 * * 1-5", "*/15 * * * *", "30 2 * * *", "0 0 L * *", "0 12 * * 5L", "5 4 * * 1#2", "10-20/5 8 1,15 * *")


@pytest.mark.slow
@pytest.mark.parametrize("text", LIBRARY)
@pytest.mark.parametrize("name", SAMPLE)
def test_without_a_choice_it_goes_as_debians_cron_but_for_times_that_are_skipped(text: str, name: str) -> None:
    """The library moves those to the end of the gap, and this one by the length of the gap."""
    zone = ZoneInfo(name)
    begin, end = BEGIN, BEGIN + timedelta(days=120 if text.startswith("*") else 800)
    library = []
    for when in CronSim(text, (begin - timedelta(seconds=1)).astimezone(zone)):
        if when >= end:
            break
        library.append(ms(when.astimezone(UTC)))
    asked = Recurrence(cron=[text], zone=name)
    ours = list(takewhile(lambda one: one.at_ms < ms(end), asked.occurrences(ms(begin))))
    assert len(ours) == len(library) > 10
    moved = {ms(when.astimezone(UTC)) for when in (_end_of_gap(one, zone) for one in ours) if when is not None}
    plain = {one.at_ms for one in ours if one.change is not WallChange.SKIPPED}
    assert plain | moved == set(library)


def _end_of_gap(one: Occurrence, zone: ZoneInfo) -> datetime | None:
    if one.change is not WallChange.SKIPPED:
        return None
    wall = one.wall
    while True:
        wall += MINUTE
        aware = wall.replace(tzinfo=zone)
        if aware.astimezone(UTC).astimezone(zone).replace(tzinfo=None) == wall:
            return aware


@pytest.mark.parametrize(
    ("asked", "begin", "right"),
    [
        (
            Recurrence(cron=["30 1 * * *"], zone="America/New_York"),
            "2026-10-31T00:00-04:00",
            ["2026-10-31T05:30Z", "2026-11-01T05:30Z first", "2026-11-02T06:30Z"],
        ),
        (  # the same rule, with its second
            Recurrence(cron=["0 30 1 * * *"], zone="America/New_York"),
            "2026-10-31T00:00-04:00",
            ["2026-10-31T05:30Z", "2026-11-01T05:30Z first", "2026-11-02T06:30Z"],
        ),
        (
            Recurrence(cron=["0 30 2 * * *"], zone="America/New_York"),
            "2026-03-07T00:00-05:00",
            ["2026-03-07T07:30Z", "2026-03-08T07:30Z skipped", "2026-03-09T06:30Z"],
        ),
        (
            Recurrence(cron=["0 */30 1 * * *"], zone="America/New_York"),
            "2026-11-01T00:00-04:00",
            ["2026-11-01T05:00Z first", "2026-11-01T05:30Z first", "2026-11-01T06:00Z second"],
        ),
        (
            Recurrence(cron=["30 1 * * *"], zone="America/New_York", fold=FoldPolicy.SECOND),
            "2026-10-31T00:00-04:00",
            ["2026-10-31T05:30Z", "2026-11-01T06:30Z second", "2026-11-02T06:30Z"],
        ),
        (
            Recurrence(cron=["30 2 * * *"], zone="Europe/Berlin"),
            "2026-03-28T00:00+01:00",
            ["2026-03-28T01:30Z", "2026-03-29T01:30Z skipped", "2026-03-30T00:30Z"],
        ),
        (
            Recurrence(cron=["30 2 * * *", "30 3 * * *"], zone="Europe/Berlin"),
            "2026-03-29T00:00+01:00",
            ["2026-03-29T01:30Z", "2026-03-30T00:30Z", "2026-03-30T01:30Z"],  # two names of one time are one
        ),
        (
            Recurrence(every_ms=3_600_000, zone="Europe/Berlin"),
            "2026-10-25T00:30Z",
            ["2026-10-25T01:00Z", "2026-10-25T02:00Z", "2026-10-25T03:00Z"],
        ),
        (
            Recurrence(rrule=["FREQ=DAILY;BYHOUR=2;BYMINUTE=30"], zone="Europe/Berlin", gap=GapPolicy.SKIP),
            "2026-03-28T00:00+01:00",
            ["2026-03-28T01:30Z", "2026-03-30T00:30Z", "2026-03-31T00:30Z"],
        ),
        (
            Recurrence(rrule=["FREQ=HOURLY"], zone="Europe/Berlin"),
            "2026-10-25T02:00+02:00",
            ["2026-10-25T00:00Z first", "2026-10-25T01:00Z second", "2026-10-25T02:00Z"],
        ),
    ],
)
def test_changes_of_clocks_by_example(asked: Recurrence, begin: str, right: list[str]) -> None:
    said = []
    for one, _ in zip(asked.occurrences(ms(datetime.fromisoformat(begin))), right, strict=False):
        when = datetime.fromtimestamp(one.at_ms / 1_000, UTC)
        said.append(f"{when:%Y-%m-%dT%H:%MZ} {one.change}".strip())
    said = [text.removesuffix(" skipped") if len(asked.cron) > 1 else text for text in said]
    assert said == right


def test_the_oracle_sees_both_kinds_of_change() -> None:
    """Or the comparisons above would say nothing."""
    spring, autumn = changes(
        ZoneInfo("Europe/Berlin"), datetime(2026, 1, 1, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC)
    )
    assert len(Watched("Europe/Berlin", spring - AROUND, spring + AROUND).skipped) == 60
    assert len(Watched("Europe/Berlin", autumn - AROUND, autumn + AROUND).twice) == 60
