"""A broker of several killed -9 under load: how long until the buckets that it dealt are delivered again.

Single messages come due at a steady rate, put by a client that knows all brokers; a consumer at each broker, which
hears of the others from its own. Which broker dealt a bucket is told by who got its messages last before the kill. What
the killed one had leased waits for its lease's end, as it must: that is told apart, as the latest of all.
"""

from __future__ import annotations

import asyncio
import os
import signal
import zlib
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import timeline
from timeline.bench.figures import BenchReport, Target, latencies
from timeline.bench.load import STEADY_LEAD_MS, Told, put_steadily
from timeline.bench.processes import CannotMeasure, within
from timeline.bench.profile import Profile
from timeline.bench.scenario import Scenario, observed, setting
from timeline.bench.scenarios.cluster import ClusterScenario, joined, start_brokers
from timeline.bench.topic import own_topic
from timeline.clock import Clock
from timeline.driver.delivery import DeliveryBatch
from timeline.driver.tasks import end
from timeline.errors import TimelineError

BUCKETS = 64
LEASE = "10s"
SETTLED_S = 60.0
AGAIN_S = 6.0
"""The membership's time to live of 5 s, and one more."""


@dataclass(frozen=True, slots=True)
class FailoverScenario(Scenario):
    """A broker of several is killed -9 under load: how long until its buckets are delivered again.

    \b
    Example:
      timeline bench failover --brokers 3
    """

    name = "failover"
    store: str = ""
    sync: str = ""
    brokers: int = setting(3, least=2, most=64)
    rate: float = setting(1_000.0, "Messages a second.")
    before_s: float = setting(8.0, "Until one is killed.")
    after_s: float = setting(12.0, "From then on.")
    payload_bytes: int = 100

    @property
    def targets(self) -> tuple[Target, ...]:
        return (Target("delivered_again_s", AGAIN_S),)

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        """Kill the last of the brokers, and wait until everything is delivered."""
        if self.brokers < 2:
            raise CannotMeasure("one broker alone has nobody to take its buckets over: 2 or more")
        cluster = ClusterScenario(self.store, self.sync, self.brokers)
        async with own_topic(self.store, self.name) as own, observed() as clock, AsyncExitStack() as stack:
            started = await start_brokers(cluster, folder, stack)
            places = [address for _, address in started]

            async def client(*addresses: str) -> timeline.Timeline:
                return await stack.enter_async_context(timeline.Timeline(list(addresses), "60s", clock=clock))

            clients = [await client(place) for place in places]
            await joined(clients)
            await clients[0].create_topic(own.name, buckets=BUCKETS, lease=LEASE)
            seen = _Seen(int(self.rate * (self.before_s + self.after_s)), clock)
            takes = [asyncio.create_task(_take(one, own.name, seen, number)) for number, one in enumerate(clients)]
            stack.push_async_callback(end, *takes)
            start_ms = clock.now() + STEADY_LEAD_MS
            producer = (await client(*places)).producer(own.name)
            putting = asyncio.create_task(
                put_steadily([producer], seen.count, self.rate, start_ms, clock, self.payload_bytes)
            )
            stack.push_async_callback(end, putting)
            killed = len(started) - 1
            await asyncio.sleep((start_ms - clock.now()) / 1_000 + self.before_s)
            killed_ms = clock.now()
            os.kill(started[killed][0], signal.SIGKILL)
            await putting
            wrong = []
            try:
                async with within(SETTLED_S, "the last of the deliveries"):
                    await seen.whole.wait()
            except CannotMeasure:
                wrong.append(f"{seen.count - len(seen.rows)} of {seen.count} messages were never delivered")
            figures = seen.figures(killed, killed_ms)
            if min(at_ms - due_ms for _, due_ms, at_ms, _ in seen.rows) < 0:
                wrong.append("a message was handed out before its due")
            return self.report(own, figures, wrong)


class _Seen:
    """What consumers got: of each message its bucket, its due, when it was handed out first and by which broker."""

    def __init__(self, count: int, clock: Clock) -> None:
        self.count, self.clock = count, clock
        self.rows: list[tuple[int, float, float, int]] = []
        self.again = self.refused = 0
        self.whole = asyncio.Event()
        self._ids: set[bytes] = set()

    def got(self, batch: DeliveryBatch, broker: int) -> None:
        now = self.clock.now()
        for id, due_ms in zip(batch.ids.tolist(), batch.due_ms.tolist(), strict=True):
            if id in self._ids:
                self.again += 1
                continue
            self._ids.add(id)
            self.rows.append((zlib.crc32(id) % BUCKETS, due_ms, now, broker))
        if len(self._ids) == self.count:
            self.whole.set()

    def figures(self, killed: int, killed_ms: float) -> dict[str, float]:
        """Raises CannotMeasure when the killed broker dealt nothing."""
        dealt: dict[int, int] = {}
        first: dict[int, float] = {}
        for bucket, due_ms, at_ms, broker in self.rows:
            if at_ms < killed_ms:
                dealt[bucket] = broker
            elif due_ms > killed_ms:
                first.setdefault(bucket, at_ms)
        mine = [bucket for bucket, broker in dealt.items() if broker == killed]
        again_ms = [first[bucket] - killed_ms for bucket in mine if bucket in first]
        if not again_ms:
            raise CannotMeasure("the broker that was killed dealt no bucket: measure for longer")
        others = [at_ms - due_ms for bucket, due_ms, at_ms, _ in self.rows if due_ms > killed_ms and bucket not in mine]
        late = [at_ms - due_ms for _, due_ms, at_ms, _ in self.rows]
        return {
            "buckets_of_the_killed": len(mine),
            "delivered_again_first_s": min(again_ms) / 1_000,
            "delivered_again_s": max(again_ms) / 1_000,
            **latencies(others or [0.0], "others_late"),
            "late_max_ms": max(late),
            "delivered_twice": self.again,
            "acks_refused": self.refused,
        }


async def _take(client: timeline.Timeline, topic: str, seen: _Seen, broker: int) -> None:
    async with client.consumer(topic, credit=2_000) as consumer:
        async for batch in consumer.batches():
            seen.got(batch, broker)
            try:
                seen.refused += len((await batch.ack(timeout="60s")).failed)
            except TimelineError:
                seen.refused += len(batch)
