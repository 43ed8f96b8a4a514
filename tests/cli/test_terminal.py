"""Pictures of numbers, and the line that is drawn while long work goes on."""

from __future__ import annotations

import io
import os
import sys
import termios
from datetime import UTC, datetime

import pytest

from timeline.cli.app import complain
from timeline.cli.look.forecast import DueLoad, _axis, picture
from timeline.cli.options import shown_bytes, zone_of
from timeline.cli.output import Progress, Shortened, bars, fitted, id_cell, nice_step_ms, time_cell, widened
from timeline.clock import Clock
from timeline.driver.times import instant_ms
from timeline.wording import folded, shown_lateness


def test_columns_are_as_high_as_their_share() -> None:
    assert bars([0, 1, 4, 8], 1) == [" ▁▄█"]
    assert bars([0, 8, 16], 2) == ["  █", " ██"]
    assert bars([1, 10_000], 2) == [" █", "▁█"]  # what is there shows, however little
    assert bars([5], 1, top=10) == ["▄"]
    assert bars([0, 0], 2) == ["  ", "  "]
    assert bars([], 3) == ["", "", ""]


@pytest.mark.parametrize(
    ("window_ms", "most", "step_ms"),
    [(3_600_000, 100, 60_000), (3_600_000, 59, 120_000), (60_000, 100, 1_000), (1, 10, 100)],
)
def test_steps_are_round(window_ms: int, most: int, step_ms: int) -> None:
    assert nice_step_ms(window_ms, most) == step_ms
    assert nice_step_ms(10**15, 10) == 10**14


def test_few_counts_are_widened_and_many_added_up() -> None:
    assert widened([1, 2], 5) == [1, 1, 2, 2]
    assert widened([1, 2, 3, 4, 5], 2) == [6, 9]
    assert widened([], 5) == []


def test_a_forecast_names_its_peak() -> None:
    edges_ms = [1_774_767_600_000 + at * 60_000 for at in range(61)]
    load = DueLoad(edges_ms, [0] * 30 + [120] + [60] * 29, 7, True)
    text = "\n".join(line.plain for line in picture("t", load, 60_000, 100, zone_of("Europe/Berlin")))
    assert "t: 1,860 to come until 10:00, 7 due already" in text
    assert "peak        120 in the 1m from 2026-03-29 09:30:00+02:00  (2/s)" in text
    assert "a column is what comes due within 1m; ┬ stands at the time below it, Europe/Berlin" in text
    assert text.count("█") == 8 + 29 * 4
    assert "\n       60 │" in text  # half of the most
    nothing = picture("t", DueLoad(edges_ms, [0] * 60, 0, False), 60_000, 100, zone_of("UTC"))
    assert [line.plain for line in nothing] == ["t: about 0 to come until 08:00"]


