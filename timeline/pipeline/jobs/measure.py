"""The speed of rows in and out, compared with the same rows written to Parquet, and the time of each process.

    timeline pipeline measure --rows 1000000 --parallel 1 --parallel 2 --parallel 4

Table, Spark, brokers and stores share one machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from timeline.bench.processes import TICKS_PER_S, CannotMeasure, Measured, broker, resident_bytes
from timeline.clock import Clock
from timeline.driver.client import Timeline
from timeline.pipeline.jobs.backup import backup, restore
from timeline.pipeline.jobs.load import LoadRequest, load
from timeline.pipeline.session import processes, read_topic
from timeline.pipeline.source.columns import read_schema

TOPIC = "measured"
ROWS_A_PARTITION = 250_000
AHEAD_MS, WINDOW_MS = 3_600_000, 30 * 86_400_000
EVERY_S = 0.5
POINTS = 10
MIB = 1 << 20
T = TypeVar("T")
NO_CONTENT = [name for name in read_schema(payload=True).names if name not in ("payload", "headers")]


@dataclass
class MeasuredStep:
    """One step: rows per second, and the processor time of Spark's engine, its Python workers and the broker, in
    microseconds per row. `engine_mib`, `driver_mib`: memory of the engine and of this process, at ten points."""

    seconds: float = 0.0
    rows_per_s: float = 0.0
    engine_us: float = 0.0
    workers_us: float = 0.0
    brokers_us: float = 0.0
    engine_mib: list[int] = field(default_factory=list)
    driver_mib: list[int] = field(default_factory=list)
    workers_mib: int = 0
    """The most memory of one Python worker."""


@dataclass
class PipelineMeasurement:
    """The figures of all steps. `looked_s`: of the load, the time before its first row was put."""

    rows: int
    parallel: int
    store: str
    steps: dict[str, MeasuredStep] = field(default_factory=dict)
    looked_s: float = 0.0
    broker_mib: int = 0
    wrong: list[str] = field(default_factory=list)


async def measure(
    spark: SparkSession, folder: Path, store: str, into: str, rows: int, payload_bytes: int, parallel: int
) -> PipelineMeasurement:
    """Write `rows` of `payload_bytes` as Parquet, load them into a broker on `store`, scan them, back them up, and
    restore them into one on `into`. Raise CannotMeasure, and the errors of the jobs."""
    figures = PipelineMeasurement(rows, parallel, store.partition(":")[0])
    table, place = f"file://{folder}/table", f"file://{folder}/backup"
    made = _made(spark, rows, payload_bytes, Clock().now_ms() + AHEAD_MS)
    made.write.parquet(table)
    async with broker(folder, store) as (one, address):
        async with Timeline(address, "60s") as tl:
            await tl.create_topic(TOPIC)
        source = spark.read.parquet(table)
        await _step(figures, "parquet", one, lambda: source.write.parquet(f"file://{folder}/again"))
        looked = _Looked()
        asked = LoadRequest(address, TOPIC)
        loaded = await _step(figures, "load", one, lambda: load(spark, source, asked, progress=looked))
        if loaded.put != rows:
            figures.wrong.append(f"{loaded.put:,} rows were put")
        figures.looked_s = round(looked.seconds, 2)
        figures.broker_mib = one.resident_bytes() // MIB
        for name, columns in (("scan", NO_CONTENT), ("scan with payload", read_schema(payload=True).names)):
            frame = _scanned(spark, address, columns, max(4, 2 * parallel))
            await _step(figures, name, one, lambda frame=frame: _counted(frame, figures))  # type: ignore[misc]
        await _step(figures, "back up", one, lambda: backup(spark, address, TOPIC, place))
    async with broker(folder, into) as (two, address):
        await _step(figures, "restore", two, lambda: restore(spark, address, place))
    return figures


def _made(spark: SparkSession, rows: int, payload_bytes: int, first_ms: int) -> DataFrame:
    """Return rows with random ids, due at random times within thirty days."""
    return spark.range(0, rows, 1, max(1, -(-rows // ROWS_A_PARTITION))).selectExpr(
        "substr(md5(string(id)), 1, 16) AS id",
        f"timestamp_millis({first_ms}L + pmod(xxhash64(id), {WINDOW_MS}L)) AS due",
        f"rpad(concat(id, ' '), {payload_bytes}, md5(concat('x', id))) AS payload",
    )


def _scanned(spark: SparkSession, address: str, columns: list[str], partitions: int) -> DataFrame:
    schema = StructType([one for one in read_schema(payload=True).fields if one.name in columns])
    return read_topic(spark, address, TOPIC, schema, state="", partitions=str(partitions))


def _counted(frame: DataFrame, figures: PipelineMeasurement) -> None:
    """Read all columns of all rows, and drop them."""
    names = [one for one in frame.columns if one != "headers"]
    found = frame.selectExpr(f"xxhash64({', '.join(f'`{name}`' for name in names)}) AS hash").agg({"hash": "count"})
    row = found.head()
    if row is None or row[0] != figures.rows:
        figures.wrong.append(f"{row[0] if row else 0:,} rows were scanned")


class _Looked:
    """A load's progress: how long it checks rows before it puts the first."""

    def __init__(self) -> None:
        self._clock = Clock()
        self._began_ms = self._clock.monotonic_ms()
        self.seconds = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        if total and not self.seconds:
            self.seconds = (self._clock.monotonic_ms() - self._began_ms) / 1000


