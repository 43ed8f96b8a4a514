"""Answers that are made at once take memory together, whoever reads them. They wait for room, in order, or are refused,
and small ones go on."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

import timeline
from tests.gateway.processes import broker
from timeline.errors import Throttled
from timeline.gateway import answers
from timeline.gateway.answers import (
    ANSWERS_BYTES,
    LARGEST_BYTES,
    ROOMS,
    ROW_BYTES,
    SMALL_ROOM_BYTES,
    WEIGHT,
    AnswerBudget,
    AnswerRoom,
)
from timeline.gateway.app import application
from timeline.gateway.protocol import BoundedHttp, Connections
from timeline.gateway.service import GatewaySettings, HttpGateway
from timeline.model import MAX_HEADERS_BYTES

MIB = 1024 * 1024
(TINY_BYTES, TINY_ROOM_BYTES), (SMALL_BYTES, _) = ROOMS[:2]
LARGE = 500_000
COUNT = 60
PAGE = "/v1/topics/large/messages?payload=true&limit=1000"


class Deaf:
    """A caller that has not read anything. `unread_bytes`: of its answers."""

    def __init__(self, unread_bytes: int) -> None:
        self.unread_bytes, self.aborted = unread_bytes, False

    def has_read(self) -> bool:
        return False

    def has_begun(self) -> bool:
        return False

    def abort(self) -> None:
        self.aborted = True


async def test_answers_wait_in_order_and_small_ones_pass() -> None:
    budget, order = AnswerBudget(100 * MIB), list[str]()

    async def wait(name: str, size: int) -> None:
        await budget.wait(size)
        order.append(name)

    assert budget.take(90 * MIB)
    work = [asyncio.create_task(wait(name, size * MIB)) for name, size in (("first", 60), ("second", 10))]
    await asyncio.sleep(0)
    assert not budget.take(5 * MIB), "it would pass those that wait"
    assert budget.take(SMALL_BYTES)
    assert budget.take(20 * MIB, first=True), "it is in memory already"
    budget.give_back(SMALL_BYTES + 20 * MIB)
    budget.give_back(50 * MIB)
    await asyncio.gather(*work[:1])
    assert order == ["first"]
    budget.give_back(60 * MIB)
    await asyncio.gather(*work)
    assert order == ["first", "second"] and budget.made_bytes == 50 * MIB


async def test_small_answers_have_a_bound_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "WAIT_S", 0.01)
    budget = AnswerBudget(100 * MIB)
    assert budget.take(100 * MIB)
    while budget.take(SMALL_BYTES):
        pass
    assert budget.made_bytes == 100 * MIB + SMALL_ROOM_BYTES
    while budget.take(TINY_BYTES):
        pass
    assert budget.made_bytes == 100 * MIB + TINY_ROOM_BYTES
    with pytest.raises(Throttled):
        await budget.wait(SMALL_BYTES)


async def test_who_waits_in_vain_and_who_goes_away_take_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = AnswerBudget(100 * MIB)
    assert budget.take(100 * MIB)
    gone, next_one = (asyncio.create_task(budget.wait(size * MIB)) for size in (80, 40))
    await asyncio.sleep(0)
    gone.cancel()
    budget.give_back(50 * MIB)
    await next_one
    assert budget.made_bytes == 90 * MIB
    monkeypatch.setattr(answers, "WAIT_S", 0.0)
    with pytest.raises(Throttled) as refused:
        await budget.wait(20 * MIB)
    assert refused.value.retry_after_ms and "limit" in refused.value.advice
    late = asyncio.create_task(budget.wait(20 * MIB))
    await asyncio.sleep(0)
    late.cancel()
    budget.give_back(90 * MIB)  # its turn comes, and it is gone
    with pytest.raises(asyncio.CancelledError):
        await late
    assert budget.made_bytes == 0 and budget.take(100 * MIB)


async def test_who_reads_nothing_gives_way_to_answers_that_wait() -> None:
    budget, deaf = AnswerBudget(100 * MIB), [Deaf(30 * MIB) for _ in range(3)]
    for one in deaf:
        budget.unread(one)
    assert not any(one.aborted for one in deaf) and not budget.take(50 * MIB)
    await budget.wait(50 * MIB)
    assert [one.aborted for one in deaf] == [True, True, False]
    budget.read(deaf[2])
    assert budget.unread_bytes == 0 and budget.made_bytes == 50 * MIB


def test_the_largest_answer_finds_room_and_gives_back_what_it_took() -> None:
    budget = AnswerBudget()
    room = AnswerRoom(budget)
    assert room.take(ANSWERS_BYTES) and budget.made_bytes == LARGEST_BYTES
    room.keep(MIB)
    assert budget.made_bytes == WEIGHT * MIB
    room.keep(2 * MIB)
    room.give_back()
    room.give_back()
    assert budget.made_bytes == 0


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with broker(tmp_path_factory.mktemp("answers")) as served:
        yield served["listen"]


@asynccontextmanager
async def gateway_here(brokers: str) -> AsyncIterator[tuple[HttpGateway, httpx.AsyncClient, int]]:
    """A gateway in this process, with a client and its port."""
    gateway = HttpGateway(GatewaySettings(brokers=brokers).check(), "0")
    http: Any = partial(BoundedHttp, Connections(1_000, gateway.answers))
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
            yield gateway, client, port.getsockname()[1]
    finally:
        gateway.end()
        server.should_exit = True
        await serving
        await server.shutdown([port])


def deaf_caller(port: int, path: str) -> socket.socket:
    """A connection that asks, and reads nothing. Next to nothing of the answer fits into it."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect(("127.0.0.1", port))
    made.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
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
    ("path", "told_bytes"),
    [
        (PAGE, 9 * (LARGE + MAX_HEADERS_BYTES + ROW_BYTES)),
        ("/v1/topics/large/messages/m0", LARGE + MAX_HEADERS_BYTES),
        ("/message/payload?topic=large&id=m0", LARGE + MAX_HEADERS_BYTES),
    ],
    ids=["page", "message", "download"],
)
async def test_callers_that_do_not_read_take_no_more_room_than_there_is(
    brokers: str, path: str, told_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them together. Others are served meanwhile. What is refused says what to do. All room comes back."""
    monkeypatch.setattr(answers, "WAIT_S", 0.2)
    # As much room as a few answers take, so that few callers fill it.
    monkeypatch.setattr(answers, "ROOMS", ((TINY_BYTES, 2 * SMALL_BYTES), (SMALL_BYTES, SMALL_BYTES), ROOMS[2]))
    monkeypatch.setattr(answers, "SMALL_ROOM_BYTES", SMALL_BYTES)
    most = 4 * WEIGHT * told_bytes
    scans = Scans(monkeypatch)
    async with timeline.connect(brokers) as tl, gateway_here(brokers) as (gateway, http, port):
        gateway.answers._most = most
        await tl.create_topic("large")
        await tl.create_topic("small")
        async with tl.producer("large") as producer:
            for number in range(12):
                await producer.produce(b"x" * LARGE, id=f"m{number}", in_="1h")
        await http.post("/v1/topics/small/messages", json={"payload": 1, "in": "1h"})
        held = 0
        with ExitStack() as open_:
            callers = [open_.enter_context(deaf_caller(port, path)) for _ in range(COUNT)]
            end_s = asyncio.get_running_loop().time() + 4.0
            while asyncio.get_running_loop().time() < end_s:
                put = asyncio.create_task(http.post("/v1/topics/small/messages", json={"payload": 1, "in": "1h"}))
                while not put.done():
                    held = max(held, gateway.answers.made_bytes + gateway.answers.unread_bytes)
                    await asyncio.sleep(0)
                assert put.result().status_code == 201
            small = await http.get("/v1/topics/small/messages?limit=2")
            assert small.status_code == 200
            if path == PAGE:
                refused = [said for said in map(_said, callers) if said.startswith(b"HTTP/1.1 429")]
                assert refused
                problem = json.loads(refused[0].partition(b"\r\n\r\n")[2])
                assert problem["code"] == "THROTTLED" and "smaller limit" in problem["detail"]
                assert b"retry-after: 1\r\n" in refused[0].lower()
        # What is told is what an answer has, but for the names of fields.
        assert 0 < scans.most <= (most + SMALL_BYTES) // (WEIGHT * LARGE if path != PAGE else WEIGHT * 9 * LARGE)
        assert 0 < held <= most + SMALL_BYTES + told_bytes
        async with asyncio.timeout(30):
            while gateway.answers.made_bytes or gateway.answers.unread_bytes or scans.now:
                await asyncio.sleep(0)
        gateway.answers._most = ANSWERS_BYTES
        page = await http.get(PAGE)
        assert page.status_code == 200
        rest = await http.get(f"{PAGE}&cursor={page.json()['cursor']}")
        assert len({one["id"] for each in (page, rest) for one in each.json()["messages"]}) == 12
        assert gateway.answers.made_bytes == 0
        await tl.drop_topic("large")
        await tl.drop_topic("small")


def _said(caller: socket.socket) -> bytes:
    caller.setblocking(False)
    try:
        return caller.recv(4096)
    except OSError:
        return b""
