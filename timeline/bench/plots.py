"""Pictures for the documents: lateness by messages pending, the cycle's rate by batch size, and cost by numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from timeline.bench.figures import machine
from timeline.bench.load import Told
from timeline.bench.processes import CannotMeasure
from timeline.bench.scenario import Scenario
from timeline.bench.scenarios.lateness import CONSUMERS, PENDING, TOPICS, LatenessScenario, ScaleScenario
from timeline.bench.scenarios.throughput import CycleScenario
from timeline.bench.suite import SQLITE, fresh
from timeline.wording import install_command

WAITING = (0, 10_000, 100_000, 1_000_000, 10_000_000)
BATCHES = (10, 30, 100, 300, 1_000, 2_000, 5_000, 10_000)
BESIDE = {PENDING: WAITING[1:], TOPICS: (1, 10, 100, 1_000), CONSUMERS: (1, 10, 100, 1_000)}
"""The things that there may be many of, and their numbers."""
STORES = {"memory": "memory://", "SQLite": SQLITE}
SHOWN = {"lateness_p50_ms": "p50", "lateness_p99_ms": "p99", "lateness_p99_9_ms": "p99.9"}


@dataclass(slots=True)
class Curves:
    """One picture: y by x, a curve per name. `none`: where an x of 0 is drawn on the logarithmic axis."""

    title: str
    x_label: str
    y_label: str
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    none: float = 1.0

    def add(self, name: str, x: float, y: float) -> None:
        self.curves.setdefault(name, []).append((x, y))

    async def measure(
        self, asked: Scenario, x: float, shown: Mapping[str, str], folder: Path, told: Told | None = None
    ) -> None:
        """Run a scenario on a fresh store, and add its figures (figure → curve). Raises CannotMeasure."""
        report = await replace(asked, store=fresh(asked.store, folder, "plot")).run(folder, told)
        if report.wrong:
            raise CannotMeasure(f"a run went wrong, so nothing is drawn: {report.wrong[0]}")
        for figure, name in shown.items():
            self.add(name, x, report.figures[figure])
        for file in folder.glob("plot.db*"):
            file.unlink()


async def lateness_by_pending(
    folder: Path, seconds: float, pending: Sequence[int] = WAITING, told: Told | None = None
) -> Curves:
    """Measure lateness on SQLite at 1,000 messages per second while more and more others wait."""
    drawn = Curves("Lateness at 1,000/s, SQLite", "messages pending", "ms late", none=1_000.0)
    for count in pending:
        asked = LatenessScenario(store=SQLITE, seconds=seconds, runs=1, pending=count)
        await drawn.measure(asked, count, SHOWN, folder, told)
    return drawn


async def rate_by_batch(folder: Path, messages: int, batches: Sequence[int] = BATCHES) -> Curves:
    """Measure the cycle's rate in both stores by the number of messages in a put."""
    drawn = Curves("Cycle", "messages per batch", "messages per second")
    for name, store in STORES.items():
        for batch in batches:
            # Messages in small batches take longer each. The same time for each point is enough.
            share = min(1.0, batch / 1_000) * (1.0 if store != SQLITE else 0.3)
            asked = CycleScenario(store=store, batch=batch, messages=max(10 * batch, int(messages * share)))
            await drawn.measure(asked, batch, {"rate_per_s": name}, folder)
    return drawn


async def cost_by_number(
    folder: Path, seconds: float, beside: Mapping[str, Sequence[int]] = BESIDE, told: Told | None = None
) -> Curves:
    """Measure the broker's processor time per message on SQLite, at 300 per second, by what there is beside."""
    drawn = Curves("A message's cost at 300/s, SQLite", "pending messages, topics, consumers", "µs of the broker")
    for of, numbers in beside.items():
        for number in numbers:
            rest_s = min(5.0, seconds)
            asked = ScaleScenario(of=of, number=number, rate=300.0, seconds=seconds, rest_seconds=rest_s)
            await drawn.measure(asked, number, {"broker_cpu_us_per_message": of}, folder, told)
    return drawn


def drawing_tools() -> tuple[Any, Any]:
    """Return matplotlib and its pyplot. Raises CannotMeasure without them; ask before hours of measuring."""
    try:
        import matplotlib

        matplotlib.use("svg")
        from matplotlib import pyplot
    except ImportError as missing:
        raise CannotMeasure(f"plots need matplotlib: {install_command('plots')}") from missing
    return matplotlib, pyplot


def draw(curves: Curves, into: Path) -> None:
    """Draw the curves as SVG on logarithmic axes, titled with the machine. Raises CannotMeasure without matplotlib."""
    matplotlib, pyplot = drawing_tools()
    # Text as text, and the same picture from the same points.
    matplotlib.rcParams |= {"svg.hashsalt": "timeline", "svg.fonttype": "none"}
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, points in curves.curves.items():
        axes.plot([x or curves.none for x, _ in points], [y for _, y in points], marker="o", label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    # A logarithmic axis has no 0, so 0 gets a place of its own.
    places = sorted({x for points in curves.curves.values() for x, _ in points})
    axes.set_xticks([place or curves.none for place in places], [f"{place:,.0f}" for place in places], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel(curves.x_label)
    axes.set_ylabel(curves.y_label)
    on = machine()
    axes.set_title(f"{curves.title} ({on['cpu']}, {on['cores']} cores)", fontsize=10)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend()
    figure.savefig(into, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
