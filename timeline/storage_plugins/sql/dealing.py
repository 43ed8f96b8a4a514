"""What was found is dealt over the grants and leased, inside a transaction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from timeline.columns import Int64, Ragged, UInt32
from timeline.leases import deal
from timeline.model import Rows
from timeline.storage_plugins.contract import Grant, LeasedRows
from timeline.storage_plugins.sql.rows import Part

MANY_GRANTS = 8
"""Up to so many grants each is written by a statement of its own, beyond by one with a due and holder for each row."""

Write = Callable[[UInt32, list[int], Int64], None]
"""Writes leases: whose turn each is (an index of the grants), by row, and until when."""
Read = Callable[[list[int], list[int]], tuple[Ragged, Ragged, list[int]]]
"""Payloads and headers by row, of about so many bytes each, and the indexes of those that are gone."""


def lease(eligible: Part, grants: Sequence[Grant], now_ms: int, write: Write, read: Read) -> LeasedRows:
    """Deals the eligible over the grants and has the leases written; without `next_due_ms`."""
    turns = deal(grants, eligible.sizes)
    if len(turns) < len(eligible):
        eligible = eligible.take(np.arange(len(turns)))
    rows = eligible.rows
    if not len(turns):
        return LeasedRows(Rows.empty(payload=True), turns, rows.due_ms, rows.holders, None)
    lease_ms = np.array([grant.lease_ms for grant in grants], dtype=np.int64)
    due_ms = np.maximum(rows.due_ms, now_ms) + lease_ms[turns]
    write(turns, eligible.numbers, due_ms)
    payloads, headers, gone = read(eligible.numbers, eligible.sizes.tolist())
    holders = [grant.holder for grant in grants]
    held = dataclasses.replace(
        rows,
        due_ms=due_ms,
        version=rows.version + 1,
        deliveries=rows.deliveries + np.uint32(1),
        holders=Ragged.repeat(holders[0], len(turns)) if len(grants) == 1 else Ragged.of(holders).take(turns),
        payloads=payloads,
        headers=headers,
    )
    return LeasedRows(held, turns, rows.due_ms, rows.holders, None, damaged=tuple(gone))
