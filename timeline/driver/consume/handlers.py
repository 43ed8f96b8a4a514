"""Handlers: functions called for each delivery, a few at once, while their leases are extended."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias, TypeVar

from timeline import tracing
from timeline.driver.blocking.calls import SyncDelivery
from timeline.driver.delivery import CREDIT_MESSAGES, Delivery, LeaseHolder
from timeline.driver.message import Randomness
from timeline.driver.times import Duration, When, duration_ms, grown_ms, shown
from timeline.driver.transport.channel import FORKED
from timeline.errors import Closed, Invalid, TimelineError, Unknown
from timeline.model import DELIVERED_OUT, fitting_reason
from timeline.wording import shown_duration

T = TypeVar("T")


@dataclass(frozen=True)
class Backoff:
    """How long a message waits after its handler failed.

    That is `first`, then `factor` times as long with each delivery, but at most `cap`. `jitter`: the share by which it
    varies. Raise Invalid for values out of range, and for a `first` above `cap`.
    """

    first: Duration = "1s"
    factor: float = 2.0
    cap: Duration = "1h"
    jitter: float = 0.2

    def __post_init__(self) -> None:
        first_ms, cap_ms = duration_ms(self.first, "first"), duration_ms(self.cap, "cap")
        if first_ms > cap_ms:
            said = f"first must be at most cap, not {shown(self.first)} with cap={shown(self.cap)}"
            raise Invalid(f"{said}. Give a longer cap")
        if not _is_number(self.factor) or not 1.0 <= self.factor <= 1_000.0:
            raise Invalid(f"factor must be from 1 to 1000, not {shown(self.factor)}")
        if not _is_number(self.jitter) or not 0.0 <= self.jitter <= 1.0:
            raise Invalid(f"jitter must be from 0 to 1, not {shown(self.jitter)}")

    def delay_ms(self, deliveries: int, random: Randomness) -> int:
        """Return the wait in ms after the `deliveries`-th delivery failed."""
        first_ms, cap_ms = duration_ms(self.first, "first"), duration_ms(self.cap, "cap")
        grown = grown_ms(first_ms, self.factor, cap_ms, deliveries)
        return max(0, round(grown * (1.0 + self.jitter * (2.0 * random.random() - 1.0))))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Retry(Exception):
    """Raised by a handler: deliver it again after `in_` or at the time `at` (default: at once)."""

    def __init__(self, in_: Duration | None = None, at: When | None = None, reason: str = "") -> None:
        self.in_, self.at, self.reason = in_, at, str(reason)  # often the exception itself
        super().__init__(self.reason or "retry")


class Bury(Exception):
    """Raised by a handler: the message can never be handled. It becomes a dead letter with this reason."""

    def __init__(self, reason: str) -> None:
        self.reason = str(reason)  # often the exception itself
        super().__init__(self.reason)


def is_async(handler: Callable[..., object]) -> bool:
    """Return whether `handler` is an async function, an object that is called as one, or a partial of either. A plain
    function around an async one is plain: it may run that to its end in its thread."""
    while isinstance(handler, partial):
        handler = handler.func
    called = getattr(handler, "__call__", None)  # noqa: B004 - how it is called, not whether
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(called)


class Threads:
    """Threads for plain handlers: as many as may work at once."""

    def __init__(self, handler: Callable[..., object], count: int) -> None:
        self._handler = handler
        self._pool = ThreadPoolExecutor(count, "timeline-handler")
        self._loop, self._loops_thread, self._pid = asyncio.get_running_loop(), threading.get_ident(), os.getpid()

    def call(self, delivery: Delivery) -> asyncio.Future[None]:
        """Call the handler with `delivery` in a thread."""
        return self._loop.run_in_executor(self._pool, contextvars.copy_context().run, self._work, delivery)

    def close(self) -> None:
        """Start nothing more, and do not wait."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _work(self, delivery: Delivery) -> None:
        """Call the handler. An exception that no future can carry is a failure like others. So is a result that must
        still be run."""
        try:
            left = self._handler(SyncDelivery.of(delivery, self._from_thread))
        except StopIteration as stray:
            raise RuntimeError(f"the handler raised {stray!r}") from stray
        if inspect.isawaitable(left) or inspect.isasyncgen(left) or inspect.isgenerator(left):
            if inspect.iscoroutine(left):
                left.close()  # or Python warns that it was never awaited
            raise Invalid(
                f"the handler is a plain function, and returned a {type(left).__name__}, which nobody runs: "
                "make it an `async def` that awaits it"
            )

    def _from_thread(self, asked: Coroutine[Any, Any, T]) -> T:
        """Run a delivery's call in the loop. Raise Invalid or Closed if that would wait for ever."""
        try:
            if os.getpid() != self._pid:
                raise Closed(FORKED)
            if threading.get_ident() == self._loops_thread:
                raise Invalid("this is the event loop's own thread: make the handler an `async def`, and await")
        except BaseException:
            asked.close()
            raise
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result()


