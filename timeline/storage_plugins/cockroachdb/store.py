"""`cockroachdb://`: the store on CockroachDB. Several brokers may share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from timeline.model import Answers, Operation, Topic
from timeline.storage_plugins.cockroachdb import schema
from timeline.storage_plugins.cockroachdb.connections import CockroachConnections, RandomNumbers
from timeline.storage_plugins.cockroachdb.leasing import Floors
from timeline.storage_plugins.cockroachdb.location import location_of
from timeline.storage_plugins.contract import (
    Grant,
    Leased,
    Mutations,
    Opened,
    Puts,
    Settles,
    TagMutation,
    TagStep,
)
from timeline.storage_plugins.postgresql.connections import Connections, Steps
from timeline.storage_plugins.postgresql.leasing import lease_by_rules
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

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._floors = Floors()

    async def _open(self) -> Opened:
        await self._connections.open()
        try:
            found = await schema.prepare(self._connections, self._location)
        except BaseException:
            await self._connections.close()
            raise
        return Opened(found.cluster_uid, found.server, ())

    async def close(self) -> None:
        self._floors.forget()
        await super().close()

    async def check(self) -> None:
        await self._connections.use(lambda connection: connection.execute(schema.WRITABLE), writes=True)

    async def migrate(self, contract: bool) -> Versions:
        return await schema.versions(self._connections, self._location, contract)

    async def put(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        try:
            return await super().put(topic, now_ms, puts)
        finally:
            if len(puts):
                self._floors.lowered(topic, int(puts.due_ms.min()))

    async def lease_due(
        self,
        topic: Topic,
        buckets: Sequence[int] | None,
        now_ms: int,
        due_before_ms: int,
        grants: Sequence[Grant],
        overdue_ms: int = 0,
    ) -> Leased:
        wanted = None if buckets is None or len(set(buckets)) == topic.settings.buckets else list(buckets)
        begin_ms = -1 if overdue_ms else self._floors.begin_ms(topic, wanted, now_ms)
        steps = Steps(self._connections)
        leased = await lease_by_rules(steps, topic, wanted, now_ms, due_before_ms, grants, overdue_ms, begin_ms)
        if not overdue_ms:
            self._floors.looked(topic, wanted, now_ms, begin_ms, leased.next_due_ms)
        return leased

    async def settle(self, topic: Topic, now_ms: int, settles: Settles) -> Answers:
        try:
            return await super().settle(topic, now_ms, settles)
        finally:
            if np.isin(settles.operation, (Operation.RELEASE, Operation.RELET)).any():
                self._floors.forget(topic)

    async def mutate(self, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
        try:
            return await super().mutate(topic, now_ms, mutations)
        finally:
            self._floors.forget(topic)

    async def mutate_tag(self, topic: Topic, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
        try:
            return await super().mutate_tag(topic, now_ms, mutation, cursor, limit)
        finally:
            self._floors.forget(topic)
