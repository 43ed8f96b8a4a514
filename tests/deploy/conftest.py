"""One cluster as compose.yaml starts it, and one Prometheus in a hurry beside it, for the tests of test_cluster.py."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.composed import Composed
from tests.faults.faketime import WallClock
from tests.servers.prometheus import PrometheusServer
from tests.services import require_service


@pytest.fixture(scope="module")
def wall() -> Iterator[WallClock]:
    """The clock that broker-2 reads."""
    require_service("faketime")
    with tempfile.TemporaryDirectory(prefix="timeline-") as folder:
        yield WallClock(Path(folder))


@pytest.fixture(scope="module")
def cluster(wall: WallClock) -> Iterator[Composed]:
    """Three etcd, Redis, two brokers, a gateway and Prometheus: all of deploy/compose/redis.env but Grafana."""
    for service in ("etcd", "redis", "prometheus"):
        require_service(service)
    with tempfile.TemporaryDirectory(prefix="timeline-") as folder:
        composed = Composed(Path(folder), "redis")
        try:
            composed.start("etcd-1", "etcd-2", "etcd-3", "redis")
            composed.start("broker-1")
            composed.start("broker-2", more=wall.environment)
            composed.start("gateway")
            composed.start("prometheus")
            yield composed
        finally:
            composed.stop()


@pytest.fixture(scope="module")
def prometheus(cluster: Composed) -> Iterator[PrometheusServer]:
    """Scrapes both brokers and the gateway each second, with the rules that ship."""
    server = PrometheusServer(cluster.folder / "hurried").start()
    try:
        brokers = (f"{cluster.hosts[name]}:9001" for name in ("broker-1", "broker-2"))
        server.scrape(*brokers, f"{cluster.hosts['gateway']}:9080")
        yield server
    finally:
        server.stop()
