"""Peers that live in a database beside Timeline's store, on Redis or PostgreSQL.

Each does the cycle's work as its own documentation describes, in two processes: one puts, the other works. It is driven
in several ways, and the quickest counts. Puts go in batches, or from several threads where there is no call for many.
Messages are due at once. The worker's code writes the id in each payload, which is checked here. A turn ends when the
database has nothing left of it, so that every acknowledgement counts. Then messages with due times of their own show
how late they are handed out. Everything lies under a name of its own, and is removed at the end.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

import timeline
from timeline.bench.figures import BenchReport, latencies
from timeline.bench.ledger import Ledger
from timeline.bench.load import batch_at, batch_sizes, ids_of, observed
from timeline.bench.peers import DROP, DROPPED, LEFT, STORED, asked_line
from timeline.bench.peers.trials import LATE_S, due_times, quickest
from timeline.bench.processes import CannotMeasure, Measured, started_module, within
from timeline.bench.scenarios.throughput import WINDOW_BATCHES, CycleScenario, measured
from timeline.bench.stores import NAME_BYTES, scheme
from timeline.wording import install_command

LOOK_AGAIN_S = 0.005
PUT_TASKS = 2
"""While one batch is stored, the next one is on its way."""
READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class PeerSystem:
    """`module`: what its processes run. `store`: the kind of server. `packages`: what must be installed. `ways`: how it
    is driven, as its worker understands it. `less`: what it does not do."""

    module: str
    store: str
    packages: tuple[str, ...]
    ways: tuple[str, ...]
    less: str


PEERS = {
    "apscheduler": PeerSystem(
        "timeline.bench.peers.apscheduler_jobs",
        "postgresql",
        ("apscheduler", "sqlalchemy", "psycopg"),
        ("1", "10"),
        "does not: share its jobs among processes (one scheduler only), keep a job until it is done (it is removed "
        "when it begins), cancel by tag, fence; keeps what PostgreSQL keeps",
    ),
    "celery": PeerSystem(
        "timeline.bench.peers.celery_tasks",
        "redis",
        ("celery", "redis"),
        ("solo", "threads", "prefork"),
        "does not: keep due times in order in the store (the worker holds what is to come in its memory; beyond an "
        "hour it may run twice), move, cancel in the store (a revoke, by id or by stamp, reaches the workers that run "
        "then), refuse a second task under an id; what is due at once has no ETA; keeps what Redis keeps",
    ),
    "pgqueuer": PeerSystem(
        "timeline.bench.peers.pgqueuer_jobs",
        "postgresql",
        ("pgqueuer", "asyncpg"),
        (
            "1 consumer, batches of 100",
            "1 consumer, batches of 1000",
            "5 consumers, batches of 10",
            "5 consumers, batches of 100",
        ),
        "does not: promise milliseconds (it looks ten times per second at most), move, cancel by tag, fence a worker "
        "that took too long; keeps what PostgreSQL keeps, and a job commits with your own transaction",
    ),
    "procrastinate": PeerSystem(
        "timeline.bench.peers.procrastinate_jobs",
        "postgresql",
        ("procrastinate", "psycopg"),
        ("1", "10", "100"),
        "does not: promise milliseconds, move, cancel by tag, take several jobs at once, fence a worker that took too "
        "long; keeps what PostgreSQL keeps, and a job commits with your own transaction",
    ),
    "rq": PeerSystem(
        "timeline.bench.peers.rq_jobs",
        "redis",
        ("rq", "redis"),
        ("in the worker's process", "a process per job"),
        "does not: have due times finer than a second (it cuts them off, so jobs run up to a second early), move, "
        "cancel by tag, fence; what is due at once goes past its scheduler; keeps what Redis keeps",
    ),
    "redis-set": PeerSystem(
        "timeline.bench.peers.redis_set",
        "redis",
        ("redis",),
        ("100", "500", "2000"),
        "does not: wake its workers (these poll each millisecond), fence a worker that took too long, cancel by tag, "
        "count what is to come by topic; it is a recipe, whose code is yours; keeps what Redis keeps",
    ),
}


async def run_peer(asked: CycleScenario, name: str, folder: Path) -> BenchReport:
    """Do the cycle's work with the peer of this name, on the server of `asked.store`. Raises CannotMeasure."""
    peer = PEERS[name]
    if scheme(asked.store) != peer.store:
        raise CannotMeasure(f"--peer {name} runs on the server of --store: give a {peer.store}:// one")
    if asked.backlog:
        raise CannotMeasure(f"--backlog goes with --peer beanstalkd and nats: a worker of {name} takes at once")
    missing = [package for package in peer.packages if importlib.util.find_spec(package) is None]
    if missing:
        raise CannotMeasure(f"--peer {name} needs {' and '.join(missing)}: {install_command('peers')}")
    best, report = await quickest(name, peer.ways, asked, partial(_measured, name, folder))
    if not report.wrong:
        async with _running(name, peer, best, asked.store, folder) as (putter, worker):
            report.figures |= latencies(await _late_ms(putter, worker, asked.payload_bytes))
    report.notes.insert(0, peer.less)
    return report


