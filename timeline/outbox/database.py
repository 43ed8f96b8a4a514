"""The outbox's table as the relay has it: opened by its URL; rows that wait are taken, and deleted or set aside.

The URL is SQLAlchemy's own form, with a driver that is installed where it names none. Calls block; the relay makes them
in one thread. Where the database has SKIP LOCKED, what was taken stays locked until it is settled, so that several
relays share a table and none sends what another has in hand; a relay that dies lets go of it with its connection.
SQLite has none: there one relay at a time holds a lock beside the database's file.
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
from timeline.outbox.ddl import DIALECTS, TABLE, check_table
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
"""SQLAlchemy's name of each driver that the relay can use → its module, the first that is installed is taken."""
_PACKAGES = {"postgresql": "psycopg[binary]", "mysql": "pymysql"}
_ALSO = {"postgres": "postgresql", "mariadb": "mysql"}

REASON_CHARS = 1_000
TAKEN_BYTES = 16 * 1024 * 1024
"""Payload bytes that are taken at once; one payload may be more."""
COUNTED = 100_000
"""Rows that wait are counted up to so many."""
CONNECT_S = 10
ANSWER_S = 60
"""A statement that takes longer is given up."""
LIBPQ = {
    "connect_timeout": CONNECT_S,
    "tcp_user_timeout": ANSWER_S * 1_000,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
}
"""Of psycopg and psycopg2: a server whose machine is gone is given up, too, not asked for hours."""
REFUSED_BY_SQLITE = (1, 8)
"""Its primary error codes for an error in the statement (no such table), and a database that is read only."""
REFUSED_BY_MYSQL = (1044, 1045, 1049, 1142, 1143, 1146, 1290, 1698, 1836)
"""Access denied, no such database or table, no right on it, read only."""
REFUSED_BY_POSTGRESQL = ("25006", "28", "3D", "42")
"""SQLSTATE: read only, no such user or wrong password, no such database, no such table or no right on it."""
OLDEST_MYSQL = {True: (10, 6), False: (8, 0, 1)}
"""The first MariaDB, and the first MySQL, that has SKIP LOCKED."""


class OutboxRefused(TimelineError):
    """The outbox cannot be used as it is: no such table, no rights, a driver that is missing. The text says what to
    change."""

    code = "REFUSED"


