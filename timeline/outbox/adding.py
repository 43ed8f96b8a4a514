"""The outbox's table, and messages added to it inside the caller's own transaction, which is never committed here.

Times in the table are int milliseconds, those of a point in time since 1970 UTC.
"""

from __future__ import annotations

import inspect
import json
import random
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

from timeline.clock import Clock
from timeline.driver.message import Ids, Message, encode_text
from timeline.errors import Invalid
from timeline.model import DEFAULT_GROUP, MAX_GROUP_BYTES, check_topic_name, decode_headers
from timeline.wire.frames import PutFlag

TABLE = "timeline_outbox"
COLUMNS = ("topic", "grp", "id", "payload", "due_ms", "in_ms", "expires_ms", "expires_in_ms", "tag", "headers")
_MARKS: dict[str, Callable[[int, str], str]] = {
    "qmark": lambda place, name: "?",
    "numeric": lambda place, name: f":{place}",
    "numeric_dollar": lambda place, name: f"${place}",
    "named": lambda place, name: f":{name}",
    "format": lambda place, name: "%s",
    "pyformat": lambda place, name: "%s",
}
_IN_TRANSACTION = 1
"""The flag of MySQL's status that says that a transaction has begun."""


def add(
    connection: Any,
    message: Message,
    *,
    topic: str,
    group: str = DEFAULT_GROUP,
    table: str = TABLE,
    paramstyle: str | None = None,
) -> str:
    """Add `message` to the outbox and return its id, which is made here when it has none. The relay sends the message
    once the caller's transaction is committed, never when it is rolled back. This call never commits.

    `connection`: an SQLAlchemy Connection or Session, or a DB-API connection (sqlite3, psycopg, PyMySQL, Django's …)
    inside a transaction. `paramstyle`: its placeholders, if its module does not say. `at=` of the message is exact.
    `in_=`, and a relative `expires=`, count from when the relay sends it. Raise Invalid. The database's own errors
    come through.

    Of an AsyncSession or AsyncConnection: `await session.run_sync(outbox.add, message, topic=…)`.
    """
    return add_many(connection, [message], topic=topic, group=group, table=table, paramstyle=paramstyle)[0]


def add_many(
    connection: Any,
    messages: Iterable[Message],
    *,
    topic: str,
    group: str = DEFAULT_GROUP,
    table: str = TABLE,
    paramstyle: str | None = None,
) -> list[str]:
    """Add many messages, as `add` does, and return their ids in order."""
    check_table(table)
    rows = rows_of(messages, topic, group)
    if not rows:
        return []
    if _of_sqlalchemy(connection):
        _add_by_sqlalchemy(connection, rows, table)
    else:
        _add_by_dbapi(connection, rows, table, paramstyle)
    return [row["id"] for row in rows]


def statement(
    message: Message, *, topic: str, group: str = DEFAULT_GROUP, table: str = TABLE, paramstyle: str
) -> tuple[str, list[Any]]:
    """Return the INSERT that `add` runs and its values, for programs that run it themselves. The third value is the id.

    `paramstyle`: qmark (?), format (%s), numeric (:1), or numeric_dollar ($1), as asyncpg has it:
    `sql, values = outbox.statement(message, topic="reminders", paramstyle="numeric_dollar")`, then
    `await connection.execute(sql, *values)`. Raise Invalid.
    """
    [row] = rows_of([message], topic, group)
    return _insert(check_table(table), paramstyle), [row[name] for name in COLUMNS]


def rows_of(messages: Iterable[Message], topic: str, group: str) -> list[dict[str, Any]]:
    """Return the outbox's row for each message. Raise Invalid."""
    check_topic_name(topic)
    encode_text(group, "a group", MAX_GROUP_BYTES)
    listed = list(messages)
    made: Ids | None = None
    rows = []
    for message in listed:
        if not isinstance(message, Message):
            raise Invalid(f"the outbox takes timeline.Message, not {type(message).__name__}")
        id, time_ms, flags, expires_ms, tag, headers = message.encoded
        if not id:
            made = made or Ids(Clock(), random.SystemRandom())
            id = made.make()
        relative, expires_relative = bool(flags & PutFlag.IN), bool(flags & PutFlag.EXPIRES_IN)
        rows.append(
            {
                "topic": topic,
                "grp": group,
                "id": id.decode(),
                "payload": message.payload,
                "due_ms": None if relative else time_ms,
                "in_ms": time_ms if relative else None,
                "expires_ms": expires_ms if expires_ms and not expires_relative else None,
                "expires_in_ms": expires_ms if expires_ms and expires_relative else None,
                "tag": tag.decode() or None,
                "headers": json.dumps(decode_headers(headers), ensure_ascii=False) if headers else None,
            }
        )
    return rows


