"""The process that puts, in an open loop: `python -m timeline.bench.feeder ADDRESS TOPIC COUNT RATE LEAD_MS`.

It prints `ready` once it is connected, and reads START_MS from its standard input. Message i is due at
START_MS + i · 1000 / RATE, fixed beforehand, and is put by a call of its own LEAD_MS before that, however the ones
before it fare. LEAD_MS `now`: each is put with `in_=0` at that very time instead. Its payload says at which time it was
meant. Prints one JSON line at the end: how many were put, what was refused, how far behind its plan it fell.
"""

from __future__ import annotations

import asyncio
import json
import sys

import timeline
from timeline.bench.load import random_ids
from timeline.clock import Clock
from timeline.errors import TimelineError

NOW = "now"
READY = "ready"
FILLER = b"." * 80
OBSERVE_EVERY_MS = 250.0


def payload_of(meant_ms: int) -> bytes:
    """The payload of the message meant for `meant_ms`."""
    return b"%020d" % meant_ms + FILLER


def meant_of(payload: bytes) -> int:
    """The reverse."""
    return int(payload[:20])


async def feed(address: str, topic: str, count: int, rate_per_s: float, lead_ms: float | None) -> None:
    """See above."""
    clock = Clock()
    ids = [id.decode() for id in random_ids(count)]
    refused: list[str] = []
    behind_ms = 0.0
    async with timeline.connect(address, timeout="10s") as client, asyncio.TaskGroup() as calls:
        producer = client.producer(topic)
        await client.topics()  # the connection stands before the first put
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

        observed_ms = 0.0
        for number, id in enumerate(ids):
            due_ms = start_ms + int(number * 1000 / rate_per_s)
            while (early_ms := due_ms - (lead_ms or 0.0) - clock.now()) > 0:
                await asyncio.sleep(early_ms / 1000)
                if clock.monotonic_ms() - observed_ms > OBSERVE_EVERY_MS:
                    observed_ms = clock.monotonic_ms()
                    clock.observe()
            behind_ms = max(behind_ms, -early_ms)
            calls.create_task(put(id, due_ms))
    print(json.dumps({"put": count - len(refused), "refused": refused[:3], "behind_ms": behind_ms}), flush=True)


def main() -> None:
    """Reads the arguments and feeds."""
    address, topic, count, rate_per_s, lead_ms = sys.argv[1:]
    lead = None if lead_ms == NOW else float(lead_ms)
    asyncio.run(feed(address, topic, int(count), float(rate_per_s), lead))


if __name__ == "__main__":
    main()
