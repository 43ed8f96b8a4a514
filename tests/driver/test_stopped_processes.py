"""Consumer processes that are stopped: past their leases, to go on, and by Ctrl-C, to end."""

from __future__ import annotations

import asyncio
import json
import signal
import sys

import pytest

import timeline
from tests.driver.broker import Broker
from timeline import Batch

CONSUMER = """
import asyncio, json, sys, timeline

async def main():
    async with timeline.connect(sys.argv[1], timeout="20s") as tl:
        async with tl.consumer("t", id="stopped", lease="500ms", credit=50) as c:
            first = await c.take()
            print("took", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            seen = []
            while len(seen) < 40:
                d = await c.take()
                seen.append((d.id, d.version, d.lost))
                await d.ack()
            try:
                await first.extend("1m")
                late = "extended"
            except timeline.LeaseLost:
                late = "lost"
            print(json.dumps({"seen": seen, "late": late, "dropped": c.stats.dropped}), flush=True)

asyncio.run(main())
"""


@pytest.mark.processes
async def test_after_a_stop_past_the_lease_nothing_stale_is_handed_out(broker: Broker, tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p:
        await p.produce_many(Batch([b""] * 41, in_=0))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CONSUMER, broker.address, stdin=pipe, stdout=pipe
    )
    assert process.stdin is not None and process.stdout is not None
    assert await process.stdout.readline() == b"took\n"
    process.send_signal(signal.SIGSTOP)
    process.stdin.write(b"go on\n")
    # Until every lease of the stopped one has run out.
    while any([m.state is timeline.State.LEASED async for m in tl.scan("t")]):
        await asyncio.sleep(0)
    process.send_signal(signal.SIGCONT)
    told = json.loads(await process.stdout.readline())
    assert await process.wait() == 0
    assert told["late"] == "lost"
    assert len({id for id, _, _ in told["seen"]}) == 40
    assert all(version >= 3 and not lost for _, version, lost in told["seen"])
    assert told["dropped"] >= 40


RUN = """
import sys, timeline

def handler(d):
    print("took", flush=True)
    sys.stdin.readline()

with timeline.connect_sync(sys.argv[1], timeout="20s") as tl, tl.consumer("t", id="w") as c:
    try:
        c.run(handler, concurrency=1)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.processes
async def test_ctrl_c_lets_the_handler_finish_and_is_told_once(broker: Broker, tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p:
        await p.produce_many(Batch([b""] * 3, in_=0))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUN, broker.address, stdin=pipe, stdout=pipe, stderr=pipe
    )
    assert process.stdin is not None and process.stdout is not None
    assert await process.stdout.readline() == b"took\n"
    process.send_signal(signal.SIGINT)
    # It has heard of it once it handed back what nobody took.
    while len([m async for m in tl.scan("t") if m.state is timeline.State.AVAILABLE]) < 2:
        await asyncio.sleep(0)
    told = await process.communicate(b"done\n")
    assert told == (b"interrupted\n", b"") and process.returncode == 0
    assert len([m async for m in tl.scan("t")]) == 2  # the one in hand was acknowledged
