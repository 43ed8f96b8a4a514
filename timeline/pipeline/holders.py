"""Who holds a micro-batch: one holder for each of its partitions, named by query, batch and partition.

A micro-batch is what its partitions leased, and that is settled before anybody reads it: whatever a holder has when a
task has read it is what any other try of the task reads, and what `commit` acknowledges, no more. So only the first try
of a task leases, and only until `lease_by_ms` on the broker's clock. Any other looks, without being in its way, until
something is held or that time is over, and then takes the holder over: that ends a lease under way, and what is held
from then on is all there will be. Who was taken over leases nothing more. A broker takes over at itself alone: where
there are several, what another try finds may not be all yet, and it waits until that time is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
from pyspark.sql.datasource import InputPartition

from timeline.driver.client import Timeline
from timeline.errors import Superseded, Unavailable
from timeline.model import PAYLOAD_DAMAGED, Operation, Rows, payload_sums
from timeline.pipeline.outflow import PageRows

LEASING_MS = 30_000
"""After a batch was planned, its tasks may lease for so long."""
LATE_MS = 10_000
"""A lease that began in time is over by then."""
MORE_MS = 50.0
"""What comes due later than so long after the last part is the next batch's."""
LOOK_MS = 250
"""A try that may not lease looks so often whether the one that may has."""


@dataclass
class Share(InputPartition):
    """One partition of a micro-batch. `most`: rows it may lease. `again`: the batch was planned before, by a query that
    ended; nothing is leased for it any more."""

    topic: str
    holder: str
    most: int
    lease_ms: int
    lease_by_ms: int
    again: bool


def holder_of(query: str, batch: int, part: int) -> str:
    """The holder of a partition of a micro-batch."""
    return f"spark/{query}/{batch}/{part}"


async def gather(client: Timeline, share: Share, first_try: bool) -> None:
    """What the partition is to have is under its holder, and will not be more. `first_try`: of the task."""
    if first_try and not share.again and await _leased(client, share):
        return
    while True:
        found, now_ms = await _look(client, share)
        left_ms = share.lease_by_ms + LATE_MS - now_ms
        over = left_ms <= 0
        if (found or over) and (await _brokers(client, share) <= 1 or over):
            return
        # Where there are several, the first try may be at another broker, where nobody has taken it over.
        await asyncio.sleep((left_ms if found else min(left_ms, LOOK_MS)) / 1000.0)


async def _brokers(client: Timeline, share: Share) -> int:
    """Takes the holder over, which ends a lease under way at the broker that is reached; how many brokers there are."""
    try:
        async with client.holding(share.topic, share.holder, f"{share.lease_ms}ms") as holding:
            assert holding.welcome is not None
            return len(holding.welcome.brokers)
    except Superseded:
        return 1  # by another try at this broker, which leases no more than this one does


async def _leased(client: Timeline, share: Share) -> bool:
    """Leases for the partition, unless that was done or it is too late; False: another try took the holder over."""
    try:
        async with client.holding(share.topic, share.holder, f"{share.lease_ms}ms") as holding:
            found, now_ms = await _look(client, share)
            if not found and now_ms < share.lease_by_ms:
                await holding.lease(share.most, first_ms=2 * MORE_MS, more_ms=MORE_MS)
            return True
    except Superseded:
        return False


async def _look(client: Timeline, share: Share) -> tuple[bool, int]:
    """Whether the holder has anything, and when the broker said so, by its clock."""
    now_ms = 0
    async for page in client.scan_pages(share.topic, holder=share.holder, limit=1):
        now_ms = page.now_ms
        if len(page.rows):
            return True, now_ms
    return False, now_ms


async def held(client: Timeline, topic: str, holder: str, payload: bool) -> AsyncIterator[PageRows]:
    """What a holder has. Due is what was asked for, not the end of the lease."""
    async for page in client.scan_pages(topic, holder=holder, payload=payload):
        if len(page.rows):
            yield PageRows(page.rows, page.now_ms)


def sound(rows: Rows) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which rows have the payload that was put."""
    assert rows.payloads is not None
    whole: np.ndarray[tuple[int], np.dtype[np.bool_]] = payload_sums(rows.payloads, rows.headers) == rows.payload_sum
    return whole


async def bury(client: Timeline, topic: str, holder: str, rows: Rows) -> None:
    """Makes dead letters of what arrived damaged."""
    async with client.holding(topic, holder) as holding:
        await holding.settle(Operation.BURY, rows, reason=PAYLOAD_DAMAGED)


async def settle_all(client: Timeline, topic: str, holder: str, operation: Operation, time_ms: int = 0) -> int:
    """ACK or EXTEND all that a holder has; how many messages it had. Raises Unavailable when the brokers did not do all
    of it: the same again goes on."""
    parts: list[Rows] = [page.rows async for page in held(client, topic, holder, payload=False)]
    rows = Rows.concat(parts)
    if not len(rows):
        return 0
    async with client.holding(topic, holder) as holding:
        counts = await holding.settle(operation, rows, time_ms)
    undone = sum(many for status, many in counts.items() if status in ("THROTTLED", "UNAVAILABLE", "UNKNOWN"))
    if undone:
        raise Unavailable(f"{undone} of {len(rows)} messages of {holder} could not be settled")
    return len(rows)
