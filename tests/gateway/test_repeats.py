"""A request whose answer was lost is sent again under its Idempotency-Key, to another gateway, which knows nothing."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Site
from tests.gateway.processes import gateway
from tests.gateway.test_leases import lease
from tests.gateway.test_messages import problem

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture(scope="module")
def other_url(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with gateway(tmp_path_factory.mktemp("other"), site.broker, "--no-push") as opened:
        yield f"http://{opened['listen']}"


class Repeating:
    """Sends each request twice under one key. The first answer is lost: nobody but the test sees it."""

    def __init__(self, first: httpx.AsyncClient, second: httpx.AsyncClient) -> None:
        self.first, self.second = first, second
        self._keys = 0

    async def __call__(self, method: str, path: str, **asked: Any) -> tuple[httpx.Response, httpx.Response]:
        """Both answers."""
        self._keys += 1
        headers = {**asked.pop("headers", {}), "Idempotency-Key": f"{path} {self._keys}"}
        lost = await self.first.request(method, path, headers=headers, **asked)
        return lost, await self.second.request(method, path, headers=headers, **asked)

    async def same(self, method: str, path: str, **asked: Any) -> Any:
        """The answer, which must be the same both times."""
        lost, again = await self(method, path, **asked)
        assert (again.status_code, again.content) == (lost.status_code, lost.content)
        assert lost.is_success, lost.text
        return json.loads(lost.content)


@pytest.fixture
async def twice(http: httpx.AsyncClient, other_url: str) -> AsyncIterator[Repeating]:
    async with httpx.AsyncClient(base_url=other_url, timeout=60) as other:
        yield Repeating(http, other)


@pytest.fixture
async def topic(http: httpx.AsyncClient, request: pytest.FixtureRequest) -> str:
    """The path of a topic of this test's own."""
    path = "/v1/topics/" + re.sub(r"\W+", "-", request.node.name).strip("-")
    assert (await http.put(path, json={})).status_code == 201
    return path


async def put(http: httpx.AsyncClient, topic: str, *ids: str, due: str = "1h", tag: str | None = None) -> None:
    body = [{"id": id, "payload": id, "in": due} | ({"tag": tag} if tag else {}) for id in ids]
    assert {one["status"] for one in (await http.post(f"{topic}/messages", json=body)).json()["results"]} == {"OK"}


