"""An oracle of cron on wall clocks: it looks at each minute of UTC, and asks what the wall shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo, available_timezones

MINUTE = timedelta(minutes=1)
BEGIN, END = datetime(2024, 1, 1, tzinfo=UTC), datetime(2033, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class PlainCron:
    """A cron expression as sets of whole numbers. None: any."""

    text: str
    minutes: frozenset[int]
    hours: frozenset[int] | None = None
    days: frozenset[int] | None = None
    weekdays: frozenset[int] | None = None
    """As `datetime.isoweekday`."""

    def names(self, wall: datetime) -> bool:
        """Whether it names this minute of a wall clock."""
        return (
            wall.minute in self.minutes
            and (self.hours is None or wall.hour in self.hours)
            and (self.days is None or wall.day in self.days)
            and (self.weekdays is None or wall.isoweekday() in self.weekdays)
        )


@dataclass(frozen=True)
class Minute:
    """A minute of UTC, and what the wall shows then. `again`: it had shown that before."""

    utc: datetime
    wall: datetime
    again: bool


def minutes(zone: ZoneInfo, begin: datetime, end: datetime) -> Iterator[Minute]:
    """Each minute of UTC from `begin` to `end`. Whether the wall had shown it is known of the two days before."""
    shown: set[datetime] = set()
    utc = begin - timedelta(days=2)
    while utc < end:
        wall = utc.astimezone(zone).replace(tzinfo=None)
        if utc >= begin:
            yield Minute(utc, wall, again=wall in shown)
        shown.add(wall)
        utc += MINUTE


def changes(zone: ZoneInfo, begin: datetime = BEGIN, end: datetime = END) -> list[datetime]:
    """The minutes of UTC at which the wall clock is set."""
    found = []
    days = [begin + timedelta(days=n) for n in range((end - begin).days + 1)]
    for low, high in pairwise(days):
        if low.astimezone(zone).utcoffset() != high.astimezone(zone).utcoffset():
            while high - low > MINUTE:
                middle = low + (high - low) // MINUTE // 2 * MINUTE
                if low.astimezone(zone).utcoffset() == middle.astimezone(zone).utcoffset():
                    low = middle
                else:
                    high = middle
            found.append(high)
    return found


def distinct_zones() -> dict[tuple[tuple[datetime, timedelta | None], ...], str]:
    """One zone for each way to change clocks, by all of its changes: most zones are others under another name."""
    found: dict[tuple[tuple[datetime, timedelta | None], ...], str] = {}
    for name in sorted(available_timezones()):
        zone = ZoneInfo(name)
        at = changes(zone)
        found.setdefault(tuple((when, when.astimezone(zone).utcoffset()) for when in [BEGIN, *at]), name)
    return found
