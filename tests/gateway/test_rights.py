"""Every call of the application's own table, with every kind of token that must not do it. A new call cannot be
forgotten: it has no entry here, and the test fails. The console's pages are tried in `console/test_login`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

import timeline
from tests.gateway.connections import Connection
from tests.gateway.processes import broker, gateway
from tests.gateway.test_messages import problem
from tests.security.guarded import Tokens
from timeline.gateway.app import CALLS, PAGES, application
from timeline.gateway.console.site import HANDLERS
from timeline.gateway.routes.verbs import as_called
from timeline.gateway.service import GatewaySettings, HttpGateway

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

TOPIC, ID, SCHEDULE = "departures", "kept", "paused"
RECEIPT = "the receipt of a message that another one holds"
OPEN = {"healthz", "readyz", "metrics", "openapi", "docs"}
"""Pages that need no token: they show nothing of any topic."""
CHANGING = {"right": "consume"}
TAKING = {"right": "produce"}
GOVERNING = {"right": "operator"}
MANAGING = {"right": "produce"}
SEEING = {"right": "broker"}
"""Every right of a client permits it."""
RULES: dict[str, dict[str, Any]] = {
    "putMessages": CHANGING | {"body": {"payload": 1, "in": "1h"}},
    "showMessage": SEEING,
    "moveMessage": CHANGING | {"body": {"in": "2h"}},
    "cancelMessage": CHANGING,
    "leaseMessages": TAKING | {"body": {"wait": 0}},
    "streamMessages": TAKING,
    "ackLeases": TAKING | {"body": {"receipts": [RECEIPT]}},
    "extendLeases": TAKING | {"body": {"receipts": [RECEIPT], "lease": "1m"}},
    "releaseLeases": TAKING | {"body": {"receipts": [RECEIPT]}},
    "buryLeases": TAKING | {"body": {"receipts": [RECEIPT], "reason": "test"}},
    "moveTag": CHANGING | {"body": {"by": "1h"}, "query": "tag=spring"},
    "cancelTag": CHANGING | {"query": "tag=spring"},
    "reviveDeadLetters": CHANGING | {"body": {"ids": ["dead"]}},
    "purgeDeadLetters": CHANGING | {"body": {"ids": ["dead"]}},
    "listMessages": SEEING,
    "listDeadLetters": SEEING,
    "whyMessage": SEEING,
    "lateMessages": SEEING,
    "forecast": SEEING,
    "cluster": SEEING,
    "createSchedule": MANAGING | {"body": {"name": "new", "cron": "@yearly"}},
    "listSchedules": SEEING,
    "listAllSchedules": SEEING,
    "showSchedule": SEEING,
    "replaceSchedule": MANAGING | {"body": {"cron": "@daily"}},
    "updateSchedule": MANAGING | {"body": {"tag": "changed"}},
    "deleteSchedule": MANAGING,
    "pauseSchedule": MANAGING,
    "resumeSchedule": MANAGING,
    "triggerSchedule": MANAGING,
    "backfillSchedule": MANAGING | {"body": {"from": "2020-12-31T00:00Z", "to": "2022-01-01T00:00Z"}},
    "nextOccurrences": SEEING,
    "previewSchedule": SEEING | {"body": {"every": "1h"}},
    "listTopics": SEEING,
    "showTopic": SEEING,
    "createTopic": GOVERNING | {"body": {"lease": "1h"}},
    "updateTopic": GOVERNING | {"body": {"lease": "1h"}},
    "dropTopic": GOVERNING,
    "rotateSecret": GOVERNING,
}
"""By operation: a right that does not permit it, and a body and a query with which it would do something."""


@dataclass
class Guarded:
    """A gateway before a broker that asks for tokens. `receipt`: of a message that is leased."""

    http: httpx.AsyncClient
    tl: timeline.Timeline
    tokens: dict[str, str]
    receipt: str
    logs: tuple[Path, Path]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, dict[str, str]]]:
    folder = tmp_path_factory.mktemp("rights")
    tokens = Tokens(folder)
    every = ("produce", "consume", "admin", "operator", "schedule")
    made = {right: tokens.add(right, right) for right in (*every, "broker")}
    made |= {"all": tokens.add("all", *every), "other": tokens.add("other", *every, topics=["other"])}
    made["wrong"] = made["all"][:-8] + "deadbeef"
    made["expired"] = tokens.add("expired", *every, expires_ms=1)
    with (
        broker(folder, "--tokens", str(tokens.path)) as served,
        gateway(folder, served["listen"], "--log-level", "debug") as opened,
    ):
        yield served, opened, made


@pytest.fixture
async def guarded(started: Any) -> AsyncIterator[Guarded]:
    served, opened, tokens = started
    async with (
        timeline.connect(served["listen"], token=tokens["all"]) as tl,
        httpx.AsyncClient(base_url=f"http://{opened['listen']}", timeout=60) as http,
    ):
        await tl.create_topic(TOPIC)
        async with tl.producer(TOPIC) as producer:
            for id, when in ((ID, "1h"), ("leased", 0), ("dead", 0)):
                await producer.produce(b"very private", id=id, in_=when, tag="spring")
        taken = {one.id: one.receipt for _ in range(2) for one in await tl.take(TOPIC, 1, "20s", lease="1h")}
        await tl.settle(taken["dead"], "bury", reason="test")
        await tl.schedule(TOPIC, SCHEDULE, cron="@yearly", payload=b"very private", paused=True)
        yield Guarded(http, tl, tokens, taken["leased"], (served["log"], opened["log"]))
        async for one in tl.schedules():
            await one.delete()
        with contextlib.suppress(timeline.errors.NotFound):
            await tl.drop_topic(TOPIC)


def request_of(call: Any, guarded: Guarded) -> dict[str, Any]:
    """The request that would do what the call is for."""
    rule = RULES[call.operation_id]
    (path,), (method,) = call.paths, call.http_methods
    url = as_called(f"/v1{path}").replace("{topic:str}", TOPIC).replace("{id:str}", ID).replace("{name:str}", SCHEDULE)
    asked: dict[str, Any] = {"method": method, "url": f"{url}?{rule['query']}" if "query" in rule else url}
    if "body" in rule:
        asked["content"] = json.dumps(rule["body"]).replace(RECEIPT, guarded.receipt)
        asked["headers"] = {"Content-Type": "application/json"}
    return asked


async def asked(guarded: Guarded, call: Any, token: str | None) -> httpx.Response:
    """The answer, of a stream its head alone."""
    request = request_of(call, guarded)
    headers = request.pop("headers", {}) | ({} if token is None else {"Authorization": f"Bearer {token}"})
    async with guarded.http.stream(headers=headers, **request) as answer:
        if answer.status_code >= 300 or call.operation_id != "streamMessages":
            await answer.aread()
        return answer


async def state(guarded: Guarded) -> Any:
    """All that a call could change."""
    found = guarded.tl.scan(TOPIC, state=["waiting", "leased", "dead"])
    messages = [(one.id, str(one.state), one.version, one.due) async for one in found]
    schedules = [(one.name, one.revision, one.state.produced) async for one in guarded.tl.schedules(TOPIC)]
    return sorted(messages), sorted(schedules), await guarded.tl.topics()


def test_every_route_is_in_the_table() -> None:
    inside: Any = application(HttpGateway(GatewaySettings(), "test"))
    framework = inside._inside._inside
    routes = {(method, route.path_format) for route in framework.routes for method in route.methods - {"OPTIONS"}}
    named = {
        (method, "/v1" + path.replace(":str", ""))
        for call in CALLS
        for path in call.paths
        for method in call.http_methods
    }
    pages = {
        (method, path.replace(":str", "")) for page in (*PAGES, *HANDLERS) for path in page.paths
        for method in page.http_methods
    }  # fmt: skip
    assert routes == named | pages
    assert {call.operation_id for call in CALLS} == set(RULES)
    assert {page.fn.__name__ for page in PAGES} == OPEN


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.operation_id)
async def test_who_may_not_call_changes_and_sees_nothing(guarded: Guarded, call: Any) -> None:
    before = await state(guarded)
    for name in (None, "wrong", "expired"):
        answer = await asked(guarded, call, None if name is None else guarded.tokens[name])
        problem(answer, 401, "UNAUTHENTICATED")
        assert answer.headers["www-authenticate"] == "Bearer"
    for name in (RULES[call.operation_id]["right"], "broker", "other"):
        refused(await asked(guarded, call, guarded.tokens[name]))
    assert await state(guarded) == before
    permitted = await asked(guarded, call, guarded.tokens["all"])
    assert permitted.status_code in (200, 201, 204, 207, 409), permitted.text  # 409: the topic to create is there
    without_secrets(guarded, await guarded.http.get("/metrics"))


def refused(answer: httpx.Response) -> None:
    """Check that nothing was done or shown: a refusal as a whole, one for each message, or no word of the topic."""
    if answer.status_code == 403:
        problem(answer, 403, "FORBIDDEN")
    elif answer.status_code == 207:
        assert {one["status"] for one in answer.json()["results"]} == {"FORBIDDEN"}
    elif answer.status_code == 404:
        problem(answer, 404, "NOT_FOUND")
    else:
        assert answer.status_code == 200 and TOPIC not in answer.text, answer.text


def without_secrets(guarded: Guarded, *answers: httpx.Response) -> None:
    """Check that no log, metric or answer has the secret part of a token, or a payload."""
    told = [log.read_text() for log in guarded.logs] + [answer.text for answer in answers]
    for secret in [*(token.rpartition("_")[2] for token in guarded.tokens.values()), "very private"]:
        assert not any(secret in text for text in told)


@pytest.mark.parametrize(
    "call", [call for call in CALLS if "body" in RULES[call.operation_id]], ids=lambda call: call.operation_id
)
async def test_the_body_of_a_stranger_is_not_read(guarded: Guarded, call: Any) -> None:
    """The answer comes before the body does. So strangers cannot fill the gateway's memory."""
    async with Connection(str(guarded.http.base_url)) as connection:
        request = request_of(call, guarded)
        await connection.send(
            f"{request['method']} {request['url']} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n".encode()
        )
        assert (await connection.answer()).status == 401


async def test_an_operator_says_so_in_a_header(guarded: Guarded) -> None:
    async with guarded.tl.producer(TOPIC, group="theirs") as producer:
        await producer.produce(b"", id="theirs", in_="1h")
    path = f"/v1/topics/{TOPIC}/messages/theirs"
    token = {"Authorization": f"Bearer {guarded.tokens['all']}"}
    for said, status in (("", 403), ("false", 403), ("0", 403), ("yes", 400), ("true", 200)):
        more = {"Timeline-As-Operator": said} if said else {}
        answer = await guarded.http.delete(path, headers=token | more)
        assert answer.status_code == status, (said, answer.text)
