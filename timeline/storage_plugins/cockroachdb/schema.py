"""Tables, their indexes, and the schema's version.

CockroachDB changes schemas in the background and advises against DDL inside a transaction. It has no advisory locks
either. So each statement is a transaction of its own, and does nothing if its work is done. The table with the version
is created last. Several brokers may do all of it at once.
"""

from __future__ import annotations

import re
import secrets

import asyncpg
from sqlalchemy import BigInteger, Column, Computed, Index, MetaData, Table, UniqueConstraint
from sqlalchemy.schema import CreateTable
from sqlalchemy.sql import quoted_name
from sqlalchemy_cockroachdb.base import CockroachDBDialect

from timeline.storage_plugins import sql
from timeline.storage_plugins.contract import StoreRefused
from timeline.storage_plugins.postgresql.connections import (
    PostgresqlConnection,
    PostgresqlConnections,
    Steps,
    refused_rights,
)
from timeline.storage_plugins.postgresql.pool import SCHEMA, PostgresqlLocation, state_of
from timeline.storage_plugins.postgresql.schema import FoundSchema
from timeline.storage_plugins.postgresql.statements import NOTHING
from timeline.storage_plugins.versions import Versions, migrate, noted

OLDEST = (23, 2)
SHARDS = 16
"""Shards of an index by time. Without them all brokers would write to its last range."""
HASHED = frozenset(("message_free", "message_held", "message_expires", "message_died", "remembered_settled"))
_ABSENT = frozenset(("42P01", "3F000"))
"""No such table, no such schema."""
_THERE = frozenset(("42P06", "42P07", "42701", "42710", "23505"))
"""Another broker has just created it, or a migration that broke off."""
_NONE_TO_DROP = frozenset(("42703", "42704"))
"""No such column, no such index."""
VERSION = "SELECT version()"
KNOWN = "SELECT name, value FROM timeline.meta"
BEGUN = (
    "INSERT INTO timeline.meta (name, value) VALUES ('schema_version', $1), ('cluster_uid', $2) ON CONFLICT DO NOTHING"
)
REACHED = (
    "INSERT INTO timeline.meta (name, value) VALUES ('schema_version', $1), ('oldest_version', $2) "
    "ON CONFLICT (name) DO UPDATE SET value = excluded.value"
)
WRITABLE = "UPDATE timeline.meta SET value = value WHERE name = 'schema_version'"


def statements(schema: str = SCHEMA) -> list[str]:
    """Return the statements that create the schema, in order."""
    made = [f"CREATE SCHEMA IF NOT EXISTS {schema}"]
    tables = [table for table in sql.schema.sorted_tables if table.name != "meta"]
    dialect = CockroachDBDialect()
    for table in (*tables, sql.meta):
        text = str(CreateTable(_own(table), if_not_exists=True).compile(dialect=dialect)).strip()
        made += [text, *map(_index, sorted(table.indexes, key=lambda index: index.name or ""))]
    return [text.replace("x''", NOTHING).replace("\t", "    ").replace(", \n", ",\n") for text in made]


def _own(table: Table) -> Table:
    """Return the table as CockroachDB has it: a topic's uid is its key. `row` is a word of the grammar."""
    columns = [
        Column(quoted_name(column.name, column.name == "row" or None), primary_key=column.primary_key,
               type_=BigInteger if column.name == "key" else column.type, autoincrement=False,
               nullable=column.nullable, server_default=column.server_default)
        for column in table.columns
    ]  # fmt: skip
    if table is sql.topic:
        computed = Column("key", BigInteger, Computed("uid", persisted=True))
        columns = [Column("uid", BigInteger, primary_key=True, autoincrement=False), *columns[2:], computed]
    unique = [UniqueConstraint("name")] if table is sql.topic else []
    return Table(table.name, MetaData(), *columns, *unique, schema=SCHEMA)


def _index(index: Index) -> str:
    """Return the statement of an index. CockroachDB refuses SQLAlchemy's text of a hash-sharded one."""
    assert index.name is not None and index.table is not None
    where = index.dialect_options["postgresql"]["where"]
    return "".join(
        (
            f"CREATE {'UNIQUE ' if index.unique else ''}INDEX IF NOT EXISTS {index.name} ",
            f"ON {SCHEMA}.{index.table.name} ({', '.join(column.name for column in index.columns)})",
            f" USING HASH WITH (bucket_count = {SHARDS})" if index.name in HASHED else "",
            "" if where is None else f" WHERE {where}",
        )
    )


