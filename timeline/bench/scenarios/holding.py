"""The cost of held messages: a broker's memory, large payloads that are not read, and a restart."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import timeline
from timeline.bench.figures import BenchReport, Target, worst
from timeline.bench.load import ID_BYTES, Told, fill
from timeline.bench.processes import CannotMeasure, Profile, broker, within
from timeline.bench.scenario import Scenario, Setup, set_up, setting
from timeline.bench.stores import fill_store, own_topic, put_overdue, scheme
from timeline.clock import Clock

MEMORY_WARM_UP = 50_000
LATER_MS = 86_400_000
WARM_UPS = 3
DELIVERY_PATIENCE_S = 120.0
REST_S = 0.15
"""Between two calls: three times what SQLite waits before it removes payloads, so that no call meets a removal."""
MAX_PAYLOAD_BYTES = 64 * 1024 * 1024
OPERATIONS = ("move", "extend", "ack", "cancel")
RESTART_PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class MemoryScenario(Scenario):
    """The memory that a pending message takes in a broker.

    \b
    Example:
      timeline bench memory --pending 10000000
    """

    name = "memory"
    store: str = "memory://"
    pending: int = setting(1_000_000)
    payload_bytes: int = 100

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        """Compare resident memory before and after. The warm-up pays for buffers that exist anyway."""
        async with set_up(self, folder) as setup:
            producer = setup.producer()
            await fill(producer, MEMORY_WARM_UP, self.payload_bytes)
            before_bytes = setup.child.resident_bytes()
            await fill(producer, self.pending, self.payload_bytes, told)
            after_bytes = setup.child.resident_bytes()
            there = await setup.left()
        each = (after_bytes - before_bytes) / self.pending
        figures = {"resident_bytes_each": each, "broker_resident_mib": after_bytes / 2**20}
        target = Target("broker_resident_mib", 150.0)
        if scheme(self.store) == "memory":
            figures = {"beyond_payload_and_id_bytes": each - self.payload_bytes - ID_BYTES, **figures}
            target = Target("beyond_payload_and_id_bytes", 400.0)
        put = self.pending + MEMORY_WARM_UP
        wrong = [] if there == put else [f"{there} of {put} messages are there"]
        return self.report(setup.own, figures, wrong, targets=(target,))


@dataclass(frozen=True, slots=True)
class PayloadScenario(Scenario):
    """Moves, extends, acks and cancels of large messages against small ones.

    \b
    Example:
      timeline bench payload --large-bytes 10485760
    """

    name = "payload"
    store: str = "sqlite://"
    large_bytes: int = setting(10 * 1024 * 1024)
    small_bytes: int = setting(100)
    messages: int = setting(20, "Messages of each size.")

    @property
    def targets(self) -> tuple[Target, ...]:
        return tuple(Target(f"{what}_ratio", 1.2) for what in OPERATIONS)

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes by name."""
        return {"small": self.small_bytes, "large": self.large_bytes}

    @property
    def turns(self) -> list[tuple[int, str]]:
        """Return number and size of each message, sizes in turn."""
        return [(number, size) for number in range(self.messages + WARM_UPS) for size in self.sizes]

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        """Take the median of each operation, one call at a time.

        Everything is put before the first call is timed, so that no large write is in flight meanwhile.
        """
        timer = _Timer()
        async with set_up(self, folder, max_payload_bytes=MAX_PAYLOAD_BYTES, lease="10m") as setup:
            producer = setup.producer()
            later_ms = setup.clock.now_ms() + LATER_MS
            for number, size in self.turns:
                await producer.produce(os.urandom(self.sizes[size]), at=later_ms, id=f"{size}-{number}")
            for number, size in self.turns:
                await timer.timed("move", size, producer.move(f"{size}-0", at=later_ms + number + 1))
            for number, size in self.turns:
                await timer.timed("cancel", size, producer.cancel(f"{size}-{number}"))
            await self._settles(setup, producer, timer)
        figures = {f"{what}_{size}_ms": median(times[WARM_UPS:]) for (what, size), times in timer.took_ms.items()}
        for what in OPERATIONS:
            figures[f"{what}_ratio"] = figures[f"{what}_large_ms"] / figures[f"{what}_small_ms"]
        return self.report(setup.own, figures, [])

    async def _settles(self, setup: Setup, producer: timeline.Producer, timer: _Timer) -> None:
        """Deliver all messages of both sizes; then extend and acknowledge them."""
        count = len(self.turns)
        for number, size in self.turns:
            await producer.produce(os.urandom(self.sizes[size]), in_=0, id=f"{size}-due-{number}")
        taken: dict[str, list[timeline.Delivery]] = {size: [] for size in self.sizes}
        credit_bytes = count * (self.large_bytes + 1_000)
        async with setup.client.consumer(producer.topic, credit=count, credit_bytes=credit_bytes) as consumer:
            for _ in range(count):
                async with within(DELIVERY_PATIENCE_S, "a delivery"):
                    delivery = await consumer.take()
                assert delivery is not None
                taken[delivery.id.partition("-")[0]].append(delivery)
            for number, size in self.turns:
                await timer.timed("extend", size, taken[size][number].extend("20m"))
            for number, size in self.turns:
                await timer.timed("ack", size, taken[size][number].ack())


