"""Settles on their way: acks, extensions, releases and burials of what is in hand, and what their answers do to it."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from timeline.clock import Clock
from timeline.columns import Indexes, Ragged
from timeline.driver.consume.broker_clock import BrokerClock
from timeline.driver.consume.in_flight import DONE, SETTLING, WAITING, DeliveredFrame, InFlight, SettledPlaces
from timeline.driver.message import encode_text
from timeline.driver.produce.request_batch import (
    OK,
    BatchCall,
    Columns,
    ManyAnswers,
    MessageAnswer,
    RequestBatch,
    error_of,
    refusal_of,
)
from timeline.driver.produce.request_queue import RequestQueue
from timeline.driver.times import Duration, When, duration_ms, instant_ms
from timeline.driver.transport.client_context import ClientContext
from timeline.errors import Invalid, TimelineError
from timeline.model import MAX_REASON_BYTES, Answers, Operation, Status
from timeline.wire.frames import Settle, Settled, SettleFlag, credit_counts, still_held

GATHER_MS = 20.0
GATHER_MESSAGES = 64
LEASE_LEFT_MS = 50.0
"""An ack of a lease that ends sooner than this does not wait."""


class AckBatcher:
    """The acks gathered so far. They are `ripe`, and `wake` is called, 20 ms after the first of them, or once they are
    64 or hold half of the credit, in messages or in bytes, or when the lease of one of them is about to end."""

    def __init__(self, in_flight: InFlight, clock: Clock, wake: Callable[[], None]) -> None:
        self._clock, self._wake = clock, wake
        self._frames: list[DeliveredFrame] = []
        self._messages = self._bytes = 0
        self._most_messages = max(1, min(GATHER_MESSAGES, in_flight.credit.messages // 2))
        self._most_bytes = in_flight.credit.bytes // 2
        self._timer: asyncio.TimerHandle | None = None
        self.ripe = False

    def __len__(self) -> int:
        return sum(len(frame.soon) for frame in self._frames)

    def add(self, frame: DeliveredFrame, index: int) -> None:
        """One more."""
        if frame.state[index] != DONE:
            frame.state[index] = SETTLING
        if not frame.soon:
            self._frames.append(frame)
        frame.soon.append(index)
        if not self.ripe:
            soon_ms = self._clock.monotonic_ms() + LEASE_LEFT_MS
            ends_soon = frame.earliest_ms <= soon_ms and bool(frame.end_ms[index] <= soon_ms)
            self._count(1, int(frame.sizes[index]), ends_soon)

    def add_all(self, frame: DeliveredFrame, at: Indexes) -> None:
        """The same for many of a frame."""
        if not len(at):
            return
        frame.mark(at[np.frombuffer(frame.state, dtype=np.uint8)[at] != DONE], SETTLING)
        if not frame.soon:
            self._frames.append(frame)
        frame.soon.extend(at.tolist())
        if not self.ripe:
            soon_ms = self._clock.monotonic_ms() + LEASE_LEFT_MS
            ends_soon = frame.earliest_ms <= soon_ms and bool(frame.end_ms[at].min() <= soon_ms)
            self._count(len(at), int(frame.sizes[at].sum()), ends_soon)

    def _count(self, messages: int, nbytes: int, ends_soon: bool) -> None:
        self._messages += messages
        self._bytes += nbytes
        if ends_soon or self._messages >= self._most_messages or self._bytes >= self._most_bytes:
            self._ripen()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_MS / 1000.0, self._ripen)

    def _ripen(self) -> None:
        self.ripe = True
        self._stop_timer()
        self._wake()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def take(self) -> list[tuple[DeliveredFrame, Indexes]]:
        """All of them, by frame; from now on others gather."""
        taken = []
        for frame in self._frames:
            at = np.array(frame.soon, dtype=np.intp)
            frame.soon.clear()
            taken.append((frame, at))
        self._frames.clear()
        self._messages = self._bytes = 0
        self.ripe = False
        self._stop_timer()
        return taken


log = logging.getLogger("timeline.driver")

FRAME_SETTLES = 10_000
SETTLE_BYTES = 80

OnError = Callable[[DeliveredFrame, int, TimelineError], None]


class UnawaitedSettles(ManyAnswers):
    """A sink that nobody waits at: the messages of some frames, one after the other. Failures go to `on_error`."""

    def __init__(
        self,
        settler: Settler,
        parts: list[tuple[DeliveredFrame, Indexes]],
        operation: Operation,
        timeout_ms: float,
        told: bool,
    ) -> None:
        self._ends = np.cumsum([len(at) for _, at in parts]).tolist()
        super().__init__(self._ends[-1], settler.context.clock.monotonic_ms() + timeout_ms)
        self._settler, self._parts, self._operation, self.told = settler, parts, operation, told

    @property
    def unanswered(self) -> int:
        """How many of its messages have no answer."""
        return int(self._missing.sum())

    def _take(self, where: Indexes, answers: Answers) -> None:
        start = first = 0
        lasts = np.searchsorted(where, self._ends).tolist()
        for (frame, indexes), end, last in zip(self._parts, self._ends, lasts, strict=True):
            if first < last:
                mine = np.arange(first, last)
                part = answers if len(mine) == len(answers) else answers.take(mine)
                self._settler.conclude(frame, indexes[where[mine] - start], self._operation, part, self.told)
            start, first = end, last
        if not self._missing.any():
            self._batches.clear()
            self._settler.over(self)

    def expire(self, now_ms: float) -> bool:
        """Whether its deadline is over; what has no answer by then is answered by that."""
        if now_ms < self.deadline_ms:
            return False
        for batch, at, overdue in self._overdue(self._settler.context.trouble):
            self.answer(batch, at, refusal_of(len(at), Status.of(overdue.status), overdue.detail))
        return True


class Settler:
    """Makes settles of what is in hand, and draws the consequences of their answers."""

    def __init__(
        self, context: ClientContext, in_flight: InFlight, broker_clock: BrokerClock, on_error: OnError
    ) -> None:
        self.context = context
        self.in_flight = in_flight
        self._broker_clock = broker_clock
        self._on_error = on_error
        self.queue = RequestQueue(_build, context.clock, context.random, context.trouble)
        self._gathered = AckBatcher(in_flight, context.clock, self.queue.work.set)
        self._unawaited: dict[UnawaitedSettles, None] = {}  # in order, so that a run can be repeated

    async def one(
        self,
        frame: DeliveredFrame,
        index: int,
        operation: Operation,
        time_ms: int,
        flags: int,
        reason: bytes,
        timeout_ms: float,
    ) -> MessageAnswer:
        """One settle, answered. The answer says its fate; the message's state is up to date by then."""
        settles = operation is not Operation.EXTEND
        if settles and frame.state[index] != DONE:
            self.in_flight.settle_one(frame, index)
        entry = (frame, index, operation, time_ms, flags, self._op(operation), reason)
        try:
            answer = await self.queue.single(entry, SETTLE_BYTES + len(reason), timeout_ms)
        except BaseException:
            if settles:  # an extend that is broken off must not undo an ack on its way
                self.in_flight.take_back(frame, np.array([index]))
            raise
        if settles and answer.status == OK:
            self.in_flight.finish_one(frame, index)
            self._pay_out()
            return answer
        at = np.array([index])
        answers = Answers.blank(1, Status.of(answer.status))
        answers.due_ms[0] = answer.due_ms
        self.conclude(frame, at, operation, answers, told=False)
        return answer

    async def many(
        self,
        frame: DeliveredFrame,
        at: Indexes,
        operation: Operation,
        time_ms: int,
        flags: int,
        reason: bytes,
        timeout_ms: float,
    ) -> Answers:
        """Settles messages of a frame; answers in order. Raises when the call itself failed."""
        live = at[np.frombuffer(frame.state, dtype=np.uint8)[at] != DONE]
        if operation is not Operation.EXTEND:
            self.in_flight.settle(frame, live)
        many = BatchCall(len(at), timeout_ms, self.context.clock, self.context.trouble)
        for start in range(0, len(at), FRAME_SETTLES):
            positions = np.arange(start, min(len(at), start + FRAME_SETTLES))
            self.queue.add(self._batch([(frame, at[positions])], operation, time_ms, flags, reason, many, positions))
        try:
            answers = await many.finished()
        except BaseException:
            if operation is not Operation.EXTEND:
                self.in_flight.take_back(frame, live)
            raise
        self.conclude(frame, at, operation, answers, told=False)
        many.check_heard()
        return answers

    def soon(self, frame: DeliveredFrame, index: int) -> None:
        """An ack that nobody waits for."""
        self._gathered.add(frame, index)

    def soon_all(self, frame: DeliveredFrame, at: Indexes) -> None:
        """The same for many of a frame."""
        self._gathered.add_all(frame, at)

    @property
    def gathering(self) -> bool:
        """Whether acks that nobody waits for are yet to be sent."""
        return len(self._gathered) > 0

    @property
    def unanswered(self) -> int:
        """How many acks that nobody waits for have no answer yet."""
        return len(self._gathered) + sum(sink.unanswered for sink in list(self._unawaited) if sink.told)

    def gather(self, timeout_ms: float, *, at_once: bool) -> None:
        """Makes batches of the acks that nobody waits for, when it is time for them, or `at_once`."""
        if not (self._gathered.ripe or at_once):
            return
        for parts in _framed(self._gathered.take()):
            self.unawaited(parts, Operation.ACK, timeout_ms=timeout_ms)

    def extend(self, messages: Iterable[tuple[DeliveredFrame, Indexes]], lease_ms: float) -> None:
        """Extends what nobody waits for. In as few frames as may be: one each, they would wait for each other's answers
        longer than the leases last."""
        for parts in _framed(messages):
            self.unawaited(parts, Operation.EXTEND, int(lease_ms), timeout_ms=lease_ms / 2, told=False)

    def unawaited(
        self,
        parts: list[tuple[DeliveredFrame, Indexes]],
        operation: Operation,
        time_ms: int = 0,
        flags: int = 0,
        reason: bytes = b"",
        *,
        timeout_ms: float,
        told: bool = True,
    ) -> None:
        """Settles what nobody waits for. `told`: failures are reported."""
        sink = UnawaitedSettles(self, parts, operation, timeout_ms, told)
        self._unawaited[sink] = None
        self.queue.add(self._batch(parts, operation, time_ms, flags, reason, sink, None))

    def expire(self, now_ms: float) -> None:
        """Ends settles that nobody waits for at their deadline."""
        for sink in list(self._unawaited):
            if sink.expire(now_ms):
                self.over(sink)

    def over(self, sink: UnawaitedSettles) -> None:
        """`sink` is done with. Kept any longer, it would keep its frames alive until the collector has seen them."""
        self._unawaited.pop(sink, None)

    def frame(self, request: int, batch: RequestBatch) -> Settle:
        """The frame that carries `batch` as `request`, and the credit of what its settles end."""
        columns = dict(batch.columns)
        messages, nbytes = self.in_flight.credit.board(request, columns.pop("places"))
        return Settle(request=request, credit_messages=messages, credit_bytes=nbytes, **columns)

    def unsent(self, request: int, status: Status, why: str) -> None:
        """The frame of `request` cannot be sent: its settles are refused."""
        batch = self.queue.carried(request)
        if batch is not None:
            self.in_flight.credit.land(request, counts=False)
            self.queue.refused(request, refusal_of(len(batch), status, why))

    def answered(self, settled: Settled) -> None:
        """The broker's answers. Raises Invalid when they do not fit what was asked."""
        batch, status = self.queue.carried(settled.request), settled.answers.status
        if batch is not None and len(batch) == len(status):
            counts = credit_counts(batch.columns["operation"], status)
            self.in_flight.credit.land(settled.request, counts)
            if not counts:  # what did end is owed at once, not when all of its call has
                for frame, at in batch.columns["places"][np.flatnonzero(~still_held(status))].parts:
                    if frame is not None:
                        self.in_flight.credit.give(frame, at)
        self.queue.answer(settled.request, settled.answers)

    def _batch(
        self,
        parts: list[tuple[DeliveredFrame, Indexes]],
        operation: Operation,
        time_ms: int,
        flags: int,
        reason: bytes,
        sink: ManyAnswers,
        positions: Indexes | None,
    ) -> RequestBatch:
        count = sum(len(at) for _, at in parts)
        columns: Columns = {
            "ids": Ragged.concat([_part(frame, at) for frame, at in parts]),
            "birth": _joined([frame.columns.birth[at] for frame, at in parts]),
            "version": _joined([frame.columns.version[at] for frame, at in parts]),
            "operation": np.full(count, operation, dtype=np.uint8),
            "time_ms": np.full(count, time_ms, dtype=np.int64),
            "flags": np.full(count, flags, dtype=np.uint8),
            "op": np.zeros(count, np.uint64) if not self._op_needed(operation) else self.context.ids.numbers(count),
            "reasons": Ragged.repeat(reason, count) if reason else None,
            "places": SettledPlaces([(_ended(frame, operation), at) for frame, at in parts]),
        }
        return RequestBatch(
            columns, columns["operation"], sink, positions, columns["ids"].nbytes + SETTLE_BYTES * count
        )

    def _op_needed(self, operation: Operation) -> bool:
        return operation in (Operation.RELEASE, Operation.BURY)

    def _op(self, operation: Operation) -> int:
        return self.context.ids.number() if self._op_needed(operation) else 0

    def conclude(self, frame: DeliveredFrame, at: Indexes, operation: Operation, answers: Answers, told: bool) -> None:
        """What answers mean for messages in hand. `told`: failures go to whoever listens."""
        status = answers.status
        if operation is Operation.EXTEND:
            self._extended(frame, at, answers)
        elif not status.any():
            self.in_flight.finish(frame, at)
        else:
            ours = still_held(status)  # to be settled another way
            self.in_flight.finish(frame, at[status == OK])
            self._lose(frame, at[~ours & (status != OK)])
            self.in_flight.take_back(frame, at[ours])
        self._pay_out()
        if told and status.any():
            self._tell(frame, at, operation, answers)

    def _pay_out(self) -> None:
        """Credit that did not count with its settle goes by itself, now rather than with the next tick."""
        if self.in_flight.credit.owed:
            self.queue.work.set()

    def _extended(self, frame: DeliveredFrame, at: Indexes, answers: Answers) -> None:
        good = np.flatnonzero(answers.status == OK)
        if len(good):
            until_ms = answers.due_ms[good]
            end_ms = np.array([self._broker_clock.monotonic_ms(end) for end in until_ms.tolist()], dtype=np.float64)
            frame.extended(at[good], until_ms, end_ms)
        self._lose(frame, at[~still_held(answers.status) & (answers.status != OK)])

    def _lose(self, frame: DeliveredFrame, gone: Indexes) -> None:
        state = np.frombuffer(frame.state, dtype=np.uint8)
        gone = gone[state[gone] != DONE]  # what was settled, or known to be lost, is counted already
        if len(gone):
            waiting = state[gone] == WAITING
            self.in_flight.stats.dropped += int(waiting.sum())
            self.in_flight.stats.lost += int((~waiting).sum())
            self.in_flight.lose(frame, gone)

    def _tell(self, frame: DeliveredFrame, at: Indexes, operation: Operation, answers: Answers) -> None:
        failed = np.flatnonzero(answers.status != OK).tolist()
        for place in failed:
            self.in_flight.stats.settle_errors += 1
            id = frame.columns.ids[int(at[place])].decode()
            error = error_of(int(answers.status[place]), id, answers.details.get(place, ""))
            if place == failed[0]:
                more = f", nor of {len(failed) - 1} more" if len(failed) > 1 else ""
                log.warning("%s of %r was not taken%s: %s", operation.name.lower(), id, more, error)
            self._on_error(frame, int(at[place]), error)


