"""Peers in a database: they do the cycle's work, each id checked, and leave nothing behind."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import asyncpg
import pytest
from redis.asyncio import Redis

from tests.servers.fixture import Running
from tests.servers.postgresql import PostgresqlServer
from tests.servers.redis import RedisServer
from timeline.bench.peers import trials
from timeline.bench.peers.databases import PEERS, run_peer
from timeline.bench.processes import CannotMeasure
from timeline.bench.scenarios.throughput import CycleScenario

pytestmark = pytest.mark.prove

SMALL = CycleScenario(messages=200, batch=50, warm_up=50)


@pytest.fixture(autouse=True)
def few_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "LATE_COUNT", 20)


@pytest.mark.servers
@pytest.mark.processes
async def test_celery(servers: Running, tmp_path: Path) -> None:
    url = servers.url(RedisServer)
    report = await run_peer(replace(SMALL, store=f"{url}?timeout=5s"), "celery", tmp_path)
    assert report.wrong == []
    assert report.figures["rate_per_s"] > 0 and report.figures["lateness_p50_ms"] > 0
    assert report.notes[0] == PEERS["celery"].less and "solo" in report.notes[1] and "prefork" in report.notes[1]
    async with Redis.from_url(url) as server:
        assert [key async for key in server.scan_iter(match="bench_celery_*")] == []


@pytest.mark.servers
@pytest.mark.processes
@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if peer.store == "postgresql"])
async def test_a_peer_on_postgresql(servers: Running, tmp_path: Path, name: str) -> None:
    url = servers.url(PostgresqlServer)
    report = await run_peer(replace(SMALL, store=url), name, tmp_path)
    assert report.wrong == [] and report.figures["rate_per_s"] > 0
    assert report.notes[0] == PEERS[name].less
    connection = await asyncpg.connect(url)
    try:
        for left in ("pg_class WHERE relname", "pg_namespace WHERE nspname"):
            assert await connection.fetch(f"SELECT 1 FROM {left} LIKE 'bench_{name}_%'") == []
    finally:
        await connection.close()


@pytest.mark.servers
@pytest.mark.processes
async def test_the_recipe_of_a_sorted_set(servers: Running, tmp_path: Path) -> None:
    url = servers.url(RedisServer)
    report = await run_peer(replace(SMALL, store=url), "redis-set", tmp_path)
    assert report.wrong == [] and report.figures["rate_per_s"] > 0
    assert report.notes[0] == PEERS["redis-set"].less and "tried: 100 " in report.notes[1]
    async with Redis.from_url(url) as server:
        assert [key async for key in server.scan_iter(match="bench_redis_set_*")] == []


@pytest.mark.servers
@pytest.mark.processes
async def test_rq(servers: Running, tmp_path: Path) -> None:
    url = servers.url(RedisServer)
    report = await run_peer(replace(SMALL, store=url), "rq", tmp_path)
    assert report.wrong == [] and report.figures["rate_per_s"] > 0 and "lateness_min_ms" in report.figures
    assert report.notes[0] == PEERS["rq"].less and "a process per job " in report.notes[1]
    async with Redis.from_url(url) as server:
        assert [key async for key in server.scan_iter(match="*bench_rq_*")] == []
        assert not await server.smembers("rq:queues") and not await server.smembers("rq:workers")


async def test_a_backlog_is_for_servers_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(CannotMeasure, match="--backlog goes with --peer beanstalkd and nats"):
        await run_peer(replace(SMALL, store="redis://host/0", backlog=True), "rq", tmp_path)


@pytest.mark.parametrize("name", PEERS)
async def test_a_peer_wants_its_own_kind_of_server(name: str, tmp_path: Path) -> None:
    with pytest.raises(CannotMeasure, match=f"give a {PEERS[name].store}:// one"):
        await run_peer(replace(SMALL, store="memory://"), name, tmp_path)


@pytest.mark.parametrize("name", PEERS)
async def test_a_peer_that_is_not_installed_names_the_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CannotMeasure, match=r"pip install 'timeline-scheduler\[peers\]'"):
        await run_peer(replace(SMALL, store=f"{PEERS[name].store}://host/0"), name, tmp_path)
