"""Whose batch goes next to Cassandra, and that what takes a while leaves room for others in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from timeline.storage_plugins.cassandra.bucket import Bucket
from timeline.storage_plugins.cassandra.changes import (
    FAIR,
    FEW,
    SPREAD,
    SPREAD_OF_FEW,
    BatchSlots,
    CooperativeYield,
)


@dataclass(eq=False)
class Asked:
    """A part of a call, as far as turns look at it."""

    ids: list[bytes]
    leases: bool = False


@dataclass
class Changing:
    """Buckets that wait for their turn and keep it until `end` is called. `given`: who got it, in order."""

    slots: BatchSlots = field(default_factory=BatchSlots)
    given: list[int] = field(default_factory=list)
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    buckets: dict[int, Bucket] = field(default_factory=dict)
    _ends: dict[int, asyncio.Event] = field(default_factory=dict)

    async def wait(self, number: int, messages: int = 1, leases: bool = False) -> None:
        bucket = self.buckets[number] = Bucket(1, number)
        bucket.wait(Asked([b"id"] * messages, leases))
        self._ends[number] = asyncio.Event()
        self.tasks[number] = asyncio.ensure_future(self._change(bucket))
        await _settled()

    async def _change(self, bucket: Bucket) -> None:
        async with self.slots.slot(bucket):
            self.given.append(bucket.number)
            await self._ends[bucket.number].wait()

    async def end(self, number: int) -> None:
        self._ends[number].set()
        await self.tasks[number]
        await _settled()

    async def cancel(self, number: int) -> None:
        self.tasks[number].cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.tasks[number]
        await _settled()

    async def over(self) -> None:
        for ends in self._ends.values():
            ends.set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def _settled() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


@pytest.fixture
async def changing() -> Changing:
    return Changing()


async def test_of_small_batches_some_go_and_of_large_ones_many(changing: Changing) -> None:
    for number in range(SPREAD_OF_FEW + 2):
        await changing.wait(number)
    assert changing.given == list(range(SPREAD_OF_FEW))
    for number in range(100, 100 + SPREAD + 1):
        await changing.wait(number, FEW)
    assert changing.given == [*range(SPREAD_OF_FEW), *range(100, 100 + SPREAD)]
    await changing.end(100)
    assert changing.given[-1] == 100 + SPREAD
    await changing.end(0)
    assert changing.given[-1] == SPREAD_OF_FEW
    await changing.over()
    assert sorted(changing.given) == sorted(changing.tasks)


async def test_who_is_asked_for_enough_while_it_waits_waits_no_longer(changing: Changing) -> None:
    for number in range(SPREAD_OF_FEW + 1):
        await changing.wait(number)
    late = changing.buckets[SPREAD_OF_FEW]
    late.wait(Asked([b"id"] * (FEW - 2)))
    changing.slots.asked(late)
    await _settled()
    assert late.number not in changing.given
    late.wait(Asked([b"id"]))
    changing.slots.asked(late)
    await _settled()
    assert changing.given[-1] == late.number
    await changing.over()


async def test_leases_go_first_but_for_a_share(changing: Changing) -> None:
    for number in range(SPREAD_OF_FEW):
        await changing.wait(number)
    puts, leases = range(100, 103), range(200, 206)
    for number in puts:
        await changing.wait(number)
    for number in leases:
        await changing.wait(number, leases=True)
    for number in range(SPREAD_OF_FEW):
        await changing.end(number)
    for number in (*leases, *puts):
        if number in changing.given:
            await changing.end(number)
    await changing.over()
    assert (SPREAD_OF_FEW, FAIR) == (4, 4), "what follows is worked out for these"
    assert changing.given[SPREAD_OF_FEW:] == [200, 201, 202, 100, 203, 204, 205, 101, 102]


@pytest.mark.parametrize("after_it_was_given", [False, True])
async def test_a_turn_of_one_who_is_cancelled_is_anothers(changing: Changing, after_it_was_given: bool) -> None:
    for number in range(SPREAD_OF_FEW + 2):
        await changing.wait(number)
    first, second = SPREAD_OF_FEW, SPREAD_OF_FEW + 1
    if after_it_was_given:
        # It has the turn, and is cancelled before it goes on.
        changing._ends[0].set()
        while changing.buckets[first] in changing.slots._line:
            await asyncio.sleep(0)
        assert first not in changing.given
    await changing.cancel(first)
    if not after_it_was_given:
        await changing.end(0)
    await _settled()
    assert changing.given[-1] == second
    await changing.over()
    assert changing.slots._under_way == {True: 0, False: 0}


async def test_a_turn_that_ends_as_the_next_in_line_is_cancelled_is_anothers(changing: Changing) -> None:
    for number in range(SPREAD_OF_FEW + 2):
        await changing.wait(number)
    first, second = SPREAD_OF_FEW, SPREAD_OF_FEW + 1
    changing._ends[0].set()
    changing.tasks[first].cancel()
    await _settled()
    assert changing.given == [*range(SPREAD_OF_FEW), second]
    await changing.over()
    assert changing.slots._under_way == {True: 0, False: 0}


async def test_one_who_takes_a_breath_goes_on_in_a_round_of_its_own() -> None:
    cooperative, rounds, went = CooperativeYield(), 0, list[int]()

    def count() -> None:
        nonlocal rounds
        rounds += 1
        if len(went) < 7:
            asyncio.get_running_loop().call_soon(count)

    async def work(turn: Callable[[], int]) -> None:
        await cooperative.take()
        went.append(turn())

    asyncio.get_running_loop().call_soon(count)
    working = [asyncio.ensure_future(work(lambda: rounds)) for _ in range(8)]
    await asyncio.sleep(0)
    working[3].cancel()
    await asyncio.wait(working)
    assert len(went) == len(set(went)) == 7
    await asyncio.wait_for(cooperative.take(), 60)
