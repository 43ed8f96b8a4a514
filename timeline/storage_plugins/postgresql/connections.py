"""Connections at work: deadlines, repetitions, and what a failure means: nothing happened, or something may have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from ssl import SSLCertVerificationError, SSLError
from typing import Any, ClassVar, TypeAlias

import asyncpg

from timeline.storage_plugins.contract import StoreError, StoreRefused, StoreUnavailable, StoreUnknown
from timeline.storage_plugins.postgresql.pool import (
    FAILURES,
    REFUSED,
    SCHEMA,
    Busy,
    Hosts,
    PostgresqlLocation,
    PostgresqlPool,
    Raw,
    judged,
    sentence,
    state_of,
)
from timeline.storage_plugins.sql.statements import Atomic, Plan, Result, Statement, drive_async

TRIES = 5
SETTINGS = {
    "application_name": "timeline",
    "client_encoding": "UTF8",
    "jit": "off",
    # Every statement is written for an index. Array parameters, and tables that grow from nothing to millions between
    # two statistics, mislead the planner into reading, sorting or comparing a whole table. A generic plan keeps what
    # the planner believed at first.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_material": "off",
    "random_page_cost": "1.1",
    "plan_cache_mode": "force_generic_plan",
    "default_transaction_isolation": "read committed",
    # A broker whose machine is gone releases its locks soon, not after the two hours of a system's default.
    "idle_in_transaction_session_timeout": "60s",
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
}
PLANNING = ("enable_seqscan", "enable_hashjoin", "enable_mergejoin", "plan_cache_mode")
"""The settings that statements need on large tables: `schema` checks that they arrived."""
_TAKEN = "23505"
_REPEATED = frozenset(("40001", "40P01", _TAKEN))
"""Serialization failure and deadlock: the server has undone the transaction, and it is to be sent again. And a row
number that is taken, which a server that lost its last moments gave out twice."""
_NO_PEM = (9, 0x80009)
"""OpenSSL's error for a file that is not PEM (ERR_R_PEM_LIB), of version 1.1 and of version 3."""

_WAIT = "SyncRepWaitForLSN"
"""The function in which the server stops waiting for a standby. It has committed, and answers as if all were well. Its
warning is in the server's language; the function's name is not."""


class _Knowing(asyncpg.Connection):  # type: ignore[misc]
    """A connection that knows which server it is to, and whether its last commit may be on that server alone."""

    system = promoted = 0
    """The server's lineage, and the number of its timeline: see `Hosts`."""
    unsafe = False
    """Whether the last commit may be on this server alone: its wait for a standby was cancelled."""

    def listen(self) -> None:
        """Receive the server's notices, each before the answer that it comes with."""
        self.add_log_listener(self._heard)

    @staticmethod
    def _heard(raw: Raw, message: Any) -> None:
        if message.server_source_function == _WAIT:
            raw.unsafe = True


class Qualified(dict[str, str]):
    """Statements as written, with tables in schema `timeline`, by statements for the schema that the URL names. Every
    name is qualified: a pooler between us and the server need not keep a search_path."""

    def __init__(self, schema: str) -> None:
        super().__init__()
        self._schema = schema

    def __missing__(self, statement: str) -> str:
        text = self[statement] = self.qualified(statement)
        return text

    def qualified(self, statement: str) -> str:
        """Return `statement` with our schema's name."""
        return statement.replace(f"{SCHEMA}.", f"{self._schema}.")


