"""Schedules in a town: brokers over one store in virtual time, and what consumers got of each schedule."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from tests.broker.machines import TOPIC, Town
from timeline.broker.schedules.records import ragged
from timeline.columns import Ragged
from timeline.model import payload_sums
from timeline.schedules.record import SCHEDULES_GROUP, SCHEDULES_TOPIC, schedule_of
from timeline.storage_plugins.contract import Puts

START_MS = 1_700_000_000_000
"""When a town's time begins."""


async def schedule(there: Town, name: str = "s", **said: Any) -> Any:
    """Create a schedule, and return what the driver shows of it."""
    return await there.ask(lambda client: client.schedule(TOPIC, name, **said))


async def get(there: Town, name: str = "s") -> Any:
    """The schedule as it stands, None if there is none."""
    return await there.ask(lambda client: client.get_schedule(TOPIC, name))


async def change(there: Town, method: str, name: str = "s", **said: Any) -> Any:
    """Call a method of the schedule."""

    async def work(client: Any) -> Any:
        found = await client.get_schedule(TOPIC, name)
        return await getattr(found, method)(**said)

    return await there.ask(work)


def times(there: Town, name: str = "s") -> Counter[int]:
    """How often each occurrence was received, by its time in s since the town's begin."""
    found = (schedule_of(one.id) for one in there.received)
    return Counter((one[1] - START_MS) // 1_000 for one in found if one is not None and one[0] == name)


def late_ms(there: Town) -> float:
    """The most that something was received after its due time."""
    return max(-one.early_ms for one in there.received)


async def pending(there: Town) -> list[str]:
    """The ids that are on the timeline."""

    async def work(client: Any) -> list[str]:
        return [one.id async for one in client.scan(TOPIC)]

    found: list[str] = await there.ask(work)
    return found


async def records(there: Town) -> list[str]:
    """The ids of the records that are there."""

    async def work(client: Any) -> list[str]:
        return [one.id async for one in client.scan(SCHEDULES_TOPIC)]

    found: list[str] = await there.ask(work)
    return found


def record_puts(ids: list[str], payloads: list[bytes], due_ms: int, tag: str = "") -> Puts:
    """Puts of records."""
    count = len(payloads)
    content = Ragged.of(payloads)
    return Puts.filled(
        count,
        ids=ragged(ids),
        birth=np.arange(1, count + 1, dtype=np.uint64),
        due_ms=np.full(count, due_ms, dtype=np.int64),
        groups=Ragged.repeat(SCHEDULES_GROUP.encode(), count),
        tags=Ragged.repeat(tag.encode(), count),
        payload_sum=payload_sums(content, None),
        payloads=content,
    )
