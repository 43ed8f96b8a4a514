"""What carries a journal off: a process that dies, stalls or cannot write; what is missing then is counted and said."""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.broker.journalled import Counts, broker, events, until
from timeline.broker.journal import files
from timeline.broker.journal import pipe as pipes
from timeline.broker.journal.events import EventBatch, EventKind
from timeline.broker.journal.files import NO_TOPIC, Folder, JournalWriter
from timeline.broker.journal.pipe import JournalPipe, JournalProcess
from timeline.columns import Ragged
from timeline.errors import Invalid

pytestmark = pytest.mark.slow
NOW_MS = 1_700_000_000_000


async def started(url: str, name: str = "b") -> tuple[JournalPipe, Counts]:
    """A pipe of a broker whose clock is a millisecond later each time it is asked, and what is counted there."""
    counts = Counts()
    clock = itertools.count(NOW_MS)
    return await JournalPipe.start(url, name, "5e55", lambda: next(clock), counts), counts


def some(count: int, kind: EventKind = EventKind.PUT, time_ms: int = NOW_MS) -> EventBatch:
    return EventBatch(kind, "t", time_ms, count, {"id": Ragged.repeat(b"x" * 20, count)})


async def test_a_journal_that_falls_behind_drops_with_a_counter_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipes, "QUEUE_BYTES", 100_000)
    pipe, counts = await started(f"file://{tmp_path}/j")
    os.kill(pipe.process.pid, signal.SIGSTOP)
    part = some(1_000)
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
    writer = JournalWriter(folder, "b", "5e55", roll_ms=60_000, rows=100)
    for at in range(50):
        for partition in writer._partitions.values():
            partition.not_before_ms = 0.0  # as if the wait were over
        writer.add("put", "t", NOW_MS + at, 20, {"id": (b"x" * 20, np.arange(21))})
    assert max(partition.rows for partition in writer._partitions.values()) < 500
    folder.full = False
    writer.roll(everything=True)
    told = events(tmp_path / "j")
    kept = sum(1 for row in told if row["kind"] == "put")
    dropped = [row for row in told if row["kind"] == "dropped"]
    assert dropped and kept + sum(row["count"] for row in dropped) == 1_000
    assert all(row["due"] <= row["time"] for row in dropped)


async def test_a_process_that_dies_is_started_again_and_what_it_had_is_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipes, "AGAIN_S", 0.01)
    pipe, counts = await started(f"file://{tmp_path}/j?roll=1h&rows=1000", "_b")
    first = pipe.process
    assert b"file://" not in Path(f"/proc/{first.pid}/cmdline").read_bytes(), "what a URL may carry is nobody's to see"
    pipe.carry(some(1_000))
    await until(lambda: first.written)
    for _ in range(3):
        pipe.carry(some(100, time_ms=NOW_MS + 7))
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
    assert gap["due"].timestamp() * 1000 <= NOW_MS + 7 and gap["time"] >= gap["due"]
    names = [path.name for path in (tmp_path / "j").rglob("*.parquet")]
    assert not [name for name in names if name[0] in "_."], "readers take such files for hidden"


async def test_a_process_that_cannot_be_started_again_is_tried_and_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pipes, "AGAIN_S", 0.001)
    start, tries = JournalProcess.start, Counter[int]()

    def refused(url: str, name: str, session: str, run: int, gone: Callable[[], None]) -> JournalProcess:
        tries[run] += 1
        if run and tries[run] < 4:
            raise Invalid("the journal cannot be written: no such place now")
        return start(url, name, session, run, gone)

    monkeypatch.setattr(JournalProcess, "start", refused)
    pipe, counts = await started(f"file://{tmp_path}/j?roll=1h")
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


async def test_what_its_process_has_to_drop_is_counted_once(tmp_path: Path) -> None:
    folder = tmp_path / "j"
    pipe, counts = await started(f"file://{folder}?rows=10")
    folder.rmdir()
    folder.write_text("a place that takes nothing")
    pipe.carry(some(50))
    await until(lambda: counts.of[True] == 50)
    os.kill(pipe.process.pid, signal.SIGKILL)
    await until(lambda: pipe.process.ended)
    folder.unlink()
    await pipe.close(60)
    assert counts.of == {False: 50, True: 50}
    assert [row["count"] for row in events(folder) if row["kind"] == "dropped"] == [50]


async def test_the_process_imports_nothing_from_the_folder_it_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pickle.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    pipe, _ = await started(f"file://{tmp_path}/j")
    await pipe.close(60)


async def test_a_process_that_never_says_that_it_is_ready_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipes, "START_S", 0.0)
    with pytest.raises(Invalid, match="said nothing for 0 s"):
        await started(f"file://{tmp_path}/j")


def test_a_system_that_lets_nobody_step_back_that_far_has_a_journal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("seccomp")

    nice: list[int] = []
    monkeypatch.setattr(os, "sched_setscheduler", refused)
    monkeypatch.setattr(os, "nice", nice.append)
    files._step_back()
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
    told: list[tuple[int, ...]] = []
    writer = JournalWriter(folder, "b", "5e55", 60_000, 100, told=lambda *said: told.append(said))
    writer.add("put", "t", 1_700_000_000_000, 20, {"id": (b"x" * 20, np.arange(21))})
    writer.add("stopped", "", 1_700_000_000_500, 1, {})
    assert writer.close(lambda seconds: None) == 21, "and where not even that can be, that is told"
    assert told[-1] == (0, 1_700_000_000_000, 20, 20)
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
    writer = JournalWriter(Folder(f"file://{tmp_path}/j"), "b", "5e55", roll_ms=60_000, rows=10)
    for at in range(100):
        writer.add("put", f"t{at}", NOW_MS + at, 10, {"id": (b"x" * 10, np.arange(11))})
    assert sum(partition.rows for partition in writer._partitions.values()) < 200
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    monkeypatch.undo()
    writer.roll(everything=True)
    told = events(tmp_path / "j")
    kept = sum(1 for row in told if row["kind"] == "put")
    assert kept + sum(row["count"] for row in told if row["kind"] == "dropped") == 1_000


async def test_what_a_journal_needs_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes, "find_spec", lambda name: None if name == "pyarrow" else name)
    told = r"needs pyarrow, which is not installed: pip install 'timeline-scheduler\[journal\]'"
    with pytest.raises(Invalid, match=told):
        await started("file:///x")
