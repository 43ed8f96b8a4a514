"""What a PostgreSQL server can do to a store: refuse it, be a standby, be full, die and come back."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.servers import disk as disks
from tests.servers.fixture import Running
from tests.servers.postgresql import PostgresqlServer
from tests.servers.proxy import Proxy
from tests.storage_plugins.outages import own_postgresql
from timeline.model import Operation, Status
from timeline.storage_plugins import make_store
from timeline.storage_plugins.conformance.crowd import Crowd, brokers
from timeline.storage_plugins.conformance.trial import T0, Trial, named, statuses
from timeline.storage_plugins.contract import StoreRefused, StoreUnavailable, StoreUnknown
from timeline.storage_plugins.postgresql import connections, schema
from timeline.storage_plugins.postgresql.pool import PostgresqlPool
from timeline.storage_plugins.postgresql.statements import STATEMENTS
from timeline.storage_plugins.sql import changes
from timeline.storage_plugins.sql.statements import Statement

pytestmark = pytest.mark.servers

TURNS = 10
"""Of the loop, after which what lies in a socket of this machine has been read."""


@pytest.fixture
def own() -> Iterator[PostgresqlServer]:
    with own_postgresql(PostgresqlServer) as server:
        yield server


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A disk of 32 MiB that the server's user may write to."""
    with disks.server_folder() as folder, disks.small_disk(folder / "disk", "32m") as disk:
        (disk / "space").mkdir()
        shutil.chown(disk / "space", "postgres")
        yield disk


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


async def test_a_database_that_is_gone_has_no_cluster(servers: Running) -> None:
    """As at another, empty server behind the same address."""
    url = servers.url(PostgresqlServer)
    await _asked(url, "CREATE DATABASE gone")
    store = make_store(url.rpartition("/")[0] + "/gone")
    await store.open()
    await _asked(url, "DROP DATABASE gone WITH (FORCE)")
    assert (await store.inspect()).cluster_uid == ""
    await store.close()


@pytest.mark.parametrize(
    ("host", "says"), [("127.0.0.1:1", "no server listens there"), ("no-such.invalid", "this host name is not known")]
)
async def test_a_url_of_nobody_is_told_in_words(host: str, says: str) -> None:
    with pytest.raises(StoreUnavailable, match=f"{says}$"):
        await make_store(f"postgresql://user:secret@{host}/timeline").open()


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
    async with Trial(lambda: make_store(f"{own.url}?timeout_ms=8000")) as trial:
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


async def test_a_crowd_survives_kills(own: PostgresqlServer) -> None:
    """Workers and producers of two brokers at work while the server is killed, thrice; no promise is broken. Each time
    one of them at least waits for a lock, so that the kill hits a call."""
    waits = "SELECT count(*) FROM pg_locks WHERE NOT granted"
    async with Trial(lambda: make_store(own.url)) as trial:
        topic = await trial.topic(buckets=4, max_deliveries=0)
        async with brokers(trial, 2) as stores:
            crowd = Crowd(trial, topic, stores, 11)
            for _ in range(3):
                somebody, before = await asyncpg.connect(own.url), crowd.unknown + crowd.unavailable
                await crowd.run(2)
                running = asyncio.create_task(crowd.run(12))
                await somebody.execute("BEGIN")
                await somebody.execute("LOCK TABLE timeline.message IN EXCLUSIVE MODE")
                while not await somebody.fetchval(waits):
                    assert not running.done()
                own.kill()
                somebody.terminate()
                own.start()
                await running
                assert crowd.unknown + crowd.unavailable > before
            await crowd.settle_all()
            await crowd.expect_kept(("put", "OK"), ("ack", "OK"))


async def test_a_full_disk_is_told_and_loses_nothing(servers: Running, small_disk: Path) -> None:
    url = servers.server(PostgresqlServer).url
    await _asked(url, f"CREATE TABLESPACE small LOCATION '{small_disk}/space'")
    await _asked(url, "CREATE DATABASE full_up TABLESPACE small")
    try:
        async with Trial(lambda: make_store(url.rpartition("/")[0] + "/full_up")) as trial:
            topic = await trial.topic()
            kept: list[bytes] = []
            with pytest.raises(StoreUnavailable, match="disk is full"):
                for at in range(1_000):
                    ids = named(100, f"batch {at}")
                    await trial.stored(topic, ids, payload=b"x" * 2_000)
                    kept += ids
            disks.remount(small_disk, "size=128m")
            await trial.stored(topic, [b"after"])
            assert sorted(await trial.everything(topic)) == sorted([*kept, b"after"])
    finally:
        await _asked(url, "DROP DATABASE full_up")
        await _asked(url, "DROP TABLESPACE small")


