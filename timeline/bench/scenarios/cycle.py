"""The cycle: put → due → leased → pushed → acked, through gRPC, every id checked, every payload cut out.

The broker is one process, producer and consumer together another: two cores, a core each.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import timeline
from timeline.bench.figures import Report, Target
from timeline.bench.ledger import Ledger, earliest_ahead_ms
from timeline.bench.load import Told, batch_at, fill, fill_store
from timeline.bench.processes import Measured, broker, cpu_s
from timeline.bench.profile import Profile
from timeline.bench.topic import OwnTopic, own_topic, scheme
from timeline.clock import Clock
from timeline.driver.consumer import Consumer
from timeline.driver.delivery import Delivery, DeliveryBatch
from timeline.driver.producer import Producer
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


@dataclass(frozen=True, slots=True)
class Cycle:
    """What to run. `messages` after `warm_up` uncounted ones, in batches of `batch`, while `pending` others wait, in a
    topic of so many `buckets`. `journal`: where the broker keeps its events, empty: nowhere."""

    store: str = "memory://"
    api: str = "batch"
    messages: int = 500_000
    batch: int = 2_000
    pending: int = 0
    payload_bytes: int = 100
    warm_up: int = 20_000
    buckets: int = 64
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


Work = Callable[[Consumer, Ledger], Awaitable[None]]


def journalled(asked: Cycle) -> tuple[str, ...]:
    """The broker's options for its journal."""
    return ("--journal", asked.journal) if asked.journal else ()


async def run_cycle(asked: Cycle, folder: Path, told: Told | None = None, profile: Profile | None = None) -> Report:
    """One run of the cycle. Raises CannotMeasure; what a run finds wrong stands in the report."""
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(own_topic(asked.store, "cycle"))
        if asked.pending and scheme(asked.store) != "memory":
            await fill_store(asked.store, own.name, asked.pending, asked.payload_bytes, told, buckets=asked.buckets)
        child, address = await stack.enter_async_context(broker(folder, asked.store, *journalled(asked)))
        client = await stack.enter_async_context(timeline.connect(address, timeout="60s"))
        await client.create_topic(own.name, buckets=asked.buckets)
        producer = client.producer(own.name)
        if asked.pending and scheme(asked.store) == "memory":
            await fill(producer, asked.pending, asked.payload_bytes, told)
        warm = min(asked.warm_up, asked.messages)
        if warm:
            await _turn(client, producer, asked, warm)
        if profile is not None:
            await stack.enter_async_context(profile.of({"broker": child.pid, "client": profile.own_pid}))
        return await _measured(client, producer, asked, child, own)


async def _measured(
    client: timeline.Timeline, producer: Producer, asked: Cycle, child: Measured, own: OwnTopic
) -> Report:
    clock = Clock()
    own_cpu_s, broker_cpu_s = cpu_s_of_self(), child.cpu_s()
    start_ms = clock.monotonic_ms()
    ledger = await _turn(client, producer, asked, asked.messages)
    elapsed_s = (clock.monotonic_ms() - start_ms) / 1000
    count = asked.messages
    figures = {
        "rate_per_s": count / elapsed_s,
        "elapsed_s": elapsed_s,
        "broker_cpu_us_per_message": (child.cpu_s() - broker_cpu_s) * 1e6 / count,
        "client_cpu_us_per_message": (cpu_s_of_self() - own_cpu_s) * 1e6 / count,
        "broker_resident_mib": child.resident_bytes() / 1024 / 1024,
    }
    return Report("cycle", asdict(asked), figures, asked.targets, ledger.verdict(), store=own.store)


async def _turn(client: timeline.Timeline, producer: Producer, asked: Cycle, messages: int) -> Ledger:
    """So many messages through the whole cycle; returns when every ack is answered."""
    window = max(WINDOW_BATCHES * asked.batch, 2 * HANDLERS)
    ledger = Ledger(messages, window)
    credit = min(window, 1_000_000)
    consumer = client.consumer(
        producer.topic, credit=credit, credit_bytes=max(64 * 1024 * 1024, window * asked.payload_bytes)
    )
    try:
        await ledger.through(_WORK[asked.api](consumer, ledger), *_shares(producer, ledger, asked, messages))
    finally:
        await consumer.aclose()
    if consumer.stats.settle_errors:
        ledger.wrong.append(f"{consumer.stats.settle_errors} acks failed")
    return ledger


def _shares(producer: Producer, ledger: Ledger, asked: Cycle, messages: int) -> list[Awaitable[None]]:
    """Tasks that put `messages` between them, batch by batch."""
    left = messages
    clock = Clock()

    async def work() -> None:
        nonlocal left
        while left > 0:
            size = min(asked.batch, left)
            left -= size
            batch = batch_at(size, clock.now_ms(), asked.payload_bytes)
            assert batch.ids is not None
            await ledger.admit(batch.ids.tolist())
            given = batch if asked.api == "batch" else _messages(batch)
            (await producer.produce_many(given, timeout="60s")).raise_failed()

    return [work() for _ in range(PUT_TASKS)]


def _messages(batch: timeline.Batch) -> list[timeline.Message]:
    """One object a message, as a person's code makes them."""
    assert batch.ids is not None
    rows = zip(batch.payloads, batch.ids, batch.time_ms.tolist(), strict=True)
    return [timeline.Message(payload, at=at, id=id.decode()) for payload, id, at in rows]


async def _by_batches(consumer: Consumer, ledger: Ledger) -> None:
    acking: set[asyncio.Task[None]] = set()

    async def ack(batch: DeliveryBatch) -> None:
        try:
            receipts = await batch.ack(timeout="60s")
        except TimelineError as error:
            ledger.unsettled(len(batch), error)
        else:
            ledger.settle(len(batch), len(receipts.failed) if receipts.status_codes.any() else 0)

    async for batch in consumer.batches():
        ledger.met_with(batch.ids, batch.payloads)
        if (ahead_ms := earliest_ahead_ms(batch.due_ms, batch.handed_ms)) > 0:
            ledger.early(ahead_ms)
        task = asyncio.create_task(ack(batch))
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


def cpu_s_of_self() -> float:
    """Processor time that this process has used."""
    return cpu_s(os.getpid())
