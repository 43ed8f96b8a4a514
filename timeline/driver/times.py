"""Times and durations as people write them, converted to int milliseconds and back.

Points in time are aware datetimes or int milliseconds since 1970 UTC. Durations are timedeltas, seconds, or texts like
"250ms". Parts of a millisecond round up, so that nothing is early. A refusal says how to fix the value.
"""

from __future__ import annotations

import math
import operator
import re
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import TypeAlias
from zoneinfo import ZoneInfo

from timeline.errors import Invalid
from timeline.model import MAX_DURATION_MS, MAX_TIME_MS
from timeline.wording import unknown_zone

When: TypeAlias = datetime | int
"""A point in time: an aware datetime, or int milliseconds since 1970 UTC."""
Duration: TypeAlias = timedelta | int | float | str
"""A length of time: a timedelta, seconds, or "250ms" "15m" "2h" "10d" "1h30m"."""
Expiry: TypeAlias = When | timedelta | str
"""A point in time, or from now as a timedelta or a text."""

LOOKS_LIKE_SECONDS = 100_000_000_000
"""Int times from 1 to below this are refused. As milliseconds they lie before March 1973, so seconds were meant.
Datetimes of those years are allowed."""

_BEYOND_S = 1e15
"""More seconds than any limit allows. Larger floats would overflow as microseconds."""
_SHOWN_BITS = 192
_POINTS = {"in_": "at=", "--in": "--at"}
_LENGTHS = {"at": "in_=", "--at": "--in"}
"""The argument for the other kind of time, by argument."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS_US = {
    "us": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
    "w": 604_800_000_000,
}
# At most 30 ASCII digits: longer numbers are above every limit, and Python refuses to read the longest.
_PART = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(us|ms|s|m|h|d|w)\s*")
_WHOLE = re.compile(rf"\s*(?:{_PART.pattern})+")
_HMS = r"[0-9]{2}(?::?[0-9]{2}(?::?[0-9]{2}(?:[.,][0-9]+)?)?)?"
_CLOCK = rf"{_HMS}(?: ?(?:[Zz]|[+-]{_HMS}))?"
_DAY = r"[0-9]{4}-?(?:[0-9]{2}-?[0-9]{2}|W[0-9]{2}(?:-?[0-9])?)"
_ISO_TIME = re.compile(rf"[Tt]?{_CLOCK}")
_ISO_DATETIME = re.compile(rf"{_DAY}(?:[Tt ]{_CLOCK})?")


def duration_ms(value: Duration, name: str = "in_", *, least_ms: int = 0) -> int:
    """Return `value` in whole milliseconds, rounded up. `name`: the caller's argument.

    Raise Invalid for other types, for NaN, and for a value below `least_ms` or above a hundred years.

    >>> duration_ms("1h30m"), duration_ms(0.25), duration_ms(timedelta(microseconds=1))
    (5400000, 250, 1)
    """
    micros = _duration_us(value, name)
    if micros < 0 or (isinstance(value, float) and value < 0):
        raise Invalid(f"{name} must not be negative, not {shown(value)}")
    millis = -(-micros // 1_000)
    if millis < least_ms:
        raise Invalid(f"{name} must be at least {least_ms} ms, not {shown(value)}")
    if millis > MAX_DURATION_MS or (isinstance(value, float) and value * 1_000 > MAX_DURATION_MS):
        raise Invalid(f"{name} must be at most 36600 days, not {shown(value)}{_meant(value, name)}")
    return millis


def parse_iso(text: str) -> datetime:
    """Return the datetime that an ISO 8601 text says, without a zone if it has none. Raise ValueError. Unlike
    `datetime.fromisoformat`, it does not read 09.30 as 09:00:00.3, nor any letter as T."""
    if _ISO_DATETIME.fullmatch(text) is None:
        raise ValueError(text)
    return datetime.fromisoformat(text.upper())


def in_utc(text: str) -> str:
    """Return what an ISO 8601 text without a zone would be in UTC, for a refusal."""
    return f"{text}Z" if {"T", "t", " "} & set(text) else f"{text}T00:00Z"


def grown_ms(first_ms: int, factor: float, cap_ms: int, deliveries: int) -> float:
    """Return the wait after the `deliveries`-th delivery failed: `factor` times as long with each, up to the cap.

    >>> grown_ms(1_000, 2.0, 60_000, 3)
    4000.0
    """
    # Every cap is below 2^64 times the first wait. Larger powers would overflow.
    return min(float(cap_ms), first_ms * min(factor ** min(max(0, deliveries - 1), 64), 2.0**64))


def _meant(value: Duration, name: str) -> str:
    """Return a hint for a point in time given as a length, or milliseconds given as seconds."""
    if name in _POINTS:
        plain = isinstance(value, int | float) or (isinstance(value, str) and value.strip().isdigit())
        return f":{' a number is seconds from now;' if plain else ''} for a point in time use {_POINTS[name]}"
    return "" if isinstance(value, str | timedelta) else ": a number is seconds"


def shift_ms(value: Duration, name: str = "by") -> int:
    """Return a shift in whole milliseconds: a duration that may be negative, "-2h". Parts of a millisecond round
    towards later, as in a due time. Raise Invalid for other types, below one millisecond, and above a hundred years.

    >>> shift_ms("-1.5ms"), shift_ms("1.5ms") (-1, 2)"""
    back, length = False, value
    if isinstance(value, str) and value.strip().startswith("-"):
        back, length = True, value.strip()[1:]
        if length.lstrip().startswith("-"):
            raise Invalid(f"{name} must have one minus before it at most, not {shown(value)}")
    elif (isinstance(value, timedelta) and value < timedelta(0)) or (isinstance(value, int | float) and value < 0):
        back, length = True, -value
    micros = _duration_us(length, name)
    millis = -(micros // 1_000) if back else -(-micros // 1_000)
    if micros < 0 or millis == 0:
        raise Invalid(
            f"{name} must shift by at least 1 ms, forward or, with a minus before it, back; not {shown(value)}"
        )
    if abs(millis) > MAX_DURATION_MS:
        raise Invalid(f"{name} must be at most 36600 days, not {shown(value)}")
    return millis


def _duration_us(value: Duration, name: str) -> int:
    if isinstance(value, timedelta):
        micros = value // timedelta(microseconds=1)
        # pandas' have nanoseconds, which the division drops.
        return micros + 1 if micros >= 0 and getattr(value, "nanoseconds", 0) > 0 else micros
    if isinstance(value, str):
        return _text_us(value, name)
    if isinstance(value, bool):
        raise Invalid(f"{name} must be a timedelta, seconds, or a text like '15m', not {value!r}")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise Invalid(f"{name} must be a finite number of seconds, not {value!r}")
        return round(min(max(value, -_BEYOND_S), _BEYOND_S) * 1_000_000)
    try:
        return operator.index(value) * 1_000_000
    except TypeError:
        raise Invalid(
            f"{name} must be a timedelta, a number of seconds, or a text like '250ms', '15m', '2h', '10d', "
            f"not {shown(value)}"
        ) from None


def shown(value: object) -> str:
    """Return `value` for a refusal, shortened. Python does not write the longest ints."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"a number of {value.bit_length()} bits"
    try:
        return f"{value!r:.60}"
    except ValueError:
        return f"a {type(value).__name__} with a number too long to show"


