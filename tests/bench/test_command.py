"""`timeline bench` on the command line."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest

from tests.servers.etcd import EtcdServer
from tests.servers.fixture import Running
from tests.servers.redis import RedisServer
from tests.services import require_service
from timeline.bench.figures import BenchReport
from timeline.bench.scenarios import cluster
from timeline.cli.app import run
from timeline.cli.bench import ended_in_order

SCENARIOS = (
    "cycle",
    "produce",
    "lateness",
    "loop",
    "burst",
    "payload",
    "cancel-tag",
    "restart",
    "memory",
    "scale",
    "schedules",
    "cluster",
    "failover",
)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_each_scenario_explains_itself(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", scenario, "--help"]) == 0
    told = capsys.readouterr().out
    assert "Example:" in told
    assert "--json" in told


def test_a_mistyped_scenario_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "cylce"]) == 2
    assert "Did you mean cycle?" in capsys.readouterr().err


def test_more_tagged_than_pending_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "cancel-tag", "--pending", "10", "--tagged", "11"]) == 2
    assert "--tagged is at most --pending" in capsys.readouterr().err


def test_several_brokers_need_a_store_that_they_share(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "cluster", "--store", "memory://", "--sync", "etcd://nowhere"]) == 4
    assert "memory:// is a store of one broker" in capsys.readouterr().err


def test_servers_that_a_measurement_needs_are_named_when_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert run(["bench", "--brokers", "2"]) == 4
    assert "apt-get install etcd-server redis-server" in capsys.readouterr().err


def test_so_many_brokers_are_not_a_quick_suite(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--brokers", "2", "--quick"]) == 2
    assert run(["bench", "--brokers", "2", "cycle"]) == 2
    assert "options go behind the scenario" in capsys.readouterr().err


LITTLE = ["--messages", "4000", "--burst", "2000", "--rate", "200", "--seconds", "1", "--rest-seconds", "0.1"]


@pytest.mark.processes
@pytest.mark.prove
def test_two_brokers_are_measured_together(
    servers: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "SETTLED_S", 0.0)
    where = ["--store", servers.url(RedisServer), "--sync", f"{servers.url(EtcdServer)}/bench"]
    assert run(["bench", "cluster", *where, *LITTLE, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["settings"]["brokers"] == 2 and told["wrong"] == []
    assert told["figures"]["rate_per_s"] > 0 and 0 <= told["figures"]["store_and_rest_share"] <= 1
    assert told["figures"]["etcd_puts_per_hour"] >= 0 < told["figures"]["etcd_client_bytes_per_hour"]
    assert told["figures"]["burst_first_late_ms"] >= 0 and told["figures"]["lateness_min_ms"] >= 0


@pytest.mark.processes
@pytest.mark.prove
def test_workers_are_measured_on_a_store_of_the_measurements_own(capsys: pytest.CaptureFixture[str]) -> None:
    require_service("redis")
    assert run(["bench", "cluster", "--workers", *LITTLE, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["settings"]["workers"] and told["settings"]["store"].startswith("redis://127.0.0.1:")
    assert told["figures"]["rate_per_s"] > 0 < told["figures"]["brokers_cpu_us_per_message"]
    assert told["wrong"] == []


@pytest.mark.processes
def test_json_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "cycle", "--messages", "2000", "--batch", "500", "--bare", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["scenario"] == "cycle"
    assert told["settings"]["messages"] == 2000
    assert told["figures"]["times_bare_store"] > 0
    assert told["machine"]["cores"] >= 1
    assert [other["scenario"] for other in told["beside"]] == ["bare store"]


@pytest.mark.processes
@pytest.mark.prove
def test_a_lateness_stands_beside_a_bare_push(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "lateness", "--seconds", "0.3", "--runs", "1", "--bare", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (beside,) = told["beside"]
    assert beside["scenario"] == "bare push"
    ours, theirs = (one["figures"]["lateness_p99_ms"] for one in (told, beside))
    assert told["figures"]["times_bare_push_lateness_p99_ms"] == pytest.approx(ours / theirs, rel=0.01)


@pytest.mark.processes
@pytest.mark.prove
def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "cycle", "--store", "sqlite://", "--messages", "1000", "--batch", "500"]) == 0
    told = capsys.readouterr().out
    assert "rate_per_s" in told
    assert "≥ 40,000" in told


@pytest.mark.processes
def test_a_store_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "cycle", "--store", "sqllite:///x", "--messages", "10"]) == 2
    assert "sqlite" in capsys.readouterr().err


def test_sigterm_ends_a_measurement_in_order() -> None:
    ended: list[str] = []

    async def measure() -> BenchReport:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            ended.append("in order")
        raise AssertionError("it was not interrupted")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(ended_in_order(measure()))
    assert ended == ["in order"]


@pytest.mark.processes
@pytest.mark.prove
def test_buckets_of_a_broker_that_is_killed_are_delivered_again(
    servers: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--store", servers.url(RedisServer), "--sync", f"{servers.url(EtcdServer)}/failover"]
    little = ["--brokers", "2", "--rate", "200", "--before-s", "2", "--after-s", "8"]
    assert run(["bench", "failover", *where, *little, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["wrong"] == [] and told["figures"]["buckets_of_the_killed"] > 0
    assert 0 < told["figures"]["delivered_again_first_s"] <= told["figures"]["delivered_again_s"]
