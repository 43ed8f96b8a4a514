"""gRPC streams whose connection is closed while they are used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from timeline.driver.transport.grpc_transport import GrpcTransport
from timeline.wire import Fault, TransportError
from timeline.wire.frames import SERVICE
from timeline.wire.transport import ADMITTED

FULL_AFTER_TURNS = 1_000
"""A send that is under way for so many turns of the loop most likely waits for room."""


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """Of a server that reads nothing."""

    async def reads_nothing(frames: Any, context: Any) -> None:
        await context.send_initial_metadata(((ADMITTED, "1"),))
        await asyncio.Event().wait()

    server = grpc.aio.server()
    methods = {"Produce": grpc.stream_stream_rpc_method_handler(reads_nothing)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def closed_while_sent(address: str) -> BaseException | None:
    """Close a connection while a stream of it sends, and most likely waits for room. Return the cause of the error."""
    transport = GrpcTransport(address)
    stream, sent = await transport.stream("Produce", 20.0), 0

    async def send() -> None:
        nonlocal sent
        while True:
            await stream.send(b"x" * 200_000)
            sent += 1

    sending, receiving = asyncio.ensure_future(send()), asyncio.ensure_future(stream.receive())
    before, turns = sent, 0
    while turns < FULL_AFTER_TURNS:
        await asyncio.sleep(0)
        before, turns = sent, turns + 1 if sent == before else 0
    await transport.close()
    for task in (sending, receiving):
        with pytest.raises(TransportError) as broken:
            await task
        assert broken.value.fault is Fault.BROKEN
    await stream.close()
    failure = sending.exception()
    return None if failure is None else failure.__cause__


async def test_a_connection_that_closes_during_a_send_breaks_the_stream_and_cancels_nobody(address: str) -> None:
    """Another call of the client closes it, once it finds that its broker is going. gRPC then raises CancelledError,
    unless the send had not begun yet."""
    while not isinstance(await closed_while_sent(address), asyncio.CancelledError):
        pass
