"""A restart: from the broker's process starting until its first delivery, with many messages pending."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import timeline
from timeline.bench.figures import BenchReport, Target, worst
from timeline.bench.load import Told, fill_store, put_overdue
from timeline.bench.processes import CannotMeasure, start_broker, within
from timeline.bench.profile import Profile
from timeline.bench.scenario import Scenario, setting
from timeline.bench.topic import own_topic, scheme
from timeline.child import free_ports
from timeline.clock import Clock

PATIENCE_S = 300.0


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
    restarts: int = setting(3, "The slowest one counts.")
    payload_bytes: int = 100

    @property
    def targets(self) -> tuple[Target, ...]:
        held = scheme(self.store) in ("sqlite", "postgresql", "redis")
        return (Target("first_delivery_s", 3.0),) if held else ()

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        """The slowest of some restarts, one message overdue before each. Raises CannotMeasure for a store that keeps
        nothing."""
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
        (port,) = free_ports(1)
        child, address = await start_broker(folder, self.store, f"127.0.0.1:{port}")
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
