"""The live picture of a day, from the processes' histories while they grow.

The demo shows only what the histories say. The final summary reads the same files.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from timeline.demo.plan import HISTORY_SUFFIX, DayPlan, Filing

EVENTS_KEPT = 200
PRESUMED_AFTER_MS = 3_000
"""How long after its lease ended a departure whose ack has no answer counts as gone."""


class FlightStage(StrEnum):
    """Where a flight is."""

    PLANNED = "planned"
    ON_TIME = "on time"
    DELAYED = "delayed"
    CANCELLED = "cancelled"
    BOARDING = "boarding"
    DEPARTED = "departed"


@dataclass(slots=True)
class Departure:
    """A flight as the board knows it. `due_ms`: real. `gate`: which one has or had it. `deliveries`: leases so far."""

    filing: Filing
    stage: FlightStage = FlightStage.PLANNED
    due_ms: int = 0
    gate: str = ""
    deliveries: int = 0
    changed_ms: float = 0.0

    def enter(self, stage: FlightStage, wall_ms: float) -> None:
        self.stage, self.changed_ms = stage, wall_ms


@dataclass(slots=True)
class GateView:
    """A gate as the board knows it. `boarding`: flights in flight, oldest first."""

    name: str
    up: bool = False
    boarding: list[str] = field(default_factory=list)
    departed: int = 0
    crashes: int = 0
    last: str = ""

    @property
    def title(self) -> str:
        """Return its name for people, such as `Gate 1` or `Gate 5 webhook`."""
        return self.name.capitalize().replace("-", " ")


@dataclass(frozen=True, slots=True)
class Happening:
    """A line for the events list: its real time, its kind (`delay cancel crash back up inspect trouble`), its text."""

    real_ms: float
    kind: str
    text: str


class Tail:
    """Reads whole new lines of a file that another process writes, and that may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def lines(self) -> Iterator[bytes]:
        """Return the lines that were completed since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        yield from whole.splitlines()


def lateness_of(arguments: dict[str, Any], wall_ms: float) -> float:
    """Return the milliseconds from the time that was asked for to the hand-over to the gate's code."""
    return wall_ms - float(arguments["scheduled_ms"])


