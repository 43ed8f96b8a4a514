"""Three real brokers over etcd and one store, under load: killed one after the other and together, stopped past their
lease, restarted in turn. Every promise holds, and each fault shows first that it hit something."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.cluster import ClusterMachine, judged
from tests.servers.etcd import EtcdServer
from tests.servers.fixture import Running
from tests.servers.redis import RedisServer

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

Record = Callable[[str, object], None]


def _apart(servers: Running, number: int) -> tuple[str, str]:
    """A store and a membership that no other test has."""
    redis = servers.url(RedisServer).removesuffix("/0")
    return f"{redis}/{number}", f"{servers.url(EtcdServer)}/faults-{number}"


@pytest.mark.prove
async def test_brokers_are_killed_one_after_the_other_and_all_at_once(
    servers: Running, tmp_path: Path, record_property: Record
) -> None:
    store, sync = _apart(servers, 1)
    async with ClusterMachine(tmp_path, store, sync) as made:
        await made.begin(lease="3s", rate=600)
        for name in list(made.places):
            await made.kill(name)
            await made.work_on()  # without it
            await made.start_named(name)
        await made.work_on()
        await made.kill(*made.places)
        await made.start_all()
        await made.work_on()
        await judged(made, record_property)


@pytest.mark.prove
async def test_a_broker_stopped_past_its_lease_does_not_act_on_what_it_believes(
    servers: Running, tmp_path: Path, record_property: Record
) -> None:
    """What producers had sent it by then waits at its door, and was given up and put through another broker, received
    and settled, when it comes to it: the topic remembers, so that this puts nothing again."""
    store, sync = _apart(servers, 2)
    async with ClusterMachine(tmp_path, store, sync) as made:
        await made.begin(lease="30s", remember="1h")
        made.note("stop", process="b1")
        made.brokers["b1"].signal(signal.SIGSTOP)
        await made.believed("b2", 2)
        made.brokers["b1"].signal(signal.SIGCONT)
        made.note("continue", process="b1")
        await made.believed("b2", 3)
        await made.work_on(2_000)
        await judged(made, record_property)


@pytest.mark.prove
async def test_a_rolling_restart_redelivers_nothing_and_fails_no_call(
    servers: Running, tmp_path: Path, record_property: Record
) -> None:
    """With handlers that take up to five seconds."""
    store, sync = _apart(servers, 3)
    async with ClusterMachine(tmp_path, store, sync) as made:
        await made.begin(lease="10m", handle_ms=5_000)  # however slow the machine, no lease runs out
        for name in list(made.places):
            await made.drain(name)
            await made.work_on()
            await made.start_named(name)
            await made.work_on()
        verdict = await judged(made, record_property)
        assert made.taken_again() == 0
        unwell = {"UNAVAILABLE", "UNKNOWN", "THROTTLED"}
        assert not {status for (_, status), times in verdict.statuses.items() if times} & unwell
