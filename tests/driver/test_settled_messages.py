"""What is settled, or gone, stays so: no alarm about it, and no doubt."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest

import timeline
from timeline import Backoff, Batch
from timeline.driver.consume.handlers import _Crew, _Job
from timeline.driver.consume.in_flight import DONE


@pytest.mark.slow
@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("how", ["ack", "release", "bury"])
async def test_a_handler_may_settle_and_work_on_past_the_lease(
    tl: timeline.Timeline, how: str, raises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[timeline.TimelineError] = []
    worked, lost = asyncio.Event(), []

    async def handler(d: timeline.Delivery) -> None:
        end_ms = float(d._frame.end_ms[d._index])
        await {"ack": d.ack, "release": lambda: d.release(in_="1h"), "bury": lambda: d.bury("why")}[how]()
        while c.monotonic_ms() <= end_ms:
            await asyncio.sleep(0)
        lost.append(d.lost)
        worked.set()
        if raises:
            raise ValueError("after all was done")

    async with tl.producer("t") as p, tl.consumer("t", id="w", lease="1s") as c:
        c.on_settle_error = lambda d, error: told.append(error)
        await p.produce(b"", in_=0)
        running = asyncio.ensure_future(c.run(handler, concurrency=1, backoff=Backoff(first="1h")))
        await worked.wait()
        c.stop_taking()
        await running
        assert lost == [False] and told == [] and c.stats.settle_errors == 0
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert not any("was not settled" in line or "was not taken" in line for line in said)
    assert not any("again in" in line for line in said)


async def test_an_extend_that_is_broken_off_does_not_undo_an_ack_on_its_way(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        await p.produce(b"", in_=0)
        taken = await c.take()
        assert taken is not None
        acking = asyncio.ensure_future(taken.ack())
        extending = asyncio.ensure_future(taken.extend("1m"))
        await asyncio.sleep(0)
        extending.cancel()
        await asyncio.wait({acking, extending})
        assert acking.exception() is None
        assert bytes(taken._frame.state) == bytes([DONE])


async def test_a_handler_that_is_torn_down_ends_without_a_word(
    tl: timeline.Timeline, caplog: pytest.LogCaptureFixture
) -> None:
    """As when its loop is gone: what closes a coroutine is no failure of the handler, and nothing can be awaited."""
    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        await p.produce(b"", in_=0)
        delivery = await c.take()
        assert delivery is not None

        async def handler(d: timeline.Delivery) -> None:
            await asyncio.Event().wait()

        crew = _Crew(c, c.take, handler, 1, Backoff(), None)
        call = crew._handle(_Job(delivery, 0.0, None))
        call.send(None)
        call.close()
        assert caplog.records == []


async def test_a_thread_past_its_timeout_is_told_and_its_end_is_no_alarm(
    tl: timeline.Timeline, caplog: pytest.LogCaptureFixture
) -> None:
    told, loop = asyncio.Event(), asyncio.get_running_loop()

    def handler(d: timeline.SyncDelivery) -> None:
        if d.deliveries > 1:
            return
        while not d.lost:  # its message has gone back: nothing else tells a thread
            time.sleep(0)
        loop.call_soon_threadsafe(told.set)
        d.ack()

    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        await p.produce(b"", in_=0, id="slow")
        running = asyncio.ensure_future(c.run(handler, concurrency=1, timeout="20ms", backoff=Backoff(first=0)))
        await told.wait()
        while not [record for record in caplog.records if "ended at last" in record.getMessage()]:
            await asyncio.sleep(0)
        c.stop_taking()
        await running
        assert c.stats.settle_errors == 0
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any(
        "the handler of 'slow' failed, again in 0 ms" in line and "took longer than 20ms" in line for line in said
    )
    assert any(line.startswith("the handler of 'slow' ended at last: ") for line in said)


async def test_what_a_timeout_gave_back_is_not_given_back_again_when_its_thread_outlives_the_run(
    tl: timeline.Timeline, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()

    def handler(d: timeline.SyncDelivery) -> None:
        go_on.wait()

    try:
        async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
            await p.produce(b"", in_=0, id="slow")
            running = asyncio.ensure_future(
                c.run(handler, concurrency=1, timeout="20ms", backoff=Backoff(first="1h"), grace=0)
            )
            while not [m async for m in tl.scan("t", state="waiting")]:
                pass
            running.cancel()
            await asyncio.wait({running})
            assert c.stats.settle_errors == 0
    finally:
        go_on.set()
    assert "was not settled" not in caplog.text and "was not taken" not in caplog.text


async def test_what_was_being_settled_when_its_topic_was_dropped_is_not_found(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        await p.produce_many(Batch([b""] * 3, in_=0))
        held = [await c.take() for _ in range(3)]
        await tl.drop_topic("t")
        with pytest.raises(timeline.NotFound):
            await c.take()
        # As for what is on its way when the consumer hears of it: with its topic, each message is gone for certain.
        for one in held:
            assert one is not None
            with pytest.raises(timeline.NotFound):
                await one.ack()
