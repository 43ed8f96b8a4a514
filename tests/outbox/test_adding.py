"""Adding to the outbox is part of the caller's transaction, whatever it is made with."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from tests.outbox.conftest import TOPIC, Shop
from timeline import Message, outbox
from timeline.errors import Invalid

DUE = datetime(2030, 1, 1, tzinfo=UTC)
FULL = Message(b"\0\xff", at=DUE, id="ünpaid-1", tag="späte", headers={"a": "ä", "b": "\0"}, expires="1h")


def rows(shop: Shop) -> list[dict[str, Any]]:
    with shop.engine.begin() as connection:
        return [
            dict(row) for row in connection.execute(sa.text("SELECT * FROM timeline_outbox ORDER BY seq")).mappings()
        ]


def test_every_field_is_kept_and_an_id_is_made(shop: Shop) -> None:
    with shop.engine.begin() as connection:
        assert outbox.add(connection, FULL, topic=TOPIC, group="ops") == "ünpaid-1"
        made = outbox.add(connection, Message(b"", in_="1.5s", expires=DUE), topic=TOPIC)
    full, plain = rows(shop)
    due_ms = int(DUE.timestamp() * 1000)
    assert {name: full[name] for name in ("topic", "grp", "id", "tag")} == {
        "topic": TOPIC, "grp": "ops", "id": "ünpaid-1", "tag": "späte",
    }  # fmt: skip
    assert (bytes(full["payload"]), full["due_ms"], full["in_ms"]) == (b"\0\xff", due_ms, None)
    assert (full["expires_ms"], full["expires_in_ms"]) == (None, 3_600_000)
    assert (plain["id"], plain["grp"], bytes(plain["payload"])) == (made, "default", b"")
    assert (plain["due_ms"], plain["in_ms"], plain["expires_ms"], plain["tag"]) == (None, 1_500, due_ms, None)
    assert len(made) == 36 and plain["headers"] is None
    found = shop.outbox()
    first, second = found.take(10)
    found.close()
    assert first.message().encoded == FULL.encoded
    assert second.message().encoded[0] == made.encode()


@pytest.mark.parametrize("kind", ["connection", "session", "scoped_session"])
def test_what_sqlalchemy_rolls_back_was_never_there(shop: Shop, kind: str) -> None:
    registry = scoped_session(sessionmaker(shop.engine))
    made: dict[str, Any] = {
        "connection": shop.engine.connect,
        "session": lambda: Session(shop.engine),
        "scoped_session": lambda: registry,
    }
    one = made[kind]()
    outbox.add_many(one, [Message(b"", in_=1, id=id) for id in ("a", "b")], topic=TOPIC)
    one.rollback()
    outbox.add(one, Message(b"", in_=1, id="c"), topic=TOPIC)
    one.commit()
    one.close()
    assert shop.left() == ["c"]


def test_a_savepoint_that_is_rolled_back_takes_its_messages_along(shop: Shop) -> None:
    with Session(shop.engine) as session, session.begin():
        outbox.add(session, Message(b"", in_=1, id="kept"), topic=TOPIC)
        inner = session.begin_nested()
        outbox.add(session, Message(b"", in_=1, id="gone"), topic=TOPIC)
        inner.rollback()
    assert shop.left() == ["kept"]


def test_what_a_dbapi_connection_rolls_back_was_never_there(shop: Shop) -> None:
    fairy = shop.engine.raw_connection()
    raw = fairy.dbapi_connection
    assert raw is not None
    outbox.add_many(raw, [Message(b"", in_=1, id=id) for id in ("a", "b")], topic=TOPIC)
    raw.rollback()
    assert outbox.add_many(raw, [Message(b"", in_=1, id=id) for id in ("c", "d")], topic=TOPIC) == ["c", "d"]
    raw.commit()
    fairy.close()
    assert shop.left() == ["c", "d"]
    assert outbox.add_many(raw, [], topic=TOPIC) == []


@pytest.fixture
def dbapi(sqlite_shop: Shop) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(str(sqlite_shop.engine.url.database), isolation_level=None)
    yield connection
    connection.close()


def test_a_connection_that_commits_by_itself_is_refused_but_not_within_a_transaction(
    dbapi: sqlite3.Connection, sqlite_shop: Shop
) -> None:
    with pytest.raises(Invalid, match=r"commits each statement by itself \(autocommit\).*begin one first"):
        outbox.add(dbapi, Message(b"", in_=1), topic=TOPIC)
    dbapi.execute("BEGIN")
    outbox.add(dbapi, Message(b"", in_=1, id="a"), topic=TOPIC)
    dbapi.execute("COMMIT")
    assert sqlite_shop.left() == ["a"]
    with (
        sqlite_shop.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        pytest.raises(Invalid, match="autocommit"),
    ):
        outbox.add(connection, Message(b"", in_=1), topic=TOPIC)


@pytest.mark.parametrize("autocommit", [True, False])
def test_autocommit_is_refused_where_a_connection_says_it_plainly(sqlite_shop: Shop, autocommit: bool) -> None:
    """As drivers do that have no state of a transaction."""

    class Plain:
        def __init__(self, connection: Any) -> None:
            self.autocommit, self.cursor, self.commit = autocommit, connection.cursor, connection.commit

    connection: Any = Plain(sqlite3.connect(sqlite_shop.engine.url.database or ""))
    message = Message(b"", in_="1h", id="plain")
    if autocommit:
        with pytest.raises(Invalid, match="autocommit"):
            outbox.add(connection, message, topic=TOPIC, paramstyle="qmark")
    else:
        outbox.add(connection, message, topic=TOPIC, paramstyle="qmark")


@pytest.mark.servers
def test_autocommit_of_psycopg_is_refused_but_not_within_a_transaction(postgresql_shop: Shop) -> None:
    with psycopg.connect(postgresql_shop.url, autocommit=True) as connection:
        with pytest.raises(Invalid, match="autocommit"):
            outbox.add(connection, Message(b"", in_=1), topic=TOPIC)
        with connection.transaction():
            outbox.add(connection, Message(b"", in_=1, id="a"), topic=TOPIC)
    assert postgresql_shop.left() == ["a"]


@pytest.mark.servers
async def test_asyncpg_runs_the_statement_itself(postgresql_shop: Shop) -> None:
    connection = await asyncpg.connect(postgresql_shop.url)
    with pytest.raises(Invalid, match=r"outbox\.statement"):
        outbox.add(connection, FULL, topic=TOPIC)
    async with connection.transaction():
        sql, values = outbox.statement(FULL, topic=TOPIC, paramstyle="numeric_dollar")
        await connection.execute(sql, *values)
    await connection.close()
    assert values[2] == "ünpaid-1" and postgresql_shop.left() == ["ünpaid-1"]


@pytest.mark.servers
async def test_an_async_session_adds_by_run_sync(postgresql_shop: Shop) -> None:
    engine = create_async_engine(postgresql_shop.url.replace("postgresql://", "postgresql+asyncpg://"))
    async with AsyncSession(engine) as session:
        with pytest.raises(Invalid, match=r"an AsyncSession is asked by 'await connection\.run_sync\(outbox\.add"):
            outbox.add(session, FULL, topic=TOPIC)
        await session.run_sync(outbox.add, FULL, topic=TOPIC)
        await session.rollback()
        await session.run_sync(outbox.add, Message(b"", in_=1, id="b"), topic=TOPIC)
        await session.commit()
    await engine.dispose()
    assert postgresql_shop.left() == ["b"]


@pytest.mark.slow
def test_django_adds_within_its_own_transaction(sqlite_shop: Shop) -> None:
    """In a process of its own: Django is configured once for good."""
    program = f"""
