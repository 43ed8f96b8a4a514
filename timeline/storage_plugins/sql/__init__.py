"""What the SQL family of stores shares: tables, schema versions, rows as columns. The modules beside it have the logic.

Tables are SQLAlchemy Core's, so that each dialect writes its own DDL and types; the hot statements are each store's
own affair. Times are int milliseconds UTC. SQL's integers are signed: the 64-bit unsigned columns (`birth`, `last_op`,
`payload_sum`) are stored as the signed number with the same bits, see `signed`.

    topic      one record each; `key` is the small number that rows carry instead of the random 63-bit uid
    message    everything about a message but its content; dead letters too, off the due indexes
    payload    content by the message's row number, never read or written but by put and delivery
    remembered what is left of settled ids on a topic that remembers
    dropped    keys of dropped topics whose rows are not all gone yet
    meta       schema version, the cluster's uid
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from sqlalchemy import (
    BigInteger,
    Column,
    Dialect,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    text,
)
from sqlalchemy.schema import CreateIndex, CreateTable

from timeline.columns import Int64, Ragged, UInt64
from timeline.model import ROW_DTYPES, Rows
from timeline.storage_plugins.versions import Step

_NUMBER = BigInteger().with_variant(Integer(), "sqlite")
_BYTES = LargeBinary()
FREE = "died_ms = 0 AND holder = x''"
HELD = "died_ms = 0 AND holder != x''"
TAGGED = "tag != x''"
EXPIRES = "expires_ms != 0 AND died_ms = 0"
DEAD = "died_ms != 0"
"""Predicates of the partial indexes. A statement that names one of these indexes must say its predicate just so."""

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
    _number("birth"),
    _number("version", "1"),
    _number("due_ms"),
    _number("scheduled_ms"),
    _number("put_ms"),
    _number("asked_ms"),
    _number("deliveries", "0"),
    _number("last_op", "0"),
    _number("expires_ms"),
    _number("payload_sum"),
    _number("payload_bytes"),
    _number("headers_bytes"),
    _number("died_ms", "0"),
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
"""`message_free` and `message_held` split the timeline by whether there is a holder (of a lease that runs or has run
out): what may be leased is a range of each, and the load ahead is a range of the first, without looking at a row."""

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

NUMBERS = tuple(ROW_DTYPES)
"""Numeric columns of `message` that are fields of `Rows`, under the same names."""
STRINGS = {"ids": "id", "groups": "grp", "holders": "holder", "tags": "tag", "dead": "dead"}
"""Byte-string fields of `Rows` and their columns."""
UNSIGNED = frozenset(name for name, dtype in ROW_DTYPES.items() if dtype is np.uint64)


def signed(column: UInt64) -> list[int]:
    """Unsigned 64-bit numbers as the signed ones with the same bits, for SQL."""
    numbers: list[int] = np.ascontiguousarray(column, dtype=np.uint64).view(np.int64).tolist()
    return numbers


def signed_one(number: int) -> int:
    """`signed` of one number."""
    return number - (1 << 64) if number >= 1 << 63 else number


def rows_of(numbers: Mapping[str, Sequence[int] | Int64], strings: Mapping[str, Ragged]) -> Rows:
    """`Rows` from columns as SQL gives them: `numbers` under the names in NUMBERS, `strings` under the fields of
    STRINGS, and `payloads` and `headers` where they came along."""
    columns: dict[str, Any] = dict(strings)
    for name, dtype in ROW_DTYPES.items():
        column = np.asarray(numbers[name], dtype=np.int64)
        columns[name] = column.view(np.uint64) if name in UNSIGNED else column.astype(dtype, copy=False)
    return Rows(**columns)


# ── schema versions ──


class Executes(Protocol):
    """What a migration may do: run one statement inside the transaction that raises the version."""

    def __call__(self, statement: str, /) -> Any: ...


Migration = Step[Executes]

MIGRATIONS: tuple[Migration, ...] = ()
"""See `versions.migrate`."""


def ddl(dialect: Dialect) -> list[str]:
    """The statements that create the whole schema, in order."""
    made: list[str] = []
    for table in schema.sorted_tables:
        made.append(str(CreateTable(table).compile(dialect=dialect)).strip())
        indexes = sorted(table.indexes, key=lambda index: index.name or "")
        made += [str(CreateIndex(index).compile(dialect=dialect)).strip() for index in indexes]
    return made
