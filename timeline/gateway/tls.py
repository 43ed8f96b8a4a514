"""TLS of the gateway's connections: handshakes are counted and timed, and a renewed certificate is read again."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from typing import Any

from timeline.clock import Clock
from timeline.credentials import load_server_pair
from timeline.files import Reloaded
from timeline.gateway.protocol import BoundedHttp, Connections

log = logging.getLogger("timeline.gateway")

HANDSHAKE_S = 10.0
MOST_CONNECTIONS = 1_000
"""Each keeps 256 KiB for what it reads."""
PART_BYTES = 64 * 1024
"""What TLS encrypts at a time."""


class TlsFiles:
    """A certificate and its key. Raise Invalid if they cannot be used at first."""

    def __init__(self, cert: str, key: str) -> None:
        self._cert, self._key = cert, key
        self._files = Reloaded("the certificate stays as it was", [cert, key], self._load, log)

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        load_server_pair(context, self._cert, self._key, Clock().now_ms())
        return context

    def context(self) -> ssl.SSLContext:
        """Return what a handshake uses now. Files that have changed are read again. Invalid ones are logged, and the
        last good ones stay."""
        self._files.look()
        return self._files.value


class TlsConnection(asyncio.Protocol):
    """A connection before and during its handshake. After it, `http` has the connection."""

    def __init__(self, connections: Connections, files: TlsFiles, **given: Any) -> None:
        self._all, self._files = connections, files
        self._http = BoundedHttp(connections, **given)
        self._loop = asyncio.get_running_loop()
        self._early = b""
        """What came of a request before the handshake's end was noticed."""
        self._transport: Any = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        self._transport = transport
        self._all.greeted(self)
        self._task = self._loop.create_task(self._secure())

    async def _secure(self) -> None:
        try:
            secured: Any = await self._loop.start_tls(
                self._transport, self, self._files.context(), server_side=True, ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError:  # ssl.SSLError and ConnectionError, too: no TLS, another host's name, too slow, or gone
            self._transport.abort()
            return
        finally:
            self._all.secured(self)
        if secured is None or secured.is_closing():
            return
        paced = _PacedTls(self._transport, secured, self._http)
        self._transport.set_protocol(paced)
        self._http.connection_made(paced)
        secured.set_protocol(self._http)
        if self._early:
            self._http.data_received(self._early)

    def data_received(self, data: bytes) -> None:
        """Keep what comes until the request can be read."""
        self._early += data

    def abort(self) -> None:
        """Disconnect at once."""
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing."""
        self._all.secured(self)


class _PacedTls(asyncio.BufferedProtocol):
    """Stands below TLS as its connection's protocol, and above it as the transport of `http`. It hands answers to TLS
    part by part, as they are read. TLS alone encrypts a whole answer at once, however large. It tells nobody that this
    waits for its reader, and keeps as large a buffer until the connection closes."""

    def __init__(self, below: Any, tls: Any, http: BoundedHttp) -> None:
        self._below, self._tls, self._http = below, tls, http
        self._protocol = below.get_protocol()
        self._waiting: deque[memoryview] = deque()
        self._full = self._closes = False

    def get_buffer(self, sizehint: int) -> Any:
        """Return where to put what comes."""
        return self._protocol.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """Take what came."""
        self._protocol.buffer_updated(nbytes)

    def eof_received(self) -> Any:
        """Take the end of what comes."""
        return self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """End all."""
        self._waiting.clear()
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        """Wait for a reader that is slow."""
        self._full = True
        self._protocol.pause_writing()
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """Go on, as far as the reader has read."""
        self._full = False
        self._protocol.resume_writing()
        self._hand_over()
        if not self._full:
            self._http.resume_writing()

    def write(self, data: bytes) -> None:
        """Send it once what was written before is read."""
        self._waiting.append(memoryview(data))
        self._hand_over()

    def _hand_over(self) -> None:
        while self._waiting and not self._full:
            data = self._waiting.popleft()
            if len(data) > PART_BYTES:
                self._waiting.appendleft(data[PART_BYTES:])
            self._tls.write(data[:PART_BYTES])
        if self._closes and not self._waiting:
            self._tls.close()

    def get_write_buffer_size(self) -> int:
        """Return how many bytes wait for their reader."""
        waiting = sum(map(len, self._waiting))
        return int(waiting + self._tls.get_write_buffer_size() + self._below.get_write_buffer_size())

    def set_write_buffer_limits(self, high: int) -> None:
        """Set how many bytes may wait before `http` waits, too."""
        self._below.set_write_buffer_limits(high)

    def close(self) -> None:
        """Close once all is sent."""
        self._closes = True
        self._hand_over()

    def is_closing(self) -> bool:
        """Return whether it closes, or is closed."""
        return bool(self._closes or self._tls.is_closing())

    def abort(self) -> None:
        """Disconnect at once."""
        self._tls.abort()

    def can_write_eof(self) -> bool:
        """Return False: TLS has no half-closed connections."""
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return what is known of the connection."""
        return self._tls.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Take nothing more."""
        self._tls.pause_reading()

    def resume_reading(self) -> None:
        """Take more."""
        self._tls.resume_reading()
