"""Bytes → verified values: every part of a frame is checked before it is read.

FlatBuffers' Python runtime has no verifier, so this module reads frames by itself. `find_body` checks size, identifier
and root. A `Table` exists only if its vtable and fields lie inside the buffer, aligned and apart from each other. Its
methods check each offset, length and string that they follow. Vectors are views of the buffer.

The schema has no vectors of tables and no recursive tables. So the number of fields and the bytes of the frame bound
the work, whatever the offsets are.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from timeline.errors import Invalid
from timeline.wire.frames import MAJOR, MAX_FRAME_BYTES, MINOR
from timeline.wire.generated import layout

Data: TypeAlias = bytes | memoryview

SCALARS = {"ubyte": "B", "bool": "B", "ushort": "H", "uint": "I", "long": "q", "ulong": "Q", "double": "d"}
WIDTHS = {"B": 1, "H": 2, "I": 4, "q": 8, "Q": 8, "d": 8}
"""The schema's scalar types: their codes in a struct, and the bytes of those."""

DTYPES: dict[str, np.dtype[Any]] = {
    "[ubyte]": np.dtype("u1"),
    "[uint]": np.dtype("<u4"),
    "[long]": np.dtype("<i8"),
    "[ulong]": np.dtype("<u8"),
}
"""The schema's vectors of numbers, as arrays."""

_U32 = Struct("<I").unpack_from
_VTABLE = Struct("<i").unpack_from
_VTABLE_HEAD = Struct("<HH").unpack_from
_U16 = Struct("<H").unpack_from

_MAX_SHAPES = 64
"""Different vtables remembered per table; honest encoders make a handful."""


class WireError(Invalid):
    """The bytes are no frame that this side may use. Nothing of them was used."""

    advice = "the frame is damaged, or no Timeline driver or broker made it"


class WireVersionError(WireError):
    """The peer speaks another major version of the wire. The message says which side to upgrade."""


class UnknownFrame(WireError):
    """A sound frame of a newer minor, of a kind that this side does not know. Streams skip it."""


class Shape:
    """Which fields of a table one vtable has, and where. Checked once for all frames that have the same vtable at the
    same alignment."""

    __slots__ = ("absent", "names", "places", "unpack")

    def __init__(self, table: str, vtable: bytes, alignment: int) -> None:
        size = _U16(vtable, 2)[0]
        self.places: dict[str, int] = {}
        """Where each offset lies in the table."""
        present: list[tuple[int, str, str]] = []
        defaults: dict[str, int | float] = {}
        for name, kind, slot, default in layout.TABLES[table]:
            code = SCALARS.get(kind, "I")
            at = _U16(vtable, slot)[0] if slot + 2 <= len(vtable) else 0
            if not at:
                if kind in SCALARS:
                    defaults[name] = default
                continue
            width = WIDTHS[code]
            if at < 4 or at + width > size:
                raise WireError(f"{table}.{name} lies outside its table")
            if (alignment + at) % width:
                raise WireError(f"{table}.{name} is not aligned")
            if kind not in SCALARS:
                self.places[name] = at
            present.append((at, code, name))
        packing, end = ["<"], 0
        for at, code, name in sorted(present):
            if at < end:
                raise WireError(f"{table}.{name} lies upon another field")
            packing.append(f"{at - end}x{code}")
            end = at + WIDTHS[code]
        self.unpack = Struct("".join(packing)).unpack_from
        self.absent = tuple(defaults.values())
        """Defaults of the scalar fields that are missing; their names come last in `names`."""
        self.names = (*(name for _, _, name in sorted(present)), *defaults)


_SHAPES: dict[str, dict[tuple[bytes, int], Shape]] = {table: {} for table in layout.TABLES}
"""The shapes met so far. Past `_MAX_SHAPES` of a table, its oldest is forgotten."""
_LONGEST = {table: max(slot for _, _, slot, _ in fields) + 2 for table, fields in layout.TABLES.items()}
"""Bytes of a vtable that name known fields."""


def _shape_of(table: str, data: Data, start: int) -> Shape:
    """Return the shape of the table at `start`. Raise WireError for a bad vtable, field or alignment."""
    size = len(data)
    if start & 3 or start + 4 > size:
        raise WireError(f"{table} lies outside the frame or is not aligned")
    vtable = start - _VTABLE(data, start)[0]
    if vtable < 0 or vtable & 1 or vtable + 4 > size:
        raise WireError(f"the vtable of {table} lies outside the frame or is not aligned")
    vtable_bytes, table_bytes = _VTABLE_HEAD(data, vtable)
    if vtable_bytes < 4 or vtable_bytes & 1 or vtable + vtable_bytes > size:
        raise WireError(f"the vtable of {table} does not fit into the frame")
    if table_bytes < 4 or start + table_bytes > size:
        raise WireError(f"{table} does not fit into the frame")
    key = (bytes(data[vtable : vtable + min(vtable_bytes, _LONGEST[table])]), start & 7)
    known = _SHAPES[table]
    shape = known.get(key)
    if shape is None:
        shape = Shape(table, *key)
        if len(known) >= _MAX_SHAPES:
            del known[next(iter(known))]
        known[key] = shape
    return shape


