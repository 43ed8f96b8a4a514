"""Pictures for the documents: lateness against messages pending, the cycle's rate against the size of a batch, and what
a message costs against how much else there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from timeline.bench.figures import machine
from timeline.bench.load import Told
from timeline.bench.processes import CannotMeasure
from timeline.bench.scenarios.cycle import CycleScenario
from timeline.bench.scenarios.lateness import LatenessScenario
from timeline.bench.scenarios.scale import CONSUMERS, PENDING, TOPICS, ScaleScenario
from timeline.bench.suite import SQLITE, fresh

WAITING = (0, 10_000, 100_000, 1_000_000, 10_000_000)
BATCHES = (10, 30, 100, 300, 1_000, 2_000, 5_000, 10_000)
BESIDE = {PENDING: WAITING[1:], TOPICS: (1, 10, 100, 1_000), CONSUMERS: (1, 10, 100, 1_000)}
"""What there may be many of, and how many."""
STORES = {"memory": "memory://", "SQLite": SQLITE}
SHOWN = {"lateness_p50_ms": "p50", "lateness_p99_ms": "p99", "lateness_p99_9_ms": "p99.9"}


@dataclass(slots=True)
class Curves:
    """What one picture shows: y by x, a curve a name. `none` is where an x of 0 is drawn on the logarithmic axis."""

    title: str
    x_label: str
    y_label: str
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    none: float = 1.0

    def add(self, name: str, x: float, y: float) -> None:
        self.curves.setdefault(name, []).append((x, y))


async def lateness_by_pending(
    folder: Path, seconds: float, pending: Sequence[int] = WAITING, told: Told | None = None
) -> Curves:
    """Lateness on SQLite at 1,000 messages a second while ever more others wait."""
    drawn = Curves("Lateness at 1,000/s, SQLite", "messages pending", "ms late", none=1_000.0)
    for count in pending:
        asked = LatenessScenario(
            store=fresh(SQLITE, folder, f"pending-{count}"), seconds=seconds, runs=1, pending=count
        )
        report = await asked.run(folder, told)
        _check(report.wrong)
        for figure, name in SHOWN.items():
            drawn.add(name, count, report.figures[figure])
        _remove(folder, f"pending-{count}")
    return drawn


async def rate_by_batch(folder: Path, messages: int, batches: Sequence[int] = BATCHES) -> Curves:
    """The cycle's rate in both stores by how many messages a put carries."""
    drawn = Curves("Cycle", "messages a batch", "messages a second")
    for name, store in STORES.items():
        for batch in batches:
            # Few in a batch take longer each; the same time for each point is enough.
            share = min(1.0, batch / 1_000) * (1.0 if store != SQLITE else 0.3)
            count = max(10 * batch, int(messages * share))
            asked = CycleScenario(store=fresh(store, folder, f"batch-{batch}"), batch=batch, messages=count)
            report = await asked.run(folder)
            _check(report.wrong)
            drawn.add(name, batch, report.figures["rate_per_s"])
            _remove(folder, f"batch-{batch}")
    return drawn


async def cost_by_number(
    folder: Path, seconds: float, beside: Mapping[str, Sequence[int]] = BESIDE, told: Told | None = None
) -> Curves:
    """The broker's processor time a message on SQLite, single ones at 300 a second, by what there is beside them."""
    drawn = Curves("A message's cost at 300/s, SQLite", "pending messages, topics, consumers", "µs of the broker")
    for of, numbers in beside.items():
        for number in numbers:
            store = fresh(SQLITE, folder, f"{of}-{number}")
            rest_s = min(5.0, seconds)
            asked = ScaleScenario(of=of, number=number, store=store, rate=300.0, seconds=seconds, rest_seconds=rest_s)
            report = await asked.run(folder, told)
            _check(report.wrong)
            drawn.add(of, number, report.figures["broker_cpu_us_per_message"])
            _remove(folder, f"{of}-{number}")
    return drawn


def _check(wrong: list[str]) -> None:
    if wrong:
        raise CannotMeasure(f"there is nothing to draw of a run that went wrong: {wrong[0]}")


def _remove(folder: Path, name: str) -> None:
    """Makes room for the next: the file of a store, where it was one."""
    for file in folder.glob(f"{name}.db*"):
        file.unlink()


def drawing_tools() -> tuple[Any, Any]:
    """What draws: matplotlib, and its pyplot. Raises CannotMeasure when it is not there; asked before hours of
    measuring, not after."""
    try:
        import matplotlib

        matplotlib.use("svg")
        from matplotlib import pyplot
    except ImportError as missing:
        raise CannotMeasure("plots need matplotlib: pip install 'timeline[plots]'") from missing
    return matplotlib, pyplot


def draw(curves: Curves, into: Path) -> None:
    """An SVG of the curves, on logarithmic axes, that says on what machine they were taken. Raises CannotMeasure when
    matplotlib is not there."""
    matplotlib, pyplot = drawing_tools()
    # Text as text, and the same picture from the same points.
    matplotlib.rcParams |= {"svg.hashsalt": "timeline", "svg.fonttype": "none"}
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, points in curves.curves.items():
        axes.plot([x or curves.none for x, _ in points], [y for _, y in points], marker="o", label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _name_none(axes, curves)
    axes.set_xlabel(curves.x_label)
    axes.set_ylabel(curves.y_label)
    on = machine()
    axes.set_title(f"{curves.title} ({on['cpu']}, {on['cores']} cores)", fontsize=10)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend()
    figure.savefig(into, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)


def _name_none(axes: Any, curves: Curves) -> None:
    """A logarithmic axis has no 0: it gets a place of its own."""
    places = sorted({x for points in curves.curves.values() for x, _ in points})
    axes.set_xticks([place or curves.none for place in places], [f"{place:,.0f}" for place in places], fontsize=8)
    axes.minorticks_off()
