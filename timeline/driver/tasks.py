"""Tasks that run beside another one, and end with it; what goes wrong in them is never lost."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeAlias

Handler: TypeAlias = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None

_kept: dict[asyncio.AbstractEventLoop, set[asyncio.Task[None]]] = {}
"""Tasks of `keep`, by the loop that they run in."""


def keep(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Starts a task that lives until it is done, whatever becomes of its owner, who ends it (`end`, `cancel`).

    A loop holds no task that waits for another part of the program. One that only its owner holds may be found by the
    garbage collector together with that owner, and is then taken apart in any order, pending, with asyncio's complaint.
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
    """The program ends, by an error of its own perhaps, and nobody has closed the client: what still waits then waits
    for nobody, and asyncio's complaints about it would bury that error."""
    for loop, tasks in list(_kept.items()):
        loop.set_exception_handler(partial(_unless_about, tasks, loop.get_exception_handler()))


def _unless_about(
    tasks: set[asyncio.Task[None]], before: Handler, loop: asyncio.AbstractEventLoop, context: dict[str, Any]
) -> None:
    """Pass on what a loop complains of, unless it is about one of `tasks`."""
    if context.get("task") in tasks:
        return
    if before is None:
        loop.default_exception_handler(context)
    else:
        before(loop, context)


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks and waits for them. Raises what one of them failed with; that it was cancelled is no failure."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled() and (failure := task.exception()) is not None:
            raise failure


def cancel(*tasks: asyncio.Task[Any] | None) -> None:
    """Has tasks end that nobody will wait for, from whatever thread; where their loop has ended, they have."""
    for task in tasks:
        if task is not None and not task.done():
            try:
                task.get_loop().call_soon_threadsafe(task.cancel)
            except RuntimeError:
                pass  # the loop is closed


async def all_of(*works: Coroutine[Any, Any, None]) -> None:
    """Runs all at once, each to its end whatever becomes of the others. Raises what the first of them failed with."""
    for outcome in await asyncio.gather(*works, return_exceptions=True):
        if outcome is not None:
            raise outcome


async def run_until_first(work: Coroutine[Any, Any, None], companion: Coroutine[Any, Any, None]) -> None:
    """Runs `work` with `companion` beside it until one of them is done; ends the other. Raises what either failed
    with."""
    loop = asyncio.get_running_loop()
    both = (loop.create_task(work), loop.create_task(companion))
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end(*both)
