"""Recurring schedules over HTTP, on a real broker: each call, and what it refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

import timeline
from tests.gateway.test_messages import problem

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TOPIC = "recurring"
ALL = f"/v1/topics/{TOPIC}/schedules"
MONTHLY = {"name": "monthly", "cron": "0 6 1 * *", "zone": "Europe/Berlin", "payload": {"of": "{occurrence}"}}


@pytest.fixture(autouse=True)
async def topic(http: httpx.AsyncClient) -> AsyncIterator[None]:
    """A topic of this test's own."""
    assert (await http.put("/v1/topics/recurring", json={"remember": "2h"})).is_success
    yield
    for one in (await http.get(ALL)).json()["schedules"]:
        assert (await http.delete(f"{ALL}/{one['name']}")).status_code == 204
    assert (await http.delete("/v1/topics/recurring")).status_code == 204


async def test_a_body_that_a_call_does_not_read_is_refused(http: httpx.AsyncClient) -> None:
    """It would be ignored: the call would cancel what lies ahead."""
    await made(http)
    said = problem(await http.post(f"{ALL}/monthly:pause", json={"pending": "keep"}), 400, "INVALID")
    assert said == "this POST has no body: write what it says into the address, ?name=value; this call takes pending"
    assert (await http.get(f"{ALL}/monthly")).json()["paused"] is False
    assert (await http.post(f"{ALL}/monthly:pause?pending=keep")).json()["paused"] is True


