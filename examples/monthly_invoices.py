"""Monthly invoices: a schedule begins a run on the first of each month, and each customer gets one invoice per month.

The schedule produces one message per month. Its handler produces an invoice for each customer, under an id that names
month and customer. If the handler crashes halfway, the message comes again, and nobody gets a second invoice.

    timeline serve
    python examples/monthly_invoices.py

The first of the month may be far away. So it also backfills three months. Run it once more: nothing is sent again.
"""

import asyncio
import os
from datetime import UTC, datetime, timedelta

import timeline

ADDRESS = os.environ.get("TIMELINE_ADDRESS", "localhost:9000")
RUNS, INVOICES = "invoice-runs", "invoices-to-send"
CUSTOMERS = ["ada", "edsger", "grace"]

sent: list[str] = []


def month_before(first: str) -> str:
    """Return the month that ended before a time such as 2026-12-01T05:00:00Z: 2026-11."""
    return f"{datetime.fromisoformat(first) - timedelta(days=1):%Y-%m}"


async def send(d: timeline.Delivery) -> None:
    sent.append(d.id)  # your mailer; give it d.id, too, so that it sends nothing twice


async def main() -> None:
    async with timeline.connect(ADDRESS) as tl, tl.producer(INVOICES) as p:
        for topic in (RUNS, INVOICES):
            await tl.create_topic(topic, remember="120d")  # of a month that is done, nothing is done again

        # It may stand at the start of a program that runs in many copies: the same schedule is created once.
        monthly = await tl.schedule(
            RUNS,
            "monthly",
            cron="0 6 1 * *",
            zone="Europe/Berlin",
            catch_up="all",  # after an outage, no month is left out
            window="31d",
            payload="{occurrence}",  # the time of the message, in UTC
        )

        async def invoice_all(d: timeline.Delivery) -> None:
            month = month_before(d.payload.decode())
            invoices = [timeline.Message(b"invoice", in_=0, id=f"{month}/{customer}") for customer in CUSTOMERS]
            (await p.produce_many(invoices)).raise_failed()
            print(f"{month}: {len(invoices)} invoices")

        async with tl.consumer(RUNS) as runs, tl.consumer(INVOICES) as invoices:
            working = asyncio.gather(runs.run(invoice_all), invoices.run(send))
            now = datetime.now(UTC)
            done = await monthly.backfill(now - timedelta(days=92), now)
            while len(sent) < done.produced * len(CUSTOMERS) and not working.done():
                await asyncio.sleep(0.1)
            runs.stop_taking()
            invoices.stop_taking()
            await working
        print(f"{done.produced} months, {len(sent)} invoices sent for {len(set(sent))}")
        print(f"next run: {monthly.next(1)[0]}")


if __name__ == "__main__":
    asyncio.run(main())
