"""A year of departures through the whole pipeline, with every departure accounted for.

The year is loaded, moved and cancelled. It is backed up, restored into another store and compared. Then it is replayed
through a broker and its consumers, journalled, and audited. `make pipeline` does all of it.

Here the year lasts a minute. Its due times keep their proportions. Spark's audit must find what the data say.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from timeline.bench.processes import broker
from timeline.clock import Clock
from timeline.columns import Int64
from timeline.driver.client import Timeline
from timeline.errors import TimelineError
from timeline.model import Status
from timeline.pipeline.jobs.audit import Audit, audit, audit_page, pending_in
from timeline.pipeline.jobs.backup import BackupComparison, backup, restore, verify
from timeline.pipeline.jobs.forecast import forecast, forecast_page
from timeline.pipeline.jobs.load import LoadRequest, load
from timeline.pipeline.session import Progress

MINUTE_MS = 60_000
CALL = 10_000
CREDIT = 20_000
CONSUMERS = 2
PATIENCE_S = 1_200.0

TOPIC = "departures"
LEAD_MS, WINDOW_MS = 90_000, 60_000
MAPPING = {"id": "flight_id", "payload": "to_json(struct(*))", "tag": "carrier"}


class ReplayFailed(TimelineError):
    """The replay did not end as the data say."""

    code = "FAILED"


@dataclass
class Departures:
    """The departures as columns, with times scaled so that the year lasts `window_ms` from `start_ms`."""

    ids: list[bytes]
    due_ms: Int64
    leaves_ms: Int64
    cancelled: np.ndarray[Any, np.dtype[np.bool_]]
    late: np.ndarray[Any, np.dtype[np.bool_]]
    due_sql: str
    """The scaled due time as an expression over the file's columns."""

    @classmethod
    def read(cls, path: str, start_ms: int, window_ms: int) -> Departures:
        """Read the year's file."""
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
        due_sql = f"timestamp_millis({start_ms}L + (sched_dep_ms - {first}L) * {window_ms}L div {span}L)"
        return cls(ids, scaled(scheduled), scaled(actual), cancelled, late, due_sql)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class Replayed:
    """The counts of producers and consumers."""

    moved: int = 0
    cancelled: int = 0
    delivered: int = 0
    again: int = 0
    early: int = 0
    wrong: list[str] = field(default_factory=list)


async def change(addresses: str, topic: str, year: Departures, done: Replayed, progress: Progress) -> None:
    """Move late departures, and cancel cancelled ones."""
    async with Timeline(addresses, "60s") as tl, tl.producer(topic) as p:
        late = np.flatnonzero(year.late)
        for start in range(0, len(late), CALL):
            at = late[start : start + CALL]
            moved = await p.move_many([year.ids[one] for one in at.tolist()], at=year.leaves_ms[at])
            done.moved += moved.raise_failed().counts.get(Status.OK, 0)
            progress("moved", done.moved, len(late))
        gone = [year.ids[one] for one in np.flatnonzero(year.cancelled).tolist()]
        for start in range(0, len(gone), CALL):
            receipts = await p.cancel_many(gone[start : start + CALL])
            done.cancelled += receipts.counts.get(Status.OK, 0)
            progress("cancelled", done.cancelled, len(gone))


async def deliver(addresses: str, topic: str, year: Departures, done: Replayed, progress: Progress) -> None:
    """Consume and acknowledge all departures that are not cancelled. Raise ReplayFailed if that takes too long."""
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
                    progress("delivered", done.delivered, len(wanted))
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


