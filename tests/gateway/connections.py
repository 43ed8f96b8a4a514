"""Connections to a gateway, byte by byte, for requests that no library would send."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, NamedTuple, Self


class Answer(NamedTuple):
    """`headers`: by lower-case name."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """One connection to a URL. `room`: bytes that arrive before they are read."""

    def __init__(self, url: str, room: int = 2**16) -> None:
        host, _, port = url.removeprefix("http://").rstrip("/").partition(":")
        self._host, self._port, self._room = host, int(port), room
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=self._room)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def send(self, data: bytes) -> None:
        """Send, as far as the other side takes it."""
        self._writer.write(data)
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    def push(self, data: bytes) -> None:
        """Send, and do not wait until the other side takes it."""
        self._writer.write(data)

    def end(self) -> None:
        """Send nothing more."""
        self._writer.write_eof()

    def deafen(self) -> None:
        """Read nothing any more."""
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    async def answer(self) -> Answer:
        """The next answer. Raise EOFError if there is none."""
        try:
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EOFError from None
        status, *lines = head.rstrip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        code = int(status.split()[1])
        if code == 100:
            return await self.answer()
        if headers.get("transfer-encoding") == "chunked":
            return Answer(code, headers, await self._chunks())
        return Answer(code, headers, await self._reader.readexactly(int(headers.get("content-length", 0))))

    async def _chunks(self) -> bytes:
        parts = []
        while size := int(await self._reader.readline(), 16):
            parts.append(await self._reader.readexactly(size))
            await self._reader.readexactly(2)
        await self._reader.readexactly(2)
        return b"".join(parts)

    async def answers(self) -> list[Answer]:
        """All answers until the other side closes."""
        found = []
        with contextlib.suppress(EOFError):
            while True:
                found.append(await self.answer())
        return found

    async def rest(self) -> bytes:
        """All bytes until the other side closes."""
        with contextlib.suppress(ConnectionError):
            return await self._reader.read()
        return b""


def posted(path: str, body: bytes, *more: str, kind: str = "application/json") -> bytes:
    """A whole request."""
    lines = (f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Type: {kind}", f"Content-Length: {len(body)}", *more)
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
