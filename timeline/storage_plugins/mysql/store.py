"""`mysql://`: the store. Each call is a transaction on a connection of the pool; the rules are asked on locked rows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from timeline.columns import Int64, Ragged
from timeline.model import MAX_PAYLOAD_BYTES, Answers, Rows, Topic
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
    StoreRefused,
    StoreUnavailable,
    StoreUnknown,
    Swept,
    TagMutation,
    TagStep,
)
from timeline.storage_plugins.mysql import leasing, messages, reading, records, statements, sweeping
from timeline.storage_plugins.mysql.connections import Connections, Later, Session
from timeline.storage_plugins.mysql.location import Location
from timeline.storage_plugins.records import dropped
from timeline.storage_plugins.sql.calls import cut, whole
from timeline.storage_plugins.sql.changes import mutate
from timeline.storage_plugins.versions import Versions

Result = TypeVar("Result")

PUT_AT_ONCE = 5_000
"""Messages of one transaction of a put: leases pass over what it has locked, so that none waits for it."""
ROWS_RESERVED = 100_000
"""Row numbers that a process takes at once; what it does not use is never used."""
PACKET_SLACK_BYTES = 1024 * 1024
"""Of a packet, beside the content, which travels as hexadecimal text."""
SMALLEST_PACKET_BYTES = 16 * 1024 * 1024


class _Dropped(Exception):
    """The topic of a call does not stand."""


class MysqlStore(Store):
    """The store of `mysql://`; see `location.Location` for the URL."""

    capabilities = Capabilities(
        durable=True,
        survives_failover=False,
        shared=True,
        payload_limit_bytes=MAX_PAYLOAD_BYTES,
        own_clock=True,
        exact_counts=True,
    )

    def __init__(self, url: str) -> None:
        self._location = Location.of(url)
        self._connections: Connections | None = None
        self._opened: Opened | None = None
        self._opening = asyncio.Lock()
        self._rows_lock = threading.Lock()
        self._next_row, self._last_row = 1, 0
        self._keys: dict[int, int] = {}

    async def open(self) -> Opened:
        async with self._opening:
            if self._opened is None:
                connections = Connections(self._location)
                try:
                    self._opened = await connections.transact(self._open)
                except BaseException as error:
                    await asyncio.to_thread(connections.close)
                    if isinstance(error, StoreUnknown):
                        # What may have been made of the schema is found, or made, by the next opening.
                        raise StoreUnavailable(error.reason) from error
                    raise
                connections.opening = False
                self._connections = connections
            return self._opened

    def _open(self, session: Session) -> Opened:
        return self._found(session, records.prepare)

    async def inspect(self) -> Opened:
        return await self._transact(lambda session: self._found(session, records.known_uid))

    def _found(self, session: Session, uid: Callable[[Session], str]) -> Opened:
        server, warnings, packet_bytes = records.server(session)
        if packet_bytes < SMALLEST_PACKET_BYTES:
            raise StoreRefused(f"max_allowed_packet is {packet_bytes}: set it to {SMALLEST_PACKET_BYTES} or more")
        limit = min(MAX_PAYLOAD_BYTES, (packet_bytes - PACKET_SLACK_BYTES) // 2)
        self.capabilities = Capabilities(
            durable=not any("flush_log" in warning for warning in warnings),
            survives_failover=False,
            shared=True,
            payload_limit_bytes=limit,
            own_clock=True,
            exact_counts=True,
        )
        return Opened(uid(session), f"{server}, {self._location.shown}", warnings)

    async def close(self) -> None:
        connections, self._connections, self._opened = self._connections, None, None
        self._keys.clear()
        if connections is not None:
            await asyncio.to_thread(connections.close)

    async def check(self) -> None:
        await self._transact(
            lambda session: session.execute("REPLACE INTO meta (name, value) VALUES ('probe', HEX(RANDOM_BYTES(8)))")
        )

    async def migrate(self, contract: bool) -> Versions:
        return await self._transact(lambda session: records.contracted(session, contract))

    async def clock_ms(self) -> float | None:
        found = await self._transact(lambda session: session.rows("SELECT UNIX_TIMESTAMP(SYSDATE(6))"))
        return float(found[0][0]) * 1000.0

    # ── ways in ──

    async def _transact(self, act: Callable[[Session], Result]) -> Result:
        if self._connections is None:
            raise StoreUnavailable("the store is not open")
        return await self._connections.transact(act)

    async def _on(
        self, topic: Topic, act: Callable[[Session, int], Result], gone: Callable[[], Result], lock: bool = False
    ) -> Result:
        """Runs `act(session, key)` where the topic stands; else answers `gone()`. Where its key is known, whether it
        stands is asked in one exchange with the first that `act` asks, all of which is undone where it does not."""

        def keyed(session: Session) -> Result:
            asked, key = records.key_of(session, topic, lock), self._keys.get(topic.uid)
            if key is None:
                key = self._told(topic, asked)
            result = act(session, key)
            self._told(topic, asked)
            return result

        try:
            return await self._transact(keyed)
        except _Dropped:
            return gone()

    def _told(self, topic: Topic, asked: Later) -> int:
        """The topic's key, as it was `asked` for, from now on known. Raises _Dropped."""
        found, _ = asked.answered()
        if not found:
            self._keys.pop(topic.uid, None)
            raise _Dropped
        self._keys[topic.uid] = key = int(found[0][0])
        return key

    async def _on_known(
        self, topic: Topic, act: Callable[[Session, int], Result | None], gone: Callable[[], Result]
    ) -> Result:
        """The same for an `act` that asks by itself whether the topic stands, and answers None where it does not: its
        key, once known, is not asked for again."""

        def keyed(session: Session) -> Result:
            key = self._keys.get(topic.uid)
            done = act(session, self._told(topic, records.key_of(session, topic)) if key is None else key)
            return gone() if done is None else done

        try:
            return await self._transact(keyed)
        except _Dropped:
            return gone()

    async def _rows(self, count: int) -> int:
        """The first of the row numbers that a put of `count` may take (each id may be tried twice), reserved in a
        transaction of its own, so that no others wait for it."""
        needed = 2 * count + 1
        with self._rows_lock:
            first, self._next_row = self._next_row, self._next_row + needed
            enough = self._next_row <= self._last_row + 1
        if not enough:
            many = max(ROWS_RESERVED, needed)
            first = await self._transact(lambda session: records.reserve(session, many))
            with self._rows_lock:
                self._next_row, self._last_row = first + needed, first + many - 1
        return first

    # ── topics ──

    async def topics(self) -> list[Topic]:
        return await self._transact(records.all_topics)

    async def create_topic(self, topic: Topic) -> Topic:
        return await self._transact(lambda session: records.create(session, topic))

    async def update_topic(self, topic: Topic) -> Topic:
        return await self._transact(lambda session: records.update(session, topic))

    async def drop_topic(self, topic: Topic) -> bool:
        return await self._transact(lambda session: records.drop(session, topic))

    # ── messages ──

    async def put(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        done: list[Answers | BaseException] = []
        for part in cut(puts, PUT_AT_ONCE):
            try:
                done.append(await self._put(topic, now_ms, part))
            except Exception as error:
                done.append(error)
                break
        return Answers.concat(whole(done))

    async def _put(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        try:
            return await self._put_numbered(topic, now_ms, puts)
        except messages.NumbersTaken:
            with self._rows_lock:
                self._next_row, self._last_row = 1, 0
            return await self._put_numbered(topic, now_ms, puts)

    async def _put_numbered(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        first = await self._rows(len(puts))

        def act(session: Session, key: int) -> Answers:
            left = [first]  # Anew when the transaction is repeated: nothing of the one before is there.

            def reserve(count: int) -> int:
                left[0] += count
                return left[0] - count

            return messages.put(session, topic, key, now_ms, puts, reserve)

        return await self._on(topic, act, lambda: dropped(topic, len(puts)), lock=True)

    async def lease_due(
        self,
        topic: Topic,
        buckets: Sequence[int] | None,
        now_ms: int,
        due_before_ms: int,
        grants: Sequence[Grant],
        overdue_ms: int = 0,
    ) -> LeasedRows:
        if buckets is not None and len(set(buckets)) == topic.settings.buckets:
            buckets = None

        def act(session: Session, key: int) -> LeasedRows | None:
            return leasing.lease_due(session, topic, key, buckets, now_ms, due_before_ms, grants, overdue_ms)

        def gone() -> LeasedRows:
            return LeasedRows(Rows.empty(True), np.zeros(0, np.uint32), np.zeros(0, np.int64), Ragged.of([]), None)

        return await self._on_known(topic, act, gone)

    async def settle(self, topic: Topic, now_ms: int, settles: Settles) -> Answers:
        def act(session: Session, key: int) -> Answers | None:
            return messages.settle(session, topic, key, now_ms, settles)

        return await self._on_known(topic, act, lambda: dropped(topic, len(settles)))

    async def mutate(self, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
        def act(session: Session, key: int) -> Answers:
            return mutate(messages.Changes(session, topic, key, now_ms), mutations)

        return await self._on(topic, act, lambda: dropped(topic, len(mutations)))

    async def mutate_tag(self, topic: Topic, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
        if not mutation.tag:
            return TagStep({}, None)

        def act(session: Session, key: int) -> TagStep:
            return sweeping.mutate_tag(session, topic, key, now_ms, mutation, cursor, limit)

        return await self._on(topic, act, lambda: TagStep({}, None))

    async def held_by(self, topic: Topic, now_ms: int, holder: bytes, cursor: bytes, limit: int) -> Page:
        def act(session: Session, key: int) -> Page:
            return reading.held_by(session, key, now_ms, holder, cursor, limit)

        return await self._on(topic, act, lambda: Page(Rows.empty(payload=True), None))

    async def scan(
        self, topic: Topic, now_ms: int, where: ScanFilter, cursor: bytes, limit: int, payload: bool
    ) -> Page:
        def act(session: Session, key: int) -> Page:
            return reading.scan(session, topic, key, now_ms, where, cursor, limit, payload)

        return await self._on(topic, act, lambda: Page(Rows.empty(payload), None))

    async def count_due(self, topic: Topic, edges_ms: Int64) -> Int64:
        def act(session: Session, key: int) -> Int64:
            return reading.count_due(session, key, edges_ms)

        return await self._on(topic, act, lambda: np.zeros(max(0, len(edges_ms) - 1), dtype=np.int64))

    async def next_due(self, topic: Topic, buckets: Sequence[int] | None, after_ms: int) -> int | None:
        def act(session: Session, key: int) -> int | None:
            times = statements.first_dues(session, key, after_ms, buckets).answered()[0][0][:2]
            return min((time for time in times if time is not None), default=None)

        return await self._on(topic, act, lambda: None)

    async def sweep(self, topic: Topic, now_ms: int, limit: int) -> Swept:
        def act(session: Session, key: int) -> Swept:
            return sweeping.sweep(session, topic, key, now_ms, limit)

        return await self._on(topic, act, Swept)