import django
from django.conf import settings
database = {{"ENGINE": "django.db.backends.sqlite3", "NAME": {str(sqlite_shop.engine.url.database)!r}}}
settings.configure(DATABASES={{"default": database}})
django.setup()
from django.db import connection, transaction
from timeline import Invalid, Message, outbox
try:
    outbox.add(connection, Message(b"", in_=1), topic="t")
except Invalid as refused:
    print(refused.reason)
with transaction.atomic():
    outbox.add(connection, Message(b"", in_=1, id="a"), topic="t")
try:
    with transaction.atomic():
        outbox.add(connection, Message(b"", in_=1, id="b"), topic="t")
        raise KeyError
except KeyError:
    pass
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("this connection commits each statement by itself")
    assert sqlite_shop.left() == ["a"]


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (lambda shop: outbox.add(shop.engine, FULL, topic=TOPIC), r"not SQLAlchemy's Engine: 'with engine.begin\(\)"),
        (lambda shop: outbox.add("sqlite:///shop.db", FULL, topic=TOPIC), "not builtins.str; outbox.statement"),
        (lambda shop: outbox.add(shop.engine, b"x", topic=TOPIC), "takes timeline.Message, not bytes"),
        (lambda shop: outbox.add(shop.engine, FULL, topic=""), "a topic's name is 1 to 255"),
        (lambda shop: outbox.add(shop.engine, FULL, topic=TOPIC, group=""), "a group is 1 to 255 bytes"),
        (lambda shop: outbox.add(shop.engine, FULL, topic=TOPIC, table="x; --"), "a table's name is letters"),
        (lambda shop: outbox.statement(FULL, topic=TOPIC, paramstyle="?"), "paramstyle must be one of qmark"),
        (lambda shop: outbox.ddl("oracle"), "one of sqlite, postgresql, mysql, not 'oracle'"),
    ],
)
def test_a_mistake_gets_the_sentence_that_mends_it(sqlite_shop: Shop, mistake: Any, said: str) -> None:
    with pytest.raises(Invalid, match=said):
        mistake(sqlite_shop)


