"""Messages over HTTP: put, show, move and cancel, on a real broker and a real gateway."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

import timeline
from tests.gateway.processes import JSON

pytestmark = [pytest.mark.processes, pytest.mark.slow]

MESSAGES = "/v1/topics/departures/messages"


def problem(answer: httpx.Response, status: int, code: str) -> str:
    """The sentence of a problem, whose status and code are checked."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    told = answer.json()
    assert (told["status"], told["code"]) == (status, code)
    assert told["type"].startswith("urn:timeline:") and told["title"]
    detail: str = told["detail"]
    return detail


async def test_a_message_is_put_shown_moved_and_cancelled(http: httpx.AsyncClient) -> None:
    put = await http.post(MESSAGES, json={"id": "UA1545", "payload": {"gate": 7}, "in": "1h", "tag": "ops"})
    assert put.status_code == 201
    assert put.json() | {"due": ""} == {"id": "UA1545", "status": "OK", "version": 1, "due": ""}

    shown = (await http.get(f"{MESSAGES}/UA1545")).json()
    assert (shown["payload"], shown["tag"], shown["state"]) == ({"gate": 7}, "ops", "waiting")
    assert shown["due"] == put.json()["due"]

    moved = await http.patch(f"{MESSAGES}/UA1545", json={"at": "2030-01-01T09:00:00+02:00"})
    assert (moved.status_code, moved.json()["due"]) == (200, "2030-01-01T07:00:00.000Z")
    stale = await http.patch(f"{MESSAGES}/UA1545", json={"in": "1h", "if_version": 1})
    assert "it stands at another version" in problem(stale, 412, "FENCED")

    assert (await http.delete(f"{MESSAGES}/UA1545")).json()["status"] == "OK"
    said = problem(await http.delete(f"{MESSAGES}/UA1545"), 404, "NOT_FOUND")
    assert said == timeline.errors.NotFound.advice


@pytest.mark.parametrize(
    ("given", "field", "stored"),
    [
        ({"payload": {"a": [1.50, None]}}, "payload", b'{"a":[1.50,null]}'),
        ({"payload": None}, "payload", b"null"),
        ({"payload_text": "ümlaut"}, "payload_text", "ümlaut".encode()),
        ({"payload_base64": "/w=="}, "payload_base64", b"\xff"),
    ],
)
async def test_a_payload_comes_back_as_it_was_put(
    http: httpx.AsyncClient, tl: timeline.Timeline, given: dict[str, Any], field: str, stored: bytes
) -> None:
    body = json.dumps({"id": "one", "in": "1h", **given}, separators=(",", ":")).replace("1.5,", "1.50,")
    assert (await http.post(MESSAGES, content=body, headers=JSON)).status_code == 201
    try:
        message = await tl.get("departures", "one")
        assert message is not None and message.payload == stored
        shown = (await http.get(f"{MESSAGES}/one")).json()
        assert [name for name in shown if name.startswith("payload")] == [field]
        assert shown[field] == given[field]
    finally:
        await http.delete(f"{MESSAGES}/one")


async def test_the_body_is_the_payload_when_a_header_says_the_time(
    http: httpx.AsyncClient, tl: timeline.Timeline
) -> None:
    headers = {"Content-Type": "image/png", "Timeline-In": "1h", "Timeline-Id": "raw", "Timeline-Tag": "pictures"}
    assert (await http.post(MESSAGES, content=b"\x89PNG", headers=headers)).status_code == 201
    message = await tl.get("departures", "raw")
    assert message is not None
    assert (message.payload, message.tag, message.headers) == (b"\x89PNG", "pictures", {"content-type": "image/png"})
    answer = await http.post(MESSAGES, content=b"\x89PNG", headers={"Content-Type": "image/png"})
    assert "Timeline-In or Timeline-At" in problem(answer, 400, "INVALID")


async def test_headers_of_a_payload_are_utf8_and_its_trace_goes_on(http: httpx.AsyncClient) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    named = [(b"timeline-in", b"1h"), (b"timeline-id", "zürich".encode()), (b"traceparent", parent.encode())]
    assert (await http.post(MESSAGES, content=b"x", headers=named)).json()["id"] == "zürich"
    shown = (await http.get(f"{MESSAGES}/z%C3%BCrich")).json()
    assert not shown.get("headers"), "a repeat may be of another trace"
    assert (await http.delete(f"{MESSAGES}/z%C3%BCrich")).status_code == 200
    made = await http.post(MESSAGES, content=b"x", headers={"Timeline-In": "1h", "traceparent": parent})
    stored = (await http.get(f"{MESSAGES}/{made.json()['id']}")).json()
    assert stored["headers"] == {"traceparent": parent}
    wrong = await http.post(MESSAGES, content=b"x", headers=[(b"timeline-in", b"1h"), (b"timeline-tag", b"\xff")])
    assert problem(wrong, 400, "INVALID") == "Timeline-Tag must be UTF-8"


