"""Lateness: from due until handed to the consumer's code, at a steady rate, open loop.

Three processes: broker, feeder, consumer (this one). Dues are fixed beforehand, times are read on the consumer
process's clock, of several runs the worst counts.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timeline
from timeline.bench.feeder import NOW, meant_of
from timeline.bench.figures import BenchReport, Target, latencies, worst
from timeline.bench.load import Told, commit_ms
from timeline.bench.processes import CannotMeasure, Measured, disk_stalled_s
from timeline.bench.profile import Profile
from timeline.bench.scenario import Scenario, Setup, Stopwatch, set_up, setting
from timeline.bench.topic import own_topic
from timeline.clock import Clock
from timeline.driver.late import LateReport
from timeline.driver.times import duration_ms

BEGIN_MS = 250
"""From telling the feeder to begin until its first put."""
PATIENCE_S = 60.0
CREDIT = 10_000
LATE_ASKED = 10_000
"""As many late deliveries as a broker remembers."""


@dataclass(frozen=True, slots=True)
class LatenessScenario(Scenario):
    """From due until handed to the consumer's code, at a steady rate.

    \b
    Example:
      timeline bench lateness --pending 1000000 --seconds 60 --runs 3
    """

    name = "lateness"
    store: str = "sqlite://"
    rate: float = setting(1_000.0, "Messages a second.")
    seconds: float = setting(60.0, "Of each run.", least=0.01)
    runs: int = setting(3, "The worst one counts.")
    pending: int = setting(0, "Others that wait meanwhile.", least=0)
    in_zero: bool = setting(False, "Put with in_=0, instead of two seconds ahead.")
    lease_ahead: str = setting("auto", takes="auto|off|DURATION")
    lead_ms: int = 2_000
    payload_bytes: int = 100
    buckets: int = setting(64, "Of the topic.", most=4096)

    @property
    def waits_for_commits(self) -> bool:
        """Whether the store's commits lie between due and delivery: nothing is leased ahead of its time."""
        return self.in_zero or self.lease_ahead == "off"

    def targets_by(self, one_commit_ms: float) -> tuple[Target, ...]:
        """What `targets.md` asks of it. `one_commit_ms`: the store's."""
        never = Target("lateness_min_ms", 0.0, least=True)
        if self.waits_for_commits:
            return (Target("lateness_p50_ms", 2.0), Target("lateness_p99_ms", 3 * one_commit_ms + 2.0), never)
        bounds = {"lateness_p50_ms": 1.0, "lateness_p99_ms": 3.0, "lateness_p99_9_ms": 10.0}
        return (*(Target(name, bound) for name, bound in bounds.items()), never)

    def check(self) -> None:
        if self.lease_ahead not in ("auto", "off"):
            duration_ms(self.lease_ahead, "--lease-ahead")

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        """So many runs on one broker."""
        runs: list[dict[str, float]] = []
        wrong: list[str] = []
        one_commit_ms = 0.0
        if self.waits_for_commits:
            async with own_topic(self.store, "commits") as commits:
                one_commit_ms = await commit_ms(self.store, commits.name)
        async with set_up(
            self, folder, told, pending=self.pending, payload_bytes=self.payload_bytes, buckets=self.buckets,
            lease_ahead=0 if self.lease_ahead == "off" else self.lease_ahead,
        ) as setup:  # fmt: skip
            if profile is not None:
                await setup.stack.enter_async_context(
                    profile.of({"broker": setup.child.pid, "consumer": profile.own_pid})
                )
            for _ in range(self.runs):
                watch = Stopwatch(broker_cpu=setup.child.cpu_s)
                stalled_s, began_ms = disk_stalled_s(), setup.clock.monotonic_ms()
                run, trouble = await measured_run(setup, self, folder)
                run["broker_cpu_us_per_message"] = watch.figures(self.count)["broker_cpu_us_per_message"]
                if stalled_s is not None and (stalled_now_s := disk_stalled_s()) is not None:
                    took_ms = setup.clock.monotonic_ms() - began_ms
                    run["disk_stalled_percent"] = (stalled_now_s - stalled_s) * 1e5 / took_ms
                runs.append(run)
                wrong += trouble
            notes = await _why_late(setup.client, setup.topic, self.count * len(runs))
        figures = {**worst(runs, "lateness_p99_ms"), "runs": float(len(runs))}
        figures["lateness_min_ms"] = min(run["lateness_min_ms"] for run in runs)
        if self.waits_for_commits:
            figures["store_commit_ms"] = one_commit_ms
        p99s = ", ".join(f"{run['lateness_p99_ms']:.2f}" for run in runs)
        notes.insert(0, f"p99 of each run: {p99s} ms")
        return self.report(setup.own, figures, wrong, targets=self.targets_by(one_commit_ms), notes=notes)

    @property
    def count(self) -> int:
        """How many messages a run has."""
        return max(1, int(self.rate * self.seconds))


