"""What happens between two awaits: a store's answer on its way while somebody leaves, crashes, changes or drops."""

from __future__ import annotations

import asyncio

import pytest

from tests.broker.link import PATIENT, broker, statuses
from tests.broker.slow import InTurn, SlowStore
from timeline.broker.limits import Limits
from timeline.model import LeavingReason, Operation, State, Status, Topic, TopicSettings
from timeline.wire import (
    Deliver,
    Leaving,
    Produced,
    TopicAction,
)


async def test_what_a_producer_put_that_is_gone_is_dealt_at_once():
    store = SlowStore()
    async with broker(store, PATIENT) as link:
        consumer = await link.consume()
        store.hold("put")
        pipe = link.begin_put(["a"])
        await store.arrived("put")
        pipe.cancel()
        await asyncio.wait([pipe.task])
        store.release("put")
        assert (await consumer.down(Deliver)).ids.tolist() == [b"a"]


async def test_what_a_producer_asked_that_is_gone_is_not_put_where_it_had_not_begun():
    store = SlowStore()
    async with broker(store, PATIENT) as link:
        store.hold("put")
        first = link.begin_put(["a"])
        await store.arrived("put")
        gone, stays = link.begin_put(["b"]), link.begin_put(["c"])
        while link.node.intake.waiting < 3:
            await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone.task])
        store.release("put")
        for pipe in (first, stays):
            assert (await pipe.down(Produced)).answers.status.tolist() == [Status.OK.code]
        await link.node.intake.idle()
        assert await link.ids() == [b"a", b"c"] and not link.node.intake.waiting


async def test_what_is_due_at_once_is_leased_before_its_put_is_answered():
    store = InTurn()
    async with broker(store, PATIENT) as link:
        consumer = await link.consume()
        store.hold("put")
        pipe = link.begin_put(["a"])
        assert (await consumer.down(Deliver)).ids.tolist() == [b"a"]
        leases = store.calls["lease_due"]
        store.release("put")
        assert (await pipe.down(Produced)).answers.status.tolist() == [Status.OK.code]
        await link.put(["b"])
        assert (await consumer.down(Deliver)).ids.tolist() == [b"b"]
        assert store.calls["lease_due"] <= leases + 2, "no round for what the one before had seen"


async def test_a_put_that_comes_in_turn_after_the_lease_has_a_round_of_its_own():
    store = InTurn()
    async with broker(store, PATIENT) as link:
        consumer = await link.consume()
        store.hold("lease_due")
        await link.put(["a"])
        await store.arrived("lease_due")
        await link.put(["b"])
        store.release("lease_due")
        got = [*(await consumer.down(Deliver)).ids.tolist(), *(await consumer.down(Deliver)).ids.tolist()]
        assert got == [b"a", b"b"]


async def test_what_a_consumer_released_that_is_gone_is_dealt_at_once():
    store = SlowStore()
    async with broker(store, PATIENT) as link:
        first = await link.consume("first", credit=1)
        await link.put(["a"])
        got = await first.down(Deliver)
        second = await link.consume("second")
        store.hold("settle")
        settling = asyncio.ensure_future(link.settle(first, got, Operation.RELEASE, 0))
        await store.arrived("settle")
        first.cancel()
        await asyncio.wait([first.task])
        settling.cancel()
        store.release("settle")
        assert (await second.down(Deliver)).ids.tolist() == [b"a"]


async def test_a_move_whose_caller_gave_up_still_reaches_the_dealer():
    store = SlowStore()
    async with broker(store, PATIENT) as link:
        consumer = await link.consume()
        await link.put(["a"], in_ms=3_600_000)
        store.hold("mutate")
        moving = asyncio.ensure_future(link.mutate(Operation.MOVE, ["a"]))
        await store.arrived("mutate")
        moving.cancel()
        store.release("mutate")
        assert (await consumer.down(Deliver)).ids.tolist() == [b"a"]


async def test_a_put_to_a_topic_that_cannot_be_looked_up_is_unavailable_not_unanswered():
    store = SlowStore(shared=True)
    async with broker(store) as link:
        store.refuse = {"topics"}
        link.node.catalog._read_at_ms = -1e9
        assert statuses(await link.put(["a"], topic="unknown")) == [Status.UNAVAILABLE]


async def test_records_read_before_a_create_do_not_take_the_topic_away():
    store = SlowStore(shared=True)
    async with broker(store) as link:
        store.hold("topics")
        reading = asyncio.ensure_future(link.node.catalog.refresh())
        await store.arrived("topics")
        creating = asyncio.ensure_future(link.topic(TopicAction.CREATE, "new"))
        await asyncio.sleep(0)
        store.release("topics")
        await asyncio.gather(reading, creating)
        assert [topic.name for topic in link.node.catalog.all()] == ["new", "t"]


