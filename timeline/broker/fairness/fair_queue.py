"""Shares: whose turn it is where several peers want the same, and how much of a bounded room each may take.

Start-time fair queueing (Goyal, Vin, Cheng, 1996) over hosts, and over the connections of each: whoever was served
least goes first; what one does not use is there for the others, and one that asks for little waits in nobody's queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")
RESERVED = 16
"""One part in so many of a bound is kept for peers of which nothing waits yet."""
MANY_FLOWS = 4_096


def host_of(peer: str) -> str:
    """The host of a peer (scheme:host:port, or any name)."""
    return peer.rpartition(":")[0] or peer


class _Flows:
    """Names that wait, each with what it was served so far."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []
        self._served: dict[str, float] = {}
        self._now = 0.0
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._heap)

    def enter(self, name: str) -> None:
        """`name`, which did not wait, waits from now on: behind what it was served, but never for its past idleness."""
        self._arrivals += 1
        heappush(self._heap, (max(self._now, self._served.get(name, 0.0)), self._arrivals, name))

    def first(self) -> str:
        """Who is next."""
        return self._heap[0][2]

    def serve(self, cost: float, more: bool) -> None:
        """The first was served `cost`; `more`: it waits on."""
        self._now, _, name = heappop(self._heap)
        self._served[name] = max(self._served.get(name, 0.0), self._now) + cost
        if more:
            self.enter(name)
        elif len(self._served) > MANY_FLOWS + 4 * len(self._heap):
            self._served = {name: served for name, served in self._served.items() if served > self._now}

    def charge(self, name: str, cost: float) -> None:
        """`name` was served `cost` out of its turn, or more than was thought."""
        self._served[name] = max(self._served.get(name, 0.0), self._now) + cost


class FairQueue(Generic[T]):
    """What waits, each peer's in order, between peers the one first that was served least. Costs have any unit."""

    def __init__(self) -> None:
        self._hosts = _Flows()
        self._peers: dict[str, _Flows] = {}
        self._waiting: dict[str, deque[tuple[T, float]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, peer: str, item: T, cost: float) -> None:
        """Adds what `peer` asks for, and will be charged when it is taken."""
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
        """What `pop` would take."""
        return self._waiting[self._peers[self._hosts.first()].first()][0][0]

    def pop(self) -> T:
        """Takes what is next."""
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
        """`peer` cost so much beside, or more than was thought."""
        host = host_of(peer)
        self._hosts.charge(host, cost)
        peers = self._peers.get(host)
        if peers is None:
            peers = self._peers[host] = _Flows()
        peers.charge(peer, cost)

    def forget(self) -> None:
        """Nothing waits: what anybody was served until now is no reason to be behind."""
        if self._peers:
            self._hosts = _Flows()
            self._peers.clear()


class Quota:
    """How much of something bounded waits, in all, of each host and of each of its peers, in messages and bytes.

    A peer that has nothing there finds some room, however much others send: the last part of it is kept for such, and
    the last half of that for hosts that have nothing. Where several fill it, none may have more of it than is left, no
    host by whatever many connections either. One alone may have nearly all.
    """

    def __init__(self, messages: int, bytes_: int) -> None:
        self._most = (messages, bytes_)
        self._of: dict[str, list[int]] = {}
        self._of_host: dict[str, list[int]] = {}
        self.messages = self.bytes = 0

    def admits(self, peer: str, messages: int, bytes_: int) -> bool:
        """Whether there is room for so much more of `peer`. What is large by itself is let in where nothing waits."""
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
        """So much more of `peer` waits."""
        for of, name in ((self._of, peer), (self._of_host, host_of(peer))):
            mine = of.setdefault(name, [0, 0])
            mine[0] += messages
            mine[1] += bytes_
        self.messages += messages
        self.bytes += bytes_

    def remove(self, peer: str, messages: int, bytes_: int) -> None:
        """So much of `peer` waits no more."""
        for of, name in ((self._of, peer), (self._of_host, host_of(peer))):
            mine = of[name]
            mine[0] -= messages
            mine[1] -= bytes_
            if not mine[0]:
                del of[name]
        self.messages -= messages
        self.bytes -= bytes_


class RecentPeers:
    """Who was there lately. `monotonic_ms` tells the time."""

    def __init__(self, monotonic_ms: Callable[[], float], lately_ms: int) -> None:
        self._monotonic_ms, self._lately_ms = monotonic_ms, lately_ms
        self._seen_ms: dict[str, float] = {}
        """In the order in which they were seen last."""

    def seen(self, peer: str) -> None:
        """`peer` is here now."""
        self._seen_ms.pop(peer, None)
        self._seen_ms[peer] = self._monotonic_ms()
        self._forget()

    @property
    def several(self) -> bool:
        """Whether more than one was."""
        self._forget()
        return len(self._seen_ms) > 1

    def _forget(self) -> None:
        since_ms = self._monotonic_ms() - self._lately_ms
        while self._seen_ms and self._seen_ms[first := next(iter(self._seen_ms))] < since_ms:
            del self._seen_ms[first]
