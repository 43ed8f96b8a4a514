"""Credit in bytes: a large message goes to whoever has room for it, and outboxes that nobody reads keep room for
others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.broker.link import Pipe, broker, statuses
from tests.broker.slow import SlowStore
from timeline.broker.dispatch.roster import Outboxes
from timeline.broker.limits import Limits
from timeline.columns import Ragged
from timeline.model import Operation, Status
from timeline.wire import Deliver, TopicAction

MIB = 1024 * 1024


@pytest.mark.slow
async def test_a_message_goes_past_a_consumer_whose_turn_it_is_without_the_credit() -> None:
    """A limited topic deals one message at a time, and the turn passes only with a message."""
    async with broker() as link:
        await link.topic(TopicAction.UPDATE, max_rate_per_s=10)
        narrow = await link.consume("a", credit=10, credit_bytes=100_000)
        wide = await link.consume("b", credit=10, credit_bytes=16 * MIB)
        await link.put(["small0"])
        await narrow.down(Deliver)
        await link.put(["small1"])
        await wide.down(Deliver)
        await link.put(["large"], payloads=Ragged.of([b"x" * MIB]))
        assert (await wide.down(Deliver)).ids.tolist() == [b"large"]


@pytest.mark.slow
async def test_a_message_larger_than_all_credit_goes_to_one_that_has_nothing_in_hand() -> None:
    async with broker() as link:
        await link.topic(TopicAction.UPDATE, max_rate_per_s=10)
        idle = await link.consume("a", credit=10, credit_bytes=400_000)
        busy = await link.consume("b", credit=10, credit_bytes=900_000)
        await link.put(["small0"])
        small = await idle.down(Deliver)
        await link.put(["small1"])
        await busy.down(Deliver)
        assert statuses(await link.settle(idle, small, Operation.ACK)) == [Status.OK]
        await link.put(["large"], payloads=Ragged.of([b"x" * 950_000]))
        assert (await idle.down(Deliver)).ids.tolist() == [b"large"]


@pytest.mark.slow
async def test_a_message_larger_than_a_share_of_the_round_goes_to_one_that_has_the_credit() -> None:
    """Each consumer has something in hand. A round of twenty gives each 0.8 MiB."""
    async with broker() as link:
        pipes = [await link.consume(f"c{n:02}", credit=10, credit_bytes=16 * MIB) for n in range(20)]
        await link.put([f"small{n}" for n in range(20)])
        for pipe in pipes:
            await pipe.down(Deliver)
        await link.put(["large", "behind"], payloads=Ragged.of([b"x" * MIB, b"y"]))
        waits = {asyncio.ensure_future(pipe.down(Deliver)) for pipe in pipes}
        found: list[bytes] = []
        while len(found) < 2:
            done, waits = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            found += [id for one in done for id in one.result().ids.tolist()]
        for wait in waits:
            wait.cancel()
    assert sorted(found) == [b"behind", b"large"]


class Granting(SlowStore):
    """Notes the holders of each lease call."""

    def __init__(self) -> None:
        super().__init__()
        self.granted: list[list[bytes]] = []

    async def lease_due(self, *arguments: Any) -> Any:
        self.granted.append([grant.holder for grant in arguments[4]])
        return await super().lease_due(*arguments)


async def test_one_whose_credit_comes_back_during_a_round_in_which_nothing_fitted_is_in_the_next() -> None:
    store = Granting()
    async with broker(store) as link:
        narrow = await link.consume("narrow", credit=10, credit_bytes=45)
        await link.put(["small"], payloads=Ragged.of([b"x" * 29]))
        small = await narrow.down(Deliver)
        store.hold("lease_due")
        await link.put(["large"], payloads=Ragged.of([b"x" * 21]))
        await store.arrived("lease_due")
        assert statuses(await link.settle(narrow, small, Operation.ACK)) == [Status.OK]
        await link.consume("wide", credit=1, credit_bytes=MIB)
        begun = len(store.granted)
        assert store.granted[-1] == [b"narrow"], "16 bytes were left for it: too few"
        store.release("lease_due")
        while len(store.granted) == begun:
            await asyncio.sleep(0)
        assert sorted(store.granted[begun]) == [b"narrow", b"wide"]


async def test_a_session_that_takes_over_gets_messages_larger_than_a_round() -> None:
    async with broker(limits=Limits(lease_bytes=MIB // 2)) as link:
        first = await link.consume("w", credit=10, credit_bytes=16 * MIB)
        ids = ["a", "b", "c"]
        await link.put(ids, payloads=Ragged.of([b"x" * MIB] * 3))
        await received(first, 3)
        second = await link.consume("w", session=2, credit=10, credit_bytes=16 * MIB)
        assert sorted(await received(second, 3)) == [b"a", b"b", b"c"]


async def received(pipe: Pipe, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        found += (await pipe.down(Deliver)).ids.tolist()
    return found


async def test_consumers_that_do_not_read_hold_up_no_other_host() -> None:
    limits = Limits(outboxes_bytes=4 * MIB, outbox_bytes=MIB, lease_bytes=MIB, stall_ms=3_600_000)
    async with broker(limits=limits) as link:
        await link.topic(TopicAction.CREATE, "u")
        good = await link.consume("good", topic="u", credit=100, peer="host2:1")
        for number in range(16):
            ids = [f"m{number}-{at}" for at in range(8)]
            await link.put(ids, payloads=Ragged.of([b"x" * (MIB // 8)] * 8))
        for number in range(12):
            bad = await link.consume(f"bad{number}", credit=1_000, credit_bytes=1024 * MIB, peer=f"host1:{number}")
            bad.flowing.clear()
        while link.node.outboxes.bytes < 3 * MIB:
            await asyncio.sleep(0)
        for number in range(3):
            await link.put([f"good{number}"], topic="u")
            assert (await good.down(Deliver)).ids.tolist() == [b"good%d" % number]


def test_a_host_has_no_more_of_the_outboxes_than_is_left_to_others() -> None:
    freed: list[int] = []
    outboxes = Outboxes(100, lambda: freed.append(outboxes.bytes))
    outboxes.add("a", 99)
    assert outboxes.admits("a") and not freed
    outboxes.add("a", 20)
    assert not outboxes.admits("a") and outboxes.admits("b")
    outboxes.add("b", 31)
    assert not outboxes.admits("b") and not outboxes.admits("c")
    outboxes.add("a", -1)
    assert freed == [149], "there is room for c"
    outboxes.add("a", -59)
    assert freed == [149], "nobody waits"
    outboxes.add("a", -1)
    assert outboxes.admits("c")
    assert not outboxes.admits("a") and not outboxes.admits("b"), "they have more than is left"
    outboxes.add("b", -25)
    assert outboxes.admits("b") and not outboxes.admits("a")
    outboxes.add("b", -6)
    assert outboxes.admits("a")
