"""A campaign at 9:00 by each recipient's own clock, in two variants. Then one variant is cancelled by its tag.

    timeline serve
    python examples/campaign.py

The mails stay on the timeline until that morning: `timeline ls mailing --tag spring-a`.
"""

import asyncio
import os
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import cycle, islice

import timeline

ADDRESS = os.environ.get("TIMELINE_ADDRESS", "localhost:9000")
RECIPIENTS = int(os.environ.get("RECIPIENTS", "10000"))
ZONES = ("Pacific/Auckland", "Asia/Kolkata", "Europe/Berlin", "America/New_York", "America/Los_Angeles")

# Two days ahead, so that 9:00 is in the future in every zone.
DAY = (datetime.now(UTC) + timedelta(days=2)).date()


def mails() -> list[timeline.Message]:
    nine = {zone: timeline.local(DAY, "09:00", zone) for zone in ZONES}  # also across clock changes
    return [
        timeline.Message(
            f"Dear customer {number}".encode(),
            at=nine[zone],
            id=f"spring-{number}",  # a job that runs again sends no mail twice
            tag="spring-b" if number % 2 else "spring-a",
            expires=nine[zone] + timedelta(hours=3),  # late is worse than never
        )
        for number, zone in enumerate(islice(cycle(ZONES), RECIPIENTS))
    ]


async def main() -> None:
    async with timeline.connect(ADDRESS) as tl, tl.producer("mailing", group="marketing") as p:
        await tl.create_topic("mailing")
        receipts = (await p.produce_many(mails())).raise_failed()
        for due, count in sorted(Counter(receipt.due for receipt in receipts).items()):
            print(f"{due:%d %B %H:%M} UTC: {count} mails")
        would = await p.cancel_tag("spring-b", dry_run=True)
        print(f"calling off spring-b would meet {would.changed} of {len(receipts)}")
        done = await p.cancel_tag("spring-b")
        print("called off:", ", ".join(f"{count} {status}" for status, count in done.counts.items()))


if __name__ == "__main__":
    asyncio.run(main())
