"""A line: parcels waiting to be sent, those aboard, and what becomes of them when an answer comes or a wire breaks.

Single calls gather in `forming` while what went before is being sent, so that a burst of them goes as one frame and a
lone one at once: no timer. Whoever owns the line takes parcels off it, sends them, and hands back the answers.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Any

from timeline.clock import Clock
from timeline.driver.produce.ids import Randomness
from timeline.driver.produce.request_batch import Answer, Build, Many, Parcel, Single, Singles, judge
from timeline.errors import Invalid
from timeline.model import Answers, Status
from timeline.wire.frames import AIM_BYTES

FORMING_MESSAGES = 10_000
AGAIN_FIRST_MS = 20.0
AGAIN_CAP_MS = 1_000.0


class Line:
    """Parcels on their way. `work` is set while something waits to be sent; `build` makes a parcel of single calls;
    `trouble` says why nothing can be sent."""

    def __init__(self, build: Build, clock: Clock, random: Randomness, trouble: Callable[[], str]) -> None:
        self._build = build
        self._clock = clock
        self._random = random
        self._trouble = trouble
        self._waiting: deque[Parcel] = deque()
        self._forming: deque[tuple[Any, Single, int]] = deque()
        self._aboard: dict[int, Parcel] = {}
        self._resting: dict[asyncio.TimerHandle, Parcel] = {}
        self._request = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.work = asyncio.Event()
        self.aboard_bytes = 0

    @property
    def waiting(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._waiting or self._forming)

    @property
    def resting(self) -> bool:
        """Whether something was refused for the moment, and goes again by and by."""
        return bool(self._resting)

    def can_go(self, form: bool) -> bool:
        """Whether `next` would find something; single calls that gathered count when they may `form` a parcel."""
        return bool(self._waiting or (form and self._forming))

    @property
    def forming(self) -> int:
        """Single calls that gather."""
        return len(self._forming)

    @property
    def aboard(self) -> int:
        """Parcels sent and not answered."""
        return len(self._aboard)

    def carried(self, request: int) -> Parcel | None:
        """What went as `request` and is not answered."""
        return self._aboard.get(request)

    @property
    def oldest_sent_ms(self) -> float | None:
        """When the oldest parcel aboard was sent."""
        return next(iter(self._aboard.values())).sent_ms if self._aboard else None

    @property
    def newest_sent_ms(self) -> float:
        """When the newest parcel aboard was sent; long ago where none is."""
        return next(reversed(self._aboard.values())).sent_ms if self._aboard else -math.inf

    async def single(self, entry: Any, nbytes: int, timeout_ms: float) -> Answer:
        """Sends one message's call with whatever others form with it. Never raises for its fate: the answer says it."""
        loop = asyncio.get_running_loop()
        single = Single(loop.create_future(), self._clock.monotonic_ms() + timeout_ms)
        timer = loop.call_later(timeout_ms / 1000.0, self._expire, single)
        self._forming.append((entry, single, nbytes))
        self._wake()
        try:
            return await single.future
        finally:
            timer.cancel()
            self._thin_out()

    def _thin_out(self) -> None:
        """Single calls whose callers gave up while nothing could be sent leave nothing behind."""
        if self._forming and self._forming[0][1].future.done():
            while self._forming and self._forming[0][1].future.done():
                self._forming.popleft()
            self._check_idle()

    def forget_unwanted(self) -> None:
        """Forgets all that nobody waits for any more. Whoever owns the line says so while nothing can be sent, or an
        outage would gather what was asked for during all of it."""
        self._forming = deque(entry for entry in self._forming if not entry[1].future.done())
        parcels, self._waiting = self._waiting, deque()
        for parcel in parcels:
            wanted = parcel.sink.wants(parcel)
            if wanted is None or len(wanted):
                self._waiting.append(parcel)
            else:
                _forget(parcel)
        self._check_idle()

    def _expire(self, single: Single) -> None:
        single.expire(self._trouble())

    def add(self, parcel: Parcel) -> None:
        """Queues a parcel."""
        parcel.sink.adopt(parcel)
        self._waiting.append(parcel)
        self._wake()

    def next(self, form: bool = True) -> tuple[int, Parcel] | None:
        """The next parcel to send, now aboard, and its request number; None when nothing waits. `form`: single calls
        that gathered may go, too."""
        parcel = self._next_waiting() or (self._formed() if form else None)
        if parcel is None:
            self._check_idle()
            return None
        self._request += 1
        parcel.aboard, parcel.sent_ms = True, self._clock.monotonic_ms()
        parcel.tries += 1
        self._aboard[self._request] = parcel
        self.aboard_bytes += parcel.nbytes
        return self._request, parcel

    def _next_waiting(self) -> Parcel | None:
        while self._waiting:
            parcel = self._waiting.popleft()
            wanted = parcel.sink.wants(parcel)
            if wanted is None:
                return parcel
            _forget(parcel)
            if len(wanted):
                part = parcel.take(wanted, parcel.unsure)
                part.sink.adopt(part)
                return part
        return None

    def _formed(self) -> Parcel | None:
        entries: list[Any] = []
        singles: list[Single] = []
        nbytes = 0
        while self._forming and len(entries) < FORMING_MESSAGES:
            entry, single, size = self._forming[0]
            if entries and nbytes + size > AIM_BYTES:
                break
            self._forming.popleft()
            if not single.future.done():
                entries.append(entry)
                singles.append(single)
                nbytes += size
        if not entries:
            return None
        columns, operation, size = self._build(entries)
        parcel = Parcel(columns, operation, Singles(singles), None, size)
        parcel.sink.adopt(parcel)
        return parcel

    def answer(self, request: int, answers: Answers, retry_after_ms: int = 0) -> Parcel | None:
        """The peer answered `request`; answers what the parcel was, None when it is no longer aboard. Raises Invalid
        when the answer does not fit the parcel."""
        parcel = self._aboard.get(request)
        if parcel is None:
            return None
        if len(answers) != len(parcel):
            raise Invalid(f"the broker answered {len(answers)} messages of {len(parcel)}")
        self._unboard(request)
        judged = judge(parcel, answers)
        for part in judged.again:
            part.retry_after_ms = retry_after_ms
            part.sink.adopt(part)
        if len(judged.final):
            parcel.sink.answer(parcel, judged.done, judged.final)
        _forget(parcel)
        for part in judged.again:
            self._rest(part, retry_after_ms)
        self._check_idle()
        return parcel

    def refused(self, request: int, status: Answers) -> None:
        """A definite refusal of the whole parcel `request`, though no answer frame said it. What an earlier sending may
        have done is UNKNOWN all the same."""
        parcel = self._aboard.get(request)
        if parcel is not None:
            if parcel.unsure:
                status = refusal_of(len(parcel), Status.UNKNOWN, status.details.get(0, ""))
            self._unboard(request)
            parcel.sink.answer(parcel, None, status)
            _forget(parcel)
            self._check_idle()

    def back(self, request: int, *, sent: bool, retry_after_ms: int = 0) -> None:
        """`request` has no answer: it goes again, unsure when it was `sent`."""
        parcel = self._aboard.get(request)
        if parcel is not None:
            self._unboard(request)
            parcel.unsure = parcel.unsure or sent
            if sent and not retry_after_ms:
                self._waiting.appendleft(parcel)
                self._wake()
            else:
                self._rest(parcel, retry_after_ms)

    def broke(self, *, sent: bool = True) -> None:
        """The wire broke: all that was aboard goes again, unsure when it may have arrived."""
        for request in reversed(list(self._aboard)):
            self.back(request, sent=sent)

    def refuse_all(self, status: Status, detail: str) -> None:
        """A definite refusal of all that is aboard, waits or rests: the broker cannot be talked to at all."""
        for handle, parcel in self._resting.items():
            handle.cancel()
            self._waiting.append(parcel)
        self._resting.clear()
        while self.next() is not None:
            pass
        self.refuse_aboard(status, detail)

    def refuse_aboard(self, status: Status, detail: str) -> None:
        """A definite refusal of all that is aboard."""
        for request, parcel in list(self._aboard.items()):
            self.refused(request, refusal_of(len(parcel), status, detail))

    def _unboard(self, request: int) -> None:
        parcel = self._aboard.pop(request)
        parcel.aboard = False
        self.aboard_bytes -= parcel.nbytes

    def _rest(self, parcel: Parcel, retry_after_ms: int) -> None:
        """Waits before the parcel goes again: as long as the broker asked, or longer with each try; jittered."""
        backoff_ms = min(AGAIN_CAP_MS, AGAIN_FIRST_MS * 2.0 ** min(parcel.tries, 10))
        jitter = self._random.random()
        delay_ms = retry_after_ms * (1.0 + 0.2 * jitter) if retry_after_ms else backoff_ms * (0.5 + jitter / 2)
        loop = asyncio.get_running_loop()

        def ready() -> None:
            del self._resting[handle]
            self._waiting.append(parcel)
            self._wake()

        handle = loop.call_later(delay_ms / 1000.0, ready)
        self._resting[handle] = parcel
        self._idle.clear()

    def _wake(self) -> None:
        self._idle.clear()
        self.work.set()

    def _check_idle(self) -> None:
        if not (self._aboard or self._waiting or self._forming or self._resting):
            self._idle.set()

    async def idle(self) -> None:
        """Returns when nothing is on its way."""
        await self._idle.wait()

    def drop(self) -> None:
        """Gives everything up: who still waits is told what is known."""
        for handle in self._resting:
            handle.cancel()
        parcels = [*self._aboard.values(), *self._waiting, *self._resting.values()]
        while (formed := self._formed()) is not None:
            parcels.append(formed)
        self._aboard.clear()
        self._waiting.clear()
        self._resting.clear()
        for parcel in parcels:
            wanted = parcel.sink.wants(parcel)
            count = len(parcel) if wanted is None else len(wanted)
            if count:
                overdue = parcel.overdue()
                why = overdue.detail or "it was closed before it could be sent"
                answers = refusal_of(count, Status.of(overdue.status), why)
                parcel.sink.answer(parcel, wanted, answers)
            _forget(parcel)
        self.aboard_bytes = 0
        self.work.clear()
        self._idle.set()


def refusal_of(count: int, status: Status, detail: str) -> Answers:
    """`count` answers that say the same."""
    answers = Answers.blank(count, status)
    answers.details = dict.fromkeys(range(count), detail)
    return answers


def _forget(parcel: Parcel) -> None:
    if isinstance(parcel.sink, Many):
        parcel.sink.forget(parcel)
