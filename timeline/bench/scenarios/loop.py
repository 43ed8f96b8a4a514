"""The loops that people write, over a backlog: each message acknowledged before the next is taken, by both drivers;
handlers; `timeline consume`; and acks that nobody waits for.

The broker is one process, the consumer this one or, for the command, another. Every message comes once.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import timeline
from timeline.bench.figures import BenchReport
from timeline.bench.load import FILL_BATCH, Told, batch_at
from timeline.bench.processes import CannotMeasure, Measured, within
from timeline.bench.profile import Profile
from timeline.bench.scenario import Scenario, Stopwatch, set_up, setting
from timeline.clock import Clock

OVERDUE_MS = 1_000
CONCURRENCY = 8
PATIENCE_S = 600.0
CHUNK_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class LoopScenario(Scenario):
    """Loops over a backlog: one ack after the other, handlers, `timeline consume`, and `ack_soon`.

    \b
    Example:
      timeline bench loop --store memory://
    """

    name = "loop"
    store: str = "sqlite://"
    messages: int = setting(3_000, "Of loops that wait for each answer.")
    many: int = setting(30_000, "Of the others: consume and ack_soon.")
    payload_bytes: int = 100

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        """Each loop over a backlog of its own, one after the other."""
        figures: dict[str, float] = {}
        wrong: list[str] = []
        async with set_up(self, folder) as setup:
            for name, (take, many) in LOOPS.items():
                count = self.many if many else self.messages
                backlog = _Backlog(setup.client, setup.address, f"{setup.topic}-{name}", count, folder)
                await backlog.fill(self.payload_bytes)
                watch = Stopwatch(broker_cpu=setup.child.cpu_s)
                async with within(PATIENCE_S, f"the end of the {name} loop"):
                    await take(backlog)
                figures[f"{name}_per_s"] = count / (backlog.clock.monotonic_ms() - backlog.began_ms) * 1e3
                used = watch.figures(count)["broker_cpu_us_per_message"]
                figures[f"{name}_broker_cpu_us_per_message"] = used
                left = int((await setup.client.forecast(backlog.topic, window="1h", step="1h")).counts.sum())
                if left or backlog.taken != count or backlog.doubled:
                    wrong.append(f"{name}: {backlog.taken} of {count} came, {backlog.doubled} twice, {left} are left")
        return self.report(setup.own, figures, wrong)


class _Backlog:
    """A topic with `count` overdue messages, and what was taken of them. `began_ms`: when the first one was."""

    def __init__(self, client: timeline.Timeline, address: str, topic: str, count: int, folder: Path) -> None:
        self.client, self.address, self.topic, self.count, self.folder = client, address, topic, count, folder
        self.clock = Clock()
        self.began_ms = 0.0
        self.taken = 0
        self._ids: set[str] = set()

    async def fill(self, size_bytes: int) -> None:
        """Make the topic, and put the messages."""
        await self.client.create_topic(self.topic)
        producer = self.client.producer(self.topic)
        for start in range(0, self.count, FILL_BATCH):
            batch = batch_at(min(FILL_BATCH, self.count - start), self.clock.now_ms() - OVERDUE_MS, size_bytes)
            (await producer.produce_many(batch, timeout="60s")).raise_failed()

    def take(self, id: str) -> bool:
        """One was taken; whether all are."""
        if not self.taken:
            self.began_ms = self.clock.monotonic_ms()
        self.taken += 1
        self._ids.add(id)
        return self.taken == self.count

    @property
    def doubled(self) -> int:
        return self.taken - len(self._ids)


Take = Callable[[_Backlog], Awaitable[None]]


async def _plain(backlog: _Backlog) -> None:
    async with backlog.client.consumer(backlog.topic) as consumer:
        async for d in consumer:
            last = backlog.take(d.id)
            await d.ack()
            if last:
                return


async def _plain_sync(backlog: _Backlog) -> None:
    await asyncio.to_thread(_plain_in_thread, backlog)


def _plain_in_thread(backlog: _Backlog) -> None:
    with timeline.connect_sync(backlog.address) as client, client.consumer(backlog.topic) as consumer:
        for d in consumer:
            last = backlog.take(d.id)
            d.ack()
            if last:
                return


async def _handlers(backlog: _Backlog) -> None:
    async def handle(d: timeline.Delivery) -> None:
        if backlog.take(d.id):
            consumer.stop_taking()

    async with backlog.client.consumer(backlog.topic) as consumer:
        await consumer.run(handle, CONCURRENCY)


async def _ack_soon(backlog: _Backlog) -> None:
    async with backlog.client.consumer(backlog.topic) as consumer:
        async for d in consumer:
            d.ack_soon()
            if backlog.take(d.id):
                return


async def _command(backlog: _Backlog) -> None:
    what = ("consume", backlog.topic, "--count", str(backlog.count), "--address", backlog.address)
    child = await Measured.start("consume", backlog.folder, sys.executable, "-m", "timeline", *what)
    try:
        assert child.process.stdout is not None
        rest = b""
        while chunk := await child.process.stdout.read(CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                backlog.take(line.split(b"  ")[1].decode())
        if await child.process.wait():
            raise CannotMeasure(f"timeline consume ended with code {child.process.returncode}: {child.last_words()}")
    finally:
        await child.end()


LOOPS: dict[str, tuple[Take, bool]] = {
    "plain": (_plain, False),
    "sync": (_plain_sync, False),
    "run": (_handlers, False),
    "consume": (_command, True),
    "ack_soon": (_ack_soon, True),
}
"""A loop and whether it waits for no answer, so that it takes `many`; by the name in the figures."""
