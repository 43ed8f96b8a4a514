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
from timeline.broker import journal_files, journal_pipe, journal_process
from timeline.broker.journal import Journal, Kind, Part
from timeline.broker.journal_files import FIELDS, NO_TOPIC, Folder, Writer, folder_name, parts, split_url
from timeline.broker.journal_pipe import JournalPipe
from timeline.broker.journal_process import JournalProcess, encoded
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
    assert (by_tag["tag"], by_tag["count"], by_tag["topic"]) == ("autumn", 1, "jobs%2Fé")
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
        # The process that writes had one more event in hand: what it has it writes, and that the end came unsaid.
        wait_for(lambda: len(events(folder)) == 5_002)
    told = Counter(row["kind"] for row in events(folder))
    assert told == Counter(put=5_000, started=1, dropped=1)
    (gap,) = (row for row in events(folder) if row["kind"] == "dropped")
    assert gap["count"] is None and gap["due"] <= gap["time"], "nobody knows what was in its queue"


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


class Counts:
    """What a broker would count."""

    def __init__(self) -> None:
        self.of: Counter[bool] = Counter()
        self.restarts = 0

    def events(self, dropped: bool, count: int) -> None:
        self.of[dropped] += count

    def restarted(self) -> None:
        self.restarts += 1


async def test_a_journal_that_falls_behind_drops_with_a_counter_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_pipe, "QUEUE_BYTES", 100_000)
    counts = Counts()
    clock = iter(range(1, 1_000_000))
    pipe = await JournalPipe.start(
        f"file://{tmp_path}/j",
        "b",
        "5e55",
        lambda: next(clock),
        counts,
    )
    os.kill(pipe.process.pid, signal.SIGSTOP)
    part = Part(Kind.PUT, "t", 1_700_000_000_000, 1_000, {"id": Ragged.repeat(b"x" * 20, 1_000)})
    for _ in range(200):
        pipe.carry(part)
    assert counts.of[True] > 100_000
    os.kill(pipe.process.pid, signal.SIGCONT)
    await pipe.close(60)
    told = events(tmp_path / "j")
    kept = sum(1 for row in told if row["kind"] == "put")
    dropped = [row for row in told if row["kind"] == "dropped"]
    assert kept == counts.of[False] and sum(row["count"] for row in dropped) == counts.of[True]
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
    writer.roll(everything=True)
    told = events(tmp_path / "j")
    kept = sum(1 for row in told if row["kind"] == "put")
    dropped = [row for row in told if row["kind"] == "dropped"]
    assert dropped and kept + sum(row["count"] for row in dropped) == 1_000
    assert all(row["due"] <= row["time"] for row in dropped)


def some(count: int, kind: Kind = Kind.PUT, time_ms: int = 1_700_000_000_000) -> Part:
    return Part(kind, "t", time_ms, count, {"id": Ragged.repeat(b"x" * 20, count)})


async def until(happened: Callable[[], bool]) -> None:
    """Returns once `happened`."""
    for _ in range(6_000):
        if happened():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen within a minute")


async def test_a_process_that_dies_is_started_again_and_what_it_had_is_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_pipe, "AGAIN_S", 0.01)
    counts = Counts()
    clock = iter(range(1_700_000_000_000, 1_800_000_000_000))
    url = f"file://{tmp_path}/j?roll=1h&rows=1000"
    pipe = await JournalPipe.start(url, "_b", "5e55", lambda: next(clock), counts)
    first = pipe.process
    assert b"file://" not in Path(f"/proc/{first.pid}/cmdline").read_bytes(), "what a URL may carry is nobody's to see"
    pipe.carry(some(1_000))
    await until(lambda: first.wrote)
    for _ in range(3):
        pipe.carry(some(100, time_ms=1_700_000_000_007))
    await until(lambda: first.unwritten[0] == 300)
    os.kill(first.pid, signal.SIGKILL)
    await until(lambda: counts.restarts == 1)
    assert counts.of[True] == 300
    pipe.carry(some(50))
    await pipe.close(60)
    told = events(tmp_path / "j")
    kinds = Counter(row["kind"] for row in told)
    assert kinds == Counter(put=1_050, started=1, dropped=1, stopped=1), "no file of the first one is written over"
    (gap,) = (row for row in told if row["kind"] == "dropped")
    assert gap["count"] == 300
    assert gap["due"].timestamp() * 1000 <= 1_700_000_000_007 and gap["time"] >= gap["due"]
    names = [path.name for path in (tmp_path / "j").rglob("*.parquet")]
    assert not [name for name in names if name[0] in "_."], "readers take such files for hidden"


