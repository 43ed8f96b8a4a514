"""`sqlite:///file`: the embedded store. One process, one file, durable when answered.

Changes go to the one writer, which commits them in groups. Reads that may be long have connections of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from timeline.model import MAX_PAYLOAD_BYTES, Answers, Status, Topic
from timeline.storage_plugins.contract import (
    Capabilities,
    DiskSpace,
    Grant,
    LeasedRows,
    Opened,
    Puts,
    Settles,
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
from timeline.storage_plugins.sql.changes import TagCounts, remove_dropped, settle
from timeline.storage_plugins.sql.dialect import Changes, SqlDialect
from timeline.storage_plugins.sql.leasing import lease_due
from timeline.storage_plugins.sql.statements import Plan, Result
from timeline.storage_plugins.sql.store import SqlStore, created, cut, removed, whole, without_all
from timeline.storage_plugins.sqlite import bulk
from timeline.storage_plugins.sqlite.database import Checkpointer, Database, SqliteLocation, contracted
from timeline.storage_plugins.sqlite.dialect import SqliteDialect, put, read, settle_plain
from timeline.storage_plugins.sqlite.writer import LATER, LEASES, SETTLES, SqliteWriter, Transaction, unavailable
from timeline.storage_plugins.versions import Versions

log = logging.getLogger("timeline.store")

READERS = 2
ROWS_AT_ONCE = 150
ROW_WEIGHT = 27
"""Messages of one work of a tag operation or a sweep, and the weight of each, which dirties at least two pages of its
own. Leases and settles may have to wait for one work: messages that are leased ahead by then are not
late."""
WORKS_IN_LINE = 16
"""The most such works that wait at once, for a transaction each."""


class SqliteStore(SqlStore):
    """The store of `sqlite:///file`; see `database.SqliteLocation` for the URL."""

    capabilities = Capabilities(
        durable=True,
        survives_failover=False,
        shared=False,
        payload_limit_bytes=MAX_PAYLOAD_BYTES,
        own_clock=False,
        exact_counts=True,
    )
    tells_commit_seq = True
    sql = SqliteDialect()

    def __init__(self, url: str) -> None:
        location = SqliteLocation.of(url)
        self.file = location.path
        self._database = Database(location)
        self._writer: SqliteWriter | None = None
        self._starting: asyncio.Future[SqliteWriter] | None = None
        self._checkpointer: Checkpointer | None = None
        self._readers: ThreadPoolExecutor | None = None
        self._reading = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._keys: dict[int, int] = {}
        """The keys of topics by uid. The writer changes them, the event loop reads them, each in one step."""
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

    async def _started(self, starting: asyncio.Future[SqliteWriter]) -> None:
        """Wait for an opening. A waiter may be cancelled: the opening goes on, for the next `open` or `close`."""
        try:
            writer = await asyncio.shield(starting)
        except BaseException:
            if starting.cancelled() or (starting.done() and starting.exception() is not None):
                self._starting = None
            raise
        if starting is self._starting:
            self._starting = None
            self._writer, self._readers = writer, ThreadPoolExecutor(READERS, "timeline-sqlite-reader")

    def _start(self) -> SqliteWriter:
        connections = [self._database.open()]
        try:
            connections.append(self._database.connect_for_checkpoints())
            self._keys = dict(connections[0].execute("SELECT uid, key FROM topic").fetchall())
            self._looked_until = None if self._database.clean else 0
            self._checkpointer = Checkpointer(connections[1], self._database.path)
            database = self._database
            writer = SqliteWriter(
                connections[0], self._checkpointer.note, database.lost, database.room, database.cramped
            )
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

    def _stop(self, writer: SqliteWriter, readers: ThreadPoolExecutor) -> None:
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
        """Close the files; all connections are closed by now."""
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

    def _running(self) -> SqliteWriter:
        if self._writer is None:
            raise StoreUnavailable("the store is not open")
        return self._writer

    async def _write(self, act: Callable[[Transaction], Result], priority: int, weight: int) -> Result:
        return await self._running().submit(act, priority, weight)

    async def _read(self, plan: Callable[[], Plan[Result]]) -> Result:
        return await self._reads(lambda connection: read(connection, plan()))

    async def _reads(self, act: Callable[[sqlite3.Connection], Result]) -> Result:
        self._running()
        if self._readers is None:
            raise StoreUnavailable("the store is not open")
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._on_reader, act)

    def _on_reader(self, act: Callable[[sqlite3.Connection], Result]) -> Result:
        try:
            connection: sqlite3.Connection | None = getattr(self._reading, "connection", None)
            if connection is None:
                connection = self._reading.connection = self._database.connect(reading=True)
                self._connections.append(connection)
            return act(connection)
        except sqlite3.Error as error:
            raise self._running().judged(error) from error

    async def _record(self, plan: Callable[[SqlDialect], Plan[Result]]) -> Result:
        return await self._write(lambda transaction: transaction.run(plan(SqliteDialect(transaction.orphan))), LATER, 1)

    async def _read_of(self, topic: Topic, plan: Callable[[int], Plan[Result]], gone: Callable[[], Result]) -> Result:
        key = self._keys.get(topic.uid)
        return gone() if key is None else await self._read(lambda: plan(key))

    async def _change_of(
        self, topic: Topic, now_ms: int, plan: Callable[[Changes], Plan[Result]], gone: Callable[[], Result],
        weight: int, priority: int = LATER,
    ) -> Result:  # fmt: skip
        def act(transaction: Transaction) -> Result:
            changes = self._changes(transaction, topic, now_ms)
            return gone() if changes is None else transaction.run(plan(changes))

        return await self._write(act, priority, weight)

    def _changes(self, transaction: Transaction, topic: Topic, now_ms: int) -> Changes | None:
        """Return the changes of a call; None if the topic was dropped."""
        key = self._keys.get(topic.uid)
        return None if key is None else Changes(SqliteDialect(transaction.orphan), topic, key, now_ms)

    # ── topics ──

    async def create_topic(self, topic: Topic) -> Topic:
        def act(transaction: Transaction) -> Topic:
            made = transaction.run(created(self.sql, topic))
            # The key is known from now on, whether or not the creator still waits.
            (key,) = transaction.connection.execute("SELECT key FROM topic WHERE uid = ?", (made.uid,)).fetchone()
            self._know(transaction, made.uid, int(key))
            return made

        return await self._write(act, LATER, 1)

    async def drop_topic(self, topic: Topic) -> bool:
        def act(transaction: Transaction) -> bool:
            gone = transaction.run(removed(self.sql, topic))
            if gone:
                # Now, not after the commit: a put behind this one in the same transaction must not find the topic.
                self._know(transaction, topic.uid, None)
            return gone

        return await self._write(act, LATER, 1)

    def _know(self, transaction: Transaction, uid: int, key: int | None) -> None:
        """Note a topic's key (None: it has none any more), unless the transaction is undone."""
        before = self._keys.get(uid)
        self._set_key(uid, key)
        transaction.undo.append(lambda: self._set_key(uid, before))

    def _set_key(self, uid: int, key: int | None) -> None:
        if key is None:
            self._keys.pop(uid, None)
        else:
            self._keys[uid] = key

    # ── messages ──

    async def put(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        if why := self._running().trouble.get("full"):
            raise StoreFull(why)  # the last space is for leases, settles and cancels
        parts = cut(puts)
        if len(parts) == 1:
            return await self._put(topic, now_ms, puts)
        done = await asyncio.gather(*(self._put(topic, now_ms, part) for part in parts), return_exceptions=True)
        answers = Answers.concat(parted := whole(done))
        answers.commit_seq = max(part.commit_seq for part in parted)  # a lease in between has not seen the later parts
        return answers

    async def _put(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        def act(transaction: Transaction) -> Answers:
            changes = self._changes(transaction, topic, now_ms)
            if changes is None:
                return dropped(topic, len(puts))
            if not transaction.claim(len(puts), puts.payloads.nbytes + puts.headers.nbytes):
                answers = Answers.blank(len(puts), Status.UNAVAILABLE)
                answers.details = dict.fromkeys(range(len(puts)), transaction.writer.cramped)
                return answers
            answers = transaction.run(put(transaction.writer.reserve, changes, puts))
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
        buckets = without_all(topic, buckets)

        def act(transaction: Transaction) -> LeasedRows:
            changes = self._changes(transaction, topic, now_ms)
            if changes is None:
                return LeasedRows.empty()
            found = transaction.run(lease_due(changes, buckets, due_before_ms, grants, overdue_ms))
            assert found is not None, "the topic stands"
            leased = found.leased
            transaction.weight = len(leased.rows) + leased.expired + len(leased.buried)
            leased.commit_seq = transaction.commit_seq
            return leased

        return await self._write(act, LEASES, sum(grant.count for grant in grants))

    async def settle(self, topic: Topic, now_ms: int, settles: Settles) -> Answers:
        count = len(settles)
        answers = await self._change_of(
            topic, now_ms, lambda changes: settle(changes, settles, settle_plain),
            lambda: dropped(topic, count), count, SETTLES,
        )  # fmt: skip
        assert answers is not None, "the topic stands"
        return answers

    async def mutate_tag(self, topic: Topic, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
        key, counts = self._keys.get(topic.uid), TagCounts()
        if key is None or not mutation.tag:
            return TagStep({}, None)
        rows, onward = await self._read(lambda: bulk.search_tag(key, mutation.tag, cursor, max(1, limit)))

        def change(rows: list[int], changes: Changes) -> Plan[TagCounts]:
            part = TagCounts()
            yield from bulk.change_tagged(changes, mutation, rows, part)
            return part

        parts = [rows[start : start + ROWS_AT_ONCE] for start in range(0, len(rows), ROWS_AT_ONCE)]
        works = [(len(part), partial(change, part)) for part in parts]
        async for part in self._in_small_works(topic, now_ms, works, TagCounts):
            counts.add(part)
        return TagStep(dict(counts.by_status), onward, counts.earliest_due_ms)

    async def _in_small_works(
        self, topic: Topic, now_ms: int, works: Sequence[tuple[int, Callable[[Changes], Plan[Result]]]],
        gone: Callable[[], Result],
    ) -> AsyncIterator[Result]:  # fmt: skip
        """Do `works` in order, each with its number of rows, and yield what each returned. Leases and settles may go
        between any two. If works failed, raise after all that were done."""
        for start in range(0, len(works), WORKS_IN_LINE):
            line = works[start : start + WORKS_IN_LINE]
            asked = [self._change_of(topic, now_ms, plan, gone, ROW_WEIGHT * rows) for rows, plan in line]
            ended = await asyncio.gather(*asked, return_exceptions=True)
            for result in ended:
                if not isinstance(result, BaseException):
                    yield result
            whole(ended, start > 0)

    async def room(self) -> DiskSpace:
        folder = self._database.path.parent
        try:
            return await self._reads(lambda _: disk_space_of(folder))
        except OSError as error:
            raise StoreUnavailable(f"{folder}: {error.strerror}") from error

    async def sweep(self, topic: Topic, now_ms: int, limit: int) -> Swept:
        key, limit = self._keys.get(topic.uid), max(1, limit)
        if key is None:
            return Swept()
        removed = Counter[str]()
        # One at a time, whatever the topic: sweeps share one walk over the file's payloads.
        async with self._sweeping:
            looked_until = self._looked_until
            found = await self._read(lambda: bulk.search(topic, key, now_ms, limit, looked_until))
            works = [(len(part), partial(bulk.remove, found=part)) for part in found.parts(ROWS_AT_ONCE)]
            try:
                async for part in self._in_small_works(topic, now_ms, works, Swept):
                    removed.update(expired=part.expired, dead=part.dead_purged, orphans=part.orphans)
                if topic.uid in self._keys:  # the sweep of a topic dropped meanwhile removed no payloads
                    self._looked_until = found.looked_until
                if found.faded:
                    until_ms = now_ms - topic.settings.remember_ms
                    async for count in self._up_to(limit, partial(bulk.forget, key, until_ms)):
                        removed["forgotten"] += count
                if found.dropped:
                    async for count in self._up_to(limit, remove_dropped):
                        removed["dropped"] += count
                more = found.more or limit in (removed["forgotten"], removed["dropped"])
            except StoreError as trouble:
                if not removed.total():
                    raise
                log.warning("a sweep of %s ended early: %s", topic.name, trouble.detail)
                more = True  # the next sweep meets the trouble, if it lasts
        return Swept(removed["expired"], removed["forgotten"], removed["dead"], removed["orphans"], more)

    async def _up_to(self, limit: int, remove: Callable[[SqlDialect, int], Plan[int]]) -> AsyncIterator[int]:
        """Repeat `remove` until nothing is left or `limit` is reached; yield how many were removed each time."""
        removed = 0
        while True:
            most = min(ROWS_AT_ONCE, limit - removed)

            def act(transaction: Transaction, most: int = most) -> int:
                return transaction.run(remove(SqliteDialect(transaction.orphan), most))

            done = await self._write(act, LATER, ROW_WEIGHT * most)
            yield done
            removed += done
            if done < most or removed >= limit:
                return
