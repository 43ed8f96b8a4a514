"""The other brokers, one connection to each, and hints to them: what comes due anew in buckets that they deal. Nothing
rests on hints, so nobody waits for them.

Hints of a topic gather while a call to a broker is under way, the earliest due standing for all: a peer that learns of
one due finds out by its own round what else there is. What a peer refuses for having too much to do, it is told again a
little later. A call that fails otherwise drops what it carried, and the next one comes
after a rest: the peer's slow poll and sweep find what it was not told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Protocol

import numpy as np

from timeline.broker.fairness.limits import Limits
from timeline.broker.runtime import Tasks
from timeline.metrics import Metrics
from timeline.sync import Member
from timeline.wire import Fault, Hint, Hinted, TransportError, WireError, decode_as, encode

log = logging.getLogger("timeline.broker")


class PeerChannel(Protocol):
    """A way to another broker."""

    async def unary(self, method: str, frame: bytes, timeout_s: float) -> bytes:
        """One frame for one. Raises TransportError."""

    async def close(self) -> None:
        """Ends everything that runs over it."""


PeerFactory = Callable[[str], PeerChannel]
"""Makes the way to an address."""


class BrokerPeer:
    """Another broker, and the connection to it, over which it is asked and hints are sent."""

    def __init__(self, peers: BrokerPeers, member: Member, channel: PeerChannel) -> None:
        self._peers, self.member, self.channel = peers, member, channel
        self.waiting: dict[int, int] = {}
        """By topic's uid, the earliest due that is yet to be told."""
        self.gone = False
        self._running = False
        self._silent = False

    def tell(self, topic_uid: int, due_ms: int) -> None:
        """Something of the topic is due there at `due_ms`."""
        known_ms = self.waiting.get(topic_uid)
        if known_ms is None and len(self.waiting) >= self._peers.limits.hints_waiting:
            self._peers.count("dropped", 1)
            return
        if known_ms is None or due_ms < known_ms:
            self.waiting[topic_uid] = due_ms
        if not self._running:
            self._running = True
            self._peers.tasks.spawn(self._run(), f"hints to {self.member.name}")

    async def _run(self) -> None:
        try:
            while self.waiting and not self.gone:
                told, self.waiting = self.waiting, {}
                limits = self._peers.limits
                trouble = await self._send(told)
                rest_ms = limits.hint_pace_ms if trouble is None else limits.hint_rest_ms
                if isinstance(trouble, TransportError) and trouble.fault is Fault.OVERLOADED:
                    # It is there, and may have time in a moment: what it refused waits with what has come since.
                    rest_ms = limits.throttle_ms
                    self.waiting = {**told, **{uid: min(at, told.get(uid, at)) for uid, at in self.waiting.items()}}
                elif trouble is not None:
                    self._peers.count("dropped", len(told))
                await asyncio.sleep(rest_ms / 1000.0)
        finally:
            self._running = False

    async def _send(self, told: dict[int, int]) -> TransportError | WireError | None:
        """Why the peer has not heard it; None: it has."""
        count = len(told)
        frame = Hint(
            self._peers.name,
            np.fromiter(told.keys(), dtype=np.int64, count=count),
            np.fromiter(told.values(), dtype=np.int64, count=count),
        )
        try:
            data = await self.channel.unary("Hint", encode(frame), self._peers.limits.hint_timeout_ms / 1000.0)
            decode_as(data, Hinted)
        except (TransportError, WireError) as trouble:
            if not self._silent:
                log.warning("broker %s is not told what comes due there: %s", self.member.name, trouble.reason)
            self._silent = True
            return trouble
        self._silent = False
        self._peers.count("sent", count)
        return None


class BrokerPeers:
    """The other brokers of the cluster. `make` makes the way to an address, on first use; None: there is none."""

    def __init__(
        self, name: str, make: PeerFactory | None, limits: Limits, metrics: Metrics, tasks: Tasks
    ) -> None:  # fmt: skip
        self.name, self._make = name, make
        self.limits, self._metrics, self.tasks = limits, metrics, tasks
        self._peers: dict[str, BrokerPeer] = {}

    def count(self, outcome: str, many: int) -> None:
        """So many hints were `sent`, `received` or `dropped`."""
        self._metrics.count("timeline_hints_total", outcome, by=many)

    def tell(self, member: Member, topic_uid: int, due_ms: int) -> None:
        """Something of the topic is due at `due_ms` in a bucket that `member` deals. Returns at once."""
        peer = self.peer(member)
        if peer is None:
            self.count("dropped", 1)
        else:
            peer.tell(topic_uid, due_ms)

    def peer(self, member: Member) -> BrokerPeer | None:
        """`member`, and the one connection to it; None where there is no way, or there are as many as there may be."""
        peer = self._peers.get(member.name)
        if peer is not None and peer.member.address != member.address:
            self._part(self._peers.pop(member.name))
            peer = None
        if peer is None and self._make and member.address and len(self._peers) < self.limits.peers:
            peer = self._peers[member.name] = BrokerPeer(self, member, self._make(member.address))
        return peer

    def keep(self, members: Collection[Member]) -> None:
        """Forgets those that are not among `members`."""
        there = {member.name for member in members}
        for name in [name for name in self._peers if name not in there]:
            self._part(self._peers.pop(name))

    def _part(self, peer: BrokerPeer) -> None:
        self.count("dropped", len(peer.waiting))
        peer.gone = True
        peer.waiting.clear()
        self.tasks.spawn(peer.channel.close(), f"parting with {peer.member.name}", finishes=True)

    async def close(self) -> None:
        """Ends every connection."""
        peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.gone = True
            await peer.channel.close()
