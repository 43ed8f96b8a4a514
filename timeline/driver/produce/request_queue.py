"""A queue: batches that wait, those sent and not answered, and what an answer or a broken wire makes of them.

Single calls gather in `forming` while what went before is being sent, so that a burst of them goes as one frame and a
lone one at once: no timer. Whoever owns the queue takes batches off it, sends them, and hands back the answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from timeline.clock import Clock
from timeline.driver.message import Randomness
from timeline.driver.produce.request_batch import (
    Build,
    JudgedAnswers,
    ManyAnswers,
    MessageAnswer,
    RequestBatch,
    SingleCall,
    SingleCalls,
    judge,
    refusal_of,
)
from timeline.driver.tasks import cancel, end, keep
from timeline.errors import Invalid, Unavailable
from timeline.model import Answers, Status
from timeline.wire.frames import AIM_BYTES

log = logging.getLogger("timeline.driver")

FORMING_MESSAGES = 10_000
AGAIN_FIRST_MS = 20.0
AGAIN_CAP_MS = 1_000.0


class RequestQueue:
    """Batches on their way. `work` is set while something waits to be sent; `build` makes a batch of single calls;
    `trouble` says why nothing can be sent."""

    def __init__(self, build: Build, clock: Clock, random: Randomness, trouble: Callable[[], Unavailable]) -> None:
        self._build = build
        self._clock = clock
        self._random = random
        self._trouble = trouble
        self._waiting: deque[RequestBatch] = deque()
        self.forming: deque[tuple[Any, SingleCall, int]] = deque()
        """Single calls that gather."""
        self.outstanding: dict[int, RequestBatch] = {}
        """Batches sent and not answered, by request number, the oldest first."""
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
    def resting(self) -> bool:
        """Whether something was refused for the moment, and goes again by and by."""
        return bool(self._resting)

    def can_go(self, form: bool) -> bool:
        """Whether `next` would find something; single calls that gathered count when they may `form` a batch."""
        return bool(self._waiting or (form and self.forming))

    def carried(self, request: int) -> RequestBatch | None:
        """What went as `request` and is not answered."""
        return self.outstanding.get(request)

    async def single(self, entry: Any, nbytes: int, timeout_ms: float) -> MessageAnswer:
        """Sends one message's call with whatever others form with it. Never raises for its fate: the answer says it."""
        loop = asyncio.get_running_loop()
        single = SingleCall(loop.create_future(), self._clock.monotonic_ms() + timeout_ms)
        timer = loop.call_later(timeout_ms / 1000.0, self._expire, single)
        self.forming.append((entry, single, nbytes))
        self._wake()
        try:
            return await single.future
        finally:
            timer.cancel()
            if self.forming and self.forming[0][1].future.done():
                self._thin_out()

    def _thin_out(self) -> None:
        """Single calls whose callers gave up while nothing could be sent leave nothing behind."""
        while self.forming and self.forming[0][1].future.done():
            self.forming.popleft()
        self._check_idle()

    def forget_unwanted(self) -> None:
        """Forgets all that nobody waits for any more. Whoever owns the queue says so while nothing can be sent, or an
        outage would gather what was asked for during all of it."""
        self.forming = deque(entry for entry in self.forming if not entry[1].future.done())
        batches, self._waiting = self._waiting, deque()
        for batch in batches:
            wanted = batch.sink.wants(batch)
            if wanted is None or len(wanted):
                self._waiting.append(batch)
            else:
                _forget(batch)
        self._check_idle()

    def _expire(self, single: SingleCall) -> None:
        single.expire(self._trouble())

    def add(self, batch: RequestBatch) -> None:
        """Queues a batch."""
        batch.sink.adopt(batch)
        self._waiting.append(batch)
        self._wake()

    def next(self, form: bool = True) -> tuple[int, RequestBatch] | None:
        """Return the next batch to send, and its request number; None when nothing waits. `form`: single calls that
        gathered may go, too."""
        batch = self._next_waiting() if self._waiting else None
        if batch is None and form and self.forming:
            batch = self._formed()
        if batch is None:
            self._check_idle()
            return None
        self._request += 1
        batch.outstanding, batch.sent_ms = True, self._clock.monotonic_ms()
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
            _forget(batch)
            if len(wanted):
                part = batch.take(wanted, batch.unsure)
                part.sink.adopt(part)
                return part
        return None

    def _formed(self) -> RequestBatch | None:
        entries: list[Any] = []
        singles: list[SingleCall] = []
        nbytes = 0
        while self.forming and len(entries) < FORMING_MESSAGES:
            entry, single, size = self.forming[0]
            if entries and nbytes + size > AIM_BYTES:
                break
            self.forming.popleft()
            if not single.future.done():
                entries.append(entry)
                singles.append(single)
                nbytes += size
        if not entries:
            return None
        columns, operation = self._build(entries)
        batch = RequestBatch(columns, operation, SingleCalls(singles), None, nbytes)
        for single in singles:
            single.batch = batch
        return batch

    def answer(self, request: int, answers: Answers, retry_after_ms: int = 0) -> RequestBatch | None:
        """Take the answer to `request`. Return its batch, or None when that is no longer outstanding. Raise Invalid
        when the answer does not fit the batch."""
        batch = self.outstanding.get(request)
        if batch is None:
            return None
        if len(answers) != len(batch):
            raise Invalid(f"the broker answered {len(answers)} messages of {len(batch)}")
        self._take_off(request)
        if not answers.status.any():
            batch.sink.answer(batch, None, answers)
        else:
            self._answer_judged(batch, judge(batch, answers), retry_after_ms)
        if isinstance(batch.sink, ManyAnswers):
            batch.sink.forget(batch)
        self._check_idle()
        return batch

    def _answer_judged(self, batch: RequestBatch, judged: JudgedAnswers, retry_after_ms: int) -> None:
        for part in judged.again:
            part.retry_after_ms = retry_after_ms
            part.sink.adopt(part)
        if len(judged.final):
            batch.sink.answer(batch, judged.done, judged.final)
        for part in judged.again:
            self._rest(part, retry_after_ms)

    def refused(self, request: int, status: Answers) -> None:
        """A definite refusal of the whole batch `request`, though no answer frame said it. What an earlier attempt may
        have done is UNKNOWN all the same."""
        batch = self.outstanding.get(request)
        if batch is not None:
            if batch.unsure:
                status = refusal_of(len(batch), Status.UNKNOWN, status.details.get(0, ""))
            self._take_off(request)
            batch.sink.answer(batch, None, status)
            _forget(batch)
            self._check_idle()

    def back(self, request: int, *, sent: bool, retry_after_ms: int = 0) -> None:
        """`request` has no answer: it goes again, unsure when it was `sent`."""
        batch = self.outstanding.get(request)
        if batch is not None:
            self._take_off(request)
            batch.unsure = batch.unsure or sent
            if sent and not retry_after_ms:
                self._waiting.appendleft(batch)
                self._wake()
            else:
                self._rest(batch, retry_after_ms)

    def broke(self, *, sent: bool = True) -> None:
        """The wire broke: all that was outstanding goes again, unsure when it may have arrived."""
        for request in reversed(list(self.outstanding)):
            self.back(request, sent=sent)

    def refuse_all(self, status: Status, detail: str) -> None:
        """A definite refusal of all that is outstanding, waits or rests: the broker cannot be talked to at all."""
        for handle, batch in self._resting.items():
            handle.cancel()
            self._waiting.append(batch)
        self._resting.clear()
        while self.next() is not None:
            pass
        self.refuse_outstanding(status, detail)

    def refuse_outstanding(self, status: Status, detail: str) -> None:
        """A definite refusal of all that is outstanding."""
        for request, batch in list(self.outstanding.items()):
            self.refused(request, refusal_of(len(batch), status, detail))

    def _take_off(self, request: int) -> None:
        batch = self.outstanding.pop(request)
        batch.outstanding = False
        self.outstanding_bytes -= batch.nbytes

    def _rest(self, batch: RequestBatch, retry_after_ms: int) -> None:
        """Waits before the batch goes again: as long as the broker asked, or longer with each try; jittered."""
        backoff_ms = min(AGAIN_CAP_MS, AGAIN_FIRST_MS * 2.0 ** min(batch.tries, 10))
        jitter = self._random.random()
        delay_ms = retry_after_ms * (1.0 + 0.2 * jitter) if retry_after_ms else backoff_ms * (0.5 + jitter / 2)
        loop = asyncio.get_running_loop()

        def ready() -> None:
            del self._resting[handle]
            self._waiting.append(batch)
            self._wake()

        handle = loop.call_later(delay_ms / 1000.0, ready)
        self._resting[handle] = batch
        self._idle.clear()

    def _wake(self) -> None:
        self._idle.clear()
        self.work.set()

    def _check_idle(self) -> None:
        if not (self.outstanding or self._waiting or self.forming or self._resting):
            self._idle.set()

    async def idle(self) -> None:
        """Returns when nothing is on its way."""
        await self._idle.wait()

    def drop(self) -> None:
        """Gives everything up: who still waits is told what is known."""
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
                overdue = batch.overdue()
                why = overdue.detail or "it was closed before it could be sent"
                answers = refusal_of(count, Status.of(overdue.status), why)
                batch.sink.answer(batch, wanted, answers)
            _forget(batch)
        self.outstanding_bytes = 0
        self.work.clear()
        self._idle.set()


