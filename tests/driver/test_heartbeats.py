"""What a consumer that has nothing to do says to its broker."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.driver.broker import Broker
from timeline.broker.limits import Limits
from timeline.driver.client import Timeline
from timeline.driver.transport.grpc_transport import GrpcTransport
from timeline.wire import Credit, decode

HEARTBEAT_MS = 60


class Watching(GrpcTransport):
    """The real way; notes when each heartbeat was sent."""

    beats_s: asyncio.Queue[float]

    async def stream(self, method: str, timeout_s: float) -> Any:
        stream: Any = await super().stream(method, timeout_s)
        send = stream.send

        async def watched(frame: bytes) -> None:
            if isinstance(decode(frame), Credit):
                self.beats_s.put_nowait(time.monotonic())
            await send(frame)

        stream.send = watched
        return stream


@pytest.mark.slow
async def test_an_idle_consumer_beats_once_a_heartbeat() -> None:
    broker = Broker(limits=Limits(heartbeat_ms=HEARTBEAT_MS))
    await broker.start()
    Watching.beats_s = asyncio.Queue()
    try:
        async with Timeline(broker.address, "10s", transport_factory=Watching) as tl:
            await tl.create_topic("t")
            async with tl.consumer("t", id="idle") as consumer:
                taking = asyncio.create_task(consumer.take())
                first_s, *_, last_s = [await Watching.beats_s.get() for _ in range(9)]
                taking.cancel()
        # A busy machine makes them come later, never sooner.
        assert 1_000 * (last_s - first_s) >= 8 * 0.7 * HEARTBEAT_MS
    finally:
        await broker.stop()
