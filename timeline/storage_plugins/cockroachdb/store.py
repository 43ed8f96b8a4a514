"""`cockroachdb://`: the store on CockroachDB. Several brokers may share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

from timeline.model import Topic
from timeline.storage_plugins.cockroachdb import schema
from timeline.storage_plugins.cockroachdb.connections import CockroachConnections, RandomNumbers
from timeline.storage_plugins.cockroachdb.location import location_of
from timeline.storage_plugins.contract import Grant, Opened
from timeline.storage_plugins.postgresql.connections import Connections, Steps
from timeline.storage_plugins.postgresql.leasing import Found, lease_by_rules
from timeline.storage_plugins.postgresql.location import Location
from timeline.storage_plugins.postgresql.numbers import Numbers
from timeline.storage_plugins.postgresql.store import PostgresqlStore
from timeline.storage_plugins.versions import Versions


class CockroachStore(PostgresqlStore):
    """The store of `cockroachdb://`; see `location.location_of` for the URL."""

    # A majority of replicas has on disk what was answered.
    capabilities = replace(PostgresqlStore.capabilities, survives_failover=True)
    located: ClassVar[Callable[[str], Location]] = staticmethod(location_of)
    connecting: ClassVar[type[Connections]] = CockroachConnections
    numbering: ClassVar[type[Numbers]] = RandomNumbers

    async def _prepare(self) -> Opened:
        found = await schema.prepare(self._connections, self._location)
        return Opened(found.cluster_uid, found.server, ())

    async def inspect(self) -> Opened:
        found = await schema.look(self._connections, self._location)
        return Opened(found.cluster_uid, found.server, ())

    async def check(self) -> None:
        await self._connections.use(lambda connection: connection.execute(schema.WRITABLE), writes=True)

    async def migrate(self, contract: bool) -> Versions:
        return await schema.versions(self._connections, self._location, contract)

    async def _lease(
        self, topic: Topic, buckets: list[int] | None, now_ms: int, due_before_ms: int, grants: Sequence[Grant],
        overdue_ms: int, due_from_ms: int, end_from_ms: int,
    ) -> Found:  # fmt: skip
        asked = (topic, buckets, now_ms, due_before_ms, grants, overdue_ms, due_from_ms)
        return await lease_by_rules(Steps(self._connections), *asked)
