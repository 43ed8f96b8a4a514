"""The event loop of a broker's process: asyncio's own, with timers to the microsecond.

asyncio waits in epoll, which counts in milliseconds, rounded up: what is due in 0.3 ms goes out after a whole one. With
a due in every millisecond nothing else wakes the loop sooner, and half a millisecond of lateness is that alone. The
older select(2) counts in microseconds, and may wait for the one descriptor that epoll itself is.
"""

from __future__ import annotations

import asyncio
import select
import selectors
import sys

FD_SETSIZE = 1024
"""select(2) takes descriptors below it alone."""
MS = 0.001

if sys.platform == "linux":

    class MicrosecondSelector(selectors.EpollSelector):
        """epoll, but that it returns when the time is over, not up to a millisecond later."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            """Events, or none after `timeout` seconds; none a little before that, if it is long: asyncio then asks for
            the rest."""
            if timeout is None or timeout <= 0:
                return super().select(timeout)
            if timeout > 2 * MS:
                return super().select(timeout - MS)
            ready, _, _ = select.select((self.fileno(),), (), (), timeout)
            return super().select(0) if ready else []


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop for a broker's process; asyncio's as it is where the system's timers are precise, or cannot be made so."""
    if sys.platform == "linux":
        selector = MicrosecondSelector()
        if selector.fileno() < FD_SETSIZE:
            return asyncio.SelectorEventLoop(selector)
        selector.close()
    return asyncio.new_event_loop()
