"""Fairness: who is next where several peers want the same, and how much of a bound each may take.

Queues use start-time fair queueing (Goyal, Vin, Cheng, 1996) over hosts, and over the connections of each host. The
peer that was served least goes first. Unused shares are there for others, and a peer that asks for little waits in no
other peer's queue.

One event loop serves all, so everybody waits for the work on one frame. `LoopScheduler` works on frames for a moment in
each turn of the loop. Other ready work goes between, timers above all. A frame that waits stays in its stream, which is
not read meanwhile, and flow control holds its sender back. Nobody is held up while nobody waits."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from heapq import heappop, heappush
from typing import Generic, TypeVar

from timeline.clock import Clock

T = TypeVar("T")
RESERVED = 16
"""One part in this many of a bound is kept for peers of which nothing waits yet."""
MANY_FLOWS = 4_096


def host_of(peer: str) -> str:
    """Return the host of a peer (scheme:host:port, or any name)."""
    return peer.rpartition(":")[0] or peer


class _Flows:
    """Names that wait, with what each was served so far."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []
        self._served: dict[str, float] = {}
        self._now = 0.0
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._heap)

    def enter(self, name: str) -> None:
        """Let `name` wait. It stands behind what it was served, but never behind its past idleness."""
        self._arrivals += 1
        heappush(self._heap, (max(self._now, self._served.get(name, 0.0)), self._arrivals, name))

    def first(self) -> str:
        """Return who is next."""
        return self._heap[0][2]

    def serve(self, cost: float, more: bool) -> None:
        """Serve the first at `cost`. `more`: it waits on."""
        self._now, _, name = heappop(self._heap)
        self._served[name] = max(self._served.get(name, 0.0), self._now) + cost
        if more:
            self.enter(name)
        elif len(self._served) > MANY_FLOWS + 4 * len(self._heap):
            self._served = {name: served for name, served in self._served.items() if served > self._now}

    def charge(self, name: str, cost: float) -> None:
        """Charge `name` for service out of its turn, or beyond the estimate."""
        self._served[name] = max(self._served.get(name, 0.0), self._now) + cost


