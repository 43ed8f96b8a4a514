"""Frames that never become whole: who brings too much of them is hung up on, and nobody else is. Over real connections:
the kernel's counters say who brought what, on Linux."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import grpc
import pytest

from tests.broker.link import broker
from tests.faults.hostile import Plain, hello, opening, puts
from timeline.broker.server.calls import Handlers
from timeline.broker.server.partial_frames import GROWN_BYTES, Unfinished
from timeline.broker.server.service import OPTIONS
from timeline.wire import MAX_FRAME_BYTES, SERVICE, Beat, Credit, Ping, Pong, Produced, Welcome, decode_as, encode

PART_BYTES = 16_000
MOST_BYTES = 20 * PART_BYTES


class Served:
    """A broker behind gRPC. `size`: what it is told that its process takes."""

    def __init__(self, service: object) -> None:
        self.size = 0
        self.server = grpc.aio.server(options=OPTIONS)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.unfinished = Unfinished({self.port}, MOST_BYTES, lambda: self.size)
        self.server.add_generic_rpc_handlers((Handlers(service, 10_000, unfinished=self.unfinished),))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def look(self) -> int:
        """By a process that has grown."""
        self.size += GROWN_BYTES
        return self.unfinished.look()

    @contextmanager
    def begun(self, count: int, method: str) -> Iterator[list[Plain]]:
        """Connections that each have sent a part of a large frame."""
        part = opening(method, b"x" * PART_BYTES, announced=MAX_FRAME_BYTES)
        made = [Plain(self.address, part) for _ in range(count)]
        try:
            yield made
        finally:
            for one in made:
                one.close()


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    async with broker() as link:
        made = Served(link.node.service)
        await made.server.start()
        try:
            yield made
        finally:
            await made.server.stop(None)


async def over(connections: list[Plain], count: int) -> None:
    """Returns once so many of them have ended."""
    while sum(one.over for one in connections) != count:
        await asyncio.sleep(0)
        for one in connections:
            one.look()


@pytest.mark.parametrize("method", ["Mutate", "Produce"])
async def test_those_who_brought_most_are_hung_up_on_and_others_go_on(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as made, grpc.aio.insecure_channel(made.address) as channel:
        produce = channel.stream_stream(f"/{SERVICE}/Produce")()
        for request in range(1, 9):  # more than the bound, in whole frames
            frame = puts(request, [b"%d" % request], [b"x" * (MOST_BYTES // 4)], in_ms=3_600_000, topic="t")
            await produce.write(encode(frame))
            decode_as(await produce.read(), Produced)
        consume = channel.stream_stream(f"/{SERVICE}/Consume")()
        await consume.write(hello("c", "t"))
        decode_as(await consume.read(), Welcome)
        with made.begun(40, method) as connections:
            ended = 0
            while ended < 20:  # the other half of what was sent may be here
                await asyncio.sleep(0)
                ended += made.look()
                ended += made.look()  # gRPC still has those that were hung up on
            assert ended < 40
            hung_up_on = [record.args for record in caplog.records if record.msg.startswith("hung up on")]
            assert len({args[0] for args in hung_up_on}) == len(hung_up_on) == ended
            await over(connections, ended)
        await consume.write(encode(Credit(echo=7)))
        assert decode_as(await consume.read(), Beat).echo == 7
        ping = channel.unary_unary(f"/{SERVICE}/Ping")
        for _ in range(3):
            decode_as(await ping(encode(Ping(1.0))), Pong)


async def test_what_stays_below_the_bound_is_left_alone_and_so_is_all_while_nothing_grows() -> None:
    async with served() as made:
        with made.begun(10, "Mutate") as few, made.begun(40, "Mutate") as many:
            assert made.unfinished.look() == 0
            while not (ended := made.look()):
                await asyncio.sleep(0)
            await over(few + many, ended)
        with made.begun(5, "Mutate") as few:
            async with grpc.aio.insecure_channel(made.address) as channel:
                await channel.unary_unary(f"/{SERVICE}/Ping")(encode(Ping(1.0)))
            assert made.look() == 0
            for one in few:
                one.look()
                assert not one.over
