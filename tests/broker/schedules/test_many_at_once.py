"""Calls about schedules while they change."""

from __future__ import annotations

import asyncio
import json

from tests.broker.link import broker
from tests.broker.schedules.calls import ask, create, shown
from timeline.wire import ScheduleAction

EDITS = 40


async def test_edits_at_the_same_time_are_all_made_one_after_the_other() -> None:
    async with broker("memory://") as link:
        await create(link, every_ms=3_600_000)
        bodies = [{"tag": f"edit-{number}"} for number in range(EDITS)]
        answers = await asyncio.gather(*(ask(link, ScheduleAction.UPDATE, body=body) for body in bodies))
        assert sorted(shown(answer)["revision"] for answer in answers) == list(range(2, EDITS + 2))
        assert shown(await ask(link, ScheduleAction.GET))["revision"] == EDITS + 1


async def test_a_list_names_schedules_that_change_meanwhile() -> None:
    async with broker("memory://") as link:
        for number in range(5):
            await create(link, f"s{number}", every_ms=1_000)
            # The first look at the newest one is under way: it puts the next record.
            answer = await ask(link, ScheduleAction.LIST, "", "", limit=10)
            assert sorted(one["name"] for one in json.loads(answer.body)) == [f"s{n}" for n in range(number + 1)]
