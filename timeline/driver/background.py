"""A background thread with an event loop in it, for those who call from plain threads."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Self, TypeVar

from timeline.errors import Closed, Invalid

T = TypeVar("T")


class Background:
    """A thread with an event loop in it, made on first use, and made anew in a forked child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._closed = False

    def run(self, asked: Coroutine[Any, Any, T], /) -> T:
        """Runs `asked` in the loop and answers what it answers. Ctrl-C cancels it there."""
        future = self.start(asked)
        try:
            return self.wait(future)
        except BaseException:
            future.cancel()
            raise

    def start(self, asked: Coroutine[Any, Any, T], /) -> Future[T]:
        """Has `asked` run in the loop."""
        try:
            loop = self._ready()
        except BaseException:
            asked.close()
            raise
        return asyncio.run_coroutine_threadsafe(asked, loop)

    @staticmethod
    def wait(future: Future[T]) -> T:
        """What a future of `start` came to."""
        try:
            return future.result()
        except CancelledError:
            raise Closed("the client was closed meanwhile") from None

    def _ready(self) -> asyncio.AbstractEventLoop:
        if self._pid != os.getpid():
            # The thread stayed with the parent; its lock may have been held when the process was forked.
            self._lock, self._loop, self._pid = threading.Lock(), None, os.getpid()
        with self._lock:
            if self._closed:
                raise Closed("the client was closed: connect again")
            if threading.current_thread() is self._thread:
                raise Invalid("this is the client's own thread: use the asynchronous client here")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._work, args=(self._loop,), name="timeline", daemon=True)
                self._thread.start()
            return self._loop

    @staticmethod
    def _work(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            rest = asyncio.all_tasks(loop)
            for task in rest:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
            self._loop = None
        if loop is not None and thread is not None and self._pid == os.getpid():
            loop.call_soon_threadsafe(loop.stop)
            thread.join()


def iterate(background: Background, source: AsyncIterator[T]) -> Iterator[T]:
    """An asynchronous iterator, one step at a time."""
    try:
        while True:
            try:
                item = background.run(_step(source))
            except StopAsyncIteration:
                return
            if item is None:
                return
            yield item[0]
    finally:
        try:
            background.run(_end(source))
        except Closed:
            pass  # closed while iterated: the loop has ended it


async def _step(source: AsyncIterator[T]) -> tuple[T] | None:
    try:
        return (await anext(source),)
    except StopAsyncIteration:
        return None


async def _end(source: Any) -> None:
    await source.aclose()


class Closing:
    """`with` and `close()` for something that closes in the loop."""

    _background: Background

    def close(self) -> None:
        """Flushes and closes."""
        raise AssertionError("each kind says how it closes")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
