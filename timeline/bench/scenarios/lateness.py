"""Lateness: from due until handed to the consumer's code, at a steady rate, open loop.

Three processes: broker, feeder, consumer (this one). Dues are fixed beforehand, times are read on the consumer
process's clock, of several runs the worst counts.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import timeline
from timeline.bench.feeder import NOW, meant_of
from timeline.bench.figures import Report, Target, latencies, worst
from timeline.bench.load import Told, commit_ms, fill, fill_store
from timeline.bench.processes import CannotMeasure, Measured, broker, disk_stalled_s
from timeline.bench.profile import Profile
from timeline.bench.topic import own_topic, scheme
from timeline.clock import Clock
from timeline.driver.late import LateReport

BEGIN_MS = 250
"""From telling the feeder to begin until its first put."""
PATIENCE_S = 60.0
CREDIT = 10_000
OBSERVE_EVERY_S = 0.25
LATE_ASKED = 10_000
"""As many late deliveries as a broker remembers."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """What to run. `in_zero`: put with `in_=0` instead of `lead_ms` ahead. `lease_ahead`: "auto", "off", or how long,
    as in "1s". It and `buckets` are the topic's."""

    store: str = "sqlite://"
    rate: float = 1_000.0
    seconds: float = 60.0
    runs: int = 3
    pending: int = 0
    in_zero: bool = False
    lease_ahead: str = "auto"
    lead_ms: int = 2_000
    payload_bytes: int = 100
    buckets: int = 64

    @property
    def waits_for_commits(self) -> bool:
        """Whether the store's commits lie between due and delivery: nothing is leased ahead of its time."""
        return self.in_zero or self.lease_ahead == "off"

    def targets(self, one_commit_ms: float) -> tuple[Target, ...]:
        """What `targets.md` asks of it. `one_commit_ms`: the store's."""
        never = Target("lateness_min_ms", 0.0, least=True)
        if self.waits_for_commits:
            return (Target("lateness_p50_ms", 2.0), Target("lateness_p99_ms", 3 * one_commit_ms + 2.0), never)
        bounds = {"lateness_p50_ms": 1.0, "lateness_p99_ms": 3.0, "lateness_p99_9_ms": 10.0}
        return (*(Target(name, bound) for name, bound in bounds.items()), never)


@asynccontextmanager
async def observed() -> AsyncIterator[Clock]:
    """A clock that is kept with the machine's, as a broker keeps its own."""
    clock = Clock()

    async def observe() -> None:
        while True:
            await asyncio.sleep(OBSERVE_EVERY_S)
            clock.observe()

    task = asyncio.ensure_future(observe())
    try:
        yield clock
    finally:
        task.cancel()


async def run_lateness(
    asked: Lateness, folder: Path, told: Told | None = None, profile: Profile | None = None
) -> Report:
    """So many runs on one broker. Raises CannotMeasure."""
    in_memory = scheme(asked.store) == "memory"
    one_commit_ms = 0.0
    runs: list[dict[str, float]] = []
    wrong: list[str] = []
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(own_topic(asked.store, "lateness"))
        if asked.waits_for_commits:
            one_commit_ms = await commit_ms(asked.store, f"{own.name}-commits")
        if asked.pending and not in_memory:
            await fill_store(asked.store, own.name, asked.pending, asked.payload_bytes, told, buckets=asked.buckets)
        child, address = await stack.enter_async_context(broker(folder, asked.store))
        clock = await stack.enter_async_context(observed())
        async with timeline.Timeline(address, "30s", clock=clock) as client:
            await client.create_topic(own.name, buckets=asked.buckets)
            await client.update_topic(own.name, lease_ahead=0 if asked.lease_ahead == "off" else asked.lease_ahead)
            if asked.pending and in_memory:
                await fill(client.producer(own.name), asked.pending, asked.payload_bytes, told)
        if profile is not None:
            await stack.enter_async_context(profile.of({"broker": child.pid, "consumer": profile.own_pid}))
        for _ in range(asked.runs):
            async with timeline.Timeline(address, "30s", clock=clock) as client:
                count = max(1, int(asked.rate * asked.seconds))
                used_s, stalled_s, began_ms = child.cpu_s(), disk_stalled_s(), clock.monotonic_ms()
                run, trouble = await measured_run(client, clock, asked, own.name, address, folder, count)
            run["broker_cpu_us_per_message"] = (child.cpu_s() - used_s) * 1e6 / count
            if stalled_s is not None and (stalled_now_s := disk_stalled_s()) is not None:
                run["disk_stalled_percent"] = (stalled_now_s - stalled_s) * 1e5 / (clock.monotonic_ms() - began_ms)
            runs.append(run)
            wrong += trouble
        async with timeline.Timeline(address, "30s", clock=clock) as client:
            notes = await _why_late(client, own.name, sum(int(run["messages"]) for run in runs))
    figures = {**worst(runs, "lateness_p99_ms"), "runs": float(len(runs))}
    figures["lateness_min_ms"] = min(run["lateness_min_ms"] for run in runs)
    if asked.waits_for_commits:
        figures["store_commit_ms"] = one_commit_ms
    p99s = ", ".join(f"{run['lateness_p99_ms']:.2f}" for run in runs)
    notes.insert(0, f"p99 of each run: {p99s} ms")
    return Report("lateness", asdict(asked), figures, asked.targets(one_commit_ms), wrong, notes=notes, store=own.store)


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


async def start_feeder(folder: Path, address: str, topic: str, count: int, asked: Lateness) -> Measured:
    """The process that puts, connected and waiting for the time to begin."""
    lead = NOW if asked.in_zero else str(asked.lead_ms)
    command = (sys.executable, "-m", "timeline.bench.feeder", address, topic, str(count), str(asked.rate), lead)
    feeder = await Measured.start("feeder", folder, *command)
    try:
        await feeder.line()
    except BaseException:
        await feeder.end()
        raise
    return feeder


async def measured_run(
    client: timeline.Timeline,
    clock: Clock,
    asked: Lateness,
    topic: str,
    address: str,
    folder: Path,
    count: int,
    begun: asyncio.Event | None = None,
) -> tuple[dict[str, float], list[str]]:
    """One run of `count` messages: its figures and what was wrong. `begun` is set with the first delivery."""
    feeder = await start_feeder(folder, address, topic, count, asked)
    ahead_ms = 0 if asked.in_zero else asked.lead_ms
    arrivals = Arrivals(clock, count)
    consumer = client.consumer(topic, credit=CREDIT)
    try:
        await feeder.tell(str(clock.now_ms() + BEGIN_MS + ahead_ms))
        async with asyncio.timeout(ahead_ms / 1000 + count / asked.rate + PATIENCE_S):
            async for d in consumer:
                arrivals.take(d)
                d.ack_soon()
                if begun is not None:
                    begun.set()
                if arrivals.all.is_set():
                    break
        fed = json.loads(await feeder.line())
    except TimeoutError:
        raise CannotMeasure(f"{arrivals.missing} of {count} messages never came: {feeder.last_words()}") from None
    finally:
        await consumer.aclose()
        await feeder.end()
    return arrivals.judged(fed, asked.in_zero)
