"""A day as its processes would write it down if the service were perfect, in no time at all. Tests then spoil it."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from timeline.clock import Clock
from timeline.demo.plan import GATES, HISTORY_SUFFIX, INSPECTOR, WEBHOOK_GATE, DayPlan, Filing, gate_name
from timeline.history import HistoryFile
from timeline.model import payload_sum

ANSWER_MS = 2.0


@dataclass
class StagedDay:
    """Plays `plan` into history files in `folder`, up to `until_ms` (real) where given."""

    plan: DayPlan
    folder: Path
    until_ms: float = float("inf")
    transit_ms: float = 1.0
    now_ms: float = 0.0
    _work: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _histories: dict[str, HistoryFile] = field(default_factory=dict)
    _gates: list[str] = field(default_factory=lambda: [*(gate_name(number) for number in range(GATES)), WEBHOOK_GATE])
    _held: dict[str, dict[str, tuple[Filing, int, float]]] = field(default_factory=lambda: defaultdict(dict))
    _dead: set[str] = field(default_factory=set)
    _turn: int = 0

    def play(self) -> None:
        """The whole day."""
        self.now_ms = float(self.plan.begin_ms)
        for gate in self._gates:
            self._history(gate).note(
                "consume", {"topic": self.plan.topic, "consumer": gate, "session": 1, "credit": 64}
            )
        for at_ms in self.plan.inspections.times if self.plan.inspections else ():
            self._at(at_ms + self.transit_ms, lambda at_ms=at_ms: self._inspect(at_ms))
        for filing in self.plan.filings:
            self._at(filing.put_ms, lambda filing=filing: self._put(filing))
        while self._work and self._work[0][0] <= self.until_ms:
            self.now_ms, _, step = heapq.heappop(self._work)
            step()
        for history in self._histories.values():
            history.close()

    def _inspect(self, at_ms: int) -> None:
        self._history(INSPECTOR).note("inspect", {"id": f"runway@{at_ms}", "scheduled_ms": at_ms})

    def _at(self, at_ms: float, step: Callable[[], None]) -> None:
        heapq.heappush(self._work, (at_ms, self._turn, step))
        self._turn += 1

    def _history(self, process: str) -> HistoryFile:
        if process not in self._histories:
            clock = Clock(wall_s=lambda: self.now_ms / 1000, monotonic_s=lambda: self.now_ms / 1000)
            self._histories[process] = HistoryFile(self.folder / f"{process}{HISTORY_SUFFIX}", process, clock)
        return self._histories[process]

    def _call(self, process: str, operation: str, values: dict[str, Any], result: dict[str, Any]) -> None:
        history = self._history(process)
        call = history.call(operation, values)
        self._at(self.now_ms + ANSWER_MS, lambda: history.answer(call, "ok", {"status": "OK", **result}))

    def _about(self, filing: Filing, **more: Any) -> dict[str, Any]:
        return {"topic": self.plan.topic, "id": filing.flight.id, **more}

    def _put(self, filing: Filing) -> None:
        group = filing.flight.carrier
        values = self._about(filing, group=group, due_ms=filing.due_ms, sum=payload_sum(filing.flight.payload()))
        self._call("feeder-1", "put", values, {"version": 1, "due_ms": filing.due_ms})
        if filing.notice_ms:
            self._at(filing.notice_ms, lambda: self._notice(filing))
        if not filing.flight.cancelled:
            version = 3 if filing.moved_ms else 2
            self._at(filing.final_due_ms + self.transit_ms, lambda: self._receive(filing, version, 1))

    def _notice(self, filing: Filing) -> None:
        group = filing.flight.carrier
        if filing.flight.cancelled:
            self._call("feeder-1", "cancel", self._about(filing, group=group), {})
        else:
            values = self._about(filing, group=group, due_ms=filing.moved_ms)
            self._call("feeder-1", "move", values, {"version": 2, "due_ms": filing.moved_ms})

    def _receive(self, filing: Filing, version: int, deliveries: int) -> None:
        self._turn += 1
        gates = len(self._gates)
        number = next(n % gates for n in range(self._turn, self._turn + gates) if self._gates[n % gates])
        gate = self._gates[number]
        until_ms = int(self.now_ms) + self.plan.lease_ms
        about = self._about(filing, consumer=gate, session=1, birth=7, version=version)
        more = {
            "due_ms": filing.final_due_ms,
            "scheduled_ms": filing.final_due_ms,
            "lease_until_ms": until_ms,
            "sum": payload_sum(filing.flight.payload()),
            "deliveries": deliveries,
        }
        self._history(gate).note("receive", {**about, **more})
        self._held[gate][filing.flight.id] = (filing, version, until_ms)
        crash = next((crash for crash in self.plan.crashes if crash.gate == number), None)
        if crash is not None and gate == gate_name(number) and self.now_ms >= crash.after_ms:
            self._crash(number, gate)
        else:
            self._at(self.now_ms + self.plan.boarding_ms, lambda: self._ack(gate, filing, version))

    def _crash(self, number: int, gate: str) -> None:
        self._history(gate).note("fault", {"what": "crash", "consumer": gate})
        self._gates[number] = ""
        self._dead.add(gate)
        for filing, version, until_ms in self._held[gate].values():
            again = (filing, version + 1, 2)
            self._at(until_ms + self.transit_ms, lambda again=again: self._receive(*again))
        self._at(self.now_ms + 2_000, lambda: self._reopen(number))

    def _reopen(self, number: int) -> None:
        self._gates[number] = gate_name(number, 2)
        values = {"topic": self.plan.topic, "consumer": self._gates[number], "session": 1, "credit": 64}
        self._history(self._gates[number]).note("consume", values)

    def _ack(self, gate: str, filing: Filing, version: int) -> None:
        if gate not in self._dead:
            del self._held[gate][filing.flight.id]
            self._call(gate, "ack", self._about(filing, consumer=gate, birth=7, version=version), {"version": version})
