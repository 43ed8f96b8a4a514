"""A bounded pool of threads with a connection each: transactions, their repetition, and errors as the contract has
them.

PyMySQL in threads: a batch is a handful of statements, so that the driver's own cost a statement does not count, and
the event loop is not held up by building their text.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pymysql

from timeline.storage_plugins.contract import StoreError, StoreRefused, StoreUnavailable, StoreUnknown
from timeline.storage_plugins.mysql.location import Location

Result = TypeVar("Result")

TRIES = 8
"""Of a transaction that a deadlock or a lock's wait ended: nothing of it happened."""
DEADLOCK, LOCK_WAIT = 1213, 1205
LOST = frozenset({2003, 2006, 2013, 2014, 2055, 1053, 1927, 4031})
WRONG_SETTINGS = {
    1044: "the user has no rights to this database: GRANT them",
    1045: "user or password is wrong: mend them in the URL",
    1049: "there is no such database: CREATE DATABASE it, or name another in the URL",
    1142: "the user lacks a right: GRANT ALL on this database",
    1698: "this user may not log in with a password: use another, or ALTER USER",
}
UNUSABLE = {
    1021: "the server's disk is full: make room",
    1114: "a table, or the server's disk, is full: make room",
    1040: "the server has too many connections: raise max_connections, or lower pool in the URL",
    1203: "the user has too many connections: raise max_user_connections, or lower pool in the URL",
    1290: "the server is read-only: name the primary in the URL",
    1836: "the server is read-only: name the primary in the URL",
}


def code_of(error: BaseException) -> int:
    """The server's or driver's number of an error; 0 when it has none."""
    return error.args[0] if error.args and isinstance(error.args[0], int) else 0


def judged(error: BaseException, where: str, opening: bool) -> StoreError:
    """An error of a transaction of which surely nothing happened. What a person has to mend is refused at an opening;
    later it may pass, as when rights are changed."""
    code = code_of(error)
    said = str(error.args[1]) if len(error.args) > 1 else str(error)
    if code in WRONG_SETTINGS:
        wrong = StoreRefused if opening else StoreUnavailable
        return wrong(f"{where}: {WRONG_SETTINGS[code]} (error {code})")
    return StoreUnavailable(f"{where}: {UNUSABLE.get(code, said)} (error {code})")


class Session:
    """A connection inside a transaction."""

    def __init__(self, connection: Any) -> None:
        self._cursor = connection.cursor()

    def rows(self, statement: str, parameters: Sequence[Any] | None = None) -> Sequence[tuple[Any, ...]]:
        """The rows that a statement answers."""
        self._cursor.execute(statement, parameters)
        found: Sequence[tuple[Any, ...]] = self._cursor.fetchall()
        return found

    def execute(self, statement: str, parameters: Sequence[Any] | None = None) -> int:
        """Runs a statement; how many rows it changed."""
        return int(self._cursor.execute(statement, parameters))


class Connections:
    """As many connections as threads, made when needed, replaced when lost."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._threads = ThreadPoolExecutor(location.pool, "timeline-mysql")
        self._mine = threading.local()
        self._all: set[Any] = set()
        self._lock = threading.Lock()
        self.opening = True

    async def transact(self, act: Callable[[Session], Result]) -> Result:
        """Runs `act` in a transaction, again after a deadlock. Raises StoreUnavailable when nothing happened,
        StoreUnknown when the commit's answer was lost."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._transact, act)

    def close(self) -> None:
        """Finishes what runs, closes all. Blocks."""
        self._threads.shutdown(wait=True)
        with self._lock:
            for connection in self._all:
                connection._force_close()
            self._all.clear()

    def _connect(self) -> Any:
        at = self._location
        connection = pymysql.connect(
            host=at.host,
            port=at.port,
            user=at.user,
            password=at.password,
            database=at.database,
            charset="utf8mb4",
            connect_timeout=min(5, at.timeout_s),
            read_timeout=at.timeout_s,
            write_timeout=at.timeout_s,
            ssl={"ca": at.ssl_ca} if at.ssl_ca else None,
        )
        session = Session(connection)
        session.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        wait_s = max(1, at.timeout_s // TRIES)
        session.execute(
            "SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', time_zone = '+00:00', "
            f"innodb_lock_wait_timeout = {wait_s}, group_concat_max_len = {1 << 30}"
        )
        with self._lock:
            self._all.add(connection)
        return connection

    def _discard(self) -> None:
        connection = self._mine.__dict__.pop("connection", None)
        if connection is not None:
            with self._lock:
                self._all.discard(connection)
            connection._force_close()

    def _transact(self, act: Callable[[Session], Result]) -> Result:
        fresh = False
        for tried in range(TRIES):
            try:
                connection = self._mine.__dict__.get("connection")
                if connection is None:
                    fresh = True
                    connection = self._mine.connection = self._connect()
                result = act(Session(connection))
            except (pymysql.MySQLError, OSError) as error:
                code = code_of(error)
                lost = not isinstance(error, pymysql.MySQLError) or code in LOST or code == 0
                if lost or not self._rolled_back():
                    self._discard()
                again = code in (DEADLOCK, LOCK_WAIT) or (lost and not fresh)
                if not again or tried + 1 == TRIES:
                    raise judged(error, self._location.shown, self.opening) from error
                if not lost:
                    threading.Event().wait(0.001 * 2**tried * (1 + secrets.randbelow(1000) / 1000))
                continue
            except BaseException:
                if not self._rolled_back():
                    self._discard()
                raise
            try:
                connection.commit()
            except (pymysql.MySQLError, OSError) as error:
                self._discard()
                raise StoreUnknown(f"{self._location.shown}: the commit's answer was lost: {error}") from error
            return result
        raise AssertionError("the last try returns or raises")

    def _rolled_back(self) -> bool:
        """Whether the connection is as good as new."""
        try:
            self._mine.connection.rollback()
        except (pymysql.MySQLError, OSError, AttributeError):
            return False
        return True
