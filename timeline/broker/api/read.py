"""Reading: scans of what a topic has or one consumer holds, forecasts, and why deliveries were late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import numpy as np

from timeline.broker.api.access import Deed, Principal
from timeline.broker.api.topics import TopicAccess, Walk, opened, permit, sealed
from timeline.broker.catalog import Readiness
from timeline.broker.dispatch.dealer import Dealers
from timeline.broker.fairness import SharedPace
from timeline.broker.lanes import MeteredStore
from timeline.broker.late import LateRing, LateRows
from timeline.broker.runtime import Runtime
from timeline.broker.status import MessageCounts, count_lapsed
from timeline.columns import Ragged
from timeline.errors import Invalid
from timeline.model import Rows, State, Topic, buckets_of, payload_sums
from timeline.storage_plugins.contract import ScanFilter
from timeline.wire import Forecast, Forecasted, Late, LateList, Scan, ScanPage

MAX_STEPS = 10_000
FORECAST_SHARE = 0.5
"""The share of its time that the store is asked for a forecast, which somebody waits for."""
PAGE_ROWS = 1_000
READ_AGAIN = 3
"""How often a message is read again that was replaced between reading its row and its payload."""


class ReadHandler:
    """Answers calls that read. They raise StoreError, TransportError and Invalid."""

    def __init__(
        self,
        runtime: Runtime,
        topics: TopicAccess,
        readiness: Readiness,
        store: MeteredStore,
        dealers: Dealers,
        late: LateRing,
        counts: MessageCounts,
    ) -> None:
        self._clock, self._late_ms = runtime.clock, runtime.limits.late_ms
        self._topics, self._readiness, self._store = topics, readiness, store
        self._dealers, self._late, self._counts = dealers, late, counts

    async def scan(self, asked: Scan, caller: Principal) -> AsyncGenerator[ScanPage, None]:
        """Yield the pages of a scan, in the order of buckets, of at most `PAGE_ROWS` rows each. One is empty where the
        store looked at many rows and found none, so that its caller may stop there. The last one has no cursor unless
        `asked.limit` ended it. Expired messages are left out, swept or not."""
        topic = await self._topics.find(asked.topic, caller, Deed.READ if asked.payload else Deed.SEE)
        walk = Walk.HELD if asked.holder else Walk.SCAN
        cursor, left = opened(topic, walk, asked.cursor), asked.limit
        if not cursor and asked.bucket_from:
            cursor = asked.bucket_from.to_bytes(4, "big")
        while True:
            now_ms = self._clock.now_ms()
            most = min(PAGE_ROWS, left) if left else PAGE_ROWS
            rows, cursor = await _page(self._store, topic, now_ms, asked, cursor, most)
            yield ScanPage(rows, now_ms, sealed(topic, walk, cursor))
            if asked.limit:
                left -= len(rows)
            if not cursor or (asked.limit and left <= 0):
                return

    async def forecast(self, asked: Forecast, caller: Principal) -> Forecasted:
        """Return how many messages come due in each step of a window."""
        topic, store = await self._topics.find(asked.topic, caller, Deed.SEE), self._store
        if asked.step_ms < 1 or asked.window_ms < 1:
            raise Invalid("window and step must be at least 1 ms")
        steps = -(-asked.window_ms // asked.step_ms)
        if steps > MAX_STEPS:
            raise Invalid(f"a forecast has at most {MAX_STEPS} steps, not {steps}: ask for a longer step")
        now_ms = self._clock.now_ms()
        edges = now_ms + np.arange(steps + 1, dtype=np.int64) * asked.step_ms
        edges[-1] = min(int(edges[-1]), now_ms + asked.window_ms)
        in_parts, pace = self._counts.in_parts, SharedPace(self._clock, FORECAST_SHARE)
        next_due = await in_parts.next_due(topic)
        first_ms = now_ms - 1 if next_due is None else min(next_due, now_ms - 1)
        counted, _ = await in_parts.count(topic, np.append(first_ms, edges), self._counts.cuts(topic.uid), pace)
        overdue = int(counted[0]) + await count_lapsed(store, topic, now_ms)
        return Forecasted(edges, counted[1:], overdue, store.store.capabilities.exact_counts)

    async def late(self, asked: Late, caller: Principal) -> LateList:
        """Return the late deliveries that this broker remembers. A message by id is added if it is late now."""
        now_ms = self._clock.now_ms()
        if asked.topic:
            permit(caller.refusal(Deed.SEE, asked.topic))
        names = {dealer.topic.uid: dealer.topic.name for dealer in self._dealers}
        topics = {
            uid: name for uid, name in names.items() if caller.sees(name) and (not asked.topic or name == asked.topic)
        }
        parts = [LateRows.blank(0)]
        for part in self._late.since(asked.since_ms, topics, asked.id, asked.limit):
            parts.append(part)
            await asyncio.sleep(0)  # deliveries are not to wait for all of them
        if asked.id and asked.topic and not self._readiness.no_calls:
            parts.append(await self._overdue(asked.topic, asked.id, now_ms))
        late = LateRows.concat(parts)
        late = late.slice(max(0, len(late) - asked.limit), len(late))
        return LateList.of(late, dropped=self._late.dropped, now_ms=now_ms)

    async def _overdue(self, name: str, id: bytes, now_ms: int) -> LateRows:
        """Return the message with its present cause, if it is due and not leased."""
        topic = await self._topics.catalog.find(name)
        if topic is None:
            return LateRows.blank(0)
        dealer = self._dealers.of(topic)  # now: once the store has answered, the topic may have been dropped
        where = ScanFilter(frozenset({State.AVAILABLE}), ids=Ragged.of([id]))
        page = await self._store.call("scan", self._store.store.scan(topic, now_ms, where, b"", 1, False))
        rows = page.rows.take(~page.rows.expired(now_ms))
        rows = rows.take(now_ms - rows.due_ms > self._late_ms)
        causes = [dealer.lateness.causes.still(due_ms, now_ms) for due_ms in rows.due_ms.tolist()]
        cause = np.array(causes, dtype=np.uint8)
        return LateRows.of(rows, topics=name.encode(), consumers=b"", delivered_ms=now_ms, cause=cause)


async def _page(
    store: MeteredStore, topic: Topic, now_ms: int, asked: Scan, cursor: bytes, most: int
) -> tuple[Rows, bytes]:
    """Return at most `most` rows of a scan from `cursor` on, and the next cursor. Empty: it is done."""
    if asked.holder:
        holder = asked.holder.encode()
        page = await store.call("held_by", store.store.held_by(topic, now_ms, holder, cursor, most))
        rows = page.rows if asked.payload else replace(page.rows, payloads=None, headers=None)
        return rows, page.cursor or b""
    where = ScanFilter(frozenset(asked.states), asked.tag, asked.due_from_ms, asked.due_to_ms, asked.ids)
    page = await store.call("scan", store.store.scan(topic, now_ms, where, cursor, most, asked.payload))
    if asked.payload:
        page = replace(page, rows=await _whole(store, topic, now_ms, where, page.rows))
    expired = page.rows.expired(now_ms)
    if expired.any():
        page = replace(page, rows=page.rows.take(~expired))
    if not asked.bucket_to or asked.ids is not None:
        return page.rows, page.cursor or b""
    inside = buckets_of(page.rows.ids, topic.settings.buckets) < asked.bucket_to
    end = asked.bucket_to.to_bytes(4, "big")
    if page.cursor is None or page.cursor >= end or not inside.all():
        return page.rows if inside.all() else page.rows.take(inside), b""
    return page.rows, page.cursor


async def _whole(store: MeteredStore, topic: Topic, now_ms: int, where: ScanFilter, rows: Rows) -> Rows:
    """Return the rows, each with its own payload.

    Rows whose payload does not fit its checksum are read again. A damaged one stays as it is. A message that is gone,
    or matches no more, is left out.
    """
    for _ in range(READ_AGAIN):
        assert rows.payloads is not None
        torn = payload_sums(rows.payloads, rows.headers) != rows.payload_sum
        if not torn.any():
            break
        again, cursor = [rows], b""
        asked = replace(where, ids=rows.ids.take(np.flatnonzero(torn)))
        while True:
            page = await store.call("scan", store.store.scan(topic, now_ms, asked, cursor, PAGE_ROWS, True))
            again.append(page.rows)
            if not page.cursor:
                break
            cursor = page.cursor
        whole = Rows.concat(again)
        latest = {id: at for at, id in enumerate(whole.ids.tolist()) if at >= len(rows) or not torn[at]}
        order = np.array([latest[id] for id in rows.ids.tolist() if id in latest], dtype=np.intp)
        same = len(order) == len(rows) and bool((whole.birth[order] == rows.birth).all())
        rows = whole.take(order)
        if same:
            break
    return rows
