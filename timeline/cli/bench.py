"""`timeline bench`: how fast this machine's Timeline is, and how late."""

from __future__ import annotations

import asyncio
import math
import signal
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from timeline.bench.bare import run_bare
from timeline.bench.beanstalkd import KINDS, run_beanstalkd
from timeline.bench.burst import Burst
from timeline.bench.cancel_tag import CancelTag
from timeline.bench.cluster import Cluster
from timeline.bench.cycle import APIS, Cycle, run_cycle
from timeline.bench.figures import Report, machine
from timeline.bench.lateness import Lateness, run_lateness
from timeline.bench.memory import Memory
from timeline.bench.payload import Payload
from timeline.bench.peers import PEERS, run_peer
from timeline.bench.plots import PENDING, draw, drawing_tools, lateness_by_pending, rate_by_batch
from timeline.bench.processes import CannotMeasure
from timeline.bench.produce import Produce
from timeline.bench.profile import Profile
from timeline.bench.restart import Restart
from timeline.bench.suite import FULL, QUICK, RUN, Entry, compare, compare_pending, fresh, run_entry
from timeline.cli.app import REFUSED, SOME_FAILED, Failed, Suggesting
from timeline.cli.output import print_json, print_table
from timeline.cli.progress import Progress

MOST = 1_000_000_000
SOME, NONE_OR_SOME = click.IntRange(1, MOST), click.IntRange(0, MOST)


class Finite(click.FloatRange):
    """Numbers of a range; NaN, which no comparison keeps out, and infinity are none."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        number = float(super().convert(value, parameter, context))
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number.", parameter, context)
        return number


FOLDER = click.Path(exists=True, file_okay=False, writable=True, path_type=Path)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
folder_option = click.option("--folder", type=FOLDER, help="Where files go.  [a temporary one]")


@click.group(cls=Suggesting, invoke_without_command=True)
@click.option("--quick", is_flag=True, help="All scenarios, but small: some minutes instead of most of an hour.")
@folder_option
@json_option
@click.pass_context
def bench(context: click.Context, as_json: bool, folder: Path | None, quick: bool) -> int | None:
    """Measure speed and lateness on this machine; brokers, clients and peers in processes of their own.

    Without a command: all scenarios that the targets name, with beanstalkd beside the cycle. Exit code 1 when something
    was wrong (a message lost, doubled, early); a missed target is shown, not an error.

    \b
    Example:
      timeline bench --quick
      timeline bench cycle --store sqlite:// --pending 1000000 --json
    """
    if context.invoked_subcommand is not None:
        if as_json or folder is not None or quick:
            raise click.UsageError("options go behind the scenario: timeline bench cycle --json")
        return None
    return run_suite(QUICK if quick else FULL, as_json, folder)


def run_suite(suite: Sequence[Entry], as_json: bool, folder: Path | None) -> int:
    """All of a suite, one after the other; each is told as it ends."""
    on, reports = machine(), []
    for entry in suite:
        with tempfile.TemporaryDirectory(prefix="timeline-bench-", dir=folder) as made:
            click.echo(f"{entry.title} …", err=True)
            with Progress("pending", getattr(entry.asked, "pending", 0)) as progress:
                try:
                    report = asyncio.run(ended_in_order(run_entry(entry, Path(made), progress.add)))
                except CannotMeasure as trouble:
                    raise Failed(REFUSED, f"{entry.title}: {trouble.reason}") from trouble
        reports.append(report)
        compare_pending(reports)
        if not as_json:
            tell(report)
    if as_json:
        print_json({"scenarios": [report.as_json() for report in reports], "machine": on})
    else:
        click.echo(signature(on))
    return SOME_FAILED if any(one.wrong for report in reports for one in (report, *report.beside)) else 0


def store_line(report: Report) -> str:
    """What the figures were taken on: the store in words, what it declares, and what weakens that."""
    told = report.store
    kept = f"what it answered {'survives' if told['durable'] else 'need not survive'} a kill -9"
    line = f"store: {told['server']}; {kept}{' and the loss of a server' if told['survives_failover'] else ''}"
    return "\n".join([line, *(f"store: {warning}" for warning in told["warnings"])])


def signature(on: dict[str, Any]) -> str:
    """What the figures were taken on, in a line."""
    return f"\n{on['cpu']}, {on['cores']} cores, load {on['load_1min']} at the start, Python {on['python']}"


profile_option = click.option(
    "--profile", "profiled", is_flag=True, help="Sample broker and client with py-spy; slows them a little."
)


def store_option(default: str) -> Callable[..., Any]:
    """--store, where `sqlite://` without a file means a fresh one."""
    return click.option(
        "--store", default=default, show_default=True, metavar="URL", help="sqlite:// alone is a fresh file."
    )


def measured(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds what every scenario takes."""
    return json_option(folder_option(function))


def conducted(
    as_json: bool, folder: Path | None, run: Callable[[Path], Coroutine[Any, Any, Report]], profile: bool = False
) -> int:
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
        tell(report)
        click.echo(signature(on))
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


