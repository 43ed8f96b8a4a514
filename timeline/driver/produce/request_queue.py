"""Requests on their way: who waits for them, the batches that carry them, and the queue of those batches.

A batch is some columns of one frame. Behind it stands a *sink*: `SingleCalls`, the callers of coalesced single calls,
or `ManyAnswers`, one call over many messages. After an outcome that may or may not have happened, a batch is *unsure*:
the very same columns go again, births and operation ids included. The answer settles what the first attempt did.

Single calls gather in `forming` while earlier frames are sent. A burst of them shares a frame, and a lone one goes at
once: there is no timer. The owner of a queue takes batches off it, sends them, and hands in the answers.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from timeline.clock import Clock
from timeline.columns import Bools, ColumnBatch, Indexes, Int64, Ragged, UInt8
from timeline.driver.message import Randomness
from timeline.driver.receipts import (
    DUPLICATE,
    NOT_FOUND,
    OK,
    STORED_BEFORE,
    THROTTLED,
    UNAVAILABLE,
    UNKNOWN,
    MessageAnswer,
    error_of,
)
from timeline.driver.tasks import end, keep
from timeline.driver.transport.channel import ClientContext, Deadline
from timeline.errors import Forbidden, Invalid, NotFound, TimelineError, Unavailable
from timeline.model import Answers, Operation, Status
from timeline.wire import Judgement
from timeline.wire.frames import AIM_BYTES, PutFlag

log = logging.getLogger("timeline.driver")

FRAME_MESSAGES = 10_000
AGAIN_FIRST_MS = 20.0
AGAIN_CAP_MS = 1_000.0

Columns: TypeAlias = dict[str, Any]
"""Columns of a frame by name: Ragged, numpy arrays, or None where a column is absent."""
Build: TypeAlias = Callable[[Sequence[Any]], tuple[Columns, "Operation | UInt8"]]
"""Makes (columns, operations) of coalesced single calls."""


def columns_of(frame: type[ColumnBatch], values: Iterable[Sequence[Any]]) -> Columns:
    """Return the columns of single calls for `frame`. `values`: of each of its columns, in order."""
    fields = [field for field in frame.columns if field.kind != "whole"]
    return {field.name: field.column(each) for field, each in zip(fields, values, strict=True)}


def calls_of(frame: type[ColumnBatch], operation: Operation) -> Build:
    """Return what makes `frame`'s columns of single calls. An entry of one has a value for each of these columns."""
    return lambda entries: (columns_of(frame, zip(*entries, strict=True)), operation)


def columns_at(columns: Columns, at: Indexes | slice) -> Columns:
    """Return the columns of the messages at `at`."""

    def pick(column: Any) -> Any:
        if isinstance(column, Ragged) and isinstance(at, np.ndarray):
            return column.take(at)
        return None if column is None else column[at]

    return {name: pick(column) for name, column in columns.items()}


NOT_SENT = MessageAnswer(UNAVAILABLE)


@dataclass(slots=True, eq=False)
class RequestBatch:
    """Columns of one frame. `operation`: of all messages, or of each. `positions`: the messages' places in the sink;
    None: all, in order. `unsure`: an earlier attempt may have happened. `outstanding`: sent and not answered.
    `verdict`: the answer at the deadline, if nothing can have happened. `tries`: how often it was sent. `took_ms`:
    how long its last answer took."""

    columns: Columns
    operation: Operation | UInt8
    sink: AnswerSink
    positions: Indexes | None
    nbytes: int
    unsure: bool = False
    outstanding: bool = False
    verdict: MessageAnswer = NOT_SENT
    tries: int = 0
    took_ms: float = 0.0
    sent_ms: float = 0.0

    def __len__(self) -> int:
        return len(self.columns["ids"])

    @property
    def outdated(self) -> bool:
        """Whether a caller of one of its messages has given up."""
        return self.sink.wants(self) is not None

    def take(self, at: Indexes, unsure: bool = False) -> RequestBatch:
        """Return a batch of the messages at `at`, to go again in place of this one."""
        columns = columns_at(self.columns, at)
        operation = self.operation if isinstance(self.operation, Operation) else self.operation[at]
        positions = at if self.positions is None else self.positions[at]
        share = self.nbytes * len(at) // max(1, len(self))
        unsure = unsure or self.unsure
        part = replace(
            self, columns=columns, operation=operation, positions=positions, nbytes=share, unsure=unsure,
            outstanding=False,
        )  # fmt: skip
        self.sink.adopt(part, self)
        return part

    def overdue(self, trouble: Callable[[], Unavailable]) -> MessageAnswer:
        """Return its answer at the deadline. `trouble` says why it could not be sent."""
        if self.unsure or self.outstanding:
            return MessageAnswer(UNKNOWN, detail="no answer within the deadline: it may or may not have happened")
        return _explained(self.verdict, trouble)


