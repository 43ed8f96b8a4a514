"""gRPC's health service answers strangers: they are bounded, and hold up nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from timeline.broker.server import probes
from timeline.broker.server.probes import HealthService

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def made() -> HealthService:
    return HealthService()


@pytest.fixture
async def channel(made: HealthService) -> AsyncIterator[Any]:
    """A channel to a server of the health service."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    server.add_generic_rpc_handlers((made.handlers(),))
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as opened:
        yield opened
    await server.stop(None)


@pytest.fixture
def served(made: HealthService, channel: Any) -> tuple[HealthService, Any]:
    """A health service and a stub of it."""
    return made, health_pb2_grpc.HealthStub(channel)


def asked(service: str = "") -> Any:
    return health_pb2.HealthCheckRequest(service=service)


async def test_it_is_checked_and_watched(served: tuple[HealthService, Any]) -> None:
    made, stub = served
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await stub.Check(asked("x"))
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(asked("x"))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    for status in (SERVING, NOT_SERVING, SERVING):
        await made.set("x", status)
        assert (await watch.read()).status == status
        assert (await stub.Check(asked("x"))).status == status
    watch.cancel()


async def test_those_who_watch_are_bounded(served: tuple[HealthService, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made, stub = served
    monkeypatch.setattr(probes, "MOST_WATCHES", 3)
    await made.set("", SERVING)
    watches = [stub.Watch(asked()) for _ in range(3)]
    for watch in watches:
        assert (await watch.read()).status == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in stub.Watch(asked()):
            pass
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await stub.Check(asked())).status == SERVING
    for watch in watches:
        watch.cancel()
    while made.watches:
        await stub.Check(asked())


class Stubborn:
    """A call whose peer does not read."""

    def __init__(self) -> None:
        self.writing = asyncio.Event()

    async def write(self, _: Any) -> None:
        self.writing.set()
        await asyncio.get_running_loop().create_future()


async def test_one_who_does_not_read_holds_up_nobody() -> None:
    made, stubborn = HealthService(), Stubborn()
    await made.set("", SERVING)
    hanging = asyncio.ensure_future(made.Watch(asked().SerializeToString(), stubborn))
    await stubborn.writing.wait()
    await asyncio.wait_for(made.set("", NOT_SERVING), 60)
    assert (await made.Check(asked().SerializeToString(), None)).status == NOT_SERVING
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert made.watches == 0


async def test_what_is_no_request_is_refused_and_logged_nowhere(channel: Any, caplog: pytest.LogCaptureFixture) -> None:
    check = channel.unary_unary("/grpc.health.v1.Health/Check")
    watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await check(b"\xff\xff\xff\x01")
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in watch(b"\xff\xff\xff\x01"):
            pass
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not caplog.records
