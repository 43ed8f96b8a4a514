"""A consumer that comes back with something in hand: its credit counts besides that."""

from __future__ import annotations

import asyncio

import pytest

from tests.broker.link import Link, Pipe, broker
from timeline.columns import Ragged
from timeline.model import Operation
from timeline.wire import Credit, Deliver

LARGE = Ragged.of([b"0123456789"])


async def _comes_back(link: Link) -> tuple[Pipe, Deliver]:
    """Consumer `c` with room for 5 messages of 3 bytes in all, one of 2 bytes in hand, on its second stream."""
    first = await link.consume(credit=5, credit_bytes=3)
    await link.put(["a"])
    got: Deliver = await first.down(Deliver)
    first.cancel()
    await asyncio.wait([first.task])
    return await link.consume(credit=4, credit_bytes=1, room_messages=5, room_bytes=3, in_hand=got), got


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
