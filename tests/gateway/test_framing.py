"""Requests that break the rules of HTTP, are cut, or follow one another. Each has one meaning, and its own answer."""

from __future__ import annotations

import asyncio
import itertools
import json

import httpx
import pytest

import timeline
from tests.gateway.conftest import Site
from tests.gateway.connections import Connection, posted

pytestmark = [pytest.mark.processes, pytest.mark.slow]

MESSAGES = "/v1/topics/departures/messages"
BODY = b'{"payload":1,"in":"1h"}'
NUMBERS = itertools.count()
TARGET, MOVE = f"{MESSAGES}/cut-target".encode(), b'{"in":"2h"}'
PATCH = b"PATCH %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
ALIVE = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEAD = f"POST {MESSAGES} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
PUT = b"17\r\n" + BODY + b"\r\n0\r\n"
HTTP2 = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
AMBIGUOUS = {
    "CL+TE": HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n" + PUT + b"\r\n",
    "TE+CL": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 23\r\n\r\n" + PUT + b"\r\n",
    "TE unknown": HEAD + b"Transfer-Encoding: xchunked\r\nContent-Length: 23\r\n\r\n" + BODY,
    "TE not last": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n" + PUT + b"\r\n",
    "TE identity": HEAD + b"Transfer-Encoding: identity\r\nContent-Length: 23\r\n\r\n" + BODY,
    "TE twice": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + PUT + b"\r\n",
    "TE space": HEAD + b"Transfer-Encoding : chunked\r\nContent-Length: 23\r\n\r\n" + BODY,
    "TE control": HEAD + b"Transfer-Encoding: \x0bchunked\r\nContent-Length: 23\r\n\r\n" + BODY,
    "TE folded": HEAD + b"Transfer-Encoding:\r\n chunked\r\nContent-Length: 23\r\n\r\n" + BODY,
    "header folded": HEAD + b"X: a\r\n b\r\nContent-Length: 23\r\n\r\n" + BODY,
    "CL twice": HEAD + b"Content-Length: 23\r\nContent-Length: 10\r\n\r\n" + BODY,
    "CL list": HEAD + b"Content-Length: 23, 23\r\n\r\n" + BODY,
    "CL sign": HEAD + b"Content-Length: +23\r\n\r\n" + BODY,
    "CL below 0": HEAD + b"Content-Length: -1\r\n\r\n" + BODY,
    "CL in base 16": HEAD + b"Content-Length: 0x17\r\n\r\n" + BODY,
    "CL beyond 64 bits": HEAD + b"Content-Length: 18446744073709551639\r\n\r\n" + BODY,
    "CL empty": HEAD + b"Content-Length: \r\n\r\n" + BODY,
    "chunk sign": CHUNKED + b"-17\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk prefix": CHUNKED + b"0x17\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk beyond 64 bits": CHUNKED + b"10000000000000017\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk of bare LF": CHUNKED + b"17\n" + BODY + b"\n0\n\n",
    "chunk too short": CHUNKED + b"5\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk of letters": CHUNKED + b"zz\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk extension with LF": CHUNKED + b"17;a\nb\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk with space": CHUNKED + b"17 \r\n" + BODY + b"\r\n0\r\n\r\n",
    "bare LF": b"GET /healthz HTTP/1.1\nHost: localhost\n\n",
    "bare CR": b"GET /healthz HTTP/1.1\rHost: localhost\r\r",
    "NUL": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nA: b\0c\r\n\r\n",
    "CR in a value": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nA: b\rc\r\n\r\n",
    "no colon": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nAbc\r\n\r\n",
    "no host": b"GET /healthz HTTP/1.1\r\nA: b\r\n\r\n",
    "two hosts": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: y\r\n\r\n",
    "tunnel": b"CONNECT x:1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "control in the path": b"GET /heal\x01thz HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


async def stored(tl: timeline.Timeline) -> dict[str, int]:
    """The version of each message that there is."""
    return {one.id: one.version async for one in tl.scan("departures")}


async def test_another_transfer_coding_is_not_read_as_if_it_were_none(site: Site) -> None:
    async with Connection(site.url) as connection:
        await connection.send(HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + ALIVE)
        (answer,) = await connection.answers()
    assert (answer.status, answer.json()["detail"]) == (501, "of transfer codings, only chunked is read")


@pytest.mark.parametrize("request_", AMBIGUOUS.values(), ids=list(AMBIGUOUS))
async def test_what_two_servers_could_read_in_two_ways_is_refused(
    site: Site, tl: timeline.Timeline, request_: bytes
) -> None:
    """And nothing behind it is a request, so none can be smuggled in."""
    before = await stored(tl)
    async with Connection(site.url) as connection:
        await connection.send(request_ + ALIVE)
        (answer,) = await connection.answers()
    assert answer.status == 400 and answer.headers["connection"] == "close"
    assert (answer.headers["content-type"], answer.json()["code"]) == ("application/problem+json", "INVALID")
    assert await stored(tl) == before


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (CHUNKED + b"17;a=b\r\n" + BODY + b"\r\n0\r\n\r\n", 201),
        (CHUNKED + PUT + b"Timeline-Id: trailer\r\nAuthorization: Bearer x\r\n\r\n", 201),
        (HEAD + HTTP2 + b"Content-Length: 23\r\n\r\n" + BODY, 201),
        (HEAD + HTTP2 + b"Transfer-Encoding: chunked\r\n\r\n" + PUT + b"\r\n", 201),
        (ALIVE[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n", 200),
        (HEAD + b"Content-Length: 5\r\n\r\nHELLO", 400),
    ],
    ids=["chunk extension", "trailers", "upgrade to HTTP/2", "the same in chunks", "upgrade to a socket", "no JSON"],
)  # fmt: skip
async def test_odd_requests_are_served_and_so_is_the_next_one(site: Site, request_: bytes, status: int) -> None:
    """Java's own client asks for HTTP/2 with its first request. The answer is one of HTTP/1.1."""
    for parts in ([request_ + ALIVE], [request_[at : at + 1] for at in range(len(request_))] + [ALIVE]):
        async with Connection(site.url) as connection:
            for part in parts:
                await connection.send(part)
            answer = await connection.answer()
            assert answer.status == status, answer
            assert "trailer" not in answer.body.decode()
            assert (await connection.answer()).body == b"alive\n"


async def test_an_error_of_http_is_not_the_answer_to_the_request_before(site: Site) -> None:
    """A put whose Content-Length is too small is put, and its answer says so."""
    async with Connection(site.url) as connection:
        await connection.send(posted(MESSAGES, b"ABC", "Timeline-In: 1h") + b"DEF\r\n\r\n")
        first, *others = await connection.answers()
    assert first.status == 201
    assert [answer.status for answer in others] in ([], [400])


async def test_requests_that_follow_one_another_have_their_answers_in_order_and_a_bound(site: Site) -> None:
    waits = posted("/v1/topics/departures/leases", b'{"wait":0}')
    many = [waits, *(f"GET /v1/topics/{number} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() for number in range(100))]
    async with Connection(site.url) as connection:
        await connection.send(b"".join(many))
        first, *others = await connection.answers()
    assert first.json() == {"messages": []}
    assert 1 <= len(others) < 100
    for number, answer in enumerate(others):
        assert f"no topic '{number}'" in answer.json()["detail"]


def recorded() -> dict[str, bytes]:
    """A request of each kind, and one in chunks."""
    number = next(NUMBERS)
    line = b'{"id":"cut-line-%d","payload":1,"in":"1h"}' % number
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n%s\r\n0\r\n\r\n"
    one = b'{"id":"cut-%d","payload":1,"in":"1h"}' % number
    return {
        "one": posted(MESSAGES, one),
        "array": posted(MESSAGES, b"[" + one.replace(b"cut", b"cut-array") + b"]"),
        "lines": posted(MESSAGES, line, kind="application/x-ndjson"),
        "chunks": chunked % (len(one) + 7, one.replace(b"cut", b"cut-chunks")),
        "raw": posted(MESSAGES, b"payload", "Timeline-In: 1h", f"Timeline-Id: cut-raw-{number}", kind="text/plain"),
        "lease": posted("/v1/topics/departures/leases", b'{"wait":0}'),
        "ack": posted("/v1/leases:ack", b'{"receipts":["none"]}'),
        "list": f"GET {MESSAGES}?limit=1 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(),
        "move": PATCH % (TARGET, len(MOVE), MOVE),
        "cancel": b"DELETE %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % TARGET,
        "topic": b"PUT /v1/topics/departures HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}",
    }


async def cut_short(site: Site, request_: bytes, length: int) -> None:
    """Send the start of a request, end, and see that there is no good answer."""
    async with Connection(site.url) as connection:
        await connection.send(request_[:length])
        connection.end()
        assert not any(answer.status < 400 for answer in await connection.answers()), (request_, length)


@pytest.mark.parametrize("kind", recorded())
async def test_a_request_cut_at_any_byte_does_nothing(site: Site, tl: timeline.Timeline, kind: str) -> None:
    """And all others are served meanwhile."""
    request_ = recorded()[kind]
    async with tl.producer("departures") as producer:
        await producer.produce(b"", id="cut-target", in_="1h", if_exists="replace")
    before = await stored(tl)
    lengths = range(1, len(request_))
    for start in range(0, len(lengths), 50):
        await asyncio.gather(*(cut_short(site, request_, length) for length in lengths[start : start + 50]))
    async with Connection(site.url) as connection, httpx.AsyncClient(base_url=site.url, timeout=60) as http:
        assert await stored(tl) == before
        assert (await http.get("/metrics")).text.count("timeline_gateway_requests_in_flight 1.0") == 1
        await connection.send(request_)
        assert (await connection.answer()).status < 300
    after = await stored(tl)
    if kind in ("move", "cancel"):
        version = before.pop("cut-target")
        assert after == before | ({"cut-target": version + 1} if kind == "move" else {})
    else:
        assert len(after) == len(before) + (kind in ("one", "array", "lines", "chunks", "raw"))


async def test_lines_that_break_off_say_where(site: Site, tl: timeline.Timeline) -> None:
    """In the summary, and in answers per line."""
    for number, accept in enumerate(("*/*", "application/x-ndjson")):
        lines = b"".join(b'{"id":"broken-%d-%d","payload":1,"in":"1h"}\n' % (number, line) for line in range(1_500))
        head = (
            f"POST {MESSAGES} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\nAccept: {accept}\r\n"
        )
        async with Connection(site.url) as connection:
            await connection.send(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
            await connection.send(b"%x\r\n%s\r\nno chunk\r\n" % (len(lines), lines))
            answer = await connection.answer()
        assert answer.status == 207
        if number:
            *good, stopped = [json.loads(line) for line in answer.body.splitlines()]
            assert {one["status"] for one in good} == {"OK"}
            put = len(good)
        else:
            told = answer.json()
            stopped, put = told["stopped"], told["counts"]["OK"]
        assert put == 1_000 and (stopped["line"], stopped["status"]) == (1_001, "INVALID")
        assert "breaks the rules of HTTP/1.1" in stopped["detail"] and "nor any after it was put" in stopped["detail"]
        assert await tl.get("departures", f"broken-{number}-999") is not None
        assert await tl.get("departures", f"broken-{number}-1000") is None


@pytest.mark.parametrize("kind", ["application/json", "application/x-ndjson", "text/plain"])
async def test_an_encoded_body_is_refused_and_not_stored_as_it_is(http: httpx.AsyncClient, kind: str) -> None:
    headers = {"Content-Type": kind, "Content-Encoding": "gzip"} | (
        {"Timeline-In": "1h"} if kind == "text/plain" else {}
    )
    answer = await http.post(MESSAGES, content=BODY, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (400, "INVALID")
    assert "Content-Encoding 'gzip' is not read: send the body as it is" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("head", "status", "said"),
    [
        (
            f"GET {MESSAGES}?tag=".encode() + "frühling".encode(),
            400,
            "must be written with percent signs, such as %C3%BC",
        ),
        (b"GET foo", 400, "begins with /"),
        (b"GET /" + b"p" * 4_096, 431, "a path of at most 4096 bytes"),
        (b"GET /login?" + b"a" * 8_193, 431, "a query of 8192 with 100 fields"),
        (b"GET /login?" + b"a&" * 100, 431, "a query of 8192 with 100 fields"),
        (b"GET /login HTTP/1.1\r\nCookie: " + b"a" * 16_385, 431, "100 cookies of 16384 bytes in all"),
        (b"GET /login HTTP/1.1\r\nCookie: " + b"a=b;" * 100, 431, "100 cookies of 16384 bytes in all"),
    ],
)
async def test_an_address_that_cannot_be_served_says_why(site: Site, head: bytes, status: int, said: str) -> None:
    version = b"" if b"HTTP/1.1" in head else b" HTTP/1.1"
    async with Connection(site.url) as connection:
        await connection.send(head + version + b"\r\nHost: localhost\r\n\r\n")
        answer = await connection.answer()
    assert (answer.status, said in answer.body.decode()) == (status, True), answer.body
