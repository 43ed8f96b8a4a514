"""Batches: what of a call is on its way together, who waits for it, and what an answer to it means.

A batch is some columns of a frame. Behind it stands a *sink*: `SingleCalls`, the waiting callers of coalesced single
calls, or `BatchCall`, one call over a batch. After an outcome of its own that may or may not have happened, a batch is
*unsure*: the very same columns, births and operation ids included, go again, and the answer settles what it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from timeline import errors
from timeline.clock import Clock
from timeline.columns import Bools, Indexes, Ragged, UInt8
from timeline.errors import TimelineError, Unavailable
from timeline.model import Answers, Operation, Status
from timeline.wire import Judgement
from timeline.wire.frames import PutFlag

Columns: TypeAlias = dict[str, Any]
"""Columns of a frame by name: Ragged, numpy arrays, or None where a column is absent."""

OK = Status.OK.code
DUPLICATE = Status.DUPLICATE.code
NOT_FOUND = Status.NOT_FOUND.code
STORED_BEFORE = 2
"""`Answers.repeat` of a put that found its own message there; 1 is that of one that had moved another."""
THROTTLED = Status.THROTTLED.code
UNAVAILABLE = Status.UNAVAILABLE.code
UNKNOWN = Status.UNKNOWN.code

_ERRORS: dict[int, type[TimelineError]] = {
    Status.INVALID.code: errors.Invalid,
    Status.TOO_LARGE.code: errors.TooLarge,
    THROTTLED: errors.Throttled,
    NOT_FOUND: errors.NotFound,
    Status.FORBIDDEN.code: errors.Forbidden,
    Status.FENCED.code: errors.Fenced,
    Status.LEASED.code: errors.Leased,
    Status.DEAD.code: errors.Dead,
    Status.EXISTS.code: errors.Exists,
    Status.EXPIRED.code: errors.Expired,
    UNAVAILABLE: errors.Unavailable,
    UNKNOWN: errors.Unknown,
}


def error_of(
    status: int,
    id: str | None,
    detail: str = "",
    retry_after_ms: int = 0,
    operation: Operation | None = None,
    trouble: Unavailable | None = None,
) -> TimelineError:
    """The exception that says status code `status`, which is neither OK nor DUPLICATE; one that this version does not
    know reads as UNKNOWN. `operation`: what was asked, which its advice depends on. `trouble`: why it was not sent."""
    kind = _ERRORS.get(status, errors.Unknown)
    advice = "" if operation is None else errors.ADVICE_OF_CALLS.get((operation.name.lower(), kind.code), "")
    error = kind(detail, id=id, retry_after_ms=retry_after_ms, advice=advice)
    if trouble is not None:
        error.lasting, error.found = trouble.lasting, trouble.found
    return error


class MessageAnswer(NamedTuple):
    """One message's definite answer. `status` is a code."""

    status: int
    version: int = 0
    due_ms: int = 0
    settled: bool = False
    late: bool = False
    detail: str = ""
    retry_after_ms: int = 0
    repeat: int = 0
    trouble: Unavailable | None = None
    """Why it could not be sent."""


@dataclass(slots=True, eq=False)
class RequestBatch:
    """Columns of one frame. `operation`: what is asked of all, or of each. `positions`: which messages of the sink
    these are, None: all, in order. `unsure`: an earlier attempt may have happened. `outstanding`: sent and not
    answered. `verdict`: what a deadline makes of it while nothing of it can have happened; `retry_after_ms`: the wait
    that a broker asked for then. `tries`: how often it was sent."""

    columns: Columns
    operation: Operation | UInt8
    sink: AnswerSink
    positions: Indexes | None
    nbytes: int
    unsure: bool = False
    outstanding: bool = False
    verdict: int = UNAVAILABLE
    verdict_detail: str = ""
    retry_after_ms: int = 0
    tries: int = 0
    sent_ms: float = 0.0

    def __len__(self) -> int:
        return len(self.columns["ids"])

    @property
    def outdated(self) -> bool:
        """Whether somebody whose message is in it waits no more."""
        return self.sink.wants(self) is not None

    def take(self, at: Indexes, unsure: bool) -> RequestBatch:
        """A batch of the messages at `at`, to go again."""
        columns = {
            name: column if column is None else (column.take(at) if isinstance(column, Ragged) else column[at])
            for name, column in self.columns.items()
        }
        operation = self.operation if isinstance(self.operation, Operation) else self.operation[at]
        positions = at if self.positions is None else self.positions[at]
        share = self.nbytes * len(at) // max(1, len(self))
        return RequestBatch(columns, operation, self.sink, positions, share, unsure or self.unsure, tries=self.tries)

    def overdue(self) -> MessageAnswer:
        """What its deadline makes of it now."""
        if self.unsure or self.outstanding:
            return MessageAnswer(UNKNOWN, detail="no answer within the deadline: it may or may not have happened")
        return MessageAnswer(self.verdict, detail=self.verdict_detail, retry_after_ms=self.retry_after_ms)


