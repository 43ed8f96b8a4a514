"""The SQLite store when the disk is full or broken, the file damaged or read-only, the process killed: definite
errors, nothing acknowledged lost, nothing refused done, and well again by itself."""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.servers import disk as disks
from tests.storage_plugins.sqlite_calls import NOW_MS, dump, grant, ids, puts, settles, topic
from timeline.columns import Ragged
from timeline.model import Status, Topic
from timeline.storage_plugins import open_store
from timeline.storage_plugins.contract import Puts, Store, StoreFull, StoreRefused, StoreUnavailable, StoreUnknown


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with disks.small_disk(tmp_path / "disk", "4m") as folder:
        yield folder


async def _fill(store: Store, made: Topic) -> tuple[set[bytes], set[bytes]]:
    """Puts until the disk is full; answers the ids that were acknowledged and those of which that is unknown."""
    stored: set[bytes] = set()
    unknown: set[bytes] = set()
    for batch in range(1_000):
        chosen = ids(40, b"fill-%03d" % batch)
        try:
            answers = await store.put(made, NOW_MS, puts(chosen, payload=os.urandom(1_000)))
        except StoreUnavailable as error:
            assert "full" in error.reason
            return stored, unknown
        except StoreUnknown:
            unknown |= set(chosen)
            return stored, unknown
        assert answers.status.tolist() == [0] * 40
        stored |= set(chosen)
    raise AssertionError("the disk never filled up")


async def test_full_disk(small_disk: Path) -> None:
    made = topic()
    store = await open_store(f"sqlite:///{small_disk}/a.db")
    await store.create_topic(made)
    await store.check()
    stored, unknown = await _fill(store, made)
    with pytest.raises(StoreUnavailable, match="full"):
        await store.check()
    found = await dump(store, made)
    assert stored <= set(found.ids.tolist()) <= stored | unknown

    disks.remount(small_disk, "size=12m")
    await store.check()
    more = ids(50, b"more")
    assert (await store.put(made, NOW_MS, puts(more))).status.tolist() == [0] * 50
    await store.close()
    again = await open_store(f"sqlite:///{small_disk}/a.db")
    assert stored | set(more) <= set((await dump(again, made)).ids.tolist()) <= stored | unknown | set(more)
    await again.close()


async def test_full_disk_empties_by_settling(small_disk: Path) -> None:
    """Leases and acks need little room, and make more for others."""
    made = topic()
    store = await open_store(f"sqlite:///{small_disk}/a.db")
    await store.create_topic(made)
    stored, unknown = await _fill(store, made)
    done: set[bytes] = set()
    while (leased := await store.lease_due(made, None, NOW_MS, 0, [grant(50)])).rows.ids:
        assert (await store.settle(made, NOW_MS, settles(leased.rows))).status.tolist() == [0] * len(leased.rows)
        done |= set(leased.rows.ids.tolist())
    assert stored <= done <= stored | unknown
    while True:  # what was acknowledged goes in an idle moment
        try:
            await store.check()
            break
        except StoreUnavailable:
            await asyncio.sleep(0)
    assert (await store.put(made, NOW_MS, puts(ids(50)))).status.tolist() == [0] * 50
    await store.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "at_once", "payload_bytes"), [("12m", 60, 20_000), ("32m", 60, 100_000), ("64m", 30, 400_000)]
)
async def test_large_puts_leave_room_for_all_other_calls(
    size: str, at_once: int, payload_bytes: int, tmp_path: Path
) -> None:
    """They come together, into one commit that is larger than the reserve."""
    made = topic()
    with disks.small_disk(tmp_path / "disk", size) as disk:
        store = await open_store(f"sqlite:///{disk}/a.db")
        await store.create_topic(made)
        stored: list[bytes] = []
        for turn in range(1_000):
            chosen = ids(at_once, b"fill-%03d" % turn)
            asked = [store.put(made, NOW_MS, puts([one], payload=os.urandom(payload_bytes))) for one in chosen]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            for id, one in zip(chosen, answers, strict=True):
                if isinstance(one, BaseException):
                    assert isinstance(one, StoreFull)
                elif one.status.tolist() == [Status.OK.code]:
                    stored.append(id)
                else:
                    assert one.status.tolist() == [Status.UNAVAILABLE.code] and "nearly full" in one.details[0]
            if not stored or stored[-1] not in chosen:
                break
        assert len(stored) * payload_bytes > 0.2 * os.statvfs(disk).f_blocks * os.statvfs(disk).f_frsize
        leased = await store.lease_due(made, None, NOW_MS, 0, [grant(len(stored))])
        assert sorted(leased.rows.ids.tolist()) == sorted(stored)
        for part in range(0, len(stored), 7):
            settled = await store.settle(made, NOW_MS, settles(leased.rows.slice(part, part + 7)))
            assert set(settled.status.tolist()) == {0}
        await store.close()


