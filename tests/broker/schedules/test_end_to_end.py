"""A schedule from its creation to the delivery of its occurrences, on real stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broker.link import broker
from tests.broker.schedules.calls import ask, create, shown
from timeline.model import Operation, Status
from timeline.wire import Deliver, ScheduleAction


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "sqlite"])
async def test_a_schedule_is_created_and_its_occurrences_are_delivered_at_their_times(
    store: str, tmp_path: Path
) -> None:
    url = "memory://" if store == "memory" else f"sqlite:///{tmp_path}/t.db"
    async with broker(url) as link:
        consumer = await link.consume()
        made = await create(link, every_ms=1_000, payload="aGk=", headers={"n": "{sequence}"})
        first_ms = shown(made)["next_ms"]
        for number in range(2):
            got = await consumer.down(Deliver)
            assert got.payloads.tolist() == [b"hi"]
            assert got.due_ms.tolist() == [first_ms + number * 1_000]
            assert got.pushed_ms >= first_ms + number * 1_000
            await link.settle(consumer, got, Operation.ACK)
        ended = await ask(link, ScheduleAction.DELETE)
        assert (ended.status, ended.counts["cancelled"] > 100) == (Status.OK.code, True)
        assert await link.ids() == []
        assert (await ask(link, ScheduleAction.GET)).status == Status.NOT_FOUND.code
