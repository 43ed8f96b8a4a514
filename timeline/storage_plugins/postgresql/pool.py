"""The way to a server: the URL, the host to take, the failures, and a bounded pool of connections.

A dead connection is replaced, and one in a doubtful state is dropped. Of several hosts, the one that takes writes is
taken, and never one that was replaced by a promotion. A promoted standby begins a new timeline with a higher number. A
former primary that comes back, or was only cut off, takes writes as well, under the old number: those writes are lost.
Each connection asks all hosts, and so finds the one promoted last. A machine that does not answer causes no delay.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from ssl import SSLError
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import asyncpg

from timeline.storage_plugins import shown
from timeline.storage_plugins.contract import StoreError, StoreFull, StoreRefused, StoreUnavailable, StoreUnknown
from timeline.storage_plugins.sql import number_option

log = logging.getLogger("timeline.store")

SCHEMA = "timeline"
POOL, POOL_RANGE = 8, (2, 1_000)
TIMEOUT_MS, TIMEOUT_RANGE_MS = 10_000, (10, 3_600_000)
_PASSED_ON = frozenset(
    ("sslmode", "sslcert", "sslkey", "sslrootcert", "sslcrl", "sslpassword", "passfile", "target_session_attrs")
)
_WRITABLE = ("read-write", "primary")
_FILES = ("sslcert", "sslkey", "sslrootcert", "sslcrl")


@dataclass(frozen=True, slots=True)
class PostgresqlLocation:
    """The content of a `postgresql://` URL. `dsn`: the driver's URL. `hosts`: the same for each host, if the one that
    takes writes is to be found among several. `schema`: the schema of our tables. `pool`: the most connections at once.
    `timeout_ms`: a call's deadline."""

    dsn: str
    shown: str
    schema: str = SCHEMA
    pool: int = POOL
    timeout_ms: int = TIMEOUT_MS
    hosts: tuple[str, ...] = ()

    @classmethod
    def of(cls, url: str, scheme: str = "postgresql", port: int = 5432) -> PostgresqlLocation:
        """Read `postgresql://user:password@host:port,host:port/database?schema=&pool=&timeout_ms=&sslmode=`. The rest
        comes from PGHOST, PGUSER, PGPASSWORD, PGSSLMODE and so on. Raise StoreRefused, which says what to write
        instead."""
        try:
            parts = urlsplit(url)
            options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        except ValueError as bad:
            raise StoreRefused(f"{shown(url)!r} is no URL: write {scheme}://user@host:{port}/database") from bad
        schema = options.pop("schema", SCHEMA)
        if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", schema):
            raise StoreRefused(f"schema must be small letters, digits and _, not {schema!r:.80}")
        pool = number_option("pool", options.pop("pool", str(POOL)), POOL_RANGE)
        timeout_ms = number_option("timeout_ms", options.pop("timeout_ms", str(TIMEOUT_MS)), TIMEOUT_RANGE_MS)
        unknown = sorted(set(options) - _PASSED_ON)
        if unknown:
            known = ", ".join(sorted({"schema", "pool", "timeout_ms", *_PASSED_ON}))
            raise StoreRefused(f"{unknown[0]!r:.80} is no option of {scheme}://; known are {known}")
        for name in _FILES:
            if options.get(name) and not os.path.isfile(options[name]):
                raise StoreRefused(f"{name} names a file; {options[name]!r:.200} is none")
        # Of several hosts, the one that takes writes. After a failover, the next connection finds the new one.
        user, at, hosts = parts.netloc.rpartition("@")
        wanted = options.setdefault("target_session_attrs", "read-write" if "," in hosts else "any")

        def dsn(hosts: str) -> str:
            return urlunsplit(("postgresql", f"{user}{at}{hosts}", parts.path, urlencode(options), ""))

        several = "," in hosts and wanted in _WRITABLE
        each = tuple(dsn(host) for host in hosts.split(",")) if several else ()
        return cls(dsn(hosts), shown(url), schema, pool, timeout_ms, each)


# ── failures ──

