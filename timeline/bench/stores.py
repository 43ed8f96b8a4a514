"""The store that is measured: a topic of our own in it, messages that wait there, and what it declares of itself.

Others may use the store. A measurement touches only topics of its own name. They are dropped at the end, also when it
fails or is interrupted.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

import timeline
from timeline.bench.load import (
    FILL_BATCH,
    ID_BYTES,
    PENDING_FROM_MS,
    TAG,
    Told,
    batch_at,
    pending_dues,
    random_numbers,
)
from timeline.bench.processes import CannotMeasure, within
from timeline.clock import Clock
from timeline.columns import Ragged
from timeline.errors import Invalid, TimelineError
from timeline.model import Status, Topic, TopicSettings, payload_sums
from timeline.storage_plugins import make_store, open_store
from timeline.storage_plugins.contract import Puts, Store

NAME_BYTES = 6
COMMITS = 30
UPKEPT_FROM_MESSAGES = 100_000
UPKEEP_S = 1_800.0
LOOK_S = 0.5
BUSY = ("aof_rewrite_in_progress", "aof_rewrite_scheduled", "rdb_bgsave_in_progress")


def scheme(url: str) -> str:
    """Return the kind of store that `url` names."""
    return url.partition("://")[0].removesuffix(":")


@dataclass(frozen=True, slots=True)
class OwnTopic:
    """A topic name of our own; more topics append to it.

    `server` describes the store. `durable`, `survives_failover`: what the plugin declares with these settings.
    `warnings`: what weakens them.
    """

    name: str
    server: str
    durable: bool
    survives_failover: bool
    warnings: tuple[str, ...] = ()

    @property
    def store(self) -> dict[str, Any]:
        """Return the store's description for reports."""
        return {name: value for name, value in asdict(self).items() if name != "name"}


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    """Open a store inside the context."""
    store = await open_store(url)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def own_topic(url: str, scenario: str) -> AsyncIterator[OwnTopic]:
    """Yield a topic name, not created yet. Drop all topics that begin with it at the end.

    The store must be closed elsewhere by then. Raises CannotMeasure if the store cannot be opened, or keeps a topic.
    """
    name = f"bench-{scenario}-{os.urandom(NAME_BYTES).hex()}"
    try:
        store = make_store(url)
        try:
            found = await store.open()
        finally:
            await store.close()
    except Invalid:  # the URL is wrong, not the store
        raise
    except TimelineError as trouble:
        raise CannotMeasure(trouble.reason) from trouble
    declared = store.capabilities
    try:
        yield OwnTopic(name, found.server, declared.durable, declared.survives_failover, found.warnings)
    finally:
        if scheme(url) != "memory":  # it ended with the broker
            await _drop(url, name)


async def _drop(url: str, name: str) -> None:
    try:
        async with opened(url) as store:
            for topic in await store.topics():
                if topic.name.startswith(name):
                    await store.drop_topic(topic)
    except TimelineError as trouble:
        raise CannotMeasure(
            f"the measurement's messages are still in the store; run `timeline topic drop {name}`: {trouble.reason}"
        ) from trouble


async def create_in(store: Store, name: str, **settings: Any) -> Topic:
    """Create a topic directly in a store."""
    uid = int.from_bytes(os.urandom(8)) >> 1
    return await store.create_topic(Topic(name, uid, TopicSettings(**settings), 1, Clock().now_ms()))


def puts_of(batch: timeline.Batch) -> Puts:
    """Return a batch with absolute due times as the columns that a broker hands to a store."""
    count = len(batch)
    assert batch.ids is not None
    puts = Puts.blank(count)
    puts.ids = batch.ids
    puts.birth = random_numbers(count)
    puts.due_ms = np.maximum(batch.time_ms, 1)
    puts.groups = Ragged.repeat(b"default", count)
    puts.tags = batch.tags or puts.tags
    puts.payload_sum = payload_sums(batch.payloads, None)
    puts.payloads = batch.payloads
    return puts


