"""The cycle: put → due → leased → pushed → acked, through gRPC, every id checked, every payload cut out.

The broker is one process, producer and consumer together another: two cores, a core each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import timeline
from timeline.bench.figures import BenchReport, Target
from timeline.bench.ledger import Ledger, earliest_ahead_ms
from timeline.bench.load import Told, batch_at, batch_sizes, ids_of
from timeline.bench.profile import Profile
from timeline.bench.scenario import Scenario, Setup, Stopwatch, cpu_s_of_self, set_up, setting
from timeline.bench.topic import scheme
from timeline.clock import Clock
from timeline.driver.consumer import Consumer
from timeline.driver.delivery import Delivery
from timeline.errors import TimelineError

APIS = ("batch", "object", "handlers")
PUT_TASKS = 3
ACKS_UNDER_WAY = 8
WINDOW_BATCHES = 8
HANDLERS = 100
API_PER_S = {"batch": 400_000.0, "object": 80_000.0, "handlers": 15_000.0}
STORE_PER_S = {
    "memory": 400_000.0,
    "redis": 60_000.0,
    "sqlite": 40_000.0,
    "postgresql": 15_000.0,
    "cassandra": 4_000.0,
}
SQLITE_PENDING_PER_S = 20_000.0


Work = Callable[[Consumer, Ledger], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class CycleScenario(Scenario):
    """Put → due → leased → pushed → acked, every id and payload checked.

    \b
    Example:
      timeline bench cycle --messages 1000000
    """

    # `warm_up`: uncounted messages before. `journal`: where the broker keeps its events, empty: nowhere.
    name = "cycle"
    store: str = "memory://"
    api: str = setting("batch", "How the client works.", choices=APIS)
    messages: int = setting(500_000)
    batch: int = setting(2_000, "Messages a put.", most=100_000)
    pending: int = setting(0, "Others that wait meanwhile.", least=0)
    payload_bytes: int = setting(100, least=16)
    warm_up: int = 20_000
    buckets: int = setting(64, "Of the topic.", most=4096)
    journal: str = ""

    @property
    def targets(self) -> tuple[Target, ...]:
        """What is asked of it: of the client's way of working, and of the store; none where a store has none."""
        wanted = STORE_PER_S.get(scheme(self.store))
        if wanted is None:
            return ()
        if scheme(self.store) == "sqlite" and self.pending >= 1_000_000:
            wanted = SQLITE_PENDING_PER_S
        return (Target("rate_per_s", min(wanted, API_PER_S[self.api]), least=True),)

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        """One run of the cycle, after a warm-up."""
        async with set_up(
            self, folder, told, pending=self.pending, payload_bytes=self.payload_bytes, buckets=self.buckets,
            options=("--journal", self.journal) if self.journal else (),
        ) as setup:  # fmt: skip
            if warm := min(self.warm_up, self.messages):
                await self._turn(setup, warm)
            if profile is not None:
                await setup.stack.enter_async_context(
                    profile.of({"broker": setup.child.pid, "client": profile.own_pid})
                )
            watch = Stopwatch(broker_cpu=setup.child.cpu_s, client_cpu=cpu_s_of_self)
            ledger = await self._turn(setup, self.messages)
            figures = watch.figures(self.messages)
            figures["broker_resident_mib"] = setup.child.resident_bytes() / 1024 / 1024
            return self.report(setup.own, figures, ledger.verdict())

    async def _turn(self, setup: Setup, messages: int) -> Ledger:
        """So many messages through the whole cycle; returns when every ack is answered."""
        window = max(WINDOW_BATCHES * self.batch, 2 * HANDLERS)
        ledger = Ledger(messages, window)
        credit_bytes = max(64 * 1024 * 1024, window * self.payload_bytes)
        consumer = setup.client.consumer(setup.topic, credit=min(window, 1_000_000), credit_bytes=credit_bytes)
        sizes = batch_sizes(messages, self.batch)
        producer, clock = setup.producer(), Clock()

        async def put() -> None:
            for size in sizes:
                batch = batch_at(size, clock.now_ms(), self.payload_bytes)
                await ledger.put_batch(producer, batch, None if self.api == "batch" else _messages(batch))

        try:
            await ledger.through(_WORK[self.api](consumer, ledger), *(put() for _ in range(PUT_TASKS)))
        finally:
            await consumer.aclose()
        if consumer.stats.settle_errors:
            ledger.wrong.append(f"{consumer.stats.settle_errors} acks failed")
        return ledger


def _messages(batch: timeline.Batch) -> list[timeline.Message]:
    """One object a message, as a person's code makes them."""
    rows = zip(batch.payloads, ids_of(batch), batch.time_ms.tolist(), strict=True)
    return [timeline.Message(payload, at=at, id=id.decode()) for payload, id, at in rows]


async def _by_batches(consumer: Consumer, ledger: Ledger) -> None:
    acking: set[asyncio.Task[None]] = set()

    async for batch in consumer.batches():
        ledger.met_with(batch.ids, batch.payloads)
        if (ahead_ms := earliest_ahead_ms(batch.due_ms, batch.handed_ms)) > 0:
            ledger.early(ahead_ms)
        task = asyncio.create_task(ledger.ack(batch))
        acking.add(task)
        if len(acking) >= ACKS_UNDER_WAY:
            done, acking = await asyncio.wait(acking, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()


def _look(d: Delivery, ledger: Ledger) -> None:
    id = d.id.encode()
    ledger.met([id])
    if not d.payload.startswith(id):
        ledger.wrong.append("a payload was handed out with another message's id")


async def _by_objects(consumer: Consumer, ledger: Ledger) -> None:
    def failed(d: Delivery, error: TimelineError) -> None:
        ledger.wrong.append(f"an ack was refused: {error.code}")

    consumer.on_settle_error = failed
    async for d in consumer:
        _look(d, ledger)
        d.ack_soon()
        ledger.settle(1)


async def _by_handlers(consumer: Consumer, ledger: Ledger) -> None:
    async def handle(d: Delivery) -> None:
        _look(d, ledger)
        await d.ack()
        ledger.settle(1)

    await consumer.run(handle, HANDLERS)


_WORK: dict[str, Work] = {"batch": _by_batches, "object": _by_objects, "handlers": _by_handlers}
