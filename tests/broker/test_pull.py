"""Put, Take and Settle: producing and consuming by single calls."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.broker.link import Link, broker, stands, statuses
from tests.broker.slow import SlowStore
from timeline.broker.api import pull
from timeline.broker.limits import Limits
from timeline.columns import Ragged
from timeline.model import Operation, State, Status
from timeline.wire import (
    Deliver,
    Fault,
    Hello,
    Produced,
    Settle,
    Settled,
    SettleFlag,
    Take,
    TopicAction,
    TransportError,
    decode_as,
    encode,
)

LONG = 60_000


async def put(link: Link, ids: list[str], in_ms: int = 0, **more: Any) -> Produced:
    return decode_as(await link.node.service.unary("Put", encode(link.puts(ids, in_ms, **more))), Produced)


async def take(link: Link, most: int = 10, wait_ms: int = 0, **more: Any) -> Deliver:
    asked = Take(more.pop("topic", "t"), most, wait_ms=wait_ms, **more)
    return decode_as(await link.node.service.unary("Take", encode(asked), peer="test:1"), Deliver)


def settles(link: Link, got: Deliver, operation: Operation, time_ms: int = 0, **more: Any) -> Settle:
    flags = more.pop("flags", SettleFlag(0))
    return link.settles(got, operation, time_ms, flags, **{"request": 3, "topic": "t", "holder": got.holder, **more})


async def settle(link: Link, got: Deliver, operation: Operation, time_ms: int = 0, **more: Any) -> Settled:
    frame = settles(link, got, operation, time_ms, **more)
    return decode_as(await link.node.service.unary("Settle", encode(frame)), Settled)


async def waiting(link: Link, count: int = 1) -> None:
    """Return once this many Takes wait."""
    while sum(len(one.takes) for one in pulls(link)) != count:
        await asyncio.sleep(0)


def pulls(link: Link) -> list[Any]:
    return [one for one in link.node.dealers.consumers() if one.id.startswith(b"pull:")]


async def test_a_message_is_put_taken_and_acknowledged_by_three_calls() -> None:
    async with broker() as link:
        answer = await put(link, ["a", "b"])
        assert answer.request == 1
        assert statuses(answer) == [Status.OK, Status.OK]
        got = await take(link)
        assert sorted(got.ids.tolist()) == [b"a", b"b"]
        assert got.holder.startswith("pull:b1:")
        assert got.deliveries.tolist() == [1, 1]
        done = await settle(link, got, Operation.ACK)
        assert (done.request, statuses(done)) == (3, [Status.OK, Status.OK])
        assert await link.ids() == []


async def test_a_take_returns_when_something_comes_due() -> None:
    async with broker() as link:
        taking = asyncio.ensure_future(take(link, wait_ms=LONG))
        await waiting(link)
        await put(link, ["a"], in_ms=30)
        got = await taking
        assert got.ids.tolist() == [b"a"]
        assert got.pushed_ms >= int(got.due_ms[0])
        assert len(link.node.service.streams) == 0


async def test_takes_that_come_during_a_lease_call_are_served_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were answered that there was nothing, though messages were due: the call had begun before them."""
    monkeypatch.setattr(pull, "LEAST_WAIT_MS", 0)
    async with broker() as link:
        assert len((await take(link)).ids) == 0
        (dealer,) = link.node.dealers
        lease, leasing, go_on = dealer._lease, asyncio.Event(), asyncio.Event()

        async def slow_lease(*given: Any) -> Any:
            leasing.set()
            await go_on.wait()
            return await lease(*given)

        dealer._lease = slow_lease  # type: ignore[method-assign]
        await put(link, ["a", "b", "c"])
        first = asyncio.ensure_future(take(link, 1, LONG))
        await leasing.wait()
        others = [asyncio.ensure_future(take(link, 1)) for _ in range(3)]
        await waiting(link, 4)
        for _ in range(100):
            await asyncio.sleep(0)  # their own wait is over
        go_on.set()
        taken = [len((await one).ids) for one in (first, *others)]
        assert taken == [1, 1, 1, 0], "the last one learns that there is nothing more"


async def test_a_take_of_nothing_is_empty_and_leaves_no_credit() -> None:
    async with broker() as link:
        assert len((await take(link)).ids) == 0
        (one,) = pulls(link)
        assert (one.credit_messages, one.credit_bytes, one.room_messages, one.room_bytes) == (0, 0, 0, 0)


