"""Frames that are refused are let go of at once, not when Python's collector comes by."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import grpc
import pytest

from tests.driver.broker import Broker
from timeline.broker.limits import MIB
from timeline.wire import METHODS, SERVICE

FRAMES = 10


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Without Python's collector; what is allocated is counted."""
    gc.collect()
    gc.disable()
    tracemalloc.start(1)
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.enable()


async def _answer(channel: grpc.aio.Channel, method: str) -> grpc.StatusCode | None:
    """What a frame that is none is answered. Holds nothing of it afterwards."""
    path, frame = f"/{SERVICE}/{method}", bytes(MIB)
    try:
        if METHODS[method] == "unary_unary":
            await channel.unary_unary(path)(frame)
        elif METHODS[method] == "unary_stream":
            async for _ in channel.unary_stream(path)(frame):
                pass
        else:
            call = channel.stream_stream(path)()
            await call.write(frame)
            await call.read()
    except grpc.aio.AioRpcError as refused:
        code: grpc.StatusCode = refused.code()
        return code
    return None


@pytest.mark.slow
@pytest.mark.parametrize("method", ["Mutate", "Ping", "Scan", "Produce", "Consume"])
@pytest.mark.usefixtures("uncollected")
async def test_a_frame_that_is_refused_does_not_stay(method: str) -> None:
    broker = Broker()
    await broker.start()
    try:
        async with grpc.aio.insecure_channel(broker.address) as channel:
            assert await _answer(channel, method) is grpc.StatusCode.INVALID_ARGUMENT
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(FRAMES):
                await _answer(channel, method)
            assert tracemalloc.get_traced_memory()[0] - before < FRAMES * MIB / 2
    finally:
        await broker.stop()
