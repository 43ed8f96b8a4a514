"""A fleet of workers, replaced one by one under load: every mail goes out, none twice.

On SIGTERM a worker takes nothing more, and returns at once the messages that its code has not seen. Then it lets its
handlers finish, and ends.

    timeline serve
    python examples/worker_fleet.py

`python examples/worker_fleet.py work mailer-1` is one worker, as your process manager would run it.
"""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter

import timeline

ADDRESS = os.environ.get("TIMELINE_ADDRESS", "localhost:9000")


async def send(d: timeline.Delivery) -> None:
    await asyncio.sleep(0.02)  # talking to the mail server
    print(d.id, flush=True)


async def work(name: str) -> None:
    async with timeline.connect(ADDRESS) as tl, tl.consumer("mails", id=name, lease="30s") as c:
        await c.run(send, concurrency=20, grace="25s")


class Fleet:
    """The workers, and the mails that they report as sent."""

    def __init__(self) -> None:
        self.workers: list[Process] = []
        self.sent: Counter[str] = Counter()
        self.readers: list[asyncio.Task[None]] = []

    async def start(self, name: str) -> None:
        """Start a worker. Return after it has sent its first mail."""
        worker = await asyncio.create_subprocess_exec(sys.executable, __file__, "work", name, stdout=PIPE)
        at_work = asyncio.Event()
        self.workers.append(worker)
        self.readers.append(asyncio.create_task(self.read(worker, at_work)))
        await at_work.wait()

    async def read(self, worker: Process, at_work: asyncio.Event) -> None:
        assert worker.stdout is not None
        async for line in worker.stdout:
            self.sent[line.decode().strip()] += 1
            at_work.set()
        at_work.set()

    async def retire(self) -> None:
        """Send SIGTERM to the oldest worker. Return after it has ended."""
        worker = self.workers.pop(0)
        worker.terminate()
        if await worker.wait():
            raise SystemExit(f"a worker ended with {worker.returncode}")


async def feed(p: timeline.Producer, until: asyncio.Event) -> int:
    """Put a thousand mails per second. Return how many."""
    count = 0
    while not until.is_set():
        mails = [timeline.Message(b"hello", in_=n / 1000, id=f"mail-{count + n}") for n in range(200)]
        (await p.produce_many(mails)).raise_failed()
        count += len(mails)
        await asyncio.sleep(0.2)
    return count


async def deploy() -> None:
    fleet, deployed = Fleet(), asyncio.Event()
    async with timeline.connect(ADDRESS) as tl, tl.producer("mails", group="news") as p:
        await tl.create_topic("mails")
        feeding = asyncio.create_task(feed(p, deployed))
        for n in range(3):
            await fleet.start(f"old-{n}")
        for n in range(3):
            await fleet.start(f"new-{n}")
            await fleet.retire()
        deployed.set()
        count = await feeding
        while [m async for m in tl.scan("mails", limit=1)]:
            await asyncio.sleep(0.1)
    while fleet.workers:
        await fleet.retire()
    await asyncio.gather(*fleet.readers)
    print(f"{count} mails, {len(fleet.sent)} sent, {fleet.sent.total() - len(fleet.sent)} of them twice")


if __name__ == "__main__":
    asyncio.run(work(sys.argv[2]) if sys.argv[1:2] == ["work"] else deploy())
