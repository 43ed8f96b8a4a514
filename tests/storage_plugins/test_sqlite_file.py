"""The file of `sqlite:///`: its URL, who may have it, what it must be, and its schema's versions."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.servers.disk import small_disk
from tests.storage_plugins.sqlite_calls import NOW_MS, dump, ids, puts, topic
from timeline.model import Status
from timeline.storage_plugins import make_store, open_store, sql
from timeline.storage_plugins.contract import StoreRefused, StoreUnavailable
from timeline.storage_plugins.sql.statements import Plan
from timeline.storage_plugins.sqlite import bulk, database
from timeline.storage_plugins.sqlite.database import Database, Lock


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sqlite://", "sqlite:///timeline.db"),
        ("sqlite:///", "sqlite:///timeline.db"),
        ("sqlite:///:memory:", "memory://"),
        ("sqlite://:memory:", "memory://"),
        ("sqlite://host/a.db", "three slashes"),
        ("sqlite://me:secret@host/a.db", "^REFUSED: 'sqlite://…@host/a.db' names a host: .*, sqlite:///host/a.db$"),
        ("sqlite:///folder/", "names a folder"),
        ("sqlite:///a%00b", "names a folder, not a file"),
        ("sqlite:///a.db?mode=rw", "known is cache_mib"),
        ("sqlite:///a.db?cache_mib=0", "from 1 to 65536"),
        ("sqlite:///a.db?cache_mib=-1", "from 1 to 65536"),
        ("sqlite:///a.db?cache_mib=", "from 1 to 65536"),
        ("sqlite:///a.db?cache_mib=9999999999999", "from 1 to 65536"),
    ],
)
def test_urls_that_make_no_sense(url: str, says: str) -> None:
    with pytest.raises(StoreRefused, match=says):
        make_store(url)


async def test_relative_and_escaped_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url, name in (("sqlite:///a%20b.db?cache_mib=2", "a b.db"), (f"sqlite:///{tmp_path}/c.db", "c.db")):
        store = await open_store(url)
        await store.check()
        await store.close()
        assert (tmp_path / name).is_file()


async def test_cluster_and_messages_outlive_the_store(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    made = topic()
    store = make_store(url)
    first = await store.open()
    assert (await store.open()).cluster_uid == first.cluster_uid
    await store.create_topic(made)
    await store.put(made, NOW_MS, puts(ids(3)))
    await store.close()
    await store.close()
    second = await store.open()
    assert second.cluster_uid == first.cluster_uid
    assert len(first.cluster_uid) == 32
    assert "SQLite" in second.server
    assert await store.topics() == [made]
    assert len(await dump(store, made)) == 3
    await store.close()


async def test_second_opening_is_refused_with_the_owner(tmp_path: Path) -> None:
    store = await open_store(f"sqlite:///{tmp_path}/a.db")
    (tmp_path / "other.db").symlink_to(tmp_path / "a.db")
    for name in ("a.db", "other.db"):
        with pytest.raises(StoreRefused, match=f"in use by process {os.getpid()}:"):
            await open_store(f"sqlite:///{tmp_path}/{name}")
    await store.check()
    await store.close()
    await (await open_store(f"sqlite:///{tmp_path}/other.db")).close()


async def test_an_opening_that_is_given_up_leaves_no_lock_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, begun, go = f"sqlite:///{tmp_path}/a.db", threading.Event(), threading.Event()
    connect = Database.connect

    def slowly(self: Database, reading: bool = False) -> sqlite3.Connection:
        begun.set()
        go.wait()
        return connect(self, reading)

    monkeypatch.setattr(Database, "connect", slowly)
    for end in (lambda store: store.close(), lambda store: store.open()):
        store = make_store(url)
        begun.clear()
        go.clear()
        opening = asyncio.ensure_future(store.open())
        await asyncio.to_thread(begun.wait)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        go.set()
        await end(store)
        await store.close()
        await (await open_store(url)).close()


async def test_an_opening_for_which_no_file_is_left_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    store = make_store(f"sqlite:///{tmp_path}/a.db")
    with monkeypatch.context() as patch:
        patch.setattr(database.os, "open", fails)
        patch.setattr(Lock, "take", lambda _: None)
        with pytest.raises(StoreUnavailable, match=r"a\.db: Too many open files"):
            await store.open()
    await store.open()
    await store.check()
    await store.close()


async def test_a_topic_whose_creator_gave_up_waiting_is_there_for_others(tmp_path: Path) -> None:
    made = topic()
    store = await open_store(f"sqlite:///{tmp_path}/a.db")
    creating = asyncio.ensure_future(store.create_topic(made))
    await asyncio.sleep(0)
    creating.cancel()
    while await store.topics() != [made]:
        await asyncio.sleep(0)
    assert creating.cancelled()
    assert (await store.put(made, NOW_MS, puts(ids(3)))).status.tolist() == [Status.OK.code] * 3
    await store.close()


_HOLD = """
import asyncio, sys
from timeline.storage_plugins import open_store
async def hold():
    await open_store(sys.argv[1])
    print("open", flush=True)
    await asyncio.Event().wait()
