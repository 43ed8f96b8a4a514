"""Figures, targets, and what the sampled stacks say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from timeline.bench.figures import BenchReport, Target, latencies, machine, worst
from timeline.bench.processes import Hot, Profile, hottest, stalled_s
from timeline.bench.scenarios import holding
from timeline.bench.scenarios.lateness import LATE_ASKED, causes_of
from timeline.broker.limits import Limits
from timeline.cli.bench import tell
from timeline.driver.late import Cause, LateDelivery, LateReport
from timeline.storage_plugins.sqlite import writer


@pytest.mark.parametrize(
    ("target", "value", "held"),
    [
        (Target("rate", 100, least=True), 100, True),
        (Target("rate", 100, least=True), 99.9, False),
        (Target("late", 3), 3, True),
        (Target("late", 3), 3.1, False),
    ],
)
def test_a_target_is_held_or_not(target: Target, value: float, held: bool) -> None:
    assert target.held(value) is held


def test_percentiles() -> None:
    found = latencies([float(value) for value in range(1, 1001)])
    assert found["lateness_min_ms"] == 1
    assert found["lateness_max_ms"] == 1000
    assert found["lateness_p50_ms"] == pytest.approx(500.5)
    assert found["lateness_p99_ms"] == pytest.approx(990, abs=1)
    assert found["lateness_p99_9_ms"] == pytest.approx(999, abs=1)


def test_the_worst_run_counts() -> None:
    assert worst([{"p99": 1.0}, {"p99": 7.0}, {"p99": 3.0}], "p99") == {"p99": 7.0}


def test_causes_are_counted_most_frequent_first_and_what_was_forgotten_too() -> None:
    causes = [Cause.NO_CREDIT, Cause.STORE_SLOW, Cause.STORE_SLOW]
    late = tuple(LateDelivery("t", f"m{at}", "c", 0, 60, cause) for at, cause in enumerate(causes))
    said = "were more than 50 ms late, as the broker explains it: STORE_SLOW 2, NO_CREDIT 1"
    assert causes_of(LateReport(late, 0, ()), 1_000) == [f"3 of 1,000 in all runs {said}"]
    of_many = f"1,203 of 5,000 in all runs {said}, and 1,200 before these"
    assert causes_of(LateReport(late, 1_200, ()), 5_000) == [of_many]
    assert causes_of(LateReport((), 0, ()), 1_000) == []


def test_all_that_a_broker_remembers_is_asked_for() -> None:
    assert Limits().late_kept == LATE_ASKED


@pytest.mark.parametrize(
    ("told", "stalled"),
    [
        ("some avg10=0.1 avg60=0.0 avg300=0.0 total=9\nfull avg10=0.0 avg60=0.0 avg300=0.0 total=2500000\n", 2.5),
        ("some avg10=0.1 avg60=0.0 avg300=0.0 total=9\n", None),
        ("full\n", None),
        ("", None),
    ],
)
def test_how_long_a_machine_waited_for_its_disk(told: str, stalled: float | None) -> None:
    assert stalled_s(told) == stalled


def test_no_call_meets_the_removal_of_the_payload_before() -> None:
    assert holding.REST_S >= 2 * writer.REST_S


def test_a_report_for_machines() -> None:
    target = Target("rate_per_s", 10, least=True)
    peer = BenchReport("peer", {}, {"rate_per_s": 2.0})
    report = BenchReport("cycle", {"messages": 5}, {"rate_per_s": 12.34567}, (target,), beside=[peer])
    told = json.loads(json.dumps(report.as_json()))
    assert told["figures"] == {"rate_per_s": 12.3457}
    assert told["targets"] == [{"figure": "rate_per_s", "bound": 10, "least": True, "held": True}]
    assert told["beside"][0]["scenario"] == "peer"


def test_the_machine_is_said() -> None:
    assert {"cpu", "cores", "load_1min", "python", "system"} <= set(machine())


def test_the_hottest_functions(tmp_path: Path) -> None:
    file = tmp_path / "broker.stacks"
    file.write_text(
        "main (timeline/__main__.py:3);put (/x/lib/python3.11/site-packages/timeline/store.py:10) 6\n"
        "main (timeline/__main__.py:3);put (/x/lib/python3.11/site-packages/timeline/store.py:12) 3\n"
        "main (timeline/__main__.py:4) 1\n"
    )
    first, second = hottest(file)
    assert (first.function, first.own, first.whole) == ("put (timeline/store.py)", 0.9, 0.9)
    assert (second.function, second.own, second.whole) == ("main (timeline/__main__.py)", 0.1, 1.0)


def test_a_process_that_could_not_be_sampled_is_named(tmp_path: Path) -> None:
    profile = Profile(tmp_path, {"broker": [Hot("put (store.py)", 0.5, 0.75)], "client": []})
    assert profile.lines()[0] == "broker: 50.0% own, 75.0% in all: put (store.py)"
    assert profile.lines()[1].startswith("client: py-spy took no samples")


def test_a_report_keeps_passwords_to_itself() -> None:
    asked = {"store": "mysql://timeline:secret@db:3306/t?pool=4", "messages": 5}
    told = BenchReport("cycle", asked, {}).as_json()
    assert told["settings"] == {"store": "mysql://…@db:3306/t", "messages": 5}
    plain = {"store": "sqlite:///t.db?cache_mib=8"}
    assert BenchReport("cycle", plain, {}).as_json()["settings"] == plain


@pytest.mark.parametrize(("load", "rate", "said"), [(10.21, 5.0, True), (0.1, 5.0, False), (10.21, 50.0, False)])
def test_a_target_missed_on_a_busy_machine_says_so(
    capsys: pytest.CaptureFixture[str], load: float, rate: float, said: bool
) -> None:
    report = BenchReport("cycle", {}, {"rate_per_s": rate}, (Target("rate_per_s", 10, least=True),))
    tell(report, {"cores": 2, "load_1min": load})
    told = capsys.readouterr().out
    assert ("MISSED on a machine that was busy: load 10.21 on 2 cores" in told) is said
