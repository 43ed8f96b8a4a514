"""The shape of a scenario: settings, each with its help text, and a run that returns a report.

`timeline bench` makes a command of each. Its options are the fields that `setting` declares, its help the docstring.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import timeline
from timeline.bench.figures import BenchReport, Target
from timeline.bench.load import TAG, Told, fill, observed
from timeline.bench.processes import Measured, Profile, broker, cpu_s
from timeline.bench.stores import OwnTopic, fill_store, own_topic, scheme
from timeline.clock import Clock

MOST = 1_000_000_000


def setting(
    default: Any, help: str = "", *, least: float = 1, most: int = MOST, choices: tuple[str, ...] = (), takes: str = ""
) -> Any:
    """Declare a field of a scenario that is an option of its command.

    It is a number from `least` to `most`, one of `choices`, or a duration whose metavar is `takes`.
    """
    metadata = {"help": help, "least": least, "most": most, "choices": choices, "takes": takes}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Scenario(ABC):
    """A measurement, and its store."""

    name: ClassVar[str]
    store: str = "memory://"

    @property
    def targets(self) -> tuple[Target, ...]:
        """Return what `targets.md` asks of it."""
        return ()

    def check(self) -> None:  # noqa: B027 (most settings contradict no others)
        """Raise Invalid for settings that contradict each other."""

    @abstractmethod
    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        """Measure, with files in `folder`. Raises CannotMeasure; what went wrong in a run is in the report."""

    def report(self, own: OwnTopic, figures: dict[str, float], wrong: list[str], **more: Any) -> BenchReport:
        """Return the report, with the scenario's own targets unless `more` has others."""
        more = {"targets": self.targets, **more}
        return BenchReport(self.name, asdict(self), figures, wrong=wrong, store=own.store, **more)


@dataclass(frozen=True, slots=True)
class Setup:
    """A broker, a client and a topic for a scenario. `clock` follows the machine's."""

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

    async def left(self, topic: str = "", window: str = "32d") -> int:
        """Return the number of messages on the timeline of the topic, or of another one."""
        return int((await self.client.forecast(topic or self.topic, window=window, step=window)).counts.sum())

    def resident_mib(self) -> float:
        """Return the broker's memory that is in RAM now."""
        return self.child.resident_bytes() / 2**20

    async def sample(self, profile: Profile | None, own: str) -> None:
        """Sample the broker and this process, named `own`, from now on, if there is a profile."""
        if profile is not None:
            await self.stack.enter_async_context(profile.of({"broker": self.child.pid, own: os.getpid()}))


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
    """Run a broker on the scenario's store with more `options` of serve, and a topic with the settings `topic`.

    `pending` messages wait in it, `tagged` of them with a tag. A store that outlives its broker is filled beforehand.
    """
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


def cpu_s_of_self() -> float:
    """Return the processor time that this process has used."""
    return cpu_s(os.getpid())


class Stopwatch:
    """Time, and the processor time of named processes, since it was made."""

    def __init__(self, **cpu: Callable[[], float]) -> None:
        self._clock, self._cpu = Clock(), cpu
        self._used_s = {name: used() for name, used in cpu.items()}
        self._start_ms = self._clock.monotonic_ms()

    def figures(self, count: int) -> dict[str, float]:
        """Return the rate of `count` messages, and what each cost every process."""
        elapsed_s = (self._clock.monotonic_ms() - self._start_ms) / 1000
        return {"rate_per_s": count / elapsed_s, "elapsed_s": elapsed_s, **self.costs(count)}

    def costs(self, count: int) -> dict[str, float]:
        """Return only what each of `count` messages cost every process."""
        used = {name: used() - self._used_s[name] for name, used in self._cpu.items()}
        return {f"{name}_us_per_message": used_s * 1e6 / count for name, used_s in used.items()}
