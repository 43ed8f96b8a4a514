"""A broker's process: its event loop, whether a port is free, and when another process begins in its place.

The loop is asyncio's own, with timers to the microsecond. asyncio waits in epoll, which counts in milliseconds, rounded
up. A timer of 0.3 ms then takes a whole one. With a due time in every millisecond nothing else wakes the loop sooner,
and half a millisecond of lateness comes from that alone. The older select(2) counts in microseconds, and may wait for
the one descriptor that epoll itself is.
"""

from __future__ import annotations

import asyncio
import select
import selectors
import sys

from timeline.clock import Clock
from timeline.config import listening

FD_SETSIZE = 1024
"""select(2) takes only descriptors below it."""
MS = 0.001
BACKOFF_FIRST_S = 0.1
BACKOFF_CAP_S = 5.0
WELL_AFTER_MS = 30_000.0
"""A process that ran this long is started again at once, as if it had never ended."""

if sys.platform == "linux":

    class MicrosecondSelector(selectors.EpollSelector):
        """epoll that returns when the time is over, not up to a millisecond later."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            """Return events, or none after `timeout` seconds. A long wait ends a little sooner; asyncio then asks for
            the rest."""
            if timeout is None or timeout <= 0:
                return super().select(timeout)
            if timeout > 2 * MS:
                return super().select(timeout - MS)
            ready, _, _ = select.select((self.fileno(),), (), (), timeout)
            return super().select(0) if ready else []


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a loop for a broker's process: asyncio's own where timers are precise, or cannot be made so."""
    if sys.platform == "linux":
        selector = MicrosecondSelector()
        if selector.fileno() < FD_SETSIZE:
            return asyncio.SelectorEventLoop(selector)
        selector.close()
    return asyncio.new_event_loop()


def check_free(listen: str) -> None:
    """Raise OSError as `listening` does if a process cannot listen there now. Port 0 is always free."""
    listening(listen).close()


class RestartDelay:
    """How long a process that ended stays away before it is started again: longer each time."""

    def __init__(self) -> None:
        self._clock = Clock()
        self._began_ms = 0.0
        self._delay_s = 0.0

    def begins(self) -> None:
        """Note that the process is started."""
        self._began_ms = self._clock.monotonic_ms()

    def after_end(self) -> float:
        """Return the delay in seconds. A process that ran well before it ended comes again at once."""
        well = self._clock.monotonic_ms() - self._began_ms >= WELL_AFTER_MS
        self._delay_s = BACKOFF_FIRST_S if well else min(BACKOFF_CAP_S, self._delay_s * 2 or BACKOFF_FIRST_S)
        return self._delay_s