log = logging.getLogger("timeline.driver")

Handler: TypeAlias = Callable[[Delivery], Awaitable[object]] | Callable[[SyncDelivery], object]
"""An async function of a Delivery, or a plain one, run in a thread, of a delivery whose methods need no await. A plain
one that returns a coroutine fails."""

Take: TypeAlias = Callable[[], Awaitable[Delivery | None]]
"""Waits for the next delivery. None: there will be none."""

MAX_CONCURRENCY = 10_000

BUFFERED_MS = 20.0
LOOK_MS = 250.0


@dataclass(eq=False, slots=True)
class _Job:
    """A delivery that a handler has. `task`: to cancel when the lease is lost; None for a thread. `handling`: the
    handler works. Nothing interrupts the settle that follows. `given_back`: the message was released because its thread
    took too long. The thread goes on, without effect."""

    delivery: Delivery
    extend_at_ms: float
    task: asyncio.Task[None] | None
    handling: bool = True
    cancelled: bool = False
    given_back: bool = False


class _RunCredit:
    """Fits the credit of one `run` to the speed of its handlers: what they handle in `BUFFERED_MS` waits for them,
    besides one message for each.

    With less, quick handlers wait for the broker. When handlers become slow, waiting messages go back, so that others
    can have them before they are late. A waiting message also loses a delivery if the process dies. So only one waits
    for each handler while a message with few deliveries left is there: it may be the one that kills the process.
    """

    def __init__(self, consumer: LeaseHolder, concurrency: int) -> None:
        self._consumer, self._concurrency = consumer, concurrency
        self._least = 2 * concurrency
        self._most = max(self._least, CREDIT_MESSAGES)
        self._working = self._handled = 0
        self._since_ms = self._busy_ms = 0.0
        self._frail = False
        """Whether a message began since the last look that one more crash, or two, would make a dead letter."""
        self._enough = asyncio.Event()
        """Set: it is time for a look."""

    def begins(self, delivery: Delivery) -> None:
        """Note that a handler begins."""
        if 0 < delivery.max_deliveries <= delivery.deliveries + 1:
            self._frail = True
            if self._consumer.credit > self._least:
                self._enough.set()
        if not self._working:
            self._since_ms = self._consumer.monotonic_ms()
        self._working += 1

    def ends(self) -> None:
        """Note that a handler has ended."""
        self._working -= 1
        self._handled += 1
        if not self._working:
            self._busy_ms += self._consumer.monotonic_ms() - self._since_ms
        if self._handled >= self._consumer.credit:
            self._enough.set()

    async def keep(self) -> None:
        """Look at the speed again and again."""
        while True:
            await _pause(LOOK_MS / 1000.0, self._enough)
            if self._working:
                now_ms = self._consumer.monotonic_ms()
                self._busy_ms += now_ms - self._since_ms
                self._since_ms = now_ms
            if self._frail or self._handled >= self._consumer.credit or self._busy_ms >= BUFFERED_MS:
                self._fit()
                self._handled, self._busy_ms, self._frail = 0, 0.0, False

    def _fit(self) -> None:
        buffered = 0 if self._frail else int(BUFFERED_MS * self._handled / max(self._busy_ms, 0.001))
        credit, wanted = self._consumer.credit, min(self._most, max(self._least, self._concurrency + buffered))
        # A small change is not worth a frame, unless messages may become dead letters.
        if wanted >= 1.25 * credit or wanted <= credit / 2 or (self._frail and wanted < credit):
            self._consumer.resize_credit(wanted, most_waiting=wanted - self._concurrency)