def test_a_connection_that_does_not_say_its_placeholders_is_asked_for_them(sqlite_shop: Shop) -> None:
    class Wrapped:
        def __init__(self) -> None:
            self.raw = sqlite3.connect(str(sqlite_shop.engine.url.database))
            self.cursor, self.commit = self.raw.cursor, self.raw.commit

    wrapped = Wrapped()
    with pytest.raises(Invalid, match=r"paramstyle='format'\) for %s, 'qmark' for \?"):
        outbox.add(wrapped, FULL, topic=TOPIC)
    outbox.add(wrapped, FULL, topic=TOPIC, paramstyle="qmark")
    wrapped.raw.commit()
    wrapped.raw.close()
    assert sqlite_shop.left() == ["ünpaid-1"]


def test_a_table_of_another_name(sqlite_shop: Shop) -> None:
    for made in outbox.ddl("sqlite", "main.mail"):
        sqlite_shop.run(made.replace("ON main.mail", "ON mail").replace("INDEX IF NOT EXISTS ", "INDEX main."))
    with sqlite_shop.engine.begin() as connection:
        outbox.add(connection, FULL, topic=TOPIC, table="main.mail")
        assert connection.scalar(sa.text("SELECT count(*) FROM mail")) == 1


@pytest.mark.slow
def test_adding_needs_no_package_but_the_drivers_own(tmp_path: Path) -> None:
    program = """
import sys
for name in ("sqlalchemy", "click", "rich", "prometheus_client", "grpc"):
    sys.modules[name] = None
import sqlite3
from timeline import Message, outbox
connection = sqlite3.connect(sys.argv[1])
for made in outbox.ddl("sqlite"):
    connection.execute(made)
print(outbox.add(connection, Message(b"", in_=1, id="a"), topic="t"))
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "a.db")], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("a\n", "")
