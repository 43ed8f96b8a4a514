"""A broker and a gateway for each module, and a client of HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

import timeline
from tests.gateway.processes import broker, gateway


@dataclass
class Site:
    """A broker and its gateway."""

    broker: str
    url: str
    log: Path
    process: Any


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with broker(folder) as served, gateway(folder, served["listen"]) as opened:
        asyncio.run(_topics(served["listen"]))
        yield Site(served["listen"], f"http://{opened['listen']}", opened["log"], opened["process"])


async def _topics(address: str) -> None:
    async with timeline.connect(address) as tl:
        await tl.create_topic("departures")
        await tl.create_topic("remembering", remember="1h")


@pytest.fixture
async def http(site: Site) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=site.url, timeout=60) as client:
        yield client


@pytest.fixture
async def tl(site: Site) -> AsyncIterator[timeline.Timeline]:
    async with timeline.connect(site.broker) as client:
        yield client
