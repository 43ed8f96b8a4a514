"""SQLite's statements: none scans a table, all carry batches of any size and any bytes, none touches content that it
need not."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.storage_plugins.sqlite_calls import NOW_MS, dump, grant, ids, puts, settles, topic
from timeline.columns import Ragged
from timeline.model import Operation, State, Status, Topic
from timeline.storage_plugins import open_store
from timeline.storage_plugins.contract import Mutations, ScanFilter, Store, TagMutation
from timeline.storage_plugins.sqlite import dialect
from timeline.storage_plugins.sqlite.database import Database

TOUCHES = re.compile("(FROM|JOIN|INTO|UPDATE) payload")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every statement that any connection of a store runs from here on."""
    seen: list[str] = []
    connect: Callable[..., sqlite3.Connection] = Database.connect

    def connect_traced(self: Database, reading: bool = False) -> sqlite3.Connection:
        connection = connect(self, reading)
        connection.set_trace_callback(seen.append)
        return connection

    monkeypatch.setattr(Database, "connect", connect_traced)
    return seen


def _mutations(operation: Operation, chosen: list[bytes], due_ms: int = NOW_MS) -> Mutations:
    count = len(chosen)
    return Mutations(
        operation=operation,
        ids=Ragged.of(chosen),
        groups=Ragged.repeat(b"default", count),
        due_ms=np.full(count, due_ms, dtype=np.int64),
        if_version=np.zeros(count, dtype=np.int64),
        leased=np.zeros(count, dtype=np.bool_),
        op=np.arange(1, count + 1, dtype=np.uint64),
    )


async def _every_call(store: Store, made: Topic) -> None:
    """Each call of the contract, on ways that find something."""
    count = 40
    tagged = Ragged.of([b"spring" if at % 2 else b"" for at in range(count)])
    expires_ms = np.array([NOW_MS + 60_000 if at % 3 else 0 for at in range(count)], dtype=np.int64)
    batch = puts(ids(count), tags=tagged, expires_ms=expires_ms)
    await store.put(made, NOW_MS, batch)
    assert set((await store.put(made, NOW_MS, batch)).status.tolist()) == {Status.DUPLICATE.code}
    leased = await store.lease_due(made, None, NOW_MS, NOW_MS + 50, [grant(10), grant(10, b"v")])
    assert len(leased.rows) == 20
    await store.lease_due(made, [0, 1], NOW_MS, 0, [grant(1, bytes([65 + at])) for at in range(20)])
    for operation in (Operation.EXTEND, Operation.RELEASE, Operation.BURY, Operation.ACK):
        at = np.arange(5) + 5 * (int(operation) % 4)
        await store.settle(made, NOW_MS, settles(leased.rows.take(at), operation, NOW_MS + 90_000))
    for operation in (Operation.MOVE, Operation.CANCEL, Operation.REVIVE, Operation.PURGE):
        await store.mutate(made, NOW_MS, _mutations(operation, ids(count)[20:30], NOW_MS + 10))
    await store.mutate_tag(made, NOW_MS, TagMutation(Operation.MOVE, b"spring", b"default", NOW_MS, 9, by_ms=5), b"", 9)
    for where in (
        ScanFilter(),
        ScanFilter(states=frozenset((State.DEAD,))),
        ScanFilter(states=frozenset((State.WAITING, State.LEASED)), due_from_ms=1, due_to_ms=NOW_MS * 2),
        ScanFilter(tag=b"spring"),
        ScanFilter(ids=Ragged.of(ids(3))),
    ):
        await store.scan(made, NOW_MS, where, b"", 5, payload=True)
    await store.held_by(made, NOW_MS, b"w", b"", 10)
    for held in (False, True):
        await store.count_due(made, np.array([0, NOW_MS, NOW_MS + 100], dtype=np.int64), held)
    for buckets in (None, [0, 1]):
        await store.next_due(made, buckets, 0)
    await store.next_dues()
    await store.sweep(made, NOW_MS + 10_000_000, 100)


