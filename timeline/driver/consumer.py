"""The consumer: deliveries of one topic, pushed when they are due, one by one or in batches."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from typing import overload

from timeline.driver.consume.handlers import Backoff, Handler, run_handlers
from timeline.driver.consume.in_flight import DeliveredFrame, check_credit
from timeline.driver.delivery import Delivered, Delivery, DeliveryBatch, LeaseHolder
from timeline.driver.times import Duration, duration_ms
from timeline.errors import Closed, Invalid, TimelineError
from timeline.model import MAX_BATCH

log = logging.getLogger("timeline.driver")

CREDIT_BYTES = 16 * 1024 * 1024
MAX_CREDIT = MAX_BATCH
"""All messages in flight must fit into one Hello."""
OF_USERS = ("aclose", "batches", "run", "stats", "stop_taking", "take", "take_batch", "taking")
"""The consumer's methods for users."""
YIELD_EVERY = 128
"""Deliveries handed out of a full buffer before other tasks may run."""


def wait_of(wait: Duration | None, timeout: Duration | None) -> Duration | None:
    """Return how long a take waits, whichever name says it, and warn of the former one."""
    if timeout is None:
        return wait
    warnings.warn("take(timeout=) is called take(wait=) now", DeprecationWarning, stacklevel=3)
    return timeout


