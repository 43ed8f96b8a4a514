"""The report of a measurement: figures by name, their targets, and the machine."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from timeline.storage_plugins import shown

PERCENTILES = {"p50": 50.0, "p99": 99.0, "p99_9": 99.9}


@dataclass(frozen=True, slots=True)
class Target:
    """`figure` must be at most `bound`, or at least `bound` with `least`."""

    figure: str
    bound: float
    least: bool = False

    def held(self, value: float) -> bool:
        """Return whether `value` meets the target."""
        return value >= self.bound if self.least else value <= self.bound

    def __str__(self) -> str:
        return f"{'≥' if self.least else '≤'} {self.bound:,g}"


@dataclass(slots=True)
class BenchReport:
    """The outcome of one scenario.

    `settings` are enough to repeat it. `figures` have their unit in the name; `targets` bound some of them. `wrong`
    lists what was incorrect: a message lost, doubled or early. `beside` has peers and bare stores of the same
    invocation. `store` describes the server, what it declares, and what weakens that.
    """

    scenario: str
    settings: dict[str, Any]
    figures: dict[str, float]
    targets: tuple[Target, ...] = ()
    wrong: list[str] = field(default_factory=list)
    beside: list[BenchReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    store: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the report for machines; `held` says of each target whether it is met."""
        return {
            "scenario": self.scenario,
            "settings": {name: _without_password(name, value) for name, value in self.settings.items()},
            "store": self.store,
            "figures": {name: _rounded(value) for name, value in self.figures.items()},
            "targets": [
                {**asdict(target), "held": target.held(self.figures[target.figure])} for target in self.targets
            ],
            "wrong": self.wrong,
            "notes": self.notes,
            "beside": [other.as_json() for other in self.beside],
        }


def _without_password(name: str, value: object) -> object:
    return shown(value) if name == "store" and isinstance(value, str) and "@" in value else value


def _rounded(value: float) -> float | int:
    return int(value) if float(value).is_integer() else round(float(value), 4)


def latencies(values_ms: Sequence[float] | npt.NDArray[np.float64], name: str = "lateness") -> dict[str, float]:
    """Return `<name>_min_ms`, `_p50_ms`, `_p99_ms`, `_p99_9_ms` and `_max_ms` of at least one time."""
    column = np.asarray(values_ms, dtype=np.float64)
    found = {f"{name}_min_ms": float(column.min())}
    found |= {f"{name}_{short}_ms": float(np.percentile(column, share)) for short, share in PERCENTILES.items()}
    return {**found, f"{name}_max_ms": float(column.max())}


def worst(runs: Sequence[Mapping[str, float]], name: str) -> Mapping[str, float]:
    """Return the run with the largest figure `name`."""
    return max(runs, key=lambda run: run[name])


def machine() -> dict[str, Any]:
    """Return the machine, and its load before the measurement."""
    try:
        models = re.findall(r"^model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        models = []
    return {
        "cpu": models[0] if models else platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }
