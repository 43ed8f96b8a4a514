"""Callers that send too much, too little or too slowly, and that do not read. The gateway's memory stays bounded, and
the puts of others go on."""

from __future__ import annotations

import asyncio
import os
import resource
import struct
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

import timeline
from tests.gateway.connections import Connection, posted
from tests.gateway.processes import JSON, broker, gateway
from tests.services import VARIABLE, required
from timeline.clock import Clock
from timeline.driver.consume.pull import PulledDelivery
from timeline.errors import Throttled
from timeline.gateway import protocol, requests, streams
from timeline.gateway.protocol import LOOK_S, UNREAD_BYTES, BoundedHttp, Connections
from timeline.gateway.requests import (
    BODIES_BYTES,
    CALL_WEIGHT,
    MAX_BODY_BYTES,
    SLOW_BYTES_PER_S,
    SMALL_ROOM_BYTES,
    BodyBudget,
    BodyRoom,
    LargeAnswers,
)

pytestmark = [pytest.mark.processes, pytest.mark.slow]

MESSAGES = "/v1/topics/departures/messages"
MIB = 1024 * 1024


@dataclass
class Victim:
    """A broker and a gateway of these tests alone."""

    http: httpx.AsyncClient
    tl: timeline.Timeline
    url: str
    pids: dict[str, int]

    def __post_init__(self) -> None:
        self._before = {name: memory(pid, "VmRSS") for name, pid in self.pids.items()}
        for pid in self.pids.values():
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # forgets how much it had at its worst

    def grown(self) -> dict[str, int]:
        """How many MiB each process had more at its worst than at first."""
        return {name: memory(pid, "VmHWM") - self._before[name] for name, pid in self.pids.items()}

    async def put(self) -> None:
        """A put of somebody else, which must go well."""
        answer = await self.http.post(MESSAGES, json={"payload": 1, "in": "1h"})
        assert answer.status_code == 201, answer.text


def memory(pid: int, field: str) -> int:
    """MiB of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(field))


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    folder = tmp_path_factory.mktemp("bounds")
    with most_files(), broker(folder) as served, gateway(folder, served["listen"]) as opened:
        yield served, opened


@pytest.fixture
async def victim(started: Any) -> AsyncIterator[Victim]:
    served, opened = started
    url = f"http://{opened['listen']}"
    async with timeline.connect(served["listen"]) as tl, httpx.AsyncClient(base_url=url, timeout=60) as http:
        await tl.create_topic("departures")
        assert (await http.post(MESSAGES, json={"payload": 1, "in": "1h"})).status_code == 201
        made = Victim(http, tl, url, {"broker": served["pid"], "gateway": opened["pid"]})
        yield made
        await made.put()
        await tl.drop_topic("departures")


@contextmanager
def most_files() -> Iterator[int]:
    """As many descriptors as this process, and those that it starts, may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def puts_meanwhile(victim: Victim, work: asyncio.Task[Any]) -> int:
    """Put as somebody else until `work` is done. Return how often."""
    count = 0
    while not work.done():
        await victim.put()
        count += 1
    return count


@pytest.mark.parametrize(
    "count", [20_000, pytest.param(1_000_000, marks=[pytest.mark.prove, pytest.mark.timeout(900)])]
)
async def test_lines_without_end_take_no_more_memory(
    victim: Victim, count: int, record_property: Callable[[str, object], None]
) -> None:
    async def lines() -> AsyncIterator[bytes]:
        line = b'{"id":"line-%d","payload":{"gate":7,"flight":"UA1545"},"at":"2030-01-01T00:00Z","tag":"import"}\n'
        for start in range(0, count, 1_000):
            yield b"".join(line % number for number in range(start, start + 1_000))

    kind = {"Content-Type": "application/x-ndjson"}
    work = asyncio.create_task(victim.http.post(MESSAGES, content=lines(), headers=kind, timeout=900))
    assert await puts_meanwhile(victim, work) > 0
    assert work.result().json() == {"counts": {"OK": count}, "failed": [], "failed_omitted": 0}
    grown = victim.grown()
    record_property("grown_mib", grown)
    assert grown["gateway"] < 30 and grown["broker"] < 100 + count // 10_000, grown


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=[pytest.mark.prove, pytest.mark.timeout(300)])])
async def test_idle_connections_cost_little(
    victim: Victim, count: int, record_property: Callable[[str, object], None]
) -> None:
    """A third says nothing, a third begins a head, and a third had an answer."""
    async with AsyncExitStack() as stack:
        files = stack.enter_context(most_files())
        if files < count + 200:
            unmet = pytest.fail if required(os.environ.get(VARIABLE)) else pytest.skip
            unmet(f"this process may open {files} files only, and {count + 200} are needed")
        for number in range(count):
            connection = await stack.enter_async_context(Connection(victim.url))
            if number % 3:
                await connection.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"\r\n" * (number % 3 - 1))
            if number % 1_000 == 0:
                await victim.put()
        await victim.put()
    grown = victim.grown()
    record_property("grown_mib", grown)
    assert grown["gateway"] < 10 + count // 50, grown


async def test_where_few_files_may_be_opened_the_longest_idle_give_way(tmp_path: Path) -> None:
    few = ("sh", "-c", 'ulimit -n 256 && exec "$@"', "few")
    with broker(tmp_path) as served, gateway(tmp_path, served["listen"], before=few) as opened:
        url = f"http://{opened['listen']}"
        async with AsyncExitStack() as stack:
            first, *_ = [await stack.enter_async_context(Connection(url)) for _ in range(400)]
            assert await first.rest() == b""
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                assert (await http.put("/v1/topics/departures", json={})).status_code == 201
                assert (await http.post(MESSAGES, json={"payload": 1, "in": "1h"})).status_code == 201
            assert len(list(Path(f"/proc/{opened['pid']}/fd").iterdir())) < 200


async def test_who_does_not_read_an_answer_holds_up_nobody(victim: Victim) -> None:
    """A list of 1 MiB payloads, and a stream of events."""
    many = [{"payload_text": "x" * 1_000_000, "in": 0} for _ in range(12)]
    for start in range(0, len(many), 3):
        await victim.http.post(MESSAGES, json=many[start : start + 3])
    page = (await victim.http.get(f"{MESSAGES}?payload=true&limit=1000")).json()
    assert 4 <= len(page["messages"]) < 10 and page["cursor"]
    async with AsyncExitStack() as stack:
        for number in range(60):
            deaf = await stack.enter_async_context(Connection(victim.url, room=1))
            deaf.deafen()
            path = f"{MESSAGES}?payload=true&limit=1000" if number % 5 else "/v1/topics/departures/stream?credit=1000"
            await deaf.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            await victim.put()
    assert victim.grown()["gateway"] < 300, victim.grown()


async def test_half_bodies_keep_nobody_out(victim: Victim) -> None:
    async with AsyncExitStack() as stack:
        for number in range(200):
            half = await stack.enter_async_context(Connection(victim.url))
            await half.send(posted(MESSAGES, b"[" * 60_000, kind="application/json")[: -number - 1])
        for _ in range(20):
            await victim.put()
    assert victim.grown()["gateway"] < 60, victim.grown()


async def test_bodies_that_trickle_keep_nobody_out(victim: Victim) -> None:
    """A byte of each at a time, and somebody else's put between."""
    async with AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(Connection(victim.url)) for _ in range(100)]
        body = posted(MESSAGES, b'{"payload_text":"' + b"x" * 50_000, kind="application/json")
        for connection in slow:
            await connection.send(body[:-100])
        for at in range(30):
            for connection in slow:
                await connection.send(body[len(body) - 100 + at :][:1])
            await victim.put()
    assert victim.grown()["gateway"] < 60, victim.grown()


