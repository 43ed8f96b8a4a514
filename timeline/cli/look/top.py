"""`timeline top`: running brokers, watched live in a terminal."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from zoneinfo import ZoneInfo

import click
from rich.console import Console
from rich.live import Live

from timeline.cli.app import awaited
from timeline.cli.look.snapshot import Glance, Watcher
from timeline.cli.look.top_view import picture, seconds_ahead
from timeline.cli.options.client_options import check_topic, client_command, topic_names
from timeline.cli.options.identity import connected
from timeline.cli.options.values import DURATION, zone_of
from timeline.cli.terminal.output import console, print_json
from timeline.driver.times import duration_ms
from timeline.errors import TimelineError

WIDTH_UNSEEN = 120
ENDING_KEYS = (b"q", b"Q", b"\x1b")


@click.command()
@click.argument("topic", required=False, shell_complete=topic_names)
@click.option("--every", default="1s", show_default=True, type=DURATION, help="How often to look.")
@click.option("--once", is_flag=True, help="Print one picture and end.")
@click.option("--tz", metavar="ZONE", help="Show times in this zone.  [this machine's]")
@client_command
def top(topic: str | None, every: str, once: bool, tz: str | None, address: str, timeout: str, as_json: bool) -> int:
    """Watch brokers live: topics, what comes due in each second ahead, consumers and their credit, how late deliveries
    were, and the late ones with their causes.

    Percentiles are of the last minute (at the first look: since the broker started), as bounds that were kept. Where
    standard output is no terminal, and with --once or --json, it looks twice, --every apart, for the rates, tells once,
    with percentiles since the broker started, and ends.

    \b
    Example:
      timeline top
      timeline top departures --once
      timeline top --json --every 5s
    """
    zone = zone_of(tz)
    every_s = duration_ms(every, "--every", least_ms=1) / 1000

    async def work() -> None:
        async with connected(address, timeout) as tl:
            if topic is not None:
                await check_topic(tl, topic)
            screen = console()
            if not (once or as_json) and screen.is_terminal:
                await _live(Watcher(tl, topic or ""), screen, every_s, zone)
                return
            watcher = Watcher(tl, topic or "", ever=True)
            width = screen.width if screen.is_terminal else WIDTH_UNSEEN
            await watcher.look(seconds_ahead(width))
            await asyncio.sleep(every_s)
            glance = await watcher.look(seconds_ahead(width))
        if as_json:
            print_json(glance.as_json())
        else:
            screen.print(picture(glance, width, None, zone))

    return awaited(work())


async def _live(watcher: Watcher, screen: Console, every_s: float, zone: ZoneInfo | None) -> None:
    """Draws one picture after the other until somebody presses q. A broker that goes away is waited for."""
    glance: Glance | None = None
    trouble = ""
    ended = asyncio.Event()
    # The first look comes before the screen is cleared: what goes wrong with it is said in the ordinary way.
    glance = await watcher.look(seconds_ahead(screen.width))
    with keys(ended), Live(console=screen, screen=True, auto_refresh=False) as live:
        while True:
            live.update(picture(glance, screen.width, screen.height, zone, trouble), refresh=True)
            try:
                await asyncio.wait_for(ended.wait(), every_s)
                return
            except TimeoutError:
                try:
                    glance, trouble = await watcher.look(seconds_ahead(screen.width)), ""
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
