"""Memory: what a pending message costs a broker beyond its payload and id."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from timeline.bench.figures import BenchReport, Target
from timeline.bench.load import ID_BYTES, Told, fill
from timeline.bench.profile import Profile
from timeline.bench.scenario import Scenario, set_up, setting
from timeline.bench.topic import scheme

WARM_UP = 50_000


@dataclass(frozen=True, slots=True)
class MemoryScenario(Scenario):
    """What a pending message costs a broker in memory.

    \b
    Example:
      timeline bench memory --pending 10000000
    """

    name = "memory"
    store: str = "memory://"
    pending: int = setting(1_000_000)
    payload_bytes: int = 100

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        """Resident memory before and after. What is put before the first look pays for buffers that are
        there anyway."""
        async with set_up(self, folder) as setup:
            producer = setup.producer()
            await fill(producer, WARM_UP, self.payload_bytes)
            before_bytes = setup.child.resident_bytes()
            await fill(producer, self.pending, self.payload_bytes, told)
            after_bytes = setup.child.resident_bytes()
            there = await setup.left()
        each = (after_bytes - before_bytes) / self.pending
        figures = {"resident_bytes_each": each, "broker_resident_mib": after_bytes / 1024 / 1024}
        target = Target("broker_resident_mib", 150.0)
        if scheme(self.store) == "memory":
            figures = {"beyond_payload_and_id_bytes": each - self.payload_bytes - ID_BYTES, **figures}
            target = Target("beyond_payload_and_id_bytes", 400.0)
        wrong = [] if there == self.pending + WARM_UP else [f"{there} of {self.pending + WARM_UP} messages are there"]
        return self.report(setup.own, figures, wrong, targets=(target,))
