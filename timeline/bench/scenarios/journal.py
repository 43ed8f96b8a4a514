"""The cycle with the event journal on, beside the same without: what the journal costs, and what it holds.

One pair says little where rates swing by a tenth: the cost is the median over several pairs, each in turn the other way
round."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median

import pyarrow.parquet as pq

from timeline.bench.figures import BenchReport
from timeline.bench.scenarios.cycle import CycleScenario

SCENARIO = "cycle journalled"
PAIRS = 5


async def run_journalled(asked: CycleScenario, folder: Path) -> BenchReport:
    """The same cycle by a broker that keeps a journal, in `PAIRS` pairs with one that keeps none; figures are of the
    last, with the events in its journal, how many it dropped (of all), and what the journal costs of the rate and of
    the broker's processor time, in percent. Raises CannotMeasure."""
    rates: list[float] = []
    times: list[float] = []
    dropped, wrong = 0, []
    for number in range(PAIRS):
        place = folder / f"journal-{number}"
        with_one = replace(asked, journal=f"file://{place}")
        order = (asked, with_one) if number % 2 else (with_one, asked)
        found = {one.journal: await one.run(folder) for one in order}
        plain, report = found[""], found[with_one.journal]
        rates.append(report.figures["rate_per_s"] / plain.figures["rate_per_s"])
        times.append(report.figures["broker_cpu_us_per_message"] / plain.figures["broker_cpu_us_per_message"])
        kinds = _events(place)
        dropped += kinds.pop("dropped", 0)
        wrong += plain.wrong + report.wrong
    report.scenario, report.wrong = SCENARIO, wrong
    report.figures |= {
        "journal_events": sum(kinds.values()),
        "journal_dropped": dropped,
        "journal_cost_percent": 100 * (1 - median(rates)),
        "journal_broker_cpu_percent": 100 * (median(times) - 1),
    }
    return report


def _events(place: Path) -> Counter[str]:
    """How many events of each kind are in a journal."""
    kinds: Counter[str] = Counter()
    for path in place.rglob("*.parquet"):
        table = pq.ParquetFile(path).read(columns=["kind", "count"])
        for kind, count in zip(table.column("kind").to_pylist(), table.column("count").to_pylist(), strict=True):
            kinds[kind] += count or 1
    return kinds
