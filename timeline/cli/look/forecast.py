"""`timeline forecast`: how much comes due, and when."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from zoneinfo import ZoneInfo

import click
import numpy as np
from rich.text import Text

import timeline
from timeline.cli.app import UNREACHABLE, Failed
from timeline.cli.options import DURATION, ClientOptions, Milliseconds, client_command, topic_names, zone_option
from timeline.cli.output import NICE_STEPS_MS, bars, console, nice_step_ms, picked, print_json, widened
from timeline.driver.queries import MAX_STEPS
from timeline.driver.times import as_datetime, duration_ms, iso_or_none
from timeline.errors import Invalid, Unavailable
from timeline.wording import shown_duration

AT_ONCE = 64
"""Topics that are asked for at the same time."""
HEIGHT = 8
MARGIN = 12
WIDTH_UNSEEN = 100
"""Width of the picture without a terminal."""
PEAKS = 3
DAY_MS = 86_400_000
LABEL_GAP = 3
LEAST_MARK_MS = 1_000


@dataclass(frozen=True, slots=True)
class DueLoad:
    """The messages that come due per step. `edges_ms` is one longer than `counts`."""

    edges_ms: list[int]
    counts: list[int]
    overdue: int
    exact: bool

    @property
    def total(self) -> int:
        return sum(self.counts)


@click.command()
@click.argument("topic", required=False, shell_complete=topic_names)
@click.option("--window", default="1h", type=Milliseconds(), help="How far to look ahead.")
@click.option("--step", type=DURATION, help="How much a column covers. Default: a round step that fits the terminal.")
@zone_option
@client_command
async def forecast(
    tl: timeline.Timeline, options: ClientOptions, topic: str | None, window: int, step: str | None,
    zone: ZoneInfo | None,
) -> None:  # fmt: skip
    """Draw how many messages of TOPIC, or of all topics, come due in the time ahead.

    The store is counted as it is now. Messages that are produced, moved or cancelled later change the picture. Messages
    in flight are not counted, but those whose lease ran out are due. Without TOPIC, all topics together are counted
    within --timeout.

    \b
    Example:
      timeline forecast departures --window 24h
      timeline forecast --window 10m --step 1s --json
    """
    width = (shutil.get_terminal_size().columns if console().is_terminal else WIDTH_UNSEEN) - MARGIN
    step_ms = nice_step_ms(window, max(10, width)) if step is None else duration_ms(step, "--step", least_ms=1)
    if -(-window // step_ms) > MAX_STEPS:
        raise Invalid(f"--window has more than {MAX_STEPS} steps of --step {step}: make the step longer")
    load = await load_ahead(tl, topic, window, step_ms, options.timeout)
    if options.as_json:
        print_json(_json(topic, load, step_ms))
    else:
        for line in picture(topic or "all topics", load, step_ms, width, zone):
            console().print(line, soft_wrap=True)


async def load_ahead(tl: timeline.Timeline, topic: str | None, window_ms: int, step_ms: int, timeout: str) -> DueLoad:
    """Return the load of `topic`. None: of all topics, added up, within `timeout` in all. Raise Failed after that."""
    if topic is not None:
        return _sum([await tl.forecast(topic, window_ms / 1000, step_ms / 1000)])
    room = asyncio.Semaphore(AT_ONCE)
    outlooks: list[timeline.Outlook] = []
    names: list[str] = []

    async def ask(name: str) -> None:
        async with room:
            with suppress(timeline.NotFound):  # dropped meanwhile
                outlooks.append(await tl.forecast(name, window_ms / 1000, step_ms / 1000))

    until_s = asyncio.get_running_loop().time() + duration_ms(timeout, "--timeout") / 1000
    all_names = [each.name for each in await tl.topics()]
    try:
        async with asyncio.timeout_at(until_s):
            names = await _to_forecast(tl, all_names)
            await asyncio.gather(*map(ask, names))
    except TimeoutError:
        asked = len(names) or len(all_names)
        raise Failed(
            UNREACHABLE,
            f"{Unavailable.code}: only {len(outlooks):,} of {asked:,} topics were counted within {timeout}. Name one "
            "topic, or wait longer with --timeout",
        ) from None
    return _sum(outlooks)


def _sum(outlooks: list[timeline.Outlook]) -> DueLoad:
    if not outlooks:
        return DueLoad([], [], 0, True)
    counts = np.sum([outlook.counts for outlook in outlooks], axis=0).tolist()
    overdue = sum(outlook.overdue for outlook in outlooks)
    return DueLoad(outlooks[0].edges_ms.tolist(), counts, overdue, all(outlook.exact for outlook in outlooks))


async def _to_forecast(tl: timeline.Timeline, names: list[str]) -> list[str]:
    """Return those of `names` that may have messages: all but those that every broker counted as empty. If all are
    empty, one is kept, for the steps. If a broker does not answer, all are kept."""
    told = await tl.standing()
    if told.unreachable:
        return names
    empty: set[str] = set()
    stocked: set[str] = set()
    for load in (load for one in told.brokers for load in one.topics):
        (stocked if load.next_due_ms or not load.counted_ms else empty).add(load.topic)
    return [name for name in names if name in stocked or name not in empty] or names[:1]


def picture(name: str, load: DueLoad, step_ms: int, width: int, zone: ZoneInfo | None) -> list[Text]:
    """Return the load drawn in columns, with its peaks in words."""
    about = "" if load.exact else "about "
    head = Text.assemble((name, "bold"), f": {about}{load.total:,} to come")
    if load.edges_ms:
        head.append(f" until {_clock(load.edges_ms[-1], zone, load)}")
    if load.overdue:
        head.append(f", {load.overdue:,} due already", "yellow")
    if not load.total:
        return [head]
    shown = widened(load.counts, width)
    per_step = step_ms * max(1, -(-len(load.counts) // width))
    top = max(shown)
    lines = [head, Text("")]
    # Half of a small odd number is not a count.
    half = f"{top / 2:,.0f}" if top % 2 == 0 or top >= 10 else ""
    for at, line in enumerate(bars(shown, HEIGHT)):
        label = f"{top:,.0f}" if at == 0 else half if at == HEIGHT // 2 else ""
        lines.append(
            Text.assemble((f"{label:>9} ", "grey58"), ("│", "grey58"), (line, "green" if at else "bold green"))
        )
    axis, times = _axis(load, len(shown), zone)
    lines.append(Text(f"{'0':>9} └{axis}", "grey58"))
    lines.append(Text(f"{'':11}{times}", "grey58"))
    of_zone = zone.key if zone is not None else f"UTC{as_datetime(load.edges_ms[0]).astimezone().isoformat()[-6:]}"
    said = f"a column is what comes due within {shown_duration(per_step)}; ┬ stands at the time below it, {of_zone}"
    lines.append(Text(f"{'':11}{said}", "grey58"))
    lines += [Text(""), *_peaks(load, step_ms, zone)]
    return lines


def _axis(load: DueLoad, width: int, zone: ZoneInfo | None) -> tuple[str, str]:
    """Return the line under the columns, with a mark at each round time, and the times, each starting at its mark."""
    first_ms, last_ms = load.edges_ms[0], load.edges_ms[-1]
    window_ms = max(1, last_ms - first_ms)
    offset = as_datetime(first_ms).astimezone(zone).utcoffset()
    offset_ms = int(offset.total_seconds() * 1000) if offset is not None else 0
    for every_ms in (*NICE_STEPS_MS, window_ms):
        form = _form(every_ms, window_ms)
        room = len(as_datetime(first_ms).strftime(form)) + LABEL_GAP
        if every_ms >= LEAST_MARK_MS and window_ms / every_ms <= max(1, width // room):
            break
    line, times = ["─"] * width, [" "] * (width + room)
    at_ms = -(-(first_ms + offset_ms) // every_ms) * every_ms - offset_ms
    while at_ms < last_ms:
        column = (at_ms - first_ms) * width // window_ms
        said = as_datetime(at_ms).astimezone(zone).strftime(form)
        line[column], times[column : column + len(said)] = "┬", said
        at_ms += every_ms
    return "".join(line), "".join(times).rstrip()


def _form(every_ms: int, window_ms: int) -> str:
    """Return the shortest clear format of times that are `every_ms` apart."""
    if every_ms < 60_000:
        return "%H:%M:%S"
    if every_ms < DAY_MS:
        return "%H:%M" if window_ms < DAY_MS else "%d %b %H:%M"
    return "%d %b" if window_ms < 300 * DAY_MS else "%Y-%m-%d"


def _clock(at_ms: int, zone: ZoneInfo | None, load: DueLoad) -> str:
    """Return a time, as short as the window allows."""
    when = as_datetime(at_ms).astimezone(zone)
    window_ms = load.edges_ms[-1] - load.edges_ms[0]
    if window_ms <= 600_000:
        return when.strftime("%H:%M:%S")
    return when.strftime(
        "%H:%M" if window_ms < 86_400_000 else "%d %b %H:%M" if window_ms < 864_000_000 else "%Y-%m-%d"
    )


def _peaks(load: DueLoad, step_ms: int, zone: ZoneInfo | None) -> list[Text]:
    """Return the fullest steps in words, the fullest first."""
    order = sorted(range(len(load.counts)), key=lambda at: (-load.counts[at], at))
    lines = []
    for at in [at for at in order if load.counts[at]][:PEAKS]:
        count = load.counts[at]
        when = as_datetime(load.edges_ms[at]).astimezone(zone).isoformat(sep=" ", timespec="seconds")
        rate = count * 1000 / step_ms
        said = "peak" if at == order[0] else "then"
        lines.append(Text(f"{said}  {count:>9,} in the {shown_duration(step_ms)} from {when}  ({rate:,.3g}/s)"))
    return lines


def _json(topic: str | None, load: DueLoad, step_ms: int) -> dict[str, Any]:
    steps = [
        {"start": iso_or_none(start_ms), "start_ms": start_ms, "end_ms": end_ms, "count": count}
        for start_ms, end_ms, count in zip(load.edges_ms, load.edges_ms[1:], load.counts, strict=False)
    ]
    return {"topic": topic, "step_ms": step_ms, **picked(load, "total", "overdue", "exact"), "steps": steps}
