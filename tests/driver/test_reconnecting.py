"""Brokers that go away, under calls and consumers."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import timeline
from tests.driver.broker import Broker
from timeline import Batch, Status
from timeline.clock import Clock
from timeline.driver.consume.session import Outage, Subscription
from timeline.driver.transport.channel import Channel


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Broker, Broker]]:
    """Two brokers that share one store object in memory."""
    first = Broker(name="b1")
    await first.start()
    assert first.store is not None
    first.store.capabilities = dataclasses.replace(first.store.capabilities, shared=True)
    second = Broker(store=first.store, name="b2")
    await second.start()
    yield first, second
    await second.stop()
    await first.stop()


@pytest.fixture
async def lasting(tmp_path: Path) -> AsyncIterator[tuple[Broker, timeline.Timeline]]:
    """A broker on a file, which survives its restarts, and a client of it."""
    file = f"sqlite:///{tmp_path}/timeline.db"
    async with Broker(file) as broker, timeline.connect(broker.address, timeout="20s") as tl:
        await tl.create_topic("t")
        yield broker, tl


async def test_a_call_outlives_a_broker_that_comes_back(lasting: tuple[Broker, timeline.Timeline]) -> None:
    broker, tl = lasting
    async with tl.producer("t") as p:
        await p.produce(b"1", in_="1h", id="m1")
        calls = [asyncio.ensure_future(p.produce(b"%d" % n, in_="1h", id=f"n{n}")) for n in range(100)]
        await asyncio.sleep(0)
        restarted = asyncio.ensure_future(broker.restart())
        receipts = await asyncio.gather(*calls)
        assert {r.status for r in receipts} == {Status.OK}
        await restarted
        assert (await p.move("m1", in_="2h")).version == 2
    assert len([m async for m in tl.scan("t")]) == 101


@pytest.mark.slow
async def test_a_consumer_keeps_its_leases_across_a_broken_stream(lasting: tuple[Broker, timeline.Timeline]) -> None:
    broker, tl = lasting
    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        await p.produce_many(Batch([b""] * 20, in_=0))
        held = [await c.take() for _ in range(20)]
        await broker.restart()
        for d in held:
            assert d is not None and d.version == 2
            await d.ack()
        await p.produce(b"later", in_=0)
        later = await c.take()
        assert later is not None and later.payload == b"later"
        await later.ack()
    assert [m async for m in tl.scan("t")] == []
    assert c.stats.reconnects >= 1


@pytest.mark.slow
async def test_on_leaving_a_consumer_goes_to_another_broker(pair: tuple[Broker, Broker]) -> None:
    first, second = pair
    async with timeline.connect(f"{first.address},{second.address}", timeout="10s") as tl:
        await tl.create_topic("t")
        async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
            await p.produce(b"1", in_=0)
            d = await c.take()
            assert d is not None
            at = tl._context.channel.current
            here, there = (first, second) if at == first.address else (second, first)
            await here.drain_streams()
            await d.ack()
            await p.produce(b"2", in_=0)
            d = await c.take()
            assert d is not None and d.payload == b"2"
            await d.ack()
            assert tl._context.channel.current == there.address


@pytest.mark.slow
async def test_never_sent_is_unavailable_and_names_the_message() -> None:
    async with timeline.connect("127.0.0.1:1", timeout="200ms") as tl:
        with pytest.raises(timeline.Unavailable) as never:
            await tl.producer("t").produce(b"", in_=0, id="m")
        assert never.value.id == "m" and never.value.retryable
        with pytest.raises(timeline.Unavailable):
            await tl.producer("t").move("m", in_=0)
        with pytest.raises(timeline.Unavailable):
            await tl.producer("t").produce_many([timeline.Message(b"", in_=0)])
        with pytest.raises(timeline.Unavailable, match=r"127\.0\.0\.1:1"):
            await tl.topics()
        with pytest.raises(timeline.Unavailable):
            await tl.consumer("t").take()


async def test_sent_and_never_answered_is_unknown() -> None:
    broker = Broker()
    await broker.start()
    try:
        async with timeline.connect(broker.address, timeout="10s") as tl:
            await tl.create_topic("t")
            async with tl.producer("t") as p:
                await p.produce(b"", in_="1h", id="m")
                held = broker.hold()
                with pytest.raises(timeline.Unknown) as unknown:
                    await p.produce(b"", in_="1h", id="n", timeout="100ms")
                assert unknown.value.id == "n"
                held.set()
                assert (await p.produce(b"", in_="1h", id="n")).status is Status.DUPLICATE
    finally:
        await broker.stop()


async def test_of_several_addresses_a_dead_one_is_passed_over(broker: Broker) -> None:
    async with timeline.connect(f"127.0.0.1:1,{broker.address}", timeout="10s") as tl:
        await tl.create_topic("t")
        async with tl.producer("t") as p:
            assert (await p.produce(b"", in_="1h")).ok


async def test_closing_flushes_what_is_on_its_way(broker: Broker) -> None:
    tl = timeline.connect(broker.address)
    await tl.create_topic("t")
    p = tl.producer("t")
    calls = [asyncio.ensure_future(p.produce(b"", in_="1h")) for _ in range(50)]
    await asyncio.sleep(0)
    await tl.aclose()
    assert all(r.ok for r in await asyncio.gather(*calls))
    for call in (p.produce(b"", in_="1h"), p.cancel("m"), p.produce_many([]), tl.topics()):
        with pytest.raises(timeline.Closed):
            await call


@pytest.mark.slow
async def test_an_outage_is_told_of_once_and_its_end_once(
    lasting: tuple[Broker, timeline.Timeline], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broker, tl = lasting
    tried_in_vain, failures = asyncio.Event(), 0
    failed = Channel.failed

    def counted(channel: Channel, address: str, trouble: str, *found: Any) -> None:
        nonlocal failures
        failures += 1
        if failures == 4:
            tried_in_vain.set()
        failed(channel, address, trouble, *found)

    monkeypatch.setattr(Channel, "failed", counted)
    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        await p.produce(b"before", in_=0)
        await _acked(c)
        assert caplog.records == []
        await broker.stop()
        await tried_in_vain.wait()
        await broker.start()
        await p.produce(b"after", in_=0)
        await _acked(c)
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 2, told
    assert told[0].startswith("consumer w of t lost its broker, and tries to reach one:") and broker.address in told[0]
    assert told[1].startswith(f"consumer w of t has a broker again, at {broker.address}, after ")


def test_an_outage_counts_from_when_the_draining_broker_ended_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 100.0
    outage = Outage(Subscription("t", "w", 1, 0), Clock(monotonic_s=lambda: now_s))
    outage.dismissed()
    outage.over("b1")
    assert caplog.records == []  # another one took it: no outage
    outage.dismissed()
    now_s += 5.0
    outage.begins("b1: refused")
    now_s += 1.0
    outage.begins("b1: refused")
    outage.over("b1")
    outage.over("b1")
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "consumer w of t lost its broker, and tries to reach one: b1: refused",
        "consumer w of t has a broker again, at b1, after 6.0 s",
    ]


async def _acked(consumer: timeline.Consumer) -> None:
    delivery = await consumer.take()
    assert delivery is not None
    await delivery.ack()
