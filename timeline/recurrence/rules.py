"""The rules by which something recurs on a wall clock: cron expressions and recurrence rules of RFC 5545.

A rule gives naive wall times in ascending order. `recurrence` finds out which points in time these are.
"""

from __future__ import annotations

import calendar
import heapq
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, time, timedelta
from itertools import islice, product
from zoneinfo import ZoneInfo

from timeline.errors import Invalid
from timeline.wording import install_command

try:
    from cronsim import CronSim, CronSimError
    from dateutil.rrule import rrule, rrulestr
except ImportError:  # a program with the driver alone
    _readable = False
else:
    _readable = True

_TICK = timedelta(microseconds=1)
_ANY = "*"
_ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_FIELDS = (
    ("second", "0 to 59"),
    ("minute", "0 to 59"),
    ("hour", "0 to 23"),
    ("day of the month", "1 to 31, L (the last), LW (the last weekday) or 15W (the weekday nearest to the 15th)"),
    ("month", "1 to 12, or JAN to DEC"),
    ("day of the week", "0 to 7 (0 and 7 are Sunday), SUN to SAT, 5L (the last Friday) or 5#3 (the third Friday)"),
)
"""Each field of six: its name, and what it may be."""
_DAY, _WEEKDAY = 3, 5
_NEAREST = re.compile(r"([0-9]{1,2})W", re.IGNORECASE)
_STEPPED = re.compile(r"([0-9A-Za-z]+)-([0-9A-Za-z]+)/0*[1-9][0-9]*")
_NAMES = {name: number for names, first in (("JANFEBMARAPRMAYJUNJULAUGSEPOCTNOVDEC", 1), ("SUNMONTUEWEDTHUFRISAT", 0))
          for number, name in enumerate((names[at : at + 3] for at in range(0, len(names), 3)), first)}  # fmt: skip
_ALL_DAYS, _ALL_WEEKDAYS = frozenset(range(1, 32)), frozenset(range(7))
_SATURDAY, _SUNDAY = 5, 6


def rules_are_readable() -> bool:
    """Return whether the packages that read rules are installed."""
    return _readable


def require_packages() -> None:
    """Raise Invalid, which says what to install, unless rules can be read here."""
    if not _readable:
        raise Invalid(f"rules are read by cronsim and python-dateutil: {install_command('schedules')}")


