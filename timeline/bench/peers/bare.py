"""The bounds of a measurement: the speed of the bare store, and the lateness of bare gRPC.

The bare store runs its own put, lease_due and settle in the shape of the cycle, without broker or wire. A bare push is
a process that writes a frame at each due time, and this one, which reads them. It has the rate, open loop, clock and
event loop of a lateness, and no store, rules, puts or acks. It shows what the machine was like at that moment.
`python -m timeline.bench.peers.bare` is the process that writes; it prints its address.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import grpc.aio

import timeline
from timeline.bench.figures import BenchReport, latencies, worst
from timeline.bench.ledger import Ledger
from timeline.bench.load import Told, batch_sizes, meant_of, observed, paced, payload_of, random_numbers
from timeline.bench.processes import started_module, within
from timeline.bench.scenario import Stopwatch, cpu_s_of_self
from timeline.bench.scenarios.lateness import BEGIN_MS, PATIENCE_S, LatenessScenario
from timeline.bench.scenarios.throughput import WINDOW_BATCHES, CycleScenario, measured
from timeline.bench.stores import create_in, fill_open, opened, own_topic, puts_of
from timeline.broker.server.process import new_loop
from timeline.clock import Clock
from timeline.model import Operation, Status, Topic
from timeline.storage_plugins.contract import Grant, Settles, Store

HOLDER = b"bare"
LEASE_MS = 30_000
SERVICE, METHOD = "timeline.bench", "Push"
AROUND = b"." * 150
"""About what a frame has besides the payload of its one message."""


async def run_bare(asked: CycleScenario, told: Told | None = None) -> BenchReport:
    """Run the cycle's statements on a store opened in this process. Raises what the store raises."""
    async with own_topic(asked.store, "bare") as own, opened(asked.store) as store:
        topic = await create_in(store, own.name, buckets=asked.buckets)
        if asked.pending:
            await fill_open(store, topic, asked.pending, asked.payload_bytes, told)
        report = await measured("bare store", asked, partial(_turn, store, topic, asked), cpu=cpu_s_of_self)
        report.store = own.store
        return report


async def _turn(store: Store, topic: Topic, asked: CycleScenario, messages: int) -> Ledger:
    """Pass messages through put, lease and ack; puts go on meanwhile."""
    ledger = Ledger(messages, messages if asked.backlog else WINDOW_BATCHES * asked.batch)
    stored = asyncio.Semaphore(0)
    clock = Clock()

    async def put(batch: timeline.Batch) -> None:
        answers = await store.put(topic, clock.now_ms(), puts_of(batch))
        if answers.status.any():
            ledger.wrong.append("a put was refused")
        stored.release()

    async def consume() -> None:
        while True:
            await stored.acquire()
            grant = Grant(HOLDER, asked.batch, LEASE_MS, 1 << 40)
            now_ms = clock.now_ms()
            rows = (await store.lease_due(topic, None, now_ms, now_ms, [grant])).rows
            assert rows.payloads is not None
            ledger.met_with(rows.ids, rows.payloads)
            acks = Settles.of(rows, holders=HOLDER, operation=Operation.ACK, op=random_numbers(len(rows)))
            answers = await store.settle(topic, clock.now_ms(), acks)
            ledger.settle(len(answers), int((answers.status != Status.OK.code).sum()))

    puts = ledger.put_each(batch_sizes(messages, asked.batch), asked.payload_bytes, put)
    if asked.backlog:
        await puts
        await ledger.through(consume())
    else:
        await ledger.through(puts, consume())
    return ledger


async def run_bare_push(asked: LatenessScenario, folder: Path) -> BenchReport:
    """Run as many pushes as the lateness has runs; return the one with the worst p99. Raises CannotMeasure."""
    runs: list[dict[str, float]] = []
    async with (
        started_module("bare-push", folder, "timeline.bench.peers.bare") as child,
        observed() as clock,
        grpc.aio.insecure_channel(await child.line()) as channel,
    ):
        for _ in range(asked.runs):
            watch = Stopwatch(pusher_cpu=child.cpu_s)
            run = latencies(await _pushed(channel, clock, asked.count, asked.rate))
            runs.append(run | watch.costs(asked.count))
    return BenchReport("bare push", asdict(asked), {**worst(runs, "lateness_p99_ms"), "runs": float(len(runs))})


async def _pushed(channel: grpc.aio.Channel, clock: Clock, count: int, rate_per_s: float) -> list[float]:
    """Return how late each frame of one run was read, in ms."""
    late_ms: list[float] = []
    start_ms = clock.now_ms() + BEGIN_MS
    async with within(count / rate_per_s + PATIENCE_S, "all frames of a bare push"):
        call = channel.unary_stream(f"/{SERVICE}/{METHOD}")(json.dumps([start_ms, count, rate_per_s]).encode())
        async for frame in call:
            late_ms.append(clock.now() - meant_of(frame))
    return late_ms


async def _push(request: bytes, _: object) -> AsyncIterator[bytes]:
    async with observed() as clock:
        async for due_ms, _late_ms in paced(clock, *json.loads(request)):
            yield payload_of(due_ms) + AROUND


async def serve() -> None:
    """Push to every caller until the process is ended."""
    server = grpc.aio.server()
    methods = {METHOD: grpc.unary_stream_rpc_method_handler(_push)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    gc.freeze()  # as a broker does: the collector walks no modules
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve())
