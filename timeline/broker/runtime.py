"""The runtime that all parts of a broker share. No background task is forgotten, and none dies in silence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol, TypeVar

from timeline.broker.fairness import LoopScheduler
from timeline.broker.limits import Limits
from timeline.clock import Clock
from timeline.metrics import Metrics

log = logging.getLogger("timeline.broker")
FINISH_S = 5.0
AGAIN_S = 1.0
"""How long a cancelled task may take to end before it is cancelled again."""
T = TypeVar("T")


class Underway:
    """Counts work under way, by `begin` and `end` or as a context. `none` is set while there is none."""

    def __init__(self) -> None:
        self._count = 0
        self.none = asyncio.Event()
        self.none.set()

    def begin(self) -> None:
        """Count one more."""
        self._count += 1
        self.none.clear()

    def end(self) -> None:
        """Count one less."""
        self._count -= 1
        if self._count == 0:
            self.none.set()

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()


async def wait_within(event: asyncio.Event, wait_s: float) -> None:
    """Return when `event` is set. It is set after `wait_s` at the latest."""
    timer = asyncio.get_running_loop().call_later(max(0.0, wait_s), event.set)
    try:
        await event.wait()
    finally:
        timer.cancel()


class Tasks:
    """Running tasks. One that ends with an exception is logged and reported to `on_crash`."""

    def __init__(self, on_crash: Callable[[str, BaseException], None]) -> None:
        self._running: dict[asyncio.Task[None], None] = {}  # in order, so that a run can be repeated
        self._finishing: dict[asyncio.Task[None], None] = {}
        self._on_crash = on_crash

    def spawn(self, work: Coroutine[object, object, None], name: str, *, finishes: bool = False) -> asyncio.Task[None]:
        """Run `work` until it ends or `cancel` is called. A task that `finishes` is awaited instead: it is in the
        middle of a store's call, and ends soon."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        (self._finishing if finishes else self._running)[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        self._finishing.pop(task, None)
        if not task.cancelled() and (crash := task.exception()) is not None:
            log.error("task %s ended by an error", task.get_name(), exc_info=crash)
            self._on_crash(task.get_name(), crash)

    async def cancel(self, finish_s: float = FINISH_S) -> None:
        """Cancel all and wait for their end. Those that finish by themselves have up to `finish_s` for it. So has what
        others still do when they are cancelled: it may take tasks that finish, and new ones, too."""
        until_s = asyncio.get_running_loop().time() + finish_s
        if self._finishing:
            await asyncio.wait([*self._finishing], timeout=finish_s)
        for task in [*self._running]:
            task.cancel()
        while (left := self._all()) and (left_s := until_s - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait(left, timeout=left_s)
        while left := self._all():
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=AGAIN_S)

    def _all(self) -> list[asyncio.Task[None]]:
        return [*self._running, *self._finishing]


class OffLoop(Protocol):
    """Calls a function that may take long, while the event loop goes on."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


async def on_loop(work: Callable[[], T]) -> T:
    """Call it at once. Nothing else happens meanwhile."""
    return work()


@dataclass(frozen=True, slots=True)
class Runtime:
    """The shared parts of one broker. `scheduler` shares the event loop between peers. `off_loop` is for what may take
    long."""

    clock: Clock
    limits: Limits
    metrics: Metrics
    tasks: Tasks
    scheduler: LoopScheduler
    off_loop: OffLoop = on_loop
