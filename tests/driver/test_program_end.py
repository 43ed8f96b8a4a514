"""Programs that end without closing their client: acks that nobody waits for arrive all the same, or it is told that
they are lost.

Real processes: what matters is what the interpreter does at its end."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

import timeline
from tests.driver.broker import Broker

PROGRAM = """
import asyncio, os, sys, threading, timeline

address, how = sys.argv[1:]

async def take(c):
    for _ in range(3):
        (await c.take()).ack_soon()

async def main():
    global tl, c
    tl = timeline.connect(address)
    c = tl.consumer("t", credit=100)
    await take(c)
    if how == "raises":
        raise ValueError("its own")
    if how == "exits":
        sys.exit(3)
    if how == "drops":
        del c
    if how == "forks":
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            await asyncio.sleep(0)
            os._exit(0)

async def worker():
    async with timeline.connect(address) as tl, tl.consumer("t", credit=100) as c:
        await take(c)
        taken.set()
        await asyncio.Event().wait()

async def in_a_task():
    global task, taken
    taken = asyncio.Event()
    task = asyncio.create_task(worker())
    await taken.wait()

def plain():
    global tl, c
    tl = timeline.connect_sync(address)
    c = tl.consumer("t", credit=100)
    for _ in range(3):
        c.take().ack_soon()
    if how == "plain raises":
        raise ValueError("its own")
    if how == "plain exits":
        sys.exit(3)
    if how == "plain forks":
        child = os.fork()
        if child:
            os.waitpid(child, 0)

if how.startswith("plain"):
    plain()
elif how == "stopped loop":
    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
elif how == "closed loop":
    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
elif how == "daemon":
    done = threading.Event()
    async def stay():
        await main()
        done.set()
        await asyncio.Event().wait()
    threading.Thread(target=asyncio.run, args=(stay(),), daemon=True).start()
    done.wait()
elif how == "task":
    asyncio.run(in_a_task())
else:
    asyncio.run(main())
"""

IN_ORDER = ["returns", "drops", "task", "stopped loop", "daemon", "plain returns"]
WITH_ERRORS = {"raises": 1, "exits": 3, "plain raises": 1, "plain exits": 3}


def _run(address: str, how: str) -> subprocess.CompletedProcess[str]:
    with timeline.connect_sync(address, timeout="10s") as tl:
        tl.create_topic("t", lease="1h")
        tl.producer("t").produce_many([timeline.Message(b"", in_=0, id=f"m{n}") for n in range(3)])
    return subprocess.run([sys.executable, "-c", PROGRAM, address, how], capture_output=True, text=True, timeout=60)


def _left(address: str) -> int:
    with timeline.connect_sync(address, timeout="10s") as tl:
        return len(list(tl.scan("t")))


@pytest.mark.slow
@pytest.mark.parametrize("how", IN_ORDER)
def test_acks_arrive_though_nobody_closed_the_client(served: str, how: str) -> None:
    done = _run(served, how)
    assert (done.returncode, done.stderr) == (0, "")
    assert _left(served) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), WITH_ERRORS.items())
def test_acks_arrive_before_an_error_ends_the_program(served: str, how: str, code: int) -> None:
    done = _run(served, how)
    assert done.returncode == code
    assert "acks" not in done.stderr and ("its own" in done.stderr) is (code == 1)
    assert _left(served) == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["forks", "plain forks"])
def test_a_forked_child_sends_nothing_of_its_parents(served: str, how: str) -> None:
    """The child ends in order. The parent of an event loop ends at once, before its acks have gone."""
    done = _run(served, how)
    assert done.returncode == 0 and "acks" not in done.stderr
    assert _left(served) == (3 if how == "forks" else 0)


FORKED = """
import asyncio, os, sys, timeline

address, how = sys.argv[1:]

async def put(p, id):
    assert (await p.produce(b"", in_="1h", id=id)).ok

if how == "async":
    tl = timeline.connect(address, timeout="20s")
    p = tl.producer("t")
    runner = asyncio.Runner()
    runner.run(put(p, "parent"))
