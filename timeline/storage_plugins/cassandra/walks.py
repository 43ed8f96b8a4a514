"""Walks over (bucket, id): scans, what a holder has, operations by tag; and counts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from timeline.columns import Int64, Ragged
from timeline.leases import decide, state_of
from timeline.model import Rows, State, Status, Topic, buckets_of
from timeline.storage_plugins.asks import cursor_at, matches, place_of, tag_ask
from timeline.storage_plugins.cassandra.bucket import NOWHERE_MS, Bucket, Head
from timeline.storage_plugins.cassandra.changes import DecidedMessages, StoreContext, contents_of, partly, settled_on
from timeline.storage_plugins.cassandra.partition import AT_ONCE, LAST_ID
from timeline.storage_plugins.cassandra.rows import CassandraRow, rows_of, tag_key
from timeline.storage_plugins.cassandra.session import Tombstoned
from timeline.storage_plugins.cassandra.statements import DEAD, FREE, HELD
from timeline.storage_plugins.contract import Page, ScanFilter, StoreUnavailable, TagMutation, TagStep

PAGE_BYTES = 1024 * 1024
LOOKED_AT = 5_000
"""Rows that one page looks at, at most: it may be empty and not the last."""
READ_ROWS = 1_000
COUNTED_ROWS = 5_000
MOST_AHEAD = 32
"""Buckets that are read at once where there is little in them."""
LOOKS = 20
"""Times to look for the next due of a bucket that is changed meanwhile."""

Wanted = Callable[[CassandraRow], bool]


async def _ids_after(context: StoreContext, key: tuple[int, int], tag: bytes, after: bytes, limit: int) -> list[bytes]:
    """Ids under a tag in a bucket."""
    start, end = tag_key(tag, after), tag_key(tag, LAST_ID)
    rows = await context.partition.connected.read("tagged", *key, start, end, limit)
    return [row.id[1 + len(tag) :] for row in rows]


async def _stored(context: StoreContext, key: tuple[int, int], ids: Sequence[bytes], whole: bool) -> list[CassandraRow]:
    found: list[CassandraRow] = []
    name = "find_whole" if whole else "find"
    for start in range(0, len(ids), AT_ONCE):
        rows = await context.partition.connected.read(name, *key, list(ids[start : start + AT_ONCE]))
        found += [CassandraRow.of(row, whole) for row in rows]
    return sorted(found, key=lambda stored: stored.id)


async def _walk(
    context: StoreContext,
    topic: Topic,
    wanted: Wanted,
    cursor: bytes,
    limit: int,
    tag: bytes = b"",
    whole: bool = False,
) -> tuple[list[tuple[int, CassandraRow]], bytes | None]:
    """Up to `limit` messages that are `wanted`, and where to go on; `whole`: with the content beside them. Buckets are
    read one after the other while they fill pages, more and more of them at once while they do not."""
    bucket, after = place_of(cursor)
    found: list[tuple[int, CassandraRow]] = []
    looked_at, ahead = 0, 1
    while bucket < topic.settings.buckets:
        numbers = range(bucket, min(bucket + ahead, topic.settings.buckets))
        parts = await asyncio.gather(
            *(_part(context, (topic.uid, at), tag, after if at == bucket else b"", whole) for at in numbers)
        )
        for number, (part, onward) in zip(numbers, parts, strict=True):
            looked_at += len(part)
            for stored in part:
                if wanted(stored):
                    found.append((number, stored))
                    if len(found) == limit:
                        return found, cursor_at(number, stored.id)
            if onward is not None:
                bucket, after, ahead = number, onward, 1
                break
        else:
            bucket, after, ahead = numbers.stop, b"", min(2 * ahead, MOST_AHEAD)
        if looked_at >= LOOKED_AT and bucket < topic.settings.buckets:
            return found, cursor_at(bucket, after)
    return found, None


async def _part(
    context: StoreContext, key: tuple[int, int], tag: bytes, after: bytes, whole: bool
) -> tuple[list[CassandraRow], bytes | None]:
    """The next messages of a bucket by id, and after which id to go on in it (None: there are no more)."""
    way = (*key, bool(tag))
    if not after:
        context.tombstoned.discard(way)
    if way not in context.tombstoned:
        try:
            if tag:
                ids = await _ids_after(context, key, tag, after, READ_ROWS)
                return await _stored(context, key, ids, whole), ids[-1] if len(ids) == READ_ROWS else None
            rows = await context.partition.connected.read("walk_whole" if whole else "walk", *key, after, READ_ROWS)
            return [CassandraRow.of(row, whole) for row in rows], rows[-1].id if len(rows) == READ_ROWS else None
        except Tombstoned:
            context.tombstoned.add(way)
    ids = [id for id in await _living(context, key) if id > after]
    part = await _stored(context, key, ids[:READ_ROWS], whole)
    return [one for one in part if not tag or one.tag == tag], ids[READ_ROWS - 1] if len(ids) > READ_ROWS else None


async def _living(context: StoreContext, key: tuple[int, int]) -> list[bytes]:
    """Ids of all that lives in a bucket, in order, by its timelines and its dead letters: so much was acknowledged that
    Cassandra does not read past it, and a timeline is read from its floor."""
    for _ in range(LOOKS):
        head = (await context.partition.heads(key[0], [key[1]]))[key[1]]
        ids: set[bytes] = set()
        for kind, from_ms in ((FREE, head.floor(FREE)), (HELD, head.floor(HELD)), (DEAD, 1)):
            if from_ms < NOWHERE_MS:
                ids.update(await _ids_from(context, key, kind, from_ms))
        # What was being moved from one timeline to the other between two reads would be on neither.
        if (await context.partition.heads(key[0], [key[1]]))[key[1]] == head:
            return sorted(ids)
    raise StoreUnavailable(f"bucket {key[1]} is changed all the time while all of it is read")


async def _ids_from(context: StoreContext, key: tuple[int, int], kind: int, from_ms: int) -> list[bytes]:
    """Ids on a timeline from a time on."""
    ids: list[bytes] = []
    place = (from_ms - 1, LAST_ID)
    while True:
        rows = await context.partition.connected.read("timeline", *key, kind, *place, COUNTED_ROWS)
        ids += [row.id for row in rows]
        if len(rows) < COUNTED_ROWS:
            return ids
        place = (rows[-1].at, rows[-1].id)


async def _page(
    context: StoreContext, topic: Topic, found: list[tuple[int, CassandraRow]], onward: bytes | None, payload: bool
) -> Page:
    """A page, which ends near PAGE_BYTES where it carries payloads."""
    if not payload:
        return Page(rows_of([stored for _, stored in found]), onward)
    sizes = np.cumsum(np.array([stored.size_bytes for _, stored in found], dtype=np.int64))
    count = max(1, int(np.searchsorted(sizes, PAGE_BYTES, "right")))
    if count < len(found):
        found = found[:count]
        onward = cursor_at(found[-1][0], found[-1][1].id)
    contents = await context.contents.read(topic.uid, found)
    return Page(rows_of([stored for _, stored in found], [pair or (b"", b"") for pair in contents]), onward)


async def scan(
    context: StoreContext, topic: Topic, now_ms: int, where: ScanFilter, cursor: bytes, limit: int, payload: bool
) -> Page:
    """`Store.scan`."""
    limit = max(1, limit)

    def wanted(stored: CassandraRow) -> bool:
        return matches(where, stored.message, stored.tag, now_ms)

    if where.ids is None:
        found, onward = await _walk(context, topic, wanted, cursor, limit, where.tag, payload)
        return await _page(context, topic, found, onward, payload)
    ids = Ragged.of(list(dict.fromkeys(where.ids.tolist())))
    places = sorted(zip(buckets_of(ids, topic.settings.buckets).tolist(), ids.tolist(), strict=True))
    if cursor:
        places = [place for place in places if place > place_of(cursor)]
    onward = cursor_at(*places[limit - 1]) if len(places) > limit else None
    by_bucket: dict[int, list[bytes]] = {}
    for bucket, id in places[:limit]:
        by_bucket.setdefault(bucket, []).append(id)
    parts = await asyncio.gather(
        *(_stored(context, (topic.uid, bucket), mine, payload) for bucket, mine in by_bucket.items())
    )
    found = [
        (bucket, stored) for bucket, part in zip(by_bucket, parts, strict=True) for stored in part if wanted(stored)
    ]
    return await _page(context, topic, found, onward, payload)


async def held_by(context: StoreContext, topic: Topic, now_ms: int, holder: bytes, cursor: bytes, limit: int) -> Page:
    """`Store.held_by`: buckets one after the other, each along its live leases, of which there are as many as
    consumers have in hand."""
    if not holder:
        return Page(Rows.empty(payload=True), None)
    limit, (start, after) = max(1, limit), place_of(cursor)
    found: list[tuple[int, CassandraRow]] = []
    onward: bytes | None = None
    while start < topic.settings.buckets and len(found) < limit:
        numbers = range(start, min(start + MOST_AHEAD, topic.settings.buckets))
        parts = await asyncio.gather(
            *(_leased(context, (topic.uid, at), now_ms, holder, after if at == start else b"") for at in numbers)
        )
        found += [(number, stored) for number, part in zip(numbers, parts, strict=True) for stored in part]
        start, after = numbers.stop, b""
    if len(found) > limit:
        onward = cursor_at(found[limit - 1][0], found[limit - 1][1].id)
    elif start < topic.settings.buckets:
        onward = cursor_at(start, b"")
    return await _page(context, topic, found[:limit], onward, payload=True)


async def _leased(
    context: StoreContext, key: tuple[int, int], now_ms: int, holder: bytes, after: bytes
) -> list[CassandraRow]:
    """What a holder has of a bucket under a live lease, by id."""
    ids = sorted({id for id in await _ids_from(context, key, HELD, now_ms + 1) if id > after})
    found = await _stored(context, key, ids, whole=True)
    return [one for one in found if one.message.holder == holder and state_of(one.message, now_ms) is State.LEASED]


async def mutate_tag(
    context: StoreContext, topic: Topic, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int
) -> TagStep:
    """`Store.mutate_tag`."""
    if not mutation.tag:
        return TagStep({}, None)
    found, onward = await _walk(context, topic, lambda stored: True, cursor, max(1, limit), mutation.tag)
    by_bucket: dict[int, list[bytes]] = {}
    for number, stored in found:
        by_bucket.setdefault(number, []).append(stored.id)
    counts: Counter[int] = Counter()
    moved: list[int] = []
    for bucket in context.buckets.of(topic.uid, by_bucket):
        ids = by_bucket[bucket.number]
        for start in range(0, len(ids), AT_ONCE):
            with partly(counts.total):
                some, to = await _tag_part(context, topic, now_ms, mutation, bucket, ids[start : start + AT_ONCE])
            counts += some
            moved += to
    return TagStep(dict(counts), onward, min(moved, default=None))


async def _tag_part(
    context: StoreContext, topic: Topic, now_ms: int, mutation: TagMutation, bucket: Bucket, ids: list[bytes]
) -> tuple[Counter[int], list[int]]:
    """A tag operation on some messages of a bucket: counts by status, and the dues of what was moved."""

    async def attempt() -> tuple[Counter[int], list[int], list[CassandraRow]]:
        await context.partition.head(bucket)
        standing = DecidedMessages(topic, now_ms, await context.partition.find(bucket, ids))
        counts: Counter[int] = Counter()
        moved: list[int] = []
        for stored in standing.there():
            if stored.message.remembered or stored.tag != mutation.tag:
                continue
            if not mutation.meets(stored.put_ms, stored.message.asked_ms, stored.message.last_op):
                continue
            ask = tag_ask(mutation, stored.message)
            if ask is None:
                counts[Status.INVALID.code] += 1
            elif mutation.dry_run:
                counts[decide(stored.message, ask, now_ms, topic.settings).status.code] += 1
            else:
                decision = standing.decide(stored.id, ask)
                counts[decision.status.code] += 1
                if decision.status is Status.OK and decision.message is not None:
                    moved.append(decision.message.due_ms)
        pairs = standing.pairs()
        if pairs:
            await context.partition.change(bucket, pairs)
        return counts, moved, standing.gone

    counts, moved, gone = await settled_on(bucket, attempt)
    context.contents.delete(topic.uid, contents_of(bucket, gone))
    return counts, moved


async def count_due(context: StoreContext, topic: Topic, edges_ms: Int64) -> Int64:
    """`Store.count_due`: reads the free timeline between the outer edges."""
    counts = np.zeros(max(0, len(edges_ms) - 1), dtype=np.int64)
    if not len(counts):
        return counts
    for start in range(0, topic.settings.buckets, MOST_AHEAD):
        numbers = range(start, min(start + MOST_AHEAD, topic.settings.buckets))
        counts += sum(await asyncio.gather(*(_count(context, (topic.uid, number), edges_ms) for number in numbers)))
    return counts


async def _count(context: StoreContext, key: tuple[int, int], edges_ms: Int64) -> Int64:
    counts = np.zeros(len(edges_ms) - 1, dtype=np.int64)
    start_ms, id = int(edges_ms[0]) - 1, LAST_ID
    while True:
        rows = await context.partition.connected.read("timeline", *key, FREE, start_ms, id, COUNTED_ROWS)
        times = np.array([row.at for row in rows], dtype=np.int64)
        counts += np.maximum(0, np.diff(np.searchsorted(times, edges_ms)))
        if len(rows) < COUNTED_ROWS or rows[-1].at >= edges_ms[-1]:
            return counts
        start_ms, id = rows[-1].at, rows[-1].id


async def next_due(context: StoreContext, topic: Topic, buckets: Sequence[int] | None, after_ms: int) -> int | None:
    """`Store.next_due`."""
    numbers = range(topic.settings.buckets) if buckets is None else buckets
    left = [at for at in numbers if 0 <= at < topic.settings.buckets]
    found: list[int] = []
    for _ in range(LOOKS):
        heads = await context.partition.heads(topic.uid, left)
        parts = await asyncio.gather(*(_firsts(context, (topic.uid, at), heads[at], after_ms) for at in left))
        found += [at for part in parts if part is not None for at in part]
        # What was being moved from one timeline to the other between two reads would be on neither.
        left = [number for number, part in zip(left, parts, strict=True) if part is None]
        if not left:
            break
    return min(found, default=None)


async def _firsts(context: StoreContext, key: tuple[int, int], head: Head, after_ms: int) -> list[int] | None:
    """The first dues after `after_ms` on a bucket's two timelines; None when it changed between."""
    found: list[int] = []
    for kind in (FREE, HELD):
        start_ms = max(head.floor(kind) - 1, after_ms)
        if start_ms < NOWHERE_MS - 1:
            rows = await context.partition.connected.read("timeline", *key, kind, start_ms, LAST_ID, 1)
            if any(row.last != head.last for row in rows):
                return None
            found += [row.at for row in rows]
    return found
