"""A broker's process: its event loop, and whether a port is free.

The loop is asyncio's own, with timers to the microsecond. asyncio waits in epoll, which counts in milliseconds, rounded
up. A timer of 0.3 ms then takes a whole one. With a due time in every millisecond nothing else wakes the loop sooner,
and half a millisecond of lateness comes from that alone. The older select(2) counts in microseconds, and may wait for
the one descriptor that epoll itself is.
"""

from __future__ import annotations

import asyncio
import select
import selectors
import socket
import sys

from timeline.config import split_address

FD_SETSIZE = 1024
"""select(2) takes only descriptors below it."""
MS = 0.001

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
    """Raise OSError with the system's reason, its `filename` `listen`, if a process cannot listen there now. Port 0 is
    always free."""
    host, port = split_address(listen)
    try:
        kind, *_, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as asked:
            asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            asked.bind(address)
            asked.listen(1)
    except OSError as taken:
        raise OSError(taken.errno, taken.strerror, listen) from taken
