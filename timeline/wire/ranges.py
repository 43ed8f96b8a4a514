"""A verified table whose values are also in range: what `decode` reads frames with.

Every method raises WireError with the field's name and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt

from timeline.columns import Int64, Ragged, UInt8, UInt32, UInt64
from timeline.errors import Invalid
from timeline.model import (
    MAX_BATCH,
    MAX_DURATION_MS,
    MAX_GROUP_BYTES,
    MAX_REASON_BYTES,
    MAX_TAG_BYTES,
    MAX_TIME_MS,
    check_topic_name,
)
from timeline.wire.frames import MAX_COUNT
from timeline.wire.validate import is_utf8, validate_texts, within
from timeline.wire.verify import Data, Place, Table

MAX_INT64 = 2**63 - 1
MAX_CURSOR_BYTES = 4096
_FEW = 32


class Body(Table):
    """The body of a frame, or a table in it. `count`: its number of messages, once its first column was read."""

    __slots__ = ("count",)

    def __init__(self, name: str, data: Data, start: int, lenient: bool) -> None:
        super().__init__(name, data, start, lenient)
        self.count = -1

    @classmethod
    def at(cls, place: Place) -> Body:
        return cls(*place)

    def part(self, field: str, name: str) -> Body:
        """The table `name` that `field` refers to; it must be there."""
        at = self.target(field)
        if at is None:
            raise self.refusal(field, "is missing")
        return Body(name, self.data, at, self.lenient)

    # -- single values ---------------------------------------------------------------------------------------------

    def number(self, field: str, least: int, most: int) -> int:
        value = self.whole(field)
        if not least <= value <= most:
            raise self.refusal(field, f"is {value}; allowed are {least} to {most}")
        return value

    def time(self, field: str) -> int:
        return self.number(field, 0, MAX_TIME_MS)

    def duration(self, field: str) -> int:
        return self.number(field, 0, MAX_DURATION_MS)

    def tally(self, field: str) -> int:
        return self.number(field, 0, MAX_COUNT)

    def reading(self, field: str) -> float:
        """A clock reading with its fraction."""
        value = self.real(field)
        if not (math.isfinite(value) and 0 <= value <= MAX_TIME_MS):
            raise self.refusal(field, f"is {value}; a clock reads 0 to {MAX_TIME_MS}")
        return value

    def difference(self, field: str) -> float:
        """What two clocks are apart, either way."""
        value = self.real(field)
        if not (math.isfinite(value) and abs(value) <= MAX_TIME_MS):
            raise self.refusal(field, f"is {value}; clocks are apart by {MAX_TIME_MS} at most")
        return value

    def choice(self, field: str, allowed: Collection[int]) -> int:
        value = self.whole(field)
        if value not in allowed:
            raise self.refusal(field, f"is {value}; allowed are {', '.join(str(int(each)) for each in allowed)}")
        return value

    def topic(self, field: str = "topic") -> str:
        name = self.text(field)
        try:
            return check_topic_name(name)
        except Invalid as bad:
            raise self.refusal(field, f"is no topic's name: {bad.reason}") from None

    def optional_name(self, field: str) -> str:
        """The same, or empty where there is none."""
        return self.name_of(field) if self.text(field) else ""

    def name_of(self, field: str) -> str:
        """A group's or a consumer's name."""
        name = self.text(field)
        if not 1 <= len(name.encode()) <= MAX_GROUP_BYTES or "\0" in name:
            raise self.refusal(field, f"is 1 to {MAX_GROUP_BYTES} bytes of UTF-8 without NUL, not {name!r:.80}")
        return name

    def sentence(self, field: str) -> str:
        said = self.text(field)
        if len(said) > MAX_REASON_BYTES or len(said.encode()) > MAX_REASON_BYTES:
            raise self.refusal(field, f"takes up to {MAX_REASON_BYTES} bytes")
        return said

    def bytes_of(self, field: str, most: int) -> bytes:
        blob = self.blob(field)
        if blob is None:
            return b""
        if len(blob) > most:
            raise self.refusal(field, f"takes up to {most} bytes, not {len(blob)}")
        return bytes(blob)

    def cursor(self) -> bytes:
        return self.bytes_of("cursor", MAX_CURSOR_BYTES)

    def tag(self, field: str, least: int = 0) -> bytes:
        tag = self.bytes_of(field, MAX_TAG_BYTES)
        if len(tag) < least or not is_utf8(tag):
            raise self.refusal(field, f"is {least} to {MAX_TAG_BYTES} bytes of UTF-8")
        return tag

    # -- columns ---------------------------------------------------------------------------------------------------

    def _agree(self, field: str, count: int) -> None:
        """The first column says how many messages there are, the others agree."""
        if count == self.count:
            return
        if self.count >= 0:
            raise self.refusal(field, f"has {count} items where {self.count} are expected")
        if count > MAX_BATCH:
            raise self.refusal(field, f"has {count} items; a frame carries up to {MAX_BATCH}")
        self.count = count

    def ragged(self, field: str) -> Ragged:
        """A column of byte strings."""
        return self.optional_ragged(field) or self._none(field)

    def _none(self, field: str) -> Ragged:
        self._agree(field, 0)
        return Ragged(b"", np.zeros(1, np.uint32))

    def optional_ragged(self, field: str) -> Ragged | None:
        """Likewise; None when it is left out."""
        offsets = self.uints(field + "_offsets")
        blob = self.blob(field)
        if offsets is None or not len(offsets):
            if blob is not None and len(blob):
                raise self.refusal(field, "has bytes but no offsets")
            if offsets is None:
                return None
            return self._none(field)
        self._agree(field, len(offsets) - 1)
        last = 0 if blob is None else len(blob)
        if len(offsets) <= _FEW:
            marks = offsets.tolist()
            sound = marks[0] == 0 and marks[-1] == last and marks == sorted(marks)
        else:
            sound = int(offsets[0]) == 0 and int(offsets[-1]) == last and bool((offsets[1:] >= offsets[:-1]).all())
        if not sound:
            raise self.refusal(field, f"has offsets that do not lead, never decreasing, from 0 to {last}")
        return Ragged(b"" if blob is None else blob, offsets)

    def judged(self, field: str, judge: Callable[[Ragged], dict[int, str]]) -> Ragged:
        """A column of which `judge` finds nothing bad."""
        column = self.ragged(field)
        self._blame(field, judge(column))
        return column

    def optional_judged(self, field: str, judge: Callable[[Ragged], dict[int, str]]) -> Ragged | None:
        column = self.optional_ragged(field)
        if column is not None:
            self._blame(field, judge(column))
        return column

    def addresses(self, field: str) -> tuple[str, ...]:
        """Where brokers are: a column by itself."""
        return tuple(
            address.decode()
            for address in self.judged(field, lambda column: validate_texts(column, "an address", 1, 1024))
        )

    def _blame(self, field: str, bad: dict[int, str]) -> None:
        for index, sentence in bad.items():
            raise self.refusal(field, f"is bad at {index}: {sentence}")

    def int64(self, field: str, least: int | None = None, most: int = MAX_INT64) -> Int64:
        """A column of int64, in range where one is given."""
        column = self.longs(field)
        if column is None:
            column = np.zeros(0, np.int64)
        self._agree(field, len(column))
        if least is not None and not within(column, least, most):
            raise self.refusal(field, f"has a value outside {least} to {most}")
        return column

    def times(self, field: str) -> Int64:
        return self.int64(field, 0, MAX_TIME_MS)

    def optional_counts(self, field: str) -> Int64 | None:
        return self.int64(field, 0, MAX_COUNT) if field in self.places else None

    def optional_int64(self, field: str) -> Int64 | None:
        return self.int64(field) if field in self.places else None

    def uint64(self, field: str) -> UInt64:
        column = self.ulongs(field)
        if column is None:
            column = np.zeros(0, np.uint64)
        self._agree(field, len(column))
        return column

    def uint32(self, field: str, most: int = 2**32 - 1) -> UInt32:
        column = self.uints(field)
        if column is None:
            column = np.zeros(0, np.uint32)
        self._agree(field, len(column))
        if most < 2**32 - 1 and not within(column, 0, most):
            raise self.refusal(field, f"has a value above {most}")
        return column

    def uint8(self, field: str, allowed: bytes | None = None) -> UInt8:
        """A column of bytes that are among `allowed`."""
        column = self.ubytes(field)
        if column is None:
            column = np.zeros(0, np.uint8)
        self._agree(field, len(column))
        if allowed is not None and (strange := column.tobytes().translate(None, allowed)):
            raise self.refusal(field, f"has a value of {strange[0]}; allowed are {', '.join(map(str, allowed))}")
        return column

    def flags(self, field: str, known: int) -> UInt8:
        """A column of flags. Unknown bits are refused, in a frame of a newer minor masked off."""
        if self.lenient:
            masked: npt.NDArray[np.uint8] = self.uint8(field) & np.uint8(known)
            return masked
        return self.uint8(field, _BELOW[known])


_BELOW = {known: bytes(range(known + 1)) for known in (1, 3, 7, 15)}
