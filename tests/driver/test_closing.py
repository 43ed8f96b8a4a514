"""Settles when one side goes: the consumer while a settle of it rests, or the broker while acks of it gather."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

import timeline
from tests.broker.slow import SlowStore
from tests.driver.broker import Broker
from timeline.driver.consume import settler
from timeline.driver.consume.session import ConsumerSession, ConsumeStream
from timeline.driver.produce.produce_stream import ProduceStream
from timeline.driver.transport.channel import OpenedStream
from timeline.model import LeavingReason
from timeline.wire import Frame, Leaving, Welcome


async def _in_hand(tl: timeline.Timeline, count: int) -> tuple[timeline.Consumer, list[timeline.Delivery]]:
    """A consumer of a new topic, and what it was given."""
    await tl.create_topic("t")
    async with tl.producer("t") as p:
        await p.produce_many([timeline.Message(b"", in_=0, id=f"m{n}") for n in range(count)])
    c = tl.consumer("t", id="w")
    return c, [await anext(aiter(c)) for _ in range(count)]


async def _after_a_refusal(store: SlowStore) -> None:
    """Returns once the store has refused a settle; from then on it refuses none."""
    async with asyncio.timeout(10):
        while not store.calls["settle"]:
            await asyncio.sleep(0)
    store.refuse.clear()


@pytest.mark.slow
async def test_acks_that_rest_are_sent_again_before_the_consumer_leaves() -> None:
    """An awaited one is on its way when it closes; one that nobody waits for still gathers."""
    store = SlowStore()
    told: list[timeline.TimelineError] = []
    async with Broker(store) as broker, timeline.connect(broker.address, timeout="10s") as tl:
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


async def test_acks_that_gather_when_the_broker_drains_still_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another broker, or the same one started again, may come too late for them."""
    monkeypatch.setattr(settler, "GATHER_MS", 3_600_000.0)
    store = SlowStore()
    async with Broker(store) as broker, timeline.connect(broker.address, timeout="10s") as tl:
        c, deliveries = await _in_hand(tl, 4)
        draining = asyncio.ensure_future(broker.drain_streams())
        for d in deliveries:
            d.ack_soon()
        await draining
        assert store.calls["settle"] == 1
        await broker.start()
        assert [m.id async for m in tl.scan("t")] == []
        await c.aclose()


