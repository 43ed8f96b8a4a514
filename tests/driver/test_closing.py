"""Settles when one side goes: the consumer while a settle of it rests, or the broker while acks of it gather."""

from __future__ import annotations

import asyncio

import timeline
from tests.broker.slow import SlowStore
from tests.driver.broker import Broker


async def _after_a_refusal(store: SlowStore) -> None:
    """Returns once the store has refused a settle; from then on it refuses none."""
    async with asyncio.timeout(10):
        while not store.calls["settle"]:
            await asyncio.sleep(0)
    store.refuse.clear()


async def test_acks_that_rest_are_sent_again_before_the_consumer_leaves() -> None:
    """An awaited one is on its way when it closes; one that nobody waits for still gathers."""
    store = SlowStore()
    broker = Broker(store)
    await broker.start()
    told: list[timeline.TimelineError] = []
    async with timeline.connect(broker.address, timeout="10s") as tl:
        await tl.create_topic("t")
        async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
            c.on_settle_error = lambda _, error: told.append(error)
            await p.produce_many([timeline.Message(b"", in_=0, id=id) for id in ("awaited", "soon")])
            first, second = [await anext(aiter(c)) for _ in range(2)]
            store.refuse.add("settle")
            refused = asyncio.ensure_future(_after_a_refusal(store))
            awaited = asyncio.ensure_future(first.ack())
            await asyncio.sleep(0)
            second.ack_soon()
        await refused
        await awaited
        assert not told
        assert [m.id async for m in tl.scan("t")] == []
    await broker.stop()


async def test_acks_that_gather_when_the_broker_drains_still_reach_it() -> None:
    """Another broker, or the same one started again, may come too late for them."""
    store = SlowStore()
    broker = Broker(store)
    await broker.start()
    async with timeline.connect(broker.address, timeout="10s") as tl:
        topic = await tl.create_topic("t")
        async with tl.producer("t") as p:
            await p.produce_many([timeline.Message(b"", in_=0, id=f"m{n}") for n in range(4)])
        c = tl.consumer("t", id="w")
        deliveries = [await anext(aiter(c)) for _ in range(4)]
        draining = asyncio.ensure_future(broker.drain_streams())
        for d in deliveries:
            d.ack_soon()
        await draining
        assert store.calls["settle"] == 1
        await broker.start()
        assert [m.id async for m in tl.scan(topic.name)] == []
        await c.aclose()
    await broker.stop()
