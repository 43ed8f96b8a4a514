"""The buffer of what was leased ahead, by itself, and when its topic is paused or tuned or a clock jumps."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.broker.columns import make_consumer, make_leased
from tests.broker.link import PATIENT, Link, Pipe, broker, statuses
from tests.broker.slow import SlowStore
from timeline.broker.dispatch.leased_batch import LeaseAheadBuffer
from timeline.broker.limits import Limits
from timeline.clock import ALONE_MS, Clock
from timeline.model import Operation, State, Status
from timeline.storage_plugins.memory.store import MemoryStore
from timeline.wire import Deliver, TopicAction


async def not_delivered(link: Link, consumer: Pipe) -> None:
    """Returns when "a" is leased no more; it was not delivered meanwhile."""
    while consumer.from_broker.empty() and await link.ids(State.AVAILABLE) != [b"a"]:
        await asyncio.sleep(0)
    assert consumer.from_broker.empty()


async def test_a_pause_holds_back_what_was_leased_ahead():
    async with broker(limits=PATIENT) as link:
        await link.topic(TopicAction.UPDATE, lease_ahead_ms=60_000)
        consumer = await link.consume()
        await link.put(["a"], in_ms=150)
        while await link.ids(State.LEASED) != [b"a"]:
            await asyncio.sleep(0)
        await link.topic(TopicAction.UPDATE, paused=True)
        await not_delivered(link, consumer)
        await link.topic(TopicAction.UPDATE, paused=False)
        assert (await consumer.down(Deliver)).deliveries.tolist() == [1]


async def test_how_far_ahead_a_store_may_be_leased_it_says_itself():
    """Until it is known how long its leases take."""
    store = MemoryStore()
    store.capabilities = dataclasses.replace(store.capabilities, lease_ahead_ms=7_200_000)
    async with broker(store, PATIENT) as link:
        consumer = await link.consume()
        await link.put(["a"], in_ms=3_600_000)
        async with asyncio.timeout(60):
            while await link.ids(State.LEASED) != [b"a"]:
                await asyncio.sleep(0)
        assert consumer.from_broker.empty()


async def test_a_pause_holds_back_what_a_lease_call_under_way_brings():
    store = SlowStore()
    async with broker(store, PATIENT) as link:
        consumer = await link.consume()
        for _ in range(100):  # the dealer has looked and sleeps
            await asyncio.sleep(0)
        store.hold("lease_due")
        await link.put(["a"])
        while b"a" not in await link.ids(State.LEASED):
            await asyncio.sleep(0)
        await link.topic(TopicAction.UPDATE, paused=True)
        store.release("lease_due")
        await not_delivered(link, consumer)
        await link.topic(TopicAction.UPDATE, paused=False)
        assert (await consumer.down(Deliver)).deliveries.tolist() == [1]


async def test_lease_ahead_that_is_turned_off_lets_go_of_what_was_leased_ahead():
    async with broker(limits=PATIENT) as link:
        await link.topic(TopicAction.UPDATE, lease_ahead_ms=60_000)
        await link.consume()
        await link.put(["a"], in_ms=30_000)
        while await link.ids(State.LEASED) != [b"a"]:
            await asyncio.sleep(0)
        await link.topic(TopicAction.UPDATE, lease_ahead_ms=0)
        async with asyncio.timeout(20):
            while await link.ids(State.WAITING) != [b"a"]:
                await asyncio.sleep(0)
        assert statuses(await link.mutate(Operation.CANCEL, ["a"])) == [Status.OK]


async def test_what_was_leased_ahead_is_due_when_the_clock_says_so_though_it_jumped():
    ahead_s = {"wall": 0.0, "monotonic": 0.0}
    clock = Clock(lambda: time.time() + ahead_s["wall"], lambda: time.monotonic() + ahead_s["monotonic"])
    async with broker(limits=Limits(observe_every_ms=5), clock=clock) as link:
        await link.topic(TopicAction.UPDATE, lease_ahead_ms=60_000)
        consumer = await link.consume(lease_ms=12 * 3_600_000)
        await link.put(["a"], in_ms=59_000)
        while await link.ids(State.LEASED) != [b"a"]:
            await asyncio.sleep(0)
        ahead_s["wall"] = 3_600.0
        while clock.step_ms == 0.0:
            await asyncio.sleep(0)
        ahead_s["monotonic"] = ALONE_MS / 1_000.0
        ahead_s["wall"] += ahead_s["monotonic"]
        async with asyncio.timeout(30):
            assert (await consumer.down(Deliver)).ids.tolist() == [b"a"]


def test_held_gives_out_at_the_due_and_never_before():
    held = LeaseAheadBuffer()
    first, second = make_consumer("a"), make_consumer("b")
    held.add(first, make_leased([30, 10, 20]))
    held.add(second, make_leased([10]))
    assert held.next_due_ms() == 10
    assert held.due(9) == []
    given_out = {consumer.id: batch.rows.ids.tolist() for consumer, batch in held.due(20)}
    assert given_out == {b"a": [b"m1", b"m2"], b"b": [b"m0"]}
    assert len(held) == 1
    assert [batch.rows.ids.tolist() for batch in held.of(first)] == [[b"m0"]]
    assert held.next_due_ms() is None
    assert held.everything() == []


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 50), min_size=1, max_size=8)), max_size=8))
def test_held_loses_nothing_and_doubles_nothing(adds):
    held, consumers = LeaseAheadBuffer(), [make_consumer("a"), make_consumer("b")]
    for who, dues in adds:
        held.add(consumers[who], make_leased(dues))
    seen = []
    for now in range(0, 51, 5):
        for _, batch in held.due(now):
            assert all(now - 5 < due <= now for due in batch.was_due_ms.tolist())
            seen += batch.was_due_ms.tolist()
    assert sorted(seen) == sorted(due for _, dues in adds for due in dues)
