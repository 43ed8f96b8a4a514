"""Frames that go ahead of others': earned by what was sent, and used up by what comes."""

from __future__ import annotations

import pytest

from tests.broker.columns import make_leased
from tests.broker.link import broker, statuses
from tests.broker.newer import UNKNOWN
from timeline.broker.api.consume import deliver
from timeline.broker.fairness import LoopScheduler
from timeline.model import MAX_REASON_BYTES, Operation, Status, TopicSettings
from timeline.wire import Beat, Deliver

NOTHING = deliver(make_leased([], []), 0, TopicSettings())


@pytest.fixture
def aheads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Which frames went ahead of others', where that was asked, one after the other."""
    found: list[bool] = []
    take = LoopScheduler.take

    async def noted(self: LoopScheduler, peer: str, bytes_: int = 0, ahead: bool = False) -> bool:
        if peer == "test":
            found.append(ahead)
        return await take(self, peer, bytes_, ahead)

    monkeypatch.setattr(LoopScheduler, "take", noted)
    return found


async def test_a_settle_of_what_was_sent_goes_ahead_and_nothing_more(aheads: list[bool]):
    async with broker() as link:
        pipe = await link.consume()
        await link.put(["a"])
        got = await pipe.down(Deliver)
        aheads.clear()
        assert statuses(await link.settle(pipe, got, Operation.ACK)) == [Status.OK]
        link.beat(pipe)
        await pipe.down(Beat)
        assert aheads == [True, False]


@pytest.mark.parametrize("what", ["a beat", "no settles", "a newer frame"])
async def test_whatever_goes_ahead_uses_it_up(what: str, aheads: list[bool]):
    async with broker() as link:
        pipe = await link.consume()
        await link.put(["a"])
        got = await pipe.down(Deliver)
        aheads.clear()
        for _ in range(2):
            if what == "a beat":
                link.beat(pipe)
                await pipe.down(Beat)
            elif what == "no settles":
                await link.settle(pipe, NOTHING, Operation.ACK)
            else:
                pipe.to_broker.put_nowait(UNKNOWN)
        assert statuses(await link.settle(pipe, got, Operation.ACK)) == [Status.OK]
        assert aheads == [True, False, False]


async def test_what_was_settled_together_is_settled(aheads: list[bool]):
    """And earns nothing for later. A long frame waits its turn."""
    async with broker() as link:
        pipe = await link.consume()
        await link.put([f"m{at}" for at in range(8)])
        got = await pipe.down(Deliver)
        assert len(got.birth) == 8
        aheads.clear()
        await link.settle(pipe, got, Operation.EXTEND, 60_000)
        link.beat(pipe)
        await pipe.down(Beat)
        assert aheads == [True, False]
        await link.put([f"n{at}" for at in range(8)])
        got = await pipe.down(Deliver)
        aheads.clear()
        await link.settle(pipe, got, Operation.BURY, reason=b"x" * MAX_REASON_BYTES)
        assert aheads == [False]


async def test_a_stream_keeps_some_for_later_and_no_more(aheads: list[bool], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("timeline.broker.api.consume.MOST_EARNED", 3)
    async with broker() as link:
        pipe = await link.consume()
        await link.put([f"m{at}" for at in range(8)])
        await pipe.down(Deliver)
        aheads.clear()
        for _ in range(5):
            link.beat(pipe)
            await pipe.down(Beat)
        assert aheads == [True, True, True, False, False]
