"""What people write on the command line: times, durations, headers, topic settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any
from zoneinfo import ZoneInfo

import click
from click.core import ParameterSource

from timeline.cli.app import complain
from timeline.clock import Clock
from timeline.config import has_password, parse_url
from timeline.driver.times import LOOKS_LIKE_SECONDS, as_datetime, duration_ms, instant_ms, local
from timeline.errors import Invalid

FORMS = (
    "a time is ISO 8601 with its offset (2026-03-29T09:00+02:00, …Z), now, now+15m, now-1h, a local time "
    "(2026-03-29T09:00) with --tz Europe/Berlin, or milliseconds since 1970 UTC"
)
_BARE = re.compile(r"-?[0-9]{1,30}(?:\.[0-9]{1,30})?")
_MILLIS = re.compile(r"-?[0-9]{9,30}")
"""More digits than a date written without hyphens has."""
_LENGTH = re.compile(r"\s*-?[0-9]+(?:\.[0-9]*)?\s*[a-z].*|\s*-?[0-9]{1,7}(?:\.[0-9]*)?\s*")
"""What begins as a duration does, or is a number of fewer digits than a date has."""
_NOW = re.compile(r"now(?:\s*([+-])\s*(\S+))?")


class Duration(click.ParamType[str]):
    """An option that takes a duration. A number without a unit is seconds, as in the Python API."""

    name = "DURATION"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> str:
        """The text with its unit; what it is worth is judged where its bounds are known."""
        return with_unit(str(value))


DURATION = Duration()


class Milliseconds(Duration):
    """An option that takes a duration of at least `least_ms`, and gives it in milliseconds."""

    def __init__(self, least_ms: int = 1) -> None:
        self._least_ms = least_ms

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """The duration. Raises Invalid naming the option."""
        if isinstance(value, int):
            return value
        option = parameter.opts[0] if parameter is not None else "a duration"
        return duration_ms(super().convert(value, parameter, context), option, least_ms=self._least_ms)


class _Zone(click.ParamType[ZoneInfo]):
    """An option that names a time zone."""

    name = "ZONE"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> ZoneInfo:
        """The zone. Raises Invalid."""
        found = value if isinstance(value, ZoneInfo) else zone_of(value)
        assert found is not None
        return found


shown_zone_option = click.option("--tz", "zone", type=_Zone(), help="Show times in this zone.  [this machine's]")


def every_option(help: str, default: str = "1s") -> Callable[[Any], Any]:
    """`--every`: how often a command looks again."""
    return click.option("--every", default=default, show_default=True, type=Milliseconds(), help=help)


class Url(click.ParamType[str]):
    """A URL that may hold a password, or @FILE, which has it. Warns of a password on the command line. `elsewhere`:
    where else it may be given."""

    name = "URL|@FILE"

    def __init__(self, elsewhere: str = "") -> None:
        self.elsewhere = elsewhere

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> str:
        """The URL itself."""
        url = parse_url(value)
        typed = (
            context is not None
            and parameter is not None
            and context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        )
        if typed and url == value and has_password(url):
            assert parameter is not None
            option = f"{parameter.opts[0]} " if isinstance(parameter, click.Option) else ""
            complain(
                f"others on this machine can read the password in {option or 'the URL '}from the list of processes. "
                f"Write the URL into a file of yours, and give {option}@FILE{self.elsewhere}"
            )
        return url


def with_unit(text: str) -> str:
    """`text`, with the unit that a bare number has: seconds."""
    return f"{text}s" if _BARE.fullmatch(text) else text


def is_length(text: str) -> bool:
    """Whether a text that may be a time or a duration is meant as a duration, well written or not."""
    return _LENGTH.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Time:
    """A point in time (`at_ms`, milliseconds UTC), or so long from now (`in_ms`, may be negative)."""

    at_ms: int | None = None
    in_ms: int | None = None

    @property
    def at(self) -> datetime | None:
        """The point in time for the driver, which takes the ints of the early 1970s for seconds."""
        return None if self.at_ms is None else as_datetime(self.at_ms)

    def asked(self) -> dict[str, Any]:
        """`at=` or `in_=`, as the driver takes it; what lies before now is now."""
        return {"at": self.at} if self.at_ms is not None else {"in_": max(0, self.in_ms or 0) / 1000}

    def absolute_ms(self) -> int:
        """Milliseconds UTC; what counts from now does so on this machine's clock."""
        if self.at_ms is not None:
            return self.at_ms
        return Clock().now_ms() + (self.in_ms or 0)