class CronRule:
    """A cron expression of five fields, or of six with the seconds first. Days are `L`, `LW`, `15W`, `5L` and `5#3`,
    too. As in cron, a day must match both day fields if one begins with `*`, and otherwise either of them.

    Raise Invalid, which names the field that is wrong and says what it may be.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        fields = _ALIASES.get(text.strip().lower(), text).split()
        self.of_clock = any(field.startswith(_ANY) for field in fields[-5:-3])
        """Whether it goes with the clock's time, like `*/15 * * * *`, rather than with hours of the day."""
        if len(fields) == 5:
            fields.insert(0, "0")
        if len(fields) != 6:
            raise Invalid(
                f"cron {text!r:.80} must have five fields (minute, hour, day of the month, month, day of the week), or "
                f"six with the second first, all in one text; it has {len(fields)}"
            )
        self._parts = list(self._parted([_without_idle_steps(field) for field in fields]))

    def words(self) -> str:
        """Return the expression in English, if there are words for it."""
        if any(nearest for _, nearest in self._parts):
            return f"by the cron expression {self.text}"
        expression, _ = self._parts[0]
        read, fields = CronSim(expression, _SOME_TIME), expression.split()
        if fields[_DAY].startswith(_ANY) or fields[_WEEKDAY].startswith(_ANY):
            return _explained(fields)
        either = [*fields[:_WEEKDAY], _ANY], [*fields[:_DAY], _ANY, *fields[_DAY + 1 :]]
        if read.days >= _ALL_DAYS or {day % 7 for day in read.weekdays if isinstance(day, int)} == _ALL_WEEKDAYS:
            return _explained([*fields[:_DAY], _ANY, fields[_DAY + 1], _ANY])
        # A day that none of the months has leaves the weekday.
        return ", or ".join(_explained(one) for one in either if _reads(" ".join(one)))

    def walls(self, begin: datetime) -> Iterator[datetime]:
        """Yield its wall times from `begin`, which may be one of them."""
        last = None
        for wall in heapq.merge(*(self._walls(begin, *part) for part in self._parts)):
            if wall != last:
                yield wall
            last = wall

    def _walls(self, begin: datetime, expression: str, nearest: frozenset[int]) -> Iterator[datetime]:
        with suppress(OverflowError):  # the year 9999 is over
            for wall in CronSim(expression, begin - _TICK):
                if not nearest or _is_nearest(wall, nearest):
                    yield wall

    def _parted(self, fields: list[str]) -> Iterator[tuple[str, frozenset[int]]]:
        """Yield expressions that together are this one, each with the days of the month to whose nearest weekdays it is
        limited; none: it is not."""
        days = fields[_DAY].split(",")
        nearest = frozenset(int(match[1]) for day in days if (match := _NEAREST.fullmatch(day)))
        others = [day for day in days if not _NEAREST.fullmatch(day)]
        if not nearest:
            yield self._checked(fields), nearest
            return
        if not nearest <= set(range(1, 32)):
            raise self._wrong(_DAY, fields[_DAY])
        self._checked([*fields[:_DAY], str(min(nearest)), fields[_DAY + 1], _ANY])  # that its months have such a day
        both = fields[_WEEKDAY].startswith(_ANY)
        yield self._checked([*fields[:_DAY], _ANY, fields[_DAY + 1], fields[_WEEKDAY] if both else _ANY]), nearest
        if others or not both:
            yield self._checked([*fields[:_DAY], ",".join(others) or _ANY, *fields[_DAY + 1 :]]), frozenset()

    def _checked(self, fields: list[str]) -> str:
        expression = " ".join(fields)
        try:
            CronSim(expression, _SOME_TIME)
        except CronSimError:
            for place, field in enumerate(fields):
                alone = [_ANY] * len(fields)
                alone[place] = field
                if not _reads(" ".join(alone)):
                    raise self._wrong(place, field) from None
            raise Invalid(f"cron {self.text!r:.80} has a day of the month that none of its months has") from None
        return expression

    def _wrong(self, place: int, field: str) -> Invalid:
        name, allowed = _FIELDS[place]
        return Invalid(
            f"the {name} of cron {self.text!r:.80} must be {allowed}, or *, a list (1,3), a range upwards (1-5) or a "
            f"step (*/5); it is {field!r:.40}"
        )


def _without_idle_steps(field: str) -> str:
    """Return a field of cron with `6` in the place of `6-6/3`, which the library reads as `6/3`."""
    terms = [_STEPPED.fullmatch(term) for term in field.split(",")]
    return ",".join(
        match[1] if match and _number(match[1]) == _number(match[2]) else term
        for match, term in zip(terms, field.split(","), strict=True)
    )


def _number(said: str) -> int | str:
    return int(said) if said.isdigit() else _NAMES.get(said.upper(), said)


def _explained(fields: list[str]) -> str:
    said: str = CronSim(" ".join(fields), _SOME_TIME).explain()
    return f"{said[0].lower()}{said[1:]}"


_SOME_TIME = datetime(2000, 1, 1)


def _reads(expression: str) -> bool:
    try:
        CronSim(expression, _SOME_TIME)
    except CronSimError:
        return False
    return True


def _is_nearest(wall: datetime, days: frozenset[int]) -> bool:
    """Return whether a day is the weekday nearest to one of `days`, within its month."""
    last = calendar.monthrange(wall.year, wall.month)[1]
    return any(wall.day == _nearest_weekday(wall.year, wall.month, day, last) for day in days if day <= last)


def _nearest_weekday(year: int, month: int, day: int, last: int) -> int:
    weekday = calendar.weekday(year, month, day)
    if weekday == _SATURDAY:
        return day - 1 if day > 1 else day + 2
    if weekday == _SUNDAY:
        return day + 1 if day < last else day - 2
    return day