@pytest.mark.slow
async def test_small_puts_with_random_ids_leave_room_too(tmp_path: Path) -> None:
    """They touch a page of each index, each. After an opening, the log has no file to write over."""
    made = topic()
    with disks.small_disk(tmp_path / "disk", "48m") as disk:
        url = f"sqlite:///{disk}/a.db"
        store = await open_store(url)
        await store.create_topic(made)
        for _ in range(80):
            await store.put(made, NOW_MS, _random(250))
        await store.close()
        store = await open_store(url)
        with (disk / "ballast").open("wb") as ballast:
            ballast.write(bytes(_free(disk) - 3_584_000))
        taken = 0
        while await _taken(store, made):
            taken += 1
            assert _free(disk) > 900_000
        assert taken
        leased = await store.lease_due(made, None, NOW_MS + 86_400_000, 0, [grant(300)])
        settled = await store.settle(made, NOW_MS, settles(leased.rows))
        assert settled.status.tolist() == [0] * 300
        await store.close()


def _random(count: int) -> Puts:
    """Puts of which no index is warm."""
    due_ms = np.array([NOW_MS + secrets.randbelow(80_000_000) for _ in range(count)])
    names = [secrets.token_hex(8).encode() for _ in range(count)]
    tags = Ragged.of([secrets.token_hex(4).encode() for _ in range(count)])
    return puts(names, payload=os.urandom(100), due_ms=due_ms, expires_ms=due_ms * 2, tags=tags)


def _free(disk: Path) -> int:
    return os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize


async def _taken(store: Store, made: Topic) -> bool:
    try:
        return set((await store.put(made, NOW_MS, _random(80))).status.tolist()) == {Status.OK.code}
    except StoreFull:
        return False


