"""Honest load: random ids over all buckets, payloads that say whose they are, others pending over 30 days."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import timeline
from timeline.bench.figures import median
from timeline.bench.processes import CannotMeasure, within
from timeline.bench.topic import scheme
from timeline.clock import Clock
from timeline.columns import Int64, Ragged, UInt64
from timeline.driver.producer import Producer
from timeline.errors import TimelineError
from timeline.model import Status, Topic, TopicSettings, payload_sums
from timeline.storage_plugins import open_store
from timeline.storage_plugins.contract import Puts, Store

if TYPE_CHECKING:
    from timeline.storage_plugins.redis.connection import Address
    from timeline.storage_plugins.redis.server import Server

ID_BYTES = 16
TAG = "campaign"
PENDING_SPREAD_MS = 30 * 86_400_000
PENDING_FROM_MS = 3_600_000
"""Pending messages lie from an hour ahead: none comes due while something else is measured."""
FILL_BATCH = 10_000
FILL_TASKS = 3
COMMITS = 30
STEADY_LEAD_MS = 3_000
TICK_S = 0.02
UPKEPT_FROM_MESSAGES = 100_000
UPKEEP_S = 1_800.0
LOOK_S = 0.5
BUSY = ("aof_rewrite_in_progress", "aof_rewrite_scheduled", "rdb_bgsave_in_progress")

Told = Callable[[int], object]
"""Called with how many messages were put since it was called last."""


def random_ids(count: int) -> Ragged:
    """`count` random ids of 16 characters, as a column without an object each."""
    text = os.urandom(ID_BYTES // 2 * count).hex().encode()
    return Ragged(text, np.arange(count + 1, dtype=np.int64) * ID_BYTES)


def random_numbers(count: int) -> UInt64:
    """`count` random 64-bit numbers."""
    return np.frombuffer(os.urandom(8 * count), dtype=np.uint64)


def payloads_for(ids: Ragged, size_bytes: int) -> Ragged:
    """Payloads of `size_bytes`, each beginning with its message's id, so that a mix-up shows."""
    count = len(ids)
    if size_bytes < ID_BYTES:
        raise CannotMeasure(f"payloads are at least {ID_BYTES} bytes here, not {size_bytes}: they carry their id")
    block = np.full((count, size_bytes), ord("."), dtype=np.uint8)
    block[:, :ID_BYTES] = np.frombuffer(ids.data, dtype=np.uint8).reshape(count, ID_BYTES)
    return Ragged(block.tobytes(), np.arange(count + 1, dtype=np.int64) * size_bytes)


def pending_dues(count: int, now_ms: int) -> Int64:
    """Dues spread evenly at random over the next 30 days."""
    return random_numbers(count).astype(np.int64, copy=True) % np.int64(PENDING_SPREAD_MS) + now_ms + PENDING_FROM_MS


def batch_at(count: int, at: Any, size_bytes: int, tags: str | None = None) -> timeline.Batch:
    """A batch of fresh messages due `at` (milliseconds, one for all or one each)."""
    ids = random_ids(count)
    return timeline.Batch(payloads=payloads_for(ids, size_bytes), at=at, ids=ids, tags=tags)


def ids_of(batch: timeline.Batch) -> list[bytes]:
    """Return the ids of a batch that `batch_at` made."""
    assert batch.ids is not None
    return batch.ids.tolist()


def batch_sizes(count: int, most: int) -> Iterator[int]:
    """Return the sizes of batches of `most` that come to `count`; several tasks may share them."""
    return (min(most, count - start) for start in range(0, count, most))


async def put_steadily(
    producers: Sequence[Producer],
    count: int,
    rate_per_s: float,
    start_ms: float,
    clock: Clock,
    size_bytes: int,
    noted: Callable[[list[bytes]], Awaitable[None]] | None = None,
) -> None:
    """Put `count` messages from `start_ms` on, each by a call of its own STEADY_LEAD_MS ahead of a due time fixed
    beforehand, by the producers in turn. `noted`: told of each id first."""
    calls: set[asyncio.Task[Any]] = set()
    done = 0
    while done < count:
        due = min(count, int((clock.now() + STEADY_LEAD_MS - start_ms) * rate_per_s / 1_000) + 1)
        for number in range(done, due):
            due_ms = int(start_ms + number * 1_000 / rate_per_s)
            batch = batch_at(1, due_ms, size_bytes)
            if noted is not None:
                await noted(ids_of(batch))
            # By the call for one, which the driver gathers.
            put = producers[number % len(producers)].produce(batch.payloads[0], at=due_ms, id=ids_of(batch)[0].decode())
            call = asyncio.create_task(put)
            calls.add(call)
            call.add_done_callback(calls.discard)
        done = max(done, due)
        await asyncio.sleep(TICK_S)
    await asyncio.gather(*calls)


