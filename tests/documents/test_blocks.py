"""Every block of code in the documents is executed, in order, against a real broker, or compiled and checked."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import timeline
from tests.documents.pages import DOCS, PAGES, README, REFERENCE, blocks
from tests.documents.stage import Served, Stage, compiled, serving, understand
from timeline import config

EVERY = [*sorted(DOCS.rglob("*.md")), README]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One broker for all pages."""
    with serving(tmp_path_factory.mktemp("documents")) as broker:
        yield broker


@pytest.mark.processes
@pytest.mark.parametrize("page", [*PAGES, README], ids=lambda page: page.stem)
async def test_a_page_runs_as_it_stands(page: Path, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(served.folder)
    monkeypatch.setenv("TIMELINE_ADDRESS", served.listen)
    monkeypatch.delenv("TIMELINE_CONFIG", raising=False)
    async with timeline.connect(served.listen) as tl:
        for topic in await tl.topics():
            await tl.drop_topic(topic.name)
    stage = Stage(served)
    try:
        for block in blocks(page):
            await stage.play(block)
    finally:
        await stage.close()


@pytest.mark.parametrize("page", EVERY, ids=lambda page: page.stem)
def test_python_and_commands_of_every_page_are_well_formed(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            compiled(block)
        elif block.language == "sh":
            understand(block)


def test_the_configuration_file_of_the_reference_is_taken(tmp_path: Path) -> None:
    files = [block for block in blocks(REFERENCE / "serve-settings.md") if block.language == "toml"]
    assert files
    for block in files:
        file = tmp_path / "timeline.toml"
        file.write_text(block.body)
        assert set(tomllib.loads(block.body)) <= set(config.SETTINGS)
        assert config.load(file=file, variables={}).max_inflight_bytes == 128 * config.MIB
