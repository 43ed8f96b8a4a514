"""Tables and their tuning, migrations under an advisory lock, and the promises of the server's settings."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from sqlalchemy.dialects import postgresql as dialect

from timeline.storage_plugins import sql, versions
from timeline.storage_plugins.contract import StoreRefused, StoreUnavailable
from timeline.storage_plugins.postgresql.connections import PLANNING, SETTINGS, PostgresqlConnection
from timeline.storage_plugins.postgresql.statements import NOTHING
from timeline.storage_plugins.versions import Versions, noted

OLDEST = 130_000
LOCK = 0x544C4E
"""The advisory lock of the one broker that creates or migrates the schema."""
ROWS_AT_A_TIME = 1_000
"""So many row numbers come from the sequence at once, so that a put needs no statement for them."""

# A message's row is written three times and deleted. Space on its page and an early vacuum keep the tables small.
_CHURN = "autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0"
TUNING = (
    f"ALTER TABLE message SET (fillfactor = 70, {_CHURN}, autovacuum_analyze_scale_factor = 0.05, "
    "autovacuum_vacuum_insert_scale_factor = 0.2)",
    f"ALTER TABLE payload SET ({_CHURN}, toast.autovacuum_vacuum_scale_factor = 0.01)",
    f"ALTER TABLE remembered SET ({_CHURN})",
    "ALTER TABLE payload ALTER COLUMN payload SET STORAGE EXTERNAL",
    # No statement finds a message by its row number. So each put and each lease writes one index less.
    "ALTER TABLE message DROP CONSTRAINT message_pkey",
    "ALTER TABLE message REPLICA IDENTITY USING INDEX message_id",
    # A planner that takes the table for empty confuses two indexes that serve the same condition, and looks for one id
    # among all that the topic remembers.
    "DROP INDEX remembered_settled",
    "CREATE INDEX remembered_settled ON remembered ((topic + 0), settled_ms)",
    f"CREATE SEQUENCE message_row INCREMENT BY {ROWS_AT_A_TIME}",
)


@dataclass(frozen=True, slots=True)
class FoundSchema:
    """The result of `prepare`: the cluster's uid (empty: there is no schema), the server in words, and the promises of
    its settings."""

    cluster_uid: str
    server: str
    warnings: tuple[str, ...] = ()
    durable: bool = True
    survives_failover: bool = True


def statements() -> list[str]:
    """Return the statements that create the schema, in order."""
    made = sql.ddl(dialect.dialect())  # type: ignore[no-untyped-call]
    return [text.replace("x''", NOTHING) for text in made] + list(TUNING)


async def prepare(connection: PostgresqlConnection, schema: str, shown: str) -> FoundSchema:
    """Create or migrate the schema, in the caller's transaction. Raise StoreRefused or StoreUnavailable."""
    await _check_server(connection, shown)
    await _alone(connection, schema)
    if not await _there(connection, schema):
        if not await connection.fetchval("SELECT to_regnamespace($1) IS NOT NULL", schema):
            await connection.execute(f"CREATE SCHEMA {schema}")
        for statement in statements():
            await connection.execute(statement)
        newest = 1 + len(sql.MIGRATIONS)
        await _note(connection, Versions(newest, newest), cluster_uid=secrets.token_hex(16))
    known = await _known(connection)
    try:
        cluster_uid = known["cluster_uid"]
        await _migrated(connection, known, contract=False)
    except (KeyError, ValueError) as damaged:
        raise StoreRefused(f"{shown}: table {schema}.meta is damaged ({damaged!r}): restore the database") from damaged
    return await _found(connection, cluster_uid, shown)


async def look(connection: PostgresqlConnection, schema: str, shown: str) -> FoundSchema:
    """Return what is there now, and change nothing. The uid is empty if there is no schema. Raises as `prepare`."""
    await _check_server(connection, shown)
    known = await _known(connection) if await _there(connection, schema) else {}
    return await _found(connection, known.get("cluster_uid", ""), shown)


