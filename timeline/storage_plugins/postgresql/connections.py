"""Connections at work: deadlines, what is tried again, and what a failure means: nothing happened, or something may
have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from ssl import SSLCertVerificationError, SSLError
from typing import Any, ClassVar, TypeAlias

import asyncpg

from timeline.storage_plugins.contract import StoreError, StoreRefused, StoreUnavailable, StoreUnknown
from timeline.storage_plugins.postgresql.failures import FAILURES, REFUSED, judged, sentence, state_of, unsent
from timeline.storage_plugins.postgresql.location import SCHEMA, PostgresqlLocation
from timeline.storage_plugins.postgresql.pool import Busy, Hosts, PostgresqlPool, Raw
from timeline.storage_plugins.sql.statements import Atomic, Plan, Result, Statement, drive_async

TRIES = 5
SETTINGS = {
    "application_name": "timeline",
    "client_encoding": "UTF8",
    "jit": "off",
    # Every statement is written for an index. Parameters that are arrays, and tables that grow from nothing to
    # millions between two looks at them, mislead the planner into reading, sorting or comparing all of a table; and
    # what it believed when it first saw a statement is what a generic plan keeps.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_material": "off",
    "random_page_cost": "1.1",
    "plan_cache_mode": "force_generic_plan",
    "default_transaction_isolation": "read committed",
    # A broker whose machine is gone lets go of its locks soon, not after the two hours that a system waits by default.
    "idle_in_transaction_session_timeout": "60s",
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
}
PLANNING = ("enable_seqscan", "enable_hashjoin", "enable_mergejoin", "plan_cache_mode")
"""Of these, what statements cannot do without where tables are large: `schema` looks whether they came through."""
_TAKEN = "23505"
_REPEATED = frozenset(("40001", "40P01", _TAKEN))
"""Serialization failure and deadlock: the server has undone the transaction, and asks for it to be sent again. And a
row number that is taken, which a server that lost its last moments gave out twice."""
_OWN_TYPES = 16_384
"""The server's own types have numbers below, the same on every server."""


_WAIT = "SyncRepWaitForLSN"
"""Where the server says that it waits no longer for a standby: it has committed, and answers as if all were well. The
name is in no language."""


class _Knowing(asyncpg.Connection):  # type: ignore[misc]
    """A connection that asks only once, not once each, what an array of the server's own types is: that is five round
    trips before the first statement."""

    _known: ClassVar[dict[frozenset[int], Any]] = {}

    system = promoted = 0
    """Whose data the server has, and the number of its timeline: see `Hosts`."""
    unsafe = False
    """Whether what was committed last may be on this server alone: its wait for a standby was broken off."""

    def listen(self) -> None:
        """Hears what is said beside answers, before the answer that it comes with is handed on."""
        self.add_log_listener(self._heard)

    @staticmethod
    def _heard(raw: Raw, message: Any) -> None:
        if message.server_source_function == _WAIT:
            raw.unsafe = True

    async def _introspect_types(self, typeoids: Iterable[int], timeout: float | None) -> Any:
        asked = frozenset(typeoids)
        found = self._known.get(asked)
        if found is None:
            found = await super()._introspect_types(asked, timeout)
            if max(asked) < _OWN_TYPES:
                self._known[asked] = found
        return found


class Qualified(dict[str, str]):
    """Statements by the text they are written in, where our tables are in schema `timeline`, as sent to the schema
    that the URL names. Every name is qualified: a pooler between us and the server need not keep a search_path."""

    def __init__(self, schema: str) -> None:
        super().__init__()
        self._schema = schema

    def __missing__(self, statement: str) -> str:
        text = self[statement] = self.qualified(statement)
        return text

    def qualified(self, statement: str) -> str:
        """`statement` with our schema's name."""
        return statement.replace(f"{SCHEMA}.", f"{self._schema}.")


