"""Columns of messages → Arrow batches, as they lie: numbers and byte strings are handed on without an object a row, but
for headers where a message has any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from timeline.columns import Bools, Int64, Ragged, UInt32, UInt64
from timeline.model import Rows, State, decode_headers

TIMES = pa.timestamp("us", tz="UTC")
HEADERS = pa.map_(pa.string(), pa.string())
_STATES = pa.array([State.WAITING.value, State.AVAILABLE.value, State.LEASED.value, State.DEAD.value])


def texts(column: Ragged, nullable: bool = False) -> pa.Array:
    """A column of UTF-8, empty ones as null where `nullable`."""
    return _bytes(column, pa.string(), nullable)


def binaries(column: Ragged) -> pa.Array:
    """A column of bytes."""
    return _bytes(column, pa.binary(), False)


def _bytes(column: Ragged, kind: pa.DataType, nullable: bool) -> pa.Array:
    count = len(column)
    first, end = int(column.offsets[0]), int(column.offsets[-1])
    marks = np.ascontiguousarray(column.offsets - first, dtype=np.int32)
    data = pa.py_buffer(memoryview(column.data)[first:end])
    mask = None
    if nullable:
        there: Bools = column.sizes > 0
        mask = None if there.all() else pa.py_buffer(np.packbits(there, bitorder="little").tobytes())
    return pa.Array.from_buffers(kind, count, [mask, pa.py_buffer(marks), data])


def times(millis: Int64, nullable: bool = False) -> pa.Array:
    """Milliseconds as timestamps, 0 as null where `nullable`."""
    micros = millis * 1_000
    mask = (millis == 0) if nullable else None
    return pa.array(micros, pa.int64(), mask=mask).cast(TIMES)


def longs(numbers: Int64 | UInt64) -> pa.Array:
    """64-bit numbers; unsigned ones with the same bits."""
    return pa.array(numbers.view(np.int64), pa.int64())


def ints(numbers: UInt32) -> pa.Array:
    """Counts below 2^31."""
    return pa.array(np.minimum(numbers, 2**31 - 1).astype(np.int32), pa.int32())


def headers_of(column: Ragged | None, count: int) -> pa.Array:
    """Encoded headers as maps; null where a message has none."""
    if column is None or not column.nbytes:
        return pa.nulls(count, HEADERS)
    maps = [list(decode_headers(item).items()) if item else None for item in column.tolist()]
    return pa.array(maps, HEADERS)


def states_of(rows: Rows, now_ms: int) -> pa.Array:
    """Each row's state at the broker's time of reading."""
    code = np.where(rows.holders.sizes > 0, 2, 0)
    code[rows.due_ms <= now_ms] = 1
    code[rows.died_ms > 0] = 3
    return pa.DictionaryArray.from_arrays(pa.array(code, pa.int8()), _STATES).cast(pa.string())


@dataclass(frozen=True, slots=True)
class PageRows:
    """A page of a scan: its rows, and the broker's time."""

    rows: Rows
    now_ms: int


def _payloads(page: PageRows) -> pa.Array:
    rows = page.rows
    return binaries(rows.payloads) if rows.payloads is not None else pa.nulls(len(rows), pa.binary())


_COLUMNS: dict[str, Callable[[PageRows], pa.Array]] = {
    "id": lambda page: texts(page.rows.ids),
    "due": lambda page: times(page.rows.due_ms),
    "state": lambda page: states_of(page.rows, page.now_ms),
    "scheduled": lambda page: times(page.rows.scheduled_ms),
    "tag": lambda page: texts(page.rows.tags, nullable=True),
    "group": lambda page: texts(page.rows.groups),
    "holder": lambda page: texts(page.rows.holders, nullable=True),
    "version": lambda page: longs(page.rows.version),
    "deliveries": lambda page: ints(page.rows.deliveries),
    "put": lambda page: times(page.rows.put_ms),
    "asked": lambda page: times(page.rows.asked_ms),
    "expires": lambda page: times(page.rows.expires_ms, nullable=True),
    "died": lambda page: times(page.rows.died_ms, nullable=True),
    "dead": lambda page: texts(page.rows.dead, nullable=True),
    "birth": lambda page: longs(page.rows.birth),
    "last_op": lambda page: longs(page.rows.last_op),
    "payload_sum": lambda page: longs(page.rows.payload_sum),
    "payload_bytes": lambda page: ints(page.rows.payload_bytes),
    "payload": _payloads,
    "headers": lambda page: headers_of(page.rows.headers, len(page.rows)),
}


def record_batch(page: PageRows, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of `schema` of a page."""
    return pa.RecordBatch.from_arrays([_COLUMNS[name](page) for name in schema.names], schema=schema)
