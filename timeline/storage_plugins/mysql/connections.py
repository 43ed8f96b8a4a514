"""The URL of a server, and a bounded pool of threads with a connection each. Transactions, their repetition, and errors
as the contract has them.

PyMySQL runs in threads, so that building statements does not delay the event loop. A batch is a few statements: the
driver's cost per statement does not count. A call has one deadline, which includes its wait for a thread. After
it, the connection is cut, so that the thread is free again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pymysql
from pymysql.constants import CLIENT, CR

from timeline.storage_plugins.contract import (
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    StoreUnknown,
)
from timeline.storage_plugins.sql import number_option
from timeline.storage_plugins.sql.statements import Plan, Result, Statement, drive

PORT = 3306
RANGES = {"pool": (2, 64), "timeout_ms": (100, 600_000), "tls": (0, 1)}
OPTIONS = (*RANGES, "ca")
_SHAPE = "mysql://user:password@host:3306/database"
TRIES = 8
"""The most tries of a transaction that a deadlock or a wait for a lock ended: nothing of it happened."""
TOGETHER_CHARACTERS = 1024 * 1024
"""The length of statements that go in one exchange. A longer one goes by itself."""
DEADLOCK, LOCK_WAIT = 1213, 1205
LOST = frozenset({2003, 2006, 2013, 2014, 2055, 1053, 1927, 4031})
_LOCKED = "this account is locked: ALTER USER … ACCOUNT UNLOCK, or use another"
NO_DATABASE = 1049
WRONG_SETTINGS = {
    1044: "the user has no rights to this database: GRANT them",
    1045: "user or password is wrong: correct them in the URL, or in TIMELINE_MYSQL_PASSWORD",
    NO_DATABASE: "there is no such database: CREATE DATABASE it, or name another in the URL",
    1142: "the user lacks a right: GRANT ALL on this database",
    1227: "the user lacks a right: GRANT it",
    1286: "the server has no InnoDB: start it with InnoDB",
    1698: "this user may not log in with a password: use another, or ALTER USER",
    3118: _LOCKED,
    3955: _LOCKED,
    4151: _LOCKED,
}
FULL = {1021: "the server's disk is full: make room", 1114: "a table, or the server's disk, is full: make room"}
UNUSABLE = {
    1040: "the server has too many connections: raise max_connections, or lower pool in the URL",
    1203: "the user has too many connections: raise max_user_connections, or lower pool in the URL",
    1226: "the user has used up what it may: raise its max_user_connections, or lower pool in the URL",
    1290: "the server is read-only: name the primary in the URL",
    1836: "the server is read-only: name the primary in the URL",
}


@dataclass(frozen=True, slots=True, repr=False)
class MysqlLocation:
    """The content of a `mysql://` URL. `pool`: the most connections at once. `timeout_ms`: a call's deadline. `ca`: the
    file of certificates that TLS trusts; empty: the system's."""

    host: str
    port: int
    user: str
    password: str
    database: str
    pool: int = 8
    timeout_ms: int = 10_000
    tls: bool = False
    ca: str = ""

    @property
    def shown(self) -> str:
        """The database as it may be logged."""
        return f"{self.host}:{self.port}/{self.database}"

    @classmethod
    def of(cls, url: str) -> MysqlLocation:
        """Read `mysql://user:password@host:port/database?pool=&timeout_ms=&tls=&ca=`. User and password may be in
        TIMELINE_MYSQL_USER and TIMELINE_MYSQL_PASSWORD instead. Raise StoreRefused, which says what to write instead,
        and never the password."""
        try:
            parts = urlsplit(url)
            port = parts.port or PORT
        except ValueError:
            # The error's own text may have a part of a password with a "/", "?" or "#" in it.
            raise StoreRefused(
                f"this mysql:// URL cannot be read: write {_SHAPE}, special characters in a password as %2F and so on"
            ) from None
        database = unquote(parts.path.removeprefix("/"))
        if not parts.hostname or not database or "/" in database:
            raise StoreRefused(f"a mysql:// URL names a host and a database: write {_SHAPE}")
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if unknown := [option for option in options if option not in OPTIONS]:
            raise StoreRefused(f"{unknown[0]!r:.80} is no option of mysql://; known are {', '.join(OPTIONS)}")
        ca = options.pop("ca", "")
        if ca and not os.path.isfile(ca):
            raise StoreRefused(f"ca names a file of certificates; {ca!r:.200} is none")
        numbers = {option: number_option(option, text, RANGES[option]) for option, text in options.items()}
        return cls(
            parts.hostname,
            port,
            unquote(parts.username or "") or os.environ.get("TIMELINE_MYSQL_USER", "root"),
            unquote(parts.password or "") or os.environ.get("TIMELINE_MYSQL_PASSWORD", ""),
            database,
            tls=bool(numbers.pop("tls", bool(ca))),
            ca=ca,
            **numbers,
        )