def tell(report: Report) -> None:
    """A report as a table, its peers beside it."""
    told = {target.figure: target for target in report.targets}
    rows = []
    for one in (report, *report.beside):
        for name, value in one.figures.items():
            target = told.get(name) if one is report else None
            verdict = "" if target is None else f"{target} {'held' if target.held(value) else 'MISSED'}"
            rows.append((one.scenario, name, f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.3g}", verdict))
    if report.store:
        click.echo(store_line(report))
    print_table(("what", "figure", "value", "target"), rows, right=("value",), empty="nothing was measured")
    for one in (report, *report.beside):
        for note in one.notes:
            click.echo(f"{one.scenario}: {note}")
        for wrong in one.wrong:
            click.echo(f"{one.scenario}: WRONG: {wrong}")


@bench.command()
@store_option("memory://")
@click.option("--api", type=click.Choice(APIS), default="batch", show_default=True, help="How the client works.")
@click.option("--messages", type=SOME, default=500_000, show_default=True)
@click.option("--batch", type=click.IntRange(1, 100_000), default=2_000, show_default=True, help="Messages a put.")
@click.option("--pending", type=NONE_OR_SOME, default=0, show_default=True, help="Others that wait meanwhile.")
@click.option("--payload-bytes", type=click.IntRange(16, MOST), default=100, show_default=True)
@click.option("--buckets", type=click.IntRange(1, 4096), default=64, show_default=True, help="Of the topic.")
@click.option("--bare", is_flag=True, help="Beside it, the store's own statements without broker or wire.")
@click.option("--peer", type=click.Choice(["beanstalkd", *PEERS]), help="Beside it, the same work by this one.")
@click.option("--journal", is_flag=True, help="Beside it, what the event journal costs: five pairs, with and without.")
@profile_option
@measured
def cycle(
    as_json: bool, folder: Path | None, bare: bool, peer: str | None, journal: bool, profiled: bool, store: str,
    **settings: Any,
) -> int:  # fmt: skip
    """Put → due → leased → pushed → acked, every id and payload checked.

    \b
    Example:
      timeline bench cycle --messages 1000000
    """

    async def run(place: Path) -> Report:
        asked = Cycle(store=fresh(store, place), **settings)
        profile = Profile(place) if profiled else None
        with Progress("pending", asked.pending) as progress:
            report = await run_cycle(asked, place, progress.add, profile)
            if bare:
                beside = replace(asked, store=fresh(store, place, "bare"))
                report.beside.append(await run_bare(beside, progress.add))
        if journal:
            from timeline.bench.journal import run_journalled

            report.beside.append(await run_journalled(replace(asked, store=fresh(store, place, "journalled")), place))
        if peer in PEERS:
            report.beside.append(await run_peer(asked, peer, place))
        elif peer is not None:
            report.beside += [await run_beanstalkd(asked, kind, place) for kind in KINDS]
        compare(report)
        if profile is not None:
            report.notes += profile.lines()
        return report

    return conducted(as_json, folder, run)


@bench.command()
@store_option("memory://")
@click.option("--messages", type=SOME, default=100_000, show_default=True)
@click.option("--tasks", type=SOME, default=100, show_default=True, help="Tasks that put at once.")
@measured
def produce(as_json: bool, folder: Path | None, store: str, **settings: Any) -> int:
    """Single `await p.produce()` from many tasks.

    \b
    Example:
      timeline bench produce --store sqlite://
    """
    return plainly(Produce, as_json, folder, store, settings)


@bench.command()
@store_option("sqlite://")
@click.option("--rate", type=Finite(1), default=1_000.0, show_default=True, help="Messages a second.")
@click.option("--seconds", type=Finite(0.01), default=60.0, show_default=True, help="Of each run.")
@click.option("--runs", type=SOME, default=3, show_default=True, help="The worst one counts.")
@click.option("--pending", type=NONE_OR_SOME, default=0, show_default=True, help="Others that wait meanwhile.")
@click.option("--in-zero", is_flag=True, help="Put with in_=0, instead of two seconds ahead.")
@click.option("--lease-ahead", type=click.Choice(["auto", "off"]), default="auto", show_default=True)
@profile_option
@measured
def lateness(as_json: bool, folder: Path | None, profiled: bool, store: str, **settings: Any) -> int:
    """From due until handed to the consumer's code, at a steady rate.

    \b
    Example:
      timeline bench lateness --pending 1000000 --seconds 60 --runs 3
    """

    async def run(place: Path) -> Report:
        asked = Lateness(store=fresh(store, place), **settings)
        with Progress("pending", asked.pending) as progress:
            profile = Profile(place) if profiled else None
            report = await run_lateness(asked, place, progress.add, profile)
        if profile is not None:
            report.notes += profile.lines()
        return report

    return conducted(as_json, folder, run)


@bench.command()
@store_option("memory://")
@click.option("--messages", type=SOME, default=100_000, show_default=True)
@click.option("--credit", type=click.IntRange(1, 1_000_000), default=20_000, show_default=True)
@measured
def burst(as_json: bool, folder: Path | None, store: str, **settings: Any) -> int:
    """Many messages due in one millisecond.

    \b
    Example:
      timeline bench burst --store sqlite:// --messages 100000
    """
    return plainly(Burst, as_json, folder, store, settings)


@bench.command()
@store_option("sqlite://")
@click.option("--large-bytes", type=SOME, default=10 * 1024 * 1024, show_default=True)
@click.option("--small-bytes", type=SOME, default=100, show_default=True)
@click.option("--messages", type=SOME, default=20, show_default=True, help="Of each size.")
@measured
def payload(as_json: bool, folder: Path | None, store: str, **settings: Any) -> int:
    """Moves, extends, acks and cancels of large messages against small ones.

    \b
    Example:
      timeline bench payload --large-bytes 10485760
    """
    return plainly(Payload, as_json, folder, store, settings)


@bench.command()
@store_option("sqlite://")
@click.option("--pending", type=SOME, default=1_000_000, show_default=True, help="Tagged ones included.")
@click.option("--tagged", type=SOME, default=100_000, show_default=True)
@click.option("--seconds", type=Finite(0.1), default=5.0, show_default=True, help="Lateness of others.")
@measured
def cancel_tag(as_json: bool, folder: Path | None, store: str, **settings: Any) -> int:
    """Cancel by tag, and how late others are meanwhile.

    \b
    Example:
      timeline bench cancel-tag --pending 10000000 --tagged 1000000
    """
    if settings["tagged"] > settings["pending"]:
        raise click.UsageError("--tagged is at most --pending: tagged messages are some of those that are pending")
    return plainly(CancelTag, as_json, folder, store, settings)


@bench.command()
@store_option("sqlite://")
@click.option("--pending", type=NONE_OR_SOME, default=1_000_000, show_default=True)
@click.option("--restarts", type=SOME, default=3, show_default=True, help="The slowest one counts.")
@measured
def restart(as_json: bool, folder: Path | None, store: str, **settings: Any) -> int:
    """From the broker's start until its first delivery.

    \b
    Example:
      timeline bench restart --pending 10000000
    """
    return plainly(Restart, as_json, folder, store, settings)


@bench.command()
@store_option("memory://")
@click.option("--pending", type=SOME, default=1_000_000, show_default=True)
@measured
def memory(as_json: bool, folder: Path | None, store: str, **settings: Any) -> int:
    """What a pending message costs a broker in memory.

    \b
    Example:
      timeline bench memory --pending 10000000
    """
    return plainly(Memory, as_json, folder, store, settings)


@bench.command()
@click.option("--store", required=True, metavar="URL", help="One that brokers share.")
@click.option("--sync", default="", metavar="URL", help="The etcd by which several brokers find each other.")
@click.option("--brokers", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option("--messages", type=SOME, default=200_000, show_default=True, help="In the cycle.")
@click.option("--burst", type=SOME, default=100_000, show_default=True, help="Due in one millisecond.")
@click.option("--rate", type=Finite(1), default=1_000.0, show_default=True, help="Messages a second, for lateness.")
@click.option("--seconds", type=Finite(0.01), default=20.0, show_default=True, help="Of that.")
@click.option("--rest-seconds", type=Finite(0), default=60.0, show_default=True, help="To watch etcd for, at rest.")
@measured
def cluster(as_json: bool, folder: Path | None, store: str, **settings: Any) -> int:
    """Cycle, hot instant and lateness of several brokers on one store, and what etcd takes at rest.

    \b
    Example:
      timeline bench cluster --brokers 2 --store redis://127.0.0.1/0 --sync etcd://127.0.0.1/bench
    """
    return plainly(Cluster, as_json, folder, store, settings)


@bench.command()
@click.option("--into", type=FOLDER, default=".", show_default=True, help="Where the SVGs go.")
@click.option("--seconds", type=Finite(0.1), default=30.0, show_default=True, help="Each lateness.")
@click.option("--messages", type=SOME, default=500_000, show_default=True, help="Each cycle.")
@click.option("--most", type=NONE_OR_SOME, default=10_000_000, show_default=True, help="Messages pending.")
def plot(into: Path, seconds: float, messages: int, most: int) -> int:
    """Draw lateness against messages pending, and the cycle's rate against the size of a batch.

    \b
    Example:
      timeline bench plot --into design-docs --most 1000000
    """
    pending = tuple(count for count in PENDING if count <= most)
    with tempfile.TemporaryDirectory(prefix="timeline-bench-") as made, Progress("messages put") as progress:
        try:
            drawing_tools()
            draw(asyncio.run(rate_by_batch(Path(made), messages)), into / "rate-by-batch.svg")
            late = lateness_by_pending(Path(made), seconds, pending, progress.add)
            draw(asyncio.run(late), into / "lateness-by-pending.svg")
        except CannotMeasure as trouble:
            raise Failed(REFUSED, trouble.reason) from trouble
    click.echo(f"lateness-by-pending.svg and rate-by-batch.svg are in {into}")
    return 0
