"""A bounded pool of threads with a connection each: transactions, their repetition, and errors as the contract has
them.

PyMySQL in threads: a batch is a handful of statements, so that the driver's own cost a statement does not count, and
the event loop is not held up by building their text. A call has one deadline, its wait for a thread included; past it
the connection is cut, so that the thread is free again.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pymysql
from pymysql.constants import CLIENT

from timeline.storage_plugins.contract import (
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    StoreUnknown,
)
from timeline.storage_plugins.mysql.location import MysqlLocation
from timeline.storage_plugins.sql.statements import Plan, Result, Statement, drive

TRIES = 8
"""Of a transaction that a deadlock or a lock's wait ended: nothing of it happened."""
TOGETHER_CHARACTERS = 1024 * 1024
"""Of statements that go in one exchange; a longer one goes by itself."""
DEADLOCK, LOCK_WAIT = 1213, 1205
LOST = frozenset({2003, 2006, 2013, 2014, 2055, 1053, 1927, 4031})
WRONG_SETTINGS = {
    1044: "the user has no rights to this database: GRANT them",
    1045: "user or password is wrong: mend them in the URL, or in TIMELINE_MYSQL_PASSWORD",
    1049: "there is no such database: CREATE DATABASE it, or name another in the URL",
    1142: "the user lacks a right: GRANT ALL on this database",
    1286: "the server has no InnoDB: start it with InnoDB",
    1698: "this user may not log in with a password: use another, or ALTER USER",
}
FULL = {1021: "the server's disk is full: make room", 1114: "a table, or the server's disk, is full: make room"}
UNUSABLE = {
    1040: "the server has too many connections: raise max_connections, or lower pool in the URL",
    1203: "the user has too many connections: raise max_user_connections, or lower pool in the URL",
    1226: "the user has used up what it may: raise its max_user_connections, or lower pool in the URL",
    1290: "the server is read-only: name the primary in the URL",
    1836: "the server is read-only: name the primary in the URL",
}


def code_of(error: BaseException) -> int:
    """The server's or driver's number of an error; 0 when it has none."""
    return error.args[0] if error.args and isinstance(error.args[0], int) else 0


def is_lost(error: BaseException) -> bool:
    """Whether it is of the connection, which is gone, not of a statement, which the server has refused."""
    code = code_of(error)
    return not isinstance(error, pymysql.MySQLError) or code in LOST or code == 0


def judged(error: BaseException, where: str, opening: bool) -> StoreError:
    """An error of a transaction of which surely nothing happened. What a person has to mend is refused at an opening;
    later it may pass, as when rights are changed."""
    code = code_of(error)
    distrusted = getattr(error, "original_exception", None)
    if opening and isinstance(distrusted, ssl.SSLCertVerificationError):
        why = distrusted.verify_message
        return StoreRefused(f"{where}: the certificate of the server is not trusted: name in ca= who vouches ({why})")
    said = str(error.args[1]) if len(error.args) > 1 else str(error)
    if code in WRONG_SETTINGS:
        wrong = StoreRefused if opening else StoreUnavailable
        return wrong(f"{where}: {WRONG_SETTINGS[code]} (error {code})")
    if code in FULL:
        return StoreFull(f"{where}: {FULL[code]} (error {code})")
    return StoreUnavailable(f"{where}: {UNUSABLE.get(code, said)} (error {code})")


def tls_of(location: MysqlLocation) -> ssl.SSLContext | None:
    """How the server's certificate is verified; None where TLS is not asked for. Raises StoreRefused."""
    if not location.tls:
        return None
    try:
        return ssl.create_default_context(cafile=location.ca or None)
    except ssl.SSLError as error:
        raise StoreRefused(f"ca: {location.ca} holds no certificate: name a file of them in PEM") from error


class Later:
    """A statement whose answer is wanted later: it goes in one exchange with what is asked next."""

    def __init__(self, session: MysqlSession, text: str) -> None:
        self._session, self.text = session, text
        self.answer: tuple[Sequence[tuple[Any, ...]], int] | None = None

    def answered(self) -> tuple[Sequence[tuple[Any, ...]], int]:
        """The rows that it answers, and how many it changed; sends it where nothing has yet."""
        if self.answer is None:
            self._session.send()
        assert self.answer is not None
        return self.answer


