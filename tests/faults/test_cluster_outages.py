"""What brokers lean on goes away under load and comes back: etcd's quorum, its history, all of its data, the store. And
brokers and consumers join in the middle of a burst. Nothing is lost, and delivery goes on, or goes on again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.cluster import EVERYTHING, ClusterMachine, judged
from tests.servers.etcd import EtcdClusterServer, EtcdServer
from tests.servers.fixture import Running
from tests.servers.postgresql import PostgresqlServer
from tests.servers.redis import RedisServer
from tests.services import require_service

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

Record = Callable[[str, object], None]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdClusterServer]:
    """Three members of its own."""
    require_service("etcd_cluster")
    cluster = EtcdClusterServer(tmp_path / "etcd")
    try:
        yield cluster.start()
    finally:
        cluster.kill()


@pytest.mark.prove
async def test_etcd_and_the_store_go_away_and_come_back(
    servers: Running, etcd: EtcdClusterServer, tmp_path: Path, record_property: Record
) -> None:
    postgresql = servers.server(PostgresqlServer)
    async with ClusterMachine(tmp_path, f"{postgresql.url}?schema=outages", f"{etcd.url}/outages") as made:
        await made.begin(lease="3s", rate=600, remember="1h")

        made.note("no quorum", process="etcd")
        for member in etcd.members[:2]:
            member.kill()
        await made.believed("b1", 3, "frozen")
        await made.work_on()
        for member in etcd.members[:2]:
            member.launch()
        await asyncio.to_thread(etcd.start)
        await made.believed("b1", 3, "joined")

        made.note("compaction", process="etcd")
        revision = etcd.members[0].etcdctl("get", "/", "--write-out=fields").split('"Revision" : ')[1].split()[0]
        etcd.members[0].etcdctl("compact", revision)
        await made.work_on()

        made.note("emptied", process="etcd")
        etcd.kill()
        for member in etcd.members:
            member.empty()
        await asyncio.to_thread(etcd.start)
        await made.believed("b1", 3, "joined")
        await made.work_on()

        made.note("crash", process=EVERYTHING)
        postgresql.kill()
        await asyncio.to_thread(postgresql.start)
        made.note("start", process=EVERYTHING)
        await made.work_on()
        await judged(made, record_property)


@pytest.mark.prove
async def test_brokers_and_consumers_join_during_a_burst(
    servers: Running, tmp_path: Path, record_property: Record
) -> None:
    """They deal and receive at once."""
    redis = servers.url(RedisServer).removesuffix("/0")
    store, sync = f"{redis}/4", f"{servers.url(EtcdServer)}/joining"
    async with ClusterMachine(tmp_path, store, sync) as made:
        await made.begin(lease="10s", brokers=1, rate=1_500)
        made.note("join", process="b2")
        await asyncio.gather(made.start_named("b2"), made.start_named("b3"))
        joined = [made.start_consumer(f"c{number}", address=made.places[f"b{number}"]) for number in (2, 3)]
        await asyncio.gather(*joined)
        await made.believed("b1", 3)
        await made.work_on()
        await judged(made, record_property)
        took = [child.told["received"] for child in made.consumers.values()]
        assert min(took) >= 1_000
