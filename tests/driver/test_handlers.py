"""`c.run`: acknowledges, retries, buries, extends, and ends in order."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading

import pytest

import timeline
from timeline import Backoff, Batch, Bury, Retry


async def _run_until(c: timeline.Consumer, done: asyncio.Event, handler: object, **options: object) -> None:
    running = asyncio.ensure_future(c.run(handler, **options))  # type: ignore[arg-type]
    waiting = asyncio.ensure_future(done.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    c.stop_taking()
    await running


async def test_a_handler_that_returns_acknowledges(tl: timeline.Timeline) -> None:
    seen: set[str] = set()
    done = asyncio.Event()

    async def handler(d: timeline.Delivery) -> None:
        seen.add(d.id)
        if len(seen) == 300:
            done.set()

    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        await p.produce_many(Batch([b""] * 300, in_=0))
        await _run_until(c, done, handler, concurrency=20)
        assert c.stats.settle_errors == 0
    assert [m async for m in tl.scan("t")] == []


async def test_a_plain_handler_runs_in_a_thread_and_needs_no_await(tl: timeline.Timeline) -> None:
    done, loop = asyncio.Event(), asyncio.get_running_loop()
    threads: set[str] = set()

    def handler(d: timeline.SyncDelivery) -> None:
        threads.add(threading.current_thread().name)
        assert d.payload == b"x"
        if d.deliveries == 1:
            assert d.extend("1m") == d.lease_until
            d.release(in_="10ms")
        else:
            loop.call_soon_threadsafe(done.set)

    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        await p.produce(b"x", in_=0)
        await _run_until(c, done, handler, concurrency=2)
    assert threads and all(name.startswith("timeline-handler") for name in threads)
    assert [m async for m in tl.scan("t")] == []


async def test_failures_are_released_with_backoff_and_words_of_the_handler_count(tl: timeline.Timeline) -> None:
    calls: dict[str, int] = {}
    done = asyncio.Event()

    async def handler(d: timeline.Delivery) -> None:
        calls[d.id] = calls.get(d.id, 0) + 1
        if d.id == "bury":
            raise Bury("cannot be read")
        if d.id == "fails" and d.deliveries < 3:
            raise RuntimeError("not yet")
        if d.id == "retries" and d.deliveries < 2:
            raise Retry(in_="5ms")
        if d.id == "slow" and d.deliveries < 2:
            await asyncio.Event().wait()
        if calls == {"bury": 1, "fails": 3, "retries": 2, "slow": 2}:
            done.set()

    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        for id in ("bury", "fails", "retries", "slow"):
            await p.produce(b"", in_=0, id=id)
        backoff = Backoff(first="5ms", factor=2, cap="20ms")
        await _run_until(c, done, handler, concurrency=4, timeout="30ms", backoff=backoff)
    assert [m async for m in tl.scan("t")] == []
    assert [(m.id, m.dead) async for m in tl.dead("t")] == [("bury", "cannot be read")]


async def test_a_failure_at_the_last_delivery_is_buried_with_its_reason(
    tl: timeline.Timeline, caplog: pytest.LogCaptureFixture
) -> None:
    await tl.create_topic("few", max_deliveries=2)
    over = asyncio.Event()

    async def handler(d: timeline.Delivery) -> None:
        if d.id == "last":
            over.set()
        elif d.id == "retries":
            raise Retry(in_=0, reason="the host is down")
        elif d.deliveries <= 2:
            raise ValueError("no such gate")

    async with tl.producer("few") as p, tl.consumer("few", id="w") as c:
        for id in ("fails", "retries"):
            await p.produce(b"", in_=0, id=id)
        running = asyncio.ensure_future(c.run(handler, backoff=Backoff(first=0)))
        while [m async for m in tl.scan("few")]:
            await asyncio.sleep(0)
        dead = {m.id: m.dead async for m in tl.dead("few")}
        await p.revive(["fails"], in_=0)
        while len([m async for m in tl.dead("few")]) < 2:
            await asyncio.sleep(0)
        await p.produce(b"", in_=0, id="last")
        await over.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert dead == {
        "fails": "max_deliveries: ValueError: no such gate",
        "retries": "max_deliveries: the host is down",
    }
    said = [record.getMessage() for record in caplog.records if "'fails'" in record.getMessage()]
    assert ["again in" in line for line in said] == [True, False, True, False]
    assert "last of 2 deliveries" in said[1]


async def test_the_lease_is_extended_while_a_handler_works(tl: timeline.Timeline) -> None:
    done = asyncio.Event()
    ends: list[int] = []

    async def handler(d: timeline.Delivery) -> None:
        first = d.lease_until_ms
        ends.append(first)
        while d.lease_until_ms < first + 600:
            await asyncio.sleep(0)
        done.set()

    async with tl.producer("t") as p, tl.consumer("t", id="w", lease="300ms") as c:
        await p.produce(b"", in_=0)
        await _run_until(c, done, handler)
        assert len(ends) == 1 and c.stats.lost == 0
    assert [m async for m in tl.scan("t")] == []


async def test_a_lost_lease_cancels_the_handler(tl: timeline.Timeline) -> None:
    cancelled = asyncio.Event()
    started = asyncio.Event()

    async def handler(d: timeline.Delivery) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            assert d.lost
            cancelled.set()
            raise

    async with tl.producer("t") as p, tl.consumer("t", id="w", lease="200ms") as c:
        await p.produce(b"", in_=0, id="m")

        async def cancel() -> None:
            await started.wait()
            await p.cancel("m", leased=True)

        asked = asyncio.ensure_future(cancel())
        await _run_until(c, cancelled, handler)
        await asked


async def test_sigterm_lets_handlers_finish(tl: timeline.Timeline) -> None:
    finished: list[str] = []
    going = asyncio.Event()

    async def handler(d: timeline.Delivery) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await going.wait()
        finished.append(d.id)

    async with tl.producer("t") as p, tl.consumer("t", id="w", credit=10) as c:
        await p.produce_many(Batch([b""] * 10, in_=0))
        running = asyncio.ensure_future(c.run(handler, concurrency=1))
        while c.taking:
            await asyncio.sleep(0)
        going.set()
        await running
        assert len(finished) == 1
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    left = [(m.state, m.deliveries) async for m in tl.scan("t")]
    assert left == [("available", 0)] * 9


async def test_what_does_not_finish_within_the_grace_is_released(tl: timeline.Timeline) -> None:
    started = asyncio.Event()

    async def handler(d: timeline.Delivery) -> None:
        started.set()
        await asyncio.Event().wait()

    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        await p.produce(b"", in_=0)
        await _run_until(c, started, handler, grace="10ms")
    assert [(m.state, m.deliveries) async for m in tl.scan("t")] == [("available", 1)]


def test_backoff_grows_to_its_cap_with_jitter() -> None:
    flat = Backoff(first="1s", factor=2, cap="10s", jitter=0)
    assert [flat.delay_ms(n, random.Random(1)) for n in (1, 2, 3, 4, 5, 1_000_000)] == [
        1_000,
        2_000,
        4_000,
        8_000,
        10_000,
        10_000,
    ]
    jittered = Backoff(first="1s", jitter=0.2)
    delays = {jittered.delay_ms(1, random.Random(n)) for n in range(100)}
    assert min(delays) >= 800 and max(delays) <= 1_200 and len(delays) > 50
    for bad in ({"factor": 0.5}, {"jitter": 2}, {"first": -1}, {"factor": float("nan")}):
        with pytest.raises(timeline.Invalid):
            Backoff(**bad)  # type: ignore[arg-type]