async def fill(
    producer: Producer, count: int, size_bytes: int, told: Told | None = None, tags: str | None = None
) -> None:
    """Puts `count` pending messages through a broker, as fast as it takes them."""
    left = count
    clock = Clock()

    async def work() -> None:
        nonlocal left
        while left > 0:
            size = min(FILL_BATCH, left)
            left -= size
            batch = batch_at(size, pending_dues(size, clock.now_ms()), size_bytes, tags)
            receipts = await producer.produce_many(batch, timeout="60s")
            receipts.raise_failed()
            if told is not None:
                told(size)

    await asyncio.gather(*(work() for _ in range(FILL_TASKS)))


def puts_of(batch: timeline.Batch, now_ms: int) -> Puts:
    """The columns of a batch with absolute dues as a broker hands them to a store."""
    count = len(batch)
    none = Ragged.repeat(b"", count)
    assert batch.ids is not None
    return Puts(
        ids=batch.ids,
        birth=random_numbers(count),
        due_ms=np.maximum(batch.time_ms, 1),
        expires_ms=np.zeros(count, dtype=np.int64),
        groups=Ragged.repeat(b"default", count),
        tags=batch.tags or none,
        payload_sum=payload_sums(batch.payloads, None),
        payloads=batch.payloads,
        headers=none,
        move=np.zeros(count, dtype=np.bool_),
        replace=np.zeros(count, dtype=np.bool_),
    )


async def create_in(store: Store, name: str, **settings: Any) -> Topic:
    """A topic made directly in a store."""
    uid = int.from_bytes(os.urandom(8)) >> 1
    return await store.create_topic(Topic(name, uid, TopicSettings(**settings), 1, Clock().now_ms()))


async def fill_store(
    url: str, name: str, count: int, size_bytes: int, told: Told | None = None, tagged: int = 0, buckets: int = 64
) -> None:
    """Makes the topic `name` in a store that no broker has open, and puts `count` pending messages into it directly,
    the first `tagged` of them with the tag TAG; returns when the server is done with what so many left it to do."""
    store = await open_store(url)
    try:
        topic = await create_in(store, name, buckets=buckets)
        await fill_open(store, topic, count, size_bytes, told, tagged)
    finally:
        await store.close()
    if count >= UPKEPT_FROM_MESSAGES:
        await upkept(url)


async def commit_ms(url: str, name: str) -> float:
    """What the put of one message takes in a store that no broker has open: the median of COMMITS, in a topic `name`
    that is there for no longer."""
    clock = Clock()
    took_ms = []
    store = await open_store(url)
    try:
        topic = await create_in(store, name)
        for _ in range(COMMITS):
            now_ms, start_ms = clock.now_ms(), clock.monotonic_ms()
            await _put(store, topic, batch_at(1, now_ms + PENDING_FROM_MS, ID_BYTES), now_ms)
            took_ms.append(clock.monotonic_ms() - start_ms)
        await store.drop_topic(topic)
    finally:
        await store.close()
    return median(took_ms)


async def put_overdue(url: str, name: str, size_bytes: int) -> None:
    """Puts one message that is due already into the topic `name` of a store that no broker has open."""
    store = await open_store(url)
    try:
        topic = next(topic for topic in await store.topics() if topic.name == name)
        now_ms = Clock().now_ms()
        await _put(store, topic, batch_at(1, now_ms - 1_000, size_bytes), now_ms)
    finally:
        await store.close()


async def fill_open(
    store: Store, topic: Topic, count: int, size_bytes: int, told: Told | None = None, tagged: int = 0
) -> None:
    """Puts `count` pending messages into a store that this process has open."""
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
    answers = await store.put(topic, now_ms, puts_of(batch, now_ms))
    if (answers.status != Status.OK.code).any():
        raise CannotMeasure("the store refused some of the pending messages")


async def upkept(url: str) -> None:
    """Wait for what a server does after millions of rows were put at once: a figure with many pending is of a timeline
    that has grown over weeks, not of one filled a moment ago. Redis rewrites its append-only file, PostgreSQL vacuums
    and analyses the tables, as each of them would sooner or later. Raises CannotMeasure."""
    upkeep = {"postgresql": _vacuum, "redis": _rewrite, "rediss": _rewrite}.get(scheme(url))
    if upkeep is not None:
        async with within(UPKEEP_S, "the end of the server's upkeep after the fill"):
            await upkeep(url)


async def _vacuum(url: str) -> None:
    import asyncpg

    from timeline.storage_plugins.postgresql.location import PostgresqlLocation

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


async def _rewrite(url: str) -> None:
    from timeline.storage_plugins.redis.location import RedisLocation
    from timeline.storage_plugins.redis.server import Server

    server = Server(RedisLocation.of(url))
    try:
        await server.connect()
        for address in server.masters:
            while await _busy(server, address):
                await asyncio.sleep(LOOK_S)
    except TimelineError as trouble:
        raise CannotMeasure(trouble.reason) from trouble
    finally:
        await server.close()


async def _busy(server: Server, address: Address) -> bool:
    """Whether it rewrites its file, is about to, or writes a snapshot."""
    told = bytes(await server.ask(address, "INFO", "persistence"))
    return any(f"{name}:1".encode() in told for name in BUSY)
