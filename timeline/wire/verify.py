"""Bytes → verified values: nothing of a frame can be read here without having been checked first.

FlatBuffers' Python runtime has no verifier, so this reads frames by itself: `find_body` checks cap, identifier and
root; a `Table` is made only of a table whose vtable and fields lie inside the buffer, aligned and apart from each
other; its methods check each offset, length and string they follow. Vectors come out as views of the buffer. The
schema has no vectors of tables and no recursive tables, so work is bounded by a schema's number of fields and by the
bytes of the frame, whatever the offsets say.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from timeline.columns import Int64, UInt8, UInt32, UInt64
from timeline.errors import Invalid
from timeline.wire.frames import MAJOR, MAX_FRAME_BYTES, MINOR
from timeline.wire.generated import layout

Data: TypeAlias = bytes | memoryview

SCALARS = {"ubyte": "B", "bool": "B", "ushort": "H", "uint": "I", "long": "q", "ulong": "Q", "double": "d"}
WIDTHS = {"B": 1, "H": 2, "I": 4, "q": 8, "Q": 8, "d": 8}
"""The schema's scalar types: their codes in a struct, and what those take."""

_U32 = Struct("<I").unpack_from
_VTABLE = Struct("<i").unpack_from
_VTABLE_HEAD = Struct("<HH").unpack_from
_U16 = Struct("<H").unpack_from

_LONG = np.dtype("<i8")
_ULONG = np.dtype("<u8")
_UINT = np.dtype("<u4")
_UBYTE = np.dtype("u1")

_MAX_SHAPES = 64
"""Different vtables remembered per table; honest encoders make a handful."""


class WireError(Invalid):
    """The bytes are no frame that this side may use; the sentence says what is wrong. Nothing of it was used."""

    advice = "the frame is damaged, or was not made by a Timeline driver or broker"


class WireVersionError(WireError):
    """The peer speaks another major version of the wire; the sentence says which side to upgrade."""


class UnknownFrame(WireError):
    """A sound frame of a newer minor whose kind this side does not know: on a stream it is passed over."""


class Shape:
    """What one vtable says about one table: which fields are there and where, checked once for all frames that have the
    same vtable (at the same alignment)."""

    __slots__ = ("absent", "names", "places", "unpack")

    def __init__(self, table: str, vtable: bytes, alignment: int) -> None:
        size = _U16(vtable, 2)[0]
        self.absent: tuple[int | float, ...] = ()
        """Defaults of the scalar fields that are not there; their names come last in `names`."""
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
        self.unpack = Struct(_packing(table, sorted(present))).unpack_from
        self.absent = tuple(defaults.values())
        self.names = (*(name for _, _, name in sorted(present)), *defaults)


def _packing(table: str, fields: list[tuple[int, str, str]]) -> str:
    """A format that takes the fields apart in one step. Refuses fields that lie upon each other."""
    packing, end = ["<"], 0
    for at, code, name in fields:
        if at < end:
            raise WireError(f"{table}.{name} lies upon another field")
        packing.append(f"{at - end}x{code}")
        end = at + WIDTHS[code]
    return "".join(packing)


class Shapes:
    """The shapes of one table met so far. Bounded: past `_MAX_SHAPES` the oldest is forgotten."""

    __slots__ = ("_known", "_longest", "_table")

    def __init__(self, table: str) -> None:
        self._table = table
        self._longest = max(slot for _, _, slot, _ in layout.TABLES[table]) + 2
        self._known: dict[tuple[bytes, int], Shape] = {}

    def of(self, data: Data, start: int) -> Shape:
        """The shape of the table at `start`, its vtable, fields and alignment checked. Raises WireError."""
        size = len(data)
        if start & 3 or start + 4 > size:
            raise WireError(f"{self._table} lies outside the frame or is not aligned")
        vtable = start - _VTABLE(data, start)[0]
        if vtable < 0 or vtable & 1 or vtable + 4 > size:
            raise WireError(f"the vtable of {self._table} lies outside the frame or is not aligned")
        vtable_bytes, table_bytes = _VTABLE_HEAD(data, vtable)
        if vtable_bytes < 4 or vtable_bytes & 1 or vtable + vtable_bytes > size:
            raise WireError(f"the vtable of {self._table} does not fit into the frame")
        if table_bytes < 4 or start + table_bytes > size:
            raise WireError(f"{self._table} does not fit into the frame")
        key = (bytes(data[vtable : vtable + min(vtable_bytes, self._longest)]), start & 7)
        shape = self._known.get(key)
        if shape is None:
            shape = Shape(self._table, *key)
            if len(self._known) >= _MAX_SHAPES:
                del self._known[next(iter(self._known))]
            self._known[key] = shape
        return shape


_SHAPES = {table: Shapes(table) for table in layout.TABLES}


class Table:
    """One sound table of a frame. Its methods follow and check what it refers to, and raise WireError.

    `name`: the schema's. `lenient`: the frame is of a newer minor. Vectors that are absent or of no length are None.
    """

    __slots__ = ("data", "lenient", "name", "places", "start", "values")

    def __init__(self, name: str, data: Data, start: int, lenient: bool) -> None:
        shape = _SHAPES[name].of(data, start)
        self.name = name
        self.data = data
        self.start = start
        self.lenient = lenient
        self.places = shape.places
        self.values: dict[str, int | float] = dict(
            zip(shape.names, shape.unpack(data, start) + shape.absent, strict=True)
        )

    def whole(self, field: str) -> int:
        """A scalar of a whole number type."""
        return self.values[field]  # type: ignore[return-value]

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
        """Where the offset of `field` leads, aligned and with 4 bytes there; None when the field is absent."""
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

    def ubytes(self, field: str) -> UInt8 | None:
        """A vector of ubyte, as an array on the buffer; likewise the next three."""
        return self._vector(field, _UBYTE, 1)

    def uints(self, field: str) -> UInt32 | None:
        return self._vector(field, _UINT, 4)

    def longs(self, field: str) -> Int64 | None:
        return self._vector(field, _LONG, 8)

    def ulongs(self, field: str) -> UInt64 | None:
        return self._vector(field, _ULONG, 8)

    def _vector(self, field: str, dtype: np.dtype[Any], width: int) -> npt.NDArray[Any] | None:
        at = self.target(field)
        if at is None:
            return None
        count = _U32(self.data, at)[0]
        at += 4
        if at + count * width > len(self.data):
            raise self.refusal(field, "is longer than the frame")
        if count and at % width:
            raise self.refusal(field, "is not aligned")
        return np.frombuffer(self.data, dtype, count, at)

    def refusal(self, field: str, why: str) -> WireError:
        """The error that says what is wrong with `field`."""
        return WireError(f"{self.name}.{field} {why}")


class FrameBody(NamedTuple):
    """Where a frame's body lies. `lenient`: the frame is of a newer minor."""

    name: str
    data: Data
    start: int
    lenient: bool


def is_frame(data: bytes | memoryview) -> bool:
    """Whether `data` says that it is a frame. A message of another protocol does not."""
    return len(data) >= 12 and data[4:8] == layout.IDENTIFIER


def minor_of(data: bytes) -> int:
    """Return the minor version of the wire that the sender of a frame speaks. Raise WireError for what is no frame."""
    find_body(data)
    return int(Table("Frame", data, _U32(data, 0)[0], False).whole("minor"))


def find_body(data: bytes | bytearray | memoryview) -> FrameBody:
    """The body of a frame, after its root was verified. `data` must not be changed while what is read is in use.

    Raises WireError, WireVersionError (another major) or UnknownFrame (a body that only a newer minor knows).
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
