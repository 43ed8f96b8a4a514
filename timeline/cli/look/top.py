"""`timeline top`: running brokers, watched live in a terminal."""

from __future__ import annotations

import asyncio
from zoneinfo import ZoneInfo

import click

import timeline
from timeline.cli.look.snapshot import Watcher
from timeline.cli.look.top_view import picture, seconds_ahead, watch_live
from timeline.cli.options.client_options import ClientOptions, check_topic, client_command, topic_names
from timeline.cli.options.values import every_option, shown_zone_option
from timeline.cli.terminal.output import console, print_json

WIDTH_UNSEEN = 120


@click.command()
@click.argument("topic", required=False, shell_complete=topic_names)
@every_option("How often to look.")
@click.option("--once", is_flag=True, help="Print one picture and end.")
@shown_zone_option
@client_command
async def top(
    tl: timeline.Timeline, options: ClientOptions, topic: str | None, every: int, once: bool, zone: ZoneInfo | None
) -> None:
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
    await watcher.look(seconds_ahead(width))
    await asyncio.sleep(every / 1000)
    snapshot = await watcher.look(seconds_ahead(width))
    if options.as_json:
        print_json(snapshot.as_json())
    else:
        screen.print(picture(snapshot, width, None, zone))