def _explained(verdict: MessageAnswer, trouble: Callable[[], Unavailable]) -> MessageAnswer:
    if verdict.detail:
        return verdict
    why = trouble()
    return verdict._replace(detail=why.reason, trouble=why)


class AnswerSink(ABC):
    """The callers that wait for the messages of batches. `deadline_ms`: when (monotonic) the last one gives up."""

    __slots__ = ()
    deadline_ms: float

    @abstractmethod
    def wants(self, batch: RequestBatch) -> Indexes | None:
        """Return which messages of `batch` still wait, as indexes into it. None: all."""

    @abstractmethod
    def gives_up_ms(self, batch: RequestBatch) -> float:
        """Return when (monotonic) the first caller that still waits for messages of `batch` gives up. Infinite: none
        waits."""

    @abstractmethod
    def adopt(self, batch: RequestBatch, whole: RequestBatch | None = None) -> None:
        """Note that `batch` now carries its messages, and that `whole` does so no longer."""

    @abstractmethod
    def answer(self, batch: RequestBatch, at: Indexes | None, answers: Answers) -> None:
        """Take final answers for the messages of `batch` at `at` (None: all)."""


@dataclass(slots=True, eq=False)
class SingleCall:
    """One caller of a coalesced call. Its future always gets a `MessageAnswer`."""

    future: asyncio.Future[MessageAnswer]
    deadline_ms: float
    batch: RequestBatch | None = None


class SingleCalls(AnswerSink):
    """The callers whose single calls share one batch."""

    __slots__ = ("calls", "deadline_ms")

    def __init__(self, calls: list[SingleCall]) -> None:
        self.calls = calls
        self.deadline_ms = max([call.deadline_ms for call in calls])

    def wants(self, batch: RequestBatch) -> Indexes | None:
        waiting = [not call.future.done() for call in self._of(batch)]
        return None if all(waiting) else np.flatnonzero(waiting)

    def gives_up_ms(self, batch: RequestBatch) -> float:
        return min((call.deadline_ms for call in self._of(batch) if not call.future.done()), default=math.inf)

    def adopt(self, batch: RequestBatch, whole: RequestBatch | None = None) -> None:
        for call in self._of(batch):
            call.batch = batch

    def answer(self, batch: RequestBatch, at: Indexes | None, answers: Answers) -> None:
        calls = self.calls if batch.positions is None else self._of(batch)
        if at is not None:
            calls = [calls[index] for index in at.tolist()]
        columns = (answers.status, answers.version, answers.due_ms, answers.settled, answers.repeat)
        rows = zip(*[column.tolist() for column in columns], strict=True)
        details = answers.details
        for index, (call, (status, version, due_ms, settled, repeat)) in enumerate(zip(calls, rows, strict=True)):
            if not call.future.done():
                detail = details.get(index, "") if details else ""
                call.future.set_result(MessageAnswer(status, version, due_ms, settled, repeat, detail))

    def _of(self, batch: RequestBatch) -> list[SingleCall]:
        if batch.positions is None:
            return self.calls
        return [self.calls[index] for index in batch.positions.tolist()]


