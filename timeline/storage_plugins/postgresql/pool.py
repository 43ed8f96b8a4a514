"""A bounded pool of connections, and which server they are to.

A dead connection is replaced, one whose state is in doubt is dropped, never mended. Of several hosts the one that takes
writes is taken, and never one that was promoted away from: a standby that is promoted begins a new timeline of its own,
with a higher number. A former primary that comes back by itself, or was only cut off, takes writes as well, under the
old number: what it takes is lost. All hosts are asked for each connection, so that the one promoted last is found
wherever its name stands, and a machine that does not answer keeps nobody from the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from ssl import SSLError
from typing import Any, TypeAlias

import asyncpg

from timeline.storage_plugins.contract import StoreUnavailable
from timeline.storage_plugins.postgresql.failures import FAILURES, REFUSED, sentence, state_of
from timeline.storage_plugins.postgresql.location import PostgresqlLocation

Raw: TypeAlias = Any
"""A connection of asyncpg, which ships no type hints."""

IDLE_S = 240.0
"""A connection that nobody used for so long is not trusted any more: firewalls forget them without a word."""


class Busy(Exception):
    """All connections stayed in use for the whole deadline."""


class PostgresqlPool:
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


# ── which server ──

log = logging.getLogger("timeline.store")

LOOK_S = 0.5
"""So long the other hosts have to answer, too, once one was found that takes writes."""
_POSITION = """
SELECT system_identifier, ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int8
FROM pg_control_system()
"""
_Task = asyncio.Task[Raw]


class Hosts:
    """The servers of one URL. `connect` opens a connection by what the driver is given; its class notes `system`, the
    server's lineage, and `promoted`, the number of its timeline (0: not known)."""

    def __init__(self, location: PostgresqlLocation, connect: Callable[[str], Awaitable[Raw]], timelines: bool) -> None:
        self._location = location
        self._connect = connect
        self._timelines = timelines
        self._system = self._newest = 0
        self._told: set[int] = set()

    async def connect(self) -> Raw:
        """A connection to the one to take. Raises StoreUnavailable where there is none, or what connecting raises."""
        if not self._location.hosts:
            best = await self._reach(self._location.dsn)
        else:
            tasks = [asyncio.ensure_future(self._reach(dsn)) for dsn in self._location.hosts]
            best = None
            try:
                best = self._chosen(tasks, await _answered(tasks))
            finally:
                for task in tasks:
                    task.cancel()
                    task.add_done_callback(lambda done: _let_go(done, best))
        if best.promoted and best.system != self._system:
            self._system, self._newest = best.system, 0
        if self.behind(best):
            best.terminate()
            raise StoreUnavailable(
                f"the only server that takes writes is on timeline {best.promoted}, and another was promoted to "
                f"{self._newest} since: what this one takes would be lost; stop it, and make it a standby of the other"
            )
        self._newest = best.promoted or self._newest
        return best

    def behind(self, raw: Raw) -> bool:
        """Whether another server was promoted since the one that this is a connection to."""
        return bool(raw.promoted) and raw.system == self._system and raw.promoted < self._newest

    async def _reach(self, dsn: str) -> Raw:
        async with asyncio.timeout(self._location.timeout_ms / 1000):
            raw = await self._connect(dsn)
            try:
                if self._timelines:
                    raw.system, raw.promoted = await raw.fetchrow(_POSITION)
            except asyncpg.PostgresError:
                pass  # a standby, for those who want one; or a service that does not tell
            except BaseException:
                raw.terminate()
                raise
            return raw

    def _chosen(self, tasks: list[_Task], answered: list[_Task]) -> Raw:
        """The one promoted last among those that answered; of equals the first in the URL."""
        found = [task.result() for task in tasks if task in answered and task.exception() is None]
        if not found:
            raise self._nowhere([task.exception() or TimeoutError() for task in tasks])
        best = max(found, key=lambda raw: int(raw.promoted))
        for raw in found:
            if raw.system == best.system and raw.promoted < best.promoted and raw.promoted not in self._told:
                self._told.add(raw.promoted)
                log.warning(
                    "%s: two servers take writes; the one on timeline %d is passed over for the one on %d: stop it, "
                    "or whoever else finds it loses what it writes there",
                    *(self._location.shown, raw.promoted, best.promoted),
                )
        return best

    def _nowhere(self, errors: list[BaseException]) -> BaseException:
        """Why there is no server: what must be mended before any is found, else what each host says."""
        for error in errors:
            if _is_to_be_mended(error):
                return error
        hosts = self._location.shown.partition("://")[2].rpartition("@")[2].partition("/")[0].split(",")
        said = zip(hosts, map(_why, errors), strict=False)
        return StoreUnavailable(f"no host takes writes: {'; '.join(': '.join(pair) for pair in said)}")


def _is_to_be_mended(error: BaseException) -> bool:
    """Whether waiting does not help."""
    if isinstance(error, (SSLError, asyncpg.exceptions.ClientConfigurationError)):
        return True
    return state_of(error) in REFUSED or not isinstance(error, FAILURES)


def _why(error: BaseException) -> str:
    standby = isinstance(error, asyncpg.exceptions.TargetServerAttributeNotMatched)
    return "a standby, or takes no writes" if standby else sentence(error)


async def _answered(tasks: list[_Task]) -> list[_Task]:
    """Those that have answered or failed: all, but for those that are silent long after one has answered."""
    left, within_s = set(tasks), None
    while left:
        done, left = await asyncio.wait(left, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            break
        if any(task.exception() is None for task in done):
            within_s = LOOK_S
    return [task for task in tasks if task.done()]


def _let_go(task: _Task, best: Raw | None) -> None:
    """Ends a connection that was made and not taken."""
    if not task.cancelled() and task.exception() is None and task.result() is not best:
        task.result().terminate()
