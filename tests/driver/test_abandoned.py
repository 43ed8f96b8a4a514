"""Producers that nobody closed and nobody holds any more: they end without a word, and lose nothing."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys

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
