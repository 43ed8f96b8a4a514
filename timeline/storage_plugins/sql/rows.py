"""The results of statements: whole columns, as `Rows` for the broker and as messages for the rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import add
from typing import Any

import msgspec
import numpy as np

from timeline.columns import Indexes, Int64, Ragged
from timeline.leases import Message
from timeline.model import Rows, Topic, buckets_of
from timeline.storage_plugins.asks import cursor_at
from timeline.storage_plugins.sql import STRINGS, UNSIGNED, rows_of, signed_one

UNSIGNED_BITS = (1 << 64) - 1
CHANGING = ("version", "due_ms", "scheduled_ms", "asked_ms", "deliveries", "last_op", "died_ms", "holder", "dead")
"""Columns of `message` that an operation may change."""
LARGEST_ID = b"\xff" * 256
_OF_RULES = tuple(field.name for field in fields(Message) if field.name != "remembered")
_COLUMN_OF = {"group": "grp"}
_FIELD_OF = {"group": "groups", "holder": "holders"}
"""A field of `Message` as a column of the table, and as a field of `Rows`, where the name differs."""


def changing_columns(messages: Sequence[Message]) -> list[list[Any]]:
    """Return the columns of CHANGING as messages have them."""
    columns: list[list[Any]] = [[getattr(message, name) for message in messages] for name in CHANGING]
    columns[CHANGING.index("last_op")] = [signed_one(message.last_op) for message in messages]
    return columns


@dataclass(slots=True)
class FoundColumns:
    """The result of a statement: numbers and byte strings by column name, all `count` long."""

    numbers: dict[str, list[int]]
    strings: dict[str, Ragged]
    count: int


@dataclass(frozen=True, slots=True)
class FoundMessage:
    """A message as the rules see it, with its id, its row (0: only its id is remembered), the size of its content, and
    whether it has a tag."""

    id: bytes
    row: int
    message: Message
    size_bytes: int = 0
    tagged: bool = True


def stored_of(found: FoundColumns) -> Iterator[FoundMessage]:
    """Return columns of whole messages as messages."""
    numbers, strings = found.numbers, found.strings
    columns: list[Iterable[Any]] = []
    for name in (_COLUMN_OF.get(field, field) for field in _OF_RULES):
        column = numbers[name] if name in numbers else strings[name]
        columns.append([number & UNSIGNED_BITS for number in numbers[name]] if name in UNSIGNED else column)
    sizes = map(add, numbers["payload_bytes"], numbers["headers_bytes"])
    others = (strings["id"], numbers["row"], sizes, strings["tag"].sizes.tolist())
    for id, row, size, tag, *values in zip(*others, *columns, strict=True):
        yield FoundMessage(id, row, Message(*values), size, tag > 0)


def remembered_of(id: bytes, birth: int, version: int, payload_sum: int, last_op: int) -> FoundMessage:
    """Return the remains of a settled id, from their columns."""
    left = Message(
        birth & UNSIGNED_BITS,
        version,
        last_op=last_op & UNSIGNED_BITS,
        payload_sum=payload_sum & UNSIGNED_BITS,
        remembered=True,
    )
    return FoundMessage(id, 0, left)


def remembered_columns(remembered: Mapping[bytes, Message]) -> list[list[Any]]:
    """Return remains as columns: id, birth, version, payload_sum, last_op."""
    left = remembered.values()
    return [
        list(remembered),
        [signed_one(message.birth) for message in left],
        [message.version for message in left],
        [signed_one(message.payload_sum) for message in left],
        [signed_one(message.last_op) for message in left],
    ]


@dataclass(slots=True)
class MessageBatch:
    """Messages with their row numbers and the bytes of their content."""

    rows: Rows
    numbers: list[int]
    sizes: Int64

    @classmethod
    def of(cls, found: FoundColumns) -> MessageBatch:
        """Return columns of whole messages as a batch."""
        rows = rows_of(found.numbers, {field: found.strings[name] for field, name in STRINGS.items()})
        headers_bytes = np.array(found.numbers["headers_bytes"], dtype=np.int64)
        return cls(rows, found.numbers["row"], rows.payload_bytes.astype(np.int64) + headers_bytes)

    def __len__(self) -> int:
        return len(self.numbers)

    def only(self) -> FoundMessage:
        """Return its only message, for the rules."""
        rows = self.rows
        found = [getattr(rows, _FIELD_OF.get(name, name))[0] for name in _OF_RULES]
        values: list[Any] = [value if isinstance(value, bytes) else int(value) for value in found]
        seen = Message(*values)
        return FoundMessage(rows.ids[0], self.numbers[0], seen, int(self.sizes[0]), bool(rows.tags[0]))

    def take(self, indexes: Indexes) -> MessageBatch:
        """Return the messages at `indexes`, in that order."""
        return MessageBatch(self.rows.take(indexes), [self.numbers[at] for at in indexes.tolist()], self.sizes[indexes])

    def fitting(self, most_bytes: int) -> MessageBatch:
        """Return the first messages whose content stays near `most_bytes`, at least one."""
        count = int(np.searchsorted(np.cumsum(self.sizes), most_bytes, "right"))
        return self if count >= len(self) else self.take(np.arange(max(1, count)))

    @classmethod
    def concat(cls, parts: list[MessageBatch]) -> MessageBatch:
        """Return the parts one after the other."""
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls(Rows.empty(), [], np.zeros(0, dtype=np.int64))
        return cls(
            Rows.concat([part.rows for part in parts]),
            [number for part in parts for number in part.numbers],
            np.concatenate([part.sizes for part in parts]),
        )

    @classmethod
    def merged(cls, parts: list[MessageBatch], limit: int) -> MessageBatch:
        """Return the first `limit` messages of all parts, by (due, id)."""
        if len(parts) == 1:
            return parts[0]
        joined = cls.concat(parts)
        due_ms, ids = joined.rows.due_ms.tolist(), joined.rows.ids.tolist()
        order = sorted(range(len(joined)), key=lambda at: (due_ms[at], ids[at]))
        return joined.take(np.array(order[:limit], dtype=np.intp))


def cursor_after(topic: Topic, id: bytes) -> bytes:
    """Return the cursor of a walk that has passed the message with this id."""
    return cursor_at(int(buckets_of(Ragged.of([id]), topic.settings.buckets)[0]), id)


class ColumnsQuery:
    """A SELECT whose result is one row of whole columns. `numbers`: integer columns. `strings`: byte-string columns.

    Its row has a list of each number column, of the lengths of each string column, and each string column in one."""

    def __init__(self, numbers: Sequence[str], strings: Sequence[str] = ()) -> None:
        self.numbers, self.strings = tuple(numbers), tuple(strings)

    def read(self, rows: Sequence[Any]) -> FoundColumns:
        """Return what such a statement found."""
        (row,) = rows
        # One text for all: parsing each list by itself costs more than its numbers if there are few.
        listed = len(self.numbers) + len(self.strings)
        lists: list[list[int]] = msgspec.json.decode(f"[{','.join(map(self.listing, row[:listed]))}]")
        found: dict[str, Ragged] = {}
        for name, lengths, data in zip(self.strings, lists[len(self.numbers) :], row[listed:], strict=True):
            sizes = np.array([length or 0 for length in lengths], dtype=np.int64)
            offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
            np.cumsum(sizes, out=offsets[1:])
            found[name] = Ragged(data or b"", offsets)
        return FoundColumns(dict(zip(self.numbers, lists, strict=False)), found, len(lists[0]))

    def read_free(self, rows: Sequence[Any]) -> FoundColumns:
        """Return what such a statement found, with the columns that are the same for all living messages without a
        holder."""
        found = self.read(rows)
        nothing = Ragged(b"", np.zeros(found.count + 1, dtype=np.int64))
        found.numbers["died_ms"] = [0] * found.count
        found.strings |= {"holder": nothing, "dead": nothing}
        return found

    def listing(self, listed: Any) -> str:
        """Return a list of the row as a JSON array."""
        return str(listed)


def pieces(sizes: Sequence[int], most_bytes: int, most: int = 1 << 62) -> Iterator[slice]:
    """Return where to cut messages with contents of `sizes` bytes: at most `most` each, and within `most_bytes` unless
    a single content is larger."""
    start = 0
    while start < len(sizes):
        stop, left = start + 1, most_bytes - sizes[start]
        while stop < len(sizes) and stop - start < most and sizes[stop] <= left:
            left -= sizes[stop]
            stop += 1
        yield slice(start, stop)
        start = stop
