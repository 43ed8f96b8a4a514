"""The conformance suite on `memory://`, each check a test of its own: in columns, and by the table alone."""

from __future__ import annotations

import pytest

from timeline.storage_plugins.conformance import CHECKS, run_check
from timeline.storage_plugins.conformance.against_rules import walk
from timeline.storage_plugins.conformance.trial import Trial
from timeline.storage_plugins.memory import MemoryStore


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
async def test_columns(name: str) -> None:
    (await run_check(name, MemoryStore)).raise_failed()


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
async def test_by_the_table_alone(name: str) -> None:
    (await run_check(name, lambda: MemoryStore(fast=False))).raise_failed()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1_000, 1_040))
async def test_many_random_walks(seed: int) -> None:
    async with Trial(MemoryStore) as trial:
        await walk(trial, seed, 200)
        await walk(trial, seed, 200, remember_ms=1_000_000_000, max_deliveries=3)
        await walk(trial, seed, 200, redelivery_backoff_ms=103, max_deliveries=2, dead_retention_ms=2_003)
