"""Errors over HTTP name what a caller of HTTP has: no arguments of Python, and no flags."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from timeline import errors
from timeline.gateway.problems import in_words_of_http

FOREIGN = re.compile(r"\btl\.|\bd\.|\bin_\b|\b\w+=(?!\")|\bNone\b|\bTrue\b|(?<!\w)--\w|`|\(\)|_topic\b")
AT = {"payload": 1, "in": 0}
REQUESTS: tuple[tuple[str, str, Any, str], ...] = (
    ("POST", "/t/messages", {"payload": 1, "at": 1_700_000_000}, "at 1700000000 looks like seconds"),
    ("POST", "/t/messages", {"payload": 1, "at": "2300-01-01T00:00Z"}, "the topic's setting horizon raises it"),
    ("POST", "/none/messages", AT, "there is no topic 'none': create it first (PUT /v1/topics/{topic})"),
    ("POST", "/none/leases", {"wait": 0}, "create it first (PUT /v1/topics/{topic})"),
    ("POST", "/t/messages", AT | {"id": "kept", "group": "other"}, "act for that one ('group')"),
    ("DELETE", "/t/messages/leased", None, "or cancel with ?leased=true"),
    ("PATCH", "/t/messages?tag=s", {"by": 1, "resume": "x"}, "Give it as 'resume' of the answer had it"),
    ("DELETE", "/t/messages?tag=", None, "an empty one would mean everything"),
    ("POST", "/t/dead:revive", {"ids": ["kept"]}, "GET /v1/topics/{topic}/messages/{id} says where it is"),
    ("PUT", "/t", {"lease": "1h"}, "lease is 30s, not 1h: PATCH /v1/topics/{topic} changes it"),
    ("GET", "/t/messages?due_from=2031-01-01T00:00Z&due_to=2030-01-01T00:00Z", None, "due_from must lie before due_to"),
)  # fmt: skip


def foreign(sentence: str) -> list[str]:
    return FOREIGN.findall(sentence.replace("?leased=true", ""))


def test_the_advice_of_every_error_and_call() -> None:
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.TimelineError)
    ]
    told = [kind.advice for kind in kinds] + list(errors.ADVICE_OF_CALLS.values())
    assert len(told) > 15
    for advice in map(in_words_of_http, told):
        assert foreign(advice) == [], advice


@pytest.mark.processes
@pytest.mark.slow
async def test_the_sentences_of_refusals(http: httpx.AsyncClient) -> None:
    path = "/v1/topics"
    assert (await http.put(f"{path}/t", json={})).status_code == 201
    for id, due in (("leased", 0), ("kept", "1h")):
        await http.post(f"{path}/t/messages", json={"id": id, "payload": 1, "in": due, "tag": "s"})
    (receipt,) = [one["receipt"] for one in (await http.post(f"{path}/t/leases", json={})).json()["messages"]]
    for method, where, body, said in REQUESTS:
        answer = await http.request(method, path + where, json=body)
        told = answer.json()
        detail = told["detail"] if "detail" in told else told["results"][0]["detail"]
        assert said in detail and foreign(detail) == [], detail
    damaged = await http.post("/v1/leases:ack", json={"receipts": [receipt[:-2]]})
    assert damaged.json()["results"][0]["detail"].endswith("Give it as it came with the delivery ('receipt')")


@pytest.mark.processes
@pytest.mark.slow
async def test_a_topic_that_is_not_there_is_no_message_that_is_not_there(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/topics/none/messages", json=AT)
    assert answer.status_code == 404 and "no message has this id" not in answer.json()["detail"]
