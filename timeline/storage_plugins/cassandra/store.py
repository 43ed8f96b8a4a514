"""The store of `cassandra://`."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from cassandra import DriverException
from cassandra.cluster import NoHostAvailable
from cassandra.connection import ConnectionException

from timeline.columns import Int64
from timeline.model import Answers, Rows, Topic
from timeline.storage_plugins.cassandra import changes, leasing, records, session, walks
from timeline.storage_plugins.cassandra.bucket import BucketAccess, Buckets
from timeline.storage_plugins.cassandra.changes import StoreContext
from timeline.storage_plugins.cassandra.rows import Contents
from timeline.storage_plugins.cassandra.session import (
    CassandraLocation,
    CassandraSession,
    Handover,
    Mailbox,
    OpenedSession,
    connect,
    look,
    migrated,
    unavailable,
)
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
    Swept,
    TagMutation,
    TagStep,
)
from timeline.storage_plugins.records import dropped
from timeline.storage_plugins.versions import Versions

Answer = TypeVar("Answer")
PAYLOAD_LIMIT_BYTES = 8 * 1024 * 1024
"""Half of the largest mutation that Cassandra takes with its default commit log segments of 32 MiB."""


class CassandraStore(Store):
    """The store of `cassandra://host,host/keyspace`; see `location.CassandraLocation` for the URL.

    The servers' settings say whether it is durable: that capability is right once the store is open."""

    capabilities = Capabilities(
        durable=True,
        survives_failover=False,
        shared=True,
        payload_limit_bytes=PAYLOAD_LIMIT_BYTES,
        own_clock=False,
        exact_counts=True,
        lease_ahead_ms=1_000,
    )

    def __init__(self, url: str) -> None:
        self._location = CassandraLocation.of(url)
        self._opening = asyncio.Lock()
        self._opened: Opened | None = None
        self._warnings: tuple[str, ...] = ()
        self._context: StoreContext | None = None

    async def open(self) -> Opened:
        async with self._opening:
            if self._opened is not None:
                return self._opened
            found = await self._connect()
            try:
                uid = await records.cluster_uid(
                    found.connected, secrets.token_hex(16), str(1 + len(session.MIGRATIONS))
                )
            except BaseException:
                await asyncio.shield(asyncio.to_thread(found.connected.close))
                raise
            self.capabilities = dataclasses.replace(self.capabilities, durable=not found.unsafe)
            connected = found.connected
            self._context = StoreContext(
                BucketAccess(connected), Contents(connected), Buckets(), records.Records(connected)
            )
            self._warnings = found.warnings
            self._opened = Opened(uid, f"Cassandra {found.version}, {found.replication}", found.unsafe + found.warnings)
            return self._opened

    async def inspect(self) -> Opened:
        connected, opened = self._connected(), self._opened
        assert opened is not None
        unsafe, uid = await _in_thread(look, connected.session, self._location)
        self.capabilities = dataclasses.replace(self.capabilities, durable=not unsafe)
        return Opened(uid, opened.server, unsafe + self._warnings)

    async def _connect(self) -> OpenedSession:
        """Connect on a thread. It goes on if this is cancelled; its session is closed then."""
        mailbox, handover = Mailbox(), Handover()
        try:
            return await asyncio.to_thread(connect, self._location, lambda: mailbox, handover)
        except asyncio.CancelledError:
            handover.abandon()
            raise

    async def close(self) -> None:
        async with self._opening:
            context, self._context, self._opened = self._context, None, None
            if context is not None:
                await context.contents.finish()
                await asyncio.to_thread(context.partition.connected.close)

    async def check(self) -> None:
        await records.probe(self._at_work().partition.connected)

    async def migrate(self, contract: bool) -> Versions:
        return await _in_thread(migrated, self._connected().session, contract)

    def _at_work(self) -> StoreContext:
        if self._context is None:
            raise StoreUnavailable("the store is not open")
        return self._context

    def _connected(self) -> CassandraSession:
        return self._at_work().partition.connected

    async def _of(self, topic: Topic, call: Callable[..., Awaitable[Answer]], none: Answer, *given: Any) -> Answer:
        """Return what `call` answers; `none` where the topic was dropped."""
        context = self._at_work()
        return await call(context, topic, *given) if await context.stands(topic) else none

    # ── topics ──

    async def topics(self) -> list[Topic]:
        return await self._at_work().topics()

    async def create_topic(self, topic: Topic) -> Topic:
        return await records.create(self._connected(), topic)

    async def update_topic(self, topic: Topic) -> Topic:
        return await records.update(self._connected(), topic)

    async def drop_topic(self, topic: Topic) -> bool:
        context = self._at_work()
        done = await records.drop(context.partition.connected, topic)
        context.forget(topic.uid)
        return done

    # ── messages ──

    async def put(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        context = self._at_work()
        if not await context.stands(topic, lately=True):
            return dropped(topic, len(puts))
        return await changes.put(context, topic, now_ms, puts)

    async def lease_due(
        self,
        topic: Topic,
        buckets: Sequence[int] | None,
        now_ms: int,
        due_before_ms: int,
        grants: Sequence[Grant],
        overdue_ms: int = 0,
    ) -> LeasedRows:
        call = leasing.LeaseCall(self._at_work(), topic, now_ms, due_before_ms, overdue_ms)
        return await leasing.lease_due(call, buckets, grants)

    async def settle(self, topic: Topic, now_ms: int, settles: Settles) -> Answers:
        context = self._at_work()
        if not await context.stands(topic, lately=True):
            return dropped(topic, len(settles))
        return await changes.settle(context, topic, now_ms, settles)

    async def mutate(self, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
        return await self._of(topic, changes.mutate, dropped(topic, len(mutations)), now_ms, mutations)

    async def mutate_tag(self, topic: Topic, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
        return await self._of(topic, walks.mutate_tag, TagStep({}, None), now_ms, mutation, cursor, limit)

    async def held_by(self, topic: Topic, now_ms: int, holder: bytes, cursor: bytes, limit: int) -> Page:
        none = Page(Rows.empty(payload=True), None)
        return await self._of(topic, walks.held_by, none, now_ms, holder, cursor, limit)

    async def scan(
        self, topic: Topic, now_ms: int, where: ScanFilter, cursor: bytes, limit: int, payload: bool
    ) -> Page:
        none = Page(Rows.empty(payload), None)
        return await self._of(topic, walks.scan, none, now_ms, where, cursor, limit, payload)

    async def count_due(self, topic: Topic, edges_ms: Int64, held: bool = False) -> Int64:
        none = np.zeros(max(0, len(edges_ms) - 1), dtype=np.int64)
        return await self._of(topic, walks.count_due, none, edges_ms, held)

    async def next_due(self, topic: Topic, buckets: Sequence[int] | None, after_ms: int) -> int | None:
        return await self._of(topic, walks.next_due, None, buckets, after_ms)

    async def sweep(self, topic: Topic, now_ms: int, limit: int) -> Swept:
        return await self._of(topic, walks.sweep, Swept(), now_ms, limit)


async def _in_thread(work: Callable[..., Answer], *given: Any) -> Answer:
    """Return what `work` answers, which blocks. Raise StoreUnavailable for the driver's errors."""
    try:
        return await asyncio.to_thread(work, *given)
    except (DriverException, NoHostAvailable, ConnectionException) as error:
        raise unavailable(error) from error