_DOUBTFUL = ("08", "40003", "57P01", "57P02", "57P03")
"""SQLSTATEs after which the outcome of a commit is not known."""
NO_DATABASE = "3D000"
REFUSED = {
    "28P01": "the password is wrong: correct it in the URL, in PGPASSWORD or in ~/.pgpass",
    "28000": "this user may not connect: see the server's pg_hba.conf",
    NO_DATABASE: "there is no such database: create it (createdb), or name another one in the URL",
    "42501": "this user lacks rights: it must own the schema, or be allowed to create one in the database",
}
_UNAVAILABLE = {
    "53300": "the server has no connection left: raise its max_connections, or lower pool= in the URLs of the brokers",
    "53200": "the server is out of memory",
    "57P03": "the server starts up, shuts down or recovers",
    "25006": "the server takes no writes (it is a standby, or recovers): give the primary's address, or all hosts",
    "42501": REFUSED["42501"],
}
_FULL, _FREE = "53100", "the server's disk is full: free some space"
FAILURES = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError, EOFError)


def sentence(error: BaseException) -> str:
    """Return what went wrong, without parts of the URL. The driver's own texts name at most hosts."""
    if isinstance(error, TimeoutError):
        return "no answer within the deadline"
    words = " ".join(str(error).split())
    if isinstance(error, socket.gaierror):
        return "this host name is not known"
    # Of a name with several addresses, asyncio's error has no errno: "Multiple exceptions: [Errno 111] …".
    if isinstance(error, ConnectionRefusedError) or f"[Errno {errno.ECONNREFUSED}]" in words:
        return "no server listens there"
    return f"{type(error).__name__}: {words[:300]}" if words else type(error).__name__


def state_of(error: BaseException) -> str:
    """Return the server's own code of an error; empty: it is not the server's."""
    return getattr(error, "sqlstate", None) or ""


def judged(error: BaseException, doubtful: bool) -> StoreError:
    """Return the contract's error. `doubtful`: the statement may have been committed if no answer came."""
    if isinstance(error, StoreError):
        return error
    state = state_of(error)
    said = isinstance(error, asyncpg.PostgresError) and state and not state.startswith(_DOUBTFUL)
    if doubtful and not said:
        return StoreUnknown(sentence(error))
    if state == _FULL:
        return StoreFull(_FREE)
    return StoreUnavailable(_UNAVAILABLE.get(state, sentence(error)))


# ── the pool ──

Raw: TypeAlias = Any
"""A connection of asyncpg, which has no type hints."""

IDLE_S = 240.0
"""A connection that was idle for so long is not used again: firewalls drop those silently."""


class Busy(Exception):
    """All connections were in use for the whole deadline."""


class PostgresqlPool:
    """At most `most` connections, made by `connect` when needed. `fit`: whether one may still be used."""

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
        """Return a connection that seems to live. Raise Busy, or what `connect` raises."""
        try:
            # Not `wait_for`, which loses a cancellation that comes together with the place.
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
        """Return a new connection; if the server has none left for us, one of ours that comes back in time."""
        until_s = asyncio.get_running_loop().time() + within_s
        try:
            return await self._connect()
        except asyncpg.TooManyConnectionsError:
            if (kept := await self._given_back(until_s)) is None:
                raise
            return kept

    async def _given_back(self, until_s: float) -> Raw | None:
        """Return a connection that came back; None if the time is over or none can come back."""
        while (kept := self._kept()) is None and self._used:
            self._given.clear()
            try:
                async with asyncio.timeout_at(until_s):
                    await self._given.wait()
            except TimeoutError:
                return None
        return kept

    def give(self, connection: Raw, sound: bool) -> None:
        """Take a connection back. Not `sound`: its state is not known, and it is dropped."""
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
        """Drop all idle connections: another one's server has silently gone, and theirs may have too."""
        while self._idle:
            self._idle.pop()[0].terminate()

    async def close(self, within_s: float) -> None:
        """Wait so long for connections in use, then end all."""
        try:
            async with asyncio.timeout(within_s):
                for _ in range(self._most):
                    await self._free.acquire()
                for connection, _ in self._idle:
                    await connection.close()
        except (TimeoutError, OSError):
            pass  # they are terminated below
        finally:
            for connection in (*self._used, *(idle for idle, _ in self._idle)):
                connection.terminate()
            self._idle.clear()

    def _kept(self) -> Raw | None:
        """Return the idle connection that was used last, so that the others can close after a peak; None: there is
        none."""
        now_s = asyncio.get_running_loop().time()
        while self._idle:
            connection, since_s = self._idle.pop()
            if now_s - since_s < IDLE_S and not connection.is_closed() and self._fit(connection):
                return connection
            connection.terminate()
        return None


