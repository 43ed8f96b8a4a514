"""Stores with one plausible mistake each at the limits of what they are asked, and where callers race."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tests.storage_plugins.faulty_leases import caught_by
from timeline.columns import Ragged
from timeline.model import Answers, Operation, Status, Topic
from timeline.storage_plugins.contract import (
    Grant,
    LeasedRows,
    Mutations,
    Page,
    Puts,
    ScanFilter,
    Settles,
    Swept,
)
from timeline.storage_plugins.memory import MemoryStore


@caught_by("ids_that_look_alike")
class FindsIdsByWhatTheyLookLike(MemoryStore):
    """Stored as they are, found as a collation compares them."""

    async def mutate(self, topic: Topic, now_ms: int, mutations_: Mutations) -> Answers:
        return await super().mutate(topic, now_ms, replace(mutations_, ids=_folded(mutations_.ids)))


def _folded(names: Ragged) -> Ragged:
    return Ragged.of([name.strip().lower() for name in names])


@caught_by("holders_that_look_alike")
class ComparesHoldersByCollation(MemoryStore):
    """A settle whose holder only looks like the one that has it passes."""

    async def settle(self, topic: Topic, now_ms: int, settles_: Settles) -> Answers:
        rows = (await self.scan(topic, now_ms, ScanFilter(ids=settles_.ids), b"", 100_000, False)).rows
        names = dict(zip(rows.ids.tolist(), rows.holders.tolist(), strict=True))
        holders = [
            names[id] if id in names and names[id].strip().lower() == holder.strip().lower() else holder
            for id, holder in zip(settles_.ids, settles_.holders, strict=True)
        ]
        return await super().settle(topic, now_ms, replace(settles_, holders=Ragged.of(holders)))


@caught_by("groups_and_tags_that_look_alike")
class ComparesTagsByCollation(MemoryStore):
    async def put(self, topic: Topic, now_ms: int, puts_: Puts) -> Answers:
        return await super().put(topic, now_ms, replace(puts_, tags=_folded(puts_.tags)))


@caught_by("clock_is_passed_in")
class AsksTheServersClock(MemoryStore):
    """Remembered ids end by the server's clock, as keys with a time to live do."""

    async def sweep(self, topic: Topic, now_ms: int, limit: int) -> Swept:
        return await super().sweep(topic, max(now_ms, 1_790_000_000_000), limit)


@caught_by("fields_at_their_limits")
class CutsLongReasons(MemoryStore):
    async def settle(self, topic: Topic, now_ms: int, settles_: Settles) -> Answers:
        reasons = Ragged.of([reason[:255] for reason in settles_.reasons])
        return await super().settle(topic, now_ms, replace(settles_, reasons=reasons))


@caught_by("checksums_of_64_bits")
class CountsInDoubles(MemoryStore):
    """Births and checksums as JavaScript, JSON and Lua have numbers: 53 bits."""

    async def put(self, topic: Topic, now_ms: int, puts_: Puts) -> Answers:
        rounded = np.array([int(float(birth)) & ((1 << 64) - 1) for birth in puts_.birth.tolist()], dtype=np.uint64)
        return await super().put(topic, now_ms, replace(puts_, birth=rounded))


@caught_by("topics_at_their_limits")
class CountsBucketsInAByte(MemoryStore):
    """The bucket is a byte."""

    async def lease_due(
        self,
        topic: Topic,
        buckets: Sequence[int] | None,
        now_ms: int,
        due_before_ms: int,
        grants: Sequence[Grant],
        overdue_ms: int = 0,
    ) -> LeasedRows:
        asked = None if buckets is None else sorted({bucket for bucket in buckets if bucket < 256})
        return await super().lease_due(topic, asked, now_ms, due_before_ms, grants, overdue_ms)


@caught_by("large_mixed_batches")
class AnswersOutOfPlace(MemoryStore):
    """The answers of a large batch come in the order of its ids."""

    async def mutate(self, topic: Topic, now_ms: int, mutations_: Mutations) -> Answers:
        answers = await super().mutate(topic, now_ms, mutations_)
        if len(mutations_) > 3_000:
            order = np.array(sorted(range(len(mutations_)), key=mutations_.ids.tolist().__getitem__))
            answers.status = answers.status[order]
        return answers


@caught_by("scan_by_many_ids")
class LooksForTheFirstThousand(MemoryStore):
    async def scan(
        self, topic: Topic, now_ms: int, where: ScanFilter, cursor: bytes, limit: int, payload: bool
    ) -> Page:
        if where.ids is not None:
            where = replace(where, ids=where.ids[:1_000])
        return await super().scan(topic, now_ms, where, cursor, limit, payload)