async def test_records_read_before_a_drop_do_not_bring_the_topic_back():
    store = SlowStore(shared=True)
    async with broker(store) as link:
        store.hold("topics")
        reading = asyncio.ensure_future(link.node.catalog.refresh())
        await store.arrived("topics")
        dropping = asyncio.ensure_future(link.topic(TopicAction.DROP))
        await asyncio.sleep(0)
        store.release("topics")
        await asyncio.gather(reading, dropping)
        assert link.node.catalog.all() == []


async def test_two_who_ask_for_an_unknown_topic_wait_for_one_reading():
    store = SlowStore(shared=True)
    async with broker(store) as link:
        link.node.catalog._topics.clear()
        link.node.catalog._read_at_ms = -1e9
        store.hold("topics")
        finding = [asyncio.ensure_future(link.node.catalog.find("t")) for _ in range(2)]
        await store.arrived("topics")
        store.release("topics")
        assert [topic is not None and topic.name for topic in await asyncio.gather(*finding)] == ["t", "t"]
        assert store.calls["topics"] == 2  # at the start, and now


async def test_however_many_ask_for_the_records_again_wait_for_one_reading_more():
    store = SlowStore(shared=True)
    async with broker(store, PATIENT) as link:
        before = store.calls["topics"]
        store.hold("topics")
        first = asyncio.ensure_future(link.node.catalog.refresh())
        await store.arrived("topics")
        await store.create_topic(Topic("new", 77, TopicSettings(), 1, 0))
        later = [asyncio.ensure_future(link.node.catalog.refresh()) for _ in range(5)]
        await asyncio.sleep(0)
        store.release("topics")
        await asyncio.gather(first, *later)
        assert store.calls["topics"] - before == 2
        assert "new" in [topic.name for topic in link.node.catalog.all()]


@pytest.mark.slow
async def test_settings_that_change_while_a_round_is_under_way_are_looked_at():
    store = SlowStore()
    async with broker(store, PATIENT) as link:
        await link.topic(TopicAction.UPDATE, redelivery_backoff_ms=3_600_000)
        first = await link.consume("first", lease_ms=200, credit=1)
        await link.put(["a"])
        await first.down(Deliver)
        second = await link.consume("second")
        store.hold("lease_due")
        await link.put(["b"])
        await store.arrived("lease_due")
        await link.topic(TopicAction.UPDATE, redelivery_backoff_ms=0)
        store.release("lease_due")
        got = []
        while len(got) < 2:
            got += (await second.down(Deliver)).ids.tolist()
        assert sorted(got) == [b"a", b"b"]


@pytest.mark.slow
async def test_a_lease_that_nears_its_end_is_waited_for_not_asked_for_again_and_again():
    store = SlowStore()
    async with broker(store, PATIENT) as link:
        await link.topic(TopicAction.UPDATE, lease_ahead_ms=60_000)
        first = await link.consume("first", lease_ms=250, credit=1)
        await link.put(["a"])
        await first.down(Deliver)
        second = await link.consume("second")
        assert (await second.down(Deliver)).ids.tolist() == [b"a"]
        assert store.calls["lease_due"] < 12


@pytest.mark.prove
@pytest.mark.slow
async def test_a_look_long_before_the_due_does_not_keep_from_leasing_ahead():
    async with broker(limits=PATIENT) as link:
        await link.topic(TopicAction.UPDATE, lease_ahead_ms=60_000)
        await link.put(["a"], in_ms=60_200)
        await link.consume()
        while await link.ids(State.LEASED) != [b"a"]:
            await asyncio.sleep(0)


async def test_what_was_leased_ahead_goes_out_though_a_lease_call_hangs():
    store = SlowStore()
    async with broker(store, PATIENT) as link:
        await link.topic(TopicAction.UPDATE, lease_ahead_ms=60_000)
        consumer = await link.consume()
        await link.put(["a"], in_ms=150)
        while await link.ids(State.LEASED) != [b"a"]:
            await asyncio.sleep(0)
        store.hold("lease_due")
        await link.put(["b"], in_ms=3_000)
        await store.arrived("lease_due")
        assert (await consumer.down(Deliver)).ids.tolist() == [b"a"]
        store.release("lease_due")


