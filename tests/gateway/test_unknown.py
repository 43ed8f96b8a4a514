"""A broker that takes a call and does not answer: 504, and nothing is ever done twice under another key."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

import timeline
from tests.gateway.processes import JSON, broker, gateway
from tests.gateway.test_messages import problem

pytestmark = [pytest.mark.processes, pytest.mark.slow]

MESSAGES = "/v1/topics/departures/messages"
ONE = b'{"payload":1,"in":"1h"}'
PUTS = {
    "one": (ONE, JSON),
    "array": (b"[" + ONE + b"," + ONE + b"]", JSON),
    "lines": (ONE + b"\n" + ONE, {"Content-Type": "application/x-ndjson"}),
    "payload": (b"raw", {"Timeline-In": "1h"}),
}


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[timeline.Timeline, httpx.AsyncClient, int]]:
    """A client of a broker with a topic, one of its gateway, and the broker's process."""
    with broker(folder) as started, gateway(folder, started["listen"]) as opened:
        async with (
            timeline.connect(started["listen"]) as tl,
            httpx.AsyncClient(base_url=f"http://{opened['listen']}", timeout=60) as http,
        ):
            await tl.create_topic("departures")
            yield tl, http, started["pid"]


async def test_a_put_without_an_answer_may_have_happened_and_its_repeat_tells(tmp_path: Path) -> None:
    async with served(tmp_path) as (tl, http, pid):
        assert (await http.post(MESSAGES, json={"id": "before", "payload": 1, "in": "1h"})).status_code == 201

        async def put(kind: str) -> httpx.Response:
            body, headers = PUTS[kind]
            return await http.post(MESSAGES, content=body, headers=headers | {"Idempotency-Key": kind})

        os.kill(pid, signal.SIGSTOP)
        try:
            lost = await asyncio.gather(*map(put, PUTS))
        finally:
            os.kill(pid, signal.SIGCONT)
        for answer in lost:
            said = problem(answer, 504, "UNKNOWN")
            assert "may have happened" in said and "Idempotency-Key" in said, said
        repeats = await asyncio.gather(*map(put, PUTS))
        for kind, answer in zip(PUTS, repeats, strict=True):
            assert answer.status_code == (207 if kind in ("array", "lines") else 201), answer.text
        again = await asyncio.gather(*map(put, PUTS))
        assert [answer.json() for answer in again] == [answer.json() for answer in repeats]
        found = [one.id async for one in tl.scan("departures")]
    assert len(found) == len(set(found)) == 1 + 1 + 2 + 2 + 1


@pytest.mark.prove
async def test_a_change_without_an_answer_may_have_happened_and_its_repeat_tells(tmp_path: Path) -> None:
    async with served(tmp_path) as (tl, http, pid):
        for id, tag in (("moved", ""), ("cancelled", ""), ("tagged", "spring")):
            put = await http.post(MESSAGES, json={"id": id, "payload": 1, "in": "1h", "tag": tag})
            assert put.status_code == 201
        await http.post(MESSAGES, json={"id": "leased", "payload": 1, "in": 0})
        leases = await http.post("/v1/topics/departures/leases", json={"wait": "20s", "lease": "10m"})
        receipts = [one["receipt"] for one in leases.json()["messages"]]
        calls: dict[tuple[str, str], dict[str, object] | None] = {
            ("PATCH", f"{MESSAGES}/moved"): {"in": "2h"},
            ("DELETE", f"{MESSAGES}/cancelled"): None,
            ("PATCH", f"{MESSAGES}?tag=spring"): {"by": "1h"},
            ("POST", "/v1/leases:release"): {"receipts": receipts, "in": "3h"},
        }

        async def call(one: tuple[str, str]) -> httpx.Response:
            return await http.request(*one, json=calls[one], headers={"Idempotency-Key": "change"})

        os.kill(pid, signal.SIGSTOP)
        try:
            lost = await asyncio.gather(*map(call, calls))
        finally:
            os.kill(pid, signal.SIGCONT)
        moved, cancelled, by_tag, released = lost
        for answer in (moved, cancelled, released):
            assert "may have happened" in problem(answer, 504, "UNKNOWN")
        assert "nothing happened" in problem(by_tag, 503, "UNAVAILABLE"), "it had only looked so far"
        moved, cancelled, tagged, again = await asyncio.gather(*map(call, calls))
        assert (moved.status_code, moved.json()["version"]) == (200, 2)
        assert cancelled.status_code in (200, 404), "done now, or before"
        assert tagged.json()["counts"] == {"OK": 1}
        assert [one["status"] for one in again.json()["results"]] in (["OK"], ["FENCED"], ["NOT_FOUND"])
        found = {one.id: one async for one in tl.scan("departures")}
    assert set(found) == {"moved", "tagged", "leased"}
    assert found["moved"].version == found["tagged"].version == 2, "each was moved once"
    assert found["leased"].state == "waiting" and not found["leased"].holder
