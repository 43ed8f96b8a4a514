"""One connection to a Redis server: commands out, answers in, in their order.

hiredis packs and parses its bytes. One call at a time uses a connection. One that failed in the middle is closed, so
that no call reads another's answers.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence
from typing import Any

import hiredis

from timeline.storage_plugins.redis.location import RedisLocation

Address = tuple[str, int]


class Refusal(Exception):
    """A server's answer that is an error. `greeting`: the command that it answers, where `connect` sent that."""

    greeting = ""

    @property
    def code(self) -> str:
        """Its first word, which is Redis's error code."""
        return str(self).partition(" ")[0]


class Broken(Exception):
    """The connection ended, or its server was silent for too long. `sent`: commands had been sent by then."""

    def __init__(self, reason: str, sent: bool = True) -> None:
        super().__init__(reason)
        self.sent = sent


class RedisConnection(asyncio.Protocol):
    """A connection, made by `connect`. A reply that is an error is a value, a `Refusal`."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader(protocolError=Broken, replyError=Refusal)
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._answers: list[Any] = []
        self._wanted = 0
        self._end = ""

    @property
    def closed(self) -> bool:
        """Whether it can no longer be used."""
        return self._transport is None or self._transport.is_closing()

    async def exchange(self, commands: Sequence[Sequence[Any]], timeout_s: float) -> list[Any]:
        """Send the commands and return what each answers. Raise Broken."""
        transport = self._transport
        if transport is None or transport.is_closing():
            raise Broken(self._end or "the connection is closed", sent=False)
        self._answers, self._wanted = [], len(commands)
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            transport.write(b"".join([hiredis.pack_command(tuple(command)) for command in commands]))
            async with asyncio.timeout(timeout_s):
                await self._waiting
        except TimeoutError as error:
            self.close()
            raise Broken(f"no answer within {timeout_s:g} s") from error
        except BaseException:
            self.close()
            raise
        finally:
            self._waiting = None
        return self._answers

    def close(self) -> None:
        """Close it at once, without sending what is left."""
        if self._transport is not None:
            self._transport.abort()

    # ── asyncio's side ──

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        reader, answers = self._reader, self._answers
        try:
            reader.feed(data)
            while (answer := reader.gets()) is not False:
                answers.append(answer)
        except Broken as error:
            self._fail(f"it does not speak Redis' protocol: {error}")
            self.close()
            return
        if self._waiting is not None and len(answers) >= self._wanted and not self._waiting.done():
            self._waiting.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(str(error or "the server closed the connection"))

    def _fail(self, reason: str) -> None:
        self._end = self._end or reason
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(Broken(self._end))


async def connect(
    location: RedisLocation, address: Address, tls: ssl.SSLContext | None, cluster_uid: str = ""
) -> RedisConnection:
    """Return a connection that is authenticated and has chosen its database. Raise Broken, or Refusal.
    `cluster_uid`: what the store's own record must say, if this server has it."""
    timeout_s = location.timeout_ms / 1000
    try:
        async with asyncio.timeout(timeout_s):
            _, connection = await asyncio.get_running_loop().create_connection(RedisConnection, *address, ssl=tls)
    except TimeoutError as error:
        raise Broken(f"no connection within {timeout_s:g} s", sent=False) from error
    except OSError as error:
        raise Broken(str(error) or type(error).__name__, sent=False) from error
    hello: list[tuple[Any, ...]] = [("CLIENT", "SETNAME", "timeline")]
    if location.password or location.user:
        user = (location.user,) if location.user else ()
        hello.insert(0, ("AUTH", *user, location.password))
    if location.db:
        hello.append(("SELECT", location.db))
    if cluster_uid:
        hello.append(("HGET", location.record, "cluster_uid"))
    try:
        answers = await connection.exchange(hello, timeout_s)
    except Broken as error:
        raise Broken(str(error), sent=False) from error
    for command, answer in zip(hello, answers, strict=True):
        if command[0] == "HGET":
            # Another node of a cluster may have the record, and one that loads its data cannot tell yet.
            if not isinstance(answer, Refusal) and answer != cluster_uid.encode():
                connection.close()
                raise Broken("it does not have the data of the cluster that was opened", sent=False)
        # A user who may not name its connection can work all the same.
        elif isinstance(answer, Refusal) and not (command[0] == "CLIENT" and answer.code == "NOPERM"):
            connection.close()
            answer.greeting = command[0]
            raise answer
    return connection


class RedisPool:
    """The connections to one server: a bounded number, one call each, kept while they last. `cluster_uid`: see
    `connect`."""

    def __init__(
        self, location: RedisLocation, address: Address, tls: ssl.SSLContext | None, cluster_uid: str = ""
    ) -> None:
        self._location, self._address, self._tls = location, address, tls
        self._cluster_uid = cluster_uid
        self._free = asyncio.Semaphore(location.connections)
        self._idle: list[RedisConnection] = []
        self._used: set[RedisConnection] = set()
        self._closed = False

    async def exchange(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send commands on a connection of their own and return what each answers. Raise Broken, or Refusal if no
        connection could be made."""
        timeout_s = self._location.timeout_ms / 1000
        try:
            async with asyncio.timeout(timeout_s):
                await self._free.acquire()
        except TimeoutError as error:
            raise Broken(
                f"all {self._location.connections} connections were busy for {timeout_s:g} s; "
                "connections=… in the URL allows more",
                sent=False,
            ) from error
        connection: RedisConnection | None = None
        try:
            while self._idle and connection is None:
                kept = self._idle.pop()
                connection = None if kept.closed else kept
            connection = connection or await connect(self._location, self._address, self._tls, self._cluster_uid)
            if self._closed:
                connection.close()
                raise Broken("the store was closed", sent=False)
            self._used.add(connection)
            return await connection.exchange(commands, timeout_s)
        finally:
            if connection is not None:
                self._used.discard(connection)
                if not connection.closed and not self._closed:
                    self._idle.append(connection)
            self._free.release()

    def close(self) -> None:
        """Close all of them. Calls that wait for one, or for it to be made, raise Broken."""
        self._closed = True
        for connection in (*self._idle, *self._used):
            connection.close()
        self._idle.clear()


__all__ = ["Address", "Broken", "RedisConnection", "RedisPool", "Refusal", "connect"]
