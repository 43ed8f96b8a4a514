"""What a payload costs those who do not need it: moves, extends, acks and cancels of large messages and small ones."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from dataclasses import asdict, dataclass
from pathlib import Path

import timeline
from timeline.bench.figures import Report, Target, median
from timeline.bench.processes import broker, within
from timeline.bench.topic import own_topic
from timeline.clock import Clock

LATER_MS = 86_400_000
WARM_UPS = 3
PATIENCE_S = 120.0
REST_S = 0.15
"""Between two calls: three times what SQLite waits before it removes payloads, so that no call meets a removal."""
MAX_PAYLOAD_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Payload:
    """What to run: `messages` of each size, the two in turn."""

    store: str = "sqlite://"
    large_bytes: int = 10 * 1024 * 1024
    small_bytes: int = 100
    messages: int = 20


OPERATIONS = ("move", "extend", "ack", "cancel")


async def run_payload(asked: Payload, folder: Path) -> Report:
    """Medians of each operation, one call at a time; everything is put before the first one is timed, so that no
    large write is in flight beside what is measured."""
    sizes = {"small": asked.small_bytes, "large": asked.large_bytes}
    timer = Timer()
    async with (
        own_topic(asked.store, "payload") as own,
        broker(folder, asked.store) as (_, address),
        timeline.connect(address, timeout="60s") as client,
    ):
        await client.create_topic(own.name, max_payload_bytes=MAX_PAYLOAD_BYTES, lease="10m")
        producer = client.producer(own.name)
        numbers = range(asked.messages + WARM_UPS)
        later_ms = Clock().now_ms() + LATER_MS
        for number in numbers:
            for size, size_bytes in sizes.items():
                await producer.produce(os.urandom(size_bytes), at=later_ms, id=f"{size}-{number}")
        for number in numbers:
            for size in sizes:
                id, at_ms = f"{size}-0", later_ms + number + 1
                await timer.timed("move", size, producer.move(id, at=at_ms))
        for number in numbers:
            for size in sizes:
                await timer.timed("cancel", size, producer.cancel(f"{size}-{number}"))
        await _settles(client, producer, timer, asked, sizes)
    figures = {f"{what}_{size}_ms": median(times[WARM_UPS:]) for (what, size), times in timer.took_ms.items()}
    for what in OPERATIONS:
        figures[f"{what}_ratio"] = figures[f"{what}_large_ms"] / figures[f"{what}_small_ms"]
    targets = tuple(Target(f"{what}_ratio", 1.2) for what in OPERATIONS)
    return Report("payload", asdict(asked), figures, targets, store=own.store)


async def _settles(
    client: timeline.Timeline, producer: timeline.Producer, timer: Timer, asked: Payload, sizes: dict[str, int]
) -> None:
    """Delivers messages of both sizes, all of them before the first is settled; then extends and acknowledges them."""
    count = 2 * (asked.messages + WARM_UPS)
    for number in range(count // 2):
        for size, size_bytes in sizes.items():
            await producer.produce(os.urandom(size_bytes), in_=0, id=f"{size}-due-{number}")
    taken: dict[str, list[timeline.Delivery]] = {size: [] for size in sizes}
    async with client.consumer(
        producer.topic, credit=count, credit_bytes=count * (asked.large_bytes + 1_000)
    ) as consumer:
        for _ in range(count):
            async with within(PATIENCE_S, "a delivery"):
                delivery = await consumer.take()
            assert delivery is not None
            taken[delivery.id.partition("-")[0]].append(delivery)
        for small, large in zip(taken["small"], taken["large"], strict=True):
            await timer.timed("extend", "small", small.extend("20m"))
            await timer.timed("extend", "large", large.extend("20m"))
        for small, large in zip(taken["small"], taken["large"], strict=True):
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
