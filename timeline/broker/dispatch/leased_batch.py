"""Leased batches: rows leased together for one consumer, as columns; and the buffer of those leased ahead."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from timeline.columns import Bools, ColumnBatch, Int64, Ragged, UInt64
from timeline.model import MAX_TIME_MS, PAYLOAD_APART, PAYLOAD_DAMAGED, PAYLOAD_GONE, Operation, Rows
from timeline.storage_plugins.contract import LeasedRows, Settles
from timeline.storage_plugins.offload import is_pointer

C = TypeVar("C")
Token = tuple[bytes, int, int]
"""A lease: id, birth and version of its message."""
MESSAGE_OVERHEAD_BYTES = 80
"""Size of a message in a Deliver frame beside its id, tag, headers and payload."""


JOINED_MESSAGES, JOINED_BYTES = 64, 64 * 1024
"""Batches up to this size go together: a copy of them costs less than a frame."""


@dataclass(slots=True)
class LeasedBatch(ColumnBatch):
    """Leased rows, payloads included.

    - `was_due_ms`: when each came due.
    - `again`: whether each is leased again after a lease ran out.
    - `leased_ms`: when the lease call returned.
    - `stranded`: a sweep found them where another broker should have dealt them.
    """

    rows: Rows
    was_due_ms: Int64
    again: Bools
    leased_ms: int
    stranded: bool = False
    _frame_bytes: int = field(init=False, default=-1)

    def where(self, keep: Bools) -> LeasedBatch:
        """Return the rows where `keep`; itself if that is all."""
        return self if bool(keep.all()) else self.take(np.flatnonzero(keep))

    def joins(self, other: LeasedBatch, messages: int, bytes_: int) -> bool:
        """Return whether it may go with `other`, of the same round, behind `messages` and `bytes_`. All must be
        small."""
        return (
            self.leased_ms == other.leased_ms
            and self.stranded == other.stranded
            and messages + len(self) <= JOINED_MESSAGES
            and bytes_ + self.frame_bytes <= JOINED_BYTES
        )

    @property
    def sizes(self) -> Int64:
        """Bytes of payload and headers of each row, which count against a consumer's credit."""
        return content_sizes(self.rows)

    @property
    def frame_bytes(self) -> int:
        """About its size on the wire, and in memory until it gets there."""
        if self._frame_bytes < 0:
            rows, count = self.rows, len(self)
            content = rows.payloads.nbytes if rows.payloads is not None else int(rows.payload_bytes.sum())
            content += rows.headers.nbytes if rows.headers is not None else 0
            self._frame_bytes = content + rows.ids.nbytes + rows.tags.nbytes + count * MESSAGE_OVERHEAD_BYTES
        return self._frame_bytes

    def frames(self, most_messages: int, most_bytes: int) -> Iterator[LeasedBatch]:
        """Cut it so that each part makes a frame of about `most_bytes` at most."""
        count = len(self)
        if count <= most_messages and self.frame_bytes <= most_bytes:
            yield self
            return
        ends = np.cumsum(self.sizes + self.rows.ids.sizes + self.rows.tags.sizes + MESSAGE_OVERHEAD_BYTES)
        start = 0
        while start < count:
            before = int(ends[start - 1]) if start else 0
            stop = int(np.searchsorted(ends, before + most_bytes, side="right"))
            stop = min(max(stop, start + 1), start + most_messages, count)
            yield self.slice(start, stop)
            start = stop

    def settles(
        self, operation: Operation, random_bits: Callable[[int], int], *, unseen: bool = False, reason: bytes = b""
    ) -> Settles:
        """Return the same settle for each row, in its holder's name."""
        op = np.fromiter((random_bits(64) | 1 for _ in range(len(self))), dtype=np.uint64, count=len(self))
        return Settles.of(self.rows, operation=operation, op=op, unseen=unseen, reasons=reason)


def tokens(ids: Ragged, birth: UInt64, version: Int64) -> set[Token]:
    """Return the token of each."""
    return set(zip(ids.tolist(), birth.tolist(), version.tolist(), strict=True))


