"""The outbox's table as the relay uses it: opened by its URL; waiting rows are taken, then deleted or rejected.

The URL has SQLAlchemy's form. If it names no driver, an installed one is used. Calls block, and the relay makes them in
one thread. Where the database has SKIP LOCKED, rows that were taken stay locked until they are settled, so that several
relays can share a table. The locks of a relay that dies end with its connection. SQLite has no SKIP LOCKED: there one
relay at a time holds a lock beside the database's file.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError

from timeline.clock import Clock
from timeline.driver.message import Message
from timeline.driver.times import When, as_datetime
from timeline.errors import Invalid, TimelineError, Unavailable
from timeline.outbox.adding import DIALECTS, TABLE, check_table
from timeline.storage_plugins import shown

DRIVERS = {
    "sqlite": {"pysqlite": "sqlite3"},
    "postgresql": {"psycopg": "psycopg", "psycopg2": "psycopg2", "pg8000": "pg8000"},
    "mysql": {
        "pymysql": "pymysql",
        "mysqldb": "MySQLdb",
        "mysqlconnector": "mysql.connector",
        "mariadbconnector": "mariadb",
    },
}
"""SQLAlchemy's name of each driver that the relay can use → its module. The first one that is installed is used."""
_PACKAGES = {"postgresql": "psycopg[binary]", "mysql": "pymysql"}
_ALSO = {"postgres": "postgresql", "mariadb": "mysql"}

REASON_CHARS = 1_000
TAKEN_BYTES = 16 * 1024 * 1024
"""Payload bytes that are taken at once. A single payload may be larger."""
COUNTED = 100_000
"""The most waiting rows that are counted."""
CONNECT_S = 10
ANSWER_S = 60
"""The deadline of a statement."""
LIBPQ = {
    "connect_timeout": CONNECT_S,
    "tcp_user_timeout": ANSWER_S * 1_000,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
}
"""Options of psycopg and psycopg2: the relay gives up a server whose machine is gone, instead of asking for hours."""
REFUSED_BY_SQLITE = (1, 8)
"""Its primary error codes for an error in the statement (no such table), and a file that is read-only."""
REFUSED_BY_MYSQL = (1044, 1045, 1049, 1142, 1143, 1146, 1227, 1698, 3118, 3955, 4151)
"""Access denied, no such database or table, a missing right, an account that is locked (after too many wrong passwords,
for example). A read-only server (1290, 1836) is one that a failover will replace."""
REFUSED_BY_POSTGRESQL = ("28", "3D", "42")
"""SQLSTATE: no such user or wrong password, no such database, no such table or no right to it. A read-only server
(25006) is one that a failover will replace."""
OLDEST_MYSQL = {True: (10, 6), False: (8, 0, 1)}
"""The first MariaDB, and the first MySQL, that has SKIP LOCKED."""


class OutboxRefused(TimelineError):
    """The outbox cannot be used as it is: no such table, no rights, or a missing driver. The text says what to
    change."""

    code = "REFUSED"


def outbox_url(url: str) -> URL:
    """Return `url` read, with a driver in it. Raise Invalid if it is no URL of a known database, and OutboxRefused if
    no driver is installed or SQLite's file is missing."""
    scheme, separator, _ = url.partition("://")
    asked, _, driver = scheme.partition("+")
    dialect = _ALSO.get(asked, asked)
    if not separator or dialect not in DIALECTS:
        forms = "sqlite:////path/to/app.db, postgresql://user@host/database or mysql://user@host/database"
        raise Invalid(f"the outbox lies in a database of SQL, {forms}, not {shown(url)!r}")
    try:
        read = make_url(url)
    except (ArgumentError, ValueError):
        raise Invalid(
            f"{shown(url)!r} cannot be read as a URL: special characters in a password are written %40"
        ) from None
    if "@" in (read.host or ""):
        # Half of a password that has an @ in it: the driver would look that up, and say that it is not known.
        raise Invalid(f"{shown(url)!r} names no host: special characters in a password are percent-encoded, @ is %40")
    known = DRIVERS[dialect]
    if driver and driver not in known:
        raise Invalid(f"the relay uses {', '.join(known)} for {dialect}, not {driver!r:.40}")
    if dialect == "sqlite":
        _check_file(read.database)
    return read.set(drivername=f"{dialect}+{driver or _installed(dialect)}")


