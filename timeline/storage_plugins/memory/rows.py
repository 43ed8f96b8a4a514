"""The rows of one topic: a slot a message, its fixed-size fields in one record, ids and payloads beside it.

A row's numbers lie together (104 bytes), so that a lease or a settle touches two cache lines a message however many
are pending; whole batches are gathered and scattered by numpy. Besides the index of ids, each row stands in one agenda
by what it is: *free* by its due, *held* by its lease's end, *dead* by when it died, *kept* (only the settled id is
left) by when it was settled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from timeline.columns import Bools, Indexes, Int64, Ragged, UInt8, UInt32
from timeline.model import ROW_DTYPES, Rows, buckets_of
from timeline.storage_plugins.memory.agenda import Agenda, Objects, pack
from timeline.storage_plugins.memory.growing import GrowingColumn, Index, Names, grow_objects, objects, same

EMPTY, FREE, HELD, DEAD, KEPT = range(5)
"""What a slot holds: nothing, a message without holder, one with a holder (its lease may have run out), a dead
letter, a settled id that is remembered."""
LIVING = (FREE, HELD)

_FIELDS = [*ROW_DTYPES.items(), *((name, np.uint32) for name in ("headers_bytes", "holder", "group", "tag"))]
RECORD = np.dtype(sorted(_FIELDS, key=lambda field: -np.dtype(field[1]).itemsize), align=True)
WORDS = RECORD.itemsize // 8
_FIRST_CAPACITY = 16
"""Ten thousand topics with a message each are no rarity."""
_SHRINK_ABOVE = 65_536


def records_of(words: Int64) -> Any:
    """The named fields of gathered rows: a view."""
    return words.view(RECORD)[:, 0]


class TopicRows:
    """All messages of one topic. Slots are handed around as numpy indexes; `records` is a view of `words`. `fast`:
    batches go by columns; else each message is decided by the table."""

    def __init__(self, buckets: int, fast: bool = True) -> None:
        self.buckets = buckets
        self.fast = fast
        self.index = Index()
        self.groups, self.tags, self.holders = Names(), Names(), Names()
        self.tagged: dict[int, set[int]] = {}
        self.headers: dict[int, bytes] = {}
        self.reasons: dict[int, bytes] = {}
        self.free = Agenda(self._current, lambda: self.counts[FREE], self.ids_at)
        self.held = Agenda(self._current, lambda: self.counts[HELD], self.ids_at)
        self.dead = Agenda(self._current, lambda: self.counts[DEAD])
        self.kept = Agenda(self._current, lambda: self.counts[KEPT])
        self.expiring = Agenda(self._same_birth, lambda: len(self.index))
        self._agendas = {FREE: self.free, HELD: self.held, DEAD: self.dead, KEPT: self.kept}
        self._start_columns()

    def _start_columns(self) -> None:
        self._words = GrowingColumn(np.int64, _FIRST_CAPACITY, WORDS)
        self._stamps = GrowingColumn(np.uint32, _FIRST_CAPACITY)
        self._kinds = GrowingColumn(np.uint8, _FIRST_CAPACITY)
        self._bucket = GrowingColumn(np.uint16, _FIRST_CAPACITY)
        self._spare = GrowingColumn(np.intp, _FIRST_CAPACITY)
        self.ids: Objects = objects(_FIRST_CAPACITY)
        self.payloads: Objects = objects(_FIRST_CAPACITY)
        self._show()
        self.counts = [0, 0, 0, 0, 0]
        self._used = 0
        self._spares = 0

    def _show(self) -> None:
        """The columns under the names by which they are used."""
        self.words: Int64 = self._words.array
        self.records = records_of(self.words)
        self.stamps: UInt32 = self._stamps.array
        self.kinds: UInt8 = self._kinds.array
        self.bucket: npt.NDArray[np.uint16] = self._bucket.array

    def _current(self, slots: Indexes, stamps: UInt32) -> Bools:
        current: Bools = self.stamps[slots] == stamps
        return current

    def _same_birth(self, slots: Indexes, stamps: UInt32) -> Bools:
        births = self.records["birth"][slots].astype(np.uint32)
        current: Bools = (births == stamps) & np.isin(self.kinds[slots], (FREE, HELD, DEAD))
        return current

    # ── slots ──

    def allocate(self, count: int) -> Indexes:
        """`count` empty slots, those given back last first."""
        reused = min(count, self._spares)
        fresh = count - reused
        if self._used + fresh > len(self.kinds):
            self._grow(self._used + fresh)
        self._spares -= reused
        slots: Indexes = np.empty(count, dtype=np.intp)
        slots[:reused] = self._spare.array[self._spares : self._spares + reused]
        slots[reused:] = np.arange(self._used, self._used + fresh)
        self._used += fresh
        return slots

    def _grow(self, wanted: int) -> None:
        length = len(self.kinds)
        more = length if length < 1024 else length // 2 if length < _SHRINK_ABOVE else length // 8
        capacity = max(wanted, length + more)
        # No view may be left while they grow.
        del self.words, self.records, self.stamps, self.kinds, self.bucket
        try:
            for column in (self._words, self._stamps, self._kinds, self._bucket):
                column.grow(capacity)
            grow_objects(self.ids, capacity)
            grow_objects(self.payloads, capacity)
        finally:
            self._show()

    def give_back(self, slots: Indexes) -> None:
        """Slots that hold nothing any more."""
        count = len(slots)
        if self._spares + count > len(self._spare.array):
            self._spare.grow(len(self.kinds))
        self._spare.array[self._spares : self._spares + count] = slots
        self._spares += count

    # ── where a row stands ──

    def place(self, slots: Indexes, kind: int, times_ms: Int64) -> None:
        """The rows are `kind` from now on and stand in its agenda at `times_ms`; earlier entries become stale."""
        stamps = self.stamps[slots] + np.uint32(1)
        self.stamps[slots] = stamps
        self._count_out(slots)
        self.kinds[slots] = kind
        self.counts[kind] += len(slots)
        self._agendas[kind].add(times_ms, pack(slots, stamps))

    def put_back(self, times_ms: Int64, slots: Indexes) -> None:
        """Back into their agendas, unchanged, with what `Agenda.take` took off them."""
        kinds = self.kinds[slots]
        for kind in np.unique(kinds).tolist():
            chosen = kinds == kind
            self._agendas[kind].add(times_ms[chosen], pack(slots[chosen], self.stamps[slots[chosen]]))

    def _count_out(self, slots: Indexes) -> None:
        for kind, count in enumerate(np.bincount(self.kinds[slots], minlength=5).tolist()):
            self.counts[kind] -= count

    def expire_at(self, slots: Indexes, expires_ms: Int64, births: npt.NDArray[np.uint64]) -> None:
        """Notes when rows expire."""
        self.expiring.add(expires_ms, pack(slots, births.astype(np.uint32)))

    # ── content ──

    def ids_at(self, slots: Indexes) -> Objects:
        return self.ids[slots]

    def write(self, slots: Indexes, ids: Ragged, words: Int64, payloads: Ragged, headers: Ragged) -> None:
        """New rows into empty slots whose ids are in the index already."""
        records = records_of(words)
        self.words[slots] = words
        self.ids[slots] = ids.tolist()
        self.payloads[slots] = payloads.tolist()
        self.bucket[slots] = buckets_of(ids, self.buckets)
        if headers.nbytes:
            pairs = zip(slots.tolist(), headers.tolist(), strict=True)
            self.headers.update((slot, header) for slot, header in pairs if header)
        if records["tag"].any():
            for slot, tag in zip(slots.tolist(), records["tag"].tolist(), strict=True):
                if tag:
                    self.tagged.setdefault(tag, set()).add(slot)
        self.place(slots, FREE, np.ascontiguousarray(records["due_ms"]))
        expiring = records["expires_ms"] != 0
        if expiring.any():
            self.expire_at(slots[expiring], records["expires_ms"][expiring], records["birth"][expiring])

    def erase(self, slots: Indexes, words: Int64) -> None:
        """Empties slots whose ids are out of the index already. `words`: the rows as they stood."""
        self._drop_content(slots, words)
        self.ids[slots] = None
        self.stamps[slots] += np.uint32(1)
        self._count_out(slots)
        self.kinds[slots] = EMPTY
        self.give_back(slots)
        if len(self.kinds) > _SHRINK_ABOVE and not len(self.index):
            for agenda in (self.free, self.held, self.dead, self.kept, self.expiring):
                agenda.clear()
            self._start_columns()

    def keep(self, slots: Indexes, words: Int64, now_ms: int) -> None:
        """Leaves only the settled ids."""
        self._drop_content(slots, words)
        for name in ("holder", "tag", "group"):
            self.records[name][slots] = 0
        self.records["died_ms"][slots] = now_ms
        self.place(slots, KEPT, np.full(len(slots), now_ms, dtype=np.int64))

    def _drop_content(self, slots: Indexes, words: Int64) -> None:
        self.payloads[slots] = None
        records = records_of(words)
        if self.headers or self.reasons:
            for slot in slots.tolist():
                self.headers.pop(slot, None)
                self.reasons.pop(slot, None)
        tags = records["tag"]
        if tags.any():
            for slot, tag in zip(slots.tolist(), tags.tolist(), strict=True):
                if tag:
                    members = self.tagged[tag]
                    members.discard(slot)
                    if not members:
                        del self.tagged[tag]

    def remove(self, slots: Indexes, now_ms: int, remember: bool) -> None:
        """Takes messages off: wholly, or, on a topic that remembers, all but the settled id."""
        words = self.words.take(slots, axis=0)
        if remember:
            self.keep(slots, words, now_ms)
            return
        self.index.take(self.ids[slots].tolist())
        self.erase(slots, words)

    def forget_unused_names(self) -> None:
        """Drops names that no row carries, now and then."""
        for names, field in ((self.groups, "group"), (self.tags, "tag"), (self.holders, "holder")):
            if names.crowded(len(self.index)):
                names.keep_only(self.records[field][: self._used][self.kinds[: self._used] != EMPTY])

    def in_bucket(self, bucket: int) -> Indexes:
        """The slots of all rows of `bucket`, whatever they are."""
        slots: Indexes = np.flatnonzero(self.bucket[: self._used] == bucket)
        filled: Indexes = slots[self.kinds[slots] != EMPTY]
        return filled

    def every(self) -> Indexes:
        """The slots of all rows."""
        slots: Indexes = np.flatnonzero(self.kinds[: self._used] != EMPTY)
        return slots

    def sizes(self, records: Any) -> Int64:
        """Bytes of payload and headers of gathered rows."""
        sizes: Int64 = records["payload_bytes"].astype(np.int64) + records["headers_bytes"]
        return sizes

    def rows(self, slots: Indexes, words: Int64, payload: bool) -> Rows:
        """Gathered rows as the model's columns."""
        records, count = records_of(words), len(slots)
        numbers: dict[str, Any] = {name: np.ascontiguousarray(records[name]) for name in ROW_DTYPES}
        return Rows(
            ids=Ragged.of(self.ids[slots].tolist()),
            groups=self.groups.column(records["group"]),
            holders=self.holders.column(records["holder"]),
            tags=self.tags.column(records["tag"]),
            dead=_sparse(self.reasons, slots) if numbers["died_ms"].any() else same(b"", count),
            payloads=Ragged.of(self.payloads[slots].tolist()) if payload else None,
            headers=_sparse(self.headers, slots) if payload else None,
            **numbers,
        )


def _sparse(values: dict[int, bytes], slots: Indexes) -> Ragged:
    """A column of what only few rows have."""
    if not values:
        return same(b"", len(slots))
    return Ragged.of([values.get(slot, b"") for slot in slots.tolist()])


__all__ = ["DEAD", "EMPTY", "FREE", "HELD", "KEPT", "LIVING", "RECORD", "WORDS", "TopicRows", "records_of"]
