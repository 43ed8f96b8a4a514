"""Calls from plain threads into an event loop: the background thread of a client, and deliveries without await. Each
blocking method is derived from the asynchronous one."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, overload

from timeline.driver.delivery import Delivered, Deliveries, Delivery, DeliveryBatch
from timeline.driver.tasks import PARTING_S
from timeline.driver.transport.channel import CLIENT_CLOSED
from timeline.errors import Closed, Invalid

T = TypeVar("T")
P = ParamSpec("P")


class Background:
    """A thread with an event loop, made on first use and again in a forked child. `in_loop`: calls may block the event
    loop of their own thread, as in a Spark job of a notebook."""

    def __init__(self, in_loop: bool = False) -> None:
        self._in_loop = in_loop
        self._begin()
        self._closed = False
        _backgrounds.add(self)

    def run(self, asked: Coroutine[Any, Any, T], /) -> T:
        """Run `asked` in the loop and return its result. Ctrl-C cancels it there."""
        future = self.start(asked)
        try:
            return self.wait(future)
        except BaseException:
            future.cancel()
            raise

    def start(self, asked: Coroutine[Any, Any, T], /) -> Future[T]:
        """Start `asked` in the loop. Raise Invalid if waiting for it would block another event loop."""
        with self._lock:
            try:
                loop = self._ready()
            except BaseException:
                asked.close()
                raise
            return asyncio.run_coroutine_threadsafe(asked, loop)  # in this thread's context: its trace goes along

    @staticmethod
    def wait(future: Future[T]) -> T:
        """Return the result of a future of `start`."""
        try:
            return future.result()
        except CancelledError:
            raise Closed("the client was closed meanwhile") from None

    def check(self) -> None:
        """Raise Closed after `close`, and Invalid where a call would block an event loop: the client's own, or another
        one."""
        if self._closed:
            raise Closed(CLIENT_CLOSED)
        if threading.current_thread() is self._thread:
            raise Invalid("this is the client's own thread: use the asynchronous client here")
        if not self._in_loop:
            _check_no_loop()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def _ready(self) -> asyncio.AbstractEventLoop:
        self.check()
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._work, args=(self._loop,), name="timeline", daemon=True)
            self._thread.start()
        return self._loop

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            pass  # raised in a handler: its caller, in a thread that may end, gets Closed
        finally:
            with self._lock:
                self._closed, self._loop = True, None  # no call may come that is never answered
            # The last calls become tasks, and a late stop takes effect now, not later in between.
            loop.call_soon(loop.stop)
            loop.run_forever()
            rest = asyncio.all_tasks(loop)
            if rest:
                loop.run_until_complete(asyncio.wait(rest, timeout=PARTING_S))
            for task in rest:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    def close(self) -> None:
        """End the thread. All later calls raise Closed."""
        with self._lock:
            self._closed = True
            loop, self._loop = self._loop, None
            if loop is not None:  # else it never began, or is ending
                loop.call_soon_threadsafe(loop.stop)
        if self._thread is not None:
            self._thread.join()


_backgrounds: weakref.WeakSet[Background] = weakref.WeakSet()


def _note_fork() -> None:
    """Have each background begin again in a forked child. Its thread stayed with the parent, and may have held the lock
    at the fork. No other thread runs in the child yet."""
    for background in list(_backgrounds):
        background._begin()


os.register_at_fork(after_in_child=_note_fork)


def _check_no_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise Invalid(
        "connect_sync would block the event loop that runs here: use timeline.connect() and await here, or run your "
        "function in a thread: await asyncio.to_thread(f)"
    )


def iterate(background: Background, source: AsyncIterator[T]) -> Iterator[T]:
    """Iterate over an asynchronous generator, one step at a time."""
    steps = _Steps(source)
    try:
        while (item := background.run(steps.next())) is not None:
            yield item[0]
    finally:
        try:
            background.run(steps.end())
        except (Closed, Invalid):
            pass  # closed while iterated: the loop has ended it; or refused like the step before, which says so


class _Steps(Generic[T]):
    """An asynchronous generator that another thread iterates."""

    def __init__(self, source: AsyncIterator[T]) -> None:
        self._source: Any = source
        self._under_way: asyncio.Task[Any] | None = None

    async def next(self) -> tuple[T] | None:
        """Return the next item in a tuple, or None at the end."""
        self._under_way = asyncio.current_task()
        try:
            return (await anext(self._source),)
        except StopAsyncIteration:
            return None
        finally:
            self._under_way = None

    async def end(self) -> None:
        """Close it. After Ctrl-C a step may still be under way."""
        step = self._under_way
        if step is not None:
            step.cancel()
            await asyncio.wait({step})
        await self._source.aclose()


class Blocking:
    """The base of objects that call an asynchronous one, `target`, from plain threads."""

    def __init__(self, background: Background, target: Any) -> None:
        self._background, self._target, self._run = background, target, background.run

    def __repr__(self) -> str:
        return f"Sync{self._target!r}"

    def close(self) -> None:
        """Flush and close."""
        if not self._target.closed:
            self._run(self._target.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            self.close()
        except Invalid:  # refused like the call that ends the block, whose error says it
            if error is None:
                raise


def blocking(word: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """Return a method that calls the coroutine method `word`, and returns its result. Its object has the asynchronous
    one as `_target`, and as `_run` a function that runs a coroutine in its loop."""

    @functools.wraps(word)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        done: T = self._run(word(self._target, *args, **kwargs))
        return done

    call.__doc__ = f"Do what the asynchronous `{word.__name__}` does, and return when it is done."
    return call


def stepping(word: Callable[Concatenate[Any, P], AsyncIterator[T]]) -> Callable[Concatenate[Any, P], Iterator[T]]:
    """Return a method that iterates over the asynchronous generator method `word`."""

    @functools.wraps(word)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return iterate(self._background, word(self._target, *args, **kwargs))

    call.__doc__ = f"Iterate over what the asynchronous `{word.__name__}` yields."
    return call


def in_loop(word: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a method that calls the plain method `word` in the loop."""

    @functools.wraps(word)
    async def called(target: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return word(target, *args, **kwargs)

    return blocking(called)


class Run(Protocol):
    """Runs a coroutine in the client's event loop from another thread, and returns its result."""

    def __call__(self, asked: Coroutine[Any, Any, T], /) -> T: ...


class SyncDelivery(Delivered):
    """One message, leased to this consumer, for a plain thread. See `Delivery`."""

    __slots__ = ("_run", "_target")

    _target: Delivery
    _run: Run

    @classmethod
    def of(cls, delivery: Delivery, run: Run) -> SyncDelivery:
        """Return `delivery` for another thread than its loop's."""
        made = cls(delivery._consumer, delivery._frame, delivery._index, delivery._handed_ms)
        made._target, made._run = delivery, run
        return made

    ack = blocking(Delivery.ack)
    ack_soon = in_loop(Delivery.ack_soon)
    extend = blocking(Delivery.extend)
    release = blocking(Delivery.release)
    bury = blocking(Delivery.bury)


class SyncDeliveryBatch(Deliveries, Sequence[SyncDelivery]):
    """Deliveries that arrived together, for a plain thread. See `DeliveryBatch`."""

    _target: DeliveryBatch
    _run: Run

    @classmethod
    def of(cls, batch: DeliveryBatch, run: Run) -> SyncDeliveryBatch:
        """Return `batch` for another thread than its loop's."""
        made = cls(batch._consumer, batch._frame, batch._at, batch._handed_ms)
        made._target, made._run = batch, run
        return made

    @overload
    def __getitem__(self, index: int) -> SyncDelivery: ...
    @overload
    def __getitem__(self, index: slice) -> SyncDeliveryBatch: ...
    def __getitem__(self, index: int | slice) -> SyncDelivery | SyncDeliveryBatch:
        if isinstance(index, slice):
            return SyncDeliveryBatch.of(self._target[index], self._run)
        return SyncDelivery.of(self._target[index], self._run)

    ack = blocking(DeliveryBatch.ack)
    ack_soon = in_loop(DeliveryBatch.ack_soon)
    extend = blocking(DeliveryBatch.extend)
    release = blocking(DeliveryBatch.release)
    bury = blocking(DeliveryBatch.bury)