class Consumer(LeaseHolder):
    """Deliveries of a topic. Made by `Timeline.consumer`; iterate it, take `batches()`, or `run` a handler.

        async with tl.consumer("departures", id="worker-1", credit=100) as c:
            async for d in c:
                await d.ack()

    At most `credit` messages and `credit_bytes` are in flight: in its buffer, or with your code and not settled. It
    extends the leases of buffered messages, and returns them when it closes. Messages with your code stay leased. It
    reconnects by itself, and keeps its messages.

    Iteration ends when the consumer is closed. It raises Unavailable if no broker was ever reached, Superseded if
    another consumer took its id, and NotFound if the topic does not exist (any more).

    `on_settle_error(delivery, error)` is called if `ack_soon` could not settle a message. `stats` counts.
    """

    on_settle_error: Callable[[Delivery, TimelineError], object] | None = None
    _since_yield = 0

    def __repr__(self) -> str:
        return f"Consumer({self.topic!r}, id {self.id!r})"

    def __dir__(self) -> list[str]:
        """Offer to completion what users call, and not what deliveries and handlers call."""
        return [*OF_USERS, "id", "on_settle_error", "topic"]

    def __aiter__(self) -> AsyncIterator[Delivery]:
        return self._each()

    async def _each(self) -> AsyncIterator[Delivery]:
        while (delivery := await self.take()) is not None:
            yield delivery

    @overload
    async def take(self) -> Delivery | None: ...
    @overload
    async def take(
        self, max: int, wait: Duration | None = None, *, timeout: Duration | None = None
    ) -> list[Delivery]: ...
    async def take(
        self, max: int | None = None, wait: Duration | None = None, *, timeout: Duration | None = None
    ) -> Delivery | list[Delivery] | None:
        """Wait for the next delivery, or, with `max`, for at most that many.

            for d in await c.take(max=10, wait="20s"):
                await d.ack()

        With `max`, return a list as soon as there is a delivery: all buffered ones, up to `max`. The list is empty if
        none came within `wait`. None waits without a bound, and 0 takes only buffered ones.
        Raise Unavailable if no broker has taken the consumer in that time, unless the first attempt has only begun.
        `max` bounds one call; `credit` bounds the messages that the consumer leases ahead of it. A cancelled call takes
        nothing. Raise Closed once the consumer is closed or takes nothing more, Invalid, and the errors of iteration.

        Without `max`, return one delivery, without a bound on the wait. Return None once the consumer is closed or
        takes nothing more. `timeout` is the former name of `wait`, and warns.
        """
        if self._since_yield >= YIELD_EVERY:
            self._since_yield = 0
            await asyncio.sleep(0)
        if max is not None:
            return await self._several(check_credit(max, "max", MAX_CREDIT), wait_of(wait, timeout))
        if wait is not None or timeout is not None:
            raise Invalid("wait needs max. Use take(max=1, wait=…), which returns a list")
        while True:
            taken = self._in_flight.next(self.monotonic_ms()) if self._ours else None
            if taken is not None:
                self._since_yield += 1
                return Delivery(self, *taken, self._context.clock.now())
            if not await self._more():
                return None
            self._since_yield = 0

    async def _several(self, most: int, wait: Duration | None) -> list[Delivery]:
        wait_s = None if wait is None else duration_ms(wait, "wait") / 1000.0
        try:
            async with asyncio.timeout(wait_s):
                while not (taken := self._waiting(most)):
                    if not await self._more():
                        raise Closed("the consumer takes nothing more. Make another with tl.consumer(…)")
        except TimeoutError:
            if wait_s and (why := self._session.unreached()) is not None:
                raise why from None
            return []
        self._since_yield += len(taken)
        return taken

    def _waiting(self, most: int) -> list[Delivery]:
        """Hand out at most `most` buffered messages. There is no await between here and the caller, or a cancelled call
        would lose them."""
        taken: list[Delivery] = []
        while len(taken) < most and self._ours and (found := self._in_flight.next(self.monotonic_ms())) is not None:
            taken.append(Delivery(self, *found, self._context.clock.now()))
        return taken

    def put_back(self, deliveries: Sequence[Delivered]) -> None:
        """Put deliveries back into the buffer that never reached the user's code."""
        if self._epoch != self._context.epoch:
            return
        for d in reversed(deliveries):
            self._in_flight.put_back(d._frame, d._index)
        if not self._session.taking:
            self._session.hand_back()
        self._event.set()

    async def batches(self) -> AsyncIterator[DeliveryBatch]:
        """Yield deliveries in the batches that they arrived in, as columns.

            async for b in c.batches():
                work(b.ids, b.payloads)
                await b.ack()

        It ends when the consumer is closed or takes nothing more, and raises the errors of iteration.
        """
        while (batch := await self.take_batch()) is not None:
            yield batch

    async def take_batch(self) -> DeliveryBatch | None:
        """Wait for the next batch. Return None once the consumer is closed or takes nothing more."""
        while True:
            taken = self._in_flight.next_batch(self.monotonic_ms()) if self._ours else None
            if taken is not None:
                return DeliveryBatch(self, *taken, self._context.clock.now())
            if not await self._more():
                return None

    @property
    def _ours(self) -> bool:
        """Whether the messages are this process's and this loop's. A forked child leaves them to its parent."""
        if self.closed:
            return False
        self._context.check()
        return self._epoch == self._context.epoch

    async def _more(self) -> bool:
        """Wait until there may be a message. Return False if there will be none, or raise the reason. Every event wakes
        all callers. They do not wake each other, or idle handlers would do so for ever."""
        if self.closed:
            return False
        self.open()
        if not self._session.taking:
            return False
        self._event.clear()
        if not self._in_flight.ready and self._session.failure is None:
            self._settler.queue.work.set()  # send credit that came back before waiting
            in_flight = self._in_flight
            in_flight.awaited += 1
            try:
                await self._event.wait()
            finally:
                in_flight.awaited -= 1
        if self._session.failure is not None:
            raise self._session.failure.with_traceback(None)  # each of many callers would add its lines to it
        return not self.closed and self._session.taking

    async def run(
        self,
        handler: Handler,
        concurrency: int = 8,
        *,
        backoff: Backoff | None = None,
        timeout: Duration | None = None,
        grace: Duration = "30s",
    ) -> None:
        """Call `handler(delivery)` for each delivery, `concurrency` at once. After a close, a cancelled task or
        SIGTERM, take nothing more, and let handlers finish within `grace`.

        While the handler works, the lease is extended. When it returns, the message is acknowledged. When it raises,
        the message is released with `backoff` by its deliveries (default: the topic's retry settings). `raise
        timeline.Retry(in_=…)` or `timeline.Bury(reason)` decides otherwise. `timeout`: how long one call may take.

        SystemExit, KeyboardInterrupt and other exceptions that are no Exception end the run. The message is released as
        after any exception, the other handlers finish within `grace`, and then the exception is raised here.

        Plain functions run in threads. They get a delivery whose methods need no await, and fail if they return a
        coroutine. When the lease is lost, `d.lost` is set and an async handler is cancelled."""
        await run_handlers(self, self.take, handler, concurrency, backoff, timeout, grace)

    def _settle_failed(self, frame: DeliveredFrame, index: int, error: TimelineError) -> None:
        if self.on_settle_error is None:
            return
        try:
            self.on_settle_error(Delivery(self, frame, index, 0.0), error)
        except Exception:
            log.exception("on_settle_error failed")
