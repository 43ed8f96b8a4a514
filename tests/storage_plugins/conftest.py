"""What every test of a store finds: `cockroachdb://` speaks to its stand-in, unless a real one is there."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def cockroachdb_stands_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tests that ask servers."""
    if request.node.get_closest_marker("servers") is None:
        return
    from tests.storage_plugins import cockroach_stand_in

    if not os.environ.get(cockroach_stand_in.REAL):
        store = cockroach_stand_in.StandInStore
        monkeypatch.setattr("timeline.storage_plugins.cockroachdb.CockroachStore", store)
