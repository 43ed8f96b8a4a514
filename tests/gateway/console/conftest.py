"""A broker and a gateway whose console has something to see, for each module."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest

import timeline
from tests.gateway.conftest import Site
from tests.gateway.console.stage import Console, Visitor, chromium, fill, window
from tests.gateway.processes import broker, gateway


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder: Path = tmp_path_factory.mktemp("console")
    with broker(folder) as served, gateway(folder, served["listen"]) as opened:
        asyncio.run(_fill(served["listen"]))
        yield Site(served["listen"], f"http://{opened['listen']}", opened["log"], opened["process"])


async def _fill(address: str) -> None:
    async with timeline.connect(address) as tl:
        await fill(tl)


@pytest.fixture
async def console(stage: Site) -> AsyncIterator[Console]:
    async with httpx.AsyncClient(base_url=stage.url, timeout=60) as http:
        yield Console(http)


@pytest.fixture
async def tl(stage: Site) -> AsyncIterator[timeline.Timeline]:
    async with timeline.connect(stage.broker) as client:
        yield client


@pytest.fixture
async def visitor(stage: Site, require_service: Callable[[str], None]) -> AsyncIterator[Visitor]:
    """A window of a browser, which had nothing to complain about in the end."""
    require_service("chromium")
    async with chromium() as browser, window(browser, stage.url) as visitor:
        yield visitor
        assert visitor.troubles == []
