"""The sweep: what expired, what is remembered no longer, dead letters past their retention, contents of nobody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from timeline.leases import state_of
from timeline.model import State, Topic
from timeline.storage_plugins.cassandra import records
from timeline.storage_plugins.cassandra.bucket import NOWHERE_MS, Bucket, Changed, Place, beyond
from timeline.storage_plugins.cassandra.changes import DecidedMessages, StoreContext, contents_of, settled_on
from timeline.storage_plugins.cassandra.contents import Content
from timeline.storage_plugins.cassandra.partition import HEADS_AT_ONCE, LAST_ID
from timeline.storage_plugins.cassandra.rows import CassandraRow, signed
from timeline.storage_plugins.cassandra.statements import DEAD, EXPIRES, KEPT, PARTS
from timeline.storage_plugins.contract import Swept

GRACE_MS = 10 * 60_000
"""Older than any put's deadline."""
LOOKED_AT = 200
MOST_TOMBSTONES = 2_000
"""So many deletions in an index of a bucket are made one. What is acknowledged before its expiry, or purged, leaves
them, and a read that meets a hundred thousand is refused."""
_FIRST: Place = (-(1 << 62), b"")
"""Before any entry."""


@dataclass(frozen=True, slots=True)
class SweepRange:
    """What goes along an index: of the entries of `kind` until `until_ms` those whose message is `gone`."""

    kind: int
    until_ms: int
    gone: Callable[[CassandraRow], bool]


async def _orphans(context: StoreContext, topic: Topic, now_ms: int, limit: int) -> int:
    """Looks on for contents of nobody, in one part of one bucket at a time; answers how many were deleted."""
    bucket, part, after = context.looking.get(topic.uid, (0, 0, (b"", 0, 0)))
    connected = context.partition.connected
    rows = await connected.read("content_walk", topic.uid, bucket, part, *after, min(limit, LOOKED_AT))
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
    if len(rows) < min(limit, LOOKED_AT):
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

    for bucket, kind in context.buckets.with_tombstones(topic.uid, MOST_TOMBSTONES):
        await _tidy(context, bucket, kind)
    expired, more = await _remove(context, topic, now_ms, limit, SweepRange(EXPIRES, now_ms, over))
    since_ms = now_ms - settings.remember_ms
    forgotten, more_kept = await _remove(context, topic, now_ms, limit, SweepRange(KEPT, since_ms, faded))
    dead, more_dead = 0, False
    if settings.dead_retention_ms:
        until_ms = now_ms - settings.dead_retention_ms
        dead, more_dead = await _remove(context, topic, now_ms, limit, SweepRange(DEAD, until_ms, rotten))
    swept = await _orphans(context, topic, now_ms, limit)
    await records.clear_dropped(context.partition.connected)
    return Swept(expired, forgotten, dead, swept, more or more_kept or more_dead)


async def _tidy(context: StoreContext, bucket: Bucket, kind: int) -> None:
    """Makes one deletion of all that lay in an index before what comes first there."""

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


async def _remove(context: StoreContext, topic: Topic, now_ms: int, limit: int, past: SweepRange) -> tuple[int, bool]:
    """Removes what is `past`, at most `limit`; answers how many, and whether there may be more."""
    removed = 0
    for bucket in context.buckets.of(topic.uid, await _with(context, topic, past)):
        after: Place | None = _FIRST
        while after is not None:
            if removed == limit:
                if await _entries(context, bucket, past, after, 1):
                    return removed, True
                break
            count = min(limit - removed, LOOKED_AT)
            some, after = await _remove_some(context, topic, now_ms, bucket, past, after, count)
            removed += some
    return removed, False


async def _with(context: StoreContext, topic: Topic, past: SweepRange) -> list[int]:
    """Buckets that have something that may be past."""
    found: list[int] = []
    for start in range(0, topic.settings.buckets, HEADS_AT_ONCE):
        numbers = list(range(start, min(start + HEADS_AT_ONCE, topic.settings.buckets)))
        rows = await context.partition.connected.read("firsts", topic.uid, numbers, past.kind, past.until_ms)
        found += [row.bucket for row in rows]
    return found


async def _entries(context: StoreContext, bucket: Bucket, past: SweepRange, after: Place, count: int) -> list[Any]:
    """Entries after one that may be past. What is not yet is not looked at: tombstones lie there, too."""
    bounds = (*after, past.until_ms, LAST_ID)
    return await context.partition.connected.read("past", *bucket.key, past.kind, *bounds, count)


async def _remove_some(
    context: StoreContext, topic: Topic, now_ms: int, bucket: Bucket, past: SweepRange, after: Place, count: int
) -> tuple[int, Place | None]:
    """Removes what is past of the next `count` entries; answers how many, and after which to go on (None: no more)."""

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
        # What goes from where this look began is one deletion of a range: the next sweep looks from there again, and
        # an entry deleted by itself would be met until it is compacted, a hundred thousand of them not at all.
        run = list(takewhile(lambda place: place[1] in pairs, places[:count]))
        if pairs:
            cleared = (past.kind, beyond(after), beyond(run[-1])) if run else None
            await context.partition.change(bucket, pairs, cleared=cleared)
        return [before for before, _ in pairs.values() if before is not None], onward

    removed, onward = await settled_on(bucket, attempt)
    context.contents.delete(topic.uid, contents_of(bucket, removed))
    return len(removed), onward
