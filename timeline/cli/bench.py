"""`timeline bench`: how fast this machine's Timeline is, and how late. Each scenario is a command. Its settings are the
options, and its docstring is the help."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click

from timeline.bench.figures import BenchReport, machine
from timeline.bench.peers.databases import PEERS
from timeline.bench.plots import (
    BESIDE,
    WAITING,
    cost_by_number,
    draw,
    drawing_tools,
    lateness_by_pending,
    rate_by_batch,
)
from timeline.bench.processes import CannotMeasure
from timeline.bench.scenario import MOST, Scenario
from timeline.bench.scenarios.cluster import ClusterScenario, FailoverScenario
from timeline.bench.scenarios.console import ConsoleScenario
from timeline.bench.scenarios.holding import MemoryScenario, PayloadScenario, RestartScenario
from timeline.bench.scenarios.http import HttpScenario, WebhookScenario
from timeline.bench.scenarios.lateness import PENDING, BurstScenario, CancelTagScenario, LatenessScenario, ScaleScenario
from timeline.bench.scenarios.schedules import SchedulesScenario
from timeline.bench.scenarios.throughput import CycleScenario, LoopScenario, ProduceScenario
from timeline.bench.suite import FULL, OWN_SERVERS, QUICK, SuiteEntry, compare_pending, measure, run_entry
from timeline.cli.app import REFUSED, SOME_FAILED, Failed, Suggesting, say
from timeline.cli.options import DURATION, Url
from timeline.cli.output import Progress, print_json, print_table
from timeline.demo.processes import ETCD, REDIS, CannotPlay, DemoProcesses, missing, start_etcd, start_redis

FOLDER = click.Path(exists=True, file_okay=False, writable=True, path_type=Path)
BROKERS = click.IntRange(1, 64)
TOGETHER = (ClusterScenario, FailoverScenario)
"""Scenarios with several brokers. They get a store and an etcd of their own where none are given."""


class Finite(click.FloatRange):
    """A range of finite numbers. No comparison would refuse NaN."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        number = float(super().convert(value, parameter, context))
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number.", parameter, context)
        return number


json_option = click.Option(["--json", "as_json"], is_flag=True, help="Print JSON for machines.")
folder_option = click.Option(["--folder"], type=FOLDER, help="Folder for files. Default: a temporary one.")
profile_option = click.Option(
    ["--profile", "profiled"], is_flag=True, help="Sample broker and client with py-spy, which slows them a little."
)
BESIDE_IT = {
    CycleScenario: (
        click.Option(["--bare"], is_flag=True, help="Measure the store's own statements, too, without broker or wire."),
        click.Option(
            ["--peer"],
            type=click.Choice(sorted([*OWN_SERVERS, *PEERS])),
            metavar="PEER",
            help=f"Measure the same work by this peer, too: {', '.join(sorted([*OWN_SERVERS, *PEERS]))}.",
        ),
        click.Option(["--journal"], is_flag=True, help="Measure the journal, too: five pairs with and without it."),
        profile_option,
    ),
    LatenessScenario: (
        click.Option(["--bare"], is_flag=True, help="Measure gRPC alone, too: only frames, pushed at each due time."),
        profile_option,
    ),
}
"""The peers of a scenario."""


def command_of(kind: type[Scenario]) -> click.Command:
    """Return the command that runs a scenario."""
    beside = BESIDE_IT.get(kind, ())

    def run(as_json: bool, folder: Path | None, **given: Any) -> int:
        more = {option.name: given.pop(option.name) for option in beside if option.name}
        asked = kind(**given)
        asked.check()

        async def work(place: Path) -> BenchReport:
            async with _with_servers(asked, place) as ready:
                with Progress("pending", getattr(asked, "pending", 0)) as progress:
                    return await measure(ready, place, progress.add, **more)

        return conducted(as_json, folder, work)

    if kind in TOGETHER:
        store = [
            click.Option(
                ["--store"],
                default="",
                show_default=False,
                type=Url(),
                help="Store that brokers share. Default: a new Redis.",
            ),
            click.Option(
                ["--sync"], default="", show_default=False, type=Url(), help="Membership backend. Default: a new etcd."
            ),
        ]
    else:
        about = "Store of the broker. sqlite:// alone is a fresh file."
        default = kind().store
        store = [click.Option(["--store"], default=default, type=Url(), metavar="URL", help=about)]
    options = [_option_of(field) for field in dataclasses.fields(kind) if field.metadata]
    parameters: list[click.Parameter] = [*store, *options, *beside, json_option, folder_option]
    return click.Command(kind.name, callback=run, params=parameters, help=kind.__doc__)


