"""What statements answer: as columns for the broker, and as messages for the rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from timeline.columns import Indexes, Int64, Ragged
from timeline.leases import Message
from timeline.model import Rows
from timeline.storage_plugins.contract import Grant, LeasedRows
from timeline.storage_plugins.sql import NUMBERS, STRINGS, rows_of
from timeline.storage_plugins.sql.rows import UNSIGNED_BITS

OLD = tuple(name for name in NUMBERS if name != "died_ms")
"""Numbers of a leased row, as they were before."""
PACKED = ("n", "turn", "until_ms", *OLD)
"""Numbers that a lease answers."""
TEXTS = ("id", "grp", "holder", "tag", "payload", "headers")
"""Byte strings that it answers; the holder is the one of a lease that ran out."""
COLUMNS = ("row", "bucket", "headers_bytes", *NUMBERS, *STRINGS.values())
_PLACE = {name: at for at, name in enumerate(COLUMNS)}


def whole(table: str = "m") -> str:
    """All columns of a message, in the order that `Part.of` and `stored_of` read."""
    return ", ".join(f"{table}.{name}" for name in COLUMNS)


@dataclass(frozen=True, slots=True)
class Stored:
    """A message as the rules see it, and its place: its row (0: only its id is remembered), bucket and id."""

    row: int
    message: Message
    bucket: int = 0
    id: bytes = b""


def stored_of(record: Any) -> Stored:
    """A record of `whole` columns as the rules see it."""
    return Stored(
        record["row"],
        Message(
            birth=record["birth"] & UNSIGNED_BITS,
            version=record["version"],
            due_ms=record["due_ms"],
            scheduled_ms=record["scheduled_ms"],
            asked_ms=record["asked_ms"],
            holder=record["holder"],
            deliveries=record["deliveries"],
            last_op=record["last_op"] & UNSIGNED_BITS,
            group=record["grp"],
            expires_ms=record["expires_ms"],
            payload_sum=record["payload_sum"] & UNSIGNED_BITS,
            died_ms=record["died_ms"],
            dead=record["dead"],
        ),
        record["bucket"],
        record["id"],
    )


def remembered_of(record: Any) -> Stored:
    """A record of `remembered` as the rules see it."""
    left = Message(
        record["birth"] & UNSIGNED_BITS,
        record["version"],
        last_op=record["last_op"] & UNSIGNED_BITS,
        payload_sum=record["payload_sum"] & UNSIGNED_BITS,
        remembered=True,
    )
    return Stored(0, left, 0, record["id"])


@dataclass(slots=True)
class Part:
    """Messages with their row numbers, buckets and the bytes of their content."""

    rows: Rows
    numbers: list[int]
    buckets: list[int]
    sizes: Int64

    def __len__(self) -> int:
        return len(self.numbers)

    @classmethod
    def of(cls, records: Sequence[Any]) -> Part:
        """Records that begin with `whole` columns, as columns."""
        columns: list[Any] = list(zip(*records, strict=True)) if records else [()] * len(COLUMNS)
        rows = rows_of(
            {name: columns[_PLACE[name]] for name in NUMBERS},
            {field: Ragged.of(list(columns[_PLACE[name]])) for field, name in STRINGS.items()},
        )
        headers = np.array(columns[_PLACE["headers_bytes"]], dtype=np.int64)
        sizes = rows.payload_bytes.astype(np.int64) + headers
        return cls(rows, list(columns[_PLACE["row"]]), list(columns[_PLACE["bucket"]]), sizes)

    def take(self, indexes: Indexes) -> Part:
        """The messages at `indexes`, in that order."""
        at = indexes.tolist()
        return Part(
            self.rows.take(indexes),
            [self.numbers[index] for index in at],
            [self.buckets[index] for index in at],
            self.sizes[indexes],
        )


def numbers_of(packed: bytes | None) -> Int64:
    """A column of numbers that came as one byte string."""
    return np.frombuffer(packed or b"", dtype=">i8").astype(np.int64)


def strings_of(data: bytes | None, lengths: bytes | None) -> tuple[Ragged, tuple[int, ...]]:
    """A column of byte strings that came as one, and the indexes of those that are not there at all."""
    sizes = np.frombuffer(lengths or b"", dtype=">i4").astype(np.int64)
    missing = tuple(np.flatnonzero(sizes < 0).tolist())
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(np.maximum(sizes, 0), out=offsets[1:])
    return Ragged(data or b"", offsets), missing


def leased_of(found: Any, grants: Sequence[Grant]) -> LeasedRows:
    """What `LEASE` leased, in the order of the deal; without `next_due_ms`."""
    numbers = {name: numbers_of(found[name]) for name in PACKED}
    texts = {name: strings_of(found[name], found[f"{name}_lengths"]) for name in TEXTS}
    order, count = numbers["n"], len(numbers["n"])
    grant = (numbers["turn"] - 1).astype(np.uint32)
    was_due_ms, prior = numbers["due_ms"], texts["holder"][0]
    numbers |= {
        "due_ms": numbers["until_ms"],
        "version": numbers["version"] + 1,
        "deliveries": numbers["deliveries"] + 1,
        "died_ms": np.zeros(count, dtype=np.int64),
    }
    holders = [one.holder for one in grants]
    rows = rows_of(
        {name: numbers[name] for name in NUMBERS},
        {
            "ids": texts["id"][0],
            "groups": texts["grp"][0],
            "tags": texts["tag"][0],
            "holders": Ragged.repeat(holders[0], count) if len(holders) == 1 else Ragged.of(holders).take(grant),
            "dead": Ragged.repeat(b"", count),
            "payloads": texts["payload"][0],
            "headers": texts["headers"][0],
        },
    )
    leased = LeasedRows(rows, grant, was_due_ms, prior, None, damaged=texts["payload"][1])
    return leased if bool((order[1:] > order[:-1]).all()) else _sorted(leased, np.argsort(order))


def _sorted(leased: LeasedRows, order: Indexes) -> LeasedRows:
    """The same in another order: no server promises that of its aggregates."""
    place = {int(old): new for new, old in enumerate(order)}
    return LeasedRows(
        leased.rows.take(order),
        leased.grant[order],
        leased.was_due_ms[order],
        leased.prior_holders.take(order),
        None,
        damaged=tuple(sorted(place[at] for at in leased.damaged)),
    )