@caught_by("payload_limit")
class PromisesMoreThanItTakes(MemoryStore):
    async def put(self, topic: Topic, now_ms: int, puts_: Puts) -> Answers:
        most = 16 * 1024 * 1024 - 1
        payloads = Ragged.of([payload[:most] for payload in puts_.payloads])
        return await super().put(topic, now_ms, replace(puts_, payloads=payloads))


@caught_by("brokers_racing")
class SettlesWhatItReadBefore(MemoryStore):
    """The token is compared in one step, and the message changed in another."""

    async def settle(self, topic: Topic, now_ms: int, settles_: Settles) -> Answers:
        rows = (await self.scan(topic, now_ms, ScanFilter(ids=settles_.ids), b"", 100_000, False)).rows
        found = {id: at for at, id in enumerate(rows.ids.tolist())}
        await asyncio.sleep(0)
        now = (await self.scan(topic, now_ms, ScanFilter(ids=settles_.ids), b"", 100_000, False)).rows
        version, holders = settles_.version.copy(), settles_.holders.tolist()
        standing = {id: at for at, id in enumerate(now.ids.tolist())}
        for at, id in enumerate(settles_.ids.tolist()):
            if id in found and id in standing and int(rows.version[found[id]]) == int(version[at]):
                version[at], holders[at] = now.version[standing[id]], now.holders[standing[id]]
        return await super().settle(topic, now_ms, replace(settles_, version=version, holders=Ragged.of(holders)))


@caught_by("brokers_racing_where_ids_are_remembered")
class RemembersNoCancels(MemoryStore):
    async def mutate(self, topic: Topic, now_ms: int, mutations_: Mutations) -> Answers:
        return await super().mutate(replace(topic, settings=replace(topic.settings, remember_ms=0)), now_ms, mutations_)


class _Reading(MemoryStore):
    """Gives others a turn between what it looks at and what it does."""

    async def mutate(self, topic: Topic, now_ms: int, mutations_: Mutations) -> Answers:
        if mutations_.operation is not Operation.CANCEL:
            return await super().mutate(topic, now_ms, mutations_)
        rows = (await self.scan(topic, now_ms, ScanFilter(ids=mutations_.ids), b"", 100_000, False)).rows
        free = {id for id, holder in zip(rows.ids, rows.holders, strict=True) if not holder}
        await asyncio.sleep(0)
        leased = np.array([id in free for id in mutations_.ids], dtype=np.bool_)
        return await super().mutate(topic, now_ms, replace(mutations_, leased=leased))


@caught_by("cancel_racing_a_lease")
class CancelsWhatWasFreeBefore(_Reading):
    """Whether a message is leased is read in one step, and cancelled in another."""


@caught_by("extend_racing_a_lease")
class ExtendsWhatItReadBefore(MemoryStore):
    """An extend answers by what it read, though a lease has come in between."""

    async def settle(self, topic: Topic, now_ms: int, settles_: Settles) -> Answers:
        rows = (await self.scan(topic, now_ms, ScanFilter(ids=settles_.ids), b"", 100_000, False)).rows
        found = dict(zip(rows.ids.tolist(), rows.version.tolist(), strict=True))
        await asyncio.sleep(0)
        answers = await super().settle(topic, now_ms, settles_)
        for at, id in enumerate(settles_.ids.tolist()):
            if found.get(id) == int(settles_.version[at]):
                answers.status[at] = Status.OK.code
        return answers


@caught_by("late_ack_racing_a_lease")
class AcksWhatItReadBefore(ExtendsWhatItReadBefore):
    """The same of an ack."""


@caught_by("payloads_that_lie_apart")
class MeasuresWhatItIsGiven(MemoryStore):
    async def put(self, topic: Topic, now_ms: int, puts_: Puts) -> Answers:
        return await super().put(topic, now_ms, replace(puts_, payload_bytes=None))


@caught_by("leases_in_turn")
class SaysItsTurnTooEarly(MemoryStore):
    """A lease tells the turn in which it was asked for, before the put that it has not seen."""

    tells_commit_seq = True

    async def put(self, topic: Topic, now_ms: int, puts_: Puts) -> Answers:
        answers = await super().put(topic, now_ms, puts_)
        answers.commit_seq = 1
        return answers


@caught_by("scan_from_a_bucket")
class StartsWhereItLikes(MemoryStore):
    """Takes a bucket alone for no cursor at all."""

    async def scan(
        self, topic: Topic, now_ms: int, where: ScanFilter, cursor: bytes, limit: int, payload: bool
    ) -> Page:
        return await super().scan(topic, now_ms, where, cursor if len(cursor) > 4 else b"", limit, payload)