class ManyAnswers(AnswerSink):
    """A sink of `count` messages. It knows which of them have no answer yet."""

    def __init__(self, queue: RequestQueue, count: int, timeout_ms: float) -> None:
        self.queue = queue
        self.deadline_ms = queue.clock.monotonic_ms() + timeout_ms
        self._missing = np.ones(count, dtype=np.bool_)
        # Kept here: thousands of calls that time out at once must not walk the queue for each.
        self._batches: dict[RequestBatch, None] = {}

    def adopt(self, batch: RequestBatch, whole: RequestBatch | None = None) -> None:
        self._batches[batch] = None
        if whole is not None:
            self._batches.pop(whole, None)

    def wants(self, batch: RequestBatch) -> Indexes | None:
        waiting = self._missing if batch.positions is None else self._missing[batch.positions]
        return None if waiting.all() else np.flatnonzero(waiting)

    def gives_up_ms(self, batch: RequestBatch) -> float:
        wanted = self.wants(batch)
        return self.deadline_ms if wanted is None or len(wanted) else math.inf

    def answer(self, batch: RequestBatch, at: Indexes | None, answers: Answers) -> None:
        where = np.arange(len(batch)) if at is None else at
        where = where if batch.positions is None else batch.positions[where]
        missing = self._missing[where]
        if not missing.all():
            fresh = np.flatnonzero(missing)
            where, answers = where[fresh], answers.take(fresh)
        self._missing[where] = False
        if at is None:
            self._batches.pop(batch, None)
        self._take(where, answers)

    @abstractmethod
    def _take(self, where: Indexes, answers: Answers) -> None:
        """Take the first answers for the messages at `where`."""

    def _overdue(self) -> Iterator[tuple[RequestBatch, Indexes, MessageAnswer]]:
        """Yield each batch with messages that have no answer at the deadline, these messages, and their answer then."""
        batches, self._batches = self._batches, {}
        for batch in batches:
            wanted = self.wants(batch)
            at = np.arange(len(batch)) if wanted is None else wanted
            if len(at):
                yield batch, at, batch.overdue(self.queue.trouble)


class BatchCall(ManyAnswers):
    """One call over many messages, which collects the answers in order. Its deadline counts from the last answer, so
    that a large batch may take as long as it makes progress.

    `refused`: messages that the driver refuses, by index. They are not sent.
    """

    def __init__(self, queue: RequestQueue, count: int, timeout_ms: float, refused: Judgement | None = None) -> None:
        super().__init__(queue, count, timeout_ms)
        self.answers = Answers.blank(count, Status.UNAVAILABLE)
        self._left = count
        self._timeout_ms = timeout_ms
        self._trouble: TimelineError | None = None
        self._done = asyncio.Event()
        self.waits_ms: dict[int, int] = {}
        """How long a broker asked to wait, by the message's index."""
        if refused:
            at = np.fromiter(refused, dtype=np.intp, count=len(refused))
            answers = Answers.blank(len(refused))
            answers.status = np.array([status.code for status, _ in refused.values()], dtype=np.uint8)
            answers.details = {place: why for place, (_, why) in enumerate(refused.values())}
            self._fill(at, answers)
        self.heard = not self._left
        """Whether a broker said anything about any message."""
        if not self._left:
            self._done.set()

    def send(self, columns: Columns, operation: Operation, sizes: Int64) -> None:
        """Queue all messages that are not refused, in as few frames as fit. `sizes`: bytes per message."""
        places = np.flatnonzero(self._missing)
        if len(places) < len(sizes):
            columns, sizes = columns_at(columns, places), sizes[places]
        for part in cuts_of(sizes, AIM_BYTES, FRAME_MESSAGES):
            batch = RequestBatch(columns_at(columns, part), operation, self, places[part], int(sizes[part].sum()))
            self.queue.add(batch)

    def _take(self, where: Indexes, answers: Answers) -> None:
        self.heard = True
        self._fill(where, answers)
        self.deadline_ms = self.queue.clock.monotonic_ms() + self._timeout_ms

    def _fill(self, where: Indexes, answers: Answers) -> None:
        self.answers.assign(where, answers)
        self._missing[where] = False
        self._left -= len(where)
        if self._left == 0:
            self._done.set()

    async def finished(self) -> Answers:
        """Return the answers of all messages. Those without one at the deadline are UNKNOWN, THROTTLED or
        UNAVAILABLE."""
        while not self._done.is_set():
            left_ms = self.deadline_ms - self.queue.clock.monotonic_ms()
            if left_ms <= 0:
                self._expire()
                break
            try:
                await wait_until_set(self._done, left_ms)
            except asyncio.CancelledError:
                self._missing[:] = False  # batches that are not sent yet never are
                self._batches.clear()
                raise
            if self._left:
                self._done.clear()
        return self.answers

    def _expire(self) -> None:
        for batch, at, overdue in self._overdue():
            where = at if batch.positions is None else batch.positions[at]
            self._trouble = overdue.trouble or self._trouble
            self.heard = self.heard or overdue.status == THROTTLED
            self._fill(where, refusal_of(len(at), Status.of(overdue.status), overdue.detail))
            if overdue.retry_after_ms:
                self.waits_ms.update(dict.fromkeys(where.tolist(), overdue.retry_after_ms))

    def check_heard(self) -> None:
        """Raise why the call itself failed, if no broker said anything about any message."""
        if not self.heard:
            at = int(np.argmax(self.answers.status))
            detail, wait_ms = self.answers.details.get(at, ""), self.waits_ms.get(at, 0)
            raise error_of(int(self.answers.status[at]), None, detail, wait_ms, trouble=self._trouble)


