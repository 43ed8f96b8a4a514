"""Consumers with nothing to do do nothing."""

from __future__ import annotations

import asyncio

import pytest

import timeline
from timeline import Batch


@pytest.mark.parametrize("concurrency", [1, 8])
async def test_idle_handlers_do_not_wake_each_other(
    tl: timeline.Timeline, concurrency: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them woke at the first message; from then on each woke the one before it, a whole core without end."""
    looks, done = 0, asyncio.Semaphore(0)
    more = timeline.Consumer._more

    async def counted(consumer: timeline.Consumer) -> bool:
        nonlocal looks
        looks += 1
        return await more(consumer)

    async def handler(d: timeline.Delivery) -> None:
        done.release()

    monkeypatch.setattr(timeline.Consumer, "_more", counted)
    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        running = asyncio.ensure_future(c.run(handler, concurrency=concurrency))
        for _ in range(3):
            await p.produce_many(Batch([b""] * 2, in_=0))
            for _ in range(2):
                await done.acquire()
        while c._in_flight.frames:  # until all acks are answered, too
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        looked = looks
        for _ in range(1_000):  # far more turns of the loop than any of them needs to look again
            await asyncio.sleep(0)
        assert looks == looked
        await p.produce(b"", in_=0)
        await done.acquire()
        c.stop_taking()
        await running


async def test_what_ends_a_consumer_reaches_all_who_wait_for_it(tl: timeline.Timeline) -> None:
    async with tl.consumer("t", id="w") as c:
        waiting = [asyncio.ensure_future(c.take()) for _ in range(5)]
        async with tl.producer("t") as p:
            await p.produce(b"", in_=0)
            done, waiting_on = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        c.stop_taking()
        assert [await one for one in waiting_on] == [None] * 4
        (first,) = done
        delivery = first.result()
        assert delivery is not None
        await delivery.ack()
