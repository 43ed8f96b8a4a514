"""Cancelling a campaign: by tag, while everything else goes on."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path

import timeline
from timeline.bench.figures import Report, Target
from timeline.bench.lateness import TOPIC, Lateness, measured_run, observed
from timeline.bench.load import TAG, Told, fill, fill_store
from timeline.bench.processes import broker
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


async def run_cancel_tag(asked: CancelTag, folder: Path, told: Told | None = None) -> Report:
    """The walk's rate, and lateness of others without it and during it."""
    untagged = asked.pending - asked.tagged
    in_memory = asked.store.startswith("memory:")
    if not in_memory:
        await fill_store(asked.store, TOPIC, asked.pending, asked.payload_bytes, told, asked.tagged)
    other = Lateness(rate=asked.rate, seconds=asked.seconds)
    count = max(1, int(asked.rate * asked.seconds))
    async with (
        broker(folder, asked.store) as (_, address),
        observed() as clock,
        timeline.Timeline(address, "60s", clock=clock) as client,
    ):
        await client.create_topic(TOPIC)
        producer = client.producer(TOPIC)
        if in_memory:
            await fill(producer, untagged, asked.payload_bytes, told)
            await fill(producer, asked.tagged, asked.payload_bytes, told, TAG)
        before, wrong = await measured_run(client, clock, other, address, folder, count)
        begun = asyncio.Event()
        meanwhile = asyncio.ensure_future(measured_run(client, clock, other, address, folder, count, begun))
        await asyncio.wait({meanwhile, asyncio.ensure_future(begun.wait())}, return_when=asyncio.FIRST_COMPLETED)
        start_ms = clock.monotonic_ms()
        progress = await producer.cancel_tag(TAG, timeout=WALK_TIMEOUT)
        took_s = (clock.monotonic_ms() - start_ms) / 1000
        during, trouble = await meanwhile
        left = int((await client.forecast(TOPIC, window="32d", step="1d")).counts.sum())
    cancelled = progress.counts.get(Status.OK, 0)
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
    targets = (Target("rate_per_s", 20_000.0, least=True), Target("p99_ratio", 2.0))
    return Report("cancel-tag", asdict(asked), figures, targets, wrong)