async def fill_store(
    url: str, name: str, count: int, size_bytes: int, told: Told | None = None, tagged: int = 0, buckets: int = 64
) -> None:
    """Create the topic `name` in a store that no broker has open, and put `count` pending messages into it.

    The first `tagged` have the tag TAG. Returns when the server has finished its upkeep.
    """
    async with opened(url) as store:
        await fill_open(store, await create_in(store, name, buckets=buckets), count, size_bytes, told, tagged)
    if count >= UPKEPT_FROM_MESSAGES:
        await upkept(url)


async def fill_open(
    store: Store, topic: Topic, count: int, size_bytes: int, told: Told | None = None, tagged: int = 0
) -> None:
    """Put `count` pending messages into a store that this process has open."""
    clock = Clock()
    for start in range(0, count, FILL_BATCH):
        size = min(FILL_BATCH, count - start)
        now_ms = clock.now_ms()
        batch = batch_at(size, pending_dues(size, now_ms), size_bytes)
        if start < tagged:
            batch.tags = Ragged.of([TAG.encode() if start + at < tagged else b"" for at in range(size)])
        await _put(store, topic, batch, now_ms)
        if told is not None:
            told(size)


async def _put(store: Store, topic: Topic, batch: timeline.Batch, now_ms: int) -> None:
    answers = await store.put(topic, now_ms, puts_of(batch))
    if (answers.status != Status.OK.code).any():
        raise CannotMeasure("the store refused some of the pending messages")


async def commit_ms(url: str, name: str) -> float:
    """Return the median time of COMMITS puts of one message, in a topic `name` of a store that no broker has open."""
    clock = Clock()
    took_ms = []
    async with opened(url) as store:
        topic = await create_in(store, name)
        for _ in range(COMMITS):
            now_ms, start_ms = clock.now_ms(), clock.monotonic_ms()
            await _put(store, topic, batch_at(1, now_ms + PENDING_FROM_MS, ID_BYTES), now_ms)
            took_ms.append(clock.monotonic_ms() - start_ms)
        await store.drop_topic(topic)
    return median(took_ms)


async def put_overdue(url: str, name: str, size_bytes: int) -> None:
    """Put one overdue message into the topic `name` of a store that no broker has open."""
    async with opened(url) as store:
        topic = next(topic for topic in await store.topics() if topic.name == name)
        now_ms = Clock().now_ms()
        await _put(store, topic, batch_at(1, now_ms - 1_000, size_bytes), now_ms)


async def upkept(url: str) -> None:
    """Wait for the server's upkeep after a large fill, so that the figures are those of a timeline grown over weeks.

    Redis rewrites its append-only file. PostgreSQL vacuums and analyses the tables. Raises CannotMeasure.
    """
    upkeep = {"postgresql": _vacuum, "redis": _rewrite, "rediss": _rewrite}.get(scheme(url))
    if upkeep is not None:
        async with within(UPKEEP_S, "the end of the server's upkeep after the fill"):
            await upkeep(url)


async def _vacuum(url: str) -> None:
    import asyncpg

    from timeline.storage_plugins.postgresql.pool import PostgresqlLocation

    location = PostgresqlLocation.of(url)
    try:
        connection = await asyncpg.connect(location.dsn)
        try:
            for table in ("message", "payload"):
                await connection.execute(f"VACUUM (ANALYZE) {location.schema}.{table}")
        finally:
            await connection.close()
    except (OSError, asyncpg.PostgresError) as trouble:
        raise CannotMeasure(f"the tables cannot be vacuumed: {trouble}") from trouble


def _busy(persistence: bytes) -> bool:
    return any(f"{name}:1".encode() in persistence for name in BUSY)


async def _rewrite(url: str) -> None:
    """Wait until no master rewrites its file, is about to, or writes a snapshot."""
    from timeline.storage_plugins.redis.server import RedisLocation, Server

    server = Server(RedisLocation.of(url))
    try:
        await server.connect()
        for address in server.masters:
            while _busy(bytes(await server.ask(address, "INFO", "persistence"))):
                await asyncio.sleep(LOOK_S)
    except TimelineError as trouble:
        raise CannotMeasure(trouble.reason) from trouble
    finally:
        await server.close()
