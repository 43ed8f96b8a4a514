"""Long work, watched: how many are done, how fast, and how long it still takes, on standard error."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TextIO, TypeVar

from timeline.clock import Clock
from timeline.wording import printable, shown_lateness

EVERY_MS = 200.0
RATE_OVER_MS = 5_000.0
"""The time left is reckoned from the rate of the last few seconds."""

T = TypeVar("T")


class Progress:
    """Counts what is done, in a line that is drawn over itself while a person watches `screen` (a terminal; nothing is
    written elsewhere). `total`: how many there will be; None: not known, unless `add` is told the part that is done."""

    def __init__(
        self, what: str, total: int | None = None, *, screen: TextIO | None = None, clock: Clock | None = None
    ) -> None:
        self._what, self.total = what, total
        self._screen = screen or sys.stderr
        self._clock = clock or Clock()
        self._start_ms = self._said_ms = self._clock.monotonic_ms()
        self._marks: list[tuple[float, float]] = [(self._start_ms, 0.0)]
        self.watched = self._screen.isatty()
        self.done = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def name(self, what: str) -> None:
        """Name what is under way, at once."""
        if self.watched:
            self._screen.write(f"\r\033[K{printable(what)} …")
            self._screen.flush()

    def clear(self) -> None:
        """Takes the line away, so that something else can be said there."""
        if self.watched:
            self._screen.write("\r\033[K")
            self._screen.flush()

    @property
    def rate_per_s(self) -> float:
        """How many a second, from the start."""
        elapsed_s = (self._clock.monotonic_ms() - self._start_ms) / 1000
        return self.done / elapsed_s if elapsed_s > 0 else 0.0

    def add(self, count: int = 1, part: float | None = None) -> None:
        """`count` more are done, in all the `part` of the whole (0 to 1)."""
        self.done += count
        now_ms = self._clock.monotonic_ms()
        if not self.watched or now_ms - self._said_ms < EVERY_MS:
            return
        self._said_ms = now_ms
        if part is None and self.total:
            part = self.done / self.total
        of = f" of {self.total:,}" if self.total else ""
        left = "" if part is None else self._left(part, now_ms)
        self._screen.write(f"\r\033[K{printable(self._what)} {self.done:,}{of}  {self.rate_per_s:,.0f}/s{left}")
        self._screen.flush()

    def _left(self, part: float, now_ms: float) -> str:
        """How far it is, and how long it still takes at the pace of late."""
        self._marks.append((now_ms, part))
        while len(self._marks) > 2 and now_ms - self._marks[1][0] >= RATE_OVER_MS:
            del self._marks[0]
        then_ms, then = self._marks[0]
        percent = f"  {min(part, 1):.0%}"
        if part <= then or now_ms <= then_ms:
            return percent
        left_ms = max(0.0, 1 - part) * (now_ms - then_ms) / (part - then)
        return f"{percent}, {shown_lateness(max(1, round(left_ms / 1000)) * 1000)} left"


async def counted(entries: AsyncIterator[T], progress: Progress) -> AsyncIterator[T]:
    """`entries` as they come, each counted."""
    async for entry in entries:
        progress.add()
        yield entry
