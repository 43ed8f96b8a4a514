"""The thread behind `connect_sync`: it winds down once, whoever closes it meanwhile."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

import timeline
from timeline.driver.blocking.calls import Background


@pytest.mark.slow
def test_closing_while_it_winds_down_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that raised SystemExit ended the loop; to be told to stop in the midst of that broke it off."""
    background = Background()
    begun, cancelled, go_on = threading.Event(), threading.Event(), threading.Event()
    never = asyncio.Event()  # held here: a loop holds its tasks weakly

    async def lingers() -> None:
        try:
            begun.set()
            await never.wait()
        finally:
            cancelled.set()
            while not go_on.is_set():
                await asyncio.sleep(0)

    async def exits() -> None:
        raise SystemExit(3)

    background.start(lingers())
    begun.wait()
    with pytest.raises((timeline.Closed, SystemExit)):
        background.run(exits())
    cancelled.wait()
    thread = background._thread
    assert thread is not None
    joined: list[int | None] = []
    join = threading.Thread.join

    def joining(self: threading.Thread, timeout: float | None = None) -> None:
        joined.append(self.ident)
        join(self, timeout)

    monkeypatch.setattr(threading.Thread, "join", joining)
    closing = threading.Thread(target=background.close)
    closing.start()
    while thread.ident not in joined:
        pass
    go_on.set()
    closing.join()
    assert not thread.is_alive()
    background.close()


RACE = """
import os, signal, sys, threading
from timeline.driver.blocking.calls import Background

async def nothing():
    pass

background = Background()
background.run(nothing())
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
signal.alarm(30)  # ends a child that hangs
pid, asked, go_on = os.getpid, threading.Event(), threading.Event()

def asks_slowly():
    found = pid()
    if threading.current_thread() is second:
        asked.set()
        go_on.wait()
    return found

second = threading.Thread(target=lambda: background.run(nothing()))
os.getpid = asks_slowly
second.start()
while second.is_alive() and not asked.is_set():
    pass
background.run(nothing())
go_on.set()
second.join()
os._exit([thread.name for thread in threading.enumerate()].count("timeline"))
"""


@pytest.mark.slow
def test_the_first_calls_of_two_threads_after_a_fork_share_one_thread() -> None:
    """Each of them may notice the fork, and neither may undo what the other has begun."""
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "")
