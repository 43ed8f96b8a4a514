"""What a message looks like in Redis: one value of the bucket's hash, a header of fixed size and four strings.

The header is packed, little endian, so that numpy reads a batch of them at once and scripts find numbers by their
place. Births, operation ids and sums are opaque bytes to scripts, whose numbers are doubles; times stay below 2**53.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from timeline.columns import Ragged
from timeline.leases import Message
from timeline.model import ROW_DTYPES, Rows

FREE, HELD, DEAD, KEPT = 1, 2, 3, 4
"""What a value is: a message without holder, one with a holder (its lease may have run out), a dead letter, a settled
id that is remembered (`died_ms`: since when)."""

HEAD = np.dtype(
    [
        ("version", "<i8"),
        ("due_ms", "<i8"),
        ("deliveries", "<u4"),
        ("holder_size", "u1"),
        ("kind", "u1"),
        ("expires_ms", "<i8"),
        ("birth", "<u8"),
        ("scheduled_ms", "<i8"),
        ("put_ms", "<i8"),
        ("asked_ms", "<i8"),
        ("last_op", "<u8"),
        ("payload_sum", "<u8"),
        ("died_ms", "<i8"),
        ("payload_bytes", "<u4"),
        ("headers_bytes", "<u4"),
        ("reason_size", "<u2"),
        ("group_size", "u1"),
        ("tag_size", "u1"),
    ]
)
"""What a lease changes comes first, so that a script makes the new value of two pieces, the first of them the same for
most of a batch."""
HEAD_BYTES = HEAD.itemsize
KIND_AT = HEAD.fields["kind"][1] if HEAD.fields else 0
"""Where a value says what it is."""
_PACK = struct.Struct("<qqIBBqQqqqQQqIIHBB")


@dataclass(frozen=True, slots=True)
class RedisRow:
    """A message as the rules see it, and what they do not look at. `packed`: the value as it stands in Redis, which a
    change is compared with; empty for what is not stored yet."""

    message: Message
    put_ms: int = 0
    tag: bytes = b""
    payload_bytes: int = 0
    headers_bytes: int = 0
    settled_ms: int = 0
    packed: bytes = b""

    @property
    def size_bytes(self) -> int:
        return self.payload_bytes + self.headers_bytes


def kind_of(message: Message) -> int:
    """Which of the four a message is."""
    if message.remembered:
        return KEPT
    if message.died_ms:
        return DEAD
    return HELD if message.holder else FREE


def pack(stored: RedisRow) -> bytes:
    """The value that stands in Redis for `stored`."""
    message = stored.message
    head = _PACK.pack(
        message.version,
        message.due_ms,
        message.deliveries,
        len(message.holder),
        kind_of(message),
        message.expires_ms,
        message.birth,
        message.scheduled_ms,
        stored.put_ms,
        message.asked_ms,
        message.last_op,
        message.payload_sum,
        stored.settled_ms if message.remembered else message.died_ms,
        stored.payload_bytes,
        stored.headers_bytes,
        len(message.dead),
        len(message.group),
        len(stored.tag),
    )
    return b"".join((head, stored.tag, message.group, message.holder, message.dead))


def unpack(packed: bytes) -> RedisRow:
    """The reverse of `pack`."""
    numbers = _PACK.unpack_from(packed)
    version, due_ms, deliveries, holder_size, kind, expires_ms, birth, scheduled_ms, put_ms = numbers[:9]
    asked_ms, last_op, payload_sum, died_ms, payload_bytes, headers_bytes = numbers[9:15]
    reason_size, group_size, tag_size = numbers[15:]
    if kind == KEPT:
        kept = Message(birth, version, last_op=last_op, payload_sum=payload_sum, remembered=True)
        return RedisRow(kept, settled_ms=died_ms, packed=packed)
    group_at = HEAD_BYTES + tag_size
    holder_at = group_at + group_size
    reason_at = holder_at + holder_size
    message = Message(
        birth=birth,
        version=version,
        due_ms=due_ms,
        scheduled_ms=scheduled_ms,
        asked_ms=asked_ms,
        holder=packed[holder_at:reason_at],
        deliveries=deliveries,
        last_op=last_op,
        group=packed[group_at:holder_at],
        expires_ms=expires_ms,
        payload_sum=payload_sum,
        died_ms=died_ms,
        dead=packed[reason_at : reason_at + reason_size],
    )
    return RedisRow(message, put_ms, packed[HEAD_BYTES:group_at], payload_bytes, headers_bytes, packed=packed)


def heads_of(values: Sequence[bytes]) -> Any:
    """The headers of packed values as named columns, to read only."""
    return np.frombuffer(b"".join([value[:HEAD_BYTES] for value in values]), dtype=HEAD)


def rows_of(ids: list[bytes], values: list[bytes], contents: list[bytes] | None = None) -> Rows:
    """Packed values as the model's columns. `contents`: payload and headers of each, back to back."""
    heads = heads_of(values)
    numbers: dict[str, Any] = {name: heads[name].astype(dtype) for name, dtype in ROW_DTYPES.items()}
    tags, groups, holders, dead = _strings(values, heads)
    rows = Rows(ids=Ragged.of(ids), groups=groups, holders=holders, tags=tags, dead=dead, **numbers)
    if contents is not None and not heads["headers_bytes"].any():
        rows.payloads, rows.headers = Ragged.of(contents), Ragged.repeat(b"", len(contents))
    elif contents is not None:
        # Counted from the end: of a payload that lies apart there is only its place, whatever `payload_bytes` says.
        sizes = heads["headers_bytes"].tolist()
        cuts = [len(content) - size for content, size in zip(contents, sizes, strict=True)]
        rows.payloads = Ragged.of([content[:cut] for content, cut in zip(contents, cuts, strict=True)])
        rows.headers = Ragged.of([content[cut:] for content, cut in zip(contents, cuts, strict=True)])
    return rows


def _strings(values: list[bytes], heads: Any) -> list[Ragged]:
    """Tags, groups, holders and reasons behind the headers."""
    columns: list[Ragged] = []
    starts = np.full(len(values), HEAD_BYTES, dtype=np.int64)
    for name in ("tag_size", "group_size", "holder_size", "reason_size"):
        sizes = heads[name].astype(np.int64)
        ends = starts + sizes
        if not sizes.any():
            columns.append(Ragged.repeat(b"", len(values)))
        elif (starts == starts[0]).all() and (ends == ends[0]).all():
            cut = slice(int(starts[0]), int(ends[0]))
            columns.append(Ragged.of([value[cut] for value in values]))
        else:
            spans = zip(values, starts.tolist(), ends.tolist(), strict=True)
            columns.append(Ragged.of([value[start:end] for value, start, end in spans]))
        starts = ends
    return columns


__all__ = ["DEAD", "FREE", "HEAD", "HEAD_BYTES", "HELD", "KEPT", "RedisRow", "heads_of", "kind_of", "pack",
           "rows_of", "unpack"]  # fmt: skip