def outbox_url(url: str) -> URL:
    """`url` read, with a driver in it. Raises Invalid for what is no URL of a known database, OutboxRefused without a
    driver or, of SQLite, without its file."""
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
        raise Invalid("an outbox in memory is seen by nobody else: give the file, sqlite:////path/to/app.db")
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
    """Why none of it can be sent."""

    def message(self) -> Message:
        """What is to be sent. Raises Invalid or TooLarge: the table is open to whoever can insert a row."""
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
"""Those of the table that make a row."""


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A row that was set aside. `refused_ms`: when, milliseconds UTC; `reason`: why."""

    seq: int
    topic: str
    group: str
    id: str
    due_ms: int | None
    refused_ms: int
    reason: str


@dataclass(frozen=True, slots=True)
class OutboxCounts:
    """How much stands in the table. `oldest_ms`: since when the oldest row waits, milliseconds UTC; 0: none does."""

    waiting: int
    set_aside: int
    oldest_ms: int


def _point(millis: int) -> When:
    # A due before 1970 is 1 in a row; as an int that would look like seconds.
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
    """The table `table` of the database at `url`. `idle_s`: after how long the server may let go of rows whose relay
    says nothing any more, where it can. Raises as `outbox_url`."""

    def __init__(self, url: str, table: str = TABLE, idle_s: int = 60, clock: Clock | None = None) -> None:
        self.url = outbox_url(url)
        self.shown = shown(url)
        self.table = check_table(table)
        self.dialect = self.url.get_backend_name()
        self._clock = clock or Clock()
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
        """Settings of a new connection: rows of a relay that fell silent are not locked for ever; a text of SQLite's
        that is no UTF-8 is no error of all that it was asked for with."""
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
        """Connects and looks whether the table is there. Raises Unavailable when no database answers, OutboxRefused,
        with what to do about it, for everything else."""
        try:
            with self._engine.connect() as connection:
                self._check_version(connection)
                self._check_columns(connection)
        except (OperationalError, InterfaceError) as trouble:
            raise self.explained(trouble) from trouble
        except DBAPIError as refused:
            raise OutboxRefused(f"{self.shown}: {reason_of(refused)}") from refused

    def explained(self, trouble: DBAPIError) -> Unavailable | OutboxRefused:
        """The error for a database that cannot be asked."""
        said = reason_of(trouble)
        if self._refuses(trouble):
            return OutboxRefused(f"{self.shown}: {said}")
        return Unavailable(f"the database at {self.shown} cannot be asked: {said}")

    def _refuses(self, trouble: DBAPIError) -> bool:
        """Whether the database answered, and said no: by the code of its error."""
        error: Any = trouble.orig
        first = error.args[0] if error.args else None
        if self.dialect == "sqlite":
            return getattr(error, "sqlite_errorcode", 0) & 0xFF in REFUSED_BY_SQLITE
        if self.dialect == "mysql":
            return getattr(error, "errno", first) in REFUSED_BY_MYSQL
        state = (
            first.get("C") if isinstance(first, dict) else getattr(error, "sqlstate", getattr(error, "pgcode", None))
        )
        if state is None and not trouble.connection_invalidated:
            return self._answers()
        return str(state).startswith(REFUSED_BY_POSTGRESQL)

    def _answers(self) -> bool:
        """Whether a PostgreSQL that did not let us connect accepts connections: libpq tells no code of why not."""
        if self.url.get_driver_name() != "psycopg":
            return False
        from psycopg import pq
        from psycopg.conninfo import make_conninfo

        known = LIBPQ | self.url.translate_connect_args(username="user", database="dbname") | dict(self.url.query)
        return pq.PGconn.ping(make_conninfo(**known).encode()) == pq.Ping.OK

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
        """Lets go of everything."""
        self.give_back()
        self._engine.dispose()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def shares(self) -> bool:
        """Whether several relays may take from the table at once."""
        return self.dialect != "sqlite"

    def hold(self) -> bool:
        """Whether this relay may take now: always where relays share; else only one may, until it closes or dies."""
        if self.shares or self._lock is not None:
            return True
        lock = os.open(f"{self.url.database}-{self.table}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    # ── sending ──

    def take(self, most: int, without: Sequence[str] = ()) -> list[OutboxRow]:
        """Up to `most` rows that wait, in the order of `seq`, none of the topics `without`; as many as TAKEN_BYTES
        allow. They are this relay's until `settle` or `give_back`."""
        self.give_back()
        at = self._table.c
        waiting = [at.refused_ms.is_(None)]
        if without:
            # In SQLite bytes are never equal to a text, though they are the same topic.
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
            if not self.shares:  # SQLite's columns take any type: a text is bytes here, too
                columns["payload"] = sa.cast(at.payload, sa.LargeBinary()).label("payload")
            read = sa.select(*columns.values()).where(at.seq.in_(chosen)).order_by(at.seq)
            rows = [_row(row) for row in self._connection.execute(read)] if chosen else []
        except BaseException:
            self.give_back()
            raise
        if not rows or not self.shares:  # a transaction of SQLite would keep its log from being cut short
            self.give_back()
        return rows

    def settle(self, sent: Sequence[int], refused: Mapping[int, str]) -> None:
        """Deletes the rows `sent`, sets aside those `refused` with the reason, and gives back the rest of what was
        taken; all of it or nothing."""
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
        """Deletes rows. InnoDB locks whatever it reads to find them, and would rather read a small table whole than
        look keys up: then it waits for rows that another relay has, while that one waits for ours. Joined from the
        keys, in this order, it reads these rows alone."""
        if self.dialect != "mysql":
            connection.execute(sa.delete(self._table).where(self._table.c.seq.in_(seqs)))
            return
        keys = "JSON_TABLE(:seqs, '$[*]' COLUMNS (seq BIGINT PATH '$')) AS k"
        joined = f"{keys} STRAIGHT_JOIN {self.table} AS o FORCE INDEX (PRIMARY) ON o.seq = k.seq"
        connection.execute(sa.text(f"DELETE o FROM {joined}"), {"seqs": json.dumps(list(seqs))})

    def give_back(self) -> None:
        """Lets go of what was taken and not settled. Harmless when there is nothing."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            connection.close()
        except DBAPIError:  # it is dead, and with it its locks
            connection.invalidate()
            connection.close()

    def let_go(self) -> None:
        """After trouble: the connection is not used again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.invalidate()
            connection.close()
        self._engine.dispose()

    # ── looking ──

    def waiting(self) -> OutboxCounts:
        """How much waits and is set aside now, each counted up to COUNTED."""
        at = self._table.c
        with self._engine.connect() as connection:

            def count(condition: sa.ColumnElement[bool]) -> int:
                some = sa.select(at.seq).where(condition).limit(COUNTED).subquery()
                return connection.execute(sa.select(sa.func.count()).select_from(some)).scalar_one()

            first = sa.select(at.added_ms).where(at.refused_ms.is_(None)).order_by(at.seq).limit(1)
            oldest_ms = connection.execute(first).scalar_one_or_none()
            return OutboxCounts(count(at.refused_ms.is_(None)), count(at.refused_ms.is_not(None)), int(oldest_ms or 0))

    def set_aside(self, most: int) -> list[RefusedRow]:
        """Up to `most` rows that were set aside, in the order of `seq`."""
        at = self._table.c
        wanted = sa.select(at.seq, at.topic, at.grp, at.id, at.due_ms, at.refused_ms, sa.func.coalesce(at.refused, ""))
        look = wanted.where(at.refused_ms.is_not(None)).order_by(at.seq).limit(most)
        with self._engine.connect() as connection:
            return [RefusedRow(*map(_shown, row)) for row in connection.execute(look)]

    def retry(self, seqs: Sequence[int] | None) -> int:
        """Has rows that were set aside wait again: those of `seqs`, or all (None). Answers how many there were."""
        return self._change(sa.update(self._table).values(refused_ms=None, refused=None), seqs)

    def purge(self, seqs: Sequence[int] | None) -> int:
        """Deletes rows that were set aside: those of `seqs`, or all (None). Answers how many there were."""
        return self._change(sa.delete(self._table), seqs)

    def _change(self, change: sa.Update | sa.Delete, seqs: Sequence[int] | None) -> int:
        at = self._table.c
        change = change.where(at.refused_ms.is_not(None))
        with self._engine.begin() as connection:
            done = connection.execute(change if seqs is None else change.where(at.seq.in_(seqs)))
            return int(done.rowcount)


def _table(name: str) -> sa.Table:
    """The table as SQLAlchemy has it."""
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
    """A text of SQLite's; as it is where it is no UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text


def _shown(value: Any) -> Any:
    """Bytes as text, where SQLite keeps them in a column of texts."""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


def reason_of(trouble: DBAPIError) -> str:
    """What the database said, on one line."""
    return " ".join(str(trouble.orig).split()) or type(trouble.orig).__name__
