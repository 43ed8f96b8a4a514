"""The columns of the source: those of a table to write, and those of a table that is read.

Written: `due` (timestamp) and `payload` (binary or string). Optional: `id` and `tag` (string), `headers`
(map<string,string>) and `expires` (timestamp).

Read: all fields of a message. Births, operation ids and checksums are unsigned; Spark's long shows the same bits
signed. Times are timestamps, null where there is none. Only headers become an object per row.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from timeline.columns import Bools, Int64, Ragged, UInt32, UInt64
from timeline.errors import Invalid
from timeline.model import Rows, State, decode_headers
from timeline.wire.frames import ScanPage

TIMES = pa.timestamp("us", tz="UTC")
_ARROW_HEADERS = pa.map_(pa.string(), pa.string())
HEADERS = MapType(StringType(), StringType())
_WRITTEN: dict[str, tuple[tuple[DataType, ...], str]] = {
    "due": ((TimestampType(),), "a timestamp"),
    "payload": ((BinaryType(), StringType()), "binary or a string"),
    "id": ((StringType(),), "a string"),
    "tag": ((StringType(),), "a string"),
    "headers": ((HEADERS,), "a map<string,string>"),
    "expires": ((TimestampType(),), "a timestamp"),
}
_REQUIRED = ("due", "payload")


_READ: dict[str, tuple[DataType, bool, Callable[[ScanPage], pa.Array]]] = {
    "id": (StringType(), False, lambda page: texts(page.rows.ids)),
    "due": (TimestampType(), False, lambda page: times(page.rows.due_ms)),
    "state": (StringType(), False, lambda page: states_of(page.rows, page.now_ms)),
    "scheduled": (TimestampType(), False, lambda page: times(page.rows.scheduled_ms)),
    "tag": (StringType(), True, lambda page: texts(page.rows.tags, nullable=True)),
    "group": (StringType(), False, lambda page: texts(page.rows.groups)),
    "holder": (StringType(), True, lambda page: texts(page.rows.holders, nullable=True)),
    "version": (LongType(), False, lambda page: longs(page.rows.version)),
    "deliveries": (IntegerType(), False, lambda page: ints(page.rows.deliveries)),
    "put": (TimestampType(), False, lambda page: times(page.rows.put_ms)),
    "asked": (TimestampType(), False, lambda page: times(page.rows.asked_ms)),
    "expires": (TimestampType(), True, lambda page: times(page.rows.expires_ms, nullable=True)),
    "died": (TimestampType(), True, lambda page: times(page.rows.died_ms, nullable=True)),
    "dead": (StringType(), True, lambda page: texts(page.rows.dead, nullable=True)),
    "birth": (LongType(), False, lambda page: longs(page.rows.birth)),
    "last_op": (LongType(), False, lambda page: longs(page.rows.last_op)),
    "payload_sum": (LongType(), False, lambda page: longs(page.rows.payload_sum)),
    "payload_bytes": (IntegerType(), False, lambda page: ints(page.rows.payload_bytes)),
    "payload": (BinaryType(), True, lambda page: payloads_of(page.rows)),
    "headers": (HEADERS, True, lambda page: headers_of(page.rows.headers, len(page.rows))),
}
"""Per column: its type, whether it may be null, and how it is made of a page."""

READ = StructType([StructField(name, kind, nullable) for name, (kind, nullable, _) in _READ.items()])
"""The columns of a batch read. Payload and headers are there only on request."""

CONTENT = ("payload", "headers")

_ARROW = {
    "string": pa.string(), "binary": pa.binary(), "int": pa.int32(), "bigint": pa.int64(), "timestamp": TIMES,
    HEADERS.simpleString(): _ARROW_HEADERS,
}  # fmt: skip


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the schema of record batches for columns that `check_read` lets through."""
    return pa.schema([pa.field(one.name, _ARROW[one.dataType.simpleString()], one.nullable) for one in schema.fields])


def read_schema(payload: bool) -> StructType:
    """Return the columns of a batch read, with or without the content."""
    return READ if payload else StructType([field for field in READ.fields if field.name not in CONTENT])


