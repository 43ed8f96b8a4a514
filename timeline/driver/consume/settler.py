"""Settles on their way: acks, extensions, releases and burials of what is in hand, and what their answers do to it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from timeline.columns import Indexes, Ragged
from timeline.driver.consume.ack_batcher import Gathering
from timeline.driver.consume.broker_clock import BrokerClock
from timeline.driver.consume.credit import Places
from timeline.driver.consume.in_flight import DONE, WAITING, Hand, Load
from timeline.driver.message import encode_text
from timeline.driver.produce.request_batch import OK, Answer, Columns, Many, Parcel, error_of
from timeline.driver.produce.request_queue import Line, refusal_of
from timeline.driver.times import Duration, When, duration_ms, instant_ms
from timeline.driver.transport.client_context import Link
from timeline.errors import Invalid, TimelineError
from timeline.model import MAX_REASON_BYTES, Answers, Operation, Status
from timeline.wire.frames import Settle, Settled, SettleFlag, credit_counts, still_held

log = logging.getLogger("timeline.driver")

FRAME_SETTLES = 10_000
SETTLE_BYTES = 80

OnError = Callable[[Load, int, TimelineError], None]


class Quiet:
    """A sink that nobody waits at: the messages of some loads, one after the other. Failures go to `on_error`."""

    def __init__(self, desk: SettleDesk, parts: list[tuple[Load, Indexes]], timeout_ms: float, told: bool) -> None:
        self.parts = parts
        self.deadline_ms = desk.link.clock.monotonic_ms() + timeout_ms
        self.told = told
        self._desk = desk
        self._ends = np.cumsum([len(at) for _, at in parts])
        self._done = np.zeros(int(self._ends[-1]), dtype=np.bool_)
        self._parcels: dict[int, Parcel] = {}

    def wants(self, parcel: Parcel) -> Indexes | None:
        done = self._done if parcel.positions is None else self._done[parcel.positions]
        return np.flatnonzero(~done) if done.any() else None

    @property
    def unanswered(self) -> int:
        """How many of its messages have no answer."""
        return int((~self._done).sum())

    def adopt(self, parcel: Parcel) -> None:
        self._parcels[id(parcel)] = parcel

    def answer(self, parcel: Parcel, at: Indexes | None, answers: Answers) -> None:
        if at is None:
            self._parcels.pop(id(parcel), None)
        where = np.arange(len(parcel)) if at is None else at
        where = where if parcel.positions is None else parcel.positions[where]
        fresh = np.flatnonzero(~self._done[where])
        if len(fresh) < len(where):
            where, answers = where[fresh], answers.take(fresh)
        self._done[where] = True
        operations = parcel.operation if isinstance(parcel.operation, np.ndarray) else None
        start = first = 0
        ends, lasts = self._ends.tolist(), np.searchsorted(where, self._ends).tolist()
        for (load, indexes), end, last in zip(self.parts, ends, lasts, strict=True):
            if first < last:
                mine = np.arange(first, last)
                part = answers if len(mine) == len(answers) else answers.take(mine)
                operation = Operation.ACK if operations is None else Operation(int(operations[0]))
                self._desk.conclude(load, indexes[where[mine] - start], operation, part, self.told)
            start, first = end, last
        if self._done.all():
            self._parcels.clear()
            self._desk.over(self)

    def expire(self, now_ms: float) -> bool:
        """Whether its deadline is over; what has no answer by then is answered by that."""
        if now_ms < self.deadline_ms:
            return False
        for parcel in list(self._parcels.values()):
            wanted = self.wants(parcel)
            count = len(parcel) if wanted is None else len(wanted)
            if count:
                overdue = parcel.overdue()
                why = overdue.detail or self._desk.link.trouble()
                self.answer(parcel, wanted, refusal_of(count, Status.of(overdue.status), why))
        return True


class SettleDesk:
    """Makes settles of what is in hand, and draws the consequences of their answers."""

    def __init__(self, link: Link, hand: Hand, broker_clock: BrokerClock, on_error: OnError) -> None:
        self.link = link
        self.hand = hand
        self._broker_clock = broker_clock
        self._on_error = on_error
        self.line = Line(_build, link.clock, link.random, link.trouble)
        self._gathered = Gathering(hand, link.clock, self.line.work.set)
        self._quiet: dict[Quiet, None] = {}  # in order, so that a run can be repeated

    async def one(
        self, load: Load, index: int, operation: Operation, time_ms: int, flags: int, reason: bytes, timeout_ms: float
    ) -> Answer:
        """One settle, answered. The answer says its fate; the message's state is up to date by then."""
        settles = operation is not Operation.EXTEND
        if settles and load.state[index] != DONE:
            self.hand.settle_one(load, index)
        entry = (load, index, operation, time_ms, flags, self._op(operation), reason)
        try:
            answer = await self.line.single(entry, SETTLE_BYTES + len(reason), timeout_ms)
        except BaseException:
            if settles:  # an extend that is broken off must not undo an ack on its way
                self.hand.take_back(load, np.array([index]))
            raise
        if settles and answer.status == OK:
            self.hand.finish_one(load, index)
            self._pay_out()
            return answer
        at = np.array([index])
        answers = Answers.blank(1, Status.of(answer.status))
        answers.due_ms[0] = answer.due_ms
        self.conclude(load, at, operation, answers, told=False)
        return answer

    async def many(
        self,
        load: Load,
        at: Indexes,
        operation: Operation,
        time_ms: int,
        flags: int,
        reason: bytes,
        timeout_ms: float,
    ) -> Answers:
        """Settles messages of a load; answers in order. Raises when the call itself failed."""
        live = at[np.frombuffer(load.state, dtype=np.uint8)[at] != DONE]
        if operation is not Operation.EXTEND:
            self.hand.settle(load, live)
        many = Many(len(at), timeout_ms, self.link.clock, self.link.trouble)
        for start in range(0, len(at), FRAME_SETTLES):
            positions = np.arange(start, min(len(at), start + FRAME_SETTLES))
            self.line.add(self._parcel([(load, at[positions])], operation, time_ms, flags, reason, many, positions))
        try:
            answers = await many.finished()
        except BaseException:
            if operation is not Operation.EXTEND:
                self.hand.take_back(load, live)
            raise
        self.conclude(load, at, operation, answers, told=False)
        many.check_heard()
        return answers

    def soon(self, load: Load, index: int) -> None:
        """An ack that nobody waits for."""
        self._gathered.add(load, index)

    def soon_all(self, load: Load, at: Indexes) -> None:
        """The same for many of a load."""
        self._gathered.add_all(load, at)

    @property
    def gathering(self) -> bool:
        """Whether acks that nobody waits for are yet to be sent."""
        return len(self._gathered) > 0

    @property
    def unanswered(self) -> int:
        """How many acks that nobody waits for have no answer yet."""
        return len(self._gathered) + sum(sink.unanswered for sink in list(self._quiet) if sink.told)

    def gather(self, timeout_ms: float, *, at_once: bool) -> None:
        """Makes parcels of the acks that nobody waits for, when it is time for them, or `at_once`."""
        if not (self._gathered.ripe or at_once):
            return
        for parts in _framed(self._gathered.take()):
            self.quietly(parts, Operation.ACK, timeout_ms=timeout_ms)

    def extend(self, messages: Iterable[tuple[Load, Indexes]], lease_ms: float) -> None:
        """Extends what nobody waits for. In as few frames as may be: one each, they would wait for each other's answers
        longer than the leases last."""
        for parts in _framed(messages):
            self.quietly(parts, Operation.EXTEND, int(lease_ms), timeout_ms=lease_ms / 2, told=False)

    def quietly(
        self,
        parts: list[tuple[Load, Indexes]],
        operation: Operation,
        time_ms: int = 0,
        flags: int = 0,
        reason: bytes = b"",
        *,
        timeout_ms: float,
        told: bool = True,
    ) -> None:
        """Settles what nobody waits for. `told`: failures are reported."""
        sink = Quiet(self, parts, timeout_ms, told)
        self._quiet[sink] = None
        self.line.add(self._parcel(parts, operation, time_ms, flags, reason, sink, None))

    def expire(self, now_ms: float) -> None:
        """Ends settles that nobody waits for at their deadline."""
        for sink in list(self._quiet):
            if sink.expire(now_ms):
                self.over(sink)

    def over(self, sink: Quiet) -> None:
        """`sink` is done with. Kept any longer, it would keep its loads alive until the collector has seen them."""
        self._quiet.pop(sink, None)

    def frame(self, request: int, parcel: Parcel) -> Settle:
        """The frame that carries `parcel` as `request`, and the credit of what its settles end."""
        columns = dict(parcel.columns)
        messages, nbytes = self.hand.credit.board(request, columns.pop("places"))
        return Settle(request=request, credit_messages=messages, credit_bytes=nbytes, **columns)

    def unsent(self, request: int, status: Status, why: str) -> None:
        """The frame of `request` cannot be sent: its settles are refused."""
        parcel = self.line.carried(request)
        if parcel is not None:
            self.hand.credit.land(request, counts=False)
            self.line.refused(request, refusal_of(len(parcel), status, why))

    def answered(self, frame: Settled) -> None:
        """The broker's answers. Raises Invalid when they do not fit what was asked."""
        parcel, status = self.line.carried(frame.request), frame.answers.status
        if parcel is not None and len(parcel) == len(status):
            counts = credit_counts(parcel.columns["operation"], status)
            self.hand.credit.land(frame.request, counts)
            if not counts:  # what did end is owed at once, not when all of its call has
                for load, at in parcel.columns["places"][np.flatnonzero(~still_held(status))].parts:
                    if load is not None:
                        self.hand.credit.give(load, at)
        self.line.answer(frame.request, frame.answers)

    def _parcel(
        self,
        parts: list[tuple[Load, Indexes]],
        operation: Operation,
        time_ms: int,
        flags: int,
        reason: bytes,
        sink: Many | Quiet,
        positions: Indexes | None,
    ) -> Parcel:
        count = sum(len(at) for _, at in parts)
        columns: Columns = {
            "ids": Ragged.concat([_part(load, at) for load, at in parts]),
            "birth": _joined([load.frame.birth[at] for load, at in parts]),
            "version": _joined([load.frame.version[at] for load, at in parts]),
            "operation": np.full(count, operation, dtype=np.uint8),
            "time_ms": np.full(count, time_ms, dtype=np.int64),
            "flags": np.full(count, flags, dtype=np.uint8),
            "op": np.zeros(count, np.uint64) if not self._op_needed(operation) else self.link.ids.numbers(count),
            "reasons": Ragged.repeat(reason, count) if reason else None,
            "places": Places([(_ended(load, operation), at) for load, at in parts]),
        }
        return Parcel(columns, columns["operation"], sink, positions, columns["ids"].nbytes + SETTLE_BYTES * count)

    def _op_needed(self, operation: Operation) -> bool:
        return operation in (Operation.RELEASE, Operation.BURY)

    def _op(self, operation: Operation) -> int:
        return self.link.ids.number() if self._op_needed(operation) else 0

    def conclude(self, load: Load, at: Indexes, operation: Operation, answers: Answers, told: bool) -> None:
        """What answers mean for messages in hand. `told`: failures go to whoever listens."""
        status = answers.status
        if operation is Operation.EXTEND:
            self._extended(load, at, answers)
        elif not status.any():
            self.hand.finish(load, at)
        else:
            ours = still_held(status)  # to be settled another way
            self.hand.finish(load, at[status == OK])
            self._lose(load, at[~ours & (status != OK)])
            self.hand.take_back(load, at[ours])
        self._pay_out()
        if told and status.any():
            self._tell(load, at, operation, answers)

    def _pay_out(self) -> None:
        """Credit that did not count with its settle goes by itself, now rather than with the next tick."""
        if self.hand.credit.owed:
            self.line.work.set()

    def _extended(self, load: Load, at: Indexes, answers: Answers) -> None:
        good = np.flatnonzero(answers.status == OK)
        if len(good):
            until_ms = answers.due_ms[good]
            end_ms = np.array([self._broker_clock.monotonic_ms(end) for end in until_ms.tolist()], dtype=np.float64)
            load.extended(at[good], until_ms, end_ms)
        self._lose(load, at[~still_held(answers.status) & (answers.status != OK)])

    def _lose(self, load: Load, gone: Indexes) -> None:
        state = np.frombuffer(load.state, dtype=np.uint8)
        gone = gone[state[gone] != DONE]  # what was settled, or known to be lost, is counted already
        if len(gone):
            waiting = state[gone] == WAITING
            self.hand.stats.dropped += int(waiting.sum())
            self.hand.stats.lost += int((~waiting).sum())
            self.hand.lose(load, gone)

    def _tell(self, load: Load, at: Indexes, operation: Operation, answers: Answers) -> None:
        failed = np.flatnonzero(answers.status != OK).tolist()
        for place in failed:
            self.hand.stats.settle_errors += 1
            id = load.frame.ids[int(at[place])].decode()
            error = error_of(int(answers.status[place]), id, answers.details.get(place, ""))
            if place == failed[0]:
                more = f", nor of {len(failed) - 1} more" if len(failed) > 1 else ""
                log.warning("%s of %r was not taken%s: %s", operation.name.lower(), id, more, error)
            self._on_error(load, int(at[place]), error)


