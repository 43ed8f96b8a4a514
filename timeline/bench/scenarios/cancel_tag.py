"""Cancelling a campaign: by tag, while everything else goes on."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path

import timeline
from timeline.bench.figures import Report, Target
from timeline.bench.load import TAG, Told, fill, fill_store
from timeline.bench.processes import broker
from timeline.bench.scenarios.lateness import Lateness, measured_run, observed
from timeline.bench.topic import own_topic, scheme
from timeline.clock import Clock
from timeline.model import Status

WALK_TIMEOUT = "10m"


@dataclass(frozen=True, slots=True)
class CancelTag:
    """What to run: cancel `tagged` of `pending` messages; before it and meanwhile others are delivered at `rate`."""

    store: str = "sqlite://"
    pending: int = 1_000_000
    tagged: int = 100_000
    rate: float = 1_000.0
    seconds: float = 5.0
    payload_bytes: int = 100

    @property
    def targets(self) -> tuple[Target, ...]:
        """What is asked of it, on any store and on its own."""
        others = Target("p99_ratio", 2.0)
        if scheme(self.store) not in ("sqlite", "postgresql"):
            return (others,)
        return (Target("rate_per_s", 20_000.0, least=True), others)


async def run_cancel_tag(asked: CancelTag, folder: Path, told: Told | None = None) -> Report:
    """The walk's rate, and lateness of others without it and during it."""
    async with own_topic(asked.store, "cancel-tag") as own:
        if scheme(asked.store) != "memory":
            await fill_store(asked.store, own.name, asked.pending, asked.payload_bytes, told, asked.tagged)
        async with (
            broker(folder, asked.store) as (_, address),
            observed() as clock,
            timeline.Timeline(address, "60s", clock=clock) as client,
        ):
            await client.create_topic(own.name)
            if scheme(asked.store) == "memory":
                producer = client.producer(own.name)
                await fill(producer, asked.pending - asked.tagged, asked.payload_bytes, told)
                await fill(producer, asked.tagged, asked.payload_bytes, told, TAG)
            figures, wrong = await _walk(client, clock, asked, own.name, address, folder)
    return Report("cancel-tag", asdict(asked), figures, asked.targets, wrong, store=own.store)


async def _walk(
    client: timeline.Timeline, clock: Clock, asked: CancelTag, topic: str, address: str, folder: Path
) -> tuple[dict[str, float], list[str]]:
    """Cancels what is tagged once others are being delivered: the figures and what was wrong."""
    other = Lateness(rate=asked.rate, seconds=asked.seconds)
    count = max(1, int(asked.rate * asked.seconds))
    before, wrong = await measured_run(client, clock, other, topic, address, folder, count)
    begun = asyncio.Event()
    meanwhile = asyncio.ensure_future(measured_run(client, clock, other, topic, address, folder, count, begun))
    await asyncio.wait({meanwhile, asyncio.ensure_future(begun.wait())}, return_when=asyncio.FIRST_COMPLETED)
    start_ms = clock.monotonic_ms()
    progress = await client.producer(topic).cancel_tag(TAG, timeout=WALK_TIMEOUT)
    took_s = (clock.monotonic_ms() - start_ms) / 1000
    during, trouble = await meanwhile
    left = int((await client.forecast(topic, window="32d", step="1d")).counts.sum())
    cancelled, untagged = progress.counts.get(Status.OK, 0), asked.pending - asked.tagged
    wrong += trouble
    if cancelled != asked.tagged or left != untagged:
        wrong.append(f"{cancelled} of {asked.tagged} were cancelled, {left} of {untagged} others are left")
    figures = {
        "rate_per_s": cancelled / took_s,
        "elapsed_s": took_s,
        "p99_before_ms": before["lateness_p99_ms"],
        "p99_during_ms": during["lateness_p99_ms"],
        "p99_ratio": during["lateness_p99_ms"] / before["lateness_p99_ms"],
    }
    return figures, wrong
