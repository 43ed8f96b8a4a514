"""`timeline top`: running brokers, drawn as wide and high as the terminal, until a key ends it."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import termios
import tty
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

import timeline
from timeline.cli.look.late import COLUMNS, SPARE, late_json
from timeline.cli.options import ClientOptions, check_topic, client_command, every_option, topic_names, zone_option
from timeline.cli.output import QUIET, bars, console, id_cell, picked, print_json, table
from timeline.driver.brokers import BrokerStanding, ConsumerStatus
from timeline.driver.late import LateDelivery
from timeline.driver.times import as_datetime, iso_or_none
from timeline.driver.transport.channel import named_trouble
from timeline.errors import TimelineError
from timeline.watcher import Snapshot, TopicSnapshot, Watcher
from timeline.wire import Health
from timeline.wording import shown_lateness

T = TypeVar("T")
CHART_HEIGHT = 5
ENDING_KEYS = (b"q", b"Q", b"\x1b")
MARGIN = 11
ROWS_ASIDE = 6
"""Lines that are neither rows of a table nor brokers nor the chart: titles, heads, gaps."""
LATE_ONCE = 10
"""Late deliveries in a picture that is drawn once. Many have the same cause."""
WELL_MS, FAIR_MS = 10.0, 50.0
TOPICS_ONCE = 200
"""Topics in a picture of unbounded height."""
_HEALTH = {Health.HEALTHY: ("healthy", "green"), Health.SILENT: ("silent", "bold red"),
           Health.STALLED: ("stalled", "bold red"), Health.SET_ASIDE: ("suspended", "bold yellow")}  # fmt: skip
WIDTH_UNSEEN = 120


@click.command()
@click.argument("topic", required=False, shell_complete=topic_names)
@every_option("Time between two looks.")
@click.option("--once", is_flag=True, help="Print one picture and end.")
@zone_option
@client_command
async def top(
    tl: timeline.Timeline, options: ClientOptions, topic: str | None, every: int, once: bool, zone: ZoneInfo | None
) -> None:
    """Watch brokers live: topics, the load of the coming seconds, consumers with their credit, and late deliveries with
    their causes.

    Percentiles are bounds that were kept in the last minute. The first picture counts since the broker started. With
    --once or --json, or without a terminal, it looks twice, --every apart, for the rates: once if topics are not known.
    Then it prints one picture, with percentiles since the broker started, and ends.

    In JSON, `unknown` says why nothing is known but the state of the brokers themselves, as when none of them can read
    its store. Otherwise it is empty. `unreachable` has each broker that does not answer, with the reason.

    \b
    Example:
      timeline top
      timeline top departures --once
      timeline top --json --every 5s
    """
    if topic is not None:
        await check_topic(tl, topic)
    screen = console()
    if not (once or options.as_json) and screen.is_terminal:
        live = Watcher(tl, topic or "")
        return await watch_live(
            screen,
            every / 1000,
            lambda: live.look(seconds_ahead(screen.width)),
            lambda seen, trouble: picture(seen, screen.width, screen.height, zone, trouble),
        )
    watcher = Watcher(tl, topic or "", ever=True)
    width = screen.width if screen.is_terminal else WIDTH_UNSEEN
    snapshot = await watcher.look(seconds_ahead(width))
    if not snapshot.unknown:  # else there are no rates, and another look would wait for --timeout as this one did
        await asyncio.sleep(every / 1000)
        snapshot = await watcher.look(seconds_ahead(width))
    if options.as_json:
        print_json(snapshot_json(snapshot))
    else:
        screen.print(picture(snapshot, width, None, zone))


def snapshot_json(seen: Snapshot) -> dict[str, Any]:
    """Return a snapshot for machines."""
    return {
        "now": iso_or_none(seen.now_ms),
        "brokers": [broker_json(one) for one in seen.brokers],
        "unreachable": dict(seen.unreachable),
        "topics": [_topic_json(one) for one in seen.topics],
        "due_per_s_ahead": list(seen.ahead),
        "overdue": seen.overdue,
        "consumers": [
            picked(one, "topic", "id", "health", "in_flight", "credit", "credit_bytes") for one in seen.consumers
        ],
        "late": [late_json(one) for one in seen.late],
        "unknown": seen.unknown,
    }


def broker_json(one: BrokerStanding) -> dict[str, Any]:
    """Return a broker for machines."""
    return {
        **picked(one, "address", "broker", "version"),
        "up_ms": one.now_ms - one.started_ms,
        **picked(one, "trouble", "store"),
        "store_ms": one.store_ms or None,
        "store_warnings": list(one.warnings),
    }


def _topic_json(one: TopicSnapshot) -> dict[str, Any]:
    return {
        **picked(one, "name", "state", "due", "waiting", "next_due"),
        "delivered_per_s": None if one.delivered_per_s is None else round(one.delivered_per_s, 3),
        **picked(one, "consumers", "in_flight", "credit"),
        "lateness_ms": lateness_json((one.p50_ms, one.p99_ms, one.max_ms)),
    }


def lateness_json(bounds: Sequence[float | None]) -> dict[str, float | None]:
    """Return what `bounds_ms` returned for machines. Infinity is null there, too."""
    finite = (None if bound is None or math.isinf(bound) else bound for bound in bounds)
    return dict(zip(("p50", "p99", "max"), finite, strict=True))


def seconds_ahead(width: int) -> int:
    """Return how many seconds of coming load fit, one column each."""
    return max(10, min(300, width - MARGIN - 1))


def picture(snapshot: Snapshot, width: int, height: int | None, zone: ZoneInfo | None, trouble: str = "") -> Group:
    """Draw the snapshot with lines of `width`, cut to `height` of them. None: all of it, and TOPICS_ONCE topics.
    `trouble`: why it is not of this moment."""
    parts: list[RenderableType] = [_head(snapshot, zone, trouble), *map(_broker, snapshot.brokers)]
    parts += store_warnings(snapshot.brokers, no_wrap=True)
    parts += [Text(f"  ✗ {named_trouble(address, why)}", "bold red") for address, why in snapshot.unreachable.items()]
    if snapshot.unknown:
        said = f"Topics, load and late deliveries are not known: {snapshot.unknown}"
        return Group(*parts, Text(""), Text(said, "bold red"))
    parts += _ahead(snapshot, zone)
    used = len(parts) + ROWS_ASIDE + (3 if snapshot.late else 1)
    topics, consumers, late = _shares(height, used, (len(snapshot.topics), len(snapshot.consumers), len(snapshot.late)))
    parts += [Text(""), _topics(_busiest(snapshot.topics, topics), snapshot.now_ms, width)]
    parts += more(len(snapshot.topics) - topics, "topic")
    parts += [Text(""), consumer_table(snapshot.consumers[:consumers], width)]
    parts += more(len(snapshot.consumers) - consumers, "consumer")
    shown = late if height is not None else min(late, LATE_ONCE)
    parts += [Text(""), _late(snapshot.late[:shown], width, zone)]
    if shown < late:
        parts.append(Text("… and more: 'timeline late' has all of them, with a count of their causes", QUIET))
    return Group(*parts)


def _shares(height: int | None, used: int, wanted: tuple[int, int, int]) -> list[int]:
    """Return the rows of each of three tables: a third of what is left, and what the others do not need."""
    if height is None:
        return [min(wanted[0], TOPICS_ONCE), *wanted[1:]]
    left = max(3, height - used)
    given = [0, 0, 0]
    while left > 0 and any(has < wants for has, wants in zip(given, wanted, strict=True)):
        for at in range(3):
            if left > 0 and given[at] < wanted[at]:
                given[at] += 1
                left -= 1
    return given


def _head(snapshot: Snapshot, zone: ZoneInfo | None, trouble: str) -> Text:
    when = as_datetime(snapshot.now_ms).astimezone(zone).strftime("%Y-%m-%d %H:%M:%S")
    head = Text.assemble(("timeline top", "bold"), f"  {when}", no_wrap=True, overflow="ellipsis")
    if trouble:
        head.append(f"   {trouble}", "bold red")
    return head


def _broker(one: BrokerStanding) -> Text:
    up = shown_lateness(max(0, one.now_ms - one.started_ms))
    store = f", leases' p99 {shown_lateness(one.store_ms)}" if one.store_ms else ""
    return Text.assemble(
        ("  ● ", "bold red" if one.trouble else "green"),
        (one.broker, "bold"),
        # A narrow terminal cuts the end: the trouble is read before all else, the version last.
        (f"  {one.trouble}" if one.trouble else "", "bold red"),
        (f"  at {one.address}  up {up}  {one.store}{store}  {one.version}", QUIET),
        no_wrap=True,
        overflow="ellipsis",
    )


def store_warnings(brokers: Sequence[BrokerStanding], no_wrap: bool = False) -> list[Text]:
    """Return a line for each setting that weakens a store, with the brokers that found it."""
    found: dict[str, list[str]] = {}
    for one in brokers:
        for warning in one.warnings:
            found.setdefault(warning, []).append(one.broker)
    return [
        Text(f"  ! store of {', '.join(names)}: {warning}", "bold yellow", no_wrap=no_wrap, overflow="ellipsis")
        for warning, names in found.items()
    ]


def _ahead(snapshot: Snapshot, zone: ZoneInfo | None) -> list[RenderableType]:
    """Draw the coming load, one column per second."""
    most = max(snapshot.ahead, default=0)
    head = Text.assemble(("DUE PER SECOND", "bold"), f"  {sum(snapshot.ahead):,} in the next {len(snapshot.ahead)} s")
    if most:
        at_ms = snapshot.now_ms + snapshot.ahead.index(most) * 1000
        head.append(f", most {most:,} at {as_datetime(at_ms).astimezone(zone).strftime('%H:%M:%S')}")
    if snapshot.overdue:
        head.append(f"; {snapshot.overdue:,} due and not delivered", "bold yellow")
    lines: list[RenderableType] = [Text(""), head]
    for at, line in enumerate(bars(snapshot.ahead, CHART_HEIGHT)):
        label = f"{most:,}" if at == 0 and most else ""
        style = ("bold yellow", "yellow", "green", "green", "green")[at]
        lines.append(Text.assemble((f"{label:>{MARGIN - 2}} │", QUIET), (line, style), no_wrap=True, overflow="crop"))
    marks = "".join("┴" if at and at % 10 == 0 else "─" for at in range(len(snapshot.ahead)))
    lines.append(Text(f"{'0':>{MARGIN - 2}} └{marks}", QUIET, no_wrap=True, overflow="crop"))
    axis = [" "] * (len(snapshot.ahead) + 6)
    for at in range(0, len(snapshot.ahead), 20 if len(snapshot.ahead) > 40 else 10):
        said = f"+{at}s" if at else "now"
        start = max(0, at - len(said) // 2) if at else 0
        axis[start : start + len(said)] = said
    lines.append(Text(" " * MARGIN + "".join(axis).rstrip(), QUIET, no_wrap=True, overflow="crop"))
    return lines


LATE = ("p50 LATE", "p99 LATE", "MAX LATE")


def _topics(topics: Sequence[TopicSnapshot], now_ms: int, width: int) -> Table:
    numbers = ("DUE", "WAITING", "NEXT DUE", "OUT/s", "CONSUMERS", "IN FLIGHT", "CREDIT", *LATE)
    rows = []
    for one in topics:
        starved = "bold yellow" if one.due and not (one.consumers and one.credit) else ""
        rows.append((
            Text(one.name, "bold"),
            Text(one.state, "bold yellow" if one.state == "paused" else ""),
            Text(f"{one.due:,}", starved),
            "" if one.waiting is None else f"{one.waiting:,}",
            _until(one.next_due_ms, now_ms),
            "" if one.delivered_per_s is None else f"{one.delivered_per_s:,.1f}",
            Text(f"{one.consumers:,}", "" if one.consumers else starved),
            f"{one.in_flight:,}",
            Text(f"{one.credit:,}", starved if one.consumers else ""),
            *map(late_bound, (one.p50_ms, one.p99_ms, one.max_ms)),
        ))  # fmt: skip
    spare = ("p50 LATE", "IN FLIGHT", "NEXT DUE", "OUT/s", "WAITING", "CREDIT", "STATE", "MAX LATE")
    return table(("TOPIC", "STATE", *numbers), rows, width, numbers, empty="none yet", spare=spare)


def _busiest(topics: Sequence[TopicSnapshot], count: int) -> Sequence[TopicSnapshot]:
    """Return the topics by name: all, or the `count` busiest."""
    if count >= len(topics):
        return topics

    def busy(one: TopicSnapshot) -> tuple[float, ...]:
        return one.due, one.delivered_per_s or 0.0, one.in_flight, one.waiting or 0

    return sorted(sorted(topics, key=busy, reverse=True)[:count], key=lambda one: one.name)


def _until(at_ms: int, now_ms: int) -> str:
    if not at_ms:
        return ""
    return "now" if at_ms <= now_ms else f"in {shown_lateness(at_ms - now_ms)}"


def late_bound(value_ms: float | None) -> Text:
    """Return a bound of lateness in its colour."""
    if value_ms is None:
        return Text("")
    if math.isinf(value_ms):
        return Text("> 1h", "bold red")
    style = "green" if value_ms <= WELL_MS else "yellow" if value_ms <= FAIR_MS else "bold red"
    return Text(f"≤ {shown_lateness(value_ms)}", style)


def consumer_table(consumers: Sequence[ConsumerStatus], width: int, brokers: Sequence[str] = ()) -> Table:
    """Draw a line per consumer. `brokers`: where each is connected, if that is shown."""
    numbers = ("IN FLIGHT", "CREDIT", "CREDIT MiB")
    rows = [
        (
            one.id, one.topic, *brokers[at : at + 1], Text(*_HEALTH[one.health]), f"{one.in_flight:,}",
            f"{one.credit:,}", f"{one.credit_bytes / 1024**2:,.1f}",
        )
        for at, one in enumerate(consumers)
    ]  # fmt: skip
    heads = ("CONSUMER", "TOPIC", *(("BROKER",) if brokers else ()), "HEALTH", *numbers)
    spare = ("CREDIT MiB", "BROKER", "CREDIT", "TOPIC")
    return table(heads, rows, width, numbers, empty="no consumer is connected", spare=spare)


def _late(late: Sequence[LateDelivery], width: int, zone: ZoneInfo | None) -> RenderableType:
    if not late:
        return Text("LATE  nothing was more than 50 ms late in the last ten minutes", QUIET)
    rows = [
        (
            as_datetime(one.delivered_ms).astimezone(zone).strftime("%H:%M:%S"),
            shown_lateness(one.delivered_ms - one.due_ms), one.topic, id_cell(one.id), one.consumer, one.why,
        )
        for one in late
    ]  # fmt: skip
    return table(COLUMNS, rows, width, ("LATE BY",), spare=SPARE)


def more(count: int, what: str) -> list[RenderableType]:
    """Return a line with the number of what is not shown."""
    return [Text(f"… and {count:,} {what}{'s' if count > 1 else ''} more", QUIET)] if count > 0 else []


async def watch_live(
    screen: Console, every_s: float, look: Callable[[], Awaitable[T]], draw: Callable[[T, str], RenderableType]
) -> None:
    """Draw one look after the other until the key q. While a broker is away, the last look stays, with the error."""
    ended, trouble = asyncio.Event(), ""
    # The first look comes before the screen is cleared: its error is printed as usual.
    seen = await look()
    with keys(ended), Live(console=screen, screen=True, auto_refresh=False) as live:
        while True:
            live.update(draw(seen, trouble), refresh=True)
            try:
                await asyncio.wait_for(ended.wait(), every_s)
                return
            except TimeoutError:
                try:
                    seen, trouble = await look(), ""
                except TimelineError as gone:
                    trouble = f"how it stood; {gone.code}: {gone.reason or gone.advice}"


@contextmanager
def keys(ended: asyncio.Event) -> Iterator[None]:
    """Within it, the key q or escape sets `ended`, without the return key."""
    loop = asyncio.get_running_loop()
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def pressed() -> None:
        keys = os.read(keyboard, 64)
        if not keys or keys in ENDING_KEYS:
            ended.set()

    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, pressed)
    try:
        yield
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