class _GivenBack(TimeoutError):
    """A plain handler has ended whose message was released at its timeout."""


class _Crew:
    """The workers of one `run`."""

    def __init__(
        self,
        consumer: LeaseHolder,
        take: Take,
        handler: Handler,
        concurrency: int,
        backoff: Backoff | None,
        timeout_ms: int | None,
    ) -> None:
        self.take = take
        self.consumer, self.handler, self.backoff, self.timeout_ms = consumer, handler, backoff, timeout_ms
        self.jobs: set[_Job] = set()
        self.credit = None if consumer.credit_fixed else _RunCredit(consumer, concurrency)
        self.threads = None if is_async(handler) else Threads(handler, concurrency)
        self.ending = False
        """Whether the workers are being cancelled."""
        self.ended_by: BaseException | None = None
        """The exception of a handler that ends the run: a BaseException that is no Exception."""
        self._runner = asyncio.current_task()
        self._too_long = f"the handler took longer than {shown_duration(timeout_ms or 0)}"
        self._kept_ms = 0.0
        """The lease by which `keep` sleeps now, ms."""
        self._shorter = asyncio.Event()

    async def work(self) -> None:
        """Take and handle deliveries until no more come."""
        task = asyncio.current_task()
        while (delivery := await self.take()) is not None:
            lease_ms = self.consumer.lease_ms
            if lease_ms < self._kept_ms:  # it was not connected yet, or to a broker that knew another lease
                self._shorter.set()
            job = _Job(delivery, self.consumer.extend_at_ms(delivery), task if self.threads is None else None)
            self.jobs.add(job)
            if self.credit is not None:
                self.credit.begins(delivery)
            try:
                await self._handle(job)
            finally:
                self.jobs.discard(job)
                if self.credit is not None:
                    self.credit.ends()

    async def _handle(self, job: _Job) -> None:
        delivery = job.delivery
        try:
            await self._call(job)
        except asyncio.CancelledError as cancelled:
            if self._ends(asyncio.current_task()):
                if not job.given_back:
                    await self._settle(delivery, partial(delivery.release, reason="the consumer shut down"), ends=True)
                delivery._frame.lost[delivery._index] = True  # a thread that works on sees it in `d.lost`
                raise
            if job.cancelled:
                log.warning("the lease of %r %s: its handler was cancelled", delivery.id, self._how_lost(delivery))
                return
            # The handler cancelled its own task, or its awaited work was cancelled: it failed, and the others go on.
            what = "its own task was cancelled" if _uncancelled(job.task) else "what it waited for was cancelled"
            await self._failed(delivery, f"CancelledError: {what}", cancelled)
        except _GivenBack as late:
            if late.__cause__ is not None and not self._ended_by(late.__cause__):
                log.warning("the handler of %r ended at last: %s", delivery.id, _words(late.__cause__))
        except Retry as again:
            if not await self._buried(delivery, again.reason or "its handler asked for another delivery"):
                await self._again(delivery, again)
        except Bury as bury:
            await self._settle(delivery, partial(delivery.bury, fitting_reason(bury.reason) or "buried by its handler"))
        except GeneratorExit as closed:
            self._ended_by(closed)
            raise  # it ends this call, which must not wait any more
        except BaseException as error:  # a task that raised SystemExit or KeyboardInterrupt would end the loop
            await self._failed(delivery, _words(error), error, quiet=self._ended_by(error))
        else:
            if not self._settled(delivery):
                self.consumer.ack_handled(delivery)  # not awaited: the next delivery needs no answer to this one

    def _ended_by(self, error: BaseException) -> bool:
        """Return whether `error` ends the run, which then raises it. No other handler begins."""
        if isinstance(error, Exception) or self.ended_by is not None:
            return False
        self.ended_by = error
        self.consumer.stop_taking()
        return True

    def _how_lost(self, delivery: Delivery) -> str:
        ended = float(delivery._frame.end_ms[delivery._index]) <= self.consumer.monotonic_ms()
        return "ended, since no broker extended it" if ended else "is lost (it was cancelled, or another has it)"

    async def _again(self, delivery: Delivery, again: Retry) -> None:
        """Release the message until the handler's time. A wrong time is a failure like others, or the message would
        wait until its lease ends."""
        if self._settled(delivery):
            return
        try:
            patience_s = self.consumer.patience_s(delivery)
            await delivery.release(in_=again.in_, at=again.at, reason=fitting_reason(again.reason), timeout=patience_s)
        except Invalid as bad:
            await self._failed(delivery, f"Retry: {bad.reason}", bad)
        except TimelineError as error:
            self.consumer.settle_failed(delivery, error)

    async def _failed(
        self, delivery: Delivery, reason: str, error: BaseException | None = None, *, quiet: bool = False
    ) -> None:
        """Release the message with backoff, if the topic permits another delivery and it is not settled yet. `quiet`:
        log nothing, since `run` raises the error."""
        if self._settled(delivery):
            if not quiet:
                log.warning("the handler of %r failed after it had settled it: %s", delivery.id, reason, exc_info=error)
            return
        if await self._buried(delivery, reason, error, quiet=quiet):
            return
        if self.backoff is None:
            wait_ms = round(delivery.retry_in / timedelta(milliseconds=1))
        else:
            wait_ms = self.backoff.delay_ms(delivery.deliveries, self.consumer.random)
        if not quiet:
            log.warning("the handler of %r failed, again in %d ms: %s", delivery.id, wait_ms, reason, exc_info=error)
        await self._settle(delivery, partial(delivery.release, in_=wait_ms / 1000.0, reason=fitting_reason(reason)))

    async def _buried(
        self, delivery: Delivery, reason: str, error: BaseException | None = None, *, quiet: bool = False
    ) -> bool:
        """Bury a message after the last delivery that its topic permits. After a release it would become a dead letter,
        too, but without the reason. Return False if more deliveries may come."""
        most = delivery.max_deliveries
        if not 0 < most <= delivery.deliveries or self._settled(delivery):
            return False
        log.error(
            "the handler of %r failed at the last of %d deliveries: %s",
            delivery.id, most, reason, exc_info=None if quiet else error,
        )  # fmt: skip
        await self._settle(delivery, partial(delivery.bury, fitting_reason(f"{DELIVERED_OUT.decode()}: {reason}")))
        return True

    async def _call(self, job: _Job) -> None:
        try:
            if tracing.tracer() is None:
                await self._call_plainly(job)
            else:
                with job.delivery.span(expected=(Retry, Bury)):
                    await self._call_plainly(job)
            if job.task is not None and job.task.cancelling():
                await asyncio.sleep(0)  # its own late cancellation takes effect here, not amid the ack
        finally:
            job.handling = False
            if job.cancelled and job.task is not None:
                job.task.uncancel()

    async def _call_plainly(self, job: _Job) -> None:
        if self.threads is None:
            await self._call_async(job.delivery)
        else:
            await self._call_in_thread(self.threads, job)

    async def _call_async(self, delivery: Delivery) -> None:
        handler: Any = self.handler
        if self.timeout_ms is None:
            await handler(delivery)
        else:
            try:
                async with asyncio.timeout(self.timeout_ms / 1000.0) as limit:
                    await handler(delivery)
            except TimeoutError as over:
                if limit.expired():
                    raise TimeoutError(self._too_long) from over
                raise

    async def _call_in_thread(self, threads: Threads, job: _Job) -> None:
        delivery = job.delivery
        future = threads.call(delivery)
        if self.timeout_ms is not None:
            done, _ = await asyncio.wait({future}, timeout=self.timeout_ms / 1000.0)
            if not done and not self._settled(delivery):
                # A thread cannot be stopped. Its message is released, `d.lost` says so, and the worker waits.
                job.given_back = True
                await self._failed(delivery, self._too_long)
                delivery._frame.lost[delivery._index] = True
                await asyncio.wait({future})
                raise _GivenBack(self._too_long) from (None if future.cancelled() else future.exception())
        await asyncio.shield(future)

    async def _settle(self, delivery: Delivery, ask: Callable[..., Awaitable[None]], *, ends: bool = False) -> None:
        """Settle a message, unless its handler did. Without a broker wait as long as the lease lasts, unless the run
        `ends`, so that finished work is not done again."""
        if self._settled(delivery):
            return
        try:
            await ask(timeout=None if ends else self.consumer.patience_s(delivery))
        except TimelineError as error:
            self.consumer.settle_failed(delivery, error)
        except asyncio.CancelledError:
            self.consumer.settle_failed(
                delivery, Unknown("the consumer ended before a broker answered", id=delivery.id)
            )
            raise

    def _settled(self, delivery: Delivery) -> bool:
        """Return whether the handler settled the message itself."""
        return not self.consumer.holds(delivery) and not delivery.lost

    async def keep(self) -> None:
        """Extend the handlers' leases at a third of the lease. Cancel a handler whose lease is lost."""
        while True:
            self._kept_ms = self.consumer.lease_ms
            await _pause(max(0.005, self._kept_ms / 12_000.0), self._shorter)
            now_ms = self.consumer.monotonic_ms()
            due: list[Delivery] = []
            for job in list(self.jobs):
                if job.delivery.lost:
                    task = job.task if job.handling and not job.cancelled else None
                    if task is not None and (
                        self.consumer.holds(job.delivery) or job.delivery._frame.lost[job.delivery._index]
                    ):
                        job.cancelled = True
                        task.cancel()
                elif job.extend_at_ms <= now_ms and self.consumer.holds(job.delivery) and not self.consumer.closed:
                    job.extend_at_ms = self.consumer.extend_at_ms(job.delivery)
                    due.append(job.delivery)
            if due:
                self.consumer.extend_unawaited(due)

    def _ends(self, worker: asyncio.Task[Any] | None) -> bool:
        """Return whether a worker itself was cancelled because `run` ends, in order or because all tasks are cancelled.
        Its handler or its awaited work do not count."""
        all_end = self.ending or (self._runner is not None and self._runner.cancelling() > 0)
        return all_end and worker is not None and worker.cancelling() > 0


