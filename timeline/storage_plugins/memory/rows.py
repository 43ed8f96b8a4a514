"""The rows of one topic: a slot per message, with its numbers in one record, and ids and payloads beside it.

A row's numbers lie together (104 bytes). So a lease or a settle touches two cache lines per message, however many are
pending. Numpy gathers and scatters whole batches. Besides the index of ids, each row stands in one agenda, which is an
index on times. *Free* rows stand by due, *held* ones by the lease's end, and *dead* ones by time of death. Of *kept*
ones only the settled id is left. They stand by time of settling.

Nothing here may pause to grow. At a million messages, copying a column takes a tenth of a second, and rehashing a
dictionary half of one. So a long column has a memory mapping of its own, which the kernel moves by its page tables, and
a large index is many small dictionaries.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from itertools import islice, repeat
from operator import le
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from timeline.columns import Bools, Indexes, Int64, Ragged, UInt8, UInt32, UInt64
from timeline.model import ROW_DTYPES, Rows, buckets_of

# ── agendas ──

# Entries of an agenda are (time, slot, stamp) in numpy arrays, 16 bytes each. No entry is searched for to be removed. A
# row that changes gets another stamp, which makes its earlier entries stale; stale entries are dropped when they are
# met. New entries wait unsorted in a small buffer. A full buffer becomes a sorted run, and runs of similar size are
# merged. So an entry is sorted a logarithmic number of times, and the earliest is the least of a few runs' heads.

Objects: TypeAlias = npt.NDArray[np.object_]

FRESH = 2048
"""Entries that wait unsorted before they become a run (for a moment twice this number)."""
FIRST_FRESH = 16
"""Room at first; most agendas of most topics never need more."""
MERGE_MAX = 131_072
"""Runs are merged up to this size, or a sixteenth of all, so that a merge takes only milliseconds."""
MANY_RUNS = 48
SLICE = 64
"""The least number of entries to look at per run, if several runs have something due."""
FOREVER_MS = np.iinfo(np.int64).max

_LOW = np.uint64(0xFFFF_FFFF)
_SHIFT = np.uint64(32)


def pack(slots: Indexes, stamps: UInt32) -> UInt64:
    """Return keys: the stamp above the slot."""
    keys: UInt64 = (stamps.astype(np.uint64) << _SHIFT) | slots.astype(np.uint64)
    return keys


def slots_of(keys: UInt64) -> Indexes:
    return (keys & _LOW).astype(np.intp)


def stamps_of(keys: UInt64) -> UInt32:
    return (keys >> _SHIFT).astype(np.uint32)


class _Run:
    """Entries sorted by (time, id). `at`: the first that is still of interest."""

    __slots__ = ("at", "keys", "times")

    def __init__(self, times: Int64, keys: UInt64) -> None:
        self.times = times
        self.keys = keys
        self.at = 0

    def __len__(self) -> int:
        return len(self.keys) - self.at

    def rest(self) -> tuple[Int64, UInt64]:
        return self.times[self.at :], self.keys[self.at :]


class Agenda:
    """Entries by time, then by id where `ids_of` is given.

    `is_valid(slots, stamps)`: which entries are of the row as it stands. `ids_of(slots)`: the ids of valid ones, which
    order equal times. `live()`: how many entries can be valid at most, by which stale ones are noticed.
    """

    def __init__(
        self,
        is_valid: Callable[[Indexes, UInt32], Bools],
        live: Callable[[], int],
        ids_of: Callable[[Indexes], Objects] | None = None,
    ) -> None:
        self._is_valid = is_valid
        self._live = live
        self._ids_of = ids_of
        self.clear()

    def clear(self) -> None:
        """Remove every entry."""
        self._times = np.empty(FIRST_FRESH, dtype=np.int64)
        self._keys = np.empty(FIRST_FRESH, dtype=np.uint64)
        self._count = 0
        self._fresh_first = FOREVER_MS
        self._runs: list[_Run] = []
        self._next_compacted = 0

    def __len__(self) -> int:
        """Return the number of all entries, stale ones too."""
        return self._count + sum(map(len, self._runs))

    def add(self, times: Int64, keys: UInt64) -> None:
        """Add `keys` at `times`."""
        count = len(keys)
        if count == 0:
            return
        if count > FRESH:
            self._push(*self._sorted(times, keys))
            return
        if self._count + count > 2 * FRESH:
            self._flush()
        if self._count + count > len(self._times):
            self._grow(self._count + count)
        start, self._count = self._count, self._count + count
        self._times[start : self._count] = times
        self._keys[start : self._count] = keys
        self._fresh_first = min(self._fresh_first, int(times.min()))

    def take(self, until_ms: int, count: int) -> tuple[Int64, UInt64]:
        """Remove and return the first `count` valid entries with time ≤ `until_ms`, by (time, id)."""
        surfaced = self._surface(until_ms)
        if surfaced is not None:
            if len(surfaced[1]) <= count and not self._due_runs(until_ms):
                return surfaced
            self._push(*surfaced)
        parts: list[tuple[Int64, UInt64]] = []
        while count > 0 and (runs := self._due_runs(until_ms)):
            times, keys = self._take_block(runs, until_ms, count)
            parts.append((times, keys))
            count -= len(keys)
        if not parts:
            return self._times[:0], self._keys[:0]
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def first(self, after_ms: int = -1, accept: Callable[[Indexes], Bools] | None = None) -> int | None:
        """Return the earliest time > `after_ms` of a valid entry that `accept` accepts; None if there is none."""
        best = FOREVER_MS
        for run in self._runs:
            at = run.at if after_ms < 0 else run.at + int(np.searchsorted(run.times[run.at :], after_ms, "right"))
            best = min(best, self._first_of(run, at, best, accept, drop=after_ms < 0))
        self._runs = [run for run in self._runs if len(run)]
        if self._count and self._fresh_first < best:
            self._drop_stale_fresh()
            times, keys = self._times[: self._count], self._keys[: self._count]
            wanted = times > after_ms
            if accept is not None:
                wanted &= accept(slots_of(keys))
            if wanted.any():
                best = min(best, int(times[wanted].min()))
        return None if best == FOREVER_MS else best

    def count_between(self, edges_ms: Int64) -> Int64:
        """Return how many valid entries lie in each [edge[i], edge[i + 1])."""
        counts = np.zeros(max(0, len(edges_ms) - 1), dtype=np.int64)
        if len(counts) == 0:
            return counts
        parts = [(self._times[: self._count], self._keys[: self._count])]
        for run in self._runs:
            low, high = np.searchsorted(run.times[run.at :], (edges_ms[0], edges_ms[-1]), "left") + run.at
            parts.append((run.times[low:high], run.keys[low:high]))
        for times, keys in parts:
            steps = np.searchsorted(edges_ms, times[self._valid(keys)], "right") - 1
            steps = steps[(steps >= 0) & (steps < len(counts))]
            counts += np.bincount(steps, minlength=len(counts))
        return counts

    def slots(self) -> Indexes:
        """Return the slots of all valid entries, in no order."""
        keys = np.concatenate([self._keys[: self._count], *(run.keys[run.at :] for run in self._runs)])
        return slots_of(keys[self._valid(keys)])

    # ── inside ──

    def _grow(self, wanted: int) -> None:
        """Make the buffer longer, up to its largest size."""
        room, count = min(2 * FRESH, max(wanted, 4 * len(self._times))), self._count
        times, keys = np.empty(room, dtype=np.int64), np.empty(room, dtype=np.uint64)
        times[:count], keys[:count] = self._times[:count], self._keys[:count]
        self._times, self._keys = times, keys

    def _valid(self, keys: UInt64) -> Bools:
        return self._is_valid(slots_of(keys), stamps_of(keys))

    def _sorted(self, times: Int64, keys: UInt64) -> tuple[Int64, UInt64]:
        """Return the valid of these entries by (time, id)."""
        valid = self._valid(keys)
        if not valid.all():
            times, keys = times[valid], keys[valid]
        order = self._order(times, keys)
        return times[order], keys[order]

    def _order(self, times: Int64, keys: UInt64) -> Indexes:
        order = np.argsort(times, kind="stable")
        if self._ids_of is None or len(order) < 2:
            return order
        ordered = times[order]
        same = ordered[1:] == ordered[:-1]
        if same.any():
            tied = np.zeros(len(order), dtype=np.bool_)
            tied[1:] |= same
            tied[:-1] |= same
            members = order[tied]
            order[tied] = members[by_id(ordered[tied], self._ids_of(slots_of(keys[members])))]
        return order

    def _flush(self) -> None:
        """Make room in the buffer: drop stale entries; if many are left, make them a run."""
        self._drop_stale_fresh()
        if self._count > FRESH // 2:
            times, keys = self._times[: self._count], self._keys[: self._count]
            self._count, self._fresh_first = 0, FOREVER_MS
            self._push(*self._sorted(times.copy(), keys.copy()))

    def _drop_stale_fresh(self) -> None:
        times, keys = self._times[: self._count], self._keys[: self._count]
        valid = self._valid(keys)
        if not valid.all():
            self._keep_fresh(times[valid], keys[valid])

    def _keep_fresh(self, times: Int64, keys: UInt64) -> None:
        self._count = len(keys)
        self._times[: self._count] = times
        self._keys[: self._count] = keys
        self._fresh_first = int(times.min()) if self._count else FOREVER_MS

    def _surface(self, until_ms: int) -> tuple[Int64, UInt64] | None:
        """Remove and return the buffer's entries up to `until_ms`, sorted; None if there are none."""
        if self._count == 0 or self._fresh_first > until_ms:
            return None
        times, keys = self._times[: self._count], self._keys[: self._count]
        due = times <= until_ms
        if due.all():
            taken = times.copy(), keys.copy()
            self._count, self._fresh_first = 0, FOREVER_MS
        else:
            taken = times[due], keys[due]
            self._keep_fresh(times[~due], keys[~due])
        surfaced = self._sorted(*taken)
        return surfaced if len(surfaced[1]) else None

    def _push(self, times: Int64, keys: UInt64) -> None:
        """Add a run, merged with its predecessors while they are of similar size."""
        limit = max(MERGE_MAX, len(self) // 16)
        runs = self._runs
        while runs and len(runs[-1]) <= 2 * len(keys) and len(runs[-1]) + len(keys) <= limit:
            times, keys = self._merged(runs.pop(), _Run(times, keys))
        if len(keys):
            runs.append(_Run(times, keys))
        if len(runs) > MANY_RUNS:
            runs.sort(key=len, reverse=True)
            smaller, larger = runs.pop(), runs.pop()
            runs.append(_Run(*self._merged(larger, smaller)))
        self._compact()

    def _merged(self, one: _Run, other: _Run) -> tuple[Int64, UInt64]:
        first, second = one.rest(), other.rest()
        if len(first[0]) and len(second[0]) and second[0][-1] < first[0][0]:
            first, second = second, first
        times, keys = np.concatenate((first[0], second[0])), np.concatenate((first[1], second[1]))
        if len(first[0]) and len(second[0]) and first[0][-1] >= second[0][0]:
            return self._sorted(times, keys)
        valid = self._valid(keys)
        return times[valid], keys[valid]

    def _compact(self) -> None:
        """If stale entries dominate, drop those of one run only, so that the pause stays short."""
        if not self._runs or len(self) <= 2 * self._live() + 8 * FRESH:
            return
        at = self._next_compacted = (self._next_compacted + 1) % len(self._runs)
        times, keys = self._runs[at].rest()
        valid = self._valid(keys)
        self._runs[at] = _Run(times[valid], keys[valid])
        self._runs = [run for run in self._runs if len(run)]

    def _due_runs(self, until_ms: int) -> list[_Run]:
        self._runs = [run for run in self._runs if len(run)]
        return [run for run in self._runs if run.times[run.at] <= until_ms]

    def _take_block(self, runs: list[_Run], until_ms: int, count: int) -> tuple[Int64, UInt64]:
        """Remove and return up to `count` of the first entries of `runs`. A slice of each is looked at, and an entry
        beyond a slice must not come before those taken. May be empty if stale ones were met."""
        # Where a run has enough by itself, none that begins later is of interest, and often no other run is.
        full = [int(run.times[run.at + count - 1]) for run in runs if len(run) >= count]
        if full:
            until_ms = min(until_ms, *full)
            runs = [run for run in runs if run.times[run.at] <= until_ms]
        size = count if len(runs) == 1 else max(SLICE, 2 * count // len(runs))
        ends = [run.at + int(np.searchsorted(run.times[run.at :], until_ms, "right")) for run in runs]
        stops = [min(run.at + size, end) for run, end in zip(runs, ends, strict=True)]
        times = np.concatenate([run.times[run.at : stop] for run, stop in zip(runs, stops, strict=True)])
        keys = np.concatenate([run.keys[run.at : stop] for run, stop in zip(runs, stops, strict=True)])
        valid = self._valid(keys)
        indexes = np.flatnonzero(valid)
        order = indexes if len(runs) == 1 else indexes[self._order(times[indexes], keys[indexes])]
        limit = min(count, len(order))
        if len(runs) > 1:
            limit = min(limit, self._complete(runs, stops, ends, valid, order))
        taken = order[:limit]
        left = valid.copy()
        left[taken] = False
        start = 0
        for run, stop in zip(runs, stops, strict=True):
            span = stop - run.at
            waiting = left[start : start + span]
            run.at += int(waiting.argmax()) if waiting.any() else span
            if run.at > 2 * FRESH and run.at > len(run.keys) // 2:
                rest_times, rest_keys = run.rest()
                run.times, run.keys, run.at = rest_times.copy(), rest_keys.copy(), 0
            start += span
        return times[taken], keys[taken]

    def _complete(self, runs: list[_Run], stops: list[int], ends: list[int], valid: Bools, order: Indexes) -> int:
        """Return how many of `order` surely come before all entries beyond the slices."""
        place = np.zeros(len(valid), dtype=np.intp)
        place[order] = np.arange(len(order))
        limit, start = len(order), 0
        for run, stop, end in zip(runs, stops, ends, strict=True):
            part = valid[start : start + stop - run.at]
            if stop < end:
                last = start + len(part) - 1 - int(part[::-1].argmax())
                limit = min(limit, int(place[last]) + 1 if part.any() else 0)
            start += len(part)
        return limit

    def _first_of(self, run: _Run, at: int, best: int, accept: Callable[[Indexes], Bools] | None, drop: bool) -> int:
        """Return the time of the first entry of interest in `run` from `at` on; FOREVER_MS if none is before `best`."""
        size = 16
        while at < len(run.keys) and run.times[at] < best:
            keys = run.keys[at : at + size]
            valid = self._valid(keys)
            stale = int(valid.argmax()) if valid.any() else len(keys)
            if drop and run.at == at:
                run.at += stale
            wanted = valid if accept is None else valid & accept(slots_of(keys))
            if wanted.any():
                return min(best, int(run.times[at + int(wanted.argmax())]))
            at += len(keys)
            size = min(2 * size, 65_536)
        return FOREVER_MS


def by_id(times: Int64, ids: Objects) -> Indexes:
    """Return the order of entries by (time, id as bytes). The first eight bytes are compared as numbers; ids hold no
    NUL, so padding with it keeps the order. The rest is compared only where these tie. The driver's own ids come in
    order already, and begin alike."""
    listed = ids.tolist()
    if (times[1:] >= times[:-1]).all() and all(map(le, listed, islice(listed, 1, None))):
        return np.arange(len(listed))
    prefix = ids.astype("S8").view(">u8").astype(np.uint64)
    order = np.lexsort((prefix, times))
    times, prefix = times[order], prefix[order]
    same = (times[1:] == times[:-1]) & (prefix[1:] == prefix[:-1])
    if same.any():
        edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False])).astype(np.int8)))
        for start, stop in zip(edges[::2].tolist(), (edges[1::2] + 1).tolist(), strict=True):
            group = order[start:stop]
            order[start:stop] = group[sorted(range(len(group)), key=ids[group].tolist().__getitem__)]
    return order


