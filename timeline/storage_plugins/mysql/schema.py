"""The shared tables as MySQL and MariaDB need them: byte strings of bounded length, so that they can be indexed and
compare as bytes, and, since there are no partial indexes, a computed column that splits the timeline."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Column, Computed, Index, MetaData, SmallInteger, Table, text
from sqlalchemy.dialects import mysql as mysql_dialect
from sqlalchemy.schema import CreateIndex, CreateTable

from timeline.model import MAX_GROUP_BYTES, MAX_HOLDER_BYTES, MAX_ID_BYTES, MAX_REASON_BYTES, MAX_TAG_BYTES
from timeline.storage_plugins import sql

DIALECT = mysql_dialect.dialect()
OPTIONS: dict[str, Any] = {"mysql_engine": "InnoDB", "mysql_charset": "utf8mb4"}
FREE, HELD, DEAD = 0, 1, 2
"""Values of `kind`: living without a holder, living with one (whose lease runs or has run out), dead letter."""

_KIND = "CASE WHEN died_ms <> 0 THEN 2 WHEN holder = x'' THEN 0 ELSE 1 END"
_BYTES = {
    "id": MAX_ID_BYTES,
    "grp": MAX_GROUP_BYTES,
    "holder": MAX_HOLDER_BYTES,
    "tag": MAX_TAG_BYTES,
    "dead": MAX_REASON_BYTES,
    "name": 1020,
    "value": 255,
}
_PLACE = "CASE WHEN died_ms <> 0 THEN died_ms ELSE due_ms END"
_INDEXES = {
    "message_id": ("topic", "bucket", "id"),
    "message_due": ("topic", "kind", "place_ms", "id", "bucket"),
}
"""`message_due` is the timeline of each kind, by the due of what lives and by the time at which dead letters died. It
carries the bucket, so that the next due of some buckets is found without looking at rows."""


def _number(name: str) -> Column[int]:
    return Column(name, BigInteger(), primary_key=True, autoincrement=False)


def _key_bytes(name: str) -> Column[bytes]:
    return Column(name, mysql_dialect.VARBINARY(_BYTES[name]), primary_key=True)


def _beside(made: MetaData) -> None:
    """What few messages have stands in tables beside: an index of `message` would have an entry for each of them."""
    row: Column[int] = Column("row", BigInteger(), nullable=False)
    Table("tagged", made, _number("topic"), _key_bytes("tag"), _number("bucket"), _key_bytes("id"), row, **OPTIONS)
    Table("expiring", made, _number("topic"), _number("expires_ms"), _number("row"), **OPTIONS)


def _column(column: Column[object]) -> Column[object]:
    """A shared column with a type of this family; texts that are compared become bytes."""
    kind: object = column.type
    if column.name in _BYTES:
        kind = mysql_dialect.VARBINARY(_BYTES[column.name])
    elif column.name in ("payload", "headers") or column.name == "settings":
        kind = mysql_dialect.LONGBLOB()
    elif isinstance(column.type, BigInteger):
        kind = BigInteger()
    return Column(
        column.name,
        kind,  # type: ignore[arg-type]
        primary_key=column.primary_key,
        autoincrement=column.autoincrement,
        nullable=False,
        unique=column.unique,
        server_default=None if column.server_default is None else text(str(column.server_default.arg)),  # type: ignore[attr-defined]
    )


def _tables() -> MetaData:
    made = MetaData()
    for table in sql.schema.sorted_tables:
        columns = [_column(column) for column in table.columns]
        if table.name == "message":
            kind: Column[Any] = Column("kind", SmallInteger, Computed(_KIND, persisted=True))
            place: Column[Any] = Column("place_ms", BigInteger(), Computed(_PLACE, persisted=True))
            columns += [kind, place]
        indexes = []
        if table.name == "message":
            indexes = [Index(name, *on, unique=name == "message_id") for name, on in _INDEXES.items()]
        elif table.name == "remembered":
            indexes = [Index("remembered_settled", "topic", "settled_ms")]
        Table(table.name, made, *columns, *indexes, **OPTIONS)
    _beside(made)
    return made


def ddl(*names: str) -> list[str]:
    """The statements that create the tables of these names, with their indexes. MySQL knows no IF NOT EXISTS of an
    index: one that is there is an error."""
    made: list[str] = []
    for table in (_tables().tables[name] for name in names):
        made.append(str(CreateTable(table, if_not_exists=True).compile(dialect=DIALECT)).strip())
        indexes = sorted(table.indexes, key=lambda index: index.name or "")
        made += [str(CreateIndex(index).compile(dialect=DIALECT)).strip() for index in indexes]
    return made