class MysqlSession:
    """A connection inside a transaction. An exchange with the server is what a call waits for, so statements whose
    answers nobody needs yet go together: in order, and none after one that failed."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._cursor = connection.cursor()
        self._waiting: list[Later] = []
        self._waiting_characters = 0

    def run(self, plan: Plan[Result]) -> Result:
        """Run a plan in this transaction."""
        return drive(plan, self._answers)

    def _answers(self, asked: Sequence[Statement]) -> list[Any]:
        laters = [self.later(statement.text, statement.values or None) for statement in asked]
        return [_read(statement, later) for statement, later in zip(asked, laters, strict=True)]

    def rows(self, statement: str, parameters: Sequence[Any] | None = None) -> Sequence[tuple[Any, ...]]:
        """The rows that a statement answers."""
        return self.later(statement, parameters).answered()[0]

    def execute(self, statement: str, parameters: Sequence[Any] | None = None) -> int:
        """Runs a statement; how many rows it changed."""
        return self.later(statement, parameters).answered()[1]

    def later(self, statement: str, parameters: Sequence[Any] | None = None) -> Later:
        """Puts a statement off until the next one whose answer is wanted, or the commit."""
        later = Later(self, self._cursor.mogrify(statement, parameters))
        if self._waiting_characters + len(later.text) > TOGETHER_CHARACTERS:
            self.send()
        self._waiting.append(later)
        self._waiting_characters += len(later.text)
        return later

    def send(self) -> None:
        """Sends what waits, and takes in its answers."""
        sent, self._waiting, self._waiting_characters = self._waiting, [], 0
        for at, later in enumerate(sent):
            if at:
                self._cursor.nextset()
            else:
                self._cursor.execute(";".join(each.text for each in sent))
            later.answer = self._cursor.fetchall(), self._cursor.rowcount

    def commit(self) -> None:
        """Commits, with what waits in the same exchange. Raises NotCommitted where the server refused that."""
        if not self._waiting:
            self._connection.commit()
            return
        last = self._waiting[-1]
        try:
            self.execute("COMMIT")
        except pymysql.MySQLError as error:
            if last.answer is None and not is_lost(error):
                raise NotCommitted(error) from error
            raise


def _read(asked: Statement, later: Later) -> Any:
    """What a statement answers; one whose answer nobody needs goes with the next."""
    if asked.read is not None:
        return asked.read(later.answered()[0])
    return later.answered()[1] if asked.counts else None


class NotCommitted(Exception):
    """The server refused a statement ahead of the commit, which it therefore did not come to."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _Call:
    """A call on its way. Who asked may give it up: then nothing more is tried, and its connection is cut."""

    def __init__(self) -> None:
        self.connection: Any = None
        self.given_up = threading.Event()
        self._deciding = threading.Lock()
        self._commits = False

    def may_commit(self) -> bool:
        """Whether somebody still waits for it; from then on, giving it up leaves open what happened."""
        with self._deciding:
            self._commits = not self.given_up.is_set()
            return self._commits

    def not_committed(self) -> None:
        """It came to no commit: it is as it was before."""
        with self._deciding:
            self._commits = False

    def give_up(self) -> bool:
        """Ends it, as far as that is still possible. Answers whether surely nothing happened."""
        with self._deciding:
            self.given_up.set()
            if self.connection is not None:
                # Closing a socket does not wake who reads from it; this does. It may be gone already.
                with contextlib.suppress(OSError, AttributeError):
                    self.connection._sock.shutdown(socket.SHUT_RDWR)
            return not self._commits

    def end(self) -> None:
        """From now on its connection is another call's, and not cut with this one."""
        with self._deciding:
            self.connection = None