# ── which server ──

LOOK_S = 0.5
"""How long the other hosts may take to answer, once one was found that takes writes."""
_POSITION = """
SELECT system_identifier, ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int8
FROM pg_control_system()
"""
_Task = asyncio.Task[Raw]


class Hosts:
    """The servers of one URL. `connect` opens a connection by the driver's URL. Its class notes `system`, the server's
    lineage, and `promoted`, the number of its timeline (0: not known)."""

    def __init__(self, location: PostgresqlLocation, connect: Callable[[str], Awaitable[Raw]], timelines: bool) -> None:
        self._location = location
        self._connect = connect
        self._timelines = timelines
        self._system = self._newest = 0
        self._told: set[int] = set()

    async def connect(self) -> Raw:
        """Return a connection to the server to take. Raise StoreUnavailable if there is none, or what connecting
        raises."""
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
                f"The only server that takes writes is on timeline {best.promoted}, and another was promoted to "
                f"{self._newest} since. Writes to this one would be lost. Stop it, and make it a standby of the other."
            )
        self._newest = best.promoted or self._newest
        return best

    def behind(self, raw: Raw) -> bool:
        """Return whether another server was promoted since this connection's server."""
        return bool(raw.promoted) and raw.system == self._system and raw.promoted < self._newest

    async def _reach(self, dsn: str) -> Raw:
        async with asyncio.timeout(self._location.timeout_ms / 1000):
            raw = await self._connect(dsn)
            try:
                if self._timelines:
                    raw.system, raw.promoted = await raw.fetchrow(_POSITION)
            except asyncpg.PostgresError:
                pass  # a standby, where the URL asks for one, or a service that does not say
            except BaseException:
                raw.terminate()
                raise
            return raw

    def _chosen(self, tasks: list[_Task], answered: list[_Task]) -> Raw:
        """Return the server promoted last among those that answered; of equals, the first in the URL."""
        found = [task.result() for task in tasks if task in answered and task.exception() is None]
        if not found:
            raise self._nowhere([task.exception() or TimeoutError() for task in tasks])
        best = max(found, key=lambda raw: int(raw.promoted))
        for raw in found:
            if raw.system == best.system and raw.promoted < best.promoted and raw.promoted not in self._told:
                self._told.add(raw.promoted)
                log.warning(
                    "%s: Two servers take writes. The one on timeline %d is ignored for the one on %d. Stop it, since "
                    "other clients may write to it, and lose that.",
                    *(self._location.shown, raw.promoted, best.promoted),
                )
        return best

    def _nowhere(self, errors: list[BaseException]) -> BaseException:
        """Return why there is no server: an error that waiting cannot help, else what each host says."""
        for error in errors:
            if _is_permanent(error):
                return error
        hosts = self._location.shown.partition("://")[2].rpartition("@")[2].partition("/")[0].split(",")
        said = zip(hosts, map(_why, errors), strict=False)
        return StoreUnavailable(f"no host takes writes: {'; '.join(': '.join(pair) for pair in said)}")


def _is_permanent(error: BaseException) -> bool:
    """Return whether waiting does not help."""
    if isinstance(error, (SSLError, asyncpg.exceptions.ClientConfigurationError)):
        return True
    return state_of(error) in REFUSED or not isinstance(error, FAILURES)


def _why(error: BaseException) -> str:
    standby = isinstance(error, asyncpg.exceptions.TargetServerAttributeNotMatched)
    return "a standby, or takes no writes" if standby else sentence(error)


async def _answered(tasks: list[_Task]) -> list[_Task]:
    """Return the tasks that have answered or failed: all, except those still silent LOOK_S after one has answered."""
    left, within_s = set(tasks), None
    while left:
        done, left = await asyncio.wait(left, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            break
        if any(task.exception() is None for task in done):
            within_s = LOOK_S
    return [task for task in tasks if task.done()]


def _let_go(task: _Task, best: Raw | None) -> None:
    """End a connection that was made and not taken."""
    if not task.cancelled() and task.exception() is None and task.result() is not best:
        task.result().terminate()
