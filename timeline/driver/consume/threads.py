"""Threads for plain handlers: each call gets a delivery whose methods need no await."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from timeline.driver.blocking.delivery import SyncDelivery
from timeline.driver.delivery import Delivery
from timeline.driver.transport.client_context import FORKED
from timeline.errors import Closed, Invalid

T = TypeVar("T")


def is_async(handler: Callable[..., object]) -> bool:
    """Whether it is an async function, or an object that is called as one, or a partial of either. A plain function
    around an async one is plain, whatever it wraps: it may well run that to its end, in its thread."""
    while isinstance(handler, partial):
        handler = handler.func
    called = getattr(handler, "__call__", None)  # noqa: B004 - how it is called, not whether
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(called)


class Threads:
    """As many as handlers may work at once, beside the event loop that made them."""

    def __init__(self, handler: Callable[..., object], count: int) -> None:
        self._handler = handler
        self._pool = ThreadPoolExecutor(count, "timeline-handler")
        self._loop, self._loops_thread, self._pid = asyncio.get_running_loop(), threading.get_ident(), os.getpid()

    def call(self, delivery: Delivery) -> asyncio.Future[None]:
        """Has a thread call the handler with `delivery`."""
        return self._loop.run_in_executor(self._pool, contextvars.copy_context().run, self._work, delivery)

    def close(self) -> None:
        """Begins nothing more, and waits for nothing."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _work(self, delivery: Delivery) -> None:
        """The handler, in its thread. What no future can carry, or would end the loop and not the thread, is a failure
        like any other; so is what has only been made, and is yet to be run by somebody."""
        try:
            left = self._handler(SyncDelivery.of(delivery, self._from_thread))
        except (StopIteration, SystemExit, KeyboardInterrupt) as stray:
            raise RuntimeError(f"the handler raised {stray!r}") from stray
        if inspect.isawaitable(left) or inspect.isasyncgen(left) or inspect.isgenerator(left):
            if inspect.iscoroutine(left):
                left.close()  # else Python says, too, that it was never awaited
            raise Invalid(
                f"the handler is a plain function, and returned a {type(left).__name__}, which nobody runs: "
                "make it an `async def` that awaits it"
            )

    def _from_thread(self, asked: Coroutine[Any, Any, T]) -> T:
        """Runs what a delivery is asked in the loop. Raises Invalid and Closed where that would wait for ever."""
        try:
            if os.getpid() != self._pid:
                raise Closed(FORKED)
            if threading.get_ident() == self._loops_thread:
                raise Invalid("this is the event loop's own thread: make the handler an `async def`, and await")
        except BaseException:
            asked.close()
            raise
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result()