def _insert(table: str, paramstyle: str) -> str:
    mark = _MARKS.get(paramstyle)
    if mark is None:
        raise Invalid(f"paramstyle must be one of {', '.join(_MARKS)}, not {paramstyle!r:.40}")
    marks = ", ".join(mark(place, name) for place, name in enumerate(COLUMNS, start=1))
    return f"INSERT INTO {table} ({', '.join(COLUMNS)}) VALUES ({marks})"


# ── SQLAlchemy ──


def _of_sqlalchemy(connection: Any) -> bool:
    """Return whether this is a usable connection of SQLAlchemy. Raise Invalid for an unusable one."""
    roots = {kind.__module__.partition(".")[0] for kind in type(connection).__mro__}
    if "sqlalchemy" not in roots:
        return False
    # A connection of SQLAlchemy has imported it already; other programs do not need it.
    orm = sys.modules.get("sqlalchemy.orm")
    if isinstance(connection, (_core().Connection, *((orm.Session, orm.scoped_session) if orm else ()))):
        return True
    kind = type(connection).__name__
    if kind.startswith("Async") or kind == "async_scoped_session":
        raise Invalid(f"an {kind} is asked by 'await connection.run_sync(outbox.add, message, topic=…)'")
    raise Invalid(
        f"the outbox takes the connection or session whose transaction it is to be part of, not SQLAlchemy's {kind}: "
        "'with engine.begin() as connection: outbox.add(connection, …)'"
    )


def _core() -> Any:
    return sys.modules["sqlalchemy"]


def _add_by_sqlalchemy(connection: Any, rows: list[dict[str, Any]], table: str) -> None:
    core = connection if isinstance(connection, _core().Connection) else connection.connection()
    if not core.in_transaction():
        core.begin()  # as its first statement would
    _check_transaction(core.connection.dbapi_connection)
    connection.execute(_core().text(_insert(table, "named")), rows if len(rows) > 1 else rows[0])


# ── DB-API ──


def _add_by_dbapi(connection: Any, rows: list[dict[str, Any]], table: str, paramstyle: str | None) -> None:
    if not callable(getattr(connection, "cursor", None)) or not callable(getattr(connection, "commit", None)):
        raise Invalid(
            "the outbox takes an SQLAlchemy connection or session or a DB-API connection, not "
            f"{type(connection).__module__}.{type(connection).__name__}; "
            "outbox.statement(…) has the SQL and its values for any other"
        )
    if inspect.iscoroutinefunction(connection.commit):
        raise Invalid(
            f"{type(connection).__name__} is asynchronous: run what outbox.statement(…) answers, "
            "'sql, values = outbox.statement(message, topic=…, paramstyle=…)'"
        )
    _check_transaction(connection)
    style = paramstyle or _style_of(connection)
    sql = _insert(table, style)
    named = style == "named"
    values: list[Any] = [row if named else [row[name] for name in COLUMNS] for row in rows]
    cursor = connection.cursor()
    try:
        if len(values) == 1:
            cursor.execute(sql, values[0])
        else:
            cursor.executemany(sql, values)
    finally:
        cursor.close()


def _style_of(connection: Any) -> str:
    """Return the placeholders of a DB-API connection, as the module of its class declares them."""
    for kind in type(connection).__mro__:
        parts = kind.__module__.split(".")
        if parts[0] == "django":
            return "format"
        for length in range(len(parts), 0, -1):
            style = getattr(sys.modules.get(".".join(parts[:length])), "paramstyle", None)
            if isinstance(style, str):
                return style
    raise Invalid(
        f"{type(connection).__module__}.{type(connection).__name__} does not say which placeholders it takes: "
        "add(…, paramstyle='format') for %s, 'qmark' for ?"
    )