async def test_acks_that_are_awaited_when_the_broker_drains_still_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others gather behind the first."""
    told, take = asyncio.Event(), ConsumerSession._take

    def listening(session: ConsumerSession, stream: ConsumeStream, frame: Frame) -> None:
        take(session, stream, frame)
        if stream.leaving is not None:
            told.set()

    monkeypatch.setattr(ConsumerSession, "_take", listening)
    store = SlowStore()
    async with Broker(store) as broker, timeline.connect(broker.address, timeout="10s") as tl:
        c, deliveries = await _in_hand(tl, 6)
        store.hold("settle")
        acks = [asyncio.ensure_future(deliveries[0].ack())]
        while not c._settler.queue.outstanding:
            await asyncio.sleep(0)
        acks += [asyncio.ensure_future(d.ack()) for d in deliveries[1:]]
        draining = asyncio.ensure_future(broker.drain_streams())
        await told.wait()
        store.release("settle")
        await draining
        await asyncio.gather(*acks)  # by nobody else: no broker is there
        await broker.start()
        await c.aclose()


@pytest.mark.slow
async def test_a_broker_that_drains_while_something_is_sent_still_gets_what_gathers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settler, "GATHER_MS", 3_600_000.0)
    beating, beat = asyncio.Event(), ConsumerSession._beat

    async def long(session: ConsumerSession, stream: ConsumeStream, now_ms: float) -> None:
        await beat(session, stream, now_ms)
        beating.set()
        while stream.leaving is None and not stream.over:
            await asyncio.sleep(0)

    store = SlowStore()
    async with Broker(store) as broker, timeline.connect(broker.address, timeout="10s") as tl:
        c, deliveries = await _in_hand(tl, 4)
        monkeypatch.setattr(ConsumerSession, "_beat", long)
        await beating.wait()
        draining = asyncio.ensure_future(broker.drain_streams())
        for d in deliveries:
            d.ack_soon()
        await draining
        assert store.calls["settle"] == 1
        monkeypatch.undo()
        await broker.start()
        await c.aclose()


@pytest.mark.parametrize("reason", LeavingReason)
def test_only_a_broker_that_drains_hears_more_and_that_once(reason: LeavingReason) -> None:
    stream = ConsumeStream(OpenedStream("a", None), 0.0)  # type: ignore[arg-type]
    assert not stream.hears
    stream.welcome = Welcome("b", 0, 1, 1, 1, 1)
    assert stream.hears
    stream.leaving = Leaving(reason, "")
    assert stream.hears is (reason is LeavingReason.DRAINING)
    stream.heard_out = True
    assert not stream.hears
    stream.farewell = True  # it answers what this side said, and reads on
    assert stream.hears


async def test_calls_after_a_close_say_what_was_closed_and_what_to_open_again(broker: Broker) -> None:
    async with timeline.connect(broker.address, timeout="10s") as tl:
        await tl.create_topic("t")
        p, c = tl.producer("t"), tl.consumer("t", id="w")
        await p.produce(b"", in_=0)
        delivery = await c.take()
        assert delivery is not None
        await p.aclose()
        await c.aclose()
        for call, said in ((p.produce(b"", in_=0), "tl.producer"), (p.move("m", in_=0), "tl.producer")):
            with pytest.raises(timeline.Closed, match=said):
                await call
        with pytest.raises(timeline.Closed, match="the consumer was closed"):
            await delivery.ack()
        other = tl.producer("t")
    for call in (p.produce(b"", in_=0), other.produce(b"", in_=0), other.cancel_many(["m"]), delivery.ack()):
        with pytest.raises(timeline.Closed, match=r"the client was closed\. Connect again"):
            await call


async def test_an_abandoned_producer_leaves_once_though_its_client_is_closed_meanwhile(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second end would cancel it while it leaves. Its call would then be cut off."""
    ended: list[bool] = []
    part = ProduceStream._part

    async def noted(stream: ProduceStream, *given: Any) -> None:
        ended.append(False)
        await part(stream, *given)
        ended[-1] = True

    monkeypatch.setattr(ProduceStream, "_part", noted)
    async with timeline.connect(broker.address, timeout="10s") as tl:
        await tl.create_topic("t")
        await tl.producer("t").produce(b"", in_="1h")
        gc.collect()
        while not ended:
            await asyncio.sleep(0)
    assert ended == [True]


async def test_a_close_that_is_cancelled_cuts_off_an_abandoned_producer_that_leaves(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing goes on behind a close that has ended. Its event loop may end, too."""
    leaving, left = asyncio.Event(), asyncio.Event()

    async def never(stream: ProduceStream, *given: Any) -> None:
        leaving.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    tl = timeline.connect(broker.address, timeout="10s")
    await tl.create_topic("t")
    await tl.producer("t").produce(b"", in_="1h")
    monkeypatch.setattr(ProduceStream, "_part", never)
    gc.collect()
    closing = asyncio.ensure_future(tl.aclose())
    await leaving.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert left.is_set()


async def test_a_close_that_is_cancelled_leaves_no_stream_of_a_producer_open(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving = asyncio.Event()

    async def never(stream: ProduceStream, *given: Any) -> None:
        leaving.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(ProduceStream, "_part", never)
    async with timeline.connect(broker.address, timeout="10s") as tl:
        await tl.create_topic("t")
        p = tl.producer("t")
        await p.produce(b"", in_="1h", id="m")
        await p.move("m", in_="2h")
        closing = asyncio.ensure_future(p.aclose())
        await leaving.wait()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        left = {task.get_coro().__qualname__ for task in asyncio.all_tasks()}  # type: ignore[union-attr]
        assert not left & {"ProduceStream._read", "QueueRunner._run"}


async def test_a_consumer_that_is_stopped_before_its_first_use_takes_nothing(tl: timeline.Timeline) -> None:
    """As by a signal that comes while the topic is created."""
    await tl.producer("t").produce(b"", in_=0)
    async with tl.consumer("t") as c:
        c.stop_taking()
        assert [d async for d in c] == []
        assert await c.take() is None
