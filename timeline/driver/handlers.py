"""Handlers: a function called for each delivery, a few at once, with the lease kept alive meanwhile."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from timeline import tracing
from timeline.driver.delivery import Delivery
from timeline.driver.ids import Randomness
from timeline.driver.sync_delivery import SyncDelivery
from timeline.driver.times import Duration, When, duration_ms
from timeline.errors import Invalid, TimelineError
from timeline.model import DELIVERED_OUT, MAX_REASON_BYTES
from timeline.wording import shown_duration

if TYPE_CHECKING:
    from timeline.driver.consumer import Consumer

log = logging.getLogger("timeline.driver")

Handler: TypeAlias = Callable[[Delivery], Awaitable[object]] | Callable[[SyncDelivery], object]
"""An async function of a Delivery, or a plain one, run in a thread, of a delivery whose methods need no await."""
T = TypeVar("T")

MAX_CONCURRENCY = 10_000


@dataclass(frozen=True)
class Backoff:
    """How long a message whose handler failed waits: `first`, then `factor` times as long with each delivery, at most
    `cap`, give or take the share `jitter`. Raises Invalid for what cannot be meant."""

    first: Duration = "1s"
    factor: float = 2.0
    cap: Duration = "1h"
    jitter: float = 0.2

    def __post_init__(self) -> None:
        duration_ms(self.first, "first")
        duration_ms(self.cap, "cap")
        if not _is_number(self.factor) or not 1.0 <= self.factor <= 1_000.0:
            raise Invalid(f"factor must be from 1 to 1000, not {self.factor!r}")
        if not _is_number(self.jitter) or not 0.0 <= self.jitter <= 1.0:
            raise Invalid(f"jitter must be from 0 to 1, not {self.jitter!r}")

    def delay_ms(self, deliveries: int, random: Randomness) -> int:
        """The wait in ms after the `deliveries`-th delivery failed."""
        first_ms, cap_ms = duration_ms(self.first, "first"), duration_ms(self.cap, "cap")
        # Beyond 2^64 times the first wait every cap is reached; larger powers would only overflow.
        grown = min(float(cap_ms), first_ms * min(self.factor ** min(deliveries - 1, 64), 2.0**64))
        return max(0, round(grown * (1.0 + self.jitter * (2.0 * random.random() - 1.0))))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Retry(Exception):
    """Raised by a handler: not now, again `in_` a while or `at` a time (at once when neither is given)."""

    def __init__(self, in_: Duration | None = None, at: When | None = None, reason: str = "") -> None:
        self.in_, self.at, self.reason = in_, at, str(reason)  # often the exception itself
        super().__init__(self.reason or "retry")


class Bury(Exception):
    """Raised by a handler: this message can never be handled; make it a dead letter with this reason."""

    def __init__(self, reason: str) -> None:
        self.reason = str(reason)  # often the exception itself
        super().__init__(self.reason)


@dataclass(eq=False, slots=True)
class _Job:
    """A delivery that a handler has. `task`: what to cancel when the lease is lost, None for a thread. `handling`: the
    handler still works; afterwards its message is settled, which nothing interrupts."""

    delivery: Delivery
    extend_at_ms: float
    task: asyncio.Task[None] | None
    handling: bool = True
    cancelled: bool = False


class _Crew:
    """The workers of one `run`."""

    def __init__(
        self, consumer: Consumer, handler: Handler, concurrency: int, backoff: Backoff, timeout_ms: int | None
    ) -> None:
        self.consumer, self.handler, self.backoff, self.timeout_ms = consumer, handler, backoff, timeout_ms
        self.concurrency = concurrency
        self.jobs: set[_Job] = set()
        self.is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004 - an object whose __call__ is async is an async handler
        )
        self.pool = None if self.is_async else ThreadPoolExecutor(concurrency, "timeline-handler")
        self.loop = asyncio.get_running_loop()

    async def work(self) -> None:
        """One worker: takes and handles until nothing more comes."""
        task = asyncio.current_task()
        while (delivery := await self.consumer.take()) is not None:
            lease_ms = self.consumer.lease_ms
            job = _Job(delivery, self.consumer.monotonic_ms() + lease_ms / 3, task if self.is_async else None)
            self.jobs.add(job)
            try:
                await self._handle(job)
            finally:
                self.jobs.discard(job)

    async def _handle(self, job: _Job) -> None:
        delivery = job.delivery
        try:
            await self._call(job)
        except asyncio.CancelledError as cancelled:
            if _ends(asyncio.current_task()):
                await self._settle(delivery, delivery.release(reason="the consumer shut down"))
                delivery._load.lost[delivery._index] = True  # a thread works on: its next look tells it
                raise
            if job.cancelled:
                log.warning("the lease of %r was lost: its handler was cancelled", delivery.id)
                return
            # What the handler waited for was cancelled by somebody else: it failed, and the others go on.
            await self._failed(delivery, "CancelledError: what it waited for was cancelled", cancelled)
        except Retry as again:
            if not await self._buried(delivery, again.reason or "its handler asked for another delivery"):
                await self._again(delivery, again)
        except Bury as bury:
            await self._settle(delivery, delivery.bury(_short(bury.reason) or "buried by its handler"))
        except Exception as error:
            await self._failed(delivery, _words(error), error)
        else:
            await self._settle(delivery, delivery.ack())

    async def _again(self, delivery: Delivery, again: Retry) -> None:
        """Back until when the handler said. A time that cannot be is a failure of the handler like any other: else the
        message would lie there until its lease ends."""
        if self._settled(delivery):
            return
        try:
            await delivery.release(in_=again.in_, at=again.at, reason=_short(again.reason))
        except Invalid as bad:
            await self._failed(delivery, f"Retry: {bad.reason}", bad)
        except TimelineError as error:
            self.consumer.settle_failed(delivery, error)

    async def _failed(self, delivery: Delivery, reason: str, error: BaseException | None = None) -> None:
        """Once more after the backoff, where the topic permits another delivery."""
        if await self._buried(delivery, reason, error):
            return
        wait_ms = self.backoff.delay_ms(delivery.deliveries, self.consumer.random)
        log.warning("the handler of %r failed, again in %d ms: %s", delivery.id, wait_ms, reason, exc_info=error)
        await self._settle(delivery, delivery.release(in_=wait_ms / 1000.0, reason=_short(reason)))

    async def _buried(self, delivery: Delivery, reason: str, error: BaseException | None = None) -> bool:
        """Buries a message that was delivered as often as its topic permits: released, it would become a dead letter
        all the same, but nobody would know the reason. False: there are more deliveries to come."""
        most = delivery._load.frame.max_deliveries
        if not 0 < most <= delivery.deliveries:
            return False
        log.error(
            "the handler of %r failed at the last of %d deliveries: %s", delivery.id, most, reason, exc_info=error
        )
        await self._settle(delivery, delivery.bury(_short(f"{DELIVERED_OUT.decode()}: {reason}")))
        return True

    async def _call(self, job: _Job) -> None:
        try:
            if tracing.tracer() is None:
                await self._call_plainly(job.delivery)
            else:
                with job.delivery.span(expected=(Retry, Bury)):
                    await self._call_plainly(job.delivery)
        finally:
            job.handling = False
            if job.cancelled and job.task is not None:
                job.task.uncancel()

    async def _call_plainly(self, delivery: Delivery) -> None:
        if self.pool is None:
            await self._call_async(delivery)
        else:
            await self._call_in_thread(delivery)

    async def _call_async(self, delivery: Delivery) -> None:
        handler: Any = self.handler
        if self.timeout_ms is None:
            await handler(delivery)
        else:
            async with asyncio.timeout(self.timeout_ms / 1000.0):
                await handler(delivery)

    async def _call_in_thread(self, delivery: Delivery) -> None:
        assert self.pool is not None
        future = self.loop.run_in_executor(self.pool, contextvars.copy_context().run, self._work_in_thread, delivery)
        if self.timeout_ms is not None:
            done, _ = await asyncio.wait({future}, timeout=self.timeout_ms / 1000.0)
            if not done:
                # A thread cannot be stopped: its message goes back now, and the worker waits for it to end.
                await self._failed(delivery, f"the handler took longer than {shown_duration(self.timeout_ms)}")
                await asyncio.wait({future})
                return
        result = await asyncio.shield(future)
        if inspect.isawaitable(result):
            await result

    def _work_in_thread(self, delivery: Delivery) -> object:
        """The handler, in its thread. What no future can carry, or would end the loop and not the thread, is a failure
        like any other."""
        handler: Any = self.handler
        try:
            return handler(SyncDelivery.of(delivery, self._from_thread))
        except (StopIteration, SystemExit, KeyboardInterrupt) as stray:
            raise RuntimeError(f"the handler raised {stray!r}") from stray

    def _from_thread(self, asked: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(asked, self.loop).result()

    async def _settle(self, delivery: Delivery, asked: Coroutine[Any, Any, None]) -> None:
        """Settles what a handler left; when it settled the message itself, that stands."""
        if self._settled(delivery):
            asked.close()
            return
        try:
            await asked
        except TimelineError as error:
            self.consumer.settle_failed(delivery, error)

    def _settled(self, delivery: Delivery) -> bool:
        """Whether the handler did it itself."""
        return not self.consumer.holds(delivery) and not delivery.lost

    async def keep(self) -> None:
        """Extends what handlers have at a third of the lease; cancels a handler whose lease is lost."""
        while True:
            lease_ms = self.consumer.lease_ms
            await _pause(max(0.005, lease_ms / 12_000.0))
            now_ms = self.consumer.monotonic_ms()
            for job in list(self.jobs):
                if job.delivery.lost:
                    task = job.task if job.handling and not job.cancelled else None
                    if task is not None and self.consumer.holds_or_lost(job.delivery):
                        job.cancelled = True
                        task.cancel()
                elif job.extend_at_ms <= now_ms and self.consumer.holds(job.delivery) and not self.consumer.closed:
                    job.extend_at_ms = now_ms + lease_ms / 3
                    self.consumer.extend_quietly(job.delivery)


def _ends(task: asyncio.Task[Any] | None) -> bool:
    """Whether this task itself was cancelled, and not only what it waited for."""
    return task is not None and task.cancelling() > 0


async def _pause(wait_s: float) -> None:
    await asyncio.sleep(wait_s)


def _words(error: Exception) -> str:
    """What an exception says; its own code may fail at that, too."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, which cannot say why"


