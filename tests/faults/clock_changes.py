"""Which times a scheduler fires across a real change of clocks: it runs under libfaketime, whose clocks go fast.

    python -m tests.faults.clock_changes

is such a program, at a broker. It takes the rules on standard input, and prints a JSON object for each firing. A rule
fires each five minutes, so that who reads the lines sees how far the clocks have come.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import timeline
from tests.faults.faketime import LIBRARY
from timeline.child import send_signal

ZONE = ZoneInfo("America/New_York")
ONE, TWO = "half past one", "half past two"
RULES = {ONE: "30 1 * * *", TWO: "30 2 * * *"}
TIMELINE = ("-m", "tests.faults.clock_changes")
TOPIC = "bells"
TICK, TICKS = "tick", "*/5 * * * *"
READY = "ready"
"""What is told first, once all rules are there."""
RATE = 60
LEADS = (timedelta(minutes=12), timedelta(minutes=45), timedelta(hours=3))
"""Time by clocks that go fast until a program is ready: more on a machine that is busy."""
PATIENCE_S = 100.0
"""From one firing to the next, by true clocks."""
STANDARD_OUTPUT = 1
"""Written to at once: threads tell in parallel, and Celery takes `sys.stdout` for its log."""
TIMEOUT = "10m"
"""Of a call, by clocks that go fast."""


@dataclass(frozen=True)
class FastClocks:
    """Clocks of several processes that go RATE times as fast as true ones, wall clock and monotonic clock, from
    `begin` on."""

    begin: datetime
    _since_s: float = field(default_factory=time.time)

    def environment(self) -> dict[str, str]:
        """The environment to start a process with, at once: its clocks go on from now."""
        assert LIBRARY is not None
        true_s = time.time()
        now_s = self.begin.timestamp() + (true_s - self._since_s) * RATE
        return {**os.environ, "LD_PRELOAD": str(LIBRARY), "FAKETIME": f"{now_s - true_s:+.3f} x{RATE}"}


@dataclass(frozen=True, order=True)
class Firing:
    """That a rule fired, by the clock of the process. `due`: the time for which it did, where the program says so."""

    at: datetime
    rule: str
    due: datetime | None = None

    @property
    def shown(self) -> str:
        """Its time on the wall clock of ZONE: `1:30 EDT`."""
        return shown(self.due or self.at)


def shown(when: datetime) -> str:
    """A time on the wall clock of ZONE: `1:30 EDT`."""
    return when.astimezone(ZONE).strftime("%-H:%M %Z")


async def across(program: Sequence[str], begin: datetime, end: datetime, folder: Path) -> list[Firing]:
    """Run Python with `program` until `end` of its clocks. It is ready before `begin`. Return what it fired then."""
    for lead in LEADS:
        async with _lines(program, begin - lead, folder) as lines:
            if (await anext(lines)).at >= begin:
                continue  # the machine is slow: more time before
            found = []
            async for one in lines:
                if one.rule != TICK:
                    found.append(one)
                elif one.at >= end:
                    return found
    raise AssertionError(f"it was not ready within {LEADS[-1]} of clocks that go {RATE} times as fast")


@asynccontextmanager
async def _lines(program: Sequence[str], since: datetime, folder: Path) -> AsyncIterator[AsyncIterator[Firing]]:
    """Run a program whose clocks go fast `since` then. Yield what it tells: that it is ready, and each firing."""
    clocks, log = FastClocks(since), folder / "program.log"
    async with AsyncExitStack() as stack:
        asked: dict[str, Any] = {"rules": {**RULES, TICK: TICKS}}
        if program == TIMELINE:
            place = folder / f"{since:%H%M}"
            place.mkdir()
            asked["address"] = await stack.enter_async_context(_broker(clocks, place))
        process = await stack.enter_async_context(_running(clocks, log, *program))
        assert process.stdin is not None
        process.stdin.write(json.dumps(asked).encode() + b"\n")
        yield _read(process, log)


async def _read(process: Process, log: Path) -> AsyncIterator[Firing]:
    assert process.stdout is not None
    while True:
        async with asyncio.timeout(PATIENCE_S):
            line = await process.stdout.readline()
        assert line, f"it ended: {log.read_text(encoding='utf-8')[-2_000:]}"
        told = json.loads(line)
        yield Firing(_instant(told["at_s"]), told["rule"], told["due_s"] and _instant(told["due_s"]))


def _instant(at_s: float) -> datetime:
    return datetime.fromtimestamp(at_s, UTC)


def fires(rule: str, due_s: float = 0.0) -> None:
    """Tell that a rule fires now."""
    os.write(STANDARD_OUTPUT, json.dumps({"rule": rule, "at_s": time.time(), "due_s": due_s}).encode() + b"\n")


def end_with_input() -> None:
    """End this process when its standard input ends."""
    sys.stdin.read()
    os._exit(0)


def with_timeline(rules: Mapping[str, str], address: str) -> None:
    """Make a schedule of each rule at the broker there, and a consumer, which fires."""
    threading.Thread(target=end_with_input, daemon=True).start()
    asyncio.run(_fire(address, {rule.replace(" ", "-"): expression for rule, expression in rules.items()}))


async def _fire(address: str, rules: Mapping[str, str]) -> None:
    async with timeline.connect(address, timeout=TIMEOUT) as client:
        await client.create_topic(TOPIC, lease=TIMEOUT, remember="2h")
        for name, expression in rules.items():
            await client.schedule(TOPIC, name, cron=expression, zone=ZONE.key)
        fires(READY)
        async with client.consumer(TOPIC) as consumer:
            async for delivery in consumer:
                fires(delivery.id.partition("@")[0].replace("-", " "), delivery.due_ms / 1_000)
                await delivery.ack()


@asynccontextmanager
async def _broker(clocks: FastClocks, folder: Path) -> AsyncIterator[str]:
    """Run a broker with such clocks; yield its address."""
    where = ("--store", f"sqlite:///{folder}/timeline.db", "--listen", "127.0.0.1:0", "--metrics", "off")
    async with _running(clocks, folder / "broker.log", "-m", "timeline", "serve", "--json", *where) as process:
        assert process.stdout is not None
        yield json.loads(await process.stdout.readline())["listen"]


@asynccontextmanager
async def _running(clocks: FastClocks, log: Path, *command: str) -> AsyncIterator[Process]:
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=clocks.environment(),
        )
    try:
        yield process
    finally:
        send_signal(process, signal.SIGKILL)
        await process.wait()


if __name__ == "__main__":
    with_timeline(**json.loads(sys.stdin.readline()))
