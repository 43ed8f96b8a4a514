"""The console: how long its pages take beside very many messages, and how late others are while people click."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from timeline.bench.figures import BenchReport, Target
from timeline.bench.load import Told, batch_sizes
from timeline.bench.processes import CannotMeasure, Profile
from timeline.bench.scenario import Scenario, Setup, Stopwatch, set_up, setting
from timeline.bench.scenarios.http import client, figures_of, gateway
from timeline.bench.scenarios.lateness import LatenessScenario, measured_run
from timeline.driver.batch import Batch

BURIED_AT_ONCE = 1_000
REASONS = ("504 after 31 s", "smtp.example.org refused it: 550 no user 17", "the address is unknown")
TAGS = ("spring", "autumn")
ROUNDS = 10
"""Visits to each page, by one person, in the first part."""
VISITS = 1_000_000
"""Of people who are told to end before they have made them all."""


@dataclass(frozen=True, slots=True)
class ConsoleScenario(Scenario):
    """The console's pages with messages pending and dead letters, and lateness beside people who click.

    \b
    Example:
      timeline bench console --store sqlite://
    """

    name = "console"
    store: str = "sqlite://"
    pending: int = setting(1_000_000, "Messages that wait.", least=0)
    dead: int = setting(100_000, "Dead letters.", least=1)
    people: int = setting(10, "People who click, a page per second each.")
    rate: float = setting(500.0, "Messages per second for lateness.")
    seconds: float = setting(20.0, "Length of each run.", least=0.1)

    @property
    def targets(self) -> tuple[Target, ...]:
        return (
            Target("page_max_ms", 300.0),
            Target("late_p99_ratio", 1.5),
            Target("gateway_resident_mib", 150.0),
        )

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        wrong: list[str] = []
        async with (
            set_up(self, folder, told, pending=self.pending, tagged=self.pending // 10, payload_bytes=100) as setup,
            gateway(folder, setup.address, "--no-push", "--until-input-ends") as (child, address),
        ):
            await self._bury(setup)
            watch = Stopwatch(broker=setup.child.cpu_s, gateway=child.cpu_s)
            async with client(folder, "click", address, setup.topic, ROUNDS, 1) as visitor:
                figures = await figures_of(visitor)
            visits = figures.pop("visits")
            figures |= {name.replace("message", "page"): value for name, value in watch.costs(int(visits)).items()}
            begun_mib = child.resident_bytes() / 2**20
            await setup.client.create_topic(f"{setup.topic}-late")
            late = replace(setup, own=replace(setup.own, name=f"{setup.topic}-late"))
            steady = LatenessScenario(self.store, rate=self.rate, seconds=self.seconds)
            alone, trouble = await measured_run(late, steady, folder)
            wrong += trouble
            async with client(folder, "click", address, setup.topic, VISITS, self.people) as people:
                beside, trouble = await measured_run(late, steady, folder)
                if people.process.returncode is not None:
                    raise CannotMeasure(f"the people ended: {people.last_words()}")
            wrong += trouble
            ended_mib = child.resident_bytes() / 2**20
        figures |= {"late_p99_ms": alone["lateness_p99_ms"], "late_p99_ms_beside_people": beside["lateness_p99_ms"]}
        figures["late_p99_ratio"] = beside["lateness_p99_ms"] / alone["lateness_p99_ms"]
        figures |= {"gateway_resident_mib": ended_mib, "gateway_grown_mib": ended_mib - begun_mib}
        return self.report(setup.own, figures, wrong)

    async def _bury(self, setup: Setup) -> None:
        """Make the dead letters: put them due now, take them and bury them."""
        producer = setup.producer()
        for at, size in enumerate(batch_sizes(self.dead, 10 * BURIED_AT_ONCE)):
            payloads = [b"." * 100] * size
            batch = Batch(payloads=payloads, in_=0, tags=[TAGS[(at + one) % 2] for one in range(size)])
            (await producer.produce_many(batch)).raise_failed()
        buried = 0
        while buried < self.dead:
            taken = await setup.client.take(setup.topic, BURIED_AT_ONCE, "30s", lease="10m")
            if not taken:
                raise CannotMeasure(f"{self.dead - buried} messages did not come to be buried")
            reason = REASONS[buried // BURIED_AT_ONCE % len(REASONS)]
            told = await setup.client.settle([one.receipt for one in taken], "bury", reason=reason)
            told.raise_failed()
            buried += len(taken)
