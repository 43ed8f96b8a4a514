"""Rows, batches and consumers for tests of the broker's parts."""

from __future__ import annotations

import numpy as np

from timeline.broker.dispatch.leased_batch import LeasedBatch
from timeline.broker.dispatch.roster import ConnectedConsumer, Outboxes
from timeline.broker.limits import Limits
from timeline.columns import Ragged
from timeline.model import ROW_DTYPES, Rows, payload_sums


def make_rows(due_ms: list[int], payloads: list[bytes] | None = None, holder: bytes = b"c") -> Rows:
    """Rows m0, m1, … due at `due_ms`, held by `holder`."""
    count = len(due_ms)
    content = Ragged.of(payloads if payloads is not None else [b"x"] * count)
    columns = {name: np.zeros(count, dtype=dtype) for name, dtype in ROW_DTYPES.items()}
    columns["birth"] = np.arange(1, count + 1, dtype=np.uint64)
    columns["version"] = np.full(count, 2, dtype=np.int64)
    columns["due_ms"] = columns["scheduled_ms"] = np.array(due_ms, dtype=np.int64)
    columns["payload_sum"] = payload_sums(content, None)
    return Rows(
        ids=Ragged.of([f"m{at}".encode() for at in range(count)]),
        groups=Ragged.repeat(b"default", count),
        holders=Ragged.repeat(holder, count),
        tags=Ragged.repeat(b"", count),
        dead=Ragged.repeat(b"", count),
        payloads=content,
        headers=Ragged.repeat(b"", count),
        **columns,
    )


def make_leased(due_ms: list[int], payloads: list[bytes] | None = None) -> LeasedBatch:
    """A batch of such rows, leased at 0."""
    return LeasedBatch(
        make_rows(due_ms, payloads), np.array(due_ms, dtype=np.int64), np.zeros(len(due_ms), dtype=bool), 0
    )


def make_consumer(id: str, messages: int = 10, bytes_: int = 1_000, limits: Limits | None = None) -> ConnectedConsumer:
    return ConnectedConsumer(
        id=id.encode(),
        session=1,
        lease_ms=30_000,
        credit_messages=messages,
        credit_bytes=bytes_,
        limits=limits or Limits(),
        heartbeat_ms=(limits or Limits()).heartbeat_ms,
        heard_ms=0.0,
        wake=lambda: None,
        outboxes=Outboxes(1 << 30, lambda: None),
        dealing=True,
    )