EMPTY, FREE, HELD, DEAD, KEPT = range(5)
"""The kinds of slot. FREE: a message without holder. HELD: one with a holder, whose lease may have run out. DEAD: a
dead letter. KEPT: a settled id that is remembered."""
LIVING = (FREE, HELD)

_FIELDS = [*ROW_DTYPES.items(), *((name, np.uint32) for name in ("headers_bytes", "holder", "group", "tag"))]
RECORD = np.dtype(sorted(_FIELDS, key=lambda field: -np.dtype(field[1]).itemsize), align=True)
WORDS = RECORD.itemsize // 8
_FIRST_CAPACITY = 16
"""Small, as there may be ten thousand topics with a message each."""
_SHRINK_ABOVE = 65_536


# ── columns, the index of ids, and names as numbers ──

MAPPED_ABOVE_BYTES = 1024 * 1024
"""Shorter columns are copied: a small topic needs no mapping for each."""


class GrowingColumn:
    """A column of numbers, zero where nothing was written. `array` is all of it. While somebody keeps a view of it, it
    grows by a copy."""

    def __init__(self, dtype: npt.DTypeLike, capacity: int, width: int = 0) -> None:
        self._dtype = np.dtype(dtype)
        self._width = width
        self._memory: mmap.mmap | None = None
        self.array: npt.NDArray[Any] = np.zeros((capacity, width) if width else capacity, self._dtype)

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` rows in all."""
        size = capacity * self._dtype.itemsize * max(1, self._width)
        if size < MAPPED_ABOVE_BYTES:
            self._copy(np.zeros((capacity, self._width) if self._width else capacity, self._dtype))
        elif not self._extended(size):
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._copy(self._over(memory))
            self._memory = memory

    def _extended(self, size: int) -> bool:
        """Return whether the mapping could be made longer in place, or moved as a whole."""
        if self._memory is None:
            return False
        before = self.array
        self.array = before[:0].copy()
        del before
        try:
            self._memory.resize(size)
        except (BufferError, SystemError):  # somebody keeps a view, or this system cannot: copy
            return False
        finally:  # whatever went wrong, its contents are there
            self.array = self._over(self._memory)
        return True

    def _copy(self, longer: npt.NDArray[Any]) -> None:
        longer[: len(self.array)] = self.array
        self.array = longer

    def _over(self, memory: mmap.mmap) -> npt.NDArray[Any]:
        flat = np.frombuffer(memory, self._dtype)
        return flat.reshape(-1, self._width) if self._width else flat


def objects(capacity: int) -> npt.NDArray[np.object_]:
    """Return a column of objects, None throughout."""
    return np.full(capacity, None, dtype=np.object_)


def grow_objects(column: npt.NDArray[np.object_], capacity: int) -> None:
    """Make room for `capacity` objects in all. There may be no view of the column."""
    column.resize(capacity, refcheck=False)


YOUNG = 80_000
"""Ids in the first dictionary. A little above that it would grow to twice its size, which takes milliseconds."""
PARTS = 256
MOVED_AT_ONCE = 2_048
_MASK = PARTS - 1


class Index:
    """Ids and their slots. New ids go into one dictionary, where most of them live and die. Beyond YOUNG of them, the
    oldest move a few at a time, each into one of PARTS by its hash."""

    def __init__(self) -> None:
        self._young: dict[bytes, int] = {}
        self._parts: list[dict[bytes, int]] = []
        self._in_parts = 0

    def __len__(self) -> int:
        return len(self._young) + self._in_parts

    def __contains__(self, id: bytes) -> bool:
        return self.get(id) >= 0

    def get(self, id: bytes) -> int:
        """Return the slot of `id`, -1 if there is none."""
        slot = self._young.get(id, -1)
        return slot if slot >= 0 or not self._in_parts else self._parts[hash(id) & _MASK].get(id, -1)

    def find(self, ids: list[bytes]) -> list[int]:
        """Return the slot of each id, -1 where there is none."""
        slots = list(map(self._young.get, ids, repeat(-1)))
        if self._in_parts and -1 in slots:
            parts = self._parts
            slots = [
                slot if slot >= 0 else parts[hash(id) & _MASK].get(id, -1) for id, slot in zip(ids, slots, strict=True)
            ]
        return slots

    def add(self, ids: list[bytes], slots: list[int]) -> bool:
        """Add new ids with their slots. Return False, and change nothing, if an id is there or comes twice."""
        young, parts = self._young, self._parts
        if not young.keys().isdisjoint(ids):
            return False
        if self._in_parts:
            homes = [parts[number & _MASK] for number in map(hash, ids)]
            if any(map(dict.__contains__, homes, ids)):
                return False
        before = len(young)
        young.update(zip(ids, slots, strict=True))
        if len(young) != before + len(ids):
            for id in ids:
                young.pop(id, None)
            return False
        if len(young) > YOUNG:
            self._move()
        return True

    def take(self, ids: list[bytes]) -> list[int]:
        """Remove ids. Return their slots, -1 where there was none."""
        slots = list(map(self._young.pop, ids, repeat(-1)))
        if self._in_parts and -1 in slots:
            left, parts = slots.count(-1), self._parts
            slots = [
                slot if slot >= 0 else parts[hash(id) & _MASK].pop(id, -1) for id, slot in zip(ids, slots, strict=True)
            ]
            self._in_parts -= left - slots.count(-1)
            if not self._in_parts:
                self._parts = []
        return slots

    def put_back(self, ids: list[bytes], slots: list[int]) -> None:
        """Undo a `take`: add the ids whose slot it found."""
        self._young.update((id, slot) for id, slot in zip(ids, slots, strict=True) if slot >= 0)

    def _move(self) -> None:
        """Move the oldest of the young into their parts."""
        young = self._young
        self._parts = parts = self._parts or [{} for _ in range(PARTS)]
        oldest = list(islice(young, max(MOVED_AT_ONCE, len(young) - YOUNG)))
        for id in oldest:
            parts[hash(id) & _MASK][id] = young.pop(id)
        self._in_parts += len(oldest)


KEEP = 1024
"""Names that are kept before unused ones are looked for."""
UNKNOWN = np.uint32(0xFFFF_FFFF)


def only_item(column: Ragged) -> bytes | None:
    """Return the item that all of a column are, for the cost of a memory comparison; None if items differ."""
    count = len(column)
    sizes = column.sizes
    size = int(sizes[0]) if count else 0
    if column.nbytes != size * count or not bool((sizes == size).all()):
        return None
    if size == 0:
        return b""
    start = int(column.offsets[0])
    item = bytes(column.data[start : start + size])
    return item if bytes(column.data[start : start + size * count]) == item * count else None


def same(item: bytes, count: int) -> Ragged:
    """Return a column of `item` `count` times, without a look at each."""
    return Ragged(item * count, np.arange(count + 1, dtype=np.int64) * len(item))


class Names:
    """Groups, tags or holders, each kept once. Rows carry its number; 0 is the empty name."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {b"": 0}
        self._names: list[bytes | None] = [b""]
        self._unused: list[int] = []
        self._look_at = KEEP

    def number(self, name: bytes) -> int:
        """Return the number of `name`, which gets one if it is new."""
        number = self._numbers.get(name)
        if number is None:
            if self._unused:
                number = self._unused.pop()
                self._names[number] = name
            else:
                number = len(self._names)
                self._names.append(name)
            self._numbers[name] = number
        return number

    def numbers(self, column: Ragged) -> UInt32:
        """Return the numbers of a column of names."""
        item = only_item(column)
        if item is not None:
            return np.full(len(column), self.number(item), dtype=np.uint32)
        return np.fromiter(map(self.number, column.tolist()), dtype=np.uint32, count=len(column))

    def known(self, column: Ragged) -> UInt32:
        """Return the same without adding any: UNKNOWN for a new name."""
        item = only_item(column)
        if item is not None:
            return np.full(len(column), self._numbers.get(item, UNKNOWN), dtype=np.uint32)
        found = [self._numbers.get(name, UNKNOWN) for name in column.tolist()]
        return np.array(found, dtype=np.uint32)

    def find(self, name: bytes) -> int | None:
        """Return the number of `name`, if it has one."""
        return self._numbers.get(name)

    def name(self, number: int) -> bytes:
        """Return the name with `number`."""
        return self._names[number] or b""

    def column(self, numbers: UInt32) -> Ragged:
        """Return the names of a column of numbers."""
        if len(numbers) and bool((numbers == numbers[0]).all()):
            return same(self.name(int(numbers[0])), len(numbers))
        return Ragged.of([self.name(number) for number in numbers.tolist()])

    def crowded(self, rows: int) -> bool:
        """Return whether to look for unused names, on a topic of `rows` rows."""
        return len(self._numbers) >= max(self._look_at, rows // 64)

    def keep_only(self, numbers: UInt32) -> None:
        """Remove all names but those with these numbers."""
        kept = set(np.unique(numbers).tolist()) | {0}
        for name, number in list(self._numbers.items()):
            if number not in kept:
                del self._numbers[name]
                self._names[number] = None
                self._unused.append(number)
        self._look_at = max(KEEP, 2 * len(self._numbers))


# ── the rows ──


def records_of(words: Int64) -> Any:
    """Return the named fields of gathered rows, as a view."""
    return words.view(RECORD)[:, 0]


class TopicRows:
    """All messages of one topic. Slots are numpy indexes; `records` is a view of `words`. `fast`: batches go by
    columns. Otherwise the table decides each message."""

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
        """Set the columns under the names by which they are used."""
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
        """Return `count` empty slots, those given back last first."""
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
        # They grow without a copy only if there is no view of them.
        del self.words, self.records, self.stamps, self.kinds, self.bucket
        try:
            for column in (self._words, self._stamps, self._kinds, self._bucket):
                column.grow(capacity)
            grow_objects(self.ids, capacity)
            grow_objects(self.payloads, capacity)
        finally:
            self._show()

    def give_back(self, slots: Indexes) -> None:
        """Take back empty slots."""
        count = len(slots)
        if self._spares + count > len(self._spare.array):
            self._spare.grow(len(self.kinds))
        self._spare.array[self._spares : self._spares + count] = slots
        self._spares += count

    # ── where a row stands ──

    def place(self, slots: Indexes, kind: int, times_ms: Int64) -> None:
        """Make the rows `kind`, in its agenda at `times_ms`; their earlier entries become stale."""
        stamps = self.stamps[slots] + np.uint32(1)
        self.stamps[slots] = stamps
        self._count_out(slots)
        self.kinds[slots] = kind
        self.counts[kind] += len(slots)
        self._agendas[kind].add(times_ms, pack(slots, stamps))

    def put_back(self, times_ms: Int64, slots: Indexes) -> None:
        """Put rows that `Agenda.take` took back into their agendas, unchanged."""
        kinds = self.kinds[slots]
        for kind in np.unique(kinds).tolist():
            chosen = kinds == kind
            self._agendas[kind].add(times_ms[chosen], pack(slots[chosen], self.stamps[slots[chosen]]))

    def _count_out(self, slots: Indexes) -> None:
        for kind, count in enumerate(np.bincount(self.kinds[slots], minlength=5).tolist()):
            self.counts[kind] -= count

    def expire_at(self, slots: Indexes, expires_ms: Int64, births: npt.NDArray[np.uint64]) -> None:
        """Note when rows expire."""
        self.expiring.add(expires_ms, pack(slots, births.astype(np.uint32)))

    # ── content ──

    def ids_at(self, slots: Indexes) -> Objects:
        return self.ids[slots]

    def write(self, slots: Indexes, ids: Ragged, words: Int64, payloads: Ragged, headers: Ragged) -> None:
        """Write new rows into empty slots. Their ids are in the index already."""
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
        """Empty slots whose ids are out of the index already. `words`: the rows as they were."""
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
        """Leave only the settled ids."""
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
        """Remove messages; on a topic that remembers, all but the settled ids."""
        words = self.words.take(slots, axis=0)
        if remember:
            self.keep(slots, words, now_ms)
            return
        self.index.take(self.ids[slots].tolist())
        self.erase(slots, words)

    def forget_unused_names(self) -> None:
        """Remove names that no row carries, now and then."""
        for names, field in ((self.groups, "group"), (self.tags, "tag"), (self.holders, "holder")):
            if names.crowded(len(self.index)):
                names.keep_only(self.records[field][: self._used][self.kinds[: self._used] != EMPTY])

    def in_bucket(self, bucket: int) -> Indexes:
        """Return the slots of all rows of `bucket`."""
        slots: Indexes = np.flatnonzero(self.bucket[: self._used] == bucket)
        filled: Indexes = slots[self.kinds[slots] != EMPTY]
        return filled

    def every(self) -> Indexes:
        """Return the slots of all rows."""
        slots: Indexes = np.flatnonzero(self.kinds[: self._used] != EMPTY)
        return slots

    def sizes(self, records: Any) -> Int64:
        """Return bytes of payload and headers of gathered rows."""
        sizes: Int64 = records["payload_bytes"].astype(np.int64) + records["headers_bytes"]
        return sizes

    def rows(self, slots: Indexes, words: Int64, payload: bool) -> Rows:
        """Return gathered rows as `Rows`."""
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
    """Return a column of what only few rows have."""
    if not values:
        return same(b"", len(slots))
    return Ragged.of([values.get(slot, b"") for slot in slots.tolist()])