async def _check_server(connection: PostgresqlConnection, shown: str) -> None:
    number = int(await connection.fetchval("SHOW server_version_num"))
    if number < OLDEST:
        raise StoreRefused(f"PostgreSQL {number // 10_000} is too old: {OLDEST // 10_000} or newer is needed")
    if await connection.fetchval("SELECT pg_is_in_recovery()"):
        raise StoreUnavailable(
            f"{shown}: this server is a standby or recovers, and takes no writes: give the primary's address, or all "
            "hosts, separated by commas"
        )


async def _there(connection: PostgresqlConnection, schema: str) -> bool:
    return bool(await connection.fetchval("SELECT to_regclass($1) IS NOT NULL", f"{schema}.meta"))


async def _found(connection: PostgresqlConnection, cluster_uid: str, shown: str) -> FoundSchema:
    settings = {name: await connection.fetchval(f"SHOW {name}") for name in (*_LOOKED_AT, *PLANNING)}
    server = f"PostgreSQL {await connection.fetchval('SHOW server_version')}, {shown}"
    return FoundSchema(cluster_uid, server, tuple(_warnings(settings)), *_promises(settings))


async def migrate(connection: PostgresqlConnection, schema: str, contract: bool) -> Versions:
    """Do `Store.migrate`, in the caller's transaction."""
    await _alone(connection, schema)
    return await _migrated(connection, await _known(connection), contract)


async def _alone(connection: PostgresqlConnection, schema: str) -> None:
    """Lock this schema against other creations and migrations until the transaction ends; other clusters in the
    database need not wait. Names without a schema are of this one."""
    await connection.execute("SELECT pg_advisory_xact_lock($1, hashtext($2))", LOCK, schema)
    await connection.execute(f"SET LOCAL search_path TO {schema}")


async def _known(connection: PostgresqlConnection) -> dict[str, str]:
    records = await connection.fetch("SELECT name, value FROM timeline.meta")
    return {record["name"]: record["value"] for record in records}


async def _migrated(connection: PostgresqlConnection, known: dict[str, str], contract: bool) -> Versions:
    """Return what `versions.migrate` reaches. Its steps name their statements, which then run in order."""
    told: list[str] = []
    found = noted(known)
    reached = versions.migrate(told.append, found, sql.MIGRATIONS, contract=contract)
    for statement in told:
        await connection.execute(statement)
    if reached != found:
        await _note(connection, reached)
    return reached


async def _note(connection: PostgresqlConnection, reached: Versions, **more: str) -> None:
    written = {**more, "schema_version": str(reached.version), "oldest_version": str(reached.oldest)}
    await connection.executemany(
        "INSERT INTO timeline.meta (name, value) VALUES ($1, $2) "
        "ON CONFLICT (name) DO UPDATE SET value = excluded.value",
        list(written.items()),
    )


_LOOKED_AT = ("synchronous_commit", "fsync", "full_page_writes", "synchronous_standby_names")


def _promises(settings: dict[str, str]) -> tuple[bool, bool]:
    """Return whether answered data survives a crash of the server, and the loss of it."""
    commit = settings["synchronous_commit"]
    durable = settings["fsync"] != "off" and commit != "off"
    return durable, durable and commit in ("on", "remote_apply") and bool(settings["synchronous_standby_names"].strip())


def _warnings(settings: dict[str, str]) -> list[str]:
    """Return a sentence for each setting that weakens these promises."""
    said: list[str] = []
    commit = settings["synchronous_commit"]
    if commit == "off":
        said.append(
            "synchronous_commit is off: a crash of the server loses what was answered in its last moments (up to three "
            "times wal_writer_delay); set it to on"
        )
    if commit in ("local", "remote_write") and settings["synchronous_standby_names"].strip():
        said.append(
            f"synchronous_commit is {commit}: the standbys that synchronous_standby_names waits for may lack what was "
            "answered last, and a fail-over loses it; set it to on"
        )
    if settings["fsync"] == "off":
        said.append("fsync is off: a crash of the machine may lose or damage everything; set it to on")
    if settings["full_page_writes"] == "off":
        said.append("full_page_writes is off: a crash of the machine may damage pages; set it to on")
    lost = [name for name in PLANNING if settings[name] != SETTINGS[name]]
    if lost:
        said.append(
            f"{', '.join(lost)}: a pooler between here and the server dropped these settings of the connection, and "
            "plans may read whole tables; set them with ALTER ROLE … SET, see the page on PostgreSQL"
        )
    return said
