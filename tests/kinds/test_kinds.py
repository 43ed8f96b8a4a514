"""A second kind of topic is honoured by stores, from its put to what follows a lease that ran out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

import timeline
from tests.driver.broker import Broker
from timeline import kinds, model
from timeline.columns import Bools, Int64
from timeline.errors import Invalid
from timeline.kinds import Kind, Scheduled, TimelineKind, kind_of
from timeline.model import Operation, Status, TopicSettings
from timeline.storage_plugins.conformance.trial import T0, Trial, statuses
from timeline.storage_plugins.contract import Store
from timeline.storage_plugins.memory import MemoryStore
from timeline.storage_plugins.reference import ReferenceStore

SLOT_MS = 1_000
REST_MS = 77


class Slots:
    """Messages are due at full seconds, the largest id first, and rest for a while after a lease that ran out."""

    in_batches = False

    def due_of_put(self, asked_ms: int, now_ms: int) -> int:
        return -(-max(asked_ms, now_ms) // SLOT_MS) * SLOT_MS

    def order(self, message: Scheduled, id: bytes) -> tuple[int, int]:
        return message.due_ms, -int(id)

    def due_of_release(self, message: Scheduled, asked_ms: int, now_ms: int, unseen: bool) -> int:
        return self.due_of_put(now_ms + 1, now_ms)

    def due_after_expiry(self, message: Scheduled, settings: TopicSettings) -> int:
        return message.due_ms + REST_MS

    def late_from(self, was_due_ms: Int64, scheduled_ms: Int64, again: Bools) -> Int64:
        return was_due_ms


@pytest.fixture(autouse=True)
def slots(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kind: Kind = Slots()
    monkeypatch.setattr(model, "KINDS", (*model.KINDS, "slots"))
    monkeypatch.setitem(kinds.KINDS, "slots", kind)
    yield


@pytest.fixture(params=[MemoryStore, ReferenceStore])
async def trial(request: pytest.FixtureRequest) -> AsyncIterator[Trial]:
    make: type[Store] = request.param
    async with Trial(make) as opened:
        yield opened


def test_each_kind_that_a_topic_may_have_is_there() -> None:
    assert tuple(kinds.KINDS) == model.KINDS
    assert isinstance(kind_of(TopicSettings()), TimelineKind)
    with pytest.raises(Invalid, match="kind must be 'timeline' or 'slots', not 'cron'"):
        TopicSettings(kind="cron").check()


async def test_the_due_time_of_a_put_is_the_kinds(trial: Trial) -> None:
    topic = await trial.topic(kind="slots", buckets=1)
    answers = await trial.put(topic, [b"1", b"2"], [T0 + 1, T0 + SLOT_MS])
    assert answers.due_ms.tolist() == [T0 + SLOT_MS, T0 + SLOT_MS]
    assert (await trial.row(topic, b"1"))["scheduled_ms"] == T0 + SLOT_MS
    beyond = await trial.put(topic, [b"3"], [T0 + 1], expires_ms=T0 + 2)
    assert statuses(beyond) == [Status.INVALID]
    assert len((await trial.lease(topic, now_ms=T0 + SLOT_MS - 1)).rows) == 0


async def test_the_order_of_a_bucket_is_the_kinds(trial: Trial) -> None:
    topic = await trial.topic(kind="slots", buckets=1)
    await trial.stored(topic, [b"1", b"3", b"2"], T0)
    taken = [(await trial.lease(topic, 1)).rows.ids.tolist() for _ in range(3)]
    assert taken == [[b"3"], [b"2"], [b"1"]]


async def test_a_released_message_is_due_when_the_kind_says(trial: Trial) -> None:
    topic = await trial.topic(kind="slots", buckets=1)
    await trial.stored(topic, [b"1"], T0)
    leased = await trial.lease(topic)
    released = await trial.settle(topic, Operation.RELEASE, leased.rows, time_ms=T0 + 10 * SLOT_MS)
    assert released.due_ms.tolist() == [T0 + SLOT_MS]
    assert (await trial.row(topic, b"1"))["scheduled_ms"] == T0 + SLOT_MS


async def test_a_message_rests_after_its_lease_ran_out_as_the_kind_says(trial: Trial) -> None:
    topic = await trial.topic(kind="slots", buckets=1)
    await trial.stored(topic, [b"1"], T0)
    assert (await trial.lease(topic, lease_ms=100)).next_due_ms == T0 + 100 + REST_MS
    assert len((await trial.lease(topic, now_ms=T0 + 100 + REST_MS - 1)).rows) == 0
    assert (await trial.lease(topic, now_ms=T0 + 100 + REST_MS)).rows.ids.tolist() == [b"1"]


def test_lateness_of_a_timeline_counts_from_the_scheduled_time_unless_a_lease_ran_out() -> None:
    was_due_ms, scheduled_ms = np.array([30, 30, 5]), np.array([10, 10, 10])
    again = np.array([False, True, False])
    assert TimelineKind().late_from(was_due_ms, scheduled_ms, again).tolist() == [10, 30, 5]


async def test_a_store_that_cannot_hold_a_kind_refuses_its_topics(tmp_path: Path) -> None:
    async with Broker(f"sqlite:///{tmp_path}/messages.db") as broker, timeline.connect(broker.address) as tl:
        with pytest.raises(Invalid, match="this store holds no topics of kind 'slots'"):
            await tl.create_topic("t", kind="slots")
        assert await tl.topics() == []
