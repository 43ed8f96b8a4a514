"""Clients that generators make of the gateway's own document, each of them through the same scenario."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

import timeline
from tests.gateway.clients.toolkits import BUILT, HERE, go_module, run, typescript_package
from tests.gateway.conftest import Site

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SEEN = """\
create true 30000
put moved OK 1 cancelled OK 1
move OK 2
cancel OK
show NOT_FOUND
lease moved A7 1 true
ack OK NOT_FOUND
put OK
bury OK
dead letter no such gate
revive 1
lease letter hi 1
ack OK
schedule daily 1 0 9 * * * {occurrence}
change 2 2 Europe/Berlin
next 4 true
pause paused
delete 204
"""
"""Every client prints this."""


@pytest.fixture
def document(site: Site, tmp_path: Path) -> Path:
    """The document as the gateway gives it."""
    file = tmp_path / "openapi.json"
    file.write_bytes(httpx.get(f"{site.url}/openapi.json", timeout=60).raise_for_status().content)
    return file


async def is_done(tl: timeline.Timeline, topic: str) -> bool:
    """Return whether the scenario left nothing."""
    return [one async for one in tl.scan(topic)] == [] and [one async for one in tl.dead(topic)] == []


async def test_python_by_openapi_python_client(
    site: Site, document: Path, tmp_path: Path, tl: timeline.Timeline
) -> None:
    generate = ("generate", "--path", document, "--meta", "none", "--output-path", tmp_path / "timeline_client")
    run(tmp_path, sys.executable, "-m", "openapi_python_client", *generate)
    script = (tmp_path / "scenario.py").write_bytes((HERE / "scenario.py").read_bytes())
    assert script and run(tmp_path, sys.executable, "scenario.py", site.url, "python").replace("True", "true") == SEEN
    assert await is_done(tl, "python")


@pytest.mark.prove
async def test_go_by_oapi_codegen(
    site: Site, document: Path, tmp_path: Path, tl: timeline.Timeline, require_service: Callable[[str], None]
) -> None:
    require_service("go_client")
    module = go_module(tmp_path)
    made = run(module, BUILT / "go" / "oapi-codegen", "-generate", "types,client", "-package", "main", document)
    (module / "api.go").write_text(made)
    run(module, "go", "build", "-o", "scenario", ".")
    assert run(module, "./scenario", site.url, "go") == SEEN
    assert await is_done(tl, "go")


@pytest.mark.prove
async def test_typescript_by_openapi_typescript(
    site: Site, document: Path, tmp_path: Path, tl: timeline.Timeline, require_service: Callable[[str], None]
) -> None:
    require_service("typescript_client")
    package = typescript_package(tmp_path)
    binaries = package / "node_modules" / ".bin"
    run(package, binaries / "openapi-typescript", document, "--default-non-nullable=false", "-o", "api.d.ts")
    run(package, binaries / "tsc")
    assert run(package, "node", "out/scenario.js", site.url, "typescript") == SEEN
    assert await is_done(tl, "typescript")
