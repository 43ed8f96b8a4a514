"""A TCP proxy of our own between a store and its server: it forwards, delays, and cuts connections where it is told to.

It knows no protocol. An *exchange* is what a client sends at once, and what comes back for it. Cut *before*, the server
never sees the exchange; cut *after*, the server has done it and its answer is lost. With every exchange cut once both
ways, so is every commit among them.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from contextlib import suppress
from random import Random
from socket import SO_LINGER, SOL_SOCKET
from typing import Literal, Self
from urllib.parse import urlsplit, urlunsplit

When = Literal["before", "after"]
CHUNK_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)
"""Closing with this in SO_LINGER resets the connection, as a server that dies does."""


class Proxy:
    """Between clients and the server on `port`. `exchanges`: how many have come so far, over all connections; `cuts`:
    how many connections were cut. `keeps_ends`: that a server has closed a connection is kept from its client; `kept`:
    it was."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.host, self.server_port = host, port
        self.exchanges = 0
        self.cuts = 0
        self.delay_s = 0.0
        self.keeps_ends = False
        self.kept = asyncio.Event()
        self._cut_at: tuple[int, When] | None = None
        self._every: tuple[int, When] | None = None
        self._gap: Callable[[], int] | None = None
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accepted, self.host, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut_all()
        await self._server.wait_closed()

    @property
    def port(self) -> int:
        """Where clients connect."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def url(self, url: str) -> str:
        """`url` of the server, by way of the proxy."""
        parts = urlsplit(url)
        user, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{user}{at}{self.host}:{self.port}"))

    def cut_once(self, nth: int, when: When) -> None:
        """Cuts the connection of the `nth` exchange from now on, counted from 1."""
        self._cut_at, self._every, self._gap = (self.exchanges + nth, when), None, None

    def cut_every(self, nth: int, when: When) -> None:
        """Cuts the connection of each `nth` exchange from now on."""
        self._cut_at, self._every, self._gap = None, (nth, when), None

    def cut_about_every(self, nth: int, when: When) -> None:
        """Cuts the connection of each `nth` exchange on average: the next one comes after 1 to 2 `nth` - 1 of them, the
        same way each time. A caller whose attempts are all alike would meet what comes at equal distances always at the
        same place, and never get through."""
        gaps = Random(nth)
        self._gap = lambda: gaps.randint(1, 2 * nth - 1)
        self._cut_at, self._every = (self.exchanges + self._gap(), when), None

    def leave_alone(self) -> None:
        """Forwards everything."""
        self._cut_at = self._every = self._gap = None

    def cut_all(self) -> None:
        """Cuts all connections that are open."""
        for link in list(self._links):
            link.cut()

    def judge(self) -> When | None:
        """Counts an exchange; whether and how its connection is to be cut."""
        self.exchanges += 1
        if self._cut_at is not None and self.exchanges == self._cut_at[0]:
            when = self._cut_at[1]
            if self._gap is not None:
                self._cut_at = (self.exchanges + self._gap(), when)
            return when
        if self._every is not None and self.exchanges % self._every[0] == 0:
            return self._every[1]
        return None

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_server = await asyncio.open_connection(self.host, self.server_port)
        except OSError:
            writer.close()
            return
        link = _Link(self, (reader, writer), to_server)
        self._links.add(link)
        try:
            await link.run()
        finally:
            self._links.discard(link)


class _Link:
    """A client's connection and its connection to the server."""

    def __init__(
        self,
        proxy: Proxy,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self.proxy = proxy
        self.from_client, self.to_client = client
        self.from_server, self.to_server = server
        self.loses_answer = False
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Forwards both ways until either side ends."""
        async with asyncio.TaskGroup() as both:
            both.create_task(self._up())
            both.create_task(self._down())

    def cut(self) -> None:
        """Resets both connections."""
        self.proxy.cuts += 1
        self._over.set()
        for writer in (self.to_client, self.to_server):
            if not writer.is_closing():
                writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, _RESET)
                writer.transport.abort()

    async def _up(self) -> None:
        while data := await _read(self.from_client):
            when = self.proxy.judge()
            if when == "before":
                self.cut()
                return
            self.loses_answer = self.loses_answer or when == "after"
            if not await self._forward(self.to_server, data):
                break
        self.to_server.close()

    async def _down(self) -> None:
        while data := await _read(self.from_server):
            if self.loses_answer:
                self.cut()
                return
            if not await self._forward(self.to_client, data):
                break
        if self.proxy.keeps_ends:
            self.proxy.kept.set()
            await self._over.wait()
        self.to_client.close()

    async def _forward(self, writer: asyncio.StreamWriter, data: bytes) -> bool:
        if self.proxy.delay_s:
            with suppress(TimeoutError):  # as long as the delay, unless the connection is cut meanwhile
                await asyncio.wait_for(self._over.wait(), self.proxy.delay_s)
        try:
            writer.write(data)
            await writer.drain()
        except ConnectionError:
            return False
        return True


async def _read(reader: asyncio.StreamReader) -> bytes:
    """What came; nothing when the connection is over, in order or not."""
    try:
        return await reader.read(CHUNK_BYTES)
    except ConnectionError:
        return b""
