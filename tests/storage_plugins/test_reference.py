"""The conformance suite on the reference store, and on a copy of it, which is how a stranger starts a plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import start
from timeline.storage_plugins import reference
from timeline.storage_plugins.conformance import CHECKS, run_check
from timeline.storage_plugins.conformance.against_rules import walk
from timeline.storage_plugins.conformance.trial import Trial
from timeline.storage_plugins.memory import MemoryStore
from timeline.storage_plugins.reference import ReferenceStore

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
async def test_conformance(name: str) -> None:
    (await run_check(name, ReferenceStore)).raise_failed()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(500)
def test_a_renamed_copy_is_a_plugin_that_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(reference.__file__).read_text(encoding="utf-8")
    (tmp_path / "ledger.py").write_text(source.replace("Reference", "Ledger"), encoding="utf-8")
    installed = tmp_path / "ledger-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: ledger\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[timeline.storage_plugins]\nledger = ledger:LedgerStore\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    checked = start("check-store", "ledger://here")
    out, err = checked.communicate(timeout=480)
    assert checked.returncode == 0, out.decode() + err.decode()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2_000, 2_010))
async def test_columns_agree_with_the_reference_store(seed: int) -> None:
    async with Trial(MemoryStore) as trial:
        await walk(trial, seed, 300, remember_ms=1_000_000_000, redelivery_backoff_ms=103, max_deliveries=2)
