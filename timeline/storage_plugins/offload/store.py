"""A store with offloaded payloads. It is any store, with a place for large payloads:

    sqlite:////var/lib/timeline/timeline.db?payloads=s3://bucket/timeline&payload_offload_bytes=262144

A payload is written before its row and deleted after it, after the answer and in the background. Only a put writes
payloads. Only calls that return them (a lease, `held_by`, a scan with payloads) read them, and compare their checksum.
A sweep finds the files that remain: of refused and lost puts, of cancelled and expired messages. It looks at a share of
the files at a time, and deletes those that twice, a grace apart, had no row.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence

import numpy as np

from timeline.columns import Int64, Ragged
from timeline.model import MAX_PAYLOAD_BYTES, Answers, Operation, Rows, State, Status, Topic
from timeline.storage_plugins.asks import give_back, pages
from timeline.storage_plugins.contract import (
    Capabilities,
    DiskSpace,
    Grant,
    LeasedRows,
    Mutations,
    Opened,
    Page,
    Puts,
    ScanFilter,
    Settles,
    Store,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    StoreUnknown,
    Swept,
    TagMutation,
    TagStep,
    TellsDiskSpace,
)
from timeline.storage_plugins.offload import (
    LEAST_OFFLOAD_BYTES,
    NONCE_BYTES,
    OFFLOAD_BYTES,
    SHARDS,
    PayloadGone,
    PayloadStore,
    PayloadsUnavailable,
    Place,
    fill,
    place_of_name,
    places_of,
    read_all,
    shard_folder,
    topic_folder,
)
from timeline.storage_plugins.versions import Versions

log = logging.getLogger("timeline.store")

MOST_SUSPECTS = 65_536
"""The most suspects that are remembered. Others wait until these have left."""
MOST_DOOMED = 65_536
"""The most files that wait to be deleted. More are left to a sweep."""
LOOKED_UP_AT_ONCE = 1_000
DELETED_AT_ONCE = 1_000
GRACE_MS = 3_600_000
"""How long a payload without a row is kept: longer than any put may take."""
MOST_KNOWN = 65_536
"""The most payloads that an acknowledgement deletes by itself. A sweep finds the others."""
LOOKED_AT, MOST_READ = 100, 100_000
"""Offloaded payloads of a topic that are looked for in a place without a mark, and the large messages of a topic whose
contents are read to find them."""
Life = tuple[int, bytes, int]
"""Topic, id, birth."""
EVERYTHING = frozenset((State.WAITING, State.AVAILABLE, State.LEASED, State.DEAD))


class Orphans:
    """Deletes payloads of messages that are gone. `grace_ms`: how long one without a row is kept."""

    def __init__(self, payloads: PayloadStore, grace_ms: int) -> None:
        self._payloads, self._grace_ms = payloads, grace_ms
        self._suspects: dict[tuple[int, int], dict[str, int]] = {}
        """By topic and shard: the files that the last look found without a row, and since when they have none."""
        self._suspected = 0
        """How many there are in all."""
        self._shards: dict[int, int] = {}
        """By topic: the shard that is next."""
        self._doomed: list[str] = []
        self._deleting: asyncio.Task[None] | None = None

    def delete_later(self, names: Sequence[str]) -> None:
        """Delete these soon, in the background. A sweep finds those that cannot be deleted."""
        self._doomed += names[: max(0, MOST_DOOMED - len(self._doomed))]
        if self._doomed and self._deleting is None:
            self._deleting = asyncio.create_task(self._delete(), name="timeline-payloads")

    async def flush(self) -> None:
        """Wait until the files that were to be deleted are."""
        while self._deleting is not None:
            await self._deleting

    async def _delete(self) -> None:
        try:
            while self._doomed:
                names, self._doomed = self._doomed[:DELETED_AT_ONCE], self._doomed[DELETED_AT_ONCE:]
                try:
                    await self._payloads.delete(names)
                except PayloadsUnavailable as trouble:
                    # With all that wait behind them: each try may take a whole deadline.
                    log.warning("%d payloads are left to a sweep: %s", len(names) + len(self._doomed), trouble.reason)
                    self._doomed = []
        finally:
            self._deleting = None

    async def sweep(self, inner: Store, topic: Topic, now_ms: int) -> int:
        """Sweep the next share of the topic's files; return how many were deleted. A failure is only logged."""
        shard = self._shards.get(topic.uid, 0)
        self._shards[topic.uid] = (shard + 1) % SHARDS
        # Forgotten first: if this look fails, their grace begins again, and they keep no room from others.
        before = self._suspects.get((topic.uid, shard), {})
        self._suspect(topic.uid, shard, {})
        try:
            names = await self._payloads.names(shard_folder(topic.uid, shard))
            living = await self._living(inner, topic, now_ms, names)
            since = {name: min(before.get(name, now_ms), now_ms) for name in names if name not in living}
            until_ms = now_ms - self._grace_ms
            over = [name for name, since_ms in since.items() if since_ms <= until_ms]
            self._suspect(topic.uid, shard, {name: at_ms for name, at_ms in since.items() if at_ms > until_ms})
            await self._payloads.delete(over)
        except StoreError as trouble:
            log.warning("payloads of %s could not be swept: %s", topic.name, trouble.detail)
            return 0
        return len(over)

    def _suspect(self, uid: int, shard: int, since: dict[str, int]) -> None:
        """Replace the suspects of a shard by `since`, or by the oldest of them that there is room for.

        Each suspect leaves at a later look at its shard: deleted, or not found again. So the others get their turn.
        """
        self._suspected -= len(self._suspects.pop((uid, shard), {}))
        room = MOST_SUSPECTS - self._suspected
        if len(since) > room:
            since = dict(sorted(since.items(), key=lambda suspect: suspect[1])[:room])
        if since and uid in self._shards:  # else the topic was dropped during the look
            self._suspects[uid, shard] = since
            self._suspected += len(since)

    def forget(self, uid: int) -> None:
        """Forget a topic that was dropped."""
        if self._shards.pop(uid, None) is not None:
            for shard in range(SHARDS):
                self._suspect(uid, shard, {})

    def forget_others(self, uids: set[int]) -> None:
        """Forget all topics but these: another broker dropped them."""
        for uid in self._shards.keys() - uids:
            self.forget(uid)

    async def _living(self, inner: Store, topic: Topic, now_ms: int, names: list[str]) -> set[str]:
        """Return those of `names` that rows point to."""
        ids = sorted({place.id for place in map(place_of_name, names) if place is not None})
        living: set[str] = set()
        for start in range(0, len(ids), LOOKED_UP_AT_ONCE):
            asked = Ragged.of(ids[start : start + LOOKED_UP_AT_ONCE])
            cursor: bytes | None = b""
            while cursor is not None:
                where = ScanFilter(EVERYTHING, ids=asked)
                page = await inner.scan(topic, now_ms, where, cursor, LOOKED_UP_AT_ONCE, True)
                living.update(place.name(topic.uid) for place in places_of(page.rows).values())
                cursor = page.cursor
        return living


