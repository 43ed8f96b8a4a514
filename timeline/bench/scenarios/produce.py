"""Single puts: many tasks, each awaiting one `p.produce()` after the other."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path

import timeline
from timeline.bench.figures import Report, Target, latencies
from timeline.bench.load import batch_at
from timeline.bench.processes import broker
from timeline.bench.scenarios.cycle import cpu_s_of_self
from timeline.bench.topic import own_topic
from timeline.clock import Clock

FROM_NOW_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Produce:
    """What to run: `messages` puts by `tasks` tasks of one producer."""

    store: str = "memory://"
    messages: int = 100_000
    tasks: int = 100
    payload_bytes: int = 100


async def run_produce(asked: Produce, folder: Path) -> Report:
    """One run; every put is answered OK, and all of them are there at the end."""
    async with (
        own_topic(asked.store, "produce") as own,
        broker(folder, asked.store) as (child, address),
        timeline.connect(address, timeout="60s") as client,
    ):
        await client.create_topic(own.name)
        producer = client.producer(own.name)
        clock = Clock()
        due_ms = clock.now_ms() + FROM_NOW_MS
        batch = batch_at(asked.messages, due_ms, asked.payload_bytes)
        assert batch.ids is not None
        todo = list(zip(batch.payloads, [id.decode() for id in batch.ids], strict=True))
        todo.reverse()
        took_ms: list[float] = []

        async def work() -> None:
            while todo:
                payload, id = todo.pop()
                asked_ms = clock.monotonic_ms()
                await producer.produce(payload, at=due_ms, id=id)
                took_ms.append(clock.monotonic_ms() - asked_ms)

        own_cpu_s, broker_cpu_s, start_ms = cpu_s_of_self(), child.cpu_s(), clock.monotonic_ms()
        await asyncio.gather(*(work() for _ in range(asked.tasks)))
        elapsed_s = (clock.monotonic_ms() - start_ms) / 1000
        figures = {
            "rate_per_s": asked.messages / elapsed_s,
            "broker_cpu_us_per_message": (child.cpu_s() - broker_cpu_s) * 1e6 / asked.messages,
            "client_cpu_us_per_message": (cpu_s_of_self() - own_cpu_s) * 1e6 / asked.messages,
            **latencies(took_ms, "answer"),
        }
        there = int((await client.forecast(own.name, window="2h", step="1h")).counts.sum())
        targets = (Target("rate_per_s", 20_000.0, least=True),)
        wrong = [] if there == asked.messages else [f"{there} of {asked.messages} messages are there"]
        return Report("produce", asdict(asked), figures, targets, wrong, store=own.store)
