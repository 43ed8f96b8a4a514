"""Each scenario in small, with real processes: what it measured was right, and it says what it promises to say. How
fast it was is nobody's business here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.services import require_service
from timeline.bench.figures import BenchReport
from timeline.bench.peers import own_servers, trials
from timeline.bench.peers.bare import run_bare, run_bare_push
from timeline.bench.peers.own_servers import WAYS, run_own_server
from timeline.bench.processes import CannotMeasure, disk_stalled_s
from timeline.bench.scenarios.console import ConsoleScenario
from timeline.bench.scenarios.holding import OPERATIONS, MemoryScenario, PayloadScenario, RestartScenario
from timeline.bench.scenarios.http import HttpScenario, WebhookScenario
from timeline.bench.scenarios.lateness import OF, BurstScenario, CancelTagScenario, LatenessScenario, ScaleScenario
from timeline.bench.scenarios.schedules import SchedulesScenario
from timeline.bench.scenarios.throughput import APIS, LOOPS, CycleScenario, LoopScenario, ProduceScenario
from timeline.bench.stores import opened
from timeline.bench.suite import OWN_SERVERS

pytestmark = pytest.mark.processes

LATENESS = {f"lateness_{short}_ms" for short in ("min", "p50", "p99", "p99_9", "max")}


def _well(report: BenchReport, *figures: str) -> None:
    assert report.wrong == []
    assert set(figures) <= set(report.figures)
    assert {target.figure for target in report.targets} <= set(report.figures)
    assert all(value == value for value in report.figures.values())  # no NaN


@pytest.mark.parametrize("api", [APIS[0], *(pytest.param(api, marks=pytest.mark.prove) for api in APIS[1:])])
async def test_cycle(store: str, api: str, tmp_path: Path) -> None:
    asked = CycleScenario(store, api, messages=2_500, batch=400, pending=700, warm_up=300)
    _well(await asked.run(tmp_path), "rate_per_s", "broker_cpu_us_per_message", "client_cpu_us_per_message")


async def test_a_cycle_smaller_than_a_batch(tmp_path: Path) -> None:
    _well(await CycleScenario(messages=1, batch=5_000, warm_up=0).run(tmp_path), "rate_per_s")


@pytest.mark.prove
async def test_bare(store: str) -> None:
    _well(await run_bare(CycleScenario(store, messages=2_500, batch=400, pending=500, warm_up=300)), "rate_per_s")


@pytest.mark.prove
async def test_a_bare_push_is_late_and_never_early(tmp_path: Path) -> None:
    report = await run_bare_push(LatenessScenario(seconds=0.2, runs=2), tmp_path)
    _well(report, *LATENESS, "pusher_cpu_us_per_message")
    assert 0 < report.figures["lateness_min_ms"] <= report.figures["lateness_p50_ms"]


async def test_a_backlog_is_put_before_it_is_taken(store: str, tmp_path: Path) -> None:
    _well(await CycleScenario(store, messages=2_500, batch=400, warm_up=300, backlog=True).run(tmp_path), "rate_per_s")


@pytest.mark.parametrize(("name", "kind"), [(one.name, kind) for one in OWN_SERVERS.values() for kind in one.kinds])
@pytest.mark.prove
async def test_a_peer_that_is_a_server(name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "beanstalkd":
        require_service(name)
    monkeypatch.setattr(trials, "LATE_COUNT", 100)
    monkeypatch.setattr(own_servers, "SYNCED_MESSAGES", 500)
    server = OWN_SERVERS[name]
    report = await run_own_server(server, CycleScenario(messages=6_000, batch=1_000, warm_up=100), kind, tmp_path)
    _well(report, "rate_per_s", *LATENESS)
    worth, less, driven = report.notes
    assert (worth, less) == (server.kinds[kind], server.less)
    assert all(str(way) in driven for way in WAYS)
    assert report.figures["lateness_min_ms"] >= 0, "a delay is rounded up"


@pytest.mark.parametrize("name", OWN_SERVERS)
@pytest.mark.prove
async def test_a_peer_that_is_a_server_takes_a_backlog(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "beanstalkd":
        require_service(name)
    monkeypatch.setattr(trials, "LATE_COUNT", 10)
    asked = CycleScenario(messages=2_000, warm_up=0, backlog=True)
    _well(await run_own_server(OWN_SERVERS[name], asked, "memory", tmp_path), "rate_per_s")


async def test_produce(store: str, tmp_path: Path) -> None:
    _well(await ProduceScenario(store, messages=1_500, tasks=50).run(tmp_path), "rate_per_s", "answer_p99_ms")


@pytest.mark.parametrize(
    ("in_zero", "lease_ahead"),
    [
        (False, "auto"),
        *(pytest.param(*asked, marks=pytest.mark.prove) for asked in ((True, "auto"), (False, "off"), (False, "1s"))),
    ],
)
async def test_lateness(store: str, in_zero: bool, lease_ahead: str, tmp_path: Path) -> None:
    small = LatenessScenario(store, rate=500, seconds=0.4, runs=1, pending=300, lead_ms=200)
    asked = replace(small, in_zero=in_zero, lease_ahead=lease_ahead)
    report = await asked.run(tmp_path)
    _well(report, *LATENESS)
    assert report.figures["messages"] == 200
    assert report.figures["lateness_min_ms"] >= 0
    assert (disk_stalled_s() is not None) is ("disk_stalled_percent" in report.figures)
    assert 0 <= report.figures.get("disk_stalled_percent", 0) <= 100
    bounds = {target.figure: target.bound for target in report.targets}
    commit_ms = report.figures.get("store_commit_ms")
    assert (commit_ms is None) is not (in_zero or lease_ahead == "off")
    assert bounds["lateness_p99_ms"] == (3.0 if commit_ms is None else 3 * commit_ms + 2.0)


@pytest.mark.prove
async def test_what_was_late_is_explained_by_the_broker(tmp_path: Path) -> None:
    put_too_late = LatenessScenario("memory://", rate=500, seconds=0.4, runs=1, lead_ms=-10_000)
    report = await put_too_late.run(tmp_path)
    assert report.figures["lateness_min_ms"] >= 9_000
    said = "200 of 200 in all runs were more than 50 ms late, as the broker explains it: PRODUCED_LATE 200"
    assert report.notes[1:] == [said]


@pytest.mark.prove
async def test_burst(store: str, tmp_path: Path) -> None:
    report = await BurstScenario(store, messages=3_000, credit=1_000).run(tmp_path)
    _well(report, "drained_s", "first_late_ms", *LATENESS)
    assert report.figures["lateness_min_ms"] >= 0


async def test_loop(store: str, tmp_path: Path) -> None:
    report = await LoopScenario(store, messages=250, many=500).run(tmp_path)
    _well(report, *(f"{name}_per_s" for name in LOOPS), *(f"{name}_broker_cpu_us_per_message" for name in LOOPS))


@pytest.mark.prove
async def test_payload(store: str, tmp_path: Path) -> None:
    report = await PayloadScenario(store, large_bytes=300_000, messages=2).run(tmp_path)
    _well(report, *(f"{what}_ratio" for what in OPERATIONS))


@pytest.mark.prove
async def test_cancel_tag(store: str, tmp_path: Path) -> None:
    asked = CancelTagScenario(store, pending=3_000, tagged=1_000, rate=200, seconds=0.5)
    _well(await asked.run(tmp_path), "rate_per_s", "p99_before_ms", "p99_during_ms")


@pytest.mark.prove
async def test_restart(tmp_path: Path) -> None:
    report = await RestartScenario(f"sqlite:///{tmp_path / 'bench.db'}", pending=500, restarts=2).run(tmp_path)
    _well(report, "first_delivery_s", "listening_s")


async def test_a_store_that_keeps_nothing_cannot_restart(tmp_path: Path) -> None:
    with pytest.raises(CannotMeasure, match="keeps nothing"):
        await RestartScenario("memory://").run(tmp_path)


@pytest.mark.prove
async def test_schedules_at_rest_and_beside_ordinary_messages(tmp_path: Path) -> None:
    asked = SchedulesScenario(
        f"sqlite:///{tmp_path / 'bench.db'}", schedules=50, spread=20, seconds=2, moment=30, rest_seconds=0.2
    )
    report = await asked.run(tmp_path)
    _well(report, "start_s", "at_rest_percent", "spread_p50_ratio", "moment_p99_ratio")
    async with opened(asked.store) as store:
        assert not await store.topics(), "what it made is gone again"


@pytest.mark.parametrize("of", OF)
@pytest.mark.prove
async def test_scale(store: str, of: str, tmp_path: Path) -> None:
    asked = ScaleScenario(store, of, 5, rate=300, seconds=0.4, rest_seconds=0.2)
    report = await asked.run(tmp_path)
    _well(report, "broker_cpu_us_per_message", *LATENESS)
    assert report.figures["broker_cpu_us_per_message"] > 0


@pytest.mark.prove
async def test_memory(store: str, tmp_path: Path) -> None:
    _well(await MemoryScenario(store, pending=2_000).run(tmp_path), "broker_resident_mib")


@pytest.mark.prove
async def test_http_beside_grpc(tmp_path: Path) -> None:
    asked = HttpScenario("memory://", messages=300, batched=2_000, tasks=8, rate=200, seconds=0.5)
    report = await asked.run(tmp_path)
    _well(
        report,
        "put_grpc_per_s",
        "put_http_per_s",
        "batch_grpc_per_s",
        "batch_http_per_s",
        "poll_p99_ms",
        "grpc_p99_ratio",
    )
    assert report.figures["messages"] == 100 and report.figures["poll_min_ms"] >= 0


@pytest.mark.prove
async def test_webhooks(tmp_path: Path) -> None:
    report = await WebhookScenario("memory://", rate=200, seconds=0.5, backlog=300).run(tmp_path)
    _well(report, "webhook_p50_ms", "webhook_p99_ms", "backlog_per_s")
    assert report.figures["webhook_min_ms"] >= 0


@pytest.mark.prove
async def test_the_console(tmp_path: Path) -> None:
    asked = ConsoleScenario("memory://", pending=300, dead=50, people=2, rate=100, seconds=0.5)
    report = await asked.run(tmp_path)
    _well(report, "overview_p50_ms", "page_max_ms", "gateway_us_per_page", "late_p99_ratio", "gateway_grown_mib")
    assert report.figures["page_max_ms"] >= report.figures["letters_p50_ms"] > 0