def _text_us(text: str, name: str) -> int:
    if text.lstrip().startswith("-") and _WHOLE.fullmatch(text.replace("-", "", 1)):
        raise Invalid(f"{name} must not be negative, not {text!r:.60}")
    if not _WHOLE.fullmatch(text):
        raise Invalid(
            f"{name} must be numbers with a unit, like '250ms', '30s', '15m', '2h', '10d' or '1h30m', or a number of "
            f"seconds, not {text!r:.60}"
        )
    # With integers "0.1s" is exactly 100 ms, which binary fractions cannot say.
    total = 0
    for number, unit in _PART.findall(text):
        whole, _, fraction = number.partition(".")
        scale = 10 ** len(fraction)
        total += -(-(int(whole + fraction) * _UNITS_US[unit]) // scale)
    return total


def instant_ms(value: When, name: str = "at") -> int:
    """Return `value` in int milliseconds since 1970 UTC, rounded up.

    Raise Invalid for naive datetimes, pandas' NaT, dates, floats, texts and booleans. Raise it for times before 1970 or
    after the year 9999, and for ints below 100,000,000,000, which look like seconds.
    """
    if isinstance(value, datetime):
        return _datetime_ms(value, name)
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise Invalid(f"{name} must be an aware datetime or int milliseconds UTC, not {_what(value, name)}")
    return _millis(number, name)


def _millis(number: int, name: str) -> int:
    if number <= 0:
        raise Invalid(f"{name} must be milliseconds since 1970 UTC, above 0, not {shown(number)}{_from_now(name)}")
    if 0 < number < LOOKS_LIKE_SECONDS:
        raise Invalid(
            f"{name}={number} looks like seconds (ints below {LOOKS_LIKE_SECONDS} do): "
            f"{name} takes milliseconds since 1970 UTC, so multiply by 1000{_from_now(name)}"
        )
    return _at_most(number, name)


def _datetime_ms(value: datetime, name: str) -> int:
    if value != value:
        raise Invalid(f"{name} must be an aware datetime or int milliseconds UTC, not {shown(value)}, which is no time")
    if value.tzinfo is None or value.utcoffset() is None:
        raise Invalid(
            f"{name}={value.isoformat()} has no time zone: say which is meant, with "
            f"value.replace(tzinfo=timezone.utc), value.astimezone() for this machine's zone, "
            f'or timeline.local("{value:%Y-%m-%d}", "{value:%H:%M}", "Europe/Berlin")'
        )
    micros = (value - _EPOCH) // timedelta(microseconds=1)
    if getattr(value, "nanosecond", 0):  # of pandas; the division drops them
        micros += 1
    if micros <= 0:
        raise Invalid(f"{name} must be a time after the start of 1970, not {value.isoformat()}")
    return _at_most(-(-micros // 1_000), name)


def _at_most(millis: int, name: str) -> int:
    if millis > MAX_TIME_MS:
        raise Invalid(f"{name} must be at most {MAX_TIME_MS} (the year 9999), not {shown(millis)}")
    return millis


def _what(value: object, name: str) -> str:
    if isinstance(value, float):
        doubtless = "whole milliseconds, int(seconds * 1000), leave no doubt about the unit"
        return f"the float {value!r}: {doubtless}{_from_now(name)}"
    if isinstance(value, date):
        return f"the date {value.isoformat()}: say the time of day too, timeline.local(date, '09:00', zone)"
    if isinstance(value, timedelta | str):
        return f"{shown(value)}{_from_now(name)}; for a text datetime.fromisoformat()"
    return f"{shown(value)} ({type(value).__name__}){_from_now(name)}"


def _from_now(name: str) -> str:
    """Return a hint for a time from now."""
    if name in _LENGTHS:
        return f"; for a time from now use {_LENGTHS[name]}"
    return "; for a time from now give a text like '15m'" if name.endswith("expires") else ""


def expiry_ms(value: Expiry) -> tuple[int, bool]:
    """Return `expires=` as (milliseconds, whether they count from now).

    A timedelta or a text counts from now. Datetimes and ints (milliseconds UTC) are points in time, as for `at=`. Raise
    Invalid for anything else. Numbers of seconds are refused: an int is a point in time.
    """
    if isinstance(value, timedelta | str):
        return duration_ms(value, "expires", least_ms=1), True
    return instant_ms(value, "expires"), False


def as_datetime(millis: int) -> datetime:
    """Return milliseconds since 1970 UTC as an aware datetime in UTC."""
    return _EPOCH + timedelta(milliseconds=millis)


def iso(at_ms: int) -> str:
    """Return a time for machines: ISO 8601 and RFC 3339, in UTC with milliseconds."""
    return as_datetime(at_ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def iso_or_none(at_ms: int) -> str | None:
    """Return the same, and None for 0, which is no time."""
    return iso(at_ms) if at_ms else None


def shown_utc(at_ms: int) -> str:
    """Return a time in UTC as a `repr` shows it: 2026-11-24 12:31:15.553Z."""
    return f"{as_datetime(at_ms).replace(tzinfo=None).isoformat(sep=' ', timespec='milliseconds')}Z"


def shown_time(at_ms: int, zone: tzinfo | None = None) -> str:
    """Return a time for people, in `zone` or in this machine's zone."""
    when = as_datetime(at_ms).astimezone(zone)
    return when.isoformat(sep=" ", timespec="milliseconds" if at_ms % 1000 else "seconds")


def local(day: date | str, clock: time | str, zone: str | ZoneInfo, gap: str = "later", fold: int = 0) -> datetime:
    """Return a wall-clock time in a time zone, an aware datetime: `local("2026-03-29", "02:30", "Europe/Berlin")`.

    `day`: a date or "YYYY-MM-DD". `clock`: a time or "HH:MM[:SS[.ffffff]]". `zone`: an IANA name. `gap`: for a time
    that clocks skip, "later" moves it forward by the skipped hour, "earlier" back, and "refuse" raises. `fold`: for a
    time that clocks show twice, 0 is the first and 1 the second.

    Raise Invalid for an unreadable value, an unknown zone, and a skipped time with gap="refuse"."""
    where = _zone(zone)
    if not isinstance(gap, str) or gap not in ("later", "earlier", "refuse"):
        raise Invalid(f"gap must be 'later', 'earlier' or 'refuse', not {shown(gap)}")
    if not isinstance(fold, int) or isinstance(fold, bool) or fold not in (0, 1):
        raise Invalid(f"fold must be 0 or 1, not {shown(fold)}")
    naive = datetime.combine(_day(day), _clock(clock))
    try:
        return _on_the_wall(naive, where, gap, fold)
    except OverflowError:
        raise Invalid(f"{naive.isoformat()} in {where.key} lies outside of the years 1 to 9999 of UTC") from None


def _on_the_wall(naive: datetime, where: ZoneInfo, gap: str, fold: int) -> datetime:
    wanted = naive.replace(tzinfo=where, fold=fold)
    if wanted.astimezone(UTC).astimezone(where).replace(tzinfo=None) == naive:
        return wanted
    if gap == "refuse":
        raise Invalid(f"clocks in {where.key} skip {naive:%Y-%m-%d %H:%M}: choose another time, or gap='later'")
    # In a gap, fold 0 uses the offset before it, so that the result is later on the wall; fold 1 the offset after it.
    skipped = naive.replace(tzinfo=where, fold=0 if gap == "later" else 1)
    return skipped.astimezone(UTC).astimezone(where)


def _zone(zone: str | ZoneInfo) -> ZoneInfo:
    if isinstance(zone, ZoneInfo):
        return zone
    if not isinstance(zone, str):
        raise Invalid(f"zone must be a name like 'America/New_York', not {shown(zone)}")
    try:
        return ZoneInfo(zone)
    except (KeyError, ValueError, OSError):
        raise Invalid(unknown_zone(zone)) from None


def _day(day: date | str) -> date:
    if isinstance(day, datetime):
        return day.date()
    if isinstance(day, date):
        return day
    try:
        return date.fromisoformat(day)
    except (TypeError, ValueError):
        raise Invalid(f"the day must be a date, or one of the calendar as 'YYYY-MM-DD', not {shown(day)}") from None


def _clock(clock: time | str) -> time:
    try:
        if isinstance(clock, str) and _ISO_TIME.fullmatch(clock) is None:
            raise ValueError(clock)  # Python reads 09.30 as 09:00:00.3
        read = clock if isinstance(clock, time) else time.fromisoformat(clock)
    except (TypeError, ValueError):
        raise Invalid(f"the time of day must be a time, or 'HH:MM' such as 09:00, not {shown(clock)}") from None
    if read.tzinfo is not None:
        raise Invalid(f"the time of day must have no time zone of its own: {clock!s} has one")
    return read
