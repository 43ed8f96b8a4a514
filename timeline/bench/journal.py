"""The cycle with the event journal on, beside one without: what the journal costs, and what it holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq

from timeline.bench.cycle import Cycle, run_cycle
from timeline.bench.figures import Report

SCENARIO = "cycle journalled"


async def run_journalled(asked: Cycle, folder: Path) -> Report:
    """The same cycle by a broker that keeps a journal; figures say how many events are in it and how many it dropped.
    Raises CannotMeasure."""
    place = folder / "journal"
    report = await run_cycle(replace(asked, journal=f"file://{place}"), folder)
    report.scenario = SCENARIO
    kinds: Counter[str] = Counter()
    for path in place.rglob("*.parquet"):
        table = pq.ParquetFile(path).read(columns=["kind", "count"])
        for kind, count in zip(table.column("kind").to_pylist(), table.column("count").to_pylist(), strict=True):
            kinds[kind] += count or 1
    dropped = kinds.pop("dropped", 0)
    report.figures |= {"journal_events": sum(kinds.values()), "journal_dropped": dropped}
    return report
