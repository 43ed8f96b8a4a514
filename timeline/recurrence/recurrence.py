"""When something recurs: several rules together, in a time zone, less what is excluded, as exact points in time."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from functools import partial
from itertools import islice
from zoneinfo import ZoneInfo

from timeline.errors import Invalid
from timeline.recurrence.rules import MOST_COUNT, CronRule, RecurrenceRule, require_packages
from timeline.wording import shown_duration, unknown_zone

LEAST_PERIOD_MS = 1_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EXCLUDED = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
    r"(?:[T ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,6})?)?(?:Z|[+-][0-9]{2}:[0-9]{2})?)?"
)
_MS = timedelta(milliseconds=1)
_MOST_CHANGE = timedelta(hours=26)
"""No clock was ever set by more."""
_HORIZON_MS = 50 * 366 * 86_400_000
"""A recurrence that gives nothing for this long is over."""
SLICE = 1_000
"""A walk says how far it has come after this many steps: times that are excluded, or that other rules give as well, and
times of the rules that exclude."""
_MOST_SLICES, _MOST_IN_ALL = 200, 400
"""Who only wants the next occurrences gives up after so many slices without one, or so many in all."""
MOST_RULES = 100
_END_YEAR, _END_MS = 9999, 253_370_764_800_000
"""The start of the year 9999. No zone's clock leaves the calendar before it."""
_STEPS = 16
"""How many of its times a rule of exclusion walks past before it begins again further on."""


class GapPolicy(StrEnum):
    """The occurrence at a wall time that clocks skip: later by the length of the gap, or none."""

    LATER = "later"
    SKIP = "skip"


class FoldPolicy(StrEnum):
    """The occurrence at a wall time that clocks show twice: at the first time, at the second, or at both."""

    FIRST = "first"
    SECOND = "second"
    BOTH = "both"


class WallChange(StrEnum):
    """Whether clocks skip the wall time of an occurrence, or show it twice: then it is the first or second time."""

    NONE = ""
    SKIPPED = "skipped"
    FIRST = "first"
    SECOND = "second"


@dataclass(frozen=True, slots=True, order=True)
class Occurrence:
    """One occurrence, at `at_ms` (milliseconds UTC). `wall`: the naive wall time that its rule names."""

    at_ms: int
    wall: datetime
    change: WallChange = WallChange.NONE


