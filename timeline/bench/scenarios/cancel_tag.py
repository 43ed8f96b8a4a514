"""Cancelling a campaign: by tag, while everything else goes on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from timeline.bench.figures import BenchReport, Target
from timeline.bench.load import TAG, Told
from timeline.bench.profile import Profile
from timeline.bench.scenario import Scenario, Setup, set_up, setting
from timeline.bench.scenarios.lateness import LatenessScenario, measured_run
from timeline.bench.topic import scheme
from timeline.errors import Invalid
from timeline.model import Status

WALK_TIMEOUT = "10m"


@dataclass(frozen=True, slots=True)
class CancelTagScenario(Scenario):
    """Cancel by tag, and how late others are meanwhile.

    \b
    Example:
      timeline bench cancel-tag --pending 10000000 --tagged 1000000
    """

    name = "cancel-tag"
    store: str = "sqlite://"
    pending: int = setting(1_000_000, "Tagged ones included.")
    tagged: int = setting(100_000)
    rate: float = 1_000.0
    seconds: float = setting(5.0, "Lateness of others.", least=0.1)
    payload_bytes: int = 100

    @property
    def targets(self) -> tuple[Target, ...]:
        others = Target("p99_ratio", 2.0)
        if scheme(self.store) not in ("sqlite", "postgresql"):
            return (others,)
        return (Target("rate_per_s", 20_000.0, least=True), others)

    def check(self) -> None:
        if self.tagged > self.pending:
            raise Invalid("--tagged is at most --pending: tagged messages are some of those that are pending")

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        """The walk's rate, and lateness of others without it and during it."""
        async with set_up(
            self, folder, told, pending=self.pending, tagged=self.tagged, payload_bytes=self.payload_bytes
        ) as setup:
            figures, wrong = await self._walk(setup, folder)
        return self.report(setup.own, figures, wrong)

    async def _walk(self, setup: Setup, folder: Path) -> tuple[dict[str, float], list[str]]:
        """Cancels what is tagged once others are being delivered: the figures and what was wrong."""
        other, clock = LatenessScenario(rate=self.rate, seconds=self.seconds), setup.clock
        before, wrong = await measured_run(setup, other, folder)
        begun = asyncio.Event()
        meanwhile = asyncio.ensure_future(measured_run(setup, other, folder, begun))
        await asyncio.wait({meanwhile, asyncio.ensure_future(begun.wait())}, return_when=asyncio.FIRST_COMPLETED)
        start_ms = clock.monotonic_ms()
        progress = await setup.producer().cancel_tag(TAG, timeout=WALK_TIMEOUT)
        took_s = (clock.monotonic_ms() - start_ms) / 1000
        during, trouble = await meanwhile
        left = await setup.left()
        cancelled, untagged = progress.counts.get(Status.OK, 0), self.pending - self.tagged
        wrong += trouble
        if cancelled != self.tagged or left != untagged:
            wrong.append(f"{cancelled} of {self.tagged} were cancelled, {left} of {untagged} others are left")
        figures = {
            "rate_per_s": cancelled / took_s,
            "elapsed_s": took_s,
            "p99_before_ms": before["lateness_p99_ms"],
            "p99_during_ms": during["lateness_p99_ms"],
            "p99_ratio": during["lateness_p99_ms"] / before["lateness_p99_ms"],
        }
        return figures, wrong
