"""Single calls: which of them share a frame, and what is left of them once they are answered."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest

import timeline
from tests.driver.broker import Broker
from timeline.clock import Clock
from timeline.driver.client import Timeline
from timeline.driver.consume.in_flight import DeliveredFrame
from timeline.driver.produce.produce_stream import GATHER_MS, SINGLES_OUTSTANDING, WORTH_A_FRAME
from timeline.driver.transport.grpc_transport import GrpcTransport
from timeline.wire import Produce, decode


class _Held(GrpcTransport):
    """The real way, on which answers wait until `answers` is set, and it is noted how many puts each frame carries."""

    frames: list[int]
    answers: asyncio.Event
    sent: asyncio.Event

    async def stream(self, method: str, timeout_s: float) -> Any:
        stream = await super().stream(method, timeout_s)
        send, receive = stream.send, stream.receive

        async def noted(data: bytes) -> None:
            frame = decode(data)
            if isinstance(frame, Produce):
                self.frames.append(len(frame.birth))
                self.sent.set()
            await send(data)

        async def held() -> bytes | None:
            data = await receive()
            await self.answers.wait()
            return data

        stream.send, stream.receive = noted, held  # type: ignore[method-assign]
        return stream


async def test_single_puts_gather_while_a_frame_waits_for_its_answer(broker: Broker) -> None:
    frames: list[int] = []
    answers, sent = asyncio.Event(), asyncio.Event()
    now_s = 1_000.0
    clock = Clock(time.time, lambda: now_s)

    def way(address: str) -> _Held:
        made = _Held(address)
        made.frames, made.answers, made.sent = frames, answers, sent
        return made

    async with Timeline(broker.address, "10s", clock=clock, transport_factory=way) as tl, asyncio.TaskGroup() as calls:
        await tl.create_topic("t")
        producer = tl.producer("t")

        async def put(count: int) -> None:
            sent.clear()
            for _ in range(count):
                calls.create_task(producer.produce(b"", in_="1h"))
            for _ in range(100):
                await asyncio.sleep(0)

        await put(1)
        await sent.wait()
        assert frames == [1]  # a lone one goes at once
        await put(2)
        assert frames == [1]  # others wait for the answer to what went before
        now_s += GATHER_MS / 1000
        await sent.wait()
        assert frames == [1, 2]  # but not for long
        await put(WORTH_A_FRAME - 1)
        assert frames == [1, 2]
        await put(1)
        await sent.wait()
        assert frames == [1, 2, WORTH_A_FRAME]  # nor when they are worth a frame
        await put(WORTH_A_FRAME)
        await sent.wait()
        assert len(frames) == SINGLES_OUTSTANDING
        await put(WORTH_A_FRAME)
        assert len(frames) == SINGLES_OUTSTANDING  # no more frames than that wait for their answers
        answers.set()
    assert sum(frames) == 3 + 3 * WORTH_A_FRAME


def _frames_alive() -> list[DeliveredFrame]:
    return [thing for thing in gc.get_objects() if type(thing) is DeliveredFrame]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
async def test_what_was_acked_leaves_nothing_behind_that_the_collector_would_have_to_walk(
    tl: timeline.Timeline,
) -> None:
    others = _frames_alive()  # of another test, if something still holds them
    await tl.create_topic("t")
    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        deliveries = aiter(c)
        for _ in range(8):  # each comes in a frame of its own
            await p.produce(b"", in_=0)
            d = await anext(deliveries)
            d.ack_soon()
        await p.produce(b"", in_=0)
        d = await anext(deliveries)
        await d.ack()  # what gathered went before it, and is answered before it
        del d
        assert len(_frames_alive()) - len(others) <= 1  # the newest one may still be somebody's variable
