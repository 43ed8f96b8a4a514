"""The base of the SQL stores: calls that are the same for all, on plans that each store runs in its own way. And the
plans of topic records, each a transaction of its own."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from timeline.columns import Int64
from timeline.model import MAX_PAYLOAD_BYTES, Answers, Rows, Topic
from timeline.storage_plugins.contract import (
    Capabilities,
    Mutations,
    Opened,
    Page,
    Puts,
    ScanFilter,
    Store,
    StoreError,
    StoreUnavailable,
    StoreUnknown,
    Swept,
    TagMutation,
    TagStep,
    TopicConflict,
)
from timeline.storage_plugins.errors import gravest
from timeline.storage_plugins.records import check_update, dropped, same_settings, settings_text, topic_of
from timeline.storage_plugins.sql import changes, reading
from timeline.storage_plugins.sql.dialect import Changes, SqlDialect
from timeline.storage_plugins.sql.statements import Plan, Result


class SqlStore(Store):
    """The base of the SQL stores."""

    sql: SqlDialect
    """The dialect of plans that only read."""

    # ── ways in ──

    @abstractmethod
    async def _read(self, plan: Callable[[], Plan[Result]]) -> Result:
        """Run a plan that only reads."""

    @abstractmethod
    async def _record(self, plan: Callable[[SqlDialect], Plan[Result]]) -> Result:
        """Run a plan that changes a topic's record, in a transaction."""

    @abstractmethod
    async def _read_of(self, topic: Topic, plan: Callable[[int], Plan[Result]], gone: Callable[[], Result]) -> Result:
        """Run a plan that only reads, by the topic's key. If the topic was dropped, return what `gone` does."""

    @abstractmethod
    async def _change_of(
        self,
        topic: Topic,
        now_ms: int,
        plan: Callable[[Changes], Plan[Result]],
        gone: Callable[[], Result],
        weight: int,
    ) -> Result:
        """Run a plan that changes about `weight` messages. If the topic was dropped, return what `gone` does."""

    # ── topics ──

    async def topics(self) -> list[Topic]:
        return await self._read(lambda: all_topics(self.sql))

    async def create_topic(self, topic: Topic) -> Topic:
        return await self._record(lambda sql: created(sql, topic))

    async def update_topic(self, topic: Topic) -> Topic:
        return await self._record(lambda sql: updated(sql, topic))

    async def drop_topic(self, topic: Topic) -> bool:
        return await self._record(lambda sql: removed(sql, topic))

    # ── messages ──

    async def mutate(self, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
        count = len(mutations)
        return await self._change_of(
            topic, now_ms, lambda changing: changes.mutate(changing, mutations), lambda: dropped(topic, count), count
        )

    async def mutate_tag(self, topic: Topic, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
        def plan(changing: Changes) -> Plan[TagStep]:
            return changes.mutate_tag(changing, mutation, cursor, limit)

        nothing, limit = TagStep({}, None), min(max(1, limit), self.sql.most_rows)
        return nothing if not mutation.tag else await self._change_of(topic, now_ms, plan, lambda: nothing, limit)

    async def sweep(self, topic: Topic, now_ms: int, limit: int) -> Swept:
        return await self._change_of(topic, now_ms, lambda changing: changes.sweep(changing, limit), Swept, limit)

    async def held_by(self, topic: Topic, now_ms: int, holder: bytes, cursor: bytes, limit: int) -> Page:
        return await self._read_of(
            topic,
            lambda key: reading.held_by(self.sql, key, now_ms, holder, cursor, limit),
            lambda: Page(Rows.empty(payload=True), None),
        )

    async def scan(
        self, topic: Topic, now_ms: int, where: ScanFilter, cursor: bytes, limit: int, payload: bool
    ) -> Page:
        return await self._read_of(
            topic,
            lambda key: reading.scan(self.sql, topic, key, now_ms, where, cursor, limit, payload),
            lambda: Page(Rows.empty(payload), None),
        )

    async def count_due(self, topic: Topic, edges_ms: Int64, held: bool = False) -> Int64:
        return await self._read_of(
            topic,
            lambda key: reading.count_due(self.sql, key, edges_ms, held),
            lambda: np.zeros(max(0, len(edges_ms) - 1), dtype=np.int64),
        )

    async def next_due(self, topic: Topic, buckets: Sequence[int] | None, after_ms: int) -> int | None:
        return await self._read_of(topic, lambda key: reading.next_due(self.sql, key, after_ms, buckets), lambda: None)

    async def next_dues(self) -> dict[int, int] | None:
        return await self._read(lambda: reading.next_dues(self.sql))


class ServerStore(SqlStore):
    """The base of SQL stores on a server, which several brokers share."""

    capabilities = Capabilities(
        durable=True,
        survives_failover=False,
        shared=True,
        payload_limit_bytes=MAX_PAYLOAD_BYTES,
        own_clock=True,
        exact_counts=True,
    )

    def __init__(self) -> None:
        self._opened: Opened | None = None
        self._opening = asyncio.Lock()

    async def open(self) -> Opened:
        async with self._opening:
            if self._opened is None:
                try:
                    self._opened = await self._open()
                except StoreUnknown as lost:
                    # The next opening finds, or makes, whatever is missing of the schema.
                    raise StoreUnavailable(lost.reason) from lost
            return self._opened

    @abstractmethod
    async def _open(self) -> Opened:
        """Connect, and create or migrate the schema. Hold nothing if that fails."""


def without_all(topic: Topic, buckets: Sequence[int] | None) -> Sequence[int] | None:
    """Return the buckets to look into; None if they are all that the topic has."""
    return None if buckets is None or len(set(buckets)) == topic.settings.buckets else buckets


# ── topic records ──

_COLUMNS = "uid, name, settings, revision, created_ms"


def all_topics(sql: SqlDialect) -> Plan[list[Topic]]:
    """Return all records, by name."""
    records = yield sql.query().rows(f"SELECT {_COLUMNS} FROM {sql.table('topic')}")
    return sorted((topic_of(*record) for record in records), key=lambda topic: topic.name)


def _standing(sql: SqlDialect, name: str) -> Plan[Topic | None]:
    query = sql.query()
    records = yield query.rows(
        f"SELECT {_COLUMNS} FROM {sql.table('topic')} WHERE name = {query(sql.text(name))}{sql.locked}"
    )
    return topic_of(*records[0]) if records else None


def created(sql: SqlDialect, topic: Topic) -> Plan[Topic]:
    """Create the record; return the one that stands."""
    query = sql.query()
    values = (topic.uid, sql.text(topic.name), sql.text(settings_text(topic)), topic.revision, topic.created_ms)
    yield query.running(
        f"INSERT INTO {sql.table('topic')} ({_COLUMNS}) VALUES ({', '.join(map(query, values))}) {sql.unless_named}"
    )
    standing = yield from _standing(sql, topic.name)
    if standing is None:
        raise TopicConflict(f"topic {topic.name!r} was dropped at this moment. Create it again.", id=topic.name)
    return same_settings(standing, topic)


def updated(sql: SqlDialect, topic: Topic) -> Plan[Topic]:
    """Change the record; return it with its next revision."""
    changed = check_update((yield from _standing(sql, topic.name)), topic)
    query = sql.query()
    yield query.running(
        f"UPDATE {sql.table('topic')} SET settings = {query(sql.text(settings_text(changed)))}, revision = "
        f"{query(changed.revision)}, created_ms = {query(changed.created_ms)} WHERE uid = {query(changed.uid)}"
    )
    return changed


def removed(sql: SqlDialect, topic: Topic) -> Plan[bool]:
    """Remove the record; a sweep removes its rows. Return False if no such record stood."""
    query, table = sql.query(), sql.table("topic")
    keys = yield query.rows(
        f"SELECT {sql.quoted('key')} FROM {table} WHERE name = {query(sql.text(topic.name))} "
        f"AND uid = {query(topic.uid)}{sql.locked}"
    )
    if not keys:
        return False
    query = sql.query()
    yield query.running(f"DELETE FROM {table} WHERE uid = {query(topic.uid)}")
    query = sql.query()
    yield query.running(f"INSERT INTO {sql.table('dropped')} ({sql.quoted('key')}) VALUES ({query(keys[0][0])})")
    return True


# ── a call in parts that are committed one after the other ──

PUT_AT_ONCE = 1_000
PUT_BYTES_AT_ONCE = 4 * 1024 * 1024
"""A larger put is done in parts of this size, so that leases need not wait for all of it."""


def whole(parts: list[Result | BaseException], begun: bool = False) -> list[Result]:
    """Return the parts of a call if all of them were done. Else raise the error of the whole call: it is unknown if
    some parts were done. `begun`: some were done before these."""
    done = [part for part in parts if not isinstance(part, BaseException)]
    failed = [part for part in parts if isinstance(part, BaseException)]
    if failed:
        raise gravest(cast(list[StoreError], failed), begun or bool(done))
    return done


def cut(puts: Puts, at_once: int = PUT_AT_ONCE) -> list[Puts]:
    """Return the puts, in several parts if they are more than `at_once` or large."""
    count = len(puts)
    if count <= at_once and puts.payloads.nbytes <= PUT_BYTES_AT_ONCE:
        return [puts]
    ends = np.cumsum(puts.payloads.sizes)
    parts: list[Puts] = []
    start = 0
    while start < count:
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + PUT_BYTES_AT_ONCE, "right"))
        stop = min(max(stop, start + 1), start + at_once, count)
        parts.append(puts.slice(start, stop))
        start = stop
    return parts
