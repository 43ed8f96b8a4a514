"""Lateness, from due until handed to the consumer's code: at a steady rate, beside many others, and in a burst.

There are three processes: broker, feeder, and this consumer. Due times are fixed beforehand (an open loop). Times are
read on the consumer process's clock. Of several runs the worst counts.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timeline
from timeline.bench.figures import BenchReport, Target, latencies, worst
from timeline.bench.ledger import Arrivals, Ledger, by
from timeline.bench.load import NOW, TAG, Told, batch_sizes, meant_of
from timeline.bench.processes import CannotMeasure, Measured, Profile, disk_stalled_s, started_module, within
from timeline.bench.scenario import Scenario, Setup, Stopwatch, set_up, setting
from timeline.bench.stores import commit_ms, own_topic, scheme
from timeline.clock import Clock
from timeline.driver.late import LateReport
from timeline.driver.times import duration_ms
from timeline.errors import Invalid
from timeline.model import Status

BEGIN_MS = 250
"""From telling the feeder to begin until its first put."""
PATIENCE_S = 60.0
CREDIT = 10_000
LATE_ASKED = 10_000
"""As many late deliveries as a broker remembers."""
PENDING, TOPICS, EMPTY, CONSUMERS = OF = ("pending", "topics", "empty", "consumers")
CREDIT_EACH = 100
CREATED_AT_ONCE = 64
DROPPED = 100
LOOK_EVERY_S = 0.1
SETTLED_S = 1.0
"""From the last consumer's connection until the broker is at rest."""
WALK_TIMEOUT = "10m"
BURST_BATCH = 10_000
BURST_LEAD_MS = 1_500
BURST_LEAD_MS_PER_MESSAGE = 0.05
BURST_TRIES = 3
DRAINED_S = {"memory": 1.0, "sqlite": 4.0, "postgresql": 4.0}
"""Targets for 100,000 messages."""


@dataclass(frozen=True, slots=True)
class LatenessScenario(Scenario):
    """From due until handed to the consumer's code, at a steady rate.

    \b
    Example:
      timeline bench lateness --pending 1000000 --seconds 60 --runs 3
    """

    name = "lateness"
    store: str = "sqlite://"
    rate: float = setting(1_000.0, "Messages per second.")
    seconds: float = setting(60.0, "Length of each run.", least=0.01)
    runs: int = setting(3, "Number of runs; the worst one counts.")
    pending: int = setting(0, "Other messages that wait meanwhile.", least=0)
    in_zero: bool = setting(False, "Put with in_=0, instead of two seconds ahead.")
    lease_ahead: str = setting("auto", takes="auto|off|DURATION")
    lead_ms: int = 2_000
    payload_bytes: int = 100
    buckets: int = setting(64, "Buckets of the topic.", most=4096)

    @property
    def count(self) -> int:
        """Return the number of messages in a run."""
        return max(1, int(self.rate * self.seconds))

    @property
    def waits_for_commits(self) -> bool:
        """Return whether the store's commits lie between due and delivery: no message is leased ahead of time."""
        return self.in_zero or self.lease_ahead == "off"

    def targets_by(self, one_commit_ms: float) -> tuple[Target, ...]:
        """Return what `targets.md` asks of it, on a store whose commit takes `one_commit_ms`."""
        never_early = Target("lateness_min_ms", 0.0, least=True)
        bounds = {"lateness_p50_ms": 1.0, "lateness_p99_ms": 3.0, "lateness_p99_9_ms": 10.0}
        if self.waits_for_commits:
            bounds = {"lateness_p50_ms": 2.0, "lateness_p99_ms": 3 * one_commit_ms + 2.0}
        return (*(Target(name, bound) for name, bound in bounds.items()), never_early)

    def check(self) -> None:
        if self.lease_ahead not in ("auto", "off"):
            duration_ms(self.lease_ahead, "--lease-ahead")

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
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
            await setup.sample(profile, "consumer")
            for _ in range(self.runs):
                stalled_s, began_ms = disk_stalled_s(), setup.clock.monotonic_ms()
                run, trouble = await measured_run(setup, self, folder)
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


async def _why_late(client: timeline.Timeline, topic: str, count: int) -> list[str]:
    """Return `causes_of` all runs, `count` messages. A broker that does not answer costs no measurement."""
    try:
        return causes_of(await client.late("24h", topic=topic, limit=LATE_ASKED), count)
    except timeline.TimelineError as trouble:
        return [f"the broker did not report why some were late: {trouble}"]


