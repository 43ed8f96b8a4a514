"""Tasks that run beside another one and end with it. Their errors are never lost."""

from __future__ import annotations

import asyncio
import atexit
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Self, TypeAlias

PARTING_S = 2.0
"""For so long a call that has done its work may end by itself. Then it is cancelled. gRPC reports the end of a call to
its event loop even if nobody waits for it, and complains in another loop when that one is closed."""

Handler: TypeAlias = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None

_kept: dict[asyncio.AbstractEventLoop, set[asyncio.Task[None]]] = {}
"""Tasks of `keep` by their loop."""


def keep(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a task that lives until it is done. Its owner ends it (`end`).

    A loop does not hold a waiting task. If only its owner did, the garbage collector could find both, and destroy the
    pending task with a complaint of asyncio.
    """
    loop = asyncio.get_running_loop()
    if loop not in _kept:
        for ended in [each for each in list(_kept) if each.is_closed()]:
            _kept.pop(ended, None)
    task = loop.create_task(work, name=name)
    _kept.setdefault(loop, set()).add(task)
    task.add_done_callback(_unkeep)
    return task


def _unkeep(task: asyncio.Task[None]) -> None:
    loop = task.get_loop()
    held = _kept.get(loop, set())
    held.discard(task)
    if not held:
        _kept.pop(loop, None)


@atexit.register
def _leave() -> None:
    """Silence asyncio's complaints about our waiting tasks when a program ends without closing its client. They would
    hide the program's own error."""
    for loop, tasks in list(_kept.items()):
        loop.set_exception_handler(partial(_unless_about, tasks, loop.get_exception_handler()))


def _unless_about(
    tasks: set[asyncio.Task[None]], before: Handler, loop: asyncio.AbstractEventLoop, context: dict[str, Any]
) -> None:
    """Pass on a loop's complaint, unless it is about one of `tasks`."""
    if context.get("task") in tasks:
        return
    if before is None:
        loop.default_exception_handler(context)
    else:
        before(loop, context)


class Closing(ABC):
    """The base of objects that `async with` closes."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class SharedClose:
    """A close that runs once. All callers wait for it, and it is cancelled with the last of them."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._waiting = 0

    async def run(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `close`, or wait for the run that has begun. Once it is over, return at once."""
        if self._task is not None and self._task.done():
            return
        if self._task is None or self._task.get_loop() is not asyncio.get_running_loop():
            self._task, self._waiting = asyncio.get_running_loop().create_task(close()), 0
        task = self._task
        self._waiting += 1
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            if self._waiting == 1:  # nothing goes on in the background
                if not task.cancelling():  # else the event loop ends, and has cancelled it
                    task.cancel()
                await asyncio.wait({task})
            raise
        finally:
            self._waiting -= 1
        if not task.cancelled():
            task.result()


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for them. Raise the error of one that failed; a cancelled one did not.

    If this is cancelled, cancel them again: what they do in order to end is cut off.
    """
    for task in tasks:
        task.cancel()
    if tasks:
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            for task in tasks:
                if task.cancelling() < 2:  # else the event loop ends, and has cancelled it
                    task.cancel()
            await asyncio.wait(tasks)
            raise
    for task in tasks:
        if not task.cancelled() and (failure := task.exception()) is not None:
            raise failure


async def all_of(*works: Coroutine[Any, Any, None] | asyncio.Task[None]) -> None:
    """Run all at once, each to its end. Raise the error of the first that failed. If this is cancelled, so are all, and
    it returns when they have ended."""
    for outcome in await asyncio.gather(*works, return_exceptions=True):
        if outcome is not None:
            raise outcome


async def run_until_first(work: Coroutine[Any, Any, None], companion: Coroutine[Any, Any, None]) -> None:
    """Run `work` and `companion` until one of them is done, and end the other. Raise the error of either."""
    loop = asyncio.get_running_loop()
    both = (loop.create_task(work), loop.create_task(companion))
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end(*both)