def cuts_of(sizes: Int64, aim_bytes: int, most: int) -> list[slice]:
    """Return where to cut columns of messages of `sizes` bytes. Each part stays below `aim_bytes` and `most` messages;
    one message larger than that goes alone."""
    ends = np.cumsum(sizes)
    cuts: list[slice] = []
    start, count = 0, len(sizes)
    while start < count:
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + aim_bytes, side="right"))
        stop = min(max(stop, start + 1), start + most, count)
        cuts.append(slice(start, stop))
        start = stop
    return cuts


def refusal_of(count: int, status: Status, detail: str) -> Answers:
    """Return `count` answers that say the same."""
    answers = Answers.blank(count, status)
    answers.details = dict.fromkeys(range(count), detail)
    return answers


_SINCE = Status.EXISTS, Status.LEASED, Status.DEAD, Status.FORBIDDEN, Status.NOT_FOUND, Status.FENCED
_CHANGED_SINCE = tuple(status.code for status in _SINCE)
"""Answers that depend on what is there now: another message, another lease, a right, the topic."""
_LEAVING = (Operation.PUT, Operation.MOVE, Operation.RELEASE, Operation.BURY, Operation.REVIVE)
"""Operations that leave a message, with which others go on."""


def judge(
    batch: RequestBatch, answers: Answers, retry_after_ms: int = 0
) -> tuple[Indexes | None, Answers, list[RequestBatch]]:
    """Return (indexes, final answers there, batches to go again); None: all answers are final.

    An unsure batch is settled here. A put's DUPLICATE of its own birth was the put; an ack's NOT_FOUND was the ack. A
    cancel's or purge's NOT_FOUND stays UNKNOWN unless the id is remembered. A put, move, release, bury or revive is
    UNKNOWN if its repeat is refused for what may have changed since. The first one may have been done, and others gone
    on with the message.
    """
    _spread_detail(answers)
    operation = batch.operation
    status = answers.status.copy()
    stored = _is(operation, Operation.PUT) & (status == DUPLICATE) & (answers.repeat != 0)
    status[stored] = OK
    answers.repeat = np.where(stored, np.uint8(STORED_BEFORE), answers.repeat)
    if batch.unsure:
        missing = status == NOT_FOUND
        status[missing & _is(operation, Operation.ACK)] = OK
        gone = missing & (_is(operation, Operation.CANCEL) | _is(operation, Operation.PURGE)) & (answers.settled == 0)
        late = (status == Status.INVALID.code) & _may_have_been_in_time(batch)
        leaves = np.isin(operation, [one.value for one in _LEAVING])
        refused = leaves & np.isin(status, _CHANGED_SINCE)
        for where, why in (
            (gone, "it is gone: this call did it, or it was delivered first"),
            (late, "repeated too late for its expiry: it was never stored, or delivered meanwhile"),
        ):
            answers.details.update(dict.fromkeys(np.flatnonzero(where).tolist(), why))
        for at in np.flatnonzero(refused).tolist():
            told = answers.details.get(at) or Status.of(int(status[at]))
            answers.details[at] = f"the answer was lost, and then the repeat was refused: {told}"
        status[gone | late | refused] = UNKNOWN
    again = []
    for code in (THROTTLED, UNAVAILABLE, UNKNOWN):
        where = np.flatnonzero(answers.status == code)
        if len(where):
            part = batch.take(where, unsure=code == UNKNOWN)
            verdict = code if code == THROTTLED else UNAVAILABLE
            detail = answers.details.get(int(where[0]), "")
            part.verdict = MessageAnswer(verdict, detail=detail, retry_after_ms=retry_after_ms)
            again.append(part)
    final = replace(answers, status=status)
    if not again:
        return None, final, again
    done = np.flatnonzero(~np.isin(answers.status, (THROTTLED, UNAVAILABLE, UNKNOWN)))
    return done, final.take(done), again


