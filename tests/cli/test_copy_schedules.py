"""`timeline copy` takes a topic's recurring schedules along, each as it stands, and proves that they are there."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Call
from timeline.model import Operation, State, Topic
from timeline.schedules import Specification
from timeline.schedules.record import SCHEDULES_TOPIC, ScheduleRecord, record_id
from timeline.storage_plugins import open_store
from timeline.storage_plugins.conformance.trial import T0, Trial
from timeline.storage_plugins.contract import Store, StoreRefused
from timeline.storage_plugins.copying import TopicCopy, topic_of
from timeline.storage_plugins.copying_schedules import newest_records
from timeline.storage_plugins.memory import MemoryStore

FAR = 4_000_000_000_000


def record(topic: str, name: str, number: int = 1, **fields: Any) -> ScheduleRecord:
    specification = Specification(topic, name, every_ms=60_000, payload=b"of " + name.encode())
    return ScheduleRecord(specification, number, created_ms=T0 - 5, position_ms=T0 + 500, **fields)


async def internal(trial: Trial, uid: int = 77) -> Topic:
    settings = replace(trial.record(buckets=4).settings, remember_ms=86_400_000, max_deliveries=0)
    return await trial.store.create_topic(Topic(SCHEDULES_TOPIC, uid, settings, 1, T0))


async def written(trial: Trial, topic: Topic, *records: ScheduleRecord) -> None:
    ids, tags = [one.id.encode() for one in records], [one.tag.encode() for one in records]
    payloads = [one.encode() for one in records]
    await trial.stored(topic, ids, T0 + 400, payload=payloads, tag=tags, group=b"~schedules")


async def shown(store: Store, topic: str) -> dict[str, ScheduleRecord]:
    return {name: one.record for name, one in (await newest_records(store, topic, T0))[1].items()}


async def copied(source: Store, target: Store, topic: Topic) -> TopicCopy:
    copying = TopicCopy(source, target, topic, lambda: T0)
    await copying.prepare()
    if copying.whole is None:
        await copying.run()
        assert (await copying.compare()).same
    await copying.copy_schedules()
    if not copying.done.failed:
        await copying.finish()
    return copying


async def test_schedules_go_with_their_topic_and_with_their_state() -> None:
    async with Trial(MemoryStore) as trial, Trial(MemoryStore) as other:
        topic, schedules = await trial.topic(), await internal(trial)
        mine = record(topic.name, "mine", 3, sequence=7, produced=6, missed=1, last_id="mine@x", revision=2)
        paused = replace(
            record(topic.name, "paused"), specification=replace(mine.specification, name="paused", paused=True)
        )
        gone = record(topic.name, "gone", 2, deleted=True)
        await written(
            trial, schedules, mine, replace(mine, number=2), paused, gone, replace(gone, number=1, deleted=False),
            record("another", "mine"), record(f"{topic.name}.x", "mine"),
        )  # fmt: skip
        await trial.lease(schedules, 1, now_ms=T0 + 400, lease_ms=30_000)  # a broker looks at one
        done = (await copied(trial.store, other.store, topic)).done
        assert (done.schedules, done.failed) == (2, 0)
        assert await shown(other.store, topic.name) == {"mine": mine, "paused": paused}
        into = await topic_of(other.store, SCHEDULES_TOPIC)
        assert into.settings == schedules.settings and into.uid != schedules.uid
        rows = await other.scan(into, states={State.WAITING, State.AVAILABLE}, now_ms=T0, payload=True)
        assert sorted(rows.tags.tolist()) == sorted([mine.tag.encode(), paused.tag.encode()])


async def test_a_copy_that_is_run_again_leaves_what_has_gone_on() -> None:
    async with Trial(MemoryStore) as trial, Trial(MemoryStore) as other:
        topic, schedules = await trial.topic(), await internal(trial)
        await trial.stored(topic, [b"a"], FAR)
        mine = record(topic.name, "mine", 3)
        await written(trial, schedules, mine)
        await copied(trial.store, other.store, topic)
        into = await topic_of(other.store, SCHEDULES_TOPIC)
        later = replace(mine, number=4, sequence=1)
        await written(other, into, later)
        await other.mutate(into, Operation.CANCEL, [mine.id.encode()], group=b"~schedules")
        again = await copied(trial.store, other.store, topic)
        assert again.whole is not None and (again.done.schedules, again.done.failed) == (1, 0)
        assert await shown(other.store, topic.name) == {"mine": later}


async def test_a_copy_that_broke_off_before_its_schedules_copies_them() -> None:
    async with Trial(MemoryStore) as trial, Trial(MemoryStore) as other:
        topic, schedules = await trial.topic(), await internal(trial)
        await trial.stored(topic, [b"a"], FAR)
        await written(trial, schedules, record(topic.name, "mine"))
        first = TopicCopy(trial.store, other.store, topic, lambda: T0)
        await first.prepare()
        await first.run()
        assert await shown(other.store, topic.name) == {}
        assert (await copied(trial.store, other.store, topic)).done.schedules == 1
        assert list(await shown(other.store, topic.name)) == ["mine"]


async def test_another_schedule_of_the_target_is_refused_by_name() -> None:
    async with Trial(MemoryStore) as trial, Trial(MemoryStore) as other:
        topic, schedules, into = await trial.topic(), await internal(trial), await internal(other)
        mine = record(topic.name, "mine")
        await written(trial, schedules, mine, record(topic.name, "same"))
        theirs = replace(mine, specification=replace(mine.specification, payload=b"theirs"), created_ms=T0 - 9)
        await written(other, into, theirs, replace(record(topic.name, "same"), created_ms=T0 - 9))
        copying = TopicCopy(trial.store, other.store, topic, lambda: T0)
        with pytest.raises(StoreRefused, match=rf"other schedules of '{topic.name}' .* 'mine'\. Delete them there"):
            await copying.prepare()
        assert [one.name for one in await other.store.topics()] == [SCHEDULES_TOPIC]


async def test_a_name_that_the_target_has_used_is_a_failure_of_its_own() -> None:
    async with Trial(MemoryStore) as trial, Trial(MemoryStore) as other:
        topic, schedules, into = await trial.topic(), await internal(trial), await internal(other)
        mine = record(topic.name, "mine")
        await written(trial, schedules, mine, record(topic.name, "other"))
        await written(other, into, replace(mine, created_ms=T0 - 9))
        await other.mutate(into, Operation.CANCEL, [mine.id.encode()], group=b"~schedules")
        done = (await copied(trial.store, other.store, topic)).done
        assert (done.schedules, done.failed) == (1, 1)
        assert "has had another schedule of this name" in done.reasons[b"schedule mine"]


async def test_a_record_that_is_damaged_is_named() -> None:
    async with Trial(MemoryStore) as trial, Trial(MemoryStore) as other:
        topic, schedules = await trial.topic(), await internal(trial)
        id = record_id(topic.name, "mine", 1)
        await trial.stored(schedules, [id.encode()], T0, payload=b"{}", group=b"~schedules")
        says = re.escape(f"record '{id}' of a schedule cannot be read: a schedule's record must have the fields")
        with pytest.raises(StoreRefused, match=says):
            await TopicCopy(trial.store, other.store, topic, lambda: T0).prepare()


@pytest.mark.parametrize("changes", [1, 99])
async def test_a_schedule_that_changes_while_it_is_read_is_found(changes: int) -> None:
    class Changing(MemoryStore):
        """A broker ends the record that was found."""

        async def scan(self, topic: Any, now_ms: int, where: Any, *rest: Any) -> Any:
            if where.ids is not None and topic.name == SCHEDULES_TOPIC:
                await trial.mutate(schedules, Operation.CANCEL, where.ids.tolist(), group=b"~schedules")
                if changes == 1:
                    await written(trial, schedules, replace(mine, number=3))
            return await super().scan(topic, now_ms, where, *rest)

    async with Trial(Changing) as trial:
        topic, schedules = await trial.topic(), await internal(trial)
        mine = record(topic.name, "mine", 2)
        await written(trial, schedules, mine)
        if changes == 1:
            assert await shown(trial.store, topic.name) == {"mine": replace(mine, number=3)}
            return
        with pytest.raises(StoreRefused, match=r"'mine' of .* changes while it is read: stop the brokers"):
            await newest_records(trial.store, topic.name, T0)


@pytest.mark.slow
async def test_the_command_copies_schedules_and_no_internal_topic(tmp_path: Path, call: Call) -> None:
    source, target = f"sqlite:///{tmp_path}/a.db", f"sqlite:///{tmp_path}/b.db"
    store = await open_store(source)
    trial = Trial(lambda: store)
    topic = await trial.store.create_topic(trial.record(buckets=4))
    await trial.stored(topic, [b"a"], FAR)
    await written(trial, await internal(trial), record(topic.name, "mine"))
    await store.close()
    for what in ("copied", "whole"):
        done = await asyncio.to_thread(call, "copy", source, target, "--topic", topic.name, "--json")
        assert (done.code, done.json[0]["schedules"], done.json[0]["ok"]) == (0, 1, True), (what, done.err)
    refused = await asyncio.to_thread(call, "copy", source, target, "--topic", SCHEDULES_TOPIC)
    assert refused.code == 4 and "their recurring schedules go with them" in refused.err
