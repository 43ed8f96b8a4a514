"""What gRPC makes late by itself: a process that writes a frame at each due, and this one, which reads them.

Same rate, same open loop, same clock, the event loop of a broker, and nothing else: no store, no rules, no puts, no
acks. What a lateness beside it is worth depends on the machine and the minute; this says what both are like.
`python -m timeline.bench.peers.bare_push` is the process that writes; it prints its address.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

import grpc.aio

from timeline.bench.feeder import meant_of, payload_of
from timeline.bench.figures import BenchReport, latencies, worst
from timeline.bench.processes import Measured, within
from timeline.bench.scenario import observed
from timeline.bench.scenarios.lateness import BEGIN_MS, PATIENCE_S, LatenessScenario
from timeline.broker.server.process import new_loop
from timeline.clock import Clock

SERVICE, METHOD = "timeline.bench", "Push"
AROUND = b"." * 150
"""About what a frame has besides the payload of its one message."""
BARE_PUSH = "bare push"


async def run_bare_push(asked: LatenessScenario, folder: Path) -> BenchReport:
    """As many runs as of the lateness beside it, the one with the worst p99 shown. Raises CannotMeasure."""
    child = await Measured.start("bare-push", folder, sys.executable, "-m", "timeline.bench.peers.bare_push")
    runs: list[dict[str, float]] = []
    try:
        async with observed() as clock, grpc.aio.insecure_channel(await child.line()) as channel:
            for _ in range(asked.runs):
                used_s = child.cpu_s()
                run = latencies(await _run(channel, clock, asked.count, asked.rate))
                runs.append({**run, "pusher_cpu_us_per_message": (child.cpu_s() - used_s) * 1e6 / asked.count})
    finally:
        await child.end()
    return BenchReport(BARE_PUSH, asdict(asked), {**worst(runs, "lateness_p99_ms"), "runs": float(len(runs))})


async def _run(channel: grpc.aio.Channel, clock: Clock, count: int, rate_per_s: float) -> list[float]:
    """How late each frame of one run was read, in ms."""
    late_ms: list[float] = []
    start_ms = clock.now_ms() + BEGIN_MS
    async with within(count / rate_per_s + PATIENCE_S, "all frames of a bare push"):
        call = channel.unary_stream(f"/{SERVICE}/{METHOD}")(json.dumps([start_ms, count, rate_per_s]).encode())
        async for frame in call:
            late_ms.append(clock.now() - meant_of(frame))
    return late_ms


async def _push(request: bytes, _: object) -> AsyncIterator[bytes]:
    """A frame at each due, however those before it fared."""
    start_ms, count, rate_per_s = json.loads(request)
    async with observed() as clock:
        for number in range(count):
            due_ms = start_ms + int(number * 1000 / rate_per_s)
            while (early_ms := due_ms - clock.now()) > 0:
                await asyncio.sleep(early_ms / 1000)
            yield payload_of(due_ms) + AROUND


async def serve() -> None:
    """Pushes to whoever asks, until it is ended."""
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
