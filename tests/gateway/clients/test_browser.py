"""Debian's Chromium reads the stream with the scripts of docs/http.md, as they stand there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import timeline
from tests.documents.pages import DOCS, blocks
from tests.gateway.processes import broker, gateway
from tests.gateway.push.receiver import Receiver
from tests.security.guarded import Tokens
from timeline.model import State

pytestmark = [pytest.mark.processes, pytest.mark.slow]

EVENT_SOURCE, FETCHED = (block.body for block in blocks(DOCS / "http.md") if block.language == "js")
TOLD = """
const tell = (...words) => fetch("/told", { method: "POST", body: JSON.stringify(words) });
console.log = tell;
addEventListener("error", (event) => tell("error", event.message));
addEventListener("unhandledrejection", (event) => tell("error", `${event.reason}`));
"""


class Visited:
    """The site that the browser visits, of an origin of its own. Its page tells what its script prints."""

    def __init__(self) -> None:
        self.script = ""
        self._told: asyncio.Queue[list[Any]] = asyncio.Queue()
        self.server = Receiver(self._answer)

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def told(self) -> list[Any]:
        async with asyncio.timeout(90):
            return await self._told.get()

    async def _answer(self, request: web.Request, body: bytes) -> web.StreamResponse:
        if request.path == "/told":
            self._told.put_nowait(json.loads(body))
        if request.path != "/":
            return web.Response(text="")
        page = f"<!doctype html><title>stream</title><script type=module>{TOLD}{self.script}</script>"
        return web.Response(text=page, content_type="text/html")


@pytest.fixture
async def visited(require_service: Callable[[str], None]) -> AsyncIterator[Visited]:
    require_service("chromium")
    visited = Visited()
    await visited.server.start()
    yield visited
    await visited.server.stop()


@asynccontextmanager
async def chromium(folder: Path, url: str) -> AsyncIterator[None]:
    """Show a page. The browser reaches nobody but this machine."""
    flags = (
        "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={folder / 'profile'}",
    )  # fmt: skip
    with (folder / "chromium.log").open("wb") as log:
        started = await asyncio.create_subprocess_exec("chromium", *flags, url, stdout=log, stderr=log)
    try:
        yield
    finally:
        started.terminate()
        await started.wait()


async def put(tl: timeline.Timeline, *ids: str) -> None:
    await tl.create_topic("mails", lease="5m")
    async with tl.producer("mails") as producer:
        for id in ids:
            await producer.produce(
                json.dumps({"to": id}).encode(), in_=0, id=id, headers={"content-type": "application/json"}
            )


async def test_an_event_source_reads_acks_and_connects_again(tmp_path: Path, visited: Visited) -> None:
    with broker(tmp_path, "--http", "off") as served:
        async with timeline.connect(served["listen"]) as tl:
            with gateway(tmp_path, served["listen"], "--origin", visited.origin) as opened:
                await put(tl, "ada", "bob", "eve")
                visited.script = EVENT_SOURCE.replace("localhost:9080", opened["listen"]).replace(
                    "credit=10", "credit=1"
                )
                async with chromium(tmp_path, visited.origin):
                    seen = [await visited.told() for _ in range(3)]
                    assert sorted(seen) == [["ada", {"to": "ada"}], ["bob", {"to": "bob"}], ["eve", {"to": "eve"}]]
                    while [one async for one in tl.scan("mails")]:
                        await asyncio.sleep(0)
                    opened["process"].terminate()
                    opened["process"].wait(60)
                    address = ("--listen", opened["listen"])
                    with gateway(tmp_path, served["listen"], "--origin", visited.origin, *address):
                        await put(tl, "again")
                        assert await visited.told() == ["again", {"to": "again"}]


async def test_with_a_token_a_page_fetches_the_stream(tmp_path: Path, visited: Visited) -> None:
    tokens = Tokens(tmp_path)
    token, admin = tokens.add("page", "consume"), tokens.add("admin", "admin", "produce")
    with (
        broker(tmp_path, "--http", "off", "--tokens", str(tokens.path)) as served,
        gateway(tmp_path, served["listen"], "--origin", visited.origin) as opened,
    ):
        async with timeline.connect(served["listen"], token=admin) as tl:
            await put(tl, "ada", "bob")
        script = FETCHED.replace("localhost:9080", opened["listen"])
        source = f'new EventSource("http://{opened["listen"]}/v1/topics/mails/stream").onerror = () => tell("refused");'
        visited.script = f"const token = {json.dumps(token)};\n{source}\n{script}"
        async with chromium(tmp_path, visited.origin):
            seen = [await visited.told() for _ in range(3)]
        assert sorted(seen) == [["ada"], ["bob"], ["refused"]]


async def test_a_page_that_nobody_named_reads_nothing_and_leases_nothing(tmp_path: Path, visited: Visited) -> None:
    with broker(tmp_path, "--http", "off") as served, gateway(tmp_path, served["listen"]) as opened:
        async with timeline.connect(served["listen"]) as tl:
            await put(tl, "ada")
        source = EVENT_SOURCE.replace("localhost:9080", opened["listen"])
        visited.script = source + 'stream.onerror = () => tell("refused");\n'
        async with chromium(tmp_path, visited.origin):
            assert await visited.told() == ["refused"]
        async with timeline.connect(served["listen"]) as tl:
            assert [one.state async for one in tl.scan("mails")] == [State.AVAILABLE]
