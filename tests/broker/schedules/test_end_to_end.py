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
        dues: list[int] = []
        for _ in range(2):
            got = await consumer.down(Deliver)
            assert got.payloads.tolist() == [b"hi"]
            dues += got.due_ms.tolist()
            assert got.pushed_ms >= dues[-1]
            await link.settle(consumer, got, Operation.ACK)
        # The time of the first one may be over before the answer says which one is next.
        assert dues[0] <= shown(made)["next_ms"]
        assert [due_ms % 1_000 for due_ms in dues] == [0, 0] and dues[1] - dues[0] == 1_000
        ended = await ask(link, ScheduleAction.DELETE)
        assert (ended.status, ended.counts["cancelled"] > 100) == (Status.OK.code, True)
        assert await link.ids() == []
        assert (await ask(link, ScheduleAction.GET)).status == Status.NOT_FOUND.code