async def test_an_id_may_have_any_character(http: httpx.AsyncClient) -> None:
    id = "a/b?c%2F d:ü"
    assert (await http.post(MESSAGES, json={"id": id, "payload": 1, "in": "1h"})).status_code == 201
    path = f"{MESSAGES}/a%2Fb%3Fc%252F%20d:%C3%BC"
    assert (await http.get(path)).json()["id"] == id
    assert (await http.delete(path)).json()["id"] == id
    assert "UTF-8" in problem(await http.get(f"{MESSAGES}/%FF"), 400, "INVALID")


async def test_a_repeat_puts_nothing_twice(http: httpx.AsyncClient) -> None:
    once = {"id": "same", "payload": 1, "in": "1h"}
    assert (await http.post(MESSAGES, json=once)).status_code == 201
    again = await http.post(MESSAGES, json=once)
    assert (again.status_code, again.json()["status"]) == (200, "DUPLICATE")
    other = await http.post(MESSAGES, json=once | {"payload": 2})
    assert "the id is taken" in problem(other, 409, "EXISTS")
    assert other.json()["id"] == "same"
    moved = await http.post(MESSAGES, json=once | {"in": "2h", "if_exists": "move"})
    assert (moved.status_code, moved.json()["moved"]) == (200, True)


async def test_the_same_key_gets_the_same_answer(http: httpx.AsyncClient) -> None:
    for body in ({"payload": 1, "in": "1h"}, [{"payload": 1, "in": "1h"}, {"payload": 1, "in": "1h"}]):
        key = {"Idempotency-Key": f"key of {type(body).__name__}"}
        first = await http.post(MESSAGES, json=body, headers=key)
        again = await http.post(MESSAGES, json=body, headers=key)
        assert (first.status_code, first.json()) == (again.status_code, again.json())
        without = await http.post(MESSAGES, json=body)
        assert without.json() != first.json()


async def test_an_array_has_one_answer_each(http: httpx.AsyncClient) -> None:
    listed = [
        {"id": "array-1", "payload": 1, "in": "1h"},
        {"id": "array-2", "payload": 2},
        {"id": "array-3", "payload": 3, "at": "2030-01-01T09:00"},
        {"id": "array-4", "payload": 4, "in": 60, "group": "other"},
    ]
    answer = await http.post(MESSAGES, json=listed)
    assert answer.status_code == 207
    results = answer.json()["results"]
    assert [(one["id"], one["status"]) for one in results] == [
        ("array-1", "OK"), ("array-2", "INVALID"), ("array-3", "INVALID"), ("array-4", "OK"),
    ]  # fmt: skip
    assert "give either at" in results[1]["detail"]
    assert "does not say in which time zone" in results[2]["detail"]


async def test_a_stream_of_lines_is_put_whole(http: httpx.AsyncClient, tl: timeline.Timeline) -> None:
    many = 2_500
    lines = [json.dumps({"id": f"line-{number}", "payload": number, "in": "1h"}) for number in range(many)]
    lines[7] = '{"payload": 1}'
    lines[8] = '{"payload": 1, "in": "1h", "colour": "red"}'
    body = "\n".join(lines).encode()
    kind = {"Content-Type": "application/x-ndjson"}
    told = (await http.post(MESSAGES, content=body, headers=kind)).json()
    assert told["counts"] == {"OK": many - 2, "INVALID": 2}
    assert [one["line"] for one in told["failed"]] == [8, 9]
    assert "there is no field 'colour'" in told["failed"][1]["detail"]
    assert told["failed_omitted"] == 0

    answer = await http.post(MESSAGES, content=body, headers=kind | {"Accept": "application/x-ndjson"})
    answers = [json.loads(line) for line in answer.text.splitlines()]
    assert [one["line"] for one in answers] == list(range(1, many + 1))
    assert {one["status"] for one in answers} == {"DUPLICATE", "INVALID"}
    assert await tl.get("departures", f"line-{many - 1}") is not None


async def test_a_stream_without_lines_is_refused_for_a_name_that_no_topic_can_have(http: httpx.AsyncClient) -> None:
    kind = {"Content-Type": "application/x-ndjson"}
    answer = await http.post(f"/v1/topics/{'t' * 256}/messages", content=b"\n", headers=kind)
    assert (answer.status_code, answer.json()["code"]) == (400, "INVALID")


