"""What the benchmarks' tests have in common."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store of each kind, empty."""
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'bench.db'}"
