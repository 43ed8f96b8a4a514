"""Walks over (bucket, id): scans, what a holder has, operations by tag, counts; and the sweep along the indexes."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from timeline.columns import Int64
from timeline.leases import decide, state_of
from timeline.model import Rows, State, Status, Topic
from timeline.storage_plugins.asks import cursor_at, matches, place_of, places_of, tag_ask
from timeline.storage_plugins.cassandra import records
from timeline.storage_plugins.cassandra.bucket import (
    AT_ONCE,
    HEADS_AT_ONCE,
    LAST_ID,
    NOWHERE_MS,
    Bucket,
    Changed,
    Head,
    Place,
    beyond,
)
from timeline.storage_plugins.cassandra.changes import (
    BatchPart,
    DecidedMessages,
    Dropped,
    StoreContext,
    contents_of,
    partly,
    settled_on,
)
from timeline.storage_plugins.cassandra.rows import CassandraRow, Content, rows_of, signed, tag_key
from timeline.storage_plugins.cassandra.session import Tombstoned
from timeline.storage_plugins.cassandra.statements import DEAD, EXPIRES, FREE, HELD, KEPT, PARTS
from timeline.storage_plugins.contract import (
    Page,
    ScanFilter,
    StoreError,
    StoreUnavailable,
    Swept,
    TagMutation,
    TagStep,
)

log = logging.getLogger("timeline.store")

PAGE_BYTES = 1024 * 1024
LOOKED_AT = 5_000
"""The most rows that one page looks at; it may then be empty and not the last."""
READ_ROWS = 1_000
COUNTED_ROWS = 5_000
MOST_AHEAD = 32
"""Buckets that are read at once if they hold little."""
LOOKS = 20
"""How often to look for the next due of a bucket that is changed meanwhile."""

GRACE_MS = 10 * 60_000
"""Longer than any put's deadline."""
SWEPT_AT_ONCE = 200
MOST_TOMBSTONES = 2_000
"""From this number, deletions in an index of a bucket are made one. Messages that are purged, or acknowledged before
their expiry, leave them. Cassandra refuses a read that meets a hundred thousand."""
_FIRST: Place = (-(1 << 62), b"")
"""Before any entry."""

Wanted = Callable[[CassandraRow], bool]


async def _ids_after(context: StoreContext, key: tuple[int, int], tag: bytes, after: bytes, limit: int) -> list[bytes]:
    """Return ids under a tag in a bucket."""
    start, end = tag_key(tag, after), tag_key(tag, LAST_ID)
    rows = await context.partition.connected.read("tagged", *key, start, end, limit)
    return [row.id[1 + len(tag) :] for row in rows]


async def _stored(context: StoreContext, key: tuple[int, int], ids: Sequence[bytes], whole: bool) -> list[CassandraRow]:
    rows = await context.partition.rows(key, ids, whole)
    return sorted((CassandraRow.of(row, whole) for row in rows), key=lambda stored: stored.id)


async def _walk(
    context: StoreContext,
    topic: Topic,
    wanted: Wanted,
    cursor: bytes,
    limit: int,
    tag: bytes = b"",
    whole: bool = False,
) -> tuple[list[tuple[int, CassandraRow]], bytes | None]:
    """Return up to `limit` messages that are `wanted`, and where to go on. `whole`: with the content beside them.
    Buckets are read one by one while they fill pages, and more and more of them at once while they do not."""
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
    """Return the next messages of a bucket by id, and after which id to go on in it (None: no more)."""
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
    """Return ids of all that lives in a bucket, in order, from its timelines and dead letters. Cassandra does not read
    past all tombstones of its messages, but a timeline is read from its floor."""
    for _ in range(LOOKS):
        head = (await context.partition.heads(key[0], [key[1]]))[key[1]]
        ids: set[bytes] = set()
        for kind, from_ms in ((FREE, head.floor(FREE)), (HELD, head.floor(HELD)), (DEAD, 1)):
            if from_ms < NOWHERE_MS:
                ids.update(await _ids_from(context, key, kind, from_ms))
        # What was being moved from one timeline to the other between two reads would be on neither.
        if (await context.partition.heads(key[0], [key[1]]))[key[1]] == head:
            return sorted(ids)
    raise StoreUnavailable(f"other calls change bucket {key[1]} all the time while it is read")


