"""What all peers have in common: each way to drive one is tried, and its lateness is that of messages 10 ms apart."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from timeline.bench.figures import BenchReport
from timeline.bench.processes import CannotMeasure
from timeline.bench.scenarios.throughput import CycleScenario

SMALLER = 5
"""A trial has so much fewer messages than a measurement."""
LATE_COUNT, LATE_APART_MS, LATE_AHEAD_MS = 1_000, 10, 5_000
"""A peer's lateness: so many messages, so far apart, put so long before the first is due."""
LATE_S = (LATE_AHEAD_MS + LATE_COUNT * LATE_APART_MS) / 1000 + 60.0
"""How long the last of them is waited for."""
Way = TypeVar("Way")


async def quickest(
    name: str,
    ways: Sequence[Way],
    asked: CycleScenario,
    measure: Callable[[CycleScenario, Way], Awaitable[BenchReport]],
) -> tuple[Way, BenchReport]:
    """Return the way in which a peer is quickest, and its report, which says so. Each way has a trial. Of the two that
    are quickest there, the better one of two whole measurements counts. Raise CannotMeasure if a trial goes wrong."""
    trial = replace(asked, messages=max(1, asked.messages // SMALLER), warm_up=asked.warm_up // SMALLER)
    rates: dict[int, float] = {}
    for at, way in enumerate(ways):
        report = await measure(trial, way)
        if report.wrong:
            raise CannotMeasure(f"{name}, {way}: {'; '.join(report.wrong)}")
        rates[at] = report.figures["rate_per_s"]
    finals = [(at, await measure(asked, ways[at])) for at in sorted(rates, key=rates.__getitem__)[-2:]]
    best, report = max(finals, key=lambda one: one[1].figures["rate_per_s"])
    for at, final in finals:
        rates[at] = final.figures["rate_per_s"]
    report.wrong[:] = [wrong for _, final in finals for wrong in final.wrong]
    told = "; ".join(f"{ways[at]} {rate:,.0f}/s" for at, rate in rates.items())
    report.notes.append(f"driven by {ways[best]}; tried: {told}")
    return ways[best], report


def due_times(now_ms: int) -> list[int]:
    """Return when the messages are due that show a peer's lateness."""
    return [now_ms + LATE_AHEAD_MS + at * LATE_APART_MS for at in range(LATE_COUNT)]