async def test_takes_get_no_more_than_they_have_room_for_and_the_first_is_first() -> None:
    async with broker() as link:
        first = asyncio.ensure_future(take(link, 2, LONG))
        await waiting(link, 1)
        second = asyncio.ensure_future(take(link, 10, LONG))
        await waiting(link, 2)
        await put(link, ["a", "b", "c"])
        assert len((await first).ids) == 2
        assert len((await second).ids) == 1
        (one,) = pulls(link)
        assert (one.credit_messages, one.credit_bytes) == (0, 0)
        assert (one.room_messages, one.room_bytes) == (0, 0)


async def test_bytes_bound_a_take_and_a_larger_message_comes_alone() -> None:
    async with broker() as link:
        await put(link, ["a", "b", "c"], payloads=Ragged.of([b"x" * 60] * 3))
        got = await take(link, 10, max_bytes=130)
        assert len(got.ids) == 2
        alone = await take(link, 10, max_bytes=1)
        assert len(alone.ids) == 1
        (one,) = pulls(link)
        assert (one.credit_messages, one.credit_bytes, one.room_bytes) == (0, 0, 0)


async def test_messages_of_a_caller_that_is_gone_go_back_unseen() -> None:
    async with broker() as link:
        gone = asyncio.ensure_future(take(link, 1, LONG))
        await waiting(link)
        (dealer,) = link.node.dealers
        push = dealer._push

        def push_and_hang_up(*given: Any) -> None:
            push(*given)
            gone.cancel()

        dealer._push = push_and_hang_up  # type: ignore[method-assign]
        await put(link, ["a"])
        with pytest.raises(asyncio.CancelledError):
            await gone
        got = await take(link, 1, LONG)
        assert (got.ids.tolist(), got.deliveries.tolist()) == ([b"a"], [1])


async def test_a_cancelled_take_leaves_no_credit() -> None:
    async with broker() as link:
        gone = asyncio.ensure_future(take(link, 1, LONG))
        await waiting(link)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await put(link, ["a"])
        assert await link.ids(State.AVAILABLE) == [b"a"]
        (one,) = pulls(link)
        assert (one.credit_messages, one.room_messages) == (0, 0)


async def test_each_settle_does_what_it_says() -> None:
    async with broker() as link:
        await put(link, ["a"])
        got = await take(link)
        extended = await settle(link, got, Operation.EXTEND, 600_000)
        assert int(extended.answers.due_ms[0]) > int(got.lease_until_ms[0])
        assert statuses(await settle(link, got, Operation.RELEASE, 0)) == [Status.OK]
        again = await take(link, wait_ms=LONG)
        assert again.version.tolist() == [got.version[0] + 2]
        assert statuses(await settle(link, got, Operation.ACK)) == [Status.FENCED]
        assert statuses(await settle(link, again, Operation.ACK, holder="pull:b1:00000000")) == [Status.FENCED]
        reasons = Ragged.of([b"why"])
        assert statuses(await settle(link, again, Operation.BURY, reasons=reasons)) == [Status.OK]
        assert await link.ids(State.DEAD) == [b"a"]


async def test_a_settle_of_a_topic_that_is_not_there_is_not_found() -> None:
    async with broker() as link:
        await put(link, ["a"])
        got = await take(link)
        assert statuses(await settle(link, got, Operation.ACK, topic="nowhere")) == [Status.NOT_FOUND]
        for more in ({"topic": ""}, {"holder": ""}):
            with pytest.raises(TransportError, match="names its topic and its holder") as refused:
                await settle(link, got, Operation.ACK, **more)
            assert refused.value.fault is Fault.REFUSED_FRAME


async def test_a_take_has_the_lease_that_it_asks_for() -> None:
    async with broker() as link:
        await put(link, ["a", "b"])
        short, usual = await take(link, 1, lease_ms=5_000), await take(link, 1)
        for got, lease_ms in ((short, 5_000), (usual, 30_000)):
            assert 0 < got.lease_until_ms[0] - got.leased_ms <= lease_ms
            assert got.lease_until_ms[0] - got.leased_ms > lease_ms - 4_000
        assert short.holder == f"{usual.holder}:5000"
        with pytest.raises(TransportError, match="max_lease"):
            await take(link, lease_ms=365 * 86_400_000)


