"""`cockroachdb://`: the store on CockroachDB. Several brokers may share it.

Its statements are PostgreSQL's, with some other fragments. Rows have no place on disk (`ctid`), so they are found by
their key. Rows carry their topic's uid itself, so that a statement knows its range of an index without a lookup.
Nothing is locked that SERIALIZABLE guards anyhow. Rows that another part of a statement names are joined (`IN`): an
array of them (`ANY`) would be searched in the whole table. A golden file of the tests has every statement as it is
sent.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar
from urllib.parse import urlsplit, urlunsplit

from timeline.storage_plugins import shown
from timeline.storage_plugins.cockroachdb import schema
from timeline.storage_plugins.contract import Opened
from timeline.storage_plugins.postgresql.connections import PostgresqlConnections
from timeline.storage_plugins.postgresql.dialect import PostgresqlDialect, RowNumbers
from timeline.storage_plugins.postgresql.pool import PostgresqlLocation
from timeline.storage_plugins.postgresql.statements import Fragments, HotStatements
from timeline.storage_plugins.postgresql.store import PostgresqlStore
from timeline.storage_plugins.sql.statements import Plan
from timeline.storage_plugins.versions import Versions

PORT = 26257
FIRST_MS, CAP_MS = 10, 500
SETTINGS = {"application_name": "timeline", "default_transaction_isolation": "serializable"}
_ROW_BITS = 63
_LIVES = "EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1)"
WORDS = Fragments(
    place='"row"',
    topic="$1::int8",
    of_topic=f"= $1 AND {_LIVES}",
    each="",  # with OFFSET 0, CockroachDB could not join, and would scan for each row
    keeps_record="",
    claiming="",
    new_row='b."row" IN (SELECT stored."row" FROM stored)',
    among="IN ({})",
    forget=f"""
DELETE FROM timeline.remembered WHERE topic = $1 AND settled_ms <= $2 AND {_LIVES} ORDER BY settled_ms LIMIT $3
""",
    forget_dropped="""
DELETE FROM timeline.remembered WHERE topic = $1 ORDER BY id LIMIT $2
""",
)
STATEMENTS = HotStatements(WORDS)


class CockroachDialect(PostgresqlDialect):
    """The dialect of CockroachDB."""

    apart = True
    leases_at_once = False
    words = WORDS
    statements = STATEMENTS


class RandomRowNumbers(RowNumbers):
    """Row numbers without a sequence, on which all nodes would have to agree. Random ones also spread new rows over all
    ranges of the table."""

    def take(self, count: int) -> Plan[list[int]]:
        """Return `count` of them, each used once."""
        yield from ()
        return [secrets.randbits(_ROW_BITS) for _ in range(count)]


class CockroachConnections(PostgresqlConnections):
    """The pool at work, on a server whose transactions are all SERIALIZABLE. It may undo one for the sake of another
    (40001). That one is tried again, up to `tries` times, after a random wait that grows. If the server does not know
    whether a transaction was done (40003), the call is unknown."""

    settings: dict[str, str] = SETTINGS
    tries: ClassVar[int] = 12
    timelines: ClassVar[bool] = False

    def __init__(self, location: PostgresqlLocation, renumber: Callable[[], None]) -> None:
        super().__init__(location, renumber)
        # Steps of a migration name tables without a schema.
        self.settings = self.settings | {"search_path": location.schema}

    async def _again(self, error: BaseException, attempt: int) -> bool:
        again = await super()._again(error, attempt)
        if again:
            most_ms = min(CAP_MS, FIRST_MS << attempt)
            await asyncio.sleep(secrets.randbelow(most_ms * 1_000) / 1_000_000)
        return again


def location_of(url: str) -> PostgresqlLocation:
    """Read `cockroachdb://user:password@host:port,host:port/database?schema=&pool=&timeout_ms=&sslmode=`: what a
    `postgresql://` URL says, on another port. Any node takes writes: of several hosts the first that answers is used.
    Raises StoreRefused with what to write instead."""
    try:
        parts = urlsplit(url)
        user, at, hosts = parts.netloc.rpartition("@")
        if hosts and not any(host.rpartition("]")[2].partition(":")[2] for host in hosts.split(",")):
            hosts = ",".join(f"{host}:{PORT}" for host in hosts.split(","))
            url = urlunsplit(parts._replace(netloc=f"{user}{at}{hosts}"))
    except ValueError:
        pass  # PostgresqlLocation reports it
    if "target_session_attrs" not in url:
        url += f"{'&' if '?' in url else '?'}target_session_attrs=any"
    found = PostgresqlLocation.of(url, "cockroachdb", PORT)
    return replace(found, shown=shown(url), hosts=())


class CockroachStore(PostgresqlStore):
    """The store of `cockroachdb://`; see `location_of` for the URL."""

    # A majority of replicas has on disk what was answered.
    capabilities = replace(PostgresqlStore.capabilities, survives_failover=True)
    located: ClassVar[Callable[[str], PostgresqlLocation]] = staticmethod(location_of)
    connecting: ClassVar[type[PostgresqlConnections]] = CockroachConnections
    numbering: ClassVar[type[RowNumbers]] = RandomRowNumbers
    sql: PostgresqlDialect = CockroachDialect()

    async def _prepare(self) -> Opened:
        found = await schema.prepare(self._connections, self._location)
        return Opened(found.cluster_uid, found.server, ())

    async def _look(self) -> Opened:
        found = await schema.look(self._connections, self._location)
        return Opened(found.cluster_uid, found.server, ())

    async def check(self) -> None:
        await self._connections.use(lambda connection: connection.execute(schema.WRITABLE), writes=True)

    async def migrate(self, contract: bool) -> Versions:
        return await schema.versions(self._connections, self._location, contract)