def check_written(schema: StructType) -> None:
    """Raise Invalid unless rows of `schema` can be put. The error names the column and the remedy."""
    for field in schema.fields:
        known = _WRITTEN.get(field.name)
        if known is None:
            near = difflib.get_close_matches(field.name.lower(), _WRITTEN, n=1)
            hint = f". If it is the {near[0]}, rename it" if near else ""
            raise Invalid(
                f"column {field.name!r} is none of {', '.join(_WRITTEN)}. Drop it, or put it into the payload{hint}"
            )
        types, words = known
        if not any(_same(field.dataType, one) for one in types):
            raise Invalid(
                f"column {field.name!r} must be {words}, not {field.dataType.simpleString()}"
                f"{_cure(words, field.dataType)}"
            )
    for name in _REQUIRED:
        if name not in schema.names:
            raise Invalid(f"there is no column {name!r} ({_WRITTEN[name][1]}). The columns are {_listed(schema.names)}")


def check_read(schema: StructType, whole: StructType) -> None:
    """Raise Invalid unless `schema`, which a person asked for, has only columns of `whole`, with their types."""
    for field in schema.fields:
        if field.name not in whole.names:
            near = difflib.get_close_matches(field.name, whole.names, n=1)
            hint = f": did you mean {near[0]}?" if near else f". There are {_listed(whole.names)}"
            raise Invalid(f"messages have no column {field.name!r}{hint}")
        kind = whole[field.name].dataType
        if not _same(field.dataType, kind):
            raise Invalid(
                f"column {field.name!r} is {kind.simpleString()}, not {field.dataType.simpleString()}. "
                "Read it with its own type and cast it then"
            )


def _same(one: DataType, other: DataType) -> bool:
    return one.simpleString() == other.simpleString()


def _cure(words: str, kind: DataType) -> str:
    if isinstance(kind, TimestampNTZType):
        return ", which has no time zone. Cast it to timestamp if its times are in the session's zone"
    if words == "a timestamp" and isinstance(kind, LongType | IntegerType):
        return ": timestamp_millis(…) or timestamp_seconds(…) makes a timestamp of a number"
    return ": cast it"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


_STATES = pa.array([State.WAITING.value, State.AVAILABLE.value, State.LEASED.value, State.DEAD.value])


def texts(column: Ragged, nullable: bool = False) -> pa.Array:
    """Return a column of UTF-8. If `nullable`, empty means null."""
    return _bytes(column, pa.string(), nullable)


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
    """Return milliseconds as timestamps. If `nullable`, 0 means null."""
    micros = millis * 1_000
    mask = (millis == 0) if nullable else None
    return pa.array(micros, pa.int64(), mask=mask).cast(TIMES)


def longs(numbers: Int64 | UInt64) -> pa.Array:
    """Return 64-bit numbers, unsigned ones with the same bits."""
    return pa.array(numbers.view(np.int64), pa.int64())


def ints(numbers: UInt32) -> pa.Array:
    """Return counts, at most 2^31 - 1."""
    return pa.array(np.minimum(numbers, 2**31 - 1).astype(np.int32), pa.int32())


def headers_of(column: Ragged | None, count: int) -> pa.Array:
    """Return encoded headers as maps; null where a message has none."""
    if column is None or not column.nbytes:
        return pa.nulls(count, _ARROW_HEADERS)
    maps = [list(decode_headers(item).items()) if item else None for item in column.tolist()]
    return pa.array(maps, _ARROW_HEADERS)


def states_of(rows: Rows, now_ms: int) -> pa.Array:
    """Return each row's state at the broker's time of reading."""
    code = np.where(rows.holders.sizes > 0, 2, 0)
    code[rows.due_ms <= now_ms] = 1
    code[rows.died_ms > 0] = 3
    return pa.DictionaryArray.from_arrays(pa.array(code, pa.int8()), _STATES).cast(pa.string())


def payloads_of(rows: Rows) -> pa.Array:
    """Return payloads; null where they were not asked for."""
    return _bytes(rows.payloads, pa.binary(), False) if rows.payloads is not None else pa.nulls(len(rows), pa.binary())


def record_batch(page: ScanPage, schema: pa.Schema) -> pa.RecordBatch:
    """Return a page as a batch with the columns of `schema`."""
    return pa.RecordBatch.from_arrays([_READ[name][2](page) for name in schema.names], schema=schema)
