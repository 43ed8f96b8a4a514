"""Schedules that programs create whenever they start."""

from __future__ import annotations

import json
from dataclasses import replace

from tests.broker.link import Link, broker
from tests.broker.schedules.calls import ask, create, shown
from tests.broker.schedules.villages import record_puts
from timeline.model import Status
from timeline.schedules.record import SCHEDULES_TOPIC, ScheduleRecord
from timeline.storage_plugins.contract import ScanFilter
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


async def stored(link: Link) -> list[ScheduleRecord]:
    """The records that are there."""
    topic = link.node.catalog.known(SCHEDULES_TOPIC)
    assert topic is not None
    rows = (await link.node.store.store.scan(topic, 0, ScanFilter(), b"", 100, True)).rows
    assert rows.payloads is not None
    return [ScheduleRecord.decode(payload) for payload in rows.payloads.tolist()]


async def test_of_two_schedules_that_calls_created_at_the_same_time_one_is_left() -> None:
    async with broker("memory://") as link:
        await create(link, every_ms=86_400_000, paused=True)
        topic = link.node.catalog.known(SCHEDULES_TOPIC)
        (first,) = await stored(link)
        assert topic is not None
        # The broker of the other call ended before it found the first one. A look was faster than that, too.
        second = [replace(first, number=first.number + by) for by in (5_000_000, 5_000_001)]
        puts = record_puts([one.id for one in second], [one.encode() for one in second], 9_000_000_000_000, first.tag)
        await link.node.store.store.put(topic, 0, puts)
        again = await ask(link, ScheduleAction.CREATE, body={"every_ms": 86_400_000, "paused": True})
        assert again.status == Status.DUPLICATE.code
        listed = await ask(link, ScheduleAction.LIST, "", "", limit=10)
        assert [one["number"] for one in json.loads(listed.body)] == [first.number]


async def test_numbers_of_a_schedule_are_far_from_those_of_the_second_before() -> None:
    async with broker("memory://") as link:
        # A broker whose clock is ahead may have created and deleted an earlier one, and its numbers are remembered.
        assert shown(await create(link, every_ms=86_400_000))["number"] % 1_000_000 == 0
