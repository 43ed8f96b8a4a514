"""What statements answer: whole columns, as `Rows` for the broker and as messages for the rules; and the cursors of
walks over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from timeline.columns import Indexes, Int64, Ragged
from timeline.leases import Message
from timeline.model import Rows, Topic, buckets_of
from timeline.storage_plugins.sql import STRINGS, rows_of, signed_one

UNSIGNED_BITS = (1 << 64) - 1
_FIELDS = (
    *("row", "headers_bytes", "payload_bytes", "birth", "last_op", "payload_sum", "version", "due_ms"),
    *("scheduled_ms", "asked_ms", "deliveries", "expires_ms", "died_ms"),
)
CHANGING = ("version", "due_ms", "scheduled_ms", "asked_ms", "deliveries", "last_op", "died_ms", "holder", "dead")
"""Columns of `message` that an operation may change."""
LARGEST_ID = b"\xff" * 256


def changing_columns(messages: Sequence[Message]) -> list[list[Any]]:
    """The columns of CHANGING as messages have them."""
    columns: list[list[Any]] = [[getattr(message, name) for message in messages] for name in CHANGING]
    columns[CHANGING.index("last_op")] = [signed_one(message.last_op) for message in messages]
    return columns


@dataclass(slots=True)
class FoundColumns:
    """What a statement found: numbers and byte strings by column name, all `count` long."""

    numbers: dict[str, list[int]]
    strings: dict[str, Ragged]
    count: int


@dataclass(frozen=True, slots=True)
class FoundMessage:
    """A message as the rules see it, with its id, its row (0: only its id is remembered), what its content takes, and
    whether it has a tag."""

    id: bytes
    row: int
    message: Message
    size_bytes: int = 0
    tagged: bool = True


def stored_of(found: FoundColumns) -> Iterator[FoundMessage]:
    """Columns of whole messages as messages."""
    numbers, strings = found.numbers, found.strings
    columns = (*(numbers[name] for name in _FIELDS), *(strings[name] for name in ("holder", "grp", "dead", "id")))
    for values in zip(*columns, strings["tag"].sizes.tolist(), strict=True):
        row, headers_bytes, payload_bytes, birth, last_op, payload_sum, *rest = values
        version, due_ms, scheduled_ms, asked_ms, deliveries, expires_ms, died_ms, holder, group, dead, id, tag = rest
        seen = Message(
            birth=birth & UNSIGNED_BITS,
            version=version,
            due_ms=due_ms,
            scheduled_ms=scheduled_ms,
            asked_ms=asked_ms,
            holder=holder,
            deliveries=deliveries,
            last_op=last_op & UNSIGNED_BITS,
            group=group,
            expires_ms=expires_ms,
            payload_sum=payload_sum & UNSIGNED_BITS,
            died_ms=died_ms,
            dead=dead,
        )
        yield FoundMessage(id, row, seen, payload_bytes + headers_bytes, tag > 0)


def remembered_of(id: bytes, birth: int, version: int, payload_sum: int, last_op: int) -> FoundMessage:
    """What is left of a settled id, from its columns."""
    left = Message(
        birth & UNSIGNED_BITS,
        version,
        last_op=last_op & UNSIGNED_BITS,
        payload_sum=payload_sum & UNSIGNED_BITS,
        remembered=True,
    )
    return FoundMessage(id, 0, left)


@dataclass(slots=True)
class MessageBatch:
    """Messages with their row numbers and the bytes of their content."""

    rows: Rows
    numbers: list[int]
    sizes: Int64

    @classmethod
    def of(cls, found: FoundColumns) -> MessageBatch:
        """Columns of whole messages as a batch."""
        rows = rows_of(found.numbers, {field: found.strings[name] for field, name in STRINGS.items()})
        headers_bytes = np.array(found.numbers["headers_bytes"], dtype=np.int64)
        return cls(rows, found.numbers["row"], rows.payload_bytes.astype(np.int64) + headers_bytes)

    def __len__(self) -> int:
        return len(self.numbers)

    def only(self) -> FoundMessage:
        """Its only message, for the rules."""
        rows = self.rows
        seen = Message(
            birth=int(rows.birth[0]),
            version=int(rows.version[0]),
            due_ms=int(rows.due_ms[0]),
            scheduled_ms=int(rows.scheduled_ms[0]),
            asked_ms=int(rows.asked_ms[0]),
            holder=rows.holders[0],
            deliveries=int(rows.deliveries[0]),
            last_op=int(rows.last_op[0]),
            group=rows.groups[0],
            expires_ms=int(rows.expires_ms[0]),
            payload_sum=int(rows.payload_sum[0]),
            died_ms=int(rows.died_ms[0]),
            dead=rows.dead[0],
        )
        return FoundMessage(rows.ids[0], self.numbers[0], seen, int(self.sizes[0]), bool(rows.tags[0]))

    def take(self, indexes: Indexes) -> MessageBatch:
        """The messages at `indexes`, in that order."""
        return MessageBatch(self.rows.take(indexes), [self.numbers[at] for at in indexes.tolist()], self.sizes[indexes])

    def fitting(self, most_bytes: int) -> MessageBatch:
        """The first messages whose content stays near `most_bytes`, at least one."""
        count = int(np.searchsorted(np.cumsum(self.sizes), most_bytes, "right"))
        return self if count >= len(self) else self.take(np.arange(max(1, count)))

    @classmethod
    def concat(cls, parts: list[MessageBatch]) -> MessageBatch:
        """The parts one after the other."""
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
        """The first `limit` of the parts together, by (due, id)."""
        if len(parts) == 1:
            return parts[0]
        joined = cls.concat(parts)
        due_ms, ids = joined.rows.due_ms.tolist(), joined.rows.ids.tolist()
        order = sorted(range(len(joined)), key=lambda at: (due_ms[at], ids[at]))
        return joined.take(np.array(order[:limit], dtype=np.intp))


def place_after(cursor: bytes) -> tuple[int, bytes]:
    """Where a walk over (bucket, id) goes on; before everything for an empty cursor."""
    return (int.from_bytes(cursor[:4], "big"), cursor[4:]) if cursor else (-1, b"")


def cursor_at(bucket: int, id: bytes) -> bytes:
    """The cursor of a walk that has passed (bucket, id)."""
    return bucket.to_bytes(4, "big") + id


def cursor_after(topic: Topic, id: bytes) -> bytes:
    """The cursor of a walk that has passed the message with this id."""
    return cursor_at(int(buckets_of(Ragged.of([id]), topic.settings.buckets)[0]), id)


def columns_of(
    numbers: tuple[str, ...], strings: tuple[str, ...], lists: list[list[int]], joined: Sequence[bytes | None]
) -> FoundColumns:
    """Columns from lists of numbers, one for each of `numbers` and one of lengths for each of `strings`, and from each
    of `strings` back to back."""
    found: dict[str, Ragged] = {}
    for name, lengths, data in zip(strings, lists[len(numbers) :], joined, strict=True):
        sizes = np.array([length or 0 for length in lengths], dtype=np.int64)
        offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
        np.cumsum(sizes, out=offsets[1:])
        found[name] = Ragged(data or b"", offsets)
    return FoundColumns(dict(zip(numbers, lists, strict=False)), found, len(lists[0]))


def without_holder(found: FoundColumns) -> FoundColumns:
    """Columns of living messages that nobody holds, with what is the same for all of them."""
    nothing = Ragged(b"", np.zeros(found.count + 1, dtype=np.int64))
    found.numbers["died_ms"] = [0] * found.count
    found.strings |= {"holder": nothing, "dead": nothing}
    return found