def _part(frame: DeliveredFrame, at: Indexes) -> Ragged:
    """The ids at `at`; the column itself when that is all of them in order."""
    if len(at) == len(frame) and (len(at) == 1 or bool((np.diff(at) == 1).all())):
        return frame.columns.ids
    return frame.columns.ids.take(at)


def _joined(columns: list[Any]) -> Any:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _framed(messages: Iterable[tuple[DeliveredFrame, Indexes]]) -> Iterator[list[tuple[DeliveredFrame, Indexes]]]:
    """Messages in parts of what one frame takes."""
    parts: list[tuple[DeliveredFrame, Indexes]] = []
    count = 0
    for frame, at in messages:
        if parts and count + len(at) > FRAME_SETTLES:
            yield parts
            parts, count = [], 0
        parts.append((frame, at))
        count += len(at)
    if parts:
        yield parts


def _ended(frame: DeliveredFrame, operation: Operation) -> DeliveredFrame | None:
    """`frame`, when this settle of its messages ends their stay in hand."""
    return None if operation is Operation.EXTEND else frame


def _runs(frames: Sequence[DeliveredFrame | None], at: Indexes) -> list[tuple[DeliveredFrame | None, Indexes]]:
    """Messages one by one as parts of frames."""
    starts = [0, *(n for n in range(1, len(frames)) if frames[n] is not frames[n - 1])]
    return [(frames[start], at[start:end]) for start, end in zip(starts, [*starts[1:], len(frames)], strict=True)]


