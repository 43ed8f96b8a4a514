"""An event loop in virtual time: it shuffles what is ready and jumps to the next timer; nothing ever waits.

What runs belongs to a `Process`, known by the context of its callbacks (tasks inherit it from the task that made
them). A process can be paused, as by SIGSTOP: its callbacks are kept until it goes on. Or killed, as by kill -9: they
never run again, not even what a `finally` would do.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import inspect
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from types import CoroutineType
from typing import Any

Handle = asyncio.Handle


class Process:
    """A process of the simulated machines. `on_kill` are called when it is killed, by those that notice: its peers."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.loop = loop
        self.name = name
        self.paused = False
        self.dead = False
        self.parked: deque[Handle] = deque()
        self.context = contextvars.copy_context()
        self.context.run(_process.set, self)
        self.tasks: list[asyncio.Task[Any]] = []

    def run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts `work` as this process."""
        task = self.loop.create_task(work, context=self.context.copy())
        self.tasks.append(task)
        return task

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs `function` as this process at once, so that whatever it starts belongs to it."""
        return self.context.copy().run(function, *arguments)

    def pause(self) -> None:
        """Nothing of it runs until `resume`."""
        self.paused = True

    def resume(self) -> None:
        """It goes on where it was."""
        self.paused = False
        if not self.dead:
            self.loop.ready_again(self.parked)
        self.parked.clear()

    def kill(self) -> None:
        """Nothing of it ever runs again."""
        self.dead = True


_process: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
_number: contextvars.ContextVar[int] = contextvars.ContextVar("number", default=0)
"""Which task a callback belongs to, counted as they were made."""


class Stuck(RuntimeError):
    """Nothing is ready, no timer is set, and what is waited for has not happened."""


class Endless(RuntimeError):
    """A task that does not end."""


MOST_EXITS = 50
"""So often at most a task waits again on its way out."""


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop. Starts at `start_s` of its own monotonic time; `rng` decides among what is ready."""

    def __init__(self, rng: random.Random, start_s: float = 1_000.0) -> None:
        super().__init__()
        self._now = start_s
        self._rng = rng
        self.tasks: list[asyncio.Task[Any]] = []
        self.steps = 0
        self.failures: list[dict[str, Any]] = []
        self._closing = False
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._note_failure)

    def time(self) -> float:
        return self._now

    def delay(self, seconds: float) -> None:
        """Let time pass while a callback runs."""
        self._now += seconds

    def ready_again(self, handles: deque[Handle]) -> None:
        """Makes callbacks of a process that goes on ready, in their order."""
        self._ready.extend(handles)  # type: ignore[attr-defined]

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, context: Any = None) -> asyncio.Task[Any]:
        own = contextvars.copy_context() if context is None else context
        own.run(_number.set, len(self.tasks) + 1)
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=own)
        self.tasks.append(task)
        return task

    def _note_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not self._closing:
            self.failures.append(context)

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            if not scheduled:
                raise Stuck("nothing is ready and no timer is set")
            self._now = max(self._now, scheduled[0]._when)
        while scheduled and (scheduled[0]._cancelled or scheduled[0]._when <= self._now):
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        batch = list(ready)
        ready.clear()
        if len(batch) > 1:
            # In the order of their tasks first: code that walks a set wakes its members by their addresses, which are
            # no part of a seed.
            batch.sort(key=_number_of)
            self._rng.shuffle(batch)
        self.steps += len(batch)
        for handle in batch:
            if handle._cancelled:
                continue
            process = handle._context.get(_process)
            if process is not None and (process.dead or process.paused):
                process.parked.append(handle)
                continue
            handle._run()

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Handle:
        return self.call_soon(callback, *args, context=context)

    def _write_to_self(self) -> None:
        """There is no selector to wake."""

    def _process_events(self, event_list: Any) -> None:
        """There are no events but timers."""

    def finish(self) -> None:
        """Ends whatever is still there, without letting it run on, and closes."""
        self._closing = True
        self.call_soon = self._refuse  # type: ignore[method-assign, assignment]
        self.call_at = self._refuse  # type: ignore[method-assign, assignment]
        self.call_later = self._refuse  # type: ignore[method-assign, assignment]
        asyncio._set_running_loop(self)
        try:
            # What a `finally` starts on the way joins the list, and is closed in its turn.
            for task in self.tasks:
                if not task.done():
                    self._close(task)
        finally:
            asyncio._set_running_loop(None)
        self._ready.clear()  # type: ignore[attr-defined]
        self._scheduled.clear()  # type: ignore[attr-defined]
        self.close()

    def _close(self, task: asyncio.Task[Any]) -> None:
        """Closes what a task runs. What waits in a `finally` on its way out is closed there in its turn: left half
        closed, it would be so when it is collected, and say then, in the middle of another seed, that it ignored its
        exit. A coroutine that a task took and did not begin is closed, too: nobody awaits it any more."""
        work = task.get_coro()
        assert work is not None
        if isinstance(work, CoroutineType) and inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
            for taken in work.cr_frame.f_locals.values():
                if isinstance(taken, CoroutineType):
                    taken.close()
        for _ in range(MOST_EXITS):
            try:
                work.close()
            except (RuntimeError, asyncio.CancelledError):
                continue
            return
        raise Endless(f"{task.get_name()} goes on however often it is closed")

    def _refuse(self, *args: Any, **kwargs: Any) -> Handle:
        return Handle(_nothing, (), self)


def _number_of(handle: Any) -> int:
    number: int = handle._context.get(_number, 0)
    return number


def _nothing() -> None:
    """What is called after the end."""


class Timer:
    """`await timer.wait(s)`: virtual seconds go by. What a simulated process does instead of sleeping."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    async def wait(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future = self._loop.create_future()
        handle = self._loop.call_later(seconds, _set, future)
        try:
            await future
        finally:
            handle.cancel()


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def in_virtual_time(work: Callable[[], Awaitable[None]]) -> None:
    """Run `work` in a loop that never waits."""
    loop = VirtualLoop(random.Random(1))

    async def whole() -> None:
        await work()

    try:
        loop.run_until_complete(whole())
    finally:
        loop.finish()


async def wait(seconds: float) -> None:
    """Return after `seconds` of virtual time."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    await Timer(loop).wait(seconds)
