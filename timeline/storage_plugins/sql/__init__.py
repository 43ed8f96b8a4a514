"""The tables of the SQL stores, their schema versions, and the columns that a put writes. The modules beside it have
the logic.

The tables are SQLAlchemy Core's, so that each dialect writes its own DDL and types. Each store writes its hot
statements by hand. Times are int milliseconds UTC. SQL's integers are signed: unsigned 64-bit columns (`birth`,
`last_op`, `payload_sum`) are stored as the signed number with the same bits, see `signed`.

    topic      one record each; `key` is the small number that rows carry instead of the random 63-bit uid
    message    a message without its content; dead letters too, outside the due indexes
    payload    content by the message's row number; only put and delivery read or write it
    remembered the remains of settled ids on a topic that remembers
    dropped    keys of dropped topics that may still have rows
    meta       schema version, the cluster's uid
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from sqlalchemy import BigInteger, Column, Dialect, Index, Integer, LargeBinary, MetaData, Table, Text, text
from sqlalchemy.schema import CreateIndex, CreateTable

from timeline.columns import Int64, Ragged
from timeline.model import ROW_DTYPES, Rows
from timeline.storage_plugins.contract import PUT_NUMBERS, Puts, StoreRefused
from timeline.storage_plugins.versions import Step

_NUMBER = BigInteger().with_variant(Integer(), "sqlite")
_BYTES = LargeBinary()
FREE = "died_ms = 0 AND holder = x''"
HELD = "died_ms = 0 AND holder != x''"
TAGGED = "tag != x''"
EXPIRES = "expires_ms != 0 AND died_ms = 0"
DEAD = "died_ms != 0"
"""Predicates of the partial indexes. A statement that names one of these indexes must repeat its predicate exactly."""

NUMBERS = tuple(ROW_DTYPES)
"""Numeric columns of `message` that are fields of `Rows`, under the same names."""
STRINGS = {"ids": "id", "groups": "grp", "holders": "holder", "tags": "tag", "dead": "dead"}
"""Byte-string fields of `Rows` and their columns."""
UNSIGNED = frozenset(name for name, dtype in ROW_DTYPES.items() if dtype is np.uint64)
NEW = ("row", "bucket", "id", *PUT_NUMBERS, "payload_bytes", "headers_bytes", "grp", "tag")
"""Columns of a new message that differ from put to put, in the order of `new_columns`. The due time is `scheduled_ms`
too, the topic and the times of the put are the same for all, and the other columns have defaults."""
_STATED = frozenset(
    ("birth", "due_ms", "scheduled_ms", "put_ms", "asked_ms", "expires_ms", "payload_sum", "payload_bytes")
)
"""Numeric columns that puts of every schema version state. All others need a default, for older brokers."""

schema = MetaData()


def _number(name: str, default: str | None = None) -> Column[int]:
    return Column(name, _NUMBER, nullable=False, server_default=None if default is None else text(default))


def _bytes(name: str, empty: bool = False) -> Column[bytes]:
    return Column(name, _BYTES, nullable=False, server_default=text("x''") if empty else None)


def _partial(name: str, predicate: str, *columns: str) -> Index:
    where = text(predicate)
    return Index(name, *columns, sqlite_where=where, postgresql_where=where)


meta = Table("meta", schema, Column("name", Text, primary_key=True), Column("value", Text, nullable=False))

topic = Table(
    "topic",
    schema,
    Column("key", Integer, primary_key=True, autoincrement=True),
    Column("uid", _NUMBER, nullable=False, unique=True),
    Column("name", Text, nullable=False, unique=True),
    Column("settings", Text, nullable=False),
    _number("revision"),
    _number("created_ms"),
    sqlite_autoincrement=True,
)

dropped = Table("dropped", schema, Column("key", Integer, primary_key=True, autoincrement=False))

message = Table(
    "message",
    schema,
    Column("row", _NUMBER, primary_key=True, autoincrement=False),
    _number("topic"),
    _number("bucket"),
    _bytes("id"),
    *(_number(name, None if name in _STATED else "1" if name == "version" else "0") for name in NUMBERS),
    _number("headers_bytes"),
    _bytes("grp"),
    _bytes("holder", empty=True),
    _bytes("tag"),
    _bytes("dead", empty=True),
    Index("message_id", "topic", "bucket", "id", unique=True),
    _partial("message_free", FREE, "topic", "due_ms", "id"),
    _partial("message_held", HELD, "topic", "due_ms", "id"),
    _partial("message_tag", TAGGED, "topic", "tag", "bucket", "id"),
    _partial("message_expires", EXPIRES, "topic", "expires_ms"),
    _partial("message_dead", DEAD, "topic", "bucket", "id"),
    _partial("message_died", DEAD, "topic", "died_ms"),
)
"""`message_free` and `message_held` split the timeline by whether a message has a holder, of a lease that runs or has
run out. Messages that may be leased are a range of each. The load ahead is a range of the first, read without a row."""

payload = Table(
    "payload",
    schema,
    Column("row", _NUMBER, primary_key=True, autoincrement=False),
    _bytes("payload"),
    _bytes("headers"),
)

remembered = Table(
    "remembered",
    schema,
    Column("topic", _NUMBER, primary_key=True, autoincrement=False),
    Column("id", _BYTES, primary_key=True),
    _number("birth"),
    _number("version"),
    _number("payload_sum"),
    _number("last_op"),
    _number("settled_ms"),
    Index("remembered_settled", "topic", "settled_ms"),
    sqlite_with_rowid=False,
)


def signed(column: npt.NDArray[Any]) -> list[int]:
    """Return a column of numbers for SQL: unsigned 64-bit ones as the signed ones with the same bits."""
    numbers: list[int] = (column.view(np.int64) if column.dtype == np.uint64 else column).tolist()
    return numbers


def signed_one(number: int) -> int:
    """Return `signed` of one number."""
    return number - (1 << 64) if number >= 1 << 63 else number


def new_columns(puts: Puts, rows: Sequence[int], buckets: Sequence[int]) -> list[Sequence[Any]]:
    """Return the columns of NEW. `rows`: the row number of each put."""
    numbers = (*(getattr(puts, name) for name in PUT_NUMBERS), puts.sizes, puts.headers.sizes)
    return [rows, buckets, puts.ids.tolist(), *map(signed, numbers), puts.groups.tolist(), puts.tags.tolist()]


def rows_of(numbers: Mapping[str, Sequence[int] | Int64], strings: Mapping[str, Ragged]) -> Rows:
    """Return `Rows` from columns as SQL returns them: `numbers` under the names in NUMBERS, and `strings` under the
    fields of STRINGS, with `payloads` and `headers` if they were read."""
    columns: dict[str, Any] = dict(strings)
    for name, dtype in ROW_DTYPES.items():
        column = np.asarray(numbers[name], dtype=np.int64)
        columns[name] = column.view(np.uint64) if name in UNSIGNED else column.astype(dtype, copy=False)
    return Rows(**columns)


def number_option(name: str, value: str, allowed: tuple[int, int]) -> int:
    """Return the number that an option of a URL names. Raise StoreRefused if it is not in the range `allowed`."""
    low, high = allowed
    if not value.isascii() or not value.isdigit() or not low <= int(value[:9]) <= high:
        raise StoreRefused(f"{name} must be a whole number from {low} to {high}, not {value!r:.80}")
    return int(value)


# ── schema versions ──


class Executes(Protocol):
    """The tool of a migration: it runs one statement inside the transaction that raises the version."""

    def __call__(self, statement: str, /) -> Any: ...


Migration = Step[Executes]

MIGRATIONS: tuple[Migration, ...] = ()
"""See `versions.migrate`."""


def ddl(dialect: Dialect) -> list[str]:
    """Return the statements that create the whole schema, in order."""
    made: list[str] = []
    for table in schema.sorted_tables:
        made.append(str(CreateTable(table).compile(dialect=dialect)).strip())
        indexes = sorted(table.indexes, key=lambda index: index.name or "")
        made += [str(CreateIndex(index).compile(dialect=dialect)).strip() for index in indexes]
    return made
