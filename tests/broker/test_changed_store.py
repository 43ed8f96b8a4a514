"""A store that is looked at again while brokers run: its settings, and whether it is the one that was opened."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.broker.link import Link, broker, stands, statuses
from tests.broker.watched import FAR_MS, look, psql, put
from tests.servers.fixture import Running
from tests.servers.mysql import MysqlServer
from tests.servers.postgresql import PostgresqlServer
from tests.servers.redis import RedisServer
from tests.services import require_service
from timeline.model import Answers, Status, Topic
from timeline.storage_plugins.contract import Opened, Puts, StoreRefused
from timeline.storage_plugins.memory import MemoryStore
from timeline.wire import Deliver, TopicAction, TransportError


class Changing(MemoryStore):
    """Answers what the test says when it is inspected."""

    uid = ""
    weak: tuple[str, ...] = ()
    server = refuses = ""

    async def inspect(self) -> Opened:
        if self.refuses:
            raise StoreRefused(self.refuses)
        found = await super().inspect()
        return Opened(self.uid or found.cluster_uid, self.server or found.server, self.weak)


class HalfGone(Changing):
    """Loses its data while it puts: what comes second finds no topic."""

    async def put(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        answers = await super().put(topic, now_ms, puts)
        answers.status[1:] = Status.NOT_FOUND.code
        self.uid = "9f" * 16
        return answers


async def test_a_put_that_finds_another_store_half_way_keeps_the_answers_before():
    async with broker(HalfGone()) as link:
        told = await link.node.puts.put(link.puts(["stored", "lost"], FAR_MS), "test")
        assert told.status.tolist() == [Status.OK.code, Status.UNAVAILABLE.code]
        assert "another" in told.details[1] and 0 not in told.details


def warned(link: Link) -> float | None:
    return link.node.metrics.registry.get_sample_value("timeline_store_warnings")


async def refused(link: Link) -> str:
    """What puts, calls and streams are told: all the same. No topic is taken for dropped."""
    told = await put(link, "refused")
    assert told.status.tolist() == [Status.UNAVAILABLE.code]
    why: str = told.details[0]
    streams = [link.open(method).task for method in ("Produce", "Consume")]
    for asked in (link.ids(), link.topic(TopicAction.LIST), *streams):
        assert asked is not None
        with pytest.raises(TransportError) as said:
            await asked
        assert said.value.reason == why
    assert [topic.name for topic in link.node.catalog.all()] == ["t"]
    return why


async def test_another_store_is_not_used_until_the_old_one_is_back(caplog: pytest.LogCaptureFixture):
    store = Changing()
    async with broker(store) as link:
        opened = (await store.open()).cluster_uid
        await link.put(["a"])
        consumer = await link.consume()
        await consumer.down(Deliver)
        store.uid = "9f" * 16
        why = await look(link)
        assert f"This broker opened cluster {opened}, and finds cluster {store.uid} there now." in why
        assert await refused(link) == why
        assert why in caplog.text
        store.uid = ""
        assert await look(link) == ""
        assert statuses(await link.put(["b"])) == [Status.OK]
        await consumer.down(Deliver)


async def test_settings_that_weaken_the_store_are_followed_up_and_down(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "timeline.broker")
    store = Changing()
    async with broker(store) as link:
        assert warned(link) == 0
        store.weak = ("syncs never: set it to always",)
        assert await look(link) == "" and warned(link) == 1
        await look(link)
        assert (await stands(link)).warnings == store.weak
        assert caplog.text.count("store: syncs never: set it to always") == 1
        store.weak, store.server = (), "upgraded"
        assert await look(link) == "" and warned(link) == 0
        assert "this is over: syncs never" in caplog.text
        told = [metric for metric in link.node.metrics.registry.collect() if metric.name == "timeline_store_info"]
        assert [sample.labels["server"] for metric in told for sample in metric.samples] == ["upgraded"]


async def test_what_an_opening_refuses_is_refused_until_it_is_mended():
    store = Changing()
    async with broker(store) as link:
        store.refuses = "evicts keys: set noeviction"
        assert await look(link) == await refused(link) == store.refuses and warned(link) == 1
        store.refuses = ""
        assert await look(link) == "" and warned(link) == 0


async def test_no_topic_is_dropped_because_another_store_has_none():
    class Emptied(Changing):
        capabilities = dataclasses.replace(MemoryStore.capabilities, shared=True)

        async def topics(self) -> list[Any]:
            return [] if self.uid else await super().topics()

    store = Emptied()
    async with broker(store) as link:
        consumer = await link.consume()
        store.uid = "9f" * 16
        with pytest.raises(TransportError, match="lost its data"):
            await link.topic(TopicAction.LIST)
        store.uid = ""
        assert await look(link) == ""
        await link.put(["a"])
        await consumer.down(Deliver)


# ── real servers ──


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    require_service("redis")
    server = RedisServer(tmp_path / "redis").start()
    yield server
    server.stop()


def cli(server: RedisServer, *command: str) -> str:
    return subprocess.run(
        ["redis-cli", "-p", str(server.port), *command], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.servers
async def test_redis_that_restarts_without_its_data(redis: RedisServer):
    """However quickly: the first put after it is told, and nothing is made there."""
    async with broker(redis.url) as link:
        opened = (await link.node.store.store.open()).cluster_uid
        await link.put(["kept"], FAR_MS)
        redis.stop()
        data, away = redis.folder / "appendonlydir", redis.folder / "away"
        data.rename(away)
        await asyncio.to_thread(redis.start)
        assert (await put(link, "lost")).status.tolist() == [Status.UNAVAILABLE.code]
        why = await look(link)
        assert f"opened cluster {opened}, and finds no cluster there now" in why
        assert await refused(link) == why
        assert cli(redis, "KEYS", "*") == "", "nothing was made in a server that lost its data"
        redis.stop()
        shutil.rmtree(data)
        away.rename(data)
        await asyncio.to_thread(redis.start)
        assert await look(link) == ""
        assert await link.ids() == [b"kept"]


@pytest.mark.servers
async def test_redis_whose_settings_change(redis: RedisServer):
    cli(redis, "CONFIG", "SET", "appendfsync", "always")
    async with broker(redis.url) as link:
        assert warned(link) == 0
        cli(redis, "CONFIG", "SET", "appendfsync", "no")
        assert await look(link) == "" and warned(link) == 1 and not link.node.store.store.capabilities.durable
        cli(redis, "CONFIG", "SET", "appendfsync", "always")
        assert await look(link) == "" and warned(link) == 0 and link.node.store.store.capabilities.durable
        cli(redis, "CONFIG", "SET", "maxmemory", "100mb")
        cli(redis, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        assert "CONFIG SET maxmemory-policy noeviction" in await look(link) and warned(link) == 1
        cli(redis, "CONFIG", "SET", "maxmemory-policy", "noeviction")
        assert await look(link) == "" and warned(link) == 0


@pytest.mark.servers
async def test_postgresql_with_other_contents_and_settings(servers: Running):
    server = servers.server(PostgresqlServer)
    url = f"{server.url}?schema=watched"
    async with broker(f"{server.url}?schema=another"), broker(url) as link:
        await link.put(["kept"], FAR_MS)
        rename = "ALTER SCHEMA {} RENAME TO {}".format
        psql(server, rename("watched", "aside"))
        assert "no cluster there now" in await look(link)
        assert "no cluster there now" in await refused(link)
        psql(server, rename("another", "watched"))
        assert "finds cluster " in await look(link)
        psql(server, rename("watched", "another"))
        psql(server, rename("aside", "watched"))
        assert await look(link) == ""
        psql(server, rename("watched", "aside"))
        psql(server, rename("another", "watched"))
        psql(server, "DELETE FROM watched.topic")  # brokers of tests give all topics the same uid
        told = await put(link, "lost")  # before anybody has looked: there is no such topic there
        assert told.status.tolist() == [Status.UNAVAILABLE.code] and "finds cluster " in told.details[0]
        psql(server, rename("watched", "another"))
        psql(server, rename("aside", "watched"))
        assert await look(link) == ""
        assert await link.ids() == [b"kept"]
        try:
            psql(server, "ALTER SYSTEM SET synchronous_commit = off")
            psql(server, "SELECT pg_reload_conf()")
            while not warned(link):
                assert await look(link) == ""
            assert "synchronous_commit is off" in link.node.store.warnings[0]
        finally:
            psql(server, "ALTER SYSTEM RESET synchronous_commit")
            psql(server, "SELECT pg_reload_conf()")
        while warned(link):
            assert await look(link) == ""


@pytest.mark.servers
async def test_mysql_with_other_contents_and_settings(servers: Running):
    server = servers.server(MysqlServer)
    url, other = server.url, server.url
    mine, theirs = url.rpartition("/")[2], other.rpartition("/")[2]
    rename = "RENAME TABLE {0}.meta TO {1}.meta".format
    async with broker(url) as link:
        await link.put(["kept"], FAR_MS)
        server.sql(rename(mine, theirs))
        assert "no cluster there now" in await look(link)
        assert "no cluster there now" in await refused(link)
        server.sql(rename(theirs, mine))
        assert await look(link) == ""
        assert await link.ids() == [b"kept"]
        try:
            server.sql("SET GLOBAL innodb_flush_log_at_trx_commit = 2")
            assert await look(link) == "" and warned(link) == 1
        finally:
            server.sql("SET GLOBAL innodb_flush_log_at_trx_commit = 1")
        assert await look(link) == "" and warned(link) == 0


@pytest.mark.parametrize("happens", ["deleted", "replaced"])
@pytest.mark.parametrize("of", ["a.db", "a.db-wal"])
async def test_a_file_that_has_gone_takes_no_put(tmp_path: Path, happens: str, of: str):
    """What is written into a file without a name is gone when the broker ends."""
    file, away = tmp_path / of, tmp_path / "away.db"
    async with broker(f"sqlite:///{tmp_path}/a.db") as link:
        await link.put(["kept"], FAR_MS)
        file.rename(away)
        if happens == "replaced":
            shutil.copy(away, file)
        assert (await put(link, "lost")).status.tolist() == [Status.UNAVAILABLE.code]
        why = await look(link)
        assert str(file) in why and "restart the broker" in why
        assert await refused(link) == why
        away.rename(file)
        assert await look(link) == ""
        assert await link.ids() == [b"kept"]


@pytest.mark.parametrize(("of", "bytes_"), [("a.db", 4096), ("a.db-wal", 0)])
async def test_a_file_that_was_cut_short_takes_no_put(tmp_path: Path, of: str, bytes_: int):
    async with broker(f"sqlite:///{tmp_path}/a.db") as link:
        await link.put([f"kept-{at}" for at in range(100)], FAR_MS)
        checkpoint(tmp_path / "a.db")
        await link.put(["later"], FAR_MS)
        os.truncate(tmp_path / of, bytes_)
        assert (await put(link, "lost")).status.tolist() == [Status.UNAVAILABLE.code]
        assert f"{tmp_path / of} was cut short" in await look(link)


def checkpoint(file: Path) -> None:
    """Carries what the log has into the database, as the store does by itself."""
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)")


async def test_a_place_of_payloads_that_is_another_one(tmp_path: Path):
    mine, away, theirs = (tmp_path / name for name in ("mine", "away", "theirs"))
    for place in (mine, theirs):
        place.mkdir()
    async with broker(f"memory://?payloads=file://{theirs}"):
        pass
    async with broker(f"memory://?payloads=file://{mine}") as link:
        mine.rename(away)
        for put_there in (mine.mkdir, lambda: theirs.rename(mine)):
            put_there()
            why = await look(link)
            assert "is not the place of payloads that was opened" in why and str(mine) in why
            assert await refused(link) == why
        mine.rename(theirs)
        away.rename(mine)
        assert await look(link) == ""
