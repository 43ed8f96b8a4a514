"""Readers that take nothing are given up: they count as long as gRPC holds something for them, and are told why if they
ever read on. Over a real connection: only there is something held."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from tests.broker.link import Link, broker
from tests.faults.hostile import hello
from timeline.broker.limits import Limits
from timeline.broker.server.calls import Handlers
from timeline.broker.server.service import OPTIONS
from timeline.columns import Ragged
from timeline.wire import SERVICE, Scan, encode

OF_CLIENT = [("grpc.http2.bdp_probe", 0), ("grpc.max_receive_message_length", -1)]
"""What has not been asked for is not sent beyond the first 64 KiB."""


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Link, Any]]:
    """A broker with three messages of 1 MB, behind gRPC, and a channel to it."""
    limits = Limits(stall_ms=50, observe_every_ms=5)
    async with broker(limits=limits) as link:
        server = grpc.aio.server(options=OPTIONS)
        service = link.node.service
        server.add_generic_rpc_handlers((Handlers(service, limits.stall_ms),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OF_CLIENT) as channel:
                await link.put(["a", "b", "c"], payloads=Ragged.of([b"x" * 1_000_000] * 3))
                yield link, channel
        finally:
            await server.stop(None)


async def streams_left(link: Link, left: int) -> None:
    while len(link.node.service.streams) != left:
        await link.node.service.streams.ended(0.01)


async def given_up(link: Link, channel: Any, method: str) -> Any:
    """A call whose reader has taken nothing for too long."""
    service = link.node.service
    if method == "Scan":
        call = channel.unary_stream(f"/{SERVICE}/Scan")(encode(Scan("t", payload=True)))
        while not service._scans.messages:
            await service.streams.ended(0.01)
        while service._scans.messages:
            await service.streams.ended(0.01)
    else:
        call = channel.stream_stream(f"/{SERVICE}/Consume")()
        await call.write(hello("deaf", "t", credit=1 << 30))
        topic = await link.node.catalog.find("t")
        assert topic is not None
        roster = link.node.dealers.of(topic).roster
        while not roster.consumers:
            await service.streams.ended(0.01)
        while roster.consumers:
            await service.streams.ended(0.01)
    await streams_left(link, 1)
    return call


@pytest.mark.parametrize("method", ["Consume", "Scan"])
async def test_who_reads_on_is_told_why_there_is_no_more(method: str):
    async with served() as (link, channel):
        call = await given_up(link, channel, method)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "not taken for 50 ms" in ended.value.details()
        await streams_left(link, 0)


@pytest.mark.parametrize("method", ["Consume", "Scan"])
async def test_what_was_held_for_one_that_is_gone_counts_no_more(method: str):
    forgotten: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: forgotten.append(context))
    async with served() as (link, channel):
        await given_up(link, channel, method)
        await channel.close()
        await streams_left(link, 0)
    gc.collect()
    assert not forgotten  # the write that was given up fails by itself, and its error is retrieved
