"""Membership through three members of etcd, some of which die, stop, come back, or lose everything."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.etcd import EtcdClusterServer, EtcdServer
from tests.services import require_service
from tests.sync.etcd_brokers import every, joined, told
from timeline.sync import JoinState

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdClusterServer]:
    """Three members for this module; a test that harms one mends it."""
    require_service("etcd_cluster")
    cluster = EtcdClusterServer(tmp_path_factory.mktemp("etcd")).start()
    try:
        yield cluster
    finally:
        cluster.kill()


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
async def test_each_member_may_die_or_stop(cluster: EtcdClusterServer, harm: signal.Signals) -> None:
    """Whichever it is: brokers turn to another one, and hear of each other."""
    url = f"{cluster.url}/{harm.name}"
    async with joined(url, "b1", "b2") as (one, two):
        for member in cluster.members:
            member.signal(harm)
            try:
                await told(one, two)
                await told(two, one)
                await every([one, two], lambda b: b.membership.state.join_state is JoinState.JOINED, "joined")
                assert one.names() == two.names() == ["b1", "b2"]
            finally:
                if harm is signal.SIGSTOP:
                    member.signal(signal.SIGCONT)
                else:
                    member.kill()
                    await asyncio.to_thread(member.start)
            await asyncio.to_thread(member.await_ready)


async def test_without_a_quorum_all_stays_as_it_was_and_comes_back(cluster: EtcdClusterServer) -> None:
    async with joined(f"{cluster.url}/quorum?ttl=3s", "b1", "b2") as (one, two):
        owners = one.owners()
        for member in cluster.members[:2]:
            member.kill()
        await every([one, two], lambda b: b.membership.state.join_state is JoinState.FROZEN, "frozen")
        assert one.membership.state.reason and one.names() == two.names() == ["b1", "b2"]
        assert one.owners() == two.owners() == owners
        one.membership.host(8, "arrivals", [b"x"])
        one.membership.topics_changed()
        assert one.membership.buckets(8, 64) is None  # what it hosts itself it knows
        seen = len(one.seen), len(two.seen)
        two.changes = type(two.changes)(0)
        for member in cluster.members[:2]:
            member.launch()
        await asyncio.to_thread(cluster.start)
        await every([one, two], lambda b: b.membership.state.join_state is JoinState.JOINED, "joined")
        await two.until(lambda: two.membership.hosting(8) == {"b1": 1}, "what was hosted meanwhile")
        await two.until(lambda: "TOPICS" in str(two.changes), "topics that changed meanwhile")
        for broker, before in zip((one, two), seen, strict=True):
            assert all(names == ["b1", "b2"] for names in broker.seen[before:])
        assert one.owners() == two.owners() == owners


async def test_an_etcd_that_lost_everything_is_filled_again(tmp_path: Path) -> None:
    require_service("etcd")
    etcd = EtcdServer(tmp_path).start()
    try:
        async with joined(f"{etcd.url}/p?ttl=3s", "b1", "b2", "b3") as brokers:
            owners = brokers[0].owners()
            etcd.kill()
            await every(brokers, lambda b: b.membership.state.join_state is JoinState.FROZEN, "frozen")
            seen = [len(broker.seen) for broker in brokers]
            etcd.empty()
            await asyncio.to_thread(etcd.start)
            await every(brokers, lambda b: b.membership.state.join_state is JoinState.JOINED, "joined")
            for name in ("b1", "b2", "b3"):
                await brokers[0].until(
                    lambda name=name: f"brokers/{name}" in etcd.etcdctl("get", "--prefix", "/p/"), name
                )  # type: ignore[misc]
            await told(brokers[0], *brokers[1:])
            for broker, before in zip(brokers, seen, strict=True):
                # A broker's entry is back a moment before what it hosts.
                await broker.until(lambda at=broker: at.owners() == owners, "the same owners")  # type: ignore[misc]
                assert all(len(names) == 3 for names in broker.seen[before:]), broker.seen[before:]
    finally:
        etcd.kill()


async def test_a_broker_of_another_store_never_takes_an_emptied_etcd_over(tmp_path: Path) -> None:
    """Two clusters under one prefix: whoever comes first after etcd lost everything has it; the other says so, and goes
    on with what it believed."""
    require_service("etcd")
    etcd = EtcdServer(tmp_path).start()
    try:
        async with joined(f"{etcd.url}/p?ttl=3s", "b1", "b2") as (one, two):
            etcd.kill()
            etcd.empty()
            await asyncio.to_thread(etcd.start)
            await every([one, two], lambda b: b.membership.state.join_state is JoinState.JOINED, "joined")
            etcd.etcdctl("put", "/p/cluster", '{"format": 1, "cluster": "another", "by": "x"}')
            etcd.etcdctl("del", "/p/brokers/b1")
            await one.until(lambda: one.membership.state.join_state is JoinState.REFUSED, "refused")
            assert "have another store (cluster another)" in one.membership.state.reason
            assert one.owners() == ["b1" if name == "b1" else "b2" for name in one.owners()]
    finally:
        etcd.kill()
