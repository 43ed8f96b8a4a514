"""`sqlite:///file`: the embedded store. One process, one file, durable when answered.

Changes go to the one writer, which commits them by groups; reads that may be long go to connections of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np

from timeline.columns import Int64, Ragged
from timeline.model import MAX_PAYLOAD_BYTES, Answers, Rows, Topic
from timeline.storage_plugins.contract import (
    Capabilities,
    DiskSpace,
    Grant,
    LeasedRows,
    Mutations,
    Opened,
    Page,
    Puts,
    ScanFilter,
    Settles,
    Store,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    Swept,
    TagMutation,
    TagStep,
    disk_space_of,
)
from timeline.storage_plugins.records import dropped
from timeline.storage_plugins.sql.calls import cut, whole
from timeline.storage_plugins.sql.changes import mutate
from timeline.storage_plugins.sqlite import leasing, messages, reading, records, sweeping, tags
from timeline.storage_plugins.sqlite.checkpoints import Checkpointer
from timeline.storage_plugins.sqlite.database import Database, Location, contracted
from timeline.storage_plugins.sqlite.writer import LATER, LEASES, SETTLES, Transaction, Writer, unavailable
from timeline.storage_plugins.versions import Versions

Result = TypeVar("Result")

READERS = 2
ROWS_AT_ONCE = 150
ROW_WEIGHT = 27
"""Messages of one work of a tag operation or a sweep, and what each weighs in a transaction: it dirties two pages and
more of its own. One work is as much as leases and settles may have to wait for: what is leased ahead by then is not
late."""
WORKS_IN_LINE = 16
"""Such works that wait at once: a transaction of one each."""


class SqliteStore(Store):
    """The store of `sqlite:///file`; see `database.Location` for the URL."""

    capabilities = Capabilities(
        durable=True,
        survives_failover=False,
        shared=False,
        payload_limit_bytes=MAX_PAYLOAD_BYTES,
        own_clock=False,
        exact_counts=True,
    )
    tells_commit_seq = True

    def __init__(self, url: str) -> None:
        self._database = Database(Location.of(url))
        self._writer: Writer | None = None
        self._starting: asyncio.Future[Writer] | None = None
        self._checkpointer: Checkpointer | None = None
        self._readers: ThreadPoolExecutor | None = None
        self._reading = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._topics = records.Topics()
        self._sweeping = asyncio.Lock()
        self._looked_until: int | None = None

    async def open(self) -> Opened:
        if self._writer is None:
            if self._starting is None:
                self._starting = asyncio.ensure_future(asyncio.to_thread(self._start))
            await self._started(self._starting)
        return Opened(self._database.cluster_uid, self._database.server)

    async def inspect(self) -> Opened:
        self._running()
        if why := self._database.lost():
            raise StoreRefused(why)
        return Opened(self._database.cluster_uid, self._database.server)

    async def _started(self, starting: asyncio.Future[Writer]) -> None:
        """Waits for an opening. Who waits may be cancelled: it goes on, and is there for the next `open` or `close`."""
        try:
            writer = await asyncio.shield(starting)
        except BaseException:
            if starting.cancelled() or (starting.done() and starting.exception() is not None):
                self._starting = None
            raise
        if starting is self._starting:
            self._starting = None
            self._writer, self._readers = writer, ThreadPoolExecutor(READERS, "timeline-sqlite-reader")

    def _start(self) -> Writer:
        connections = [self._database.open()]
        try:
            connections.append(self._database.connect_for_checkpoints())
            self._topics.load(connections[0])
            self._looked_until = None if self._database.clean else 0
            self._checkpointer = Checkpointer(connections[1], self._database.path)
            writer = Writer(connections[0], self._checkpointer.note, self._database.lost, self._database.cramped)
            writer.start()
        except BaseException as error:
            for connection in connections:
                connection.close()
            self._close_files()
            if isinstance(error, sqlite3.Error):
                raise unavailable(error) from error
            if isinstance(error, OSError):
                raise StoreUnavailable(f"{self._database.path}: {error.strerror}") from error
            raise
        self._checkpointer.start(writer.carry_rest)
        return writer

    async def close(self) -> None:
        if self._starting is not None:
            with contextlib.suppress(StoreError):  # An opening that failed holds nothing.
                await self._started(self._starting)
        writer, readers = self._writer, self._readers
        self._writer = self._readers = None
        if writer is not None and readers is not None:
            await asyncio.to_thread(self._stop, writer, readers)

    def _stop(self, writer: Writer, readers: ThreadPoolExecutor) -> None:
        readers.shutdown(wait=True)
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._reading = threading.local()
        if self._checkpointer is not None:
            self._checkpointer.stop()
        writer.stop(clean=self._looked_until is None)
        self._close_files()

    def _close_files(self) -> None:
        """All connections are closed by now."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None
        self._database.close()

    async def check(self) -> None:
        writer = self._running()
        if "damaged" in writer.trouble:
            raise StoreUnavailable(writer.trouble["damaged"])
        await self._write(writer.probe, SETTLES, 1)
        writer.proven()

    async def migrate(self, contract: bool) -> Versions:
        return await self._write(lambda transaction: contracted(transaction.connection, contract), LATER, 1)

    # ── ways in ──

    def _running(self) -> Writer:
        if self._writer is None:
            raise StoreUnavailable("the store is not open")
        return self._writer

    async def _write(self, act: Callable[[Transaction], Result], priority: int, weight: int) -> Result:
        return await self._running().submit(act, priority, weight)

    async def _read(self, act: Callable[[sqlite3.Connection], Result]) -> Result:
        self._running()
        if self._readers is None:
            raise StoreUnavailable("the store is not open")
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._reads, act)

    def _reads(self, act: Callable[[sqlite3.Connection], Result]) -> Result:
        """On a reader's thread."""
        try:
            connection: sqlite3.Connection | None = getattr(self._reading, "connection", None)
            if connection is None:
                connection = self._reading.connection = self._database.connect(reading=True)
                self._connections.append(connection)
            return act(connection)
        except sqlite3.Error as error:
            raise self._running().judged(error) from error

    # ── topics ──

    async def topics(self) -> list[Topic]:
        return await self._read(records.all_topics)

    async def create_topic(self, topic: Topic) -> Topic:
        return await self._write(lambda transaction: records.create(transaction, topic, self._topics), LATER, 1)

    async def update_topic(self, topic: Topic) -> Topic:
        return await self._write(lambda transaction: records.update(transaction, topic), LATER, 1)

    async def drop_topic(self, topic: Topic) -> bool:
        return await self._write(lambda transaction: records.drop(transaction, topic, self._topics), LATER, 1)

    # ── messages ──

    async def put(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        if why := self._running().trouble.get("full"):
            raise StoreFull(why)  # what little is left is for leases, settles and cancels
        parts = cut(puts)
        if len(parts) == 1:
            return await self._put(topic, now_ms, puts)
        done = await asyncio.gather(*(self._put(topic, now_ms, part) for part in parts), return_exceptions=True)
        return Answers.concat(whole(done))

    async def _put(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        def act(transaction: Transaction) -> Answers:
            key = self._topics.key(topic)
            if key is None:
                return dropped(topic, len(puts))
            answers = messages.put(transaction, topic, key, now_ms, puts)
            answers.commit_seq = transaction.commit_seq
            return answers

        return await self._write(act, LATER, len(puts))

    async def lease_due(
        self,
        topic: Topic,
        buckets: Sequence[int] | None,
        now_ms: int,
        due_before_ms: int,
        grants: Sequence[Grant],
        overdue_ms: int = 0,
    ) -> LeasedRows:
        wanted = sum(grant.count for grant in grants)
        if buckets is not None and len(set(buckets)) == topic.settings.buckets:
            buckets = None

        def act(transaction: Transaction) -> LeasedRows:
            key = self._topics.key(topic)
            if key is None:
                return LeasedRows(Rows.empty(True), np.zeros(0, np.uint32), np.zeros(0, np.int64), Ragged.of([]), None)
            leased = leasing.lease_due(transaction, topic, key, buckets, now_ms, due_before_ms, grants, overdue_ms)
            transaction.weight = len(leased.rows) + leased.expired + len(leased.buried)
            leased.commit_seq = transaction.commit_seq
            return leased

        return await self._write(act, LEASES, wanted)

    async def settle(self, topic: Topic, now_ms: int, settles: Settles) -> Answers:
        def act(transaction: Transaction) -> Answers:
            key = self._topics.key(topic)
            if key is None:
                return dropped(topic, len(settles))
            return leasing.settle(transaction, topic, key, now_ms, settles)

        return await self._write(act, SETTLES, len(settles))

    async def mutate(self, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
        def act(transaction: Transaction) -> Answers:
            key = self._topics.key(topic)
            if key is None:
                return dropped(topic, len(mutations))
            return mutate(messages.Changes(transaction, topic, key, now_ms), mutations)

        return await self._write(act, LATER, len(mutations))

    async def mutate_tag(self, topic: Topic, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
        key, done = self._topics.key(topic), tags.Done()
        if key is None or not mutation.tag:
            return done.step(None)
        found = await self._read(lambda connection: tags.search(connection, key, mutation.tag, cursor, max(1, limit)))

        def change(rows: list[int], transaction: Transaction) -> tags.Done:
            key, part = self._topics.key(topic), tags.Done()
            if key is not None:
                tags.change(transaction, topic, key, now_ms, mutation, rows, part)
            return part

        parts = [found.rows[start : start + ROWS_AT_ONCE] for start in range(0, len(found.rows), ROWS_AT_ONCE)]
        for part in await self._in_small_works([(len(rows), partial(change, rows)) for rows in parts]):
            done.add(part)
        return done.step(found.cursor)

    async def _in_small_works(self, works: Sequence[tuple[int, Callable[[Transaction], Result]]]) -> list[Result]:
        """Does `works`, each with how many rows it changes, in order; leases and settles may go between any two."""
        done: list[Result] = []
        for start in range(0, len(works), WORKS_IN_LINE):
            line = [self._write(act, LATER, ROW_WEIGHT * rows) for rows, act in works[start : start + WORKS_IN_LINE]]
            done += whole(await asyncio.gather(*line, return_exceptions=True), start > 0)
        return done

    async def held_by(self, topic: Topic, now_ms: int, holder: bytes, cursor: bytes, limit: int) -> Page:
        key = self._topics.key(topic)
        if key is None:
            return Page(Rows.empty(payload=True), None)
        return await self._read(lambda connection: reading.held_by(connection, key, now_ms, holder, cursor, limit))

    async def scan(
        self, topic: Topic, now_ms: int, where: ScanFilter, cursor: bytes, limit: int, payload: bool
    ) -> Page:
        key = self._topics.key(topic)
        if key is None:
            return Page(Rows.empty(payload), None)
        return await self._read(
            lambda connection: reading.scan(connection, topic, key, now_ms, where, cursor, limit, payload)
        )

    async def count_due(self, topic: Topic, edges_ms: Int64) -> Int64:
        key = self._topics.key(topic)
        if key is None:
            return np.zeros(max(0, len(edges_ms) - 1), dtype=np.int64)
        return await self._read(lambda connection: reading.count_due(connection, key, edges_ms))

    async def next_due(self, topic: Topic, buckets: Sequence[int] | None, after_ms: int) -> int | None:
        key = self._topics.key(topic)
        if key is None:
            return None
        return await self._read(lambda connection: reading.next_due(connection, key, buckets, after_ms))

    async def room(self) -> DiskSpace:
        folder = self._database.path.parent
        try:
            return await self._read(lambda _: disk_space_of(folder))
        except OSError as error:
            raise StoreUnavailable(f"{folder}: {error.strerror}") from error

    async def sweep(self, topic: Topic, now_ms: int, limit: int) -> Swept:
        key, limit = self._topics.key(topic), max(1, limit)
        if key is None:
            return Swept()
        # One at a time, whatever the topic: they share one walk over the file's payloads.
        async with self._sweeping:
            looked_until = self._looked_until
            found = await self._read(
                lambda connection: sweeping.search(connection, topic, key, now_ms, limit, looked_until)
            )
            remove = partial(sweeping.remove, topic=topic, key=key, now_ms=now_ms)
            works = [(len(part), partial(remove, found=part)) for part in found.parts(ROWS_AT_ONCE)]
            swept = await self._in_small_works(works)
            self._looked_until = found.looked_until
            forgotten = dropped_rows = 0
            if found.faded:
                until_ms = now_ms - topic.settings.remember_ms
                forgotten = await self._up_to(limit, partial(sweeping.forget, key=key, until_ms=until_ms))
            if found.dropped:
                dropped_rows = await self._up_to(limit, sweeping.remove_dropped)
        return Swept(
            expired=sum(part.expired for part in swept),
            forgotten=forgotten,
            dead_purged=sum(part.dead_purged for part in swept),
            orphans=sum(part.orphans for part in swept),
            more=found.more or limit in (forgotten, dropped_rows),
        )

    async def _up_to(self, limit: int, remove: Callable[..., int]) -> int:
        """Repeats `remove(transaction, limit=…)` until less is left or `limit` is reached; how many were removed."""
        removed = 0
        while True:
            most = min(ROWS_AT_ONCE, limit - removed)
            done = await self._write(partial(remove, limit=most), LATER, ROW_WEIGHT * most)
            removed += done
            if done < most or removed >= limit:
                return removed
