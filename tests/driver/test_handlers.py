"""`c.run`: acknowledges, retries, buries, extends, and ends in order."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import timeline
from tests.conditions import until
from tests.driver.broker import Broker
from timeline import Backoff, Batch, Bury, Retry
from timeline.driver.consume import handlers


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


async def test_an_error_for_all_handlers_has_a_short_traceback(tl: timeline.Timeline) -> None:
    """All of them raise the same error. Each would add its lines to it."""

    async def handler(_: timeline.Delivery) -> None: ...

    async with tl.consumer("absent") as c:
        with pytest.raises(timeline.NotFound) as refused:
            await c.run(handler, concurrency=8)
    names = [frame.name for frame in refused.traceback]
    assert names[1:] == ["run", "run_handlers", "work", "take", "_more"]


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


@pytest.mark.slow
async def test_the_lease_is_extended_while_a_handler_works(tl: timeline.Timeline) -> None:
    done = asyncio.Event()
    ends: list[int] = []

    async def handler(d: timeline.Delivery) -> None:
        first = d.lease_until_ms
        ends.append(first)
        while d.lease_until_ms < first + 600:
            await asyncio.sleep(0)
        done.set()

    async with tl.producer("t") as p, tl.consumer("t", id="w", lease="1s") as c:
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


@pytest.mark.slow
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


def test_handlers_that_do_not_finish_are_told_apart_by_number_and_kind() -> None:
    assert handlers.unfinished(1, False) == "1 handler did not finish within the grace: it is cancelled"
    assert handlers.unfinished(2, False).endswith("2 handlers did not finish within the grace: they are cancelled")
    assert "It learns of it at its next look" in handlers.unfinished(1, True)
    assert "They learn of it at their next look" in handlers.unfinished(2, True)


async def test_a_thread_that_the_grace_was_too_short_for_is_told_at_its_next_look(tl: timeline.Timeline) -> None:
    begun, told = threading.Event(), threading.Event()

    def handler(d: timeline.SyncDelivery) -> None:
        begun.set()
        until(lambda: d.lost)
        told.set()

    async with tl.producer("t") as p, tl.consumer("t", lease="20s") as c:
        await p.produce(b"", in_=0, id="m")
        running = asyncio.create_task(c.run(handler, concurrency=1, grace="10ms"))
        await asyncio.to_thread(begun.wait)
        c.stop_taking()
        await running
        assert await asyncio.to_thread(told.wait, 10)


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
    factors: list[dict[str, Any]] = [{"factor": factor} for factor in (0.5, 0, -2, 1e9, float("nan"), float("inf"))]
    for bad in (*factors, {"jitter": 2}, {"jitter": -0.1}, {"first": -1}):
        with pytest.raises(timeline.Invalid):
            Backoff(**bad)


def test_a_first_wait_above_the_cap_is_refused() -> None:
    with pytest.raises(timeline.Invalid, match="first must be at most cap, not '1s' with cap='1ms'"):
        Backoff(first="1s", cap="1ms")
    with pytest.raises(timeline.Invalid, match="Give a longer cap"):
        Backoff(first="2h")
    Backoff(first="1h", cap=3600)


@pytest.mark.parametrize("bad", [{"factor": "2"}, {"factor": True}, {"jitter": None}, {"jitter": float("nan")}])
def test_a_backoff_of_another_type_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(timeline.Invalid, match=f"{next(iter(bad))} must be"):
        Backoff(**bad)


async def test_a_handler_whose_own_work_was_cancelled_has_failed_and_the_run_goes_on(tl: timeline.Timeline) -> None:
    done = asyncio.Event()

    async def handler(d: timeline.Delivery) -> None:
        if d.deliveries == 1:
            helper = asyncio.ensure_future(asyncio.Event().wait())
            helper.cancel()
            await helper
        done.set()

    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        await p.produce(b"", in_=0)
        await _run_until(c, done, handler, concurrency=2, backoff=Backoff(first=0))
    assert done.is_set()
    assert [m async for m in tl.scan("t")] == []


@pytest.mark.slow
async def test_a_settle_on_its_way_is_not_broken_off_when_the_lease_ends(
    broker: Broker, tl: timeline.Timeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert broker.node is not None
    store, go, rounds = broker.node.store, asyncio.Event(), 0
    settle, pause = store.settle, handlers._pause
    taken: list[timeline.Delivery] = []

    async def held(*asked: Any) -> Any:
        await go.wait()
        return await settle(*asked)

    async def counted(*asked: Any) -> None:
        nonlocal rounds
        rounds += 1
        await pause(*asked)

    async def handler(d: timeline.Delivery) -> None:
        taken.append(d)
        store.settle = held  # type: ignore[method-assign]

    monkeypatch.setattr(handlers, "_pause", counted)
    async with tl.producer("t") as p, tl.consumer("t", id="w", lease="200ms") as c:
        await p.produce(b"", in_=0)
        running = asyncio.ensure_future(c.run(handler, concurrency=1))
        while not taken or not taken[0].lost:
            await asyncio.sleep(0)
        looked = rounds
        while rounds < looked + 2 and not running.done():
            await asyncio.sleep(0)
        assert not running.done() and c.taking
        go.set()
        c.stop_taking()
        await running


async def test_an_exception_that_no_future_can_carry_is_a_failure_like_any_other(
    tl: timeline.Timeline, caplog: pytest.LogCaptureFixture
) -> None:
    done, loop = asyncio.Event(), asyncio.get_running_loop()

    def handler(d: timeline.SyncDelivery) -> None:
        if d.deliveries == 1:
            raise StopIteration(3)
        loop.call_soon_threadsafe(done.set)

    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        await p.produce(b"", in_=0)
        await _run_until(c, done, handler, concurrency=1, backoff=Backoff(first=0))
    assert done.is_set() and "the handler raised StopIteration(3)" in caplog.text


class Stray(BaseException):
    """A handler's own, above Exception."""


