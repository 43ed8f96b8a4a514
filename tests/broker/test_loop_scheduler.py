"""A flood and somebody beside it: counted in turns of the event loop and calls of the store, never in seconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from tests.broker.link import broker, statuses
from tests.broker.slow import SlowStore
from timeline.broker.fairness import BUDGET_MS, FRAME_MS, TURNS_BETWEEN, LoopScheduler
from timeline.broker.limits import Limits
from timeline.clock import Clock
from timeline.columns import Ragged
from timeline.model import Answers, Operation, Status, Topic
from timeline.storage_plugins.contract import Puts, Settles
from timeline.storage_plugins.memory import MemoryStore
from timeline.wire import Deliver, Produced, Settle, Settled, TopicAction

PIECE_MS = 5.0


class Hours:
    """A clock that stands but for the work that is done."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s

    def work(self, ms: float) -> None:
        self.now_s += ms / 1_000.0


class Counted:
    """Counts the turns of the event loop while it runs."""

    def __init__(self) -> None:
        self.turns = 0

    async def run(self) -> None:
        while True:
            self.turns += 1
            await asyncio.sleep(0)


@asynccontextmanager
async def counted() -> AsyncIterator[Counted]:
    made = Counted()
    task = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        task.cancel()


async def test_pieces_of_a_flood_never_share_a_turn_of_the_loop_and_leave_others_some():
    hours = Hours()
    turns, at = LoopScheduler(lambda: hours() * 1_000), list[int]()
    async with counted() as loop:

        async def busy() -> None:
            """Somebody who has something to do in each turn."""
            while len(at) < 20:
                hours.work(0.1)
                await asyncio.sleep(0)

        async def piece(peer: str) -> None:
            await turns.take(peer)
            with turns.work(peer):
                at.append(loop.turns)
                hours.work(PIECE_MS)

        await asyncio.gather(busy(), *(piece(f"flood:{number % 4}") for number in range(20)))
    assert min(np.diff(at)) >= TURNS_BETWEEN


async def test_where_nobody_else_has_anything_to_do_the_next_piece_comes_in_the_turn_after():
    hours = Hours()
    turns, at = LoopScheduler(lambda: hours() * 1_000), list[int]()
    async with counted() as loop:

        async def piece() -> None:
            await turns.take("flood:1")
            with turns.work("flood:1"):
                at.append(loop.turns)
                hours.work(PIECE_MS)

        await asyncio.gather(*(piece() for _ in range(20)))
    assert max(np.diff(at)) <= 4


async def test_a_frame_waits_for_one_piece_of_a_flood_however_many_wait():
    hours = Hours()
    turns, order = LoopScheduler(lambda: hours() * 1_000), list[str]()

    async def piece(peer: str) -> None:
        await turns.take(peer)
        with turns.work(peer):
            order.append(peer)
            hours.work(PIECE_MS)

    flood = [asyncio.create_task(piece(f"flood:{number % 4}")) for number in range(100)]
    while len(order) < 10:
        await asyncio.sleep(0)
    before = len(order)
    await piece("good:1")
    assert order.index("good:1") <= before + 1
    assert turns.waiting > 80
    await asyncio.gather(*flood)


async def test_nobody_waits_where_there_is_time_for_all():
    hours = Hours()
    turns = LoopScheduler(lambda: hours() * 1_000)
    for _ in range(int(BUDGET_MS / 0.1)):
        with pytest.raises(StopIteration):
            turns.take("a:1").send(None)
    assert turns.waiting == 0


async def test_who_goes_away_while_it_waits_takes_nobodys_turn():
    hours = Hours()
    turns = LoopScheduler(lambda: hours() * 1_000)

    async def piece() -> None:
        with turns.work("a:1"):
            hours.work(PIECE_MS)

    working, gone = asyncio.create_task(piece()), asyncio.create_task(turns.take("a:1"))
    await asyncio.sleep(0)
    assert turns.waiting == 1
    gone.cancel()
    await turns.take("b:1")
    await working
    while turns.waiting:
        await asyncio.sleep(0)
    assert gone.cancelled()