async def test_full_disk_at_the_opening(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space"), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="free some space"):
            await open_store(f"sqlite:///{small_disk}/a.db")
    ballast.unlink()
    store = await open_store(f"sqlite:///{small_disk}/a.db")
    await store.check()
    await store.close()


async def test_read_only_file_system(small_disk: Path) -> None:
    url = f"sqlite:///{small_disk}/a.db"
    await (await open_store(url)).close()
    disks.remount(small_disk, "ro")
    with pytest.raises(StoreRefused, match="Read-only file system"):
        await open_store(url)
    disks.remount(small_disk, "rw")
    await (await open_store(url)).close()


@contextmanager
def _no_file_grows_beyond(limit_bytes: int) -> Iterator[None]:
    """Writes past `limit_bytes` of any file fail with an I/O error. Python ignores the signal that goes with it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
@pytest.mark.parametrize("limit_bytes", [4_096, 100_000, 400_000, 1_000_000])
async def test_broken_disk(tmp_path: Path, limit_bytes: int) -> None:
    made = topic()
    path = tmp_path / "a.db"
    store = await open_store(f"sqlite:///{path}")
    await store.create_topic(made)
    kept, doubtful, refused = set(ids(1_000)), set(), 0
    await store.put(made, NOW_MS, puts(sorted(kept), payload=bytes(500)))
    with _no_file_grows_beyond(limit_bytes):
        for batch in range(8):
            chosen = ids(300, b"batch-%d" % batch)
            try:
                await store.put(made, NOW_MS, puts(chosen, payload=os.urandom(500)))
                kept |= set(chosen)
            except StoreUnavailable as error:
                assert "SQLITE_IOERR" in error.reason
                refused += 1
            except StoreUnknown:
                doubtful |= set(chosen)
        if limit_bytes == 4_096:
            with pytest.raises((StoreUnavailable, StoreUnknown)):
                await store.check()
    assert refused or doubtful
    await store.check()
    assert (await store.put(made, NOW_MS, puts(ids(10, b"after")))).status.tolist() == [0] * 10
    kept |= set(ids(10, b"after"))
    assert kept <= set((await dump(store, made)).ids.tolist()) <= kept | doubtful
    await store.close()
    again = await open_store(f"sqlite:///{path}")
    assert kept <= set((await dump(again, made)).ids.tolist()) <= kept | doubtful
    await again.close()


async def test_damaged_page_in_mid_flight(tmp_path: Path) -> None:
    made = topic()
    path = tmp_path / "a.db"
    store = await open_store(f"sqlite:///{path}")
    await store.create_topic(made)
    await store.put(made, NOW_MS, puts(ids(3_000), payload=bytes(200)))
    await store.close()
    with path.open("r+b") as file:
        file.seek(40 * 4096)
        file.write(b"\xee" * (40 * 4096))
    store = await open_store(f"sqlite:///{path}")
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=r"malformed|corrupt"):
            await store.lease_due(made, None, NOW_MS, 0, [grant(3_000)])
    with pytest.raises(StoreUnavailable, match="restore the file"):
        await store.check()
    with pytest.raises(StoreUnavailable, match=r"malformed|corrupt"):
        await dump(store, made)
    assert await store.topics() == [made], "what is whole still answers"
    await store.close()


_LOAD = """
import asyncio, sys
from tests.storage_plugins.sqlite_calls import NOW_MS, grant, ids, puts, settles, topic
from timeline.storage_plugins import open_store

async def load(url):
    store = await open_store(url)
    made = await store.create_topic(topic(remember_ms=0))
    print("topic", made.uid, flush=True)
    held = (await store.put(made, NOW_MS, puts(ids(200, b"held"), NOW_MS - 1)))
    leased = await store.lease_due(made, None, NOW_MS, 0, [grant(200, b"holder", 10_000_000)])
    print("held", len(leased.rows), flush=True)

    async def produce():
        for batch in range(10_000):
            await store.put(made, NOW_MS, puts(ids(250, b"b%04d" % batch), NOW_MS + batch, payload=b"content" * 20))
            print("put", batch, flush=True)

    async def consume():
        while True:
            leased = await store.lease_due(made, None, NOW_MS + 100_000, 0, [grant(200)])
            if len(leased.rows):
                print("acking", b",".join(leased.rows.ids.tolist()).decode(), flush=True)
                await store.settle(made, NOW_MS, settles(leased.rows))
                print("acked", b",".join(leased.rows.ids.tolist()).decode(), flush=True)

    await asyncio.gather(produce(), consume())

asyncio.run(load(sys.argv[1]))
"""


@pytest.mark.processes
async def test_killed_under_load(tmp_path: Path) -> None:
    """All that was acknowledged before a kill -9 is there afterwards, content and leases too."""
    path = tmp_path / "a.db"
    stored: set[bytes] = set()
    acking: set[bytes] = set()
    acked: set[bytes] = set()
    uid = 0
    command = [sys.executable, "-c", _LOAD, f"sqlite:///{path}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as loader:
        assert loader.stdout is not None
        for line in loader.stdout:
            word, _, rest = line.rstrip("\n").partition(" ")
            if not line.endswith("\n"):
                break  # Cut in the middle by the kill.
            if word == "topic":
                uid = int(rest)
            elif word == "held":
                assert rest == "200"
            elif word == "put":
                stored |= set(ids(250, b"b%04d" % int(rest)))
                if len(stored) == 20_000:
                    loader.send_signal(signal.SIGKILL)
            else:
                (acking if word == "acking" else acked).update(rest.encode().split(b","))
        assert loader.wait() == -signal.SIGKILL
    assert len(stored) >= 20_000
    assert acked

    store = await open_store(f"sqlite:///{path}")
    (made,) = await store.topics()
    assert made.uid == uid
    found = await dump(store, made)
    there = set(found.ids.tolist())
    assert stored - acking <= there
    assert not acked & there
    assert found.payloads is not None
    content = {id: payload for id, payload in zip(found.ids, found.payloads, strict=True) if id.startswith(b"b")}
    assert set(content.values()) == {b"content" * 20}
    held = await store.held_by(made, NOW_MS, b"holder", b"", 1_000)
    assert held.rows.ids.tolist() == ids(200, b"held")
    assert held.rows.version.tolist() == [2] * 200
    while (await store.sweep(made, NOW_MS, 10_000)).more:
        pass
    await store.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM payload").fetchone() == (len(there),)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


async def test_payload_that_is_gone(tmp_path: Path) -> None:
    """A message without its content is leased, named as damaged, and harms no other."""
    made = topic()
    path = tmp_path / "a.db"
    store = await open_store(f"sqlite:///{path}")
    await store.create_topic(made)
    await store.put(made, NOW_MS, puts(ids(5), payloads=Ragged.of([b"0", b"1", b"2", b"3", b"4"])))
    await store.close()
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM payload WHERE payload = x'32'")
        connection.execute("INSERT INTO payload (row, payload, headers) VALUES (999999, x'', x'')")
        connection.execute("UPDATE meta SET value = '0' WHERE name = 'clean'")
    connection.close()
    store = await open_store(f"sqlite:///{path}")
    leased = await store.lease_due(made, None, NOW_MS, 0, [grant(10)])
    assert leased.damaged == (2,)
    assert leased.rows.payloads is not None
    assert leased.rows.payloads.tolist() == [b"0", b"1", b"", b"3", b"4"]
    assert (await store.sweep(made, NOW_MS, 100)).orphans == 1
    await store.close()


async def test_a_call_that_is_given_up_is_still_whole(tmp_path: Path) -> None:
    made = topic()
    store = await open_store(f"sqlite:///{tmp_path}/a.db")
    await store.create_topic(made)
    calls = [asyncio.ensure_future(store.put(made, NOW_MS, puts(ids(50, b"c%d" % at)))) for at in range(20)]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    rows = (await dump(store, made)).ids.tolist()
    counts = [sum(id.startswith(b"c%d-" % at) for id in rows) for at in range(20)]
    assert set(counts[1::2]) == {50}
    assert set(counts[::2]) <= {0, 50}
    await store.close()
