"""What a PostgreSQL server can do to a store: refuse it, be a standby, be full, die and come back."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.servers.fixture import Running
from tests.servers.postgresql import PostgresqlServer
from tests.services import require_service
from timeline.model import Status
from timeline.storage_plugins import make_store
from timeline.storage_plugins.conformance.trial import Trial, named, statuses
from timeline.storage_plugins.contract import StoreRefused, StoreUnavailable, StoreUnknown

pytestmark = pytest.mark.servers


@pytest.fixture
def own() -> Iterator[PostgresqlServer]:
    """A server that a test may kill, in the folder that the server's user may pass through."""
    require_service("postgresql")
    folder = Path(tempfile.mkdtemp(prefix="timeline-"))
    folder.chmod(0o711)
    server = PostgresqlServer(folder / "postgresql")
    try:
        yield server.start()
    finally:
        server.stop()
        shutil.rmtree(folder)


async def _asked(url: str, statement: str) -> Any:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(statement)
    finally:
        await connection.close()


async def _opened(url: str) -> Any:
    store = make_store(url)
    try:
        return await store.open()
    finally:
        await store.close()


async def test_a_database_that_is_not_there_is_refused(servers: Running) -> None:
    url = servers.url(PostgresqlServer).rpartition("/")[0] + "/nowhere"
    with pytest.raises(StoreRefused, match="no such database: create it"):
        await _opened(url)


async def test_a_newer_schema_is_refused(servers: Running) -> None:
    url = f"{servers.url(PostgresqlServer)}?schema=newer"
    await _opened(url)
    await _asked(servers.url(PostgresqlServer), "UPDATE newer.meta SET value = '99' WHERE name LIKE '%_version'")
    with pytest.raises(StoreRefused, match="schema has version 99"):
        await _opened(url)


async def test_brokers_that_open_an_empty_database_at_once_agree(servers: Running) -> None:
    url = f"{servers.url(PostgresqlServer)}?schema=at_once"
    opened = await asyncio.gather(*(_opened(url) for _ in range(6)))
    assert len({one.cluster_uid for one in opened}) == 1


async def test_asynchronous_commit_is_declared(servers: Running) -> None:
    url = servers.url(PostgresqlServer)
    await _asked(url, "CREATE DATABASE careless")
    await _asked(url, "ALTER DATABASE careless SET synchronous_commit = off")
    store = make_store(url.rpartition("/")[0] + "/careless")
    try:
        opened = await store.open()
        assert "synchronous_commit is off" in opened.warnings[0]
        assert not store.capabilities.durable
    finally:
        await store.close()


async def test_what_was_answered_survives_a_kill(own: PostgresqlServer) -> None:
    async with Trial(lambda: make_store(f"{own.url}?timeout_ms=2000")) as trial:
        topic = await trial.topic()
        await trial.stored(topic, named(500))
        own.kill()
        with pytest.raises((StoreUnavailable, StoreUnknown)):
            await trial.put(topic, [b"lost"])
        with pytest.raises(StoreUnavailable):
            await trial.store.check()
        own.start()
        await trial.store.check()
        assert sorted(await trial.everything(topic)) >= named(500)
        assert statuses(await trial.put(topic, [b"again"])) == [Status.OK]


async def test_connections_exhausted_say_so(own: PostgresqlServer) -> None:
    own.stop()
    own.settings = ("max_connections=5", "superuser_reserved_connections=0")
    own.start()
    taken = [await asyncpg.connect(own.url) for _ in range(5)]
    try:
        with pytest.raises(StoreUnavailable, match="raise its max_connections"):
            await _opened(own.url)
    finally:
        for connection in taken:
            await connection.close()


async def test_a_standby_is_not_written_to(own: PostgresqlServer) -> None:
    own.stop()
    Path(own.folder / "data" / "standby.signal").touch()
    own.start()
    with pytest.raises(StoreUnavailable, match="standby or recovers"):
        await _opened(own.url)


async def test_a_wrong_password_is_refused_and_not_shown(own: PostgresqlServer) -> None:
    hba = own.folder / "data" / "pg_hba.conf"
    await _asked(own.url, "ALTER USER postgres PASSWORD 'right'")
    own.stop()
    hba.write_text("host all all 127.0.0.1/32 scram-sha-256\n", encoding="utf-8")
    own.start()
    with pytest.raises(StoreRefused, match="password is wrong") as refused:
        await _opened(own.url.replace("postgres@", "postgres:s3cret@"))
    assert "s3cret" not in str(refused.value)
    await _opened(own.url.replace("postgres@", "postgres:right@"))


@pytest.mark.parametrize("rest", ["?pool=1", "?schema=A-b", "?colour=red", "?timeout_ms=soon"])
def test_an_option_that_makes_no_sense_is_refused(rest: str) -> None:
    with pytest.raises(StoreRefused, match=r"must be|no option"):
        make_store(f"postgresql://user:s3cret@host/database{rest}")
