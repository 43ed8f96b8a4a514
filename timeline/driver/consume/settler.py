"""Settles of messages in flight: acks, extensions, releases and burials, and what their answers mean."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from timeline.clock import Clock
from timeline.columns import Indexes, Ragged
from timeline.driver.consume.broker_clock import BrokerClock
from timeline.driver.consume.in_flight import DONE, SETTLING, WAITING, DeliveredFrame, InFlight, SettledPlaces
from timeline.driver.message import encode_text
from timeline.driver.produce.request_queue import (
    FRAME_MESSAGES,
    BatchCall,
    Columns,
    ManyAnswers,
    RequestBatch,
    RequestQueue,
    columns_of,
    refusal_of,
)
from timeline.driver.receipts import OK, MessageAnswer, error_of
from timeline.driver.times import Duration, When, duration_ms, instant_ms
from timeline.driver.transport.channel import ClientContext
from timeline.errors import Invalid, TimelineError
from timeline.model import MAX_REASON_BYTES, Answers, Operation, Status
from timeline.wire.frames import Settle, Settled, SettleFlag, credit_counts, still_held

GATHER_MS = 20.0
GATHER_MESSAGES = 64
LEASE_LEFT_MS = 50.0
"""An ack of a lease that ends sooner than this does not wait."""
SETTLE_BYTES = 80


class SettleRequest(NamedTuple):
    """A request about messages in flight. `time_ms`, `flags`: see `wire.Settle`. `reason`: of a release or a bury."""

    operation: Operation
    time_ms: int = 0
    flags: int = 0
    reason: bytes = b""

    @property
    def ends(self) -> bool:
        """Whether it ends the lease."""
        return self.operation is not Operation.EXTEND

    @property
    def repeatable(self) -> bool:
        """Whether it needs an operation id, by which a broker recognises a repeat."""
        return self.operation in (Operation.RELEASE, Operation.BURY)


ACK = SettleRequest(Operation.ACK)
UNSEEN = SettleRequest(Operation.RELEASE, flags=int(SettleFlag.UNSEEN))
"""Returns messages that no user's code has seen."""


def release_of(in_: Duration | None, at: When | None, reason: str) -> SettleRequest:
    """Return the request of a release. Raise Invalid."""
    if in_ is not None and at is not None:
        raise Invalid("say in_= or at=, or neither to release it at once; not both")
    said = encode_text(reason, "a reason", MAX_REASON_BYTES, least_bytes=0).encode()
    if at is not None:
        return SettleRequest(Operation.RELEASE, instant_ms(at), int(SettleFlag.AT), said)
    return SettleRequest(Operation.RELEASE, 0 if in_ is None else duration_ms(in_), 0, said)


def bury_of(reason: str) -> SettleRequest:
    """Return the request of a bury, which needs a reason. Raise Invalid."""
    return SettleRequest(Operation.BURY, reason=encode_text(reason, "a reason to bury", MAX_REASON_BYTES).encode())


