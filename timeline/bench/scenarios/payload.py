"""What a payload costs those who do not need it: moves, extends, acks and cancels of large messages and small ones."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path

import timeline
from timeline.bench.figures import BenchReport, Target, median
from timeline.bench.load import Told
from timeline.bench.processes import within
from timeline.bench.profile import Profile
from timeline.bench.scenario import Scenario, Setup, set_up, setting
from timeline.clock import Clock

LATER_MS = 86_400_000
WARM_UPS = 3
PATIENCE_S = 120.0
REST_S = 0.15
"""Between two calls: three times what SQLite waits before it removes payloads, so that no call meets a removal."""
MAX_PAYLOAD_BYTES = 64 * 1024 * 1024


OPERATIONS = ("move", "extend", "ack", "cancel")


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
    messages: int = setting(20, "Of each size.")

    @property
    def targets(self) -> tuple[Target, ...]:
        return tuple(Target(f"{what}_ratio", 1.2) for what in OPERATIONS)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes by name; operations take them in turn."""
        return {"small": self.small_bytes, "large": self.large_bytes}

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        """Medians of each operation, one call at a time; everything is put before the first one is timed, so that no
        large write is in flight beside what is measured."""
        timer = Timer()
        async with set_up(self, folder, max_payload_bytes=MAX_PAYLOAD_BYTES, lease="10m") as setup:
            producer = setup.producer()
            numbers = range(self.messages + WARM_UPS)
            later_ms = setup.clock.now_ms() + LATER_MS
            for number in numbers:
                for size, size_bytes in self.sizes.items():
                    await producer.produce(os.urandom(size_bytes), at=later_ms, id=f"{size}-{number}")
            for number in numbers:
                for size in self.sizes:
                    await timer.timed("move", size, producer.move(f"{size}-0", at=later_ms + number + 1))
            for number in numbers:
                for size in self.sizes:
                    await timer.timed("cancel", size, producer.cancel(f"{size}-{number}"))
            await self._settles(setup, producer, timer)
        figures = {f"{what}_{size}_ms": median(times[WARM_UPS:]) for (what, size), times in timer.took_ms.items()}
        for what in OPERATIONS:
            figures[f"{what}_ratio"] = figures[f"{what}_large_ms"] / figures[f"{what}_small_ms"]
        return self.report(setup.own, figures, [])

    async def _settles(self, setup: Setup, producer: timeline.Producer, timer: Timer) -> None:
        """Delivers messages of both sizes, all of them before the first is settled; then extends and acknowledges
        them."""
        count = 2 * (self.messages + WARM_UPS)
        for number in range(count // 2):
            for size, size_bytes in self.sizes.items():
                await producer.produce(os.urandom(size_bytes), in_=0, id=f"{size}-due-{number}")
        taken: dict[str, list[timeline.Delivery]] = {size: [] for size in self.sizes}
        credit_bytes = count * (self.large_bytes + 1_000)
        async with setup.client.consumer(producer.topic, credit=count, credit_bytes=credit_bytes) as consumer:
            for _ in range(count):
                async with within(PATIENCE_S, "a delivery"):
                    delivery = await consumer.take()
                assert delivery is not None
                taken[delivery.id.partition("-")[0]].append(delivery)
            pairs = list(zip(taken["small"], taken["large"], strict=True))
            for small, large in pairs:
                await timer.timed("extend", "small", small.extend("20m"))
                await timer.timed("extend", "large", large.extend("20m"))
            for small, large in pairs:
                await timer.timed("ack", "small", small.ack())
                await timer.timed("ack", "large", large.ack())


class Timer:
    """How long calls took, by operation and size."""

    def __init__(self) -> None:
        self.took_ms: dict[tuple[str, str], list[float]] = {}
        self._clock = Clock()

    async def timed(self, what: str, size: str, call: Awaitable[object]) -> None:
        """Awaits `call` and notes how long it took. Rests before: what the call before left to do after its answer (a
        payload's bytes to delete) is not this one's."""
        await asyncio.sleep(REST_S)
        start_ms = self._clock.monotonic_ms()
        await call
        self.took_ms.setdefault((what, size), []).append(self._clock.monotonic_ms() - start_ms)
