"""Answers that may be large are made a few at a time, whoever reads them. Others wait, or are refused."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

import timeline
from tests.gateway.processes import broker
from tests.security.certificates import Authority, Pair
from timeline.errors import Throttled
from timeline.gateway import protocol, requests, streams
from timeline.gateway.app import application
from timeline.gateway.problems import ClientGone
from timeline.gateway.protocol import HIGH_WATER_LIMIT, LEFT_BYTES, BoundedHttp, Connections
from timeline.gateway.requests import LARGE_AT_ONCE, LargeAnswers
from timeline.gateway.service import GatewaySettings, HttpGateway
from timeline.gateway.tls import TlsConnection, TlsFiles

MIB = 1024 * 1024
LARGE, COUNT = 500_000, 60
PAGE_BYTES = 10 * LARGE * 3 // 2
"""About what a page takes, with payloads as base64."""
PAGE = "/v1/topics/large/messages?payload=true&limit=1000"


async def _drained() -> bool:
    return True


async def _gone() -> bool:
    return False


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
        await answers.begin(asyncio.Event().wait)
    monkeypatch.undo()
    answers.set_crowded(False)
    for _ in range(2 * LARGE_AT_ONCE):
        with pytest.raises(ClientGone):
            await answers.begin(_gone)
    for _ in range(LARGE_AT_ONCE):
        await answers.begin(_drained)


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with broker(tmp_path_factory.mktemp("large")) as served:
        yield served["listen"]


@asynccontextmanager
async def gateway_here(
    brokers: str, pair: Pair | None = None
) -> AsyncIterator[tuple[Connections, httpx.AsyncClient, int]]:
    """A gateway in this process: its connections, a client, and its port. `pair`: for TLS."""
    gateway = HttpGateway(GatewaySettings(brokers=brokers).check(), "0")
    connections = Connections(1_000, gateway.answers)
    http: Any = partial(BoundedHttp, connections)
    if pair is not None:
        http = partial(TlsConnection, connections, TlsFiles(pair.cert, pair.key))
    config = uvicorn.Config(application(gateway), http=http, loop="none", ws="none", lifespan="on", log_config=None)
    server = uvicorn.Server(config)
    port = socket.create_server(("127.0.0.1", 0), backlog=COUNT * 2)
    port.setblocking(False)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup([port])
    serving = asyncio.create_task(server.main_loop())
    try:
        url = f"{'http' if pair is None else 'https'}://127.0.0.1:{port.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=60, verify=False) as client:
            yield connections, client, port.getsockname()[1]
    finally:
        gateway.end()
        server.should_exit = True
        await serving
        await server.shutdown([port])


def deaf_caller(port: int, path: str, requests: int, tls: bool) -> socket.socket:
    """A connection that asks so often, and reads nothing. Next to nothing of the answer fits into it."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect(("127.0.0.1", port))
    if tls:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        made = context.wrap_socket(made)
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
@pytest.mark.parametrize(
    ("asks", "tls"), [(1, False), (3, False), (1, True)], ids=["one request", "three at once", "TLS"]
)
async def test_callers_that_do_not_read_take_a_bounded_part(
    brokers: str, asks: int, tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of memory, and of the turns. Others are served meanwhile. What is refused says what to do."""
    monkeypatch.setattr(requests, "LARGE_WAIT_S", 0.5)
    monkeypatch.setattr(protocol, "UNREAD_BYTES", 20 * MIB)
    scans, unread = Scans(monkeypatch), 0
    pair = Authority(tmp_path, "authority").issue("gateway") if tls else None
    async with timeline.connect(brokers) as tl, gateway_here(brokers, pair) as (connections, http, port):
        await tl.create_topic("large")
        await tl.create_topic("small")
        async with tl.producer("large") as producer:
            for number in range(12):
                await producer.produce(b"\xff" * LARGE, id=f"m{number}", in_="1h")
        with ExitStack() as open_:
            callers = [
                open_.enter_context(await asyncio.to_thread(deaf_caller, port, PAGE, asks, tls)) for _ in range(COUNT)
            ]
            refused, heard = list[bytes](), [b""] * COUNT
            while not refused:
                put = asyncio.create_task(http.post("/v1/topics/small/messages", json={"payload": 1, "in": "1h"}))
                while not put.done():
                    unread = max(unread, sum(each.unread_bytes for each in connections._unread))
                    await asyncio.sleep(0)
                assert put.result().status_code == 201
                heard = [said + _said(caller) for said, caller in zip(heard, callers, strict=True)]
                refused = [said for said in heard if said.startswith(b"HTTP/1.1 429") and said.endswith(b"}")]
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


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_nothing_is_leased_while_callers_leave_too_much_unread(
    brokers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "CROWDED_S", 0.01)
    leases, stream = "/v1/topics/crowd/leases", "/v1/topics/crowd/stream"
    async with timeline.connect(brokers) as tl, gateway_here(brokers) as (connections, http, _):
        answers = connections._answers
        await tl.create_topic("crowd")
        await tl.producer("crowd").produce(b"", id="first", in_=0)
        answers.set_crowded(True)
        for refused in (await http.post(leases, json={"wait": "60s"}), await http.get(stream)):
            assert (refused.status_code, refused.json()["code"]) == (429, "THROTTLED")
            assert "leave too much unread" in refused.json()["detail"]
        assert (await tl.get("crowd", "first")).deliveries == 0
        answers.set_crowded(False)
        (first,) = (await http.post(leases, json={"wait": "60s"})).json()["messages"]
        assert (first["id"], first["deliveries"]) == ("first", 1)
        async with http.stream("GET", stream) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == ": open"
            answers.set_crowded(True)
            await tl.producer("crowd").produce(b"", id="second", in_=0)
            while await anext(lines) != ": alive":
                pass
            answers.set_crowded(False)
            while not (line := await anext(lines)).startswith("data: "):
                pass
            second = json.loads(line.removeprefix("data: "))
        assert (second["id"], second["deliveries"]) == ("second", 1)
        polling = asyncio.create_task(http.post(leases, json={"wait": "60s"}))
        while not any(one.consumers for one in (await tl.standing()).brokers):
            pass
        answers.set_crowded(True)
        await tl.producer("crowd").produce(b"", id="third", in_=0)
        assert (await polling).status_code == 429, "it waited for the message before"
        answers.set_crowded(False)
        (third,) = (await http.post(leases, json={"wait": "60s"})).json()["messages"]
        assert (third["id"], third["deliveries"]) == ("third", 1)
        await tl.drop_topic("crowd")


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_no_turn_begins_while_the_head_of_its_answer_would_wait_for_the_reader(brokers: str) -> None:
    async with gateway_here(brokers) as (connections, _, port):
        with deaf_caller(port, PAGE, 0, False) as caller:
            while not connections._idle:
                await asyncio.sleep(0)
            (one,) = connections._idle
            while not one.unread_bytes:
                one.transport.write(b"x" * 4096)
            one.transport.write(b"x" * (HIGH_WATER_LIMIT - one.unread_bytes))
            assert not one.flow.write_paused
            drained = asyncio.create_task(one._drained())
            await asyncio.sleep(0)
            assert not drained.done()
            while not drained.done():
                _said(caller)
                await asyncio.sleep(0)
            assert drained.result() and one.unread_bytes <= LEFT_BYTES
