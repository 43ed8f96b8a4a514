"""The only place that reads a clock. Everything else gets `now` as an argument.

`Clock.now_ms` is the wall clock at start, carried on by the monotonic clock and slewed towards the wall. So it neither
jumps nor runs back by itself. `observe` notices a jump of the wall clock by more than 500 ms. It follows only if others
confirm the jump or, if no other clock can say, after 60 s. So a step makes nothing early.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum, auto

STEP_MS = 500.0
WARN_MS, CRITICAL_MS = 50.0, 500.0
"""From this difference a clock is worth a warning, and from the second no broker may lease by it."""
ALONE_MS = 60_000.0
SLEW = 0.005
"""Share of elapsed time by which a small difference is corrected: 5 ms per second."""
CLOSE_MS = 0.05
"""Two clocks read within this are read at one instant."""
LOOKS = 4
"""Most tries to read both clocks, if something comes between."""


class StepVerdict(Enum):
    """Other clocks' verdict on a jump of the wall clock: it is right, our time is, or no clock can say."""

    CONFIRMED = auto()
    DENIED = auto()
    OPEN = auto()


def nobody(step_ms: float) -> StepVerdict:
    """Return the verdict where there is no other clock."""
    return StepVerdict.OPEN


class Clock:
    """Wall time that does not jump, and monotonic time. `wall_s`, `monotonic_s`: the machine's clocks in seconds.

    Call `observe` now and then (a broker does so every 250 ms). Between calls `now_ms` goes on by the monotonic clock
    alone.
    """

    def __init__(
        self, wall_s: Callable[[], float] = time.time, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall_s = wall_s
        self._monotonic_s = monotonic_s
        # Counted from the start: among numbers as large as the time since 1970 each sum loses a tenth of a microsecond.
        self._start_ms, self._base_mono_ms, _ = self._look()
        self._base_ms = 0.0
        self._slew_ms = 0.0
        self._stepped_since_ms: float | None = None
        self._observed_step_ms = 0.0

    def now(self) -> float:
        """Return milliseconds UTC."""
        return self._start_ms + self._at(self.monotonic_ms())

    def now_at(self, mono_ms: float) -> float:
        """Return `now` at monotonic `mono_ms`, no earlier than the last look."""
        return self._start_ms + self._at(mono_ms)

    def now_ms(self) -> int:
        """Return milliseconds UTC, rounded down: nothing is early."""
        return int(self.now() // 1)

    def monotonic_ms(self) -> float:
        """Return milliseconds for durations."""
        return self._monotonic_s() * 1000.0

    @property
    def step_ms(self) -> float:
        """How far the wall clock is ahead of ours after a jump that was not followed yet. 0: there is none."""
        return self._observed_step_ms

    def observe(self, judge: Callable[[float], StepVerdict] = nobody) -> float:
        """Compare with the wall clock: slew a small difference, notice and perhaps follow a jump.

        `judge` returns what others say of a jump that put the wall clock that many ms ahead. Return the difference in
        ms (wall − ours). Return 0 if there may be none, because the process was held up between the clocks.
        """
        wall_ms, mono_ms, apart_ms = self._look()
        ours_ms = self._at(mono_ms)
        difference_ms = wall_ms - self._start_ms - ours_ms
        if apart_ms > CLOSE_MS and difference_ms <= 0 <= difference_ms + apart_ms:
            self._rebase(ours_ms, mono_ms)
            return 0.0
        if abs(difference_ms) <= STEP_MS:
            self._stepped_since_ms, self._observed_step_ms = None, 0.0
            self._rebase(ours_ms, mono_ms, slew_ms=difference_ms)
            return difference_ms
        self._rebase(ours_ms, mono_ms)
        moved_ms = abs(difference_ms - self._observed_step_ms)
        verdict = judge(difference_ms)
        if self._stepped_since_ms is None or moved_ms > STEP_MS or verdict is StepVerdict.DENIED:
            self._stepped_since_ms = mono_ms
        self._observed_step_ms = difference_ms
        if verdict is StepVerdict.CONFIRMED or mono_ms - self._stepped_since_ms >= ALONE_MS:
            self._stepped_since_ms, self._observed_step_ms = None, 0.0
            self._rebase(ours_ms + difference_ms, mono_ms)
        return difference_ms

    def _look(self) -> tuple[float, float, float]:
        """Return the wall clock, the monotonic clock after it, and by how many ms it may have been read later.

        The wall comes first: time that passes before the other is read makes ours late, never early. Late is bad too,
        because times counted from a late clock are early once it has caught up. So the closest of some looks counts.
        """
        closest = (0.0, 0.0, float("inf"))
        for _ in range(LOOKS):
            before_ms, wall_ms, mono_ms = self.monotonic_ms(), self._wall_s() * 1000.0, self.monotonic_ms()
            if mono_ms - before_ms < closest[2]:
                closest = wall_ms, mono_ms, mono_ms - before_ms
            if closest[2] <= CLOSE_MS:
                break
        return closest

    def _at(self, mono_ms: float) -> float:
        """Return our time at `mono_ms`, in ms since the start.

        The last difference is worked off as time goes by, at most SLEW of it. So the clock has no break and never
        stands or runs back.
        """
        elapsed_ms = mono_ms - self._base_mono_ms
        limit_ms = SLEW * elapsed_ms
        return self._base_ms + elapsed_ms + max(-limit_ms, min(limit_ms, self._slew_ms))

    def _rebase(self, now_ms: float, mono_ms: float, slew_ms: float = 0.0) -> None:
        self._base_ms, self._base_mono_ms, self._slew_ms = now_ms, mono_ms, slew_ms
