"""Walks over (bucket, id), leases of a holder, counts, and sweeps. A cursor: bucket (4 bytes) and last id."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from timeline.columns import Int64
from timeline.leases import Ask, decide
from timeline.model import Answers, Operation, Rows, Status, Topic, bucket_of
from timeline.storage_plugins.asks import cursor_at, matches, place_of, places_of, tag_ask
from timeline.storage_plugins.contract import Page, ScanFilter, StoreError, StoreFull, Swept, TagMutation, TagStep
from timeline.storage_plugins.errors import gravest
from timeline.storage_plugins.redis import scripts
from timeline.storage_plugins.redis.changes import BucketKeys, Items, RedisCall, all_of, left_of
from timeline.storage_plugins.redis.records import KEPT, KIND_AT, RedisRow, heads_of, rows_of, unpack

PAGE_BYTES = 1024 * 1024
WALKED_AT_ONCE = 64
"""Buckets that a walk reads together."""
ORDERED_AT_ONCE = 2_000
"""Ids of a bucket that one script puts in order, in a few milliseconds."""
ORDER_KEPT_MS = 600_000
"""How long after a walk its order is maintained."""
LOOKED_AT = 1_000
"""Leases that one script looks through for a holder's."""
COUNTED_BUCKETS, COUNTED_STEPS = 64, 64
"""What one script counts, in a few milliseconds."""


async def _walk(
    keys: BucketKeys, tag: bytes, cursor: bytes, limit: int
) -> tuple[list[bytes], list[bytes], bytes | None]:
    """Return the next ids of the walk, at most `limit`, their values, and where it goes on."""
    bucket, last = place_of(cursor)
    buckets = keys.topic.settings.buckets
    ids: list[bytes] = []
    values: list[bytes] = []
    # Buckets that are read by calls of their own may together exceed the limit: few first, then more.
    width = 1 if tag or keys.server.cluster else WALKED_AT_ONCE
    while bucket < buckets and len(ids) < limit:
        chosen = range(bucket, min(buckets, bucket + width))
        width = min(4 * width, WALKED_AT_ONCE)
        read = _read_tagged if tag else _read_bucket
        for listed, packed in await read(keys, chosen, tag, last, limit - len(ids)):
            room = limit - len(ids)
            ids += listed[:room]
            values += packed[:room]
            if len(listed) >= room:
                return ids, values, cursor_at(bucket, ids[-1])
            bucket, last = bucket + 1, b""
    return ids, values, None


async def _read_tagged(
    keys: BucketKeys, buckets: Sequence[int], tag: bytes, last: bytes, limit: int
) -> list[tuple[list[bytes], list[bytes]]]:
    """Return what carries the tag, of each bucket. `last`: the id after which to go on in the first."""
    start = bytes([len(tag)]) + tag
    calls = [
        ([keys.base(bucket)], (start, last if bucket == buckets[0] else b"", limit)) for bucket in buckets
    ]  # fmt: skip
    return [(ids, packed) for ids, packed in all_of(await keys.server.run_each(scripts.TAGGED, calls))]


async def _read_bucket(
    keys: BucketKeys, buckets: Sequence[int], _: bytes, last: bytes, limit: int
) -> list[tuple[list[bytes], list[bytes]]]:
    """Return the ids of the first bucket, and of those after it that come along."""
    found: list[tuple[list[bytes], list[bytes]]] = []
    while not found:
        # On a cluster each bucket is read by itself; the caller cuts off what exceeds the limit.
        groups = keys.groups(buckets)
        args = (limit, ORDERED_AT_ONCE, ORDER_KEPT_MS)
        calls = [
            ([keys.base(bucket) for bucket in group], (*args, last if group[0] == buckets[0] else b""))
            for group in groups
        ]
        try:
            answers = all_of(await keys.server.run_each(scripts.WALK, calls))
        except StoreFull:
            return [await _read_unordered(keys, buckets[0], last, limit)]
        for answer in answers:
            done = [(ids, values) for ordered, ids, values in answer if ordered]
            found += done
            if len(done) < len(answer):
                break
    return found


async def _read_unordered(keys: BucketKeys, bucket: int, last: bytes, limit: int) -> tuple[list[bytes], list[bytes]]:
    """Return the same of one bucket, from a server that takes no writes and so keeps no order of ids. Each page looks
    through the whole bucket."""
    base = keys.base(bucket)
    cursor, found = b"0", dict[bytes, bytes]()
    while True:
        cursor, listed = await keys.server.at(base, "HSCAN", base, cursor, "COUNT", ORDERED_AT_ONCE)
        pairs = zip(listed[::2], listed[1::2], strict=True)
        found.update((id, packed) for id, packed in pairs if id > last and packed[KIND_AT] < KEPT)
        ids = heapq.nsmallest(limit, found)
        found = {id: found[id] for id in ids}
        if cursor == b"0":
            return ids, list(found.values())


