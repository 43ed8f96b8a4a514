"""Short ways to a real MySQL server in its tests: a database, a store on it, and connections of other people."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import urlsplit

import pymysql

from tests.servers.mysql import MysqlServer
from timeline.storage_plugins import make_store
from timeline.storage_plugins.conformance.trial import Trial

LOOKS = 6_000


@asynccontextmanager
async def trial(url: str, **options: Any) -> AsyncIterator[Trial]:
    """A trial on `url` with these options."""
    query = "&".join(f"{name}={value}" for name, value in options.items())
    whole = f"{url}?{query}" if query else url
    async with Trial(lambda: make_store(whole)) as trying:
        yield trying


@contextmanager
def other(url: str) -> Iterator[Any]:
    """A connection of somebody else to the same database, in a transaction of its own."""
    parts = urlsplit(url)
    connection = pymysql.connect(
        host=parts.hostname or "",
        port=parts.port or 0,
        user=parts.username or "",
        password=parts.password or "",
        database=parts.path[1:],
        read_timeout=60,
    )
    run(connection, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
    try:
        yield connection
    finally:
        connection.close()


def run(connection: Any, *statements: str) -> list[Any]:
    """Runs statements; what the last one answered."""
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
        return list(cursor.fetchall())


async def until(server: MysqlServer, question: str) -> None:
    """Returns once the server answers something to `question`; asking takes some milliseconds each time."""
    for _ in range(LOOKS):
        if (await asyncio.to_thread(server.sql, question)).strip():
            return
    raise AssertionError(f"the server never answered {question}")


def database_of(url: str) -> str:
    """The database that a URL names."""
    return urlsplit(url).path[1:]


@contextmanager
def setting(server: MysqlServer, name: str, value: str) -> Iterator[None]:
    """A setting of the whole server, for a while."""
    before = server.sql(f"SELECT @@GLOBAL.{name}").strip()
    server.sql(f"SET GLOBAL {name} = {value}")
    try:
        yield
    finally:
        server.sql(f"SET GLOBAL {name} = {before}")
