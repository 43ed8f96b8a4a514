"""The result of a day: the processes' histories and the last scan, checked against the data, and shown to people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from timeline.demo.picture import Spread, lateness_of
from timeline.demo.plan import WEBHOOK_GATE, DayPlan, Inspections
from timeline.history import Event, check

LIVENESS_MARGIN_MS = 10_000
"""How long beyond a lease a departure may wait for gates with credit before it counts as stranded."""


@dataclass(slots=True)
class Summary:
    """The result of a demo. Counts are distinct departures, except `inspected`, `crashes`, `leases_back` and
    `redelivered`.

    `leases_back`: deliveries of a message whose earlier lease had run out. `redelivered`: those of them that a gate's
    code had seen before. `inspected`: inspections of the runway, from a recurring schedule. `lateness` is that of first
    deliveries, `redelivery_lateness` that of later ones, `webhook_lateness` that of the gate that is a webhook
    receiver, and `inspection_lateness` that of inspections. All last from the time asked for to the code of a gate or
    the inspector.
    `off`: a sentence for everything that is wrong; empty if all went well.
    """

    put: int
    moved: int
    cancelled: int
    delivered: int
    early: int
    lost: int
    doubled: int
    inspected: int
    lateness: Spread
    redelivery_lateness: Spread
    webhooks: int
    webhook_lateness: Spread
    inspection_lateness: Spread
    crashes: int
    leases_back: int
    redelivered: int
    violations: list[str] = field(default_factory=list)
    off: list[str] = field(default_factory=list)

    @property
    def well(self) -> bool:
        return not self.off

    def as_json(self) -> dict[str, Any]:
        """Return the keys of `timeline demo --json`."""
        found = asdict(self) | {"ok": self.well}
        for name in ("lateness", "redelivery_lateness", "webhook_lateness", "inspection_lateness"):
            del found[name]
            found[f"{name}_ms"] = getattr(self, name).as_json()
        return found


@dataclass(frozen=True, slots=True)
class Played:
    """A day that was played. `folder`: its files, or None. `killed`: the killed broker of a cluster, if any."""

    summary: Summary
    plan: DayPlan
    folder: Path | None
    killed: str = ""


def summarize(
    plan: DayPlan,
    events: Sequence[Event],
    rows: Sequence[dict[str, Any]],
    end_wall_ms: float,
    troubles: Sequence[str] = (),
) -> Summary:
    """Judge a day.

    `events`: all processes' histories. `rows`: the last scan, in the checker's form. `troubles`: what the conductor
    noticed about the processes.
    """
    inspections = [event for event in events if event.operation == "inspect"]
    events = [event for event in events if event.operation != "inspect"]
    verdict = check(
        events,
        rows,
        # One machine has one clock: no delivery may be early by any amount.
        clock_bound_ms=0.0,
        liveness_bound_ms=plan.lease_ms + LIVENESS_MARGIN_MS,
        end_wall_ms=end_wall_ms,
        most=20,
    )
    receives = [event for event in events if event.operation == "receive"]
    firsts = [event for event in receives if event.arguments["deliveries"] == 1]
    again = [event for event in receives if event.arguments["deliveries"] > 1]
    pushed = [event for event in receives if event.arguments["consumer"] == WEBHOOK_GATE]
    delivered = {event.arguments["id"] for event in receives}
    summary = Summary(
        put=len(_done(events, "put")),
        moved=len(_done(events, "move")),
        cancelled=len(_done(events, "cancel")),
        delivered=len(delivered),
        early=verdict.counts["early"],
        lost=verdict.counts["lost"],
        doubled=verdict.counts["doubled"],
        inspected=len({event.arguments["scheduled_ms"] for event in inspections}),
        lateness=Spread.of(lateness_of(event.arguments, event.wall_ms) for event in firsts),
        redelivery_lateness=Spread.of(lateness_of(event.arguments, event.wall_ms) for event in again),
        webhooks=len({event.arguments["id"] for event in pushed}),
        webhook_lateness=Spread.of(
            lateness_of(event.arguments, event.wall_ms) for event in pushed if event.arguments["deliveries"] == 1
        ),
        inspection_lateness=Spread.of(lateness_of(event.arguments, event.wall_ms) for event in inspections),
        crashes=sum(event.operation == "fault" for event in events),
        leases_back=len(again),
        redelivered=len(receives) - len(delivered),
        violations=[str(violation) for violation in verdict.violations],
    )
    off_by_flight = _off_by_flight(plan, events, delivered, rows)
    summary.off = [*_off(summary, plan, rows), *off_by_flight, *_off_by_inspection(plan, inspections), *troubles]
    return summary


def data_of(plan: DayPlan) -> dict[str, int]:
    """Return the counts of a Summary that agrees with the data."""
    flights = [filing.flight for filing in plan.filings]
    put, cancelled = len(flights), sum(flight.cancelled for flight in flights)
    moved = sum(flight.late for flight in flights)
    never = {"early": 0, "lost": 0, "doubled": 0}
    inspected = 0 if plan.inspections is None else plan.inspections.count
    data = {"put": put, "moved": moved, "cancelled": cancelled, "delivered": put - cancelled, **never}
    return {**data, "inspected": inspected}


def _done(events: Iterable[Event], operation: str) -> set[str]:
    return {event.arguments["id"] for event in events if event.operation == operation and event.happened}


def _off(summary: Summary, plan: DayPlan, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return where the totals differ from the data."""
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
    if plan.webhook is not None and not summary.webhooks:
        off.append("no departure went out by webhook")
    return off