def _option_of(field: dataclasses.Field[Any]) -> click.Option:
    """Return the option that a setting of a scenario is."""
    flag = f"--{field.name.replace('_', '-')}"
    of = field.metadata
    more: dict[str, Any] = {"default": field.default, "help": of["help"] or None}
    if isinstance(field.default, bool):
        return click.Option([flag], is_flag=True, **more)
    if of["takes"]:
        return click.Option([flag], type=DURATION, metavar=of["takes"], **more)
    if of["choices"]:
        return click.Option([flag], type=click.Choice(of["choices"]), **more)
    kind = Finite(of["least"]) if isinstance(field.default, float) else click.IntRange(of["least"], of["most"])
    return click.Option([flag], type=kind, **more)


@asynccontextmanager
async def _with_servers(asked: Scenario, place: Path) -> AsyncIterator[Scenario]:
    """Yield the scenario, with a new store and etcd where several brokers need them and none are given."""
    if not isinstance(asked, TOGETHER):
        yield asked
        return
    meet = not (isinstance(asked, ClusterScenario) and (asked.brokers == 1 or asked.workers))
    processes = DemoProcesses(place)
    try:
        if absent := missing(*([ETCD] * (meet and not asked.sync) + [REDIS] * (not asked.store))):
            raise CannotMeasure(absent)
        try:
            sync = asked.sync or (await start_etcd(processes) if meet else "")
            store = asked.store or await start_redis(processes)
        except CannotPlay as trouble:
            raise CannotMeasure(trouble.reason) from trouble
        yield dataclasses.replace(asked, store=store, sync=sync)
    finally:
        await processes.kill()


