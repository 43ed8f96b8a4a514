"""Bounds on streams and scans: what is past them is refused with a sentence, what is stuck ends, and counts no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from tests.broker.link import Link, Pipe, broker, statuses
from tests.faults.hostile import hello
from timeline.broker.dispatch.roster import ConsumerHealth
from timeline.broker.limits import Limits
from timeline.clock import Clock
from timeline.model import LeavingReason, Status
from timeline.wire import (
    Deliver,
    Fault,
    Leaving,
    Scan,
    TransportError,
    Welcome,
    encode,
)


async def fault_of(pipe: Pipe) -> TransportError:
    """Why the broker ended a stream."""
    assert pipe.task is not None
    await asyncio.wait([pipe.task])
    fault = pipe.task.exception()
    assert isinstance(fault, TransportError)
    return fault


async def gone(link: Link, left: int) -> None:
    """Returns when so many streams are left."""
    while len(link.node.service.streams) > left:
        await link.node.service.streams.ended(60.0)


async def test_streams_past_the_limit_of_a_host_or_of_the_broker_are_refused_and_others_go_on():
    async with broker(limits=Limits(streams=4, streams_per_peer=3)) as link:
        first = await link.consume("c0")
        others = [link.open("Produce", "ipv4:10.0.0.1:77"), link.open("Consume", "ipv4:10.0.0.1:78")]
        third = link.open("Consume", "ipv4:10.0.0.1:79")
        refused = await fault_of(link.open("Produce", "ipv4:10.0.0.2:77"))
        assert refused.fault is Fault.OVERLOADED
        assert "4 streams" in refused.reason and "max_streams" in refused.reason
        third.cancel()
        await gone(link, 3)
        one_more = link.open("Consume", "ipv4:10.0.0.1:80")
        others[0].cancel()
        await gone(link, 3)
        again = link.open("Consume", "ipv4:10.0.0.1:81")
        first.cancel()
        await gone(link, 3)
        per_peer = await fault_of(link.open("Consume", "ipv4:10.0.0.1:82"))
        assert per_peer.fault is Fault.OVERLOADED
        assert "ipv4:10.0.0.1 has 3 streams" in per_peer.reason and "max_streams_per_peer" in per_peer.reason
        for pipe in (others[1], one_more, again):
            pipe.cancel()
        await gone(link, 0)
        assert statuses(await link.put(["a"])) == [Status.OK]


@pytest.mark.parametrize("method", ["Produce", "Consume"])
async def test_a_stream_on_which_nothing_is_said_ends(method: str):
    async with broker(limits=Limits(hello_ms=5)) as link:
        fault = await fault_of(link.open(method))
        assert fault.fault is Fault.DEADLINE
        assert "5 ms" in fault.reason
        assert len(link.node.service.streams) == 0


async def test_a_superseded_stream_that_stopped_reading_ends_and_the_new_one_gets_the_rest():
    async with broker(limits=Limits(stall_ms=20, observe_every_ms=5)) as link:
        first = await link.consume(session=1)
        first.flowing.clear()
        await link.put(["a"])
        while first.sending == 0:
            await asyncio.sleep(0)
        second = await link.consume(session=2)
        assert first.task is not None
        await asyncio.wait([first.task])
        assert (await second.down(Deliver)).ids.tolist() == [b"a"]
        await gone(link, 1)


async def test_a_broker_that_was_held_up_ends_no_stream_before_it_has_looked_twice():
    """What its peers took meanwhile is read after its first look."""
    clock = Held()
    async with broker(limits=Limits(observe_every_ms=3_600_000), clock=Clock(clock.s, clock.s)) as link:
        consumers = [await link.consume(name) for name in ("reads", "does not")]
        for pipe in consumers:
            pipe.flowing.clear()
        await link.put([f"m{at}" for at in range(4)])
        while not all(pipe.sending for pipe in consumers):
            await asyncio.sleep(0)
        clock.gone_s += 12.0
        await link.node._look_over()
        consumers[0].flowing.set()
        while consumers[0].sending:
            await asyncio.sleep(0)
        await link.node._look_over()
        await gone(link, 1)
        assert [pipe.task is not None and pipe.task.done() for pipe in consumers] == [False, True]


class Held:
    """A clock that a test moves."""

    gone_s = 1_700_000_000.0

    def s(self) -> float:
        return self.gone_s


async def test_a_producer_that_stopped_reading_ends():
    async with broker(limits=Limits(stall_ms=20, observe_every_ms=5)) as link:
        pipe = link.open("Produce")
        pipe.flowing.clear()
        pipe.up(link.puts(["a"]))
        assert pipe.task is not None
        await asyncio.wait([pipe.task])
        await gone(link, 0)


async def test_a_stream_that_was_told_to_leave_and_stopped_reading_ends_though_its_topic_is_gone():
    async with broker(limits=Limits(stall_ms=20, observe_every_ms=5)) as link:
        consumer = await link.consume()
        consumer.flowing.clear()
        await link.put(["a"])
        while consumer.sending == 0:
            await asyncio.sleep(0)
        await link.drop()
        await gone(link, 0)


async def test_scans_past_the_limit_are_refused_and_one_that_is_given_up_counts_no_more():
    async with broker(limits=Limits(scans=2)) as link:
        await link.put([f"m{at}" for at in range(3)])
        running = [link.node.service.unary_stream("Scan", encode(Scan("t"))) for _ in range(2)]
        for scan in running:
            await anext(scan)
        with pytest.raises(TransportError) as refused:
            await anext(link.node.service.unary_stream("Scan", encode(Scan("t"))))
        assert refused.value.fault is Fault.OVERLOADED
        assert "2 scans" in refused.value.reason and "max_scans" in refused.value.reason
        await running[0].aclose()
        await anext(link.node.service.unary_stream("Scan", encode(Scan("t"))))


async def test_one_host_does_not_keep_all_others_from_scanning():
    async with broker(limits=Limits(scans=32)) as link:
        await link.put([f"m{at}" for at in range(3)])

        def scan(peer: str) -> AsyncGenerator[bytes, None]:
            return link.node.service.unary_stream("Scan", encode(Scan("t")), peer=peer)

        greedy = [scan(f"ipv4:10.0.0.1:{at}") for at in range(33)]
        begun = await asyncio.gather(*(anext(each) for each in greedy), return_exceptions=True)
        refused = [one for one in begun if isinstance(one, TransportError)]
        assert len(refused) == 2 and {one.fault for one in refused} == {Fault.OVERLOADED}
        other = scan("ipv4:10.0.0.2:1")
        assert await anext(other)
        for each in (*greedy, other):
            await each.aclose()


async def test_draining_tells_producers_to_leave():
    async with broker(limits=Limits(drain_streams_ms=60_000)) as link:
        pipe = link.open("Produce")
        pipe.up(link.puts(["a"]))
        await pipe.down()
        draining = asyncio.ensure_future(link.node.drain(60_000))
        assert (await pipe.down(Leaving)).reason is LeavingReason.DRAINING
        await pipe.close()
        await draining


async def test_where_many_are_connected_each_is_told_to_beat_less_often():
    limits = Limits(heartbeat_ms=10, heartbeats_per_s=10, heartbeat_cap_ms=250, heartbeats_missed=3)
    async with broker(limits=limits) as link:
        told = []
        for number in range(1, 5):
            pipe = link.open("Consume")
            pipe.to_broker.put_nowait(hello(f"c{number}", "t"))
            told.append((await pipe.down(Welcome)).heartbeat_ms)
        assert told == [100, 200, 250, 250]
        second = next(iter(link.node.dealers)).roster.consumers[b"c2"]
        assert second.health(second.heard_ms + 600) is ConsumerHealth.HEALTHY
        assert second.health(second.heard_ms + 601) is ConsumerHealth.SILENT