def _off_by_flight(
    plan: DayPlan, events: Sequence[Event], delivered: set[str], rows: Sequence[dict[str, Any]]
) -> list[str]:
    """Return where single flights differ: which went out, and at which time."""
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


def _off_by_inspection(plan: DayPlan, inspections: Sequence[Event]) -> list[str]:
    """Return where inspections of the runway differ from what the schedule says."""
    planned = set() if plan.inspections is None else set(plan.inspections.times)
    unplanned = {event.arguments["id"] for event in inspections if event.arguments["scheduled_ms"] not in planned}
    early = {event.arguments["id"] for event in inspections if event.wall_ms < event.arguments["scheduled_ms"]}
    sets = {"inspections came at no time of the schedule": unplanned, "inspections came early": early}
    return [f"{len(ids)} {words}: {', '.join(sorted(ids)[:3])}" for words, ids in sets.items() if ids]


def _schedule(summary: Summary, planned: Inspections) -> str:
    each = "each hour" if planned.hours == 1 else f"every {planned.hours} hours"
    return f"schedule   the runway was inspected {each}, {summary.inspected} times: {summary.inspection_lateness}"


def _webhooks(summary: Summary) -> str:
    return f"webhooks   {summary.webhooks} of the departures went to gate 5 by POST: {summary.webhook_lateness}"


def tell(played: Played, console: Console) -> None:
    """Print the summary for people."""
    summary, plan = played.summary, played.plan
    console.print(Text(f"New York's departures of {plan.day:%A %d %B %Y} at {plan.clock.speed:g}× real time", "bold"))
    console.print(Text("What the processes' histories and a last scan show, beside the data:", "grey58"))
    table = Table("", "found", "data", "", box=None, pad_edge=False, header_style="grey58")
    table.columns[1].justify = table.columns[2].justify = "right"
    for name, asked in data_of(plan).items():
        found = getattr(summary, name)
        mark = Text("✓", style="green") if found == asked else Text("✕", style="bold red")
        table.add_row(name, str(found), str(asked), mark)
    console.print(table)
    back = summary.redelivery_lateness
    lines = [
        (f"lateness   {summary.lateness}, {summary.lateness.count} first deliveries", ""),
        (f"crashes    {summary.crashes} gates crashed, {summary.leases_back} leases ran out and came back", ""),
        *([(f"redelivery {back} after the due time", "")] if back.count else []),
        *([(_webhooks(summary), "")] if summary.webhooks else []),
        *([(_schedule(summary, plan.inspections), "")] if plan.inspections is not None else []),
        *([(f"cluster    {played.killed} was killed half-way, the other one went on", "")] if played.killed else []),
        *((f"off: {sentence}", "bold red") for sentence in summary.off),
        *((violation, "red") for violation in summary.violations[:5]),
    ]
    if played.folder is not None:
        lines.append((f"histories, logs and store are kept in {played.folder}", "grey58"))
    for line, style in lines:
        console.print(Text(line, style=style), soft_wrap=True)
