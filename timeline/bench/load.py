"""Honest load: random ids over all buckets, payloads that carry their id, and the process that puts at fixed times.

`python -m timeline.bench.load ADDRESS TOPIC COUNT RATE LEAD_MS` is that process, the feeder, an open loop. It prints
`ready` once it is connected, and reads START_MS from its standard input. Message i is due at
START_MS + i · 1000 / RATE. It is put by a call of its own LEAD_MS earlier, even if earlier calls are late. With LEAD_MS
`now` each is put with `in_=0` at that time instead. Each payload has the time that was meant. At the end it prints one
JSON line: how many were put, what was refused, and how far it fell behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

import timeline
from timeline.bench.processes import CannotMeasure
from timeline.clock import Clock
from timeline.columns import Int64, Ragged, UInt64
from timeline.driver.producer import Producer
from timeline.errors import TimelineError

ID_BYTES = 16
TAG = "campaign"
PENDING_SPREAD_MS = 30 * 86_400_000
PENDING_FROM_MS = 3_600_000
"""Pending messages are due from an hour ahead on, so none interferes with a measurement."""
FILL_BATCH = 10_000
FILL_TASKS = 3
OBSERVE_EVERY_S = 0.25
NOW, READY, BEGUN = "now", "ready", "begun"
FILLER = b"." * 80

Told = Callable[[int], object]
"""Called with the number of messages put since the last call."""


def random_ids(count: int) -> Ragged:
    """Return random ids of 16 characters, as a column without an object each."""
    text = os.urandom(ID_BYTES // 2 * count).hex().encode()
    return Ragged(text, np.arange(count + 1, dtype=np.int64) * ID_BYTES)


def random_numbers(count: int) -> UInt64:
    """Return random 64-bit numbers."""
    return np.frombuffer(os.urandom(8 * count), dtype=np.uint64)


def payloads_for(ids: Ragged, size_bytes: int) -> Ragged:
    """Return payloads of `size_bytes` that begin with their message's id, so that a mix-up shows."""
    count = len(ids)
    if size_bytes < ID_BYTES:
        raise CannotMeasure(f"payloads are at least {ID_BYTES} bytes here, not {size_bytes}: they carry their id")
    block = np.full((count, size_bytes), ord("."), dtype=np.uint8)
    block[:, :ID_BYTES] = np.frombuffer(ids.data, dtype=np.uint8).reshape(count, ID_BYTES)
    return Ragged(block.tobytes(), np.arange(count + 1, dtype=np.int64) * size_bytes)


def pending_dues(count: int, now_ms: int) -> Int64:
    """Return due times spread evenly at random over the next 30 days."""
    return random_numbers(count).astype(np.int64, copy=True) % np.int64(PENDING_SPREAD_MS) + now_ms + PENDING_FROM_MS


def batch_at(count: int, at: Any, size_bytes: int, tags: str | None = None) -> timeline.Batch:
    """Return a batch of new messages due `at` (milliseconds, one for all or one each)."""
    ids = random_ids(count)
    return timeline.Batch(payloads=payloads_for(ids, size_bytes), at=at, ids=ids, tags=tags)


def ids_of(batch: timeline.Batch) -> list[bytes]:
    """Return the ids of a batch that `batch_at` made."""
    assert batch.ids is not None
    return batch.ids.tolist()


def batch_sizes(count: int, most: int) -> Iterator[int]:
    """Return the sizes of batches of at most `most` that sum to `count`. Several tasks may share the iterator."""
    return (min(most, count - start) for start in range(0, count, most))


async def fill(
    producer: Producer, count: int, size_bytes: int, told: Told | None = None, tags: str | None = None
) -> None:
    """Put `count` pending messages through a broker, as fast as it takes them."""
    sizes, clock = batch_sizes(count, FILL_BATCH), Clock()

    async def work() -> None:
        for size in sizes:
            batch = batch_at(size, pending_dues(size, clock.now_ms()), size_bytes, tags)
            (await producer.produce_many(batch, timeout="60s")).raise_failed()
            if told is not None:
                told(size)

    await asyncio.gather(*(work() for _ in range(FILL_TASKS)))


@asynccontextmanager
async def observed() -> AsyncIterator[Clock]:
    """Yield a clock that follows the machine's, as a broker's does."""
    clock = Clock()

    async def observe() -> None:
        while True:
            await asyncio.sleep(OBSERVE_EVERY_S)
            clock.observe()

    task = asyncio.ensure_future(observe())
    try:
        yield clock
    finally:
        task.cancel()


def payload_of(meant_ms: int) -> bytes:
    """Return the payload of the message meant for `meant_ms`."""
    return b"%020d" % meant_ms + FILLER


def meant_of(payload: bytes) -> int:
    """Return the time that `payload_of` was given."""
    return int(payload[:20])


async def paced(
    clock: Clock, start_ms: int, count: int, rate_per_s: float, lead_ms: float = 0.0
) -> AsyncIterator[tuple[int, float]]:
    """Yield each due time `lead_ms` before it, and by how much that is late. Both in milliseconds."""
    for number in range(count):
        due_ms = start_ms + int(number * 1000 / rate_per_s)
        while (early_ms := due_ms - lead_ms - clock.now()) > 0:
            await asyncio.sleep(early_ms / 1000)
        yield due_ms, -early_ms


async def feed(address: str, topic: str, count: int, rate_per_s: float, lead_ms: float | None) -> None:
    """Put as the module describes. `lead_ms` None: `now`."""
    ids = [id.decode() for id in random_ids(count)]
    refused: list[str] = []
    behind_ms = 0.0
    async with (
        observed() as clock,
        timeline.connect(address, timeout="10s") as client,
        asyncio.TaskGroup() as calls,
    ):
        producer = client.producer(topic)
        await client.topics()  # so that the connection exists before the first put
        print(READY, flush=True)
        start_ms = int(sys.stdin.readline())

        async def put(id: str, due_ms: int) -> None:
            try:
                if lead_ms is None:
                    await producer.produce(payload_of(due_ms), in_=0, id=id)
                else:
                    await producer.produce(payload_of(due_ms), at=due_ms, id=id)
            except TimelineError as error:
                refused.append(error.code)

        places = iter(ids)
        async for due_ms, late_ms in paced(clock, start_ms, count, rate_per_s, lead_ms or 0.0):
            behind_ms = max(behind_ms, late_ms)
            calls.create_task(put(next(places), due_ms))
    print(json.dumps({"put": count - len(refused), "refused": refused[:3], "behind_ms": behind_ms}), flush=True)


def main() -> None:
    address, topic, count, rate_per_s, lead_ms = sys.argv[1:]
    lead = None if lead_ms == NOW else float(lead_ms)
    asyncio.run(feed(address, topic, int(count), float(rate_per_s), lead))


if __name__ == "__main__":
    main()
