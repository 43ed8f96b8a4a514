"""Scale: what a message costs a broker, and how late it is, by how many others there are beside it.

Single messages at a steady rate, as of `lateness`. What the broker takes at rest, while nobody asks for anything, is
looked at before: it is a part of what a message costs then, and goes by time.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import timeline
from timeline.bench.figures import BenchReport, latencies
from timeline.bench.load import Told
from timeline.bench.processes import CannotMeasure, Measured, within
from timeline.bench.profile import Profile
from timeline.bench.scenario import Scenario, Stopwatch, set_up, setting
from timeline.bench.scenarios.lateness import BEGIN_MS, PATIENCE_S, Arrivals, LatenessScenario, start_feeder

PENDING, TOPICS, EMPTY, CONSUMERS = OF = ("pending", "topics", "empty", "consumers")
CREDIT = 100
CREATED_AT_ONCE = 64
DROPPED = 100
LOOK_EVERY_S = 0.1
SETTLED_S = 1.0
"""From the last consumer's coming until the broker is at rest."""


@dataclass(frozen=True, slots=True)
class ScaleScenario(Scenario):
    """What a message costs beside many pending messages, topics (with a consumer each, or empty) or consumers.

    \b
    Example:
      timeline bench scale --of consumers --number 1000
    """

    # "pending": other messages that wait; "topics": each with a consumer, one of them in use; "empty": topics, all but
    # the one in use without messages and consumers, of which some are dropped in the end; "consumers": of the one
    # topic, dealt its messages in turn.
    name = "scale"
    store: str = "sqlite://"
    of: str = setting(TOPICS, "What there are many of.", choices=OF)
    number: int = setting(1_000, "How many.")
    rate: float = setting(300.0, "Messages a second.")
    seconds: float = setting(20.0, "Of that.", least=0.01)
    rest_seconds: float = setting(5.0, "To watch the broker at rest.", least=0)
    payload_bytes: int = 100

    @property
    def pending(self) -> int:
        """How many other messages wait."""
        return self.number if self.of == PENDING else 0

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        """One run on a broker of its own."""
        steady = LatenessScenario(self.store, rate=self.rate, seconds=self.seconds)
        async with set_up(self, folder, told, pending=self.pending, payload_bytes=self.payload_bytes) as setup:
            client, name = setup.client, setup.topic
            others = [f"{name}-{at}" for at in range(1, self.number) if self.of == TOPICS]
            for other in others:
                await client.create_topic(other)
            empty = await _create_empty(client, name, self.number - 1 if self.of == EMPTY else 0)
            arrivals = Arrivals(setup.clock, steady.count)
            topics = [name, *others] * (self.number if self.of == CONSUMERS else 1)
            working = await setup.stack.enter_async_context(_consuming(client, topics, arrivals))
            rest_s = await _at_rest(setup.child, self.rest_seconds)
            feeder = await start_feeder(setup, folder, steady)
            try:
                watch = Stopwatch(broker_cpu=setup.child.cpu_s)
                await feeder.tell(str(setup.clock.now_ms() + BEGIN_MS + steady.lead_ms))
                patience_s = steady.lead_ms / 1000 + self.seconds + PATIENCE_S
                if not await arrivals.wait(patience_s, working):
                    words = feeder.last_words()
                    raise CannotMeasure(f"{arrivals.missing} of {steady.count} messages never came: {words}")
                cost_us = watch.figures(steady.count)["broker_cpu_us_per_message"]
                figures, wrong = arrivals.judged(json.loads(await feeder.line()), in_zero=False)
            finally:
                await feeder.end()
            figures["broker_resident_mib"] = setup.child.resident_bytes() / 2**20
            if empty:
                figures |= latencies(await _dropped(client, empty[:DROPPED]), "drop")
        figures["broker_cpu_us_per_message"] = cost_us
        figures["broker_at_rest_ms_per_s"] = rest_s * 1e3
        return self.report(setup.own, figures, wrong)


@asynccontextmanager
async def _consuming(
    client: timeline.Timeline, topics: Sequence[str], arrivals: Arrivals
) -> AsyncIterator[list[asyncio.Task[None]]]:
    """A consumer of each of `topics`, all of them connected; the tasks that have them."""
    consumers = [client.consumer(topic, credit=CREDIT) for topic in topics]

    async def work(consumer: timeline.Consumer) -> None:
        async for d in consumer:
            arrivals.take(d)
            d.ack_soon()

    tasks = [asyncio.ensure_future(work(consumer)) for consumer in consumers]
    try:
        async with within(PATIENCE_S, f"all of {len(topics)} consumers"):
            while await _connected(client) < len(topics):
                for task in tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(LOOK_EVERY_S)
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(consumer.aclose() for consumer in consumers))


async def _create_empty(client: timeline.Timeline, name: str, count: int) -> list[str]:
    """The names of so many topics more."""
    names = [f"{name}-empty-{at}" for at in range(count)]
    for start in range(0, count, CREATED_AT_ONCE):
        await asyncio.gather(*(client.create_topic(each) for each in names[start : start + CREATED_AT_ONCE]))
    return names


async def _dropped(client: timeline.Timeline, names: Sequence[str]) -> list[float]:
    """How long each drop took, in ms."""
    took_ms = []
    for name in names:
        began_s = time.monotonic()
        await client.drop_topic(name)
        took_ms.append((time.monotonic() - began_s) * 1e3)
    return took_ms


async def _connected(client: timeline.Timeline) -> int:
    told = await client.standing(consumers=1)
    return sum(load.consumers for broker in told.brokers for load in broker.topics)


async def _at_rest(child: Measured, seconds: float) -> float:
    """Processor seconds a second that a process takes while nobody asks it for anything, counted in steps of 10 ms."""
    await asyncio.sleep(min(seconds, SETTLED_S))
    used_s, began_s = child.cpu_s(), time.monotonic()
    await asyncio.sleep(seconds)
    return (child.cpu_s() - used_s) / (time.monotonic() - began_s) if seconds else 0.0