async def _page(keys: BucketKeys, ids: list[bytes], values: list[bytes], payload: bool, onward: bytes | None) -> Page:
    """Return a page of these rows; with payloads it ends near PAGE_BYTES."""
    if not ids:
        return Page(Rows.empty(payload), onward)
    if not payload:
        return Page(rows_of(ids, values), onward)
    heads = heads_of(values)
    sizes = np.cumsum(heads["payload_bytes"].astype(np.int64) + heads["headers_bytes"])
    count = max(1, int(np.searchsorted(sizes, PAGE_BYTES, "right")))
    if count < len(ids):
        ids, values = ids[:count], values[:count]
        onward = cursor_at(bucket_of(ids[-1], keys.topic.settings.buckets), ids[-1])
    return Page(rows_of(ids, values, await _contents(keys, ids)), onward)


async def _contents(keys: BucketKeys, ids: list[bytes]) -> list[bytes]:
    """Return payload and headers of each, back to back; empty if they are gone."""
    places: dict[int, list[int]] = {}
    for at, id in enumerate(ids):
        places.setdefault(bucket_of(id, keys.topic.settings.buckets), []).append(at)
    found = [b""] * len(ids)

    async def read(bucket: int, members: list[int]) -> None:
        base = keys.base(bucket)
        fields = [ids[at] for at in members]
        for at, content in zip(members, await keys.server.at(base, "HMGET", base + b":p", *fields), strict=True):
            found[at] = content or b""

    await asyncio.gather(*(read(bucket, members) for bucket, members in places.items()))
    return found


async def scan(keys: BucketKeys, now_ms: int, where: ScanFilter, cursor: bytes, limit: int, payload: bool) -> Page:
    """`Store.scan`."""
    limit = max(1, limit)
    if where.ids is not None:
        places, onward = places_of(where.ids, keys.topic.settings.buckets, cursor, limit)
        ids = [id for _, id in places]
        values = await keys.fetch(ids) if ids else []
    else:
        ids, values, onward = await _walk(keys, where.tag, cursor, limit)
    chosen = []
    for at, value in enumerate(values):
        if value:
            stored = unpack(value)
            if not stored.message.remembered and matches(where, stored.message, stored.tag, now_ms):
                chosen.append(at)
    return await _page(keys, [ids[at] for at in chosen], [values[at] for at in chosen], payload, onward)


async def held_by(keys: BucketKeys, now_ms: int, holder: bytes, cursor: bytes, limit: int) -> Page:
    """`Store.held_by`: walks the leases of a bucket by their ends. An extended lease may come twice, but is never
    missed. The cursor is the bucket, the end (8 bytes) and the id."""
    limit, buckets = max(1, limit), keys.topic.settings.buckets
    bucket, rest = place_of(cursor)
    due, last = (str(int.from_bytes(rest[:8], "big")).encode(), rest[8:]) if rest else (b"", b"")
    ids: list[bytes] = []
    values: list[bytes] = []
    while holder and bucket < buckets and len(ids) < limit:
        if not last:
            bucket = await _next_with_leases(keys, bucket, now_ms)
            if bucket == buckets:
                break
        args = (now_ms, holder, due, last, LOOKED_AT, limit - len(ids))
        found, packed, due, last = await keys.server.run(scripts.HELD_BY, [keys.base(bucket)], args)
        ids += found
        values += packed
        bucket += not last
    onward = None
    if last:
        onward = _held_cursor(bucket, int(float(due)), last)
    elif holder and bucket < buckets:
        onward = cursor_at(bucket, b"")
    page = await _page(keys, ids, values, True, onward)
    if len(page.rows) < len(ids):
        cut = len(page.rows) - 1
        return Page(page.rows, _held_cursor(bucket_of(ids[cut], buckets), int(page.rows.due_ms[cut]), ids[cut]))
    return page


def _held_cursor(bucket: int, due_ms: int, id: bytes) -> bytes:
    return cursor_at(bucket, due_ms.to_bytes(8, "big") + id)


async def _next_with_leases(keys: BucketKeys, bucket: int, now_ms: int) -> int:
    """Return the first bucket from this one on that has a lease; the number of buckets if none has."""
    rest = range(bucket, keys.topic.settings.buckets)
    bases = [keys.base(at) for at in rest]
    counts = await keys.server.at_each([(key, ("ZCOUNT", key + b":h", b"(%d" % now_ms, "+inf")) for key in bases])
    return next((at for at, count in zip(rest, counts, strict=True) if count), keys.topic.settings.buckets)


async def count_due(keys: BucketKeys, edges_ms: Int64, held: bool) -> Int64:
    """`Store.count_due`."""
    counts = np.zeros(max(0, len(edges_ms) - 1), dtype=np.int64)
    most = keys.topic.settings.buckets
    for start in range(0, most, COUNTED_BUCKETS):
        buckets = range(start, min(start + COUNTED_BUCKETS, most))
        for step in range(0, len(counts), COUNTED_STEPS):
            edges = edges_ms[step : step + COUNTED_STEPS + 1].tolist()
            for _, part in await keys.each(scripts.COUNT, buckets, b":h" if held else b":f", *edges):
                counts[step : step + COUNTED_STEPS] += np.array(part, dtype=np.int64)
    return counts


