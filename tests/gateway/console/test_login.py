"""Tokens, cookies, other sites and other hosts: who may see and do what."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import timeline
from tests.gateway.console.stage import Console
from tests.gateway.processes import broker, gateway
from tests.security.guarded import Tokens
from timeline.gateway.console.live import LOGIN
from timeline.gateway.console.site import HANDLERS

pytestmark = [pytest.mark.processes, pytest.mark.slow]

KEPT = "/message?topic=mails&id=kept"
OPEN = {"/login", "/logout", "/static/{name:str}"}
"""Pages without a token: they show nothing of any topic."""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, dict[str, str], Path]]:
    folder = tmp_path_factory.mktemp("login")
    tokens = Tokens(folder)
    every = ("produce", "consume", "admin", "operator", "schedule")
    made = {"all": tokens.add("all", *every), "produce": tokens.add("produce", "produce")}
    made["other"] = tokens.add("other", *every, topics=["other"])
    with (
        broker(folder, "--tokens", str(tokens.path)) as served,
        gateway(folder, served["listen"], "--log-level", "debug") as opened,
    ):
        yield served["listen"], f"http://{opened['listen']}", made, opened["log"]


@pytest.fixture
async def tl(guarded: Any) -> AsyncIterator[timeline.Timeline]:
    async with timeline.connect(guarded[0], token=guarded[2]["all"]) as client:
        await client.create_topic("mails")
        async with client.producer("mails") as producer:
            await producer.produce(b"very private", id="kept", in_="1h")
        yield client


@pytest.fixture
async def console(guarded: Any) -> AsyncIterator[Console]:
    async with httpx.AsyncClient(base_url=guarded[1], timeout=60) as http:
        yield Console(http)


async def log_in(console: Console, token: str, **more: str) -> httpx.Response:
    return await console.post("/login", {"token": token, "next": "/topic?name=mails", **more})


def paths(method: str) -> list[str]:
    return sorted(path for one in HANDLERS if method in one.http_methods for path in one.paths if path not in OPEN)


@pytest.mark.parametrize("path", paths("GET"))
async def test_no_page_opens_without_a_token(console: Console, path: str) -> None:
    answer = await console.get(path, topic="mails", name="mails", id="kept")
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        assert answer.content == LOGIN  # the page that listens opens the login
    else:
        assert answer.status_code == 303 and answer.headers["location"].startswith("/login"), answer.text
    assert "very private" not in answer.text


@pytest.mark.parametrize("path", paths("POST"))
async def test_nothing_is_done_without_a_token(console: Console, tl: timeline.Timeline, path: str) -> None:
    form = {
        "topic": "mails",
        "name": "mails",
        "id": "kept",
        "do": "cancel",
        "payload": "x",
        "in": "1h",
        "cron": "@daily",
    }
    answer = await console.post(f"{path}?topic=mails&name=mails&id=kept", form)
    assert answer.status_code == 401 and 'href="/login"' in answer.text, answer.text
    assert await tl.get("mails", "kept") is not None


async def test_a_login_that_has_ended_loses_nothing_that_was_written(console: Console, tl: timeline.Timeline) -> None:
    form = {"topic": "mails", "payload": "a long <b>text</b>\nof two lines", "tag": "spring", "json": "on"}
    answer = await console.post("/produce", form)
    assert answer.status_code == 401 and "Your login has ended" in answer.text
    assert "a long &lt;b&gt;text&lt;/b&gt;\nof two lines</pre>" in answer.text and "spring" in answer.text
    part = await console.post("/dead/step", {"topic": "mails", "do": "count"}, hx_request="true")
    assert part.status_code == 401 and "Log in" in part.text and "</html>" not in part.text


async def test_a_form_from_before_a_login_is_sent_again_after_it(
    console: Console, tl: timeline.Timeline, guarded: Any
) -> None:
    await log_in(console, guarded[2]["all"])
    form = {"csrf": console.http.cookies["timeline_csrf"], "topic": "mails", "payload": "x", "id": "again", "in": "1h"}
    console.http.cookies.delete("timeline_token")  # its time is over
    assert (await console.post("/produce", form)).status_code == 401
    await log_in(console, guarded[2]["all"])
    assert (await console.post("/produce", form)).status_code == 303
    assert await tl.get("mails", "again") is not None
    await console.post("/logout", {})
    assert "timeline_csrf" not in console.http.cookies


async def test_a_token_opens_what_it_may(console: Console, tl: timeline.Timeline, guarded: Any) -> None:
    _, _, tokens, log = guarded
    wrong = await log_in(console, tokens["all"][:-8] + "deadbeef")
    assert wrong.status_code == 401 and "token" in wrong.text and tokens["all"][:-8] not in wrong.text
    right = await log_in(console, tokens["all"])
    assert right.status_code == 303 and right.headers["location"] == "/topic?name=mails"
    kept = next(one for one in right.headers.get_list("set-cookie") if one.startswith("timeline_token="))
    assert "HttpOnly" in kept and "SameSite=strict" in kept
    assert "very private" in (await console.get("/message", topic="mails", id="kept")).text
    assert (await console.post(KEPT, {"do": "now"})).status_code == 303
    assert (await console.post("/logout", {})).headers["location"] == "/login"
    assert (await console.get("/")).status_code == 303
    assert tokens["all"] not in log.read_text()


async def test_a_token_without_the_right_sees_no_payload_and_changes_nothing(
    console: Console, tl: timeline.Timeline, guarded: Any
) -> None:
    await log_in(console, guarded[2]["produce"])
    told = (await console.get("/message", topic="mails", id="kept")).text
    assert "very private" not in told and "may not" in told
    assert (await console.get("/message/payload", topic="mails", id="kept")).status_code == 403
    denied = await console.post("/topic/pause?topic=mails", {"do": "pause"})
    assert denied.status_code == 403 and "needs the right" in denied.text


async def test_a_token_of_another_topic_finds_nothing(console: Console, tl: timeline.Timeline, guarded: Any) -> None:
    await log_in(console, guarded[2]["other"])
    assert "mails" not in (await console.get("/")).text
    assert (await console.get("/topic", name="mails")).status_code == 404
    assert "very private" not in (await console.get("/message", topic="mails", id="kept")).text
    assert "kept</a>" not in (await console.get("/find", q="kept")).text


async def test_an_operator_acts_on_messages_of_any_group(console: Console, tl: timeline.Timeline, guarded: Any) -> None:
    await log_in(console, guarded[2]["all"], operator="on")
    async with tl.producer("mails", group="theirs") as producer:
        await producer.produce(b"x", id="of-theirs", in_="1h")
    form = {"group": "theirs", "do": "cancel"}
    assert (await console.post("/message?topic=mails&id=of-theirs", form)).status_code == 303
    assert await tl.get("mails", "of-theirs") is None


@pytest.mark.parametrize(
    "headers",
    [
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "none"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
    ],
)
async def test_another_site_changes_nothing(
    console: Console, tl: timeline.Timeline, guarded: Any, headers: dict[str, str]
) -> None:
    await log_in(console, guarded[2]["all"])
    answer = await console.post(KEPT, {"do": "cancel"}, **headers)
    assert answer.status_code == 403 and "only pages of this console" in answer.text
    assert await tl.get("mails", "kept") is not None


async def test_a_form_needs_its_secret(console: Console, tl: timeline.Timeline, guarded: Any) -> None:
    await log_in(console, guarded[2]["all"])
    for secret in ("", "guessed"):
        answer = await console.http.post(KEPT, data={"csrf": secret, "do": "cancel"})
        assert answer.status_code == 403 and "no longer valid" in answer.text
    as_json = await console.http.post(KEPT, json={"do": "cancel"})
    assert as_json.status_code == 400
    assert await tl.get("mails", "kept") is not None


async def test_the_cookie_is_no_token_of_the_api(console: Console, guarded: Any) -> None:
    await log_in(console, guarded[2]["all"])
    assert (await console.get("/v1/topics")).status_code == 401


async def test_cookies_go_over_tls_alone_where_the_page_came_over_it(console: Console, guarded: Any) -> None:
    """A proxy ends TLS in front of this gateway. The browser tells the page's own origin."""
    host = guarded[1].removeprefix("http://")
    for origin, secure in ((f"http://{host}", False), (f"https://{host}", True)):
        answer = await console.post("/login", {"token": guarded[2]["all"], "next": "/"}, origin=origin)
        assert answer.status_code == 303, answer.text
        kept = next(one for one in answer.headers.get_list("set-cookie") if one.startswith("timeline_token="))
        assert ("Secure" in kept) is secure, kept


async def test_another_host_is_refused(console: Console) -> None:
    answer = await console.http.get("/login", headers={"Host": "evil.example"})
    assert answer.status_code == 403 and "does not answer under the host" in answer.text


@pytest.mark.parametrize("path", ["//evil.example", "/\\evil.example", "https://evil.example", "/\nx"])
async def test_a_login_leads_to_no_other_site(console: Console, guarded: Any, path: str) -> None:
    answer = await console.post("/login", {"token": guarded[2]["all"], "next": path})
    assert answer.status_code == 303 and answer.headers["location"] == "/"
