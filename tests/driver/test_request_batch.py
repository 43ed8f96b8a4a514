"""RequestBatch: what an answer means, above all after one that was lost. RequestQueue: where batches wait."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest

from timeline.clock import Clock
from timeline.columns import Ragged
from timeline.driver.produce.request_queue import BatchCall, RequestBatch, RequestQueue, calls_of, cuts_of, judge
from timeline.errors import Invalid, Unavailable
from timeline.model import Answers, Operation, Status
from timeline.wire import Produce, PutFlag


def _queue() -> RequestQueue:
    return RequestQueue(calls_of(Produce, Operation.PUT), Clock(), random.Random(1), _nobody)


def _nobody() -> Unavailable:
    return Unavailable("nobody is there")


def _batch(operation: Operation, count: int, queue: RequestQueue | None = None, unsure: bool = False) -> RequestBatch:
    columns = {"ids": Ragged.of([b"%d" % n for n in range(count)]), "birth": np.arange(1, count + 1, dtype=np.uint64)}
    many = BatchCall(queue or _queue(), count, 1_000.0)
    return RequestBatch(columns, operation, many, None, 10 * count, unsure=unsure)


def _answers(*statuses: Status, repeat: int = 0, settled: int = 0) -> Answers:
    answers = Answers.blank(len(statuses))
    answers.status[:] = [status.code for status in statuses]
    answers.repeat[:] = repeat
    answers.settled[:] = settled
    return answers


CHANGED_SINCE = (
    Status.EXISTS, Status.FORBIDDEN, Status.LEASED, Status.DEAD, Status.NOT_FOUND, Status.FENCED,
)  # fmt: skip
"""Answers about a message that was perhaps put or freed, delivered and settled before they became true."""
LEAVING = (Operation.PUT, Operation.MOVE, Operation.RELEASE, Operation.BURY, Operation.REVIVE)
"""Operations that leave a message."""


@pytest.mark.parametrize(
    ("operation", "unsure", "status", "repeat", "settled", "final"),
    [
        (Operation.PUT, True, Status.DUPLICATE, 1, 0, Status.OK),
        (Operation.PUT, True, Status.DUPLICATE, 0, 0, Status.DUPLICATE),
        (Operation.PUT, True, Status.DUPLICATE, 0, 1, Status.DUPLICATE),
        (Operation.PUT, False, Status.EXISTS, 0, 0, Status.EXISTS),
        *((operation, True, status, 0, 0, Status.UNKNOWN) for operation in LEAVING for status in CHANGED_SINCE),
        (Operation.MOVE, False, Status.NOT_FOUND, 0, 0, Status.NOT_FOUND),
        (Operation.MOVE, True, Status.INVALID, 0, 0, Status.INVALID),
        (Operation.MOVE, True, Status.OK, 1, 0, Status.OK),
        (Operation.ACK, True, Status.NOT_FOUND, 0, 0, Status.OK),
        (Operation.ACK, False, Status.NOT_FOUND, 0, 0, Status.NOT_FOUND),
        (Operation.ACK, True, Status.FENCED, 0, 0, Status.FENCED),
        (Operation.CANCEL, True, Status.NOT_FOUND, 0, 0, Status.UNKNOWN),
        (Operation.CANCEL, True, Status.NOT_FOUND, 0, 1, Status.NOT_FOUND),
        (Operation.CANCEL, False, Status.NOT_FOUND, 0, 0, Status.NOT_FOUND),
        (Operation.PURGE, True, Status.NOT_FOUND, 0, 0, Status.UNKNOWN),
        (Operation.CANCEL, True, Status.LEASED, 0, 0, Status.LEASED),
        (Operation.EXTEND, True, Status.FENCED, 0, 0, Status.FENCED),
        (Operation.RELEASE, True, Status.OK, 1, 0, Status.OK),
    ],
)
def test_an_own_unknown_is_settled_by_the_repeated_call(
    operation: Operation, unsure: bool, status: Status, repeat: int, settled: int, final: Status
) -> None:
    batch = _batch(operation, 1, unsure=unsure)
    _, judged, again = judge(batch, _answers(status, repeat=repeat, settled=settled))
    assert not again
    assert Status.of(int(judged.status[0])) is final


@pytest.mark.parametrize(
    ("flags", "due_ms", "expires_ms", "unsure", "final"),
    [
        (PutFlag.IN, 9, 5, True, Status.UNKNOWN),
        (PutFlag.IN, 9, 5, False, Status.INVALID),
        (PutFlag.IN, 9, 0, True, Status.INVALID),
        (PutFlag.IN | PutFlag.EXPIRES_IN, 5, 5, True, Status.INVALID),
        (PutFlag.IN | PutFlag.EXPIRES_IN, 4, 5, True, Status.UNKNOWN),
        (PutFlag(0), 5, 5, True, Status.INVALID),
        (PutFlag(0), 4, 5, True, Status.UNKNOWN),
        (PutFlag(0), 4, 5, False, Status.INVALID),
    ],
)
def test_a_repeat_that_came_too_late_for_its_expiry_says_nothing_of_the_first_sending(
    flags: PutFlag, due_ms: int, expires_ms: int, unsure: bool, final: Status
) -> None:
    batch = _batch(Operation.PUT, 2, unsure=unsure)
    batch.columns |= {"flags": np.full(2, flags, np.uint8), "expires_ms": np.full(2, expires_ms, np.int64)}
    batch.columns["time_ms"] = np.full(2, due_ms, np.int64)
    _, judged, again = judge(batch, _answers(Status.INVALID, Status.OK))
    assert not again
    assert [Status.of(code) for code in judged.status.tolist()] == [final, Status.OK]


def test_what_may_be_repeated_goes_again_and_the_rest_is_final() -> None:
    batch = _batch(Operation.PUT, 5)
    answers = _answers(Status.OK, Status.THROTTLED, Status.UNKNOWN, Status.EXISTS, Status.UNAVAILABLE)
    done, final, again = judge(batch, answers, 20)
    assert done is not None and done.tolist() == [0, 3] and len(final) == 2
    assert [(part.columns["ids"].tolist(), part.unsure) for part in again] == [
        ([b"1"], False),
        ([b"4"], False),
        ([b"2"], True),
    ]
    assert [Status.of(part.overdue(_nobody).status) for part in again] == ["THROTTLED", "UNAVAILABLE", "UNKNOWN"]
    assert [part.overdue(_nobody).retry_after_ms for part in again] == [20, 20, 0]
    assert again[2].columns["birth"].tolist() == [3]


def _entry(id: bytes) -> tuple[object, ...]:
    return (id, 7, 0, 1, b"payload", 0, b"", b"")


async def test_single_calls_form_the_next_frame() -> None:
    queue = _queue()
    calls = [asyncio.ensure_future(queue.single(_entry(b"%d" % n), 100, 60_000)) for n in range(10)]
    await queue.work.wait()
    taken = queue.next()
    assert taken is not None and queue.next() is None
    request, batch = taken
    assert len(batch) == 10 and len(queue.outstanding) == 1
    queue.answer(request, _answers(*[Status.OK] * 10))
    assert {answer.status for answer in await asyncio.gather(*calls)} == {Status.OK.code}
    await queue.idle()
    assert queue.outstanding_bytes == 0


async def test_a_broken_wire_makes_what_was_aboard_unsure_and_sends_the_same_again() -> None:
    queue = _queue()
    call = asyncio.ensure_future(queue.single(_entry(b"m"), 100, 60_000))
    await queue.work.wait()
    first = queue.next()
    assert first is not None
    queue.broke()
    second = queue.next()
    assert second is not None and second[0] != first[0]
    assert second[1].columns is first[1].columns and second[1].unsure
    assert queue.answer(first[0], _answers(Status.OK)) is None  # an answer from the wire that broke
    queue.answer(second[0], _answers(Status.DUPLICATE, repeat=1))
    assert (await call).status == Status.OK.code


async def test_an_answer_that_does_not_fit_is_refused() -> None:
    queue = _queue()
    call = asyncio.ensure_future(queue.single(_entry(b"m"), 100, 60_000))
    await queue.work.wait()
    taken = queue.next()
    assert taken is not None
    with pytest.raises(Invalid, match="2 messages of 1"):
        queue.answer(taken[0], _answers(Status.OK, Status.OK))
    queue.drop()
    assert (await call).status == Status.UNKNOWN.code


async def test_closing_says_what_is_known() -> None:
    queue = _queue()
    sent = asyncio.ensure_future(queue.single(_entry(b"sent"), 100, 60_000))
    await queue.work.wait()
    queue.next()
    waiting = asyncio.ensure_future(queue.single(_entry(b"waiting"), 100, 60_000))
    await asyncio.sleep(0)
    queue.drop()
    assert (await sent).status == Status.UNKNOWN.code
    assert (await waiting).status == Status.UNAVAILABLE.code


async def test_a_call_that_was_cancelled_is_not_sent() -> None:
    queue = _queue()
    call = asyncio.ensure_future(queue.single(_entry(b"m"), 100, 60_000))
    await queue.work.wait()
    call.cancel()
    await asyncio.wait({call})
    assert queue.next() is None


async def test_calls_that_were_given_up_while_nothing_could_be_sent_leave_nothing_behind() -> None:
    queue = _queue()
    overdue = [asyncio.ensure_future(queue.single(_entry(b"%d" % n), 100, 0.0)) for n in range(10)]
    cancelled = asyncio.ensure_future(queue.single(_entry(b"m"), 100, 60_000))
    await queue.work.wait()
    cancelled.cancel()
    await asyncio.wait({cancelled})
    assert {answer.status for answer in await asyncio.gather(*overdue)} == {Status.UNAVAILABLE.code}
    assert not queue.waiting
    await queue.idle()


async def test_a_queue_that_cannot_send_forgets_what_nobody_waits_for_and_keeps_the_rest() -> None:
    queue = _queue()
    waiting = asyncio.ensure_future(queue.single(_entry(b"waits"), 100, 60_000))
    await queue.work.wait()
    cancelled = asyncio.ensure_future(queue.single(_entry(b"m"), 100, 60_000))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait({cancelled})
    given_up, wanted = _batch(Operation.PUT, 3, queue), _batch(Operation.PUT, 2, queue)
    queue.add(given_up)
    queue.add(wanted)
    given_up.sink.answer(given_up, None, _answers(*[Status.UNAVAILABLE] * 3))
    queue.forget_unwanted()
    taken = [queue.next(), queue.next()]
    assert [batch.columns["ids"].tolist() for _, batch in filter(None, taken)] == [[b"0", b"1"], [b"waits"]]
    assert queue.next() is None
    queue.drop()
    assert (await waiting).status == Status.UNKNOWN.code


def test_frames_are_cut_at_their_aim() -> None:
    sizes = np.array([10, 10, 10, 500, 10, 10])
    assert [(cut.start, cut.stop) for cut in cuts_of(sizes, 100, 1_000)] == [(0, 3), (3, 4), (4, 6)]
    assert [(cut.start, cut.stop) for cut in cuts_of(np.full(5, 1), 100, 2)] == [(0, 2), (2, 4), (4, 5)]
    assert cuts_of(np.zeros(0, dtype=np.int64), 100, 2) == []


async def test_a_batch_whose_caller_was_cancelled_is_not_sent() -> None:
    queue = _queue()
    waits, rests = _batch(Operation.PUT, 3, queue), _batch(Operation.PUT, 2, queue)
    callers = [asyncio.ensure_future(batch.sink.finished()) for batch in (waits, rests)]  # type: ignore[attr-defined]
    queue.add(rests)
    taken = queue.next()
    assert taken is not None
    queue.answer(taken[0], _answers(*[Status.THROTTLED] * 2), 1)
    queue.add(waits)
    await asyncio.sleep(0)
    for caller in callers:
        caller.cancel()
    await asyncio.wait(callers)
    assert queue.next() is None
    while queue._resting:
        await queue.work.wait()
        queue.work.clear()
    assert queue.next() is None
    await queue.idle()


class _WaitingBatches(deque[RequestBatch]):
    """The waiting batches of a RequestQueue. Nobody may iterate over them."""

    def __iter__(self) -> Iterator[RequestBatch]:
        raise AssertionError("somebody iterated over all waiting batches")


async def test_a_call_that_times_out_looks_at_its_own_batches_only() -> None:
    queue = _queue()
    queue._waiting = _WaitingBatches()
    calls = [BatchCall(queue, 3, 0.0) for _ in range(2)]
    for call in calls:
        columns = {"ids": Ragged.of([b"1", b"2", b"3"]), "flags": np.zeros(3, np.uint8)}
        queue.add(RequestBatch(columns, Operation.PUT, call, np.arange(3), 10))
    for call in calls:
        answers = await call.finished()
        assert answers.status.tolist() == [Status.UNAVAILABLE.code] * 3
        assert answers.details == dict.fromkeys(range(3), "nobody is there")
    with pytest.raises(Unavailable, match="nobody is there"):
        calls[0].check_heard()


async def test_a_message_that_goes_again_times_out_by_its_new_batch() -> None:
    queue = _queue()
    call = BatchCall(queue, 3, 60_000.0)
    columns = {"ids": Ragged.of([b"1", b"2", b"3"]), "flags": np.zeros(3, np.uint8)}
    queue.add(RequestBatch(columns, Operation.PUT, call, np.arange(3), 10))
    taken = queue.next()
    assert taken is not None
    queue.answer(taken[0], _answers(Status.OK, Status.THROTTLED, Status.UNKNOWN), 40)
    call.deadline_ms = 0.0
    answers = await call.finished()
    assert [Status.of(code) for code in answers.status.tolist()] == ["OK", "THROTTLED", "UNKNOWN"]
    assert call.waits_ms == {1: 40}
    queue.drop()


class _Hands:
    """A clock whose hands are moved by the test."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.slow