async def _ids_from(context: StoreContext, key: tuple[int, int], kind: int, from_ms: int) -> list[bytes]:
    """Return ids on a timeline from a time on."""
    return [row.id async for rows in _timeline(context, key, kind, from_ms) for row in rows]


async def _timeline(
    context: StoreContext, key: tuple[int, int], kind: int, from_ms: int, until_ms: int = NOWHERE_MS
) -> AsyncIterator[list[Any]]:
    """Yield the entries of a timeline from a time on, and before another one, COUNTED_ROWS at a time."""
    place, last = (from_ms - 1, LAST_ID), (until_ms - 1, LAST_ID)
    while True:
        rows = await context.partition.entries(key, kind, place, last, COUNTED_ROWS)
        yield rows
        if len(rows) < COUNTED_ROWS:
            return
        place = (rows[-1].at, rows[-1].id)


async def _page(
    context: StoreContext, topic: Topic, found: list[tuple[int, CassandraRow]], onward: bytes | None, payload: bool
) -> Page:
    """Return a page, which ends near PAGE_BYTES if it carries payloads."""
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
    places, onward = places_of(where.ids, topic.settings.buckets, cursor, limit)
    by_bucket: dict[int, list[bytes]] = {}
    for bucket, id in places:
        by_bucket.setdefault(bucket, []).append(id)
    parts = await asyncio.gather(
        *(_stored(context, (topic.uid, bucket), mine, payload) for bucket, mine in by_bucket.items())
    )
    found = [
        (bucket, stored) for bucket, part in zip(by_bucket, parts, strict=True) for stored in part if wanted(stored)
    ]
    return await _page(context, topic, found, onward, payload)


async def held_by(context: StoreContext, topic: Topic, now_ms: int, holder: bytes, cursor: bytes, limit: int) -> Page:
    """`Store.held_by`: buckets one after the other, each along its live leases."""
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
    """Return what a holder has of a bucket under a live lease, by id."""
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
    """Do a tag operation on some messages of a bucket. Return counts by status, and the dues of what was moved."""
    counts: Counter[int] = Counter()
    moved: list[int] = []

    def decided(found: dict[bytes, CassandraRow]) -> DecidedMessages:
        counts.clear()
        moved.clear()
        standing = DecidedMessages(topic, now_ms, found)
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
        return standing

    try:
        await BatchPart(context, topic, ids, decided).done(bucket)
    except Dropped:
        return Counter(), []
    return counts, moved


async def count_due(context: StoreContext, topic: Topic, edges_ms: Int64, held: bool) -> Int64:
    """`Store.count_due`: reads the timelines between the outer edges."""
    counts = np.zeros(max(0, len(edges_ms) - 1), dtype=np.int64)
    if not len(counts):
        return counts
    kind = HELD if held else FREE
    for start in range(0, topic.settings.buckets, MOST_AHEAD):
        numbers = range(start, min(start + MOST_AHEAD, topic.settings.buckets))
        heads = await context.partition.heads(topic.uid, numbers)
        parts = (_count(context, (topic.uid, at), kind, heads[at].floor(kind), edges_ms) for at in numbers)
        counts += sum(await asyncio.gather(*parts))
    return counts


async def _count(context: StoreContext, key: tuple[int, int], kind: int, floor_ms: int, edges_ms: Int64) -> Int64:
    # Cassandra does not read past all tombstones: before the floor and behind the last edge there may be many.
    counts, until_ms = np.zeros(len(edges_ms) - 1, dtype=np.int64), int(edges_ms[-1])
    from_ms = max(int(edges_ms[0]), floor_ms)
    if from_ms < until_ms:
        async for rows in _timeline(context, key, kind, from_ms, until_ms):
            times = np.array([row.at for row in rows], dtype=np.int64)
            counts += np.maximum(0, np.diff(np.searchsorted(times, edges_ms)))
    return counts


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
    """Return the first dues after `after_ms` on a bucket's two timelines; None if it changed in between."""
    found: list[int] = []
    for kind in (FREE, HELD):
        start_ms = max(head.floor(kind) - 1, after_ms)
        if start_ms < NOWHERE_MS - 1:
            rows = await context.partition.connected.read("timeline", *key, kind, start_ms, LAST_ID, 1)
            if any(row.last != head.last for row in rows):
                return None
            found += [row.at for row in rows]
    return found


