"""Histories on disk: what a killed process leaves behind is read, what is damaged is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from timeline.clock import Clock
from timeline.history import BadHistory, Event, History, HistoryFile, read_history, read_lines


class Hands:
    """A clock moved by hand, in seconds."""

    def __init__(self) -> None:
        self.at = 5.0

    def clock(self) -> Clock:
        return Clock(lambda: 1_000.0 + self.at, lambda: self.at)


def _write(path: Path) -> None:
    hands = Hands()
    history = HistoryFile(path, "p1", hands.clock())
    call = history.call("put", {"id": "a", "due_ms": 5})
    hands.at += 0.25
    history.answer(call, "ok", {"status": "OK", "version": 1})
    many = history.call("cancel", [{"id": "a"}, {"id": "b"}])
    history.answer(many, ["ok", "fail"], [{"status": "OK"}, {"status": "NOT_FOUND"}])
    history.note("receive", {"id": "é"})
    history.call("move", {"id": "c"})
    history.close()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    _write(tmp_path / "h")
    events = read_history([tmp_path / "h"])
    assert [(event.operation, event.arguments["id"], event.outcome) for event in events] == [
        ("put", "a", "ok"),
        ("cancel", "a", "ok"),
        ("cancel", "b", "fail"),
        ("receive", "é", "ok"),
        ("move", "c", "unknown"),
    ]
    put = events[0]
    assert (put.invoked, put.returned, put.wall_ms) == (5_000.0, 5_250.0, 1_005_000.0)
    assert events[2].result == {"status": "NOT_FOUND"}
    assert events[-1].returned == float("inf") and events[-1].may_have_happened and not events[-1].happened


def test_the_same_events_in_memory(tmp_path: Path) -> None:
    hands = Hands()
    history = History("p1", hands.clock())
    call = history.call("put", {"id": "a"})
    history.note("receive", {"id": "a"})
    history.answer(call, "ok", {"status": "OK"})
    again = list(read_lines(event.as_line() for event in history.events))
    assert [event.as_line() for event in again] == [event.as_line() for event in history.events]


def test_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    _write(tmp_path / "h")
    whole = (tmp_path / "h").read_bytes()
    full = read_history([tmp_path / "h"])
    (tmp_path / "h").write_bytes(whole[:-7])
    assert len(read_history([tmp_path / "h"])) == len(full) - 1


def test_damage_in_the_middle_is_refused_with_its_place() -> None:
    good = Event("p", "put", {"id": "a"}, 1.0, 2.0).as_line()
    with pytest.raises(BadHistory, match="history:2 is no JSON"):
        list(read_lines([good, good[:10], good]))
    with pytest.raises(BadHistory, match="answers call 9"):
        list(read_lines(['{"call":9,"outcome":"ok","returned":1}']))


@pytest.mark.slow
def test_a_killed_process_leaves_each_call_it_started(tmp_path: Path) -> None:
    code = f"""
import os, signal
from timeline.clock import Clock
from timeline.history import HistoryFile
history = HistoryFile({str(tmp_path / "h")!r}, "p", Clock())
call = history.call("put", {{"id": "a"}})
history.answer(call, "ok", {{"status": "OK"}})
history.call("put", {{"id": "b"}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code])
    assert done.returncode == -9
    events = read_history([tmp_path / "h"])
    assert [(event.arguments["id"], event.outcome) for event in events] == [("a", "ok"), ("b", "unknown")]


def test_histories_of_several_processes_are_merged_by_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        _write(tmp_path / name)
    events = read_history([tmp_path / "one", tmp_path / "two"])
    assert [event.invoked for event in events] == sorted(event.invoked for event in events)
    assert [event.number for event in events] == list(range(len(events)))
