"""`timeline bench cluster` and `failover`: what takes several brokers, and a store and an etcd for them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeAlias

import click

from timeline.bench.figures import Report
from timeline.bench.processes import CannotMeasure
from timeline.bench.scenarios.cluster import Cluster, run_cluster
from timeline.bench.scenarios.failover import Failover, run_failover
from timeline.cli.options.values import Url
from timeline.cli.tools.scenario import SOME, Finite, conducted, measured
from timeline.demo.processes import CannotPlay, DemoProcesses
from timeline.demo.servers import ETCD, REDIS, missing, start_etcd, start_redis

BROKERS = click.IntRange(1, 64)
Together: TypeAlias = Callable[[Any, Path], Coroutine[Any, Any, Report]]
"""Runs a scenario with its settings, which name store and etcd, in a folder."""


cluster_store_option = click.option(
    "--store", default="", type=Url(), help="One that brokers share.  [a Redis for the measurement]"
)
cluster_sync_option = click.option(
    "--sync", default="", type=Url(), help="Where they meet.  [an etcd for the measurement]"
)


def together(
    as_json: bool, folder: Path | None, store: str, sync: str, kind: type, run: Together, settings: dict[str, Any],
    meet: bool = True,
) -> int:  # fmt: skip
    """Runs what takes several brokers, of `kind` and with `settings`, with a store, and, where they are to `meet`, an
    etcd of its own where none is given."""

    async def with_servers(place: Path) -> Report:
        async with AsyncExitStack() as stack:
            processes = DemoProcesses(place)
            stack.push_async_callback(processes.kill)
            if absent := missing(*([ETCD] * (meet and not sync) + [REDIS] * (not store))):
                raise CannotMeasure(absent)
            try:
                at = sync or (await start_etcd(processes) if meet else "")
                on = store or await start_redis(processes)
            except CannotPlay as trouble:
                raise CannotMeasure(trouble.reason) from trouble
            return await run(kind(store=on, sync=at, **settings), place)

    return conducted(as_json, folder, with_servers)


@click.command()
@cluster_store_option
@cluster_sync_option
@click.option("--brokers", type=BROKERS, default=2, show_default=True)
@click.option("--workers", is_flag=True, help="Brokers as workers of one `serve --workers`, which need no etcd.")
@click.option("--messages", type=SOME, default=200_000, show_default=True, help="In the cycle.")
@click.option("--burst", type=SOME, default=100_000, show_default=True, help="Due in one millisecond.")
@click.option("--rate", type=Finite(1), default=1_000.0, show_default=True, help="Messages a second, for lateness.")
@click.option("--seconds", type=Finite(0.01), default=20.0, show_default=True, help="Of that.")
@click.option("--rest-seconds", type=Finite(0), default=60.0, show_default=True, help="To watch etcd for, at rest.")
@measured
def cluster(as_json: bool, folder: Path | None, store: str, sync: str, **settings: Any) -> int:
    """Cycle, hot instant and lateness of several brokers on one store, and what etcd takes at rest.

    \b
    Example:
      timeline bench cluster --brokers 4
      timeline bench cluster --brokers 2 --store redis://127.0.0.1/0 --sync etcd://127.0.0.1/bench
    """
    meet = settings["brokers"] > 1 and not settings["workers"]
    return together(as_json, folder, store, sync, Cluster, run_cluster, settings, meet)


@click.command()
@cluster_store_option
@cluster_sync_option
@click.option("--brokers", type=click.IntRange(2, 64), default=3, show_default=True)
@click.option("--rate", type=Finite(1), default=1_000.0, show_default=True, help="Messages a second.")
@click.option("--before-s", type=Finite(1), default=8.0, show_default=True, help="Until one is killed.")
@click.option("--after-s", type=Finite(1), default=12.0, show_default=True, help="From then on.")
@measured
def failover(as_json: bool, folder: Path | None, store: str, sync: str, **settings: Any) -> int:
    """A broker of several is killed -9 under load: how long until its buckets are delivered again.

    \b
    Example:
      timeline bench failover --brokers 3
    """
    return together(as_json, folder, store, sync, Failover, run_failover, settings)
