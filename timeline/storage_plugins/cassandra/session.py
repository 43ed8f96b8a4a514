"""The driver's session behind asyncio: sends, and says what a failure means. `opening.py` makes it."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections import deque, namedtuple
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

from cassandra import ConsistencyLevel, InvalidRequest, ReadFailure, Unauthorized, Unavailable
from cassandra.cluster import Cluster, NoHostAvailable, Session
from cassandra.connection import ConnectionException
from cassandra.protocol import SyntaxException
from cassandra.query import BatchStatement, BatchType, PreparedStatement

from timeline.storage_plugins.contract import StoreUnavailable

PROTOCOL = 5
"""The version of the wire's protocol."""
IN_FLIGHT = 64
"""Requests of one store at once; more wait here, where they cost nothing."""
TOO_MANY_TOMBSTONES = 1
"""Why a replica fails a read, by number."""
READ_TRIES = 4
"""Times a read is sent whose connection ends before the answer."""
LOOK_S = 0.05
"""How often a request that finds no connection looks again, for half of the time that it has."""

Statement = tuple[str, Sequence[Any]]
"""The name of a statement of `statements.py` and its values."""


@lru_cache(maxsize=256)
def _row(columns: tuple[str, ...]) -> Any:
    return namedtuple("Row", [name.strip("[]") for name in columns])


def rows_as(columns: Sequence[str], rows: Sequence[Any]) -> list[Any]:
    """Rows as named tuples. The driver's own way makes a class anew for each answer, which takes longer than the rest
    of it. Cassandra's `[applied]` is `applied`."""
    return list(map(_row(tuple(columns))._make, rows))


class Doubt(Exception):
    """A write whose outcome is not known: it may have happened, or may happen yet."""


class Worn(StoreUnavailable):
    """A read met more deletions than Cassandra reads past."""


class Mailbox:
    """Hands what the driver's thread got to the event loop: one wake-up for whatever came meanwhile."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._came: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._lock = threading.Lock()
        self._awake = False

    def post(self, future: asyncio.Future[Any], rows: Any, error: BaseException | None) -> None:
        """On the driver's thread."""
        with self._lock:
            self._came.append((future, rows, error))
            wake, self._awake = not self._awake, True
        if wake and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            came, self._came = self._came, deque()
            self._awake = False
        for future, rows, error in came:
            if future.done():
                continue
            if error is None:
                future.set_result(rows)
            else:
                future.set_exception(error)


Encoder = Callable[[Any], Any]
"""From a value to what goes over the wire; None stays None where a column may be without."""


def _as_it_is(value: Any) -> Any:
    return value


_ENCODERS: dict[str, Encoder] = {
    "bigint": struct.Struct(">q").pack,
    "int": struct.Struct(">i").pack,
    "tinyint": struct.Struct(">b").pack,
    "blob": _as_it_is,
}


def _encoder(kind: Any) -> Encoder:
    return _ENCODERS.get(kind.typename) or partial(kind.serialize, protocol_version=PROTOCOL)


class Encoded(BatchStatement):  # type: ignore[misc]
    """A batch that takes values as they go over the wire. The driver's own binding asks of each value whether its
    column is encrypted, and of each statement how to route it: both cost more than the rest of it."""

    def take(self, query_id: bytes, encoders: Sequence[Encoder], values: Sequence[Any]) -> None:
        """Adds a statement on the partition of the one that was added first."""
        encoded = [encode(value) for encode, value in zip(encoders, values, strict=True)]
        self._add_statement_and_params(True, query_id, encoded)


class Connected:
    """A session with everything prepared. Made by `opening.connect`; its methods run on the event loop."""

    def __init__(
        self,
        cluster: Cluster,
        session: Session,
        prepared: dict[str, PreparedStatement],
        mailbox: Mailbox,
        timeout_s: float,
    ) -> None:
        self._cluster = cluster
        self.session = session
        self._prepared = prepared
        self._encoders = {
            name: [_encoder(column.type) for column in one.column_metadata] for name, one in prepared.items()
        }
        self._mailbox = mailbox
        self._looks = int(timeout_s / LOOK_S / 2)
        self._room = asyncio.Semaphore(IN_FLIGHT)

    async def read(self, name: str, *values: Any, serial: bool = False) -> list[Any]:
        """Rows. Raises StoreUnavailable, Worn among them."""
        bound = self._prepared[name].bind(values)
        if serial:
            bound.consistency_level = ConsistencyLevel.LOCAL_SERIAL
        for _ in range(READ_TRIES):
            try:
                return list(await self._send(bound) or ())
            except ConnectionException as lost:
                trouble: Exception = lost
            except ReadFailure as error:
                if TOO_MANY_TOMBSTONES in (error.error_code_map or {}).values():
                    raise Worn(told(error)) from error
                raise unavailable(error) from error
            except Exception as error:
                raise unavailable(error) from error
        raise unavailable(trouble) from trouble

    async def write(self, statements: Sequence[Statement]) -> list[Any]:
        """One batch, or one statement: all of it or nothing within a partition. Answers its rows (a conditional one
        has some). Raises StoreUnavailable when nothing happened, Doubt when it may have."""
        name, values = statements[0]
        statement: Any = self._prepared[name].bind(values)
        if len(statements) > 1:
            batch = Encoded(BatchType.UNLOGGED, consistency_level=ConsistencyLevel.LOCAL_QUORUM)
            batch.serial_consistency_level = ConsistencyLevel.LOCAL_SERIAL
            batch.add(statement)
            for name, values in statements[1:]:
                batch.take(self._prepared[name].query_id, self._encoders[name], values)
            statement = batch
        try:
            return list(await self._send(statement) or ())
        except (NoHostAvailable, Unavailable, InvalidRequest, Unauthorized, SyntaxException) as error:
            raise unavailable(error) from error
        except Exception as error:
            raise Doubt(told(error)) from error

    async def _send(self, statement: Any) -> Any:
        """Sends once there is a connection; what was sent is never sent again."""
        for _ in range(self._looks):
            try:
                return await self._ask(statement)
            except NoHostAvailable:
                await asyncio.sleep(LOOK_S)
        return await self._ask(statement)

    async def _ask(self, statement: Any) -> Any:
        async with self._room:
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            post = self._mailbox.post
            self.session.execute_async(statement).add_callbacks(
                lambda rows: post(future, rows, None), lambda error: post(future, None, error)
            )
            return await future

    def close(self) -> None:
        """Blocks until the driver's threads have ended."""
        self._cluster.shutdown()


def told(error: BaseException) -> str:
    """What a failure says, in one line and without what was sent."""
    if isinstance(error, NoHostAvailable):
        reasons = "; ".join(sorted({f"{type(why).__name__}: {why}" for why in error.errors.values()}))
        return f"no node of Cassandra can be reached{': ' + reasons if reasons else ''}"
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def unavailable(error: BaseException) -> StoreUnavailable:
    """As a failure after which nothing happened."""
    return StoreUnavailable(told(error))