_STEPS = {
    "SECONDLY": timedelta(seconds=1),
    "MINUTELY": timedelta(minutes=1),
    "HOURLY": timedelta(hours=1),
    "DAILY": timedelta(days=1),
    "WEEKLY": timedelta(weeks=1),
    "MONTHLY": None,
    "YEARLY": None,
}
"""Each FREQ, and the length of its periods on a wall clock, if they are all as long."""
_OF_CLOCK = ("SECONDLY", "MINUTELY", "HOURLY")
_MONTHS = {"MONTHLY": 1, "YEARLY": 12}
"""The length of other periods, in months."""
_MOST_TIMES = 1_440
"""Times of each day with BYSETPOS: the library makes a list of them at each look."""
MOST_COUNT = 100_000
_NUMBERS = {
    "INTERVAL": (1, 1_000_000, False),
    "COUNT": (1, MOST_COUNT, False),
    "BYSECOND": (0, 59, False),
    "BYMINUTE": (0, 59, False),
    "BYHOUR": (0, 23, False),
    "BYMONTHDAY": (1, 31, True),
    "BYYEARDAY": (1, 366, True),
    "BYWEEKNO": (1, 53, True),
    "BYMONTH": (1, 12, False),
    "BYSETPOS": (1, 366, True),
}
"""Parts that are numbers: the least, the most, and whether a minus counts from the end."""
_DAYS = ("MO", "TU", "WE", "TH", "FR", "SA", "SU")
_BYDAY = re.compile(r"([+-]?[0-9]{1,2})?(MO|TU|WE|TH|FR|SA|SU)")
_UNTIL = re.compile(r"([0-9]{8})(?:T([0-9]{6})(Z?))?")
_SECOND, _MINUTE, _YEAR = timedelta(seconds=1), timedelta(minutes=1), timedelta(days=366)
_AHEAD = 50 * _YEAR
"""A rule that gives nothing for this long is over."""
_CYCLE_YEARS, _CYCLE = 400, timedelta(days=146_097)
"""The calendar repeats after it, weekdays and all. The library walks to the year 9999 where a rule gives nothing, so a
rule is walked as near to that year as the cycle permits: a second instead of half a minute."""
_QUIET = timedelta(days=1)
"""A rule remembers where it gave nothing for longer than this."""
_BY_DAY = ("SECONDLY", "MINUTELY", "HOURLY", "DAILY")
_ORDINALS = {"MONTHLY": 5, "YEARLY": 53}
"""By FREQ, the largest number that a day may have before it, as in -1FR."""
_MOST_DAYS = (0, 31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


class RecurrenceRule:
    """A recurrence rule of RFC 5545, like `FREQ=MONTHLY;BYDAY=-1FR`. `start`: its DTSTART on the wall. None: the first
    midnight of 1970, for rules that do not count from their start.

    Raise Invalid, which names the part that is wrong and says what it may be.
    """

    def __init__(self, text: str, start: datetime | None, zone: ZoneInfo) -> None:
        self.text = text
        said = text.strip().upper().removeprefix("RRULE:")
        if not said or "\n" in said or ":" in said:
            raise self._wrong(
                "it is one rule, like FREQ=WEEKLY;BYDAY=MO,TH: give its DTSTART as start, EXDATE as exclude"
            )
        parts: dict[str, str] = {}
        for part in said.split(";"):
            name, separator, value = part.partition("=")
            if not separator or not value or name in parts:
                raise self._wrong(f"{part[:40]!r} must be a name and a value, like BYHOUR=9, each name once")
            parts[name] = value
        self._check(parts)
        if start is None and ("COUNT" in parts or parts.get("INTERVAL", "1") != "1"):
            raise self._wrong("COUNT and INTERVAL count from a start: give one")
        self._freq = parts["FREQ"]
        self._step = _STEPS[self._freq]
        self.of_clock = self._freq in _OF_CLOCK
        """As of a `CronRule`."""
        self._quiet: tuple[datetime, datetime] | None = None
        """From when to before when it gives nothing, as a walk found; to the end of all time if it is over."""
        self._start = start or datetime(1970, 1, 1)
        self._interval = int(parts.get("INTERVAL", "1"))
        self._count = int(parts.pop("COUNT", "0"))
        until = parts.pop("UNTIL", None)
        self._until = datetime.max if until is None else self._until_of(until, zone)
        self._times = self._times_of_day(parts)
        """The hours, minutes and seconds of each day; empty: the library lists the times."""
        self._said = ";".join(f"{name}={value}" for name, value in parts.items())
        self._rule(self._start, self._start)

    def words(self) -> str:
        """Return the rule as it was given."""
        return f"by the rule {self.text}"

    def walls(self, begin: datetime) -> Iterator[datetime]:
        """Yield its wall times from `begin`, which may be one of them."""
        if self._count:
            yield from (wall for wall in islice(self._from(self._start), self._count) if wall >= begin)
        else:
            yield from self._from(begin)

    def _from(self, begin: datetime) -> Iterator[datetime]:
        """Yield wall times from `begin`."""
        gives = True
        while gives and begin <= self._until:
            quiet = self._quiet
            if quiet is not None and quiet[0] <= begin < quiet[1]:
                begin = quiet[1]
                if begin == datetime.max:
                    return
            gives = False
            until = max(self._start, begin)
            until += min(_AHEAD, datetime.max - until)
            for wall in self._between(begin, until):
                if not gives and wall - begin > _QUIET:
                    self._quiet = begin, wall
                gives = True
                yield wall
            if not gives:
                self._quiet = begin, datetime.max
            begin = until + min(_SECOND, datetime.max - until)
            gives = gives and until < datetime.max - _SECOND

    def _between(self, begin: datetime, until: datetime) -> Iterator[datetime]:
        """Yield wall times from `begin` to `until`."""
        if not self._times:
            yield from self._listed(self._near(begin), begin, until)
            return
        begin = max(begin, self._start.replace(microsecond=0))
        last = min(until, self._until)
        hours, minutes, seconds = self._times
        first = datetime.combine(begin, time())
        for day in self._listed(datetime.combine(self._near(begin), time()), first, until):
            for hour, minute in product(hours, minutes):
                at = day.replace(hour=hour, minute=minute)
                if at > begin - _MINUTE:
                    walls = (at.replace(second=second) for second in seconds)
                    yield from (wall for wall in walls if begin <= wall <= last)

    def _times_of_day(self, parts: dict[str, str]) -> list[list[int]]:
        """Return the times of day of a rule about days, and leave it their midnights. Else the library would walk
        through each second of a year."""
        if self.of_clock:
            return []
        found = []
        for name in ("hour", "minute", "second"):
            said = parts.get(f"BY{name.upper()}")
            found.append(sorted({int(one) for one in said.split(",")} if said else {getattr(self._start, name)}))
        if "BYSETPOS" in parts:
            if (most := math.prod(map(len, found))) > _MOST_TIMES:
                raise self._wrong(f"with BYSETPOS, a day has at most {_MOST_TIMES} times, not {most}")
            return []
        parts |= {"BYHOUR": "0", "BYMINUTE": "0", "BYSECOND": "0"}
        return found

    def _near(self, begin: datetime) -> datetime:
        """Return a start that gives the same times from `begin` on, without the years before it to walk through."""
        start = self._start
        if begin <= start:
            return start
        if self._step is not None:
            period = self._step * self._interval
            return start + max(0, (begin - start) // period - 1) * period
        period_months = self._interval * _MONTHS[self._freq]
        passed = ((begin.year - start.year) * 12 + begin.month - start.month) // period_months
        for periods in range(passed - 1, 0, -1):
            years, month = divmod(start.month - 1 + periods * period_months, 12)
            with suppress(ValueError):  # no such day in that month: an earlier one has it
                return start.replace(year=start.year + years, month=month + 1)
        return start

    def _listed(self, start: datetime, begin: datetime, until: datetime) -> Iterator[datetime]:
        """Yield what the library gives from `begin` to `until`: wall times, or days at midnight."""
        away = (datetime.max.year - until.year) // _CYCLE_YEARS * _CYCLE
        try:
            for wall in self._rule(start + away, min(until, self._until) + away).xafter(begin + away, inc=True):
                yield wall - away
        except (ValueError, IndexError) as bad:  # the library finds it out only now
            raise self._wrong(f"it does not fit together: {bad}") from None

    def _rule(self, start: datetime, until: datetime) -> rrule:
        said = f"{self._said};UNTIL={until:%Y%m%dT%H%M%S}"
        try:
            made = rrulestr(said, dtstart=start)
        except (ValueError, TypeError) as bad:
            raise self._wrong(f"it does not fit together: {bad}") from None
        assert isinstance(made, rrule)
        return made

    def _check(self, parts: dict[str, str]) -> None:
        freq = parts.get("FREQ", "")
        if freq not in _STEPS:
            raise self._wrong(f"FREQ must be one of {', '.join(_STEPS)}, not {freq[:40]!r}")
        for name, value in parts.items():
            if name in _NUMBERS:
                self._check_numbers(name, value)
            elif name == "BYDAY":
                self._check_days(freq, value)
            elif name == "WKST" and value not in _DAYS:
                raise self._wrong(f"WKST must be one of {', '.join(_DAYS)}, not {value[:40]!r}")
            elif name not in ("FREQ", "BYDAY", "WKST", "UNTIL"):
                known = ("FREQ", "UNTIL", *_NUMBERS, "BYDAY", "WKST")
                raise self._wrong(f"there is no part {name[:40]}: the parts are {', '.join(known)}")
        if "COUNT" in parts and "UNTIL" in parts:
            raise self._wrong("it takes COUNT or UNTIL, not both")
        if "BYSETPOS" in parts and freq in _BY_DAY:
            raise self._wrong("BYSETPOS needs FREQ=WEEKLY or a longer one")
        days, months = (
            [int(one) for one in parts.get(name, "").split(",") if one] for name in ("BYMONTHDAY", "BYMONTH")
        )
        if days and min(map(abs, days)) > max(_MOST_DAYS[month] for month in months or [1]):
            raise self._wrong("none of its months has a day of BYMONTHDAY")

    def _check_days(self, freq: str, value: str) -> None:
        for day in value.split(","):
            match = _BYDAY.fullmatch(day)
            if match is None:
                raise self._wrong(f"BYDAY must be days like MO,TH, or -1FR for the last Friday, not {value[:40]!r}")
            if match[1] and not 1 <= abs(int(match[1])) <= _ORDINALS.get(freq, 0):
                most = " or ".join(f"1 to {most} with FREQ={each}" for each, most in _ORDINALS.items())
                raise self._wrong(f"the number before a day of BYDAY is {most}, not {day!r}")

    def _check_numbers(self, name: str, value: str) -> None:
        low, high, signed = _NUMBERS[name]
        single = name in ("INTERVAL", "COUNT")
        for one in (value,) if single else value.split(","):
            digits = one.lstrip("+-") if signed else one
            if not (digits.isascii() and digits.isdigit() and len(digits) <= 7 and low <= int(digits) <= high):
                or_back = f", or -{high} to -{low} from the end" if signed else ""
                raise self._wrong(f"{name} must be {low} to {high}{or_back}, not {one[:40]!r}")

    def _until_of(self, value: str, zone: ZoneInfo) -> datetime:
        match = _UNTIL.fullmatch(value)
        try:
            if match is None:
                raise ValueError
            until = datetime.strptime(match[1] + (match[2] or "235959"), "%Y%m%d%H%M%S")
            # With a Z it is a point in time. The library wants one on the wall, as the others are.
            return until.replace(tzinfo=UTC).astimezone(zone).replace(tzinfo=None) if match[3] else until
        except (ValueError, OverflowError):
            raise self._wrong(f"UNTIL must be like 20271231 or 20271231T235959Z, not {value[:40]!r}") from None

    def _wrong(self, why: str) -> Invalid:
        return Invalid(f"rrule {self.text[:120]!r}: {why}")
