"""Sweeps of `sqlite:///`: in works so small that leases need not wait, and no work at all where nothing is over."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.storage_plugins.sqlite_calls import NOW_MS, dump, grant, ids, puts, settles, topic
from timeline.storage_plugins import open_store
from timeline.storage_plugins.contract import StoreUnavailable
from timeline.storage_plugins.sql.statements import Plan, Statement
from timeline.storage_plugins.sqlite import bulk
from timeline.storage_plugins.sqlite import store as sqlite_store

LATER_MS = NOW_MS + 100_000
TOTAL = Statement("SELECT total_changes()", (), lambda rows: rows[0][0])


@pytest.fixture(autouse=True)
def small_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_store, "ROWS_AT_ONCE", 7)
    monkeypatch.setattr(sqlite_store, "WORKS_IN_LINE", 2)


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each work of a sweep removed."""
    changed: list[int] = []

    def counted(module: Any, name: str) -> None:
        work: Callable[..., Any] = getattr(module, name)

        def act(*arguments: Any, **named: Any) -> Plan[Any]:
            before = yield TOTAL
            answer = yield from work(*arguments, **named)
            changed.append((yield TOTAL) - before)
            return answer

        monkeypatch.setattr(module, name, act)

    for module, name in ((bulk, "remove"), (bulk, "forget"), (sqlite_store, "remove_dropped")):
        counted(module, name)
    return changed


async def test_others_go_between_the_works_of_a_sweep(tmp_path: Path, removed: list[int]) -> None:
    made = topic()
    store = await open_store(f"sqlite:///{tmp_path}/a.db")
    await store.create_topic(made)
    await store.put(made, NOW_MS, puts(ids(70, b"over"), LATER_MS, expires_ms=np.full(70, LATER_MS + 1)))
    await store.put(made, NOW_MS, puts([b"due"]))
    sweep = asyncio.ensure_future(store.sweep(made, LATER_MS + 1, 1_000))
    while not removed:
        await asyncio.sleep(0)
    leased = await store.lease_due(made, None, NOW_MS, 0, [grant(5)])
    assert leased.rows.ids.tolist() == [b"due"]
    assert not sweep.done() and sum(removed) < 70
    assert (await sweep).expired == 70
    assert removed == [7] * 10
    await store.close()


@pytest.mark.slow
async def test_what_is_forgotten_and_what_was_dropped_goes_in_small_works_too(
    tmp_path: Path, removed: list[int]
) -> None:
    made = topic("made", remember_ms=1_000)
    gone = [topic(name, remember_ms=1_000_000) for name in ("one", "two", "three")]
    store = await open_store(f"sqlite:///{tmp_path}/a.db")
    for each in (made, *gone):
        await store.create_topic(each)
        await store.put(each, NOW_MS, puts(ids(30), expires_ms=np.full(30, LATER_MS)))
        leased = await store.lease_due(each, None, NOW_MS, 0, [grant(10)])
        await store.settle(each, NOW_MS, settles(leased.rows))
    for each in gone:
        assert await store.drop_topic(each)
    # Of what lives, 20 have expired and 10 are remembered no longer; of what was dropped, 30 of either kind are left.
    sweeps = 0
    while True:
        swept = await store.sweep(made, LATER_MS, 25)
        sweeps += 1
        if not swept.more:
            break
    # A work changes at most seven rows, and notes what it leaves of each, or that a topic is all gone.
    assert sweeps == 4 and max(removed) <= 2 * 7
    assert len(await dump(store, made)) == 0
    await store.close()
    with sqlite3.connect(tmp_path / "a.db") as connection:
        for table in ("message", "payload", "dropped"):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,), table
        assert connection.execute("SELECT count(*) FROM remembered").fetchone() == (20,)
    connection.close()


@pytest.mark.parametrize("fine", [4, 9, 10, 12])
async def test_a_sweep_that_fails_half_way_answers_what_it_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fine: int
) -> None:
    """It fails in the small works, among the remembered ids, or among the rows of a dropped topic."""
    made, gone = topic("made", remember_ms=1_000), topic("gone")
    store = await open_store(f"sqlite:///{tmp_path}/a.db")
    for each in (made, gone):
        await store.create_topic(each)
    await store.put(gone, NOW_MS, puts(ids(20)))
    await store.drop_topic(gone)
    await store.put(made, NOW_MS, puts(ids(10)))
    await store.settle(made, NOW_MS, settles((await store.lease_due(made, None, NOW_MS, 0, [grant(10)])).rows))
    await store.put(made, NOW_MS, puts(ids(50, b"over"), LATER_MS, expires_ms=np.full(50, LATER_MS + 1)))
    done = 0

    def failing(module: Any, name: str) -> None:
        work: Callable[..., Any] = getattr(module, name)

        def act(*arguments: Any, **named: Any) -> Plan[Any]:
            nonlocal done
            if done == fine:
                raise sqlite3.OperationalError("database or disk is full")
            done += 1
            return (yield from work(*arguments, **named))

        monkeypatch.setattr(module, name, act)

    for module, name in ((bulk, "remove"), (bulk, "forget"), (sqlite_store, "remove_dropped")):
        failing(module, name)
    swept = await store.sweep(made, LATER_MS + 1, 1_000)
    assert (swept.expired, swept.forgotten) == (min(50, 7 * fine), 10 if fine > 9 else 7 * max(0, fine - 8))
    assert swept.more
    fine = done
    with pytest.raises(StoreUnavailable, match="full"):
        await store.sweep(made, LATER_MS + 1, 1_000)
    fine = -1
    rest = await store.sweep(made, LATER_MS + 1, 1_000)
    assert (swept.expired + rest.expired, swept.forgotten + rest.forgotten, rest.more) == (50, 10, False)
    await store.close()


async def test_a_sweep_of_nothing_writes_nothing(tmp_path: Path, removed: list[int]) -> None:
    made = topic(remember_ms=60_000, dead_retention_ms=60_000)
    store = await open_store(f"sqlite:///{tmp_path}/a.db")
    await store.create_topic(made)
    await store.put(made, NOW_MS, puts(ids(10), expires_ms=np.full(10, LATER_MS)))
    leased = await store.lease_due(made, None, NOW_MS, 0, [grant(5)])
    await store.settle(made, NOW_MS, settles(leased.rows))
    swept = await store.sweep(made, NOW_MS + 1, 1_000)
    assert not swept.more and not removed
    await store.close()
