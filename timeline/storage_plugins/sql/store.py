"""The store of the SQL family: the calls that are the same for all, on plans that each store runs in its own way."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from timeline.columns import Int64
from timeline.model import Answers, Rows, Topic
from timeline.storage_plugins.contract import (
    Mutations,
    Page,
    Puts,
    ScanFilter,
    Store,
    StoreUnavailable,
    StoreUnknown,
)
from timeline.storage_plugins.records import dropped
from timeline.storage_plugins.sql import changes, reading, records
from timeline.storage_plugins.sql.dialect import Changes, SqlDialect
from timeline.storage_plugins.sql.statements import Plan, Result


class SqlStore(Store):
    """Base of the SQL stores."""

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
        """Run a plan that only reads, by the topic's key; `gone` answers where it was dropped."""

    @abstractmethod
    async def _change_of(
        self,
        topic: Topic,
        now_ms: int,
        plan: Callable[[Changes], Plan[Result]],
        gone: Callable[[], Result],
        weight: int,
    ) -> Result:
        """Run a plan that changes about `weight` messages; `gone` answers where the topic was dropped."""

    # ── topics ──

    async def topics(self) -> list[Topic]:
        return await self._read(lambda: records.all_topics(self.sql))

    async def create_topic(self, topic: Topic) -> Topic:
        return await self._record(lambda sql: records.create(sql, topic))

    async def update_topic(self, topic: Topic) -> Topic:
        return await self._record(lambda sql: records.update(sql, topic))

    async def drop_topic(self, topic: Topic) -> bool:
        return await self._record(lambda sql: records.drop(sql, topic))

    # ── messages ──

    async def mutate(self, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
        count = len(mutations)
        return await self._change_of(
            topic, now_ms, lambda changing: changes.mutate(changing, mutations), lambda: dropped(topic, count), count
        )

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

    async def count_due(self, topic: Topic, edges_ms: Int64) -> Int64:
        return await self._read_of(
            topic,
            lambda key: reading.count_due(self.sql, key, edges_ms),
            lambda: np.zeros(max(0, len(edges_ms) - 1), dtype=np.int64),
        )

    async def next_due(self, topic: Topic, buckets: Sequence[int] | None, after_ms: int) -> int | None:
        return await self._read_of(topic, lambda key: reading.next_due(self.sql, key, after_ms, buckets), lambda: None)


def without_all(topic: Topic, buckets: Sequence[int] | None) -> Sequence[int] | None:
    """The buckets to look into; None where they are all that the topic has."""
    return None if buckets is None or len(set(buckets)) == topic.settings.buckets else buckets


# ── a call in parts that are committed one after the other ──

PUT_AT_ONCE = 1_000
PUT_BYTES_AT_ONCE = 4 * 1024 * 1024
"""A larger put is done in parts of this size, in one transaction or several, so that leases need not wait for all of
it."""


def whole(parts: list[Result | BaseException], begun: bool = False) -> list[Result]:
    """The parts of a call when all of them were done. Else raises what the whole call is to say: where something was
    done (`begun`: before these), that nothing happened would be untrue."""
    done = [part for part in parts if not isinstance(part, BaseException)]
    failed = [part for part in parts if isinstance(part, BaseException)]
    if not failed:
        return done
    graver = next((error for error in failed if not isinstance(error, StoreUnavailable)), None)
    if graver is None and (done or begun) and isinstance(failed[0], StoreUnavailable):
        raise StoreUnknown(f"a part of it was done, then: {failed[0].reason}") from failed[0]
    raise graver or failed[0]


def cut(puts: Puts, at_once: int = PUT_AT_ONCE) -> list[Puts]:
    """The puts themselves, or, where they are more than `at_once` or large, parts that are committed one after the
    other."""
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
