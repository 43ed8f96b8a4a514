"""Schedules that programs create whenever they start."""

from __future__ import annotations

from tests.broker.link import broker
from tests.broker.schedules.calls import ask, create, shown
from timeline.model import Status
from timeline.wire import ScheduleAction


async def test_a_paused_schedule_is_the_same_for_a_program_that_creates_it_at_its_start() -> None:
    async with broker("memory://") as link:
        await create(link, every_ms=60_000)
        await ask(link, ScheduleAction.PAUSE)
        again = await ask(link, ScheduleAction.CREATE, body={"every_ms": 60_000})
        assert (again.status, shown(again)["paused"], shown(again)["revision"]) == (Status.DUPLICATE.code, True, 2)


async def test_a_schedule_that_is_to_begin_paused_is_another_one_than_one_that_runs() -> None:
    async with broker("memory://") as link:
        await create(link, every_ms=60_000)
        again = await ask(link, ScheduleAction.CREATE, body={"every_ms": 60_000, "paused": True})
        assert (again.status, shown(again)["paused"]) == (Status.EXISTS.code, False)