class Table:
    """One sound table of a frame. Its methods follow and check its offsets, and raise WireError.

    `name`: the schema's. `lenient`: the frame is of a newer minor. `count`: the number of messages, once the first
    column was read; -1 before. Vectors that are absent are None.
    """

    __slots__ = ("count", "data", "lenient", "name", "places", "start", "values")

    def __init__(self, name: str, data: Data, start: int, lenient: bool) -> None:
        shape = _shape_of(name, data, start)
        self.name = name
        self.data = data
        self.start = start
        self.lenient = lenient
        self.count = -1
        self.places = shape.places
        self.values: dict[str, int | float] = dict(
            zip(shape.names, shape.unpack(data, start) + shape.absent, strict=True)
        )

    def whole(self, field: str, least: int | None = None, most: int | None = None) -> int:
        """A scalar of a whole number type, `least` to `most` if given."""
        value: int = self.values[field]  # type: ignore[assignment]
        if least is not None and most is not None and not least <= value <= most:
            raise self.refusal(field, f"is {value}; allowed are {least} to {most}")
        return value

    def real(self, field: str) -> float:
        """A double."""
        return self.values[field]

    def flag(self, field: str) -> bool:
        """A bool."""
        value = self.values[field]
        if value > 1:
            raise self.refusal(field, "is neither 0 nor 1")
        return value == 1

    def target(self, field: str) -> int | None:
        """Return where the offset of `field` leads: aligned, with 4 bytes there. None: the field is absent."""
        place = self.places.get(field)
        if place is None:
            return None
        at: int = self.start + place + self.values[field]  # type: ignore[assignment]
        if at & 3 or at == self.start + place or at + 4 > len(self.data):
            raise self.refusal(field, "leads outside the frame, to itself, or is not aligned")
        return at

    def text(self, field: str) -> str:
        """A string; empty when absent."""
        at = self.target(field)
        if at is None:
            return ""
        length = _U32(self.data, at)[0]
        end = at + 4 + length
        if end + 1 > len(self.data) or self.data[end]:
            raise self.refusal(field, "does not end inside the frame with a zero byte")
        try:
            return str(self.data[at + 4 : end], "utf-8")
        except UnicodeDecodeError:
            raise self.refusal(field, "is not UTF-8") from None

    def blob(self, field: str) -> memoryview | None:
        """A vector of bytes, as a view."""
        at = self.target(field)
        if at is None:
            return None
        end = at + 4 + _U32(self.data, at)[0]
        if end > len(self.data):
            raise self.refusal(field, "is longer than the frame")
        return memoryview(self.data)[at + 4 : end]

    def vector(self, field: str, dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
        """A vector of numbers, as an array on the buffer."""
        at = self.target(field)
        if at is None:
            return None
        count, width = _U32(self.data, at)[0], dtype.itemsize
        at += 4
        if at + count * width > len(self.data):
            raise self.refusal(field, "is longer than the frame")
        if count and at % width:
            raise self.refusal(field, "is not aligned")
        return np.frombuffer(self.data, dtype, count, at)

    def refusal(self, field: str, why: str) -> WireError:
        """Return the error for a bad `field`."""
        return WireError(f"{self.name}.{field} {why}")


class FrameBody(NamedTuple):
    """Where a frame's body lies. `lenient`: the frame is of a newer minor."""

    name: str
    data: Data
    start: int
    lenient: bool


def is_frame(data: bytes | memoryview) -> bool:
    """Return whether `data` has the identifier of a frame. Messages of other protocols do not."""
    return len(data) >= 12 and data[4:8] == layout.IDENTIFIER


def minor_of(data: bytes) -> int:
    """Return the minor version of the wire that a frame's sender speaks. Raise WireError if it is no frame."""
    find_body(data)
    return int(Table("Frame", data, _U32(data, 0)[0], False).whole("minor"))


def find_body(data: bytes | bytearray | memoryview) -> FrameBody:
    """Return the body of a frame whose root is sound. Its values are views: do not change `data` while they are used.

    Raise WireError, WireVersionError (another major) or UnknownFrame (a body that only a newer minor knows).
    """
    if not isinstance(data, bytes):
        data = memoryview(data).cast("B")
    if len(data) > MAX_FRAME_BYTES:
        raise WireError(f"a frame may take {MAX_FRAME_BYTES} bytes, this one has {len(data)}")
    if not is_frame(data):
        raise WireError(f"these {len(data)} bytes are no frame: they do not carry {layout.IDENTIFIER.decode()!r}")
    root = Table("Frame", data, _U32(data, 0)[0], False)
    major, minor, kind = root.whole("major"), root.whole("minor"), root.whole("body_type")
    if major != MAJOR:
        raise WireVersionError(
            f"this side speaks version {MAJOR}.{MINOR} of the wire, the peer {major}.{minor}: "
            f"upgrade {'this side' if major > MAJOR else 'the peer'}"
        )
    name = layout.BODIES.get(kind)
    if name is None:
        if minor > MINOR:
            raise UnknownFrame(
                f"a frame of version {major}.{minor}, of kind {kind}, that {MAJOR}.{MINOR} does not know"
            )
        raise WireError(f"there is no frame of kind {kind}")
    start = root.target("body")
    if start is None:
        raise WireError("the frame has no body")
    return FrameBody(name, data, start, minor > MINOR)
