"""SQLite's one writer: group commit, who goes first, and one guilty work among many."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.storage_plugins.sqlite_calls import NOW_MS, ids, puts, topic
from timeline.storage_plugins import make_store
from timeline.storage_plugins.contract import StoreUnavailable, StoreUnknown
from timeline.storage_plugins.sql.store import PUT_AT_ONCE
from timeline.storage_plugins.sqlite import writer
from timeline.storage_plugins.sqlite.database import Database, SqliteLocation
from timeline.storage_plugins.sqlite.writer import (
    ENOUGH_WEIGHT,
    LATER,
    LEASES,
    MOST_WEIGHT,
    SETTLES,
    Room,
    SqliteWriter,
    Transaction,
)


class Opened:
    """A writer on a new file, and a way to make works wait until several are in line."""

    def __init__(self, path: Path) -> None:
        self.database = Database(SqliteLocation.of(f"sqlite:///{path}"))
        connection = self.database.open()
        self.statements: list[str] = []
        self.changes: list[int] = []
        connection.set_trace_callback(self.statements.append)
        self.writer = SqliteWriter(connection, self.changes.append, lambda: "", lambda _: Room(sys.maxsize), "full")
        self.writer.start()

    def hold(self, line: int = SETTLES) -> tuple[asyncio.Future[None], threading.Event]:
        """A work that keeps the writer busy until the event is set."""
        go = threading.Event()
        started = threading.Event()

        def wait(_: Transaction) -> None:
            started.set()
            go.wait()

        answer = self.writer.submit(wait, line, 1)
        started.wait()
        return answer, go

    def count(self, of: str) -> int:
        return self.statements.count(of)


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Opened]:
    made = Opened(tmp_path / "a.db")
    yield made
    await asyncio.to_thread(made.writer.stop, True)
    made.database.close()


def note(name: str) -> Callable[[Transaction], str]:
    def act(transaction: Transaction) -> str:
        transaction.connection.execute("INSERT INTO meta (name, value) VALUES (?, '')", (name,))
        return name

    return act


def noted(path: Path) -> set[str]:
    with sqlite3.connect(path) as connection:
        names = {name for (name,) in connection.execute("SELECT name FROM meta")}
    connection.close()
    return names


@pytest.mark.slow
async def test_what_waits_is_committed_together(opened: Opened) -> None:
    held, go = opened.hold()
    waiting = [opened.writer.submit(note(f"n{at}"), LATER, 1) for at in range(50)]
    before = opened.count("COMMIT")
    go.set()
    assert await asyncio.gather(held, *waiting) == [None, *(f"n{at}" for at in range(50))]
    assert opened.count("COMMIT") == before + 2
    assert opened.changes == [0, 50]


def named(ran: list[str], name: str, weight: int | None = None) -> Callable[[Transaction], None]:
    def act(transaction: Transaction) -> None:
        ran.append(name)
        if weight is not None:
            transaction.weight = weight

    return act


async def _in_line(opened: Opened, put_weight: int) -> list[str]:
    ran: list[str] = []
    held, go = opened.hold()
    lines = (("put", LATER), ("put", LATER), ("settle", SETTLES), ("put", LATER), ("settle", SETTLES))
    waiting = [
        opened.writer.submit(named(ran, name), priority, put_weight if priority == LATER else MOST_WEIGHT)
        for name, priority in lines
    ]
    go.set()
    await asyncio.gather(held, *waiting)
    return ran


async def test_leases_and_settles_go_first_and_puts_are_not_starved(opened: Opened) -> None:
    assert await _in_line(opened, ENOUGH_WEIGHT) == ["settle", "put", "settle", "put", "put"]
    assert opened.count("BEGIN IMMEDIATE") == opened.count("COMMIT") == 4, "one of each line however much it weighs"


async def test_what_is_heavy_takes_turns_with_leases_and_settles(opened: Opened) -> None:
    assert await _in_line(opened, ENOUGH_WEIGHT + 1) == ["settle", "put", "settle", "put", "put"]
    assert opened.count("COMMIT") == 1 + 4, "no lease or settle waits for a heavy one beside it"


async def test_what_little_is_left_in_the_log_is_carried_between_two_transactions(opened: Opened) -> None:
    opened.writer.carry_rest()
    for at in range(3):
        await opened.writer.submit(note(f"n{at}"), LATER, 1)
    assert opened.count("PRAGMA wal_checkpoint(PASSIVE)") == 1
    log = opened.statements.index("PRAGMA wal_checkpoint(PASSIVE)")
    assert opened.statements[log - 1 : log] in ([], ["COMMIT"]), "never inside a transaction"


async def test_a_lease_weighs_what_it_leased(opened: Opened) -> None:
    ran: list[str] = []
    held, go = opened.hold()
    waiting = [opened.writer.submit(named(ran, "lease", 3), LEASES, MOST_WEIGHT // 2) for _ in range(20)]
    go.set()
    await asyncio.gather(held, *waiting)
    assert len(ran) == 20
    assert opened.count("COMMIT") == 1, "many topics' leases that found little share a transaction"


async def test_puts_end_a_transaction_when_a_lease_has_come(opened: Opened) -> None:
    ran: list[str] = []
    loop = asyncio.get_running_loop()
    held, go = opened.hold()
    leases: list[asyncio.Future[None]] = []

    def put(_: Transaction) -> None:
        ran.append("put")
        if not leases:
            coming = asyncio.run_coroutine_threadsafe(submit_lease(), loop)
            leases.append(coming.result())

    async def submit_lease() -> asyncio.Future[None]:
        return opened.writer.submit(named(ran, "lease"), LEASES, 1)

    waiting = [opened.writer.submit(put, LATER, ENOUGH_WEIGHT) for _ in range(3)]
    go.set()
    await asyncio.gather(held, *waiting)
    await leases[0]
    assert ran == ["put", "lease", "put", "put"]
    assert opened.count("COMMIT") == 1 + 2, "and it is committed with the one that was under way"


async def test_a_lease_comes_after_the_put_that_waits_with_it(opened: Opened) -> None:
    turns: dict[str, int] = {}

    def turn(name: str) -> Callable[[Transaction], None]:
        return lambda transaction: turns.update({name: transaction.commit_seq})

    held, go = opened.hold(LEASES)
    waiting = [opened.writer.submit(turn("lease"), LEASES, 1), opened.writer.submit(turn("put"), LATER, 1)]
    go.set()
    await asyncio.gather(held, *waiting)
    assert turns["lease"] > turns["put"] > 0
    assert opened.count("COMMIT") == 1 + 1, "one commit for both"


async def test_only_the_guilty_work_fails(opened: Opened, tmp_path: Path) -> None:
    held, go = opened.hold()

    def guilty(transaction: Transaction) -> None:
        note("guilty")(transaction)
        transaction.connection.execute("INSERT INTO nowhere VALUES (1)")

    def refuses(transaction: Transaction) -> None:
        note("refused")(transaction)
        raise ValueError("not like this")

    good = [opened.writer.submit(note(f"n{at}"), LATER, 1) for at in range(3)]
    bad, refused = opened.writer.submit(guilty, SETTLES, 1), opened.writer.submit(refuses, LATER, 1)
    go.set()
    await held
    assert await asyncio.gather(*good) == ["n0", "n1", "n2"]
    with pytest.raises(StoreUnavailable, match="no such table"):
        await bad
    with pytest.raises(ValueError, match="not like this"):
        await refused
    assert {"n0", "n1", "n2"} <= noted(tmp_path / "a.db")
    assert not {"guilty", "refused"} & noted(tmp_path / "a.db")


async def test_answers_come_after_the_commit(opened: Opened, tmp_path: Path) -> None:
    seen: list[bool] = []
    answer = opened.writer.submit(note("n"), LATER, 1)
    answer.add_done_callback(lambda _: seen.append("n" in noted(tmp_path / "a.db")))
    await answer
    await asyncio.sleep(0)
    assert seen == [True]


async def test_row_numbers_are_never_given_twice(tmp_path: Path) -> None:
    given: list[int] = []

    def reserve(transaction: Transaction) -> int:
        return transaction.writer.reserve(10)

    def reserve_and_fail(transaction: Transaction) -> int:
        given.append(transaction.writer.reserve(10))
        raise ValueError("rolled back")

    for _ in range(3):
        opened = Opened(tmp_path / "a.db")
        with pytest.raises(ValueError, match="rolled back"):
            await opened.writer.submit(reserve_and_fail, LATER, 1)
        given += [await opened.writer.submit(reserve, LATER, 1) for _ in range(2)]
        await asyncio.to_thread(opened.writer.stop, True)
        opened.database.close()
    assert given == sorted(given)
    assert min(after - before for before, after in itertools.pairwise(given)) >= 10


async def test_what_waits_is_done_before_it_stops(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "a.db")
    held, go = opened.hold()
    waiting = [opened.writer.submit(note(f"n{at}"), LATER, MOST_WEIGHT) for at in range(3)]
    stopping = asyncio.get_running_loop().run_in_executor(None, opened.writer.stop, True)
    go.set()
    await stopping
    assert await asyncio.gather(held, *waiting) == [None, "n0", "n1", "n2"]
    with pytest.raises(StoreUnavailable, match="closed"):
        opened.writer.submit(note("late"), LATER, 1)
    opened.database.close()


async def test_who_gave_up_waiting_harms_nobody(opened: Opened) -> None:
    held, go = opened.hold()
    given_up, patient = opened.writer.submit(note("a"), LATER, 1), opened.writer.submit(note("b"), LATER, 1)
    given_up.cancel()
    go.set()
    await held
    assert await patient == "b"
    assert given_up.cancelled()


async def test_a_writer_that_stumbles_leaves_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake of ours ends its thread; who waits is told so, and so is who comes later."""
    opened = Opened(tmp_path / "a.db")
    held, go = opened.hold()

    def stumbles(changes: int) -> None:
        raise ZeroDivisionError(changes)

    monkeypatch.setattr(opened.writer, "_committed", stumbles)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    waiting = opened.writer.submit(note("a"), LATER, 1)
    go.set()
    with pytest.raises(StoreUnknown, match="in the middle of it"):
        await held
    with pytest.raises(StoreUnavailable, match="has ended"):
        await waiting
    with pytest.raises(StoreUnavailable, match="closed"):
        opened.writer.submit(note("b"), LATER, 1)
    await asyncio.to_thread(opened.writer.stop, True)
    opened.database.close()