def _may_have_been_in_time(batch: RequestBatch) -> Bools | bool:
    """Return which puts with an expiry an earlier attempt may have stored. The expiry need not have been over then, and
    a due time may count from the broker's now at each attempt. The refusal of a later one proves nothing."""
    expires_ms = batch.columns.get("expires_ms")
    if batch.operation is not Operation.PUT or expires_ms is None:
        return False
    flags, due_ms = batch.columns["flags"], batch.columns["time_ms"]
    alike = ((flags & PutFlag.IN) != 0) == ((flags & PutFlag.EXPIRES_IN) != 0)
    return np.asarray((expires_ms != 0) & ~(alike & (expires_ms <= due_ms)), dtype=np.bool_)


def _is(operation: Operation | UInt8, wanted: Operation) -> Bools | bool:
    if isinstance(operation, Operation):
        return operation is wanted
    return np.asarray(operation == wanted.value, dtype=np.bool_)


def _spread_detail(answers: Answers) -> None:
    """Repeat the sentence for a whole frame, which brokers send with its first message alone."""
    if list(answers.details) == [0] and len(answers) > 1 and (answers.status == answers.status[0]).all():
        answers.details = dict.fromkeys(range(len(answers)), answers.details[0])


class RequestQueue:
    """Batches on their way. `work`: set while something waits to be sent. `build`: makes a batch of single calls.
    `trouble`: says why nothing can be sent."""

    def __init__(self, build: Build, clock: Clock, random: Randomness, trouble: Callable[[], Unavailable]) -> None:
        self._build = build
        self.clock = clock
        self._random = random
        self.trouble = trouble
        self._waiting: deque[RequestBatch] = deque()
        self.forming: deque[tuple[Any, SingleCall, int]] = deque()
        """Single calls that gather: (values, caller, bytes)."""
        self.outstanding: dict[int, RequestBatch] = {}
        """Batches sent and not answered by request number, the oldest first."""
        self._resting: dict[asyncio.TimerHandle, RequestBatch] = {}
        self._request = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.work = asyncio.Event()
        self.outstanding_bytes = 0

    @property
    def waiting(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._waiting or self.forming)

    @property
    def busy(self) -> bool:
        """Whether anything is on its way, or rests before it goes again."""
        return bool(self.outstanding or self._waiting or self.forming or self._resting)

    def can_go(self, form: bool) -> bool:
        """Whether `next(form)` would find something."""
        return bool(self._waiting or (form and self.forming))

    async def single(self, entry: Any, nbytes: int, timeout_ms: float) -> MessageAnswer:
        """Send one message's call together with others. The answer says what became of it; nothing is raised."""
        loop = asyncio.get_running_loop()
        call = SingleCall(loop.create_future(), self.clock.monotonic_ms() + timeout_ms)
        timer = loop.call_later(timeout_ms / 1000.0, self._expire, call)
        self.forming.append((entry, call, nbytes))
        self._wake()
        try:
            return await call.future
        finally:
            timer.cancel()
            while self.forming and self.forming[0][1].future.done():  # given up while nothing could be sent
                self.forming.popleft()
                self._check_idle()

    def _expire(self, call: SingleCall) -> None:
        if not call.future.done():
            batch = call.batch
            answer = _explained(NOT_SENT, self.trouble) if batch is None else batch.overdue(self.trouble)
            call.future.set_result(answer)

    def forget_unwanted(self) -> None:
        """Forget all calls that were given up. Owners ask for it while nothing can be sent, or an outage would gather
        every call that was made during it."""
        self.forming = deque(entry for entry in self.forming if not entry[1].future.done())
        self._waiting = deque(batch for batch in self._waiting if (at := batch.sink.wants(batch)) is None or len(at))
        self._check_idle()

    def add(self, batch: RequestBatch) -> None:
        """Queue a new batch."""
        batch.sink.adopt(batch)
        self._waiting.append(batch)
        self._wake()

    def next(self, form: bool = True) -> tuple[int, RequestBatch] | None:
        """Return the next batch to send, and its request number; None if nothing waits. `form`: gathered single calls
        may go, too."""
        batch = self._next_waiting() if self._waiting else None
        if batch is None and form and self.forming:
            batch = self._formed()
        if batch is None:
            self._check_idle()
            return None
        self._request += 1
        batch.outstanding, batch.sent_ms = True, self.clock.monotonic_ms()
        batch.tries += 1
        self.outstanding[self._request] = batch
        self.outstanding_bytes += batch.nbytes
        return self._request, batch

    def _next_waiting(self) -> RequestBatch | None:
        while self._waiting:
            batch = self._waiting.popleft()
            wanted = batch.sink.wants(batch)
            if wanted is None:
                return batch
            if len(wanted):
                return batch.take(wanted)
        return None

    def _formed(self) -> RequestBatch | None:
        entries: list[Any] = []
        calls: list[SingleCall] = []
        nbytes = 0
        while self.forming and len(entries) < FRAME_MESSAGES:
            entry, call, size = self.forming[0]
            if entries and nbytes + size > AIM_BYTES:
                break
            self.forming.popleft()
            if not call.future.done():
                entries.append(entry)
                calls.append(call)
                nbytes += size
        if not entries:
            return None
        columns, operation = self._build(entries)
        batch = RequestBatch(columns, operation, SingleCalls(calls), None, nbytes)
        for call in calls:
            call.batch = batch
        return batch

    def answer(self, request: int, answers: Answers, retry_after_ms: int = 0) -> RequestBatch | None:
        """Take the answer to `request`. Return its batch, or None if it is no longer outstanding. Raise Invalid if
        the answer does not fit the batch."""
        batch = self.outstanding.get(request)
        if batch is None:
            return None
        if len(answers) != len(batch):
            raise Invalid(f"the broker answered {len(answers)} messages of {len(batch)}")
        self._take_off(request)
        if not answers.status.any():
            batch.sink.answer(batch, None, answers)
        else:
            batch.took_ms = self.clock.monotonic_ms() - batch.sent_ms
            done, final, again = judge(batch, answers, retry_after_ms)
            if len(final):
                batch.sink.answer(batch, done, final)
            for part in again:
                self._rest(part, retry_after_ms)
        self._check_idle()
        return batch

    def refused(self, request: int, status: Status, why: str) -> None:
        """Take a definite refusal of batch `request` that no answer frame said. An unsure batch is UNKNOWN all the
        same."""
        batch = self.outstanding.get(request)
        if batch is not None:
            self._take_off(request)
            status = Status.UNKNOWN if batch.unsure else status
            batch.sink.answer(batch, None, refusal_of(len(batch), status, why))
            self._check_idle()

    def back(self, request: int, *, sent: bool) -> None:
        """Send batch `request` again. It has no answer, and is unsure if it was `sent`."""
        batch = self.outstanding.get(request)
        if batch is not None:
            self._take_off(request)
            batch.unsure = batch.unsure or sent
            if sent:
                self._waiting.appendleft(batch)
                self._wake()
            else:
                self._rest(batch, 0)

    def broke(self, *, sent: bool = True) -> None:
        """Send all outstanding batches again, because the connection broke. `sent`: they may have arrived."""
        for request in reversed(list(self.outstanding)):
            self.back(request, sent=sent)

    def refuse_all(self, status: Status, why: str) -> None:
        """Refuse all batches: no broker can be talked to at all."""
        for handle, batch in self._resting.items():
            handle.cancel()
            self._waiting.append(batch)
        self._resting.clear()
        while self.next() is not None:
            pass
        self.refuse_outstanding(status, why)

    def refuse_outstanding(self, status: Status, why: str) -> None:
        """Refuse all batches that were sent."""
        for request in list(self.outstanding):
            self.refused(request, status, why)

    def _take_off(self, request: int) -> None:
        batch = self.outstanding.pop(request)
        batch.outstanding = False
        self.outstanding_bytes -= batch.nbytes

    def _rest(self, batch: RequestBatch, retry_after_ms: int) -> None:
        """Wait before the batch goes again: as long as the broker asked, or longer with each try; jittered."""
        backoff_ms = min(AGAIN_CAP_MS, AGAIN_FIRST_MS * 2.0 ** min(batch.tries, 10))
        jitter = self._random.random()
        self._rest_for(
            batch, retry_after_ms * (1.0 + 0.2 * jitter) if retry_after_ms else backoff_ms * (0.5 + jitter / 2)
        )

    def _rest_for(self, batch: RequestBatch, delay_ms: float) -> None:
        """Let the batch go again after `delay_ms`, unless there is no time for an answer: what is certain now would
        become UNKNOWN."""

        def ready() -> None:
            del self._resting[handle]
            left_ms = batch.sink.gives_up_ms(batch) - self.clock.monotonic_ms()
            if left_ms < batch.took_ms and not batch.unsure:
                self._rest_for(batch, max(left_ms, AGAIN_FIRST_MS))
                return
            self._waiting.append(batch)
            self._wake()

        handle = asyncio.get_running_loop().call_later(delay_ms / 1000.0, ready)
        self._resting[handle] = batch
        self._idle.clear()

    def _wake(self) -> None:
        self._idle.clear()
        self.work.set()

    def _check_idle(self) -> None:
        if not self.busy:
            self._idle.set()

    async def idle(self) -> None:
        """Return once nothing is on its way."""
        await self._idle.wait()

    def drop(self) -> None:
        """Give everything up. Callers that still wait get what is known."""
        for handle in self._resting:
            handle.cancel()
        batches = [*self.outstanding.values(), *self._waiting, *self._resting.values()]
        while (formed := self._formed()) is not None:
            batches.append(formed)
        self.outstanding.clear()
        self._waiting.clear()
        self._resting.clear()
        for batch in batches:
            wanted = batch.sink.wants(batch)
            count = len(batch) if wanted is None else len(wanted)
            if count:
                overdue = batch.overdue(lambda: Unavailable("it was closed before it could be sent"))
                batch.sink.answer(batch, wanted, refusal_of(count, Status.of(overdue.status), overdue.detail))
        self.outstanding_bytes = 0
        self.work.clear()
        self._idle.set()


