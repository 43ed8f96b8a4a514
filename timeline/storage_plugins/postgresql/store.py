"""`postgresql://`: the store on PostgreSQL. Several brokers may share it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import ClassVar, TypeVar

import numpy as np

from timeline.columns import Int64
from timeline.model import MAX_PAYLOAD_BYTES, Answers, Operation, Rows, Status, Topic
from timeline.storage_plugins.contract import (
    Capabilities,
    Grant,
    LeasedRows,
    Mutations,
    Opened,
    Page,
    Puts,
    ScanFilter,
    Settles,
    Store,
    StoreUnavailable,
    StoreUnknown,
    Swept,
    TagMutation,
    TagStep,
)
from timeline.storage_plugins.postgresql import leasing, records, schema, sweeping, tags, walking
from timeline.storage_plugins.postgresql.connections import Connection, Connections, Steps, refused_rights
from timeline.storage_plugins.postgresql.floors import NEVER_MS, Floors
from timeline.storage_plugins.postgresql.location import Location
from timeline.storage_plugins.postgresql.messages import mutate
from timeline.storage_plugins.postgresql.numbers import Numbers
from timeline.storage_plugins.postgresql.putting import Putting
from timeline.storage_plugins.versions import Versions

Result = TypeVar("Result")

_MARK = "SELECT pg_logical_emit_message(true, 'timeline', '')"
"""Commits, and changes nothing."""


class PostgresqlStore(Store):
    """The store of `postgresql://`; see `location.Location` for the URL."""

    capabilities = Capabilities(
        durable=True,
        survives_failover=False,
        shared=True,
        payload_limit_bytes=MAX_PAYLOAD_BYTES,
        own_clock=True,
        exact_counts=True,
    )

    located: ClassVar[Callable[[str], Location]] = Location.of
    connecting: ClassVar[type[Connections]] = Connections
    numbering: ClassVar[type[Numbers]] = Numbers

    def __init__(self, url: str) -> None:
        self._location = type(self).located(url)
        self._numbers = self.numbering()
        self._connections = self.connecting(self._location, self._numbers.forget)
        self._opened: Opened | None = None
        self._opening = asyncio.Lock()
        self._waits_for_standby = False
        self._floors = Floors()

    async def open(self) -> Opened:
        async with self._opening:
            if self._opened is None:
                try:
                    self._opened = await self._open()
                except StoreUnknown as lost:
                    # What may have been made of the schema is found, or made, by the next opening.
                    raise StoreUnavailable(lost.reason) from lost
            return self._opened

    async def _open(self) -> Opened:
        await self._connections.open()
        try:
            return await self._prepare()
        except BaseException:
            await self._connections.close()
            raise

    async def _prepare(self) -> Opened:
        """Makes or looks at the schema, and reads the server's settings."""
        location = self._location

        async def prepare(connection: Connection) -> schema.Found:
            with refused_rights(location):
                return await schema.prepare(connection, location.schema, location.shown)

        return self._as_found(await self._connections.transact(prepare))

    async def inspect(self) -> Opened:
        location = self._location

        async def look(connection: Connection) -> schema.Found:
            return await schema.look(connection, location.schema, location.shown)

        return self._as_found(await self._connections.use(look, writes=False))

    def _as_found(self, found: schema.Found) -> Opened:
        self.capabilities = replace(self.capabilities, durable=found.durable, survives_failover=found.survives_failover)
        self._waits_for_standby = found.survives_failover
        return Opened(found.cluster_uid, found.server, found.warnings)

    async def close(self) -> None:
        async with self._opening:
            self._opened = None
            self._numbers.forget()
            self._floors.forget()
            await self._connections.close()

    async def check(self) -> None:
        async def write(connection: Connection) -> None:
            if await connection.fetchval("SELECT pg_is_in_recovery()"):
                raise StoreUnavailable("the server is a standby or recovers, and takes no writes")
            await connection.execute("UPDATE timeline.meta SET value = value WHERE name = 'schema_version'")

        await self._connections.transact(write)

    async def migrate(self, contract: bool) -> Versions:
        return await self._connections.transact(
            lambda connection: schema.migrate(connection, self._location.schema, contract)
        )

    async def clock_ms(self) -> float | None:
        sql = "SELECT extract(epoch FROM clock_timestamp())::float8 * 1000"
        return float(await self._connections.use(lambda connection: connection.fetchval(sql), writes=False))

    # ── topics ──

    async def topics(self) -> list[Topic]:
        return await self._connections.use(records.all_topics, writes=False)

    async def create_topic(self, topic: Topic) -> Topic:
        return await self._connections.transact(lambda connection: records.create(connection, topic))

    async def update_topic(self, topic: Topic) -> Topic:
        return await self._connections.transact(lambda connection: records.update(connection, topic))

    async def drop_topic(self, topic: Topic) -> bool:
        return await self._connections.transact(lambda connection: records.drop(connection, topic))

    # ── messages ──

    async def _read(self, topic: Topic, act: Callable[[Connection, int], Awaitable[Result]], gone: Result) -> Result:
        async def begin(connection: Connection) -> Result:
            key = await records.key_of(connection, topic)
            return gone if key is None else await act(connection, key)

        return await self._connections.use(begin, writes=False)

    async def _replicated(self, steps: Steps, answers: Answers) -> Answers:
        """`answers`, once the standby has what they are about. A change waits for it; what only looks sees, too, what
        another call committed whose own wait was cut short, and that may be on the primary alone: a commit waits for
        all that was committed before."""
        if self._waits_for_standby and (answers.repeat.any() or (answers.status != Status.OK.code).any()):
            await steps.use(lambda connection: connection.execute(_MARK), writes=True)
        return answers

    async def put(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        if not len(puts):
            return Answers.blank(0)
        steps = Steps(self._connections)
        try:
            return await self._replicated(steps, await Putting(steps, topic, now_ms, puts, self._numbers).answers())
        finally:
            self._floors.lower(topic, int(puts.due_ms.min()))

    async def lease_due(
        self,
        topic: Topic,
        buckets: Sequence[int] | None,
        now_ms: int,
        due_before_ms: int,
        grants: Sequence[Grant],
        overdue_ms: int = 0,
    ) -> LeasedRows:
        wanted = None if buckets is None or len(set(buckets)) == topic.settings.buckets else list(buckets)
        asked = (topic, wanted, now_ms, due_before_ms, grants, overdue_ms)
        backoff_ms, shortest_ms = topic.settings.redelivery_backoff_ms, min((one.lease_ms for one in grants), default=0)
        try:
            if overdue_ms:
                return (await self._lease(*asked, -1, NEVER_MS)).leased
            with self._floors.look(topic, wanted, now_ms) as look:
                found = await self._lease(*asked, look.due_ms, look.end_ms)
                if found.nothing and look.begins_again():
                    found = await self._lease(*asked, look.due_ms, look.end_ms)
                look.left(found.leased.next_due_ms, found.end_ms, backoff_ms)
            return found.leased
        finally:
            if grants:
                self._floors.lower(topic, end_ms=now_ms + shortest_ms)

    async def _lease(
        self, topic: Topic, buckets: list[int] | None, now_ms: int, due_before_ms: int, grants: Sequence[Grant],
        overdue_ms: int, due_from_ms: int, end_from_ms: int,
    ) -> leasing.Found:  # fmt: skip
        asked = (topic, buckets, now_ms, due_before_ms, grants, overdue_ms, due_from_ms)
        if any(grant.count for grant in grants):
            found = await self._connections.use(
                lambda connection: leasing.lease_plain(connection, *asked, end_from_ms), writes=True
            )
            if found is not None:
                return found
        return await leasing.lease_by_rules(Steps(self._connections), *asked)

    async def settle(self, topic: Topic, now_ms: int, settles: Settles) -> Answers:
        steps = Steps(self._connections)
        try:
            return await self._replicated(steps, await leasing.settle(steps, topic, now_ms, settles))
        finally:
            if (settles.operation == Operation.RELEASE).any():
                self._floors.lower(topic, now_ms)
            # One that had run out may end before those that were known to run.
            ends_ms = settles.time_ms[
                (settles.operation == Operation.EXTEND) | (settles.operation == Operation.REGRANT)
            ]
            if len(ends_ms):
                self._floors.lower(topic, end_ms=int(ends_ms.min()))

    async def mutate(self, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
        steps = Steps(self._connections)
        try:
            return await self._replicated(steps, await mutate(steps, topic, now_ms, mutations))
        finally:
            if mutations.operation in (Operation.MOVE, Operation.REVIVE) and len(mutations):
                self._floors.lower(topic, int(mutations.due_ms.min()))

    async def mutate_tag(self, topic: Topic, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
        if not mutation.tag:
            return TagStep({}, None)
        steps = Steps(self._connections)
        try:
            found = await tags.step(steps, topic, now_ms, mutation, cursor, max(1, limit))
            if self._waits_for_standby and not mutation.dry_run:  # some of it may have been done before
                await steps.use(lambda connection: connection.execute(_MARK), writes=True)
            return found
        finally:
            if mutation.operation is Operation.MOVE and not mutation.dry_run:
                self._floors.lower(topic, mutation.due_ms or -1)

    async def held_by(self, topic: Topic, now_ms: int, holder: bytes, cursor: bytes, limit: int) -> Page:
        return await self._read(
            topic,
            lambda connection, key: walking.held_by(connection, key, now_ms, holder, cursor, limit),
            Page(Rows.empty(payload=True), None),
        )

    async def scan(
        self, topic: Topic, now_ms: int, where: ScanFilter, cursor: bytes, limit: int, payload: bool
    ) -> Page:
        return await self._read(
            topic,
            lambda connection, key: walking.scan(connection, topic, key, now_ms, where, cursor, limit, payload),
            Page(Rows.empty(payload), None),
        )

    async def count_due(self, topic: Topic, edges_ms: Int64) -> Int64:
        nothing = np.zeros(max(0, len(edges_ms) - 1), dtype=np.int64)
        return await self._read(topic, lambda connection, key: walking.count_due(connection, key, edges_ms), nothing)

    async def next_due(self, topic: Topic, buckets: Sequence[int] | None, after_ms: int) -> int | None:
        return await self._connections.use(
            lambda connection: walking.next_due(connection, topic, buckets, after_ms), writes=False
        )

    async def sweep(self, topic: Topic, now_ms: int, limit: int) -> Swept:
        steps, limit = Steps(self._connections), max(1, limit)
        swept = await sweeping.sweep(steps, topic, now_ms, limit)
        more = await steps.transact(lambda connection: sweeping.remove_dropped(connection, limit))
        return Swept(swept.expired, swept.forgotten, swept.dead_purged, swept.orphans, swept.more or more)
