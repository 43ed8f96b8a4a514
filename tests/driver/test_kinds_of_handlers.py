"""`c.run` of what is no plain `async def`: decorated, made by others, run in threads, forked, and its own end."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import warnings
from collections.abc import Callable, Generator
from typing import Any

import pytest

import timeline
from timeline import Backoff
from timeline.driver.consume.handlers import is_async


async def _works(d: timeline.Delivery) -> None:
    await d.extend("1m")
    d._consumer.stop_taking()


def _decorated(handler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(handler)
    def wrapper(*given: Any) -> Any:
        return handler(*given)

    return wrapper


class _Called:
    async def __call__(self, d: timeline.Delivery) -> None:
        await _works(d)

    async def method(self, d: timeline.Delivery) -> None:
        await _works(d)


async def _given(more: object, d: timeline.Delivery) -> None:
    await _works(d)


ASYNC: list[Callable[..., Any]] = [
    functools.partial(_given, 1),
    functools.partial(functools.partial(_given), 1),
    _Called(),
    functools.partial(_Called()),
    _Called().method,
]


@pytest.mark.parametrize("handler", ASYNC)
async def test_an_async_function_is_one_whatever_was_made_of_it(
    tl: timeline.Timeline, handler: Callable[..., Any]
) -> None:
    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        await p.produce(b"", in_=0, id="m")
        await c.run(handler)
    assert await tl.get("t", "m") is None


def test_an_async_function_around_a_plain_one_is_async() -> None:
    def plain(d: timeline.SyncDelivery) -> None: ...

    @functools.wraps(plain)
    async def around(d: timeline.Delivery) -> None:
        await asyncio.to_thread(plain, d)

    assert is_async(around) and not is_async(plain) and not is_async(lambda d: _works(d))


def _yields(d: timeline.SyncDelivery) -> Generator[str]:
    yield d.id


@pytest.mark.slow
@pytest.mark.parametrize(
    ("handler", "kind"),
    [(lambda d: _works(d), "coroutine"), (_decorated(_works), "coroutine"), (_yields, "generator")],
)
async def test_a_plain_handler_that_leaves_its_work_to_others_has_failed(
    tl: timeline.Timeline, handler: Callable[..., Any], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody does it; awaited in the loop, what it asks of its delivery would block the loop for ever."""
    await tl.create_topic("once", max_deliveries=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with tl.producer("once") as p, tl.consumer("once", id="w") as c:
            await p.produce(b"", in_=0)
            running = asyncio.ensure_future(c.run(handler))
            while not (dead := [str(m.dead) async for m in tl.dead("once")]) and not running.done():
                await asyncio.sleep(0)
            c.stop_taking()
            await running
        gc.collect()
    assert f"plain function, and returned a {kind}, which nobody runs: make it an `async def`" in dead[0]
    assert "never awaited" not in caplog.text


async def test_a_plain_delivery_that_is_used_in_the_loop_is_refused(tl: timeline.Timeline) -> None:
    """It would wait for the loop, in the loop."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()

    async def in_loop(d: timeline.SyncDelivery) -> None:
        with pytest.raises(timeline.Invalid, match="event loop's own thread"):
            d.extend("1m")
        told.set()

    def handler(d: timeline.SyncDelivery) -> None:
        asyncio.run_coroutine_threadsafe(in_loop(d), loop).result()

    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        await p.produce(b"", in_=0, id="m")
        running = asyncio.ensure_future(c.run(handler))
        await told.wait()
        c.stop_taking()
        await running
    assert await tl.get("t", "m") is None


@pytest.mark.parametrize("way", ["async", "sync"])
def test_a_child_that_a_plain_handler_forks_cannot_settle(served: str, way: str) -> None:
    """The loop stayed with the parent: it would wait for ever. Whichever client runs the handler."""
    reading, writing = os.pipe()

    def handler(d: timeline.SyncDelivery) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are threads, of which a child has none
            pid = os.fork()
        if pid == 0:
            try:
                d.ack()
            except BaseException as error:
                os.write(writing, repr(error).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        os.close(writing)
        stop()

    async def run_async() -> None:
        nonlocal stop
        loop = asyncio.get_running_loop()
        async with timeline.connect(served, timeout="20s") as tl, tl.producer("t") as p, tl.consumer("t", id="w") as c:
            stop = functools.partial(loop.call_soon_threadsafe, c.stop_taking)
            await p.produce(b"", in_=0)
            await c.run(handler, concurrency=1)

    stop: Callable[[], object]
    with timeline.connect_sync(served, timeout="20s") as tl:
        tl.create_topic("t", lease="30s")
        if way == "async":
            asyncio.run(run_async())
        else:
            with tl.producer("t") as p, tl.consumer("t", id="w") as c:
                stop = c.stop_taking
                p.produce(b"", in_=0)
                c.run(handler, concurrency=1)
        assert list(tl.scan("t")) == []
    said = os.read(reading, 1_000).decode()
    os.close(reading)
    assert said.startswith("Closed(") and "forked" in said, said


async def _at_once() -> None:
    asyncio.current_task().cancel()  # type: ignore[union-attr]


async def _amid_its_work() -> None:
    await _at_once()
    await asyncio.Event().wait()


@pytest.mark.parametrize("ends_itself", [_at_once, _amid_its_work])
async def test_a_handler_that_cancels_its_own_task_has_failed_and_the_run_goes_on(
    tl: timeline.Timeline, ends_itself: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []

    async def handler(d: timeline.Delivery) -> None:
        seen.append(d.id)
        if len(seen) == 1:
            await ends_itself()
        elif len(seen) == 4:
            c.stop_taking()

    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        for id in ("a", "b", "c"):
            await p.produce(b"", in_=0, id=id)
        await c.run(handler, concurrency=1, backoff=Backoff(first=0))
        assert c.stats.settle_errors == 0
    assert sorted(seen) == sorted(["a", "b", "c", seen[0]])
    assert [m async for m in tl.scan("t")] == []
    assert "CancelledError: its own task was cancelled" in caplog.text


async def test_a_run_that_is_cancelled_with_all_tasks_gives_back_what_handlers_had(tl: timeline.Timeline) -> None:
    """As `asyncio.run` does it at its end: no handler's doing."""
    started = asyncio.Event()

    async def handler(d: timeline.Delivery) -> None:
        started.set()
        await asyncio.Event().wait()

    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        await p.produce(b"", in_=0, id="m")
        running = asyncio.ensure_future(c.run(handler, concurrency=1))
        await started.wait()
        for task in asyncio.all_tasks():
            if task is running or task.get_name().startswith("handler "):
                task.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled()
    assert [(m.state, m.deliveries) async for m in tl.scan("t")] == [("available", 1)]
