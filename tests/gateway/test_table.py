"""The rest of the API: topics, lists, tags, dead letters, lateness, the cluster, and streams of events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

import timeline
from tests.gateway.conftest import Site
from tests.gateway.connections import Connection
from tests.gateway.test_leases import lease, put, settle
from tests.gateway.test_messages import problem
from timeline.driver.queries import NAMES
from timeline.gateway.clients import CallerClient
from timeline.gateway.routes import many
from timeline.gateway.shapes import DeadLetters, NewTopic
from timeline.leases.table import GUARDS
from timeline.model import Operation, TopicSettings

pytestmark = [pytest.mark.processes, pytest.mark.slow]


async def made(http: httpx.AsyncClient, name: str, **settings: Any) -> str:
    assert (await http.put(f"/v1/topics/{name}", json=settings)).status_code == 201
    return f"/v1/topics/{name}"


async def test_topics_are_created_changed_and_dropped(http: httpx.AsyncClient) -> None:
    path = await made(http, "orders", lease="10s", max_deliveries=3, lease_ahead="auto")
    again = await http.put(path, json={"lease": 10, "max_deliveries": 3})
    assert (again.status_code, again.json()["settings"]["lease_ms"]) == (200, 10_000)
    problem(await http.put(path, json={"lease": "1h"}), 409, "EXISTS")
    changed = await http.patch(path, json={"paused": True})
    assert changed.json()["settings"]["paused"] is True and changed.json()["revision"] == 2
    assert (await http.get(path)).json() == changed.json()
    assert changed.json() in (await http.get("/v1/topics")).json()["topics"]
    assert "lease must be" in problem(await http.patch(path, json={"lease": "1 day"}), 400, "INVALID")
    assert "there is no field 'leese'" in problem(await http.patch(path, json={"leese": "1s"}), 400, "INVALID")
    assert (await http.delete(path)).status_code == 204
    assert "there is no topic 'orders'" in problem(await http.get(path), 404, "NOT_FOUND")
    problem(await http.delete(path), 404, "NOT_FOUND")


async def test_a_list_has_pages(http: httpx.AsyncClient) -> None:
    path = await made(http, "listed")
    ids = {f"message-{number}" for number in range(25)}
    body = [{"id": id, "payload": id, "at": "2030-01-01T00:00Z", "tag": "even"} for id in ids]
    body.append({"id": "other", "payload": 1, "in": "1h"})
    await http.post(f"{path}/messages", json=body)
    seen: list[str] = []
    asked: dict[str, Any] = {"limit": 10, "tag": "even"}
    while True:
        page = (await http.get(f"{path}/messages", params=asked)).json()
        assert len(page["messages"]) <= 10
        seen += [one["id"] for one in page["messages"]]
        if page["cursor"] is None:
            break
        asked["cursor"] = page["cursor"]
    assert sorted(seen) == sorted(ids)
    of_time = {"due_from": "2029-12-31T00:00Z", "due_to": "2030-01-02T00:00Z", "limit": 100, "payload": "true"}
    found = (await http.get(f"{path}/messages", params=of_time)).json()["messages"]
    assert {one["id"]: one["payload"] for one in found} == {id: id for id in ids}
    assert "state must be one of" in problem(await http.get(f"{path}/messages?state=late"), 400, "INVALID")
    problem(await http.get(f"{path}/messages?cursor=junk!"), 400, "INVALID")
    problem(await http.get(f"{path}/messages?limit=0"), 400, "INVALID")


async def test_a_tag_is_moved_and_cancelled(http: httpx.AsyncClient) -> None:
    path = await made(http, "tagged")
    await http.post(f"{path}/messages", json=[{"payload": 1, "in": "1h", "tag": "spring"} for _ in range(3)])
    dry = await http.patch(f"{path}/messages?tag=spring&dry_run=true", json={"by": "2h"})
    assert (dry.json()["matched"], dry.json()["dry_run"]) == (3, True)
    moved = (await http.patch(f"{path}/messages?tag=spring", json={"by": "-10m"})).json()
    assert (moved["changed"], moved["counts"], moved["finished"], moved["resume"]) == (3, {"OK": 3}, True, None)
    both = await http.patch(f"{path}/messages?tag=spring", json={"by": "1h", "in": "1h"})
    assert "goes without at and in" in problem(both, 400, "INVALID")
    problem(await http.patch(f"{path}/messages", json={"by": "1h"}), 400, "INVALID")
    problem(await http.delete(f"{path}/messages?tag="), 400, "INVALID")
    gone = (await http.delete(f"{path}/messages?tag=spring")).json()
    assert (gone["changed"], gone["finished"]) == (3, True)
    assert (await http.get(f"{path}/messages")).json() == {"messages": [], "cursor": None}


async def test_dead_letters_are_listed_revived_and_purged(http: httpx.AsyncClient) -> None:
    path = await made(http, "deadly")
    await put(http, "deadly", "one", "two")
    for _ in range(2):
        (message,) = await lease(http, "deadly", max=1)
        assert await settle(http, "bury", message["receipt"], reason="bad") == ["OK"]
    letters = (await http.get(f"{path}/dead")).json()["messages"]
    assert {one["id"]: one["reason"] for one in letters} == {"one": "bad", "two": "bad"}
    revived = await http.post(f"{path}/dead:revive", json={"ids": ["one", "none"], "in": "1h"})
    assert revived.status_code == 207
    assert [one["status"] for one in revived.json()["results"]] == ["OK", "NOT_FOUND"]
    assert revived.json()["counts"] == {"OK": 1, "NOT_FOUND": 1}
    assert (await http.post(f"{path}/dead:purge", json={"all": True})).json()["counts"] == {"OK": 1}
    assert (await http.get(f"{path}/dead")).json()["messages"] == []
    problem(await http.post(f"{path}/dead:purge", json={}), 400, "INVALID")


async def test_a_call_for_all_letters_that_breaks_off_says_how_far_it_came(
    http: httpx.AsyncClient, tl: timeline.Timeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await made(http, "broken-off")
    await put(http, "broken-off", "one", "two")
    for _ in range(2):
        (message,) = await lease(http, "broken-off", max=1)
        await settle(http, "bury", message["receipt"], reason="bad")
    monkeypatch.setattr(many, "LETTERS_AT_ONCE", 1)
    asked: list[str] = []
    async with tl.producer("broken-off") as producer:

        async def purge(ids: list[str]) -> timeline.Receipts:
            asked.extend(ids)
            if len(asked) > 1:
                raise timeline.Unavailable("no broker answers")
            return await producer.purge(ids)

        told = await many._letters(CallerClient(tl), "broken-off", DeadLetters(all=True), purge)
    assert told.counts == {"OK": 1} and (told.stopped or "").startswith("no broker answers")
    assert len((await http.get(f"{path}/dead")).json()["messages"]) == 1


async def test_what_comes_due_what_was_late_and_the_cluster(http: httpx.AsyncClient) -> None:
    path = await made(http, "looked-at")
    await put(http, "looked-at", "late")
    await http.post(f"{path}/messages", json={"id": "soon", "payload": 1, "in": "30m"})
    forecast = (await http.get(f"{path}/forecast?window=1h&step=10m")).json()
    assert (forecast["total"], forecast["overdue"], len(forecast["steps"])) == (1, 1, 6)
    why = (await http.get(f"{path}/messages/late/why")).json()
    assert why["message"]["id"] == "late" and why["text"]
    waiting = (await http.get(f"{path}/messages/soon/why")).json()
    assert "waiting: due in" in " ".join(waiting["text"])
    problem(await http.get(f"{path}/messages/none/why"), 404, "NOT_FOUND")
    past_ms = int(datetime.now(UTC).timestamp() * 1000) - 5_000
    await http.post(f"{path}/messages", json={"id": "past", "payload": 1, "at": past_ms})
    leased: set[str] = set()
    while leased != {"late", "past"}:
        some = (await http.post(f"{path}/leases", json={"max": 2, "wait": "20s"})).json()["messages"]
        leased |= {one["id"] for one in some}
    told = (await http.get(f"{path}/late?since=10m")).json()
    (past,) = [one for one in told["deliveries"] if one["id"] == "past"]
    assert told["unreachable"] == [] and past["late_ms"] >= 5_000
    assert past["cause"] == "PRODUCED_LATE", past
    for state, ids in (("waiting", ["soon"]), ("leased", ["late", "past"]), ("dead", [])):
        listed = (await http.get(f"{path}/messages?state={state}")).json()["messages"]
        assert sorted(one["id"] for one in listed) == ids, state
    cluster = (await http.get("/v1/cluster")).json()
    assert len(cluster["brokers"]) == 1 and cluster["unreachable"] == {}
    assert "looked-at" in {load["topic"] for load in cluster["brokers"][0]["topics"]}


async def test_a_stream_of_events_gives_as_many_as_there_is_credit_for(
    http: httpx.AsyncClient, tl: timeline.Timeline
) -> None:
    await made(http, "streamed")
    await put(http, "streamed", "a", "b", "c")
    seen = []
    async with http.stream("GET", "/v1/topics/streamed/stream?credit=1&lease=10m") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                message = json.loads(line.removeprefix("data: "))
                seen.append(message["id"])
                leased = [one.id async for one in tl.scan("streamed", state="leased")]
                assert leased == [message["id"]], "no more than the credit is out"
                if len(seen) == 3:
                    break
                assert await settle(http, "ack", message["receipt"]) == ["OK"]
    assert sorted(seen) == ["a", "b", "c"]
    await put(http, "streamed", "fleeting", expires="1m")
    async with http.stream("GET", "/v1/topics/streamed/stream?credit=1&lease=10m") as answer:
        lines = (line.removeprefix("data: ") async for line in answer.aiter_lines() if line.startswith("data: "))
        message = json.loads(await anext(lines))
        assert await settle(http, "release", message["receipt"], **{"in": "5m"}) == ["EXPIRED"]
        await put(http, "streamed", "next")
        assert json.loads(await anext(lines))["id"] == "next", "a message that is gone takes no credit"
    problem(await http.get("/v1/topics/nowhere/stream"), 404, "NOT_FOUND")
    problem(await http.get("/v1/topics/streamed/stream?credit=0"), 400, "INVALID")


async def test_json_of_several_lines_is_one_line_of_a_stream(http: httpx.AsyncClient) -> None:
    path = await made(http, "pretty")
    payload = {"to": "ada", "lines": ["a\nb", "c\rd"], "empty": {}}
    written = json.dumps({"in": 0, "payload": payload}, indent=2).replace("\n", "\r\n\r\n").encode()
    headers = {"Content-Type": "application/json"}
    assert (await http.post(f"{path}/messages", content=written, headers=headers)).status_code == 201
    async with http.stream("GET", f"{path}/stream?lease=10m") as answer:
        data = [line async for line in until(answer.aiter_lines(), "data: ")]
    assert json.loads(data[-1].removeprefix("data: "))["payload"] == payload
    assert data[-2] == "event: message"


async def until(lines: AsyncIterator[str], begin: str) -> AsyncIterator[str]:
    """The lines to the first one that begins so."""
    async for line in lines:
        yield line
        if line.startswith(begin):
            return


async def test_a_stream_ends_with_its_connection_though_another_request_waits_behind_it(
    http: httpx.AsyncClient, site: Site
) -> None:
    path = await made(http, "left")

    async def streams() -> float:
        lines = (await http.get("/metrics")).text.splitlines()
        return next(float(line.split(" ")[1]) for line in lines if line.startswith("timeline_gateway_streams "))

    async with Connection(site.url) as connection:
        await connection.send(f"GET {path}/stream?lease=10m HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        while not await streams():
            pass
        await connection.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    at = 0
    while await streams():  # what is written to nobody shows that nobody is there
        at += 1
        await put(http, "left", f"m{at}")


async def test_each_refusal_has_its_status(http: httpx.AsyncClient, tl: timeline.Timeline) -> None:
    path = await made(http, "refusals", max_payload_bytes=100)
    one = f"{path}/messages/a"

    async def produced(**more: Any) -> httpx.Response:
        return await http.post(f"{path}/messages", json={"id": "a", "payload_text": "x", "in": 0, **more})

    assert (await produced()).status_code == 201
    (leased,) = (await http.post(f"{path}/leases", json={"wait": "20s", "lease": "10m"})).json()["messages"]
    problem(await http.delete(one), 409, "LEASED")
    problem(await http.patch(one, json={"in": "1h"}), 409, "LEASED")
    problem(await produced(payload_text="y", if_exists="replace"), 409, "LEASED")
    extended = await http.post("/v1/leases:extend", json={"receipts": [leased["receipt"]], "lease": "50m"})
    (told,) = extended.json()["results"]
    stored = await tl.get("refusals", "a")
    assert told["status"] == "OK" and stored is not None
    assert stored.due - datetime.now(UTC) > timedelta(minutes=45), "the lease ends when it was asked to"
    assert await settle(http, "bury", leased["receipt"], reason="no") == ["OK"]
    for method, body in (("DELETE", None), ("PATCH", {"in": "1h"})):
        problem(await http.request(method, one, json=body), 409, "DEAD")
    problem(await produced(payload_text="y", if_exists="replace"), 409, "DEAD")
    assert (await produced(id="b", payload_text="x" * 100)).status_code == 201
    assert "100" in problem(await produced(id="c", payload_text="x" * 101), 413, "TOO_LARGE")
    assert (await produced(id="d", expires="1h")).status_code == 201
    leases = (await http.post(f"{path}/leases", json={"max": 10, "wait": "20s"})).json()["messages"]
    last = next(one for one in leases if one["id"] == "d")
    beyond = await http.post("/v1/leases:release", json={"receipts": [last["receipt"]], "in": "2h"})
    assert [result["status"] for result in beyond.json()["results"]] == ["EXPIRED"]


async def test_a_lease_says_when_the_topic_would_try_again(http: httpx.AsyncClient, tl: timeline.Timeline) -> None:
    """So a caller can release it for as long as every other consumer would."""
    path = await made(http, "retried", retry_first="7h", retry_factor=2.0, retry_cap="30h", retry_jitter=0)
    await put(http, "retried", "a")
    (leased,) = (await http.post(f"{path}/leases", json={"wait": "20s"})).json()["messages"]
    assert leased["retry_in_ms"] == 7 * 3_600_000
    asked = {"receipts": [leased["receipt"]], "in": leased["retry_in_ms"] / 1000}
    assert (await http.post("/v1/leases:release", json=asked)).json()["results"][0]["status"] == "OK"
    one = await tl.get("retried", "a")
    assert one is not None and timedelta(hours=6.9) < one.due - datetime.now(UTC) <= timedelta(hours=7)


async def test_the_document_has_each_refusal_of_a_message(http: httpx.AsyncClient) -> None:
    calls = (await http.get("/openapi.json")).json()["paths"]["/v1/topics/{topic}/messages/{id}"]
    for method, operation in (("patch", Operation.MOVE), ("delete", Operation.CANCEL)):
        told = {
            example["value"]["code"]
            for status, response in calls[method]["responses"].items() if status >= "400"
            for example in response["content"]["application/problem+json"]["examples"].values()
        }  # fmt: skip
        assert {status for status, _ in GUARDS[operation]} <= told, method


async def test_a_method_a_parameter_and_a_page_that_are_not_there(http: httpx.AsyncClient) -> None:
    path = await made(http, "strict")
    wrong = await http.put(f"{path}/messages/a", json={})
    assert "it takes DELETE, GET, OPTIONS, PATCH" in problem(wrong, 405, "INVALID")
    assert "PUT /v1/topics/{topic} creates one" in problem(await http.post("/v1/topics"), 405, "INVALID")
    assert wrong.headers["Allow"] == "DELETE, GET, OPTIONS, PATCH"
    said = problem(await http.get(f"{path}/messages", params={"statee": "dead"}), 400, "INVALID")
    assert "there is no parameter 'statee': this call takes cursor, due_from" in said
    said = problem(await http.post(f"{path}/messages?in=5s", json={"payload": 1, "in": "1h"}), 400, "INVALID")
    assert said == "there is no parameter 'in': this call takes none"
    said = problem(await http.delete(f"{path}/messages"), 400, "INVALID")
    assert said == "the parameter 'tag' is missing: put it into the address, ?tag=…"
    for page in ("/schema", "/schema/swagger", "/schema/openapi.json"):
        problem(await http.get(page), 404, "NOT_FOUND")


async def test_a_body_that_is_not_read_is_refused_and_one_that_is_needed_is_asked_for(http: httpx.AsyncClient) -> None:
    """A dry run or a version in the body of a DELETE would be as if it were not said."""
    path = await made(http, "unread")
    for id in ("a", "b"):
        created = await http.post(f"{path}/messages", json={"id": id, "payload": 1, "in": "1h", "tag": "spring"})
        assert created.status_code == 201
    for where, asked in (
        (f"{path}/messages?tag=spring", {"dry_run": True}),
        (f"{path}/messages/a", {"if_version": 7}),
        (path, {"confirm": False}),
    ):
        said = problem(await http.request("DELETE", where, json=asked), 400, "INVALID")
        assert said.startswith(
            "this DELETE has no body: write what it says into the address, ?name=value; this call takes"
        )
    listed = (await http.get(f"{path}/messages")).json()
    assert sorted(one["id"] for one in listed["messages"]) == ["a", "b"]
    for method, where in (
        ("POST", f"{path}/dead:revive"), ("POST", f"{path}/leases"), ("POST", "/v1/leases:ack"),
        ("PATCH", f"{path}/messages/a"), ("PATCH", f"{path}/messages?tag=spring"),
    ):  # fmt: skip
        said = problem(await http.request(method, where), 400, "INVALID")
        assert said == "this call needs a body in JSON: /docs shows its fields", where
    assert (await http.put(f"{path}2")).status_code == 201  # all settings have defaults


async def test_every_setting_of_a_topic_can_be_set(http: httpx.AsyncClient) -> None:
    assert set(NewTopic.__struct_fields__) == set(NAMES)
    path = await made(
        http, "pushed", retry_first="2s", retry_factor=1.5, retry_jitter=0.1, push_url="https://example.com/hook",
        push_timeout="5s", push_rate=100,
    )  # fmt: skip
    found = (await http.get(path)).json()["settings"]
    assert (found["retry_first_ms"], found["retry_factor_percent"], found["push_timeout_ms"]) == (2_000, 150, 5_000)
    assert (await http.patch(path, json={"push_url": ""})).json()["settings"]["push_url"] == ""
    back = dict.fromkeys(("retry_first", "retry_factor", "push_timeout", "push_rate", "lease_ahead"))
    usual = {name: getattr(TopicSettings(), name) for name in TopicSettings.__slots__}
    assert (await http.patch(path, json=back)).json()["settings"] == usual | {"retry_jitter_percent": 10}
    assert "push_url begins with https" in problem(await http.patch(path, json={"push_url": "ftp://x"}), 400, "INVALID")


async def test_a_secret_of_webhooks_is_made_and_shown_once(http: httpx.AsyncClient, tl: timeline.Timeline) -> None:
    path = await made(http, "signed", push_url="https://example.com/hook")
    secrets = [(await http.post(f"{path}/secret:rotate")).json() for _ in range(2)]
    assert [one["name"] for one in secrets] == ["signed", "signed"]
    assert await tl.topic_secrets("signed") == tuple(one["secret"] for one in reversed(secrets))
    problem(await http.post("/v1/topics/nowhere/secret:rotate"), 404, "NOT_FOUND")
    listed = (await http.get("/v1/topics")).text
    assert not any(one["secret"] in listed for one in secrets)


async def test_options_names_all_methods_of_a_path(http: httpx.AsyncClient) -> None:
    told = await http.request("OPTIONS", "/v1/topics/departures/messages")
    assert (told.status_code, told.headers["Allow"]) == (204, "DELETE, GET, OPTIONS, PATCH, POST")


async def test_an_empty_duration_is_no_duration(http: httpx.AsyncClient) -> None:
    path = await made(http, "empty")
    for name in ("in", "at"):
        answer = await http.post(f"{path}/messages", json={"payload": 1, name: ""})
        assert name in problem(answer, 400, "INVALID")
    assert "in must be" in problem(await http.post(f"{path}/dead:revive", json={"all": True, "in": ""}), 400, "INVALID")


async def test_a_number_is_a_number_however_it_is_written(http: httpx.AsyncClient) -> None:
    """JSON has one kind of number. A text is none, and a number is no truth value."""
    path = await made(http, "numbers")
    assert (await http.post(f"{path}/leases", json={"max": 3.0, "wait": 0})).status_code == 200
    put = await http.post(f"{path}/messages", json={"id": "a", "payload": 1.0, "at": 1_900_000_000_000.0})
    assert put.json()["due"] == "2030-03-17T17:46:40.000Z"
    assert '"payload":1.0' in (await http.get(f"{path}/messages/a")).text
    for body in ({"max": "3"}, {"max": 3.5}):
        problem(await http.post(f"{path}/leases", json=body), 400, "INVALID")
    assert "paused" in problem(await http.patch(path, json={"paused": 1}), 400, "INVALID")


async def test_a_time_may_be_written_in_small_letters(http: httpx.AsyncClient) -> None:
    """RFC 3339 allows it."""
    path = await made(http, "letters")
    put = await http.post(f"{path}/messages", json={"payload": 1, "at": "2030-01-01t09:00:00z"})
    assert put.json()["due"] == "2030-01-01T09:00:00.000Z"


async def test_a_payload_says_when_it_is_due(http: httpx.AsyncClient) -> None:
    path = await made(http, "bodies")
    answer = await http.post(f"{path}/messages", json={"any": "thing"}, headers={"Timeline-Id": "a"})
    assert "Timeline-In or Timeline-At" in problem(answer, 400, "INVALID")


async def test_a_state_may_be_named_twice(http: httpx.AsyncClient) -> None:
    path = await made(http, "states")
    asked = [("state", "waiting"), ("state", "dead")] * 4
    assert (await http.get(f"{path}/messages", params=asked)).json()["messages"] == []