def _check_transaction(raw: Any) -> None:
    """Raise Invalid for a connection that commits each statement by itself: its messages could not be rolled back."""
    if _commits_by_itself(raw):
        raise Invalid(
            "this connection commits each statement by itself (autocommit), so a message would be sent whatever "
            "becomes of your transaction: begin one first"
        )


def _commits_by_itself(raw: Any) -> bool:
    if hasattr(raw, "in_transaction") and hasattr(raw, "isolation_level"):  # sqlite3
        if raw.in_transaction:
            return False
        autocommit = getattr(raw, "autocommit", -1)
        return autocommit is True or (autocommit == -1 and raw.isolation_level is None)
    if callable(getattr(raw, "get_autocommit", None)):  # PyMySQL, Django
        return bool(raw.get_autocommit()) and not getattr(raw, "server_status", 0) & _IN_TRANSACTION
    info = getattr(raw, "info", None)
    status = getattr(info, "transaction_status", None)  # psycopg, psycopg2
    if getattr(raw, "autocommit", None) is not True:
        return False
    return int(status) == 0 if status is not None else not getattr(raw, "in_transaction", False)


# ── the table ──

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,50}(\.[A-Za-z_][A-Za-z0-9_]{0,50})?")
_SHAPE = """
CREATE TABLE IF NOT EXISTS {table} (
    seq {key},
    topic {word} NOT NULL,
    grp {word} DEFAULT 'default' NOT NULL,
    id {word} NOT NULL,
    payload {content} NOT NULL,
    due_ms BIGINT,
    in_ms BIGINT,
    expires_ms BIGINT,
    expires_in_ms BIGINT,
    tag {word},
    headers TEXT,
    added_ms BIGINT DEFAULT ({now}) NOT NULL,
    refused_ms BIGINT,
    refused TEXT,
    CHECK ((due_ms IS NULL) <> (in_ms IS NULL)){inside}
){after}
"""
# A row waits until `refused_ms` is set; sent rows are deleted. The index has only the rows that wait, since rejected
# rows may stay for long.
_INDEX = "CREATE INDEX IF NOT EXISTS {index} ON {table} (seq) WHERE refused_ms IS NULL"

_WORDS = {
    "sqlite": {
        "key": "INTEGER PRIMARY KEY AUTOINCREMENT",
        "word": "TEXT",
        "content": "BLOB",
        "now": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
        "inside": "",
        "after": "",
    },
    "postgresql": {
        "key": "BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY",
        "word": "TEXT",
        "content": "BYTEA",
        "now": "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT)",
        "inside": "",
        # Rows live for a moment, so vacuum must come long before a fifth of the table is dead.
        "after": " WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000)",
    },
    "mysql": {
        "key": "BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY",
        "word": "VARCHAR(255)",
        "content": "LONGBLOB",
        "now": "CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS SIGNED)",
        "inside": ",\n    INDEX {index} (refused_ms, seq)",
        "after": " ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin",
    },
}
DIALECTS = tuple(_WORDS)


def ddl(dialect: str, table: str = TABLE) -> list[str]:
    """Return the statements that create the outbox's table for `dialect`, one of DIALECTS (mysql: also MariaDB). They
    do nothing if it exists already. Raise Invalid."""
    if dialect not in _WORDS:
        raise Invalid(f"dialect must be one of {', '.join(DIALECTS)}, not {dialect!r:.40}")
    index = f"{check_table(table).rpartition('.')[2]}_waiting"
    words = {name: word.format(index=index) for name, word in _WORDS[dialect].items()}
    made = [_SHAPE.format(table=table, **words).strip()]
    return made if dialect == "mysql" else [*made, _INDEX.format(index=index, table=table)]


def check_table(table: str) -> str:
    """Return `table` if it can be the name of a table, with or without a schema before it. Raise Invalid."""
    if not isinstance(table, str) or not _NAME.fullmatch(table):
        raise Invalid(
            f"a table's name is letters, digits and _, with a schema and a dot before it or without: {table!r:.80}"
        )
    return table