async def next_due(keys: BucketKeys, buckets: Sequence[int] | None, after_ms: int) -> int | None:
    """`Store.next_due`."""
    answers = await keys.each(scripts.SOONEST, buckets, b"(%d" % after_ms)
    return min((int(float(time)) for _, times in answers for time in times if time), default=None)


@dataclass(slots=True)
class _TagCall(RedisCall):
    """A tag operation on the messages of a walk. `passed`: those that it does not take."""

    mutation: TagMutation = field(kw_only=True)
    passed: set[int] = field(default_factory=set)

    def ask(self, at: int, stored: RedisRow | None) -> Ask | None:
        message, mutation = stored.message if stored else None, self.mutation
        if (
            stored is None
            or message is None
            or stored.tag != mutation.tag
            or not mutation.meets(stored.put_ms, message.asked_ms, message.last_op)
        ):
            self.passed.add(at)
            return None
        ask = tag_ask(mutation, message)
        if ask is None:
            self.answers.status[at] = Status.INVALID.code
        return ask


async def mutate_tag(keys: BucketKeys, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
    """`Store.mutate_tag`."""
    if not mutation.tag:
        return TagStep({}, None)
    ids, values, onward = await _walk(keys, mutation.tag, cursor, max(1, limit))
    call = _TagCall(keys, now_ms, ids, Answers.blank(len(ids)), dry_run=mutation.dry_run, mutation=mutation)
    await call.decide(range(len(ids)), dict(enumerate(values)))
    if call.troubles:
        raise gravest(call.troubles, call.written)
    if call.gone:
        return TagStep({}, None)
    taken = [at for at in range(len(ids)) if at not in call.passed]
    status, due_ms = call.answers.status[taken], call.answers.due_ms[taken]
    moves = mutation.operation is Operation.MOVE and not mutation.dry_run
    moved = due_ms[status == Status.OK.code].tolist() if moves else []
    return TagStep(dict(Counter(status.tolist())), onward, min(moved, default=None))


async def sweep(keys: BucketKeys, now_ms: int, limit: int) -> Swept:
    """`Store.sweep`. There are no payloads without metadata: one script writes and removes both."""
    limit, settings = max(1, limit), keys.topic.settings
    until = {b":e": now_ms, b":k": now_ms - settings.remember_ms}
    if settings.dead_retention_ms:
        until[b":x"] = now_ms - settings.dead_retention_ms
    removed: Counter[bytes] = Counter()
    more = False
    for suffix, until_ms in until.items():
        try:
            found, full = await _past(keys, suffix, until_ms, now_ms, limit)
        except StoreError as error:
            if removed.total():
                raise gravest([error], True) from error
            raise
        more |= full or len(found) > limit
        items = Items()
        for change in found[:limit]:
            items.add(*change)
        if len(items):
            outcome = await keys.change(items)
            removed[suffix] = 0 if outcome.gone else len(items) - len(outcome.stands) - len(outcome.failed)
            if outcome.failed:
                raise gravest(outcome.failed.values(), removed.total() > 0)
    return Swept(removed[b":e"], removed[b":k"], removed[b":x"], 0, more)


async def _past(
    keys: BucketKeys, suffix: bytes, until_ms: int, now_ms: int, limit: int
) -> tuple[list[tuple[bytes, bytes, bytes]], bool]:
    """Return what a sweep removes of a sorted set (id, value, what is left), and whether there may be more."""
    found: list[tuple[bytes, bytes, bytes]] = []
    # Some that are past their expiry are held: what is looked at grows until enough is found.
    look, full = limit // keys.topic.settings.buckets + 16, True
    while full and len(found) < limit:
        found, full = [], False
        for _, answer in await keys.each(scripts.RANGE, None, look, suffix, until_ms):
            for ids, values in answer:
                full |= len(ids) == look
                for id, value in zip(ids, values, strict=True):
                    left = _swept(suffix, value, now_ms, keys.topic)
                    if left is not None:
                        found.append((id, value, left))
        look *= 2
    return found, full


def _swept(suffix: bytes, value: bytes | None, now_ms: int, topic: Topic) -> bytes | None:
    """Return what a sweep leaves of a value; None where it stays."""
    if not value:
        return None
    if suffix != b":e":
        return b""
    stored = unpack(value)
    ask = Ask(Operation.CANCEL, group=stored.message.group)
    decision = decide(stored.message, ask, now_ms, topic.settings)
    if decision.status is not Status.EXPIRED:
        return None
    return left_of(stored, ask, decision, now_ms, topic.settings) or b""


__all__ = ["count_due", "held_by", "mutate_tag", "next_due", "scan", "sweep"]