class _Timer:
    """How long calls took, by operation and size."""

    def __init__(self) -> None:
        self.took_ms: dict[tuple[str, str], list[float]] = {}
        self._clock = Clock()

    async def timed(self, what: str, size: str, call: Awaitable[object]) -> None:
        """Await `call` and note its time.

        Rests before it, so that work after the last call's answer, such as a payload to delete, is not counted.
        """
        await asyncio.sleep(REST_S)
        start_ms = self._clock.monotonic_ms()
        await call
        self.took_ms.setdefault((what, size), []).append(self._clock.monotonic_ms() - start_ms)


@dataclass(frozen=True, slots=True)
class RestartScenario(Scenario):
    """From the broker's start until its first delivery.

    \b
    Example:
      timeline bench restart --pending 10000000
    """

    name = "restart"
    store: str = "sqlite://"
    pending: int = setting(1_000_000, least=0)
    restarts: int = setting(3, "Number of restarts; the slowest one counts.")
    payload_bytes: int = 100

    @property
    def targets(self) -> tuple[Target, ...]:
        held = scheme(self.store) in ("sqlite", "postgresql", "redis")
        return (Target("first_delivery_s", 3.0),) if held else ()

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        """Restart some times, with one message overdue each time. Raises CannotMeasure for a store in memory."""
        if scheme(self.store) == "memory":
            raise CannotMeasure("memory:// keeps nothing over a restart: give a store that does, such as sqlite://")
        async with own_topic(self.store, self.name) as own:
            await fill_store(self.store, own.name, self.pending, self.payload_bytes, told)
            runs = [await self._one(own.name, folder) for _ in range(self.restarts)]
        each = ", ".join(f"{run['first_delivery_s']:.2f}" for run in runs)
        return self.report(own, dict(worst(runs, "first_delivery_s")), [], notes=[f"each restart: {each} s"])

    async def _one(self, topic: str, folder: Path) -> dict[str, float]:
        await put_overdue(self.store, topic, self.payload_bytes)
        clock = Clock()
        start_ms = clock.monotonic_ms()
        async with broker(folder, self.store) as (child, address):
            listening_ms = clock.monotonic_ms() - start_ms
            async with timeline.connect(address, timeout="60s") as client, client.consumer(topic, credit=1) as consumer:
                async with within(RESTART_PATIENCE_S, "the first delivery"):
                    delivery = await consumer.take()
                delivered_ms = clock.monotonic_ms() - start_ms
                assert delivery is not None
                await delivery.ack()
            return {
                "first_delivery_s": delivered_ms / 1000,
                "listening_s": listening_ms / 1000,
                "broker_resident_mib": child.resident_bytes() / 2**20,
            }