@dataclass(frozen=True)
class Recurrence:
    """When something recurs. Give one rule or several: their occurrences are put together, and equal times are one.

    `cron`, `rrule`: expressions on the wall clock of `zone`, an IANA name. `every_ms`: a period in ms, counted
    from `start_ms`, or else from 1970. `start_ms`, `end_ms`: no occurrence before the one, none at or after the other
    (0: no bound). `count`: the most occurrences from `start_ms` on (0: no bound).

    `exclude`: dates (2026-12-25), times in the zone (2026-12-25T09:00) or with an offset, and rules (`cron:…`,
    `rrule:…`). Their times are left out.

    `gap`, `fold`: for changes of clocks. None: by the rule. A rule that goes with the clock's time, like
    `*/15 * * * *`, goes on through each change: SKIP and BOTH. For other rules: LATER and FIRST.

    Raise Invalid, which names the field and says what would be right.
    """

    cron: Sequence[str] = ()
    every_ms: int = 0
    rrule: Sequence[str] = ()
    exclude: Sequence[str] = ()
    start_ms: int = 0
    end_ms: int = 0
    count: int = 0
    zone: str = "UTC"
    gap: GapPolicy | None = None
    fold: FoldPolicy | None = None
    _compiled: _Compiled = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (self.cron or self.rrule or self.every_ms):
            raise Invalid("a schedule needs a rule: give cron (like '0 9 * * 1-5'), every (like 15m) or rrule")
        if self.every_ms and self.every_ms < LEAST_PERIOD_MS:
            raise Invalid(f"every must be at least {shown_duration(LEAST_PERIOD_MS)}, not {self.every_ms} ms")
        if not 0 <= self.count <= MOST_COUNT:
            raise Invalid(f"count must be 1 to {MOST_COUNT}, not {self.count}: give an end instead")
        if self.count and not self.start_ms:
            raise Invalid("count needs a start to count from")
        if max(self.start_ms, self.end_ms) > _END_MS:
            raise Invalid("start and end must lie before the year 9999")
        if (rules := len(self.cron) + len(self.rrule) + sum(":" in text[:6] for text in self.exclude)) > MOST_RULES:
            raise Invalid(f"a schedule has at most {MOST_RULES} rules, what is excluded by rule included; not {rules}")
        if self.end_ms and self.end_ms <= self.start_ms:
            raise Invalid("end must be after start")
        object.__setattr__(self, "_compiled", _Compiled(self))  # which checks the texts

    def occurrences(self, from_ms: int, before: int = 0) -> Iterator[Occurrence]:
        """Yield occurrences at or after `from_ms`, in order. `before`: how many of `count` lie before it; they are not
        counted again here. It gives up after some 200,000 steps without one, or 400,000 in all; `walk` would go on."""
        return occurrences_of(self.walk(from_ms, before), _MOST_SLICES)

    def following(self, from_ms: int, limit: int) -> list[Occurrence]:
        """Return at most `limit` occurrences at or after `from_ms`. `count` counts from the start on; without it there
        may be years of seconds in between."""
        found = self.occurrences(self.start_ms if self.count else from_ms)
        return list(islice((one for one in found if one.at_ms >= from_ms), limit))

    def walk(self, from_ms: int, before: int | None = 0) -> Iterator[Occurrence | int]:
        """Yield occurrences as `occurrences` does. After each `SLICE` of steps, yield how far it has come: a time at
        which a later walk may begin. It ends only when no occurrence comes for 50 years from its begin. `before`: None
        for no count."""
        yield from self._compiled.walk(max(from_ms, self.start_ms), before)

    def words(self) -> str:
        """Return the rules in English."""
        return self._compiled.words()


def occurrences_of(walk: Iterator[Occurrence | int], most_slices: int, before_ms: int = 0) -> Iterator[Occurrence]:
    """Yield the occurrences of a walk. It gives up after `most_slices` without one, or 400 in all. `before_ms`: after
    two without one that reach beyond that time (0: no bound)."""
    in_row = slices = 0
    for one in walk:
        if isinstance(one, Occurrence):
            in_row = 0
            yield one
            continue
        in_row, slices = in_row + 1, slices + 1
        if in_row >= most_slices or slices >= _MOST_IN_ALL or (in_row > 1 and 0 < before_ms < one):
            return


