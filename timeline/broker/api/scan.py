"""A scan's pages: what a topic has, or what one consumer holds, in the order of buckets."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from timeline.broker.api.cursors import Walk, opened, sealed
from timeline.model import Rows, Topic, buckets_of, payload_sums
from timeline.storage_plugins.contract import ScanFilter
from timeline.wire import Scan, ScanPage

if TYPE_CHECKING:
    from timeline.broker.lanes.metered_store import MeteredStore
    from timeline.broker.node import Node

PAGE_ROWS = 1_000
READ_AGAIN = 3
"""How often a message is read again that another replaced between the reading of its row and of its payload."""


async def pages(node: Node, topic: Topic, asked: Scan) -> AsyncGenerator[ScanPage, None]:
    """The pages of a scan of `topic`, of at most `PAGE_ROWS` rows each; the last one, which may be empty, has no cursor
    unless `asked.limit` ended it. Raises StoreError, Invalid for a cursor that is none of its own."""
    walk = Walk.HELD if asked.holder else Walk.SCAN
    cursor, left = opened(topic, walk, asked.cursor), asked.limit
    if not cursor and asked.bucket_from:
        cursor = asked.bucket_from.to_bytes(4, "big")
    while True:
        now_ms = node.clock.now_ms()
        most = min(PAGE_ROWS, left) if left else PAGE_ROWS
        rows, cursor = await _page(node.store, topic, now_ms, asked, cursor, most)
        if len(rows) or not cursor:
            yield ScanPage(rows, now_ms, sealed(topic, walk, cursor))
        if asked.limit:
            left -= len(rows)
        if not cursor or (asked.limit and left <= 0):
            return


async def _page(
    store: MeteredStore, topic: Topic, now_ms: int, asked: Scan, cursor: bytes, most: int
) -> tuple[Rows, bytes]:
    """At most so many rows of a scan from `cursor` on, and where it goes on (empty: it is done)."""
    if asked.holder:
        holder = asked.holder.encode()
        page = await store.call("held_by", store.store.held_by(topic, now_ms, holder, cursor, most))
        rows = page.rows if asked.payload else replace(page.rows, payloads=None, headers=None)
        return rows, page.cursor or b""
    where = ScanFilter(frozenset(asked.states), asked.tag, asked.due_from_ms, asked.due_to_ms, asked.ids)
    page = await store.call("scan", store.store.scan(topic, now_ms, where, cursor, most, asked.payload))
    if asked.payload:
        page = replace(page, rows=await _whole(store, topic, now_ms, where, page.rows))
    if not asked.bucket_to or asked.ids is not None:
        return page.rows, page.cursor or b""
    inside = buckets_of(page.rows.ids, topic.settings.buckets) < asked.bucket_to
    end = asked.bucket_to.to_bytes(4, "big")
    if page.cursor is None or page.cursor >= end or not inside.all():
        return page.rows if inside.all() else page.rows.take(inside), b""
    return page.rows, page.cursor


async def _whole(store: MeteredStore, topic: Topic, now_ms: int, where: ScanFilter, rows: Rows) -> Rows:
    """Return the rows, each with its own payload. Rows whose payload does not fit its checksum are read again: one that
    is damaged stays as it is, one that is gone or matches no more is left out."""
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