def causes_of(late: LateReport, count: int) -> list[str]:
    """Return what the broker reports of those of `count` messages that were late; nothing if none was."""
    if not late.deliveries:
        return []
    by_cause = ", ".join(f"{cause} {number:,}" for cause, number in late.causes.items())
    forgotten = f", and {late.dropped:,} before these" if late.dropped else ""
    share = f"{len(late.deliveries) + late.dropped:,} of {count:,} in all runs"
    return [f"{share} were more than 50 ms late, as the broker explains it: {by_cause}{forgotten}"]


class LateArrivals(Arrivals):
    """Deliveries of one run, and how late each was by `clock`. `first` is set with the first one."""

    def __init__(self, clock: Clock, count: int) -> None:
        super().__init__(count)
        self.first = asyncio.Event()
        self._clock = clock
        self._late_ms: list[float] = []
        self._since_meant_ms: list[float] = []

    async def take(self, consumer: timeline.Consumer) -> None:
        """Note what the consumer gets, and acknowledge it."""
        async for d in consumer:
            handed_ms = self._clock.now()
            self._late_ms.append(handed_ms - d.due_ms)
            self._since_meant_ms.append(handed_ms - meant_of(d.payload))
            self.add(d.id)
            self.first.set()
            d.ack_soon()

    async def wait(self, patience_s: float, working: Sequence[asyncio.Task[None]]) -> bool:
        """Return whether all came in that time. Raises what one of the tasks that take them raised."""
        came = asyncio.ensure_future(self.all.wait())
        done, _ = await asyncio.wait({came, *working}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        came.cancel()
        for task in done - {came}:
            task.result()
        return self.all.is_set()

    def judged(self, fed: dict[str, Any], in_zero: bool) -> tuple[dict[str, float], list[str]]:
        """Return the figures, and what was wrong. `fed`: the feeder's last line."""
        wrong = [f"{self.doubled} messages were delivered twice"] if self.doubled else []
        if fed["put"] != self.count:
            wrong.append(f"{self.count - fed['put']} puts were refused: {fed['refused']}")
        if (early_ms := -min(self._late_ms)) > 0:
            wrong.append(f"handed out {early_ms:.3f} ms before its due")
        figures = latencies(self._late_ms)
        if in_zero:
            figures |= latencies(self._since_meant_ms, "since_call")
        return {**figures, "messages": float(self.count), "feeder_behind_ms": fed["behind_ms"]}, wrong


@asynccontextmanager
async def consuming(
    client: timeline.Timeline, topics: Sequence[str], arrivals: LateArrivals, credit: int
) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run a consumer of each of `topics`; yield their tasks."""
    consumers = [client.consumer(topic, credit=credit) for topic in topics]
    tasks = [asyncio.ensure_future(arrivals.take(consumer)) for consumer in consumers]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(consumer.aclose() for consumer in consumers))


async def fed_run(
    setup: Setup,
    asked: LatenessScenario,
    folder: Path,
    arrivals: LateArrivals,
    working: Sequence[asyncio.Task[None]],
) -> tuple[dict[str, float], list[str]]:
    """Let a feeder put until all has arrived. Return the figures, and what was wrong. Raises CannotMeasure."""
    ahead_ms = 0 if asked.in_zero else asked.lead_ms
    lead = NOW if asked.in_zero else str(asked.lead_ms)
    what = (setup.address, setup.topic, str(asked.count), str(asked.rate), lead)
    async with started_module("feeder", folder, "timeline.bench.load", *what) as feeder:
        await feeder.line()
        watch = Stopwatch(broker_cpu=setup.child.cpu_s)
        await feeder.tell(str(setup.clock.now_ms() + BEGIN_MS + ahead_ms))
        if not await arrivals.wait(ahead_ms / 1000 + asked.count / asked.rate + PATIENCE_S, working):
            words = feeder.last_words()
            raise CannotMeasure(f"{arrivals.missing} of {asked.count} messages never came: {words}")
        costs = watch.costs(asked.count)
        figures, wrong = arrivals.judged(json.loads(await feeder.line()), asked.in_zero)
    return {**figures, **costs}, wrong


async def measured_run(
    setup: Setup, asked: LatenessScenario, folder: Path, arrivals: LateArrivals | None = None
) -> tuple[dict[str, float], list[str]]:
    """Measure one run with one consumer, as `fed_run`."""
    arrivals = arrivals or LateArrivals(setup.clock, asked.count)
    async with consuming(setup.client, [setup.topic], arrivals, CREDIT) as working:
        return await fed_run(setup, asked, folder, arrivals, working)


@dataclass(frozen=True, slots=True)
class ScaleScenario(Scenario):
    """The cost of a message beside many pending messages, topics (with a consumer each, or empty) or consumers.

    \b
    Example:
      timeline bench scale --of consumers --number 1000
    """

    # "pending": other messages that wait. "topics": each with a consumer, one of them in use. "empty": topics without
    # messages and consumers beside the one in use; some of them are dropped in the end. "consumers": of the one topic,
    # which get its messages in turn.
    name = "scale"
    store: str = "sqlite://"
    of: str = setting(TOPICS, "Kind of thing that there are many of.", choices=OF)
    number: int = setting(1_000, "Number of them.")
    rate: float = setting(300.0, "Messages per second.")
    seconds: float = setting(20.0, "Length of the run.", least=0.01)
    rest_seconds: float = setting(5.0, "Time to watch the broker at rest.", least=0)
    payload_bytes: int = 100

    @property
    def pending(self) -> int:
        """Return how many other messages wait."""
        return self.number if self.of == PENDING else 0

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        steady = LatenessScenario(self.store, rate=self.rate, seconds=self.seconds)
        async with set_up(self, folder, told, pending=self.pending, payload_bytes=self.payload_bytes) as setup:
            client, name = setup.client, setup.topic
            others = [f"{name}-{at}" for at in range(1, self.number) if self.of == TOPICS]
            for other in others:
                await client.create_topic(other)
            empty = [f"{name}-empty-{at}" for at in range(self.number - 1) if self.of == EMPTY]
            for start in range(0, len(empty), CREATED_AT_ONCE):
                await asyncio.gather(*(client.create_topic(each) for each in empty[start : start + CREATED_AT_ONCE]))
            arrivals = LateArrivals(setup.clock, steady.count)
            topics = [name, *others] * (self.number if self.of == CONSUMERS else 1)
            async with consuming(client, topics, arrivals, CREDIT_EACH) as working:
                await _connected(client, working)
                rest_s = await at_rest(setup.child, self.rest_seconds)
                figures, wrong = await fed_run(setup, steady, folder, arrivals, working)
                figures["broker_resident_mib"] = setup.resident_mib()
                if empty:
                    figures |= latencies([await _drop_ms(client, each) for each in empty[:DROPPED]], "drop")
        # A part of what a message costs, which goes by time.
        figures["broker_at_rest_ms_per_s"] = rest_s * 1e3
        return self.report(setup.own, figures, wrong)


async def _connected(client: timeline.Timeline, working: Sequence[asyncio.Task[None]]) -> None:
    """Wait until the broker counts all consumers. Raises what one of them raised."""
    async with within(PATIENCE_S, f"all of {len(working)} consumers"):
        while True:
            brokers = (await client.standing(consumers=1)).brokers
            if sum(load.consumers for broker in brokers for load in broker.topics) >= len(working):
                return
            for task in working:
                if task.done():
                    task.result()
            await asyncio.sleep(LOOK_EVERY_S)


async def at_rest(child: Measured, seconds: float) -> float:
    """Return the processor seconds per second of a process that has nothing to do, in steps of 10 ms."""
    await asyncio.sleep(min(seconds, SETTLED_S))
    used_s, began_s = child.cpu_s(), time.monotonic()
    await asyncio.sleep(seconds)
    return (child.cpu_s() - used_s) / (time.monotonic() - began_s) if seconds else 0.0


async def _drop_ms(client: timeline.Timeline, topic: str) -> float:
    began_s = time.monotonic()
    await client.drop_topic(topic)
    return (time.monotonic() - began_s) * 1e3


@dataclass(frozen=True, slots=True)
class CancelTagScenario(Scenario):
    """Cancel by tag, and how late others are meanwhile.

    \b
    Example:
      timeline bench cancel-tag --pending 10000000 --tagged 1000000
    """

    name = "cancel-tag"
    store: str = "sqlite://"
    pending: int = setting(1_000_000, "Pending messages, tagged ones included.")
    tagged: int = setting(100_000)
    rate: float = 1_000.0
    seconds: float = setting(5.0, "Length of the lateness run.", least=0.1)
    payload_bytes: int = 100

    @property
    def targets(self) -> tuple[Target, ...]:
        others = Target("p99_ratio", 2.0)
        if scheme(self.store) not in ("sqlite", "postgresql"):
            return (others,)
        return (Target("rate_per_s", 20_000.0, least=True), others)

    def check(self) -> None:
        if self.tagged > self.pending:
            raise Invalid("--tagged is at most --pending: tagged messages are some of those that are pending")

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        """Measure the rate of the cancel, and others' lateness before it and during it."""
        async with set_up(
            self, folder, told, pending=self.pending, tagged=self.tagged, payload_bytes=self.payload_bytes
        ) as setup:
            other, clock = LatenessScenario(rate=self.rate, seconds=self.seconds), setup.clock
            before, wrong = await measured_run(setup, other, folder)
            arrivals = LateArrivals(clock, other.count)
            meanwhile = asyncio.ensure_future(measured_run(setup, other, folder, arrivals))
            begun = asyncio.ensure_future(arrivals.first.wait())
            await asyncio.wait({meanwhile, begun}, return_when=asyncio.FIRST_COMPLETED)
            start_ms = clock.monotonic_ms()
            progress = await setup.producer().cancel_tag(TAG, timeout=WALK_TIMEOUT)
            took_s = (clock.monotonic_ms() - start_ms) / 1000
            during, trouble = await meanwhile
            left = await setup.left()
        cancelled, untagged = progress.counts.get(Status.OK, 0), self.pending - self.tagged
        wrong += trouble
        if cancelled != self.tagged or left != untagged:
            wrong.append(f"{cancelled} of {self.tagged} were cancelled, {left} of {untagged} others are left")
        figures = {
            "rate_per_s": cancelled / took_s,
            "elapsed_s": took_s,
            "p99_before_ms": before["lateness_p99_ms"],
            "p99_during_ms": during["lateness_p99_ms"],
            "p99_ratio": during["lateness_p99_ms"] / before["lateness_p99_ms"],
        }
        return self.report(setup.own, figures, wrong)


@dataclass(frozen=True, slots=True)
class BurstScenario(Scenario):
    """Many messages due in one millisecond.

    \b
    Example:
      timeline bench burst --store sqlite:// --messages 100000
    """

    name = "burst"
    store: str = "memory://"
    messages: int = setting(100_000)
    credit: int = setting(20_000, most=1_000_000)
    payload_bytes: int = 100

    @property
    def targets(self) -> tuple[Target, ...]:
        always = (Target("first_late_ms", 5.0), Target("lateness_min_ms", 0.0, least=True))
        drained_s = DRAINED_S.get(scheme(self.store))
        if drained_s is None:
            return always
        return (Target("drained_s", drained_s * self.messages / 100_000), *always)

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        """Measure one burst, from its due time until the last ack is answered."""
        async with set_up(self, folder) as setup:
            lead_ms = BURST_LEAD_MS + int(self.messages * BURST_LEAD_MS_PER_MESSAGE)
            for attempt in range(BURST_TRIES):
                # A topic each time, so that messages put too late for their instant do not come again.
                topic = f"{setup.topic}-{attempt}"
                await setup.client.create_topic(topic)
                due_ms = setup.clock.now_ms() + lead_ms
                ledger, sizes = Ledger(self.messages, self.messages), batch_sizes(self.messages, BURST_BATCH)
                await ledger.put_each(sizes, self.payload_bytes, by(setup.client.producer(topic)), due_ms)
                if setup.clock.now_ms() < due_ms - 500:
                    return await self._drain(setup, topic, due_ms, ledger)
                lead_ms *= 2
        raise CannotMeasure(f"{self.messages} messages could not be put within {lead_ms / 2000:.0f} s")

    async def _drain(self, setup: Setup, topic: str, due_ms: int, ledger: Ledger) -> BenchReport:
        async with setup.client.consumer(topic, credit=self.credit) as consumer:
            await ledger.through(ledger.take(consumer, setup.clock.now))
            drained_ms = setup.clock.now() - due_ms
        late = ledger.lateness()
        figures = {"drained_s": drained_ms / 1000, "first_late_ms": late["lateness_min_ms"], **late}
        return self.report(setup.own, figures, ledger.verdict())
