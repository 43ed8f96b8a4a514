"""The conformance suite on a real Cassandra, each check a test of its own."""

from __future__ import annotations

import pytest

from tests.servers.cassandra import CassandraServer
from tests.servers.fixture import Running
from tests.storage_plugins.checks import LEFT
from timeline.storage_plugins import make_store
from timeline.storage_plugins.conformance import run_check

pytestmark = [pytest.mark.servers, pytest.mark.timeout(400)]


@pytest.mark.parametrize("name", LEFT)
async def test_check(servers: Running, name: str) -> None:
    url = servers.url(CassandraServer)
    (await run_check(name, lambda: make_store(url))).raise_failed()
