"""Errors over HTTP name what a caller of HTTP has: no arguments of Python, and no flags."""

from __future__ import annotations

import re
from typing import Any

import httpx
import msgspec
import pytest

from timeline import errors
from timeline.errors import Invalid
from timeline.gateway import shapes
from timeline.gateway.problems import in_words_of_http
from timeline.gateway.putting import LINE, LIST
from timeline.gateway.values import HEADERS, MOST_SAID, TIMES, decoded, in_words, instant

FOREIGN = re.compile(r"\btl\.|\bd\.|\bin_\b|\b\w+=(?!\")|\bNone\b|\bTrue\b|(?<!\w)--\w|`|\(\)|_topic\b")
AT = {"payload": 1, "in": 0}
REQUESTS: tuple[tuple[str, str, Any, str], ...] = (
    ("POST", "/t/messages", {"payload": 1, "at": 1_700_000_000}, "at 1700000000 looks like seconds"),
    ("POST", "/t/messages", {"payload": 1, "at": "2300-01-01T00:00Z"}, "the topic's setting horizon raises it"),
    ("POST", "/none/messages", AT, "there is no topic 'none': create it first (PUT /v1/topics/{topic})"),
    ("POST", "/none/leases", {"wait": 0}, "create it first (PUT /v1/topics/{topic})"),
    ("POST", "/t/messages", AT | {"id": "kept", "group": "other"}, "act for that one (give it as 'group')"),
    ("DELETE", "/t/messages/leased", None, "or cancel with ?leased=true"),
    ("PATCH", "/t/messages?tag=s", {"by": 1, "resume": "x"}, "Give it as 'resume' of the answer had it"),
    ("DELETE", "/t/messages?tag=", None, "an empty one would mean everything"),
    ("POST", "/t/dead:revive", {"ids": ["kept"]}, "GET /v1/topics/{topic}/messages/{id} says where it is"),
    ("PUT", "/t", {"lease": "1h"}, "lease is 30s, not 1h: PATCH /v1/topics/{topic} changes it"),
    ("GET", "/t/messages?due_from=2031-01-01T00:00Z&due_to=2030-01-01T00:00Z", None, "due_from must lie before due_to"),
)  # fmt: skip