def percentile(ordered: list[float], share: float) -> float:
    """Return the value below or at which `share` of the ascending values lie (nearest rank); 0 without values."""
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of a lateness, in milliseconds of real time."""

    count: int
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        ordered = sorted(values)
        return cls(len(ordered), *(percentile(ordered, share) for share in (0.5, 0.99, 1.0)))

    def as_json(self) -> dict[str, float]:
        return {"p50": round(self.p50, 3), "p99": round(self.p99, 3), "max": round(self.max, 3)}

    def __str__(self) -> str:
        return f"p50 {self.p50:.1f} ms, p99 {self.p99:.1f} ms, max {self.max:.1f} ms"


def _each(values: Any) -> list[dict[str, Any]]:
    return values if isinstance(values, list) else [values]


class DayPicture:
    """The histories' contents so far. `refresh` reads on."""

    def __init__(self, plan: DayPlan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.departures = {filing.flight.id: Departure(filing, due_ms=filing.due_ms) for filing in plan.filings}
        self.gates: dict[str, GateView] = {}
        self.counts: Counter[str] = Counter()
        self.lateness_ms: list[float] = []
        self.inspected: set[int] = set()
        """The times of the inspections of the runway that were made."""
        self.happenings: deque[Happening] = deque(maxlen=EVENTS_KEPT)
        self.happened = 0
        self._tails: dict[Path, Tail] = {}
        self._calls: dict[tuple[Path, int], dict[str, Any]] = {}
        self._takes: dict[str, Callable[[dict[str, Any], float], None]] = {
            "put": self._put,
            "move": self._moved,
            "cancel": self._cancelled,
            "receive": self._received,
            "ack": self._acked,
            "fault": self._fault,
            "consume": self._opened,
            "inspect": self._inspected,
        }

    def refresh(self) -> None:
        """Read what was added to the histories since the last call."""
        new: list[tuple[float, Path, dict[str, Any]]] = []
        for path in self.folder.glob(f"*{HISTORY_SUFFIX}"):
            for line in self._tails.setdefault(path, Tail(path)).lines():
                value = json.loads(line)
                new.append((value.get("returned", value.get("invoked")), path, value))
        # The order of events across processes matters: a gate comes back after its crash.
        for _, path, value in sorted(new, key=lambda one: one[0]):
            self._take(path, value)

    def presume(self, now_ms: float) -> None:
        """Count departures as gone whose gate crashed during the ack, if none came back long after the lease.

        Only the ack's answer was lost then. The last scan shows whether that is true.
        """
        long_ago_ms = now_ms - self.plan.lease_ms - PRESUMED_AFTER_MS
        for call in self._calls.values():
            for one in _each(call["arguments"]) if call["operation"] == "ack" else ():
                departure = self.departures[one["id"]]
                if departure.stage is FlightStage.BOARDING and departure.changed_ms < long_ago_ms:
                    self._left(departure, now_ms)

    @property
    def settled(self) -> int:
        """Return how many flights have departed or are cancelled."""
        return self.counts["departed"] + self.counts["cancelled"]

    @property
    def done(self) -> bool:
        return self.settled >= len(self.departures) and self.inspections_left == 0

    @property
    def inspections_left(self) -> int:
        """Return how many inspections of the runway are still to come."""
        planned = self.plan.inspections
        return 0 if planned is None else len(set(planned.times) - self.inspected)

    def load_ahead(self, now_ms: float, step_ms: float, steps: int) -> list[int]:
        """Return how many flights on the timeline are due in each of the next `steps` steps (real ms)."""
        counts = [0] * steps
        for departure in self.departures.values():
            if departure.stage in (FlightStage.ON_TIME, FlightStage.DELAYED):
                step = int((departure.due_ms - now_ms) // step_ms)
                if 0 <= step < steps:
                    counts[step] += 1
        return counts

    def lateness(self) -> Spread:
        """Return the lateness of first deliveries so far."""
        return Spread.of(self.lateness_ms)

    def _take(self, path: Path, line: dict[str, Any]) -> None:
        if "operation" not in line:
            started = self._calls.pop((path, line["call"]))
            line = {**started, "outcome": line["outcome"], "at": line["returned"] - started["invoked"]}
        elif line.get("returned") is None:
            self._calls[path, line["call"]] = line
            return
        if line["operation"] not in self._takes:
            return
        each = _each(line["arguments"])
        outcomes = line["outcome"] if isinstance(line["outcome"], list) else [line["outcome"]] * len(each)
        wall_ms = line["wall_ms"] + line.get("at", 0.0)
        for one, outcome in zip(each, outcomes, strict=True):
            if outcome == "ok":
                self._takes[line["operation"]](one, wall_ms)
            else:
                self.say(wall_ms, "trouble", f"{line['operation']} of {one.get('id', '')} answered {outcome}")

    def _put(self, values: dict[str, Any], wall_ms: float) -> None:
        self.departures[values["id"]].enter(FlightStage.ON_TIME, wall_ms)
        self.counts["put"] += 1

    def _moved(self, values: dict[str, Any], wall_ms: float) -> None:
        departure = self.departures[values["id"]]
        departure.enter(FlightStage.DELAYED, wall_ms)
        departure.due_ms = values["due_ms"]
        self.counts["moved"] += 1
        flight = departure.filing.flight
        until = self.plan.clock.text(flight.leaves_ms)
        self.say(wall_ms, "delay", f"{flight.number} to {flight.dest} {flight.delay_min} min late, now {until}")

    def _cancelled(self, values: dict[str, Any], wall_ms: float) -> None:
        departure = self.departures[values["id"]]
        departure.enter(FlightStage.CANCELLED, wall_ms)
        self.counts["cancelled"] += 1
        self.say(wall_ms, "cancel", f"{departure.filing.flight.number} to {departure.filing.flight.dest} cancelled")

    def _received(self, values: dict[str, Any], wall_ms: float) -> None:
        departure, gate = self.departures[values["id"]], self._gate(values["consumer"])
        number = departure.filing.flight.number
        gate.boarding.append(number)
        gate.last = number
        self.counts["departed"] -= departure.stage is FlightStage.DEPARTED
        departure.enter(FlightStage.BOARDING, wall_ms)
        departure.gate, departure.deliveries = gate.name, values["deliveries"]
        if values["deliveries"] == 1:
            self.lateness_ms.append(lateness_of(values, wall_ms))
            return
        self.counts["leases_back"] += 1
        self.say(wall_ms, "back", f"{number}'s lease ran out: {gate.title} boards it")

    def _acked(self, values: dict[str, Any], wall_ms: float) -> None:
        departure, gate = self.departures[values["id"]], self._gate(values["consumer"])
        number = departure.filing.flight.number
        if number in gate.boarding:
            gate.boarding.remove(number)
        gate.departed += 1
        departure.gate = gate.name
        self._left(departure, wall_ms)

    def _left(self, departure: Departure, wall_ms: float) -> None:
        self.counts["departed"] += departure.stage is not FlightStage.DEPARTED
        departure.enter(FlightStage.DEPARTED, wall_ms)

    def _opened(self, values: dict[str, Any], wall_ms: float) -> None:
        gate = self._gate(values["consumer"])
        if gate.crashes:
            self.say(wall_ms, "up", f"{gate.title} is open again")
        gate.up, gate.boarding = True, []

    def _inspected(self, values: dict[str, Any], wall_ms: float) -> None:
        if values["scheduled_ms"] not in self.inspected:
            self.inspected.add(values["scheduled_ms"])
            self.say(wall_ms, "inspect", "the runway is inspected, by its recurring schedule")

    def _fault(self, values: dict[str, Any], wall_ms: float) -> None:
        gate = self._gate(values["consumer"])
        gate.up = False
        gate.crashes += 1
        self.counts["crashes"] += 1
        held = ", ".join(gate.boarding)
        self.say(wall_ms, "crash", f"{gate.title} crashes with {held} in hand")

    def _gate(self, consumer: str) -> GateView:
        name = consumer.partition(".")[0]
        return self.gates.setdefault(name, GateView(name))

    def say(self, real_ms: float, kind: str, text: str) -> None:
        """Add a line to the events list."""
        self.happenings.append(Happening(real_ms, kind, text))
        self.happened += 1
