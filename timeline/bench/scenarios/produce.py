"""Single puts: many tasks, each awaiting one `p.produce()` after the other."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from timeline.bench.figures import BenchReport, Target, latencies
from timeline.bench.load import Told, batch_at, ids_of
from timeline.bench.profile import Profile
from timeline.bench.scenario import Scenario, Stopwatch, cpu_s_of_self, set_up, setting

FROM_NOW_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class ProduceScenario(Scenario):
    """Single `await p.produce()` from many tasks.

    \b
    Example:
      timeline bench produce --store sqlite://
    """

    name = "produce"
    store: str = "memory://"
    messages: int = setting(100_000)
    tasks: int = setting(100, "Tasks that put at once.")
    payload_bytes: int = 100

    @property
    def targets(self) -> tuple[Target, ...]:
        return (Target("rate_per_s", 20_000.0, least=True),)

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        """Every put is answered OK, and all of them are there at the end."""
        async with set_up(self, folder) as setup:
            producer, clock = setup.producer(), setup.clock
            due_ms = clock.now_ms() + FROM_NOW_MS
            batch = batch_at(self.messages, due_ms, self.payload_bytes)
            todo = list(zip(batch.payloads, [id.decode() for id in ids_of(batch)], strict=True))
            todo.reverse()
            took_ms: list[float] = []

            async def work() -> None:
                while todo:
                    payload, id = todo.pop()
                    asked_ms = clock.monotonic_ms()
                    await producer.produce(payload, at=due_ms, id=id)
                    took_ms.append(clock.monotonic_ms() - asked_ms)

            watch = Stopwatch(broker_cpu=setup.child.cpu_s, client_cpu=cpu_s_of_self)
            await asyncio.gather(*(work() for _ in range(self.tasks)))
            figures = watch.figures(self.messages)
            del figures["elapsed_s"]
            there = await setup.left("2h")
        wrong = [] if there == self.messages else [f"{there} of {self.messages} messages are there"]
        return self.report(setup.own, figures | latencies(took_ms, "answer"), wrong)
