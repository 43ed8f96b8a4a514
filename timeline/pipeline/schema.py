"""The columns of the source: what a table to write must have, and what a table that is read has.

Written: `due` (timestamp) and `payload` (binary or string); when there, `id` and `tag` (string), `headers`
(map<string,string>) and `expires` (timestamp). Read: all fields of a message, 64-bit numbers as they lie (births,
operation ids and checksums are unsigned; Spark's long shows the same bits signed), times as timestamps, null where
there is none."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

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

from timeline.errors import Invalid

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

READ = StructType(
    [
        StructField("id", StringType(), False),
        StructField("due", TimestampType(), False),
        StructField("state", StringType(), False),
        StructField("scheduled", TimestampType(), False),
        StructField("tag", StringType(), True),
        StructField("group", StringType(), False),
        StructField("holder", StringType(), True),
        StructField("version", LongType(), False),
        StructField("deliveries", IntegerType(), False),
        StructField("put", TimestampType(), False),
        StructField("asked", TimestampType(), False),
        StructField("expires", TimestampType(), True),
        StructField("died", TimestampType(), True),
        StructField("dead", StringType(), True),
        StructField("birth", LongType(), False),
        StructField("last_op", LongType(), False),
        StructField("payload_sum", LongType(), False),
        StructField("payload_bytes", IntegerType(), False),
        StructField("payload", BinaryType(), True),
        StructField("headers", HEADERS, True),
    ]
)
"""What a batch read has; payload and headers only where they are asked for."""

CONTENT = ("payload", "headers")

STREAMED = StructType(
    [field for field in READ.fields if field.name in ("id", "due", "scheduled", "tag", "version", "deliveries")]
    + [READ["payload"], READ["headers"]]
)
"""What a stream read has: what was delivered. `due`: when it came due."""


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