@pytest.mark.slow
async def test_what_goes_ahead_does_not_slow_down_those_in_line():
    """Small frames wait, and consumers acknowledge all the while: as many of the line have a turn as without those."""
    hours = Hours()
    turns, let = LoopScheduler(lambda: hours() * 1_000), list[int]()
    over = False

    async def acknowledging() -> None:
        while not over:
            if await turns.take("good:1", ahead=True):
                with turns.work("good:1", ahead=True):
                    hours.work(FRAME_MS)
            await asyncio.sleep(0)

    async def small(peer: str) -> None:
        await turns.take(peer)
        with turns.work(peer):
            let.append(turns._number)
            hours.work(FRAME_MS)

    async with counted():
        others = [asyncio.create_task(acknowledging()) for _ in range(20)]
        await asyncio.gather(*(small(f"flood:{number % 8}") for number in range(400)))
        over = True
        await asyncio.gather(*others)
    assert max(let.count(turn) for turn in set(let)) >= BUDGET_MS / FRAME_MS - 1


class Noting(SlowStore):
    """Notes the ids of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[bytes]] = []

    async def put(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        self.asked.append(puts.ids.tolist())
        return await super().put(topic, now_ms, puts)

    async def settle(self, topic: Topic, now_ms: int, settles: Settles) -> Answers:
        self.asked.append(settles.ids.tolist())
        return await super().settle(topic, now_ms, settles)


def settles(request: int, ids: list[bytes]) -> Settle:
    """Acks of what nobody has."""
    count = len(ids)
    return Settle(
        request=request,
        ids=Ragged.of(ids),
        birth=np.ones(count, dtype=np.uint64),
        version=np.ones(count, dtype=np.int64),
        operation=np.full(count, Operation.ACK, dtype=np.uint8),
        time_ms=np.zeros(count, dtype=np.int64),
        flags=np.zeros(count, dtype=np.uint8),
        op=np.arange(1, count + 1, dtype=np.uint64),
    )


async def test_a_put_does_not_wait_for_all_that_others_put_before():
    store = Noting()
    async with broker(store, Limits(store_batch_messages=4, shared_batch_messages=4)) as link:
        store.hold("put")
        flood = link.open("Produce", "flood:1")
        for at in range(20):
            flood.up(link.puts([f"f{at}-0", f"f{at}-1"], in_ms=3_600_000))
        await store.arrived("put")
        while link.node.intake.waiting < 40:
            await asyncio.sleep(0)
        good = link.open("Produce", "good:1")
        good.up(link.puts(["g"], in_ms=3_600_000))
        while link.node.intake.waiting < 41:
            await asyncio.sleep(0)
        store.release("put")
        await good.down(Produced)
        for _ in range(20):
            await flood.down(Produced)
    assert [b"g" in ids for ids in store.asked].index(True) == 1
    assert sum(map(len, store.asked)) == 41


class HeldTopic(SlowStore):
    """One whose calls to one topic wait."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.gate = name, asyncio.Event()

    async def put(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        if topic.name == self.name:
            await self.gate.wait()
        return await super().put(topic, now_ms, puts)


async def test_a_topics_puts_do_not_wait_for_another_topics_call():
    store = HeldTopic("t")
    async with broker(store) as link:
        await link.topic(TopicAction.CREATE, "other")
        held = link.open("Produce", "flood:1")
        held.up(link.puts(["f"], in_ms=3_600_000))
        while not link.node.intake.waiting:
            await asyncio.sleep(0)
        assert statuses(await link.put(["g"], in_ms=3_600_000, topic="other")) == [Status.OK]
        assert link.node.intake.waiting == 1
        store.gate.set()
        assert statuses(await held.down(Produced)) == [Status.OK]


async def test_a_settle_does_not_wait_for_all_that_another_settles_and_each_gets_its_own_answers():
    store = Noting()
    async with broker(store, Limits(shared_batch_messages=4)) as link:
        flood = await link.consume("flood", peer="flood:1")
        good = await link.consume("good", peer="good:1")
        store.hold("settle")
        good.up(settles(1, [b"first"]))
        await store.arrived("settle")
        for at in range(5):
            flood.up(settles(at, [b"f%d-%d" % (at, one) for one in range(10)]))
        while link.node.settling.waiting < 51:
            await asyncio.sleep(0)
        good.up(settles(2, [b"g"]))
        while link.node.settling.waiting < 52:
            await asyncio.sleep(0)
        store.release("settle")
        assert [len((await flood.down(Settled)).answers) for _ in range(5)] == [10] * 5
        assert [len((await good.down(Settled)).answers) for _ in range(2)] == [1, 1]
    assert [b"g" in ids for ids in store.asked].index(True) <= 2
    assert max(map(len, store.asked)) <= 4


class Worked(MemoryStore):
    """A store each of whose settles takes the loop for a while, from when the gate is open."""

    def __init__(self, hours: Hours) -> None:
        super().__init__()
        self.hours, self.settled, self.gate = hours, 0, asyncio.Event()

    async def settle(self, topic: Topic, now_ms: int, settles: Settles) -> Answers:
        if not self.gate.is_set():
            await self.gate.wait()
        self.settled += 1
        self.hours.work(PIECE_MS)
        return await super().settle(topic, now_ms, settles)


@pytest.mark.slow
async def test_what_is_due_waits_for_some_pieces_of_a_flood_of_settles_not_for_all_of_it():
    """The store never waits, so that nothing but turns gives others a chance: from the put's frame to the delivery on
    its way only a few of the flood's calls go between."""
    hours, frames = Hours(), 60
    store = Worked(hours)
    limits = Limits(store_batch_messages=10, shared_batch_messages=10)
    async with broker(store, limits, Clock(hours, hours)) as link:
        floods = [await link.consume(f"f{number}", credit=0, peer=f"flood:{number}") for number in range(4)]
        good = await link.consume("good", peer="good:1")
        producer = link.open("Produce", "good:2")
        for pipe in floods:
            for at in range(frames):
                pipe.up(settles(at, [b"%d-%d" % (at, one) for one in range(10)]))
        while link.node.settling.waiting < 4 * frames * 10:
            await asyncio.sleep(0)
        store.gate.set()
        producer.up(link.puts(["m"], in_ms=0))
        assert (await good.down(Deliver)).ids.tolist() == [b"m"]
        assert store.settled < frames
        for pipe in floods:
            for _ in range(frames):
                await pipe.down(Settled)


async def test_what_goes_ahead_passes_those_who_wait_up_to_the_budget_of_a_turn():
    hours = Hours()
    turns = LoopScheduler(lambda: hours() * 1_000)

    async def piece() -> None:
        await turns.take("flood:1")
        with turns.work("flood:1"):
            hours.work(PIECE_MS)

    flood = [asyncio.create_task(piece()) for _ in range(5)]
    while not turns.waiting:
        await asyncio.sleep(0)
    for _ in range(round(BUDGET_MS / FRAME_MS)):
        with pytest.raises(StopIteration):
            turns.take("good:1", ahead=True).send(None)
    late = turns.take("good:1", ahead=True)
    assert late.send(None) is not None
    late.close()
    await asyncio.gather(*flood)


async def test_who_waits_has_his_turn_however_many_go_ahead():
    hours, served = Hours(), 0
    turns = LoopScheduler(lambda: hours() * 1_000)

    async def favoured(peer: str) -> None:
        while True:
            await turns.take(peer, ahead=True)
            with turns.work(peer):
                hours.work(0.1)
            await asyncio.sleep(0)

    async def patient() -> None:
        nonlocal served
        while served < 20:
            await turns.take("patient:1")
            served += 1

    crowd = [asyncio.create_task(favoured(f"many:{number}")) for number in range(20)]
    waiting = asyncio.create_task(patient())
    async with counted() as loop:
        while served < 20 and loop.turns < 20 * 2 * TURNS_BETWEEN:
            await asyncio.sleep(0)
    for task in (waiting, *crowd):
        task.cancel()
    assert served == 20
