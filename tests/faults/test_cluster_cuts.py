"""Brokers cut off, one way and both, from etcd, from the store and from each other, under load: the network loses their
packets. Needs root; elsewhere it is skipped, or fails where services are required."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.cluster import ClusterMachine, judged
from tests.faults.lan import INWARDS, OUTWARDS, Lan, lan
from tests.servers.etcd import EtcdServer
from tests.servers.process import free_port
from tests.servers.redis import RedisServer
from tests.services import require_service

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.prove]

Record = Callable[[str, object], None]
WAYS = ((INWARDS, OUTWARDS), (OUTWARDS,), (INWARDS,))


@pytest.fixture
def network() -> Iterator[Lan]:
    """Three machines."""
    require_service("netns")
    with lan("b1", "b2", "b3") as made:
        yield made


@pytest.fixture
def redis(network: Lan, tmp_path: Path) -> Iterator[RedisServer]:
    """One that the machines reach."""
    require_service("redis")
    server = RedisServer(tmp_path / "redis", "--bind", "127.0.0.1", network.host, "--protected-mode", "no").start()
    yield server
    server.stop()


@pytest.fixture
def etcd(network: Lan, tmp_path: Path) -> Iterator[EtcdServer]:
    """The same."""
    require_service("etcd")
    server = EtcdServer(tmp_path / "etcd")
    heard = f"http://{network.host}:{server.port}"
    server.settings = ("--listen-client-urls", f"http://{server.endpoint},{heard}", "--advertise-client-urls", heard)
    server.start()
    yield server
    server.stop()


async def _cut(
    made: ClusterMachine, network: Lan, name: str, off: str, port: int | None, ways: tuple[str, ...]
) -> None:
    """The broker `name` is cut off from what is at `port` of the host, or from the other brokers, while the others work
    on; then it works again."""
    made.note("cut", process=name, off=off, ways="+".join(ways))
    if port:
        network.cut(name, network.host, port, ways)
    else:
        for other, address in network.places.items():
            if other != name:
                network.cut(name, address, ways=ways)
    if off == "etcd" and OUTWARDS in ways:
        await made.believed("b2", 2)  # its lease ran out
    else:
        await made.work_on(3_000 if off == "store" else 1_500, each=False)  # longer than until its buckets move
    network.mend(name)
    made.note("mend", process=name)
    await made.work_on()


async def test_brokers_are_cut_off_one_way_and_both(
    network: Lan, redis: RedisServer, etcd: EtcdServer, tmp_path: Path, record_property: Record
) -> None:
    store, sync = f"redis://{network.host}:{redis.port}/0", f"etcd://{network.host}:{etcd.port}/cuts"
    async with ClusterMachine(tmp_path, store, sync) as made:
        made.more = ("--insecure",)
        made.places = {name: f"{address}:{free_port()}" for name, address in network.places.items()}
        made.address = ",".join(made.places.values())
        made.inside = {name: network.inside(name) for name in network.places}
        await made.begin(lease="3s", rate=600, remember="1h")
        for ways in WAYS:
            await _cut(made, network, "b1", "etcd", etcd.port, ways)
            await _cut(made, network, "b3", "store", redis.port, ways)
            await _cut(made, network, "b2", "peers", None, ways)
        await judged(made, record_property)