else:
    tl = timeline.connect_sync(address, timeout="20s")
    p = tl.producer("t")
    assert p.produce(b"", in_="1h", id="parent").ok

if child := os.fork():
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status))
    os._exit(0)
if how == "async":
    asyncio.Runner().run(put(p, "child"))
else:
    assert p.produce(b"", in_="1h", id="child").ok
sys.exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["async", "sync"])
def test_a_forked_child_that_has_used_the_client_exits_in_order(served: str, how: str) -> None:
    """It does not close the client, and lets the interpreter end: what it keeps of its parent's gRPC stands no end in
    the way, and no crash."""
    with timeline.connect_sync(served, timeout="10s") as tl:
        tl.create_topic("t")
    done = subprocess.run([sys.executable, "-c", FORKED, served, how], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
    assert _left(served) == 2


@pytest.mark.slow
def test_acks_that_cannot_be_sent_are_counted(served: str) -> None:
    done = _run(served, "closed loop")
    assert done.returncode == 0
    assert "The program ended before 3 acks of t were answered." in done.stderr
    assert _left(served) == 3


GONE = """
import asyncio, sys, timeline

address, how = sys.argv[1:]

async def main():
    global tl, c
    tl = timeline.connect(address)
    c = tl.consumer("t", credit=100)
    taken = [await c.take() for _ in range(30)]
    print("taken", flush=True)
    sys.stdin.readline()
    for d in taken:
        d.ack_soon()

def plain():
    global tl, c
    tl = timeline.connect_sync(address)
    c = tl.consumer("t", credit=100)
    taken = [c.take() for _ in range(30)]
    print("taken", flush=True)
    sys.stdin.readline()
    for d in taken:
        d.ack_soon()

def many():
    global tl, consumers
    tl = timeline.connect_sync(address)
    consumers = [tl.consumer("t", credit=1) for _ in range(100)]
    taken = [c.take() for c in consumers]
    print("taken", flush=True)
    sys.stdin.readline()
    for d in taken:
        d.ack_soon()

asyncio.run(main()) if how == "asynchronous" else plain() if how == "plain" else many()
"""


@pytest.mark.slow
async def test_a_hundred_consumers_hold_up_the_end_no_longer_than_one(broker: Broker) -> None:
    """One after the other, they would take longer than a test may."""
    async with timeline.connect(broker.address, timeout="10s") as tl:
        await tl.create_topic("t", lease="1h")
        batch = [timeline.Message(b"", in_=0, id=f"m{n}") for n in range(100)]
        (await tl.producer("t").produce_many(batch)).raise_failed()
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", GONE, broker.address, "many", stdin=pipe, stdout=pipe, stderr=pipe
    )
    assert child.stdout is not None
    try:
        assert await child.stdout.readline() == b"taken\n"
        await broker.stop()
        _, errors = await child.communicate(b"\n")
    finally:
        if child.returncode is None:
            child.kill()
    assert child.returncode == 0 and b"Traceback" not in errors
    assert errors.count(b"The program ended before 1 acks of t were answered.") == 100


@pytest.mark.slow
@pytest.mark.parametrize("how", ["asynchronous", "plain"])
async def test_without_a_broker_a_program_ends_soon_and_says_how_many_acks_were_lost(broker: Broker, how: str) -> None:
    async with timeline.connect(broker.address, timeout="10s") as tl:
        await tl.create_topic("t", lease="1h")
        batch = [timeline.Message(b"", in_=0, id=f"m{n}") for n in range(30)]
        (await tl.producer("t").produce_many(batch)).raise_failed()
    command = (sys.executable, "-c", GONE, broker.address, how)
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    assert child.stdout is not None
    assert await child.stdout.readline() == b"taken\n"
    await broker.stop()
    _, errors = await child.communicate(b"\n")
    assert child.returncode == 0
    assert b"The program ended before 30 acks of t were answered." in errors