async def wait_until_set(event: asyncio.Event, within_ms: float) -> None:
    """Wait until `event` is set. After `within_ms` it is set here."""
    timer = asyncio.get_running_loop().call_later(within_ms / 1000.0, event.set)
    try:
        await event.wait()
    finally:
        timer.cancel()


class QueueRunner(ABC):
    """The owner of a queue. It sends its batches in a task of its own, `carry`. `name`: of that task. `about`: the
    subject of the log line if it fails."""

    def __init__(self, queue: RequestQueue, name: str, about: str) -> None:
        self.queue = queue
        self._name, self._about = name, about
        self._task: asyncio.Task[None] | None = None
        self._under_way: set[asyncio.Task[None]] = set()
        """Calls that `carry` has begun."""

    @abstractmethod
    async def carry(self) -> None:
        """Send the queue's batches, for ever."""

    def start(self) -> None:
        """Run the queue from now on, in a task that only `stop` ends."""
        if self._task is None:
            self._task = keep(self._run(), self._name)

    async def _run(self) -> None:
        try:
            await self.carry()
        except Exception as error:  # a mistake of ours: callers must not wait for ever
            log.exception("%s failed", self._about)
            self._task = None
            self.queue.broke()
            self.queue.refuse_all(Status.UNAVAILABLE, f"the producer failed: {error!r}")

    @property
    def started(self) -> bool:
        """Whether it runs."""
        return self._task is not None

    async def stop(self, within_ms: float = 0.0) -> None:
        """End at once, whatever `within_ms` allows. Callers that still wait get what is known."""
        try:
            await end(*self._under_way, *([] if self._task is None else [self._task]))
        finally:
            self._task = None
            self.queue.drop()


