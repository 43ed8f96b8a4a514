"""Columns: batches of messages from wire to store and back, without an object per message.

Numbers are numpy arrays. Byte strings (ids, payloads, headers, tags) are a `Ragged` column: one block of bytes and
offsets into it, as they lie in a frame. Measured (`targets.md`): columns encode 9.1 M messages/s, a table per message
0.16 M.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise, repeat
from operator import attrgetter, call, getitem
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Self,
    TypeAlias,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

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
    """A column of n byte strings. `data` holds them back to back: item i is `data[offsets[i]:offsets[i + 1]]`.

    `offsets` has n + 1 entries, does not decrease, and need not start at 0: a slice shares its parent's data. Items
    come out as `bytes`. Immutable by convention.
    """

    __slots__ = ("_items", "data", "offsets")

    def __init__(self, data: Buffer, offsets: npt.NDArray[np.integer]) -> None:
        self.data = data
        self.offsets = offsets
        self._items: list[bytes] | None = None

    @classmethod
    def of(cls, items: Iterable[bytes]) -> Ragged:
        """Return a column of `items`. It keeps the list, so `tolist` costs nothing."""
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
        """Return a column of `count` times `item`."""
        return cls.of([item] * count)

    @classmethod
    def concat(cls, columns: Sequence[Ragged]) -> Ragged:
        """Return the columns one after the other."""
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
        """Return item `index` without a copy."""
        return memoryview(self.data)[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.tolist())

    def tolist(self) -> list[bytes]:
        """Return all items as `bytes`, made once and kept. numpy cuts items of one common length (~20 ns each)."""
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
        """The length of each item in bytes."""
        return (self.offsets[1:] - self.offsets[:-1]).astype(np.int64, copy=False)

    @property
    def nbytes(self) -> int:
        """The bytes of all items together."""
        return int(self.offsets[-1]) - int(self.offsets[0])

    def take(self, indexes: npt.NDArray[np.integer | np.bool_] | Sequence[int]) -> Ragged:
        """Return the items at `indexes` in that order, or those for which a mask is True."""
        items = self.tolist()
        if isinstance(indexes, np.ndarray) and indexes.dtype == np.bool_:
            if len(indexes) != len(items):
                raise IndexError(f"a mask of {len(indexes)} for {len(items)} items")
            indexes = np.flatnonzero(indexes)
        listed = indexes.tolist() if isinstance(indexes, np.ndarray) else indexes
        return Ragged.of([items[index] for index in listed])

    def compact(self) -> Ragged:
        """Return the same items with offsets from 0 and data of their own, apart from a larger frame."""
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


# ── batches ──


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a number may have, both ends included."""

    least: int
    most: int = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Text:
    """A rule for byte strings: `least` to `most` bytes of UTF-8, without NUL unless `nul`. `what`: the noun in
    messages."""

    what: str
    least: int
    most: int
    nul: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """A form of its own, which `wire.codec` knows by name."""

    name: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a batch, as its class declares it.

    `type`: the annotation without None and without `limit`. `kind`: `numbers` (of `dtype`), `strings` (a `Ragged`),
    `notes` (a dict by index), `batch` (of the same length), or `whole` (one value for the whole batch). `limit`: the
    allowed values.
    """

    name: str
    type: Any
    kind: str
    dtype: type[np.generic] | None
    optional: bool
    default: Any
    limit: Range | Text | Form | None

    def column(self, values: Sequence[Any]) -> Any:
        """Return a column of `values`; None where it may be left out and says nothing."""
        if self.optional and not any(values):
            return None
        return Ragged.of(list(values)) if self.dtype is None else np.fromiter(values, self.dtype, len(values))


_DTYPES: dict[Any, type[np.generic]] = {
    Int64: np.int64,
    UInt64: np.uint64,
    UInt32: np.uint32,
    UInt8: np.uint8,
    Bools: np.bool_,
}


class ColumnBatch:
    """The base of all batches: n messages as columns, each declared once as a field of a `dataclass(slots=True)`.

    The type of a field is an array alias of this module or a `Ragged`, either of them perhaps `| None`. A `dict[int,
    …]` has notes on single messages. Another batch has the same length. Any other type is one value for the whole
    batch. `Annotated` adds a `Range`, a `Text` or a `Form`. Fields with `init=False` are derived: a new batch starts
    without them.
    """

    __slots__ = ()
    columns: ClassVar[tuple[Field, ...]] = ()
    """Every field, in order."""
    _values: ClassVar[Any]
    _first: ClassVar[Any]
    _blanks: ClassVar[tuple[Callable[[int], Any], ...]] = ()
    _picks: ClassVar[tuple[Callable[[Any, Any], Any], ...]] = ()

    if TYPE_CHECKING:

        def __init__(self, *values: Any) -> None: ...

    def __init_subclass__(cls) -> None:
        # `dataclass(slots=True)` makes the class twice; the second one has its fields.
        if "__dataclass_fields__" not in cls.__dict__:
            return
        cls.columns = fields_of(cls)
        cls._values = attrgetter(*(field.name for field in cls.columns))
        always = {field.kind: field.name for field in reversed(cls.columns) if not field.optional}
        cls._first = attrgetter(always.get("numbers") or always.get("strings") or always["batch"])
        cls._blanks = tuple(_blanking(field) for field in cls.columns)
        cls._picks = tuple(_picking(field) for field in cls.columns)

    def __len__(self) -> int:
        return len(self._first(self))

    @classmethod
    def blank(cls, count: int) -> Self:
        """Return `count` messages of zeros and empty strings, without optional columns."""
        return cls._zeros(count)

    @classmethod
    def _zeros(cls, count: int) -> Self:
        return cls(*[blank(count) for blank in cls._blanks])

    @classmethod
    def filled(cls, count: int, **given: Any) -> Self:
        """Return `count` messages with the columns that are given; the others are blank, or None where optional."""
        blanks = zip(cls.columns, cls._blanks, strict=True)
        values = {field.name: blank(count) for field, blank in blanks if field.name not in given}
        return cls(**(values | given))

    @classmethod
    def of(cls, source: ColumnBatch, **given: Any) -> Self:
        """Return a batch about the messages of another one: columns that are not `given` are those of that name there.
        A number or byte string is given for each message alike. A column that is neither given nor there is blank,
        unless it is optional."""
        values = []
        for field, blank in zip(cls.columns, cls._blanks, strict=True):
            if field.name not in given:
                value = getattr(source, field.name, None)
                values.append(blank(len(source)) if value is None else value)
                continue
            value = given[field.name]
            if isinstance(value, int) and field.kind == "numbers":
                value = np.full(len(source), value, dtype=field.dtype)
            elif isinstance(value, bytes) and field.kind == "strings":
                value = Ragged.repeat(value, len(source))
            values.append(value)
        return cls(*values)

    def take(self, at: npt.NDArray[np.integer | np.bool_]) -> Self:
        """Return the messages at these indexes, in that order, or those where a mask says True."""
        if at.dtype == np.bool_:
            if len(at) != len(self):
                raise IndexError(f"a mask of {len(at)} for {len(self)} messages")
            at = np.flatnonzero(at)
        return type(self)(*map(call, self._picks, self._values(self), repeat(at)))

    def slice(self, start: int, stop: int) -> Self:
        """Return the messages from `start` up to `stop`, on the same columns; the batch itself when that is all."""
        if start == 0 and stop >= len(self):
            return self
        return type(self)(*map(call, self._picks, self._values(self), repeat(slice(start, stop))))

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Return the parts one after the other; what they say as a whole is the first one's. An optional column is
        there in all or in none of those that are not empty. Raise ValueError otherwise."""
        parts = [part for part in parts if len(part)] or parts[:1]
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls.blank(0)
        starts = list(accumulate(map(len, parts[:-1]), initial=0))
        values = zip(*map(cls._values, parts), strict=True)
        return cls(*[_concat(field, column, starts) for field, column in zip(cls.columns, values, strict=True)])

    def assign(self, where: Indexes, other: Self) -> None:
        """Put the messages of `other` in the place of those at `where`. Columns must be writable and in both."""
        for field, own, theirs in zip(self.columns, self._values(self), other._values(other), strict=True):
            if field.kind == "numbers" and own is not None:
                own[where] = theirs
            elif field.kind == "strings" and own is not None:
                items = own.tolist().copy()
                for at, item in zip(where.tolist(), theirs.tolist(), strict=True):
                    items[at] = item
                setattr(self, field.name, Ragged.of(items))
            elif field.kind == "notes" and (own or theirs):
                for at, place in enumerate(where.tolist()):
                    own.pop(place, None)
                    if at in theirs:
                        own[place] = theirs[at]
            elif field.kind == "batch":
                own.assign(where, theirs)


