"""Buckets read, and changed by one conditional batch at a time.

Whoever changes a bucket writes a new random `last` under the condition that it still is what it was before. So all
that a change looked at is as it was, whoever else is at work, and each batch has one condition, whatever it holds; only
what is put for the first time has one of its own, so that it need not be looked for. Within a process one change of a
bucket is under way at a time; between processes the loser reads again and decides anew.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence

from timeline.storage_plugins.cassandra.bucket import (
    Bucket,
    Changed,
    Head,
    IndexChange,
    Pairs,
    Place,
    TimelinePrefix,
    beyond,
)
from timeline.storage_plugins.cassandra.rows import CassandraRow
from timeline.storage_plugins.cassandra.session import CassandraSession, Statement, WriteUnknown
from timeline.storage_plugins.cassandra.statements import FREE, HEAD, HELD, MESSAGE, SWEPT
from timeline.storage_plugins.contract import StoreUnavailable, StoreUnknown

AT_ONCE = 200
"""Messages of one batch."""
HEADS_AT_ONCE = 128
READ_AHEAD = 256
"""Entries of a timeline that are read at once: those of a lease, and of the next few."""
LAST_ID = b"\xff" * 256
"""Beyond any id."""


class AlreadyThere(Changed):
    """Something that was taken for absent is there: find it."""


class BucketAccess:
    """Reads and changes buckets over a session."""

    def __init__(self, connected: CassandraSession) -> None:
        self.connected = connected
        self._random = random.SystemRandom()

    def number(self) -> int:
        """A random number, not 0."""
        return 1 + self._random.getrandbits(62)

    async def head(self, bucket: Bucket) -> Head:
        """The head that is known, or as it stands."""
        if bucket.head is None:
            await self.confirm([bucket])
        assert bucket.head is not None
        return bucket.head

    async def confirm(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        """Reads the heads of buckets of one topic; answers those that are not, or were not, as they are known."""
        if not buckets:
            return []
        heads = await self.heads(buckets[0].topic, [bucket.number for bucket in buckets])
        return [bucket for bucket in buckets if bucket.meet(heads[bucket.number])]

    async def heads(self, topic: int, numbers: Sequence[int]) -> dict[int, Head]:
        """The heads of buckets of a topic as they stand."""
        heads = dict.fromkeys(numbers, Head())
        for start in range(0, len(numbers), HEADS_AT_ONCE):
            rows = await self.connected.read("heads", topic, list(numbers[start : start + HEADS_AT_ONCE]))
            heads.update({row.bucket: Head.of(row) for row in rows})
        return heads

    async def find(self, bucket: Bucket, ids: Sequence[bytes], whole: bool = False) -> dict[bytes, CassandraRow]:
        """Messages and remembered ids; `whole`: with what content lies beside them. Raises Changed."""
        found: dict[bytes, CassandraRow] = {}
        for start in range(0, len(ids), AT_ONCE):
            name, some = "find_whole" if whole else "find", list(ids[start : start + AT_ONCE])
            for row in await self.connected.read(name, *bucket.key, some):
                bucket.agree(row)
                found[row.id] = CassandraRow.of(row, whole)
        return found

    async def reach(self, bucket: Bucket, kind: int, limit: int, due_ms: int) -> TimelinePrefix:
        """The beginning of a timeline: its first `limit` entries at least, or all until `due_ms`. Raises Changed."""
        head = await self.head(bucket)
        known = bucket.reached(kind, limit, due_ms)
        if known is None:
            count = max(limit, min(bucket.room, READ_AHEAD))
            rows = await self.connected.read("timeline", *bucket.key, kind, head.floor(kind) - 1, LAST_ID, count)
            for row in rows:
                bucket.agree(row)
            if not rows and await self.confirm([bucket]):
                raise Changed  # Where there is no row, none tells of which state that is.
            entries: list[Place] = [(row.at, row.id) for row in rows]
            whole = len(rows) < count
            known = TimelinePrefix(entries, None if whole else beyond(entries[-1]))
            bucket.prefixes[kind] = known
        return known

    async def change(
        self,
        bucket: Bucket,
        pairs: Pairs,
        absent: Collection[bytes] = (),
        cleared: tuple[int, Place, Place] | None = None,
    ) -> None:
        """Makes it so, on the state that `bucket.head` names; the caller holds its lock. `absent`: of ids that nobody
        looked for, but takes for free. `cleared`: (kind, first, end) of an index of which all goes that is there.
        Raises Changed when that state has passed, AlreadyThere when one of those ids is there, StoreUnknown when it
        cannot be told whether it was done."""
        head, change = await self.head(bucket), IndexChange.of(pairs)
        after = change.prefixes(bucket)
        floors: dict[int, int] = {}
        for kind in (FREE, HELD):
            come = [at for where, at, _ in change.come if where == kind]
            floors[kind] = after[kind].floor if kind in after else min([head.floor(kind), *come])
        cuts = change.cuts(bucket)
        if cleared is not None:
            cuts.append(cleared)
            kind, first, end = cleared
            change.gone -= {entry for entry in change.gone if entry[0] == kind and first <= entry[1:] < end}
        rest: list[Statement] = [("cut", (*bucket.key, kind, *first, *end)) for kind, first, end in cuts]
        rest += [("remove", (*bucket.key, *entry)) for entry in change.gone]
        rest += [("index", (*bucket.key, *entry)) for entry in change.come]
        rest += [_stated(bucket, id, before, stands, id in absent) for id, (before, stands) in pairs.items()]
        if head.last is None:
            rest.append(("index", (*bucket.key, HEAD, 0, b"")))
        number = await self._claim(bucket, head, floors, rest, bool(absent))
        bucket.tombstones.update(kind for kind, _, _ in change.gone if kind in SWEPT)
        bucket.became(Head(number, floors[FREE], floors[HELD]), after, pairs)

    async def _claim(
        self, bucket: Bucket, head: Head, floors: Mapping[int, int], rest: list[Statement], presumes: bool
    ) -> int:
        """Sends the batch; answers its number. Where the answer is lost, the bucket is read back; where nothing has
        happened by then it is sent again: one of them may still be under way, and both have the same condition, so
        that one passes."""
        tried: list[int] = []
        trouble = ""
        for _ in range(2):
            tried.append(self.number())
            claim: Statement = ("claim", (tried[-1], floors[FREE], floors[HELD], *bucket.key, head.last))
            try:
                rows = await self.connected.write([claim, *rest])
                if rows[0][0]:
                    return tried[-1]
                stands = next((row.last for row in rows if getattr(row, "last", None) is not None), None)
            except WriteUnknown as doubt:
                trouble = str(doubt)
                stands = await self._read_back(bucket, trouble)
            except StoreUnavailable as error:
                bucket.forget()
                if trouble:
                    raise StoreUnknown(f"a change was sent and its answer lost ({trouble}), then: {error}") from error
                raise
            except BaseException:
                bucket.forget()
                raise
            if stands in tried:
                return int(stands)
            if stands != head.last or not trouble:
                break
        bucket.forget()
        if trouble:
            raise StoreUnknown(f"a change was sent and its answer lost ({trouble}); the bucket has changed since")
        raise AlreadyThere if presumes and stands == head.last else Changed

    async def _read_back(self, bucket: Bucket, trouble: str) -> int | None:
        try:
            rows = await self.connected.read("head", *bucket.key, serial=True)
        except StoreUnavailable as error:
            bucket.forget()
            raise StoreUnknown(f"a change was sent and its answer lost ({trouble}), then: {error}") from error
        return rows[0].last if rows else None


def _stated(
    bucket: Bucket, id: bytes, before: CassandraRow | None, after: CassandraRow | None, absent: bool
) -> Statement:
    """What makes a message stand as `after`. Its content is written with it once, and taken away with what is only
    remembered."""
    if after is None:
        return "remove", (*bucket.key, MESSAGE, 0, id)
    same = before is not None and (before.attempt, before.message.birth) == (after.attempt, after.message.birth)
    if same and not after.message.remembered:
        return "restate", (*bucket.key, id, after.fields())
    payload, headers = after.content if after.content is not None and after.inline else (None, None)
    return "store_new" if absent else "store", (*bucket.key, id, after.fields(), payload, headers)
