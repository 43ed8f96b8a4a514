"""The packed form of a message in Redis: one value of its bucket's hash.

A value is a header of fixed size, tag, group, later numbers, holder and reason. Numpy reads the headers of a batch at
once, and scripts find numbers by their place. Birth, operation id and checksum are opaque bytes to scripts, whose
numbers are doubles. Times stay below 2**53.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from timeline.columns import Int64, Ragged
from timeline.leases import Message
from timeline.model import ROW_DTYPES, Rows
from timeline.storage_plugins.contract import PUT_NUMBERS, Puts
from timeline.storage_plugins.versions import LaterNumbers

FREE, HELD, DEAD, KEPT = 1, 2, 3, 4
"""The kinds of value: a message without holder, one with a holder (its lease may have run out), a dead letter, and a
remembered id (settled at `died_ms`)."""

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
"""The fields that a lease changes come first. So a script makes the new value of two pieces, the first the same for
most of a batch."""
HEAD_BYTES = HEAD.itemsize
KIND_AT = HEAD.fields["kind"][1] if HEAD.fields else 0
"""The place of a value's kind."""
_NAMES = HEAD.names or ()
_PUT_NAMES = tuple(name for name in PUT_NUMBERS if name in _NAMES)
_LATER = LaterNumbers(_NAMES)
_PACK = struct.Struct("<qqIBBqQqqqQQqIIHBB")


@dataclass(frozen=True, slots=True)
class RedisRow:
    """A message for the rules, and what they do not look at. `later`: its later numbers. `packed`: its value in Redis,
    which a change is compared with; empty for what is not stored yet."""

    message: Message
    put_ms: int = 0
    tag: bytes = b""
    payload_bytes: int = 0
    headers_bytes: int = 0
    settled_ms: int = 0
    later: bytes = b""
    packed: bytes = b""


def _kind_of(message: Message) -> int:
    if message.remembered:
        return KEPT
    if message.died_ms:
        return DEAD
    return HELD if message.holder else FREE


def pack(stored: RedisRow) -> bytes:
    """Return the value of `stored`."""
    message = stored.message
    head = _PACK.pack(
        message.version, message.due_ms, message.deliveries, len(message.holder), _kind_of(message), message.expires_ms,
        message.birth, message.scheduled_ms, stored.put_ms, message.asked_ms, message.last_op, message.payload_sum,
        stored.settled_ms if message.remembered else message.died_ms, stored.payload_bytes, stored.headers_bytes,
        len(message.dead), len(message.group), len(stored.tag),
    )  # fmt: skip
    return b"".join((head, stored.tag, message.group, stored.later, message.holder, message.dead))


def pack_puts(puts: Puts, now_ms: int) -> list[bytes]:
    """Return the values of new messages."""
    heads = np.zeros(len(puts), dtype=HEAD)
    for name in _PUT_NAMES:
        heads[name] = getattr(puts, name)
    heads["version"] = 1
    heads["scheduled_ms"] = puts.due_ms
    heads["put_ms"] = heads["asked_ms"] = now_ms
    heads["payload_bytes"] = puts.sizes
    heads["headers_bytes"] = puts.headers.sizes
    heads["group_size"] = puts.groups.sizes
    heads["tag_size"] = puts.tags.sizes
    heads["kind"] = FREE
    strings = zip(bytes_of(heads), puts.tags.tolist(), puts.groups.tolist(), _LATER.pack(puts), strict=True)
    return [head + tag + group + later for head, tag, group, later in strings]


def bytes_of(column: Any) -> list[bytes]:
    """Return each item of a column, a number or a header, as its bytes."""
    listed: list[bytes] = column.view(f"V{column.dtype.itemsize}").tolist()
    return listed


