"""What the demo's processes have in common: how one starts, waits for the day to begin, notes what it does, and ends.

The conductor starts each as `python -m timeline.demo.<module> FOLDER …` with pipes. It prints `ready` once it could
begin, reads the plan when it is told `go`, and ends on SIGTERM, or by itself when the conductor is gone (its standard
input ends), so that nothing outlives a demo.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import timeline
from timeline.clock import Clock
from timeline.demo.plan import Plan, read_plan
from timeline.errors import TimelineError
from timeline.history import OK, HistoryFile, outcome_of

PLAN = "plan.json"
READY, GO = "ready", "go"
HISTORY_SUFFIX = ".history.jsonl"
OBSERVE_EVERY_S = 0.25


class Part:
    """A process of the demo that has been told to begin. `stopping` is set on SIGTERM."""

    def __init__(self, folder: Path, name: str, plan: Plan, clock: Clock, stopping: asyncio.Event) -> None:
        self.plan = plan
        self.clock = clock
        self.stopping = stopping
        self.history = HistoryFile(folder / f"{name}{HISTORY_SUFFIX}", name, clock)

    async def until(self, real_ms: float) -> bool:
        """Returns at `real_ms`, or when told to stop; whether it may go on."""
        wait_s = (real_ms - self.clock.now()) / 1000
        if wait_s > 0:
            try:
                await asyncio.wait_for(self.stopping.wait(), wait_s)
            except TimeoutError:
                return True
        return not self.stopping.is_set()

    async def noted(self, operation: str, values: dict[str, Any], asked: Awaitable[timeline.Receipt | None]) -> bool:
        """Awaits one call on one message and notes it before and after; whether it was answered OK."""
        call = self.history.call(operation, values)
        try:
            answer = await asked
        except TimelineError as error:
            self.history.answer(call, outcome_of(error.code), {"status": error.code, "why": str(error)})
            done = False
        else:
            told = {} if answer is None else {"version": answer.version, "due_ms": answer.due_ms}
            self.history.answer(call, OK, {"status": "OK", **told})
            done = True
        self.history.flush()
        return done


@asynccontextmanager
async def begun(folder: Path, name: str) -> AsyncIterator[Part]:
    """Says that this process is ready, waits for the word, and gives the part it plays."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    words = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(words), sys.stdin)
    print(READY, flush=True)
    if (await words.readline()).decode().strip() != GO:
        sys.exit("the conductor is gone")
    clock = Clock()
    part = Part(folder, name, read_plan(folder / PLAN), clock, stopping)
    behind = [asyncio.ensure_future(_observe(clock)), asyncio.ensure_future(_orphaned(words))]
    try:
        yield part
    finally:
        for task in behind:
            task.cancel()
        part.history.close()


async def _observe(clock: Clock) -> None:
    """Keeps this process's clock with the machine's, as the broker does with its own."""
    while True:
        await asyncio.sleep(OBSERVE_EVERY_S)
        clock.observe()


async def _orphaned(words: asyncio.StreamReader) -> None:
    """Ends the process at once when the conductor has died."""
    while await words.read(1024):
        pass
    os._exit(1)


def play(role: Callable[[list[str]], Awaitable[None]]) -> None:
    """Runs a process's main coroutine."""

    async def run() -> None:
        await role(sys.argv[1:])

    asyncio.run(run())