# ── the sweep: what expired, remembered ids and dead letters past their time, orphaned contents ──


@dataclass(frozen=True, slots=True)
class SweepRange:
    """The part of an index that a sweep removes: entries of `kind` until `until_ms` whose message is `gone`."""

    kind: int
    until_ms: int
    gone: Callable[[CassandraRow], bool]


async def _orphans(context: StoreContext, topic: Topic, now_ms: int, limit: int) -> int:
    """Look on for orphaned contents, in one part of one bucket. Return how many were deleted."""
    bucket, part, after = context.looking.get(topic.uid, (0, 0, (b"", 0, 0)))
    connected = context.partition.connected
    rows = await connected.read("content_walk", topic.uid, bucket, part, *after, min(limit, SWEPT_AT_ONCE))
    old = [row for row in rows if row.put_ms <= now_ms - GRACE_MS]
    [known] = context.buckets.of(topic.uid, [bucket])

    async def attempt() -> dict[bytes, CassandraRow]:
        await context.partition.head(known)
        return await context.partition.find(known, list({row.id for row in old}))

    found = await settled_on(known, attempt) if old else {}
    orphans = [row for row in old if not _owned(row, found.get(row.id))]
    size = 1 if part == 0 else 1 << 20
    contents = [Content(bucket, row.id, row.birth & ((1 << 64) - 1), row.attempt, size) for row in orphans]
    context.contents.delete(topic.uid, contents)
    if len(rows) < min(limit, SWEPT_AT_ONCE):
        at = bucket * (PARTS + 1) + part + 1
        bucket, part = divmod(at % (topic.settings.buckets * (PARTS + 1)), PARTS + 1)
        after = (b"", 0, 0)
    else:
        after = (rows[-1].id, rows[-1].birth, rows[-1].attempt)
    context.looking[topic.uid] = (bucket, part, after)
    return len(orphans)


def _owned(row: object, stored: CassandraRow | None) -> bool:
    if stored is None or stored.message.remembered:
        return False
    return (signed(stored.message.birth), stored.attempt) == (row.birth, row.attempt)  # type: ignore[attr-defined]


async def sweep(context: StoreContext, topic: Topic, now_ms: int, limit: int) -> Swept:
    """`Store.sweep`."""
    limit, settings = max(1, limit), topic.settings

    def over(stored: CassandraRow) -> bool:
        message = stored.message
        free = state_of(message, now_ms) in (State.WAITING, State.AVAILABLE)
        return free and 0 < message.expires_ms <= now_ms

    def faded(stored: CassandraRow) -> bool:
        return stored.message.remembered and stored.settled_ms <= now_ms - settings.remember_ms

    def rotten(stored: CassandraRow) -> bool:
        return bool(stored.message.died_ms) and stored.message.died_ms <= now_ms - settings.dead_retention_ms

    ranges = [SweepRange(EXPIRES, now_ms, over), SweepRange(KEPT, now_ms - settings.remember_ms, faded)]
    if settings.dead_retention_ms:
        ranges.append(SweepRange(DEAD, now_ms - settings.dead_retention_ms, rotten))
    for bucket, kind in context.buckets.with_tombstones(topic.uid, MOST_TOMBSTONES):
        await _tidy(context, bucket, kind)
    removed, orphans, more = Counter[int](), 0, False
    try:
        for past in ranges:
            if await _remove(context, topic, now_ms, limit, past, removed):
                more = True
        orphans = await _orphans(context, topic, now_ms, limit)
        await records.clear_dropped(context.partition.connected)
    except StoreError as trouble:
        if not removed.total() and not orphans:
            raise
        log.warning("a sweep of %s ended early: %s", topic.name, trouble.detail)
        more = True  # the next sweep meets the trouble, if it lasts
    return Swept(removed[EXPIRES], removed[KEPT], removed[DEAD], orphans, more)


