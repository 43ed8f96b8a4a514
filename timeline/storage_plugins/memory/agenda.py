"""An agenda: the memory store's index on times.

Entries are (time, slot, stamp) in numpy arrays, 16 bytes each. No entry is searched for to be removed. A row that
changes gets another stamp, which makes its earlier entries stale; stale entries are dropped when they are met.
New entries wait unsorted in a small buffer. A full buffer becomes a sorted run, and runs of similar size are merged. So
an entry is sorted a logarithmic number of times, and the earliest is the least of a few runs' heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from timeline.columns import Bools, Indexes, Int64, UInt32, UInt64

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
        (times, keys), (more_times, more_keys) = one.rest(), other.rest()
        return self._sorted(np.concatenate((times, more_times)), np.concatenate((keys, more_keys)))

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
    NUL, so padding with it keeps the order. The rest is compared only where these tie."""
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
