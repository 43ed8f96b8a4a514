"""What walks over many messages cost a Redis: the page, not what is pending."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.servers.fixture import Running
from tests.servers.redis import RedisServer
from tests.services import require_service
from timeline.columns import Ragged
from timeline.model import Operation, Topic
from timeline.storage_plugins import make_store
from timeline.storage_plugins.conformance.trial import T0, Trial, named
from timeline.storage_plugins.contract import ScanFilter
from timeline.storage_plugins.redis import scripts
from timeline.storage_plugins.redis.changes import BucketKeys
from timeline.storage_plugins.redis.server import RedisLocation, Server

pytestmark = pytest.mark.servers

MANY = 10_000


async def _calls(url: str) -> dict[str, int]:
    """How often the server has run each command."""
    location = RedisLocation.of(url)
    server = Server(location)
    try:
        lines = (await server.ask(location.addresses[0], "INFO", "commandstats")).decode().splitlines()
    finally:
        await server.close()
    told = (line.removeprefix("cmdstat_").partition(":calls=") for line in lines if ":calls=" in line)
    return {name: int(rest.partition(",")[0]) for name, _, rest in told}


async def _filled(trial: Trial, prefix: str = "m") -> Topic:
    topic = await trial.topic(buckets=1)
    await trial.stored(topic, named(MANY, prefix), T0 + 500)
    return topic


async def test_ids_are_put_in_order_once_and_a_page_reads_a_page(servers: Running) -> None:
    url = servers.url(RedisServer)
    async with Trial(lambda: make_store(url)) as trial:
        topic = await _filled(trial)
        before = await _calls(url)
        for steps in (range(1, 10), range(1)):
            rows = await trial.scan(topic, limit=500)
            assert rows.ids.tolist() == sorted(named(MANY))
            after = await _calls(url)
            assert after.get("hscan", 0) - before.get("hscan", 0) in steps
            assert after["zrangebylex"] - before.get("zrangebylex", 0) <= MANY / 500 + 1
            assert after.get("hkeys", 0) == before.get("hkeys", 0)
            before = after


async def test_what_comes_and_goes_while_ids_are_put_in_order(servers: Running) -> None:
    async with Trial(lambda: make_store(servers.url(RedisServer))) as trial:
        topic = await _filled(trial)
        ids = named(MANY)

        async def change() -> None:
            for turn in range(10):
                await trial.mutate(topic, Operation.CANCEL, ids[turn::20])
                await trial.stored(topic, named(100, f"n{turn}"), T0 + 500)
                leased = await trial.lease(topic, 100, now_ms=T0 + 500)
                await trial.settle(topic, Operation.ACK, leased.rows, now_ms=T0 + 500)

        changing = asyncio.create_task(change())
        page = await trial.store.scan(topic, T0, ScanFilter(), b"", 1_000, False)
        assert len(page.rows) == 1_000
        await changing
        walked = (await trial.scan(topic, limit=700)).ids.tolist()
        known = [*ids, *(id for turn in range(10) for id in named(100, f"n{turn}"))]
        there = (await trial.scan(topic, limit=2_000, ids=Ragged.of(known))).ids.tolist()
        assert walked == sorted(there)
        assert MANY // 4 < len(there) < MANY


async def test_ids_half_in_order_are_put_in_order_anew_by_another_run_of_the_server(tmp_path: Path) -> None:
    """The cursor of a hash means nothing to the next process, whose hash is in another order."""
    require_service("redis")
    server = RedisServer(tmp_path, "--appendfsync", "always").start()
    location = RedisLocation.of(server.url)
    asked = Server(location)
    try:
        async with Trial(lambda: make_store(server.url)) as trial:
            topic = await _filled(trial)
            base = BucketKeys(asked, topic).base(0)
            for _ in range(3):
                await asked.run(scripts.WALK, [base], (10, 2_000, 600_000, b""))
            said = await asked.at(base, "GET", base + b":w")
            assert said not in (None, b"all")
            await asyncio.to_thread(server.stop)
            await asyncio.to_thread(server.start)
            rows = await trial.scan(topic, limit=1_000)
            assert rows.ids.tolist() == sorted(named(MANY))
    finally:
        await asked.close()
        server.stop()


async def test_leases_of_one_among_many_come_in_bounded_steps(servers: Running) -> None:
    url = servers.url(RedisServer)
    async with Trial(lambda: make_store(url)) as trial:
        topic = await _filled(trial)
        await trial.lease(topic, MANY - 10, now_ms=T0 + 500, holder=b"many")
        await trial.lease(topic, 10, now_ms=T0 + 500, holder=b"few")
        before = await _calls(url)
        page = await trial.store.held_by(topic, T0 + 500, b"few", b"", 100)
        after = await _calls(url)
        assert len(page.rows) == 10
        assert after["evalsha"] - before["evalsha"] <= MANY / 1_000 + 3
