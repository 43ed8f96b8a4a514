"""The one shape of a scenario: settings, each with what it is for, and a run that comes to a report.

`timeline bench` makes a command of each: its options are the fields that `setting` declares, its help the docstring.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import timeline
from timeline.bench.figures import BenchReport, Target
from timeline.bench.load import TAG, Told, fill, fill_store
from timeline.bench.processes import Measured, broker, cpu_s
from timeline.bench.profile import Profile
from timeline.bench.topic import OwnTopic, own_topic, scheme
from timeline.clock import Clock

MOST = 1_000_000_000
OBSERVE_EVERY_S = 0.25


def setting(
    default: Any, help: str = "", *, least: float = 1, most: int = MOST, choices: tuple[str, ...] = (), takes: str = ""
) -> Any:
    """A field of a scenario that is an option of its command: a number from `least` to `most`, one of `choices`, or
    what `takes` says."""
    metadata = {"help": help, "least": least, "most": most, "choices": choices, "takes": takes}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Scenario:
    """What to run, and on which store."""

    name: ClassVar[str]
    store: str = "memory://"

    @property
    def targets(self) -> tuple[Target, ...]:
        """What `targets.md` asks of it."""
        return ()

    def check(self) -> None:
        """Raise Invalid for settings that cannot be meant together."""

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        """Measure it, with files in `folder`. Raises CannotMeasure; what a run finds wrong stands in the report."""
        raise NotImplementedError

    def report(self, own: OwnTopic, figures: dict[str, float], wrong: list[str], **more: Any) -> BenchReport:
        """What it came to."""
        more = {"targets": self.targets, **more}
        return BenchReport(self.name, asdict(self), figures, wrong=wrong, store=own.store, **more)


@dataclass(frozen=True, slots=True)
class Setup:
    """What most scenarios need: a broker, a clock that is kept with the machine's, a client, and a topic."""

    own: OwnTopic
    child: Measured
    address: str
    clock: Clock
    client: timeline.Timeline
    stack: AsyncExitStack

    @property
    def topic(self) -> str:
        return self.own.name

    def producer(self) -> timeline.Producer:
        """Return a producer of the topic."""
        return self.client.producer(self.topic)

    async def left(self, window: str = "32d") -> int:
        """Return how many messages are on the timeline."""
        return int((await self.client.forecast(self.topic, window=window, step=window)).counts.sum())


@asynccontextmanager
async def set_up(
    asked: Scenario,
    folder: Path,
    told: Told | None = None,
    *,
    pending: int = 0,
    tagged: int = 0,
    payload_bytes: int = 0,
    options: tuple[str, ...] = (),
    buckets: int = 64,
    **topic: Any,
) -> AsyncIterator[Setup]:
    """A broker on the scenario's store, with more `options` of serve, and a topic with the settings `topic` in which
    `pending` messages wait, `tagged` of them with a tag. A store that outlives its broker is filled before that."""
    in_memory = scheme(asked.store) == "memory"
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(own_topic(asked.store, asked.name))
        if pending and not in_memory:
            await fill_store(asked.store, own.name, pending, payload_bytes, told, tagged, buckets)
        child, address = await stack.enter_async_context(broker(folder, asked.store, *options))
        clock = await stack.enter_async_context(observed())
        client = await stack.enter_async_context(timeline.Timeline(address, "60s", clock=clock))
        await client.create_topic(own.name, buckets=buckets)
        if topic:
            await client.update_topic(own.name, **topic)
        if pending and in_memory:
            producer = client.producer(own.name)
            await fill(producer, pending - tagged, payload_bytes, told)
            await fill(producer, tagged, payload_bytes, told, TAG)
        yield Setup(own, child, address, clock, client, stack)


@asynccontextmanager
async def observed() -> AsyncIterator[Clock]:
    """A clock that is kept with the machine's, as a broker keeps its own."""
    clock = Clock()

    async def observe() -> None:
        while True:
            await asyncio.sleep(OBSERVE_EVERY_S)
            clock.observe()

    task = asyncio.ensure_future(observe())
    try:
        yield clock
    finally:
        task.cancel()


def cpu_s_of_self() -> float:
    """Return the processor time that this process has used."""
    return cpu_s(os.getpid())


class Stopwatch:
    """Time, and the processor time of some processes by name, since it was made."""

    def __init__(self, **cpu: Callable[[], float]) -> None:
        self._clock, self._cpu = Clock(), cpu
        self._used_s = {name: used() for name, used in cpu.items()}
        self._start_ms = self._clock.monotonic_ms()

    def figures(self, count: int) -> dict[str, float]:
        """Return the rate of `count` messages, and what each cost every process."""
        elapsed_s = (self._clock.monotonic_ms() - self._start_ms) / 1000
        found = {"rate_per_s": count / elapsed_s, "elapsed_s": elapsed_s}
        for name, used in self._cpu.items():
            found[f"{name}_us_per_message"] = (used() - self._used_s[name]) * 1e6 / count
        return found