class AnswerSink(Protocol):
    """Who waits for the messages of batches."""

    @property
    def deadline_ms(self) -> float:
        """When (monotonic) the last of them stops waiting."""

    def wants(self, batch: RequestBatch) -> Indexes | None:
        """Which messages of `batch` still wait, as indexes into it; None: all."""

    def adopt(self, batch: RequestBatch) -> None:
        """`batch` now carries the messages it holds."""

    def answer(self, batch: RequestBatch, at: Indexes | None, answers: Answers) -> None:
        """Final answers for the messages of `batch` at `at` (None: all of them)."""


class SingleCall:
    """One caller of a coalesced call: its future gets a `MessageAnswer`; at the deadline, one that says so."""

    __slots__ = ("batch", "deadline_ms", "future")

    def __init__(self, future: asyncio.Future[MessageAnswer], deadline_ms: float) -> None:
        self.future = future
        self.deadline_ms = deadline_ms
        self.batch: RequestBatch | None = None

    def expire(self, trouble: Unavailable) -> None:
        """The deadline has come. `trouble`: why nothing could be sent."""
        if not self.future.done():
            answer = self.batch.overdue() if self.batch is not None else MessageAnswer(UNAVAILABLE)
            self.future.set_result(answer if answer.detail else answer._replace(detail=trouble.reason, trouble=trouble))


class SingleCalls:
    """The callers whose single calls went into one batch."""

    __slots__ = ("entries",)

    def __init__(self, entries: list[SingleCall]) -> None:
        self.entries = entries

    @property
    def deadline_ms(self) -> float:
        return max(entry.deadline_ms for entry in self.entries)

    def wants(self, batch: RequestBatch) -> Indexes | None:
        waiting = [not entry.future.done() for entry in self._of(batch)]
        return None if all(waiting) else np.flatnonzero(waiting)

    def adopt(self, batch: RequestBatch) -> None:
        for entry in self._of(batch):
            entry.batch = batch

    def answer(self, batch: RequestBatch, at: Indexes | None, answers: Answers) -> None:
        entries = self.entries if batch.positions is None else self._of(batch)
        if at is not None:
            entries = [entries[index] for index in at.tolist()]
        details = answers.details
        columns = zip(
            answers.status.tolist(),
            answers.version.tolist(),
            answers.due_ms.tolist(),
            answers.settled.tolist(),
            answers.late.tolist(),
            answers.repeat.tolist(),
            strict=True,
        )
        for index, (entry, (status, version, due_ms, settled, late, repeat)) in enumerate(
            zip(entries, columns, strict=True)
        ):
            if not entry.future.done():
                detail = details.get(index, "") if details else ""
                entry.future.set_result(
                    MessageAnswer(status, version, due_ms, bool(settled), bool(late), detail, 0, repeat)
                )

    def _of(self, batch: RequestBatch) -> list[SingleCall]:
        if batch.positions is None:
            return self.entries
        return [self.entries[index] for index in batch.positions.tolist()]


class ManyAnswers:
    """A sink of many messages: which of them have no answer yet, and the batches that carry them."""

    def __init__(self, count: int, deadline_ms: float) -> None:
        self.deadline_ms = deadline_ms
        self._missing = np.ones(count, dtype=np.bool_)
        self._batches: dict[int, RequestBatch] = {}

    def wants(self, batch: RequestBatch) -> Indexes | None:
        waiting = self._missing if batch.positions is None else self._missing[batch.positions]
        return None if waiting.all() else np.flatnonzero(waiting)

    def adopt(self, batch: RequestBatch) -> None:
        self._batches[id(batch)] = batch

    def forget(self, batch: RequestBatch) -> None:
        """`batch` was answered or taken apart."""
        self._batches.pop(id(batch), None)

    def answer(self, batch: RequestBatch, at: Indexes | None, answers: Answers) -> None:
        where = np.arange(len(batch)) if at is None else at
        where = where if batch.positions is None else batch.positions[where]
        missing = self._missing[where]
        if not missing.all():
            fresh = np.flatnonzero(missing)
            where, answers = where[fresh], answers.take(fresh)
        self._missing[where] = False
        self._take(where, answers)

    def _take(self, where: Indexes, answers: Answers) -> None:
        raise AssertionError("each kind says what answers mean")

    def _overdue(self, trouble: Callable[[], Unavailable]) -> Iterator[tuple[RequestBatch, Indexes, MessageAnswer]]:
        """Each batch of which some messages have no answer at the deadline, with which these are, and what that makes
        of them. `trouble` says why nothing could be sent."""
        for batch in list(self._batches.values()):
            wanted = self.wants(batch)
            at = np.arange(len(batch)) if wanted is None else wanted
            if len(at):
                overdue = batch.overdue()
                if not overdue.detail:
                    why = trouble()
                    overdue = overdue._replace(detail=why.reason, trouble=why)
                yield batch, at, overdue


