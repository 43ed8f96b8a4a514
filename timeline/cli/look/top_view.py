"""A snapshot of brokers as a picture for a terminal, as wide and high as that is; and a picture that is drawn again and
again, until a key ends it."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import termios
import tty
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar
from zoneinfo import ZoneInfo

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from timeline.cli.look.snapshot import Snapshot, TopicSnapshot
from timeline.cli.terminal.chart import columns
from timeline.driver.brokers import BrokerStanding, ConsumerStatus
from timeline.driver.late import LateDelivery
from timeline.driver.times import as_datetime
from timeline.errors import TimelineError
from timeline.wire import Health
from timeline.wording import shown_lateness

T = TypeVar("T")
CHART_HEIGHT = 5
ENDING_KEYS = (b"q", b"Q", b"\x1b")
MARGIN = 11
QUIET = "grey58"
ROWS_ASIDE = 6
"""Lines that are no rows of a table, besides those of brokers and the chart: titles, heads, what is between."""
LATE_ONCE = 10
"""Late deliveries in a picture that is drawn once: often one cause after the other says the same."""
WELL_MS, FAIR_MS = 10.0, 50.0
TOPICS_ONCE = 200
"""Topics that are shown where the height is not bounded."""
NARROW = 112
"""On narrower screens the table of topics goes without some columns."""
_HEALTH = {Health.HEALTHY: ("healthy", "green"), Health.SILENT: ("silent", "bold red"),
           Health.STALLED: ("stalled", "bold red"), Health.SET_ASIDE: ("set aside", "bold yellow")}  # fmt: skip


def seconds_ahead(width: int) -> int:
    """How many seconds of coming load fit, a column each."""
    return max(10, min(300, width - MARGIN - 1))


def picture(snapshot: Snapshot, width: int, height: int | None, zone: ZoneInfo | None, trouble: str = "") -> Group:
    """The snapshot, for lines of `width`, cut to `height` of them (None: all of it, but for topics past TOPICS_ONCE).
    `trouble`: why it is not of this moment."""
    parts: list[RenderableType] = [_head(snapshot, zone, trouble), *map(_broker, snapshot.brokers)]
    parts += store_warnings(snapshot.brokers, no_wrap=True)
    parts += [Text(f"  ✗ {address}: {why}", "bold red") for address, why in snapshot.unreachable.items()]
    parts += _ahead(snapshot, zone)
    used = len(parts) + ROWS_ASIDE + (3 if snapshot.late else 1)
    topics, consumers, late = _shares(height, used, (len(snapshot.topics), len(snapshot.consumers), len(snapshot.late)))
    parts += [Text(""), _topics(_busiest(snapshot.topics, topics), snapshot.now_ms, width < NARROW)]
    parts += more(len(snapshot.topics) - topics, "topic")
    parts += [Text(""), consumer_table(snapshot.consumers[:consumers])]
    parts += more(len(snapshot.consumers) - consumers, "consumer")
    shown = late if height is not None else min(late, LATE_ONCE)
    parts += [Text(""), _late(snapshot.late[:shown], zone)]
    if shown < late:
        parts.append(Text("… and more: 'timeline late' has all of them, with a count of their causes", QUIET))
    return Group(*parts)


def _shares(height: int | None, used: int, wanted: tuple[int, int, int]) -> list[int]:
    """How many rows each of three tables gets: a third of what is left to each, and what one does not need to the
    others."""
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
    line = Text.assemble(
        ("  ● ", "bold red" if one.trouble else "green"),
        (one.broker, "bold"),
        (f" at {one.address}  {one.version}  up {up}  {one.store}{store}", QUIET),
        no_wrap=True,
        overflow="ellipsis",
    )
    if one.trouble:
        line.append(f"  {one.trouble}", "bold red")
    return line


def store_warnings(brokers: Sequence[BrokerStanding], no_wrap: bool = False) -> list[Text]:
    """A line for each setting that weakens a store, with the brokers that found it."""
    found: dict[str, list[str]] = {}
    for one in brokers:
        for warning in one.warnings:
            found.setdefault(warning, []).append(one.broker)
    return [
        Text(f"  ! store of {', '.join(names)}: {warning}", "bold yellow", no_wrap=no_wrap, overflow="ellipsis")
        for warning, names in found.items()
    ]


def _ahead(snapshot: Snapshot, zone: ZoneInfo | None) -> list[RenderableType]:
    """The coming load, a column a second."""
    most = max(snapshot.ahead, default=0)
    head = Text.assemble(("DUE PER SECOND", "bold"), f"  {sum(snapshot.ahead):,} in the next {len(snapshot.ahead)} s")
    if most:
        at_ms = snapshot.now_ms + snapshot.ahead.index(most) * 1000
        head.append(f", most {most:,} at {as_datetime(at_ms).astimezone(zone).strftime('%H:%M:%S')}")
    if snapshot.overdue:
        head.append(f"; {snapshot.overdue:,} due and not delivered", "bold yellow")
    lines: list[RenderableType] = [Text(""), head]
    for at, bars in enumerate(columns(snapshot.ahead, CHART_HEIGHT)):
        label = f"{most:,}" if at == 0 and most else ""
        style = ("bold yellow", "yellow", "green", "green", "green")[at]
        lines.append(Text.assemble((f"{label:>{MARGIN - 2}} │", QUIET), (bars, style), no_wrap=True, overflow="crop"))
    marks = "".join("┴" if at and at % 10 == 0 else "─" for at in range(len(snapshot.ahead)))
    lines.append(Text(f"{'0':>{MARGIN - 2}} └{marks}", QUIET, no_wrap=True, overflow="crop"))
    axis = [" "] * (len(snapshot.ahead) + 6)
    for at in range(0, len(snapshot.ahead), 20 if len(snapshot.ahead) > 40 else 10):
        said = f"+{at}s" if at else "now"
        start = max(0, at - len(said) // 2) if at else 0
        axis[start : start + len(said)] = said
    lines.append(Text(" " * MARGIN + "".join(axis).rstrip(), QUIET, no_wrap=True, overflow="crop"))
    return lines


WHOLE = ("DELIVERED", "STATE", "HEALTH")
LATE = ("p50 LATE", "p99 LATE", "MAX LATE")
WIDE = ("NEXT DUE", "p50 LATE", "IN HAND")


def table(*heads: str, right: Sequence[str] = ()) -> Table:
    """A table without lines; the columns `right` are set flush right."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", expand=False)
    for head in heads:
        # Numbers stay whole; names and sentences give way.
        least = len(head) if head in right or head in WHOLE else 6
        justify: JustifyMethod = "right" if head in right else "left"
        made.add_column(head, justify=justify, no_wrap=True, overflow="ellipsis", min_width=least)
    return made