def _installed(dialect: str) -> str:
    for driver, module in DRIVERS[dialect].items():
        if _has(module):
            return driver
    raise OutboxRefused(
        f"{dialect}:// needs one of {', '.join(DRIVERS[dialect].values())}, and none is installed: "
        f"pip install '{_PACKAGES[dialect]}'"
    )


def _has(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False


def _check_file(name: str | None) -> None:
    if not name or name == ":memory:":
        raise Invalid("no other program sees an outbox in memory: give the file, sqlite:////path/to/app.db")
    if not Path(name).is_file():
        raise OutboxRefused(
            f"there is no file {name}: give the database that your program writes to "
            "(four slashes before an absolute path, sqlite:////path/to/app.db)"
        )


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """One message that waits to be sent. Times are milliseconds; exactly one of `due_ms` and `in_ms` is set."""

    seq: int
    topic: str
    grp: str
    id: str
    payload: bytes
    due_ms: int | None
    in_ms: int | None
    expires_ms: int | None
    expires_in_ms: int | None
    tag: str | None
    headers: str | None
    flaw: str = ""
    """Why this row cannot be sent; empty: it can."""

    def message(self) -> Message:
        """Return the message to send. Raise Invalid or TooLarge: any program may have inserted the row."""
        if self.flaw:
            raise Invalid(self.flaw)
        expires = None if self.expires_in_ms is None else _length(self.expires_in_ms)
        return Message(
            self.payload,
            at=None if self.due_ms is None else _point(self.due_ms),
            in_=None if self.in_ms is None else _length(self.in_ms),
            id=self.id,
            tag=self.tag,
            headers=_headers(self.headers),
            expires=expires if self.expires_ms is None else _point(self.expires_ms),
        )


COLUMNS = tuple(field.name for field in fields(OutboxRow) if field.name != "flaw")
"""The columns of the table that make a row."""


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A row that was rejected. `refused_ms`: when, milliseconds UTC. `reason`: why."""

    seq: int
    topic: str
    group: str
    id: str
    due_ms: int | None
    refused_ms: int
    reason: str


@dataclass(frozen=True, slots=True)
class OutboxCounts:
    """How many rows the table has. `oldest_ms`: since when the oldest row waits, milliseconds UTC; 0: none does."""

    waiting: int
    set_aside: int
    oldest_ms: int


def _point(millis: int) -> When:
    # A row has 1 for a due time before 1970. As an int, that would look like seconds.
    return as_datetime(1) if millis == 1 else millis


def _length(millis: int) -> timedelta:
    try:
        return timedelta(milliseconds=millis)
    except (OverflowError, TypeError, ValueError):
        raise Invalid(f"in_ms and expires_in_ms are milliseconds, at most 36600 days, not {millis!r:.60}") from None


def _headers(text: str | None) -> Mapping[str, str] | None:
    if not text:
        return None
    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as bad:
        raise Invalid(f"headers must be an object of texts in JSON: {bad}") from None
    if not isinstance(read, dict):
        raise Invalid(f"headers must be an object of texts in JSON, not {text!r:.40}")
    return read


class Outbox:
    """The table `table` of the database at `url`. `idle_s`: after how long the server may release the rows of a silent
    relay, where it can. Raises as `outbox_url`."""

    def __init__(self, url: str, table: str = TABLE, idle_s: int = 60) -> None:
        self.url = outbox_url(url)
        self.shown = shown(url)
        self.table = check_table(table)
        self.dialect = self.url.get_backend_name()
        self._clock = Clock()
        self._idle_s = idle_s
        self._engine = sa.create_engine(self.url, pool_size=1, max_overflow=0, **self._options())
        sa.event.listen(self._engine, "connect", self._prepare)
        self._connection: sa.Connection | None = None
        self._lock: int | None = None
        self._table = _table(self.table)

    def _options(self) -> dict[str, Any]:
        if self.dialect == "mysql":
            # Under REPEATABLE READ a locking read also locks the gap behind the last row, where others insert.
            limits = {"connect_timeout": CONNECT_S}
            if self.url.get_driver_name() == "pymysql":
                limits |= {"read_timeout": ANSWER_S, "write_timeout": ANSWER_S}
            return {"isolation_level": "READ COMMITTED", "connect_args": limits}
        if self.dialect == "postgresql":
            waits = {"timeout": CONNECT_S} if self.url.get_driver_name() == "pg8000" else LIBPQ
            limits = {name: wait for name, wait in waits.items() if name not in self.url.query}
            return {"isolation_level": "READ COMMITTED", "connect_args": limits}
        return {"connect_args": {"timeout": ANSWER_S, "check_same_thread": False}}

    def _prepare(self, raw: Any, record: object) -> None:
        """Set up a new connection. A relay that fell silent must not lock its rows for ever, and a text of SQLite that
        is not UTF-8 must not fail the whole statement."""
        if self.dialect == "sqlite":
            raw.text_factory = _read
        orders = {
            "postgresql": [
                f"SET idle_in_transaction_session_timeout = '{self._idle_s}s'",
                f"SET statement_timeout = '{ANSWER_S}s'",
            ],
            "mysql": [f"SET SESSION wait_timeout = {self._idle_s}"],
        }
        cursor = raw.cursor()
        try:
            for order in orders.get(self.dialect, []):
                cursor.execute(order)
        finally:
            cursor.close()
        if orders.get(self.dialect):
            raw.commit()

    # ── opening ──

    def open(self) -> None:
        """Connect, and check that the table exists. Raise Unavailable if the database cannot be asked now, and
        OutboxRefused, with a remedy, for everything else."""
        try:
            with self._engine.connect() as connection:
                self._check_version(connection)
                self._check_columns(connection)
        except (OperationalError, InterfaceError) as trouble:
            raise self.explained(trouble) from trouble
        except DBAPIError as refused:
            raise OutboxRefused(f"{self.shown}: {reason_of(refused)}") from refused

    def explained(self, trouble: DBAPIError) -> Unavailable | OutboxRefused:
        """Return the error for a database that cannot be asked."""
        said = reason_of(trouble)
        if self._refuses(trouble):
            return OutboxRefused(f"{self.shown}: {said}")
        return Unavailable(f"the database at {self.shown} cannot be asked: {said}")

    def _refuses(self, trouble: DBAPIError) -> bool:
        """Return whether the database answered and refused for good, by the code of its error."""
        error: Any = trouble.orig
        first = error.args[0] if error.args else None
        if self.dialect == "sqlite":
            return getattr(error, "sqlite_errorcode", 0) & 0xFF in REFUSED_BY_SQLITE
        if self.dialect == "mysql":
            return getattr(error, "errno", first) in REFUSED_BY_MYSQL
        state = (
            first.get("C") if isinstance(first, dict) else getattr(error, "sqlstate", getattr(error, "pgcode", None))
        )
        if state is not None:
            return str(state).startswith(REFUSED_BY_POSTGRESQL)
        return False  # libpq, and so psycopg and psycopg2, hides the SQLSTATE of a refused connection

    def _check_version(self, connection: sa.Connection) -> None:
        if self.dialect != "mysql":
            return
        mariadb = bool(getattr(connection.dialect, "is_mariadb", False))
        oldest = OLDEST_MYSQL[mariadb]
        version = str(connection.scalar(sa.text("SELECT VERSION()")))
        found = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
        if found < oldest:
            name, wanted = "MariaDB" if mariadb else "MySQL", ".".join(map(str, oldest))
            raise OutboxRefused(
                f"the relay needs {name} {wanted} or newer (SKIP LOCKED); this is {'.'.join(map(str, found))}"
            )

    def _check_columns(self, connection: sa.Connection) -> None:
        looked = sa.inspect(connection)
        schema = self._table.schema
        if not looked.has_table(self._table.name, schema=schema):
            raise OutboxRefused(
                f"there is no table {self.table} in {self.shown}; "
                f"'timeline outbox ddl --dialect {self.dialect}' prints what creates it"
            )
        found = {column["name"] for column in looked.get_columns(self._table.name, schema=schema)}
        missing = [column.name for column in self._table.columns if column.name not in found]
        if missing:
            raise OutboxRefused(
                f"the table {self.table} in {self.shown} has no column {', '.join(missing)}: "
                f"'timeline outbox ddl --dialect {self.dialect}' prints how it must be"
            )

    def close(self) -> None:
        """Release everything."""
        self.give_back()
        self._engine.dispose()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def shares(self) -> bool:
        """Whether several relays may take rows from the table at once."""
        return self.dialect != "sqlite"

    def hold(self) -> bool:
        """Return whether this relay may take rows now. Where relays cannot share, one may, until it closes or dies."""
        if self.shares or self._lock is not None:
            return True
        file = os.path.realpath(self.url.database or "")  # one lock, by whatever name the file is opened
        lock = os.open(f"{file}-{self.table}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    # ── sending ──

    def take(self, most: int, without: Sequence[str] = ()) -> list[OutboxRow]:
        """Take up to `most` waiting rows, in the order of `seq`, as many as TAKEN_BYTES allow; none of the topics
        `without`. They belong to this relay until `settle` or `give_back`."""
        self.give_back()
        at = self._table.c
        waiting = [at.refused_ms.is_(None)]
        if without:
            # In SQLite, bytes never equal a text, even if they name the same topic.
            topic = at.topic if self.shares else sa.cast(at.topic, sa.Text())
            waiting.append(topic.not_in(without))
        sized = (
            sa.select(at.seq, sa.func.octet_length(at.payload))
            if self.shares
            else sa.select(at.seq, sa.func.length(at.payload))
        )
        look = sized.where(*waiting).order_by(at.seq).limit(most)
        self._connection = self._engine.connect()
        try:
            found = self._connection.execute(look.with_for_update(skip_locked=True) if self.shares else look).all()
            sizes = list(accumulate(int(size or 0) for _, size in found))
            fit = max(1, sum(total <= TAKEN_BYTES for total in sizes))
            chosen = [seq for seq, _ in found[:fit]]
            columns: dict[str, sa.ColumnElement[Any]] = {name: at[name] for name in COLUMNS}
            if not self.shares:  # SQLite's columns take any type, and a text must be bytes here too
                columns["payload"] = sa.cast(at.payload, sa.LargeBinary()).label("payload")
            read = sa.select(*columns.values()).where(at.seq.in_(chosen)).order_by(at.seq)
            rows = [_row(row) for row in self._connection.execute(read)] if chosen else []
        except BaseException:
            self.give_back()
            raise
        if not rows or not self.shares:  # an open transaction of SQLite would let its log grow
            self.give_back()
        return rows

    def settle(self, sent: Sequence[int], refused: Mapping[int, str]) -> None:
        """Delete the rows `sent`, reject those `refused` with the reason, and return the rest of the rows that were
        taken, all in one transaction."""
        connection = self._connection = self._connection or self._engine.connect()
        at, now_ms = self._table.c, self._clock.now_ms()
        try:
            if sent:
                self._delete(connection, sent)
            for seq, reason in refused.items():
                values = {"refused_ms": now_ms, "refused": reason.replace("\0", "")[:REASON_CHARS]}
                connection.execute(sa.update(self._table).where(at.seq == seq).values(values))
            connection.commit()
        finally:
            self.give_back()

    def _delete(self, connection: sa.Connection, seqs: Sequence[int]) -> None:
        """Delete rows. InnoDB locks all rows that it reads, and prefers to read a small table whole. Two relays would
        then wait for each other's rows. A join from the keys, in this order, reads these rows alone."""
        if self.dialect != "mysql":
            connection.execute(sa.delete(self._table).where(self._table.c.seq.in_(seqs)))
            return
        keys = "JSON_TABLE(:seqs, '$[*]' COLUMNS (seq BIGINT PATH '$')) AS k"
        joined = f"{keys} STRAIGHT_JOIN {self.table} AS o FORCE INDEX (PRIMARY) ON o.seq = k.seq"
        connection.execute(sa.text(f"DELETE o FROM {joined}"), {"seqs": json.dumps(list(seqs))})

    def give_back(self) -> None:
        """Return the rows that were taken and not settled. Harmless if there are none."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            connection.close()
        except DBAPIError:  # it is dead, and with it its locks
            connection.invalidate()
            connection.close()

    def let_go(self) -> None:
        """Drop the connection after an error."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.invalidate()
            connection.close()
        self._engine.dispose()

    # ── looking ──

    def waiting(self) -> OutboxCounts:
        """Return how many rows wait and are rejected, each counted up to COUNTED."""
        at = self._table.c
        with self._engine.connect() as connection:

            def count(condition: sa.ColumnElement[bool]) -> int:
                some = sa.select(at.seq).where(condition).limit(COUNTED).subquery()
                return connection.execute(sa.select(sa.func.count()).select_from(some)).scalar_one()

            first = sa.select(at.added_ms).where(at.refused_ms.is_(None)).order_by(at.seq).limit(1)
            oldest_ms = connection.execute(first).scalar_one_or_none()
            return OutboxCounts(count(at.refused_ms.is_(None)), count(at.refused_ms.is_not(None)), int(oldest_ms or 0))

    def set_aside(self, most: int) -> list[RefusedRow]:
        """Return up to `most` rejected rows, in the order of `seq`."""
        at = self._table.c
        wanted = sa.select(at.seq, at.topic, at.grp, at.id, at.due_ms, at.refused_ms, sa.func.coalesce(at.refused, ""))
        look = wanted.where(at.refused_ms.is_not(None)).order_by(at.seq).limit(most)
        with self._engine.connect() as connection:
            return [RefusedRow(*map(_shown, row)) for row in connection.execute(look)]

    def retry(self, seqs: Sequence[int] | None) -> int:
        """Make rejected rows wait again: those of `seqs`, or all (None). Return how many there were."""
        return self._change(sa.update(self._table).values(refused_ms=None, refused=None), seqs)

    def purge(self, seqs: Sequence[int] | None) -> int:
        """Delete rejected rows: those of `seqs`, or all (None). Return how many there were."""
        return self._change(sa.delete(self._table), seqs)

    def _change(self, change: sa.Update | sa.Delete, seqs: Sequence[int] | None) -> int:
        at = self._table.c
        change = change.where(at.refused_ms.is_not(None))
        with self._engine.begin() as connection:
            done = connection.execute(change if seqs is None else change.where(at.seq.in_(seqs)))
            return int(done.rowcount)


def _table(name: str) -> sa.Table:
    schema, _, own_name = name.rpartition(".")
    kinds: dict[str, sa.types.TypeEngine[Any]] = {"payload": sa.LargeBinary()}
    kinds |= dict.fromkeys(("topic", "grp", "id", "tag", "headers", "refused"), sa.Text())
    columns = [*COLUMNS, "added_ms", "refused_ms", "refused"]
    made = (sa.Column(column, kinds.get(column, sa.BigInteger())) for column in columns)
    return sa.Table(own_name, sa.MetaData(), *made, schema=schema or None)


def _row(row: sa.Row[Any]) -> OutboxRow:
    values = dict(row._mapping)
    payload = bytes(values.pop("payload") or b"")
    unreadable = [name for name, value in values.items() if isinstance(value, bytes) and _read(value) is value]
    flaw = f"{', '.join(unreadable)}: not text in UTF-8" if unreadable else ""
    return OutboxRow(**{name: _shown(value) for name, value in values.items()}, payload=payload, flaw=flaw)


def _read(text: bytes) -> str | bytes:
    """Return a text of SQLite; its bytes if they are not UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text


def _shown(value: Any) -> Any:
    """Return bytes, which SQLite may keep in a column of texts, as text."""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


def reason_of(trouble: DBAPIError) -> str:
    """Return what the database said, on one line."""
    return " ".join(str(trouble.orig).split()) or type(trouble.orig).__name__