class AckBatcher:
    """The acks of `ack_soon` gathered so far. `ripe`: they are to be sent; `wake` is called then.

    That is 20 ms after the first ack, at 64 acks, at half of the credit (in messages or bytes), or when a lease is
    about to end. `hurried`: one of them does not wait for others, but only for the answer to an earlier frame.
    """

    def __init__(self, in_flight: InFlight, clock: Clock, wake: Callable[[], None]) -> None:
        self._clock, self._wake = clock, wake
        self._frames: list[DeliveredFrame] = []
        self._messages = self._bytes = 0
        self._credit = in_flight.credit
        self._timer: asyncio.TimerHandle | None = None
        self.ripe = self.hurried = False

    def __len__(self) -> int:
        return sum(len(frame.soon) for frame in self._frames)

    def add(self, frame: DeliveredFrame, index: int, hurried: bool = False) -> None:
        """Add an ack."""
        if frame.state[index] != DONE:
            frame.state[index] = SETTLING
        if not frame.soon:
            self._frames.append(frame)
        frame.soon.append(index)
        if hurried and not self.hurried:
            self.hurried = True
            self._wake()
        if not self.ripe:
            soon_ms = self._clock.monotonic_ms() + LEASE_LEFT_MS
            ends_soon = frame.earliest_ms <= soon_ms and bool(frame.end_ms[index] <= soon_ms)
            self._count(1, int(frame.sizes[index]), ends_soon)

    def add_all(self, frame: DeliveredFrame, at: Indexes) -> None:
        """Add acks of many messages of a frame."""
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
        most = max(1, min(GATHER_MESSAGES, self._credit.messages // 2))
        if ends_soon or self._messages >= most or self._bytes >= self._credit.bytes // 2:
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
        """Take all acks, by frame."""
        taken = []
        for frame in self._frames:
            at = np.array(frame.soon, dtype=np.intp)
            frame.soon.clear()
            taken.append((frame, at))
        self._frames.clear()
        self._messages = self._bytes = 0
        self.ripe = self.hurried = False
        self._stop_timer()
        return taken


log = logging.getLogger("timeline.driver")

OnError = Callable[[DeliveredFrame, int, TimelineError], None]


class UnawaitedSettles(ManyAnswers):
    """Settles without a caller that waits: the messages of some frames, one after the other. `told`: failures go to
    the settler's `on_error`."""

    def __init__(
        self,
        settler: Settler,
        parts: list[tuple[DeliveredFrame, Indexes]],
        operation: Operation,
        timeout_ms: float,
        told: bool,
    ) -> None:
        self._ends = np.cumsum([len(at) for _, at in parts]).tolist()
        super().__init__(settler.queue, self._ends[-1], timeout_ms)
        self._settler, self._parts, self._operation, self.told = settler, parts, operation, told

    @property
    def unanswered(self) -> int:
        """The number of its messages without an answer."""
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
            self._settler.over(self)

    def expire(self, now_ms: float) -> bool:
        """Return whether its deadline is over. If so, answer all messages that have no answer."""
        if now_ms < self.deadline_ms:
            return False
        for batch, at, overdue in self._overdue():
            self.answer(batch, at, refusal_of(len(at), Status.of(overdue.status), overdue.detail))
        return True


class Settler:
    """Settles messages in flight, and applies the answers to them."""

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
        self._one_over = asyncio.Event()

    async def one(self, frame: DeliveredFrame, index: int, asked: SettleRequest, timeout_ms: float) -> MessageAnswer:
        """Settle or extend one message. Return the answer, whatever it says; the message's state is up to date then."""
        if asked.ends:
            self.in_flight.settle_one(frame, index)
        columns = frame.columns
        token = (columns.ids[index], columns.birth[index], columns.version[index])
        op = self.context.ids.number() if asked.repeatable else 0
        entry = (*token, asked.operation, asked.time_ms, asked.flags, op, asked.reason, frame, index)
        try:
            answer = await self.queue.single(entry, SETTLE_BYTES + len(asked.reason), timeout_ms)
        except BaseException:
            if asked.ends:  # an extend that is broken off must not undo an ack on its way
                self.in_flight.take_back(frame, np.array([index]))
            raise
        if asked.ends and answer.status == OK:
            self.in_flight.finish_one(frame, index)
            self._pay_out()
            return answer
        at = np.array([index])
        answers = Answers.blank(1, Status.of(answer.status))
        answers.due_ms[0] = answer.due_ms
        self.conclude(frame, at, asked.operation, answers, told=False)
        return answer

    async def many(self, frame: DeliveredFrame, at: Indexes, asked: SettleRequest, timeout_ms: float) -> Answers:
        """Settle or extend messages of a frame. Return answers in order. Raise if the call itself failed."""
        live = at[np.frombuffer(frame.state, dtype=np.uint8)[at] != DONE]
        if asked.ends:
            frame.mark(live, SETTLING)
        many = BatchCall(self.queue, len(at), timeout_ms)
        for start in range(0, len(at), FRAME_MESSAGES):
            positions = np.arange(start, min(len(at), start + FRAME_MESSAGES))
            self.queue.add(self._batch([(frame, at[positions])], asked, many, positions))
        try:
            answers = await many.finished()
        except BaseException:
            if asked.ends:
                self.in_flight.take_back(frame, live)
            raise
        self.conclude(frame, at, asked.operation, answers, told=False)
        many.check_heard()
        return answers

    def soon(self, frame: DeliveredFrame, index: int, hurried: bool = False) -> None:
        """Acknowledge without waiting. `hurried`: it gathers with others only while a frame is unanswered."""
        self._gathered.add(frame, index, hurried)

    def soon_all(self, frame: DeliveredFrame, at: Indexes) -> None:
        """Acknowledge many messages of a frame without waiting."""
        self._gathered.add_all(frame, at)

    @property
    def busy(self) -> bool:
        """Whether settles are unanswered, or acks of `ack_soon` not sent yet."""
        return self.queue.busy or len(self._gathered) > 0

    @property
    def unanswered(self) -> int:
        """The number of acks of `ack_soon` without an answer."""
        return len(self._gathered) + sum(sink.unanswered for sink in list(self._unawaited) if sink.told)

    async def acks_answered(self) -> None:
        """Return when every ack of `ack_soon` is answered, or its deadline is over."""
        while self.unanswered:
            self._one_over.clear()
            await self._one_over.wait()

    def gather(self, timeout_ms: float, *, at_once: bool) -> None:
        """Make batches of the acks of `ack_soon`, if they are ripe or `at_once`, or if one is hurried and no frame is
        unanswered."""
        if not (self._gathered.ripe or at_once or (self._gathered.hurried and not self.queue.outstanding)):
            return
        for parts in _framed(self._gathered.take()):
            self.unawaited(parts, ACK, timeout_ms=timeout_ms)

    def extend(self, messages: Iterable[tuple[DeliveredFrame, Indexes]], lease_ms: float) -> None:
        """Extend leases without waiting, in as few frames as possible. One frame per message would wait for the other
        answers longer than the leases last."""
        for parts in _framed(messages):
            asked = SettleRequest(Operation.EXTEND, int(lease_ms))
            self.unawaited(parts, asked, timeout_ms=lease_ms / 2, told=False)

    def unawaited(
        self, parts: list[tuple[DeliveredFrame, Indexes]], asked: SettleRequest, *, timeout_ms: float, told: bool = True
    ) -> None:
        """Settle or extend without waiting. `told`: failures are reported."""
        sink = UnawaitedSettles(self, parts, asked.operation, timeout_ms, told)
        self._unawaited[sink] = None
        self.queue.add(self._batch(parts, asked, sink, None))

    def expire(self, now_ms: float) -> None:
        """End unawaited settles whose deadline is over."""
        for sink in list(self._unawaited):
            if sink.expire(now_ms):
                self.over(sink)

    def over(self, sink: UnawaitedSettles) -> None:
        """Forget `sink`, which would keep its frames alive."""
        self._unawaited.pop(sink, None)
        self._one_over.set()

    def frame(self, request: int, batch: RequestBatch) -> Settle:
        """Return the frame that carries `batch` as `request`, with the credit of the messages that it ends."""
        columns = dict(batch.columns)
        messages, nbytes = self.in_flight.credit.board(request, columns.pop("places"))
        return Settle(request=request, credit_messages=messages, credit_bytes=nbytes, **columns)

    def unsent(self, request: int, status: Status, why: str) -> None:
        """Refuse the settles of `request`, whose frame cannot be sent."""
        self.in_flight.credit.land(request, counts=False)
        self.queue.refused(request, status, why)

    def answered(self, settled: Settled) -> None:
        """Take the broker's answers. Raise Invalid if they do not fit the request."""
        batch, status = self.queue.outstanding.get(settled.request), settled.answers.status
        if batch is not None and len(batch) == len(status):
            counts = credit_counts(batch.columns["operation"], status)
            self.in_flight.credit.land(settled.request, counts)
            if not counts:  # messages that did end are owed at once, not when all of their call have
                for frame, at in batch.columns["places"][np.flatnonzero(~still_held(status))].parts:
                    if frame is not None:
                        self.in_flight.credit.give(frame, at)
        self.queue.answer(settled.request, settled.answers)

    def _batch(
        self,
        parts: list[tuple[DeliveredFrame, Indexes]],
        asked: SettleRequest,
        sink: ManyAnswers,
        positions: Indexes | None,
    ) -> RequestBatch:
        count = sum(len(at) for _, at in parts)
        columns: Columns = {
            "ids": Ragged.concat([_ids(frame, at) for frame, at in parts]),
            "birth": np.concatenate([frame.columns.birth[at] for frame, at in parts]),
            "version": np.concatenate([frame.columns.version[at] for frame, at in parts]),
            "operation": np.full(count, asked.operation, dtype=np.uint8),
            "time_ms": np.full(count, asked.time_ms, dtype=np.int64),
            "flags": np.full(count, asked.flags, dtype=np.uint8),
            "op": self.context.ids.numbers(count) if asked.repeatable else np.zeros(count, np.uint64),
            "reasons": Ragged.repeat(asked.reason, count) if asked.reason else None,
            "places": SettledPlaces([(frame if asked.ends else None, at) for frame, at in parts]),
        }
        nbytes = columns["ids"].nbytes + SETTLE_BYTES * count
        return RequestBatch(columns, columns["operation"], sink, positions, nbytes)

    def conclude(self, frame: DeliveredFrame, at: Indexes, operation: Operation, answers: Answers, told: bool) -> None:
        """Apply answers to messages in flight. `told`: report failures."""
        status = answers.status
        if operation is Operation.EXTEND:
            self._extended(frame, at, answers)
        elif not status.any():
            self.in_flight.finish(frame, at)
        else:
            ours = still_held(status)  # they can be settled another way
            self.in_flight.finish(frame, at[status == OK])
            self._lose(frame, at[~ours & (status != OK)])
            self.in_flight.take_back(frame, at[ours])
        self._pay_out()
        if told and status.any():
            self._tell(frame, at, operation, answers)

    def _pay_out(self) -> None:
        """Send credit that did not count with its settle now, rather than with the next tick."""
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
        gone = gone[state[gone] != DONE]  # settled and lost messages are counted already
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


def _ids(frame: DeliveredFrame, at: Indexes) -> Ragged:
    """Return the ids at `at`: the column itself if these are all in order."""
    if len(at) == len(frame) and (len(at) == 1 or bool((np.diff(at) == 1).all())):
        return frame.columns.ids
    return frame.columns.ids.take(at)


def _framed(messages: Iterable[tuple[DeliveredFrame, Indexes]]) -> Iterator[list[tuple[DeliveredFrame, Indexes]]]:
    """Yield messages in parts that fit into one frame."""
    parts: list[tuple[DeliveredFrame, Indexes]] = []
    count = 0
    for frame, at in messages:
        if parts and count + len(at) > FRAME_MESSAGES:
            yield parts
            parts, count = [], 0
        parts.append((frame, at))
        count += len(at)
    if parts:
        yield parts


def _runs(frames: Sequence[DeliveredFrame | None], at: Indexes) -> list[tuple[DeliveredFrame | None, Indexes]]:
    """Return single messages as parts of frames."""
    starts = [0, *(n for n in range(1, len(frames)) if frames[n] is not frames[n - 1])]
    return [(frames[start], at[start:end]) for start, end in zip(starts, [*starts[1:], len(frames)], strict=True)]


def _build(entries: Sequence[Any]) -> tuple[Columns, Any]:
    """Return the columns of single settles. An entry has a value for each column of `Settle`, its frame and index."""
    *values, frames, indexes = zip(*entries, strict=True)
    columns = columns_of(Settle, values)
    operation = columns["operation"]
    ended = [None if op == Operation.EXTEND else frame for frame, op in zip(frames, operation.tolist(), strict=True)]
    columns["places"] = SettledPlaces(_runs(ended, np.array(indexes, dtype=np.intp)))
    return columns, operation


def weakly(
    tell: Callable[[DeliveredFrame, int, TimelineError], None],
) -> Callable[[DeliveredFrame, int, TimelineError], None]:
    """Return a function that calls the method `tell`, but does not hold its consumer."""
    method = weakref.WeakMethod(tell)

    def told(frame: DeliveredFrame, index: int, error: TimelineError) -> None:
        if (there := method()) is not None:
            there(frame, index, error)

    return told
