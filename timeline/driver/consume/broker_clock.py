"""A broker's clock on this process's monotonic clock, from the times at which frames were sent and arrived.

A frame that lay in a socket while the process was stopped arrives late with an old time. So the broker's times are
placed by what is certain: an answer was made after its question was sent, and before the answer arrived. The end of a
lease is placed at its earliest possible moment, so that it is never taken for later.
"""

from __future__ import annotations

import logging
from collections import deque

from timeline.clock import WARN_MS

log = logging.getLogger("timeline.driver")
WINDOW_MS = 60_000.0
SAMPLES = 64


class BrokerClock:
    """Bounds of (monotonic − broker's time), in ms, over a sliding window.

    A question sent at monotonic `sent_ms` and answered at the broker's `now_ms`: the difference is at least sent − now.
    A frame made at the broker's `now_ms` that arrived at monotonic `arrived_ms`: it is at most arrived − now. When the
    broker's clock steps, the two contradict each other, and the newer one counts.
    """

    def __init__(self) -> None:
        self._least: deque[tuple[float, float]] = deque(maxlen=SAMPLES)
        self._most: deque[tuple[float, float]] = deque(maxlen=SAMPLES)
        self._low: float | None = None
        self._high: float | None = None

    def another(self) -> None:
        """Forget everything: the next frames are another broker's."""
        self._least.clear()
        self._most.clear()
        self._low = self._high = None

    def sent(self, sent_ms: float, now_ms: int, arrived_ms: float) -> None:
        """Note an answer that came at `arrived_ms`."""
        # `now_ms` is rounded down: the answer may have been made up to one millisecond later.
        self._least.append((arrived_ms, sent_ms - now_ms - 1.0))
        self.arrived(arrived_ms, now_ms)

    def arrived(self, arrived_ms: float, now_ms: int) -> None:
        """Note a frame that was made at the broker's `now_ms` and came at `arrived_ms`."""
        self._most.append((arrived_ms, arrived_ms - now_ms))
        for samples in (self._least, self._most):
            while samples and samples[0][0] < arrived_ms - WINDOW_MS:
                samples.popleft()
        self._high = min(value for _, value in self._most)
        self._low = max((value for _, value in self._least), default=None)
        if self._low is not None and self._low > self._high:
            self._reset()

    def _reset(self) -> None:
        """Keep only the newest samples after a step of the broker's clock. In doubt a lease is taken for shorter."""
        newest = self._most[-1]
        self._most.clear()
        self._most.append(newest)
        self._high = newest[1]
        last = self._least[-1]
        self._least.clear()
        if last[1] <= self._high:
            self._least.append(last)
            self._low = last[1]
        else:
            self._low = None

    def monotonic_ms(self, broker_ms: float) -> float:
        """Return the earliest monotonic time that the broker's `broker_ms` can be; −∞ before any frame."""
        low = self._low if self._low is not None else self._high
        return broker_ms + low if low is not None else float("-inf")

    def ahead(self, clock_ms: float, mono_ms: float) -> tuple[float, float] | None:
        """Return (by how much a clock is ahead of the broker's, the error bound), in ms. None before any answer.
        `clock_ms`: its time at monotonic `mono_ms`. Negative: behind."""
        if self._low is None or self._high is None:
            return None
        return clock_ms - mono_ms + (self._low + self._high) / 2, (self._high - self._low) / 2


class Drift:
    """This machine's clock against its brokers'. It logs once when the clock is off by 50 ms or more, and once when it
    is right again."""

    def __init__(self) -> None:
        self._off = False

    def note(self, broker: str, ahead_ms: float, error_ms: float) -> None:
        """Note that the clock is `ahead_ms` ahead of the broker's, give or take `error_ms`."""
        sure_ms = abs(ahead_ms) - error_ms
        if self._off == (sure_ms >= (WARN_MS / 2 if self._off else WARN_MS)):
            return
        self._off = not self._off
        said = f"{abs(ahead_ms) / 1000:,.3f} s (give or take {error_ms / 1000:,.3f} s) "
        said += f"{'ahead of' if ahead_ms >= 0 else 'behind'} broker {broker}'s"
        if self._off:
            log.warning("this machine's clock is %s: set it by chrony or ntpd; due times count by the broker's", said)
        else:
            log.info("this machine's clock is set: now %s", said)