class _Compiled:
    """A recurrence with its texts read."""

    def __init__(self, asked: Recurrence) -> None:
        require_packages()
        self._asked = asked
        self._zone = _zone(asked.zone)
        self._start = _wall(asked.start_ms, self._zone) if asked.start_ms else None
        self._rules = self._read(asked.cron, asked.rrule)
        self._dates: set[date] = set()
        self._walls: set[datetime] = set()
        self._times_ms: set[int] = set()
        cron, rrule = [], []
        for text in asked.exclude:
            kind, _, rule = text.partition(":")
            if kind == "cron":
                cron.append(rule.strip())
            elif kind == "rrule":
                rrule.append(rule.strip())
            else:
                self._exclude(text)
        self._excluding = self._read(cron, rrule)

    def _read(self, cron: Sequence[str], rrule: Sequence[str]) -> list[CronRule | RecurrenceRule]:
        read: list[CronRule | RecurrenceRule] = [CronRule(text) for text in cron]
        return [*read, *(RecurrenceRule(text, self._start, self._zone) for text in rrule)]

    def _exclude(self, text: str) -> None:
        try:
            if _EXCLUDED.fullmatch(text) is None:
                raise ValueError
            if len(text) == len("2026-12-25"):
                self._dates.add(date.fromisoformat(text))
                return
            when = datetime.fromisoformat(text)
        except ValueError:
            raise Invalid(
                f"exclude {text!r:.80} must be a date (2026-12-25), a time (2026-12-25T09:00, in the zone or with its "
                "offset), or a rule (cron:* * 25 12 *)"
            ) from None
        if when.tzinfo is None:
            self._walls.add(when)
        else:
            self._times_ms.add((when - _EPOCH) // _MS)

    def words(self) -> str:
        said = [rule.words() for rule in self._rules]
        if self._asked.every_ms:
            said.append(f"every {shown_duration(self._asked.every_ms)}")
        text = " and ".join(said)
        return f"{text[:1].upper()}{text[1:]}, in {self._asked.zone}"

    def walk(self, from_ms: int, before: int | None) -> Iterator[Occurrence | int]:
        asked = self._asked
        end_ms = asked.end_ms or _END_MS
        count = asked.count if before is not None else 0
        begin_ms, last_ms, given, steps = from_ms, from_ms - 1, before or 0, 0
        while 0 <= begin_ms < end_ms and not (count and given >= count):
            coming, excluding = self._coming(begin_ms)
            begin_ms, walked = -1, 0
            for one in coming:
                if one.at_ms - max(last_ms, from_ms) > _HORIZON_MS or one.at_ms >= end_ms:
                    return
                again = one.at_ms == last_ms
                excluded = not again and (self._is_excluded(one) or any(rule.has(one.at_ms) for rule in excluding))
                before_it, walked = walked, sum(rule.steps for rule in excluding)
                steps += max(again or excluded, walked - before_it)
                if steps >= SLICE and max(last_ms, from_ms) < one.at_ms:
                    steps = 0
                    yield one.at_ms
                    if excluded and one.wall.date() in self._dates and (begin_ms := self._next_day(one)) > one.at_ms:
                        break  # and begin again there
                    begin_ms = -1
                if not (again or excluded):
                    last_ms, given = one.at_ms, given + 1
                    yield one
                    if count and given >= count:
                        return

    def _coming(self, from_ms: int) -> tuple[Iterator[Occurrence], list[_Excluding]]:
        found = [self._of_rule(rule, from_ms) for rule in self._rules]
        if self._asked.every_ms:
            found.append(self._of_period(from_ms))
        return heapq.merge(*found), [_Excluding(partial(self._of_rule, rule), from_ms) for rule in self._excluding]

    def _next_day(self, one: Occurrence) -> int:
        """Return the time of the midnight after it."""
        if one.wall.year >= _END_YEAR:
            return -1
        midnight = datetime.combine(one.wall.date() + timedelta(days=1), datetime.min.time())
        return min(_utc_ms(midnight, self._zone, 0), _utc_ms(midnight, self._zone, 1))

    def _is_excluded(self, occurrence: Occurrence) -> bool:
        at_ms, wall = occurrence.at_ms, occurrence.wall
        if at_ms in self._times_ms or wall in self._walls or wall.date() in self._dates:
            return True
        # Previews show the wall time to which clocks moved it.
        return occurrence.change is WallChange.SKIPPED and _wall(at_ms, self._zone) in self._walls

    def _of_period(self, from_ms: int) -> Iterator[Occurrence]:
        period_ms, anchor_ms = self._asked.every_ms, self._asked.start_ms
        at_ms = anchor_ms + -(-(from_ms - anchor_ms) // period_ms) * period_ms
        while at_ms < _END_MS:
            yield Occurrence(at_ms, _wall(at_ms, self._zone))
            at_ms += period_ms

    def _of_rule(self, rule: CronRule | RecurrenceRule, from_ms: int) -> Iterator[Occurrence]:
        """Yield the occurrences of one rule, in the order of time. Where clocks change, the order of wall times is
        another one: a skipped one comes later, and one that is shown twice may come at its second time."""
        asked = self._asked
        gap = asked.gap or (GapPolicy.SKIP if rule.of_clock else GapPolicy.LATER)
        fold = asked.fold or (FoldPolicy.BOTH if rule.of_clock else FoldPolicy.FIRST)
        waiting: list[Occurrence] = []
        reached_ms = from_ms
        for wall in rule.walls(self._begin(from_ms)):
            if wall.year >= _END_YEAR:
                break
            first_ms, second_ms = _utc_ms(wall, self._zone, 0), _utc_ms(wall, self._zone, 1)
            for occurrence in _occurrences(wall, first_ms, second_ms, gap, fold):
                if occurrence.at_ms >= from_ms:
                    heapq.heappush(waiting, occurrence)
            # All later wall times are at this time or later.
            reached_ms = max(reached_ms, min(first_ms, second_ms))
            while waiting and waiting[0].at_ms <= reached_ms:
                yield heapq.heappop(waiting)
        while waiting:
            yield heapq.heappop(waiting)

    def _begin(self, from_ms: int) -> datetime:
        """Return a wall time that no occurrence from `from_ms` on is named before."""
        here = _EPOCH + from_ms * _MS
        offsets = [
            (here + away).astimezone(self._zone).utcoffset() for away in (-_MOST_CHANGE, timedelta(0), _MOST_CHANGE)
        ]
        now = offsets[1]
        assert now is not None
        back = max(abs(each - now) for each in offsets if each is not None)
        return _wall(from_ms, self._zone) - back


class _Excluding:
    """A rule whose times are excluded, asked about times in order, from `from_ms` on. `occurrences`: its own, from a
    time on."""

    def __init__(self, occurrences: Callable[[int], Iterator[Occurrence]], from_ms: int) -> None:
        self._occurrences = occurrences
        self._coming = occurrences(from_ms)
        self._next_ms = -1
        self.steps = 0
        """How many of its times were walked past."""

    def has(self, at_ms: int) -> bool:
        """Return whether it gives this time. After a few of its own times it begins again at this one: a rule for each
        second has many between two that are asked about."""
        for _ in range(_STEPS):
            if self._next_ms >= at_ms:
                return self._next_ms == at_ms
            self._walk()
        self._coming = self._occurrences(at_ms)
        self._walk()
        return self._next_ms == at_ms

    def _walk(self) -> None:
        self.steps += 1
        following = next(self._coming, None)
        self._next_ms = _END_MS if following is None else following.at_ms


def _occurrences(
    wall: datetime, first_ms: int, second_ms: int, gap: GapPolicy, fold: FoldPolicy
) -> Iterator[Occurrence]:
    """Yield what a wall time stands for. `first_ms`, `second_ms`: the time by the offset before a change of clocks, and
    by the one after it. A time that is skipped is the later of them by the first: its wall time then is later, too."""
    if first_ms == second_ms:
        yield Occurrence(first_ms, wall)
    elif first_ms > second_ms:
        if gap is GapPolicy.LATER:
            yield Occurrence(first_ms, wall, WallChange.SKIPPED)
    else:
        if fold is not FoldPolicy.SECOND:
            yield Occurrence(first_ms, wall, WallChange.FIRST)
        if fold is not FoldPolicy.FIRST:
            yield Occurrence(second_ms, wall, WallChange.SECOND)


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError, TypeError):
        raise Invalid(unknown_zone(name)) from None


def _wall(at_ms: int, zone: ZoneInfo) -> datetime:
    return (_EPOCH + at_ms * _MS).astimezone(zone).replace(tzinfo=None)


def _utc_ms(wall: datetime, zone: ZoneInfo, fold: int) -> int:
    return (wall.replace(tzinfo=zone, fold=fold) - _EPOCH) // _MS
