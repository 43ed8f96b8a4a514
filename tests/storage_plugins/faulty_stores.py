"""Stores with one plausible mistake each, leases aside, and the check that must find it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from tests.storage_plugins.faulty_leases import caught_by
from timeline.columns import Int64, Ragged
from timeline.model import Answers, Operation, Rows, Status, Topic
from timeline.storage_plugins.contract import (
    Mutations,
    Opened,
    Page,
    Puts,
    ScanFilter,
    Settles,
    StoreRefused,
    Swept,
    TagMutation,
    TagStep,
)
from timeline.storage_plugins.memory import MemoryStore


@caught_by("racing_moves")
class MovesByReadingFirst(MemoryStore):
    """The version is read in one step and the move done in another."""

    async def mutate(self, topic: Topic, now_ms: int, mutations_: Mutations) -> Answers:
        rows = (await self.scan(topic, now_ms, ScanFilter(ids=mutations_.ids), b"", 100, False)).rows
        if len(rows) == len(mutations_) and bool((rows.version == mutations_.if_version).all()):
            await asyncio.sleep(0)
            mutations_ = replace(mutations_, if_version=np.zeros(len(rows), dtype=np.int64))
        return await super().mutate(topic, now_ms, mutations_)


class _Respelled(MemoryStore):
    """Ids as some collation sees them."""

    def spell(self, id: bytes) -> bytes:
        raise AssertionError

    def spelled(self, ids: Ragged) -> Ragged:
        return Ragged.of([self.spell(id) for id in ids])

    async def put(self, topic: Topic, now_ms: int, puts_: Puts) -> Answers:
        return await super().put(topic, now_ms, replace(puts_, ids=self.spelled(puts_.ids)))


@caught_by("ids_are_bytes")
class IgnoresCase(_Respelled):
    def spell(self, id: bytes) -> bytes:
        return id.lower()


@caught_by("ids_are_bytes")
class IgnoresTrailingSpaces(_Respelled):
    def spell(self, id: bytes) -> bytes:
        return id.rstrip(b" ") or id


@caught_by("payload_sizes")
class CutsLongPayloads(MemoryStore):
    async def put(self, topic: Topic, now_ms: int, puts_: Puts) -> Answers:
        return await super().put(
            topic, now_ms, replace(puts_, payloads=Ragged.of([payload[:65_535] for payload in puts_.payloads]))
        )


@caught_by("repeated_put_beyond_its_expiry")
class JudgesExpiryFirst(MemoryStore):
    """What is due at or past its expiry is refused before anybody looks whether it is a repeat."""

    async def put(self, topic: Topic, now_ms: int, puts_: Puts) -> Answers:
        answers = await super().put(topic, now_ms, puts_)
        answers.status[(puts_.expires_ms > 0) & (puts_.expires_ms <= puts_.due_ms)] = Status.INVALID.code
        return answers


@caught_by("put_of_a_taken_id")
class RejectedPutsOverwrite(MemoryStore):
    """Payloads are written under the id before anybody looks whether it is taken."""

    async def put(self, topic: Topic, now_ms: int, puts_: Puts) -> Answers:
        rows = self._rows[topic.uid]
        for id, payload in zip(puts_.ids, puts_.payloads, strict=True):
            if id in rows.index:
                rows.payloads[rows.index.get(id)] = payload
        return await super().put(topic, now_ms, puts_)


@caught_by("large_batches")
class DropsTheEndOfABatch(MemoryStore):
    async def put(self, topic: Topic, now_ms: int, puts_: Puts) -> Answers:
        answers = await super().put(topic, now_ms, puts_)
        for id in puts_.ids.tolist()[9_999:]:
            rows = self._rows[topic.uid]
            rows.remove(np.array([rows.index.get(id)], dtype=np.intp), now_ms, False)
        return answers


@caught_by("remembered_ids")
class RemembersNothing(MemoryStore):
    async def settle(self, topic: Topic, now_ms: int, settles_: Settles) -> Answers:
        return await super().settle(replace(topic, settings=replace(topic.settings, remember_ms=0)), now_ms, settles_)


@caught_by("late_ack")
class NeverCallsAnAckLate(MemoryStore):
    async def settle(self, topic: Topic, now_ms: int, settles_: Settles) -> Answers:
        answers = await super().settle(topic, now_ms, settles_)
        answers.late[:] = 0
        return answers


@caught_by("release_unseen")
class CountsTheUnseen(MemoryStore):
    async def settle(self, topic: Topic, now_ms: int, settles_: Settles) -> Answers:
        return await super().settle(topic, now_ms, replace(settles_, unseen=np.zeros_like(settles_.unseen)))


@caught_by("release")
class ReleasesIntoThePast(MemoryStore):
    async def settle(self, topic: Topic, now_ms: int, settles_: Settles) -> Answers:
        return await super().settle(topic, now_ms - 1_000, settles_)


@caught_by("mixed_settles")
class AnswersOnceForTheBatch(MemoryStore):
    async def settle(self, topic: Topic, now_ms: int, settles_: Settles) -> Answers:
        answers = await super().settle(topic, now_ms, settles_)
        answers.status[:] = answers.status.max(initial=0)
        return answers


@caught_by("scan_walks_in_order")
class SkipsOneAtEachPage(MemoryStore):
    async def scan(
        self, topic: Topic, now_ms: int, where: ScanFilter, cursor: bytes, limit: int, payload: bool
    ) -> Page:
        page = await super().scan(topic, now_ms, where, cursor, limit, payload)
        if cursor and len(page.rows) > 1:
            return replace(page, rows=page.rows.take(np.arange(1, len(page.rows))))
        return page


@caught_by("scan_pages_with_payloads_stay_small")
class ReadsAllIdsAtOnce(MemoryStore):
    async def scan(
        self, topic: Topic, now_ms: int, where: ScanFilter, cursor: bytes, limit: int, payload: bool
    ) -> Page:
        page = await super().scan(topic, now_ms, where, cursor, limit, payload)
        while where.ids is not None and page.cursor is not None:
            more = await super().scan(topic, now_ms, where, page.cursor, limit, payload)
            page = Page(Rows.concat([page.rows, more.rows]), more.cursor)
        return page


@caught_by("scan_under_moves")
class ScansByDue(MemoryStore):
    """Walks by due: what moves ahead of the walk is seen again, what moves behind it never."""

    async def scan(
        self, topic: Topic, now_ms: int, where: ScanFilter, cursor: bytes, limit: int, payload: bool
    ) -> Page:
        page = await super().scan(topic, now_ms, where, b"", 1_000_000, False)
        places = sorted(zip(page.rows.due_ms.tolist(), page.rows.ids.tolist(), strict=True))
        due_ms, id = (int(cursor[:20]), cursor[20:]) if cursor else (-1, b"")
        ids = [place[1] for place in places if place > (due_ms, id)]
        rows = (await super().scan(topic, now_ms, ScanFilter(ids=Ragged.of(ids[:limit])), b"", limit, payload)).rows
        last = next((place for place in places if ids[limit:] and place[1] == ids[limit - 1]), None)
        return Page(rows, None if last is None else b"%020d" % last[0] + last[1])


@caught_by("scan_that_starts_later")
class ScansWhatItSawBefore(MemoryStore):
    seen: Rows | None = None

    async def scan(
        self, topic: Topic, now_ms: int, where: ScanFilter, cursor: bytes, limit: int, payload: bool
    ) -> Page:
        if self.seen is None:
            self.seen = (await super().scan(topic, now_ms, where, b"", 1_000_000, True)).rows
        start = int(cursor or b"0")
        rows = self.seen.take(np.arange(start, min(start + limit, len(self.seen))))
        return Page(rows, b"%d" % (start + limit) if start + limit < len(self.seen) else None)


@caught_by("held_by")
class HoldsForEver(MemoryStore):
    async def held_by(self, topic: Topic, now_ms: int, holder: bytes, cursor: bytes, limit: int) -> Page:
        return await super().held_by(topic, 0, holder, cursor, limit)


@caught_by("count_due")
class CountsTheUpperEdge(MemoryStore):
    async def count_due(self, topic: Topic, edges_ms: Int64, held: bool = False) -> Int64:
        return await super().count_due(topic, edges_ms + 1, held)


@caught_by("count_due")
class CountsOnlyTheFree(MemoryStore):
    async def count_due(self, topic: Topic, edges_ms: Int64, held: bool = False) -> Int64:
        return await super().count_due(topic, edges_ms)


@caught_by("next_dues")
class DeadIsDue(MemoryStore):
    """Takes topics that have only dead letters for topics with messages."""

    async def next_dues(self) -> dict[int, int] | None:
        return {topic.uid: 0 for topic in await self.topics()}


@caught_by("next_due")
class OverlooksWhatIsHeld(MemoryStore):
    async def next_due(self, topic: Topic, buckets: Sequence[int] | None, after_ms: int) -> int | None:
        return self._rows[topic.uid].free.first(after_ms)


@caught_by("tag_started")
class TakesWhatCameLater(MemoryStore):
    async def mutate_tag(self, topic: Topic, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
        return await super().mutate_tag(topic, now_ms, replace(mutation, started_ms=1 << 60), cursor, limit)


@caught_by("shift_by_tag_once")
class ShiftsWhatWasAskedSince(MemoryStore):
    async def mutate_tag(self, topic: Topic, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
        since = replace(mutation, started_ms=1 << 60) if mutation.by_ms else mutation
        return await super().mutate_tag(topic, now_ms, since, cursor, limit)


@caught_by("tag_chunk_repeated")
class ShiftsTwice(MemoryStore):
    chunks = 1

    async def mutate_tag(self, topic: Topic, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
        self.chunks += 1
        return await super().mutate_tag(topic, now_ms, replace(mutation, op=self.chunks), cursor, limit)


@caught_by("shift_by_tag_beyond_the_latest")
class ShiftsAnywhere(MemoryStore):
    async def mutate_tag(self, topic: Topic, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
        return await super().mutate_tag(topic, now_ms, replace(mutation, latest_ms=1 << 60), cursor, limit)


@caught_by("tag_dry_run")
class RunsDryForReal(MemoryStore):
    async def mutate_tag(self, topic: Topic, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
        return await super().mutate_tag(topic, now_ms, replace(mutation, dry_run=False), cursor, limit)


@caught_by("tag_ownership")
class TakesAnothersTag(MemoryStore):
    async def mutate_tag(self, topic: Topic, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
        groups = set((await self.scan(topic, now_ms, ScanFilter(), b"", 9_999, False)).rows.groups)
        steps = [
            await super(TakesAnothersTag, self).mutate_tag(topic, now_ms, replace(mutation, group=group), b"", 9_999)
            for group in sorted(groups)
        ]
        return replace(steps[-1], cursor=None) if steps else TagStep({}, None)


@caught_by("sweep_is_bounded")
class SweepsAllAtOnce(MemoryStore):
    async def sweep(self, topic: Topic, now_ms: int, limit: int) -> Swept:
        return await super().sweep(topic, now_ms, 1_000_000)


@caught_by("sweep_is_bounded")
class SaysThatThereIsNoMore(MemoryStore):
    async def sweep(self, topic: Topic, now_ms: int, limit: int) -> Swept:
        return replace(await super().sweep(topic, now_ms, limit), more=False)


@caught_by("sweep_expired")
class SweepsAhead(MemoryStore):
    async def sweep(self, topic: Topic, now_ms: int, limit: int) -> Swept:
        return await super().sweep(topic, now_ms + 3_000, limit)


@caught_by("dropped_rows_are_never_seen_again")
class RowsByName(MemoryStore):
    """Rows are keyed by the topic's name, and a drop leaves them for later."""

    async def drop_topic(self, topic: Topic) -> bool:
        rows, walks = self._rows.get(topic.uid), self._walks.get(topic.uid)
        dropped = await super().drop_topic(topic)
        if dropped and rows is not None and walks is not None:
            self.left = {topic.name: (rows, walks)}
        return dropped

    async def create_topic(self, topic: Topic) -> Topic:
        record = await super().create_topic(topic)
        left = getattr(self, "left", {}).pop(topic.name, None)
        if left:
            self._rows[topic.uid], self._walks[topic.uid] = left
        return record