@pytest.mark.parametrize("status", [Status.UNAVAILABLE, Status.THROTTLED])
async def test_no_batch_goes_again_without_time_for_its_answer(status: Status) -> None:
    """The last attempt before the deadline made UNKNOWN of what had certainly not happened."""
    hands = _Hands()
    queue = RequestQueue(calls_of(Produce, Operation.PUT), Clock(hands, hands), random.Random(1), _nobody)
    call = BatchCall(queue, 2, 1_000.0)
    batch = RequestBatch({"ids": Ragged.of([b"1", b"2"])}, Operation.PUT, call, None, 20)
    queue.add(batch)

    async def refused() -> bool:
        """Whether it goes again after a refusal that takes 400 ms, and a rest that takes no time."""
        taken = queue.next()
        assert taken is not None
        hands.now_s += 0.4
        queue.answer(taken[0], _answers(status, status), 1)
        (first,) = queue._resting
        while first in queue._resting:
            await asyncio.sleep(0)
        return queue.waiting

    assert await refused()  # 600 ms are left
    assert not await refused() and queue.busy  # 200 ms are left
    hands.now_s += 0.2
    answers = await call.finished()
    assert answers.status.tolist() == [status.code] * 2
    while queue._resting:
        await asyncio.sleep(0)
    assert queue.next() is None
    await queue.idle()


