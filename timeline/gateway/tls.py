"""TLS of the gateway's connections: handshakes are counted and timed, and a renewed certificate is read again."""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import Any

from timeline.clock import Clock
from timeline.credentials import load_server_pair
from timeline.files import Reloaded
from timeline.gateway.protocol import BoundedHttp, Connections

log = logging.getLogger("timeline.gateway")

HANDSHAKE_S = 10.0
MOST_CONNECTIONS = 1_000
"""Each keeps 256 KiB for what it reads."""


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
        self._http.connection_made(secured)
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
