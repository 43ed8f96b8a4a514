"""A hot instant: many messages due in one millisecond."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import timeline
from timeline.bench.figures import BenchReport, Target
from timeline.bench.ledger import Ledger
from timeline.bench.load import Told, batch_at
from timeline.bench.processes import CannotMeasure
from timeline.bench.profile import Profile
from timeline.bench.scenario import Scenario, Setup, set_up, setting
from timeline.bench.topic import scheme

PUT_BATCH = 10_000
LEAD_MS = 1_500
LEAD_S_A_MESSAGE = 1 / 20_000
TRIES = 3
DRAINED_S = {"memory": 1.0, "sqlite": 4.0, "postgresql": 4.0}
"""For 100,000."""


@dataclass(frozen=True, slots=True)
class BurstScenario(Scenario):
    """Many messages due in one millisecond.

    \b
    Example:
      timeline bench burst --store sqlite:// --messages 100000
    """

    name = "burst"
    store: str = "memory://"
    messages: int = setting(100_000)
    credit: int = setting(20_000, most=1_000_000)
    payload_bytes: int = 100

    @property
    def targets(self) -> tuple[Target, ...]:
        always = (Target("first_late_ms", 5.0), Target("lateness_min_ms", 0.0, least=True))
        drained_s = DRAINED_S.get(scheme(self.store))
        if drained_s is None:
            return always
        return (Target("drained_s", drained_s * self.messages / 100_000), *always)

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        """One burst, from its due until the last ack is answered."""
        async with set_up(self, folder) as setup:
            lead_ms = LEAD_MS + int(self.messages * LEAD_S_A_MESSAGE * 1000)
            for attempt in range(TRIES):
                # A topic each time, so that what was put too late for an instant is not met again.
                topic = f"{setup.topic}-{attempt}"
                await setup.client.create_topic(topic)
                due_ms = setup.clock.now_ms() + lead_ms
                ledger = Ledger(self.messages, self.messages)
                await self._put(setup.client.producer(topic), due_ms, ledger)
                if setup.clock.now_ms() < due_ms - 500:
                    return await self._drain(setup, topic, due_ms, ledger)
                lead_ms *= 2
        raise CannotMeasure(f"{self.messages} messages could not be put within {lead_ms / 2000:.0f} s")

    async def _put(self, producer: timeline.Producer, due_ms: int, ledger: Ledger) -> None:
        for start in range(0, self.messages, PUT_BATCH):
            size = min(PUT_BATCH, self.messages - start)
            await ledger.put_batch(producer, batch_at(size, due_ms, self.payload_bytes))

    async def _drain(self, setup: Setup, topic: str, due_ms: int, ledger: Ledger) -> BenchReport:
        async with setup.client.consumer(topic, credit=self.credit) as consumer:
            await ledger.through(ledger.take(consumer, setup.clock.now))
            drained_ms = setup.clock.now() - due_ms
        late = ledger.lateness()
        figures = {"drained_s": drained_ms / 1000, "first_late_ms": late["lateness_min_ms"], **late}
        return self.report(setup.own, figures, ledger.verdict())