@pytest.mark.parametrize(
    ("start", "window_ms", "width", "first", "every"),
    [
        ("2026-03-29T09:00:16", 3_600_000, 72, "09:10", 600_000),
        ("2026-03-29T09:00:16", 60_000, 72, "09:00:20", 10_000),
        ("2026-03-28T18:10:00", 86_400_000, 60, "29 Mar 00:00", 21_600_000),
        ("2026-03-28T18:10:00", 30 * 86_400_000, 72, "02 Apr", 604_800_000),
    ],
)
def test_an_axis_has_round_times_each_under_its_mark(
    start: str, window_ms: int, width: int, first: str, every: int
) -> None:
    zone = zone_of("Europe/Berlin")
    start_ms = instant_ms(datetime.fromisoformat(start).replace(tzinfo=zone))
    line, times = _axis(DueLoad([start_ms, start_ms + window_ms], [1], 0, True), width, zone)
    assert len(line) == width and times.strip().split("   ")[0] == first
    for at, mark in enumerate(line):
        if mark == "┬":
            assert times[at] != " " and (at == 0 or times[at - 1] == " ")
    assert line.count("┬") in (window_ms // every, window_ms // every + 1)
    assert line.index("┬") == times.index(first)


def test_half_of_a_small_odd_number_is_not_named() -> None:
    load = DueLoad([1_774_767_600_000 + at * 60_000 for at in range(11)], [1] * 10, 0, True)
    drawn = [line.plain for line in picture("t", load, 60_000, 80, zone_of("UTC"))]
    assert [line.split()[0] for line in drawn if "│" in line and not line.startswith("          │")] == ["1"]


LATE = ("DELIVERED", "LATE BY", "TOPIC", "ID", "CONSUMER", "WHY")
WAS_LATE = (
    Shortened("2026-11-25 14:02:25.180+00:00", "14:02:25"), "1.23 s", "reminders-of-customers",
    id_cell("01a21303-c54b-70cb-a9a8-b339676711b2"), "worker-host-1234", "a consumer let its lease run out",
)  # fmt: skip


@pytest.mark.parametrize(
    ("room", "kept"),
    [
        (200, LATE),
        (120, LATE),
        (80, ("DELIVERED", "LATE BY", "ID", "WHY")),
        (50, ("LATE BY", "WHY")),
    ],
)
def test_a_table_keeps_the_answer_longest_and_fits(room: int, kept: tuple[str, ...]) -> None:
    texts, widths = fitted(LATE, [WAS_LATE], ("CONSUMER", "TOPIC", "DELIVERED", "ID"), room)
    assert tuple(widths) == kept and sum(widths.values()) + 2 * (len(widths) - 1) <= room
    assert texts["WHY"][1] == WAS_LATE[-1] and widths["WHY"] == len(WAS_LATE[-1])
    short = room < 150
    assert texts["ID"][1] == ("01a21303…11b2" if short else WAS_LATE[3])
    assert texts["DELIVERED"][1] == ("14:02:25" if short else WAS_LATE[0])


def test_what_does_not_fit_is_cut_or_folded_at_its_widest() -> None:
    _, widths = fitted(("NAME", "REASON"), [("a" * 30, "b" * 60)], (), 50)
    assert widths == {"NAME": 24, "REASON": 24}
    assert id_cell("UA1545") == "UA1545" and not hasattr(id_cell("UA1545"), "short")


def test_a_time_is_told_before_its_date() -> None:
    at_ms = instant_ms(datetime(2031, 3, 29, 9, 30, tzinfo=UTC))
    told = time_cell(at_ms, UTC)
    assert told == "2031-03-29 09:30:00+00:00" and isinstance(told, Shortened) and told.short == "09:30:00 2031-03-29"
    today = time_cell(Clock().now_ms())
    assert isinstance(today, Shortened) and len(today.short) in (8, 15)


class Screen(io.StringIO):
    """A terminal that keeps what was written."""

    def isatty(self) -> bool:
        return True


def test_progress_says_how_fast_and_how_long_still() -> None:
    now_ms = [1_000.0]
    clock = Clock(lambda: 0.0, lambda: now_ms[0] / 1000)
    screen = Screen()
    with Progress("moved", 10_000, screen=screen, clock=clock) as progress:
        progress.add(10)
        assert screen.getvalue() == ""  # not for what may be over at once
        now_ms[0] += 1_000
        progress.add(990)
        assert screen.getvalue().endswith("moved 1,000 of 10,000  1,000/s  10%, 9 s left")
        now_ms[0] += 100
        progress.add(1_000)
        assert screen.getvalue().endswith("9 s left")
    assert screen.getvalue().endswith("\r\033[K")
    assert (progress.done, round(progress.rate_per_s)) == (2_000, 1_818)


def test_progress_reckons_with_the_pace_of_late_and_by_parts() -> None:
    now_ms = [0.0]
    screen = Screen()
    progress = Progress("put", screen=screen, clock=Clock(lambda: 0.0, lambda: now_ms[0] / 1000))
    for _ in range(20):  # slow: a percent a second
        now_ms[0] += 1_000
        progress.add(1, (now_ms[0] / 1_000) / 100)
    assert screen.getvalue().endswith("put 20  1/s  20%, 80 s left")
    for at in range(10):  # then two percent a second
        now_ms[0] += 1_000
        progress.add(1, 0.2 + (at + 1) * 0.02)
    assert screen.getvalue().endswith("40%, 30 s left")


def test_nobody_watches_a_pipe() -> None:
    pipe = io.StringIO()
    now_ms = [0.0]
    with Progress("put", 5, screen=pipe, clock=Clock(lambda: 0.0, lambda: now_ms[0] / 1000)) as progress:
        now_ms[0] += 10_000
        progress.add(5)
    assert pipe.getvalue() == "" and not progress.watched


def test_lengths_and_sizes_for_people() -> None:
    shown = {0: "0 ms", 73.4: "73.4 ms", 999: "999 ms", 4_520: "4.52 s", 99_960: "1m 40s", 723_000: "12m 3s"}
    assert {ms: shown_lateness(ms) for ms in shown} == shown
    assert shown_lateness(12_000_000) == "3h 20m" and shown_lateness(86_400_000 * 5 + 7_200_000) == "5d 2h"
    assert [shown_bytes(size) for size in (0, 1_500, 1024, 5 * 1024**2, 1024**3)] == [
        "0B",
        "1500B",
        "1KiB",
        "5MiB",
        "1GiB",
    ]


def test_sentences_are_folded_between_words_and_commands_stay_whole() -> None:
    line = "now  due for 4 s: the broker's topic is paused → 'timeline topic resume reminders' ends it"
    assert folded(line, 40, 5).splitlines() == [
        "now  due for 4 s: the broker's topic is",
        "     paused →",
        "     'timeline topic resume reminders'",
        "     ends it",
    ]
    assert folded("  → fits", 40, 5) == "  → fits" and folded("", 40, 5) == ""
    assert folded("x 'timeline serve --store sqlite:///a.db'", 20, 2) == "x\n  'timeline serve --store sqlite:///a.db'"


def test_a_narrow_terminal_gets_complaints_folded_and_a_file_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    complain("no message has this id: it is gone")
    assert capsys.readouterr().err == "timeline: no message has this id: it is gone\n"
    seen, screen = os.openpty()
    try:
        termios.tcsetwinsize(screen, (24, 30))
        with os.fdopen(screen, "w", closefd=False) as terminal:
            monkeypatch.setattr(sys, "stderr", terminal)
            complain("no message has this id: it is gone")
            monkeypatch.undo()
        shown = os.read(seen, 4096).decode().replace("\r\n", "\n")
    finally:
        os.close(screen)
        os.close(seen)
    assert shown == "timeline: no message has this\n    id: it is gone\n"
