"""`Consumer.take`: a few deliveries at a time, within a bounded wait."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

import timeline
from tests.driver.broker import Broker
from timeline import Batch, Closed, Invalid, Unavailable
from timeline.broker.limits import Limits


async def _buffered(c: timeline.Consumer, count: int) -> None:
    """Returns once `count` messages wait in the consumer's buffer."""
    c.open()
    while sum(frame.waiting for frame in c._in_flight.frames) < count:
        await asyncio.sleep(0)


async def test_a_take_returns_what_is_there_up_to_its_max(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p, tl.consumer("t", id="w1") as c:
        await p.produce_many(Batch([b""] * 5, in_=0, ids=list("abcde")))
        await _buffered(c, 5)
        first = await c.take(3, wait="20s")
        rest = await c.take(max=10)
        assert (len(first), len(rest)) == (3, 2)
        assert sorted(d.id for d in (*first, *rest)) == list("abcde")
        for d in (*first, *rest):
            await d.ack()
    assert [m async for m in tl.scan("t")] == []


async def test_a_take_waits_for_one_and_no_longer(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p, tl.consumer("t", id="w1") as c:
        taking = asyncio.ensure_future(c.take(max=10, wait="60s"))
        await _buffered(c, 0)
        assert not taking.done()
        await p.produce(b"", in_=0, id="a")
        assert [d.id for d in await taking] == ["a"]


async def test_the_former_name_of_the_wait_warns(tl: timeline.Timeline) -> None:
    async with tl.consumer("t") as c:
        with pytest.warns(DeprecationWarning, match=r"called take\(wait=\) now") as warned:
            assert await c.take(max=1, timeout=0) == []
    assert warned[0].filename == __file__


async def test_a_take_of_nothing_is_an_empty_list_after_its_wait(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p, tl.consumer("t", id="w1") as c:
        assert await c.take(10, wait=0) == await c.take(10, wait="5ms") == []
        await p.produce(b"", in_=0)
        await _buffered(c, 1)
        assert len(await c.take(10, wait=0)) == 1
        assert await c.take(10, wait=0) == []


@pytest.mark.slow
async def test_a_take_leaves_the_rest_to_an_iteration(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p, tl.consumer("t", id="w1", credit=4) as c:
        await p.produce_many(Batch([b""] * 200, in_=0))
        met: list[str] = []

        async def iterate() -> None:
            async for d in c:
                met.append(d.id)
                await d.ack()

        iterating = asyncio.ensure_future(iterate())
        while len(met) < 200:
            for d in await c.take(max=1, wait="5ms"):
                met.append(d.id)
                await d.ack()
        assert len(set(met)) == len(met) == 200
        iterating.cancel()


@pytest.mark.slow
async def test_one_at_a_time_goes_on_past_the_credit(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p, tl.consumer("t", id="w1", credit=4) as c:
        await p.produce_many(Batch([b""] * 50, in_=0))
        for _ in range(50):
            (d,) = await c.take(max=1, wait="20s")
            await d.ack()
        assert await c.take(max=1, wait=0) == []


@pytest.mark.slow
async def test_a_cancelled_take_loses_no_delivery(tl: timeline.Timeline) -> None:
    """Cancelled at every moment: before anything came, when it has come, and when it is about to be handed out."""
    await tl.update_topic("t", lease="1h")  # none may run out, however slow the machine
    async with tl.producer("t") as p, tl.consumer("t", id="w1", credit=200) as c:
        met: list[timeline.Delivery] = []
        cancelled = rounds = 0
        while len(met) < 200:
            if rounds % 2 == 0 and rounds < 400:
                await p.produce(b"", in_=0)
            taking = asyncio.ensure_future(c.take(max=3))
            for _ in range(rounds % 23):
                await asyncio.sleep(0)
            taking.cancel()
            try:
                met += await taking
            except asyncio.CancelledError:
                cancelled += 1
            rounds += 1
        assert cancelled > 10
        assert {d.deliveries for d in met} == {1} and len({d.id for d in met}) == c.stats.delivered == 200


async def test_a_take_never_hands_out_what_its_lease_has_left(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p, tl.consumer("t", id="w1") as c:
        await p.produce_many(Batch([b""] * 3, in_=0))
        await _buffered(c, 3)
        for frame in c._in_flight.frames:
            frame.end_ms[:] = frame.earliest_ms = 0.0
        assert await c.take(max=10, wait=0) == []
        assert c.stats.dropped == 3


async def test_a_closed_consumer_says_so_to_a_bounded_take(tl: timeline.Timeline) -> None:
    """An empty list would have a loop of takes spin for ever."""
    c = tl.consumer("t", id="w1")
    waiting = asyncio.ensure_future(c.take(max=1))
    await _buffered(c, 0)
    c.stop_taking()
    for take in (waiting, c.take(max=1, wait="1s")):
        with pytest.raises(Closed, match="takes nothing more"):
            await take
    await c.aclose()
    with pytest.raises(Closed, match="takes nothing more"):
        await c.take(max=1, wait="1s")
    assert await c.take() is None


async def test_a_take_raises_as_an_iteration_does(broker: Broker, tl: timeline.Timeline) -> None:
    with pytest.raises(timeline.NotFound):
        await tl.consumer("nowhere").take(max=1, wait="20s")


@pytest.mark.slow
@pytest.mark.parametrize("said", ["nobody listens at", "did not answer in time"])
def test_a_wait_that_ends_before_a_broker_is_there_says_why_in_both_drivers(said: str) -> None:
    """The client's own timeout is longer, so the consumer has not given up when the wait ends."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{1 if said.startswith('nobody') else silent.getsockname()[1]}"

        async def ask() -> None:
            async with timeline.connect(address, timeout="2s") as tl, tl.consumer("t") as c:
                with pytest.raises(Unavailable, match=said):
                    await c.take(max=1, wait="1s")

        asyncio.run(ask())
        with (
            timeline.connect_sync(address, timeout="2s") as tl,
            tl.consumer("t") as c,
            pytest.raises(Unavailable, match=said),
        ):
            c.take(max=1, wait="1s")


@pytest.mark.slow
async def test_a_consumer_that_the_broker_has_no_stream_for_does_not_look_like_an_empty_topic() -> None:
    async with Broker(limits=Limits(streams_per_peer=1)) as broker, timeline.connect(broker.address, "10s") as tl:
        await tl.create_topic("t")
        async with tl.consumer("t") as first, tl.consumer("t") as second:
            assert await first.take(max=1, wait="20ms") == []
            while not first.welcomed:
                await asyncio.sleep(0)
            with pytest.raises(Unavailable, match="max_streams_per_peer"):
                await second.take(max=1, wait="1s")


@pytest.mark.slow
async def test_a_consumer_that_lost_its_broker_gets_an_empty_list(broker: Broker, tl: timeline.Timeline) -> None:
    async with tl.consumer("t") as c:
        c.open()
        while not c.welcomed:
            await asyncio.sleep(0)
        await broker.stop()
        assert await c.take(max=1, wait="1s") == []


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"max": 0}, "max must be a whole number from 1"),
        ({"max": True}, "max must be a whole number from 1"),
        ({"max": 2.0}, "max must be a whole number from 1"),
        ({"max": 10**9}, "max must be a whole number from 1 to 100000"),
        ({"max": 1, "wait": -1}, "wait must not be negative"),
        ({"max": 1, "wait": "soon"}, "wait must be numbers with a unit"),
        ({"wait": "1s"}, r"Use take\(max=1, wait=…\)"),
    ],
)
def test_takes_that_cannot_be_meant_are_refused_in_both_drivers(served: str, asked: dict[str, Any], said: str) -> None:
    async def ask() -> None:
        async with timeline.connect(served) as tl, tl.consumer("t") as c:
            with pytest.raises(Invalid, match=said):
                await c.take(**asked)

    asyncio.run(ask())
    with timeline.connect_sync(served) as tl, tl.consumer("t") as c, pytest.raises(Invalid, match=said):
        c.take(**asked)
