"""A hot instant: many messages due in one millisecond."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

import timeline
from timeline.bench.figures import Report, Target, latencies
from timeline.bench.ledger import Ledger
from timeline.bench.load import batch_at
from timeline.bench.processes import CannotMeasure, broker
from timeline.bench.scenarios.lateness import observed
from timeline.bench.topic import OwnTopic, own_topic, scheme
from timeline.driver.delivery import DeliveryBatch
from timeline.errors import TimelineError

PUT_BATCH = 10_000
LEAD_MS = 1_500
LEAD_S_A_MESSAGE = 1 / 20_000
TRIES = 3
DRAINED_S = {"memory": 1.0, "sqlite": 4.0, "postgresql": 4.0}
"""For 100,000."""


@dataclass(frozen=True, slots=True)
class Burst:
    """What to run: `messages` due at the same time, taken in batches with `credit`."""

    store: str = "memory://"
    messages: int = 100_000
    credit: int = 20_000
    payload_bytes: int = 100

    @property
    def targets(self) -> tuple[Target, ...]:
        """What `targets.md` asks of it."""
        always = (Target("first_late_ms", 5.0), Target("lateness_min_ms", 0.0, least=True))
        drained_s = DRAINED_S.get(scheme(self.store))
        if drained_s is None:
            return always
        return (Target("drained_s", drained_s * self.messages / 100_000), *always)


async def run_burst(asked: Burst, folder: Path) -> Report:
    """One burst, from its due until the last ack is answered. Raises CannotMeasure."""
    async with (
        own_topic(asked.store, "burst") as own,
        broker(folder, asked.store) as (_, address),
        observed() as clock,
    ):
        lead_ms = LEAD_MS + int(asked.messages * LEAD_S_A_MESSAGE * 1000)
        for attempt in range(TRIES):
            # A topic each time, so that what was put too late for an instant is not met again.
            topic = f"{own.name}-{attempt}"
            async with timeline.Timeline(address, "60s", clock=clock) as client:
                await client.create_topic(topic)
                due_ms = clock.now_ms() + lead_ms
                ledger = Ledger(asked.messages, asked.messages)
                await _put(client.producer(topic), asked, due_ms, ledger)
                if clock.now_ms() < due_ms - 500:
                    return await _drain(client, own, topic, asked, due_ms, ledger, clock.now)
            lead_ms *= 2
    raise CannotMeasure(f"{asked.messages} messages could not be put within {lead_ms / 2000:.0f} s")


async def _put(producer: timeline.Producer, asked: Burst, due_ms: int, ledger: Ledger) -> None:
    for start in range(0, asked.messages, PUT_BATCH):
        batch = batch_at(min(PUT_BATCH, asked.messages - start), due_ms, asked.payload_bytes)
        assert batch.ids is not None
        await ledger.admit(batch.ids.tolist())
        (await producer.produce_many(batch)).raise_failed()


async def _drain(
    client: timeline.Timeline,
    own: OwnTopic,
    topic: str,
    asked: Burst,
    due_ms: int,
    ledger: Ledger,
    now: Callable[[], float],
) -> Report:
    late_ms: list[npt.NDArray[np.float64]] = []
    acking: set[asyncio.Task[None]] = set()

    async def ack(batch: DeliveryBatch) -> None:
        try:
            receipts = await batch.ack()
        except TimelineError as error:
            ledger.unsettled(len(batch), error)
        else:
            ledger.settle(len(batch), len(receipts.failed) if receipts.status_codes.any() else 0)

    async def take(consumer: timeline.Consumer) -> None:
        async for batch in consumer.batches():
            late_ms.append(now() - batch.due_ms.astype(np.float64))
            ledger.met_with(batch.ids, batch.payloads)
            task = asyncio.create_task(ack(batch))
            acking.add(task)
            task.add_done_callback(acking.discard)

    async with client.consumer(topic, credit=asked.credit) as consumer:
        await ledger.through(take(consumer))
        drained_ms = now() - due_ms
    if not late_ms:
        raise CannotMeasure("nothing was delivered")
    column = np.concatenate(late_ms)
    figures = {"drained_s": drained_ms / 1000, "first_late_ms": float(column.min()), **latencies(column)}
    if column.min() < 0:
        ledger.wrong.append(f"handed out {-column.min():.3f} ms before its due")
    return Report("burst", asdict(asked), figures, asked.targets, ledger.verdict(), store=own.store)
