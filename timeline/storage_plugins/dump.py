"""A store's last state, row by row, as the checker of histories reads it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

from timeline.leases import Message, state_of
from timeline.model import State, Topic, payload_sum
from timeline.storage_plugins.contract import ScanFilter, Store


async def dump_store(store: Store, topics: Iterable[Topic], now_ms: int) -> list[dict[str, Any]]:
    """Every message that `store` still has, dead letters too, as the checker wants it: `topic id birth version due_ms
    scheduled_ms holder deliveries group tag expires_ms sum read_sum dead died_ms state`; `read_sum` is the checksum of
    the payload and headers as they are read now."""
    rows: list[dict[str, Any]] = []
    for topic in topics:
        async for row in _dump_topic(store, topic, now_ms):
            rows.append(row)
    return rows


async def _dump_topic(store: Store, topic: Topic, now_ms: int) -> AsyncIterator[dict[str, Any]]:
    cursor: bytes | None = b""
    everything = ScanFilter(frozenset((State.WAITING, State.AVAILABLE, State.LEASED, State.DEAD)))
    while cursor is not None:
        page = await store.scan(topic, now_ms, everything, cursor, 1_000, payload=True)
        cursor, rows = page.cursor, page.rows
        if len(rows) and (rows.payloads is None or rows.headers is None):
            raise ValueError("a scan that asked for payloads came without them")
        for at in range(len(rows)):
            due_ms, holder, died_ms = int(rows.due_ms[at]), rows.holders[at], int(rows.died_ms[at])
            stands = Message(birth=0, version=0, due_ms=due_ms, holder=holder, died_ms=died_ms)
            yield {
                "topic": topic.name,
                "id": rows.ids[at].decode(),
                "birth": int(rows.birth[at]),
                "version": int(rows.version[at]),
                "due_ms": due_ms,
                "scheduled_ms": int(rows.scheduled_ms[at]),
                "holder": holder.decode(),
                "deliveries": int(rows.deliveries[at]),
                "group": rows.groups[at].decode(),
                "tag": rows.tags[at].decode(),
                "expires_ms": int(rows.expires_ms[at]),
                "sum": int(rows.payload_sum[at]),
                "read_sum": payload_sum(rows.payloads[at], rows.headers[at]) if rows.payloads and rows.headers else 0,
                "dead": rows.dead[at].decode(),
                "died_ms": died_ms,
                "state": str(state_of(stands, now_ms)),
            }