def _short(reason: str) -> str:
    """A reason that fits: at most 1 KiB of UTF-8 without NUL."""
    encoded = reason.replace("\0", " ").encode("utf-8", "replace")
    return encoded[:MAX_REASON_BYTES].decode("utf-8", "ignore")


async def run_handlers(
    consumer: Consumer,
    handler: Handler,
    concurrency: int,
    backoff: Backoff | None,
    timeout: Duration | None,
    grace: Duration,
) -> None:
    """See `Consumer.run`."""
    if not callable(handler):
        raise Invalid(f"a handler is a function of a delivery, not {handler!r:.80}")
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or not 1 <= concurrency <= MAX_CONCURRENCY:
        raise Invalid(f"concurrency must be a whole number from 1 to {MAX_CONCURRENCY}, not {concurrency!r}")
    if backoff is not None and not isinstance(backoff, Backoff):
        raise Invalid(f"backoff is a timeline.Backoff(first=…, cap=…), not {backoff!r:.80}")
    timeout_ms = None if timeout is None else duration_ms(timeout, "timeout", least_ms=1)
    grace_ms = duration_ms(grace, "grace")
    consumer.open(credit=2 * concurrency)
    crew = _Crew(consumer, handler, concurrency, backoff or Backoff(), timeout_ms)
    workers = {asyncio.create_task(crew.work(), name=f"handler {number}") for number in range(concurrency)}
    keeper = asyncio.create_task(crew.keep(), name="extending leases")
    uninstall = _on_sigterm(consumer.stop_taking)
    try:
        failed = await _until_done(workers, keeper, consumer, grace_ms, threads=crew.pool is not None)
    finally:
        uninstall()
        for task in (keeper, *workers):
            task.cancel()
        await asyncio.wait({keeper, *workers})
        if crew.pool is not None:
            crew.pool.shutdown(wait=False, cancel_futures=True)
    if failed is not None:
        raise failed