class MysqlConnections:
    """As many connections as threads, made when needed, replaced when lost."""

    def __init__(self, location: MysqlLocation) -> None:
        self._location = location
        self._tls = tls_of(location)
        self._threads = ThreadPoolExecutor(location.pool, "timeline-mysql")
        self._mine = threading.local()
        self._all: set[Any] = set()
        self._lock = threading.Lock()
        self.opening = True

    async def transact(self, act: Callable[[MysqlSession], Result]) -> Result:
        """Runs `act` in a transaction, again after a deadlock. Raises StoreUnavailable when nothing happened, also
        where the time was over before the commit was sent; StoreUnknown when its answer was lost or came too late."""
        at, call = self._location, _Call()
        try:
            asked = self._threads.submit(self._transact, act, call)
        except RuntimeError as error:
            raise StoreUnavailable("the store is closed") from error
        answer = asyncio.wrap_future(asked)
        try:
            await asyncio.wait((answer,), timeout=at.timeout_ms / 1000)
        except asyncio.CancelledError:
            answer.cancel()
            raise
        if answer.done():
            return answer.result()
        never_begun = asked.cancel()  # first: the answer's own cancellation reaches it a turn of the loop later
        answer.cancel()
        if never_begun:
            raise StoreUnavailable(
                f"{at.shown}: none of {at.pool} connections was free within {at.timeout_ms} ms: raise pool in the URL"
            )
        nothing = call.give_up() or self.opening
        late = StoreUnavailable if nothing else StoreUnknown
        raise late(f"{at.shown}: no answer within {at.timeout_ms} ms")

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
            autocommit=None,
            client_flag=CLIENT.MULTI_STATEMENTS,
            connect_timeout=max(1.0, min(5.0, at.timeout_ms / 1000)),
            read_timeout=max(1.0, at.timeout_ms / 1000),
            write_timeout=max(1.0, at.timeout_ms / 1000),
            ssl=self._tls,
        )
        # In one exchange, so that a connection is soon replaced. What the isolation is called differs.
        isolation = "tx_isolation" if "mariadb" in connection.get_server_info().lower() else "transaction_isolation"
        wait_s = max(1, at.timeout_ms // 1000 // TRIES)
        MysqlSession(connection).execute(
            f"SET SESSION autocommit = 0, {isolation} = 'READ-COMMITTED', time_zone = '+00:00', "
            "sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', "
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

    def _transact(self, act: Callable[[MysqlSession], Result], call: _Call) -> Result:
        try:
            return self._tried(act, call)
        finally:
            call.end()

    def _tried(self, act: Callable[[MysqlSession], Result], call: _Call) -> Result:
        fresh = False
        for tried in range(TRIES):
            try:
                connection = self._mine.__dict__.get("connection")
                if connection is None:
                    fresh = True
                    connection = self._mine.connection = self._connect()
                call.connection = connection
                session = MysqlSession(connection)
                result = act(session)
            except (pymysql.MySQLError, OSError) as error:
                self._after(error, call, fresh, tried)
                continue
            except BaseException:
                if not self._rolled_back():
                    self._discard()
                raise
            try:
                self._commit(session, call)
            except NotCommitted as refused:
                self._after(refused.error, call, fresh, tried)
                continue
            return result
        raise AssertionError("the last try returns or raises")

    def _after(self, error: Exception, call: _Call, fresh: bool, tried: int) -> None:
        """After a failed try: waits and returns when another is worth while, else raises what the call is to say."""
        code = code_of(error)
        lost = is_lost(error)
        # Rights to a database are those of the moment a connection took it: what is granted since counts on a new one.
        if lost or code in WRONG_SETTINGS or not self._rolled_back():
            self._discard()
        again = code in (DEADLOCK, LOCK_WAIT) or (lost and not fresh)
        if not again or tried + 1 == TRIES or call.given_up.is_set():
            raise judged(error, self._location.shown, self.opening) from error
        if not lost:
            call.given_up.wait(0.001 * 2**tried * (1 + secrets.randbelow(1000) / 1000))

    def _commit(self, session: MysqlSession, call: _Call) -> None:
        """Commits, unless nobody waits for it any more. Raises NotCommitted where it surely did not come to that."""
        if not call.may_commit():
            self._discard()
            raise StoreUnavailable(f"{self._location.shown}: given up before it was committed")
        try:
            session.commit()
        except NotCommitted:
            call.not_committed()
            raise
        except (pymysql.MySQLError, OSError) as error:
            self._discard()
            raise StoreUnknown(f"{self._location.shown}: the commit's answer was lost: {error}") from error

    def _rolled_back(self) -> bool:
        """Whether the connection is as good as new."""
        try:
            self._mine.connection.rollback()
        except (pymysql.MySQLError, OSError, AttributeError):
            return False
        return True
