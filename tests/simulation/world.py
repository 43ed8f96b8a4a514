"""One seed: some brokers, their store, producers, consumers and whatever goes wrong, in one process and virtual time.

Two phases. First everything happens while faults strike; then all faults are healed, nothing new is put, and whatever
is due must be delivered within a bound. At the end the store is dumped and the history judged.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import timeline
from tests.simulation.actors import Producer
from tests.simulation.brokers import WALL_S, Broker, BrokerClock, HistoryClock
from tests.simulation.consumers import Consumer
from tests.simulation.faults import Faults
from tests.simulation.gauges import NARROW, ROOMY
from tests.simulation.loop import Process, Timer, VirtualLoop
from tests.simulation.membership import Belief
from tests.simulation.pullers import Puller
from tests.simulation.registry import Registry
from tests.simulation.store import TroubledStore
from tests.simulation.wire import Network
from timeline.broker.node import Node
from timeline.clock import Clock
from timeline.history import Event, History, Verdict, Violation, check
from timeline.model import LEASE_AHEAD_AUTO, Topic, TopicSettings
from timeline.storage_plugins.conformance.crowd import dump_store

TIMEOUTS_S = (0.7, 2.0, 4.0)
"""How long clients wait, by seed: the shorter, the more they are told UNAVAILABLE or UNKNOWN."""
BROKERS = (1, 1, 2, 2, 3)
"""How many a seed has, by chance."""
AHEAD_MS = 50
"""The most that a message is leased ahead of its time where nobody says otherwise."""
SETTLE_S = 16.0
"""Everything that is due must be delivered so long after the faults: the longest lease and extension, a sweep, a
consumer set aside, and a margin. And where there are several brokers:"""
NOTICE_S = 6.0
"""what it takes until one that is gone is known to be."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much a seed does: `calls` of each producer, `many` in a hundred of which put several messages, while faults
    strike for `faults_s`."""

    calls: int
    many: int
    faults_s: float


FULL = Size(calls=84, many=5, faults_s=14.0)
SMALL = Size(calls=16, many=8, faults_s=6.0)
FULL_EVERY = 10
"""One seed in so many is full, the others are small: as many again in the same time, of which each finds most mistakes
nearly as often. What needs long spans, as a clock that is wrong for seconds, the full ones find; planted mistakes are
looked for with those."""


def size_of(seed: int) -> Size:
    """The size of a seed in a run of seeds."""
    return SMALL if seed % FULL_EVERY else FULL


def pullers_of(seed: int) -> int:
    """How many callers of a seed, in a run of seeds, take by single calls."""
    return random.Random(f"{seed}-pullers").choice((0, 0, 1, 2))


def _many(seed: int, asked: int) -> int:
    """How many brokers a seed has."""
    return asked or random.Random(f"{seed}-brokers").choice(BROKERS)


@dataclass(slots=True)
class Pieces:
    """What may be replaced to plant a bug: the store inside, and the broker."""

    store: Any = None
    node: Any = Node


@dataclass(slots=True)
class Outcome:
    """What became of a seed."""

    seed: int
    verdict: Verdict
    operations: int
    occurred: Counter[str] = field(default_factory=Counter)
    history: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return self.verdict.holds


class World:
    """All that a seed consists of. `brokers`: how many; 0: as many as the seed says. `pullers`: how many callers take
    by single calls."""

    def __init__(
        self, seed: int, pieces: Pieces | None = None, brokers: int = 0, size: Size = FULL, pullers: int = 0
    ) -> None:
        self.seed, self.size, self.pulling = seed, size, pullers
        self.pieces = pieces or Pieces()
        self.rng = random.Random(f"{seed}-world")
        self.loop = VirtualLoop(random.Random(f"{seed}-loop"))
        self.timer = Timer(self.loop)
        self._start_s = self.loop.time()
        self.true_clock = Clock(self._true_s, self.loop.time)
        self.network = Network(self.loop, random.Random(f"{seed}-wire"))
        perfect = self.rng.random() < 0.5
        clocks = [BrokerClock(self.loop, self.rng, perfect) for _ in range(_many(seed, brokers))]
        # With one broker its clock is the time. Where there are several, they differ from true time and from another.
        true_s = clocks[0].steady_s if len(clocks) == 1 else self._true_s
        self.history_clock = HistoryClock(true_s, self.loop.time)
        self.events: list[Event] = []
        self.occurred: Counter[str] = Counter()
        history = History("store", self.history_clock, self.events)
        store_rng = random.Random(f"{seed}-store")
        self.store = TroubledStore(self.loop, store_rng, history, self.pieces.store and self.pieces.store())
        self.pace_s = self.rng.choice((0.05, 0.1, 0.2))
        self.timeout_s = self.rng.choice(TIMEOUTS_S)
        self.topics = ("plain", "kept")
        self.belief = Belief()
        self.registry = Registry(self.loop, self.timer, random.Random(f"{seed}-registry"), self.occurred)
        self.brokers: list[Broker] = []
        self.store.brokers = len(clocks)
        for number, clock in enumerate(clocks, start=1):
            store = self.store if len(clocks) == 1 else self.store.seen_apart(random.Random(f"{seed}-store-{number}"))
            self.brokers.append(Broker(self, f"broker{number}", clock, store))
        self.limits = NARROW if self.rng.random() < 0.25 else ROOMY
        self.healed = False
        self.incarnations = 0
        self.consumers: dict[str, Consumer] = {}
        self.producers: list[Producer] = []
        self.pullers: dict[str, Puller] = {}
        self.faults = Faults(self)

    # ── what actors use ──

    def process(self, name: str) -> Process:
        return Process(self.loop, name)

    def client(self, process: Process, rng: random.Random) -> Any:
        """A driver's client in `process`, over the simulated wire."""
        make = partial(self.network.transport, process)
        return process.call(partial(self._connect, make, rng))

    def _connect(self, make: Any, rng: random.Random) -> Any:
        addresses = [broker.address for broker in self.brokers]
        if rng.random() < 0.2:
            addresses = addresses[:1]  # the others are to be learned of
        return timeline.Timeline(addresses, self.timeout_s, transport_factory=make, clock=self.true_clock, random=rng)

    def message(self, **call: Any) -> Any:
        return timeline.Message(**call)

    def token(self, delivery: Any) -> tuple[int, int]:
        """(birth, version) of a delivery."""
        return delivery.token.birth, delivery.token.version

    @property
    def operations(self) -> int:
        """How many there were so far."""
        return sum(1 for event in self.events if event.operation != "commit")

    def _true_s(self) -> float:
        return WALL_S + self.loop.time() - self._start_s

    def bound_ms(self) -> float:
        """By how much a broker's time may differ from the histories'."""
        if len(self.brokers) == 1:
            return self.brokers[0].clock.drift_ms()
        return max(broker.clock.off_ms() for broker in self.brokers)

    @property
    def settle_s(self) -> float:
        """Within what time everything that is due is delivered once all is well."""
        return SETTLE_S + (NOTICE_S if len(self.brokers) > 1 else 0.0)

    # ── brokers ──

    async def start_broker(self) -> None:
        """Starts whatever brokers do not run."""
        for broker in self.brokers:
            if broker.process is None:
                await broker.start()

    # ── consumers and producers ──

    def start_consumer(self, id: str) -> None:
        """A consumer process under `id`; the one before is left alone."""
        topic = self.topics[0] if id in ("c1", "c2") else self.topics[1]
        consumer = self.consumers[id] = Consumer(self, id, topic)
        consumer.process.run(consumer.work())

    def start_puller(self, id: str) -> None:
        """A process that takes by single calls; the one before is left alone."""
        puller = self.pullers[id] = Puller(self, id, self.topics[int(id[-1]) % 2])
        puller.process.run(puller.work())

    def restart_consumers(self) -> None:
        """Those that have ended, as whoever runs them would."""
        for id, consumer in list(self.consumers.items()):
            if consumer.process.dead or consumer.process.tasks[0].done():
                self.start_consumer(id)

    def kill(self, actor: Consumer | Producer | Puller) -> None:
        """kill -9."""
        actor.process.kill()
        self.network.cut(actor.process)
        if isinstance(actor, Consumer):
            actor.parted()

    def start_producer(self, group: str, calls: int) -> Producer:
        self.incarnations += 1
        producer = Producer(self, f"producer-{group}.{self.incarnations}", group)
        self.producers.append(producer)
        producer.process.run(producer.work(calls))
        return producer

    # ── the run ──

    async def _create_topics(self) -> None:
        rng = self.rng
        common = {
            "max_lease": 20.0,
            "max_payload_bytes": 1_000,
            "buckets": rng.choice((1, 4, 64)),
            "lease_ahead": rng.choice(("auto", 0, "30ms")),
            "redelivery_backoff": rng.choice((0, "300ms", "1s")),
        }
        plain = {**common, "lease": "2s", "max_deliveries": rng.choice((0, 25))}
        kept = {**common, "lease": "1500ms", "max_deliveries": 3, "remember": "1h"}
        client = self.client(self.process("admin"), random.Random(f"{self.seed}-admin"))
        for name, settings in zip(self.topics, (plain, kept), strict=True):
            await client.create_topic(name, **settings)
        await client.aclose()
        for topic in await self.store.inner.topics():
            told = {name: getattr(topic.settings, name) for name in ("remember_ms", "buckets", "redelivery_backoff_ms")}
            ahead_ms = topic.settings.lease_ahead_ms
            told["lease_ahead_ms"] = AHEAD_MS if ahead_ms == LEASE_AHEAD_AUTO else ahead_ms
            note = {"name": topic.name, "settings": told}
            History("admin", self.history_clock, self.events).note("topic", note)

    async def _run(self) -> float:
        if len(self.brokers) > 1:
            self.loop.create_task(self.registry.watch())
        await self.start_broker()
        await self._create_topics()
        for id in ("c1", "c2", "c3", "c4")[: 3 if len(self.brokers) == 1 else 4]:
            self.start_consumer(id)
        for number in range(self.pulling):
            self.start_puller(f"pull{number + 1}")
        for group in ("a", "a", "b"):
            self.start_producer(group, self.size.calls)
        await self.faults.strike()
        await self.faults.heal()
        await self._quiet()
        end_wall_ms = self.history_clock.now()
        for broker in self.brokers:
            await broker.drain()
        return end_wall_ms

    async def _quiet(self) -> None:
        """Waits until nothing that is due is left, or for as long as that may take."""
        until_s = self.loop.time() + self.settle_s + 1.0
        while self.loop.time() < until_s:
            await self.timer.wait(0.5)
            self.restart_consumers()  # one that was still connecting when all was healed may have given up
            now_ms = int(self.history_clock.now())
            if not any(row["state"] in ("available", "leased") for row in await self.dump(now_ms)):
                return

    async def dump(self, now_ms: int) -> list[dict[str, Any]]:
        topics = await self.store.inner.topics()
        return await dump_store(self.store.inner, topics, now_ms)

    def run(self) -> Outcome:
        """Runs the seed and judges it."""
        asyncio.set_event_loop(self.loop)
        # What a collection would finalise, and when, is no part of a seed.
        collects = gc.isenabled()
        gc.disable()
        try:
            end_wall_ms = self.loop.run_until_complete(self._run())
            rows = self.loop.run_until_complete(self.dump(int(end_wall_ms)))
        finally:
            self.loop.finish()
            asyncio.set_event_loop(None)
            if collects:
                gc.enable()
        verdict = check(
            self.events,
            rows,
            clock_bound_ms=self.bound_ms(),
            transit_bound_ms=0.0,
            liveness_bound_ms=self.settle_s * 1_000.0,
            end_wall_ms=end_wall_ms,
        )
        for task in self.loop.tasks:
            error = task.exception() if task.done() and not task.cancelled() else None
            if error is not None and not isinstance(error, timeline.TimelineError):
                verdict.violations.append(Violation("ERROR", f"a task ended by {error!r}"))
        for failure in self.loop.failures:
            sentence = f"{failure.get('message')}: {failure.get('exception')!r}"
            verdict.violations.append(Violation("ERROR", sentence))
        self.occurred += self.network.occurred + self.store.occurred
        return Outcome(self.seed, verdict, self.operations, self.occurred)

    def history(self) -> list[str]:
        """The history as lines, the same for the same seed."""
        return [event.as_line() for event in self.events]


__all__ = ["Outcome", "Pieces", "Topic", "TopicSettings", "World"]
