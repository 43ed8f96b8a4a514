"""What a topic's rows are made of: columns that grow without a pause, the index of ids, and names as small numbers.

A column twice as long, with all of it copied, is a pause of a tenth of a second at a million messages, and a dictionary
of as many that rehashes itself half of one: that would be lateness. So a long column lies in memory mapped for itself,
which the kernel moves by its page tables; and a large index is many small dictionaries.
"""

from __future__ import annotations

import mmap
from itertools import islice, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from timeline.columns import Ragged, UInt32

MAPPED_ABOVE_BYTES = 1024 * 1024
"""A shorter column is copied: a mapping each would be much for a small topic."""


class GrowingColumn:
    """A column of numbers, zero where nothing was written. `array` is all of it; nobody may keep a view of it or a part
    of it when it grows (it is then copied after all)."""

    def __init__(self, dtype: npt.DTypeLike, capacity: int, width: int = 0) -> None:
        self._dtype = np.dtype(dtype)
        self._width = width
        self._memory: mmap.mmap | None = None
        self.array: npt.NDArray[Any] = np.zeros((capacity, width) if width else capacity, self._dtype)

    def grow(self, capacity: int) -> None:
        """Makes room for `capacity` rows in all."""
        size = capacity * self._dtype.itemsize * max(1, self._width)
        if size < MAPPED_ABOVE_BYTES:
            self._copy(np.zeros((capacity, self._width) if self._width else capacity, self._dtype))
        elif not self._extended(size):
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._copy(self._over(memory))
            self._memory = memory

    def _extended(self, size: int) -> bool:
        """Whether the mapping could be made longer where it is, or moved as a whole."""
        if self._memory is None:
            return False
        before = self.array
        self.array = before[:0].copy()
        del before
        try:
            self._memory.resize(size)
        except (BufferError, SystemError):  # A view is about, or this system cannot: there is still the copy.
            return False
        finally:  # Whatever went wrong, memory that has run out too, what it holds is there.
            self.array = self._over(self._memory)
        return True

    def _copy(self, longer: npt.NDArray[Any]) -> None:
        longer[: len(self.array)] = self.array
        self.array = longer

    def _over(self, memory: mmap.mmap) -> npt.NDArray[Any]:
        flat = np.frombuffer(memory, self._dtype)
        return flat.reshape(-1, self._width) if self._width else flat


def objects(capacity: int) -> npt.NDArray[np.object_]:
    """A column of objects, None throughout."""
    return np.full(capacity, None, dtype=np.object_)


def grow_objects(column: npt.NDArray[np.object_], capacity: int) -> None:
    """Makes room for `capacity` objects in all. Nobody may keep a view of it."""
    column.resize(capacity, refcheck=False)


YOUNG = 80_000
"""Ids in the first dictionary; a little above it grows to twice its size, in some milliseconds."""
PARTS = 256
MOVED_AT_ONCE = 2_048
_MASK = PARTS - 1


class Index:
    """Ids and their slots. New ids are noted in one dictionary, where most of them live and die. When there are more
    than YOUNG, the oldest move a few at a time, each into one of PARTS by its hash."""

    def __init__(self) -> None:
        self._young: dict[bytes, int] = {}
        self._parts: list[dict[bytes, int]] = []
        self._in_parts = 0

    def __len__(self) -> int:
        return len(self._young) + self._in_parts

    def __contains__(self, id: bytes) -> bool:
        return self.get(id) >= 0

    def get(self, id: bytes) -> int:
        """The slot of `id`, -1 when there is none."""
        slot = self._young.get(id, -1)
        return slot if slot >= 0 or not self._in_parts else self._parts[hash(id) & _MASK].get(id, -1)

    def find(self, ids: list[bytes]) -> list[int]:
        """The slot of each id, -1 where there is none."""
        slots = list(map(self._young.get, ids, repeat(-1)))
        if self._in_parts and -1 in slots:
            parts = self._parts
            slots = [
                slot if slot >= 0 else parts[hash(id) & _MASK].get(id, -1) for id, slot in zip(ids, slots, strict=True)
            ]
        return slots

    def add(self, ids: list[bytes], slots: list[int]) -> bool:
        """Notes new ids with their slots; changes nothing and says False when one is there already, or comes twice."""
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
        """Takes ids out; their slots, -1 where there was none."""
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
        """Undoes a `take`: notes the ids whose slot it found."""
        self._young.update((id, slot) for id, slot in zip(ids, slots, strict=True) if slot >= 0)

    def _move(self) -> None:
        """Moves the oldest of the young to where they belong."""
        young = self._young
        self._parts = parts = self._parts or [{} for _ in range(PARTS)]
        oldest = list(islice(young, max(MOVED_AT_ONCE, len(young) - YOUNG)))
        for id in oldest:
            parts[hash(id) & _MASK][id] = young.pop(id)
        self._in_parts += len(oldest)


KEEP = 1024
"""So many names are kept before unused ones are looked for."""
UNKNOWN = np.uint32(0xFFFF_FFFF)


def only_item(column: Ragged) -> bytes | None:
    """The one item that a column says throughout; None when items differ. Costs a memory comparison."""
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
    """A column that says `item` `count` times, made without looking at each."""
    return Ragged(item * count, np.arange(count + 1, dtype=np.int64) * len(item))


class Names:
    """Names and their numbers: a group, tag or holder is kept once, and rows carry its number. 0 is the empty name."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {b"": 0}
        self._names: list[bytes | None] = [b""]
        self._unused: list[int] = []
        self._look_at = KEEP

    def number(self, name: bytes) -> int:
        """The number of `name`, a new one when it is new."""
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
        """The numbers of a column of names."""
        item = only_item(column)
        if item is not None:
            return np.full(len(column), self.number(item), dtype=np.uint32)
        return np.fromiter(map(self.number, column.tolist()), dtype=np.uint32, count=len(column))

    def known(self, column: Ragged) -> UInt32:
        """The same without adding any: UNKNOWN where a name is new."""
        item = only_item(column)
        if item is not None:
            return np.full(len(column), self._numbers.get(item, UNKNOWN), dtype=np.uint32)
        found = [self._numbers.get(name, UNKNOWN) for name in column.tolist()]
        return np.array(found, dtype=np.uint32)

    def find(self, name: bytes) -> int | None:
        """The number of `name` when it has one."""
        return self._numbers.get(name)

    def name(self, number: int) -> bytes:
        """The name with `number`."""
        return self._names[number] or b""

    def column(self, numbers: UInt32) -> Ragged:
        """The names of a column of numbers."""
        if len(numbers) and bool((numbers == numbers[0]).all()):
            return same(self.name(int(numbers[0])), len(numbers))
        return Ragged.of([self.name(number) for number in numbers.tolist()])

    def crowded(self, rows: int) -> bool:
        """Whether it is worth looking for unused names on a topic of `rows` rows."""
        return len(self._numbers) >= max(self._look_at, rows // 64)

    def keep_only(self, numbers: UInt32) -> None:
        """Forgets all names but those numbered `numbers`."""
        kept = set(np.unique(numbers).tolist()) | {0}
        for name, number in list(self._numbers.items()):
            if number not in kept:
                del self._numbers[name]
                self._names[number] = None
                self._unused.append(number)
        self._look_at = max(KEEP, 2 * len(self._numbers))