async def test_blank_lines_of_a_stream_count_as_lines(http: httpx.AsyncClient) -> None:
    good = '{"id": "b%d", "payload": 1, "in": "1h"}'
    lines = ["", good % 2, " ", "", "no JSON", *(good % number for number in range(6, 1_500)), "", "\t", "neither"]
    kind = {"Content-Type": "application/x-ndjson"}
    told = (await http.post(MESSAGES, content="\r\n".join(lines), headers=kind)).json()
    assert told["counts"] == {"OK": 1_495, "INVALID": 2}
    assert [one["line"] for one in told["failed"]] == [5, 1_502]
    answer = await http.post(MESSAGES, content="\n".join(lines), headers=kind | {"Accept": "application/x-ndjson"})
    numbers = [json.loads(line)["line"] for line in answer.text.splitlines()]
    assert numbers == [at for at, line in enumerate(lines, 1) if line.strip()]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("{", "this is not JSON"),
        ("", "the body is empty: send JSON"),
        ('{"payload": 1}', "give either at (a time) or in (how long from now)"),
        ('{"payload": 1, "in": "1h", "at": 1}', "give either at (a time) or in (how long from now)"),
        ('{"payload": 1, "in": "1h", "colour": "red"}', "there is no field 'colour'"),
        ('{"payload": 1, "payload_text": "", "in": "1h"}', "give one of payload"),
        ('{"payload_base64": "!", "in": "1h"}', "payload_base64 must be base64"),
        ('{"payload": 1, "in": "1 fortnight"}', "in must be numbers with a unit"),
        ('{"payload": 1, "in": -1}', "in must not be negative"),
        ('{"payload": 1, "in": -1e-169}', "in must not be negative"),
        ('{"payload": 1, "at": 1700000000}', "looks like seconds"),
        ('{"payload": 1, "at": "noon"}', "at 'noon' is no time"),
        ('{"payload": 1, "at": "2030-01-01T09.30Z"}', "at '2030-01-01T09.30Z' is no time"),
        ('{"payload": 1, "in": "1h", "if_exists": "maybe"}', "if_exists"),
        ('{"payload": 1, "in": "1h", "id": ""}', "an id is 1 to 255 bytes"),
        ('{"payload": 1, "in": "1h", "tag": 5}', "tag"),
    ],
)
async def test_a_wrong_body_gets_the_sentence_that_mends_it(http: httpx.AsyncClient, body: str, said: str) -> None:
    answer = await http.post(MESSAGES, content=body, headers=JSON)
    assert said in problem(answer, 400, "INVALID")


async def test_a_topic_that_is_not_there(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/topics/nowhere/messages", json={"payload": 1, "in": "1h"})
    assert "there is no topic 'nowhere'" in problem(answer, 404, "NOT_FOUND")
    problem(await http.get("/v1/topics/nowhere/messages/1"), 404, "NOT_FOUND")


async def test_no_such_call(http: httpx.AsyncClient) -> None:
    assert "/docs shows all calls" in problem(await http.get("/v1/nothing"), 404, "NOT_FOUND")
    problem(await http.put(f"{MESSAGES}/1"), 405, "INVALID")


async def test_headers_that_describe_a_payload_are_known_and_go_with_one_payload(http: httpx.AsyncClient) -> None:
    path = "/v1/topics/departures/messages"
    text = {"Content-Type": "text/plain", "Timeline-In": "1h"}
    detail = problem(await http.post(path, content=b"x", headers=text | {"Timeline-Tags": "2h"}), 400, "INVALID")
    assert "no header 'Timeline-Tags'" in detail and "Timeline-Tag," in detail
    lines = {"Content-Type": "application/x-ndjson", "Timeline-In": "1h"}
    detail = problem(await http.post(path, content=b'{"payload":1}\n{"payload":2}\n', headers=lines), 400, "INVALID")
    assert "write in or at into it" in detail
    assert (await http.post(path, content=b"x", headers=text | {"Timeline-As-Operator": "false"})).status_code == 201


async def test_what_is_there_twice_or_empty_is_refused(http: httpx.AsyncClient) -> None:
    path = "/v1/topics/departures/messages"
    detail = problem(await http.delete(path, params=[("tag", "a"), ("tag", "b")]), 400, "INVALID")
    assert "'tag' is there twice" in detail
    message = {"payload": 1, "in": "1h"}
    detail = problem(await http.post(path, json=message, headers={"Idempotency-Key": ""}), 400, "INVALID")
    assert "Idempotency-Key is empty" in detail


async def test_a_payload_that_is_no_utf_8_is_not_taken_for_json(http: httpx.AsyncClient) -> None:
    body = b'{"payload": "\xff", "in": "1h"}'
    headers = {"Content-Type": "application/json"}
    detail = problem(await http.post("/v1/topics/departures/messages", content=body, headers=headers), 400, "INVALID")
    assert "payload_base64" in detail