@caught_by("topic_updates_by_revision")
class UpdatesBlindly(MemoryStore):
    async def update_topic(self, topic: Topic) -> Topic:
        return await super().update_topic(replace(topic, revision=self._topics[topic.name].revision))


@caught_by("creating_a_topic_twice")
class IgnoresConflicts(MemoryStore):
    async def create_topic(self, topic: Topic) -> Topic:
        return self._topics.get(topic.name) or await super().create_topic(topic)


@caught_by("durable_store_keeps_everything")
class SaysThatItIsDurable(MemoryStore):
    capabilities = replace(MemoryStore.capabilities, durable=True)


@caught_by("shared_store_is_one")
class SaysThatItIsShared(MemoryStore):
    capabilities = replace(MemoryStore.capabilities, shared=True)


@caught_by("cluster_uid")
class SaysThatItHasAClock(MemoryStore):
    capabilities = replace(MemoryStore.capabilities, own_clock=True)


@caught_by("mutations_by_state")
class CancelsOneOfABatch(MemoryStore):
    async def mutate(self, topic: Topic, now_ms: int, mutations_: Mutations) -> Answers:
        answers = await super().mutate(topic, now_ms, mutations_)
        if mutations_.operation is Operation.CANCEL:
            answers.status[1:] = answers.status[:1]
        return answers