class OffloadingStore(Store):
    """`inner` with payloads above `offload_bytes` in `payloads`. `grace_ms`: see GRACE_MS."""

    def __init__(
        self, inner: Store, payloads: PayloadStore, offload_bytes: int = OFFLOAD_BYTES, grace_ms: int = GRACE_MS
    ) -> None:
        if not LEAST_OFFLOAD_BYTES <= offload_bytes <= MAX_PAYLOAD_BYTES:
            raise StoreRefused(
                f"payload_offload_bytes is from {LEAST_OFFLOAD_BYTES} to {MAX_PAYLOAD_BYTES}, not {offload_bytes}"
            )
        self.inner, self.payloads, self.grace_ms = inner, payloads, grace_ms
        self.tells_commit_seq, self.file = inner.tells_commit_seq, inner.file
        self._asked_bytes = offload_bytes
        self._orphans = Orphans(payloads, grace_ms)
        self._leased: OrderedDict[Life, str] = OrderedDict()
        self.capabilities = self._capable()

    def _capable(self) -> Capabilities:
        """Return the store's capabilities, with the largest payload. It is durable if the payloads are durable too."""
        mine = self.inner.capabilities
        self.offload_bytes = min(self._asked_bytes, mine.payload_limit_bytes)
        durable = mine.durable and self.payloads.durable
        failover = mine.survives_failover and durable
        limit = MAX_PAYLOAD_BYTES
        return dataclasses.replace(mine, durable=durable, survives_failover=failover, payload_limit_bytes=limit)

    # ── lifecycle ──

    async def open(self) -> Opened:
        await self.payloads.open()
        try:
            opened = await self.inner.open()
        except BaseException:
            await self.payloads.close()
            raise
        try:
            await self._claim(opened.cluster_uid)
        except BaseException:
            await self.inner.close()
            await self.payloads.close()
            raise
        return self._as_found(opened)

    async def inspect(self) -> Opened:
        found = await self.inner.inspect()
        if not await self.payloads.in_place():
            raise StoreRefused(
                f"{self.payloads.described} is not the place of payloads that was opened. Its mark is gone, or is "
                "another's. Mount the right one, and this broker goes on by itself."
            )
        return self._as_found(found)

    def _as_found(self, opened: Opened) -> Opened:
        self.capabilities = self._capable()
        told = f"{opened.server}; payloads above {self.offload_bytes:,} bytes in {self.payloads.described}"
        warnings = opened.warnings
        if self.inner.capabilities.durable and not self.payloads.durable:
            warnings += (f"payloads in {self.payloads.described} are gone when this process ends",)
        return dataclasses.replace(opened, server=told, warnings=warnings)

    async def _claim(self, cluster_uid: str) -> None:
        """Take a fresh place, unless it should have payloads and has none. Then it is not mounted, and each message
        would become a dead letter."""
        if self.payloads.fresh and self.payloads.durable and await self._lost():
            raise StoreRefused(
                f"the store's payloads lie apart, and none of them in {self.payloads.described}: is it mounted?"
            )
        await self.payloads.claim(cluster_uid)

    async def _lost(self) -> bool:
        """Return whether payloads are missing: rows point to some, and none of those is there."""
        found = False
        for topic in await self.inner.topics():
            for place in await self._first_places(topic):
                try:
                    await self.payloads.read(place.name(topic.uid))
                except PayloadGone:
                    found = True
                else:
                    return False
        return found

    async def _first_places(self, topic: Topic) -> list[Place]:
        """Return the places of the topic's first LOOKED_AT offloaded payloads."""
        places: list[Place] = []
        read = 0

        def walk(where: ScanFilter, payload: bool) -> AsyncIterator[Rows]:
            return pages(lambda cursor: self.inner.scan(topic, 0, where, cursor, LOOKED_UP_AT_ONCE, payload))

        async for rows in walk(ScanFilter(EVERYTHING), False):
            large = np.flatnonzero(rows.payload_bytes > LEAST_OFFLOAD_BYTES)
            if len(large):
                async for contents in walk(ScanFilter(EVERYTHING, ids=rows.ids.take(large)), True):
                    places += places_of(contents).values()
            read += len(large)
            if len(places) >= LOOKED_AT or read >= MOST_READ:
                break
        return places[:LOOKED_AT]

    async def close(self) -> None:
        await self._orphans.flush()
        await self.inner.close()
        await self.payloads.close()

    async def check(self) -> None:
        await self.inner.check()
        await self.payloads.check()

    async def migrate(self, contract: bool) -> Versions | None:
        return await self.inner.migrate(contract)

    async def clock_ms(self) -> float | None:
        return await self.inner.clock_ms()

    async def room(self) -> DiskSpace | None:
        return await self.inner.room() if isinstance(self.inner, TellsDiskSpace) else None

    # ── topics ──

    async def topics(self) -> list[Topic]:
        topics = await self.inner.topics()
        self._orphans.forget_others({topic.uid for topic in topics})
        return topics

    async def create_topic(self, topic: Topic) -> Topic:
        return await self.inner.create_topic(topic)

    async def update_topic(self, topic: Topic) -> Topic:
        return await self.inner.update_topic(topic)

    async def drop_topic(self, topic: Topic) -> bool:
        try:
            dropped = await self.inner.drop_topic(topic)
        except StoreUnknown:
            await self._delete_if_dropped(topic)
            raise
        if dropped:
            await self._delete_payloads(topic)
        return dropped

    async def _delete_if_dropped(self, topic: Topic) -> None:
        """Look whether a drop was done whose answer was lost. A repeat finds no topic, and would leave its payloads."""
        try:
            there = {each.uid for each in await self.inner.topics()}
        except StoreError as trouble:
            log.warning(
                "nobody knows whether topic %s is dropped, and its payloads stay: %s", topic.name, trouble.detail
            )
            return
        if topic.uid not in there:
            await self._delete_payloads(topic)

    async def _delete_payloads(self, topic: Topic) -> None:
        try:
            await self.payloads.delete_folder(topic_folder(topic.uid))
        except PayloadsUnavailable as trouble:
            folder, why = f"{self.payloads.described}/{topic_folder(topic.uid)}", trouble.reason
            log.warning("topic %s is dropped; delete the folder %s yourself: %s", topic.name, folder, why)
        self._orphans.forget(topic.uid)

    # ── messages ──

    async def put(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        large = np.flatnonzero(puts.payloads.sizes > self.offload_bytes)
        if not len(large):
            return await self.inner.put(topic, now_ms, puts)
        places = {
            at: Place(puts.ids[at], int(puts.birth[at]), secrets.token_bytes(NONCE_BYTES)) for at in large.tolist()
        }
        failed = await self._write(topic, puts, places)
        sizes = puts.sizes.copy()
        contents = [
            places[at].pointer if at in places else payload for at, payload in enumerate(puts.payloads.tolist())
        ]
        apart = dataclasses.replace(puts, payloads=Ragged.of(contents), payload_bytes=sizes)
        if not failed:
            answers = await self.inner.put(topic, now_ms, apart)
        else:
            sound = np.array([at for at in range(len(puts)) if at not in failed], dtype=np.intp)
            answers = Answers.blank(len(puts), Status.UNAVAILABLE)
            answers.assign(sound, await self.inner.put(topic, now_ms, apart.take(sound)))
            for at, why in failed.items():
                answers.status[at], answers.details[at] = Status.UNAVAILABLE.code, why
        # The name belongs to this attempt alone. A repeat may have met this very attempt, and an UNKNOWN one may be
        # stored.
        kept = (Status.OK.code, Status.UNKNOWN.code)
        refused = [
            place.name(topic.uid)
            for at, place in places.items()
            if at not in failed and answers.status[at] not in kept and not answers.repeat[at]
        ]
        self._orphans.delete_later(refused)
        return answers

    async def _write(self, topic: Topic, puts: Puts, places: dict[int, Place]) -> dict[int, str]:
        """Write the payloads; return which could not be written, and why."""

        async def write(at: int, place: Place) -> str:
            try:
                await self.payloads.write(place.name(topic.uid), puts.payloads[at])
            except PayloadsUnavailable as trouble:
                return trouble.reason
            return ""

        told = await asyncio.gather(*(write(at, place) for at, place in places.items()))
        return {at: why for at, why in zip(places, told, strict=True) if why}

    async def lease_due(
        self,
        topic: Topic,
        buckets: Sequence[int] | None,
        now_ms: int,
        due_before_ms: int,
        grants: Sequence[Grant],
        overdue_ms: int = 0,
    ) -> LeasedRows:
        leased = await self.inner.lease_due(topic, buckets, now_ms, due_before_ms, grants, overdue_ms)
        places = places_of(leased.rows)
        if not places:
            return leased
        for place in places.values():
            self._leased[topic.uid, place.id, place.birth] = place.name(topic.uid)
        while len(self._leased) > MOST_KNOWN:
            self._leased.popitem(last=False)
        # All leased messages wait for these, but not until their leases are worth nothing.
        patience_s = min(grant.lease_ms for grant in grants) / 1000 / 2
        read = await read_all(self.payloads, topic, leased.rows, places, patience_s)
        fill(leased.rows, read)
        leased.damaged = (*leased.damaged, *read.gone)
        return leased if not read.unread else await self._give_back(topic, now_ms, leased, read.unread, overdue_ms)

    async def _give_back(
        self, topic: Topic, now_ms: int, leased: LeasedRows, unread: dict[int, str], overdue_ms: int
    ) -> LeasedRows:
        """Return the leased messages without those that could not be read, which are given back."""
        rows, why = leased.rows.take(np.array(sorted(unread), dtype=np.intp)), next(iter(unread.values()))
        rested_ms = await give_back(self.inner.settle, topic, now_ms, rows, why)
        left = leased.take(np.array([at for at in range(len(leased.rows)) if at not in unread], dtype=np.intp))
        if not overdue_ms:
            left.next_due_ms = rested_ms if left.next_due_ms is None else min(left.next_due_ms, rested_ms)
        return left

    async def settle(self, topic: Topic, now_ms: int, settles: Settles) -> Answers:
        answers = await self.inner.settle(topic, now_ms, settles)
        if self._leased:
            acked = (settles.operation == Operation.ACK) & (answers.status == Status.OK.code)
            ended = (
                self._leased.pop((topic.uid, settles.ids[at], int(settles.birth[at])), "")
                for at in np.flatnonzero(acked).tolist()
            )
            self._orphans.delete_later([name for name in ended if name])
        return answers

    async def mutate(self, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
        return await self.inner.mutate(topic, now_ms, mutations)

    async def mutate_tag(self, topic: Topic, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
        return await self.inner.mutate_tag(topic, now_ms, mutation, cursor, limit)

    async def held_by(self, topic: Topic, now_ms: int, holder: bytes, cursor: bytes, limit: int) -> Page:
        return await self._whole(topic, await self.inner.held_by(topic, now_ms, holder, cursor, limit))

    async def scan(
        self, topic: Topic, now_ms: int, where: ScanFilter, cursor: bytes, limit: int, payload: bool
    ) -> Page:
        page = await self.inner.scan(topic, now_ms, where, cursor, limit, payload)
        return await self._whole(topic, page) if payload else page

    async def count_due(self, topic: Topic, edges_ms: Int64, held: bool = False) -> Int64:
        return await self.inner.count_due(topic, edges_ms, held)

    async def next_due(self, topic: Topic, buckets: Sequence[int] | None, after_ms: int) -> int | None:
        return await self.inner.next_due(topic, buckets, after_ms)

    async def next_dues(self) -> dict[int, int] | None:
        return await self.inner.next_dues()

    async def _whole(self, topic: Topic, page: Page) -> Page:
        """Return the page with its payloads. One that is gone or damaged is empty, though its row has a size."""
        places = places_of(page.rows)
        if places:
            read = await read_all(self.payloads, topic, page.rows, places)
            if read.unread:
                raise StoreUnavailable(next(iter(read.unread.values())))
            fill(page.rows, read)
        return page

    async def sweep(self, topic: Topic, now_ms: int, limit: int) -> Swept:
        swept = await self.inner.sweep(topic, now_ms, limit)
        found = await self._orphans.sweep(self.inner, topic, now_ms)
        return dataclasses.replace(swept, orphans=swept.orphans + found)
