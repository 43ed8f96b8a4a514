"""`memory://`: a store that keeps everything in this process, for embedded use, tests, and as the yardstick of speed.

Every call runs without a pause, so that it is atomic among the tasks of an event loop. A topic's messages are
`TopicRows`; `changes` and `walks` work on them.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from timeline.columns import Int64
from timeline.kinds import kind_of
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
    StoreRefused,
    StoreUnavailable,
    Swept,
    TagMutation,
    TagStep,
)
from timeline.storage_plugins.memory import changes, walks
from timeline.storage_plugins.memory.changes import MemoryCall
from timeline.storage_plugins.memory.rows import TopicRows
from timeline.storage_plugins.records import check_update, dropped, same_settings


class MemoryStore(Store):
    """The store of `memory://`. `cluster_uid`: 32 hex digits, random if empty. `fast`: whole batches go by columns.
    False decides each message by `leases.decide`, which the columns must agree with."""

    capabilities = Capabilities(
        durable=False,
        survives_failover=False,
        shared=False,
        payload_limit_bytes=MAX_PAYLOAD_BYTES,
        own_clock=False,
        exact_counts=True,
        every_kind=True,
    )

    def __init__(self, url: str = "memory://", *, cluster_uid: str = "", fast: bool = True) -> None:
        if url != "memory://":
            raise StoreRefused("memory:// takes nothing after it: its messages live and die with this process")
        self._cluster_uid = cluster_uid or secrets.token_hex(16)
        self._fast = fast
        self._open = False
        self._topics: dict[str, Topic] = {}
        self._rows: dict[int, TopicRows | None] = {}
        """By topic; None until its messages are used."""
        self._walks: dict[int, walks.Walks] = {}

    async def open(self) -> Opened:
        self._open = True
        return Opened(self._cluster_uid, "this process's memory")

    async def inspect(self) -> Opened:
        await self.check()
        return await self.open()

    async def close(self) -> None:
        self._open = False
        self._topics.clear()
        self._rows.clear()
        self._walks.clear()

    async def check(self) -> None:
        if not self._open:
            raise StoreUnavailable("the memory store is not open")

    # ── topics ──

    async def topics(self) -> list[Topic]:
        await self.check()
        return [self._topics[name] for name in sorted(self._topics)]

    async def create_topic(self, topic: Topic) -> Topic:
        await self.check()
        stands = self._topics.get(topic.name)
        if stands is None:
            self._topics[topic.name] = topic
            self._rows[topic.uid] = None
            return topic
        return same_settings(stands, topic)

    async def update_topic(self, topic: Topic) -> Topic:
        await self.check()
        changed = check_update(self._topics.get(topic.name), topic)
        self._topics[topic.name] = changed
        return changed

    async def drop_topic(self, topic: Topic) -> bool:
        await self.check()
        stands = self._topics.get(topic.name)
        if stands is None or stands.uid != topic.uid:
            return False
        del self._topics[topic.name], self._rows[topic.uid]
        self._walks.pop(topic.uid, None)
        return True

    def _of(self, topic: Topic) -> TopicRows | None:
        """Return the topic's rows; None if it was dropped."""
        rows = self._made(topic)
        if rows is None and topic.uid in self._rows:
            fast = self._fast and kind_of(topic.settings).in_batches
            rows = self._rows[topic.uid] = TopicRows(topic.settings.buckets, fast)
            self._walks[topic.uid] = walks.Walks()
        return rows

    def _made(self, topic: Topic) -> TopicRows | None:
        """Return the topic's rows; None if it has none yet, or was dropped."""
        if not self._open:
            raise StoreUnavailable("the memory store is not open")
        return self._rows.get(topic.uid)

    # ── messages ──

    async def put(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        rows = self._of(topic)
        if rows is None:
            return dropped(topic, len(puts))
        answers = changes.put(MemoryCall(rows, topic.settings, now_ms), puts)
        rows.forget_unused_names()
        return answers

    async def lease_due(
        self,
        topic: Topic,
        buckets: Sequence[int] | None,
        now_ms: int,
        due_before_ms: int,
        grants: Sequence[Grant],
        overdue_ms: int = 0,
    ) -> LeasedRows:
        rows = self._made(topic)
        if rows is None:
            return LeasedRows.empty()
        leased = changes.lease_due(MemoryCall(rows, topic.settings, now_ms), buckets, due_before_ms, grants, overdue_ms)
        rows.forget_unused_names()
        return leased

    async def settle(self, topic: Topic, now_ms: int, settles: Settles) -> Answers:
        rows = self._of(topic)
        if rows is None:
            return dropped(topic, len(settles))
        return changes.settle(MemoryCall(rows, topic.settings, now_ms), settles)

    async def mutate(self, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
        rows = self._of(topic)
        if rows is None:
            return dropped(topic, len(mutations))
        return changes.mutate(MemoryCall(rows, topic.settings, now_ms), mutations)

    async def mutate_tag(self, topic: Topic, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
        call = MemoryCall(self._made(topic) or _NONE, topic.settings, now_ms)
        return changes.mutate_tag(call, self._walks.get(topic.uid, _NO_WALKS), mutation, cursor, limit)

    async def held_by(self, topic: Topic, now_ms: int, holder: bytes, cursor: bytes, limit: int) -> Page:
        return walks.held_by(self._made(topic) or _NONE, now_ms, holder, cursor, limit)

    async def scan(
        self, topic: Topic, now_ms: int, where: ScanFilter, cursor: bytes, limit: int, payload: bool
    ) -> Page:
        going = self._walks.get(topic.uid, _NO_WALKS)
        return walks.scan(self._made(topic) or _NONE, going, now_ms, where, cursor, limit, payload)

    async def count_due(self, topic: Topic, edges_ms: Int64, held: bool = False) -> Int64:
        rows = self._made(topic) or _NONE
        return (rows.held if held else rows.free).count_between(edges_ms)

    async def next_due(self, topic: Topic, buckets: Sequence[int] | None, after_ms: int) -> int | None:
        return changes.next_due(self._made(topic) or _NONE, buckets, after_ms)

    async def next_dues(self) -> dict[int, int] | None:
        found = {uid: changes.next_due(rows, None, -1) for uid, rows in self._rows.items() if rows is not None}
        return {uid: due_ms for uid, due_ms in found.items() if due_ms is not None}

    async def sweep(self, topic: Topic, now_ms: int, limit: int) -> Swept:
        return changes.sweep(MemoryCall(self._made(topic) or _NONE, topic.settings, now_ms), limit)


_NONE, _NO_WALKS = TopicRows(1), walks.Walks()
"""The rows of a topic that has none yet, or was dropped: for calls that only look for some."""