async def test_no_statement_scans_a_table(tmp_path: Path, traced: list[str]) -> None:
    made = topic(buckets=4, remember_ms=1_000, dead_retention_ms=1_000)
    store = await open_store(f"sqlite:///{tmp_path}/a.db")
    await store.create_topic(made)
    traced.clear()
    await _every_call(store, made)
    await store.close()
    asked = {text for text in traced if text.startswith(("SELECT", "INSERT", "UPDATE", "DELETE"))}
    assert len(asked) > 40
    tables = {"message", "m", "payload", "p", "remembered", "r"}
    with sqlite3.connect(tmp_path / "a.db") as connection:
        for text in asked:
            plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {text}").fetchall()]
            scans = [step for step in plan if step.startswith("SCAN") and step.split()[1] in tables]
            assert not scans, f"{text[:400]}: {plan}"
    connection.close()


async def test_a_work_of_a_tag_operation_reads_its_own_rows_and_not_the_whole_tag(
    tmp_path: Path, traced: list[str]
) -> None:
    made = topic(buckets=4)
    store = await open_store(f"sqlite:///{tmp_path}/a.db")
    await store.create_topic(made)
    await _every_call(store, made)
    await store.close()
    works = {text for text in traced if "plain" in text and "json_each" in text}
    assert works
    with sqlite3.connect(tmp_path / "a.db") as connection:
        for text in works:
            plan = " ".join(row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {text}").fetchall())
            assert "SEARCH message USING INTEGER PRIMARY KEY" in plan and "message_tag" not in plan, plan
    connection.close()


async def test_a_page_that_takes_every_row_of_its_walk_reads_no_further(tmp_path: Path, traced: list[str]) -> None:
    made = topic(buckets=4)
    store = await open_store(f"sqlite:///{tmp_path}/a.db")
    await store.create_topic(made)
    await store.put(made, NOW_MS, puts(ids(30)))
    every, dead = frozenset(State), frozenset((State.DEAD,))
    for where, bounded in (
        (ScanFilter(states=every), False),
        (ScanFilter(states=every, tag=b"spring"), False),
        (ScanFilter(states=dead), False),
        (ScanFilter(states=dead, tag=b"spring"), True),
        (ScanFilter(states=every, due_to_ms=NOW_MS * 2), True),
        (ScanFilter(), True),
    ):
        traced.clear()
        await store.scan(made, NOW_MS, where, b"", 5, payload=False)
        assert traced and any("OFFSET" in text for text in traced) is bounded, where
    await store.close()


async def test_content_is_only_for_put_and_delivery(tmp_path: Path, traced: list[str]) -> None:
    made = topic(buckets=4)
    store = await open_store(f"sqlite:///{tmp_path}/a.db")
    await store.create_topic(made)
    await store.put(made, NOW_MS, puts(ids(30)))
    leased = await store.lease_due(made, None, NOW_MS, 0, [grant(20)])
    traced.clear()
    await store.settle(made, NOW_MS, settles(leased.rows.take(np.arange(10)), Operation.EXTEND, NOW_MS + 90_000))
    await store.settle(made, NOW_MS, settles(leased.rows.take(np.arange(10, 15)), Operation.RELEASE, NOW_MS))
    await store.mutate(made, NOW_MS, _mutations(Operation.MOVE, ids(30)[20:25], NOW_MS + 10))
    await store.scan(made, NOW_MS, ScanFilter(), b"", 100, payload=False)
    await store.count_due(made, np.array([0, NOW_MS], dtype=np.int64))
    assert traced
    assert not [text for text in traced if TOUCHES.search(text)]
    await store.settle(made, NOW_MS, settles(leased.rows.take(np.arange(15, 20))))
    await store.close()
    acked = [text for text in traced if TOUCHES.search(text)]
    assert acked
    assert all(text.startswith("DELETE") for text in acked)
    with sqlite3.connect(tmp_path / "a.db") as connection:
        assert connection.execute("SELECT count(*) FROM payload").fetchone() == (25,)
    connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1, 2, 3, 1023, 1024, 1025, 9_000])