def _uncancelled(task: asyncio.Task[None] | None) -> bool:
    """Return whether a task itself was cancelled, and undo that."""
    was = task is not None and task.cancelling() > 0
    while task is not None and task.cancelling():
        task.uncancel()
    return was


async def _pause(wait_s: float, over: asyncio.Event) -> None:
    """Wait until `over` is set, at most for `wait_s`, and clear it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await over.wait()
    over.clear()


def _words(error: BaseException) -> str:
    """Return the text of an exception, whose own code may fail."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, which cannot say why"


async def run_handlers(
    consumer: LeaseHolder,
    take: Take,
    handler: Handler,
    concurrency: int,
    backoff: Backoff | None,
    timeout: Duration | None,
    grace: Duration,
) -> None:
    """See `Consumer.run`."""
    if not callable(handler):
        raise Invalid(f"a handler is a function of a delivery, not {shown(handler)}")
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or not 1 <= concurrency <= MAX_CONCURRENCY:
        raise Invalid(f"concurrency must be a whole number from 1 to {MAX_CONCURRENCY}, not {shown(concurrency)}")
    if backoff is not None and not isinstance(backoff, Backoff):
        raise Invalid(f"backoff is a timeline.Backoff(first=…, cap=…), not {shown(backoff)}")
    timeout_ms = None if timeout is None else duration_ms(timeout, "timeout", least_ms=1)
    grace_ms = duration_ms(grace, "grace")
    consumer.open(credit=2 * concurrency)
    crew = _Crew(consumer, take, handler, concurrency, backoff, timeout_ms)
    workers = {asyncio.create_task(crew.work(), name=f"handler {number}") for number in range(concurrency)}
    keepers = {asyncio.create_task(crew.keep(), name="extending leases")}
    if crew.credit is not None:
        keepers.add(asyncio.create_task(crew.credit.keep(), name="fitting credit"))
    uninstall = _on_sigterm(consumer.stop_taking)
    try:
        failed = await _until_done(workers, keepers, crew, grace_ms)
    finally:
        uninstall()
        crew.ending = True
        for task in (*keepers, *workers):
            task.cancel()
        await asyncio.wait({*keepers, *workers})
        if crew.threads is not None:
            crew.threads.close()
    if crew.ended_by is not None:
        failed = crew.ended_by
    if failed is not None:
        raise failed


