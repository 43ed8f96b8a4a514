"""Brokers of two neighbouring versions of a schema at work on one server: the next version, an invented one, opens the
store while this one's callers are at it, both go on together, and the history checker finds no promise broken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.servers.fixture import Running
from tests.storage_plugins.test_unknown_outcomes import KINDS, kind_of, store_at
from timeline.storage_plugins import sql
from timeline.storage_plugins.conformance.crowd import Crowd
from timeline.storage_plugins.conformance.trial import Trial
from timeline.storage_plugins.contract import StoreRefused, StoreUnavailable, StoreUnknown
from timeline.storage_plugins.versions import Step, Versions

pytestmark = pytest.mark.servers

OWN = {
    "redis": "?prefix=versions",
    "mysql": "",
    "postgresql": "?schema=shared_by_versions",
    "cockroachdb": "?schema=shared_by_versions",
    "cassandra": "",
}
"""How a URL names a place of its own: what is done to its schema is nobody else's affair."""
NAMES = [name for name in KINDS if name in OWN]


def _expand_tables(execute: sql.Executes) -> None:
    execute("ALTER TABLE message ADD COLUMN urgency INTEGER DEFAULT 0 NOT NULL")
    execute("CREATE TABLE urgency (number INTEGER PRIMARY KEY)")


def _invent(name: str, monkeypatch: pytest.MonkeyPatch) -> Versions:
    """From now on, stores are of the next version. Return their versions until they are contracted."""
    if name == "cassandra":
        from timeline.storage_plugins.cassandra import session

        def says(statement: str) -> Callable[[Callable[[str], object]], None]:
            def half(execute: Callable[[str], object]) -> None:
                execute(statement)

            return half

        made = "CREATE TABLE IF NOT EXISTS urgency (number int PRIMARY KEY)"
        table = Step(says(made), says("DROP TABLE IF EXISTS urgency"))
        return _with(session, table, monkeypatch)
    if name != "redis":
        step = sql.Migration(_expand_tables, lambda execute: execute("DROP TABLE urgency"))
        return _with(sql, step, monkeypatch)
    from timeline.storage_plugins.redis import store

    def on_key(command: str) -> Callable[[store.Runs], None]:
        script = f"return redis.call({command})"
        return lambda runs: runs(script, [runs.prefix + b":urgency"], [])

    made = Step(on_key("'HSET', KEYS[1], 'a', '1'"), on_key("'DEL', KEYS[1]"))
    return _with(store, made, monkeypatch)


def _running(statements: list[str]) -> Callable[[sql.Executes], None]:
    """Half of a step: it runs the statements that are in the list then."""

    def half(execute: sql.Executes) -> None:
        for statement in statements:
            execute(statement)

    return half


def _with(module: Any, step: Step[Any], monkeypatch: pytest.MonkeyPatch) -> Versions:
    monkeypatch.setattr(module, "MIGRATIONS", (*module.MIGRATIONS, step))
    return Versions(1 + len(module.MIGRATIONS), len(module.MIGRATIONS))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.prove if name == "cassandra" else ()) for name in NAMES]
)
async def test_two_versions_share_a_store_under_load(
    servers: Running, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = servers.server(kind_of(name)).url.replace("/timeline?", "/versions?") + OWN[name]
    async with Trial(lambda: store_at(name, url)) as trial:
        topic = await trial.topic(buckets=4, max_deliveries=0)
        at_first = await trial.store.migrate(False)
        this, newer = trial.store, store_at(name, url)
        crowd = Crowd(trial, topic, [this], 1)
        at_work = asyncio.create_task(crowd.run(8))
        with monkeypatch.context() as patch:
            both = _invent(name, patch)
            assert at_first == Versions(both.oldest, both.oldest)
            await newer.open()
            assert await newer.migrate(False) == both
        await at_work
        crowd.stores = [this, newer]
        await crowd.run(8)
        await trial.reopen()
        crowd.stores = [trial.store, newer]
        await crowd.run(4)
        assert await trial.store.migrate(False) == both
        with pytest.raises(StoreRefused, match="contract it with the newer Timeline"):
            await trial.store.migrate(True)
        await crowd.settle_all()
        await crowd.expect_kept(("put", "OK"), ("ack", "OK"), ("move", "OK"))
        with monkeypatch.context() as patch:
            _invent(name, patch)
            contracted = Versions(both.version, both.version)
            assert await newer.migrate(True) == await newer.migrate(True) == contracted
        with pytest.raises(StoreRefused, match=f"which {both.version} and newer can use"):
            await store_at(name, url).open()
        await newer.close()


@pytest.mark.parametrize("name", [name for name in ("mysql", "cockroachdb") if name in NAMES])
async def test_a_contraction_that_stops_halfway_is_in_doubt_and_goes_on(
    servers: Running, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each statement that changes a schema commits by itself."""
    statements = ["DROP TABLE absent"]
    url = servers.server(kind_of(name)).url + ("?schema=halfway" if name == "cockroachdb" else "")
    async with Trial(lambda: store_at(name, url)):
        pass
    both = _with(sql, sql.Migration(lambda execute: None, _running(statements)), monkeypatch)
    async with Trial(lambda: store_at(name, url)) as trial:
        with pytest.raises(StoreUnavailable, match="absent"):
            await trial.store.migrate(True)
        statements.insert(0, "DROP TABLE IF EXISTS urgency")
        with pytest.raises(StoreUnknown, match=r"part of|in part"):
            await trial.store.migrate(True)
        assert await trial.store.migrate(False) == both
        statements.pop()
        assert await trial.store.migrate(True) == Versions(both.version, both.version)


@pytest.mark.parametrize("name", [name for name in ("mysql", "cockroachdb") if name in NAMES])
async def test_halves_that_stop_halfway_go_on(servers: Running, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The column is there already when it is added again, and gone when it is dropped again."""
    adding = ["ALTER TABLE message ADD COLUMN hurry BIGINT DEFAULT 0 NOT NULL", "DROP TABLE absent"]
    dropping = ["ALTER TABLE message DROP COLUMN hurry", "DROP TABLE absent"]
    url = servers.server(kind_of(name)).url + ("?schema=expanding" if name == "cockroachdb" else "")
    async with Trial(lambda: store_at(name, url)):
        pass
    both = _with(sql, sql.Migration(_running(adding), _running(dropping)), monkeypatch)
    with pytest.raises(StoreUnavailable, match="absent"):
        await store_at(name, url).open()
    adding.pop()
    async with Trial(lambda: store_at(name, url)) as trial:
        assert await trial.store.migrate(False) == both
        with pytest.raises(StoreUnknown, match="absent"):
            await trial.store.migrate(True)
        dropping.pop()
        assert await trial.store.migrate(True) == Versions(both.version, both.version)
        await trial.stored(await trial.topic(), [b"a"])
