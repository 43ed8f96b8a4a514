"""The conformance suite on `cockroachdb://`: on PostgreSQL with SERIALIZABLE transactions in its stead, or, where
TIMELINE_TEST_COCKROACHDB_URL says where one is, on a real CockroachDB."""

from __future__ import annotations

import pytest

from tests.servers.cockroachdb import CockroachServer
from tests.servers.fixture import Running
from tests.storage_plugins.checks import LEFT
from tests.storage_plugins.cockroach_stand_in import RecordedWords, golden, store
from timeline.storage_plugins.conformance import run_check

pytestmark = pytest.mark.servers


@pytest.mark.parametrize("name", LEFT)
async def test_check(servers: Running, name: str) -> None:
    url = servers.url(CockroachServer)
    RecordedWords.emitted.clear()
    (await run_check(name, lambda: store(url))).raise_failed()
    assert RecordedWords.emitted <= golden(), (
        "python -m tests.storage_plugins.cockroach_statements writes the golden file"
    )