async def _measured(name: str, folder: Path, asked: CycleScenario, way: str) -> BenchReport:
    async with _running(name, PEERS[name], way, asked.store, folder) as (putter, worker):
        cpu = {"putter_cpu": putter.cpu_s, "worker_cpu": worker.cpu_s}
        return await measured(name, asked, partial(_turn, asked, putter, worker), **cpu)


@asynccontextmanager
async def _running(
    name: str, peer: PeerSystem, way: str, url: str, folder: Path
) -> AsyncIterator[tuple[Measured, Measured]]:
    """Run the process that puts, which also creates and removes what it needs in the database, and the worker."""
    own = f"bench_{name.replace('-', '_')}_{os.urandom(NAME_BYTES).hex()}"
    # By standard input: a URL may have a password.
    settings = json.dumps({"url": url.partition("?")[0], "name": own, "way": way})
    async with started_module(f"{name}-putter", folder, peer.module, "put") as putter:
        await putter.tell(settings)
        await putter.line()
        try:
            async with started_module(f"{name}-worker", folder, peer.module, "work") as worker:
                await worker.tell(settings)
                await worker.line()
                yield putter, worker
        finally:
            await putter.tell(DROP)
            while await putter.line() != DROPPED:  # answers to earlier lines come first
                pass


async def _turn(asked: CycleScenario, putter: Measured, worker: Measured, messages: int) -> Ledger:
    ledger, answering = Ledger(messages, WINDOW_BATCHES * asked.batch), asyncio.Lock()
    sizes = batch_sizes(messages, asked.batch)

    async def put(batch: timeline.Batch) -> None:
        await putter.tell(asked_line([payload.decode() for payload in batch.payloads]))
        async with answering:
            await putter.line()

    puts = [ledger.put_each(sizes, asked.payload_bytes, put) for _ in range(PUT_TASKS)]

    def met(ids: list[bytes]) -> None:
        ledger.met(ids)
        ledger.settle(len(ids))

    await ledger.through(*puts, _read_ids(worker, met))
    if not ledger.verdict():
        while await _left(putter):
            await asyncio.sleep(LOOK_AGAIN_S)
    return ledger


async def _late_ms(putter: Measured, worker: Measured, size_bytes: int) -> list[float]:
    """Return how late messages with due times of their own are handed out. Raise CannotMeasure."""
    late_ms: list[float] = []
    done = asyncio.Event()
    async with observed() as clock, within(LATE_S, "the messages with due times"):
        due_ms = due_times(clock.now_ms())
        batch = batch_at(len(due_ms), np.array(due_ms), size_bytes)
        due_of = dict(zip(ids_of(batch), due_ms, strict=True))

        def met(ids: list[bytes]) -> None:
            now_ms = clock.now()
            late_ms.extend(now_ms - due_of.pop(id) for id in ids)
            if not due_of:
                done.set()

        reading = asyncio.ensure_future(_read_ids(worker, met))
        try:
            await putter.tell(asked_line([payload.decode() for payload in batch.payloads], due_ms))
            await putter.line()
            finished = asyncio.ensure_future(done.wait())
            await asyncio.wait([reading, finished], return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
        finally:
            reading.cancel()
    return late_ms


async def _left(putter: Measured) -> int:
    """Return how many messages are not acknowledged."""
    await putter.tell(LEFT)
    while (told := await putter.line()) == STORED:  # the last put is answered after its messages have come
        pass
    return int(told)


async def _read_ids(worker: Measured, met: Callable[[list[bytes]], None]) -> None:
    """Tell the ids that the worker's code got."""
    assert worker.process.stdout is not None
    rest = b""
    while read := await worker.process.stdout.read(READ_BYTES):
        *ids, rest = (rest + read).split(b"\n")
        if ids:
            met(ids)
    raise CannotMeasure(f"{worker.name} ended: {worker.last_words()}")
