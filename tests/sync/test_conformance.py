"""The conformance suite of memberships, each check a test of its own, on `local://` and on a real etcd."""

from __future__ import annotations

import secrets

import pytest

from tests.servers.etcd import EtcdServer
from tests.servers.fixture import Running
from timeline.sync import make_membership
from timeline.sync.conformance import CHECKS, run_check


@pytest.mark.parametrize("name", CHECKS)
async def test_local(name: str) -> None:
    meant = CHECKS[name][1]
    assert await run_check(name, lambda: make_membership("local://"), shared=False) is (meant is not True)


@pytest.mark.servers
@pytest.mark.parametrize("name", [name for name, (_, meant) in CHECKS.items() if meant is not False])
async def test_etcd(servers: Running, name: str) -> None:
    url = f"{servers.url(EtcdServer)}/{secrets.token_hex(6)}?ttl=3s"
    assert await run_check(name, lambda: make_membership(url), shared=True)
