"""A retry ladder: a failing webhook is tried again after 10 s, 1 min, 10 min and 1 h, then becomes a dead letter.

When the other side is fixed, the dead letters are revived.

    timeline serve
    python examples/retry_ladder.py

It takes 71 minutes; LADDER="1s 2s" makes it short. Each run has an order of its own. Orders of an earlier run that was
broken off are delivered or buried too.
"""

import asyncio
import os
from datetime import UTC, datetime

import timeline

ADDRESS = os.environ.get("TIMELINE_ADDRESS", "localhost:9000")
LADDER = os.environ.get("LADDER", "10s 1m 10m 1h").split()
ORDER = f"order-{datetime.now(UTC):%H%M%S}-{os.getpid()}"

fixed = asyncio.Event()


async def call_webhook(d: timeline.Delivery) -> None:
    """Stand for the other side, which is down at first."""
    if not fixed.is_set():
        raise ConnectionError("connection refused")


async def deliver(d: timeline.Delivery) -> None:
    try:
        await call_webhook(d)
    except ConnectionError as error:
        if d.deliveries > len(LADDER):
            print(f"{d.id}: attempt {d.deliveries} failed, buried")
            raise timeline.Bury(f"{d.deliveries} attempts, the last: {error}") from error
        wait = LADDER[d.deliveries - 1]
        print(f"{d.id}: attempt {d.deliveries} failed, again in {wait}")
        raise timeline.Retry(in_=wait, reason=str(error)) from error
    print(f"{d.id}: delivered at attempt {d.deliveries}")


async def operate(tl: timeline.Timeline, working: asyncio.Task[None]) -> None:
    """Do an operator's work: `timeline dead list webhooks`, fix, `timeline dead revive webhooks ID`."""
    while not (dead := [letter async for letter in tl.dead("webhooks") if letter.id == ORDER]):
        if working.done():  # by SIGTERM
            return
        await asyncio.sleep(0.1)
    for letter in dead:
        print(f"dead: {letter.id}, because: {letter.dead}")
    fixed.set()
    async with tl.producer("webhooks", group="shop") as p:
        (await p.revive([letter.id for letter in dead], in_="1s")).raise_failed()
    while not working.done() and await tl.get("webhooks", ORDER) is not None:
        await asyncio.sleep(0.1)


async def main() -> None:
    async with timeline.connect(ADDRESS) as tl, tl.consumer("webhooks") as c:
        await tl.create_topic("webhooks")
        async with tl.producer("webhooks", group="shop") as p:
            await p.produce(b"{}", in_=0, id=ORDER)
        working = asyncio.create_task(c.run(deliver))
        await operate(tl, working)
        c.stop_taking()
        await working


if __name__ == "__main__":
    asyncio.run(main())