async def test_payloads_left_behind_wait_for_company_or_a_rest(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "REST_S", 3_600.0)
    for at in range(20):
        await opened.writer.submit(lambda transaction, at=at: transaction.orphan([at], [1]), SETTLES, 1)
    assert opened.count("COMMIT") == 20, "no commit of its own for each ack's payload"
    many = list(range(writer.ORPHANS_WORTHWHILE))
    await opened.writer.submit(lambda transaction: transaction.orphan(many, [1] * len(many)), SETTLES, 1)
    while opened.count("COMMIT") < 22:
        await asyncio.sleep(0)
    monkeypatch.setattr(writer, "REST_S", 0.0)
    await opened.writer.submit(lambda transaction: transaction.orphan([1], [1]), SETTLES, 1)
    while opened.count("COMMIT") < 24:
        await asyncio.sleep(0)


async def test_a_large_payload_that_is_removed_is_not_written_once_more(tmp_path: Path) -> None:
    """Builds that overwrite what is deleted, as Debian's does, would put as many bytes into the log as it had."""
    database = Database(SqliteLocation.of(f"sqlite:///{tmp_path}/a.db"))
    connection, log = database.open(), tmp_path / "a.db-wal"
    assert connection.execute("PRAGMA secure_delete").fetchone()[0] == 2, "FAST, whatever the build's own is"
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("INSERT INTO payload VALUES (1, randomblob(1000000), x'')")
    written = log.stat().st_size
    connection.execute("DELETE FROM payload")
    assert 0 < log.stat().st_size - written < 100_000
    connection.close()
    database.close()


async def test_a_put_in_parts_is_seen_as_a_whole_by_leases_after_its_last_part_alone(tmp_path: Path) -> None:
    store, made = make_store(f"sqlite:///{tmp_path}/b.db"), topic()
    await store.open()
    try:
        await store.create_topic(made)
        before = await store.lease_due(made, None, NOW_MS, 0, [])
        answers = await store.put(made, NOW_MS, puts(ids(5 * PUT_AT_ONCE)))
        after = await store.lease_due(made, None, NOW_MS, 0, [])
        assert (answers.commit_seq, after.commit_seq) == (before.commit_seq + 5, before.commit_seq + 6)
    finally:
        await store.close()
