"""Buckets: what this process knows of each, and how it is read and changed by one conditional batch at a time.

A process knows a bucket's head, the beginnings of its two timelines, and the messages on these, all of one state: the
one that `head.last` names. It is only a copy, and may be forgotten at any time.

A change writes a new random `last`, on the condition that `last` still is what it was before. So what the change looked
at still stands, whoever else is at work, and a batch has one condition, whatever it holds. Only a message that is put
for the first time has a condition of its own, so that it need not be looked for. What is answered without a change is
confirmed by reading the head alone. Within a process one change of a bucket is under way at a time. Between processes
the loser reads again and decides again.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from timeline.storage_plugins.cassandra.rows import CassandraRow, Entry
from timeline.storage_plugins.cassandra.session import CassandraSession, Statement, Tombstoned, WriteUnknown
from timeline.storage_plugins.cassandra.statements import FREE, HEAD, HELD, MESSAGE, SWEPT
from timeline.storage_plugins.contract import StoreUnavailable, StoreUnknown

NOWHERE_MS = 1 << 62
"""The floor of an empty timeline."""
KNOWN_ENTRIES = 32_000
"""The most entries of timelines that one process knows, over all buckets."""
MOST_OF_ONE, FEWEST_OF_ONE = 1_000, 16
PASSED = 16
"""States of a bucket that are remembered: a read may find one of them while this process goes on."""
WORTH_CUTTING = 3
"""From this number of entries in a row, one deletion of a range replaces one each."""

AT_ONCE = 200
"""Messages of one batch."""
HEADS_AT_ONCE = 128
READ_AHEAD = 256
"""Entries of a timeline that are read at once: for a lease and the next few."""
LAST_ID = b"\xff" * 256
"""Beyond any id."""
SEEN_BEYOND_MS = 60_000
"""How far beyond the wanted due time a timeline is read if too much was deleted from it to read on."""
ID_BITS = 8 * 64
SMALLER, LARGER = 16, 4
"""Bits by which a part gets smaller if too much was deleted there, and larger if not."""

Place = tuple[int, bytes]
"""(due, id): a place on a timeline."""
Pairs = Mapping[bytes, tuple[CassandraRow | None, CassandraRow | None]]
"""By id the message before and after a change."""


def beyond(place: Place) -> Place:
    """Return the first place after one."""
    return place[0], place[1] + b"\0"


def _number(place: Place) -> int:
    """Return a place as a number that grows with it. Ids that differ after ID_BITS have the same."""
    at, id = place
    return (at << ID_BITS) + int.from_bytes(id[: ID_BITS // 8].ljust(ID_BITS // 8, b"\0"), "big")


def _numbered(number: int) -> Place:
    return number >> ID_BITS, (number & ((1 << ID_BITS) - 1)).to_bytes(ID_BITS // 8, "big")


@dataclass(frozen=True, slots=True)
class Head:
    """A bucket's own row: the batch that changed it last (None: none ever did), and the floors of its timelines, below
    which they are empty."""

    last: int | None = None
    floor_free: int = NOWHERE_MS
    floor_held: int = NOWHERE_MS

    @classmethod
    def of(cls, row: Any) -> Head:
        return cls(row.last, row.floor_free, row.floor_held)

    def floor(self, kind: int) -> int:
        return self.floor_free if kind == FREE else self.floor_held


class Changed(Exception):
    """The bucket was changed since it was read: read again."""


@dataclass(slots=True)
class TimelinePrefix:
    """The first entries of a timeline, in order: all before `until` (None: all)."""

    entries: list[Place]
    until: Place | None

    @property
    def floor(self) -> int:
        """Return the due below which the timeline is empty."""
        if self.entries:
            return self.entries[0][0]
        return self.until[0] if self.until is not None else NOWHERE_MS

    def covers(self, place: Place) -> bool:
        """Return whether an entry there would be known."""
        return self.until is None or place < self.until

    def changed(self, gone: Collection[Place], come: Iterable[Place], room: int) -> TimelinePrefix:
        """Return it without `gone` and with `come`, at most `room` entries."""
        entries = [place for place in self.entries if place not in gone]
        entries += [place for place in come if self.covers(place)]
        entries.sort()
        if len(entries) > room:
            return TimelinePrefix(entries[:room], entries[room])
        return TimelinePrefix(entries, self.until)

    def runs(self, gone: Collection[Place], come: Collection[Place]) -> Iterator[tuple[Place, Place]]:
        """Yield ranges (first, end) worth one deletion. They hold only entries of `gone`. Nothing comes into them by
        the same batch, as that would be deleted, too."""
        for removed, run in groupby(self.entries, key=gone.__contains__):
            places = list(run)
            if removed and len(places) >= WORTH_CUTTING:
                first, end = places[0], beyond(places[-1])
                if not any(first <= place < end for place in come):
                    yield first, end


@dataclass(slots=True, eq=False)
class Bucket:
    """One bucket. `head` may be old, but is never newer than what is read afterwards.

    A change reads it under `lock`. A lease looks without the lock, and may note what a head alone says of a timeline.
    `room`: entries to know of each timeline. `tombstones`: deletions that this process has left in each index of
    sweeps, since they were last made one. `waiting`: parts of calls that ask for a change. `asked`: messages of those
    and of the batch under way. `leases`: how many of them lease, or wait for the lock to do so. `passed`: the last few
    states that this process has changed."""

    topic: int
    number: int
    head: Head | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    room: int = MOST_OF_ONE
    tombstones: Counter[int] = field(default_factory=Counter)
    waiting: list[Any] = field(default_factory=list)
    asked: int = 0
    leases: int = 0
    passed: deque[int | None] = field(default_factory=lambda: deque(maxlen=PASSED))
    prefixes: dict[int, TimelinePrefix] = field(default_factory=dict)
    messages: dict[bytes, CassandraRow] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, int]:
        return self.topic, self.number

    def wait(self, part: Any) -> None:
        """Add a part of a call that waits for a change."""
        self.waiting.append(part)
        self.asked += len(part.ids)
        self.leases += part.leases

    def take(self, parts: Collection[Any]) -> None:
        """Take parts into a batch; they count as asked until `end`."""
        chosen = set(parts)
        self.waiting = [part for part in self.waiting if part not in chosen]

    def end(self, parts: Collection[Any]) -> None:
        """Note that parts that were taken are done or failed."""
        self.asked -= sum(len(part.ids) for part in parts)
        self.leases -= sum(part.leases for part in parts)

    def give_up(self, part: Any) -> None:
        """Remove a part that its call has given up. If it was taken, it is done all the same."""
        if part in self.waiting:
            self.take([part])
            self.end([part])

    def forget(self) -> None:
        """Forget all of it."""
        self.head, self.prefixes, self.messages = None, {}, {}
        self.passed.clear()

    def meet(self, head: Head) -> bool:
        """Note the head that was read. Return whether it differs from the known one."""
        if self.head is not None and self.head.last == head.last:
            return False
        self.forget()
        self.head = head
        self.prefixes = {kind: TimelinePrefix([], None) for kind in (FREE, HELD) if head.floor(kind) >= NOWHERE_MS}
        return True

    def current(self, head: Head) -> bool:
        """Return whether what is known is of the state that was read, or of a later one."""
        return self.head is not None and (self.head.last == head.last or head.last in self.passed)

    def reached(self, kind: int, limit: int, due_ms: int) -> TimelinePrefix | None:
        """Return the beginning of a timeline, if `limit` entries or all until `due_ms` are known."""
        known = self.prefixes.get(kind)
        if known is None and self.head is not None and self.head.floor(kind) > due_ms:
            # The floor says that nothing is due, without a read of tombstones.
            known = self.prefixes[kind] = TimelinePrefix([], (self.head.floor(kind), b""))
        if known is None or not (known.until is None or len(known.entries) >= limit or known.until[0] > due_ms):
            return None
        return known

    def agree(self, row: Any) -> None:
        """Raise Changed if `row` is of another state than the known head."""
        if self.meet(Head.of(row)):
            raise Changed

    def keep(self, stored: Iterable[CassandraRow]) -> None:
        """Keep those messages that lie on a known prefix."""
        for one in stored:
            kind, place = HELD if one.message.holder else FREE, (one.message.due_ms, one.id)
            known = self.prefixes.get(kind)
            lives = not one.message.died_ms and not one.message.remembered
            if lives and one.whole and known is not None and known.covers(place):
                self.messages[one.id] = one

    def became(self, head: Head, prefixes: dict[int, TimelinePrefix], pairs: Pairs) -> None:
        """Note a change that was made."""
        if self.head is not None:
            self.passed.append(self.head.last)
        self.head, self.prefixes = head, prefixes
        for id in pairs:
            self.messages.pop(id, None)
        self.keep(after for _, after in pairs.values() if after is not None)
        if len(self.messages) > sum(len(known.entries) for known in prefixes.values()):
            on = {id for known in prefixes.values() for _, id in known.entries}
            self.messages = {id: one for id, one in self.messages.items() if id in on}


@dataclass(slots=True)
class IndexChange:
    """The effect of a batch on the indexes of a bucket."""

    gone: set[Entry]
    come: set[Entry]

    @classmethod
    def of(cls, pairs: Pairs) -> IndexChange:
        """Return the change. An entry that stays is in neither set: in one batch a removal would win."""
        change = cls(set(), set())
        for before, after in pairs.values():
            old = before.entries() if before is not None else set()
            new = after.entries() if after is not None else set()
            change.gone |= old - new
            change.come |= new - old
        return change

    def prefixes(self, bucket: Bucket) -> dict[int, TimelinePrefix]:
        """Return what is known of the timelines afterwards."""
        after: dict[int, TimelinePrefix] = {}
        for kind, known in bucket.prefixes.items():
            after[kind] = known.changed(_on(kind, self.gone), _on(kind, self.come), bucket.room)
        return after

    def cuts(self, bucket: Bucket) -> list[tuple[int, Place, Place]]:
        """Return ranges to delete, as (kind, first, end). Their entries leave `gone`."""
        found: list[tuple[int, Place, Place]] = []
        for kind, known in bucket.prefixes.items():
            mine = _on(kind, self.gone)
            for first, end in known.runs(mine, _on(kind, self.come)):
                found.append((kind, first, end))
                self.gone -= {(kind, *place) for place in mine if first <= place < end}
        return found


def _on(kind: int, entries: set[Entry]) -> set[Place]:
    return {(at, id) for where, at, id in entries if where == kind}


class Buckets:
    """The buckets that this process knows."""

    def __init__(self) -> None:
        self._known: dict[int, dict[int, Bucket]] = {}
        self._count = 0

    def of(self, topic: int, numbers: Iterable[int]) -> list[Bucket]:
        """Return buckets of a topic, in ascending order."""
        known, wanted = self._known.setdefault(topic, {}), sorted(set(numbers))
        for at in wanted:
            if at not in known:
                known[at] = Bucket(topic, at)
                self._count += 1
        room = min(MOST_OF_ONE, max(FEWEST_OF_ONE, KNOWN_ENTRIES // max(1, self._count)))
        found = [known[at] for at in wanted]
        for bucket in found:
            bucket.room = room
        return found

    def with_tombstones(self, topic: int, least: int) -> list[tuple[Bucket, int]]:
        """Return a topic's buckets and indexes with at least this number of tombstones."""
        mine = self._known.get(topic, {}).values()
        return [(bucket, kind) for bucket in mine for kind, count in bucket.tombstones.items() if count >= least]

    def topics(self) -> set[int]:
        """Return the topics that have buckets here."""
        return set(self._known)

    def forget(self, topic: int) -> None:
        """Forget a topic that was dropped."""
        self._count -= len(self._known.pop(topic, {}))


