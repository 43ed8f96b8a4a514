"""The columns of the source: what a table to write must have, and what a table that is read has, out of its pages.

Written: `due` (timestamp) and `payload` (binary or string); when there, `id` and `tag` (string), `headers`
(map<string,string>) and `expires` (timestamp). Read: all fields of a message, 64-bit numbers as they lie (births,
operation ids and checksums are unsigned; Spark's long shows the same bits signed), times as timestamps, null where
there is none. Numbers and byte strings are handed on without an object a row, but for headers where a message has any.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class PageRows:
    """A page of a scan: its rows, and the broker's time."""

    rows: Rows
    now_ms: int


_READ: dict[str, tuple[DataType, bool, Callable[[PageRows], pa.Array]]] = {
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
    "payload": (BinaryType(), True, lambda page: _payloads(page)),
    "headers": (HEADERS, True, lambda page: headers_of(page.rows.headers, len(page.rows))),
}
"""Of each column its type, whether it may be null, and how it is made of a page."""

READ = StructType([StructField(name, kind, nullable) for name, (kind, nullable, _) in _READ.items()])
"""What a batch read has; payload and headers only where they are asked for."""

CONTENT = ("payload", "headers")

STREAMED = StructType(
    [field for field in READ.fields if field.name in ("id", "due", "scheduled", "tag", "version", "deliveries")]
    + [READ["payload"], READ["headers"]]
)
"""What a stream read has: what was delivered. `due`: when it came due."""

_ARROW = {
    "string": pa.string(), "binary": pa.binary(), "int": pa.int32(), "bigint": pa.int64(), "timestamp": TIMES,
    HEADERS.simpleString(): _ARROW_HEADERS,
}  # fmt: skip


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the schema of record batches for columns that `check_read` lets through."""
    return pa.schema([pa.field(one.name, _ARROW[one.dataType.simpleString()], one.nullable) for one in schema.fields])


def read_schema(payload: bool) -> StructType:
    """The columns of a batch read, with or without the content."""
    return READ if payload else StructType([field for field in READ.fields if field.name not in CONTENT])


def check_written(schema: StructType) -> None:
    """Raises Invalid unless rows of `schema` can be put; the sentence names the column and what to do."""
    for field in schema.fields:
        known = _WRITTEN.get(field.name)
        if known is None:
            near = difflib.get_close_matches(field.name.lower(), _WRITTEN, n=1)
            hint = f"; if it is the {near[0]}, rename it" if near else ""
            raise Invalid(
                f"column {field.name!r} is none of {', '.join(_WRITTEN)}: drop it, or put it into the payload{hint}"
            )
        types, words = known
        if not any(_same(field.dataType, one) for one in types):
            raise Invalid(
                f"column {field.name!r} must be {words}, not {field.dataType.simpleString()}"
                f"{_cure(words, field.dataType)}"
            )
    for name in _REQUIRED:
        if name not in schema.names:
            raise Invalid(f"there is no column {name!r} ({_WRITTEN[name][1]}); the columns are {_listed(schema.names)}")


def check_read(schema: StructType, whole: StructType) -> None:
    """Raises Invalid unless `schema`, which a person asked for, is some of the columns of `whole` with their types."""
    for field in schema.fields:
        if field.name not in whole.names:
            near = difflib.get_close_matches(field.name, whole.names, n=1)
            hint = f": did you mean {near[0]}?" if near else f"; there are {_listed(whole.names)}"
            raise Invalid(f"messages have no column {field.name!r}{hint}")
        kind = whole[field.name].dataType
        if not _same(field.dataType, kind):
            raise Invalid(
                f"column {field.name!r} is {kind.simpleString()}, not {field.dataType.simpleString()}: "
                "read it as it is and cast it then"
            )


def _same(one: DataType, other: DataType) -> bool:
    return one.simpleString() == other.simpleString()


def _cure(words: str, kind: DataType) -> str:
    if isinstance(kind, TimestampNTZType):
        return ", which has no time zone: cast it to timestamp where the session's zone is the one that it means"
    if words == "a timestamp" and isinstance(kind, LongType | IntegerType):
        return ": timestamp_millis(…) or timestamp_seconds(…) makes one of a number"
    return ": cast it"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


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
        return pa.nulls(count, _ARROW_HEADERS)
    maps = [list(decode_headers(item).items()) if item else None for item in column.tolist()]
    return pa.array(maps, _ARROW_HEADERS)


def states_of(rows: Rows, now_ms: int) -> pa.Array:
    """Each row's state at the broker's time of reading."""
    code = np.where(rows.holders.sizes > 0, 2, 0)
    code[rows.due_ms <= now_ms] = 1
    code[rows.died_ms > 0] = 3
    return pa.DictionaryArray.from_arrays(pa.array(code, pa.int8()), _STATES).cast(pa.string())


def _payloads(page: PageRows) -> pa.Array:
    rows = page.rows
    return binaries(rows.payloads) if rows.payloads is not None else pa.nulls(len(rows), pa.binary())


def record_batch(page: PageRows, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of `schema` of a page."""
    return pa.RecordBatch.from_arrays([_READ[name][2](page) for name in schema.names], schema=schema)
