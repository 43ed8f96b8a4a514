"""A topic's rate limit: a token bucket of one tenth of a second, so that a limit is even, not a burst each second."""

from __future__ import annotations

BURST_MS = 100.0


class RateLimit:
    """Messages per second; a limit of 0 is none."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._at_ms: float | None = None

    def _fill(self, per_s: int, mono_ms: float) -> None:
        full = max(1.0, per_s * BURST_MS / 1000.0)
        if self._at_ms is None:
            self._tokens = full
        else:
            self._tokens = min(full, self._tokens + (mono_ms - self._at_ms) * per_s / 1000.0)
        self._at_ms = mono_ms

    def wait_ms(self, per_s: int, mono_ms: float) -> float:
        """How long until one message may go; 0: now."""
        if per_s == 0:
            self._at_ms = None
            return 0.0
        self._fill(per_s, mono_ms)
        return 0.0 if self._tokens >= 1.0 else (1.0 - self._tokens) * 1000.0 / per_s

    def allowance(self, per_s: int, mono_ms: float, most: int) -> int:
        """How many may go now, at most `most`."""
        if per_s == 0:
            return most
        self._fill(per_s, mono_ms)
        return max(0, min(most, int(self._tokens)))

    def took(self, per_s: int, count: int) -> None:
        """So many went."""
        if per_s:
            self._tokens -= count
