"""What can happen to CockroachDB's stand-in: killed under load, its disk full, no connection left, a wrong password."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from tests.servers.cockroachdb import CockroachServer
from tests.servers.disk import remount, small_disk
from tests.storage_plugins.cockroach_stand_in import StandInStore
from tests.storage_plugins.outages import fill, own_postgresql, usable
from timeline.storage_plugins.conformance.crowd import Crowd, brokers
from timeline.storage_plugins.conformance.trial import Trial
from timeline.storage_plugins.contract import StoreRefused, StoreUnavailable

pytestmark = pytest.mark.servers


@pytest.fixture
def own() -> Iterator[CockroachServer]:
    with own_postgresql(CockroachServer) as server:
        assert isinstance(server, CockroachServer)
        yield server


async def _told(server: CockroachServer, *statements: str) -> None:
    connection = await asyncpg.connect(server.url.replace("cockroachdb", "postgresql"))
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


async def test_a_crowd_survives_kills(own: CockroachServer) -> None:
    """Workers and producers of two brokers, and the server killed under them; no promise is broken."""
    async with Trial(lambda: StandInStore(own.url)) as trial:
        topic = await trial.topic(buckets=4, max_deliveries=0)
        async with brokers(trial, 2) as stores:
            crowd = Crowd(trial, topic, stores, 11)
            for _ in range(2):
                told = len(crowd.events)
                running = asyncio.create_task(crowd.run(25))
                while len(crowd.events) < told + 40:
                    await asyncio.wait((running,), timeout=0.001)
                crowd.served.clear()
                await asyncio.to_thread(own.kill)
                await asyncio.to_thread(own.start)
                crowd.served.set()
                await running
            await crowd.settle_all()
            await crowd.expect_kept(("put", "OK"), ("ack", "OK"))
    assert crowd.unknown + crowd.unavailable > 0, "the kills hit nothing"


async def test_a_full_disk_is_told_and_loses_nothing(own: CockroachServer) -> None:
    with small_disk(own.folder.parent / "disk", "32m") as disk:
        (disk / "space").mkdir()
        shutil.chown(disk / "space", own.user)
        small = f"CREATE TABLESPACE small LOCATION '{disk}/space'"
        await _told(own, small, "CREATE DATABASE full_up TABLESPACE small")
        async with Trial(lambda: StandInStore(own.url.rpartition("/")[0] + "/full_up")) as trial:
            topic = await trial.topic()
            stored, told = await fill(trial, topic, 100, 2_000)
            assert isinstance(told, StoreUnavailable) and "disk is full" in str(told) and len(stored) >= 1_000
            remount(disk, "size=128m")
            await usable(trial)
            await trial.stored(topic, [b"after"])
            assert (await trial.everything(topic)).keys() == {*stored, b"after"}
        own.stop()


async def test_a_schema_that_is_gone_has_no_cluster(own: CockroachServer) -> None:
    async with Trial(lambda: StandInStore(f"{own.url}?schema=watched")) as trial:
        await _told(own, "ALTER SCHEMA watched RENAME TO aside")
        assert (await trial.store.inspect()).cluster_uid == ""
        await _told(own, "ALTER SCHEMA aside RENAME TO watched")
        assert await trial.store.inspect() == trial.opened


async def test_connections_exhausted_say_so(own: CockroachServer) -> None:
    own.stop()
    own.settings = (*own.settings, "max_connections=5", "superuser_reserved_connections=0")
    own.start()
    taken = [await asyncpg.connect(own.url.replace("cockroachdb", "postgresql")) for _ in range(5)]
    mine = StandInStore(own.url)
    with pytest.raises(StoreUnavailable, match="no connection left"):
        await mine.open()
    for connection in taken:
        await connection.close()
    assert (await mine.open()).cluster_uid
    await mine.close()


async def test_a_wrong_password_is_refused_and_not_shown(own: CockroachServer) -> None:
    await _told(own, "ALTER USER postgres PASSWORD 'right'")
    own.stop()
    hba: Path = own.folder / "data" / "pg_hba.conf"
    hba.write_text("host all all 127.0.0.1/32 scram-sha-256\n", encoding="utf-8")
    own.start()
    with pytest.raises(StoreRefused, match="password is wrong") as refused:
        await StandInStore(own.url.replace("postgres@", "postgres:s3cret@")).open()
    assert "s3cret" not in str(refused.value)
    mine = StandInStore(own.url.replace("postgres@", "postgres:right@"))
    assert (await mine.open()).cluster_uid
    await mine.close()