async def test_a_process_that_cannot_be_started_again_is_tried_and_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_pipe, "AGAIN_S", 0.001)
    start, tries = JournalProcess.start, Counter[int]()

    def refused(url: str, name: str, session: str, run: int, gone: Callable[[], None]) -> JournalProcess:
        tries[run] += 1
        if run and tries[run] < 4:
            raise Invalid("the journal cannot be written: no such place now")
        return start(url, name, session, run, gone)

    monkeypatch.setattr(JournalProcess, "start", refused)
    counts = Counts()
    pipe = await JournalPipe.start(f"file://{tmp_path}/j?roll=1h", "b", "5e55", lambda: 1_700_000_000_000, counts)
    pipe.carry(some(10))
    await until(lambda: pipe.process.unwritten[0] == 10)
    os.kill(pipe.process.pid, signal.SIGKILL)
    for _ in range(20):
        pipe.carry(some(1))
    await until(lambda: counts.restarts == 1)
    assert tries[1] == 4 and caplog.text.count("cannot be started again") == 3
    await pipe.close(60)
    told = events(tmp_path / "j")
    kinds = Counter(row["kind"] for row in told)
    assert kinds["put"] + sum(row["count"] for row in told if row["kind"] == "dropped") == 30


async def test_the_process_imports_nothing_from_the_folder_it_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pickle.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    pipe = await JournalPipe.start(f"file://{tmp_path}/j", "b", "5e55", lambda: 1, Counts())
    await pipe.close(60)


async def test_a_process_that_never_says_that_it_is_ready_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_process, "START_S", 0.0)
    with pytest.raises(Invalid, match="said nothing for 0 s"):
        await JournalPipe.start(f"file://{tmp_path}/j", "b", "5e55", lambda: 1, Counts())


def test_a_system_that_lets_nobody_step_back_that_far_has_a_journal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("seccomp")

    nice: list[int] = []
    monkeypatch.setattr(os, "sched_setscheduler", refused)
    monkeypatch.setattr(os, "nice", nice.append)
    journal_files._step_back()
    assert nice == [19]


@pytest.mark.processes
def test_a_broker_ends_though_its_journal_stalls(tmp_path: Path) -> None:
    with broker(tmp_path, "--store", "memory://", "--journal", f"file://{tmp_path}/j", "--grace", "200ms") as (_, one):
        (child,) = Path(f"/proc/{one.pid}/task/{one.pid}/children").read_text().split() or _children(one.pid)
        os.kill(int(child), signal.SIGSTOP)
        try:
            one.terminate()
            assert one.wait(60) == 0
        finally:
            os.kill(int(child), signal.SIGCONT)
    assert "the journal is still writing after" in (tmp_path / "log").read_text()


def _children(parent: int) -> list[str]:
    """Of all of a process's threads: what a thread starts is its own."""
    return [pid for task in Path(f"/proc/{parent}/task").iterdir() for pid in (task / "children").read_text().split()]


class Refusing(Folder):
    """A folder that takes only files whose names have `only` in them, and raises what is no OSError."""

    only = "nothing"

    def write(self, name: str, table: pa.Table) -> None:
        if self.only not in name:
            raise RuntimeError("the service says no")
        super().write(name, table)


def test_what_cannot_be_written_at_the_end_is_said_where_that_can_be(tmp_path: Path) -> None:
    folder = Refusing(f"file://{tmp_path}/j")
    told: list[tuple[int, int]] = []
    writer = Writer(folder, "b", "5e55", 60_000, 100, told=lambda *said: told.append(said))
    writer.add("put", "t", 1_700_000_000_000, 20, {"id": (b"x" * 20, np.arange(21))})
    writer.add("stopped", "", 1_700_000_000_500, 1, {})
    assert writer.close(lambda seconds: None) == 21, "and where not even that can be, that is told"
    assert told[-1] == (0, 1_700_000_000_000)
    folder.only = NO_TOPIC
    writer.add("put", "t", 1_700_000_000_000, 20, {"id": (b"x" * 20, np.arange(21))})
    assert writer.close(lambda seconds: None) == 0
    told_of = {row["kind"]: row for row in events(tmp_path / "j")}
    assert set(told_of) == {"dropped", "stopped"}
    assert sum(row["count"] or 0 for row in events(tmp_path / "j") if row["kind"] == "dropped") == 40


def test_all_topics_together_are_kept_within_bounds_and_pieces_of_files_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    writer = Writer(Folder(f"file://{tmp_path}/j"), "b", "5e55", roll_ms=60_000, rows=10)
    for at in range(100):
        writer.add("put", f"t{at}", 1_700_000_000_000 + at, 10, {"id": (b"x" * 10, np.arange(11))})
    assert sum(partition.rows for partition in writer._partitions.values()) < 200
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    monkeypatch.undo()
    writer.roll(everything=True)
    told = events(tmp_path / "j")
    kept = sum(1 for row in told if row["kind"] == "put")
    assert kept + sum(row["count"] for row in told if row["kind"] == "dropped") == 1_000


def test_what_a_store_did_not_say_is_noted() -> None:
    told: list[Part] = []
    journal = Journal(told.append, lambda: 5)
    journal.unknown(TOPIC, puts(3))
    assert [(part.kind, part.count, "birth" in part.columns) for part in told] == [(Kind.UNKNOWN, 3, True)]


def test_a_folder_is_named_as_hive_reads_it() -> None:
    assert folder_name("jobs/é=1 [x]") == "jobs%2Fé%3D1%20%5Bx%5D"