NEW, LEASING, TOPIC = shapes.NewMessage, shapes.Leasing, shapes.NewTopic
BODIES: tuple[tuple[Any, str, str], ...] = (
    (NEW, '{"id": 5}', "id must be text, not a number: put it in quotes"),
    (NEW, '{"id": 5.5}', "id must be text, not a number: put it in quotes"),
    (NEW, '{"id": true}', "id must be text, not true or false: put it in quotes"),
    (NEW, '{"id": ["a"]}', "id must be text, not an array"),
    (NEW, '{"in": {}}', "in must be a number or text, not an object"),
    (NEW, '{"at": 1.5}', "at must be a whole number or text, not a fraction"),
    (shapes.ExtendLeases, '{"receipts": [], "lease": null}', "lease must be a number or text, not null"),
    (LEASING, '{"max": "5"}', "max must be a whole number, not text: write it without quotes"),
    (LEASING, '{"max": 1.5}', "max must be a whole number, not a fraction"),
    (TOPIC, '{"paused": 1}', "paused must be true or false, not a number"),
    (list[NEW], '[{"in": 1}, {"id": 5}]', "[1].id must be text, not a number: put it in quotes"),
    (shapes.AckLeases, '{"receipts": 5}', "receipts must be an array, not a number"),
    (shapes.AckLeases, '{"receipts": [5]}', "receipts[0] must be text, not a number: put it in quotes"),
    (NEW, '"x"', 'the body must be an object such as {"payload": …}, not text'),
    (shapes.AckLeases, "[]", 'the body must be an object such as {"receipts": …}, not an array'),
    (TOPIC | None, "5", "the body must be an object, not a number"),
    (list[NEW], "[5]", "[0] must be an object, not a number"),
    (HEADERS.type, '{"a": 5}', "each value must be text, not a number: put it in quotes"),
    (HEADERS.type, "[]", "the value must be an object, not an array"),
    (shapes.BackfillRange, '{"from": 1}', "the field 'to' is missing"),
    (list[shapes.BackfillRange], '[{"from": 1}]', "the field 'to' is missing at [0]"),
    (shapes.MoveMessage, '{"delay": 1}', "there is no field 'delay': this call takes at, group, if_version, in"),
    (list[shapes.AckLeases], '[{"x": 1}]', "there is no field 'x' at [0]: this call takes receipts"),
    (TOPIC | None, '{"remember_ms": 1}', "there is no field 'remember_ms': write remember (as in \"1h\")"),
    (NEW, '{"in_ms": 1}', "there is no field 'in_ms': write in (as in \"1h\")"),
    (NEW, '{"at_ms": 1}', "there is no field 'at_ms': write at (as in \"2030-03-29T09:00Z\")"),
    (shapes.AckLeases, '{"receipts_ms": 1}', "there is no field 'receipts_ms': this call takes receipts"),
    (
        shapes.MoveMessage,
        '{"payload": 1}',
        "there is no field 'payload': to change a payload, produce it again with if_exists: \"replace\"",
    ),
    (shapes.AckLeases, '{"payload": 1}', "there is no field 'payload': this call takes receipts"),
    (shapes.MoveMessage, '{"by": 1}', "there is no field 'by': by goes with ?tag= alone"),
    (NEW, "", "the body is empty: send JSON"),
    (NEW, " \n", "the body is empty: send JSON"),
    (NEW, "{", "this is not JSON: Input data was truncated"),
    (NEW, '{"if_exists": "x"}', "if_exists must be one of move, replace, not 'x'"),
    (list[NEW], '[{"in": 1}, {"if_exists": "x"}]', "[1].if_exists must be one of move, replace, not 'x'"),
)  # fmt: skip
QUERIES: tuple[tuple[str, str, str], ...] = (
    ("limit", "Expected `int`, got `str`", "limit must be a whole number"),
    ("if_version", "Expected `int | null`, got `str`", "if_version must be a whole number"),
    ("limit", "Expected `int` >= 1", "limit must be a whole number of 1 or more"),
    ("limit", "Expected `int` <= 1000", "limit must be a whole number of at most 1000"),
    ("dry_run", "Expected `bool`, got `str`", "dry_run must be true or false"),
    ("gap", "Invalid enum value 'x'", "gap must be one of later, skip, not 'x'"),
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


@pytest.mark.parametrize(("kind", "body", "said"), BODIES)
def test_a_decoders_sentence_in_plain_words(kind: Any, body: str, said: str) -> None:
    with pytest.raises(Invalid) as refused:
        decoded(msgspec.json.Decoder(kind), body.encode())
    assert refused.value.reason == said


@pytest.mark.parametrize(("parameter", "theirs", "said"), QUERIES)
def test_the_sentence_of_a_parameter(parameter: str, theirs: str, said: str) -> None:
    assert in_words(theirs, parameter) == said


@pytest.mark.parametrize(
    "said",
    ["", "Something else", "Expected 'datetime', got 'str'", "Expected 'array' of length <= 5 - at '$.a'", "Expected"],
)
def test_a_sentence_that_is_not_known_stays(said: str) -> None:
    assert in_words(said, kind=NEW) == said
    assert in_words(said, "limit") == f"limit: {said}"


def test_a_field_that_is_not_known_without_its_type() -> None:
    assert in_words("Expected `bool`, got `null` - at `$.a[...]`") == "each value of a must be true or false, not null"
    assert in_words("Object contains unknown field `x` - at `$.a`") == "there is no field 'x' at a"
    assert in_words("Object contains unknown field `x`", kind=Any) == "there is no field 'x'"


@pytest.mark.slow
def test_the_name_of_a_field_is_shown_in_part() -> None:
    asked = [kind for kind in vars(shapes).values() if isinstance(kind, type) and issubclass(kind, shapes.Asked)]
    assert len(asked) > 15
    for kind in (*asked, LINE.type, LIST.type, Any):
        for name in ("x" * 10_000_000, "' - at '$" * 100_000, "' - at '$.a'\n" * 20):
            said = in_words(f"Object contains unknown field `{name}`", kind=kind)
            assert len(said) < MOST_SAID + 60, said
        assert len(in_words("Object contains unknown field `colour`", kind=kind)) < MOST_SAID + 10


@pytest.mark.parametrize("time", ["2030-01-01T00:00 02:00", "2030-01-01t00:00:00.5 0200"])
def test_a_time_whose_plus_was_not_encoded(time: str) -> None:
    with pytest.raises(Invalid, match=r"is no time: .*\. Write \+ as %2B in an address$"):
        instant(time, "due_from")


@pytest.mark.parametrize("time", ["noon", "2030-01-01T00:00  02:00", "9" * 100 + " 02:00", "2030-13-01 02:00"])
def test_another_wrong_time(time: str) -> None:
    with pytest.raises(Invalid) as refused:
        instant(time, "due_from")
    assert refused.value.reason.endswith(TIMES)


PLAIN: tuple[tuple[str, str, str | None, str], ...] = (
    ("GET", "/t/messages?limit=x", None, "limit must be a whole number"),
    ("GET", "/t/messages?limit=0", None, "limit must be a whole number of 1 or more"),
    ("DELETE", "/t/messages?tag=a&dry_run=maybe", None, "dry_run must be true or false"),
    ("DELETE", "/t/messages/m?if_version=a", None, "if_version must be a whole number"),
    ("PATCH", "/t", '"x"', "the body must be an object, not text"),
    ("POST", "/t/messages", "", "the body is empty: send JSON"),
    (
        "POST",
        "/t/messages",
        '{"payload": 1, "in": 1, "headers": {"a": 5}}',
        "headers: each value must be text, not a num",
    ),
    ("POST", "/t/leases", '{"delay": 1}', "there is no field 'delay': this call takes lease, max, max_bytes, wait"),
    ("POST", "/t/schedules/x:backfill", '{"from": 1}', "the field 'to' is missing"),
    ("PATCH", "/t/messages?tag=a", '{"payload": 1}', 'produce it again with if_exists: "replace"'),
    ("PATCH", "/t/messages/m", '{"by": 1}', "by goes with ?tag= alone"),
    ("PATCH", "/t", '{"remember_ms": 1}', 'write remember (as in "1h")'),
    ("GET", "/t/messages?due_from=2030-01-01T00:00+02:00", None, "Write + as %2B in an address"),
)


@pytest.mark.processes
@pytest.mark.slow
async def test_plain_words_for_what_a_newcomer_sends(http: httpx.AsyncClient) -> None:
    for method, where, body, said in PLAIN:
        json = {"Content-Type": "application/json"}
        answer = await http.request(method, f"/v1/topics{where}", content=body, headers=json)
        detail = answer.json()["detail"]
        assert answer.status_code == 400 and said in detail and len(detail) <= MOST_SAID, detail
