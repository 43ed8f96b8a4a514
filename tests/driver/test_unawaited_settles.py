"""How long the driver keeps what it has in hand: from its first moment, and while no broker is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import timeline
from tests.broker.slow import SlowStore
from tests.driver.broker import Broker
from timeline.driver.consume import session


async def _away(tl: timeline.Timeline) -> None:
    """Returns once calls of the client have been given up, one after the other: what was as patient as they is, too."""
    for _ in range(3):
        with pytest.raises(timeline.TimelineError):
            await tl.get("t", "m")


@pytest.mark.slow
@pytest.mark.parametrize("lease", ["150ms", "600ms", "2s"])
async def test_the_first_handler_keeps_its_message_on_a_topic_of_short_leases(broker: Broker, lease: str) -> None:
    """The consumer knows how long they last only once it is connected."""
    async with timeline.connect(broker.address) as tl:
        await tl.create_topic("t", lease=lease)

        async def works(d: timeline.Delivery) -> None:
            ends = {d.lease_until_ms}
            while len(ends) < 4:
                await asyncio.sleep(0)
                ends.add(d.lease_until_ms)
            c.stop_taking()

        async with tl.producer("t") as p, tl.consumer("t") as c:
            await p.produce(b"", in_=0, id="m")
            await c.run(works)
            assert (c.stats.delivered, c.stats.lost) == (1, 0)
        assert await tl.get("t", "m") is None


@asynccontextmanager
async def _at_work(tl: timeline.Timeline, grace: str) -> AsyncIterator[tuple[timeline.Consumer, asyncio.Event]]:
    """A consumer whose handler has a message for an hour, and works until the event is set; `run` has ended behind."""
    await tl.create_topic("t")
    working, done = asyncio.Event(), asyncio.Event()

    async def works(d: timeline.Delivery) -> None:
        working.set()
        await done.wait()

    async with tl.producer("t") as p, tl.consumer("t", lease="1h") as c:
        await p.produce(b"", in_=0, id="m")
        running = asyncio.ensure_future(c.run(works, grace=grace))
        await working.wait()
        yield c, done
        c.stop_taking()
        await running


@pytest.mark.slow
async def test_what_a_handler_has_done_is_settled_though_the_broker_is_away_longer_than_calls_wait() -> None:
    async with Broker(SlowStore()) as broker:  # a store that outlasts it
        async with timeline.connect(broker.address, timeout="100ms") as tl:
            async with _at_work(tl, grace="1h") as (c, done):
                await broker.drain_streams()
                done.set()
                await _away(tl)
                await broker.start()
            assert c.stats.settle_errors == 0
        async with timeline.connect(broker.address) as tl:
            assert await tl.get("t", "m") is None


@pytest.mark.slow
async def test_who_ends_while_the_broker_is_away_is_told_what_was_done_and_not_settled(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    async with timeline.connect(broker.address, timeout="100ms") as tl:
        async with _at_work(tl, grace="1ms") as (c, done):
            await broker.drain_streams()
            done.set()
            await _away(tl)
        assert c.stats.settle_errors == 1
    said = [record.message for record in caplog.records]
    assert "ack of 'm' was not taken: UNAVAILABLE 'm': it was closed before it could be sent" in said
    assert not [line for line in said if "did not finish" in line]


@pytest.mark.slow
async def test_acks_that_nobody_waits_for_are_tried_as_long_as_the_lease_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "QUIET_TIMEOUT_MS", 1.0)
    store = SlowStore()
    async with Broker(store) as broker, timeline.connect(broker.address, timeout="100ms") as tl:
        await tl.create_topic("t", lease="1h")
        async with tl.producer("t") as p, tl.consumer("t") as c:
            await p.produce(b"", in_=0, id="m")
            d = await anext(aiter(c))
            store.refuse = {"settle"}
            d.ack_soon()
            while not store.calls["settle"]:
                await asyncio.sleep(0)
            await broker.drain_streams()
            await _away(tl)
            store.refuse = set()
            await broker.start()
            while (await _found(tl)) is not None:
                await asyncio.sleep(0)
            assert c.stats.settle_errors == 0


async def _found(tl: timeline.Timeline) -> object:
    """The message; itself a reason to look again while the broker cannot be asked."""
    try:
        return await tl.get("t", "m")
    except timeline.Unavailable as away:
        return away


async def test_the_next_handler_does_not_wait_for_an_answer_and_run_waits_for_all() -> None:
    store, handled, both = SlowStore(), list[str](), asyncio.Event()

    async def works(d: timeline.Delivery) -> None:
        handled.append(d.id)
        if len(handled) == 2:
            both.set()

    async with Broker(store) as broker, timeline.connect(broker.address) as tl:
        await tl.create_topic("t")
        async with tl.producer("t") as p, tl.consumer("t") as c:
            store.hold("settle")
            for id in ("a", "b"):
                await p.produce(b"", in_=0, id=id)
            running = asyncio.ensure_future(c.run(works, concurrency=1))
            await both.wait()
            c.stop_taking()
            await store.arrived("settle")
            assert not running.done()
            store.release("settle")
            await running
            assert [await tl.get("t", id) for id in ("a", "b")] == [None, None]
            assert c.stats.settle_errors == 0


async def test_no_more_are_in_flight_than_handlers_and_as_many_again() -> None:
    store, handled = SlowStore(), list[str]()

    async def works(d: timeline.Delivery) -> None:
        handled.append(d.id)

    async with Broker(store) as broker, timeline.connect(broker.address) as tl:
        await tl.create_topic("t")
        async with tl.producer("t") as p, tl.consumer("t") as c:
            await p.produce_many(timeline.Batch([b""] * 50, in_=0))
            store.hold("settle")
            running = asyncio.ensure_future(c.run(works, concurrency=4))
            await store.arrived("settle")
            while len(handled) < 8:
                await asyncio.sleep(0)
            await tl.ping()  # what was on its way has come
            assert len(handled) == 8
            store.release("settle")
            while len(handled) < 50:
                await asyncio.sleep(0)
            c.stop_taking()
            await running
            assert [m async for m in tl.scan("t")] == []
