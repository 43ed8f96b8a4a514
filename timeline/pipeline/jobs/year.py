"""A year of departures through all of it, every one accounted for: loaded, moved and cancelled, backed up, restored
into another store and compared, replayed through a broker and its consumers, journalled, audited.

    make pipeline

The year lasts a minute here; its dues keep their proportions. What comes out of Spark's audit must be what the data
say.
"""

from __future__ import annotations

import asyncio
import json
import sys
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

from timeline.child import Child
from timeline.clock import Clock
from timeline.columns import Int64
from timeline.driver.client import Timeline
from timeline.driver.producer import Producer
from timeline.errors import TimelineError
from timeline.model import Status
from timeline.pipeline.jobs.audit import Audit, audit, audit_page
from timeline.pipeline.jobs.backup import backup
from timeline.pipeline.jobs.forecast import forecast, forecast_page
from timeline.pipeline.jobs.load import LoadRequest, load
from timeline.pipeline.jobs.restore import BackupComparison, restore, verify
from timeline.pipeline.jobs.stories import pending_in
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

    due_sql: str
    """The scale of the due times as an expression over the file's columns."""

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
        due_sql = f"timestamp_millis({start_ms}L + (sched_dep_ms - {first}L) * {window_ms}L div {span}L)"
        return cls(ids, scaled(scheduled), scaled(actual), cancelled, late, due_sql)

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


async def change(addresses: str, topic: str, year: Departures, done: Replayed, progress: Progress) -> None:
    """Moves what is late and cancels what is cancelled."""
    async with Timeline(addresses, "60s") as tl, tl.producer(topic) as p:
        late = np.flatnonzero(year.late)
        for start in range(0, len(late), CALL):
            at = late[start : start + CALL]
            done.moved += await _moved(p, [year.ids[one] for one in at.tolist()], year.leaves_ms[at])
            progress("moved", done.moved, len(late))
        gone = [year.ids[one] for one in np.flatnonzero(year.cancelled).tolist()]
        for start in range(0, len(gone), CALL):
            receipts = await p.cancel_many(gone[start : start + CALL])
            done.cancelled += receipts.counts.get(Status.OK, 0)
            progress("cancelled", done.cancelled, len(gone))


async def _moved(p: Producer, ids: list[bytes], at: Int64) -> int:
    receipts = await p.move_many(ids, at=at)
    return receipts.raise_failed().counts.get(Status.OK, 0)


async def deliver(addresses: str, topic: str, year: Departures, done: Replayed, progress: Progress) -> None:
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


class Serving(Child):
    """A broker of ours."""

    trouble = ReplayFailed
    listen = ""


@dataclass
class Account:
    """What became of the year's departures, and how long each step took in seconds."""

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
        """What was counted, what it is, what it must be."""
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
    """Runs the year of `data` in `folder`, where brokers, journal, backup and pages are left: the first departure is
    due `lead_ms` from now, the last one `window_ms` later. Raises ReplayFailed when it does not come to its end."""
    clock, account = Clock(), Account()
    start_ms = clock.now_ms() + lead_ms
    departures = Departures.read(data, start_ms, window_ms)
    account.departures, account.late = len(departures), int(departures.late.sum())
    account.cancelled = int(departures.cancelled.sum())
    journal = f"file://{folder}/journal"
    store = f"sqlite:///{folder}/departures.db"

    @asynccontextmanager
    async def timed(step: str) -> AsyncIterator[None]:
        began_ms = clock.monotonic_ms()
        yield
        account.seconds[step] = (clock.monotonic_ms() - began_ms) / 1000

    async with _broker(folder, "one", "--store", store, "--journal", f"{journal}?roll=5s") as one:
        # Paused until all is moved and cancelled: what is due by then goes out at once, and the audit says why.
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
        await _house(spark, one, folder, account, timed, progress)
        async with Timeline(one, "60s") as tl:
            await tl.resume_topic(TOPIC)
        async with timed("deliver"):
            await deliver(one, TOPIC, departures, account.replayed, progress)
    # The journal is whole once its broker has ended; what is left on the timeline another one tells.
    async with _broker(folder, "three", "--store", store) as three, timed("audit"):
        there = pending_in(spark, three, [TOPIC], "")
        assert there is not None
        account.left = await asyncio.to_thread(there.rows.count)
        account.audit = await asyncio.to_thread(audit, spark, journal, [TOPIC], there, (), progress)
    (folder / "audit.html").write_text(audit_page(account.audit, journal), encoding="utf-8")
    return account


async def _house(spark: SparkSession, one: str, folder: Path, account: Account, timed: Any, progress: Progress) -> None:
    """Backs up, restores into another store, and compares."""
    place = f"file://{folder}/backup"
    async with timed("back up"):
        manifest = await asyncio.to_thread(backup, spark, one, TOPIC, place, 4, progress)
        account.backed_up = manifest.messages
    async with _broker(folder, "two", "--store", "memory://") as two:
        async with timed("restore"):
            await asyncio.to_thread(restore, spark, two, place, "", "now", "skip", progress)
        async with timed("compare"):
            account.compared = await asyncio.to_thread(verify, spark, two, place)


@asynccontextmanager
async def _broker(folder: Path, name: str, *options: str) -> AsyncIterator[str]:
    command = [sys.executable, "-m", "timeline", "serve", "--listen", "127.0.0.1:0", "--metrics", "off", "--json"]
    broker = await Serving.start(name, folder, *command, "--name", name, *options)
    try:
        yield json.loads(await broker.line())["listen"]
    finally:
        await broker.end(60.0)
