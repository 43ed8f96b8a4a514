"""A bucket as this process knows it: its head, the beginnings of its two timelines, and the messages on these.

All that is known is of one state of the bucket, the one that `head.last` names. Every change is made on the condition
that this state still stands, so that what is known need not be read again to be relied on; what is answered without a
change is confirmed by reading the head alone. Nothing here is more than a copy: it may be forgotten at any time.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from timeline.storage_plugins.cassandra.rows import CassandraRow, Entry
from timeline.storage_plugins.cassandra.statements import FREE, HELD

NOWHERE_MS = 1 << 62
"""The floor of a timeline with nothing on it."""
KNOWN_ENTRIES = 32_000
"""Entries of timelines that one process knows at most, over all buckets."""
MOST_OF_ONE, FEWEST_OF_ONE = 1_000, 16
PASSED = 16
"""States of a bucket in which a reading may find it while this process goes on."""
WORTH_CUTTING = 3
"""Entries in a row from which one deletion of a range takes the place of one each."""

Place = tuple[int, bytes]
"""(due, id): where something lies on a timeline."""
Pairs = Mapping[bytes, tuple[CassandraRow | None, CassandraRow | None]]
"""By id what stood and what is to stand."""


def beyond(place: Place) -> Place:
    """The first place after one."""
    return place[0], place[1] + b"\0"


@dataclass(frozen=True, slots=True)
class Head:
    """What a bucket says of itself: the batch that changed it last (None: nothing ever did), and below which due
    nothing lies on either timeline."""

    last: int | None = None
    floor_free: int = NOWHERE_MS
    floor_held: int = NOWHERE_MS

    @classmethod
    def of(cls, row: Any) -> Head:
        return cls(row.last, row.floor_free, row.floor_held)

    def floor(self, kind: int) -> int:
        return self.floor_free if kind == FREE else self.floor_held


class Changed(Exception):
    """Somebody else changed the bucket since it was looked at: read again."""


@dataclass(slots=True)
class TimelinePrefix:
    """The first entries of a timeline, in order: every entry before `until` (None: every entry)."""

    entries: list[Place]
    until: Place | None

    @property
    def floor(self) -> int:
        """Below this due the timeline is empty."""
        if self.entries:
            return self.entries[0][0]
        return self.until[0] if self.until is not None else NOWHERE_MS

    def covers(self, place: Place) -> bool:
        """Whether what lies there would be known."""
        return self.until is None or place < self.until

    def changed(self, gone: Collection[Place], come: Iterable[Place], room: int) -> TimelinePrefix:
        """The same once `gone` is off the timeline and `come` on it, with at most `room` entries."""
        entries = [place for place in self.entries if place not in gone]
        entries += [place for place in come if self.covers(place)]
        entries.sort()
        if len(entries) > room:
            return TimelinePrefix(entries[:room], entries[room])
        return TimelinePrefix(entries, self.until)

    def runs(self, gone: Collection[Place], come: Collection[Place]) -> Iterator[tuple[Place, Place]]:
        """Ranges that hold entries of `gone` alone, first and end of each: worth one deletion. What comes into such
        a range by the same batch would be deleted with it."""
        for removed, run in groupby(self.entries, key=gone.__contains__):
            places = list(run)
            if removed and len(places) >= WORTH_CUTTING:
                first, end = places[0], beyond(places[-1])
                if not any(first <= place < end for place in come):
                    yield first, end


@dataclass(slots=True, eq=False)
class Bucket:
    """One bucket. `head` may be old, never newer than what is read afterwards. Whoever reads it to change it holds
    `lock`. `room`: entries to know of each timeline. `tombstones`: deletions that this process has left in each index
    along which a sweep looks, since these were last made one. `waiting`: parts of calls that ask for a change. `asked`:
    messages of those and of the batch under way. `leases`: how many of them lease, or wait for the lock to do so.
    `passed`: the last few states on the way to the known one that this process has changed. A lease looks at what is
    known without the lock, and keeps of that what a head by itself says of a timeline."""

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
        """A part of a call waits for a change."""
        self.waiting.append(part)
        self.asked += len(part.ids)
        self.leases += part.leases

    def take(self, parts: Collection[Any]) -> None:
        """These go into a batch now; they are asked for until `end`."""
        chosen = set(parts)
        self.waiting = [part for part in self.waiting if part not in chosen]

    def end(self, parts: Collection[Any]) -> None:
        """These were taken, and are done or failed."""
        self.asked -= sum(len(part.ids) for part in parts)
        self.leases -= sum(part.leases for part in parts)

    def give_up(self, part: Any) -> None:
        """Whoever asked for it does no more; what was taken is done all the same."""
        if part in self.waiting:
            self.take([part])
            self.end([part])

    def forget(self) -> None:
        """Forgets all of it."""
        self.head, self.prefixes, self.messages = None, {}, {}
        self.passed.clear()

    def meet(self, head: Head) -> bool:
        """Takes note of the head as it was read; answers whether it is another than the known one."""
        if self.head is not None and self.head.last == head.last:
            return False
        self.forget()
        self.head = head
        self.prefixes = {kind: TimelinePrefix([], None) for kind in (FREE, HELD) if head.floor(kind) >= NOWHERE_MS}
        return True

    def current(self, head: Head) -> bool:
        """Whether what is known is of the state that was read, or of a later one."""
        return self.head is not None and (self.head.last == head.last or head.last in self.passed)

    def reached(self, kind: int, limit: int, due_ms: int) -> TimelinePrefix | None:
        """The beginning of a timeline as far as `limit` entries or `due_ms`, if so much of it is known."""
        known = self.prefixes.get(kind)
        if known is None and self.head is not None and self.head.floor(kind) > due_ms:
            # Tombstones beyond the floor need not be met to know that nothing is due.
            known = self.prefixes[kind] = TimelinePrefix([], (self.head.floor(kind), b""))
        if known is None or not (known.until is None or len(known.entries) >= limit or known.until[0] > due_ms):
            return None
        return known

    def agree(self, row: Any) -> None:
        """Raises Changed when `row` was read from another state than the head that is known."""
        if self.meet(Head.of(row)):
            raise Changed

    def keep(self, stored: Iterable[CassandraRow]) -> None:
        """Keeps messages as they stand, those on a prefix that is known."""
        for one in stored:
            kind, place = HELD if one.message.holder else FREE, (one.message.due_ms, one.id)
            known = self.prefixes.get(kind)
            lives = not one.message.died_ms and not one.message.remembered
            if lives and one.whole and known is not None and known.covers(place):
                self.messages[one.id] = one

    def became(self, head: Head, prefixes: dict[int, TimelinePrefix], pairs: Pairs) -> None:
        """Takes note of a change that was made."""
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
    """What a batch does to the index of a bucket."""

    gone: set[Entry]
    come: set[Entry]

    @classmethod
    def of(cls, pairs: Pairs) -> IndexChange:
        """An entry that stays is in neither: in one batch a removal would win."""
        change = cls(set(), set())
        for before, after in pairs.values():
            old = before.entries() if before is not None else set()
            new = after.entries() if after is not None else set()
            change.gone |= old - new
            change.come |= new - old
        return change

    def prefixes(self, bucket: Bucket) -> dict[int, TimelinePrefix]:
        """What is known of the timelines afterwards."""
        after: dict[int, TimelinePrefix] = {}
        for kind, known in bucket.prefixes.items():
            after[kind] = known.changed(_on(kind, self.gone), _on(kind, self.come), bucket.room)
        return after

    def cuts(self, bucket: Bucket) -> list[tuple[int, Place, Place]]:
        """Ranges to delete, as (kind, first, end); what they hold is in `gone` no more."""
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
    """The buckets that this process has met."""

    def __init__(self) -> None:
        self._known: dict[int, dict[int, Bucket]] = {}
        self._count = 0

    def of(self, topic: int, numbers: Iterable[int]) -> list[Bucket]:
        """Buckets of a topic, in ascending order."""
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
        """Those of a topic with an index that has so many tombstones at least."""
        mine = self._known.get(topic, {}).values()
        return [(bucket, kind) for bucket in mine for kind, count in bucket.tombstones.items() if count >= least]

    def forget(self, topic: int) -> None:
        """Forgets a topic that was dropped."""
        self._count -= len(self._known.pop(topic, {}))


__all__ = [
    "NOWHERE_MS",
    "Bucket",
    "Buckets",
    "Changed",
    "Head",
    "IndexChange",
    "Pairs",
    "Place",
    "TimelinePrefix",
    "beyond",
]