def _topics(topics: Sequence[TopicSnapshot], now_ms: int, narrow: bool) -> Table:
    numbers = ["DUE", "WAITING", "NEXT DUE", "OUT/s", "CONSUMERS", "IN HAND", "CREDIT", *LATE]
    if narrow:
        numbers = [head for head in numbers if head not in WIDE]
    made = table("TOPIC", "STATE", *numbers, right=numbers)
    for one in topics:
        starved = one.due and (not one.consumers or not one.credit)
        cells: dict[str, RenderableType] = {
            "DUE": Text(f"{one.due:,}", "bold yellow" if starved else ""),
            "WAITING": "" if one.waiting is None else f"{one.waiting:,}",
            "NEXT DUE": _until(one.next_due_ms, now_ms),
            "OUT/s": "" if one.delivered_per_s is None else f"{one.delivered_per_s:,.1f}",
            "CONSUMERS": Text(f"{one.consumers:,}", "bold yellow" if starved and not one.consumers else ""),
            "IN HAND": f"{one.in_flight:,}",
            "CREDIT": Text(f"{one.credit:,}", "bold yellow" if starved and one.consumers else ""),
            **dict(zip(LATE, map(late_bound, (one.p50_ms, one.p99_ms, one.max_ms)), strict=True)),
        }
        state = Text(one.state, "bold yellow" if one.state == "paused" else "")
        made.add_row(Text(one.name, "bold"), state, *(cells[head] for head in numbers))
    if not topics:
        made.add_row(Text("none yet", QUIET))
    return made


def _busiest(topics: Sequence[TopicSnapshot], count: int) -> Sequence[TopicSnapshot]:
    """All topics as they are, by name; where there is not room for all, those that have most to do."""
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
    """A bound of lateness that was kept, in its colour."""
    if value_ms is None:
        return Text("")
    if math.isinf(value_ms):
        return Text("> 1h", "bold red")
    style = "green" if value_ms <= WELL_MS else "yellow" if value_ms <= FAIR_MS else "bold red"
    return Text(f"≤ {shown_lateness(value_ms)}", style)


def consumer_table(consumers: Sequence[ConsumerStatus], brokers: Sequence[str] = ()) -> Table:
    """A line a consumer; `brokers`: where each is connected, when that is to be shown."""
    numbers = ("IN HAND", "CREDIT", "CREDIT MiB")
    made = table("CONSUMER", "TOPIC", *(("BROKER",) if brokers else ()), "HEALTH", *numbers, right=numbers)
    for at, one in enumerate(consumers):
        text, style = _HEALTH[one.health]
        where = [Text(brokers[at])] if brokers else []
        mib = f"{one.credit_bytes / 1024**2:,.1f}"
        made.add_row(
            Text(one.id), Text(one.topic), *where, Text(text, style), f"{one.in_flight:,}", f"{one.credit:,}", mib
        )
    if not consumers:
        made.add_row(Text("nobody is connected", QUIET))
    return made


def _late(late: Sequence[LateDelivery], zone: ZoneInfo | None) -> RenderableType:
    if not late:
        return Text("LATE  nothing was more than 50 ms late in the last ten minutes", QUIET)
    made = table("DELIVERED", "LATE BY", "TOPIC", "ID", "CONSUMER", "WHY", right=("LATE BY",))
    for one in late:
        when = as_datetime(one.delivered_ms).astimezone(zone).strftime("%H:%M:%S")
        by = shown_lateness(one.delivered_ms - one.due_ms)
        made.add_row(when, by, Text(one.topic), Text(one.id), Text(one.consumer), one.why)
    return made


def more(count: int, what: str) -> list[RenderableType]:
    """A line that says how many there are besides."""
    return [Text(f"… and {count:,} {what}{'s' if count > 1 else ''} more", QUIET)] if count > 0 else []


async def watch_live(
    screen: Console, every_s: float, look: Callable[[], Awaitable[T]], draw: Callable[[T, str], RenderableType]
) -> None:
    """Draw one look after the other until somebody presses q. A broker that goes away is waited for: the last look
    stays, drawn with what is wrong."""
    ended, trouble = asyncio.Event(), ""
    # The first look comes before the screen is cleared: what goes wrong with it is said in the ordinary way.
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
    """While inside, `ended` is set by the key q (or escape), without the return key."""
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
