"""The conformance suite on a real `redis://`, each check a test of its own."""

from __future__ import annotations

import pytest

from tests.servers.fixture import Running
from tests.servers.redis import RedisServer
from timeline.storage_plugins import make_store
from timeline.storage_plugins.conformance import CHECKS, run_check

pytestmark = pytest.mark.servers


@pytest.mark.parametrize("name", CHECKS)
async def test_check(servers: Running, name: str) -> None:
    url = servers.url(RedisServer)
    (await run_check(name, lambda: make_store(url))).raise_failed()
