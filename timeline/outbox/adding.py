"""Adds messages to the outbox inside the caller's own transaction, which is never committed here."""

from __future__ import annotations

import inspect
import json
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

from timeline.clock import Clock
from timeline.driver.message import Ids, Message, encode_text
from timeline.errors import Invalid
from timeline.model import DEFAULT_GROUP, MAX_GROUP_BYTES, check_topic_name, decode_headers
from timeline.outbox.ddl import TABLE, check_table
from timeline.wire.frames import PutFlag

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
"""Of MySQL's status flags: a transaction was begun."""


def add(
    connection: Any,
    message: Message,
    *,
    topic: str,
    group: str = DEFAULT_GROUP,
    table: str = TABLE,
    paramstyle: str | None = None,
) -> str:
    """Adds `message` to the outbox; answers its id, made here when it has none. Sent once the caller's transaction is
    committed, never when it is rolled back. Never commits.

    `connection`: an SQLAlchemy Connection or Session, or a DB-API connection (sqlite3, psycopg, PyMySQL, Django's …)
    that is inside a transaction; `paramstyle`: its placeholders, where its module does not say. `at=` of the message is
    exact; `in_=`, and an `expires=` from now, count from when the relay sends it. Raises Invalid; whatever the database
    raises comes through.

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
    """The same for many messages; answers their ids in order."""
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
    """The INSERT that `add` runs, and its values, for whoever runs it in another way; the id is the third value.

    `paramstyle`: qmark (?), format (%s), numeric (:1), or numeric_dollar ($1), as asyncpg has it:
    `sql, values = outbox.statement(message, topic="reminders", paramstyle="numeric_dollar")`, then
    `await connection.execute(sql, *values)`. Raises Invalid.
    """
    [row] = rows_of([message], topic, group)
    return _insert(check_table(table), paramstyle), [row[name] for name in COLUMNS]


def rows_of(messages: Iterable[Message], topic: str, group: str) -> list[dict[str, Any]]:
    """The outbox's row for each message. Raises Invalid."""
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
    """Whether it is SQLAlchemy's and can be used. Raises Invalid for what is SQLAlchemy's and cannot."""
    roots = {kind.__module__.partition(".")[0] for kind in type(connection).__mro__}
    if "sqlalchemy" not in roots:
        return False
    # Not imported here: it is there, since the connection is of it, or an adding program needs it not.
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
    """The placeholders of a DB-API connection, as the module says that its class comes from."""
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
    """Raises Invalid for a connection that is known to commit each statement by itself: then nothing could be rolled
    back."""
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
    return getattr(raw, "autocommit", None) is True and status is not None and int(status) == 0