def content_sizes(rows: Rows) -> Int64:
    """Return bytes of payload and headers of each row."""
    if rows.payloads is None or rows.headers is None:
        return rows.payload_bytes.astype(np.int64)
    return rows.payloads.sizes + rows.headers.sizes if rows.headers.nbytes else rows.payloads.sizes


def ran_out(leased: LeasedRows) -> Bools:
    """Return which rows had a holder whose lease ran out."""
    if not leased.prior_holders.nbytes:
        return np.zeros(len(leased.rows), dtype=np.bool_)
    return leased.prior_holders.sizes > 0


def unsound_rows(rows: Rows, lost: tuple[int, ...] = ()) -> dict[bytes, Bools]:
    """Return rows whose payload cannot be the one that was put, by reason: the store says that it is `lost`, or its
    length differs.

    No checksum is made here. The receiver makes one, which covers the wire, too, and the driver buries what differs.
    """
    assert rows.payloads is not None
    differs: Bools = rows.payloads.sizes != rows.payload_bytes
    if not lost and not differs.any():
        return {}
    gone, apart = np.zeros((2, len(rows)), dtype=np.bool_)
    gone[list(lost)] = True
    for at in np.flatnonzero(differs & ~gone).tolist():
        apart[at] = is_pointer(rows.payloads[at])
    return {PAYLOAD_GONE: gone, PAYLOAD_APART: apart, PAYLOAD_DAMAGED: differs & ~gone & ~apart}


@dataclass(slots=True)
class _Waiting(Generic[C]):
    """A batch in order of its dues. Rows before `at` are held no more."""

    consumer: C
    batch: LeasedBatch
    at: int = 0

    def rest(self) -> LeasedBatch:
        """Return the rows still held."""
        return self.batch.slice(self.at, len(self.batch))


class LeaseAheadBuffer(Generic[C]):
    """Batches leased before they are due, given out at each due time, never before.

    A batch is put in order once. The rows of a due time are then a part of it that shares its columns.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        """When the next of each batch is due, and its number."""
        self._batches: dict[int, _Waiting[C]] = {}
        self._count = 0

    def __len__(self) -> int:
        """Return how many messages are held."""
        return sum(len(waiting.batch) - waiting.at for waiting in self._batches.values())

    def add(self, consumer: C, batch: LeasedBatch) -> None:
        """Hold `batch`, which is not empty, for `consumer`."""
        due_ms = batch.was_due_ms
        if (due_ms[1:] < due_ms[:-1]).any():
            batch = batch.take(np.argsort(due_ms, kind="stable"))
        self._count += 1
        self._batches[self._count] = _Waiting(consumer, batch)
        heapq.heappush(self._heap, (int(batch.was_due_ms[0]), self._count))

    def next_due_ms(self) -> int | None:
        """Return when the earliest is due."""
        return self._heap[0][0] if self._heap else None

    def due(self, now_ms: int) -> list[tuple[C, LeasedBatch]]:
        """Take out all that is due by `now_ms`."""
        given = []
        while self._heap and self._heap[0][0] <= now_ms:
            _, number = self._heap[0]
            waiting = self._batches[number]
            due_ms = waiting.batch.was_due_ms
            start, waiting.at = waiting.at, int(due_ms.searchsorted(now_ms, side="right"))
            given.append((waiting.consumer, waiting.batch.slice(start, waiting.at)))
            if waiting.at < len(due_ms):
                heapq.heapreplace(self._heap, (int(due_ms[waiting.at]), number))
            else:
                heapq.heappop(self._heap)
                del self._batches[number]
        return given

    def everything(self) -> list[tuple[C, LeasedBatch]]:
        """Take out all."""
        return self.due(MAX_TIME_MS)

    def of(self, consumer: C) -> list[LeasedBatch]:
        """Take out all that is held for `consumer`."""
        mine = {number for number, waiting in self._batches.items() if waiting.consumer is consumer}
        if mine:
            self._heap = [entry for entry in self._heap if entry[1] not in mine]
            heapq.heapify(self._heap)
        return [self._batches.pop(number).rest() for number in sorted(mine)]