def _build(entries: Sequence[Any]) -> tuple[Columns, Any]:
    """Columns of single settles; an entry is (frame, index, operation, time_ms, flags, op, reason)."""
    count = len(entries)
    frames, indexes, operations, times, flags, ops, reasons = zip(*entries, strict=True)
    messages = list(zip(frames, indexes, strict=True))
    operation = np.fromiter(operations, np.uint8, count)
    columns: Columns = {
        "ids": Ragged.of([frame.columns.ids[index] for frame, index in messages]),
        "birth": np.fromiter((frame.columns.birth[index] for frame, index in messages), np.uint64, count),
        "version": np.fromiter((frame.columns.version[index] for frame, index in messages), np.int64, count),
        "operation": operation,
        "time_ms": np.fromiter(times, np.int64, count),
        "flags": np.fromiter(flags, np.uint8, count),
        "op": np.fromiter(ops, np.uint64, count),
        "reasons": Ragged.of(list(reasons)) if any(reasons) else None,
        "places": SettledPlaces(_runs(list(map(_ended, frames, operations)), np.fromiter(indexes, np.intp, count))),
    }
    return columns, operation


UNSEEN = int(SettleFlag.UNSEEN)
AT = int(SettleFlag.AT)


def release_time(in_: Duration | None, at: When | None) -> tuple[int, int]:
    """When a release makes a message due again, and as what kind of time the broker is to read it."""
    if in_ is not None and at is not None:
        raise Invalid("say in_= or at=, or neither to release it at once; not both")
    if at is not None:
        return instant_ms(at), AT
    return (0 if in_ is None else duration_ms(in_)), 0


def release_reason(reason: str) -> bytes:
    """The reason of a release, as it is sent. Raises Invalid."""
    return encode_text(reason, "a reason", MAX_REASON_BYTES, least_bytes=0).encode()


def bury_reason(reason: str) -> bytes:
    """The same of a bury, which needs one."""
    return encode_text(reason, "a reason to bury", MAX_REASON_BYTES).encode()


def weakly(
    tell: Callable[[DeliveredFrame, int, TimelineError], None],
) -> Callable[[DeliveredFrame, int, TimelineError], None]:
    """The same for one who must not hold the consumer whose method it is."""
    method = weakref.WeakMethod(tell)

    def told(frame: DeliveredFrame, index: int, error: TimelineError) -> None:
        if (there := method()) is not None:
            there(frame, index, error)

    return told