async def test_batches_of_any_size(tmp_path: Path, count: int) -> None:
    made = topic()
    store = await open_store(f"sqlite:///{tmp_path}/a.db")
    await store.create_topic(made)
    assert (await store.put(made, NOW_MS, puts(ids(count)))).version.tolist() == [1] * count
    leased = await store.lease_due(made, None, NOW_MS, 0, [grant(count + 10)])
    assert leased.rows.ids.tolist() == ids(count)
    assert leased.next_due_ms == (NOW_MS + 30_000 if count else None)
    for operation in (Operation.EXTEND, Operation.REGRANT):
        answers = await store.settle(made, NOW_MS, settles(leased.rows, operation, NOW_MS + 60_000))
        assert answers.due_ms.tolist() == [NOW_MS + 60_000] * count
    leased.rows.version = leased.rows.version + 1
    assert (await store.settle(made, NOW_MS, settles(leased.rows))).status.tolist() == [0] * count
    assert len(await dump(store, made)) == 0
    await store.close()


async def test_overdue_leases_take_only_what_is_late(tmp_path: Path) -> None:
    made = topic()
    store = await open_store(f"sqlite:///{tmp_path}/a.db")
    await store.create_topic(made)
    for at, late_ms in enumerate((3_000, 2_000, 1_999, 0, -1)):
        await store.put(made, NOW_MS, puts([b"%d" % at], NOW_MS - late_ms))
    leased = await store.lease_due(made, None, NOW_MS, NOW_MS + 10, [grant(1), grant(9, b"v")], overdue_ms=2_000)
    assert leased.rows.ids.tolist() == [b"0", b"1"]
    again = await store.lease_due(made, None, NOW_MS + 31_999, 0, [grant(9)], overdue_ms=2_000)
    assert again.rows.ids.tolist() == [b"2", b"3", b"4"]
    assert (await store.lease_due(made, None, NOW_MS + 32_000, 0, [grant(9)], 2_000)).rows.ids.tolist() == [b"0", b"1"]
    await store.close()


@pytest.mark.slow
async def test_any_bytes_come_back_as_they_were(tmp_path: Path) -> None:
    every = [b"", b"\0", b"\0\0x\0", bytes(range(256)), "größe €".encode(), b"\xff\xfe\xf0", b"x" * 3_000_000]
    payloads, headers = Ragged.of(every), Ragged.of(every[::-1])
    names = Ragged.of([b"a", b"A", "ä".encode(), b"a ", b" a", b"\xf0\x9f\x98\x80", b"z" * 255])
    tags = Ragged.of([b"", b"t\xff", b"a", b"A", b"a ", b"", b"z" * 64])
    made = topic(buckets=1)
    store = await open_store(f"sqlite:///{tmp_path}/a.db")
    await store.create_topic(made)
    top = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
    births = np.array([0, 1, 1 << 63, (1 << 63) - 1, int(top), 77, 1 << 62], dtype=np.uint64)
    batch = puts(names.tolist(), payloads=payloads, headers=headers, tags=tags, birth=births, payload_sum=births[::-1])
    assert (await store.put(made, NOW_MS, batch)).status.tolist() == [0] * 7
    order = sorted(range(7), key=names.tolist().__getitem__)
    rows = (await store.lease_due(made, None, NOW_MS, 0, [grant(10, b"\xffholder")])).rows
    assert rows.payloads is not None
    assert rows.headers is not None
    for found, put in ((rows.ids, names), (rows.payloads, payloads), (rows.headers, headers), (rows.tags, tags)):
        assert found.tolist() == [put[at] for at in order]
    assert rows.birth.tolist() == births[order].tolist()
    assert rows.payload_sum.tolist() == births[::-1][order].tolist()
    held = await store.held_by(made, NOW_MS, b"\xffholder", b"", 100)
    assert held.cursor is not None, "a page ends near 1 MiB of content"
    op = np.full(7, top, dtype=np.uint64)
    answers = await store.settle(made, NOW_MS, settles(rows, Operation.RELEASE, NOW_MS, op=op))
    assert answers.status.tolist() == [0] * 7
    assert (await dump(store, made)).last_op.tolist() == [int(top)] * 7
    repeated = await store.settle(made, NOW_MS, settles(rows, Operation.RELEASE, NOW_MS, op=op))
    assert repeated.repeat.tolist() == [1] * 7
    await store.close()


def test_a_values_list_keeps_below_sqlites_variables() -> None:
    columns = [range(dialect.MOST_ROWS + 1)] * 15
    sizes = [len(parameters) for _, parameters in dialect.batches(columns)]
    assert sizes == [15 * dialect.MOST_ROWS, 15]
    assert max(sizes) + 5 < 32_766
