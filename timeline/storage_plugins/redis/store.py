"""`redis://host:port/db`: the store on Redis or Valkey, one server or a cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from timeline.columns import Int64
from timeline.model import MAX_PAYLOAD_BYTES, Answers, Topic
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
from timeline.storage_plugins.redis import changes, leasing, reading, schema, scripts
from timeline.storage_plugins.redis.changes import BucketKeys
from timeline.storage_plugins.redis.location import RedisLocation
from timeline.storage_plugins.redis.server import Server, check_rights, read_settings
from timeline.storage_plugins.versions import Versions


class RedisStore(Store):
    """The store of `redis://`; see `location` for the URL. Each message of a batch is decided by compare-and-set. If
    only a part of a batch could be written, its other messages answer UNAVAILABLE or UNKNOWN."""

    capabilities = Capabilities(
        durable=True,
        survives_failover=False,
        shared=True,
        payload_limit_bytes=MAX_PAYLOAD_BYTES,
        own_clock=True,
        exact_counts=True,
    )

    def __init__(self, url: str) -> None:
        self._location = RedisLocation.of(url)
        self._server: Server | None = None
        self._opened: Opened | None = None

    async def open(self) -> Opened:
        if self._opened is None:
            server = Server(self._location)
            try:
                await server.connect()
                found = await read_settings(server)
                await check_rights(server)
                uid = await schema.cluster_uid(server)
            except StoreUnknown as error:
                await server.close()
                raise StoreUnavailable(error.reason) from error  # opening may be repeated
            except BaseException:
                await server.close()
                raise
            self._server = server
            server.serves(uid)
            self.capabilities = dataclasses.replace(type(self).capabilities, durable=found.durable)
            self._opened = Opened(uid, found.server, found.warnings)
        return self._opened

    async def inspect(self) -> Opened:
        self._running()
        fresh = Server(self._location)  # new connections, to the server that answers now
        try:
            await fresh.connect()
            found = await read_settings(fresh)
            uid = await schema.known_uid(fresh)
        finally:
            await fresh.close()
        self.capabilities = dataclasses.replace(self.capabilities, durable=found.durable)
        return Opened(uid, found.server, found.warnings)

    async def close(self) -> None:
        server, self._server, self._opened = self._server, None, None
        if server is not None:
            await server.close()

    def _running(self) -> Server:
        if self._server is None:
            raise StoreUnavailable("the store is not open")
        return self._server

    def _keys(self, topic: Topic) -> BucketKeys:
        return BucketKeys(self._running(), topic)

    async def check(self) -> None:
        server = self._running()
        key = f"{self._location.prefix}:check".encode()
        await server.run(scripts.SWAP, [key], (b"written", b"", b"1"))
        await server.run(scripts.SWAP, [key], (b"written", b"1", b""))

    async def migrate(self, contract: bool) -> Versions:
        return await schema.migrated(self._running(), contract)

    async def clock_ms(self) -> float | None:
        server = self._running()
        seconds, micros = await server.ask(server.masters[0], "TIME")
        return int(seconds) * 1000 + int(micros) / 1000

    # ── topics ──

    async def topics(self) -> list[Topic]:
        return await schema.all_topics(self._running())

    async def create_topic(self, topic: Topic) -> Topic:
        return await schema.create_topic(self._running(), topic)

    async def update_topic(self, topic: Topic) -> Topic:
        return await schema.update_topic(self._running(), topic)

    async def drop_topic(self, topic: Topic) -> bool:
        return await schema.drop_topic(self._running(), topic)

    # ── messages ──

    async def put(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        return await changes.put(self._keys(topic), now_ms, puts)

    async def lease_due(
        self,
        topic: Topic,
        buckets: Sequence[int] | None,
        now_ms: int,
        due_before_ms: int,
        grants: Sequence[Grant],
        overdue_ms: int = 0,
    ) -> LeasedRows:
        return await leasing.lease_due(self._keys(topic), buckets, now_ms, due_before_ms, grants, overdue_ms)

    async def settle(self, topic: Topic, now_ms: int, settles: Settles) -> Answers:
        return await changes.settle(self._keys(topic), now_ms, settles)

    async def mutate(self, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
        return await changes.mutate(self._keys(topic), now_ms, mutations)

    async def mutate_tag(self, topic: Topic, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
        return await reading.mutate_tag(self._keys(topic), now_ms, mutation, cursor, limit)

    async def held_by(self, topic: Topic, now_ms: int, holder: bytes, cursor: bytes, limit: int) -> Page:
        return await reading.held_by(self._keys(topic), now_ms, holder, cursor, limit)

    async def scan(
        self, topic: Topic, now_ms: int, where: ScanFilter, cursor: bytes, limit: int, payload: bool
    ) -> Page:
        return await reading.scan(self._keys(topic), now_ms, where, cursor, limit, payload)

    async def count_due(self, topic: Topic, edges_ms: Int64) -> Int64:
        return await reading.count_due(self._keys(topic), edges_ms)

    async def next_due(self, topic: Topic, buckets: Sequence[int] | None, after_ms: int) -> int | None:
        return await reading.next_due(self._keys(topic), buckets, after_ms)

    async def sweep(self, topic: Topic, now_ms: int, limit: int) -> Swept:
        server = self._running()
        left = await schema.dropped_topics(server)
        swept = await reading.sweep(BucketKeys(server, topic), now_ms, limit)
        await schema.clear(server, left)
        return swept