async def _tidy(context: StoreContext, bucket: Bucket, kind: int) -> None:
    """Make one deletion of all that lay in an index before its first entry."""

    async def attempt() -> None:
        if (await context.partition.head(bucket)).last is not None:
            rows = await context.partition.connected.read("timeline", *bucket.key, kind, *_FIRST, 1)
            for row in rows:
                bucket.agree(row)
            if not rows and await context.partition.confirm([bucket]):
                raise Changed
            end = (rows[0].at, rows[0].id) if rows else (NOWHERE_MS, b"")
            await context.partition.change(bucket, {}, cleared=(kind, _FIRST, end))
        bucket.tombstones[kind] = 0

    await settled_on(bucket, attempt)


async def _remove(
    context: StoreContext, topic: Topic, now_ms: int, limit: int, past: SweepRange, removed: Counter[int]
) -> bool:
    """Remove what is `past`, at most `limit`, and count it in `removed`. Return whether there may be more."""
    for bucket in context.buckets.of(topic.uid, await _with(context, topic, past)):
        after: Place | None = _FIRST
        while after is not None:
            if removed[past.kind] == limit:
                if await _entries(context, bucket, past, after, 1):
                    return True
                break
            count = min(limit - removed[past.kind], SWEPT_AT_ONCE)
            some, after = await _remove_some(context, topic, now_ms, bucket, past, after, count)
            removed[past.kind] += some
    return False


async def _with(context: StoreContext, topic: Topic, past: SweepRange) -> list[int]:
    """Return buckets that have something that may be past."""
    found: list[int] = []
    for start in range(0, topic.settings.buckets, HEADS_AT_ONCE):
        numbers = list(range(start, min(start + HEADS_AT_ONCE, topic.settings.buckets)))
        rows = await context.partition.connected.read("firsts", topic.uid, numbers, past.kind, past.until_ms)
        found += [row.bucket for row in rows]
    return found


async def _entries(context: StoreContext, bucket: Bucket, past: SweepRange, after: Place, count: int) -> list[Any]:
    """Return entries after one that may be past. Later ones are not read: tombstones lie there, too."""
    bounds = (*after, past.until_ms, LAST_ID)
    return await context.partition.connected.read("past", *bucket.key, past.kind, *bounds, count)


async def _remove_some(
    context: StoreContext, topic: Topic, now_ms: int, bucket: Bucket, past: SweepRange, after: Place, count: int
) -> tuple[int, Place | None]:
    """Remove what is past of the next `count` entries. Return how many, and where to go on (None: no more)."""

    async def attempt() -> tuple[list[CassandraRow], Place | None]:
        await context.partition.head(bucket)
        rows = await _entries(context, bucket, past, after, count + 1)
        for row in rows:
            bucket.agree(row)
        places: list[Place] = [(row.at, row.id) for row in rows]
        onward = places[count - 1] if len(places) > count else None
        found = await context.partition.find(bucket, [id for _, id in places[:count]]) if places else {}
        standing = DecidedMessages(topic, now_ms, found)
        for stored in standing.there():
            if past.gone(stored):
                if stored.message.remembered:
                    standing.forget(stored.id)
                else:
                    standing.remove(stored, remember=past.kind == EXPIRES)
        pairs = standing.pairs()
        # Entries in a row from where this look began are one deletion of a range. The next sweep looks from there too,
        # and would meet entries that were deleted one by one; Cassandra refuses a hundred thousand of them.
        run = list(takewhile(lambda place: place[1] in pairs, places[:count]))
        if pairs:
            cleared = (past.kind, beyond(after), beyond(run[-1])) if run else None
            await context.partition.change(bucket, pairs, cleared=cleared)
        return [before for before, _ in pairs.values() if before is not None], onward

    removed, onward = await settled_on(bucket, attempt)
    context.contents.delete(topic.uid, contents_of(bucket, removed))
    return len(removed), onward
