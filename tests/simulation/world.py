"""One seed: a broker, its store, producers, consumers and whatever goes wrong, in one process and virtual time.

Two phases. First everything happens while faults strike; then all faults are healed, nothing new is put, and whatever
is due must be delivered within a bound. At the end the store is dumped and the history judged.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import timeline
from tests.simulation.actors import Producer
from tests.simulation.consumers import Consumer
from tests.simulation.faults import Faults
from tests.simulation.gauges import NARROW, ROOMY, Gauges
from tests.simulation.loop import Process, Timer, VirtualLoop
from tests.simulation.membership import Belief, WrongMembership
from tests.simulation.store import TroubledStore
from tests.simulation.wire import Network
from timeline.broker.node import Node
from timeline.clock import Clock
from timeline.history import Event, History, Verdict, Violation, check
from timeline.model import LEASE_AHEAD_AUTO, Topic, TopicSettings
from timeline.storage_plugins.dump import dump_store

WALL_S = 1_700_000_000.0
ADDRESS = "broker:9000"
TIMEOUTS_S = (0.7, 2.0, 4.0)
"""How long clients wait, by seed: the shorter, the more they are told UNAVAILABLE or UNKNOWN."""
AHEAD_MS = 50
"""The most that a message is leased ahead of its time where nobody says otherwise."""
SETTLE_S = 16.0
"""Everything that is due must be delivered so long after the faults: the longest lease and extension, a sweep, a
consumer set aside, and a margin."""


@dataclass(slots=True)
class Pieces:
    """What may be replaced to plant a bug: the store inside, and the broker."""

    store: Any = None
    node: Any = Node


class BrokerClock:
    """The clocks of the broker's machine, which may be off, drift, and be set by hand (`step_s`)."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, perfect: bool) -> None:
        self._loop, self._start_s = loop, loop.time()
        self.offset_s = 0.0 if perfect else rng.uniform(-0.2, 0.2)
        self.drift = 0.0 if perfect else rng.uniform(-2e-4, 2e-4)
        self.step_s = 0.0

    def wall_s(self) -> float:
        return self.steady_s() + self.step_s

    def steady_s(self) -> float:
        """The wall clock without its steps, which must not be followed: what the broker goes by."""
        gone_s = self._loop.time() - self._start_s
        return WALL_S + gone_s * (1.0 + self.drift) + self.offset_s

    def monotonic_s(self) -> float:
        gone_s = self._loop.time() - self._start_s
        return self._start_s + gone_s * (1.0 + self.drift)

    def bound_ms(self) -> float:
        """By how much spans of its time may differ from the machine's: histories tell the time by the one clock that
        decides."""
        return 0.001 + 1_000.0 * abs(self.drift) * (self._loop.time() - self._start_s)


