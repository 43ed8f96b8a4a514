"""The shared tables as MySQL and MariaDB need them, their creation and migration, and the server's promises.

Byte strings have a bounded length, so that they can be indexed and compare as bytes. There are no partial indexes, so a
computed column splits the timeline."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pymysql
from sqlalchemy import BigInteger, Column, Computed, Index, MetaData, SmallInteger, Table, text
from sqlalchemy.dialects import mysql as mysql_dialect
from sqlalchemy.schema import CreateIndex, CreateTable

from timeline.model import MAX_GROUP_BYTES, MAX_HOLDER_BYTES, MAX_ID_BYTES, MAX_REASON_BYTES, MAX_TAG_BYTES
from timeline.storage_plugins import sql
from timeline.storage_plugins.contract import StoreRefused, StoreUnavailable, StoreUnknown
from timeline.storage_plugins.mysql.connections import MysqlSession, code_of, is_lost
from timeline.storage_plugins.versions import Versions, migrate

DIALECT = mysql_dialect.dialect()
OPTIONS: dict[str, Any] = {"mysql_engine": "InnoDB", "mysql_charset": "utf8mb4"}
FREE, HELD, DEAD = 0, 1, 2
"""Values of `kind`: living without a holder, living with one (its lease runs or has run out), dead letter."""

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
"""`message_due` is the timeline of each kind: living messages by their due time, dead letters by their time of death.
It has the bucket, so that the next due time of some buckets is found without reading rows."""


def _number(name: str) -> Column[int]:
    return Column(name, BigInteger(), primary_key=True, autoincrement=False)


def _key_bytes(name: str) -> Column[bytes]:
    return Column(name, mysql_dialect.VARBINARY(_BYTES[name]), primary_key=True)


def _beside(made: MetaData) -> None:
    """Add the tables for tags and expiries, which few messages have: an index of `message` would have an entry for
    all."""
    row: Column[int] = Column("row", BigInteger(), nullable=False)
    Table("tagged", made, _number("topic"), _key_bytes("tag"), _number("bucket"), _key_bytes("id"), row, **OPTIONS)
    Table("expiring", made, _number("topic"), _number("expires_ms"), _number("row"), **OPTIONS)


def _column(column: Column[object]) -> Column[object]:
    """Return a shared column with a type of MySQL. Texts that are compared become bytes."""
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
    """Return the statements that create these tables with their indexes. MySQL knows no IF NOT EXISTS for an index: an
    existing one is an error."""
    made: list[str] = []
    for table in (_tables().tables[name] for name in names):
        made.append(str(CreateTable(table, if_not_exists=True).compile(dialect=DIALECT)).strip())
        indexes = sorted(table.indexes, key=lambda index: index.name or "")
        made += [str(CreateIndex(index).compile(dialect=DIALECT)).strip() for index in indexes]
    return made


# ── opening ──

OLDEST = {"MariaDB": (10, 6), "MySQL": (8, 0)}
LOCK = "CONCAT('timeline ', LEFT(MD5(DATABASE()), 16))"
LOCK_S = 8


TABLES = ("dropped", "expiring", "message", "meta", "payload", "remembered", "tagged", "topic")
DONE_ALREADY = frozenset((1060, 1061, 1091))
"""The column or the index is there already, or there is none to drop."""


def prepare(session: MysqlSession) -> str:
    """Create or migrate the schema, one process at a time, and return the cluster's uid. DDL commits by itself here, so
    that a creation may end half-way: the next one continues it. Tables of others are never touched."""
    with _alone(session):
        return _prepare(session)


def known_uid(session: MysqlSession) -> str:
    """Return the cluster's uid; empty: there is none."""
    there = "SELECT 1 FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = 'meta'"
    found = session.rows("SELECT value FROM meta WHERE name = 'cluster'") if session.rows(there) else ()
    return bytes(found[0][0]).decode() if found else ""


@contextmanager
def _alone(session: MysqlSession) -> Iterator[None]:
    if session.rows(f"SELECT GET_LOCK({LOCK}, {LOCK_S})")[0][0] != 1:
        raise StoreUnavailable("another process is creating or migrating this database's schema")
    try:
        yield
    finally:
        with suppress(pymysql.MySQLError, OSError):  # a lost connection has released it
            session.rows(f"SELECT RELEASE_LOCK({LOCK})")