@pytest.mark.slow
async def test_there_are_not_many_different_leases() -> None:
    async with broker() as link:
        for lease_ms in range(1_000, 1_016):
            await take(link, lease_ms=lease_ms)
        with pytest.raises(TransportError, match="16 different leases") as refused:
            await take(link, lease_ms=900)
        assert refused.value.fault is Fault.OVERLOADED
        assert len((await take(link, lease_ms=1_003)).ids) == 0


@pytest.mark.slow
async def test_a_lease_that_no_take_waits_for_gives_way_to_another_one() -> None:
    async with broker() as link:
        await put(link, ["a"])
        for lease_ms in range(1_000, 1_016):
            await take(link, lease_ms=lease_ms)
        with pytest.raises(TransportError, match="16 different leases"):
            await take(link, 1, lease_ms=900)
        for _ in range(10):
            await asyncio.sleep(0)
        await put(link, ["b"])
        assert len((await take(link, 1, lease_ms=900)).ids) == 1, "as a client's repeat finds it"


@pytest.mark.slow
async def test_takes_with_the_topics_lease_are_served_whatever_leases_others_ask_for() -> None:
    async with broker() as link:
        for lease_ms in range(1_000, 1_016):
            await take(link, lease_ms=lease_ms)
        await put(link, ["a", "b"])
        assert len((await take(link, 1)).ids) == 1
        assert len((await take(link, 1, lease_ms=30_000)).ids) == 1, "the topic's lease, by its number"
        with pytest.raises(TransportError, match="16 different leases"):
            await take(link, lease_ms=900)


async def test_a_drain_answers_takes_at_once_without_messages() -> None:
    async with broker() as link:
        taking = asyncio.ensure_future(take(link, 1, LONG))
        await waiting(link)
        await link.node.drain(10_000)
        assert len((await taking).ids) == 0
        with pytest.raises(TransportError) as refused:
            await take(link)
        assert refused.value.fault is Fault.NOT_READY


async def test_a_take_of_a_topic_that_is_dropped_learns_it() -> None:
    async with broker() as link:
        taking = asyncio.ensure_future(take(link, 1, LONG))
        await waiting(link)
        await link.drop()
        with pytest.raises(TransportError) as refused:
            await taking
        assert refused.value.fault is Fault.NO_TOPIC
        with pytest.raises(TransportError) as refused:
            await take(link)
        assert refused.value.fault is Fault.NO_TOPIC


async def test_waiting_takes_count_as_streams_of_their_host() -> None:
    async with broker(limits=Limits(streams_per_peer=1)) as link:
        taking = asyncio.ensure_future(take(link, 1, LONG))
        await waiting(link)
        with pytest.raises(TransportError, match="all that one host may") as refused:
            await take(link)
        assert refused.value.fault is Fault.OVERLOADED
        await put(link, ["a"])
        assert len((await taking).ids) == 1


async def test_the_shared_consumer_leaves_when_no_take_has_come_for_a_while() -> None:
    async with broker(limits=Limits(pull_idle_ms=30)) as link:
        first = await take(link)
        assert len(pulls(link)) == 1
        while pulls(link):
            await asyncio.sleep(0)
        assert (await take(link)).holder == first.holder


async def test_the_shared_consumer_leaves_sooner_where_other_brokers_wait_for_its_buckets() -> None:
    async with broker(limits=Limits(pull_yield_ms=10)) as link:
        await take(link)
        link.node.cluster.all_ours = lambda topic: False  # type: ignore[method-assign]
        while pulls(link):
            await asyncio.sleep(0)


async def test_a_lease_that_ran_out_does_not_suspend_the_other_callers() -> None:
    async with broker() as link:
        await put(link, ["a"])
        deliveries = 0
        while deliveries < 5:
            got = await take(link, wait_ms=LONG, lease_ms=20)
            deliveries = max([deliveries, *got.deliveries.tolist()])
        (one,) = pulls(link)
        assert (one.lapses, one.set_aside_until_ms) == (0, 0.0)


