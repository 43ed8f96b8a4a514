"""What rules give, over HTTP: the same times as on the command line, and refusals that name the field."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from tests.gateway.test_messages import problem
from timeline.cli.app import cli
from timeline.errors import Throttled
from timeline.gateway.routes import recurring

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PREVIEW = "/v1/schedules:preview"


async def test_a_change_of_clocks_is_named(http: httpx.AsyncClient) -> None:
    asked = {"cron": "30 2 * * *", "zone": "Europe/Berlin", "from": "2027-03-27T00:00:00Z", "limit": 3}
    told = (await http.post(PREVIEW, json=asked)).json()
    assert told["words"] == "At 02:30 every day, in Europe/Berlin"
    assert told["times"] == [
        {"at": "2027-03-27T01:30:00.000Z", "local": "2027-03-27T02:30:00+01:00", "clocks": ""},
        {"at": "2027-03-28T01:30:00.000Z", "local": "2027-03-28T03:30:00+02:00", "clocks": "skipped"},
        {"at": "2027-03-29T00:30:00.000Z", "local": "2027-03-29T02:30:00+02:00", "clocks": ""},
    ]
    asked = {"cron": ["30 2 * * *"], "zone": "Europe/Berlin", "fold": "both", "from": 1824940800000, "limit": 2.0}
    told = (await http.post(PREVIEW, json=asked)).json()
    assert [one["clocks"] for one in told["times"]] == ["first", "second"]


async def test_it_gives_what_the_command_gives(http: httpx.AsyncClient) -> None:
    asked = {"rrule": "FREQ=MONTHLY;BYDAY=-1FR;BYHOUR=17", "every": "90m", "exclude": ["2026-12-25", "cron:* * 1 1 *"],
             "start": "2026-12-01T00:00:00Z", "count": 400, "zone": "America/New_York",
             "from": "2026-12-20T00:00:00Z", "limit": 300}  # fmt: skip
    told = (await http.post(PREVIEW, json=asked)).json()
    options = ["--rrule", "FREQ=MONTHLY;BYDAY=-1FR;BYHOUR=17", "--every", "90m", "--exclude", "2026-12-25", "--exclude",
               "cron:* * 1 1 *", "--start", "2026-12-01T00:00:00Z", "--count", "400", "--zone", "America/New_York",
               "--from", "2026-12-20T00:00:00Z", "--next", "300", "--json"]  # fmt: skip
    # Through the program, not the bare command: click keeps the names of the help option from a command's first call.
    shown = json.loads(CliRunner().invoke(cli, ["schedule", "preview", *options], obj={}).stdout)
    assert len(shown) > 50 and [one["local"] for one in told["times"]] == shown


async def test_null_is_the_default(http: httpx.AsyncClient) -> None:
    nothing = dict.fromkeys(("rrule", "every", "exclude", "start", "end", "count", "zone", "gap", "fold", "from"), None)
    told = (await http.post(PREVIEW, json={"cron": "@daily", **nothing})).json()
    assert len(told["times"]) == 10 and told["words"].endswith("in UTC")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "a schedule needs a rule"),
        ({"cron": []}, "a schedule needs a rule"),
        ({"cron": "0 9 * *"}, "must have five fields"),
        ({"cron": "61 * * * *"}, "minute"),
        ({"cron": 7}, "cron must be text or an array"),
        ({"rrule": "FREQ=NEVER"}, "rrule"),
        ({"every": "10ms"}, "every must be at least 1s"),
        ({"every": "often"}, "every must be numbers with a unit"),
        ({"every": "1h", "exclude": "christmas"}, "exclude 'christmas' must be a date"),
        ({"every": "1h", "start": "2026-12-01T09:00"}, "start '2026-12-01T09:00' does not say in which time zone"),
        ({"every": "1h", "end": 5}, "end=5 looks like seconds"),
        ({"every": "1h", "count": 3}, "count needs a start"),
        ({"every": "1h", "count": 0, "start": "2026-12-01T09:00Z"}, "count must be at least 1"),
        ({"every": "1h", "zone": "Atlantis"}, "no time zone 'Atlantis'"),
        ({"every": "1h", "gap": "earlier"}, "gap must be one of later, skip"),
        ({"every": "1h", "from": "soon"}, "from 'soon' is no time"),
        ({"every": "1h", "limit": 0}, "limit must be 1 to 1000, not 0"),
        ({"every": "1h", "limit": 1001}, "limit must be 1 to 1000, not 1001"),
        ({"every": "1h", "crom": "@daily"}, "crom"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
async def test_a_refusal_names_the_field(http: httpx.AsyncClient, asked: dict[str, Any], said: str) -> None:
    assert said in problem(await http.post(PREVIEW, json=asked), 400, "INVALID")


async def test_a_rule_that_gives_nothing_holds_up_no_other_call(http: httpx.AsyncClient) -> None:
    """It leaves out 200,000 times in a row, for seconds. Further ones wait, and those beyond the bound come again."""
    never = {"cron": "* * * * * *", "exclude": "cron:* * * * * *"}
    walks = [asyncio.create_task(http.post(PREVIEW, json=never)) for _ in range(18)]
    await asyncio.wait(walks, return_when=asyncio.FIRST_COMPLETED)
    told = [walk.result() for walk in walks if walk.done()]
    assert problem(told[0], 429, "THROTTLED") and told[0].headers["retry-after"]
    for _ in range(20):
        assert (await http.get("/v1/topics/departures")).is_success
    assert sum(not walk.done() for walk in walks) > 10  # they were answered in between
    for walk in walks:
        walk.cancel()


async def test_a_walk_counts_until_it_ends_though_its_caller_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurring, "MOST_WALKS", 1)
    walks, began, goes_on = recurring.RuleWalks(), threading.Event(), threading.Event()

    def walk() -> bool:
        began.set()
        return goes_on.wait()

    first = asyncio.create_task(walks.run(walk))
    await asyncio.to_thread(began.wait)
    first.cancel()
    await asyncio.wait({first})
    with pytest.raises(Throttled):
        await walks.run(int)
    goes_on.set()
    while True:
        try:
            assert await walks.run(int) == 0
            break
        except Throttled:
            await asyncio.sleep(0)
    walks.stop()
