"""Turns: whose frame the event loop works on next.

One loop serves all: what a frame costs it, everybody waits for, and so does what is due. So frames are worked on for a
moment only in each turn of the loop, that of the peer first that was served least; what else is ready, timers above
all, goes between, and so do some few frames that go ahead of the line. A frame that has to wait waits in its stream,
which is not read meanwhile: flow control holds the sender back. Where nobody waits, nobody is held up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from timeline.broker.fairness.fair_queue import FairQueue

BUDGET_MS = 0.5
"""Work goes on for so long in one turn of the event loop, or one piece of it does, if that takes longer."""
TURNS_BETWEEN = 16
IDLE_MS = 0.04
"""Where the budget was not enough, nobody in line has the next turns of the loop, up to so many or until one in which
nobody has anything to do: what is due needs several, from the timer to the frame on its way, and would wait for the
whole budget in each."""
MOST_AT_ONCE = 64
"""So many pieces are begun in one turn at most: one after a turn that took longer than the budget, twice as many after
each that did not."""
FRAME_MS = 0.05
MIB_MS = 1.0
"""What a frame is thought to cost before it is known: so much, and so much a MiB."""


class LoopScheduler:
    """The event loop's time for work, shared between peers. `monotonic_ms` measures what it costs."""

    def __init__(self, monotonic_ms: Callable[[], float]) -> None:
        self._monotonic_ms = monotonic_ms
        self._line: FairQueue[tuple[asyncio.Future[bool], float]] = FairQueue()
        """What is told of its turn: whether it is the first in it."""
        self._spent_ms = self._worked_ms = 0.0
        """Of this turn's budget: what is given out, and what is used."""
        self._passed_ms = 0.0
        """What went ahead of the line in this turn of the event loop."""
        self._scheduled = False
        self._number = self._between = 0
        self._at_once = 1
        self._last_ms = 0.0

    @property
    def waiting(self) -> int:
        """Who waits for a turn."""
        return len(self._line)

    async def take(self, peer: str, bytes_: int = 0, ahead: bool = False) -> bool:
        """Returns when work for `peer`, on so many bytes, may begin: at once where nobody is held up by it, or where it
        goes ahead of the line, which is then the answer. Of that there is no more in a turn of the event loop than is
        thought to fit into the budget of one."""
        cost_ms = FRAME_MS + MIB_MS * bytes_ / (1024 * 1024)
        if not self._line and self._time_for(cost_ms):
            self._spend(cost_ms)
            return False
        if ahead and self._passed_ms + cost_ms <= BUDGET_MS:
            self._passed_ms += cost_ms
            self._schedule()
            return True
        while True:
            turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self._line.push(peer, (turn, cost_ms), cost_ms)
            self._schedule()
            # The first goes whatever went ahead of it; behind it, whoever came before may have taken longer than was
            # thought.
            if await turn or self._worked_ms < BUDGET_MS:
                return False

    @contextmanager
    def work(self, peer: str, ahead: bool = False) -> Iterator[None]:
        """What is done meanwhile, without waiting, is done for `peer`. What went `ahead` of the line does not count as
        time that those in it took."""
        began_ms = self._monotonic_ms()
        try:
            yield
        finally:
            self._worked(peer, self._monotonic_ms() - began_ms, ahead)

    @contextmanager
    def call(self, peer: str) -> Iterator[None]:
        """The same for what may wait: then it was not, or not only, this loop's time, and does not count."""
        self._schedule()
        number, began_ms = self._number, self._monotonic_ms()
        try:
            yield
        finally:
            if number == self._number:
                self._worked(peer, self._monotonic_ms() - began_ms)

    def _worked(self, peer: str, took_ms: float, ahead: bool = False) -> None:
        if not ahead:
            self._worked_ms += took_ms
        self._spend(took_ms)
        if self._line:
            self._line.charge(peer, took_ms)

    def _spend(self, ms: float) -> None:
        """Little is counted on through several turns of the loop: a callback in each would cost it more."""
        self._spent_ms += ms
        if self._spent_ms >= BUDGET_MS / 2:
            self._schedule()

    def _time_for(self, cost_ms: float) -> bool:
        return not self._spent_ms or self._spent_ms + cost_ms <= BUDGET_MS

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """A new turn of the event loop: lets those work for whom there is time in it."""
        now_ms = self._monotonic_ms()
        idle, self._last_ms = now_ms - self._last_ms < IDLE_MS, now_ms
        self._scheduled = False
        self._passed_ms = 0.0
        self._number += 1
        if self._between:
            self._between = 0 if idle else self._between - 1
        elif self._line:
            self._between = TURNS_BETWEEN
        if self._between:
            self._schedule()
            return
        self._at_once = 1 if self._worked_ms >= BUDGET_MS else min(MOST_AT_ONCE, 2 * self._at_once)
        self._spent_ms = self._worked_ms = 0.0
        if not self._line:
            self._line.forget()
            return
        let = 0
        while self._line and let < self._at_once and self._time_for(self._line.first()[1]):
            turn, cost_ms = self._line.pop()
            if not turn.done():  # its stream may be over
                turn.set_result(not let)
                self._spent_ms += cost_ms
                let += 1
        self._schedule()