@pytest.mark.slow
async def test_what_a_slow_store_leased_too_late_for_a_take_loses_no_delivery() -> None:
    store = SlowStore()
    async with broker(store) as link:
        store.hold("lease_due")
        taking = asyncio.ensure_future(take(link, wait_ms=LONG, lease_ms=500))
        await put(link, ["a"])
        while await link.ids(State.LEASED) != [b"a"]:
            await asyncio.sleep(0)
        while await link.ids(State.LEASED):
            await asyncio.sleep(0)
        store.release("lease_due")
        assert not len((await taking).ids)
        got = await take(link, wait_ms=LONG)
        assert (got.ids.tolist(), got.deliveries.tolist()) == ([b"a"], [1])


async def test_no_consumer_may_have_the_id_of_a_brokers_takes() -> None:
    async with broker() as link:
        pipe = link.open("Consume")
        none = Ragged.of([])
        hello = Hello("t", "pull:b1:1", 1, 0, 1, 1, none, np.zeros(0, np.uint64), np.zeros(0, np.int64))
        pipe.up(hello)
        assert pipe.task is not None
        with pytest.raises(TransportError, match="ids that begin with 'pull:' are for brokers"):
            await pipe.task


async def test_consumers_and_takes_share_what_is_due() -> None:
    async with broker() as link:
        pipe = await link.consume(credit=100)
        taking = asyncio.ensure_future(take(link, 100, LONG))
        await waiting(link)
        await put(link, [f"m{at}" for at in range(10)])
        streamed, taken = await pipe.down(Deliver), await taking
        assert (len(streamed.ids), len(taken.ids)) == (5, 5)
        assert streamed.holder == ""


async def test_the_lateness_of_a_take_is_counted() -> None:
    async with broker() as link:
        await put(link, ["a"])
        await take(link)
        assert (await stands(link)).topics.delivered.tolist() == [1]


@pytest.mark.slow
async def test_a_take_is_leased_one_message_ahead_and_no_more() -> None:
    async with broker() as link:
        await link.topic(TopicAction.UPDATE, lease_ahead_ms=500)
        taking = asyncio.ensure_future(take(link, 10, LONG))
        await waiting(link)
        await put(link, ["a", "b"], in_ms=[300, 450])
        first = await taking
        assert first.ids.tolist() == [b"a"]
        assert first.leased_ms < int(first.due_ms[0]) <= first.pushed_ms
        got = await take(link, 10, LONG)
        assert (got.ids.tolist(), got.version.tolist(), got.deliveries.tolist()) == ([b"b"], [2], [1])


@pytest.mark.slow
async def test_consumers_and_takes_share_what_is_leased_ahead() -> None:
    async with broker() as link:
        await link.topic(TopicAction.UPDATE, lease_ahead_ms=500)
        pipe = await link.consume(credit=10)
        taking = asyncio.ensure_future(take(link, 10, LONG))
        await waiting(link)
        await put(link, ["a", "b", "c", "d"], in_ms=300)
        streamed, taken = await pipe.down(Deliver), await taking
        assert (len(streamed.ids), len(taken.ids)) == (3, 1)


@pytest.mark.parametrize(("takes", "first"), [(4, [b"a", b"b"]), (1, [b"a"])])
async def test_a_late_round_takes_along_what_comes_due_for_the_other_takes(takes: int, first: list[bytes]) -> None:
    """It leased only what was due. What came due during its call waited for the next one, which was late again."""
    async with broker() as link:
        await link.topic(TopicAction.UPDATE, lease_ahead_ms=60_000, paused=True)
        await put(link, ["a", "b"], in_ms=[0, 20_000])
        waits = [asyncio.ensure_future(take(link, 10, LONG)) for _ in range(takes)]
        await waiting(link, takes)
        (dealer,) = link.node.dealers
        dealer._due_rate.took(0, mono_ms=0.0)
        dealer._due_rate.took(10, mono_ms=200_000.0)  # one comes due each 20 s
        lease, leased = dealer._lease, asyncio.Queue[Any]()

        async def watched(*given: Any) -> Any:
            answer = await lease(*given)
            if len(answer[0].rows):
                leased.put_nowait(answer[0].rows.ids.tolist())
            return answer

        dealer._lease = watched  # type: ignore[method-assign]
        await link.topic(TopicAction.UPDATE, paused=False)
        assert await leased.get() == first
        assert (await next(asyncio.as_completed(waits))).ids.tolist() == [b"a"]
        for one in waits:
            one.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
