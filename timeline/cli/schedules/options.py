"""The options of a schedule's specification, and times as tables of schedules show them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from zoneinfo import ZoneInfo

import click

from timeline.cli.options import DURATION, Milliseconds, parse_headers, parse_time
from timeline.clock import Clock
from timeline.driver.times import as_datetime, duration_ms
from timeline.errors import FIXED_LIMIT, Invalid, TooLarge
from timeline.recurrence import FoldPolicy, GapPolicy, Occurrence, WallChange
from timeline.schedules import CatchUp, Overlap
from timeline.schedules.specification import MOST_TEMPLATE_BYTES
from timeline.wording import shown_lateness

RULES = ("cron", "every", "rrule")
NO_POLICY = "rule"
"""What `--gap` and `--fold` of an update take for: by the rule."""
_CHANGES = {
    WallChange.NONE: "",
    WallChange.SKIPPED: "clocks skip {wall:%H:%M} that day",
    WallChange.FIRST: "the first of two {wall:%H:%M}",
    WallChange.SECOND: "the second of two {wall:%H:%M}",
}
TIME_COLUMNS = ("when", "in", "clocks")

every_option = click.option(
    "--every", default=None, type=Milliseconds(), help="A period, counted from --start or from 1970."
)
rrule_option = click.option(
    "--rrule", multiple=True, help="A rule of RFC 5545, like FREQ=MONTHLY;BYDAY=-1FR. May be repeated."
)
exclude_option = click.option(
    "--exclude",
    multiple=True,
    metavar="DATE|TIME|RULE",
    help="What is left out: 2026-12-25, 'cron:* * 25 12 *', 'rrule:FREQ=…'. May be repeated.",
)
start_option = click.option("--start", metavar="TIME", help="No occurrence before it.")
end_option = click.option("--end", metavar="TIME", help="No occurrence at it or after it.")


def policy_options(*more: str) -> Callable[[Any], Any]:
    """Return the options `--gap` and `--fold`, which also take `more`."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        function = click.option(
            "--fold",
            type=click.Choice([*(one.value for one in FoldPolicy), *more]),
            help="Which one counts of a time that clocks show twice. Default: by the rule.",
        )(function)
        return click.option(
            "--gap",
            type=click.Choice([*(one.value for one in GapPolicy), *more]),
            help="A time that clocks skip is later, or left out. Default: by the rule.",
        )(function)

    return add


_TIMING: tuple[Callable[[Any], Any], ...] = (
    click.option("--cron", multiple=True, metavar="CRON", help="Fields in quotes, '0 9 * * 1-5'. May be repeated."),
    every_option,
    rrule_option,
    exclude_option,
    click.option("--zone", metavar="ZONE", help="Time zone of rules and of local times. Default: UTC."),
    policy_options(NO_POLICY),
    start_option,
    end_option,
    click.option("--count", type=click.IntRange(min=0), metavar="N", help="The most occurrences, from --start on."),
)
HANDLING: tuple[Callable[[Any], Any], ...] = (
    click.option("--jitter", type=DURATION, help="Longest delay of an occurrence, random for each. Default: 0s."),
    click.option(
        "--catch-up",
        type=click.Choice([one.value for one in CatchUp]),
        help=f"What is produced after an outage, of the occurrences that were missed. Default: {CatchUp.LATEST}.",
    ),
    click.option("--window", type=DURATION, help="How far back that goes. Default: 1h."),
    click.option(
        "--overlap",
        type=click.Choice([one.value for one in Overlap]),
        help=f"What happens while the message before is unfinished. Default: {Overlap.ALLOW}.",
    ),
    click.option("--tag", help="Tag of the messages."),
    click.option("--group", help="Producer group that owns the messages. Default: default."),
    click.option("--expires", type=DURATION, help="How long after its due time a message is not delivered any more."),
)
_TEMPLATE: tuple[Callable[[Any], Any], ...] = (
    click.option("--payload", metavar="TEXT", help="Payload of the messages."),
    click.option("--payload-file", metavar="FILE", help="File with the payload; - is standard input."),
    click.option(
        "--header", "headers", multiple=True, metavar="NAME=VALUE", help="Header of the messages; repeatable."
    ),
)