async def _why_late(client: timeline.Timeline, topic: str, count: int) -> list[str]:
    """`told_causes` of all runs, `count` messages. No measurement is lost because the broker does not answer this."""
    try:
        return told_causes(await client.late("24h", topic=topic, limit=LATE_ASKED), count)
    except timeline.TimelineError as trouble:
        return [f"why some were late the broker did not say: {trouble}"]


def told_causes(late: LateReport, count: int) -> list[str]:
    """What the broker itself says of those of `count` messages that it delivered late: none late, no note."""
    if not late.deliveries:
        return []
    by_cause = ", ".join(f"{cause} {number:,}" for cause, number in late.causes.items())
    forgotten = f", and {late.dropped:,} before these" if late.dropped else ""
    share = f"{len(late.deliveries) + late.dropped:,} of {count:,} in all runs"
    return [f"{share} were more than 50 ms late, as the broker explains it: {by_cause}{forgotten}"]


class Arrivals:
    """What came of a run of `count` messages: how late by `clock`, and whether twice. `all`: every one of them."""

    def __init__(self, clock: Clock, count: int) -> None:
        self._clock, self.count = clock, count
        self._late_ms: list[float] = []
        self._since_meant_ms: list[float] = []
        self._seen: set[str] = set()
        self._doubled = 0
        self.all = asyncio.Event()

    @property
    def missing(self) -> int:
        return self.count - len(self._late_ms)

    def take(self, d: timeline.Delivery) -> None:
        """One was handed to the consumer's code just now."""
        handed_ms = self._clock.now()
        self._late_ms.append(handed_ms - d.due_ms)
        self._since_meant_ms.append(handed_ms - meant_of(d.payload))
        self._doubled += d.id in self._seen
        self._seen.add(d.id)
        if len(self._late_ms) == self.count:
            self.all.set()

    async def wait(self, patience_s: float, working: Sequence[asyncio.Task[None]]) -> bool:
        """Whether all came in that time. `working`: those who take them; raises what one of them ended with."""
        came = asyncio.ensure_future(self.all.wait())
        done, _ = await asyncio.wait({came, *working}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        came.cancel()
        for task in done - {came}:
            task.result()
        return self.all.is_set()

    def judged(self, fed: dict[str, Any], in_zero: bool) -> tuple[dict[str, float], list[str]]:
        """Figures, and what was wrong. `fed`: what the feeder says at its end."""
        wrong = [f"{self._doubled} messages were delivered twice"] if self._doubled else []
        if fed["put"] != self.count:
            wrong.append(f"{self.count - fed['put']} puts were refused: {fed['refused']}")
        if (early_ms := -min(self._late_ms)) > 0:
            wrong.append(f"handed out {early_ms:.3f} ms before its due")
        figures = latencies(self._late_ms)
        if in_zero:
            figures |= latencies(self._since_meant_ms, "since_call")
        return {**figures, "messages": float(self.count), "feeder_behind_ms": fed["behind_ms"]}, wrong


async def start_feeder(setup: Setup, folder: Path, asked: LatenessScenario) -> Measured:
    """The process that puts, connected and waiting for the time to begin."""
    lead = NOW if asked.in_zero else str(asked.lead_ms)
    what = (setup.address, setup.topic, str(asked.count), str(asked.rate), lead)
    feeder = await Measured.start("feeder", folder, sys.executable, "-m", "timeline.bench.feeder", *what)
    try:
        await feeder.line()
    except BaseException:
        await feeder.end()
        raise
    return feeder


async def measured_run(
    setup: Setup, asked: LatenessScenario, folder: Path, begun: asyncio.Event | None = None
) -> tuple[dict[str, float], list[str]]:
    """One run: its figures and what was wrong. `begun` is set with the first delivery."""
    feeder = await start_feeder(setup, folder, asked)
    ahead_ms = 0 if asked.in_zero else asked.lead_ms
    arrivals = Arrivals(setup.clock, asked.count)
    consumer = setup.client.consumer(setup.topic, credit=CREDIT)
    try:
        await feeder.tell(str(setup.clock.now_ms() + BEGIN_MS + ahead_ms))
        async with asyncio.timeout(ahead_ms / 1000 + asked.count / asked.rate + PATIENCE_S):
            async for d in consumer:
                arrivals.take(d)
                d.ack_soon()
                if begun is not None:
                    begun.set()
                if arrivals.all.is_set():
                    break
        fed = json.loads(await feeder.line())
    except TimeoutError:
        raise CannotMeasure(f"{arrivals.missing} of {asked.count} messages never came: {feeder.last_words()}") from None
    finally:
        await consumer.aclose()
        await feeder.end()
    return arrivals.judged(fed, asked.in_zero)
