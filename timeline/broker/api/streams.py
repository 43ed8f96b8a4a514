"""The two-way streams of one broker: how many there may be, and the end of silent and stalled ones."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from timeline.broker.api.access import ANYBODY, Principal
from timeline.broker.fairness import CooperativePace, host_of
from timeline.broker.limits import Limits
from timeline.broker.runtime import wait_within
from timeline.metrics import Metrics
from timeline.wire import Fault, Stream, TransportError

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class ClientStream:
    """A two-way stream, its peer (scheme:host:port, or any name), and its caller."""

    stream: Stream
    peer: str
    caller: Principal = ANYBODY


class Served(Protocol):
    """A stream that is being served. `sending_since_ms`: since when (monotonic) its peer has not taken a frame. None:
    no frame is being sent."""

    @property
    def sending_since_ms(self) -> float | None: ...

    def abort(self) -> None:
        """End it at once, without a word."""


class Streams:
    """All open streams, whether or not a roster still knows them."""

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self._limits, self._metrics = limits, metrics
        self._peers: Counter[str] = Counter()
        self._served: dict[Served, None] = {}  # in order of arrival, so that a run can be repeated
        self._ended = asyncio.Event()
        self._stalled: dict[Served, float] = {}
        """Streams that the last look found stalled, and since when."""

    def __len__(self) -> int:
        return self._peers.total()

    @property
    def heartbeat_ms(self) -> int:
        """The heartbeat of a consumer that joins now."""
        return self._limits.heartbeat_of(len(self))

    @contextmanager
    def admit(self, peer: str) -> Iterator[None]:
        """Count one more stream of `peer` (scheme:host:port, or any name) while it is served.

        Raise TransportError(OVERLOADED) if the broker or this peer's host has its maximum.
        """
        host = host_of(peer)
        if len(self) >= self._limits.streams:
            raise self._refused(f"this broker serves {self._limits.streams} streams, all it may (max_streams)")
        if self._peers[host] >= self._limits.streams_per_peer:
            raise self._refused(
                f"{host} has {self._limits.streams_per_peer} streams here, all that one host may (max_streams_per_peer)"
            )
        with self.kept(peer):
            yield

    @contextmanager
    def kept(self, peer: str) -> Iterator[None]:
        """Count the rest of a stream or scan that was given up as a stream, past the bounds too. A peer that lets many
        hang gets no more."""
        host = host_of(peer)
        self._peers[host] += 1
        try:
            yield
        finally:
            self._peers[host] -= 1
            if not self._peers[host]:
                del self._peers[host]
            self._ended.set()

    def _refused(self, why: str) -> TransportError:
        self._metrics.count("timeline_throttled_total", "streams")
        return TransportError(Fault.OVERLOADED, f"{why}: close some, use another broker, or raise the limit")

    @contextmanager
    def serving(self, stream: Served) -> Iterator[None]:
        """Count `stream` as served meanwhile."""
        self._served[stream] = None
        try:
            yield
        finally:
            del self._served[stream]

    async def abort_stalled(self, now_ms: float, pace: CooperativePace) -> None:
        """End streams whose peers have not taken a frame for too long at monotonic `now_ms`, if the last look found the
        same. A broker that was held up itself does not know yet, at its first look, what was taken meanwhile."""
        before, self._stalled = self._stalled, {}
        for some in pace.some(self._served):
            for stream in some:
                since_ms = stream.sending_since_ms
                if since_ms is None or now_ms - since_ms <= self._limits.stall_ms or stream not in self._served:
                    continue
                if before.get(stream) == since_ms:
                    stream.abort()
                else:
                    self._stalled[stream] = since_ms
            await pace.did(len(some))

    def of(self, kind: type[S]) -> list[S]:
        """Return the served streams of one kind."""
        return [stream for stream in self._served if isinstance(stream, kind)]

    async def ended(self, within_s: float) -> None:
        """Return when a stream ends, or after `within_s`."""
        self._ended.clear()
        await wait_within(self._ended, within_s)


async def first_frame(stream: Stream, hello_ms: int) -> bytes | None:
    """Return the first frame of a stream. Raise TransportError(DEADLINE) if none comes within `hello_ms`."""
    try:
        async with asyncio.timeout(hello_ms / 1000.0):
            return await stream.receive()
    except TimeoutError:
        raise TransportError(Fault.DEADLINE, f"nothing was said on this stream for {hello_ms} ms") from None