# ── reading and changing ──


class AlreadyThere(Changed):
    """A message that was presumed absent is there: find it."""


class BucketAccess:
    """Reads and changes buckets through a session."""

    def __init__(self, connected: CassandraSession) -> None:
        self.connected = connected
        self._random = random.SystemRandom()

    def number(self) -> int:
        """Return a random number, not 0."""
        return 1 + self._random.getrandbits(62)

    async def head(self, bucket: Bucket) -> Head:
        """Return the known head; read it if none is known."""
        if bucket.head is None:
            await self.confirm([bucket])
        assert bucket.head is not None
        return bucket.head

    async def confirm(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        """Read the heads of buckets of one topic. Return those that differ from what is known."""
        if not buckets:
            return []
        heads = await self.heads(buckets[0].topic, [bucket.number for bucket in buckets])
        return [bucket for bucket in buckets if bucket.meet(heads[bucket.number])]

    async def heads(self, topic: int, numbers: Sequence[int]) -> dict[int, Head]:
        """Read and return the heads of buckets of a topic."""
        heads = dict.fromkeys(numbers, Head())
        for start in range(0, len(numbers), HEADS_AT_ONCE):
            rows = await self.connected.read("heads", topic, list(numbers[start : start + HEADS_AT_ONCE]))
            heads.update({row.bucket: Head.of(row) for row in rows})
        return heads

    async def find(self, bucket: Bucket, ids: Sequence[bytes], whole: bool = False) -> dict[bytes, CassandraRow]:
        """Return messages and remembered ids; `whole`: with content that lies beside them. Raises Changed."""
        rows = await self.rows(bucket.key, ids, whole)
        for row in rows:
            bucket.agree(row)
        return {row.id: CassandraRow.of(row, whole) for row in rows}

    async def rows(self, key: tuple[int, int], ids: Sequence[bytes], whole: bool) -> list[Any]:
        """Return the rows of `ids`, whatever state of the bucket they are of."""
        name, rows = "find_whole" if whole else "find", list[Any]()
        for start in range(0, len(ids), AT_ONCE):
            rows += await self.connected.read(name, *key, list(ids[start : start + AT_ONCE]))
        return rows

    async def reach(self, bucket: Bucket, kind: int, limit: int, due_ms: int) -> TimelinePrefix:
        """Return the beginning of a timeline: at least `limit` entries, or all until `due_ms`. Raise Changed."""
        head = await self.head(bucket)
        known = bucket.reached(kind, limit, due_ms)
        if known is None:
            count = max(limit, min(bucket.room, READ_AHEAD))
            after: Place = head.floor(kind) - 1, LAST_ID
            end: Place | None = None
            try:
                rows = await self.connected.read("timeline", *bucket.key, kind, *after, count)
            except Tombstoned:
                end = due_ms + SEEN_BEYOND_MS, LAST_ID
                rows = await self.entries(bucket.key, kind, after, end, count)
            for row in rows:
                bucket.agree(row)
            if (end or not rows) and await self.confirm([bucket]):
                raise Changed  # a part without a row does not say of which state it is
            entries: list[Place] = [(row.at, row.id) for row in rows]
            if len(rows) == count:
                end = entries[-1]
            known = bucket.prefixes[kind] = TimelinePrefix(entries, None if end is None else beyond(end))
        return known

    async def entries(self, key: tuple[int, int], kind: int, after: Place, last: Place, limit: int) -> list[Any]:
        """Return rows of a timeline after one place, up to `last`, at most `limit`. Where more was deleted than
        Cassandra reads past, it is read in parts."""
        rows: list[Any] = []
        step = _number(last) - _number(after)
        while after < last and len(rows) < limit:
            end = min(last, _numbered(_number(after) + step))
            try:
                rows += await self.connected.read("past", *key, kind, *after, *end, limit - len(rows))
            except Tombstoned:
                step >>= SMALLER
                if not step:
                    raise
            else:
                after, step = end, step << LARGER
        return rows

    async def change(
        self,
        bucket: Bucket,
        pairs: Pairs,
        absent: Collection[bytes] = (),
        cleared: tuple[int, Place, Place] | None = None,
    ) -> None:
        """Make the change, on the state that `bucket.head` names; the caller holds its lock. `absent`: ids that are
        presumed free. `cleared`: a range (kind, first, end) of an index to delete. Raise Changed if that state has
        passed, AlreadyThere if one of those ids is there, StoreUnknown if the outcome is unknown."""
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
        """Send the batch and return its number. If the answer is lost, the bucket is read back. If nothing has happened
        by then, the batch is sent again. The first may still be under way; both have the same condition, so that only
        one passes."""
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
    """Return the statement that makes a message stand as `after`. Its content is written once, and removed when only
    the id is remembered."""
    if after is None:
        return "remove", (*bucket.key, MESSAGE, 0, id)
    same = before is not None and (before.attempt, before.message.birth) == (after.attempt, after.message.birth)
    if same and not after.message.remembered:
        return "restate", (*bucket.key, id, after.fields())
    payload, headers = after.content if after.content is not None and after.inline else (None, None)
    return "store_new" if absent else "store", (*bucket.key, id, after.fields(), payload, headers)