async def test_the_callers_with_more_time_go_again_when_the_others_have_given_up() -> None:
    queue = _queue()
    short = asyncio.ensure_future(queue.single(_entry(b"short"), 100, 50.0))
    long = asyncio.ensure_future(queue.single(_entry(b"long"), 100, 60_000.0))
    await queue.work.wait()
    await asyncio.sleep(0)
    taken = queue.next()
    assert taken is not None and len(taken[1]) == 2
    queue.work.clear()
    taken[1].sent_ms -= 10_000.0  # the answer took 10 s
    queue.answer(taken[0], _answers(Status.UNAVAILABLE, Status.UNAVAILABLE))
    await queue.work.wait()
    assert short.done() and short.result().status == Status.UNAVAILABLE.code
    taken = queue.next()
    assert taken is not None and taken[1].columns["ids"].tolist() == [b"long"]
    queue.answer(taken[0], _answers(Status.OK))
    assert (await long).status == Status.OK.code


async def test_an_unsure_batch_goes_again_until_the_deadline() -> None:
    """Only an answer can settle what the first attempt did."""
    queue = _queue()
    batch = _batch(Operation.PUT, 1, queue)
    queue.add(batch)
    taken = queue.next()
    assert taken is not None
    queue.work.clear()
    batch.sent_ms -= 10_000.0
    queue.answer(taken[0], _answers(Status.UNKNOWN))
    await queue.work.wait()
    assert queue.next() is not None