class FairQueue(Generic[T]):
    """A queue per peer, in order. The peer that was served least goes first. Costs have any unit."""

    def __init__(self) -> None:
        self._hosts = _Flows()
        self._peers: dict[str, _Flows] = {}
        self._waiting: dict[str, deque[tuple[T, float]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, peer: str, item: T, cost: float) -> None:
        """Add a request of `peer`. `cost` is charged when it is taken."""
        self._count += 1
        waiting = self._waiting.get(peer)
        if waiting is not None:
            waiting.append((item, cost))
            return
        self._waiting[peer] = deque(((item, cost),))
        host = host_of(peer)
        peers = self._peers.get(host)
        if peers is None:
            peers = self._peers[host] = _Flows()
        if not len(peers):
            self._hosts.enter(host)
        peers.enter(peer)

    def first(self) -> T:
        """Return what `pop` would take."""
        return self._waiting[self._peers[self._hosts.first()].first()][0][0]

    def pop(self) -> T:
        """Take the next one."""
        self._count -= 1
        peers = self._peers[self._hosts.first()]
        peer = peers.first()
        waiting = self._waiting[peer]
        item, cost = waiting.popleft()
        if not waiting:
            del self._waiting[peer]
        peers.serve(cost, bool(waiting))
        self._hosts.serve(cost, bool(len(peers)))
        if len(self._peers) > MANY_FLOWS + 4 * len(self._hosts):
            self._peers = {host: peers for host, peers in self._peers.items() if len(peers)}
        return item

    def charge(self, peer: str, cost: float) -> None:
        """Charge `peer` for a cost beside, or beyond the estimate."""
        host = host_of(peer)
        self._hosts.charge(host, cost)
        peers = self._peers.get(host)
        if peers is None:
            peers = self._peers[host] = _Flows()
        peers.charge(peer, cost)

    def forget(self) -> None:
        """Forget past service, since nothing waits."""
        if self._peers:
            self._hosts = _Flows()
            self._peers.clear()


class Quota:
    """A bound in messages and bytes, shared between hosts, and between the peers of each.

    A peer that has nothing there finds some room, however much others send. The last part of the bound is kept for such
    peers, and the last half of that for hosts that have nothing. If several fill it, none may have more of it than is
    left, nor may a host by any number of connections. One alone may have nearly all.
    """

    def __init__(self, messages: int, bytes_: int) -> None:
        self._most = (messages, bytes_)
        self._of: dict[str, list[int]] = {}
        self._of_host: dict[str, list[int]] = {}
        self.messages = self.bytes = 0

    def admits(self, peer: str, messages: int, bytes_: int) -> bool:
        """Return whether there is room for this much more of `peer`. Any size is admitted while nothing waits."""
        if not self.messages:
            return True
        shares = (self._of, peer, RESERVED), (self._of_host, host_of(peer), 2 * RESERVED)
        for at, (total, more) in enumerate(((self.messages, messages), (self.bytes, bytes_))):
            left = self._most[at] - total - more
            if left < 0:
                return False
            for of, name, part in shares:
                mine = of.get(name)
                if mine is not None and (left < self._most[at] // part or (len(of) > 1 and mine[at] + more > left)):
                    return False
        return True

    def add(self, peer: str, messages: int, bytes_: int) -> None:
        """Add what waits of `peer`."""
        for of, name in ((self._of, peer), (self._of_host, host_of(peer))):
            mine = of.setdefault(name, [0, 0])
            mine[0] += messages
            mine[1] += bytes_
        self.messages += messages
        self.bytes += bytes_

    def remove(self, peer: str, messages: int, bytes_: int) -> None:
        """Remove what waits of `peer`."""
        for of, name in ((self._of, peer), (self._of_host, host_of(peer))):
            mine = of[name]
            mine[0] -= messages
            mine[1] -= bytes_
            if not mine[0]:
                del of[name]
        self.messages -= messages
        self.bytes -= bytes_


class RecentPeers:
    """Whether several peers were there lately. `monotonic_ms` tells the time."""

    def __init__(self, monotonic_ms: Callable[[], float], lately_ms: int) -> None:
        self._monotonic_ms, self._lately_ms = monotonic_ms, lately_ms
        self._last = ""
        self._last_ms = self._other_ms = -math.inf
        """When the last peer was seen, and when any other one was."""

    def seen(self, peer: str) -> None:
        """Note that `peer` is here now."""
        if peer != self._last:
            self._last, self._other_ms = peer, self._last_ms
        self._last_ms = self._monotonic_ms()

    @property
    def several(self) -> bool:
        """Whether there was more than one."""
        return self._other_ms >= self._monotonic_ms() - self._lately_ms


BUDGET_MS = 0.5
"""Work goes on for this long in one turn of the event loop, or for one piece that takes longer."""
TURNS_BETWEEN = 16
IDLE_MS = 0.04
"""After a turn whose budget was used up, nobody in line has the next turns of the loop. That ends after
`TURNS_BETWEEN`, or after one in which there was no other work. A due message needs several turns from its timer to its
frame, and would wait for the whole budget in each."""
MOST_AT_ONCE = 64
"""Most pieces that begin in one turn. It is one after a turn that took longer than the budget, and doubles after each
other turn."""
FRAME_MS = 0.05
MIB_MS = 1.0
"""Estimated cost of a frame, and of each MiB in it."""


class LoopScheduler:
    """The event loop's time for work, shared between peers. `monotonic_ms` measures what work costs."""

    def __init__(self, monotonic_ms: Callable[[], float]) -> None:
        self._monotonic_ms = monotonic_ms
        self._line: FairQueue[tuple[asyncio.Future[bool], float]] = FairQueue()
        """Each future gets whether it is the first in its turn."""
        self._spent_ms = self._worked_ms = 0.0
        """Of this turn's budget: what is given out, and what is used."""
        self._passed_ms = 0.0
        """Work that went ahead of the line in this turn of the event loop."""
        self._scheduled = False
        self._number = self._between = 0
        self._at_once = 1
        self._last_ms = 0.0

    @property
    def waiting(self) -> int:
        """How many wait for a turn."""
        return len(self._line)

    async def take(self, peer: str, bytes_: int = 0, ahead: bool = False) -> bool:
        """Wait for a turn for work for `peer` on this many bytes. Return whether it went ahead of the line.

        Work that holds up no other begins at once. So does work `ahead` of the line, as far as it is thought to fit
        into the budget of one turn of the event loop.
        """
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
            # The first always goes. Those behind it wait again if the ones before took longer than estimated.
            if await turn or self._worked_ms < BUDGET_MS:
                return False

    @contextmanager
    def work(self, peer: str, ahead: bool = False, waits: bool = False) -> Iterator[None]:
        """Count the time of the block as work for `peer`.

        Work `ahead` of the line is not counted as time of those in line. Work that `waits` counts only if it ends in
        the turn of the loop in which it began. Otherwise it was not this loop's time alone.
        """
        if waits:
            self._schedule()
        number, began_ms = self._number, self._monotonic_ms()
        try:
            yield
        finally:
            if number == self._number:
                took_ms = self._monotonic_ms() - began_ms
                self._worked_ms += 0.0 if ahead else took_ms
                self._spend(took_ms)
                if self._line:
                    self._line.charge(peer, took_ms)

    def _spend(self, ms: float) -> None:
        """Count time. A little is counted through several turns, because a callback in each would cost more."""
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
        """Begin a new turn of the event loop: let work begin for which there is time in it."""
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


AT_ONCE = 100
"""How many are looked at between two pauses, about: 0.1 to 0.3 ms."""
PAUSE_S = 0.001
"""Longer than a turn of the event loop: a message takes several turns, and work in each would make it late."""
SHARE = 0.05
"""Share of its time for each look at the store. After one that took 10 ms, the next begins 190 ms later."""


async def rest(took_ms: float, share: float = SHARE) -> None:
    """Return when a look that took `took_ms` has had no more than its share of the time."""
    await asyncio.sleep(took_ms / 1000.0 * (1.0 / share - 1.0))


class SharedPace:
    """The pace of looks at the store, one after the other. Each rests first, until the one before has had no more than
    its share of the time. So it does after a look that failed."""

    def __init__(self, clock: Clock, share: float = SHARE) -> None:
        self._clock, self._share = clock, share
        self._rested_ms = 0.0

    @asynccontextmanager
    async def turn(self, round_trip_ms: float = 0.0) -> AsyncIterator[None]:
        """Rest, then look. `round_trip_ms`: the part of the look that only waits for the network."""
        await asyncio.sleep(max(0.0, self._rested_ms - self._clock.monotonic_ms()) / 1000.0)
        began_ms = self._clock.monotonic_ms()
        try:
            yield
        finally:
            now_ms = self._clock.monotonic_ms()
            self._rested_ms = now_ms + max(0.0, now_ms - began_ms - round_trip_ms) * (1.0 / self._share - 1.0)


class CooperativePace:
    """The pace of one look at all of something, so that it does not hold up what is due."""

    def __init__(self) -> None:
        self._done = 0

    def some(self, all_: Iterable[T]) -> Iterator[list[T]]:
        """Yield all that there is now, in parts to look at at once. After a pause some may be gone."""
        left = list(all_)
        return (left[start : start + AT_ONCE] for start in range(0, len(left), AT_ONCE))

    async def did(self, count: int) -> None:
        """Count `count` more, and pause if it is time."""
        self._done += count
        if self._done >= AT_ONCE:
            self._done = 0
            await self._pause()

    async def _pause(self) -> None:
        await asyncio.sleep(PAUSE_S)