async def made(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    told = await http.post(ALL, json=MONTHLY | fields)
    assert told.status_code == 201, told.text
    one: dict[str, Any] = told.json()
    return one


async def messages(http: httpx.AsyncClient) -> list[dict[str, Any]]:
    listed = await http.get("/v1/topics/recurring/messages", params={"payload": "true", "limit": 1_000})
    return sorted(listed.json()["messages"], key=lambda one: one["id"])


async def test_a_schedule_is_created_shown_and_deleted(http: httpx.AsyncClient) -> None:
    told = await made(http)
    assert {name: told[name] for name in ("topic", "name", "cron", "zone", "payload", "revision", "paused")} == {
        "topic": TOPIC, "name": "monthly", "cron": ["0 6 1 * *"], "zone": "Europe/Berlin",
        "payload": {"of": "{occurrence}"}, "revision": 1, "paused": False,
    }  # fmt: skip
    assert (told["catch_up"], told["window"], told["overlap"], told["every"]) == ("latest", "1h", "allow", None)
    assert (told["status"], told["warnings"], told["state"]["produced"]) == ("active", [], 0)
    assert told["words"].endswith("in Europe/Berlin")
    shown = (await http.get(f"{ALL}/monthly")).json()
    assert shown["next"] == told["next"] and datetime.fromisoformat(shown["next"]) > datetime.now(UTC)
    assert (await http.delete(f"{ALL}/monthly")).status_code == 204
    assert "'monthly'" in problem(await http.get(f"{ALL}/monthly"), 404, "NOT_FOUND")
    problem(await http.delete(f"{ALL}/monthly"), 404, "NOT_FOUND")


async def test_every_field_comes_back_as_it_was_given(http: httpx.AsyncClient, tl: timeline.Timeline) -> None:
    given = {
        "cron": ["0 9 * * 1-5", "0 12 * * 6"], "every": "90m", "rrule": ["FREQ=DAILY"], "exclude": ["2031-12-25"],
        "start": "2031-05-06T07:00:00.000Z", "end": "2032-05-06T07:00:00.000Z", "count": 500, "zone": "Asia/Tokyo",
        "gap": "skip", "fold": "both", "jitter": "90s", "catch_up": "all", "window": "30m", "overlap": "queue",
        "payload_base64": "/3sxfQ==", "headers": {"kind": "report"}, "tag": "spring", "group": "ops",
        "expires": "2h", "paused": True,
    }  # fmt: skip
    created = await http.post(ALL, json=given | {"name": "all"})
    assert created.status_code == 201, created.text
    shown = (await http.get(f"{ALL}/all")).json()
    assert {name: shown[name] for name in given} == given
    found = await tl.get_schedule(TOPIC, "all")
    assert found is not None and found.specification.payload == b"\xff{1}"
    assert (found.specification.every_ms, found.specification.jitter_ms) == (5_400_000, 90_000)
    # What was read can be sent again, less what only the server says.
    again = await http.put(f"{ALL}/all", json=given)
    assert (again.status_code, again.json()["revision"]) == (200, 1)
    assert (await http.post(ALL, json=given | {"name": "all"})).status_code == 200


async def test_a_name_is_taken_by_the_first(http: httpx.AsyncClient) -> None:
    await made(http)
    again = await http.post(ALL, json=MONTHLY)
    assert (again.status_code, again.json()["revision"]) == (200, 1)
    problem(await http.post(ALL, json=MONTHLY | {"zone": "UTC"}), 409, "EXISTS")


async def test_pages_have_all_schedules_once(http: httpx.AsyncClient) -> None:
    names = {f"s{number}" for number in range(60)}  # more than are read at a time
    for name in names:
        await made(http, name=name)
    seen: list[str] = []
    for path in (ALL, "/v1/schedules"):
        seen.clear()
        cursor: str | None = ""
        while cursor is not None:
            page = (await http.get(path, params={"limit": 55, "cursor": cursor})).json()
            assert len(page["schedules"]) <= 55 and not any("payload" in one for one in page["schedules"])
            seen += [one["name"] for one in page["schedules"] if one["topic"] == TOPIC]
            cursor = page["cursor"]
        assert sorted(seen) == sorted(names)
    with_payload = (await http.get(ALL, params={"payload": "true"})).json()["schedules"]
    assert all(one["payload"] == MONTHLY["payload"] for one in with_payload)
    for garbled in ("not one", "\0", "!!!!"):
        assert "cursor" in problem(await http.get(ALL, params={"cursor": garbled}), 400, "INVALID")
    problem(await http.get("/v1/topics/nosuch/schedules"), 404, "NOT_FOUND")


async def test_a_change_leaves_the_other_fields_and_null_is_the_default(http: httpx.AsyncClient) -> None:
    await made(http, tag="spring", end="2040-01-01T00:00:00Z", headers={"a": "b"})
    changed = (await http.patch(f"{ALL}/monthly", json={"every": "2h", "cron": None, "end": None})).json()
    assert (changed["revision"], changed["every"], changed["cron"], changed["end"]) == (2, "2h", [], None)
    assert (changed["tag"], changed["zone"], changed["payload"]) == ("spring", "Europe/Berlin", MONTHLY["payload"])
    replaced = (await http.put(f"{ALL}/monthly", json={"cron": "@daily"})).json()
    assert (replaced["revision"], replaced["tag"], replaced["zone"], replaced["headers"]) == (3, None, "UTC", {})
    assert "payload" not in replaced
    said = problem(await http.patch(f"{ALL}/monthly", json={}), 400, "INVALID")
    assert "say which fields to change: cron" in said
    said = problem(await http.patch(f"{ALL}/monthly", json={"cron": None}), 400, "INVALID")
    assert "a schedule needs a rule" in said
    assert (await http.get(f"{ALL}/monthly")).json()["revision"] == 3


@pytest.mark.parametrize(
    ("change", "payload", "headers"),
    [
        ({"payload": [1]}, {"payload": [1]}, {"content-type": "application/json", "a": "b"}),
        ({"payload_text": "hi"}, {"payload_text": "hi"}, {"a": "b"}),
        ({"payload_base64": "/w=="}, {"payload_base64": "/w=="}, {"a": "b"}),
        ({"headers": {"c": "d"}}, {"payload": MONTHLY["payload"]}, {"content-type": "application/json", "c": "d"}),
        ({"headers": None}, {"payload": MONTHLY["payload"]}, {"content-type": "application/json"}),
        ({"payload": 1, "headers": {"Content-Type": "text/csv"}}, {"payload_text": "1"}, {"Content-Type": "text/csv"}),
    ],
    ids=str,
)
async def test_the_type_of_a_payload_goes_with_it(
    http: httpx.AsyncClient, change: dict[str, Any], payload: dict[str, Any], headers: dict[str, str]
) -> None:
    await made(http, headers={"a": "b"})
    told = (await http.patch(f"{ALL}/monthly", json=change)).json()
    assert {name: told[name] for name in told if name.startswith("payload")} == payload
    assert told["headers"] == headers


async def test_a_change_goes_by_the_revision_if_one_is_named(http: httpx.AsyncClient) -> None:
    await made(http)
    path = f"{ALL}/monthly"
    first = await http.patch(path, params={"if_revision": 1}, json={"tag": "a"})
    assert (first.status_code, first.json()["revision"]) == (200, 2)
    repeat = await http.patch(path, params={"if_revision": 1}, json={"tag": "a"})
    assert (repeat.status_code, repeat.json()) == (200, first.json())
    for method, body in (("PATCH", {"tag": "b"}), ("PATCH", {"payload": 1}), ("PUT", {"cron": "@daily"})):
        stale = await http.request(method, path, params={"if_revision": 1}, json=body)
        assert "revision" in problem(stale, 412, "FENCED")
    problem(await http.put(f"{ALL}/absent", params={"if_revision": 1}, json={"cron": "@daily"}), 404, "NOT_FOUND")
    assert "if_revision" in problem(
        await http.patch(path, params={"if_revision": -1}, json={"tag": "b"}), 400, "INVALID"
    )


async def test_put_creates_what_is_not_there(http: httpx.AsyncClient) -> None:
    body = {"every": "1h", "payload_text": "hi"}
    created = await http.put(f"{ALL}/hourly", json=body)
    assert (created.status_code, created.json()["revision"]) == (201, 1)
    again = await http.put(f"{ALL}/hourly", json=body)
    assert (again.status_code, again.json()["revision"]) == (200, 1)


async def test_pause_and_resume(http: httpx.AsyncClient) -> None:
    await made(http)
    for _ in range(2):  # a repeat changes nothing
        paused = await http.post(f"{ALL}/monthly:pause")
        assert (paused.status_code, paused.json()["status"], paused.json()["revision"]) == (200, "paused", 2)
    for _ in range(2):
        resumed = await http.post(f"{ALL}/monthly:resume")
        assert (resumed.status_code, resumed.json()["status"], resumed.json()["revision"]) == (200, "active", 3)
    for verb in ("pause", "resume", "trigger", "backfill"):
        body = {"from": "2026-01-01T00:00Z", "to": "2026-01-02T00:00Z"} if verb == "backfill" else None
        problem(await http.post(f"{ALL}/absent:{verb}", json=body), 404, "NOT_FOUND")


async def test_occurrences_are_messages_until_a_change_cancels_them(http: httpx.AsyncClient) -> None:
    await made(http, name="often", cron=None, every="30s", payload={"of": "{occurrence}", "number": "{sequence}"})
    while not (found := await messages(http)):
        await asyncio.sleep(0)
    assert found[0]["id"].startswith("often@") and found[0]["payload"]["of"] in found[0]["id"]
    kept = await http.post(f"{ALL}/often:pause", params={"pending": "keep"})
    assert kept.json()["status"] == "paused" and await messages(http)
    await http.post(f"{ALL}/often:resume")
    await http.post(f"{ALL}/often:pause", params={"pending": "cancel"})
    while any(datetime.fromisoformat(one["due"]) > datetime.now(UTC) for one in await messages(http)):
        await asyncio.sleep(0)
    said = problem(await http.post(f"{ALL}/often:pause", params={"pending": "drop"}), 400, "INVALID")
    assert said == "pending must be one of cancel, keep, not 'drop'"
    said = problem(await http.patch(f"{ALL}/often", json={"catch_up": "ALL"}), 400, "INVALID")
    assert said == "catch_up must be one of none, latest, all, not 'ALL'"


async def test_a_trigger_with_a_time_of_its_own_puts_one_message(http: httpx.AsyncClient) -> None:
    await made(http, paused=True, payload={"of": "{occurrence}"})
    path, now = f"{ALL}/monthly:trigger", datetime.now(UTC).isoformat(timespec="milliseconds")
    first, again = [await http.post(path, json={"at": now}) for _ in range(2)]
    assert first.status_code == again.status_code == 201
    assert first.json()["id"] == again.json()["id"] and first.json()["id"].endswith(".trigger")
    assert first.json()["status"] == "OK"
    assert [one["id"] for one in await messages(http)] == [first.json()["id"]]
    each = {(await http.post(path)).json()["id"] for _ in range(2)}
    assert len(each) == 2 and len(await messages(http)) == 3
    said = problem(await http.post(path, json={"at": "2020-01-01T00:00Z"}), 400, "INVALID")
    assert "a day" in said


async def test_a_backfill_puts_what_was_not_put(http: httpx.AsyncClient) -> None:
    await made(http, name="daily", cron="0 6 * * *", zone="UTC", paused=True, payload={"of": "{occurrence}"})
    path, week = f"{ALL}/daily:backfill", {"from": "2026-11-01T00:00:00Z", "to": "2026-11-08T00:00:00Z"}
    dry = (await http.post(path, params={"dry_run": "true"}, json=week)).json()
    assert dry == {"produced": 7, "present": 0, "failed": 0, "dry_run": True} and not await messages(http)
    done = (await http.post(path, json=week)).json()
    assert done == {"produced": 7, "present": 0, "failed": 0, "dry_run": False}
    assert (await messages(http))[0]["id"] == "daily@2026-11-01T06:00:00Z"
    assert (await http.post(path, json=week)).json()["present"] == 7
    backwards = {"from": week["to"], "to": week["from"]}
    assert "to must be after from" in problem(await http.post(path, json=backwards), 400, "INVALID")
    ahead = {"from": "2026-11-01T00:00:00Z", "to": "2100-01-01T00:00:00Z"}
    assert (await http.post(path, params={"dry_run": "true"}, json=ahead)).json()["present"] == 7  # and none ahead
    assert "to must be a whole number" in problem(await http.post(path, json={"from": 1, "to": True}), 400, "INVALID")


async def test_the_next_times_name_changes_of_clocks(http: httpx.AsyncClient) -> None:
    await made(http, name="night", cron="30 2 * * *", start="2031-03-29T00:00:00Z")
    told = (await http.get(f"{ALL}/night/next", params={"limit": 2})).json()
    assert told["times"] == [
        {"at": "2031-03-29T01:30:00.000Z", "local": "2031-03-29T02:30:00+01:00", "clocks": ""},
        {"at": "2031-03-30T01:30:00.000Z", "local": "2031-03-30T03:30:00+02:00", "clocks": "skipped"},
    ]
    assert "limit" in problem(await http.get(f"{ALL}/night/next", params={"limit": 0}), 400, "INVALID")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "a schedule needs a rule"),
        ({"cron": "61 * * * *"}, "minute"),
        ({"every": "1h", "window": "long"}, "window must be numbers with a unit"),
        ({"every": "1h", "jitter": "2d"}, "jitter"),
        ({"every": "1h", "catch_up": "some"}, "catch_up must be one of none, latest, all"),
        ({"every": "1h", "overlap": None, "catch_up": None, "expires": "soon"}, "expires must be numbers"),
        ({"every": "1h", "payload": 1, "payload_text": "1"}, "give one of payload (any JSON value), payload_text"),
        ({"every": "1h", "payload_base64": "?"}, "payload_base64 must be base64"),
        ({"every": "1h", "headers": {"a": 1}}, "headers: "),
        ({"every": "1h", "tag": "x" * 65}, "tag must be text of 0 to 64 bytes"),
        ({"every": "1h", "name": "a b"}, "a schedule's name is 1 to 100 letters"),
        ({"every": "1h", "paused": 1}, "paused must be true or false"),
        ({"every": "1h", "lease": "1m"}, "lease"),
        ({"every": "1h", "count": 2}, "count needs a start"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
async def test_a_refusal_names_the_field(http: httpx.AsyncClient, asked: dict[str, Any], said: str) -> None:
    assert said in problem(await http.post(ALL, json={"name": "wrong"} | asked), 400, "INVALID")
    assert (await http.get(ALL)).json()["schedules"] == []


async def test_a_template_has_a_bound(http: httpx.AsyncClient) -> None:
    large = await http.post(ALL, json={"name": "large", "every": "1h", "payload_text": "x" * (1024 * 1024 + 1)})
    assert "payload takes 1048577 bytes" in problem(large, 413, "TOO_LARGE")


async def test_schedules_of_no_topic_and_of_internal_ones_are_refused(http: httpx.AsyncClient) -> None:
    body = {"name": "a", "every": "1h"}
    problem(await http.post("/v1/topics/nosuch/schedules", json=body), 404, "NOT_FOUND")
    assert "internal" in problem(await http.post("/v1/topics/~schedules/schedules", json=body), 400, "INVALID")


async def test_a_verb_is_part_of_the_path(http: httpx.AsyncClient) -> None:
    await made(http)
    said = problem(await http.get(f"{ALL}/monthly:pause"), 405, "INVALID")
    assert f"GET does not go with '{ALL}/monthly:pause'" in said
    assert f"there is no '{ALL}/monthly:stop'" in problem(await http.post(f"{ALL}/monthly:stop"), 404, "NOT_FOUND")
    metrics = (await http.get("/metrics")).text
    await http.post(f"{ALL}/monthly:pause")
    metrics = (await http.get("/metrics")).text
    assert 'route="/v1/topics/{topic}/schedules/{name}:pause"' in metrics and "/:pause" not in metrics
