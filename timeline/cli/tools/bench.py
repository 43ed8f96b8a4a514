"""`timeline bench`: how fast this machine's Timeline is, and how late."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from timeline.bench.figures import Report, machine
from timeline.bench.peers.bare import run_bare
from timeline.bench.peers.bare_push import run_bare_push
from timeline.bench.peers.beanstalkd import KINDS, run_beanstalkd
from timeline.bench.peers.databases import PEERS, run_peer
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
from timeline.bench.profile import Profile
from timeline.bench.scenarios.burst import Burst
from timeline.bench.scenarios.cancel_tag import CancelTag
from timeline.bench.scenarios.cycle import APIS, Cycle, run_cycle
from timeline.bench.scenarios.lateness import Lateness, run_lateness
from timeline.bench.scenarios.loop import Loop
from timeline.bench.scenarios.memory import Memory
from timeline.bench.scenarios.payload import Payload
from timeline.bench.scenarios.produce import Produce
from timeline.bench.scenarios.restart import Restart
from timeline.bench.scenarios.scale import OF, PENDING, TOPICS, Scale
from timeline.bench.suite import FULL, QUICK, Entry, compare, compare_pending, fresh, run_entry
from timeline.cli.app import REFUSED, SOME_FAILED, Failed, Suggesting, say
from timeline.cli.options.values import DURATION
from timeline.cli.terminal.output import print_json
from timeline.cli.terminal.progress import Progress
from timeline.cli.tools.bench_cluster import BROKERS, cluster, failover
from timeline.cli.tools.scenario import (
    FOLDER,
    MOST,
    NONE_OR_SOME,
    SOME,
    Finite,
    buckets_option,
    conducted,
    ended_in_order,
    folder_option,
    json_option,
    measured,
    plainly,
    profile_option,
    signature,
    store_option,
    tell,
)
from timeline.driver.times import duration_ms


@click.group(cls=Suggesting, invoke_without_command=True)
@click.option("--quick", is_flag=True, help="All scenarios, but small: some minutes instead of most of an hour.")
@click.option("--brokers", type=BROKERS, help="So many brokers together instead: `bench cluster`, as it is.")
@folder_option
@json_option
@click.pass_context
def bench(context: click.Context, as_json: bool, folder: Path | None, quick: bool, brokers: int | None) -> int | None:
    """Measure speed and lateness on this machine; brokers, clients and peers in processes of their own.

    Without a command: all scenarios that the targets name, with beanstalkd beside the cycle. Exit code 1 when something
    was wrong (a message lost, doubled, early); a missed target is shown, not an error.

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
        told: int = context.invoke(cluster, as_json=as_json, folder=folder, brokers=brokers)
        return told
    return run_suite(QUICK if quick else FULL, as_json, folder)


def run_suite(suite: Sequence[Entry], as_json: bool, folder: Path | None) -> int:
    """All of a suite, one after the other; each is told as it ends."""
    on, reports = machine(), []
    for entry in suite:
        with tempfile.TemporaryDirectory(prefix="timeline-bench-", dir=folder) as made:
            say(f"{entry.title} …", err=True)
            with Progress("pending", getattr(entry.asked, "pending", 0)) as progress:
                try:
                    report = asyncio.run(ended_in_order(run_entry(entry, Path(made), progress.add)))
                except CannotMeasure as trouble:
                    raise Failed(REFUSED, f"{entry.title}: {trouble.reason}") from trouble
        reports.append(report)
        compare_pending(reports)
        if not as_json:
            tell(report, on)
    if as_json:
        print_json({"scenarios": [report.as_json() for report in reports], "machine": on})
    else:
        say("", signature(on))
    return SOME_FAILED if any(one.wrong for report in reports for one in (report, *report.beside)) else 0


@bench.command()
@store_option("memory://")
@click.option("--api", type=click.Choice(APIS), default="batch", show_default=True, help="How the client works.")
@click.option("--messages", type=SOME, default=500_000, show_default=True)
@click.option("--batch", type=click.IntRange(1, 100_000), default=2_000, show_default=True, help="Messages a put.")
@click.option("--pending", type=NONE_OR_SOME, default=0, show_default=True, help="Others that wait meanwhile.")
@click.option("--payload-bytes", type=click.IntRange(16, MOST), default=100, show_default=True)
@buckets_option
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
            from timeline.bench.scenarios.journal import run_journalled

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
@click.option("--lease-ahead", type=DURATION, metavar="auto|off|DURATION", default="auto", show_default=True)
@buckets_option
@click.option("--bare", is_flag=True, help="Beside it, gRPC alone: frames pushed at each due, and nothing else.")
@profile_option
@measured
def lateness(as_json: bool, folder: Path | None, bare: bool, profiled: bool, store: str, **settings: Any) -> int:
    """From due until handed to the consumer's code, at a steady rate.

    \b
    Example:
      timeline bench lateness --pending 1000000 --seconds 60 --runs 3
    """

    if settings["lease_ahead"] not in ("auto", "off"):
        duration_ms(settings["lease_ahead"], "--lease-ahead")

    async def run(place: Path) -> Report:
        asked = Lateness(store=fresh(store, place), **settings)
        with Progress("pending", asked.pending) as progress:
            profile = Profile(place) if profiled else None
            report = await run_lateness(asked, place, progress.add, profile)
        if bare:
            report.beside.append(await run_bare_push(asked, place))
            compare(report)
        if profile is not None:
            report.notes += profile.lines()
        return report

    return conducted(as_json, folder, run)


@bench.command()
@store_option("sqlite://")
@click.option("--messages", type=SOME, default=3_000, show_default=True, help="Of loops that wait for each answer.")
@click.option("--many", type=SOME, default=30_000, show_default=True, help="Of the others: consume and ack_soon.")
@measured
def loop(as_json: bool, folder: Path | None, store: str, **settings: Any) -> int:
    """Loops over a backlog: one ack after the other, handlers, `timeline consume`, and `ack_soon`.

    \b
    Example:
      timeline bench loop --store memory://
    """
    return plainly(Loop, as_json, folder, store, settings)


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
@store_option("sqlite://")
@click.option("--of", type=click.Choice(OF), default=TOPICS, show_default=True, help="What there are many of.")
@click.option("--number", type=SOME, default=1_000, show_default=True, help="How many.")
@click.option("--rate", type=Finite(1), default=300.0, show_default=True, help="Messages a second.")
@click.option("--seconds", type=Finite(0.01), default=20.0, show_default=True, help="Of that.")
@click.option("--rest-seconds", type=Finite(0), default=5.0, show_default=True, help="To watch the broker at rest.")
@measured
def scale(as_json: bool, folder: Path | None, store: str, **settings: Any) -> int:
    """What a message costs beside many pending messages, topics (with a consumer each, or empty) or consumers.

    \b
    Example:
      timeline bench scale --of consumers --number 1000
    """
    return plainly(Scale, as_json, folder, store, settings)


@bench.command()
@click.option("--into", type=FOLDER, default=".", show_default=True, help="Where the SVGs go.")
@click.option("--seconds", type=Finite(0.1), default=30.0, show_default=True, help="Each lateness.")
@click.option("--messages", type=SOME, default=500_000, show_default=True, help="Each cycle.")
@click.option("--most", type=NONE_OR_SOME, default=10_000_000, show_default=True, help="Messages pending.")
def plot(into: Path, seconds: float, messages: int, most: int) -> int:
    """Draw lateness and cost against how much there is, and the cycle's rate against the size of a batch.

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


for command in (cluster, failover):
    bench.add_command(command)