class PostgresqlConnection:
    """A connection in use: asyncpg's, with statements qualified."""

    __slots__ = ("_qualified", "raw")

    def __init__(self, raw: Raw, qualified: Qualified) -> None:
        self.raw = raw
        self._qualified = qualified

    async def fetch(self, statement: str, *values: Any) -> list[Any]:
        """All records."""
        found: list[Any] = await self.raw.fetch(self._qualified[statement], *values)
        return found

    async def fetchrow(self, statement: str, *values: Any) -> Any:
        """The first record, or None."""
        return await self.raw.fetchrow(self._qualified[statement], *values)

    async def fetchval(self, statement: str, *values: Any) -> Any:
        """The first field of the first record, or None."""
        return await self.raw.fetchval(self._qualified[statement], *values)

    async def execute(self, statement: str, *values: Any) -> str:
        """The command's tag, as in `DELETE 3`."""
        tag: str = await self.raw.execute(self._qualified[statement], *values)
        return tag

    async def answer(self, asked: Statement) -> Any:
        """What a statement answers."""
        if asked.read is not None:
            return asked.read(await self.fetch(asked.text, *asked.values))
        tag = await self.execute(asked.text, *asked.values)
        return int(tag.rpartition(" ")[2]) if asked.counts else None

    async def run(self, plan: Plan[Result]) -> Result:
        """Run a plan on this connection."""
        return await drive_async(plan, self.answer, lambda asked: self.run(asked.plan()))

    async def executemany(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        """The statement with each of `rows`."""
        await self.raw.executemany(self._qualified[statement], rows)


@contextmanager
def refused_rights(location: PostgresqlLocation) -> Iterator[None]:
    """What the server refuses this user while the schema is made or looked at, as something to be mended."""
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
    """The pool at work. A call waits for a connection no longer than its deadline. A server that speaks PostgreSQL's
    protocol and another SQL has `settings` and `wording` of its own."""

    settings: dict[str, str] = SETTINGS
    wording: ClassVar[type[Qualified]] = Qualified
    tries: ClassVar[int] = TRIES
    timelines: ClassVar[bool] = True
    """Whether servers that are promoted number their timelines."""

    def __init__(self, location: PostgresqlLocation, renumber: Callable[[], None]) -> None:
        self._location = location
        self._deadline_s = location.timeout_ms / 1000
        self._renumber = renumber
        self._qualified = self.wording(location.schema)
        self._hosts = Hosts(location, self._connect, self.timelines)
        self._pool: PostgresqlPool | None = None

    async def open(self) -> None:
        """Connects once, to say at once what does not work. Raises StoreRefused or StoreUnavailable."""
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
            if error.library not in ("PEM", "X509") and "PEM lib" not in str(error):  # of the connection, not of a file
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
        """Waits for what runs, at most a deadline long."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close(self._deadline_s)

    async def use(self, act: Act[Result], writes: bool) -> Result:
        """`act` on a connection: one statement, which commits by itself. `writes`: when its answer is lost, it may
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
        """`act` within a transaction, which is done again where the server undid it for another's sake. A connection
        on which anything but a plain answer came is dropped, and its transaction with it."""
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
        """Whether it is done again: the server has undone it, for another's sake, or never saw it."""
        state = state_of(error)
        if state == _TAKEN:
            self._renumber()
        return (state in _REPEATED or unsent(error)) and attempt < self.tries - 1

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
    """One call of the store that takes several steps, each of which commits by itself: once one has written, what
    fails a later one leaves the call unknown."""

    def __init__(self, connections: PostgresqlConnections) -> None:
        self._connections = connections
        self._begun = False

    async def run(self, plan: Plan[Result]) -> Result:
        """Run a plan, each of whose statements is a step."""
        return await drive_async(plan, self._ask, self._atomic)

    async def _ask(self, asked: Statement) -> Any:
        return await self.use(lambda connection: connection.answer(asked), asked.writes)

    async def _atomic(self, asked: Atomic) -> Any:
        def act(connection: PostgresqlConnection) -> Awaitable[Any]:
            return connection.run(asked.plan())

        return await (self.use(act, writes=True) if asked.single else self.transact(act))

    async def use(self, act: Act[Result], writes: bool) -> Result:
        """`PostgresqlConnections.use`."""
        return await self._step(self._connections.use(act, writes), writes)

    async def transact(self, act: Act[Result]) -> Result:
        """`PostgresqlConnections.transact`."""
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
    """Rolls back; False where that does not work, and the connection is to be dropped."""
    if raw.is_closed():
        return False
    try:
        await raw.execute("ROLLBACK")
    except FAILURES:
        return False
    return True


def _said(error: BaseException, pool: PostgresqlPool) -> bool:
    """Whether the server has said it, and the connection is as good as before. Where one was lost or is silent, those
    that nobody uses are of the same server."""
    said = isinstance(error, asyncpg.PostgresError)
    if not said:
        pool.drop_idle()
    return said


def _safe(raw: Raw) -> bool:
    """That what was committed is as safe as the server makes it. Raises StoreUnknown where it is not."""
    if raw.unsafe:
        raise StoreUnknown("the server's wait for its standby was broken off, and the standby may not have this")
    return True