@pytest.mark.prove
async def test_who_does_not_read_the_answers_of_lines_holds_up_nobody(victim: Victim) -> None:
    """Each line has an answer of its own, and lines go on while there is room for answers."""
    line = b'{"payload":1,"in":"1h","id":"unread"}\n'
    head = (
        f"POST {MESSAGES} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
        "Accept: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    part = line * 1_000
    async with AsyncExitStack() as stack:
        for _ in range(5):
            deaf = await stack.enter_async_context(Connection(victim.url, room=1))
            deaf.deafen()
            await deaf.send(head.encode())
            for _ in range(50):
                deaf.push(b"%x\r\n%s\r\n" % (len(part), part))
                await victim.put()
    assert victim.grown()["gateway"] < 150, victim.grown()


REFUSED = {
    "a wrong type": b'{"receipts": 1, "x": "%s"}',
    "no JSON": b'{"receipts": ["%s"',
    "an unknown field": b'{"receipts": [], "x": "%s"}',
}


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/leases:ack"), ("PATCH", f"{MESSAGES}/m"), ("POST", "/v1/schedules:preview")],
)
@pytest.mark.parametrize("body", REFUSED.values(), ids=list(REFUSED))
async def test_refused_bodies_leave_room_for_others(victim: Victim, method: str, path: str, body: bytes) -> None:
    """Each counts for sixteen times its size, and all of them together for more than there is."""
    large = body % (b"x" * 900_000)
    for _ in range(BODIES_BYTES // len(large) // CALL_WEIGHT + 2):
        answer = await victim.http.request(method, path, content=large, headers=JSON)
        assert answer.status_code == 400, answer.text
    answer = await victim.http.post("/v1/leases:ack", json={"receipts": ["x" * 800_000]})
    assert answer.status_code == 207, answer.text


async def test_callers_that_go_before_their_body_ends_leave_room_for_others(victim: Victim) -> None:
    for path in ("/v1/schedules:preview", "/v1/leases:ack"):
        for _ in range(BODIES_BYTES // MIB // CALL_WEIGHT + 2):
            async with Connection(victim.url) as gone:
                await gone.send(posted(path, b"[" * MIB, kind="application/json")[:-1])
    body = {"receipts": ["x" * 800_000]}
    while (answer := await victim.http.post("/v1/leases:ack", json=body)).status_code == 429:
        await victim.put()  # those that have gone are noticed soon
    assert answer.status_code == 207, answer.text


@pytest.mark.prove
@pytest.mark.timeout(120)
async def test_large_bodies_that_do_not_end_give_way_to_others(victim: Victim) -> None:
    """Two callers take all the room there is, and then say nothing. One of them has to go."""
    head = f"POST {MESSAGES} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {MAX_BODY_BYTES}\r\n\r\n".encode()
    async with Connection(victim.url) as first, Connection(victim.url) as second:
        for connection in (first, second):
            await connection.send(head)
            for _ in range(79):
                await connection.send(b"[" * MIB)
        body = {"payload_text": "x" * 4 * MIB, "in": "1h"}
        while (answer := await victim.http.post(MESSAGES, json=body)).status_code == 429:
            await victim.put()
        assert answer.status_code in (201, 413), answer.text
        both = [asyncio.create_task(each.answer()) for each in (first, second)]
        (ended, *_), _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        cut = ended.result()
        for task in both:
            task.cancel()
        assert (cut.status, cut.json()["code"]) == (429, "THROTTLED") and "too slowly" in cut.json()["detail"]


def bomb(kind: str) -> bytes:
    """A body that is small to send, and large to read."""
    keys = b",".join(b'"%d":""' % number for number in range(1_000_000))
    return {
        "array of nothing": b"[" + b"{}," * 3_000_000 + b"{}]",
        "array of numbers": b"[" + b"1," * 5_000_000 + b"1]",
        "nested arrays": b'{"in":1,"payload":' + b"[" * 10_000_000,
        "nested objects": b'{"in":1,"payload":' + b'{"a":' * 2_000_000,
        "long number": b'{"payload":1,"in":' + b"9" * 10_000_000 + b"}",
        "large number": b'{"payload":1,"in":1e99999}',
        "many keys": b'{"payload":1,"in":1,' + keys + b"}",
        "many headers": b'{"payload":1,"in":1,"headers":{' + keys + b"}}",
        "a long name": b'{"' + b"a" * 10_000_000 + b'":1}',
        "a name like the decoder's words": b"{\" - at '$" + b"a" * MIB + b'!":1}',
        "a key twice": b'{"payload":1,"in":1,"in":"x"}',
        "no UTF-8": b'{"payload":1,"in":1,"id":"\xff"}',
        "half a character": b'{"payload":1,"in":1,"id":"\\ud800"}',
    }[kind]


BOMBS = (
    "array of nothing", "array of numbers", "nested arrays", "nested objects", "long number", "large number",
    "many keys", "many headers", "a long name", "a name like the decoder's words", "a key twice", "no UTF-8",
    "half a character",
)  # fmt: skip


@pytest.mark.prove
async def test_a_body_that_grows_when_it_is_read_is_refused(victim: Victim) -> None:
    for kind in BOMBS:
        answer = await victim.http.post(MESSAGES, content=bomb(kind), headers=JSON)
        assert answer.status_code in (400, 413), (kind, answer.text)
        assert len(answer.json()["detail"]) < 400, kind
        await victim.put()
    assert victim.grown()["gateway"] < 120, victim.grown()


@pytest.mark.parametrize("call", ["leases:ack", "topics/departures/dead:purge", "topics/departures/leases"])
async def test_the_body_of_a_call_that_puts_nothing_is_small(victim: Victim, call: str) -> None:
    for body in (b'{"receipts":' + b"[" * 10_000_000, b'{"ids":[' + b'"a",' * 10_000_000):
        answer = await victim.http.post(f"/v1/{call}", content=body, headers=JSON)
        assert (answer.status_code, answer.json()["code"]) == (413, "TOO_LARGE")
    deep = await victim.http.post(f"/v1/{call}", content=b'{"receipts":' + b"[" * 1_000_000, headers=JSON)
    assert deep.status_code == 400, deep.text
    assert victim.grown()["gateway"] < 60, victim.grown()


async def test_a_bomb_in_gzip_is_not_even_opened(victim: Victim) -> None:
    zeros = zlib.compressobj(9, wbits=31)
    body = b"".join(zeros.compress(b" " * MIB) for _ in range(200)) + zeros.flush()
    assert struct.unpack("<I", body[-4:]) == (200 * MIB,)
    answer = await victim.http.post(MESSAGES, content=body, headers=JSON | {"Content-Encoding": "gzip"})
    assert answer.status_code == 400 and "Content-Encoding" in answer.json()["detail"]
    assert victim.grown()["gateway"] < 20


async def test_heads_trailers_and_waiting_requests_are_bounded(victim: Victim) -> None:
    chunked = b"POST /v1/topics/departures/messages HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    wait = posted("/v1/topics/departures/leases", b'{"wait":"10s"}')
    floods = {
        "headers": (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n", b"a:\r\n" * 10_000),
        "one header": (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nA: ", b"a" * 100_000),
        "path": (b"GET /", b"a" * 100_000),
        "trailers": (chunked + b"0\r\n", b"a: b\r\n" * 10_000),
        "one trailer": (chunked + b"0\r\nA: ", b"a" * 100_000),
        "chunk extension": (chunked + b"5;", b"a" * 100_000),
        "requests": (wait, b"GET /healthz HTTP/1.1\r\n\r\n" * 4_000),
    }
    for begin, more in floods.values():
        async with AsyncExitStack() as stack:
            for _ in range(5):
                flood = await stack.enter_async_context(Connection(victim.url))
                await flood.send(begin)
                for _ in range(20):
                    await flood.send(more)
            await victim.put()
    assert victim.grown()["gateway"] < 40, victim.grown()


async def test_slow_bodies_give_their_room_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest first, and only those whose callers are waited for. Small bodies have some room on top."""
    budget = BodyBudget(100 * MIB)
    large, larger, busy, other, small = (BodyRoom(budget) for _ in range(5))
    large.take(30 * MIB)
    larger.take(40 * MIB)
    busy.take(30 * MIB)
    with pytest.raises(Throttled):
        other.take(MIB)
    small.take(60_000)
    assert budget.left == -60_000 > -SMALL_ROOM_BYTES
    async with asyncio.timeout(60) as one, asyncio.timeout(60) as two:
        large.timer, larger.timer = one, two
        with pytest.raises(Throttled):  # nobody is known to be slow yet
            other.take(MIB)
        monkeypatch.setattr(requests, "WINDOW_S", 0.0)
        other.take(MIB)
        assert larger.lost and not large.lost and not busy.lost
        assert two.when() is not None and two.when() <= asyncio.get_running_loop().time()  # type: ignore[operator]
        two.reschedule(None)
    with pytest.raises(Throttled):
        larger.take(1)
    for room in (large, larger, busy, other, small):
        room.give_back()
    assert budget.left == 100 * MIB and not budget.rooms


class _Counted:
    """A connection as those who count it know it. `unread_bytes`: of its answers; each look finds as many as before."""

    def __init__(self) -> None:
        self.aborted, self.unread_bytes, self.reads = False, 0, False

    def abort(self) -> None:
        self.aborted = True

    def has_read(self) -> bool:
        return self.reads


def test_each_connection_too_many_closes_another_one_that_is_idle() -> None:
    """The end of a connection comes later than its abort. Meanwhile it is not taken for the longest idle again."""
    connections, each = Connections(3, LargeAnswers()), [_Counted() for _ in range(8)]
    for number, one in enumerate(each):
        connections.opened(one)  # type: ignore[arg-type]
        if number == 0:
            connections.busy(one)  # type: ignore[arg-type]
    assert [one.aborted for one in each] == [False, *[True] * 5, False, False]


def test_a_handshake_too_many_closes_an_idle_connection_and_many_end_one_another() -> None:
    connections, idle = Connections(4, LargeAnswers()), [_Counted() for _ in range(4)]
    for one in idle:
        connections.opened(one)  # type: ignore[arg-type]
    greeted = [_Counted() for _ in range(4)]
    for one in greeted[:2]:
        connections.greeted(one)
    assert [one.aborted for one in idle + greeted] == [True, True, *[False] * 6]
    for one in idle[:2]:
        connections.closed(one)  # type: ignore[arg-type]
    for one in greeted[2:]:
        connections.greeted(one)
    assert [one.aborted for one in idle[2:] + greeted] == [False, False, True, True, False, False]


def test_a_body_that_never_ends_gives_way_to_a_new_connection() -> None:
    """Strangers may send bodies before anybody asks for a token."""
    connections, each = Connections(3, LargeAnswers()), [_Counted() for _ in range(3)]
    for one in each:
        connections.opened(one)  # type: ignore[arg-type]
        connections.busy(one)  # type: ignore[arg-type]
    for one in each[1:]:
        connections.sending(one)  # type: ignore[arg-type]
    connections.sent(each[1])  # type: ignore[arg-type]
    secured, plain, last = _Counted(), _Counted(), _Counted()
    connections.greeted(secured)
    assert [one.aborted for one in each] == [False, False, True]
    connections.closed(each[2])  # type: ignore[arg-type]
    connections.secured(secured)
    connections.opened(plain)  # type: ignore[arg-type]
    connections.busy(plain)  # type: ignore[arg-type]
    connections.opened(last)  # type: ignore[arg-type]
    assert [one.aborted for one in (*each[:2], plain, last)] == [False, False, False, True]  # their calls go on


async def test_a_slow_body_is_slow_whatever_its_contents_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = BodyBudget(100 * MIB)
    slow, call = BodyRoom(budget), BodyRoom(budget)
    monkeypatch.setattr(requests, "WINDOW_S", 1e-9)
    monkeypatch.setattr(requests, "SLOW_BYTES_PER_S", 1e18)
    async with asyncio.timeout(60) as timer:
        slow.timer = timer
        for _ in range(2):
            slow.take(3 * MIB, 16)
        assert slow.slow
        call.take(60_000, 16)  # a small one, by its own bytes
        assert not slow.lost and budget.left == (100 - 96) * MIB - 960_000
        call.take(4 * MIB)
        assert slow.lost
        timer.reschedule(None)


def test_answers_that_nobody_reads_give_way_to_those_that_somebody_does() -> None:
    connections, each = Connections(100, LargeAnswers()), [_Counted() for _ in range(4)]
    each[1].reads = True
    for one in each:
        one.unread_bytes = UNREAD_BYTES // 2
        connections.unread(one)  # type: ignore[arg-type]
    assert [one.aborted for one in each] == [True, False, True, False]


async def test_large_answers_wait_while_too_much_is_unread() -> None:
    answers, one = LargeAnswers(), _Counted()
    connections = Connections(100, answers)
    one.unread_bytes = UNREAD_BYTES + 1
    connections.unread(one)  # type: ignore[arg-type]
    assert answers.crowded() and not one.aborted
    one.unread_bytes = 0
    connections.read(one)  # type: ignore[arg-type]
    assert not answers.crowded()


def test_a_reader_is_slow_if_it_takes_less_than_so_much_a_second() -> None:
    now_s, left = 100.0, 10 * MIB
    one = BoundedHttp.__new__(BoundedHttp)
    one.loop = cast(Any, SimpleNamespace(time=lambda: now_s))
    one.transport = cast(Any, SimpleNamespace(get_write_buffer_size=lambda: left))
    one._unread_bytes, one._looked_s = left, now_s
    now_s += LOOK_S / 2
    assert one.has_read(), "it was looked at just now"
    for taken, reads in ((1, True), (-1, False)):
        now_s += 10 * LOOK_S
        left -= int(SLOW_BYTES_PER_S * (now_s - one._looked_s)) + taken
        assert one.has_read() is reads


async def test_those_that_read_slowly_are_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LOOK_S", 0.0)
    connections, each = Connections(100, LargeAnswers()), [_Counted() for _ in range(2)]
    for one in each:
        one.unread_bytes, one.reads = UNREAD_BYTES, True
        connections.unread(one)  # type: ignore[arg-type]
    assert not any(one.aborted for one in each)
    each[0].reads = False
    while not each[0].aborted:
        await asyncio.sleep(0)
    assert not each[1].aborted


async def test_an_extension_that_is_shorter_than_the_lease_frees_no_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease lasts as long as before."""
    monkeypatch.setattr(streams, "ALIVE_S", 0.0)
    stream, now_ms = streams.EventStream(1), Clock().monotonic_ms()
    stream.given(cast(PulledDelivery, SimpleNamespace(receipt="r", lease_left_ms=3_600_000)))
    stream.extended({"r"}, now_ms - 1.0)
    assert await stream.room() == 0
