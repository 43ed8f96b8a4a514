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
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from timeline.child import Child
from timeline.clock import Clock
from timeline.driver.client import Timeline
from timeline.pipeline.audit import Audit, audit
from timeline.pipeline.audit_page import audit_page
from timeline.pipeline.backup import backup
from timeline.pipeline.forecast import forecast, forecast_page
from timeline.pipeline.load import Asked, load
from timeline.pipeline.pending import pending_in
from timeline.pipeline.replay import Departures, Replayed, ReplayFailed, change, deliver
from timeline.pipeline.restore import Compared, restore, verify

TOPIC = "departures"
LEAD_MS, WINDOW_MS = 90_000, 60_000
MAPPING = {"id": "flight_id", "payload": "to_json(struct(*))", "tag": "carrier"}
Said = Callable[[str, int, int], None]


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
    compared: Compared = field(default_factory=Compared)
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
    spark: SparkSession, data: str, folder: Path, said: Said, lead_ms: int = LEAD_MS, window_ms: int = WINDOW_MS
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
            due = {"due": Departures.due_sql(data, start_ms, window_ms)}
            asked = Asked(one, TOPIC, past="now")
            loaded = await asyncio.to_thread(load, spark, spark.read.parquet(data), asked, MAPPING | due, said)
            account.loaded = loaded.put
        async with timed("move and cancel"):
            await change(one, TOPIC, departures, account.replayed, said)
        ahead = await asyncio.to_thread(forecast, spark, one, TOPIC, lead_ms + window_ms, 1_000)
        (folder / "forecast.html").write_text(forecast_page(ahead), encoding="utf-8")
        await _house(spark, one, folder, account, timed, said)
        async with Timeline(one, "60s") as tl:
            await tl.resume_topic(TOPIC)
        async with timed("deliver"):
            await deliver(one, TOPIC, departures, account.replayed, said)
    # The journal is whole once its broker has ended; what is left on the timeline another one tells.
    async with _broker(folder, "three", "--store", store) as three, timed("audit"):
        there = pending_in(spark, three, [TOPIC], "")
        assert there is not None
        account.left = await asyncio.to_thread(there.rows.count)
        account.audit = await asyncio.to_thread(audit, spark, journal, [TOPIC], there, (), said)
    (folder / "audit.html").write_text(audit_page(account.audit, journal), encoding="utf-8")
    return account


async def _house(spark: SparkSession, one: str, folder: Path, account: Account, timed: Any, said: Said) -> None:
    """Backs up, restores into another store, and compares."""
    place = f"file://{folder}/backup"
    async with timed("back up"):
        manifest = await asyncio.to_thread(backup, spark, one, TOPIC, place, 4, said)
        account.backed_up = manifest.messages
    async with _broker(folder, "two", "--store", "memory://") as two:
        async with timed("restore"):
            await asyncio.to_thread(restore, spark, two, place, "", "now", "skip", said)
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