async def test_missing_rights_are_told(servers: Running) -> None:
    url = servers.server(PostgresqlServer).url
    await _asked(url, "CREATE ROLE poor LOGIN")
    poor = url.replace("postgres@", "poor@")
    await _opened(url)
    with pytest.raises(StoreRefused, match="may not create or use schema 'timeline'"):
        await _opened(poor)
    with pytest.raises(StoreRefused, match="may not create or use schema 'of_the_poor'"):
        await _opened(f"{poor}?schema=of_the_poor")
    await _asked(url, "GRANT CREATE ON DATABASE postgres TO poor")
    assert (await _opened(f"{poor}?schema=of_the_poor")).cluster_uid


async def test_a_server_that_is_too_old_is_refused(servers: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "OLDEST", 990_000)
    with pytest.raises(StoreRefused, match=r"PostgreSQL \d+ is too old: 99 or newer is needed"):
        await _opened(servers.url(PostgresqlServer))


async def test_settings_that_lose_what_was_answered_are_declared(own: PostgresqlServer) -> None:
    for settings, durable, survives, told in (
        (("fsync=off",), False, False, "fsync is off"),
        (("full_page_writes=off",), True, False, "full_page_writes is off"),
        (("synchronous_standby_names=*", "synchronous_commit=local"), True, False, "a fail-over loses it"),
    ):
        own.stop()
        own.settings = settings
        own.start()
        store = make_store(own.url)
        try:
            opened = await store.open()
            assert told in opened.warnings[0]
            assert (store.capabilities.durable, store.capabilities.survives_failover) == (durable, survives)
        finally:
            await store.close()


async def test_settings_that_a_pooler_dropped_are_told(servers: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {name: value for name, value in connections.SETTINGS.items() if name not in connections.PLANNING}
    monkeypatch.setattr(connections.PostgresqlConnections, "settings", kept)
    opened = await _opened(servers.url(PostgresqlServer))
    assert "enable_seqscan" in opened.warnings[0] and "ALTER ROLE" in opened.warnings[0]


async def test_tls_is_asked_for_and_checked(own: PostgresqlServer) -> None:
    own.run(
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"),
        *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"),
    )
    own.run(
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=somebody else"),
        *("-keyout", "other_key.pem", "-out", "other.pem"),
    )
    await _asked(own.url, "CREATE DATABASE secured")
    own.stop()
    rules = "host postgres postgres 127.0.0.1/32 trust\nhostssl secured all 127.0.0.1/32 trust\n"
    (own.folder / "data" / "pg_hba.conf").write_text(rules, encoding="utf-8")
    secured = own.url.rpartition("/")[0] + "/secured"
    own.settings = ("ssl=on", f"ssl_cert_file={own.folder}/cert.pem", f"ssl_key_file={own.folder}/key.pem")
    own.start()
    assert (await _opened(f"{secured}?sslmode=verify-full&sslrootcert={own.folder}/cert.pem")).cluster_uid
    with pytest.raises(StoreRefused, match="certificate"):
        await _opened(f"{secured}?sslmode=verify-full&sslrootcert={own.folder}/other.pem")
    with pytest.raises(StoreRefused, match=r"may not connect: see the server's pg_hba\.conf"):
        await _opened(f"{secured}?sslmode=disable")


async def test_connections_exhausted_say_so(own: PostgresqlServer) -> None:
    own.stop()
    own.settings = ("max_connections=5", "superuser_reserved_connections=0")
    own.start()
    taken: list[asyncpg.Connection] = []
    async with asyncio.timeout(60):
        while len(taken) < 5:
            try:
                taken.append(await asyncpg.connect(own.url))
            except asyncpg.TooManyConnectionsError:
                pass  # that of whoever waited for the server's start is not gone yet
    try:
        with pytest.raises(StoreUnavailable, match="raise its max_connections"):
            await _opened(own.url)
    finally:
        for connection in taken:
            await connection.close()


async def test_where_the_server_has_no_connection_left_one_of_ours_is_waited_for(own: PostgresqlServer) -> None:
    own.stop()
    own.settings = ("max_connections=5", "superuser_reserved_connections=0")
    own.start()
    taken = [await asyncpg.connect(own.url) for _ in range(4)]
    try:
        async with Trial(lambda: make_store(f"{own.url}?timeout_ms=60000")) as trial:
            topic = await trial.topic()
            await asyncio.gather(*(trial.stored(topic, [b"%d" % number]) for number in range(20)))
            assert len(await trial.everything(topic)) == 20
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


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ("?sslmode=requre", "`sslmode` parameter must be one of: disable, allow, prefer, require"),
        ("?sslmode=verify-full&sslrootcert=/nowhere.pem", "sslrootcert names a file; '/nowhere.pem' is none"),
    ],
)
async def test_what_the_driver_does_not_understand_is_refused_at_once(rest: str, said: str) -> None:
    """A broker would wait for ever for a server that can be reached with it."""
    with pytest.raises(StoreRefused) as refused:
        await _opened(f"postgresql://user:s3cret@127.0.0.1:1/database{rest}")
    assert said in refused.value.reason and "s3cret" not in str(refused.value)


