"""gRPC streams whose connection is closed while they are used."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from timeline.driver.transport.grpc_transport import GrpcTransport
from timeline.wire import Fault, TransportError
from timeline.wire.frames import SERVICE
from timeline.wire.transport import ADMITTED


async def test_a_connection_that_closes_during_a_send_breaks_the_stream_and_cancels_nobody() -> None:
    """Another call of the client closes it, once it finds that its broker is going."""

    async def reads_nothing(frames: Any, context: Any) -> None:
        await context.send_initial_metadata(((ADMITTED, "1"),))
        await asyncio.Event().wait()

    server = grpc.aio.server()
    methods = {"Produce": grpc.stream_stream_rpc_method_handler(reads_nothing)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    transport = GrpcTransport(f"127.0.0.1:{port}")
    stream = await transport.stream("Produce", 20.0)

    async def send() -> None:
        while True:
            await stream.send(b"x" * 4_000_000)  # more than there is room for

    sending = asyncio.ensure_future(send())
    await asyncio.sleep(0)
    receiving = asyncio.ensure_future(stream.receive())
    await transport.close()
    for task in (sending, receiving):
        with pytest.raises(TransportError) as broken:
            await task
        assert broken.value.fault is Fault.BROKEN
    assert isinstance(sending.exception().__cause__, asyncio.CancelledError)  # type: ignore[union-attr]
    await stream.close()
    await server.stop(None)
