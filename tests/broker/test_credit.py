"""Credit besides what is in hand: of a consumer that comes back with something, and after settles that were refused."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.broker.link import Link, Pipe, broker, statuses
from timeline.broker.dispatch.roster import ConnectedConsumer
from timeline.columns import Ragged
from timeline.model import MAX_BATCH, Answers, Operation, Status, Topic
from timeline.storage_plugins.contract import Settles, StoreUnavailable, StoreUnknown
from timeline.storage_plugins.memory import MemoryStore
from timeline.wire import Beat, Credit, Deliver, MutateFlag, Settle, Settled
from timeline.wire.frames import MAX_COUNT

LARGE = Ragged.of([b"0123456789"])


async def _comes_back(link: Link) -> tuple[Pipe, Deliver]:
    """Consumer `c` with room for 5 messages of 3 bytes in all, one of 2 bytes in hand, on its second stream."""
    first = await link.consume(credit=5, credit_bytes=3)
    await link.put(["a"])
    got: Deliver = await first.down(Deliver)
    first.cancel()
    await asyncio.wait([first.task])
    return await link.consume(credit=4, credit_bytes=1, room_messages=5, room_bytes=3, in_hand=got), got


async def test_a_consumer_cannot_say_itself_what_is_in_flight():
    """Its word on its room is of its credit, of which the broker knows what it spent."""
    async with broker() as link:
        pipe = await link.consume(credit=5)
        dealer = next(iter(link.node.dealers))
        consumer = dealer.roster.consumers[b"c"]
        await link.put(["a"])
        await pipe.down(Deliver)
        for more, room in ((0, MAX_COUNT), (5, MAX_COUNT), (3, 13)):
            pipe.up(Credit(more, room_messages=room))
            link.beat(pipe)
            await pipe.down(Beat)
            assert (consumer.in_flight, consumer.room_messages) == (1, 1 + consumer.credit_messages)
        assert consumer.room_messages == 13
        again = await link.consume("d", credit=5, room_messages=MAX_COUNT)
        assert again and dealer.roster.consumers[b"d"].in_flight == MAX_BATCH


async def _who_gets_it(**pipes: Pipe) -> str:
    waiting = {asyncio.ensure_future(pipe.down(Deliver)): name for name, pipe in pipes.items()}
    done, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in left:
        task.cancel()
    return waiting[done.pop()]


async def test_what_is_larger_than_its_credit_does_not_go_to_it_while_it_has_something_in_hand():
    async with broker() as link:
        mine, _ = await _comes_back(link)
        other = await link.consume("other")
        await link.put(["x"])
        assert (await other.down(Deliver)).ids.tolist() == [b"x"]  # then it is the turn of the first
        await link.put(["b"])
        assert await _who_gets_it(mine=mine, other=other) == "other"


@pytest.mark.parametrize("operation", [Operation.ACK, Operation.RELEASE, Operation.BURY])
async def test_once_that_is_settled_a_large_message_goes_to_it_alone(operation: Operation):
    async with broker() as link:
        mine, got = await _comes_back(link)
        await link.settle(mine, got, operation, 3_600_000, reason=b"no")
        await link.put(["b"], payloads=LARGE)
        assert (await mine.down(Deliver)).ids.tolist() == [b"b"]


async def test_once_that_is_given_up_a_large_message_goes_to_it_alone():
    async with broker() as link:
        mine, _ = await _comes_back(link)
        mine.up(Credit(1, 2))
        await link.put(["b"], payloads=LARGE)
        assert (await mine.down(Deliver)).ids.tolist() == [b"b"]


class Unwilling(MemoryStore):
    """Says `trouble` to settles, while there is some; leaves alone and answers `refusal` for `refused`."""

    def __init__(self) -> None:
        super().__init__(cluster_uid="0" * 32)
        self.trouble: Exception | None = None
        self.refused: dict[bytes, Status] = {}

    async def settle(self, topic: Topic, now_ms: int, settles: Settles) -> Answers:
        if self.trouble is not None:
            raise self.trouble
        willing = np.flatnonzero([id not in self.refused for id in settles.ids.tolist()])
        answers = Answers.blank(len(settles))
        answers.status[:] = [self.refused.get(id, Status.OK).code for id in settles.ids.tolist()]
        answers.status[willing] = (await super().settle(topic, now_ms, settles.take(willing))).status
        return answers


async def _two_of(link: Link, more: int = 2) -> tuple[Pipe, Deliver, ConnectedConsumer]:
    """A consumer with credit for 2 messages of 2 bytes in all, both in hand; `more` wait."""
    await link.put(["a", "b", *"xy"[:more]])
    pipe = await link.consume(credit=2, credit_bytes=4)
    got: Deliver = await pipe.down(Deliver)
    assert len(got.birth) == 2
    (dealer,) = link.node.dealers
    return pipe, got, dealer.roster.consumers[b"c"]


def _asked(got: Deliver, *operations: Operation, reasons: Ragged | None = None, time_ms: int = 0) -> Settle:
    count = len(operations)
    return Settle(
        request=9,
        ids=got.ids[:count],
        birth=got.birth[:count],
        version=got.version[:count],
        operation=np.array(operations, dtype=np.uint8),
        time_ms=np.full(count, time_ms, dtype=np.int64),
        flags=np.zeros(count, dtype=np.uint8),
        op=np.arange(1, count + 1, dtype=np.uint64),
        reasons=reasons,
        credit_messages=count,
        credit_bytes=2 * count,
    )


@pytest.mark.parametrize("status", [Status.UNAVAILABLE, Status.UNKNOWN, Status.THROTTLED])
async def test_credit_does_not_count_where_one_of_its_settles_leaves_the_message_in_hand(status: Status):
    store = Unwilling()
    async with broker(store) as link:
        pipe, got, consumer = await _two_of(link)
        store.refused = {b"b": status}
        pipe.up(_asked(got, Operation.ACK, Operation.RELEASE))
        assert statuses(await pipe.down(Settled)) == [Status.OK, status]
        assert (consumer.credit_messages, consumer.credit_bytes) == (0, 0)
        # The consumer, which saw the same, gives by itself what it has room for.
        pipe.up(Credit(1, 2))
        assert len((await pipe.down(Deliver)).birth) == 1 and consumer.credit_messages == 0


@pytest.mark.parametrize("trouble", [StoreUnavailable("full"), StoreUnknown("cut")])
async def test_credit_does_not_count_where_the_store_is_in_trouble(trouble: Exception):
    store = Unwilling()
    async with broker(store) as link:
        pipe, got, consumer = await _two_of(link)
        store.trouble = trouble
        pipe.up(_asked(got, Operation.ACK, Operation.ACK))
        await pipe.down(Settled)
        assert (consumer.credit_messages, consumer.credit_bytes) == (0, 0)
        store.trouble = None
        pipe.up(_asked(got, Operation.ACK, Operation.ACK))
        assert statuses(await pipe.down(Settled)) == [Status.OK] * 2
        assert len((await pipe.down(Deliver)).birth) == 2


async def test_credit_does_not_count_where_the_broker_itself_refuses():
    async with broker() as link:
        pipe, got, consumer = await _two_of(link)
        pipe.up(_asked(got, Operation.ACK, Operation.BURY, reasons=Ragged.of([b"", b"x" * 2_000])))
        assert statuses(await pipe.down(Settled))[1] in (Status.INVALID, Status.TOO_LARGE)
        assert (consumer.credit_messages, consumer.credit_bytes) == (0, 0)


async def test_credit_counts_once_the_consumer_has_none_of_them_whatever_was_answered():
    async with broker() as link:
        pipe, got, consumer = await _two_of(link, more=0)
        await link.mutate(Operation.CANCEL, ["a"], flags=MutateFlag.LEASED)
        got.version = got.version + np.array([0, 5])
        pipe.up(_asked(got, Operation.ACK, Operation.ACK))
        assert statuses(await pipe.down(Settled)) == [Status.NOT_FOUND, Status.FENCED]
        assert (consumer.credit_messages, consumer.credit_bytes) == (2, 4)


async def test_an_extend_does_not_hold_back_the_credit_of_what_ends_beside_it():
    store = Unwilling()
    async with broker(store) as link:
        pipe, got, consumer = await _two_of(link, more=0)
        store.refused = {b"b": Status.UNAVAILABLE}
        pipe.up(_asked(got, Operation.ACK, Operation.EXTEND, time_ms=1_000))
        assert statuses(await pipe.down(Settled)) == [Status.OK, Status.UNAVAILABLE]
        assert consumer.credit_messages == 2