async def test_what_a_lease_call_brings_while_draining_goes_back():
    store = SlowStore()
    async with broker(store, Limits(hand_back_ms=10, drain_streams_ms=60_000)) as link:
        consumer = await link.consume()
        while not store.calls["lease_due"]:  # what the dealer asks for on its own
            await asyncio.sleep(0)
        await link.put(["seen"])
        await consumer.down(Deliver)
        store.hold("lease_due")
        await link.put(["a"])
        while await link.ids(State.LEASED) != [b"a", b"seen"]:
            await asyncio.sleep(0)
        draining = asyncio.ensure_future(link.node.drain(60_000))
        assert isinstance(await consumer.down(), Leaving)
        await consumer.close()
        store.release("lease_due")
        await draining
        assert store.calls["settle"] == 1


async def test_what_a_consumer_coming_back_is_given_while_draining_goes_back_however_the_store_is():
    store = SlowStore()
    async with broker(store, Limits(drain_streams_ms=10)) as link:
        first = await link.consume(session=1)
        await link.put(["a"])
        await first.down(Deliver)
        first.cancel()
        store.hold("settle")
        await link.consume(session=2)
        await store.arrived("settle")  # what it held is leased to it again
        draining = asyncio.ensure_future(link.node.drain(3_600_000))
        while link.node.settling.waiting == 0 or not link.node.not_ready:
            await asyncio.sleep(0)
        store.refuse = {"settle"}
        store.release("settle")
        while store.calls["settle"] < 2:
            await asyncio.sleep(0)
        store.refuse = set()
        await draining
        assert store.calls["settle"] == 3


async def test_a_producer_that_does_not_read_does_not_hold_up_a_drain():
    async with broker(limits=Limits(drain_streams_ms=50)) as link:
        pipe = link.open("Produce")
        pipe.flowing.clear()
        pipe.up(link.puts(["a"]))
        while await link.ids(State.AVAILABLE) != [b"a"]:
            await asyncio.sleep(0)
        await link.node.drain(3_600_000)
        assert link.node.not_ready


async def test_a_session_waits_for_what_the_one_before_hands_back():
    store = SlowStore()
    async with broker(store) as link:
        await link.topic(TopicAction.UPDATE, lease_ahead_ms=60_000)
        await link.consume(session=1)
        await link.put(["a"], in_ms=3_600)
        while await link.ids(State.LEASED) != [b"a"]:
            await asyncio.sleep(0)
        second = await link.consume(session=2)
        while not (list(link.node.dealers) and store.calls["settle"]):
            await asyncio.sleep(0)
        dealer = next(iter(link.node.dealers))
        while not dealer.roster.consumers[b"c"].dealing:
            await asyncio.sleep(0)
        # One settle: it was handed back, and there was nothing left to be let again.
        assert store.calls["settle"] == 1
        assert second.task is not None


async def test_a_consumer_that_parts_from_a_dropped_topic_hurts_nobody():
    async with broker() as link:
        consumer = await link.consume()
        consumer.flowing.clear()
        await link.topic(TopicAction.DROP)
        consumer.up(Leaving(LeavingReason.DRAINING))
        consumer.flowing.set()
        assert isinstance(await consumer.down(Leaving), Leaving)
        await asyncio.wait([consumer.task])
        assert consumer.task.cancelled() or consumer.task.exception() is None


async def test_a_full_disk_stays_not_ready_though_reads_and_settles_go_on():
    store = SlowStore()
    async with broker(store) as link:
        consumer = await link.consume()
        await link.put(["a"])
        got = await consumer.down(Deliver)
        store.refuse = {"put", "check"}
        assert statuses(await link.put(["b"])) == [Status.UNAVAILABLE]
        assert statuses(await link.settle(consumer, got, Operation.ACK)) == [Status.OK]
        assert "put is refused" in link.node.not_ready
        store.refuse = set()
        await link.node._check_store()
        assert link.node.not_ready == ""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_a_session_that_holds_many_gets_each_again_once(kind, tmp_path):
    count = 1_200  # more than a page of what is held
    async with broker("memory://" if kind == "memory" else f"sqlite:///{tmp_path}/t.db") as link:
        first = await link.consume(session=1, credit=count)
        await link.put([f"m{at}" for at in range(count)])
        taken = 0
        while taken < count:
            taken += len((await first.down(Deliver)).birth)
        second = await link.consume(session=2, credit=10 * count)
        again: list[tuple[bytes, int]] = []
        while len(again) < count:
            got = await second.down(Deliver)
            again += zip(got.ids.tolist(), got.version.tolist(), strict=True)
        await link.put(["last"])
        got = await second.down(Deliver)
        assert len(set(again)) == len({id for id, _ in again}) == count
        assert {version for _, version in again} == {3}
        assert got.ids.tolist() == [b"last"]
