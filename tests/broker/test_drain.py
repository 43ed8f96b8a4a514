"""A broker that deals no more lets its consumers go once what it did not push to them is back in the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.broker.link import Link, Pipe, broker
from tests.broker.slow import SlowStore
from timeline.broker.limits import Limits
from timeline.model import LeavingReason, State
from timeline.wire import (
    Deliver,
    Frame,
    Leaving,
    TopicAction,
)

PATIENT = Limits(hand_back_ms=3_600_000, drain_streams_ms=3_600_000)


def drains(link: Link) -> asyncio.Future[None]:
    return asyncio.ensure_future(link.node.drain(3_600_000))


def stands_aside(link: Link) -> asyncio.Future[None]:
    link.node.clocks.quarantined = "its clock is wrong"
    link.node.clocks._changed()
    return asyncio.ensure_future(asyncio.sleep(0))


ENDS = pytest.mark.parametrize(
    ("end", "reason"), [(drains, LeavingReason.DRAINING), (stands_aside, LeavingReason.QUARANTINED)]
)


async def _leased_ahead(link: Link) -> Pipe:
    """A consumer to whom something is leased whose due is yet to come."""
    await link.topic(TopicAction.UPDATE, lease_ahead_ms=60_000)
    consumer = await link.consume()
    await link.put(["a"], in_ms=50_000)
    while await link.ids(State.LEASED) != [b"a"]:
        await asyncio.sleep(0)
    return consumer


async def _unsent(link: Link) -> Pipe:
    """A consumer that reads nothing for a while: one message is on its way to it, another waits behind that."""
    consumer = await link.consume()
    consumer.flowing.clear()
    await link.put(["sent"])
    while not consumer.sending:
        await asyncio.sleep(0)
    await link.put(["a"])
    while await link.ids(State.LEASED) != [b"a", b"sent"]:
        await asyncio.sleep(0)
    return consumer


async def _what_comes(consumer: Pipe, store: SlowStore) -> list[Frame]:
    """What a consumer is told while the store keeps the answer to what goes back, and, after that, until it is told to
    leave."""
    got: list[Frame] = []

    async def read() -> None:
        while not got or not isinstance(got[-1], Leaving):
            got.append(await consumer.down())

    reading = asyncio.ensure_future(read())
    await store.arrived("settle")
    consumer.flowing.set()
    for _ in range(100):
        await asyncio.sleep(0)
    assert not any(isinstance(frame, Leaving) for frame in got), "what it is to be given elsewhere is not free yet"
    store.release("settle")
    await reading
    return got


async def _held(link: Link) -> list[bytes]:
    """What the store has leased to the consumer."""
    (dealer,) = link.node.dealers
    return [id async for rows in link.node.store.held(dealer.topic, 0, b"c") for id in rows.ids.tolist()]


@ENDS
async def test_who_is_told_to_leave_finds_what_was_leased_ahead_for_it_free_elsewhere(
    end: Callable[[Link], asyncio.Future[None]], reason: LeavingReason
) -> None:
    store = SlowStore()
    async with broker(store, PATIENT) as link:
        consumer = await _leased_ahead(link)
        store.hold("settle")
        ended = end(link)
        (leaving,) = await _what_comes(consumer, store)
        assert isinstance(leaving, Leaving) and leaving.reason is reason
        assert await _held(link) == []
        await consumer.close()
        await ended


@ENDS
async def test_who_is_told_to_leave_finds_what_was_not_sent_to_it_free_elsewhere(
    end: Callable[[Link], asyncio.Future[None]], reason: LeavingReason
) -> None:
    store = SlowStore()
    async with broker(store, PATIENT) as link:
        consumer = await _unsent(link)
        store.hold("settle")
        ended = end(link)
        got, leaving = await _what_comes(consumer, store)
        assert isinstance(got, Deliver) and got.ids.tolist() == [b"sent"]
        assert isinstance(leaving, Leaving) and leaving.reason is reason
        assert await _held(link) == [b"sent"]
        await consumer.close()
        await ended


async def test_a_lease_call_under_way_is_waited_for_too() -> None:
    store = SlowStore()
    async with broker(store, PATIENT) as link:
        consumer = await link.consume()
        while not store.calls["lease_due"]:  # what the dealer asks for on its own
            await asyncio.sleep(0)
        store.hold("lease_due")
        await link.put(["a"])
        await store.arrived("lease_due")
        store.hold("settle")
        draining = drains(link)
        while not link.node.not_ready:
            await asyncio.sleep(0)
        store.release("lease_due")
        assert [type(frame) for frame in await _what_comes(consumer, store)] == [Leaving]
        assert await _held(link) == []
        await consumer.close()
        await draining


@ENDS
async def test_a_store_that_does_not_answer_keeps_nobody(
    end: Callable[[Link], asyncio.Future[None]], reason: LeavingReason
) -> None:
    store = SlowStore()
    async with broker(store, Limits(hand_back_ms=10, drain_streams_ms=3_600_000)) as link:
        consumer = await _leased_ahead(link)
        store.hold("settle")
        ended = end(link)
        leaving = await consumer.down()
        assert isinstance(leaving, Leaving) and leaving.reason is reason
        store.release("settle")
        await consumer.close()
        await ended


async def test_one_that_was_just_coming_back_is_told_when_what_it_was_given_is_free_again() -> None:
    store = SlowStore()
    async with broker(store, PATIENT) as link:
        first = await link.consume()
        await link.put(["a"])
        await first.down(Deliver)
        first.cancel()
        (dealer,) = link.node.dealers
        while dealer.roster.consumers:
            await asyncio.sleep(0)
        store.hold("settle")
        again = await link.consume()
        await store.arrived("settle")  # what it held is leased to it again, and the answer on its way
        draining = drains(link)
        assert [type(frame) for frame in await _what_comes(again, store)] == [Leaving]
        assert await _held(link) == []
        await again.close()
        await draining


async def test_consumers_of_a_topic_are_not_kept_by_what_another_has_to_hand_back() -> None:
    store = SlowStore()
    async with broker(store, PATIENT) as link:
        await link.topic(TopicAction.CREATE, "other")
        kept, free = await _leased_ahead(link), await link.consume("o", topic="other")
        store.hold("settle")
        draining = drains(link)
        assert isinstance(await free.down(), Leaving)
        assert kept.from_broker.empty()
        store.release("settle")
        assert isinstance(await kept.down(), Leaving)
        await kept.close()
        await free.close()
        await draining


@pytest.mark.slow
async def test_a_grace_that_is_short_leaves_time_to_tell_consumers() -> None:
    store = SlowStore()
    async with broker(store, PATIENT) as link:
        consumer = await _leased_ahead(link)
        store.hold("settle")
        draining = asyncio.ensure_future(link.node.drain(200))
        assert isinstance(await consumer.down(), Leaving)
        await draining
