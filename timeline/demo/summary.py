"""What a day came to: the processes' histories and the last scan, through the history checker, against the data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from timeline.demo.picture import lateness_of, percentile
from timeline.demo.plan import DayPlan
from timeline.history import Event, check

LIVENESS_MARGIN_MS = 10_000
"""Beyond a lease, how long a departure may wait while gates have credit before it counts as stranded."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of a lateness, milliseconds of real time."""

    count: int
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        ordered = sorted(values)
        most = ordered[-1] if ordered else 0.0
        return cls(len(ordered), percentile(ordered, 0.50), percentile(ordered, 0.99), most)

    def as_json(self) -> dict[str, float]:
        return {"p50": round(self.p50, 3), "p99": round(self.p99, 3), "max": round(self.max, 3)}


@dataclass(slots=True)
class Summary:
    """The result of a demo. Counts are distinct departures but for `crashes`, `leases_back` (deliveries of a message
    whose earlier lease had run out) and `redelivered` (of those, the ones that a gate's code had seen before).

    `lateness`: of first deliveries; `redelivery_lateness`: of those after a lease had run out, both from the time asked
    for to the gate's code. `off`: a sentence for everything that is not as it must be; empty: the day went well.
    """

    put: int
    moved: int
    cancelled: int
    delivered: int
    early: int
    lost: int
    doubled: int
    lateness: Spread
    redelivery_lateness: Spread
    crashes: int
    leases_back: int
    redelivered: int
    violations: list[str] = field(default_factory=list)
    off: list[str] = field(default_factory=list)

    @property
    def well(self) -> bool:
        return not self.off

    def as_json(self) -> dict[str, Any]:
        """The keys of `timeline demo --json`."""
        told: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            told |= {f"{each.name}_ms": value.as_json()} if isinstance(value, Spread) else {each.name: value}
        return told | {"ok": self.well}


def summarize(
    plan: DayPlan,
    events: Sequence[Event],
    rows: Sequence[dict[str, Any]],
    end_wall_ms: float,
    troubles: Sequence[str] = (),
) -> Summary:
    """Judges a day. `events`: all processes' histories; `rows`: the last scan, as the checker takes it; `troubles`:
    what the conductor noticed about the processes themselves."""
    verdict = check(
        events,
        rows,
        # One machine, one clock: nothing may be early by any amount.
        clock_bound_ms=0.0,
        liveness_bound_ms=plan.lease_ms + LIVENESS_MARGIN_MS,
        end_wall_ms=end_wall_ms,
        most=20,
    )
    receives = [event for event in events if event.operation == "receive"]
    firsts = [event for event in receives if event.arguments["deliveries"] == 1]
    again = [event for event in receives if event.arguments["deliveries"] > 1]
    delivered = {event.arguments["id"] for event in receives}
    summary = Summary(
        put=len(_done(events, "put")),
        moved=len(_done(events, "move")),
        cancelled=len(_done(events, "cancel")),
        delivered=len(delivered),
        early=verdict.counts["early"],
        lost=verdict.counts["lost"],
        doubled=verdict.counts["doubled"],
        lateness=Spread.of(lateness_of(event.arguments, event.wall_ms) for event in firsts),
        redelivery_lateness=Spread.of(lateness_of(event.arguments, event.wall_ms) for event in again),
        crashes=sum(event.operation == "fault" for event in events),
        leases_back=len(again),
        redelivered=len(receives) - len(delivered),
        violations=[str(violation) for violation in verdict.violations],
    )
    summary.off = [*_off(summary, plan, rows), *_off_by_flight(plan, events, delivered, rows), *troubles]
    return summary


def data_of(plan: DayPlan) -> dict[str, int]:
    """What a day comes to, by the data: the counts of a Summary on which nothing is off."""
    flights = [filing.flight for filing in plan.filings]
    cancelled = sum(flight.cancelled for flight in flights)
    return {
        "put": len(flights),
        "moved": sum(flight.late for flight in flights),
        "cancelled": cancelled,
        "delivered": len(flights) - cancelled,
        "early": 0,
        "lost": 0,
        "doubled": 0,
    }


def _done(events: Iterable[Event], operation: str) -> set[str]:
    return {event.arguments["id"] for event in events if event.operation == operation and event.happened}


def _off(summary: Summary, plan: DayPlan, rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the totals show, next to the data's own."""
    data = data_of(plan)
    found = {name: getattr(summary, name) for name in data}
    off = [f"{name} is {found[name]}, the data say {asked}" for name, asked in data.items() if found[name] != asked]
    if summary.violations:
        off.append(f"the history checker found {len(summary.violations)} broken promises")
    if rows:
        off.append(f"{len(rows)} departures are still on the timeline after the day")
    if plan.crashes and not summary.crashes:
        off.append("no gate crashed, so nothing was shown about crashes")
    if not summary.leases_back:
        off.append("no lease came back from a crash")
    return off


def _off_by_flight(
    plan: DayPlan, events: Sequence[Event], delivered: set[str], rows: Sequence[dict[str, Any]]
) -> list[str]:
    """What single flights show: the right ones went out, at the times that the data say."""
    flown = {filing.flight.id for filing in plan.filings if not filing.flight.cancelled}
    kept = {row["id"] for row in rows}
    # A gate that crashes between its ack and the answer leaves an ack that may have counted.
    acked = {event.arguments["id"] for event in events if event.operation == "ack" and event.may_have_happened}
    unsettled = delivered - acked - kept
    asked = {filing.flight.id: filing.final_due_ms for filing in plan.filings}
    wrong = {
        event.arguments["id"]
        for event in events
        if event.operation == "receive" and event.arguments["scheduled_ms"] != asked.get(event.arguments["id"])
    }
    sets = {
        "departures of the data never went out": flown - delivered,
        "departures went out though they were cancelled or never planned": delivered - flown,
        "departures went out at another time than the data say": wrong,
        "departures went out and are gone though no gate acked them": unsettled,
    }
    return [f"{len(ids)} {words}: {', '.join(sorted(ids)[:3])}" for words, ids in sets.items() if ids]
