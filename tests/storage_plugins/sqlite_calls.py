"""Short ways to call a store in the SQLite tests."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from timeline.columns import Ragged
from timeline.model import Operation, Rows, Topic, TopicSettings, payload_sums
from timeline.storage_plugins.contract import Grant, Puts, ScanFilter, Settles, Store

NOW_MS = 1_750_000_000_000


def topic(name: str = "t", **settings: Any) -> Topic:
    """A new topic's record."""
    return Topic(name, secrets.randbits(63), TopicSettings(**settings))


def puts(ids: Sequence[bytes], due_ms: int = NOW_MS, payload: bytes = b"p", **columns: Any) -> Puts:
    """A batch of like messages; `columns` replaces whole columns."""
    count = len(ids)
    payloads = columns.pop("payloads", Ragged.repeat(payload, count))
    chosen: dict[str, Any] = {
        "ids": Ragged.of(list(ids)),
        "birth": np.frombuffer(secrets.token_bytes(8 * count), dtype=np.uint64),
        "due_ms": np.full(count, due_ms, dtype=np.int64),
        "groups": Ragged.repeat(b"default", count),
        "payload_sum": payload_sums(payloads, None),
        "payloads": payloads,
    }
    return Puts.filled(count, **(chosen | columns))


def settles(rows: Rows, operation: Operation = Operation.ACK, time_ms: int = 0, **columns: Any) -> Settles:
    """The same settle for all of `rows`, by who holds them."""
    count = len(rows)
    chosen: dict[str, Any] = {
        "ids": rows.ids,
        "birth": rows.birth,
        "version": rows.version,
        "holders": rows.holders,
        "operation": np.full(count, operation, dtype=np.uint8),
        "time_ms": np.full(count, time_ms, dtype=np.int64),
        "op": np.arange(1, count + 1, dtype=np.uint64),
        "unseen": np.zeros(count, dtype=np.bool_),
        "reasons": Ragged.repeat(b"", count),
    }
    return Settles(**(chosen | columns))


def grant(count: int, holder: bytes = b"w", lease_ms: int = 30_000, max_bytes: int = 1 << 40) -> Grant:
    """Leave to lease `count`."""
    return Grant(holder, count, lease_ms, max_bytes)


def ids(count: int, prefix: bytes = b"m") -> list[bytes]:
    """Ids in order."""
    return [prefix + b"-%06d" % at for at in range(count)]


async def dump(store: Store, topic: Topic, now_ms: int = NOW_MS, payload: bool = True) -> Rows:
    """All living messages."""
    parts, cursor = [], b""
    while True:
        page = await store.scan(topic, now_ms, ScanFilter(), cursor, 1_000, payload)
        parts.append(page.rows)
        if page.cursor is None:
            return Rows.concat(parts)
        cursor = page.cursor