def unpack(packed: bytes) -> RedisRow:
    """Return the message of a value."""
    numbers = _PACK.unpack_from(packed)
    version, due_ms, deliveries, holder_size, kind, expires_ms, birth, scheduled_ms, put_ms = numbers[:9]
    asked_ms, last_op, payload_sum, died_ms, payload_bytes, headers_bytes = numbers[9:15]
    reason_size, group_size, tag_size = numbers[15:]
    if kind == KEPT:
        kept = Message(birth, version, last_op=last_op, payload_sum=payload_sum, remembered=True)
        return RedisRow(kept, settled_ms=died_ms, packed=packed)
    group_at = HEAD_BYTES + tag_size
    later_at = group_at + group_size
    reason_at = len(packed) - reason_size
    holder_at = reason_at - holder_size
    message = Message(
        birth=birth, version=version, due_ms=due_ms, scheduled_ms=scheduled_ms, asked_ms=asked_ms,
        holder=packed[holder_at:reason_at], deliveries=deliveries, last_op=last_op, group=packed[group_at:later_at],
        expires_ms=expires_ms, payload_sum=payload_sum, died_ms=died_ms, dead=packed[reason_at:],
    )  # fmt: skip
    tag, later = packed[HEAD_BYTES:group_at], packed[later_at:holder_at]
    return RedisRow(message, put_ms, tag, payload_bytes, headers_bytes, later=later, packed=packed)


def heads_of(values: Sequence[bytes]) -> Any:
    """Return the headers of values as named columns, to read only."""
    return np.frombuffer(b"".join([value[:HEAD_BYTES] for value in values]), dtype=HEAD)


def rows_of(ids: list[bytes], values: list[bytes], contents: list[bytes] | None = None) -> Rows:
    """Return values as `Rows`. `contents`: payload and headers of each, back to back."""
    heads = heads_of(values)
    tags, groups, holders, dead, later = _strings(values, heads)
    numbers: dict[str, Any] = {name: heads[name].astype(ROW_DTYPES[name]) for name in _NAMES if name in ROW_DTYPES}
    numbers |= _LATER.columns(later)
    rows = Rows(ids=Ragged.of(ids), groups=groups, holders=holders, tags=tags, dead=dead, **numbers)
    if contents is not None and not heads["headers_bytes"].any():
        rows.payloads, rows.headers = Ragged.of(contents), Ragged.repeat(b"", len(contents))
    elif contents is not None:
        # Counted from the end: of an offloaded payload only its place is there, whatever `payload_bytes` says.
        sizes = heads["headers_bytes"].tolist()
        cuts = [len(content) - size for content, size in zip(contents, sizes, strict=True)]
        rows.payloads = Ragged.of([content[:cut] for content, cut in zip(contents, cuts, strict=True)])
        rows.headers = Ragged.of([content[cut:] for content, cut in zip(contents, cuts, strict=True)])
    return rows


def _strings(values: list[bytes], heads: Any) -> tuple[Ragged, Ragged, Ragged, Ragged, list[bytes]]:
    """Return tags, groups, holders and reasons, and the later numbers of each as they are packed."""
    tag, group, holder, reason = (
        heads[name].astype(np.int64) for name in ("tag_size", "group_size", "holder_size", "reason_size")
    )
    groups_at = HEAD_BYTES + tag
    later_at = groups_at + group
    reason_at = holder_at = later_at
    if _LATER.names or holder.any() or reason.any():
        reason_at = np.fromiter(map(len, values), dtype=np.int64, count=len(values)) - reason
        holder_at = reason_at - holder
    later = []
    if _LATER.names:
        spans = zip(values, later_at.tolist(), holder_at.tolist(), strict=True)
        later = [value[start:stop] for value, start, stop in spans]
    return (
        _cut(values, groups_at - tag, tag),
        _cut(values, groups_at, group),
        _cut(values, holder_at, holder),
        _cut(values, reason_at, reason),
        later,
    )


def _cut(values: list[bytes], starts: Int64, sizes: Int64) -> Ragged:
    """Return `sizes` bytes of each value from `starts` on."""
    if not sizes.any():
        return Ragged.repeat(b"", len(values))
    if (starts == starts[0]).all() and (sizes == sizes[0]).all():
        span = slice(int(starts[0]), int(starts[0] + sizes[0]))
        return Ragged.of([value[span] for value in values])
    spans = zip(values, starts.tolist(), (starts + sizes).tolist(), strict=True)
    return Ragged.of([value[start:stop] for value, start, stop in spans])


__all__ = [
    "FREE", "HEAD", "HEAD_BYTES", "HELD", "KEPT", "KIND_AT", "RedisRow", "bytes_of", "heads_of", "pack", "pack_puts",
    "rows_of", "unpack",
]  # fmt: skip
