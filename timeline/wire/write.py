"""Values → bytes: lay a frame's tables and vectors out from front to back and join them once.

FlatBuffers' own Builder spends most of its time on facts that the schema fixes, and copies a payload twice. Here each
table has one fixed arrangement: all scalars are written, the widest first. So a table is one `Struct.pack`, and its
vtable a constant. A payload is copied once, by the join.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from struct import error as StructError
from typing import Any, TypeAlias

import numpy as np

from timeline.columns import Buffer, Ragged
from timeline.errors import TooLarge
from timeline.wire.frames import MAJOR, MAX_FRAME_BYTES, MINOR
from timeline.wire.generated import layout
from timeline.wire.verify import DTYPES, SCALARS, WIDTHS, WireError

Get: TypeAlias = Callable[[str], Any]
"""Return the value of a field by its name in the schema. A column `x` with `x_offsets` is asked for as `x`."""

_UINT = DTYPES["[uint]"]
_COUNT = [Struct(f"<{padding}xI").pack for padding in range(8)]
"""A vector's length, with some padding before it."""
_RAGGED = "ragged"

_ROOT = Struct("<I4sHHHHHHiIHHB").pack
_ROOT_BYTES = 33
"""Offset of the root table, identifier, vtable (12 bytes), and root table (13 bytes, from 20 on)."""


class Arrangement:
    """The layout of the tables of one name: a vtable; then, at 4 modulo 8, the table. It begins with its soffset. The
    widest fields come first, so everything is aligned."""

    __slots__ = ("_slots", "_vtables", "fields", "pack", "size", "vtable_bytes")

    def __init__(self, table: str) -> None:
        raw = layout.TABLES[table]
        offsets = {name for name, *_ in raw if name.endswith("_offsets")}
        self.fields: list[tuple[str, str, int, int]] = []
        """(name, kind, place in the table, bit). Kind: of a scalar, a vector or a table; `string`; or `ragged`, whose
        bytes are 4 behind its offsets."""
        self._slots: list[tuple[int, int, int]] = []
        packing, at = ["<i"], 4
        arranged = sorted(raw, key=lambda field: (-WIDTHS[SCALARS.get(field[1], "I")], field[2]))
        for bit, (name, kind, slot, _) in enumerate(arranged):
            code = SCALARS.get(kind, "I")
            packing.append(code)
            self._slots.append((slot, at, bit))
            if name in offsets:
                self.fields.append((name.removesuffix("_offsets"), _RAGGED, at, bit))
            elif name + "_offsets" not in offsets:
                self.fields.append((name, kind, at, bit))
            at += WIDTHS[code]
        pack = Struct("".join(packing))
        self.pack = pack.pack
        self.size = pack.size
        self.vtable_bytes = 4 + 2 * len(raw)
        self._vtables: dict[int, bytes] = {}

    def vtable(self, absent: int) -> bytes:
        """Return the vtable of a table without the fields whose bits are in `absent`."""
        made = self._vtables.get(absent)
        if made is None:
            entries = [0] * len(self._slots)
            for slot, place, bit in self._slots:
                if not absent >> bit & 1:
                    entries[slot // 2 - 2] = place
            made = Struct(f"<HH{len(entries)}H").pack(self.vtable_bytes, self.size, *entries)
            self._vtables[absent] = made
        return made


_ARRANGEMENTS = {table: Arrangement(table) for table in layout.TABLES}
_KINDS = {name: number for number, name in layout.BODIES.items()}


class _Writer:
    """The parts of one frame so far. `end`: where the next part will lie."""

    __slots__ = ("end", "getter", "parts")

    def __init__(self, getter: Callable[[Any], Get]) -> None:
        self.parts: list[Buffer] = [b""]
        self.end = _ROOT_BYTES
        self.getter = getter

    def table(self, name: str, get: Get) -> int:
        """Write a table and everything that it refers to. Return its place."""
        arrangement = _ARRANGEMENTS[name]
        own = len(self.parts)
        self.parts.append(b"")
        room = self.end + arrangement.vtable_bytes
        padding = (4 - room) % 8
        start = room + padding
        self.end = start + arrangement.size
        values: list[int | float] = [arrangement.vtable_bytes]
        absent = 0
        for field, kind, place, bit in arrangement.fields:
            value = get(field)
            if kind in SCALARS:
                values.append(value)
            elif value is None or (kind == "string" and not value):
                if kind is _RAGGED:
                    absent |= 3 << bit
                    values.append(0)
                else:
                    absent |= 1 << bit
                values.append(0)
            elif kind is _RAGGED:
                values += self._ragged(value, start + place)
            elif kind == "string":
                text = value.encode()
                values.append(self._vector(text + b"\0", len(text), 4) - start - place)
            elif kind in DTYPES:
                values.append(self._column(value, DTYPES[kind]) - start - place)
            else:
                values.append(self.table(kind, self.getter(value)) - start - place)
        self.parts[own] = b"".join((bytes(padding), arrangement.vtable(absent), arrangement.pack(*values)))
        return start

    def _vector(self, data: Buffer, count: int, width: int) -> int:
        """Write a vector whose elements are aligned to `width`. Return its place."""
        padding = -(self.end + 4) % width
        at = self.end + padding
        self.parts += (_COUNT[padding](count), data)
        self.end = at + 4 + len(data)
        return at

    def _column(self, value: Any, dtype: np.dtype[Any]) -> int:
        if not isinstance(value, np.ndarray):
            return self._vector(value, len(value), 4)
        if value.dtype != dtype:
            value = value.astype(dtype)
        return self._vector(value.tobytes(), len(value), max(4, dtype.itemsize))

    def _ragged(self, column: Ragged, place: int) -> tuple[int, int]:
        offsets, data = column.offsets, column.data
        first, last = int(offsets[0]), int(offsets[-1])
        if first:
            offsets = offsets - first
        if offsets.dtype != _UINT:
            offsets = offsets.astype(_UINT)
        if first or last != len(data):
            data = memoryview(data)[first:last]
        marks = self._vector(offsets.tobytes(), len(offsets), 4) - place
        return marks, self._vector(data, last - first, 4) - place - 4


def write_frame(name: str, get: Get, getter: Callable[[Any], Get]) -> bytes:
    """Return a frame whose body is a table `name` of the values that `get` returns. `getter` makes such a function of
    the value of an inner table. Raise TooLarge, or WireError when a value does not fit its field."""
    writer = _Writer(getter)
    try:
        body = writer.table(name, get)
    except (StructError, UnicodeEncodeError, OverflowError) as bad:
        raise WireError(f"a {name} frame cannot carry these values: {bad}") from bad
    if writer.end > MAX_FRAME_BYTES:
        raise TooLarge(
            f"a frame may take {MAX_FRAME_BYTES} bytes, this one would take {writer.end}: send fewer messages"
        )
    # The root's vtable: its size, the root's size, then where major, minor, kind and body lie in the root.
    writer.parts[0] = _ROOT(20, layout.IDENTIFIER, 12, 13, 8, 10, 12, 4, 12, body - 24, MAJOR, MINOR, _KINDS[name])
    return b"".join(writer.parts)
