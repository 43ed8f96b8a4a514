"""A restart: from the broker's process starting until its first delivery, with many messages pending."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import timeline
from timeline.bench.figures import Report, Target, worst
from timeline.bench.load import Told, fill_store, put_overdue
from timeline.bench.processes import CannotMeasure, free_port, start_broker, within
from timeline.bench.topic import own_topic, scheme
from timeline.clock import Clock

TARGETS = {scheme: (Target("first_delivery_s", 3.0),) for scheme in ("sqlite", "postgresql", "redis")}
PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Restart:
    """What to run: `restarts` on a store with `pending` messages, one overdue before each restart."""

    store: str = "sqlite://"
    pending: int = 1_000_000
    restarts: int = 3
    payload_bytes: int = 100


async def run_restart(asked: Restart, folder: Path, told: Told | None = None) -> Report:
    """The slowest of some restarts. Raises CannotMeasure for a store that keeps nothing."""
    if scheme(asked.store) == "memory":
        raise CannotMeasure("memory:// keeps nothing over a restart: give a store that does, such as sqlite://")
    async with own_topic(asked.store, "restart") as own:
        await fill_store(asked.store, own.name, asked.pending, asked.payload_bytes, told)
        runs = [await _one(asked, own.name, folder) for _ in range(asked.restarts)]
    figures = dict(worst(runs, "first_delivery_s"))
    told_each = ", ".join(f"{run['first_delivery_s']:.2f}" for run in runs)
    notes = [f"each restart: {told_each} s"]
    targets = TARGETS.get(scheme(asked.store), ())
    return Report("restart", asdict(asked), figures, targets, notes=notes, store=own.store)


async def _one(asked: Restart, topic: str, folder: Path) -> dict[str, float]:
    await put_overdue(asked.store, topic, asked.payload_bytes)
    clock = Clock()
    start_ms = clock.monotonic_ms()
    child, address = await start_broker(folder, asked.store, f"127.0.0.1:{free_port()}")
    try:
        listening_ms = clock.monotonic_ms() - start_ms
        async with timeline.connect(address, timeout="60s") as client, client.consumer(topic, credit=1) as consumer:
            async with within(PATIENCE_S, "the first delivery"):
                delivery = await consumer.take()
            delivered_ms = clock.monotonic_ms() - start_ms
            assert delivery is not None
            await delivery.ack()
        return {
            "first_delivery_s": delivered_ms / 1000,
            "listening_s": listening_ms / 1000,
            "broker_resident_mib": child.resident_bytes() / 1024 / 1024,
        }
    finally:
        await child.end()