class _OneAtATime(MemoryStore):
    """Refuses to open while another one is open."""

    owner: ClassVar[MemoryStore | None] = None

    async def open(self) -> Opened:
        if _OneAtATime.owner not in (None, self):
            raise StoreRefused("in use")
        _OneAtATime.owner = self
        return await super().open()

    async def close(self) -> None:
        if _OneAtATime.owner is self:
            _OneAtATime.owner = None
        await super().close()


@caught_by("opening_again")
class NeverOpensAfterAFailure(_OneAtATime):
    async def open(self) -> Opened:
        if getattr(self, "failed", False):
            raise StoreRefused("in use")
        try:
            return await super().open()
        except StoreRefused:
            self.failed = True
            raise


@caught_by("opening_again")
class IsDeadAfterClosing(MemoryStore):
    async def open(self) -> Opened:
        if getattr(self, "closed", False):
            return Opened("0" * 32, "nothing")
        return await super().open()

    async def close(self) -> None:
        await super().close()
        self.closed = True


@caught_by("inspecting")
class MakesAClusterWhenInspected(MemoryStore):
    async def inspect(self) -> Opened:
        return replace(await super().inspect(), cluster_uid="9f" * 16)


@caught_by("inspecting")
class OpensWhenInspected(MemoryStore):
    async def inspect(self) -> Opened:
        return await self.open()


@caught_by("remembered_ids")
class ForgetsOnlyWhenSwept(MemoryStore):
    def _long(self, topic: Topic) -> Topic:
        longer = 1 << 40 if topic.settings.remember_ms else 0
        return replace(topic, settings=replace(topic.settings, remember_ms=longer))

    async def put(self, topic: Topic, now_ms: int, puts_: Puts) -> Answers:
        return await super().put(self._long(topic), now_ms, puts_)

    async def mutate(self, topic: Topic, now_ms: int, mutations_: Mutations) -> Answers:
        return await super().mutate(self._long(topic), now_ms, mutations_)
