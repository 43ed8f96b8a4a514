"""Three real brokers over etcd and one store, under load: killed one after the other and together, stopped past their
lease, restarted in turn. Every promise holds, and each fault shows first that it hit something."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.faults.cluster import ClusterMachine, cluster_machine
from tests.servers.etcd import EtcdServer
from tests.servers.fixture import Running
from tests.servers.redis import RedisServer
from timeline.history import Verdict

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

PUTS = 20_000
OUT = 100


def _apart(servers: Running, number: int) -> tuple[str, str]:
    """A store and a membership that no other test has."""
    redis = servers.url(RedisServer).removesuffix("/0")
    return f"{redis}/{number}", f"{servers.url(EtcdServer)}/faults-{number}"


async def _judged(made: ClusterMachine) -> Verdict:
    """Everything is settled, and the histories hold."""
    await made.enough()
    await made.stop()
    verdict = await made.judge()
    figures = made.figures()
    print(f"\n{verdict.counts}\n{figures}")
    assert verdict.holds, verdict.summary()
    assert verdict.counts["put"] >= PUTS
    assert verdict.counts["early"] == verdict.counts["lost"] == verdict.counts["doubled"] == 0
    for fault in made.faults_noted():
        if fault.arguments["what"] in ("crash", "stop"):
            assert made.leases_out(fault.invoked) >= OUT
    return verdict


async def test_brokers_are_killed_one_after_the_other_and_all_at_once(servers: Running, tmp_path: Path) -> None:
    store, sync = _apart(servers, 1)
    async with cluster_machine(tmp_path, store, sync, lease="3s") as made:
        await made.work_on()
        for name in list(made.places):
            await made.kill(name)
            await made.work_on()  # without it
            await made.start_named(name)
            await made.work_on()
        await made.kill(*made.places)
        await made.start_all()
        await made.work_on()
        await _judged(made)


async def test_a_broker_stopped_past_its_lease_does_not_act_on_what_it_believes(
    servers: Running, tmp_path: Path
) -> None:
    store, sync = _apart(servers, 2)
    async with cluster_machine(tmp_path, store, sync, lease="30s") as made:
        await made.work_on()
        made.note("stop", process="b1")
        made.brokers["b1"].signal(signal.SIGSTOP)
        await made.believed("b2", 2)
        made.brokers["b1"].signal(signal.SIGCONT)
        made.note("continue", process="b1")
        await made.believed("b2", 3)
        await made.work_on(6_000)
        await _judged(made)


async def test_a_rolling_restart_redelivers_nothing_and_fails_no_call(servers: Running, tmp_path: Path) -> None:
    store, sync = _apart(servers, 3)
    async with cluster_machine(tmp_path, store, sync, lease="60s") as made:
        await made.work_on()
        for name in list(made.places):
            await made.drain(name)
            await made.work_on()
            await made.start_named(name)
            await made.work_on()
        verdict = await _judged(made)
        assert made.taken_again() == 0
        unwell = {"UNAVAILABLE", "UNKNOWN", "THROTTLED"}
        assert not {status for (_, status), times in verdict.statuses.items() if times} & unwell
