"""Names as small numbers: a group, tag or holder is kept once, and rows carry its number."""

from __future__ import annotations

import numpy as np

from timeline.columns import Ragged, UInt32

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
    """Names and their numbers; 0 is the empty name."""

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


__all__ = ["UNKNOWN", "Names", "only_item", "same"]
