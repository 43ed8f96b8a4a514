"""Leases over HTTP: long polls, and settles by receipts."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

import timeline
from tests.gateway.test_messages import problem

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture
async def topic(tl: timeline.Timeline, request: pytest.FixtureRequest) -> str:
    """A topic for one test."""
    name = request.node.name[:100].replace("[", ".").replace("]", "")
    await tl.create_topic(name)
    return str(name)


async def put(http: httpx.AsyncClient, topic: str, *ids: str, **more: Any) -> None:
    body = [{"id": id, "payload": id, "in": 0, **more} for id in ids]
    assert (await http.post(f"/v1/topics/{topic}/messages", json=body)).status_code == 207


async def lease(http: httpx.AsyncClient, topic: str, **asked: Any) -> list[dict[str, Any]]:
    answer = await http.post(f"/v1/topics/{topic}/leases", json={"wait": "20s", **asked})
    assert answer.status_code == 200, answer.text
    messages: list[dict[str, Any]] = answer.json()["messages"]
    return messages


async def settle(http: httpx.AsyncClient, verb: str, *receipts: str, **more: Any) -> list[str]:
    answer = await http.post(f"/v1/leases:{verb}", json={"receipts": list(receipts), **more})
    assert answer.status_code == 207, answer.text
    return [one["status"] for one in answer.json()["results"]]


async def test_a_message_is_leased_and_acknowledged(http: httpx.AsyncClient, topic: str) -> None:
    await put(http, topic, "one", tag="ops", headers={"trace": "7"})
    (message,) = await lease(http, topic, lease="1m")
    assert (message["id"], message["payload"], message["tag"], message["deliveries"]) == ("one", "one", "ops", 1)
    assert message["headers"] == {"trace": "7", "content-type": "application/json"}
    assert message["lease_until"] > message["due"] and message["lateness_ms"] >= 0
    receipt = message["receipt"]
    assert await settle(http, "extend", receipt, lease="5m") == ["OK"]
    assert await settle(http, "ack", receipt, "no receipt") == ["OK", "INVALID"]
    assert await settle(http, "ack", receipt) == ["NOT_FOUND"]


async def test_a_payload_of_many_levels_keeps_nothing_from_others(http: httpx.AsyncClient, topic: str) -> None:
    deep, kind = b"[" * 5_000 + b"]" * 5_000, {"Content-Type": "application/json", "Timeline-In": "0"}
    put_deep = await http.post(f"/v1/topics/{topic}/messages", content=deep, headers=kind | {"Timeline-Id": "deep"})
    assert put_deep.status_code == 201
    await put(http, topic, "plain")
    found = {one["id"]: one for _ in range(2) for one in await lease(http, topic, max=1)}
    assert found["deep"]["payload_text"] == deep.decode() and found["plain"]["payload"] == "plain"
    shown = await http.get(f"/v1/topics/{topic}/messages/deep")
    assert shown.status_code == 200 and shown.json()["payload_text"] == deep.decode()


async def test_a_long_poll_returns_what_comes_due_while_it_waits(http: httpx.AsyncClient, topic: str) -> None:
    waiting = asyncio.create_task(lease(http, topic, wait="60s"))
    await put(http, topic, "later", **{"in": "300ms"})
    assert [one["id"] for one in await waiting] == ["later"]


async def test_a_poll_without_anything_due_is_empty(http: httpx.AsyncClient, topic: str) -> None:
    assert await lease(http, topic, wait="50ms") == []


async def test_released_messages_come_again_and_buried_ones_do_not(
    http: httpx.AsyncClient, tl: timeline.Timeline, topic: str
) -> None:
    await put(http, topic, "back", "dead")
    found = {one["id"]: one for one in await lease(http, topic, max=10)}
    while len(found) < 2:
        found |= {one["id"]: one for one in await lease(http, topic, max=10)}
    assert await settle(http, "release", found["back"]["receipt"], reason="not now") == ["OK"]
    assert await settle(http, "bury", found["dead"]["receipt"], reason="bad address") == ["OK"]
    (again,) = await lease(http, topic)
    assert (again["id"], again["deliveries"]) == ("back", 2)
    assert await settle(http, "ack", found["back"]["receipt"]) == ["FENCED"]
    letter = await tl.get(topic, "dead")
    assert letter is not None and letter.dead == "bad address"


async def test_a_caller_that_leaves_while_it_waits_takes_nothing(http: httpx.AsyncClient, topic: str) -> None:
    waiting = asyncio.create_task(lease(http, topic, wait="60s"))
    async with asyncio.timeout(60):
        while "in_flight 2.0" not in (await http.get("/metrics")).text:  # the poll, and this question
            pass
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(60):
        while "in_flight 1.0" not in (await http.get("/metrics")).text:
            pass
    await put(http, topic, "mine")
    (message,) = await lease(http, topic)
    assert message["deliveries"] == 1


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"max": 0}, "max must be a whole number from 1"),
        ({"wait": "soon"}, "wait must be numbers with a unit"),
        ({"lease": 0}, "lease"),
        ({"credit": 1}, "there is no field 'credit'"),
        ({"max": "ten"}, "max"),
    ],
)
async def test_a_wrong_poll_gets_the_sentence_that_mends_it(
    http: httpx.AsyncClient, asked: dict[str, Any], said: str
) -> None:
    answer = await http.post("/v1/topics/departures/leases", json=asked)
    assert said in problem(answer, 400, "INVALID")


@pytest.mark.parametrize("verb", ["ack", "release"])
async def test_a_call_takes_so_many_receipts_at_most(http: httpx.AsyncClient, verb: str) -> None:
    """Each is judged and answered alone, which would hold up others."""
    many = await http.post(f"/v1/leases:{verb}", json={"receipts": [""] * 10_001})
    assert "length <= 10000" in problem(many, 400, "INVALID")
    assert await settle(http, verb, *["none"] * 10_000) == ["INVALID"] * 10_000


async def test_a_verb_takes_its_own_fields_only(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/leases:ack", json={"receipts": [], "reason": "x"})
    assert "there is no field 'reason'" in problem(answer, 400, "INVALID")
    answer = await http.post("/v1/leases:extend", json={"receipts": []})
    assert "lease" in problem(answer, 400, "INVALID")