def added(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a decorator that adds options, shown in this order."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return add


specification_options = added(*_TIMING, *_TEMPLATE, *HANDLING)


def specification_arguments(given: Mapping[str, Any], zone: str, *, replacing: bool = False) -> dict[str, Any]:
    """Return the options that were given as `tl.schedule` and `s.update` take them. `zone`: that of local times.
    `replacing`: any rule replaces all former ones, and an empty text clears a field. Raise Invalid."""
    found = {name: given[name] for name in ("zone", "count", "catch_up", "overlap", "group") if given.get(name)}
    if given.get("count") == 0:
        found["count"] = 0
    for name in ("gap", "fold"):
        if given.get(name):
            found[name] = None if given[name] == NO_POLICY else given[name]
    rules = {name: given[name] for name in RULES if given.get(name)}
    if rules:
        found |= ({"cron": (), "every": None, "rrule": ()} if replacing else {}) | rules
        if "every" in rules:
            found["every"] = f"{rules['every']}ms"
    if given.get("exclude"):
        found["exclude"] = tuple(text for text in given["exclude"] if text)
    for name in ("start", "end"):
        if given.get(name) is not None:
            found[name] = _time(given[name], f"--{name}", zone)
    for name in ("jitter", "window", "expires"):
        if given.get(name) is not None:
            duration_ms(given[name], f"--{name}")
            found[name] = given[name]
    if given.get("tag") is not None:
        found["tag"] = given["tag"]
    if given.get("headers"):
        found["headers"] = parse_headers([pair for pair in given["headers"] if pair])
    payload = _payload(given.get("payload"), given.get("payload_file"))
    return found if payload is None else found | {"payload": payload}


def _time(text: str, option: str, zone: str) -> Any:
    return None if text == "" else as_datetime(parse_time(text, option, zone).absolute_ms())


def _payload(text: str | None, file: str | None) -> bytes | None:
    """Return the payload that was given, None without one."""
    if text is not None and file is not None:
        raise Invalid("--payload and --payload-file are one payload: give one of the two")
    if file is None:
        return None if text is None else os.fsencode(text)
    if file == "-" and sys.stdin is None:
        raise Invalid("standard input is closed: there is nothing to read")
    content = read_whole(file, MOST_TEMPLATE_BYTES)
    if len(content) > MOST_TEMPLATE_BYTES:
        said = f"--payload-file {file:.60} has more than {MOST_TEMPLATE_BYTES} bytes, which no schedule takes"
        raise TooLarge(said, advice=FIXED_LIMIT)
    return content


def read_whole(file: str, most_bytes: int) -> bytes:
    """Return the first `most_bytes` of a file, or of standard input for -, and one byte more if there is more. Raise
    Invalid."""
    if file == "-":
        return sys.stdin.buffer.read(most_bytes + 1)
    try:
        with open(file, "rb") as opened:
            return opened.read(most_bytes + 1)
    except OSError as trouble:
        raise Invalid(f"{file:.200} cannot be read ({trouble.strerror}): name another file, or - for input") from None


def time_rows(found: Iterable[Occurrence], zone: ZoneInfo) -> list[tuple[str, str, str]]:
    """Return a row of `TIME_COLUMNS` for each occurrence."""
    now_ms = Clock().now_ms()
    return [
        (shown_wall(one.at_ms, zone), distance(one.at_ms - now_ms), _CHANGES[one.change].format(wall=one.wall))
        for one in found
    ]


def zoned(at_ms: int, zone: ZoneInfo) -> str:
    """Return a time for machines, with the offset of its zone."""
    return as_datetime(at_ms).astimezone(zone).isoformat()


def shown_wall(at_ms: int, zone: ZoneInfo) -> str:
    """Return a time for people, with its weekday and the offset of its zone."""
    when = as_datetime(at_ms).astimezone(zone)
    return f"{when:%a} {when.isoformat(sep=' ')}"


def distance(ahead_ms: int) -> str:
    """Return how far ahead a time is, or with a minus how long ago."""
    return shown_lateness(ahead_ms) if ahead_ms >= 0 else f"-{shown_lateness(-ahead_ms)}"
