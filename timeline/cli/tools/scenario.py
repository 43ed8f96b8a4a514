"""What the scenarios of `timeline bench` share: options, the run in a folder of its own, how a report is told."""

from __future__ import annotations

import asyncio
import math
import signal
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import click

from timeline.bench.figures import Report, machine
from timeline.bench.processes import CannotMeasure
from timeline.bench.suite import RUN, fresh
from timeline.cli.app import REFUSED, SOME_FAILED, Failed, say
from timeline.cli.options.values import Url
from timeline.cli.terminal.output import print_json, print_table
from timeline.cli.terminal.progress import Progress

MOST = 1_000_000_000
SOME, NONE_OR_SOME = click.IntRange(1, MOST), click.IntRange(0, MOST)


FOLDER = click.Path(exists=True, file_okay=False, writable=True, path_type=Path)


class Finite(click.FloatRange):
    """Numbers of a range; NaN, which no comparison keeps out, and infinity are none."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        number = float(super().convert(value, parameter, context))
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number.", parameter, context)
        return number


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
folder_option = click.option("--folder", type=FOLDER, help="Where files go.  [a temporary one]")


buckets_option = click.option(
    "--buckets", type=click.IntRange(1, 4096), default=64, show_default=True, help="Of the topic."
)
profile_option = click.option(
    "--profile", "profiled", is_flag=True, help="Sample broker and client with py-spy; slows them a little."
)


def store_option(default: str) -> Callable[..., Any]:
    """--store, where `sqlite://` without a file means a fresh one."""
    return click.option(
        "--store",
        default=default,
        show_default=True,
        type=Url(),
        metavar="URL",
        help="sqlite:// alone is a fresh file.",
    )


def measured(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds what every scenario takes."""
    return json_option(folder_option(function))


def conducted(as_json: bool, folder: Path | None, run: Callable[[Path], Coroutine[Any, Any, Report]]) -> int:
    """Runs one scenario in a folder of its own and tells its report."""
    on = machine()
    with tempfile.TemporaryDirectory(prefix="timeline-bench-", dir=folder) as made:
        try:
            report = asyncio.run(ended_in_order(run(Path(made))))
        except CannotMeasure as trouble:
            raise Failed(REFUSED, trouble.reason) from trouble
    if as_json:
        print_json({**report.as_json(), "machine": on})
    else:
        tell(report, on)
        say("", signature(on))
    return SOME_FAILED if any(one.wrong for one in (report, *report.beside)) else 0


async def ended_in_order(running: Coroutine[Any, Any, Report]) -> Report:
    """Awaits it; SIGTERM interrupts it as Ctrl-C does, so that processes are ended and the topic is dropped."""
    task = asyncio.ensure_future(running)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def plainly(kind: type, as_json: bool, folder: Path | None, store: str, settings: dict[str, Any]) -> int:
    """Runs one scenario with nothing beside it. `kind`: of its settings, a key of RUN."""

    async def run(place: Path) -> Report:
        asked = kind(store=fresh(store, place), **settings)
        with Progress("pending", getattr(asked, "pending", 0)) as progress:
            report: Report = await RUN[kind](asked, place, progress.add)
        return report

    return conducted(as_json, folder, run)


def tell(report: Report, on: dict[str, Any]) -> None:
    """A report as a table, its peers beside it. `on`: the machine it was measured on."""
    told = {target.figure: target for target in report.targets}
    rows = []
    for one in (report, *report.beside):
        for name, value in one.figures.items():
            target = told.get(name) if one is report else None
            verdict = "" if target is None else f"{target} {'held' if target.held(value) else 'MISSED'}"
            rows.append((one.scenario, name, f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.3g}", verdict))
    if report.store:
        say(*store_lines(report))
    print_table(("what", "figure", "value", "target"), rows, right=("value",), empty="nothing was measured")
    if any(row[3].endswith("MISSED") for row in rows) and (busy := busy_line(on)):
        say(busy)
    for one in (report, *report.beside):
        for note in one.notes:
            say(f"{one.scenario}: {note}")
        for wrong in one.wrong:
            say(f"{one.scenario}: WRONG: {wrong}")


def store_lines(report: Report) -> list[str]:
    """What the figures were taken on: the store in words, what it declares, and what weakens that."""
    told = report.store
    kept = f"what it answered {'survives' if told['durable'] else 'need not survive'} a kill -9"
    line = f"store: {told['server']}; {kept}{' and the loss of a server' if told['survives_failover'] else ''}"
    return [line, *(f"store: {warning}" for warning in told["warnings"])]


def busy_line(on: dict[str, Any]) -> str:
    """What a missed target may come from, where others were at work when the measurement began; else empty."""
    if on["load_1min"] < on["cores"] / 2:
        return ""
    return f"MISSED on a machine that was busy: load {on['load_1min']} on {on['cores']} cores before; repeat it at rest"


def signature(on: dict[str, Any]) -> str:
    """What the figures were taken on, in a line."""
    return f"{on['cpu']}, {on['cores']} cores, load {on['load_1min']} at the start, Python {on['python']}"