async def prepare(connections: PostgresqlConnections, location: PostgresqlLocation) -> FoundSchema:
    """Create or migrate the schema. Raise StoreRefused or StoreUnavailable."""
    server = await _server(connections, location)
    known = await _known(connections, location)
    if "cluster_uid" not in known:
        for statement in statements(location.schema):
            await _made(connections, statement, location)
        first = (str(1 + len(sql.MIGRATIONS)), secrets.token_hex(16))
        await connections.use(lambda connection: connection.execute(BEGUN, *first), writes=True)
        known = await _known(connections, location)
    await migrated(connections, location, known, contract=False)
    return FoundSchema(known["cluster_uid"], server)


async def look(connections: PostgresqlConnections, location: PostgresqlLocation) -> FoundSchema:
    """Return what is there now, and change nothing. The uid is empty if there is no schema. Raises as `prepare`."""
    server = await _server(connections, location)
    return FoundSchema((await _known(connections, location)).get("cluster_uid", ""), server)


async def _server(connections: PostgresqlConnections, location: PostgresqlLocation) -> str:
    """Return the server in words. Raise StoreRefused."""
    said = str(await connections.use(lambda connection: connection.fetchval(VERSION), writes=False))
    version = re.search(r"CockroachDB\D* v(\d+)\.(\d+)", said)
    if version is None:
        raise StoreRefused(
            f"{location.shown}: this is no CockroachDB but {said:.60}; for PostgreSQL write postgresql://"
        )
    if (int(version[1]), int(version[2])) < OLDEST:
        raise StoreRefused(
            f"CockroachDB {version[1]}.{version[2]} is too old: {OLDEST[0]}.{OLDEST[1]} or newer is needed"
        )
    return f"CockroachDB {version[1]}.{version[2]}, {location.shown}"


async def versions(connections: PostgresqlConnections, location: PostgresqlLocation, contract: bool) -> Versions:
    """Return the schema's versions. `contract`: remove what only the version before needed."""
    return await migrated(connections, location, await _known(connections, location), contract)


async def migrated(
    connections: PostgresqlConnections, location: PostgresqlLocation, known: dict[str, str], contract: bool
) -> Versions:
    """Migrate the schema, one statement at a time. Raise StoreRefused."""
    try:
        found = noted(known)
    except (KeyError, ValueError) as damaged:
        raise StoreRefused(
            f"{location.shown}: table {location.schema}.meta is damaged ({damaged!r}): restore the database"
        ) from damaged
    told: list[str] = []
    reached = migrate(told.append, found, sql.MIGRATIONS, contract=contract)
    steps = Steps(connections)  # once one is done, a failure leaves the migration unknown
    for statement in told:
        await _made(steps, statement, location, f"SET search_path TO {location.schema}")
    if reached != found:
        numbers = (str(reached.version), str(reached.oldest))
        await steps.use(lambda connection: connection.execute(REACHED, *numbers), writes=True)
    return reached


async def _known(connections: PostgresqlConnections, location: PostgresqlLocation) -> dict[str, str]:
    """Return what table meta says; nothing if there is no schema."""

    async def look(connection: PostgresqlConnection) -> dict[str, str]:
        try:
            with refused_rights(location):
                return {record["name"]: record["value"] for record in await connection.fetch(KNOWN)}
        except asyncpg.PostgresError as error:
            if state_of(error) in _ABSENT:
                return {}
            raise

    return await connections.use(look, writes=False)


async def _made(
    connections: PostgresqlConnections | Steps, statement: str, location: PostgresqlLocation, before: str = ""
) -> None:
    """Run a statement whose part may be created or dropped already. `before`: a statement that its connection runs
    first, as it is: the steps of migrations name no schema, unlike all other statements."""

    async def make(connection: PostgresqlConnection) -> None:
        try:
            with refused_rights(location):
                if before:
                    await connection.raw.execute(before)
                await connection.execute(statement)
        except asyncpg.PostgresError as error:
            if state_of(error) not in (_THERE | _NONE_TO_DROP if " DROP " in f" {statement}" else _THERE):
                raise

    await connections.use(make, writes=True)
