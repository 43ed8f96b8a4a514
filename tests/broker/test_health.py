"""The gRPC health service says what the node says of itself, when it changes, and costs nothing meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from grpc_health.v1 import health, health_pb2

from tests.broker.link import broker
from tests.broker.slow import SlowStore
from timeline.broker.server.service import _watch_health
from timeline.wire import SERVICE

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Watched(health.aio.HealthServicer):
    """A health service whose changes can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.said: asyncio.Queue[int] = asyncio.Queue()

    async def set(self, service: str, status: int) -> None:
        await super().set(service, status)
        if service == SERVICE:
            self.said.put_nowait(status)


async def test_health_follows_the_node_without_a_timer(monkeypatch: pytest.MonkeyPatch):
    store = SlowStore()
    async with broker(store) as link:
        servicer = Watched()
        timers: list[asyncio.Task[Any] | None] = []
        loop = asyncio.get_running_loop()
        real = loop.call_at

        def noted(*args: Any, **more: Any) -> asyncio.TimerHandle:
            timers.append(asyncio.current_task())
            return real(*args, **more)

        monkeypatch.setattr(loop, "call_at", noted)
        watching = asyncio.ensure_future(_watch_health(servicer, link.node.readiness))
        assert await servicer.said.get() == SERVING
        for _ in range(100):
            await asyncio.sleep(0)
        assert watching not in timers
        monkeypatch.undo()
        store.refuse = {"put", "check"}
        await link.put(["a"])
        assert await servicer.said.get() == NOT_SERVING
        store.refuse = set()
        await link.node._check_store()
        assert await servicer.said.get() == SERVING
        draining = asyncio.ensure_future(link.node.drain(1_000))
        assert await servicer.said.get() == NOT_SERVING
        await draining
        watching.cancel()
