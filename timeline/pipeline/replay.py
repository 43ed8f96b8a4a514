"""The year's departures through brokers and consumers: what is late is moved, what is cancelled is cancelled, the rest
is delivered and acknowledged, every id and payload held against the data."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from timeline.columns import Int64
from timeline.driver.client import Timeline
from timeline.driver.producer import Producer
from timeline.errors import TimelineError
from timeline.model import Status

MINUTE_MS = 60_000
CALL = 10_000
CREDIT = 20_000
CONSUMERS = 2
PATIENCE_S = 1_200.0
Said = Callable[[str, int, int], None]


class ReplayFailed(TimelineError):
    """The replay did not come to what the data say."""

    code = "FAILED"


@dataclass
class Departures:
    """The departures as columns, their times scaled so that the year lasts `window_ms` from `start_ms`."""

    ids: list[bytes]
    due_ms: Int64
    leaves_ms: Int64
    cancelled: np.ndarray[Any, np.dtype[np.bool_]]
    late: np.ndarray[Any, np.dtype[np.bool_]]

    @classmethod
    def read(cls, path: str, start_ms: int, window_ms: int) -> Departures:
        """Reads the year's file."""
        table = pq.read_table(path, columns=["flight_id", "sched_dep_ms", "dep_delay_min"])
        scheduled = table.column("sched_dep_ms").to_numpy()
        delay = pc.fill_null(table.column("dep_delay_min"), float("nan")).to_numpy()
        cancelled = np.isnan(delay)
        late = ~cancelled & (delay > 0)
        actual = scheduled + np.where(late, np.nan_to_num(delay) * MINUTE_MS, 0).astype(np.int64)
        first, span = int(scheduled.min()), int(actual.max() - scheduled.min())

        def scaled(times: Int64) -> Int64:
            return start_ms + (times - first) * window_ms // span

        ids = [id.encode() for id in table.column("flight_id").to_pylist()]
        return cls(ids, scaled(scheduled), scaled(actual), cancelled, late)

    @staticmethod
    def due_sql(path: str, start_ms: int, window_ms: int) -> str:
        """The same scale as an expression over the file's columns."""
        table = pq.read_table(path, columns=["sched_dep_ms", "dep_delay_min"])
        scheduled = table.column("sched_dep_ms").to_numpy()
        delay = pc.fill_null(table.column("dep_delay_min"), 0.0).to_numpy()
        actual = scheduled + (np.maximum(delay, 0) * MINUTE_MS).astype(np.int64)
        first, span = int(scheduled.min()), int(actual.max() - scheduled.min())
        return f"timestamp_millis({start_ms}L + (sched_dep_ms - {first}L) * {window_ms}L div {span}L)"

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class Replayed:
    """What the consumers saw."""

    moved: int = 0
    cancelled: int = 0
    delivered: int = 0
    again: int = 0
    early: int = 0
    wrong: list[str] = field(default_factory=list)


async def change(addresses: str, topic: str, year: Departures, done: Replayed, said: Said) -> None:
    """Moves what is late and cancels what is cancelled."""
    async with Timeline(addresses, "60s") as tl, tl.producer(topic) as p:
        late = np.flatnonzero(year.late)
        for start in range(0, len(late), CALL):
            at = late[start : start + CALL]
            done.moved += await _moved(p, [year.ids[one] for one in at.tolist()], year.leaves_ms[at])
            said("moved", done.moved, len(late))
        gone = [year.ids[one] for one in np.flatnonzero(year.cancelled).tolist()]
        for start in range(0, len(gone), CALL):
            receipts = await p.cancel_many(gone[start : start + CALL])
            done.cancelled += receipts.counts.get(Status.OK, 0)
            said("cancelled", done.cancelled, len(gone))


async def _moved(p: Producer, ids: list[bytes], at: Int64) -> int:
    receipts = await p.move_many(ids, at=at)
    return receipts.raise_failed().counts.get(Status.OK, 0)


async def deliver(addresses: str, topic: str, year: Departures, done: Replayed, said: Said) -> None:
    """Takes and acknowledges all that is not cancelled. Raises ReplayFailed when that does not come to an end."""
    wanted = {id for id, cancelled in zip(year.ids, year.cancelled.tolist(), strict=True) if not cancelled}
    due = dict(zip(year.ids, np.where(year.late, year.leaves_ms, year.due_ms).tolist(), strict=True))
    seen: Counter[bytes] = Counter()
    over = asyncio.Event()

    async def consume(number: int) -> None:
        async with Timeline(addresses, "60s") as tl, tl.consumer(topic, id=f"gate-{number}", credit=CREDIT) as c:
            closing = asyncio.ensure_future(_closed(over, c.aclose))
            try:
                async for batch in c.batches():
                    ids = batch.ids.tolist()
                    seen.update(ids)
                    for id, payload, scheduled in zip(ids, batch.payloads, batch.scheduled_ms.tolist(), strict=True):
                        if id not in wanted or id not in payload or scheduled != due[id]:
                            done.wrong.append(id.decode())
                    done.early += int((batch.due_ms > batch.pushed_ms).sum())
                    (await batch.ack()).raise_failed()
                    done.delivered = len(seen)
                    said("delivered", done.delivered, len(wanted))
                    if done.delivered >= len(wanted):
                        over.set()
            finally:
                closing.cancel()

    try:
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as consumers:
            for number in range(CONSUMERS):
                consumers.create_task(consume(number))
    except TimeoutError:
        missing = len(wanted) - len(seen)
        raise ReplayFailed(f"{missing:,} departures were not delivered within {PATIENCE_S:g} s") from None
    done.again = sum(seen.values()) - len(seen)


async def _closed(over: asyncio.Event, close: Callable[[], Any]) -> None:
    await over.wait()
    await close()