class HistoryClock(Clock):
    """The clock of all histories: the machine's monotonic time, and the wall time that the broker goes by."""

    def __init__(self, broker: BrokerClock, monotonic_s: Callable[[], float]) -> None:
        super().__init__(broker.steady_s, monotonic_s)
        self._broker = broker

    def now(self) -> float:
        return self._broker.steady_s() * 1_000.0


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
    """All that a seed consists of."""

    def __init__(self, seed: int, pieces: Pieces | None = None) -> None:
        self.seed = seed
        self.pieces = pieces or Pieces()
        self.rng = random.Random(f"{seed}-world")
        self.loop = VirtualLoop(random.Random(f"{seed}-loop"))
        self.timer = Timer(self.loop)
        start_s = self.loop.time()
        self.true_clock = Clock(lambda: WALL_S + self.loop.time() - start_s, self.loop.time)
        self.network = Network(self.loop, random.Random(f"{seed}-wire"))
        self.clock = BrokerClock(self.loop, self.rng, perfect=self.rng.random() < 0.5)
        self.history_clock = HistoryClock(self.clock, self.loop.time)
        self.events: list[Event] = []
        self.occurred: Counter[str] = Counter()
        history = History("store", self.history_clock, self.events)
        store_rng = random.Random(f"{seed}-store")
        self.store = TroubledStore(self.loop, store_rng, history, self.pieces.store and self.pieces.store())
        self.pace_s = self.rng.choice((0.05, 0.1, 0.2))
        self.timeout_s = self.rng.choice(TIMEOUTS_S)
        self.topics = ("plain", "kept")
        self.belief = Belief()
        self.limits = NARROW if self.rng.random() < 0.25 else ROOMY
        self.gauges: Gauges | None = None
        self.healed = False
        self.incarnations = 0
        self.broker: Process | None = None
        self.node: Node | None = None
        self.consumers: dict[str, Consumer] = {}
        self.producers: list[Producer] = []
        self.faults = Faults(self)

    # ── what actors use ──

    def process(self, name: str) -> Process:
        return Process(self.loop, name)

    def client(self, process: Process, rng: random.Random) -> Any:
        """A driver's client in `process`, over the simulated wire."""
        make = partial(self.network.transport, process)
        return process.call(partial(self._connect, make, rng))

    def _connect(self, make: Any, rng: random.Random) -> Any:
        return timeline.Timeline(ADDRESS, self.timeout_s, transport_factory=make, clock=self.true_clock, random=rng)

    def message(self, **call: Any) -> Any:
        return timeline.Message(**call)

    def token(self, delivery: Any) -> tuple[int, int]:
        """(birth, version) of a delivery."""
        return delivery.token.birth, delivery.token.version

    # ── the broker ──

    async def start_broker(self) -> None:
        """A broker process over the store that is there."""
        self.incarnations += 1
        process = self.broker = self.process(f"broker.{self.incarnations}")
        rng = random.Random(f"{self.seed}-broker-{self.incarnations}")
        self.store.broker = process.name

        def make() -> Node:
            clock = Clock(self.clock.wall_s, self.clock.monotonic_s)
            return self.pieces.node(
                store=self.store,
                clock=clock,
                membership=WrongMembership(self.belief),
                random_bits=rng.getrandbits,
                name=process.name,
                address=ADDRESS,
                limits=self.limits,
            )

        async def start(node: Node) -> None:
            while True:
                try:
                    await node.start()
                    return
                except timeline.TimelineError:
                    await self.timer.wait(0.1)

        node = self.node = process.call(make)
        self.gauges = Gauges(node, self.occurred)
        await process.run(start(node))
        self.network.listen(ADDRESS, process, node.service)

    def _note_queues(self) -> None:
        if self.gauges is not None:
            self.gauges.note(History("gauges", self.history_clock, self.events))

    def kill_broker(self) -> None:
        """kill -9."""
        if self.broker is not None:
            self._note_queues()
            self.broker.kill()
            self.network.cut(self.broker)
            self.broker = self.node = None

    async def drain_broker(self) -> None:
        """SIGTERM, and its end."""
        broker, node = self.broker, self.node
        if broker is not None and node is not None:
            self.broker = self.node = None
            task = broker.run(node.drain(3_000))
            while not task.done() and not broker.dead:
                await self.timer.wait(0.05)
            self._note_queues()
            broker.kill()
            self.network.cut(broker)

    # ── consumers and producers ──

    def start_consumer(self, id: str) -> None:
        """A consumer process under `id`; the one before is left alone."""
        topic = self.topics[0] if id in ("c1", "c2") else self.topics[1]
        consumer = self.consumers[id] = Consumer(self, id, topic)
        consumer.process.run(consumer.work())

    def kill(self, actor: Consumer | Producer) -> None:
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
        assert self.broker is not None
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
        await self.start_broker()
        await self._create_topics()
        for id in ("c1", "c2", "c3"):
            self.start_consumer(id)
        for group in ("a", "a", "b"):
            self.start_producer(group, 84)
        await self.faults.strike()
        await self.faults.heal()
        await self._quiet()
        end_wall_ms = self.history_clock.now()
        await self.drain_broker()
        return end_wall_ms

    async def _quiet(self) -> None:
        """Waits until nothing that is due is left, or for as long as that may take."""
        until_s = self.loop.time() + SETTLE_S + 1.0
        while self.loop.time() < until_s:
            await self.timer.wait(0.5)
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
            clock_bound_ms=self.clock.bound_ms(),
            transit_bound_ms=0.0,
            liveness_bound_ms=SETTLE_S * 1_000.0,
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
        done = sum(1 for event in self.events if event.operation != "commit")
        return Outcome(self.seed, verdict, done, self.occurred)

    def history(self) -> list[str]:
        """The history as lines, the same for the same seed."""
        return [event.as_line() for event in self.events]


__all__ = ["Outcome", "Pieces", "Topic", "TopicSettings", "World"]