async def _until_done(
    workers: set[asyncio.Task[None]], keepers: set[asyncio.Task[None]], crew: _Crew, grace_ms: float
) -> BaseException | None:
    """Wait until workers have ended; they get the grace once no more is taken. Return the first failure, or None."""
    consumer = crew.consumer
    try:
        await consumer.stopped_taking({*workers, *keepers})
    except asyncio.CancelledError:
        consumer.stop_taking()
        await _finished(workers, consumer, grace_ms)
        raise
    errors = [task.exception() for task in (*keepers, *workers) if task.done() and not task.cancelled()]
    failed = next((error for error in errors if error is not None), None)
    if (failed is None or any(task.done() for task in keepers)) and not consumer.closed:
        consumer.stop_taking()
    await _finished(workers, consumer, grace_ms)
    if late := sum(job.handling for job in crew.jobs):
        log.warning("%s", unfinished(late, threads=crew.threads is not None))
    return failed


async def _finished(workers: set[asyncio.Task[None]], consumer: LeaseHolder, grace_ms: float) -> None:
    """Return once workers have ended, their acks are answered and what nobody took is back, or the grace is over."""
    end_ms = consumer.monotonic_ms() + grace_ms
    await asyncio.wait(workers, timeout=grace_ms / 1000.0)
    await consumer.all_answered(max(0.0, end_ms - consumer.monotonic_ms()))


