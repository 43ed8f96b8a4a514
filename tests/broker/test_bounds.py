"""Bounds in bytes: what callers ask of a slow store, what they say of themselves, what they may claim to take."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import numpy as np
import pytest

from tests.broker.link import broker, statuses
from tests.broker.slow import SlowStore
from timeline.broker.api import consume
from timeline.broker.limits import Limits
from timeline.columns import Ragged
from timeline.model import Operation, Status
from timeline.wire import (
    BrokerStatus,
    Credit,
    Deliver,
    Fault,
    Hello,
    StatusRequest,
    TransportError,
    Welcome,
    decode_as,
    encode,
)
from timeline.wire.frames import MAX_COUNT


async def test_settles_that_wait_are_bounded_in_bytes():
    store = SlowStore()
    async with broker(store, Limits(settles_bytes=1_500)) as link:
        await link.put(["a", "b", "c"])
        pipes = [await link.consume(name, credit=1) for name in ("c1", "c2", "c3")]
        got = [await pipe.down(Deliver) for pipe in pipes]
        store.hold("settle")
        first = asyncio.ensure_future(link.settle(pipes[0], got[0], Operation.BURY, reason=b"x" * 1_000))
        await store.arrived("settle")
        assert statuses(await link.settle(pipes[1], got[1], Operation.BURY, reason=b"y" * 1_000)) == [Status.THROTTLED]
        small = asyncio.ensure_future(link.settle(pipes[2], got[2], Operation.ACK))
        store.release("settle")
        assert [statuses(await answer) for answer in (first, small)] == [[Status.OK]] * 2
        # All of it is free again.
        assert statuses(await link.settle(pipes[1], got[1], Operation.BURY, reason=b"y" * 1_000)) == [Status.OK]
        assert link.node.settling._quota.bytes == 0


async def test_calls_under_way_are_bounded_in_bytes():
    store = SlowStore()
    async with broker(store, Limits(calls_bytes=2_000)) as link:
        store.hold("mutate")
        first = asyncio.ensure_future(link.mutate(Operation.CANCEL, ["a" * 255] * 6))
        await store.arrived("mutate")
        with pytest.raises(TransportError) as refused:
            await link.mutate(Operation.CANCEL, ["b" * 255] * 6)
        assert refused.value.fault is Fault.OVERLOADED
        store.release("mutate")
        assert statuses(await first) == [Status.NOT_FOUND] * 6
        assert statuses(await link.mutate(Operation.CANCEL, ["b" * 255] * 60)) == [Status.NOT_FOUND] * 60


@pytest.mark.slow
async def test_what_a_consumer_said_it_has_in_hand_is_not_kept(monkeypatch: pytest.MonkeyPatch):
    seen: list[weakref.ref[Any]] = []
    read = consume.decode_as

    def watched(data: bytes, kind: type[Hello]) -> Hello:
        frame = read(data, kind)
        seen.append(weakref.ref(frame.birth))
        return frame

    monkeypatch.setattr(consume, "decode_as", watched)
    async with broker() as link:
        pipe = await link.consume()
        pipe.up(Credit(echo=1))
        await pipe.down()
        gc.collect()
        assert len(seen) == 1 and seen[0]() is None
        assert len(link.node.service.streams) == 1


async def test_credit_without_measure_does_not_keep_a_broker_from_saying_how_it_stands():
    none = np.zeros(0, dtype=np.uint64)
    async with broker() as link:
        for name in ("greedy", "greedier"):
            pipe = link.open("Consume")
            pipe.up(Hello("t", name, 1, 0, MAX_COUNT, MAX_COUNT, Ragged.of([]), none, none.astype(np.int64)))
            await pipe.down(Welcome)
            for _ in range(2):
                pipe.up(Credit(MAX_COUNT, MAX_COUNT))
            pipe.up(Credit(echo=7))
            await pipe.down()
        told = decode_as(await link.node.service.unary("Stand", encode(StatusRequest("t", 10))), BrokerStatus)
        assert told.topics.credit.tolist() == [MAX_COUNT]
        assert told.consumers.credit_messages.tolist() == told.consumers.credit_bytes.tolist() == [MAX_COUNT] * 2
