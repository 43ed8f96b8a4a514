"""Background tasks of one broker: none is forgotten, none dies in silence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

log = logging.getLogger("timeline.broker")


class Tasks:
    """A set of running tasks. One that ends with an exception is logged and reported to `on_crash`."""

    def __init__(self, on_crash: Callable[[str, BaseException], None]) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._on_crash = on_crash

    def spawn(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        """Runs `work` until it ends or `cancel` is called."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (crash := task.exception()) is not None:
            log.error("task %s ended by an error", task.get_name(), exc_info=crash)
            self._on_crash(task.get_name(), crash)

    async def cancel(self) -> None:
        """Cancels all and waits for their end."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
