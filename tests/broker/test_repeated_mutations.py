"""Mutations sent again while their first sending is with the store; and what was given up before it began."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.broker.link import Link, broker, statuses
from tests.broker.slow import SlowStore
from timeline.broker.api import mutate
from timeline.broker.api.access import ANYBODY, Principal
from timeline.broker.api.mutate import Sendings
from timeline.broker.limits import Limits
from timeline.clock import Clock
from timeline.columns import Ragged
from timeline.model import Operation, Status
from timeline.storage_plugins.contract import StoreUnknown
from timeline.storage_plugins.memory import MemoryStore
from timeline.wire import (
    Deliver,
    Fault,
    Mutate,
    Mutated,
    MutateFlag,
    MutateTag,
    TagMutated,
    TransportError,
    decode,
    encode,
)

HOUR_MS = 3_600_000


class SlowToBegin(MemoryStore):
    """The first mutation reaches the store, and is done once the test says `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        self.calls = 0

    async def _held(self) -> None:
        self.calls += 1
        if self.calls == 1:
            self.reached.set()
            await self.go.wait()

    async def mutate(self, *arguments: Any) -> Any:
        await self._held()
        return await super().mutate(*arguments)

    async def mutate_tag(self, *arguments: Any) -> Any:
        await self._held()
        return await super().mutate_tag(*arguments)


class Hands:
    """A monotonic clock that the test moves on."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def move(op: int, timeout_ms: int = 0, ids: tuple[str, ...] = ("a",)) -> Mutate:
    count = len(ids)
    return Mutate(
        topic="t",
        group="default",
        operation=Operation.MOVE,
        ids=Ragged.of([id.encode() for id in ids]),
        time_ms=np.full(count, HOUR_MS, dtype=np.int64),
        flags=np.full(count, MutateFlag.IN, dtype=np.uint8),
        if_version=np.zeros(count, dtype=np.int64),
        op=np.arange(op, op + count, dtype=np.uint64),
        timeout_ms=timeout_ms,
    )


def cancel_tag(op: int, timeout_ms: int = 0) -> MutateTag:
    return MutateTag("t", "default", Operation.CANCEL, b"red", op, timeout_ms=timeout_ms)


def sent(link: Link, frame: Mutate | MutateTag, caller: Principal = ANYBODY) -> asyncio.Task[Any]:
    async def call() -> Any:
        return decode(await link.node.service.unary("Mutate", encode(frame), caller, "test"))

    return asyncio.ensure_future(call())


@asynccontextmanager
async def slow(clock: Clock | None = None) -> AsyncIterator[tuple[Link, SlowToBegin]]:
    store = SlowToBegin()
    async with broker(store, clock=clock) as link:
        try:
            yield link, store
        finally:
            store.go.set()


@pytest.mark.parametrize("given_up", [True, False], ids=["given up", "both awaited"])
async def test_a_move_sent_again_is_answered_when_its_first_sending_is_over(given_up: bool) -> None:
    async with slow() as (link, store):
        first = sent(link, move(op=7))
        await store.reached.wait()
        if given_up:
            first.cancel()
            await asyncio.wait({first})
        again = sent(link, move(op=7))
        # Refused as NOT_FOUND now, it would be moved all the same: by its first sending.
        assert statuses(await link.put(["a"], 2 * HOUR_MS)) == [Status.OK]
        store.go.set()
        answer: Mutated = await again
        assert statuses(answer) == [Status.OK]
        assert answer.answers.version.tolist() == [2] and answer.answers.repeat.tolist() == [1]


async def test_what_shares_an_operation_waits_and_what_shares_none_does_not() -> None:
    async with slow() as (link, store):
        first = sent(link, move(op=7, ids=("a", "b")))
        await store.reached.wait()
        again = sent(link, move(op=8, ids=("b", "c")))
        assert statuses(await sent(link, move(op=100, ids=("d",)))) == [Status.NOT_FOUND]
        assert store.calls == 2 and not again.done()
        store.go.set()
        assert statuses(await first) == statuses(await again) == [Status.NOT_FOUND] * 2


async def test_a_chunk_by_tag_sent_again_is_answered_when_its_first_sending_is_over() -> None:
    async with slow() as (link, store):
        assert statuses(await link.put(["a"], HOUR_MS, tags=Ragged.of([b"red"]))) == [Status.OK]
        first = sent(link, cancel_tag(op=7))
        await store.reached.wait()
        again = sent(link, cancel_tag(op=7))
        assert statuses(await sent(link, move(op=8, ids=("none",)))) == [Status.NOT_FOUND]
        assert store.calls == 2 and not again.done()
        store.go.set()
        answers: list[TagMutated] = [await first, await again]
        assert [answer.counts.get(Status.OK.code, 0) for answer in answers] == [1, 0]


async def test_an_operators_repeat_waits_while_it_is_asked_whose_the_messages_are() -> None:
    operator = replace(ANYBODY, as_operator=True)
    store = SlowStore()
    async with broker(store) as link:
        store.hold("scan")
        first = sent(link, move(op=7), operator)
        await store.arrived("scan")
        again = sent(link, move(op=7), operator)
        assert statuses(await link.put(["a"], 2 * HOUR_MS)) == [Status.OK]
        assert store.calls["scan"] == 1 and not again.done()
        store.release("scan")
        answers = await first, await again
        assert statuses(answers[0]) == statuses(answers[1])


async def test_what_is_no_operation_is_no_sending_of_another() -> None:
    async with slow() as (link, store):
        none = np.zeros(1, dtype=np.uint64)
        one, other = (replace(move(op=1, ids=(id,)), operation=Operation.CANCEL, op=none) for id in ("a", "b"))
        first = sent(link, one)
        await store.reached.wait()
        assert statuses(await sent(link, other)) == [Status.NOT_FOUND]
        assert (await sent(link, cancel_tag(op=0))).counts == {}
        store.go.set()
        assert statuses(await first) == [Status.NOT_FOUND]


async def test_what_nobody_waits_for_any_more_is_not_begun_after_its_first_sending(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with slow() as (link, store):
        first = sent(link, move(op=7))
        await store.reached.wait()
        gone = [sent(link, frame) for frame in (move(op=7), cancel_tag(op=7))]
        assert statuses(await sent(link, move(op=8, ids=("none",)))) == [Status.NOT_FOUND]
        for call in (first, *gone):
            call.cancel()
        await asyncio.wait({first, *gone})
        calls = store.calls
        store.go.set()
        await link.node.service.idle()
        assert store.calls == calls
        del first, gone, call
        gc.collect()
    assert not caplog.records


async def test_a_mistake_of_ours_is_told_though_its_caller_has_gone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with slow() as (link, store):
        call = sent(link, move(op=7))
        await store.reached.wait()
        call.cancel()
        await asyncio.wait({call})
        monkeypatch.setattr(mutate, "count_answers", None)
        store.go.set()
        await link.node.service.idle()
    assert [record.getMessage() for record in caplog.records] == ["a call whose caller has gone failed"]


async def test_its_callers_time_counts_from_when_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    hands = Hands()
    async with broker(clock=Clock(hands, hands)) as link:
        turns = link.node.scheduler
        take = turns.take

        async def taken(peer: str, *more: Any) -> bool:
            hands.now_s += 0.1
            return await take(peer, *more)

        monkeypatch.setattr(turns, "take", taken)
        assert statuses(await sent(link, move(op=7, timeout_ms=100))) == [Status.UNAVAILABLE]
        assert statuses(await sent(link, move(op=7, timeout_ms=101))) == [Status.NOT_FOUND]


async def test_what_its_callers_time_was_over_for_is_not_begun() -> None:
    hands = Hands()
    async with slow(Clock(hands, hands)) as (link, store):
        assert statuses(await link.put(["a"], HOUR_MS, tags=Ragged.of([b"red"]))) == [Status.OK]
        first, tagged = sent(link, move(op=7)), sent(link, cancel_tag(op=8))
        await store.reached.wait()
        await tagged  # it was the second, and is not held
        again = [sent(link, move(op=7, timeout_ms=timeout_ms)) for timeout_ms in (0, 100, 101)]
        by_tag = sent(link, cancel_tag(op=7, timeout_ms=100))
        # They have come once another one, sent after them, is answered.
        assert statuses(await sent(link, move(op=9, ids=("none",)))) == [Status.NOT_FOUND]
        hands.now_s += 0.1
        calls = store.calls
        store.go.set()
        await first
        assert [statuses(await one) for one in again] == [[Status.NOT_FOUND], [Status.UNAVAILABLE], [Status.NOT_FOUND]]
        assert "not begun" in (await again[1]).answers.details[0]
        with pytest.raises(TransportError, match="not begun") as refused:
            await by_tag
        assert refused.value.fault is Fault.NOT_READY
        assert store.calls == calls + 2


async def test_what_was_given_up_while_it_waited_for_its_turn_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    async with broker() as link:
        assert statuses(await link.put(["a"], HOUR_MS)) == [Status.OK]
        turns, waits, turn = link.node.scheduler, asyncio.Event(), asyncio.Event()
        take = turns.take

        async def taken(peer: str, *more: Any) -> bool:
            waits.set()
            await turn.wait()
            return await take(peer, *more)

        with monkeypatch.context() as held:
            held.setattr(turns, "take", taken)
            call = sent(link, move(op=7))
            await waits.wait()
            call.cancel()
            await asyncio.wait({call})
        turn.set()
        await link.node.service.idle()
        later = await sent(link, move(op=8))
        assert statuses(later) == [Status.OK] and later.answers.version.tolist() == [2], "moved once, by this one"


async def test_sendings_of_one_operation_go_one_after_the_other() -> None:
    sendings, under_way = Sendings(), set[int]()
    done: dict[int, list[int]] = {}

    async def send(number: int, *ops: int) -> None:
        async with sendings.in_order(ops):
            assert not under_way & set(ops)
            under_way.update(ops)
            await asyncio.sleep(0)
            for op in set(ops):
                done.setdefault(op, []).append(number)
            under_way.difference_update(ops)

    await asyncio.gather(send(0, 1, 2), send(1, 2, 3), send(2, 3), send(3, 1, 3), send(4, 2, 2))
    assert done == {1: [0, 3], 2: [0, 1, 4], 3: [1, 2, 3]}
    assert not sendings._last


async def test_a_third_sending_waits_for_the_second_though_the_first_is_over() -> None:
    sendings, order, go = Sendings(), list[str](), [asyncio.Event() for _ in range(3)]

    async def send(number: int) -> None:
        async with sendings.in_order([1]):
            order.append(f"{number} begins")
            await go[number].wait()
            order.append(f"{number} ends")

    first, second = asyncio.ensure_future(send(0)), asyncio.ensure_future(send(1))
    await asyncio.sleep(0)  # both have come
    go[0].set()
    await first
    while "1 begins" not in order:
        await asyncio.sleep(0)
    go[2].set()
    third = asyncio.ensure_future(send(2))
    await asyncio.sleep(0)
    go[1].set()
    await asyncio.gather(second, third)
    assert order == [f"{number} {what}" for number in range(3) for what in ("begins", "ends")]


class LosesAnswers(MemoryStore):
    """Each mutation by tag is done, and its answer is lost."""

    async def mutate_tag(self, *arguments: Any) -> Any:
        await super().mutate_tag(*arguments)
        raise StoreUnknown("the answer was lost by the test")


async def test_messages_that_a_lost_answer_moved_are_delivered_at_once() -> None:
    """Nothing looks for what is due by itself within the hour."""
    async with broker(LosesAnswers(), limits=Limits(sweep_every_ms=HOUR_MS)) as link:
        consumer = await link.consume()
        await link.put(["a"], HOUR_MS, tags=Ragged.of([b"red"]))
        frame = MutateTag("t", "default", Operation.MOVE, b"red", 7, in_ms=0)
        with pytest.raises(TransportError):
            await sent(link, frame)
        assert (await consumer.down(Deliver)).ids.tolist() == [b"a"]