def fields_of(kind: type) -> tuple[Field, ...]:
    """Return what a dataclass declares of the fields that it is made of, in order."""
    hints = get_type_hints(kind, include_extras=True)
    declared = [field for field in dataclasses.fields(kind) if field.init]
    return tuple(_field_of(field, hints[field.name]) for field in declared)


def _field_of(field: dataclasses.Field[Any], hint: Any) -> Field:
    hint, notes = _plain(hint)
    optional = type(None) in get_args(hint)
    if optional:
        hint, inner = _plain(next(each for each in get_args(hint) if each is not type(None)))
        notes += inner
    limits = [note for note in notes if isinstance(note, Range | Text | Form)]
    if len(limits) > 1:
        raise TypeError(f"{field.name} has {len(limits)} limits: the Range or Text of a Form is its argument")
    limit = limits[0] if limits else None
    dtype = _DTYPES.get(hint)
    if dtype is not None:
        kind = "numbers"
    elif hint is Ragged:
        kind = "strings"
    elif get_origin(hint) is dict and get_args(hint)[0] is int:
        kind = "notes"
    elif isinstance(hint, type) and issubclass(hint, ColumnBatch):
        kind = "batch"
    else:
        kind = "whole"
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return Field(field.name, hint, kind, dtype, optional, default, limit)