asyncio.run(hold())
"""


@pytest.mark.slow
async def test_lock_of_another_process_dies_with_it(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    with subprocess.Popen([sys.executable, "-c", _HOLD, url], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(StoreRefused, match=f"in use by process {holder.pid}:"):
            await open_store(url)
        holder.kill()
    await (await open_store(url)).close()


async def test_hard_link_is_refused(tmp_path: Path) -> None:
    await (await open_store(f"sqlite:///{tmp_path}/a.db")).close()
    os.link(tmp_path / "a.db", tmp_path / "b.db")
    with pytest.raises(StoreRefused, match="several names"):
        await open_store(f"sqlite:///{tmp_path}/b.db")


def _foreign(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE invoice (number INTEGER)")
    connection.close()


def _damaged(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0" + b"\xff" * 8_000)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.write_bytes(b"id,name\n" * 500), "is not an SQLite database"),
        (_damaged, "not a whole SQLite database|cannot be"),
        (_foreign, "not a Timeline's"),
        (lambda path: path.mkdir(), "is a folder"),
        (lambda path: path.symlink_to("/dev/null"), "/dev/null is no file"),
        (os.mkfifo, "is no file"),
    ],
)
async def test_what_is_no_store_is_refused_and_left_alone(
    tmp_path: Path, make: Callable[[Path], Any], says: str
) -> None:
    path = tmp_path / "a.db"
    make(path)
    before = path.read_bytes() if path.is_file() else None
    for _ in range(2):  # The second time shows that the first gave its lock back.
        with pytest.raises(StoreRefused, match=says):
            await open_store(f"sqlite:///{path}")
    assert before is None or path.read_bytes() == before


async def test_nothing_is_put_beside_what_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "passwd").write_bytes(b"root:x:0:0::/:/bin/sh\n")
    with pytest.raises(StoreRefused, match="passwd is not an SQLite database: give another file"):
        await open_store(f"sqlite:///{tmp_path}/passwd")
    assert [path.name for path in tmp_path.iterdir()] == ["passwd"]


async def test_a_lock_of_somebody_else_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "poetry.lock").write_bytes(b"# made by another tool\n")
    for _ in range(2):
        with pytest.raises(StoreRefused, match=r"poetry\.lock is not Timeline's"):
            await open_store(f"sqlite:///{tmp_path}/poetry")
    assert (tmp_path / "poetry.lock").read_bytes() == b"# made by another tool\n"


async def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(StoreRefused, match=r"cannot be opened \(No such file or directory\)"):
        await open_store(f"sqlite:///{tmp_path}/none/a.db")


def _step(*statements: str) -> sql.Migration:
    """A step that runs these and takes nothing away."""

    def expand(execute: sql.Executes) -> None:
        for statement in statements:
            execute(statement)

    return sql.Migration(expand, lambda _: None)


_NOTE_COLUMN = _step("ALTER TABLE message ADD COLUMN note BLOB NOT NULL DEFAULT x''")
_NOTE_INDEX = _step("CREATE INDEX message_note ON message (topic, note)")


async def test_schema_moves_forward_and_never_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, made = f"sqlite:///{tmp_path}/a.db", topic()
    store = await open_store(url)
    await store.create_topic(made)
    await store.put(made, NOW_MS, puts(ids(5)))
    await store.close()
    known, now = sql.MIGRATIONS, 1 + len(sql.MIGRATIONS)
    monkeypatch.setattr(sql, "MIGRATIONS", (*known, _NOTE_COLUMN, _NOTE_INDEX))
    store = await open_store(url)
    assert len(await dump(store, made)) == 5
    await store.put(made, NOW_MS, puts(ids(5, b"n")))
    await store.close()
    with sqlite3.connect(tmp_path / "a.db") as connection:
        assert connection.execute("SELECT value FROM meta WHERE name = 'schema_version'").fetchone() == (str(now + 2),)
        assert connection.execute("SELECT count(*) FROM message WHERE note = x''").fetchone() == (10,)
    connection.close()
    monkeypatch.setattr(sql, "MIGRATIONS", known)
    with pytest.raises(
        StoreRefused,
        match=f"has version {now + 2}, which {now + 1} and newer can use; this Timeline knows versions 1 to {now}",
    ):
        await open_store(url)


async def test_a_record_that_cannot_be_read_leaves_no_lock_behind(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    store = await open_store(url)
    await store.create_topic(topic())
    await store.close()
    for damage, mend in (
        (
            "UPDATE meta SET value = 'x' WHERE name = 'schema_version'",
            f"UPDATE meta SET value = '{1 + len(sql.MIGRATIONS)}' WHERE value = 'x'",
        ),
        ("DELETE FROM meta WHERE name = 'cluster_uid'", "INSERT INTO meta VALUES ('cluster_uid', 'abc')"),
    ):
        for statement, fails in ((damage, True), (mend, False)):
            with sqlite3.connect(tmp_path / "a.db") as connection:
                connection.execute(statement)
            connection.close()
            if fails:
                with pytest.raises(StoreRefused, match="table meta"):
                    await store.open()
        assert len(await store.open() and await store.topics()) == 1
        await store.close()


async def test_sweeps_of_several_topics_share_one_walk_over_the_payloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, made = f"sqlite:///{tmp_path}/a.db", [topic("one"), topic("two")]
    store = await open_store(url)
    for one in made:
        await store.create_topic(one)
        await store.put(one, NOW_MS, puts(ids(10)))
    await store.close()
    with sqlite3.connect(tmp_path / "a.db") as connection:
        connection.execute("DELETE FROM message WHERE row % 2 = 0")
        connection.execute("UPDATE meta SET value = '0' WHERE name = 'clean'")
    connection.close()
    begun: list[int | None] = []

    def search(*arguments: Any) -> Plan[bulk.Sweepable]:
        begun.append(arguments[-1])
        return looked_for(*arguments)

    looked_for = bulk.search
    monkeypatch.setattr(bulk, "search", search)
    monkeypatch.setattr(bulk, "PAYLOADS_LOOKED_AT", 8)
    store = await open_store(url)
    swept = [part for _ in range(3) for part in await asyncio.gather(*(store.sweep(one, NOW_MS, 100) for one in made))]
    await store.close()
    assert begun == [0, 8, 16, 20, None, None]
    assert [part.orphans for part in swept] == [4, 4, 2, 0, 0, 0]
    assert [part.more for part in swept] == [True, True, True, False, False, False]


async def test_failed_migration_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    await (await open_store(url)).close()

    known = sql.MIGRATIONS
    monkeypatch.setattr(sql, "MIGRATIONS", (*known, _NOTE_COLUMN, _step("CREATE TABLE message (row INTEGER)")))
    with pytest.raises(Exception, match="already exists"):
        await open_store(url)
    monkeypatch.setattr(sql, "MIGRATIONS", known)
    await (await open_store(url)).close()


async def test_a_file_system_that_tells_no_size_is_not_full(tmp_path: Path) -> None:
    """As one of memory without a bound, and several in user space."""
    with small_disk(tmp_path / "disk", "0") as disk:
        assert os.statvfs(disk).f_blocks == 0
        store = await open_store(f"sqlite:///{disk}/timeline.db")
        there = await store.create_topic(topic())
        for wanted in ids(3):
            answers = await store.put(there, NOW_MS, puts([wanted]))
            assert answers.status.tolist() == [Status.OK.code]
        await store.check()
        await store.close()


async def test_reads_of_a_file_that_was_moved_away_harm_neither_it_nor_its_log(tmp_path: Path) -> None:
    """A reader that connects only then made an empty file in its place, and SQLite deleted the log: what had been
    acknowledged and not yet carried to the file was lost."""
    made, path, away = topic(), tmp_path / "a.db", tmp_path / "away.db"
    store = await open_store(f"sqlite:///{path}")
    await store.create_topic(made)
    await store.put(made, NOW_MS, puts(ids(100)))
    log = Path(f"{path}-wal").read_bytes()
    path.rename(away)
    with pytest.raises(StoreUnavailable, match="cannot be found"):
        await dump(store, made)
    assert not path.exists()
    assert Path(f"{path}-wal").read_bytes() == log
    away.rename(path)
    assert sorted((await dump(store, made)).ids.tolist()) == ids(100)
    await store.close()


async def test_a_file_in_the_place_of_the_one_that_was_opened_is_not_read(tmp_path: Path) -> None:
    made, path, away = topic(), tmp_path / "a.db", tmp_path / "away.db"
    other = await open_store(f"sqlite:///{tmp_path}/other.db")
    await other.close()
    store = await open_store(f"sqlite:///{path}")
    await store.create_topic(made)
    await store.put(made, NOW_MS, puts(ids(100)))
    path.rename(away)
    (tmp_path / "other.db").rename(path)
    with pytest.raises(StoreUnavailable, match="is another file"):
        await dump(store, made)
    away.rename(path)
    assert sorted((await dump(store, made)).ids.tolist()) == ids(100)
    await store.close()


@pytest.mark.parametrize("empty", [False, True])
async def test_a_log_without_its_file_is_kept(tmp_path: Path, empty: bool) -> None:
    """The machine stopped, and somebody moved the file away without its log."""
    path, log = tmp_path / "a.db", tmp_path / "a.db-wal"
    log.write_bytes(b"what was acknowledged")
    if empty:
        path.touch()
    with pytest.raises(StoreRefused, match="move the database back beside it"):
        await open_store(f"sqlite:///{path}")
    assert log.read_bytes() == b"what was acknowledged"
    log.unlink()
    await (await open_store(f"sqlite:///{path}")).close()


async def test_calls_are_answered_and_the_file_closes_if_no_transaction_can_begin(tmp_path: Path) -> None:
    """They stayed in line: no call was answered, the writer tried without a pause, and the broker never ended."""
    made = topic()
    store = await open_store(f"sqlite:///{tmp_path}/a.db")
    await store.create_topic(made)
    os.truncate(tmp_path / "a.db-wal", 0)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            async with asyncio.timeout(20):
                await store.put(made, NOW_MS, puts(ids(100)))
    async with asyncio.timeout(20):
        await store.close()
