"""Calls past the framework answer as they do through it."""

from __future__ import annotations

from typing import Any, cast

import httpx
import pytest

from timeline.errors import Invalid
from timeline.gateway.app import OFTEN
from timeline.gateway.direct import DirectCalls, HostNames
from timeline.gateway.service import GatewaySettings

pytestmark = [pytest.mark.processes, pytest.mark.slow]

JSON = {"Content-Type": "application/json"}
LINES = {"Content-Type": "application/x-ndjson", "Accept": "application/x-ndjson"}
PUT, LEASE, ACK = "/v1/topics/departures/messages", "/v1/topics/departures/leases", "/v1/leases:ack"
NEW = '{"id": "direct", "payload": {"gate": "A7"}, "at": "2099-01-01T00:00Z"}'
CASES: dict[str, tuple[str, str | bytes, dict[str, str]]] = {
    "one": (PUT, NEW, JSON),
    "many": (PUT, f"[{NEW}, {{}}]", JSON),
    "lines": (PUT, NEW + "\nno json\n", LINES),
    "raw": (PUT, b"\x00", {"Timeline-At": "2099-01-01T00:00Z", "Timeline-Id": "raw"}),
    "exists": (PUT, NEW.replace("A7", "A8"), JSON),
    "no topic": (PUT.replace("departures", "nowhere"), NEW, JSON),
    "no topic, of lines": (PUT.replace("departures", "nowhere"), NEW, LINES),
    "an escaped topic": (PUT.replace("departures", "de%2Fpartures"), NEW, JSON),
    "another type": (PUT, NEW, {"Content-Type": "text/csv"}),
    "no json": (PUT, "{", JSON),
    "an unknown field": (PUT, '{"due": 1}', JSON),
    "nothing due": (LEASE, '{"wait": 0}', JSON),
    "a number as text": (LEASE, '{"wait": 0, "max": "5"}', JSON),
    "a wrong wait": (LEASE, '{"wait": "soon"}', JSON),
    "an unknown field of a lease": (LEASE, '{"waits": 1, "max": []}', JSON),
    "no body": (LEASE, "", JSON),
    "no json of a lease": (LEASE, "nothing", JSON),
    "bytes that are no text": (LEASE, b'{"wait": "\xff"}', JSON),
    "a nested body": (LEASE, '{"wait": ' + "[" * 100_000, JSON),
    "a charset": (LEASE, '{"wait": 0}', {"Content-Type": "application/json; charset=utf-8"}),
    "receipts": (ACK, '{"receipts": ["none"]}', JSON),
    "no receipts": (ACK, "{}", JSON),
    "a wrong token": (ACK, '{"receipts": []}', {**JSON, "Authorization": "Basic eDp5"}),
    "extend": ("/v1/leases:extend", '{"receipts": ["none"], "lease": "1m"}', JSON),
    "release": ("/v1/leases:release", '{"receipts": ["none"], "in": "1m", "at": 5}', JSON),
    "bury": ("/v1/leases:bury", '{"receipts": ["none"], "reason": "why"}', JSON),
}


@pytest.mark.parametrize("case", CASES)
async def test_it_answers_as_the_framework_does(http: httpx.AsyncClient, case: str) -> None:
    path, body, headers = CASES[case]
    await http.post(PUT, content=NEW, headers=JSON)

    async def answer(**more: str) -> tuple[int, dict[str, str], Any]:
        told = await http.post(path, content=body, headers={**headers, **more})
        kept = {name: value for name, value in told.headers.items() if name != "date"}
        return told.status_code, kept, told.text

    # The framework gets requests with an origin, here the gateway's own.
    await answer()
    assert await answer() == await answer(Origin=str(http.base_url).rstrip("/"))


async def test_both_ways_have_the_same_names_in_metrics(http: httpx.AsyncClient) -> None:
    async def routes() -> set[str]:
        lines = (await http.get("/metrics")).text.splitlines()
        return {line for line in lines if line.startswith("timeline_gateway_request_seconds_count")}

    for path in (PUT, LEASE, ACK):
        await http.post(path, content='{"wait": 0}', headers=JSON)
    before = {line.rpartition(" ")[0] for line in await routes()}
    for path in (PUT, LEASE, ACK):
        await http.post(path, content='{"wait": 0}', headers={**JSON, "Origin": str(http.base_url).rstrip("/")})
    assert {line.rpartition(" ")[0] for line in await routes()} - before <= {
        'timeline_gateway_request_seconds_count{method="GET",route="/metrics",status="200"}'
    }


@pytest.mark.parametrize(
    ("path", "more", "direct"),
    [
        (PUT, {}, True),
        (LEASE, {}, True),
        (ACK, {}, True),
        (PUT, {"method": "GET"}, False),
        (PUT, {"query_string": b"tag=a"}, False),
        ("/v1/topics//messages", {}, False),
        ("/v1/topics/a/b/messages", {}, False),
        (PUT + "/", {}, False),
        (PUT, {"headers": [(b"host", b"a"), (b"origin", b"https://a")]}, False),
        (PUT, {"headers": [(b"host", b"a"), (b"sec-fetch-site", b"cross-site")]}, False),
        (PUT, {"headers": [(b"host", b"a b")]}, False),
        (LEASE, {"headers": [(b"host", b"a"), (b"content-type", b"text/plain")]}, False),
    ],
)
def test_usual_requests_alone_go_past_the_framework(path: str, more: dict[str, Any], direct: bool) -> None:
    calls = DirectCalls(cast(Any, None), OFTEN, HostNames(GatewaySettings()), unasked)
    usual = [(b"host", b"localhost:9080"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": usual, **more}
    call, given = calls._found(scope)
    assert (call is not None) is direct
    assert given == ({"topic": "departures"} if direct and path != ACK else {})


async def unasked() -> bool:
    raise AssertionError


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("gateway:9080", True),
        ("timeline.default.svc", True),
        ("timeline.default.svc.cluster.local:9080", True),
        ("10.0.0.7:9080", True),
        ("app.example.org", True),
        ("evil.example:9080", False),
        ("local.evil.example", False),
        ("", False),
    ],
)
def test_an_open_gateway_answers_to_names_that_no_stranger_owns(host: str, known: bool) -> None:
    names = HostNames(GatewaySettings("0.0.0.0:9080", insecure=True, origins=("https://app.example.org",)))
    assert (names.refusal([(b"host", host.encode())]) is None) is known


@pytest.mark.parametrize("origin", ["https://[x", "https://a b", "ftp://a", "https://a/b", "a.example"])
def test_an_origin_that_is_none_is_refused(origin: str) -> None:
    with pytest.raises(Invalid, match="an origin is a scheme and a host"):
        GatewaySettings(origins=(origin,)).check()
    assert GatewaySettings(origins=("https://a.example:8443", "http://[::1]:3000")).check()
