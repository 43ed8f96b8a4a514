"""The figures of the performance page are those of the committed results, and say what a result says."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from scripts import performance_page
from timeline.bench.figures import BenchReport, Target, machine
from timeline.bench.suite import FULL, SuiteEntry
from timeline.cli.bench import TOGETHER

COMMIT, DATE = "abcdef0123", "2026-11-25"


def _report(entry: SuiteEntry, **figures: float) -> dict[str, Any]:
    asked = dataclasses.replace(entry.asked, store=entry.asked.store.replace("sqlite://", "sqlite:////srv/me/x.db"))
    targets = tuple(Target(name, value, least=True) for name, value in figures.items())
    store = {"server": "SQLite 3, /srv/me/x.db", "durable": True, "survives_failover": False, "warnings": []}
    report = BenchReport(entry.title, dataclasses.asdict(asked), figures, targets, store=store)
    if entry.peer:
        report.beside = [
            BenchReport(f"{entry.peer} memory", {"store": "memory://"}, {}),
            BenchReport("bare store", {"store": ""}, {}),
        ]
    return report.as_json()


def _shown(*reports: dict[str, Any]) -> str:
    result = {"scenarios": list(reports), "machine": machine()}
    return performance_page.figures(performance_page.recorded({"runs": []}, result, COMMIT, DATE))


def test_the_page_is_current() -> None:
    text, results = performance_page.PAGE.read_text(encoding="utf-8"), performance_page.read()
    assert text.count(performance_page.BEGIN) == text.count(performance_page.END) == 1
    assert text == performance_page.page(text, results), "run: python scripts/performance_page.py"


def test_the_readme_is_current() -> None:
    text, results = performance_page.README.read_text(encoding="utf-8"), performance_page.read()
    assert text.count(performance_page.BEGIN) == text.count(performance_page.END) == 1
    assert text == performance_page.readme(text, results), "run: python scripts/performance_page.py"


def test_every_entry_of_the_suite_has_a_row() -> None:
    shown = _shown(*(_report(entry, rate_per_s=1_234_567.0) for entry in FULL))
    for entry in FULL:
        assert f"| {entry.title} | `{entry.asked.name}" in shown
    assert "1,230,000/s | ≥ 1,230,000/s |" in shown
    assert f"Commit {COMMIT}, {DATE}" in shown
    assert "/srv" not in shown and "x.db" not in shown


def test_a_missed_target_is_in_bold() -> None:
    report = _report(FULL[0], rate_per_s=500.0)
    report["targets"][0] |= {"bound": 600.0, "held": False}
    assert "**500**/s | ≥ 600/s |" in _shown(report)


def test_peers_have_a_row_of_their_own() -> None:
    entry = next(entry for entry in FULL if entry.title == "cycle, memory")
    report = _report(entry, rate_per_s=491_234.0, times_bare_store=0.7012, times_beanstalkd_memory=13.72)
    report["beside"][0] |= {
        "figures": {"rate_per_s": 35_800.0, "lateness_p50_ms": 507.9},
        "notes": ["keeps nothing", "does not: fence", "driven by A; tried: A 2/s"],
    }
    shown = _shown(report)
    assert "| beanstalkd memory | `cycle --messages 1000000 --peer beanstalkd` | 35,800/s, p50 508 ms |  |" in shown
    assert "- *beanstalkd memory, beside cycle, memory*: Keeps nothing. Driven by A.\n" in shown
    assert "| `cycle --messages 1000000` | 491,000/s |" in shown
    assert "`cycle --messages 1000000 --peer beanstalkd --bare` | 13.7 times, 0.701 of the bare store |" in shown


@pytest.mark.parametrize("name", performance_page.scenarios())
def test_a_command_that_is_all_defaults_is_its_name(name: str) -> None:
    kind = performance_page.scenarios()[name]
    asked = {} if kind in TOGETHER else {"store": kind().store}
    settings = dataclasses.asdict(kind(**asked))
    assert performance_page.command({"scenario": name, "settings": settings}) == name


def test_a_result_replaces_the_older_one_of_its_command() -> None:
    result = {**_report(FULL[0], rate_per_s=1.0), "machine": machine()}
    once = performance_page.recorded({"runs": []}, result, "old", DATE)
    suite = performance_page.recorded(once, {"scenarios": [], "machine": machine()}, COMMIT, DATE)
    again = performance_page.recorded(suite, result, "new", DATE)
    assert [run["commit"] for run in again["runs"]] == [COMMIT, "new"]
