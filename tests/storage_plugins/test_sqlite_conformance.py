"""The conformance suite on `sqlite:///`, each check a test of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from timeline.storage_plugins import make_store
from timeline.storage_plugins.conformance import CHECKS, run_check


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
async def test_check(tmp_path: Path, name: str) -> None:
    (await run_check(name, lambda: make_store(f"sqlite:///{tmp_path}/a.db"))).raise_failed()
