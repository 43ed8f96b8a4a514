"""schemathesis asks a running gateway by its own document: every call, every check, no failure."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from tests.documents.pages import ROOT
from tests.gateway.clients import unsaid
from tests.gateway.processes import broker, gateway

pytestmark = [pytest.mark.processes, pytest.mark.slow]

CONFIG = Path(__file__).with_name("schemathesis.toml")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway with the topics that `unsaid` names. It sends no webhooks: generated URLs lead anywhere."""
    folder = tmp_path_factory.mktemp("schemathesis")
    with (
        broker(folder, "--store", "memory://", "--http", "off") as served,
        gateway(folder, served["listen"], "--no-push") as opened,
    ):
        address = f"http://{opened['listen']}"
        for topic in unsaid.TOPICS:
            httpx.put(f"{address}/v1/topics/{topic}", json={}, timeout=60).raise_for_status()
        yield address


PHASES = ("Examples", "Coverage", "Fuzzing", "Stateful")


def ask(url: str, folder: Path, phases: Sequence[str], *more: str) -> None:
    """Run these phases of schemathesis, which must find nothing."""
    environment = os.environ | {"SCHEMATHESIS_HOOKS": unsaid.__name__, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG), "run", f"{url}/openapi.json"]
    done = subprocess.run(
        [*command, "--phases", ",".join(phases).lower(), *more],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout.partition("= FAILURES")[2].partition("= WARNINGS")[0] or done.stdout
    assert "39 selected / 39 total" in done.stdout
    assert all(f"✅  {phase}" in done.stdout for phase in phases)


@pytest.mark.timeout(400)
def test_every_call_passes_all_checks(url: str, tmp_path: Path) -> None:
    ask(url, tmp_path, [phase for phase in PHASES if phase != "Coverage"], "--seed", "28", "--max-examples", "10")


@pytest.mark.prove
@pytest.mark.timeout(1_800)
def test_many_other_calls_pass_all_checks(url: str, tmp_path: Path) -> None:
    ask(url, tmp_path, PHASES, "--max-examples", "200")
