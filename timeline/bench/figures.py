"""What a measurement says: figures by name, the targets they are held against, and the machine they were taken on."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from timeline.storage_plugins import shown


@dataclass(frozen=True, slots=True)
class Target:
    """`figure` is to be at least (`least`) or at most `bound`."""

    figure: str
    bound: float
    least: bool = False

    def held(self, value: float) -> bool:
        """Whether `value` keeps it."""
        return value >= self.bound if self.least else value <= self.bound

    def __str__(self) -> str:
        return f"{'≥' if self.least else '≤'} {self.bound:,g}"


@dataclass(slots=True)
class BenchReport:
    """One scenario's outcome. `settings`: what it was asked to do, enough to repeat it. `figures`: numbers, their unit
    in the name. `targets`: what some of them are held against. `wrong`: what was incorrect (a message lost, doubled or
    early); empty when all was right. `beside`: peers and bare stores measured in the same invocation, by name.
    `store`: the server in words, how safe it declares what it has, and what weakens that."""

    scenario: str
    settings: dict[str, Any]
    figures: dict[str, float]
    targets: tuple[Target, ...] = ()
    wrong: list[str] = field(default_factory=list)
    beside: list[BenchReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    store: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For machines; `held` says of each target whether it is kept."""
        return {
            "scenario": self.scenario,
            "settings": {name: _told(name, value) for name, value in self.settings.items()},
            "store": self.store,
            "figures": {name: _plain(value) for name, value in self.figures.items()},
            "targets": [
                {**asdict(target), "held": target.held(self.figures[target.figure])} for target in self.targets
            ],
            "wrong": self.wrong,
            "notes": self.notes,
            "beside": [other.as_json() for other in self.beside],
        }


def _told(name: str, value: object) -> object:
    """A setting as a report tells it: reports are passed on, passwords are not."""
    return shown(value) if name == "store" and isinstance(value, str) and "@" in value else value


def _plain(value: float) -> float | int:
    return int(value) if float(value).is_integer() else round(float(value), 4)


PERCENTILES = {"p50": 50.0, "p99": 99.0, "p99_9": 99.9}


def latencies(values_ms: Sequence[float] | npt.NDArray[np.float64], name: str = "lateness") -> dict[str, float]:
    """`<name>_min_ms`, `_p50_ms`, `_p99_ms`, `_p99_9_ms` and `_max_ms` of some times in ms; at least one."""
    column = np.asarray(values_ms, dtype=np.float64)
    found = {f"{name}_min_ms": float(column.min())}
    found |= {f"{name}_{short}_ms": float(np.percentile(column, share)) for short, share in PERCENTILES.items()}
    return {**found, f"{name}_max_ms": float(column.max())}


def worst(runs: Sequence[Mapping[str, float]], name: str) -> Mapping[str, float]:
    """The run whose figure `name` is largest."""
    return max(runs, key=lambda run: run[name])


def median(values: Sequence[float]) -> float:
    """The middle one of some figures."""
    return float(np.median(values))


def machine() -> dict[str, Any]:
    """What the figures were taken on, and how busy it was when they were begun."""
    model = "unknown"
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        model = platform.processor() or model
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }
