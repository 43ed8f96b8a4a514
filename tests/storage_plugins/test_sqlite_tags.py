"""Tag operations of `sqlite:///`: whole batches by one statement, in works that let others go between them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.storage_plugins.sqlite_calls import NOW_MS, dump, grant, ids, puts, topic
from timeline.columns import Ragged
from timeline.model import Operation, Status
from timeline.storage_plugins import open_store
from timeline.storage_plugins.asks import cursor_at
from timeline.storage_plugins.contract import Mutations, Puts, StoreUnavailable, StoreUnknown, TagMutation
from timeline.storage_plugins.sql.rows import FoundColumns
from timeline.storage_plugins.sql.statements import Plan
from timeline.storage_plugins.sqlite import bulk
from timeline.storage_plugins.sqlite import store as sqlite_store

OP = 0xFEDC_BA98_7654_3210


@pytest.fixture(autouse=True)
def small_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_store, "ROWS_AT_ONCE", 7)
    monkeypatch.setattr(sqlite_store, "WORKS_IN_LINE", 2)


def tagged(count: int, prefix: bytes = b"m", **columns: Any) -> Puts:
    return puts(ids(count, prefix), NOW_MS + 60_000, tags=Ragged.repeat(b"spring", count), **columns)


def by_tag(operation: Operation, **more: Any) -> TagMutation:
    return TagMutation(operation, b"spring", b"default", NOW_MS, OP, **more)


async def test_a_cancel_leaves_what_the_topic_remembers(tmp_path: Path) -> None:
    made = topic(remember_ms=60_000)
    store = await open_store(f"sqlite:///{tmp_path}/a.db")
    await store.create_topic(made)
    batch = tagged(50)
    await store.put(made, NOW_MS, batch)
    step = await store.mutate_tag(made, NOW_MS, by_tag(Operation.CANCEL), b"", 1_000)
    assert (step.counts, step.cursor) == ({Status.OK.code: 50}, None)
    assert len(await dump(store, made)) == 0
    again = Mutations(
        operation=Operation.CANCEL,
        ids=batch.ids,
        groups=batch.groups,
        due_ms=np.zeros(50, dtype=np.int64),
        if_version=np.zeros(50, dtype=np.int64),
        leased=np.zeros(50, dtype=np.bool_),
        op=np.full(50, OP, dtype=np.uint64),
    )
    answers = await store.mutate(made, NOW_MS, again)
    assert answers.repeat.all() and answers.settled.all()
    assert (await store.put(made, NOW_MS, batch)).settled.all()
    await store.close()


async def test_only_plain_messages_are_done_without_the_rules(tmp_path: Path) -> None:
    made = topic()
    store = await open_store(f"sqlite:///{tmp_path}/a.db")
    await store.create_topic(made)
    await store.put(made, NOW_MS, puts(ids(10, b"leased"), tags=Ragged.repeat(b"spring", 10)))
    await store.lease_due(made, None, NOW_MS, 0, [grant(10)])
    await store.put(made, NOW_MS, tagged(10, b"plain"))
    await store.put(made, NOW_MS, tagged(10, b"theirs", groups=Ragged.repeat(b"other", 10)))
    await store.put(made, NOW_MS, tagged(10, b"short", expires_ms=np.full(10, NOW_MS + 90_000, dtype=np.int64)))
    await store.put(made, NOW_MS + 1, tagged(10, b"later"))
    move = by_tag(Operation.MOVE, by_ms=30_000)
    wanted = {Status.OK.code: 10, Status.LEASED.code: 10, Status.FORBIDDEN.code: 10, Status.INVALID.code: 10}
    for dry_run in (True, False, False):
        asked = TagMutation(move.operation, move.tag, move.group, NOW_MS, OP, by_ms=30_000, dry_run=dry_run)
        step = await store.mutate_tag(made, NOW_MS, asked, b"", 1_000)
        assert step.counts == wanted
        assert step.earliest_due_ms == (None if dry_run else NOW_MS + 90_000)
        rows = await dump(store, made)
        moved = {id for id, version in zip(rows.ids, rows.version.tolist(), strict=True) if version == 2}
        assert moved - set(ids(10, b"leased")) == (set() if dry_run else set(ids(10, b"plain")))
    await store.close()


def found(rows: list[int]) -> FoundColumns:
    return FoundColumns({"row": rows}, {}, len(rows))


def test_a_chunk_whose_last_message_goes_meanwhile_is_read_again() -> None:
    """The search has no transaction: an ack may come between its two statements."""
    search = bulk.search_tag(1, b"spring", b"", 2)
    told: list[Any] = [found([7, 8]), [], found([7, 9]), [(3, b"x")]]
    next(search)
    with pytest.raises(StopIteration) as done:
        for one in told:
            search.send(one)
    assert done.value.value == ([7, 9], cursor_at(3, b"x"))


async def test_others_go_between_the_works_of_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = topic()
    store = await open_store(f"sqlite:///{tmp_path}/a.db")
    await store.create_topic(made)
    await store.put(made, NOW_MS, tagged(70))
    await store.put(made, NOW_MS, puts([b"due"]))
    done: list[int] = []
    change = bulk.change_tagged

    def noted(*arguments: Any) -> Plan[None]:
        yield from change(*arguments)
        done.append(len(arguments[2]))

    monkeypatch.setattr(bulk, "change_tagged", noted)
    walk = asyncio.ensure_future(store.mutate_tag(made, NOW_MS, by_tag(Operation.CANCEL), b"", 1_000))
    while not done:
        await asyncio.sleep(0)
    leased = await store.lease_due(made, None, NOW_MS, 0, [grant(5)])
    assert leased.rows.ids.tolist() == [b"due"]
    assert not walk.done() and sum(done) < 70
    assert (await walk).counts == {Status.OK.code: 70}
    await store.close()


async def test_a_chunk_that_fails_half_way_says_that_something_may_have_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = topic()
    store = await open_store(f"sqlite:///{tmp_path}/a.db")
    await store.create_topic(made)
    await store.put(made, NOW_MS, tagged(70))
    change, calls = bulk.change_tagged, 0

    def fails(*arguments: Any) -> Plan[None]:
        nonlocal calls
        calls += 1
        if calls > fine:
            raise StoreUnavailable("the disk is full")
        yield from change(*arguments)

    monkeypatch.setattr(bulk, "change_tagged", fails)
    fine = 0
    with pytest.raises(StoreUnavailable, match="full"):
        await store.mutate_tag(made, NOW_MS, by_tag(Operation.CANCEL), b"", 1_000)
    calls, fine = 0, 4
    with pytest.raises(StoreUnknown, match="a part of it was done"):
        await store.mutate_tag(made, NOW_MS, by_tag(Operation.CANCEL), b"", 1_000)
    monkeypatch.setattr(bulk, "change_tagged", change)
    left = len(await dump(store, made))
    assert (await store.mutate_tag(made, NOW_MS, by_tag(Operation.CANCEL), b"", 1_000)).counts == {0: left}
    await store.close()