def unfinished(count: int, threads: bool) -> str:
    """Return the sentence about handlers that did not finish within the grace."""
    said = f"{count} handler{'' if count == 1 else 's'} did not finish within the grace: "
    if not threads:
        return said + ("it is cancelled" if count == 1 else "they are cancelled")
    return said + (
        "its message goes back. It learns of it at its next look at d.lost, and the process waits for that"
        if count == 1
        else "their messages go back. They learn of it at their next look at d.lost, and the process waits for that"
    )


_stopped_by_sigterm: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}


def _on_sigterm(stop: Callable[[], None]) -> Callable[[], None]:
    """Call `stop` on SIGTERM, in the main thread and if there is no other handler. All consumers of a process stop.
    Return a function that undoes it."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    loop = asyncio.get_running_loop()
    stops = _stopped_by_sigterm.get(loop)
    if stops is None:
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return lambda: None
        stops = []
        try:
            loop.add_signal_handler(signal.SIGTERM, _stop_all, stops)
        except NotImplementedError:  # a loop without signals: Windows, simulations
            return lambda: None
        _stopped_by_sigterm[loop] = stops
    stops.append(stop)
    return lambda: _no_longer(loop, stop)


def _stop_all(stops: list[Callable[[], None]]) -> None:
    for stop in list(stops):
        stop()


def _no_longer(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    stops = _stopped_by_sigterm[loop]
    stops.remove(stop)
    if not stops:
        del _stopped_by_sigterm[loop]
        if not loop.is_closed():
            loop.remove_signal_handler(signal.SIGTERM)