def code_of(error: BaseException) -> int:
    """Return the server's or driver's number of an error; 0: it has none."""
    return error.args[0] if error.args and isinstance(error.args[0], int) else 0


def is_lost(error: BaseException) -> bool:
    """Return whether the connection is gone; otherwise the server has refused a statement."""
    code = code_of(error)
    return not isinstance(error, pymysql.MySQLError) or code in LOST or code == 0


def judged(error: BaseException, where: str, opening: bool) -> StoreError:
    """Return the error of a transaction of which surely nothing happened. A wrong setting is refused at an opening.
    Later it may pass, as when rights are changed."""
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
    """Return how the server's certificate is verified; None: no TLS. Raise StoreRefused."""
    if not location.tls:
        return None
    try:
        return ssl.create_default_context(cafile=location.ca or None)
    except ssl.SSLError as error:
        raise StoreRefused(f"ca: {location.ca} holds no certificate: name a file of them in PEM") from error


class Later:
    """A statement whose answer is wanted later. It goes in one exchange with the next ones."""

    def __init__(self, session: MysqlSession, text: str) -> None:
        self._session, self.text = session, text
        self.answer: tuple[Sequence[tuple[Any, ...]], int] | None = None

    def answered(self) -> tuple[Sequence[tuple[Any, ...]], int]:
        """Return its rows, and how many it changed. Send it if it has not been sent."""
        if self.answer is None:
            self._session.send()
        assert self.answer is not None
        return self.answer


class MysqlSession:
    """A connection inside a transaction. A call waits for exchanges with the server, so statements whose answers are
    not needed yet go together: in order, and none after one that failed."""

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
        """Return the rows that a statement returns."""
        return self.later(statement, parameters).answered()[0]

    def execute(self, statement: str, parameters: Sequence[Any] | None = None) -> int:
        """Run a statement; return how many rows it changed."""
        return self.later(statement, parameters).answered()[1]

    def later(self, statement: str, parameters: Sequence[Any] | None = None) -> Later:
        """Delay a statement until the next one whose answer is wanted, or the commit."""
        later = Later(self, self._cursor.mogrify(statement, parameters))
        if self._waiting_characters + len(later.text) > TOGETHER_CHARACTERS:
            self.send()
        self._waiting.append(later)
        self._waiting_characters += len(later.text)
        return later

    def send(self) -> None:
        """Send the waiting statements, and read their answers."""
        sent, self._waiting, self._waiting_characters = self._waiting, [], 0
        for at, later in enumerate(sent):
            if at:
                self._cursor.nextset()
            else:
                self._cursor.execute(";".join(each.text for each in sent))
            later.answer = self._cursor.fetchall(), self._cursor.rowcount

    def commit(self) -> None:
        """Commit, in one exchange with the waiting statements. Raise NotCommitted if the server refused one of them."""
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
    """Return the answer of a statement. One without an answer goes with the next."""
    if asked.read is not None:
        return asked.read(later.answered()[0])
    return later.answered()[1] if asked.counts else None


class NotCommitted(Exception):
    """The server refused a statement before the commit, and so did not commit."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _Call:
    """A call under way. Its caller may give it up: then there are no more tries, and its connection is cut."""

    def __init__(self) -> None:
        self.wire: socket.socket | None = None
        self.given_up = threading.Event()
        self._deciding = threading.Lock()
        self._commits = False

    def may_commit(self) -> bool:
        """Return whether the caller still waits. If it gives up after this, the outcome is unknown."""
        with self._deciding:
            self._commits = not self.given_up.is_set()
            return self._commits

    def not_committed(self) -> None:
        """Note that nothing was committed."""
        with self._deciding:
            self._commits = False

    def give_up(self) -> bool:
        """End the call if that is still possible. Return whether surely nothing happened."""
        with self._deciding:
            self.given_up.set()
            if self.wire is not None:
                # Closing a socket does not wake its reader; this does. The socket may be gone already.
                with contextlib.suppress(OSError):
                    self.wire.shutdown(socket.SHUT_RDWR)
            return not self._commits

    def end(self) -> None:
        """Note that its connection belongs to another call from now on, and is not cut with this one."""
        with self._deciding:
            self.wire = None


def _dial(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect to a server. Raise what the driver does."""
    try:
        wire = socket.create_connection((host, port), timeout_s)
    except OSError as error:
        raise pymysql.OperationalError(CR.CR_CONN_HOST_ERROR, f"cannot connect to {host!r}: {error}") from error
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return wire


