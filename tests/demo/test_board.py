"""The picture that histories give, the board that shows it, and the plain lines."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.demo.staged import StagedDay
from timeline.cli.output import Screen
from timeline.demo.board import BoardWatcher, LineWatcher, draw, shown, watcher
from timeline.demo.picture import DayPicture, FlightStage, Tail, percentile
from timeline.demo.plan import HISTORY_SUFFIX, DayPlan
from timeline.demo.summary import Played, summarize, tell
from timeline.history import read_history


def picture_at(plan: DayPlan, folder: Path, share: float) -> tuple[DayPicture, float]:
    """The picture when `share` of a perfect day has gone by, and the real time then."""
    now_ms = plan.begin_ms + share * (plan.last_due_ms + 3_000 - plan.begin_ms)
    StagedDay(plan, folder, until_ms=now_ms).play()
    picture = DayPicture(plan, folder)
    picture.refresh()
    return picture, now_ms


def drawn(picture: DayPicture, now_ms: float, size: tuple[int, int]) -> str:
    out = io.StringIO()
    console = Console(file=out, width=size[0], height=size[1], color_system=None)
    console.print(draw(picture, now_ms, size), height=size[1])
    return out.getvalue()


def test_a_whole_day(plan: DayPlan, tmp_path: Path) -> None:
    picture, _ = picture_at(plan, tmp_path, 1.0)
    cancelled = sum(filing.flight.cancelled for filing in plan.filings)
    assert picture.done
    assert picture.counts["departed"] == len(plan.filings) - cancelled
    assert picture.counts["crashes"] == picture.counts["leases_back"] == 4
    assert all(gate.up and not gate.boarding for gate in picture.gates.values())
    assert {one.stage for one in picture.departures.values()} == {FlightStage.DEPARTED, FlightStage.CANCELLED}


@pytest.mark.slow
def test_reading_on_gives_the_same_as_reading_once(plan: DayPlan, tmp_path: Path) -> None:
    early, late = tmp_path / "early", tmp_path / "late"
    early.mkdir(), late.mkdir()
    StagedDay(plan, late).play()
    growing = DayPicture(plan, early)
    lines = sorted(
        ((path.name, line) for path in late.glob(f"*{HISTORY_SUFFIX}") for line in path.read_bytes().splitlines(True)),
        key=lambda one: json.loads(one[1]).get("returned") or json.loads(one[1])["invoked"],
    )
    for number, (name, line) in enumerate(lines):
        with (early / name).open("ab") as file:
            # A line is often seen before its end is there.
            file.write(line[:10])
            file.flush()
            if number % 7 == 0:
                growing.refresh()
            file.write(line[10:])
    growing.refresh()
    once = DayPicture(plan, late)
    once.refresh()
    assert growing.counts == once.counts
    assert growing.departures == once.departures
    assert growing.lateness() == once.lateness()


@pytest.mark.slow
@pytest.mark.parametrize("size", [(76, 20), (80, 24), (103, 30), (104, 30), (160, 50), (220, 70)])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_the_board_fits_every_terminal(plan: DayPlan, tmp_path: Path, size: tuple[int, int], share: float) -> None:
    picture, now_ms = picture_at(plan, tmp_path, share)
    lines = drawn(picture, now_ms, size).splitlines()
    assert len(lines) == size[1]
    assert max(map(len, lines)) <= size[0]
    text = "\n".join(lines)
    for word in ("DEPARTURES", "Next departures", "What happens", "Gates", "p50", "p99", "put", "cancelled"):
        assert word in text


def test_the_board_shows_what_happens(plan: DayPlan, tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    whole.mkdir(), part.mkdir()
    StagedDay(plan, whole).play()
    crash = next(event for event in read_history([whole / f"gate-2{HISTORY_SUFFIX}"]) if event.operation == "fault")
    until_ms = crash.wall_ms + 500.0
    StagedDay(plan, part, until_ms=until_ms).play()
    picture = DayPicture(plan, part)
    picture.refresh()
    text = drawn(picture, until_ms, (120, 40))
    assert "CRASHED, holds 1" in text
    assert "LEASE RUNS OUT" in text
    assert "Gate 2 crashes with" in text
    assert f" {plan.clock.text(plan.clock.day(until_ms))} " in text


@pytest.mark.slow
def test_the_board_shows_the_schedule(plan: DayPlan, tmp_path: Path) -> None:
    assert plan.inspections is not None
    for share, text in ((0.0, " next "), (0.5, " inspected "), (1.0, " inspected ")):
        folder = tmp_path / str(share)
        folder.mkdir()
        picture, now_ms = picture_at(plan, folder, share)
        done = sum(at_ms < now_ms for at_ms in plan.inspections.times)
        line = next(line for line in drawn(picture, now_ms, (120, 40)).splitlines() if "Runway" in line)
        assert f"{done} of {plan.inspections.count}" in line and text in line
    assert (done, picture.inspections_left) == (plan.inspections.count, 0)
    assert "the runway is inspected" in {one.text.partition(",")[0] for one in picture.happenings}


def test_the_day_is_not_done_before_the_last_inspection(plan: DayPlan, tmp_path: Path) -> None:
    StagedDay(plan, tmp_path).play()
    path = tmp_path / f"inspector{HISTORY_SUFFIX}"
    path.write_bytes(b"".join(path.read_bytes().splitlines(True)[:-1]))
    picture = DayPicture(plan, tmp_path)
    picture.refresh()
    assert picture.settled == len(picture.departures) and not picture.done


def test_the_next_departure_stands_before_the_later_ones(plan: DayPlan, tmp_path: Path) -> None:
    picture, now_ms = picture_at(plan, tmp_path, 0.4)
    waiting = [
        one.due_ms for one in shown(picture, now_ms, 30) if one.stage in (FlightStage.ON_TIME, FlightStage.DELAYED)
    ]
    assert waiting == sorted(waiting) and waiting[0] >= now_ms - 1


def test_load_ahead_counts_what_is_on_the_timeline(plan: DayPlan, tmp_path: Path) -> None:
    picture, now_ms = picture_at(plan, tmp_path, 0.4)
    loads = picture.load_ahead(now_ms, 1_000, 1_000)
    waiting = [one for one in picture.departures.values() if one.stage in (FlightStage.ON_TIME, FlightStage.DELAYED)]
    assert sum(loads) == len(waiting) > 0


def test_a_failed_call_is_told(plan: DayPlan, tmp_path: Path) -> None:
    line = {"operation": "move", "arguments": {"id": plan.filings[0].flight.id}, "process": "feeder-1", "invoked": 1.0,
            "returned": 2.0, "wall_ms": 1.0, "outcome": "fail"}  # fmt: skip
    (tmp_path / f"feeder-1{HISTORY_SUFFIX}").write_text(json.dumps(line) + "\n")
    picture = DayPicture(plan, tmp_path)
    picture.refresh()
    assert [one.kind for one in picture.happenings] == ["trouble"]


def test_an_ack_without_an_answer_is_taken_for_done_when_nothing_comes_back(plan: DayPlan, tmp_path: Path) -> None:
    StagedDay(plan, tmp_path).play()
    path = tmp_path / f"gate-3{HISTORY_SUFFIX}"
    lines = path.read_bytes().splitlines(True)
    ack = next(number for number, line in enumerate(lines) if b'"operation":"ack"' in line)
    call = json.loads(lines[ack])
    answer = next(n for n, line in enumerate(lines) if json.loads(line).get("call") == call["call"] and n != ack)
    path.write_bytes(b"".join(line for number, line in enumerate(lines) if number != answer))
    picture = DayPicture(plan, tmp_path)
    picture.refresh()
    left_ms = call["wall_ms"]
    picture.presume(left_ms + plan.lease_ms)
    assert not picture.done
    picture.presume(left_ms + plan.lease_ms + 4_000)
    picture.presume(left_ms + plan.lease_ms + 5_000)
    assert picture.done and picture.settled == len(plan.filings)


def test_a_tail_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "growing"
    tail = Tail(path)
    assert list(tail.lines()) == []
    path.write_bytes(b"one\ntw")
    assert list(tail.lines()) == [b"one"]
    with path.open("ab") as file:
        file.write(b"o\n")
    assert list(tail.lines()) == [b"two"]


def test_plain_lines(plan: DayPlan, tmp_path: Path) -> None:
    picture, now_ms = picture_at(plan, tmp_path, 1.0)
    said: list[str] = []
    lines = LineWatcher(said.append)
    lines.watch(picture, now_ms)
    lines.watch(picture, now_ms + 1)
    assert sum("crashes with" in line for line in said) == 4
    assert f"departed {picture.counts['departed']} of 98; runway inspected 20 times; late by p50 1.0" in said[-1]


def test_a_board_needs_a_terminal_with_room() -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100, height=30)
    small = Console(file=io.StringIO(), force_terminal=True, width=60, height=30)
    pipe = Console(file=io.StringIO(), width=200, height=60)
    for console, board, kind in (
        (terminal, True, BoardWatcher), (terminal, False, LineWatcher), (small, True, LineWatcher),
        (pipe, True, LineWatcher),
    ):  # fmt: skip
        with watcher(board, console, print) as viewer:
            assert isinstance(viewer, kind)


def test_the_terminal_is_itself_again_after_the_board(plan: DayPlan, tmp_path: Path) -> None:
    picture, now_ms = picture_at(plan, tmp_path, 0.5)
    out = io.StringIO()
    with (
        pytest.raises(KeyboardInterrupt),
        BoardWatcher(Console(file=out, force_terminal=True, width=100, height=30)) as board,
    ):
        board.watch(picture, now_ms)
        raise KeyboardInterrupt
    shown_on, shown_off = "\x1b[?1049h", "\x1b[?1049l"
    assert out.getvalue().count(shown_on) == out.getvalue().count(shown_off) == 1


def test_the_end_is_told(plan: DayPlan, tmp_path: Path) -> None:
    StagedDay(plan, tmp_path).play()
    summary = summarize(
        plan, read_history(tmp_path.glob(f"*{HISTORY_SUFFIX}")), [], plan.last_due_ms + 10_000, ["a gate fell"]
    )
    out = io.StringIO()
    tell(Played(summary, plan, tmp_path), Screen(out))
    text = out.getvalue()
    assert text.count("✓") == 8 and "✕" not in text and "[" not in text
    assert "Friday 08 March 2013" in text
    assert "off: a gate fell" in text
    assert plan.inspections is not None
    assert f"the runway was inspected each hour, {plan.inspections.count} times: p50 1.0 ms" in text
    assert "4 gates crashed, 4 leases ran out and came back" in text
    assert str(tmp_path) in text


def test_percentiles() -> None:
    assert [percentile([1.0, 2.0, 3.0, 4.0], share) for share in (0.0, 0.25, 0.5, 0.99, 1.0)] == [1, 1, 2, 4, 4]
    assert percentile([], 0.5) == 0.0
