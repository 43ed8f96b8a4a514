"""`timeline bench` alone: every scenario in one invocation; and the plots."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from timeline.bench.figures import BenchReport
from timeline.bench.plots import Curves, cost_by_number, draw, lateness_by_pending, rate_by_batch
from timeline.bench.scenarios.throughput import CycleScenario
from timeline.bench.suite import FULL, QUICK, SQLITE, SuiteEntry, compare, compare_pending, entries, run_entry
from timeline.cli.app import run
from timeline.cli.bench import run_suite


def late(pending: int, p99_ms: float, in_zero: bool = False) -> BenchReport:
    settings = {"in_zero": in_zero, "lease_ahead": "auto", "pending": pending}
    return BenchReport(
        "lateness", settings, {"lateness_p50_ms": 1.0, "lateness_p99_ms": p99_ms, "lateness_p99_9_ms": 9.0}
    )


def test_the_suite_holds_every_scenario_at_both_sizes() -> None:
    kinds = {"cycle", "produce", "lateness", "loop", "burst", "payload", "cancel-tag", "restart", "memory"}
    kinds |= {"http", "schedules", "webhook"}
    assert {entry.asked.name for entry in FULL} == kinds
    assert [type(entry.asked) for entry in FULL] == [type(entry.asked) for entry in QUICK]
    assert len({entry.title for entry in FULL}) == len(FULL)
    assert {entry.asked.pending for entry in FULL if entry.title.startswith("lateness")} == {0, 10**6, 10**7}
    assert any(entry.peer for entry in FULL)
    assert {"cycle", "lateness"} == {entry.asked.name for entry in FULL if entry.bare}


def test_lateness_with_others_pending_is_held_against_that_with_none() -> None:
    none, many, other = late(0, 2.0), late(1_000_000, 3.0), late(0, 50.0, in_zero=True)
    compare_pending([none, many, other])
    compare_pending([none, many, other])
    assert many.figures["times_none_lateness_p99_ms"] == 1.5
    held = {target.figure: target.held(many.figures[target.figure]) for target in many.targets}
    assert held == {"times_none_lateness_p50_ms": True, "times_none_lateness_p99_ms": False}
    assert len(many.targets) == 2
    assert not none.targets and not other.targets


@pytest.mark.parametrize(
    ("change", "held"), [({}, True), ({"api": "object"}, None), ({"store": SQLITE}, None), ({"pending": 5}, None)]
)
def test_a_cycle_in_memory_is_to_be_five_times_as_fast_as_its_peer(
    change: dict[str, object], held: bool | None
) -> None:
    settings = {"api": "list", "store": "memory://", "pending": 0, "messages": 1} | change
    report = BenchReport("cycle", settings, {"rate_per_s": 60.0})
    report.beside = [BenchReport(f"beanstalkd {kind}", {}, {"rate_per_s": 10.0}) for kind in ("memory", "binlog")]
    compare(report)
    assert report.figures["times_beanstalkd_memory"] == 6.0
    told = {target.figure: target.held(report.figures[target.figure]) for target in report.targets}
    assert told == ({} if held is None else {"times_beanstalkd_memory": held})


def test_plots_are_not_begun_without_what_draws_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("timeline.cli.bench.rate_by_batch", None)  # nothing is measured
    assert run(["bench", "plot", "--into", str(tmp_path)]) == 4
    assert "pip install 'timeline-scheduler[plots]'" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.prove
async def test_an_entry_runs_with_what_is_to_stand_beside_it(tmp_path: Path) -> None:
    entry = SuiteEntry(CycleScenario(store=SQLITE, messages=2_000, batch=500), bare=True)
    report = await run_entry(entry, tmp_path)
    assert report.scenario == "cycle, SQLite"
    assert report.figures["times_bare_store"] > 0
    assert not report.wrong


@pytest.mark.processes
@pytest.mark.prove
def test_a_suite_is_told_as_one_and_ends_well(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    small = [entry for entry in entries(0.001, 0.3, 1, 2_000) if not entry.peer and entry.title.startswith("burst")]
    assert run_suite(small, as_json=False, folder=tmp_path) == 0
    told = capsys.readouterr()
    assert "burst, SQLite" in told.out and "burst, memory …" in told.err
    assert list(tmp_path.iterdir()) == [], "what a scenario left is gone"


def test_options_of_the_suite_do_not_go_before_a_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--quick", "cycle"]) == 2
    assert "behind the scenario" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.prove
async def test_curves_come_from_runs_that_were_right(tmp_path: Path) -> None:
    lateness = await lateness_by_pending(tmp_path, seconds=0.2, pending=(0, 1_000))
    assert set(lateness.curves) == {"p50", "p99", "p99.9"}
    assert [x for x, _ in lateness.curves["p50"]] == [0, 1_000]
    rates = await rate_by_batch(tmp_path, messages=2_000, batches=(100,))
    assert set(rates.curves) == {"memory", "SQLite"}
    costs = await cost_by_number(tmp_path, 0.2, {"pending": (1_000,), "topics": (1, 3), "consumers": (2,)})
    assert {of: [x for x, _ in points] for of, points in costs.curves.items()} == {
        "pending": [1_000], "topics": [1, 3], "consumers": [2],
    }  # fmt: skip
    assert not [*tmp_path.glob("*.db*")], "what was measured is removed"


@pytest.mark.slow
def test_a_picture_names_its_points_and_is_the_same_each_time(tmp_path: Path) -> None:
    curves = Curves("Lateness", "messages pending", "ms late", none=10.0)
    for pending, ms in ((0, 1.0), (1_000, 2.0)):
        curves.add("p50", pending, ms)
    draw(curves, tmp_path / "one.svg")
    draw(curves, tmp_path / "two.svg")
    drawn = (tmp_path / "one.svg").read_text()
    assert drawn == (tmp_path / "two.svg").read_text()
    assert not re.search(r"/(home|root|tmp)/", drawn)
    assert "messages pending" in drawn
