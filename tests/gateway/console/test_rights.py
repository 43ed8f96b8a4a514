"""What a token may do in the console: each action with the rights that it needs, and with all others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

import timeline
from tests.gateway.console.stage import Console
from tests.gateway.console.test_login import log_in, paths
from tests.gateway.processes import broker, gateway
from tests.security.guarded import Tokens

pytestmark = [pytest.mark.processes, pytest.mark.slow]

RIGHTS = ("produce", "consume", "admin", "schedule")
EVERY = frozenset(RIGHTS)
OF = "?topic=mails&name=mails&id=kept"
ACTIONS: tuple[tuple[str, dict[str, str], tuple[str, ...]], ...] = (
    ("/produce", {"topic": "mails", "payload": "x", "in": "1h"}, ("produce",)),
    (f"/message{OF}", {"do": "move", "in": "2h"}, ("produce",)),
    (f"/message{OF}", {"do": "now"}, ("produce",)),
    (f"/message{OF}", {"do": "cancel"}, ("produce",)),
    (f"/message{OF}", {"do": "revive"}, ("produce",)),
    (f"/message{OF}", {"do": "purge"}, ("produce",)),
    ("/dead/step", {"topic": "mails", "do": "revive", "id": "group=default&id=kept"}, ("produce",)),
    ("/dead/step", {"topic": "mails", "do": "purge", "id": "group=default&id=kept"}, ("produce",)),
    ("/tag/step", {"topic": "mails", "tag": "spring", "do": "count"}, ("produce",)),
    ("/tag/step", {"topic": "mails", "tag": "spring", "do": "move", "in": "2h"}, ("produce",)),
    ("/tag/step", {"topic": "mails", "tag": "spring", "do": "cancel"}, ("produce",)),
    ("/topic/create", {"name": "new"}, ("admin",)),
    (f"/topic/settings{OF}", {"lease": "45s", "was_lease": "30s"}, ("admin",)),
    (f"/topic/pause{OF}", {"do": "pause"}, ("admin",)),
    ("/schedules/create", {"topic": "mails", "name": "new", "cron": "@daily", "payload": "x"}, ("schedule", "produce")),
    ("/schedule?topic=mails&name=daily", {"do": "pause"}, ("schedule", "produce")),
    ("/schedule?topic=mails&name=daily", {"do": "resume"}, ("schedule", "produce")),
    ("/schedule?topic=mails&name=daily", {"do": "trigger"}, ("schedule", "produce")),
    ("/schedule?topic=mails&name=daily", {"do": "delete"}, ("schedule", "produce")),
)
NAMES = [f"{path.partition('?')[0]} {form.get('do', '')}" for path, form, _ in ACTIONS]
NEED_NONE = {"/schedules/preview"}
"""Forms that only compute."""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, dict[frozenset[str], str]]]:
    """The addresses of a broker and its gateway, and a token of each set of rights."""
    folder = tmp_path_factory.mktemp("rights")
    tokens = Tokens(folder)
    sets = {EVERY, *(frozenset(rights) for _, _, rights in ACTIONS), *(EVERY - {right} for right in RIGHTS)}
    made = {rights: tokens.add("-".join(sorted(rights)), *sorted(rights)) for rights in sets}
    with broker(folder, "--tokens", str(tokens.path)) as served, gateway(folder, served["listen"]) as opened:
        asyncio.run(_fill(served["listen"], made[EVERY]))
        yield served["listen"], f"http://{opened['listen']}", made


async def _fill(address: str, token: str) -> None:
    async with timeline.connect(address, token=token) as tl:
        await tl.create_topic("mails")
        await tl.schedule("mails", "daily", cron="0 9 * * *", payload=b"x")
        async with tl.producer("mails") as producer:
            await producer.produce(b"x", id="kept", in_="1h", tag="spring")


@pytest.fixture
async def console(guarded: Any) -> AsyncIterator[Console]:
    async with httpx.AsyncClient(base_url=guarded[1], timeout=60) as http:
        yield Console(http)


def test_every_action_is_listed() -> None:
    assert {path.partition("?")[0] for path, _, _ in ACTIONS} == {*paths("POST")} - NEED_NONE


@pytest.mark.parametrize(("path", "form", "rights"), ACTIONS, ids=NAMES)
async def test_an_action_needs_its_rights_and_no_other(
    console: Console, guarded: Any, path: str, form: dict[str, str], rights: tuple[str, ...]
) -> None:
    address, _, tokens = guarded
    async with timeline.connect(address, token=tokens[EVERY]) as tl:
        before = await standing(tl)
        for right in rights:
            await log_in(console, tokens[EVERY - {right}])
            denied = await console.post(path, form)
            assert denied.status_code == 403 or path == "/dead/step", "there, each letter has its own answer"
            assert f"needs the right {right}" in denied.text, denied.text
            assert await standing(tl) == before, "nothing was done"
    await log_in(console, tokens[frozenset(rights)])
    allowed = await console.post(path, form)
    assert "needs the right" not in allowed.text
    # A message that is no dead letter is neither revived nor purged, and one that is cancelled is gone.
    refused = form.get("do") in ("revive", "purge") and path != "/dead/step"
    assert allowed.status_code == (404 if refused else 200 if path.endswith("/step") else 303), allowed.text


async def standing(tl: timeline.Timeline) -> Any:
    """All that actions could change."""
    messages = sorted([(one.id, one.due_ms, one.version) async for one in tl.scan("mails")])
    schedules = sorted([(one.name, one.paused, one.revision) async for one in tl.schedules("mails")])
    return messages, schedules, [(one.name, one.settings) for one in await tl.topics()]