class QueueRunner:
    """Who owns a queue: sends what it has in a task of its own, `carry`. `name`: of that task; `failing`: what the log
    says has failed then."""

    def __init__(self, queue: RequestQueue, name: str, failing: str) -> None:
        self.queue = queue
        self._name, self._failing = name, failing
        self._task: asyncio.Task[None] | None = None
        self._under_way: set[asyncio.Task[None]] = set()
        """Calls that `carry` has begun."""

    async def carry(self) -> None:
        """Send what the queue has, for ever."""
        raise AssertionError("each kind says how it sends")

    def start(self) -> None:
        """Run the queue from now on, in a task that nothing ends but `stop` and `cancel`."""
        if self._task is None:
            self._task = keep(self._run(), self._name)

    async def _run(self) -> None:
        try:
            await self.carry()
        except Exception as error:  # a mistake of ours: whoever calls must not wait for ever
            log.exception("%s failed", self._failing)
            self._task = None
            self.queue.broke()
            self.queue.refuse_all(Status.UNAVAILABLE, f"the producer failed: {error!r}")

    def cancel(self) -> None:
        """Have it end by itself: nobody can ask anything of it any more."""
        cancel(self._task, *self._under_way)

    async def stop(self) -> None:
        """End at once; who still waits is told what is known."""
        task, self._task = self._task, None
        await end(*self._under_way, *([] if task is None else [task]))
        self.queue.drop()


def _forget(batch: RequestBatch) -> None:
    if isinstance(batch.sink, ManyAnswers):
        batch.sink.forget(batch)