def _close(connection: Any, wire: socket.socket) -> None:
    """Close a connection. A server that does not answer cannot hold this up."""
    if connection.open:
        connection.close()
    wire.close()


class MysqlConnections:
    """As many connections as threads: made when needed, replaced when lost."""

    def __init__(self, location: MysqlLocation) -> None:
        self._location = location
        self._tls = tls_of(location)
        self._threads = ThreadPoolExecutor(location.pool, "timeline-mysql")
        self._mine = threading.local()
        self._wires: dict[Any, socket.socket] = {}
        """By connection: its socket, once more. TLS puts another one in its place, but this one cuts it, too."""
        self._lock = threading.Lock()
        self.opening = True

    async def transact(self, act: Callable[[MysqlSession], Result]) -> Result:
        """Run `act` in a transaction, again after a deadlock. Raise StoreUnavailable if nothing happened, also if the
        deadline passed before the commit was sent; StoreUnknown if its answer was lost or came too late."""
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
        never_begun = asked.cancel()  # first: the answer's cancellation arrives one turn of the loop later
        answer.cancel()
        if never_begun:
            raise StoreUnavailable(
                f"{at.shown}: none of {at.pool} connections was free within {at.timeout_ms} ms: raise pool in the URL"
            )
        nothing = call.give_up() or self.opening
        late = StoreUnavailable if nothing else StoreUnknown
        raise late(f"{at.shown}: no answer within {at.timeout_ms} ms")

    def close(self) -> None:
        """Finish the running calls, and close all. Block until then."""
        self._threads.shutdown(wait=True)
        with self._lock:
            for connection, wire in self._wires.items():
                _close(connection, wire)
            self._wires.clear()

    def _connect(self) -> Any:
        at = self._location
        connect_s = max(1.0, min(5.0, at.timeout_ms / 1000))
        connection: Any = pymysql.connect(
            host=at.host,
            port=at.port,
            user=at.user,
            password=at.password,
            database=at.database,
            charset="utf8mb4",
            autocommit=None,
            client_flag=CLIENT.MULTI_STATEMENTS,
            connect_timeout=connect_s,
            read_timeout=max(1.0, at.timeout_ms / 1000),
            write_timeout=max(1.0, at.timeout_ms / 1000),
            ssl=self._tls,
            defer_connect=True,
        )
        wire = _dial(at.host, at.port, connect_s)
        with self._lock:
            self._wires[connection] = wire.dup()
        try:
            connection.connect(wire)
            self._set_up(connection)
        except BaseException:
            self._drop(connection)
            raise
        return connection

    def _set_up(self, connection: Any) -> None:
        # One exchange, so that a connection is soon replaced. The name of the isolation differs.
        isolation = "tx_isolation" if "mariadb" in connection.get_server_info().lower() else "transaction_isolation"
        wait_s = max(1, self._location.timeout_ms // 1000 // TRIES)
        MysqlSession(connection).execute(
            f"SET SESSION autocommit = 0, {isolation} = 'READ-COMMITTED', time_zone = '+00:00', "
            "sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', "
            f"innodb_lock_wait_timeout = {wait_s}, group_concat_max_len = {1 << 30}"
        )

    def _discard(self) -> None:
        connection = self._mine.__dict__.pop("connection", None)
        if connection is not None:
            self._drop(connection)

    def _drop(self, connection: Any) -> None:
        with self._lock:
            wire = self._wires.pop(connection)
        _close(connection, wire)

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
                call.wire = self._wires[connection]
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
        """Handle a failed try: wait and return if another try makes sense, else raise the error of the call."""
        code = code_of(error)
        lost = is_lost(error)
        # A connection keeps the rights of its start. Rights granted since count on a new one.
        if lost or code in WRONG_SETTINGS or not self._rolled_back():
            self._discard()
        again = code in (DEADLOCK, LOCK_WAIT) or (lost and not fresh)
        if not again or tried + 1 == TRIES or call.given_up.is_set():
            raise judged(error, self._location.shown, self.opening) from error
        if not lost:
            call.given_up.wait(0.001 * 2**tried * (1 + secrets.randbelow(1000) / 1000))

    def _commit(self, session: MysqlSession, call: _Call) -> None:
        """Commit, unless the caller gave up. Raise NotCommitted if surely nothing was committed."""
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
        """Roll back; return whether the connection can be used again."""
        try:
            self._mine.connection.rollback()
        except (pymysql.MySQLError, OSError, AttributeError):
            return False
        return True
