"""`timeline store migrate`: a schema is raised, and the version before left behind."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tests.storage_plugins.test_versions import NEXT
from timeline.storage_plugins import sql


@pytest.mark.slow
def test_migrating(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    known, now = sql.MIGRATIONS, 1 + len(sql.MIGRATIONS)
    then = now + len(NEXT)
    (tmp_path / "a.db").touch()
    fresh = call("store", "migrate", url)
    assert fresh.code == 0 and f"{now}, contracted" in fresh.out, fresh.err
    monkeypatch.setattr(sql, "MIGRATIONS", (*known, *NEXT))
    expanded = call("store", "migrate", url)
    assert expanded.code == 0 and f"{then}, brokers of {now} may share it" in expanded.out
    monkeypatch.setattr("sys.stdin", io.StringIO())
    asked = call("store", "migrate", url, "--contract")
    assert asked.code == 2 and f"Brokers of schema version {now} fail from now on" in asked.err and "--yes" in asked.err
    assert f"{then}, brokers of {now} may share it" in call("store", "migrate", url).out
    contracted = call("store", "migrate", url, "--contract", "--yes", "--json")
    assert contracted.code == 0 and contracted.json[0]["version"] == contracted.json[0]["oldest"] == then
    again = call("store", "migrate", url, "--contract")
    assert again.code == 0 and f"{then}, contracted" in again.out, "there is nothing to ask about"
    monkeypatch.setattr(sql, "MIGRATIONS", known)
    refused = call("store", "migrate", url)
    assert refused.code == 4 and f"which {then} and newer can use" in refused.err
    nothing = call("store", "migrate", "memory://")
    assert nothing.code == 0 and "has no schema" in nothing.out
