"""Callers who do not read what they are answered: what they cost is bounded."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import numpy as np
import pytest

from tests.broker.link import broker, statuses
from timeline.broker.api import produce
from timeline.broker.limits import Limits
from timeline.columns import Ragged
from timeline.model import LateCause, LeavingReason, State, Status
from timeline.wire import (
    Credit,
    Deliver,
    Late,
    LateList,
    Leaving,
    Produce,
    PutFlag,
    TopicAction,
    decode_as,
    encode,
)


async def test_a_consumer_that_said_it_leaves_and_does_not_read_is_not_read_either():
    async with broker(limits=Limits(answers_waiting=4)) as link:
        pipe = await link.consume()
        pipe.flowing.clear()
        pipe.up(Leaving(LeavingReason.DRAINING))
        for turn in range(50):
            pipe.up(Credit(0, 0, turn))
        while pipe.to_broker.qsize() > 50:
            await asyncio.sleep(0)
        for _ in range(1_000):  # far more turns than the loop needs to read all that it would ever read
            await asyncio.sleep(0)
        assert pipe.to_broker.qsize() > 40
        pipe.flowing.set()
        echoes = [frame.echo for frame in [await pipe.down() for _ in range(51)] if not isinstance(frame, Leaving)]
        assert echoes == list(range(50))


def some_puts(request: int, count: int, payload: bytes) -> Produce:
    return Produce(
        request=request,
        topic="t",
        group="default",
        ids=Ragged.of([b"%d-%d" % (request, at) for at in range(count)]),
        birth=np.arange(1, count + 1, dtype=np.uint64),
        time_ms=np.zeros(count, dtype=np.int64),
        flags=np.full(count, PutFlag.IN, dtype=np.uint8),
        payloads=Ragged.of([payload] * count),
    )


async def test_the_payloads_of_a_producer_that_does_not_read_are_not_kept(monkeypatch: pytest.MonkeyPatch):
    """The payloads are too large for the topic, so that no store has a reason to keep them either."""
    seen: list[weakref.ref[Any]] = []
    read = produce.decode_as

    def watched(data: bytes, kind: type[Produce]) -> Produce:
        frame = read(data, kind)
        seen.append(weakref.ref(frame.birth))
        return frame

    monkeypatch.setattr(produce, "decode_as", watched)
    async with broker() as link:
        await link.topic(TopicAction.UPDATE, max_payload_bytes=10)
        pipe = link.open("Produce")
        pipe.flowing.clear()
        for request in range(20):
            pipe.up(some_puts(request, 1, b"x" * 1_000))
        while len(seen) < 20:
            await asyncio.sleep(0)
        for _ in range(1_000):
            await asyncio.sleep(0)
        gc.collect()
        assert [ref for ref in seen if ref() is not None] == []
        pipe.flowing.set()
        assert [statuses(await pipe.down()) for _ in range(20)] == [[Status.TOO_LARGE]] * 20


@pytest.mark.slow
async def test_what_waits_for_a_slow_reader_is_late_and_its_cause_is_known():
    async with broker(limits=Limits(late_ms=5)) as link:
        consumer = await link.consume()
        consumer.flowing.clear()
        await link.put(["first", "second"])
        await link.put(["third"])
        before_ms = link.node.clock.now_ms()
        while link.node.clock.now_ms() < before_ms + 200:  # long against what else may take time on a busy machine
            await link.topic(TopicAction.LIST)
        assert not len(decode_as(await link.node.service.unary("Late", encode(Late())), LateList).cause)
        consumer.flowing.set()
        taken = 0
        while taken < 3:
            taken += len((await consumer.down(Deliver)).birth)
        for _ in range(10):
            await asyncio.sleep(0)
        late = decode_as(await link.node.service.unary("Late", encode(Late())), LateList)
        assert sorted(late.ids) == [b"first", b"second", b"third"]
        assert {LateCause(cause) for cause in late.cause.tolist()} == {LateCause.NO_CREDIT}


@pytest.mark.slow
async def test_what_waits_for_a_slow_reader_beyond_its_lease_loses_no_delivery():
    async with broker() as link:
        consumer = await link.consume(credit=2, lease_ms=500)
        consumer.flowing.clear()
        await link.put(["first"])
        await link.put(["second"])
        while await link.ids(State.LEASED) != [b"first", b"second"]:
            await asyncio.sleep(0)
        while await link.ids(State.LEASED):
            await asyncio.sleep(0)
        consumer.flowing.set()
        (dealer,), (connected,) = link.node.dealers, link.node.dealers.consumers()
        while connected.outbox:
            await asyncio.sleep(0)
        await dealer.quiet()
        assert (await link.deliveries())[b"second"] == 0
