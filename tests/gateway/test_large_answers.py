"""Answers that may be large are made a few at a time, whoever reads them. Others wait, or are refused."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

import httpx
import pytest
import uvicorn

import timeline
from tests.gateway.processes import broker
from timeline.errors import Throttled
from timeline.gateway import protocol, requests
from timeline.gateway.app import application
from timeline.gateway.protocol import BoundedHttp, Connections
from timeline.gateway.requests import LARGE_AT_ONCE, LargeAnswers
from timeline.gateway.service import GatewaySettings, HttpGateway

MIB = 1024 * 1024
LARGE, COUNT = 500_000, 60
PAGE_BYTES = 10 * LARGE * 3 // 2
"""About what a page takes, with payloads as base64."""
PAGE = "/v1/topics/large/messages?payload=true&limit=1000"


async def _drained() -> None:
    pass


async def test_answers_wait_in_order() -> None:
    answers, order = LargeAnswers(), list[int]()

    async def one(number: int) -> None:
        await answers.begin(_drained)
        order.append(number)

    work = [asyncio.create_task(one(number)) for number in range(LARGE_AT_ONCE + 2)]
    for done in range(LARGE_AT_ONCE, LARGE_AT_ONCE + 2):
        await asyncio.wait(work[:done])
        assert order == list(range(done)) and not work[done].done()
        answers.end()
    await asyncio.gather(*work)


async def test_who_waits_in_vain_or_goes_away_takes_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = LargeAnswers()
    answers.set_crowded(True)
    gone = [asyncio.create_task(answers.begin(_drained)) for _ in range(2 * LARGE_AT_ONCE)]
    await asyncio.sleep(0)
    for one in gone:
        one.cancel()
    await asyncio.wait(gone)
    monkeypatch.setattr(requests, "LARGE_WAIT_S", 0.0)
    with pytest.raises(Throttled) as refused:
        await answers.begin(_drained)
    assert refused.value.retry_after_ms and "limit" in refused.value.advice
    with pytest.raises(Throttled):
        await answers.begin(asyncio.Event().wait)  # type: ignore[arg-type]
    monkeypatch.undo()
    answers.set_crowded(False)
    for _ in range(LARGE_AT_ONCE):
        await answers.begin(_drained)


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with broker(tmp_path_factory.mktemp("large")) as served:
        yield served["listen"]


@asynccontextmanager
async def gateway_here(brokers: str) -> AsyncIterator[tuple[Connections, httpx.AsyncClient, int]]:
    """A gateway in this process: its connections, a client, and its port."""
    gateway = HttpGateway(GatewaySettings(brokers=brokers).check(), "0")
    connections = Connections(1_000, gateway.answers)
    http: Any = partial(BoundedHttp, connections)
    config = uvicorn.Config(application(gateway), http=http, loop="none", ws="none", lifespan="on", log_config=None)
    server = uvicorn.Server(config)
    port = socket.create_server(("127.0.0.1", 0), backlog=COUNT * 2)
    port.setblocking(False)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup([port])
    serving = asyncio.create_task(server.main_loop())
    try:
        url = f"http://127.0.0.1:{port.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            yield connections, client, port.getsockname()[1]
    finally:
        gateway.end()
        server.should_exit = True
        await serving
        await server.shutdown([port])


def deaf_caller(port: int, path: str, requests: int = 1) -> socket.socket:
    """A connection that asks so often, and reads nothing. Next to nothing of the answer fits into it."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect(("127.0.0.1", port))
    made.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * requests)
    return made


class Scans:
    """Counts the scans with payloads that are under way at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.most = 0
        real: Any = timeline.Timeline.scan_pages

        async def counted(*given: Any, **asked: Any) -> AsyncIterator[Any]:
            counts = bool(asked.get("payload"))
            self.now += counts
            self.most = max(self.most, self.now)
            try:
                async for page in real(*given, **asked):
                    yield page
            finally:
                self.now -= counts

        monkeypatch.setattr(timeline.Timeline, "scan_pages", counted)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("asks", [1, 3], ids=["one request", "three at once"])
async def test_callers_that_do_not_read_take_a_bounded_part(
    brokers: str, asks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of memory, and of the turns. Others are served meanwhile. What is refused says what to do."""
    monkeypatch.setattr(requests, "LARGE_WAIT_S", 0.5)
    monkeypatch.setattr(protocol, "UNREAD_BYTES", 20 * MIB)
    scans, unread = Scans(monkeypatch), 0
    async with timeline.connect(brokers) as tl, gateway_here(brokers) as (connections, http, port):
        await tl.create_topic("large")
        await tl.create_topic("small")
        async with tl.producer("large") as producer:
            for number in range(12):
                await producer.produce(b"\xff" * LARGE, id=f"m{number}", in_="1h")
        with ExitStack() as open_:
            callers = [open_.enter_context(deaf_caller(port, PAGE, asks)) for _ in range(COUNT)]
            refused: list[bytes] = []
            while not refused:
                put = asyncio.create_task(http.post("/v1/topics/small/messages", json={"payload": 1, "in": "1h"}))
                while not put.done():
                    unread = max(unread, sum(each.unread_bytes for each in connections._unread))
                    await asyncio.sleep(0)
                assert put.result().status_code == 201
                refused = [said for said in map(_said, callers) if said.startswith(b"HTTP/1.1 429")]
            problem = json.loads(refused[0].partition(b"\r\n\r\n")[2])
            assert problem["code"] == "THROTTLED" and "smaller limit" in problem["detail"]
            assert b"retry-after: 1\r\n" in refused[0].lower()
            # Their answers are thrown away, so that others have their turn before they are gone.
            while (await http.get("/v1/topics/small/messages")).status_code != 200:
                pass
        assert 0 < scans.most <= LARGE_AT_ONCE
        assert 20 * MIB - PAGE_BYTES < unread <= 20 * MIB + (LARGE_AT_ONCE + 1) * PAGE_BYTES
        async with asyncio.timeout(30):
            while connections._unread or scans.now:
                await asyncio.sleep(0)
        page = (await http.get(PAGE)).json()
        rest = (await http.get(f"{PAGE}&cursor={page['cursor']}")).json()
        assert len(page["messages"]) < 12 and len(page["messages"] + rest["messages"]) == 12
        await tl.drop_topic("large")
        await tl.drop_topic("small")


def _said(caller: socket.socket) -> bytes:
    caller.setblocking(False)
    with suppress(OSError):
        return caller.recv(4096)
    return b""
