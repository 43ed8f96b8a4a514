"""Redis and Cassandra on a disk that fills up: told, and with room again everything that was answered is there. The
other stores' disks are with their other faults."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.servers.cassandra import CassandraServer
from tests.servers.disk import remount, small_disk
from tests.servers.process import Server
from tests.servers.redis import RedisServer
from tests.services import require_service
from tests.storage_plugins.outages import fill, usable
from timeline.storage_plugins import make_store
from timeline.storage_plugins.conformance.trial import Trial
from timeline.storage_plugins.contract import StoreUnavailable

pytestmark = [pytest.mark.servers, pytest.mark.slow, pytest.mark.timeout(400)]


async def test_redis_refuses_and_goes_on_by_itself(tmp_path: Path) -> None:
    require_service("redis")
    with small_disk(tmp_path / "disk", "8m") as disk:
        server = RedisServer(tmp_path / "redis", "--dir", str(disk)).start()
        try:
            async with Trial(lambda: make_store(server.url)) as trial:
                topic = await trial.topic(buckets=8)
                stored, told = await fill(trial, topic, 100, 900)
                assert isinstance(told, StoreUnavailable) and len(stored) >= 1_000
                assert str(told).endswith(
                    "No space left on device; make room if its disk is full: it takes writes again once it can save"
                )
                with pytest.raises(StoreUnavailable, match="No space left"):
                    await trial.store.check()
                remount(disk, "size=64m")
                await usable(trial)
                await trial.stored(topic, [b"after"])
                assert (await trial.everything(topic)).keys() == {*stored, b"after"}, "nothing refused was done"
                await _again(server)
                assert (await trial.everything(topic)).keys() == {*stored, b"after"}
        finally:
            server.stop()


async def test_redis_that_syncs_each_write_ends_and_comes_back_with_what_it_answered(tmp_path: Path) -> None:
    require_service("redis")
    with small_disk(tmp_path / "disk", "8m") as disk:
        server = RedisServer(tmp_path / "redis", "--dir", str(disk), "--appendfsync", "always").start()
        try:
            async with Trial(lambda: make_store(server.url)) as trial:
                topic = await trial.topic(buckets=8)
                stored, _ = await fill(trial, topic, 100, 900)
                with pytest.raises(StoreUnavailable, match="no connection to Redis"):
                    await trial.store.check()
                remount(disk, "size=64m")
                await _again(server)
                await trial.stored(topic, [b"after"])
                assert len(stored) >= 1_000
                assert {*stored, b"after"} <= (await trial.everything(topic)).keys()
        finally:
            server.stop()


@pytest.mark.prove
async def test_cassandra_comes_back_with_what_it_answered(tmp_path: Path) -> None:
    """The node ends, or takes no more connections, by what it could not write: nobody is told more than that."""
    require_service("cassandra")
    with small_disk(tmp_path / "disk", "200m") as disk:
        node = CassandraServer(tmp_path / "node", data=disk)
        try:
            await asyncio.to_thread(node.start)
            async with Trial(lambda: make_store(node.url)) as trial:
                topic = await trial.topic(buckets=8)
                stored, _ = await fill(trial, topic, 20, 60_000)
                with pytest.raises(StoreUnavailable, match="no node of Cassandra can be reached"):
                    await trial.store.check()
                remount(disk, "size=600m")
                await _again(node)
                await usable(trial)
                await trial.stored(topic, [b"after"])
                assert len(stored) >= 500
                assert {*stored, b"after"} <= (await trial.everything(topic)).keys()
        finally:
            await asyncio.to_thread(node.stop)


async def _again(server: Server) -> None:
    """kill -9, where it still runs, and a start."""
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)
