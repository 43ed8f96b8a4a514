"""100,000 timers that never fire: each request gets a timeout, each answer cancels it.

    timeline serve
    python examples/timeouts.py

For one request at a time, use `p.produce` and `p.cancel`. Concurrent calls share a frame.
A large batch on a slow disk may need more than the usual 10 seconds, so it gets a minute.
"""

import asyncio
import os
import time

import timeline

ADDRESS = os.environ.get("TIMELINE_ADDRESS", "localhost:9000")
REQUESTS = int(os.environ.get("REQUESTS", "100000"))


async def main() -> None:
    requests = [f"request-{number}" for number in range(REQUESTS)]
    async with timeline.connect(ADDRESS) as tl, tl.producer("timeouts", group="gateway") as p:
        await tl.create_topic("timeouts")

        started = time.perf_counter()
        timers = timeline.Batch(payloads=[b"no answer"] * REQUESTS, in_="15m", ids=requests)
        (await p.produce_many(timers, timeout="1m")).raise_failed()
        print(f"{REQUESTS} timers set in {time.perf_counter() - started:.1f} s")

        started = time.perf_counter()
        (await p.cancel_many(requests, timeout="1m")).raise_failed()
        print(f"{REQUESTS} timers cancelled in {time.perf_counter() - started:.1f} s")

        left = [m async for m in tl.scan("timeouts", limit=1)]
        print("none is left to fire" if not left else f"still there: {left[0].id}")


if __name__ == "__main__":
    asyncio.run(main())
