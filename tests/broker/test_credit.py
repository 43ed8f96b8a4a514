"""A consumer that comes back with something in hand: its credit counts besides that."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.broker.link import Link, Pipe, broker
from timeline.columns import Ragged
from timeline.model import Operation
from timeline.wire import Deliver


async def _comes_back(link: Link, lease_ms: int = 30_000) -> tuple[Pipe, Deliver]:
    """Consumer `c` with credit for 5 messages of 3 bytes in all, one of 2 bytes in hand, on its second stream."""
    first = await link.consume(credit=5, credit_bytes=3, lease_ms=lease_ms)
    await link.put(["a"])
    got: Deliver = await first.down(Deliver)
    first.cancel()
    await asyncio.wait([first.task])
    return await link.consume(credit=4, credit_bytes=1, lease_ms=lease_ms, in_hand=got), got


async def _who_gets_it(**pipes: Pipe) -> str:
    waiting = {asyncio.ensure_future(pipe.down(Deliver)): name for name, pipe in pipes.items()}
    done, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in left:
        task.cancel()
    return waiting[done.pop()]


def _large(**more: Any) -> dict[str, Any]:
    return {"payloads": Ragged.of([b"0123456789"]), **more}


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
        await link.put(["b"], **_large())
        assert (await mine.down(Deliver)).ids.tolist() == [b"b"]


async def test_once_that_lease_has_ended_a_large_message_goes_to_it_alone():
    async with broker() as link:
        mine, got = await _comes_back(link, lease_ms=50)
        other = await link.consume("other")
        again = await other.down(Deliver)
        assert again.ids.tolist() == got.ids.tolist()
        await link.settle(other, again, Operation.ACK)
        other.cancel()
        await asyncio.wait([other.task])
        await link.put(["b"], **_large())
        assert (await mine.down(Deliver)).ids.tolist() == [b"b"]


async def test_a_lease_that_it_extends_stays_in_hand():
    async with broker() as link:
        mine, got = await _comes_back(link, lease_ms=300)
        await link.settle(mine, got, Operation.EXTEND, 3_600_000, credit=0)
        consumer = next(iter(link.node.dealer(await link.node.topic("t")).roster.consumers.values()))  # type: ignore[arg-type]
        assert consumer.carried == {(b"a", int(got.birth[0]), int(got.version[0]))}
        assert consumer.carried_until_ms > link.node.clock.monotonic_ms() + 3_000_000
