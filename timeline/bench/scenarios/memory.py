"""Memory: what a pending message costs a broker beyond its payload and id."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import timeline
from timeline.bench.figures import Report, Target
from timeline.bench.load import ID_BYTES, Told, fill
from timeline.bench.processes import broker
from timeline.bench.topic import own_topic, scheme

WARM_UP = 50_000


@dataclass(frozen=True, slots=True)
class Memory:
    """What to run: `pending` messages put through a broker."""

    store: str = "memory://"
    pending: int = 1_000_000
    payload_bytes: int = 100


async def run_memory(asked: Memory, folder: Path, told: Told | None = None) -> Report:
    """Resident memory before and after. What is put before the first look pays for buffers that are there anyway."""
    async with (
        own_topic(asked.store, "memory") as own,
        broker(folder, asked.store) as (child, address),
        timeline.connect(address, timeout="60s") as client,
    ):
        await client.create_topic(own.name)
        producer = client.producer(own.name)
        await fill(producer, WARM_UP, asked.payload_bytes)
        before_bytes = child.resident_bytes()
        await fill(producer, asked.pending, asked.payload_bytes, told)
        after_bytes = child.resident_bytes()
        there = int((await client.forecast(own.name, window="32d", step="1d")).counts.sum())
    each = (after_bytes - before_bytes) / asked.pending
    if scheme(asked.store) == "memory":
        figures = {"beyond_payload_and_id_bytes": each - asked.payload_bytes - ID_BYTES, "resident_bytes_each": each}
        targets = (Target("beyond_payload_and_id_bytes", 400.0),)
    else:
        figures, targets = {"resident_bytes_each": each}, (Target("broker_resident_mib", 150.0),)
    figures["broker_resident_mib"] = after_bytes / 1024 / 1024
    wrong = [] if there == asked.pending + WARM_UP else [f"{there} of {asked.pending + WARM_UP} messages are there"]
    return Report("memory", asdict(asked), figures, targets, wrong, store=own.store)