def _strays(kind: str, stray: type[BaseException], others: list[str]) -> Any:
    """A handler, async or plain, that raises `stray` for the message `bad`, once the other has begun."""
    begun = threading.Event()

    def plain(d: timeline.SyncDelivery) -> None:
        if d.id == "bad":
            begun.wait()
            raise stray(3)
        begun.set()
        others.append(d.id)

    async def awaits(d: timeline.Delivery) -> None:
        if d.id == "bad":
            while not begun.is_set():
                await asyncio.sleep(0)
            raise stray(3)
        begun.set()
        await asyncio.sleep(0)
        others.append(d.id)

    return plain if kind == "plain" else awaits


STRAYS = [KeyboardInterrupt, SystemExit, Stray]


@pytest.mark.parametrize("stray", STRAYS)
@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_what_is_no_exception_ends_the_run_and_its_message_goes_back(
    tl: timeline.Timeline, kind: str, stray: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    others: list[str] = []
    async with tl.producer("t") as p, tl.consumer("t", id="w", lease="10m") as c:
        await p.produce_many([timeline.Message(b"", in_=0, id=id) for id in ("bad", "good")])
        with pytest.raises(stray, match=r"^3$"):
            await c.run(_strays(kind, stray, others), concurrency=2, backoff=Backoff(first="1h"))
        assert others == ["good"] and caplog.records == [], "the caller is told, and nobody else"
        left = {m.id: (m.state, m.deliveries, m.holder) async for m in tl.scan("t")}
        assert left == {"bad": (timeline.State.WAITING, 1, None)}, "what was done is acknowledged"


async def test_a_generator_exit_ends_the_run_at_once_too(tl: timeline.Timeline) -> None:
    """Its message waits for the end of its lease: nothing may be awaited after it."""
    handled: list[str] = []

    async def handler(d: timeline.Delivery) -> None:
        handled.append(d.id)
        if d.id == "bad":
            raise GeneratorExit
        await asyncio.sleep(0)

    async with tl.producer("t") as p, tl.consumer("t", id="w", lease="10m") as c:
        await p.produce(b"", in_=0, id="bad")
        with pytest.raises(GeneratorExit):
            await c.run(handler, concurrency=2)
        assert not c.taking and handled == ["bad"]


@pytest.mark.parametrize("stray", STRAYS)
@pytest.mark.parametrize("kind", ["async", "plain"])
def test_without_await_the_caller_gets_it_and_the_client_works_on(
    served: str, kind: str, stray: type[BaseException]
) -> None:
    others: list[str] = []
    with timeline.connect_sync(served, timeout="10s") as tl:
        tl.create_topic("t")
        with tl.producer("t") as p, tl.consumer("t", id="w", lease="10m") as c:
            p.produce_many([timeline.Message(b"", in_=0, id=id) for id in ("bad", "good")])
            with pytest.raises(stray, match=r"^3$"):
                c.run(_strays(kind, stray, others), concurrency=2, backoff=Backoff(first="1h"))
            assert others == ["good"]
            assert {m.id: (m.state, m.deliveries) for m in tl.scan("t")} == {"bad": (timeline.State.WAITING, 1)}


@pytest.mark.processes
@pytest.mark.parametrize("stray", ["SystemExit(3)", "KeyboardInterrupt()"])
@pytest.mark.parametrize("run", ["asyncio.run(main())", "blocking()"])
async def test_a_program_whose_handler_exits_ends_and_prints_it_once(broker: Broker, run: str, stray: str) -> None:
    program = f"""
import asyncio, sys, timeline

async def handler(d):
    raise {stray}

async def main():
    async with timeline.connect(sys.argv[1]) as tl, tl.consumer("t") as c:
        await c.run(handler)

def blocking():
    with timeline.connect_sync(sys.argv[1]) as tl, tl.consumer("t") as c:
        c.run(handler)

{run}
"""
    async with timeline.connect(broker.address, timeout="20s") as tl:
        await tl.create_topic("t")
        await tl.producer("t").produce(b"", in_=0)
    pipe = asyncio.subprocess.PIPE
    ends = await asyncio.create_subprocess_exec(sys.executable, "-c", program, broker.address, stdout=pipe, stderr=pipe)
    out, err = await ends.communicate()
    if stray == "SystemExit(3)":
        assert (ends.returncode, out, err) == (3, b"", b"")
    else:
        assert ends.returncode in (1, -2, 130) and out == b"" and err.decode().count("KeyboardInterrupt") <= 2, err
        assert b"never retrieved" not in err and b"failed, again" not in err


@pytest.mark.parametrize("raised", [lambda why: Bury(why), lambda why: Retry(reason=why)])
async def test_an_exception_given_as_the_reason_is_told_by_its_words(
    tl: timeline.Timeline, raised: Callable[[Any], Exception]
) -> None:
    await tl.create_topic("once", max_deliveries=1)

    async def handler(d: timeline.Delivery) -> None:
        raise raised(ValueError("no such gate"))

    async with tl.producer("once") as p, tl.consumer("once", id="w") as c:
        await p.produce(b"", in_=0)
        running = asyncio.ensure_future(c.run(handler))
        while not (dead := [m.dead async for m in tl.dead("once")]) and not running.done():
            await asyncio.sleep(0)
        assert not running.done() and str(dead[0]).endswith("no such gate")
        c.stop_taking()
        await running


async def test_sigterm_stops_every_run_of_the_process(tl: timeline.Timeline) -> None:
    await tl.create_topic("u")
    async with tl.consumer("t", id="a") as one, tl.consumer("u", id="b") as other:
        runs = [asyncio.ensure_future(each.run(print)) for each in (one, other)]
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        while one.taking and other.taking:
            await asyncio.sleep(0)
        stopped = not (one.taking or other.taking)
        for each in (one, other):
            each.stop_taking()
        await asyncio.gather(*runs)
    assert stopped
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.slow
async def test_a_consumer_that_is_closed_under_its_handlers_ends_their_run_without_noise(
    tl: timeline.Timeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: noise.append(context))
    started, go, rounds = asyncio.Event(), asyncio.Event(), 0
    pause = handlers._pause

    async def counted(*asked: Any) -> None:
        nonlocal rounds
        rounds += 1
        await pause(*asked)

    async def handler(d: timeline.Delivery) -> None:
        started.set()
        await go.wait()

    monkeypatch.setattr(handlers, "_pause", counted)
    async with tl.producer("t") as p:
        await p.produce(b"", in_=0)
    c = tl.consumer("t", id="w", lease="2s")
    running = asyncio.ensure_future(c.run(handler, concurrency=2))
    await started.wait()
    await c.aclose()
    looked = rounds
    while rounds < looked + 8:  # past the time when the lease would be extended
        await asyncio.sleep(0)
    go.set()
    await running
    gc.collect()
    assert noise == [] and c.stats.settle_errors == 1


async def test_a_handler_without_a_backoff_of_its_own_waits_as_its_topic_says(tl: timeline.Timeline) -> None:
    """And so does whoever takes messages by single calls, after a change at once."""
    await tl.update_topic("t", retry_first="7h", retry_factor=1.5, retry_cap="30h", retry_jitter=0)
    async with tl.producer("t") as p:
        put = await p.produce(b"", id="a", in_=0)
    failed = asyncio.Event()

    async def handler(d: timeline.Delivery) -> None:
        failed.set()
        raise ValueError

    async with tl.consumer("t", id="c") as c:
        running = asyncio.ensure_future(c.run(handler))
        await failed.wait()
        while (message := await tl.get("t", "a")) is None or message.holder:
            pass
        assert 7 <= (message.due - put.due) / timedelta(hours=1) < 8
        running.cancel()
    await tl.update_topic("t", retry_jitter=0.5)
    for expected_h in (10.5, 15.75, 23.625, 30, 30):
        async with tl.producer("t") as p:
            await p.move("a", in_=0)
        (d,) = await tl.take("t")
        assert expected_h / 2 <= d.retry_in / timedelta(hours=1) <= expected_h * 1.5
        assert d.retry_in == d.retry_in != timedelta(hours=expected_h)
        await tl.settle(d.receipt, "release", in_=d.retry_in)
