"""`timeline demo`: a real day of New York's departures, on time."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

import click

from timeline.cli.app import INTERRUPTED, REFUSED, SOME_FAILED, Failed, say
from timeline.cli.options import Url, json_option
from timeline.cli.output import Screen, print_json
from timeline.demo.board import watcher
from timeline.demo.conductor import DemoOptions, conduct
from timeline.demo.flights import DEFAULT_DAY, parse_day
from timeline.demo.plan import DEFAULT_SPEED
from timeline.demo.processes import CannotPlay
from timeline.demo.summary import tell
from timeline.storage_plugins import make_store


@click.command()
@click.option("--speed", type=float, default=DEFAULT_SPEED, help="How many times as fast as real time.")
@click.option("--day", default=str(DEFAULT_DAY), metavar="YYYY-MM-DD", help="Day to play.")
@click.option("--data", metavar="FILE", help="Parquet file of the year, for days outside the sample.")
@click.option(
    "--store",
    default="",
    show_default=False,
    type=Url(),
    metavar="URL",
    help="Store of the broker. Default: a new SQLite file.",
)
@click.option("--cluster", is_flag=True, help="Run two brokers and three members of etcd, and kill one broker.")
@click.option("--console", is_flag=True, help="Leave the console open in the end, until Ctrl-C.")
@json_option
@click.option("--keep", is_flag=True, help="Keep histories, logs and store, and print where they are.")
@click.option("--no-board", is_flag=True, help="Print plain lines in place of the live board.")
def demo(
    speed: float, day: str, data: str | None, store: str, cluster: bool, console: bool, as_json: bool, keep: bool,
    no_board: bool,
) -> int:  # fmt: skip
    """Watch a real day of New York's departures go out on time.

    A broker, the airlines' feeders and the gates are processes. Feeders put departures ahead of time, move delayed ones
    and cancel cancelled ones. Gates board them when they come due. One gate is a webhook receiver, behind a gateway.
    Sometimes a gate crashes, and its leases come back. A recurring schedule has the runway inspected each hour.

    The report compares the processes' histories and a last scan with the data. Exit code 1 when anything is wrong.

    \b
    Example:
      timeline demo                       # three minutes, a snowstorm
      timeline demo --speed 6000 --json   # about 20 seconds, for machines
      timeline demo --day 2013-06-13 --data flights_2013.parquet
      timeline demo --cluster             # two brokers, one of which is killed
      timeline demo --console             # watch it in a browser, too
    """
    if store:
        make_store(store)  # a bad URL is a usage error, before anything starts
    options = DemoOptions(parse_day(day), speed, data, store, keep, cluster, console)
    screen = Screen()
    write = partial(say, err=as_json)
    try:
        with watcher(not (no_board or as_json), screen, write) as viewer:
            played = asyncio.run(conduct(options, viewer))
    except asyncio.CancelledError:
        return INTERRUPTED
    except CannotPlay as trouble:
        raise Failed(REFUSED, f"the demo cannot go on: {trouble.reason}") from trouble
    if as_json:
        tell(played, Screen(sys.stderr))
        folder = {} if played.folder is None else {"folder": str(played.folder)}
        day_played = {"day": str(played.plan.day), "speed": played.plan.clock.speed}
        killed = {"broker_killed": played.killed} if played.killed else {}
        print_json({**played.summary.as_json(), **day_played, **killed, **folder})
    else:
        tell(played, screen)
    return 0 if played.summary.well else SOME_FAILED
