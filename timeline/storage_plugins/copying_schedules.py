"""Copy the recurring schedules of a topic with it, from one store into another.

A schedule is the newest of its records, which are messages of an internal topic. It goes over as it is: with its state,
so that it goes on where it was. What was missed until then is handled as the schedule itself says.

Records are read before the topic's messages, and put after them. So each occurrence that a record counts as produced
is among the messages.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import AsyncIterator, Callable, Iterable
from typing import NamedTuple

import numpy as np

from timeline.columns import Ragged
from timeline.errors import Invalid
from timeline.model import Rows, Status, Topic, payload_sums
from timeline.schedules.record import SCHEDULES_TOPIC, ScheduleRecord, number_of, record_id, tag_of
from timeline.schedules.specification import SCHEDULE_NAME
from timeline.storage_plugins.asks import LIVING, pages
from timeline.storage_plugins.contract import Puts, ScanFilter, Store, StoreRefused

PAGE = 1_000
TRIES = 5
"""How often a schedule is looked for that a broker changes meanwhile."""


class StoredRecord(NamedTuple):
    """A schedule's newest record, and its message as a row."""

    record: ScheduleRecord
    row: Rows


class ScheduleCopy:
    """The copy of the schedules of `topic` from `source` to `target`. `now_ms`: returns the time.

    `copied`: schedules. `there`: schedules that the target had already, by an earlier copy.
    """

    def __init__(self, source: Store, target: Store, topic: str, now_ms: Callable[[], int]) -> None:
        self._source, self._target, self._topic, self._now_ms = source, target, topic, now_ms
        self._left: list[StoredRecord] = []
        self._settings: Topic | None = None
        self.copied = self.there = 0

    async def prepare(self) -> None:
        """Read the schedules. Raise StoreRefused if the target has another one under a name of theirs."""
        self._settings, ours = await newest_records(self._source, self._topic, self._now_ms())
        _, theirs = await newest_records(self._target, self._topic, self._now_ms())
        others = [name for name in ours.keys() & theirs.keys() if not _same(ours[name].record, theirs[name].record)]
        if others:
            named = ", ".join(repr(name) for name in sorted(others)[:20])
            raise StoreRefused(
                f"the target has other schedules of {self._topic!r} under the same names: {named}. Delete them there, "
                f"or in the source (timeline schedule delete {self._topic} {min(others)})"
            )
        self.there = len(ours.keys() & theirs.keys())
        self._left = [ours[name] for name in sorted(ours.keys() - theirs.keys())]

    async def run(self) -> dict[str, str]:
        """Put what is not there, and compare. Return why schedules could not be copied, by name."""
        reasons: dict[str, str] = {}
        if not self._left:
            return reasons
        assert self._settings is not None
        into = await self._internal_topic(self._settings)
        for stored in self._left:
            puts = Puts.of(stored.row, payload_bytes=None)
            answers = await self._target.put(into, self._now_ms(), puts)
            status = Status.of(int(answers.status[0]))
            if status is Status.OK or (bool(answers.repeat[0]) and not bool(answers.settled[0])):
                self.copied += 1
            else:
                reasons[stored.record.specification.name] = _why(status, bool(answers.settled[0]))
        return await self._differing() | reasons

    async def _internal_topic(self, like: Topic) -> Topic:
        standing = next((one for one in await self._target.topics() if one.name == SCHEDULES_TOPIC), None)
        if standing is not None:
            return standing
        return await self._target.create_topic(dataclasses.replace(like, uid=1 + secrets.randbits(62), revision=1))

    async def _differing(self) -> dict[str, str]:
        """Return the schedules that the target has not as the source has them, by name. A broker of the target may have
        gone on with them."""
        _, ours = await newest_records(self._source, self._topic, self._now_ms())
        _, theirs = await newest_records(self._target, self._topic, self._now_ms())
        return {
            name: "it is not the same in the target" if name in theirs else "it is not in the target"
            for name, stored in ours.items()
            if name not in theirs or theirs[name].record.specification != stored.record.specification
        }


def _why(status: Status, settled: bool) -> str:
    if settled or status is Status.EXISTS:
        return "the target has had another schedule of this name: delete it in the source, or wait a day"
    return f"the target answers {status}"


def _same(ours: ScheduleRecord, theirs: ScheduleRecord) -> bool:
    """Return whether one record follows from the other, in either store."""
    return ours.created_ms == theirs.created_ms or ours.specification == theirs.specification


async def newest_records(store: Store, topic: str, now_ms: int) -> tuple[Topic | None, dict[str, StoredRecord]]:
    """Return the internal topic of schedules, None where there is none, and the newest record of each schedule of
    `topic`, by name. Deleted ones are left out. Raise StoreRefused if one cannot be read."""
    internal = next((one for one in await store.topics() if one.name == SCHEDULES_TOPIC), None)
    if internal is None:
        return None, {}
    numbers: dict[str, int] = {}
    async for rows in _scan(store, internal, now_ms, ScanFilter(LIVING), payload=False):
        for id in rows.ids.tolist():
            name, number = _schedule_of(id, topic)
            if number > numbers.get(name, 0):
                numbers[name] = number
    ids = [record_id(topic, name, number).encode() for name, number in numbers.items()]
    found: dict[str, StoredRecord] = {}
    for at in range(0, len(ids), PAGE):
        async for rows in _scan(store, internal, now_ms, ScanFilter(LIVING, ids=Ragged.of(ids[at : at + PAGE]))):
            found |= {one.record.specification.name: one for one in _records(rows)}
    for name in numbers.keys() - found.keys():
        found[name] = await _changing(store, internal, now_ms, topic, name)
    return internal, {name: one for name, one in found.items() if not one.record.deleted}


async def _changing(store: Store, internal: Topic, now_ms: int, topic: str, name: str) -> StoredRecord:
    """Return the newest record of a schedule that a broker has just changed. Raise StoreRefused if it goes on."""
    for _ in range(TRIES):
        found: list[StoredRecord] = []
        async for rows in _scan(store, internal, now_ms, ScanFilter(LIVING, tag=tag_of(topic, name).encode())):
            found += _records(rows)
        if found:
            return max(found, key=lambda one: one.record.number)
    raise StoreRefused(f"the schedule {name!r} of {topic!r} changes while it is read: stop the brokers of that store")


def _scan(store: Store, topic: Topic, now_ms: int, where: ScanFilter, payload: bool = True) -> AsyncIterator[Rows]:
    return pages(lambda cursor: store.scan(topic, now_ms, where, cursor, PAGE, payload))


def _schedule_of(id: bytes, topic: str) -> tuple[str, int]:
    """Return the schedule and the number of a record. The number is 0 if it is of another topic."""
    key = id.decode(errors="replace").rpartition("#")[0]
    name = key.removeprefix(f"{topic}/")
    number = number_of(id.decode(errors="replace"), topic, name) if SCHEDULE_NAME.fullmatch(name) else 0
    return (name, number) if number else ("", 0)


def _records(rows: Rows) -> Iterable[StoredRecord]:
    assert rows.payloads is not None
    sound = payload_sums(rows.payloads, rows.headers) == rows.payload_sum
    for at in range(len(rows)):
        id = rows.ids[at].decode(errors="replace")
        try:
            if not sound[at]:
                raise Invalid("it is not what its checksum is of")
            record = ScheduleRecord.decode(rows.payloads[at])
        except Invalid as bad:
            raise StoreRefused(f"the record {id!r} of a schedule cannot be read: {bad.reason}") from bad
        yield StoredRecord(record, rows.take(np.array([at], dtype=np.intp)))