async def _until_done(
    workers: set[asyncio.Task[None]], keeper: asyncio.Task[None], consumer: Consumer, grace_ms: float, *, threads: bool
) -> BaseException | None:
    """Until workers have ended; once no more is taken they get the grace. Answers why one, or their keeper, failed."""
    try:
        await consumer.stopped_taking({*workers, keeper})
    except asyncio.CancelledError:
        consumer.stop_taking()
        await asyncio.wait(workers, timeout=grace_ms / 1000.0)
        raise
    errors = [task.exception() for task in (keeper, *workers) if task.done() and not task.cancelled()]
    failed = next((error for error in errors if error is not None), None)
    if (failed is None or keeper.done()) and not consumer.closed:
        consumer.stop_taking()
    _, late = await asyncio.wait(workers, timeout=grace_ms / 1000.0)
    if late:
        log.warning("%s", unfinished(len(late), threads))
    return failed


def unfinished(count: int, threads: bool) -> str:
    """The sentence for handlers that the grace was too short for."""
    said = f"{count} handler{'' if count == 1 else 's'} did not finish within the grace: "
    if not threads:
        return said + ("it is cancelled" if count == 1 else "they are cancelled")
    return said + (
        "its message goes back; it is told, and ends at its next look at d.lost, which the process waits for"
        if count == 1
        else "their messages go back; they are told, and end at their next look at d.lost, which the process waits for"
    )


_stopped_by_sigterm: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}


def _on_sigterm(stop: Callable[[], None]) -> Callable[[], None]:
    """Calls `stop` on SIGTERM, where this is the main thread and nobody else listens to it; a process may run handlers
    of several consumers, and all of them stop. Answers how to undo it."""
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
