"""A process that puts, acknowledges and cancels large messages until it is killed, and says of each what is certain.

Usage: python -m tests.storage_plugins.large_puts URL
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from timeline.model import Operation
from timeline.storage_plugins import make_store
from timeline.storage_plugins.conformance.trial import T0, Trial

BATCH = 8


def content(id: bytes) -> bytes:
    """What is put under `id`."""
    return id * 700


async def work(url: str) -> None:
    trial = Trial(lambda: make_store(url))
    await trial.store.open()
    topic = await trial.store.create_topic(trial.record())
    for number in range(1_000_000):
        ids = [b"m-%d-%d" % (number, at) for at in range(BATCH)]
        await trial.stored(topic, ids, T0 + number, payload=[content(id) for id in ids])
        for id in ids:
            print("put", id.decode(), flush=True)
        rows = (await trial.lease(topic, 2, now_ms=T0 + number)).rows
        print("gone", *(id.decode() for id in rows.ids), flush=True)  # before it is asked: it may be
        await trial.settle(topic, Operation.ACK, rows.take(np.arange(len(rows))), now_ms=T0 + number)
        left = [id for id in ids if id not in set(rows.ids.tolist())][:1]
        print("gone", *(id.decode() for id in left), flush=True)
        await trial.mutate(topic, Operation.CANCEL, left, now_ms=T0 + number)


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1]))
