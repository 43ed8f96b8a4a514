"""The store alone: its own put, lease_due and settle in the shape of the cycle, without broker or wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict

from timeline.bench.figures import BenchReport
from timeline.bench.ledger import Ledger
from timeline.bench.load import Told, batch_at, batch_sizes, create_in, fill_open, puts_of, random_numbers
from timeline.bench.scenario import Stopwatch, cpu_s_of_self
from timeline.bench.scenarios.cycle import WINDOW_BATCHES, CycleScenario
from timeline.bench.topic import own_topic
from timeline.clock import Clock
from timeline.model import Operation, Status, Topic
from timeline.storage_plugins import open_store
from timeline.storage_plugins.contract import Grant, LeasedRows, Settles, Store

HOLDER = b"bare"
LEASE_MS = 30_000


async def run_bare(asked: CycleScenario, told: Told | None = None) -> BenchReport:
    """The cycle's statements on a store opened in this process. Raises what the store raises."""
    async with own_topic(asked.store, "bare") as own, opened(asked.store) as store:
        topic = await create_in(store, own.name, buckets=asked.buckets)
        if asked.pending:
            await fill_open(store, topic, asked.pending, asked.payload_bytes, told)
        if asked.warm_up:
            await _turn(store, topic, asked, min(asked.warm_up, asked.messages))
        watch = Stopwatch(cpu=cpu_s_of_self)
        ledger = await _turn(store, topic, asked, asked.messages)
        figures = watch.figures(asked.messages)
        return BenchReport("bare store", asdict(asked), figures, wrong=ledger.verdict(), store=own.store)


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    """A store for the length of a measurement."""
    store = await open_store(url)
    try:
        yield store
    finally:
        await store.close()


async def _turn(store: Store, topic: Topic, asked: CycleScenario, messages: int) -> Ledger:
    """So many messages through put, lease and ack: puts go on while what is there is leased and acknowledged."""
    ledger = Ledger(messages, WINDOW_BATCHES * asked.batch)
    stored = asyncio.Semaphore(0)
    clock = Clock()

    async def put() -> None:
        for size in batch_sizes(messages, asked.batch):
            now_ms = clock.now_ms()
            puts = puts_of(batch_at(size, now_ms, asked.payload_bytes), now_ms)
            await ledger.admit(puts.ids.tolist())
            answers = await store.put(topic, now_ms, puts)
            if answers.status.any():
                ledger.wrong.append("a put was refused")
            stored.release()

    async def consume() -> None:
        while True:
            await stored.acquire()
            grant = Grant(HOLDER, asked.batch, LEASE_MS, 1 << 40)
            now_ms = clock.now_ms()
            leased = await store.lease_due(topic, None, now_ms, now_ms, [grant])
            assert leased.rows.payloads is not None
            ledger.met_with(leased.rows.ids, leased.rows.payloads)
            answers = await store.settle(topic, clock.now_ms(), acks_of(leased))
            ledger.settle(len(answers), int((answers.status != Status.OK.code).sum()))

    await ledger.through(put(), consume())
    return ledger


def acks_of(leased: LeasedRows) -> Settles:
    """Acks of all that was leased."""
    rows = leased.rows
    return Settles.of(rows, holders=HOLDER, operation=Operation.ACK, op=random_numbers(len(rows)))