class PostgresqlConnection:
    """A connection in use: asyncpg's, with statements qualified."""

    __slots__ = ("_qualified", "raw")

    def __init__(self, raw: Raw, qualified: Qualified) -> None:
        self.raw = raw
        self._qualified = qualified

    async def fetch(self, statement: str, *values: Any) -> list[Any]:
        """Return all records."""
        found: list[Any] = await self.raw.fetch(self._qualified[statement], *values)
        return found

    async def fetchval(self, statement: str, *values: Any) -> Any:
        """Return the first field of the first record, or None."""
        return await self.raw.fetchval(self._qualified[statement], *values)

    async def execute(self, statement: str, *values: Any) -> str:
        """Return the command's tag, as in `DELETE 3`."""
        tag: str = await self.raw.execute(self._qualified[statement], *values)
        return tag

    async def answer(self, asked: Statement) -> Any:
        """Return the answer of a statement."""
        if asked.read is not None:
            return asked.read(await self.fetch(asked.text, *asked.values))
        tag = await self.execute(asked.text, *asked.values)
        return int(tag.rpartition(" ")[2]) if asked.counts else None

    async def run(self, plan: Plan[Result]) -> Result:
        """Run a plan on this connection."""
        return await drive_async(plan, self.answer, lambda asked: self.run(asked.plan()))

    async def executemany(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run the statement with each of `rows`."""
        await self.raw.executemany(self._qualified[statement], rows)


@contextmanager
def refused_rights(location: PostgresqlLocation) -> Iterator[None]:
    """Raise StoreRefused for a right that this user lacks, while the schema is made or read."""
    try:
        yield
    except asyncpg.PostgresError as error:
        if state_of(error) != "42501":
            raise
        raise StoreRefused(
            f"{location.shown}: this user may not create or use schema {location.schema!r}: GRANT CREATE ON DATABASE … "
            "TO the user, or let it own the schema"
        ) from error


Act: TypeAlias = Callable[[PostgresqlConnection], Awaitable[Result]]


class PostgresqlConnections:
    """The pool at work. A call waits for a connection no longer than its deadline. A server with PostgreSQL's protocol
    and another SQL has `settings` and `wording` of its own."""

    settings: dict[str, str] = SETTINGS
    wording: ClassVar[type[Qualified]] = Qualified
    tries: ClassVar[int] = TRIES
    timelines: ClassVar[bool] = True
    """Whether promoted servers number their timelines."""

    def __init__(self, location: PostgresqlLocation, renumber: Callable[[], None]) -> None:
        self._location = location
        self._deadline_s = location.timeout_ms / 1000
        self._renumber = renumber
        self._qualified = self.wording(location.schema)
        self._hosts = Hosts(location, self._connect, self.timelines)
        self._pool: PostgresqlPool | None = None

    async def open(self) -> None:
        """Connect once, to report at once what does not work. Raise StoreRefused or StoreUnavailable."""
        shown = self._location.shown
        pool = PostgresqlPool(self._hosts.connect, self._location.pool, fit=lambda raw: not self._hosts.behind(raw))
        try:
            pool.give(await pool.take(self._deadline_s), sound=True)
        except SSLCertVerificationError as error:
            raise StoreRefused(
                f"{shown}: the server's certificate is not trusted ({error.verify_message}): name its authority with "
                "sslrootcert= in the URL, and the server as its certificate does"
            ) from error
        except asyncpg.exceptions.ClientConfigurationError as error:
            raise StoreRefused(f"{shown}: {sentence(error)}") from error
        except SSLError as error:
            if error.library not in ("PEM", "X509") and error.errno not in _NO_PEM:  # of the connection, not of a file
                raise StoreUnavailable(f"{shown}: {sentence(error)}") from error
            files = "a file that sslrootcert, sslcert, sslkey or sslcrl names"
            raise StoreRefused(f"{shown}: {files} is not what it should be, in PEM ({sentence(error)})") from error
        except FAILURES as error:
            if state_of(error) in REFUSED:
                raise StoreRefused(f"{shown}: {REFUSED[state_of(error)]}") from error
            known = judged(error, doubtful=False)
            raise StoreUnavailable(f"{shown}: {known.reason}") from error
        except ValueError as error:
            raise StoreRefused(f"{shown}: the driver cannot read this URL ({type(error).__name__})") from None
        self._pool = pool

    async def _connect(self, dsn: str) -> Raw:
        raw = await asyncpg.connect(
            dsn,
            timeout=self._deadline_s,
            command_timeout=self._deadline_s,
            server_settings=self.settings,
            connection_class=_Knowing,
        )
        raw.listen()
        return raw

    async def close(self) -> None:
        """Close all connections. Calls under way have one deadline to end."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close(self._deadline_s)

    async def use(self, act: Act[Result], writes: bool) -> Result:
        """Run `act` on a connection: one statement, which commits by itself. `writes`: if its answer is lost, it may
        have happened."""
        for attempt in range(self.tries):
            pool, raw = await self._take()
            sound = False
            try:
                result = await act(PostgresqlConnection(raw, self._qualified))
                sound = _safe(raw)
                return result
            except FAILURES as error:
                sound = _said(error, pool)
                if not await self._again(error, attempt):
                    raise judged(error, writes) from error
            except StoreError:
                sound = not raw.unsafe
                raise
            finally:
                pool.give(raw, sound)
        raise AssertionError("the last try returns or raises")

    async def transact(self, act: Act[Result]) -> Result:
        """Run `act` in a transaction, again if the server undid it for the sake of another. After anything but a plain
        answer, the connection is dropped, and its transaction with it."""
        for attempt in range(self.tries):
            pool, raw = await self._take()
            committing = sound = False
            try:
                await raw.execute("BEGIN")
                result = await act(PostgresqlConnection(raw, self._qualified))
                committing = True
                await raw.execute("COMMIT")
                sound = _safe(raw)
                return result
            except FAILURES as error:
                if _said(error, pool) and not committing:
                    sound = await _undone(raw)
                if not await self._again(error, attempt):
                    raise judged(error, committing) from error
            except StoreError:
                sound = not raw.unsafe and await _undone(raw)
                raise
            finally:
                pool.give(raw, sound)
        raise AssertionError("the last try returns or raises")

    async def _again(self, error: BaseException, attempt: int) -> bool:
        """Return whether to try again: the server has undone it, for the sake of another."""
        state = state_of(error)
        if state == _TAKEN:
            self._renumber()
        return state in _REPEATED and attempt < self.tries - 1

    async def _take(self) -> tuple[PostgresqlPool, Raw]:
        pool = self._pool
        if pool is None:
            raise StoreUnavailable("the store is not open")
        try:
            return pool, await pool.take(self._deadline_s)
        except Busy:
            raise StoreUnavailable(
                f"no connection came free within the deadline: all {self._location.pool} of the pool are busy"
            ) from None
        except FAILURES as error:
            raise judged(error, doubtful=False) from error


class Steps:
    """One call of the store that takes several steps. Each step commits by itself: once one has written, a later
    failure leaves the call unknown."""

    def __init__(self, connections: PostgresqlConnections) -> None:
        self._connections = connections
        self._begun = False

    async def run(self, plan: Plan[Result]) -> Result:
        """Run a plan. Each of its statements is a step."""
        return await drive_async(plan, self._ask, self._atomic)

    async def _ask(self, asked: Statement) -> Any:
        return await self.use(lambda connection: connection.answer(asked), asked.writes)

    async def _atomic(self, asked: Atomic) -> Any:
        def act(connection: PostgresqlConnection) -> Awaitable[Any]:
            return connection.run(asked.plan())

        return await (self.use(act, writes=True) if asked.single else self.transact(act))

    async def use(self, act: Act[Result], writes: bool) -> Result:
        """Do `PostgresqlConnections.use` as a step."""
        return await self._step(self._connections.use(act, writes), writes)

    async def transact(self, act: Act[Result]) -> Result:
        """Do `PostgresqlConnections.transact` as a step."""
        return await self._step(self._connections.transact(act), True)

    async def _step(self, step: Awaitable[Result], writes: bool) -> Result:
        try:
            result = await step
        except StoreUnavailable as error:
            if self._begun:
                raise StoreUnknown(f"a part of it was done before this: {error.reason}") from error
            raise
        self._begun = self._begun or writes
        return result


async def _undone(raw: Raw) -> bool:
    """Roll back; return False if that fails, so that the connection must be dropped."""
    if raw.is_closed():
        return False
    try:
        await raw.execute("ROLLBACK")
    except FAILURES:
        return False
    return True


def _said(error: BaseException, pool: PostgresqlPool) -> bool:
    """Return whether the error is the server's answer, so that the connection is still usable. If the connection was
    lost or is silent, drop the idle ones, which are to the same server."""
    said = isinstance(error, asyncpg.PostgresError)
    if not said:
        pool.drop_idle()
    return said


def _safe(raw: Raw) -> bool:
    """Return True if the commit is as safe as the server makes it. Raise StoreUnknown if it is not."""
    if raw.unsafe:
        raise StoreUnknown("the server's wait for its standby was broken off, and the standby may not have this")
    return True