CALLS_OUTSTANDING = 4
SPARE_MS = 50.0


class UnaryCalls(QueueRunner):
    """Sends each batch of a queue as a call of `method`, to whatever broker is there."""

    method: str

    def __init__(self, context: ClientContext, queue: RequestQueue, name: str, about: str) -> None:
        super().__init__(queue, name, about)
        self._context = context

    @abstractmethod
    def frame(self, batch: RequestBatch, timeout_ms: int) -> bytes:
        """Return the frame of a call. `timeout_ms`: how long it may take."""

    @abstractmethod
    def answers(self, data: bytes) -> tuple[Answers, int]:
        """Return the answers in a frame, and how long the broker asks to wait, in ms. Raise Invalid."""

    async def carry(self) -> None:
        queue = self.queue
        while True:
            await queue.work.wait()
            queue.work.clear()
            while len(self._under_way) < CALLS_OUTSTANDING and (taken := queue.next()) is not None:
                request, batch = taken
                batch.outstanding = False  # the channel says when it is sent
                task = asyncio.get_running_loop().create_task(self._call(request, batch))
                self._under_way.add(task)
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self.queue.work.set()

    async def _call(self, request: int, batch: RequestBatch) -> None:
        queue = self.queue
        try:
            data = await self._asked(batch)
        except (Invalid, NotFound, Forbidden) as bad:
            queue.refused(request, Status(bad.code), bad.reason)
            return
        except TimelineError as trouble:
            batch.verdict = MessageAnswer(UNAVAILABLE, detail=trouble.reason, trouble=trouble)
            queue.back(request, sent=False)
            return
        except Exception as error:  # a mistake of ours: callers must not wait until the deadline
            log.exception("%s failed", self._about)
            batch.unsure = batch.unsure or batch.outstanding
            queue.refused(request, Status.UNAVAILABLE, f"the call failed: {error!r}")
            return
        try:
            queue.answer(request, *self.answers(data))
        except Invalid as bad:
            log.error("a broker sent what cannot be read: %s", bad.reason)
            batch.unsure = True  # the broker may have done it
            queue.back(request, sent=False)

    async def _asked(self, batch: RequestBatch) -> bytes:
        context = self._context
        # End a little before the callers give up, so that they learn whether it was sent.
        spare_ms = min(SPARE_MS, (batch.sink.deadline_ms - context.clock.monotonic_ms()) / 4)
        deadline = Deadline(context.clock, batch.sink.deadline_ms - spare_ms)

        def frame(timeout_ms: int) -> bytes:
            batch.sent_ms = context.clock.monotonic_ms()
            return self.frame(batch, timeout_ms)

        return await context.channel.unary(self.method, frame, deadline, batch, writes=True)
