"""A dunning job that may run twice, or die half-way and run again: every customer gets one letter.

A letter's id names invoice and step. The same id again is a DUPLICATE, not a second letter. The topic remembers settled
ids for 90 days, so this also holds after the letter went out.

    timeline serve
    python examples/dunning.py

Run it once more: no customer gets another letter.
"""

import asyncio
import os

import timeline

ADDRESS = os.environ.get("TIMELINE_ADDRESS", "localhost:9000")
OVERDUE = [f"2026-{number:04}" for number in range(1, 501)]

sent: list[str] = []


async def job(p: timeline.Producer) -> None:
    """Run by cron each night."""
    letters = [timeline.Message(invoice.encode(), in_=0, id=f"{invoice}/first-reminder") for invoice in OVERDUE]
    receipts = (await p.produce_many(letters)).raise_failed()
    print("job:", ", ".join(f"{count} {status}" for status, count in receipts.counts.items()))


async def send_letter(d: timeline.Delivery) -> None:
    sent.append(d.id)


async def main() -> None:
    async with timeline.connect(ADDRESS) as tl, tl.producer("dunning", group="billing") as p:
        await tl.create_topic("dunning", remember="90d")
        await job(p)
        await job(p)  # at once: the letters are still on the timeline, or on their way
        async with tl.consumer("dunning") as c:
            working = asyncio.create_task(c.run(send_letter))
            while not working.done() and [m async for m in tl.scan("dunning", limit=1)]:
                await asyncio.sleep(0.1)
            await job(p)  # the next night: they have gone out
            c.stop_taking()
            await working
    print(f"{len(sent)} letters sent for {len(set(sent))} invoices")


if __name__ == "__main__":
    asyncio.run(main())
