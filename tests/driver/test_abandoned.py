"""Producers and consumers that nobody closed and nobody holds any more: they end without a word, and lose nothing."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import AsyncIterator

import pytest

import timeline
from tests.driver.broker import Broker

OURS = {"producing t", "mutating t"}


def _complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "asyncio"]


async def test_one_that_only_a_collection_finds_ends_in_order(
    tl: timeline.Timeline, caplog: pytest.LogCaptureFixture
) -> None:
    before = asyncio.all_tasks()
    for n in range(5):
        p = tl.producer("t")
        await p.produce(b"", in_="1h", id=f"m{n}")
        await p.move(f"m{n}", in_="2h")
        circle: list[object] = [p]
        circle.append(circle)
        del p, circle
    gc.collect()
    while OURS & {task.get_name() for task in asyncio.all_tasks() - before}:
        await asyncio.sleep(0)
    assert _complaints(caplog) == []


@pytest.mark.slow
def test_one_of_a_plain_thread_whose_call_was_refused_ends_in_order(
    served: str, caplog: pytest.LogCaptureFixture
) -> None:
    with timeline.connect_sync(served, timeout="10s") as tl:
        tl.create_topic("t")
        for n in range(3):
            tl.producer("t").produce(b"", in_="1h", id=f"m{n}")
            gc.collect()
            with pytest.raises(timeline.NotFound):
                tl.producer("t").move("absent", in_=3)
            gc.collect()
        assert sorted(m.id for m in tl.scan("t")) == ["m0", "m1", "m2"]
    gc.collect()
    assert _complaints(caplog) == []


@pytest.mark.slow
def test_a_program_that_ends_by_a_refusal_says_nothing_but_that(served: str) -> None:
    with timeline.connect_sync(served, timeout="10s") as tl:
        tl.create_topic("t")
    program = f"""
import timeline
tl = timeline.connect_sync({served!r}, timeout="10s")
p = tl.producer("t")
p.cancel("absent")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "NotFound" in done.stderr.splitlines()[-1] and "Task" not in done.stderr, done.stderr


async def test_a_call_under_way_outlives_whoever_let_its_producer_go(broker: Broker, tl: timeline.Timeline) -> None:
    go = broker.hold()
    call = asyncio.ensure_future(tl.producer("t").produce(b"", in_="1h", id="m"))
    assert broker.node is not None
    while not broker.node.service.streams:
        await asyncio.sleep(0)
    gc.collect()
    go.set()
    assert (await call).ok


async def _take_and_let_go(tl: timeline.Timeline, count: int) -> None:
    async for d in tl.consumer("t", credit=20):
        d.ack_soon()
        count -= 1
        if not count:
            break


async def test_what_an_abandoned_consumer_had_waiting_goes_back(
    tl: timeline.Timeline, caplog: pytest.LogCaptureFixture
) -> None:
    """Else it would be extended for nobody, as long as the client lives."""
    async with tl.producer("t") as p:
        await p.produce_many([timeline.Message(b"", in_=0, id=f"m{n:02}") for n in range(20)])
    await _take_and_let_go(tl, 3)
    gc.collect()
    async with asyncio.timeout(20), tl.consumer("t", credit=1) as c:
        seen = [(d.id, d.deliveries) async for d in _acked(c, 17)]
    assert sorted(seen) == [(f"m{n:02}", 1) for n in range(3, 20)]
    assert _complaints(caplog) == []


async def _acked(c: timeline.Consumer, count: int) -> AsyncIterator[timeline.Delivery]:
    async for d in c:
        await d.ack()
        yield d
        count -= 1
        if not count:
            return


async def test_closing_the_client_waits_for_an_abandoned_consumer(broker: Broker) -> None:
    """Its acks still gather when the client is closed, at once."""
    async with timeline.connect(broker.address) as tl:
        await tl.create_topic("t", lease="60s")
        async with tl.producer("t") as p:
            await p.produce_many([timeline.Message(b"", in_=0) for _ in range(20)])
        await _take_and_let_go(tl, 20)
        gc.collect()
    async with timeline.connect(broker.address) as tl:
        assert [m.id async for m in tl.scan("t")] == []


@pytest.mark.slow
async def test_a_delivery_in_hand_keeps_its_consumer(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p:
        await p.produce(b"", in_=0, id="m")
    d = await tl.consumer("t").take()
    gc.collect()
    assert d is not None
    await d.extend("1m")
    await d.ack()
    assert await tl.get("t", "m") is None


@pytest.mark.slow
def test_grpc_has_nothing_left_to_report_to_the_loop_of_a_closed_client(
    served: str, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC hands its events to whichever loop of the process is awake: here often to the broker's, since two threads
    keep the client's from running."""

    async def use() -> None:
        async with timeline.connect(served, timeout="10s") as tl:
            await tl.producer("t").produce(b"", in_="1h", id="m")
            assert [m.id async for m in tl.scan("t")] == ["m"]

    with timeline.connect_sync(served, timeout="10s") as tl:
        tl.create_topic("t")
    done = threading.Event()

    def spin() -> None:
        while not done.is_set():
            pass

    busy = [threading.Thread(target=spin) for _ in range(2)]
    for thread in busy:
        thread.start()
    try:
        for _ in range(20):
            asyncio.run(use())
    finally:
        done.set()
        for thread in busy:
            thread.join()
    assert _complaints(caplog) == []