async def _step(figures: PipelineMeasurement, name: str, broker: Measured, work: Callable[[], T]) -> T:
    """Do `work` in another thread, and measure it."""
    clock, step = Clock(), figures.steps.setdefault(name, MeasuredStep())
    before, served = _Used.now(broker.pid), broker.cpu_s()
    began_ms = clock.monotonic_ms()
    async with _sampled(step, broker.pid):
        done = await asyncio.to_thread(work)
    step.seconds = round((clock.monotonic_ms() - began_ms) / 1000, 2)
    after = _Used.now(broker.pid)
    step.rows_per_s = round(figures.rows / max(step.seconds, 0.001))
    a_row = 1e6 / figures.rows
    step.engine_us = round((after.engine_s - before.engine_s) * a_row, 2)
    step.workers_us = round((after.workers_s - before.workers_s) * a_row, 2)
    step.brokers_us = round((broker.cpu_s() - served) * a_row, 2)
    return done


@asynccontextmanager
async def _sampled(step: MeasuredStep, broker: int) -> AsyncIterator[None]:
    """Sample the memory meanwhile."""
    seen: list[tuple[int, int]] = []

    async def look() -> None:
        while True:
            used = _Used.now(broker)
            seen.append((used.engine_bytes // MIB, used.driver_bytes // MIB))
            step.workers_mib = max(step.workers_mib, used.worker_bytes // MIB)
            await asyncio.sleep(EVERY_S)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        places = sorted({round(at * (len(seen) - 1) / (POINTS - 1)) for at in range(POINTS)}) if seen else []
        step.engine_mib, step.driver_mib = [seen[at][0] for at in places], [seen[at][1] for at in places]


@dataclass
class _Used:
    """Time and memory used by this process and by Spark's processes below it."""

    engine_s: float = 0.0
    workers_s: float = 0.0
    engine_bytes: int = 0
    driver_bytes: int = 0
    worker_bytes: int = 0

    @classmethod
    def now(cls, broker: int) -> _Used:
        """Look at all processes that this one has started, except the process `broker`."""
        used = cls(driver_bytes=resident_bytes(os.getpid()))
        children: dict[int, list[tuple[int, str]]] = {}
        for pid, (parent, name) in processes().items():
            children.setdefault(parent, []).append((pid, name))
        below = [one for one in children.get(os.getpid(), []) if one[0] != broker]
        while below:
            pid, name = below.pop()
            below += children.get(pid, [])
            try:
                own_s, ended_s = _spent_s(pid)
                used.workers_s += ended_s
                if name == "java":
                    used.engine_s += own_s
                    used.engine_bytes += resident_bytes(pid)
                elif name.startswith("python"):
                    used.workers_s += own_s
                    used.worker_bytes = max(used.worker_bytes, resident_bytes(pid))
            except (FileNotFoundError, ProcessLookupError, CannotMeasure):
                continue  # it has just ended
        return used


def _spent_s(pid: int) -> tuple[float, float]:
    """Return the processor time of a process, and of its ended children: workers come and go."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    own, ended = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
    return own / TICKS_PER_S, ended / TICKS_PER_S
