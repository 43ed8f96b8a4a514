"""The live picture of a day, drawn from the processes' histories while they grow.

Whoever looks at the demo sees what the histories say and nothing else; the final summary reads the same files.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from timeline.demo.plan import DayPlan, Filing

EVENTS_KEPT = 200
PRESUMED_AFTER_MS = 3_000
"""How long after its lease ran out a departure whose ack has no answer is taken for gone."""


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
    """A flight as the board knows it. `due_ms`: real; `gate`: who has or had it; `deliveries`: leases so far."""

    filing: Filing
    stage: FlightStage = FlightStage.PLANNED
    due_ms: int = 0
    gate: str = ""
    deliveries: int = 0
    changed_ms: float = 0.0


@dataclass(slots=True)
class GateView:
    """A gate as the board knows it. `boarding`: flights in hand, oldest first."""

    name: str
    consumer: str = ""
    up: bool = False
    boarding: list[str] = field(default_factory=list)
    departed: int = 0
    crashes: int = 0
    last: str = ""

    @property
    def title(self) -> str:
        """As people call it: `Gate 1`."""
        return self.name.replace("gate-", "Gate ")


@dataclass(frozen=True, slots=True)
class Happening:
    """A line for the events list: when (real ms), what kind (`delay cancel crash back up trouble`), words."""

    real_ms: float
    kind: str
    text: str


class Tail:
    """Reads whole new lines of a file that another process writes; it need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def lines(self) -> Iterator[bytes]:
        """The lines that have been completed since the last call."""
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
    """Milliseconds from the time that was asked for to the hand-over to the gate's code."""
    return wall_ms - float(arguments["scheduled_ms"])


def percentile(ordered: list[float], share: float) -> float:
    """The value below or at which `share` of the ascending values lie (nearest rank); 0 when there are none."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, int(-(-share * len(ordered) // 1)) - 1))]


class DayPicture:
    """What the histories say so far. `refresh` reads on."""

    def __init__(self, plan: DayPlan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.departures = {filing.flight.id: Departure(filing, due_ms=filing.due_ms) for filing in plan.filings}
        self.gates: dict[str, GateView] = {}
        self.counts: Counter[str] = Counter()
        self.lateness_ms: list[float] = []
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
        }

    def refresh(self) -> None:
        """Reads what the histories have got since the last call."""
        new: list[tuple[float, Path, dict[str, Any]]] = []
        for path in self.folder.glob("*.history.jsonl"):
            tail = self._tails.setdefault(path, Tail(path))
            for line in tail.lines():
                value = json.loads(line)
                new.append((value.get("returned", value.get("invoked")), path, value))
        # What one process did after another must be seen after it: a gate comes back after its crash.
        for _, path, value in sorted(new, key=lambda one: one[0]):
            self._take(path, value)

    def presume(self, now_ms: float) -> None:
        """What a gate had asked to ack when it crashed, and nobody was handed since though its lease has long run out,
        has left: only the answer was lost. (The last scan shows whether that is so.)"""
        asked = {
            one["id"]
            for call in self._calls.values()
            if call["operation"] == "ack"
            for one in ([call["arguments"]] if isinstance(call["arguments"], dict) else call["arguments"])
        }
        long_ago_ms = now_ms - self.plan.lease_ms - PRESUMED_AFTER_MS
        for id in asked:
            departure = self.departures[id]
            if departure.stage is FlightStage.BOARDING and departure.changed_ms < long_ago_ms:
                self._left(departure, now_ms)

    @property
    def settled(self) -> int:
        """How many flights have departed or are cancelled."""
        return self.counts["departed"] + self.counts["cancelled"]

    @property
    def done(self) -> bool:
        return self.settled >= len(self.departures)

    def load_ahead(self, now_ms: float, step_ms: float, steps: int) -> list[int]:
        """How many flights on the timeline come due in each of the next `steps` steps (real ms)."""
        counts = [0] * steps
        for departure in self.departures.values():
            if departure.stage in (FlightStage.ON_TIME, FlightStage.DELAYED):
                step = int((departure.due_ms - now_ms) // step_ms)
                if 0 <= step < steps:
                    counts[step] += 1
        return counts

    def lateness(self) -> dict[str, float]:
        """p50, p99 and max of first deliveries so far, ms."""
        ordered = sorted(self.lateness_ms)
        return {
            "p50": percentile(ordered, 0.50),
            "p99": percentile(ordered, 0.99),
            "max": ordered[-1] if ordered else 0.0,
        }

    def _take(self, path: Path, line: dict[str, Any]) -> None:
        if "operation" not in line:
            started = self._calls.pop((path, line["call"]))
            line = {**started, "outcome": line["outcome"], "at": line["returned"] - started["invoked"]}
        elif line.get("returned") is None:
            self._calls[path, line["call"]] = line
            return
        if line["operation"] not in self._takes:
            return
        arguments = line["arguments"]
        each = arguments if isinstance(arguments, list) else [arguments]
        outcomes = line["outcome"] if isinstance(line["outcome"], list) else [line["outcome"]] * len(each)
        wall_ms = line["wall_ms"] + line.get("at", 0.0)
        for one, outcome in zip(each, outcomes, strict=True):
            if outcome == "ok":
                self._takes[line["operation"]](one, wall_ms)
            else:
                self.say(wall_ms, "trouble", f"{line['operation']} of {one.get('id', '')} answered {outcome}")

    def _put(self, values: dict[str, Any], wall_ms: float) -> None:
        departure = self.departures[values["id"]]
        departure.stage, departure.changed_ms = FlightStage.ON_TIME, wall_ms
        self.counts["put"] += 1

    def _moved(self, values: dict[str, Any], wall_ms: float) -> None:
        departure = self.departures[values["id"]]
        departure.stage, departure.due_ms, departure.changed_ms = FlightStage.DELAYED, values["due_ms"], wall_ms
        self.counts["moved"] += 1
        flight = departure.filing.flight
        until = self.plan.clock.text(flight.leaves_ms)
        self.say(wall_ms, "delay", f"{flight.number} to {flight.dest} {flight.delay_min} min late, now {until}")

    def _cancelled(self, values: dict[str, Any], wall_ms: float) -> None:
        departure = self.departures[values["id"]]
        departure.stage, departure.changed_ms = FlightStage.CANCELLED, wall_ms
        self.counts["cancelled"] += 1
        self.say(wall_ms, "cancel", f"{departure.filing.flight.number} to {departure.filing.flight.dest} cancelled")

    def _received(self, values: dict[str, Any], wall_ms: float) -> None:
        departure, gate = self.departures[values["id"]], self._gate(values["consumer"])
        number = departure.filing.flight.number
        gate.boarding.append(number)
        gate.last = number
        self.counts["departed"] -= departure.stage is FlightStage.DEPARTED
        departure.stage, departure.gate, departure.changed_ms = FlightStage.BOARDING, gate.name, wall_ms
        departure.deliveries = values["deliveries"]
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
        departure.stage, departure.changed_ms = FlightStage.DEPARTED, wall_ms

    def _opened(self, values: dict[str, Any], wall_ms: float) -> None:
        gate = self._gate(values["consumer"])
        if gate.crashes:
            self.say(wall_ms, "up", f"{gate.title} is open again")
        gate.consumer, gate.up, gate.boarding = values["consumer"], True, []

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
        """A line for the events list."""
        self.happenings.append(Happening(real_ms, kind, text))
        self.happened += 1