def _part(load: Load, at: Indexes) -> Ragged:
    """The ids at `at`; the column itself when that is all of them in order."""
    if len(at) == len(load) and (len(at) == 1 or bool((np.diff(at) == 1).all())):
        return load.frame.ids
    return load.frame.ids.take(at)


def _joined(columns: list[Any]) -> Any:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _framed(messages: Iterable[tuple[Load, Indexes]]) -> Iterator[list[tuple[Load, Indexes]]]:
    """Messages in parts of what one frame takes."""
    parts: list[tuple[Load, Indexes]] = []
    count = 0
    for load, at in messages:
        if parts and count + len(at) > FRAME_SETTLES:
            yield parts
            parts, count = [], 0
        parts.append((load, at))
        count += len(at)
    if parts:
        yield parts


def _ended(load: Load, operation: Operation) -> Load | None:
    """`load`, when this settle of its messages ends their stay in hand."""
    return None if operation is Operation.EXTEND else load


def _runs(loads: Sequence[Load | None], at: Indexes) -> list[tuple[Load | None, Indexes]]:
    """Messages one by one as parts of loads."""
    starts = [0, *(n for n in range(1, len(loads)) if loads[n] is not loads[n - 1])]
    return [(loads[start], at[start:end]) for start, end in zip(starts, [*starts[1:], len(loads)], strict=True)]