async def stored(http: httpx.AsyncClient, topic: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = (await http.get(f"{topic}/messages", params={"limit": 1_000})).json()["messages"]
    return listed


@pytest.mark.parametrize(
    ("count", "asked"),
    [
        (1, {"json": {"payload": 1, "in": "1h"}}),
        (1, {"json": {"id": "own", "payload": 1, "in": "1h"}}),
        (1, {"content": b"raw", "headers": {"Timeline-In": "1h", "Content-Type": "text/plain"}}),
        (3, {"json": [{"payload": number, "in": "1h"} for number in range(3)]}),
    ],
    ids=["one", "own id", "raw", "array"],
)
async def test_a_put_stores_once(
    twice: Repeating, http: httpx.AsyncClient, topic: str, count: int, asked: dict[str, Any]
) -> None:
    await twice.same("POST", f"{topic}/messages", **asked)
    assert len(await stored(http, topic)) == count


@pytest.mark.parametrize("accept", ["application/json", "application/x-ndjson"])
async def test_a_stream_of_lines_stores_each_once(
    twice: Repeating, http: httpx.AsyncClient, topic: str, accept: str
) -> None:
    lines = b"".join(b'{"payload": %d, "in": "1h"}\n' % number for number in range(700))
    headers = {"Content-Type": "application/x-ndjson", "Accept": accept}
    lost, again = await twice("POST", f"{topic}/messages", content=lines, headers=headers)
    assert lost.status_code == again.status_code == 207
    assert lost.content == again.content
    assert len(await stored(http, topic)) == 700


async def test_one_key_with_another_message_is_refused(http: httpx.AsyncClient, topic: str) -> None:
    """Two programs that count their keys from 1 must not lose messages without a word."""
    key = {"Idempotency-Key": "1"}
    path = f"{topic}/messages"
    assert (await http.post(path, json={"payload": "a", "in": "1h"}, headers=key)).status_code == 201
    taken = "this Idempotency-Key was used for another message: give each message a key of its own"
    assert problem(await http.post(path, json={"payload": "b", "in": "1h"}, headers=key), 409, "EXISTS") == taken
    of_others = {"payload": "a", "in": "1h", "group": "others"}
    problem(await http.post(path, json=of_others, headers=key), 403, "FORBIDDEN")
    assert len(await stored(http, topic)) == 1
    both = [{"payload": "b", "in": "1h"}, {"id": "own", "payload": "c", "in": "1h"}]
    (first, second) = (await http.post(path, json=both, headers=key)).json()["results"]
    assert (first["status"], first["detail"], second["status"]) == ("EXISTS", taken, "OK")
    other = {"id": "own", "payload": "d", "in": "1h"}
    assert 'if_exists="replace"' in problem(await http.post(path, json=other, headers=key), 409, "EXISTS")


TWICE = [
    *(("POST", "", name) for name in ("Idempotency-Key", "Timeline-In", "Timeline-Id", "Authorization")),
    ("PATCH", "/a", "Idempotency-Key"),
    ("DELETE", "/a", "Idempotency-Key"),
]


@pytest.mark.parametrize(("method", "path", "name"), TWICE)
async def test_a_header_that_comes_twice_is_refused(
    http: httpx.AsyncClient, topic: str, method: str, path: str, name: str
) -> None:
    """Its repeat might go by the other one."""
    others = {"POST": {"Timeline-In": "1h", "Timeline-Id": "a"}, "PATCH": {"Content-Type": "application/json"}}
    headers = [one for one in others.get(method, {}).items() if one[0] != name] + [(name, "1h"), (name, "2h")]
    body = b'{"in":"1h"}' if method != "DELETE" else None
    refused = await http.request(method, f"{topic}/messages{path}", content=body, headers=headers)
    assert f"the header {name} is there 2 times" in problem(refused, 400, "INVALID")
    assert await stored(http, topic) == []


async def test_a_repeat_in_another_trace_is_the_same_message(http: httpx.AsyncClient, topic: str) -> None:
    told = []
    for span in ("1", "2"):
        headers = {"Idempotency-Key": "k", "traceparent": f"00-{span * 32}-{span * 16}-01"}
        told.append(await http.post(f"{topic}/messages", json={"payload": 1, "in": "1h"}, headers=headers))
    assert told[0].json() == told[1].json() and told[1].status_code == 201


async def test_a_put_that_replaces_or_moves_does_so_once(twice: Repeating, http: httpx.AsyncClient, topic: str) -> None:
    await put(http, topic, "there")
    moved = await twice.same(
        "POST", f"{topic}/messages", json={"id": "there", "payload": "there", "in": "2h", "if_exists": "move"}
    )
    assert (moved["moved"], moved["version"]) == (True, 2)
    new = {"id": "there", "payload": "new", "in": "3h", "if_exists": "replace"}
    assert (await twice.same("POST", f"{topic}/messages", json=new))["version"] == 1


async def test_a_move_moves_once(twice: Repeating, http: httpx.AsyncClient, topic: str) -> None:
    await put(http, topic, "moved")
    path = f"{topic}/messages/moved"
    assert (await twice.same("PATCH", path, json={"in": "2h"}))["version"] == 2
    # The version that the request names is gone by its own doing: a repeat is not refused for that.
    assert (await twice.same("PATCH", path, json={"in": "3h", "if_version": 2}))["version"] == 3
    assert (await http.get(path)).json()["version"] == 3


async def test_one_key_with_another_request_is_another_change(http: httpx.AsyncClient, topic: str) -> None:
    await put(http, topic, "a", "b")
    key = {"Idempotency-Key": "one"}
    moves = [("a", "2h"), ("a", "3h"), ("b", "2h")]
    told = [(await http.patch(f"{topic}/messages/{id}", json={"in": to}, headers=key)).json() for id, to in moves]
    assert [one["version"] for one in told] == [2, 3, 2]


async def test_a_repeat_after_another_move_is_a_new_one_unless_it_names_a_version(
    http: httpx.AsyncClient, topic: str
) -> None:
    """As the document says: a message remembers its last change alone."""
    await put(http, topic, "moved")
    path = f"{topic}/messages/moved"
    bare = {"json": {"in": "2h"}, "headers": {"Idempotency-Key": "bare"}}
    sure = {"json": {"in": "2h", "if_version": 2}, "headers": {"Idempotency-Key": "sure"}}
    told = [(await http.patch(path, **asked)).json().get("version") for asked in (bare, sure, bare)]
    assert told == [2, 3, 4]
    problem(await http.patch(path, **sure), 412, "FENCED")


async def test_a_move_without_a_key_is_done_again(http: httpx.AsyncClient, topic: str) -> None:
    await put(http, topic, "moved")
    told = [(await http.patch(f"{topic}/messages/moved", json={"in": "2h"})).json()["version"] for _ in range(2)]
    assert told == [2, 3]


async def test_a_cancel_is_recognised_while_its_topic_remembers(
    twice: Repeating, http: httpx.AsyncClient, topic: str
) -> None:
    await http.patch(topic, json={"remember": "1h"})
    await put(http, topic, "gone")
    assert (await twice.same("DELETE", f"{topic}/messages/gone"))["status"] == "OK"
    # Another cancel is no repeat.
    problem(await http.delete(f"{topic}/messages/gone", headers={"Idempotency-Key": "other"}), 404, "NOT_FOUND")


async def test_a_cancel_that_nobody_remembers_says_what_may_have_been(
    twice: Repeating, http: httpx.AsyncClient, topic: str
) -> None:
    await put(http, topic, "gone")
    lost, again = await twice("DELETE", f"{topic}/messages/gone")
    assert lost.status_code == 200
    assert "that call cancelled it, or it was delivered first" in problem(again, 404, "NOT_FOUND")
    await http.delete(topic)
    lost, _ = await twice("DELETE", f"{topic}/messages/gone")
    assert "there is no topic" in problem(lost, 404, "NOT_FOUND")


@pytest.mark.parametrize(
    "where", [{"by": "30m"}, {"in": "2h"}, {"at": "2030-01-01T00:00Z"}], ids=lambda to: next(iter(to))
)
async def test_a_tag_is_moved_once(
    twice: Repeating, http: httpx.AsyncClient, topic: str, where: dict[str, str]
) -> None:
    await put(http, topic, *"abc", tag="spring")
    told = await twice.same("PATCH", f"{topic}/messages", params={"tag": "spring"}, json=where)
    assert told["counts"] == {"OK": 3}
    assert {one["version"] for one in await stored(http, topic)} == {2}


async def test_a_tag_is_cancelled_and_a_repeat_finds_nothing(
    twice: Repeating, http: httpx.AsyncClient, topic: str
) -> None:
    await put(http, topic, *"abc", tag="spring")
    lost, again = await twice("DELETE", f"{topic}/messages", params={"tag": "spring"})
    assert (lost.json()["changed"], again.json()["changed"], again.status_code) == (3, 0, 200)


async def test_a_release_releases_once(twice: Repeating, http: httpx.AsyncClient, topic: str) -> None:
    await put(http, topic, "one", "two", due="0s")
    name = topic.rpartition("/")[2]
    taken = []
    while len(taken) < 2:
        taken += await lease(http, name, max=2)
    receipts = [one["receipt"] for one in taken]
    told = await twice.same("POST", "/v1/leases:release", json={"receipts": receipts, "in": "1h"})
    assert [one["status"] for one in told["results"]] == ["OK", "OK"]
    assert {(one["version"], one["state"]) for one in await stored(http, topic)} == {(3, "waiting")}


@pytest.mark.parametrize(
    ("verb", "more", "again"),
    [("ack", {}, "NOT_FOUND"), ("extend", {"lease": "1m"}, "OK"), ("bury", {"reason": "bad"}, "OK")],
)
async def test_the_other_settles_have_no_second_effect(
    twice: Repeating, http: httpx.AsyncClient, topic: str, verb: str, more: dict[str, str], again: str
) -> None:
    await put(http, topic, "one", due="0s")
    (message,) = await lease(http, topic.rpartition("/")[2])
    lost, repeat = await twice("POST", f"/v1/leases:{verb}", json={"receipts": [message["receipt"]], **more})
    assert [one["status"] for one in lost.json()["results"]] == ["OK"]
    assert [one["status"] for one in repeat.json()["results"]] == [again]


async def buried(http: httpx.AsyncClient, topic: str, *ids: str) -> None:
    """Make dead letters of these messages."""
    await put(http, topic, *ids, due="0s")
    left = len(ids)
    while left:
        taken = await lease(http, topic.rpartition("/")[2], max=left)
        await http.post("/v1/leases:bury", json={"receipts": [one["receipt"] for one in taken], "reason": "bad"})
        left -= len(taken)


async def test_letters_are_revived_once(twice: Repeating, http: httpx.AsyncClient, topic: str) -> None:
    await buried(http, topic, "one", "two")
    told = await twice.same("POST", f"{topic}/dead:revive", json={"ids": ["one", "two"], "in": "1h"})
    assert told["counts"] == {"OK": 2}
    assert {one["version"] for one in await stored(http, topic)} == {3}


async def test_a_letter_that_died_again_is_not_revived_by_a_repeat(http: httpx.AsyncClient, topic: str) -> None:
    await buried(http, topic, "one")
    revive = {"json": {"all": True, "in": 0}, "headers": {"Idempotency-Key": "revive"}}
    assert (await http.post(f"{topic}/dead:revive", **revive)).json()["counts"] == {"OK": 1}
    (message,) = await lease(http, topic.rpartition("/")[2])
    await http.post("/v1/leases:bury", json={"receipts": [message["receipt"]], "reason": "bad again"})
    await http.post(f"{topic}/dead:revive", **revive)
    assert [one["reason"] for one in (await http.get(f"{topic}/dead")).json()["messages"]] == ["bad again"]


async def test_letters_are_purged_and_a_repeat_finds_nothing(
    twice: Repeating, http: httpx.AsyncClient, topic: str
) -> None:
    await buried(http, topic, "one")
    lost, again = await twice("POST", f"{topic}/dead:purge", json={"ids": ["one"]})
    assert (lost.json()["counts"], again.json()["counts"]) == ({"OK": 1}, {"NOT_FOUND": 1})


async def test_topics_are_created_changed_and_dropped_once(twice: Repeating, topic: str) -> None:
    path = f"{topic}-twice"
    lost, again = await twice("PUT", path, json={"lease": "10s"})
    assert (lost.status_code, again.status_code) == (201, 200) and lost.json() == again.json()
    assert (await twice.same("PATCH", path, json={"lease": "20s"}))["revision"] == 2
    lost, again = await twice("DELETE", path)
    assert lost.status_code == 204
    problem(again, 404, "NOT_FOUND")


async def test_calls_of_one_key_at_one_time_are_one(twice: Repeating, http: httpx.AsyncClient, topic: str) -> None:
    await put(http, topic, "moved")
    asked = {"json": {"in": "2h"}, "headers": {"Idempotency-Key": "at once"}}
    path = f"{topic}/messages/moved"
    both = [client.patch(path, **asked) for client in (twice.first, twice.second) for _ in range(5)]
    told = [answer.json() for answer in await asyncio.gather(*both)]
    assert [one["version"] for one in told] == [2] * 10 and told == told[:1] * 10


async def test_the_document_names_the_key_of_every_writing_call(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    writing = [
        call
        for calls in document["paths"].values()
        for method, call in calls.items()
        if method in ("post", "put", "patch", "delete")
    ]
    assert len(writing) > 12
    assert not [path for path, calls in document["paths"].items() for call in calls.values() if not call["description"]]
    silent = [call["operationId"] for call in writing if "`Idempotency-Key`" not in call.get("description", "")]
    assert silent == []
    for call in writing:
        named = [one for one in call.get("parameters", []) if one["name"] == "Idempotency-Key"]
        assert bool(named) == ("needs no `Idempotency-Key`" not in " ".join(call["description"].split())), call[
            "operationId"
        ]