@dataclass
class Account:
    """The fate of the departures, and the seconds of each step."""

    departures: int = 0
    late: int = 0
    cancelled: int = 0
    loaded: int = 0
    backed_up: int = 0
    compared: BackupComparison = field(default_factory=BackupComparison)
    replayed: Replayed = field(default_factory=Replayed)
    audit: Audit = field(default_factory=Audit)
    left: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def sheet(self) -> list[tuple[str, int, int]]:
        """Each figure: its name, its count, and the count that it must have."""
        told, flown = self.audit.messages, self.departures - self.cancelled
        there = self.compared
        astray = there.missing + there.extra + there.differing
        return [
            ("loaded", self.loaded, self.departures),
            ("put, by the audit", told.get("put", 0), self.departures),
            ("moved, by the audit", told.get("moved", 0), self.late),
            ("cancelled, by the audit", told.get("cancelled", 0), self.cancelled),
            ("delivered, by the audit", told.get("delivered", 0), flown),
            ("acknowledged, by the audit", told.get("acked", 0), flown),
            ("delivered, by the consumers", self.replayed.delivered, flown),
            ("delivered once more", self.replayed.again, 0),
            ("early", self.replayed.early, 0),
            ("with another payload or time", len(self.replayed.wrong), 0),
            ("not settled", self.audit.open, 0),
            ("left on the timeline", self.left, 0),
            ("in the backup", self.backed_up, flown),
            ("the same after the restore", self.compared.same, flown),
            ("missing, too much or differing there", astray, 0),
            ("promises broken", sum(self.audit.broken.values()), 0),
            ("intervals missing in the journal", len(self.audit.gaps), 0),
        ]  # fmt: skip

    @property
    def balanced(self) -> bool:
        """Whether every departure is accounted for."""
        return all(found == wanted for _, found, wanted in self.sheet)


async def year(
    spark: SparkSession, data: str, folder: Path, progress: Progress, lead_ms: int = LEAD_MS, window_ms: int = WINDOW_MS
) -> Account:
    """Run the year of `data` in `folder`, which keeps journal, backup and pages. The first departure is due in
    `lead_ms`, the last one `window_ms` later. Raise ReplayFailed if it takes too long."""
    clock, account = Clock(), Account()
    start_ms = clock.now_ms() + lead_ms
    departures = Departures.read(data, start_ms, window_ms)
    account.departures, account.late = len(departures), int(departures.late.sum())
    account.cancelled = int(departures.cancelled.sum())
    journal = f"file://{folder}/journal"
    store, place = f"sqlite:///{folder}/departures.db", f"file://{folder}/backup"

    @asynccontextmanager
    async def timed(step: str) -> AsyncIterator[None]:
        began_ms = clock.monotonic_ms()
        yield
        account.seconds[step] = (clock.monotonic_ms() - began_ms) / 1000

    async with _broker(folder, store, "--name", "one", "--journal", f"{journal}?roll=5s") as one:
        # Paused until all is moved and cancelled. Then overdue messages go out at once, and the audit gives the cause.
        async with Timeline(one, "60s") as tl:
            await tl.create_topic(TOPIC, remember="1d", paused=True)
        async with timed("load"):
            asked = LoadRequest(one, TOPIC, past="now")
            loaded = await asyncio.to_thread(
                load, spark, spark.read.parquet(data), asked, MAPPING | {"due": departures.due_sql}, progress
            )
            account.loaded = loaded.put
        async with timed("move and cancel"):
            await change(one, TOPIC, departures, account.replayed, progress)
        ahead = await asyncio.to_thread(forecast, spark, one, TOPIC, lead_ms + window_ms, 1_000)
        (folder / "forecast.html").write_text(forecast_page(ahead), encoding="utf-8")
        async with timed("back up"):
            manifest = await asyncio.to_thread(backup, spark, one, TOPIC, place, 4, progress)
            account.backed_up = manifest.messages
        async with _broker(folder, "memory://", "--name", "two") as two:
            async with timed("restore"):
                await asyncio.to_thread(restore, spark, two, place, "", "now", "skip", progress)
            async with timed("compare"):
                account.compared = await asyncio.to_thread(verify, spark, two, place)
        async with Timeline(one, "60s") as tl:
            await tl.resume_topic(TOPIC)
        async with timed("deliver"):
            await deliver(one, TOPIC, departures, account.replayed, progress)
    # The journal is whole once its broker has ended. Another broker reads the rest of the timeline.
    async with _broker(folder, store, "--name", "three") as three, timed("audit"):
        there = pending_in(spark, three, [TOPIC], "")
        assert there is not None
        account.left = await asyncio.to_thread(there.rows.count)
        account.audit = await asyncio.to_thread(audit, spark, journal, [TOPIC], there, (), progress)
    (folder / "audit.html").write_text(audit_page(account.audit, journal), encoding="utf-8")
    return account


@asynccontextmanager
async def _broker(folder: Path, store: str, *options: str) -> AsyncIterator[str]:
    async with broker(folder, store, *options) as (child, address):
        yield address
        await child.end(60.0)  # time to write its journal
