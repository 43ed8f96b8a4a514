"""Columns: how a batch of messages travels from wire to store and back without an object a message.

Numbers are numpy arrays; byte strings (ids, payloads, headers, tags) are a `Ragged` column: one block of bytes and
offsets into it, just as they lie in a frame. Measured (`targets.md`): columns encode 9.1 M messages/s, a table per
message 0.16 M.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias, overload

import numpy as np
import numpy.typing as npt

Int64: TypeAlias = npt.NDArray[np.int64]
UInt64: TypeAlias = npt.NDArray[np.uint64]
UInt32: TypeAlias = npt.NDArray[np.uint32]
UInt8: TypeAlias = npt.NDArray[np.uint8]
Bools: TypeAlias = npt.NDArray[np.bool_]
Indexes: TypeAlias = npt.NDArray[np.intp]

Buffer: TypeAlias = bytes | bytearray | memoryview

_FEW = 32
"""Up to here plain Python is quicker than a handful of numpy calls."""


class Ragged(Sequence[bytes]):
    """A column of n byte strings: `data` holds them back to back, item i is `data[offsets[i]:offsets[i + 1]]`.

    `offsets` has n + 1 entries, does not decrease, and need not start at 0 (a slice shares its parent's data).
    Items come out as `bytes`. Immutable by convention.
    """

    __slots__ = ("_items", "data", "offsets")

    def __init__(self, data: Buffer, offsets: npt.NDArray[np.integer]) -> None:
        self.data = data
        self.offsets = offsets
        self._items: list[bytes] | None = None

    @classmethod
    def of(cls, items: Iterable[bytes]) -> Ragged:
        """A column of `items`; keeps the list, so that `tolist` costs nothing."""
        listed = items if isinstance(items, list) else list(items)
        if len(listed) <= _FEW:
            offsets = np.array([0, *accumulate(map(len, listed))], dtype=np.int64)
        else:
            offsets = np.zeros(len(listed) + 1, dtype=np.int64)
            np.cumsum(np.fromiter(map(len, listed), dtype=np.int64, count=len(listed)), out=offsets[1:])
        column = cls(b"".join(listed), offsets)
        column._items = listed
        return column

    @classmethod
    def repeat(cls, item: bytes, count: int) -> Ragged:
        """A column that says `item` `count` times."""
        return cls.of([item] * count)

    @classmethod
    def concat(cls, columns: Sequence[Ragged]) -> Ragged:
        """The columns one after the other."""
        if len(columns) == 1:
            return columns[0]
        parts, offsets, base = [], [np.zeros(1, dtype=np.int64)], 0
        for column in columns:
            start, end = int(column.offsets[0]), int(column.offsets[-1])
            parts.append(memoryview(column.data)[start:end])
            offsets.append(column.offsets[1:].astype(np.int64) - start + base)
            base += end - start
        joined = cls(b"".join(parts), np.concatenate(offsets))
        if all(column._items is not None for column in columns):
            joined._items = [item for column in columns for item in column._items or ()]
        return joined

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Ragged: ...
    def __getitem__(self, index: int | slice) -> bytes | Ragged:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return self.take(np.arange(start, stop, step))
            part = Ragged(self.data, self.offsets[start : max(start, stop) + 1])
            if self._items is not None:
                part._items = self._items[start:stop]
            return part
        if self._items is not None:
            return self._items[index]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        return bytes(self.data[int(self.offsets[index]) : int(self.offsets[index + 1])])

    def view(self, index: int) -> memoryview:
        """Item `index` without a copy."""
        return memoryview(self.data)[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.tolist())

    def tolist(self) -> list[bytes]:
        """All items as `bytes`, made once and kept. Items of one common length are cut by numpy (~20 ns each)."""
        if self._items is None:
            self._items = self._cut()
        return self._items

    def _cut(self) -> list[bytes]:
        count = len(self)
        if count == 0:
            return []
        start, end = int(self.offsets[0]), int(self.offsets[-1])
        if count == 1:
            return [bytes(self.data[start:end])]
        sizes = self.sizes
        size = int(sizes[0])
        if size and size * count == end - start and bool((sizes == size).all()):
            whole: list[bytes] = np.frombuffer(self.data, f"V{size}", count, start).tolist()
            return whole
        data = bytes(self.data[start:end]) if not isinstance(self.data, bytes) else self.data
        marks = (self.offsets if data is self.data else self.offsets - start).tolist()
        return [data[low:high] for low, high in pairwise(marks)]

    @property
    def sizes(self) -> Int64:
        """Length in bytes of each item."""
        return (self.offsets[1:] - self.offsets[:-1]).astype(np.int64, copy=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all items together."""
        return int(self.offsets[-1]) - int(self.offsets[0])

    def take(self, indexes: npt.NDArray[np.integer | np.bool_] | Sequence[int]) -> Ragged:
        """The items at `indexes`, in that order, or, as in numpy, those where a mask says True."""
        items = self.tolist()
        if isinstance(indexes, np.ndarray) and indexes.dtype == np.bool_:
            if len(indexes) != len(items):
                raise IndexError(f"a mask of {len(indexes)} for {len(items)} items")
            indexes = np.flatnonzero(indexes)
        listed = indexes.tolist() if isinstance(indexes, np.ndarray) else indexes
        return Ragged.of([items[index] for index in listed])

    def compact(self) -> Ragged:
        """The same items with offsets from 0 and data of their own (cut loose from a larger frame)."""
        start = int(self.offsets[0])
        if start == 0 and len(self.data) == int(self.offsets[-1]) and isinstance(self.data, bytes):
            return self
        packed = Ragged(bytes(self.data[start : int(self.offsets[-1])]), self.offsets - start)
        packed._items = self._items
        return packed

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Ragged):
            return self.tolist() == other.tolist()
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ragged({len(self)} items, {self.nbytes} bytes)"
