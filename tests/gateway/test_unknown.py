"""A broker that takes a put and does not answer: 504, and nothing is ever put under another key."""

from __future__ import annotations

import asyncio
import os
import signal
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


async def test_a_put_without_an_answer_may_have_happened_and_its_repeat_tells(tmp_path: Path) -> None:
    with broker(tmp_path) as served, gateway(tmp_path, served["listen"]) as opened:
        async with (
            timeline.connect(served["listen"]) as tl,
            httpx.AsyncClient(base_url=f"http://{opened['listen']}", timeout=60) as http,
        ):
            await tl.create_topic("departures")
            assert (await http.post(MESSAGES, json={"id": "before", "payload": 1, "in": "1h"})).status_code == 201

            async def put(kind: str) -> httpx.Response:
                body, headers = PUTS[kind]
                return await http.post(MESSAGES, content=body, headers=headers | {"Idempotency-Key": kind})

            os.kill(served["pid"], signal.SIGSTOP)
            try:
                lost = await asyncio.gather(*map(put, PUTS))
            finally:
                os.kill(served["pid"], signal.SIGCONT)
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