def _plain(hint: Any) -> tuple[Any, list[Any]]:
    """Return a type without its annotations, and those."""
    if get_origin(hint) is not Annotated:
        return hint, []
    hint, *notes = get_args(hint)
    return hint, notes


Picked: TypeAlias = Indexes | slice
"""Which messages of a batch are picked: indexes, or a slice from one to another."""


def _pick_strings(column: Ragged, at: Picked) -> Ragged:
    return column[at] if isinstance(at, slice) else column.take(at)


def _pick_notes(notes: dict[int, Any], at: Picked) -> dict[int, Any]:
    if not notes:
        return {}
    if isinstance(at, slice):
        return {index - at.start: note for index, note in notes.items() if at.start <= index < at.stop}
    return {new: notes[old] for new, old in enumerate(at.tolist()) if old in notes}


def _pick_batch(batch: ColumnBatch, at: Picked) -> ColumnBatch:
    return batch.slice(at.start, at.stop) if isinstance(at, slice) else batch.take(at)


_PICKS: dict[str, Callable[[Any, Any], Any]] = {
    "numbers": getitem,
    "strings": _pick_strings,
    "notes": _pick_notes,
    "batch": _pick_batch,
    "whole": lambda value, at: value,
}


def _picking(field: Field) -> Callable[[Any, Picked], Any]:
    pick = _PICKS[field.kind]
    if not field.optional or field.kind == "whole":
        return pick
    return lambda column, at: None if column is None else pick(column, at)


def _blanking(field: Field) -> Callable[[int], Any]:
    if field.optional:
        return lambda count: None
    if field.kind == "numbers":
        return partial(np.zeros, dtype=field.dtype)
    if field.kind == "strings":
        return partial(Ragged.repeat, b"")
    if field.kind == "batch":
        blank: Callable[[int], Any] = field.type.blank
        return blank
    return lambda count: {} if field.kind == "notes" else field.default


def _concat(field: Field, values: Sequence[Any], starts: Sequence[int]) -> Any:
    if field.kind == "whole":
        return values[0]
    if field.kind == "notes":
        return {start + at: note for start, notes in zip(starts, values, strict=True) for at, note in notes.items()}
    missing = [value is None for value in values]
    if all(missing):
        return None
    if any(missing):
        raise ValueError(f"batches with {field.name} and batches without cannot be joined")
    if field.kind == "numbers":
        return np.concatenate(values)
    return Ragged.concat(values) if field.kind == "strings" else type(values[0]).concat(values)
