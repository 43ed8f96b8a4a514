"""Acks that nobody waits for, on their way to a frame: they gather for a moment, so that many go together.

Sent one by one, each would be a frame, a store call and an answer of its own, and what they cost would delay the
deliveries that share the broker with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from timeline.clock import Clock
from timeline.columns import Indexes
from timeline.driver.consume.in_flight import DONE, SETTLING, DeliveredFrame, InFlight

GATHER_MS = 20.0
GATHER_MESSAGES = 64
LEASE_LEFT_MS = 50.0
"""An ack of a lease that ends sooner than this does not wait."""


class AckBatcher:
    """The acks gathered so far. They are `ripe`, and `wake` is called, 20 ms after the first of them, or once they are
    64 or hold half of the credit, in messages or in bytes, or when the lease of one of them is about to end."""

    def __init__(self, in_flight: InFlight, clock: Clock, wake: Callable[[], None]) -> None:
        self._clock, self._wake = clock, wake
        self._frames: list[DeliveredFrame] = []
        self._messages = self._bytes = 0
        self._most_messages = max(1, min(GATHER_MESSAGES, in_flight.credit.messages // 2))
        self._most_bytes = in_flight.credit.bytes // 2
        self._timer: asyncio.TimerHandle | None = None
        self.ripe = False

    def __len__(self) -> int:
        return sum(len(frame.soon) for frame in self._frames)

    def add(self, frame: DeliveredFrame, index: int) -> None:
        """One more."""
        if frame.state[index] != DONE:
            frame.state[index] = SETTLING
        if not frame.soon:
            self._frames.append(frame)
        frame.soon.append(index)
        if not self.ripe:
            soon_ms = self._clock.monotonic_ms() + LEASE_LEFT_MS
            ends_soon = frame.earliest_ms <= soon_ms and bool(frame.end_ms[index] <= soon_ms)
            self._count(1, int(frame.sizes[index]), ends_soon)

    def add_all(self, frame: DeliveredFrame, at: Indexes) -> None:
        """The same for many of a frame."""
        if not len(at):
            return
        frame.mark(at[np.frombuffer(frame.state, dtype=np.uint8)[at] != DONE], SETTLING)
        if not frame.soon:
            self._frames.append(frame)
        frame.soon.extend(at.tolist())
        if not self.ripe:
            soon_ms = self._clock.monotonic_ms() + LEASE_LEFT_MS
            ends_soon = frame.earliest_ms <= soon_ms and bool(frame.end_ms[at].min() <= soon_ms)
            self._count(len(at), int(frame.sizes[at].sum()), ends_soon)

    def _count(self, messages: int, nbytes: int, ends_soon: bool) -> None:
        self._messages += messages
        self._bytes += nbytes
        if ends_soon or self._messages >= self._most_messages or self._bytes >= self._most_bytes:
            self._ripen()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_MS / 1000.0, self._ripen)

    def _ripen(self) -> None:
        self.ripe = True
        self._stop_timer()
        self._wake()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def take(self) -> list[tuple[DeliveredFrame, Indexes]]:
        """All of them, by frame; from now on others gather."""
        taken = []
        for frame in self._frames:
            at = np.array(frame.soon, dtype=np.intp)
            frame.soon.clear()
            taken.append((frame, at))
        self._frames.clear()
        self._messages = self._bytes = 0
        self.ripe = False
        self._stop_timer()
        return taken