class BatchCall(ManyAnswers):
    """One call over a batch: collects the answers in order. Its deadline counts from the last answer, so that a large
    batch may take as long as it gets on. `trouble` says why nothing could be sent."""

    def __init__(self, count: int, timeout_ms: float, clock: Clock, trouble: Callable[[], Unavailable]) -> None:
        super().__init__(count, clock.monotonic_ms() + timeout_ms)
        self.answers = Answers.blank(count, Status.UNAVAILABLE)
        self._left = count
        self._timeout_ms = timeout_ms
        self._clock = clock
        self._trouble = trouble
        self._why: Unavailable | None = None
        self._done = asyncio.Event()
        if not count:
            self._done.set()
        self.heard = not count
        """Whether a broker said anything about any of it."""
        self.waits_ms: dict[int, int] = {}
        """What a broker asked to wait before those at these indexes are sent again."""

    def refuse(self, refused: Judgement) -> None:
        """Answer those at these indexes: the driver refused them, and nothing of them is sent."""
        where = np.fromiter(refused, dtype=np.intp, count=len(refused))
        answers = Answers.blank(len(refused), Status.INVALID)
        answers.status = np.array([status.code for status, _ in refused.values()], dtype=np.uint8)
        answers.details = {at: why for at, (_, why) in enumerate(refused.values())}
        self._fill(where, answers)
        self.heard = self.heard or not self._left

    def _take(self, where: Indexes, answers: Answers) -> None:
        self.heard = True
        self._fill(where, answers)
        self.deadline_ms = self._clock.monotonic_ms() + self._timeout_ms

    def _fill(self, where: Indexes, answers: Answers) -> None:
        self.answers.assign(where, answers)
        self._missing[where] = False
        self._left -= len(where)
        if self._left == 0:
            self._done.set()

    async def finished(self) -> Answers:
        """The answers of all, once there; what has none at the deadline says UNKNOWN, THROTTLED or UNAVAILABLE."""
        loop = asyncio.get_running_loop()
        while not self._done.is_set():
            left_ms = self.deadline_ms - self._clock.monotonic_ms()
            if left_ms <= 0:
                self._expire()
                break
            timer = loop.call_later(left_ms / 1000.0, self._done.set)
            try:
                await self._done.wait()
            except asyncio.CancelledError:
                self._give_up()
                raise
            finally:
                timer.cancel()
            if self._left:
                self._done.clear()
        return self.answers

    def _give_up(self) -> None:
        """Whoever called waits no more: what is not sent yet never is, and what is comes to nothing here."""
        self._missing[:] = False
        self._batches.clear()

    def _expire(self) -> None:
        for batch, at, overdue in self._overdue(self._trouble):
            where = at if batch.positions is None else batch.positions[at]
            self._why = overdue.trouble or self._why
            self.heard = self.heard or overdue.status == THROTTLED
            self._fill(where, refusal_of(len(at), Status.of(overdue.status), overdue.detail))
            if overdue.retry_after_ms:
                self.waits_ms.update(dict.fromkeys(where.tolist(), overdue.retry_after_ms))
        self._batches.clear()

    def check_heard(self) -> None:
        """Raises why the call itself failed: when no broker said anything about any of it."""
        if not self.heard:
            at = int(np.argmax(self.answers.status))
            detail, wait_ms = self.answers.details.get(at, ""), self.waits_ms.get(at, 0)
            raise error_of(int(self.answers.status[at]), None, detail, wait_ms, trouble=self._why)