async def test_a_file_that_holds_no_certificate_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("nothing", encoding="utf-8")
    for option in ("sslrootcert", "sslcert"):
        with pytest.raises(StoreRefused, match="is not what it should be, in PEM"):
            await _opened(f"postgresql://user@127.0.0.1:1/d?sslmode=require&{option}={tmp_path}/empty.pem")


@pytest.mark.parametrize("turns", range(5))
async def test_who_is_cancelled_while_it_waits_for_a_connection_leaves_it_to_others(
    servers: Running, turns: int
) -> None:
    """Whenever the cancellation comes: before its turn, together with it, or just after."""
    pool = PostgresqlPool(partial(asyncpg.connect, servers.url(PostgresqlServer)), 1)
    held = await pool.take(60.0)
    waiting = asyncio.create_task(pool.take(60.0))
    await asyncio.sleep(0)
    pool.give(held, sound=True)
    for _ in range(turns):
        await asyncio.sleep(0)
    if waiting.cancel():
        with pytest.raises(asyncio.CancelledError):
            await waiting
    else:
        pool.give(await waiting, sound=True)
    pool.give(await pool.take(60.0), sound=True)
    await pool.close(60.0)


async def test_a_call_that_loses_every_race_for_a_message_does_not_say_that_nothing_happened(
    servers: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = servers.url(PostgresqlServer)
    answer, races = connections.PostgresqlConnection.answer, [b"b"]
    async with Trial(lambda: make_store(url)) as trial, Trial(lambda: make_store(url)) as rival:
        topic = await trial.topic()
        await trial.stored(topic, [b"a", b"b"], T0 + 60_000)

        async def outrun(connection: connections.PostgresqlConnection, asked: Statement) -> Any:
            found = await answer(connection, asked)
            while races and asked.text == STATEMENTS.find:
                await rival.mutate(topic, Operation.MOVE, [races.pop()], T0 + 120_000)
            return found

        monkeypatch.setattr(changes, "MOST_LOST", 1)
        monkeypatch.setattr(connections.PostgresqlConnection, "answer", outrun)
        with pytest.raises(StoreUnknown, match="changed a message 1 times"):
            await trial.mutate(topic, Operation.MOVE, [b"a", b"b"], T0 + 90_000)
        dues_ms = {id: row["due_ms"] - T0 for id, row in (await trial.everything(topic)).items()}
        assert dues_ms == {b"a": 90_000, b"b": 120_000}


async def test_a_connection_that_the_server_says_it_ends_is_replaced(servers: Running) -> None:
    """What it says comes before the connection's end does. A call between the two sends nothing, but asyncpg says so by
    a text alone: the call is unknown. The proxy keeps that end back."""
    server = servers.server(PostgresqlServer)
    async with Proxy(server.port) as proxy, Trial(lambda: make_store(proxy.url(server.url))) as trial:
        topic = await trial.topic()
        proxy.keeps_ends = True
        ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'timeline'"
        assert await _asked(server.url, ended) == 1
        await proxy.kept.wait()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        with pytest.raises(StoreUnknown):
            await trial.stored(topic, [b"a"])
        await trial.stored(topic, [b"a"])
