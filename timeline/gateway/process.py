"""The gateway's process: its port, its signals, and its end after the requests under way."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn

from timeline.config import joined, listening, split_address
from timeline.gateway.app import application
from timeline.gateway.protocol import BoundedHttp, Connections, most_connections
from timeline.gateway.service import GatewaySettings, HttpGateway, Part
from timeline.gateway.tls import MOST_CONNECTIONS, TlsConnection, TlsFiles
from timeline.logs import set_up_logs

BACKLOG = 2048
ACCEPTED_AT_ONCE = 64
IDLE_S = 75
"""How long a connection may stay open between two requests."""
M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h."""
LARGE_BLOCK_BYTES = 1024 * 1024
"""More than a read of a socket allocates, 256 KiB, so that frequent calls keep their blocks."""


class _Server(uvicorn.Server):
    """A server whose signals are ours, and that accepts few connections at a time. So each is counted before more take
    descriptors."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin. As many connections as ever may wait to be accepted."""
        await super().startup(sockets)
        for port in sockets or ():
            port.listen(BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


async def run(
    settings: GatewaySettings,
    version: str,
    announce: Callable[[str], None],
    parts: tuple[Part, ...] = (),
    until_input_ends: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT. Then end after the requests under way, within the grace period. `settings` are
    checked. `announce` gets the address once the port is open. Raise OSError, its `filename` the address, if it cannot
    be had.

    `until_input_ends`: also end when standard input does, because then the process that started us is gone.
    """
    set_up_logs(settings.log_level, settings.log_format)
    _return_large_blocks()
    gateway = HttpGateway(settings, version, parts)
    most, note = most_connections(), gateway.metrics.refused
    protocol: Any = partial(BoundedHttp, Connections(most, gateway.answers, note))
    if settings.tls_cert:
        connections = Connections(min(most, MOST_CONNECTIONS), gateway.answers, note)
        protocol = partial(TlsConnection, connections, TlsFiles(settings.tls_cert, settings.tls_key))
    port = listening(settings.listen, BACKLOG)
    port.setblocking(False)
    host, _ = split_address(settings.listen)
    server = _Server(
        uvicorn.Config(
            application(gateway),
            http=protocol,
            backlog=ACCEPTED_AT_ONCE,
            loop="none",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=True,
            proxy_headers=False,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=max(1, settings.grace_ms // 1000),
        )
    )

    def stop() -> None:
        gateway.end()
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    if until_input_ends:
        _at_end_of_input(stop)
    announce(joined(host, port.getsockname()[1]))
    await server.serve(sockets=[port])


def _at_end_of_input(stop: Callable[[], None]) -> None:
    """Call `stop` when standard input ends."""
    source, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def read() -> None:
        if not os.read(source, 4096):
            loop.remove_reader(source)
            stop()

    loop.add_reader(source, read)


def _return_large_blocks() -> None:
    """Let the C library give each large block back to the system once it is free. It would keep more and more of them,
    and a gateway stay as large as it was with many large answers."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