def parse_time(text: str, option: str, zone: str | None = None) -> Time:
    """A time as FORMS says. Raises Invalid naming `option`."""
    said = text.strip()
    match = _NOW.fullmatch(said)
    if match is not None:
        if match[2] is None:
            return Time(in_ms=0)
        length_ms = duration_ms(with_unit(match[2]), option)
        if match[1] == "-" and length_ms >= Clock().now_ms():
            raise Invalid(f"{option} must be a time after the start of 1970, not {text!r:.60}")
        return Time(in_ms=length_ms if match[1] == "+" else -length_ms)
    if _MILLIS.fullmatch(said):
        if abs(int(said)) < LOOKS_LIKE_SECONDS:
            raise Invalid(f"{option} {text!r:.60} looks like seconds: it takes milliseconds since 1970 UTC; {FORMS}")
        return Time(at_ms=instant_ms(int(said), option))
    try:
        when = datetime.fromisoformat(said)
    except ValueError:
        raise Invalid(f"{option} {text!r:.60} is no time: {FORMS}") from None
    if when.tzinfo is None:
        if zone is None:
            meant = said if ":" in said else f"{said}T00:00"
            raise Invalid(
                f"{option} {text!r:.60} does not say in which time zone: add the offset ({meant}Z is UTC) or give --tz"
            )
        when = local(date(when.year, when.month, when.day), when.time(), zone)
    return Time(at_ms=instant_ms(when, option))


def due_of(at: str | None, in_: str | None, zone: str | None, options: tuple[str, str]) -> Time:
    """The time that one of two options asks for, absolute or from now. Raises Invalid unless it is one of the two, and
    for a zone that does not exist, needed or not."""
    zone_of(zone)
    if (at is None) == (in_ is None):
        raise Invalid(f"give either {options[0]} (a time) or {options[1]} (how long from now), one of the two")
    if in_ is not None:
        return Time(in_ms=duration_ms(in_, options[1]))
    assert at is not None
    return parse_time(at, options[0], zone)


def parse_headers(pairs: Sequence[str]) -> dict[str, str]:
    """`k=v` each. Raises Invalid."""
    headers: dict[str, str] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise Invalid(f"--header is name=value, not {pair!r:.60}")
        if key in headers:
            raise Invalid(f"--header {key!r:.60} is given twice")
        headers[key] = value
    return headers


def zone_of(zone: str | None) -> ZoneInfo | None:
    """The time zone by name; None stays None. Raises Invalid."""
    if zone is None:
        return None
    found = local("2000-01-01", "12:00", zone).tzinfo
    assert isinstance(found, ZoneInfo)
    return found


def iso(at_ms: int) -> str | None:
    """A time for machines: ISO 8601 in UTC with milliseconds; None for 0, which is no time."""
    if not at_ms:
        return None
    return as_datetime(at_ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def shown_count(count: int, rate_per_s: float) -> str:
    """How many, and how many a second; none have no rate."""
    return f"{count:,}, {rate_per_s:,.0f}/s" if count else "0"


def shown_bytes(size_bytes: int) -> str:
    """A size for people, such as 1MiB or 1500B; exact."""
    for unit, unit_bytes in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if size_bytes and size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes}{unit}"
    return f"{size_bytes}B"
