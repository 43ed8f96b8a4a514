"""A bounded pool of connections: a dead one is replaced, one whose state is in doubt is dropped, never mended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import asyncpg

Raw: TypeAlias = Any
"""A connection of asyncpg, which ships no type hints."""

IDLE_S = 240.0
"""A connection that nobody used for so long is not trusted any more: firewalls forget them without a word."""


class Busy(Exception):
    """All connections stayed in use for the whole deadline."""


class Pool:
    """At most `most` connections, made by `connect` as they are needed. `fit`: whether one may still be used."""

    def __init__(
        self, connect: Callable[[], Awaitable[Raw]], most: int, fit: Callable[[Raw], bool] = lambda _: True
    ) -> None:
        self._connect = connect
        self._fit = fit
        self._most = most
        self._free = asyncio.Semaphore(most)
        self._idle: list[tuple[Raw, float]] = []
        self._used: set[Raw] = set()
        self._given = asyncio.Event()

    async def take(self, within_s: float) -> Raw:
        """A connection that lives, as far as is known. Raises Busy, or what connecting raises."""
        try:
            # Not `wait_for`, which drops a cancellation that comes together with the place.
            async with asyncio.timeout(within_s):
                await self._free.acquire()
        except TimeoutError:
            raise Busy from None
        try:
            connection = self._kept() or await self._another(within_s)
        except BaseException:
            self._free.release()
            raise
        self._used.add(connection)
        return connection

    async def _another(self, within_s: float) -> Raw:
        """A new one; where the server has none left for us, one of ours that comes back in time: who holds some is not
        without its store."""
        until_s = asyncio.get_running_loop().time() + within_s
        try:
            return await self._connect()
        except asyncpg.TooManyConnectionsError:
            if (kept := await self._given_back(until_s)) is None:
                raise
            return kept

    async def _given_back(self, until_s: float) -> Raw | None:
        """None when the time is over, or nobody has one any more that could come back."""
        while (kept := self._kept()) is None and self._used:
            self._given.clear()
            try:
                async with asyncio.timeout_at(until_s):
                    await self._given.wait()
            except TimeoutError:
                return None
        return kept

    def give(self, connection: Raw, sound: bool) -> None:
        """Gives it back. Not `sound`: nobody knows what its server is doing; it is dropped."""
        self._used.discard(connection)
        if connection.is_closed():
            pass
        elif sound:
            self._idle.append((connection, asyncio.get_running_loop().time()))
        else:
            connection.terminate()
        self._given.set()
        self._free.release()

    def drop_idle(self) -> None:
        """Trusts none of those that nobody uses: another one's server has gone without a word, and theirs may have."""
        while self._idle:
            self._idle.pop()[0].terminate()

    async def close(self, within_s: float) -> None:
        """Waits for what is in use, so long, and ends all."""
        try:
            async with asyncio.timeout(within_s):
                for _ in range(self._most):
                    await self._free.acquire()
                for connection, _ in self._idle:
                    await connection.close()
        except (TimeoutError, OSError):
            pass  # they are ended without a word
        finally:
            for connection in (*self._used, *(idle for idle, _ in self._idle)):
                connection.terminate()
            self._idle.clear()

    def _kept(self) -> Raw | None:
        """The one used last of those that nobody uses: a server that has calmed down has the others closed."""
        now_s = asyncio.get_running_loop().time()
        while self._idle:
            connection, since_s = self._idle.pop()
            if now_s - since_s < IDLE_S and not connection.is_closed() and self._fit(connection):
                return connection
            connection.terminate()
        return None
