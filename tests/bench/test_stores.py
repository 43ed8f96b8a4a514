"""Each scenario in small on real databases, in a topic of its own: what others have in the store stays as it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.servers.cassandra import CassandraServer
from tests.servers.fixture import Running
from tests.servers.mysql import MysqlServer
from tests.servers.postgresql import PostgresqlServer
from tests.servers.process import Server
from tests.servers.redis import RedisServer
from timeline.bench import stores
from timeline.bench.figures import BenchReport
from timeline.bench.peers.bare import run_bare
from timeline.bench.processes import CannotMeasure
from timeline.bench.scenarios.holding import RestartScenario
from timeline.bench.scenarios.lateness import BurstScenario, CancelTagScenario, LatenessScenario
from timeline.bench.scenarios.throughput import CycleScenario, LoopScenario
from timeline.bench.stores import create_in
from timeline.bench.suite import compare
from timeline.storage_plugins import open_store

OTHERS = "somebody's"

Run = Callable[[str, Path], Awaitable[BenchReport]]


async def names_in(url: str) -> list[str]:
    """The topics of a store that nobody has open."""
    store = await open_store(url)
    try:
        return [topic.name for topic in await store.topics()]
    finally:
        await store.close()


@asynccontextmanager
async def used(url: str) -> AsyncIterator[None]:
    """A store in which somebody else has a topic."""
    store = await open_store(url)
    topic = await create_in(store, OTHERS)
    await store.close()
    try:
        yield
    finally:
        store = await open_store(url)
        await store.drop_topic(topic)
        await store.close()


async def _cycle(url: str, folder: Path) -> BenchReport:
    asked = CycleScenario(url, messages=1_000, batch=200, pending=300, warm_up=200)
    report = await asked.run(folder)
    report.beside.append(await run_bare(asked))
    compare(report)
    return report


async def _lateness(url: str, folder: Path) -> BenchReport:
    return await LatenessScenario(url, rate=200, seconds=0.4, runs=1, pending=300, in_zero=True).run(folder)


async def _burst(url: str, folder: Path) -> BenchReport:
    return await BurstScenario(url, messages=1_000, credit=500).run(folder)


async def _loop(url: str, folder: Path) -> BenchReport:
    return await LoopScenario(url, messages=100, many=300).run(folder)


async def _cancel_tag(url: str, folder: Path) -> BenchReport:
    return await CancelTagScenario(url, pending=600, tagged=200, rate=100, seconds=0.3).run(folder)


async def _restart(url: str, folder: Path) -> BenchReport:
    return await RestartScenario(url, pending=300, restarts=1).run(folder)


SCENARIOS = [
    *((kind, _cycle) for kind in (RedisServer, PostgresqlServer, MysqlServer, CassandraServer)),
    (RedisServer, _lateness),
    (PostgresqlServer, _burst),
    (PostgresqlServer, _loop),
    (PostgresqlServer, _cancel_tag),
    (MysqlServer, _restart),
]


@pytest.mark.servers
@pytest.mark.processes
@pytest.mark.parametrize(("kind", "run"), SCENARIOS, ids=lambda one: getattr(one, "name", one.__name__))
@pytest.mark.prove
async def test_a_scenario_on_a_store_that_others_use(
    servers: Running, kind: type[Server], run: Run, tmp_path: Path
) -> None:
    url = servers.url(kind)
    async with used(url):
        before = await names_in(url)
        report = await run(url, tmp_path)
        assert await names_in(url) == before
        assert OTHERS in before
    for one in (report, *report.beside):
        assert one.wrong == []
        assert one.store["server"]
        assert {target.figure for target in one.targets} <= set(one.figures)
    assert "secret" not in str(report.as_json())


@pytest.mark.processes
@pytest.mark.prove
async def test_what_an_interrupted_measurement_has_put_is_dropped(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'bench.db'}"
    running: asyncio.Task[Any] = asyncio.ensure_future(
        CycleScenario(url, messages=100, pending=30_000).run(tmp_path, lambda _: running.cancel())
    )
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await names_in(url) == []


TARGETS = {
    CycleScenario("redis://host"): {"rate_per_s": 60_000},
    CycleScenario("sqlite:///file"): {"rate_per_s": 40_000},
    CycleScenario("sqlite:///file", pending=1_000_000): {"rate_per_s": 20_000},
    CycleScenario("postgresql://host/db"): {"rate_per_s": 15_000},
    CycleScenario("postgresql://host/db", api="handlers"): {"rate_per_s": 15_000},
    CycleScenario("cassandra://host/k"): {"rate_per_s": 4_000},
    CycleScenario("mysql://host/db"): {},
    BurstScenario("postgresql://host/db"): {"drained_s": 4, "first_late_ms": 5, "lateness_min_ms": 0},
    BurstScenario("redis://host"): {"first_late_ms": 5, "lateness_min_ms": 0},
    CancelTagScenario("postgresql://host/db"): {"rate_per_s": 20_000, "p99_ratio": 2},
    CancelTagScenario("redis://host"): {"p99_ratio": 2},
}


@pytest.mark.parametrize("asked", TARGETS, ids=lambda asked: f"{type(asked).__name__}-{asked.store}")
def test_targets_are_those_of_the_kind_of_store(asked: Any) -> None:
    assert {target.figure: target.bound for target in asked.targets} == TARGETS[asked]


@pytest.mark.parametrize(
    ("store", "beside", "wanted"),
    [
        ("postgresql://h/d", "bare store", 0.7),
        ("cassandra://h/k", "bare store", 0.7),
        ("mysql://h/d", "bare store", None),
        ("postgresql://h/d", "pgqueuer", 4.0),
        ("memory://", "beanstalkd memory", 5.0),
        ("sqlite:///f", "beanstalkd fsync", 20.0),
        ("redis://h", "celery", None),
    ],
)
def test_the_ratio_to_what_ran_beside_it(store: str, beside: str, wanted: float | None) -> None:
    settings = {"store": store, "api": "list", "pending": 0}
    other = BenchReport(beside, settings, {"rate_per_s": 100.0})
    report = BenchReport("cycle", settings, {"rate_per_s": 150.0}, beside=[other])
    compare(report)
    name = f"times_{beside.replace(' ', '_')}"
    assert report.figures[name] == 1.5
    assert [(target.figure, target.bound) for target in report.targets] == ([(name, wanted)] if wanted else [])


@pytest.mark.servers
@pytest.mark.parametrize("kind", [PostgresqlServer, RedisServer])
async def test_a_fill_is_over_when_the_server_has_tidied_up(
    servers: Running, kind: type[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = servers.url(kind)
    monkeypatch.setattr(stores, "UPKEPT_FROM_MESSAGES", 500)
    await stores.fill_store(url, "filled", 500, 20)
    if kind is PostgresqlServer:
        connection = await asyncpg.connect(url)
        try:
            counted = "SELECT vacuum_count, analyze_count FROM pg_stat_user_tables WHERE relname = 'message'"
            assert all((await connection.fetchrow(counted)).values())
        finally:
            await connection.close()
    else:
        monkeypatch.setattr(stores, "BUSY", ("redis_git_sha1", "loading", "async_loading", "aof_enabled"))
        with pytest.raises(CannotMeasure, match="upkeep after the fill never came"):
            monkeypatch.setattr(stores, "UPKEEP_S", 0.2)
            await stores.upkept(url)
