"""`timeline demo`: a real day of New York's departures goes out on time."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

import click

from timeline.cli.app import INTERRUPTED, REFUSED, SOME_FAILED, Failed, say
from timeline.cli.options.values import Url
from timeline.cli.terminal.output import Screen, print_json
from timeline.demo.board import watcher
from timeline.demo.conductor import DemoOptions, conduct
from timeline.demo.flights import DEFAULT_DAY, parse_day
from timeline.demo.plan import DEFAULT_SPEED
from timeline.demo.processes import CannotPlay
from timeline.demo.summary import tell
from timeline.storage_plugins import make_store


@click.command()
@click.option("--speed", type=float, default=DEFAULT_SPEED, show_default=True, help="Times as fast as real time.")
@click.option("--day", default=str(DEFAULT_DAY), show_default=True, metavar="YYYY-MM-DD", help="New York's day.")
@click.option("--data", metavar="FILE", help="The year's parquet, for days that are not in the sample.")
@click.option(
    "--store",
    default="",
    type=Url(),
    metavar="URL",
    help="Where the broker keeps messages.  [an SQLite file of its own]",
)
@click.option("--cluster", is_flag=True, help="Two brokers over three members of etcd; one is killed half-way.")
@click.option("--json", "as_json", is_flag=True, help="The last line on standard output is one JSON object.")
@click.option("--keep", is_flag=True, help="Leave histories, logs and store behind, and say where.")
@click.option("--no-board", is_flag=True, help="Plain lines instead of the live board.")
def demo(
    speed: float, day: str, data: str | None, store: str, cluster: bool, as_json: bool, keep: bool, no_board: bool
) -> int:
    """Watch a real day of New York's departures go out on time.

    A broker, airlines' feeders and gates, each a process of its own: departures are put ahead of their scheduled time,
    delays move them, cancellations cancel them, gates board them when they come due. Now and then a gate crashes and
    its leases come back. What the end says comes from the processes' histories and a last scan, checked against the
    data. Exit code 1 when anything is off.

    \b
    Example:
      timeline demo                                  two minutes and a half, a snowstorm
      timeline demo --speed 6000 --json              about 20 seconds, for machines
      timeline demo --day 2013-06-13 --data flights_2013.parquet
      timeline demo --cluster                        two brokers, one of which is killed
    """
    if store:
        make_store(store)  # judged here, before anything begins: as a setting, not as a broker that ended
    options = DemoOptions(day=parse_day(day), speed=speed, data=data, store=store, keep=keep, cluster=cluster)
    console = Screen()
    write = partial(say, err=as_json)
    try:
        with watcher(not (no_board or as_json), console, write) as viewer:
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
        tell(played, console)
    return 0 if played.summary.well else SOME_FAILED
