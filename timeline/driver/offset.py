"""A broker's clock on this process's monotonic clock, from frames whose sending and arrival were noted.

A frame that lay in a socket while the process was stopped arrives late and says an old time; the broker's times are
therefore placed by what is known for sure: an answer was made after its question was sent (`ahead`) and before it
arrived. The end of a lease is placed by the earliest moment that it can mean, so that it is never taken for later.
"""

from __future__ import annotations

from collections import deque

WINDOW_MS = 60_000.0
SAMPLES = 64


class BrokerClock:
    """Bounds of (monotonic − broker's time), in ms, over a sliding window.

    `sent`: an answer's question was sent at monotonic `sent_ms` and answered at broker's `now_ms`: the difference is at
    least sent − now. `arrived`: a frame made at broker's `now_ms` arrived at monotonic `arrived_ms`: it is at most
    arrived − now. When the broker's clock steps the two contradict each other, and the newer one counts.
    """

    def __init__(self) -> None:
        self._least: deque[tuple[float, float]] = deque(maxlen=SAMPLES)
        self._most: deque[tuple[float, float]] = deque(maxlen=SAMPLES)
        self._low: float | None = None
        self._high: float | None = None

    def another(self) -> None:
        """Another broker is spoken to from now on: what is known of the one before says nothing of its clock."""
        self._least.clear()
        self._most.clear()
        self._low = self._high = None

    def sent(self, sent_ms: float, now_ms: int, arrived_ms: float) -> None:
        """An answer came at `arrived_ms`."""
        # `now_ms` is rounded down: the answer may have been made up to one millisecond later.
        self._least.append((arrived_ms, sent_ms - now_ms - 1.0))
        self.arrived(arrived_ms, now_ms)

    def arrived(self, arrived_ms: float, now_ms: int) -> None:
        """A frame made at the broker's `now_ms` came at `arrived_ms`."""
        self._most.append((arrived_ms, arrived_ms - now_ms))
        for samples in (self._least, self._most):
            while samples and samples[0][0] < arrived_ms - WINDOW_MS:
                samples.popleft()
        self._high = min(value for _, value in self._most)
        self._low = max((value for _, value in self._least), default=None)
        if self._low is not None and self._low > self._high:
            self._reset()

    def _reset(self) -> None:
        """The broker's clock stepped: only what is newest still holds, and a lease is rather taken for shorter."""
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
        """The earliest monotonic time that the broker's `broker_ms` can be. Before anything is known, the beginning of
        time."""
        low = self._low if self._low is not None else self._high
        return broker_ms + low if low is not None else float("-inf")

    @property
    def difference_ms(self) -> float | None:
        """The best single estimate of (monotonic − broker's time); None before anything is known."""
        return self._high