def _build(entries: Sequence[Any]) -> tuple[Columns, Any, int]:
    """Columns of single settles; an entry is (load, index, operation, time_ms, flags, op, reason)."""
    count = len(entries)
    loads, indexes, operations, times, flags, ops, reasons = zip(*entries, strict=True)
    messages = list(zip(loads, indexes, strict=True))
    operation = np.fromiter(operations, np.uint8, count)
    columns: Columns = {
        "ids": Ragged.of([load.frame.ids[index] for load, index in messages]),
        "birth": np.fromiter((load.frame.birth[index] for load, index in messages), np.uint64, count),
        "version": np.fromiter((load.frame.version[index] for load, index in messages), np.int64, count),
        "operation": operation,
        "time_ms": np.fromiter(times, np.int64, count),
        "flags": np.fromiter(flags, np.uint8, count),
        "op": np.fromiter(ops, np.uint64, count),
        "reasons": Ragged.of(list(reasons)) if any(reasons) else None,
        "places": Places(_runs(list(map(_ended, loads, operations)), np.fromiter(indexes, np.intp, count))),
    }
    return columns, operation, columns["ids"].nbytes + SETTLE_BYTES * count


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


def weakly(tell: Callable[[Load, int, TimelineError], None]) -> Callable[[Load, int, TimelineError], None]:
    """The same for one who must not hold the consumer whose method it is."""
    method = weakref.WeakMethod(tell)

    def told(load: Load, index: int, error: TimelineError) -> None:
        if (there := method()) is not None:
            there(load, index, error)

    return told