class _Bench(Suggesting):
    """The suite, and a command for each scenario."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for kind in (
            BurstScenario, CancelTagScenario, ClusterScenario, ConsoleScenario, CycleScenario, FailoverScenario,
            HttpScenario, LatenessScenario, LoopScenario, MemoryScenario, PayloadScenario, ProduceScenario,
            RestartScenario, ScaleScenario, SchedulesScenario, WebhookScenario,
        ):  # fmt: skip
            self.add_command(command_of(kind))


@click.group(cls=_Bench, invoke_without_command=True)
@click.option("--quick", is_flag=True, help="All scenarios, but small: some minutes, not most of an hour.")
@click.option("--brokers", type=BROKERS, help="Run `bench cluster` with this many brokers, and nothing else.")
@click.pass_context
def bench(context: click.Context, as_json: bool, folder: Path | None, quick: bool, brokers: int | None) -> int | None:
    """Measure speed and lateness on this machine. Brokers, clients and peers are processes of their own.

    Without a command: all scenarios that the targets name, with beanstalkd beside the cycle. Exit code 1 when something
    was wrong (a message lost, doubled, early). A missed target is shown, and is no error.

    \b
    Example:
      timeline bench --quick
      timeline bench cycle --store sqlite:// --pending 1000000 --json
      timeline bench --brokers 2
    """
    if context.invoked_subcommand is not None:
        if as_json or folder is not None or quick or brokers is not None:
            raise click.UsageError("options go behind the scenario: timeline bench cycle --json")
        return None
    if brokers is not None:
        if quick:
            raise click.UsageError("--quick is of all scenarios: for little of this one, timeline bench cluster --help")
        cluster = bench.commands["cluster"]
        told: int = context.invoke(cluster, as_json=as_json, folder=folder, brokers=brokers)
        return told
    return run_suite(QUICK if quick else FULL, as_json, folder)


bench.params += [folder_option, json_option]


def run_suite(suite: Sequence[SuiteEntry], as_json: bool, folder: Path | None) -> int:
    """Run a suite, one scenario after the other. Each is printed as it ends."""
    on, reports = machine(), []
    for entry in suite:
        say(f"{entry.title} …", err=True)
        with Progress("pending", getattr(entry.asked, "pending", 0)) as progress:
            reports.append(_measured(folder, partial(run_entry, entry, told=progress.add), f"{entry.title}: "))
        compare_pending(reports)
        if not as_json:
            tell(reports[-1], on)
    if as_json:
        print_json({"scenarios": [report.as_json() for report in reports], "machine": on})
    else:
        say("", signature(on))
    return _code(*reports)


def conducted(as_json: bool, folder: Path | None, run: Callable[[Path], Coroutine[Any, Any, BenchReport]]) -> int:
    """Run one scenario in a folder of its own and print its report."""
    on = machine()
    report = _measured(folder, run)
    if as_json:
        print_json({**report.as_json(), "machine": on})
    else:
        tell(report, on)
        say("", signature(on))
    return _code(report)


def _measured(
    folder: Path | None, run: Callable[[Path], Coroutine[Any, Any, BenchReport]], about: str = ""
) -> BenchReport:
    with tempfile.TemporaryDirectory(prefix="timeline-bench-", dir=folder) as made:
        try:
            return asyncio.run(ended_in_order(run(Path(made))))
        except CannotMeasure as trouble:
            raise Failed(REFUSED, f"{about}{trouble.reason}") from trouble


def _code(*reports: BenchReport) -> int:
    return SOME_FAILED if any(one.wrong for report in reports for one in (report, *report.beside)) else 0


async def ended_in_order(running: Coroutine[Any, Any, BenchReport]) -> BenchReport:
    """Await it. SIGTERM interrupts it as Ctrl-C does, so that processes are ended and the topic is dropped."""
    task = asyncio.ensure_future(running)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def tell(report: BenchReport, on: dict[str, Any]) -> None:
    """Print a report as a table, with its peers. `on`: the machine that it was measured on."""
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


def store_lines(report: BenchReport) -> list[str]:
    """Return the store in words, with its promises, and what weakens them."""
    told = report.store
    kept = f"what it answered {'survives' if told['durable'] else 'need not survive'} a kill -9"
    line = f"store: {told['server']}; {kept}{' and the loss of a server' if told['survives_failover'] else ''}"
    return [line, *(f"store: {warning}" for warning in told["warnings"])]


def busy_line(on: dict[str, Any]) -> str:
    """Return a hint for missed targets when the machine was busy at the start. Else empty."""
    if on["load_1min"] < on["cores"] / 2:
        return ""
    return f"MISSED on a machine that was busy: load {on['load_1min']} on {on['cores']} cores before; repeat it at rest"


def signature(on: dict[str, Any]) -> str:
    """Return the machine in a line."""
    return f"{on['cpu']}, {on['cores']} cores, load {on['load_1min']} at the start, Python {on['python']}"


@bench.command()
@click.option("--into", type=FOLDER, default=".", help="Folder for the SVGs.")
@click.option("--seconds", type=Finite(0.1), default=30.0, help="Length of each lateness run.")
@click.option("--messages", type=click.IntRange(1, MOST), default=500_000, help="Messages per cycle.")
@click.option("--most", type=click.IntRange(0, MOST), default=10_000_000, help="Most messages pending.")
def plot(into: Path, seconds: float, messages: int, most: int) -> int:
    """Draw lateness and cost by number of messages, and the cycle's rate by batch size.

    \b
    Example:
      timeline bench plot --into design-docs --most 1000000
    """
    pending = tuple(count for count in WAITING if count <= most)
    beside = {**BESIDE, PENDING: pending[1:]}
    with tempfile.TemporaryDirectory(prefix="timeline-bench-") as made, Progress("messages put") as progress:
        place = Path(made)
        try:
            drawing_tools()
            for name, measure in {
                "rate-by-batch": partial(rate_by_batch, place, messages),
                "lateness-by-pending": partial(lateness_by_pending, place, seconds, pending, progress.add),
                "cost-by-number": partial(cost_by_number, place, seconds, beside, progress.add),
            }.items():
                draw(asyncio.run(measure()), into / f"{name}.svg")
        except CannotMeasure as trouble:
            raise Failed(REFUSED, trouble.reason) from trouble
    say(f"cost-by-number.svg, lateness-by-pending.svg and rate-by-batch.svg are in {into}")
    return 0