def refusal_of(count: int, status: Status, detail: str) -> Answers:
    """`count` answers that say the same."""
    answers = Answers.blank(count, status)
    answers.details = dict.fromkeys(range(count), detail)
    return answers


@dataclass(slots=True)
class JudgedAnswers:
    """What a frame of answers means: `final` at indexes `done` (None: all); batches to go `again`."""

    done: Indexes | None
    final: Answers
    again: list[RequestBatch] = field(default_factory=list)


def judge(batch: RequestBatch, answers: Answers) -> JudgedAnswers:
    """Tells final answers from what goes again, and settles what was unsure: a put's DUPLICATE of its own birth was the
    put; an ack's NOT_FOUND was the ack; a cancel's or purge's NOT_FOUND stays UNKNOWN unless the id is remembered, and
    so does a put whose repeat came too late for its expiry."""
    status = answers.status
    _spread_detail(answers)
    operation = batch.operation
    status = status.copy()
    stored = _is(operation, Operation.PUT) & (status == DUPLICATE) & (answers.repeat != 0)
    status[stored] = OK
    answers.repeat = np.where(stored, np.uint8(STORED_BEFORE), answers.repeat)
    if batch.unsure:
        missing = status == NOT_FOUND
        status[missing & _is(operation, Operation.ACK)] = OK
        gone = missing & (_is(operation, Operation.CANCEL) | _is(operation, Operation.PURGE)) & (answers.settled == 0)
        if gone.any():
            status[gone] = UNKNOWN
            for index in np.flatnonzero(gone).tolist():
                answers.details[index] = "it is gone: this call did it, or it was delivered first"
        overtaken = (status == Status.INVALID.code) & _may_have_been_in_time(batch)
        status[overtaken] = UNKNOWN
        for index in np.flatnonzero(overtaken).tolist():
            answers.details[index] = "repeated too late for its expiry: it was never stored, or delivered meanwhile"
    again = (answers.status == THROTTLED) | (answers.status == UNAVAILABLE) | (answers.status == UNKNOWN)
    final = replace(answers, status=status)
    if not again.any():
        return JudgedAnswers(None, final)
    done = np.flatnonzero(~again)
    return JudgedAnswers(done, final.take(done), _again(batch, answers))


def _may_have_been_in_time(batch: RequestBatch) -> Bools | bool:
    """Puts with an expiry that an earlier attempt may have met: it need not be over by then, and the due may be counted
    from the broker's now each time. What refuses a later attempt says nothing of the first."""
    expires_ms = batch.columns.get("expires_ms")
    if batch.operation is not Operation.PUT or expires_ms is None:
        return False
    flags, due_ms = batch.columns["flags"], batch.columns["time_ms"]
    alike = ((flags & PutFlag.IN) != 0) == ((flags & PutFlag.EXPIRES_IN) != 0)
    return np.asarray((expires_ms != 0) & ~(alike & (expires_ms <= due_ms)), dtype=np.bool_)


def _again(batch: RequestBatch, answers: Answers) -> list[RequestBatch]:
    parts = []
    for code in (THROTTLED, UNAVAILABLE, UNKNOWN):
        where = np.flatnonzero(answers.status == code)
        if len(where):
            part = batch.take(where, unsure=code == UNKNOWN)
            part.verdict = code if code == THROTTLED else UNAVAILABLE
            part.verdict_detail = answers.details.get(int(where[0]), "")
            parts.append(part)
    return parts


def _is(operation: Operation | UInt8, wanted: Operation) -> Bools | bool:
    if isinstance(operation, Operation):
        return operation is wanted
    return np.asarray(operation == wanted.value, dtype=np.bool_)


def _spread_detail(answers: Answers) -> None:
    """One sentence for a whole frame stands at its first message alone."""
    if list(answers.details) == [0] and len(answers) > 1 and (answers.status == answers.status[0]).all():
        answers.details = dict.fromkeys(range(len(answers)), answers.details[0])


def sound(columns: Columns, count: int, refused: Judgement) -> tuple[Columns, Indexes]:
    """The columns of those among `count` messages that are not `refused`, and which these are."""
    if not refused:
        return columns, np.arange(count)
    good = np.delete(np.arange(count), list(refused))
    taken = {
        name: column if column is None else (column.take(good) if isinstance(column, Ragged) else column[good])
        for name, column in columns.items()
    }
    return taken, good


Build: TypeAlias = Callable[[Sequence[Any]], tuple[Columns, "Operation | UInt8"]]
"""Makes columns of coalesced single calls: (columns, operations)."""