def _prepare(session: MysqlSession) -> str:
    engines = {
        str(name): str(engine)
        for name, engine in session.rows(
            "SELECT CONVERT(table_name USING utf8mb4), CONVERT(engine USING utf8mb4) FROM information_schema.tables "
            "WHERE table_schema = DATABASE()"
        )
        if str(name) in TABLES
    }
    if others := sorted(name for name, engine in engines.items() if engine.lower() != "innodb"):
        raise StoreRefused(
            f"these tables are not in InnoDB, the only engine that can roll back: {', '.join(others)}; "
            "ALTER TABLE … ENGINE = InnoDB"
        )
    there = engines.keys()
    found = dict(session.rows("SELECT name, value FROM meta")) if "meta" in there else {}
    if b"cluster" not in found:
        if there - {"meta"} or found:
            raise StoreRefused(
                f"the database has tables named {', '.join(sorted(there))} that are not Timeline's: "
                "give it a database of its own"
            )
        for statement in ddl("meta"):
            session.execute(statement)
        uid = secrets.token_hex(16)
        session.execute(f"INSERT INTO meta (name, value) VALUES ('cluster', '{uid}'), ('rows', '0')")
        found[b"cluster"] = uid.encode()
    if b"schema" not in found:
        for statement in ddl(*(name for name in TABLES if name != "meta")):
            _made(session, statement)
        session.execute(f"INSERT INTO meta (name, value) VALUES ('schema', '{1 + len(sql.MIGRATIONS)}')")
    else:
        _migrated(session, found, contract=False)
    return bytes(found[b"cluster"]).decode()


def _made(session: MysqlSession, statement: str) -> None:
    """Run a statement whose column or index may be added or dropped already, because the work broke off before."""
    try:
        session.execute(statement)
    except pymysql.MySQLError as error:
        if code_of(error) not in DONE_ALREADY:
            raise


def contracted(session: MysqlSession, contract: bool) -> Versions:
    """Return the schema's versions, one process at a time. `contract`: remove what only the version before needed."""
    with _alone(session):
        return _migrated(session, dict(session.rows("SELECT name, value FROM meta")), contract)


def _migrated(session: MysqlSession, known: dict[bytes, bytes], contract: bool) -> Versions:
    found = Versions.of(known[b"schema"], known.get(b"oldest"))
    begun = False

    def execute(statement: str) -> None:
        nonlocal begun
        _made(session, statement)
        begun = True  # DDL commits by itself

    try:
        reached = migrate(execute, found, sql.MIGRATIONS, contract=contract)
        if reached != found:
            noted = (str(reached.version), str(reached.oldest))
            session.execute("REPLACE INTO meta (name, value) VALUES ('schema', %s), ('oldest', %s)", noted)
    except (pymysql.MySQLError, OSError) as error:
        if begun or is_lost(error):
            raise StoreUnknown(
                f"the schema is migrated in part, and the same command goes on with it: {error}"
            ) from error
        raise
    return reached


@dataclass(frozen=True, slots=True)
class MysqlServer:
    """The server in words, whether acknowledged data survives its death, sentences on settings that weaken that, and
    its max_allowed_packet."""

    shown: str
    durable: bool
    warnings: tuple[str, ...]
    packet_bytes: int


def server(session: MysqlSession) -> MysqlServer:
    """Return what the server is. Raise StoreRefused if it is too old or read-only."""
    names = ("version", "innodb_flush_log_at_trx_commit", "sync_binlog", "log_bin", "max_allowed_packet", "read_only")
    version, flush, sync, binlog, packet, read_only = session.rows(
        f"SELECT {', '.join(f'@@{name}' for name in names)}"
    )[0]
    kind = "MariaDB" if "mariadb" in version.lower() else "MySQL"
    number = tuple(int(part) for part in version.split("-")[0].split(".")[:2])
    if number < OLDEST[kind]:
        oldest = ".".join(map(str, OLDEST[kind]))
        raise StoreRefused(f"{kind} {version} is too old: {kind} {oldest} is needed, for SKIP LOCKED and JSON_TABLE")
    if read_only not in (0, "OFF"):
        raise StoreRefused(f"{kind} {version} is read-only: name the primary in the URL, or SET GLOBAL read_only = OFF")
    warnings = []
    if flush != 1:
        warnings.append(
            f"innodb_flush_log_at_trx_commit = {flush}: what was acknowledged in the last second may be lost when the "
            "server or its machine dies; set it to 1"
        )
    if binlog and sync != 1:
        warnings.append(
            f"sync_binlog = {sync}: a replica may miss what was acknowledged when the machine dies; set it to 1"
        )
    return MysqlServer(f"{kind} {version}", flush == 1, tuple(warnings), int(packet))


def reserve(session: MysqlSession, count: int) -> int:
    """Return the first of `count` row numbers that no other process has or will get."""
    # Beyond all existing rows too: a replica that took over may have missed the last reservation.
    standing = session.rows("SELECT COALESCE(MAX(`row`), 0) FROM message")[0][0]
    reserved = f"GREATEST(CAST(value AS SIGNED), {standing}) + {count}"
    session.execute(f"UPDATE meta SET value = LAST_INSERT_ID({reserved}) WHERE name = 'rows'")
    return int(session.rows("SELECT LAST_INSERT_ID()")[0][0]) - count + 1
