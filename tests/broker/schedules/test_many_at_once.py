"""Calls about schedules while they change."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path

import pytest

from tests.broker.link import broker
from tests.broker.schedules.calls import FAR_MS, ask, create, shown
from timeline.broker.limits import Limits
from timeline.model import Status
from timeline.wire import Fault, ScheduleAction, ScheduleAnswer, TopicAction, TransportError

EDITS = 40


@pytest.mark.slow
async def test_edits_at_the_same_time_are_all_made_one_after_the_other() -> None:
    async with broker("memory://", limits=Limits(edit_wait_ms=600_000)) as link:
        await create(link, every_ms=3_600_000)
        bodies = [{"tag": f"edit-{number}"} for number in range(EDITS)]
        answers = await asyncio.gather(*(ask(link, ScheduleAction.UPDATE, body=body) for body in bodies))
        assert sorted(shown(answer)["revision"] for answer in answers) == list(range(2, EDITS + 2))
        assert shown(await ask(link, ScheduleAction.GET))["revision"] == EDITS + 1


async def test_edits_that_wait_too_long_for_others_are_refused_before_they_begin() -> None:
    async with broker("memory://", limits=Limits(edit_wait_ms=1)) as link:
        await create(link, every_ms=3_600_000)
        edits = (ask(link, ScheduleAction.UPDATE, body={"tag": f"edit-{number}"}) for number in range(EDITS))
        answers = await asyncio.gather(*edits, return_exceptions=True)
        refused = [one for one in answers if isinstance(one, TransportError)]
        assert refused and {one.fault for one in refused} == {Fault.OVERLOADED}
        made = [shown(one)["revision"] for one in answers if isinstance(one, ScheduleAnswer)]
        assert len(made) + len(refused) == EDITS
        assert sorted(made) == list(range(2, len(made) + 2))
        assert shown(await ask(link, ScheduleAction.GET))["revision"] == len(made) + 1


async def test_edits_that_no_look_carries_out_are_put_off() -> None:
    """Its topic is gone, so that looks wait for it. Each pause and each resume leaves ids to cancel."""
    async with broker("memory://") as link:
        await create(link, every_ms=1_000)
        assert (await link.topic(TopicAction.DROP)).status == Status.OK.code
        with pytest.raises(TransportError, match="come faster than brokers carry them out") as put_off:
            for _ in range(1_000):
                await ask(link, ScheduleAction.PAUSE)
                await ask(link, ScheduleAction.RESUME)
        assert put_off.value.fault is Fault.OVERLOADED


@pytest.mark.slow
async def test_a_list_names_schedules_that_change_meanwhile() -> None:
    async with broker("memory://") as link:
        for number in range(5):
            await create(link, f"s{number}", every_ms=1_000)
            # The first look at the newest one is under way: it puts the next record.
            answer = await ask(link, ScheduleAction.LIST, "", "", limit=10)
            assert sorted(one["name"] for one in json.loads(answer.body)) == [f"s{n}" for n in range(number + 1)]


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 3])
async def test_a_list_names_each_schedule_once_while_all_change(limit: int, tmp_path: Path) -> None:
    async with broker(f"sqlite:///{tmp_path / 'store.db'}") as link:
        names = [f"s{number}" for number in range(8)]
        for name in names:
            await create(link, name, every_ms=86_400_000, start_ms=FAR_MS)
        for turn in range(2):
            found, cursor = list[str](), b""
            while True:
                page = await ask(link, ScheduleAction.LIST, "", "", limit=limit, cursor=cursor)
                found += [one["name"] for one in json.loads(page.body)]
                cursor = page.cursor
                if not cursor:
                    break
                tag = f"{turn}-{len(found)}"
                await asyncio.gather(*(ask(link, ScheduleAction.UPDATE, name, body={"tag": tag}) for name in names))
            assert sorted(found) == sorted(names)


@pytest.mark.slow
async def test_a_list_of_large_schedules_comes_in_pages_that_fit() -> None:
    payload = base64.b64encode(bytes(1024 * 1024)).decode()
    async with broker() as link:
        for number in range(12):
            await create(link, f"s{number}", every_ms=3_600_000, start_ms=FAR_MS, payload=payload)
        names: list[str] = []
        cursor, pages = b"", 0
        while cursor or not pages:
            answer = await ask(link, ScheduleAction.LIST, "", "", cursor=cursor, limit=500)
            names += [one["name"] for one in json.loads(answer.body)]
            cursor, pages = answer.cursor, pages + 1
            assert len(answer.body) < 8 * 1024 * 1024
        assert sorted(names) == sorted(f"s{number}" for number in range(12)) and pages > 1


async def test_a_refusal_is_not_repeated_once_its_cause_is_gone() -> None:
    async with broker() as link:
        await create(link, every_ms=3_600_000, start_ms=FAR_MS, payload="A" * 40)
        await link.topic(TopicAction.UPDATE, max_payload_bytes=1)
        refused = await ask(link, ScheduleAction.TRIGGER, op=5)
        assert refused.status == Status.TOO_LARGE.code
        await link.topic(TopicAction.UPDATE, max_payload_bytes=1_000)
        done = await ask(link, ScheduleAction.TRIGGER, op=5)
        assert done.status == Status.OK.code
        assert await ask(link, ScheduleAction.TRIGGER, op=5) == done


async def test_what_is_asked_is_looked_up_again() -> None:
    async with broker() as link:
        await create(link, every_ms=3_600_000, start_ms=FAR_MS)
        before = shown(await ask(link, ScheduleAction.GET, op=7))
        await ask(link, ScheduleAction.PAUSE)
        after = shown(await ask(link, ScheduleAction.GET, op=7))
        assert (before["paused"], after["paused"]) == (False, True)
