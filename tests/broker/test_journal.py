"""The event journal: what a broker did stands in it, whole files only; what it could not take is counted and said."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import timeline
from timeline.broker import journal_pipe
from timeline.broker.journal import Journal, Kind, Part
from timeline.broker.journal_files import FIELDS, Folder, Writer, parts, split_url
from timeline.broker.journal_pipe import JournalPipe, encoded
from timeline.columns import Ragged
from timeline.errors import Invalid
from timeline.model import Answers, Status, Topic, TopicSettings
from timeline.storage_plugins.contract import Puts

TOPIC = Topic("t", 1, TopicSettings())


def puts(count: int) -> Puts:
    none = Ragged.repeat(b"", count)
    zeros = np.zeros(count, dtype=np.int64)
    return Puts(
        ids=Ragged.of([b"m%d" % at for at in range(count)]),
        birth=np.arange(1, count + 1, dtype=np.uint64),
        due_ms=zeros + 1_700_000_000_000,
        expires_ms=zeros,
        groups=Ragged.repeat(b"default", count),
        tags=none,
        payload_sum=np.zeros(count, dtype=np.uint64),
        payloads=none,
        headers=none,
        move=np.zeros(count, dtype=np.bool_),
    )


def test_only_what_happened_is_told() -> None:
    told: list[Part] = []
    journal = Journal(told.append, lambda: 5)
    answers = Answers.blank(4)
    answers.status[:] = [Status.OK.code, Status.EXISTS.code, Status.OK.code, Status.DUPLICATE.code]
    answers.version[:] = [1, 3, 2, 1]
    journal.put(TOPIC, puts(4), answers)
    assert [(part.kind, part.count) for part in told] == [(Kind.PUT, 1), (Kind.MOVED, 1)]
    ids = [part.columns["id"] for part in told]
    assert [column.tolist() for column in ids if isinstance(column, Ragged)] == [[b"m0"], [b"m2"]]
    assert "birth" not in told[1].columns, "a put that moves is of another birth than the message"
    told.clear()
    journal.put(TOPIC, puts(2), Answers.blank(2, Status.EXISTS))
    journal.expired(TOPIC, 0)
    assert told == []


def test_a_part_comes_through_the_pipe_as_it_was() -> None:
    read, write = os.pipe()
    part = Part(
        Kind.PUT, "té", 7, 2, {"id": Ragged.of([b"a", b"bc"]), "birth": np.array([1, 2**63], np.uint64), "count": 3}
    )
    with os.fdopen(write, "wb") as pipe:
        for view in encoded(part):
            pipe.write(view)
        pipe.write(b"\x09\x00")  # and one that was cut off
    with os.fdopen(read, "rb") as pipe:
        ((kind, topic, time_ms, count, columns),) = parts(pipe)
    assert (kind, topic, time_ms, count, columns["count"]) == ("put", "té", 7, 2, 3)
    data, offsets = columns["id"]
    assert (bytes(data), offsets.tolist(), columns["birth"].tolist()) == (b"abc", [0, 1, 3], [1, 2**63])


@pytest.mark.parametrize("url", ["file:///x?roll=1ms", "file:///x?size=3", "file:///x?rows=0", "?roll=1s"])
def test_a_url_that_cannot_be_meant_is_refused(url: str) -> None:
    with pytest.raises(Invalid):
        split_url(url)


@contextmanager
def broker(folder: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [
        sys.executable,
        "-m",
        "timeline",
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--metrics",
        "off",
        "--json",
        *options,
    ]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        assert said, (folder / "log").read_text()
        yield json.loads(said)["listen"], process
    finally:
        process.terminate()
        process.wait(60)


def events(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in sorted(folder.rglob("*.parquet")):
        table = pq.ParquetFile(path).read()
        assert set(table.schema.names) == set(FIELDS)
        assert table.schema.metadata[b"timeline.journal"] == b"1"
        found += [row | {"topic": path.parent.name.removeprefix("topic=")} for row in table.to_pylist()]
    return sorted(found, key=lambda row: row["time"])


async def _live(address: str) -> None:
    """One of everything."""
    async with timeline.connect(address, timeout="30s") as tl:
        await tl.create_topic("jobs/é", lease="1s")
        async with tl.producer("jobs/é", group="ops") as p:
            await p.produce(b"x", in_=0, id="acked", tag="spring")
            await p.produce(b"x", in_="1h", id="moved")
            await p.move("moved", in_="2h")
            await p.produce(b"x", in_="1h", id="cancelled")
            await p.cancel("cancelled")
            await p.produce(b"x", in_="1h", id="tagged", tag="autumn")
            await p.cancel_tag("autumn")
            async with tl.consumer("jobs/é", id="worker") as c:
                await (await _next(c)).ack()
                await p.produce(b"x", in_=0, id="released")
                d = await _next(c)
                await d.release(reason="not yet")
                d = await _next(c)
                await d.bury("no use")
                await p.purge("released")
                await p.produce(b"x", in_=0, id="lost")
                await _next(c)
                d = await _next(c)  # its lease ran out
                await d.ack()


async def _next(c: timeline.Consumer) -> timeline.Delivery:
    taken = await asyncio.wait_for(c.take(), 60)
    assert taken is not None
    return taken


@pytest.mark.processes
def test_what_a_broker_did_stands_in_whole_files(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    with broker(tmp_path, "--store", "memory://", "--name", "b/1", "--journal", f"file://{folder}") as (address, _):
        asyncio.run(_live(address))
    told = events(folder)
    kinds: dict[str, list[str]] = {}
    for row in told:
        if row["id"]:
            kinds.setdefault(row["id"], []).append(row["kind"])
    assert kinds["acked"] == ["put", "delivered", "acked"]
    assert kinds["moved"] == ["put", "moved"]
    assert kinds["cancelled"] == ["put", "cancelled"]
    assert kinds["released"] == ["put", "delivered", "released", "delivered", "buried", "purged"]
    assert kinds["lost"][:1] == ["put"] and Counter(kinds["lost"]) == Counter(put=1, delivered=2, ran_out=1, acked=1)
    put = next(row for row in told if row["kind"] == "put" and row["id"] == "acked")
    assert (put["tag"], put["group"], put["version"], put["payload_bytes"], put["broker"]) == (
        "spring",
        "ops",
        1,
        1,
        "b/1",
    )
    delivered = next(row for row in told if row["kind"] == "delivered")
    assert (delivered["consumer"], delivered["deliveries"], delivered["again"], delivered["birth"]) == (
        "worker", 1, False, put["birth"],
    )  # fmt: skip
    assert 0 <= delivered["lateness"] < 60_000 and delivered["until"] > delivered["time"]
    assert [row["cause"] for row in told if row["kind"] in ("released", "buried")] == ["not yet", "no use"]
    by_tag = next(row for row in told if row["kind"] == "tag_cancelled")
    assert (by_tag["tag"], by_tag["count"], by_tag["topic"]) == ("autumn", 1, "jobs%2F%C3%A9")
    own = [row["kind"] for row in told if row["topic"] == "__HIVE_DEFAULT_PARTITION__"]
    assert own == ["started", "stopped"]
    assert not [path for path in folder.rglob("*") if path.name.endswith(".part")]


@pytest.mark.processes
def test_a_broker_that_is_killed_leaves_what_it_had_said(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    with broker(tmp_path, "--store", "memory://", "--journal", f"file://{folder}?roll=1h&rows=5000") as (
        address,
        process,
    ):
        with timeline.connect_sync(address) as tl:
            tl.create_topic("t")
            with tl.producer("t") as p:
                p.produce_many(timeline.Batch([b"x"] * 5_000, in_="1h"), timeout="60s").raise_failed()
        wait_for(lambda: len(events(folder)) == 5_000)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        # The process that writes had one more event in hand: what it has it writes, whoever is gone.
        wait_for(lambda: len(events(folder)) == 5_001)
    told = Counter(row["kind"] for row in events(folder))
    assert told == Counter(put=5_000, started=1)


def wait_for(happened: Callable[[], bool]) -> None:
    """Returns once `happened`."""
    ticks = threading.Event()
    for _ in range(600):
        if happened():
            return
        ticks.wait(0.1)
    raise AssertionError("it did not happen within a minute")


@pytest.mark.processes
def test_a_place_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("no folder")
    command = [
        sys.executable,
        "-m",
        "timeline",
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--metrics",
        "off",
        "--store",
        "memory://",
    ]
    done = subprocess.run([*command, "--journal", f"file://{taken}"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "the journal cannot be written" in done.stderr


async def test_a_journal_that_falls_behind_drops_with_a_counter_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_pipe, "QUEUE_BYTES", 100_000)
    counts: Counter[bool] = Counter()
    clock = iter(range(1, 1_000_000))
    pipe = await JournalPipe.start(
        f"file://{tmp_path}/j",
        "b",
        "5e55",
        lambda: next(clock),
        lambda dropped, events: counts.update({dropped: events}),
    )
    os.kill(pipe._process.pid, signal.SIGSTOP)
    part = Part(Kind.PUT, "t", 1_700_000_000_000, 1_000, {"id": Ragged.repeat(b"x" * 20, 1_000)})
    for _ in range(200):
        pipe.carry(part)
    assert counts[True] > 100_000
    os.kill(pipe._process.pid, signal.SIGCONT)
    await pipe.close(60)
    told = events(tmp_path / "j")
    kept = sum(1 for row in told if row["kind"] == "put")
    dropped = [row for row in told if row["kind"] == "dropped"]
    assert kept == counts[False] and sum(row["count"] for row in dropped) == counts[True]
    assert all(row["due"] is not None for row in dropped)


def test_a_place_that_takes_nothing_for_long_costs_events_and_not_memory(tmp_path: Path) -> None:
    class Full(Folder):
        full = True

        def write(self, name: str, table: pa.Table) -> None:
            if self.full:
                raise OSError(28, "No space left on device")
            super().write(name, table)

    folder = Full(f"file://{tmp_path}/j")
    writer = Writer(folder, "b", "5e55", roll_ms=60_000, rows=100)
    for at in range(50):
        for partition in writer._partitions.values():
            partition.not_before_ms = 0.0  # as if the wait were over
        writer.add("put", "t", 1_700_000_000_000 + at, 20, {"id": (b"x" * 20, np.arange(21))})
    assert max(partition.rows for partition in writer._partitions.values()) < 500
    folder.full = False
    writer.finish()
    told = events(tmp_path / "j")
    kept = sum(1 for row in told if row["kind"] == "put")
    dropped = [row for row in told if row["kind"] == "dropped"]
    assert dropped and kept + sum(row["count"] for row in dropped) == 1_000
    assert all(row["due"] <= row["time"] for row in dropped)


def test_what_cannot_be_written_at_the_end_is_told_as_dropped(tmp_path: Path) -> None:
    class NoRoomForOne(Folder):
        def write(self, name: str, table: pa.Table) -> None:
            if "topic=t/" in name:
                raise RuntimeError("an error of some object store, which is no OSError")
            super().write(name, table)

    writer = Writer(NoRoomForOne(f"file://{tmp_path}/j"), "b", "5e55", roll_ms=60_000, rows=100)
    writer.add("put", "t", 1_700_000_000_000, 3, {"id": (b"abc", np.arange(4))})
    writer.add("put", "u", 1_700_000_000_000, 2, {"id": (b"de", np.arange(3))})
    writer.add("stopped", "", 1_700_000_000_001, 1, {})
    writer.finish()
    told = events(tmp_path / "j")
    assert Counter((row["kind"], row["count"]) for row in told) == {
        ("put", None): 2,
        ("stopped", None): 1,
        ("dropped", 3): 1,
    }


def test_a_write_that_fails_leaves_no_half_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        Folder(f"file://{tmp_path}/j").write("date=d/a.parquet", pa.table({"a": [1]}))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


async def test_the_process_imports_nothing_from_the_folder_it_is_in_and_shows_no_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pickle.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    pipe = await JournalPipe.start(f"file://{tmp_path}/s3cret", "b", "5e55", lambda: 1, lambda *_: None)
    command = Path(f"/proc/{pipe._process.pid}/cmdline").read_bytes()
    await pipe.close(60)
    assert b"journal_files" in command and b"s3cret" not in command


@pytest.mark.processes
def test_a_journal_that_hangs_keeps_no_broker_from_ending(tmp_path: Path) -> None:
    options = ("--store", "memory://", "--grace", "100ms", "--journal", f"file://{tmp_path}/j")
    with broker(tmp_path, *options) as (_, process):
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGSTOP)
        try:
            process.terminate()
            assert process.wait(60) == 0
        finally:
            os.kill(int(child), signal.SIGCONT)
    assert "goes on by itself" in (tmp_path / "log").read_text()


async def test_what_its_process_has_to_drop_is_counted(tmp_path: Path) -> None:
    folder, counts, news = tmp_path / "j", Counter[bool](), asyncio.Event()

    def counted(dropped: bool, count: int) -> None:
        counts[dropped] += count
        news.set()

    pipe = await JournalPipe.start(f"file://{folder}?rows=10", "b", "5e55", lambda: 1, counted)
    folder.rmdir()
    folder.write_text("a place that takes nothing")
    pipe.carry(Part(Kind.PUT, "t", 1_700_000_000_000, 50, {"id": Ragged.repeat(b"x", 50)}))
    async with asyncio.timeout(60):
        while counts[True] < 50:
            news.clear()
            await news.wait()
    await pipe.close(60)
    assert counts == {False: 50, True: 50}
