"""The consumer: deliveries of one topic, pushed to it when they are due, one by one or in batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import overload

from timeline.driver.consume.handlers import Backoff, Handler, run_handlers
from timeline.driver.consume.in_flight import DeliveredFrame, check_credit
from timeline.driver.delivery import Delivered, Delivery, DeliveryBatch, LeaseHolder
from timeline.driver.times import Duration, duration_ms
from timeline.driver.transport.client_context import ClientContext
from timeline.errors import Closed, Invalid, TimelineError
from timeline.model import MAX_BATCH

log = logging.getLogger("timeline.driver")

CREDIT_BYTES = 16 * 1024 * 1024
MAX_CREDIT = MAX_BATCH
"""What is in hand must fit into one Hello."""
YIELD_EVERY = 128
"""Deliveries handed out of a full buffer without letting other tasks run."""


class Consumer(LeaseHolder):
    """Deliveries of a topic. Made by `Timeline.consumer`; iterate it, take `batches()`, or `run` a handler.

        async with tl.consumer("departures", id="worker-1", credit=100) as c:
            async for d in c:
                await d.ack()

    At most `credit` messages and `credit_bytes` are in hand: in its buffer, or with your code and not settled. What
    waits in the buffer is extended, and handed back when the consumer closes; what your code has stays leased. It
    reconnects by itself, keeping what it has in hand. Iteration raises Unavailable when no broker
    was ever reached, Superseded when another consumer took its id, NotFound when there is no such topic (any more); it
    ends when the consumer is closed.

    `on_settle_error(delivery, error)` is called for what `ack_soon` could not settle. `stats` counts.
    """

    def __init__(
        self,
        context: ClientContext,
        topic: str,
        id: str | None,
        lease_ms: int,
        credit: int | None,
        credit_bytes: int,
    ) -> None:
        self.on_settle_error: Callable[[Delivery, TimelineError], object] | None = None
        self._since_yield = 0
        super().__init__(context, topic, id, lease_ms, credit, credit_bytes)

    def __aiter__(self) -> AsyncIterator[Delivery]:
        return self._each()

    async def _each(self) -> AsyncIterator[Delivery]:
        while (delivery := await self.take()) is not None:
            yield delivery

    @overload
    async def take(self) -> Delivery | None: ...
    @overload
    async def take(self, max: int, timeout: Duration | None = None) -> list[Delivery]: ...
    async def take(self, max: int | None = None, timeout: Duration | None = None) -> Delivery | list[Delivery] | None:
        """Wait for the next delivery, or, with `max`, for at most that many.

            for d in await c.take(max=10, timeout="20s"):
                await d.ack()

        With `max`, return a list as soon as at least one delivery is there: all that wait, up to `max`. The list is
        empty when none came within `timeout`. As with `queue.get`, None waits without a bound, and 0 takes only what is
        there already. `max` bounds one call, `credit` what the consumer leases ahead of it. A cancelled call takes
        nothing.
        Raises Closed when the consumer is closed or takes nothing more, Invalid, and what iteration raises.

        Without `max`, return one delivery, without a bound on the wait, or None once the consumer is closed or takes
        nothing more.
        """
        if self._since_yield >= YIELD_EVERY:
            self._since_yield = 0
            await asyncio.sleep(0)
        if max is not None:
            return await self._several(check_credit(max, "max", MAX_CREDIT), timeout)
        if timeout is not None:
            raise Invalid("timeout needs max. Use take(max=1, timeout=…), which returns a list")
        while True:
            taken = self._in_flight.next(self.monotonic_ms()) if self._ours else None
            if taken is not None:
                self._since_yield += 1
                return Delivery(self, *taken, self._context.clock.now())
            if not await self._more():
                return None
            self._since_yield = 0

    async def _several(self, most: int, timeout: Duration | None) -> list[Delivery]:
        wait_s = None if timeout is None else duration_ms(timeout, "timeout") / 1000.0
        try:
            async with asyncio.timeout(wait_s):
                while not (taken := self._waiting(most)):
                    if not await self._more():
                        raise Closed("the consumer takes nothing more. Make another with tl.consumer(…)")
        except TimeoutError:
            return []
        self._since_yield += len(taken)
        return taken

    def _waiting(self, most: int) -> list[Delivery]:
        """Hand out what waits, `most` at most. Nothing awaits between here and the caller, or a cancelled call would
        lose it."""
        taken: list[Delivery] = []
        while len(taken) < most and self._ours and (found := self._in_flight.next(self.monotonic_ms())) is not None:
            taken.append(Delivery(self, *found, self._context.clock.now()))
        return taken

    def put_back(self, deliveries: Sequence[Delivered]) -> None:
        """Return deliveries to the buffer that were taken, and never reached a person's code."""
        if self._epoch != self._context.epoch:
            return
        for d in reversed(deliveries):
            self._in_flight.put_back(d._frame, d._index)
        if not self._session.taking:
            self._session.hand_back()
        self._event.set()

    async def batches(self) -> AsyncIterator[DeliveryBatch]:
        """Deliveries in the batches that they arrived in, as columns.

            async for b in c.batches():
                work(b.ids, b.payloads)
                await b.ack()

        Ends when the consumer is closed or takes nothing more; raises as iteration does.
        """
        while (batch := await self.take_batch()) is not None:
            yield batch

    async def take_batch(self) -> DeliveryBatch | None:
        """The next batch, when there is one; None once the consumer is closed or takes nothing more."""
        while True:
            taken = self._in_flight.next_batch(self.monotonic_ms()) if self._ours else None
            if taken is not None:
                return DeliveryBatch(self, *taken, self._context.clock.now())
            if not await self._more():
                return None

    @property
    def _ours(self) -> bool:
        """Whether what is in hand is this process's, and this loop's: a forked child leaves it to its parent."""
        if self.closed:
            return False
        self._context.check()
        return self._epoch == self._context.epoch

    async def _more(self) -> bool:
        """Waits until something may be there; False when nothing will be. Raises why nothing will. Whatever happens
        wakes all who wait; they do not wake each other, or idle handlers would do so for ever."""
        if self.closed:
            return False
        self.open()
        if not self._session.taking:
            return False
        self._event.clear()
        if not self._in_flight.ready and self._session.failure is None:
            self._settler.queue.work.set()  # credit may have come back: let it be sent before waiting
            in_flight = self._in_flight
            in_flight.awaited += 1
            try:
                await self._event.wait()
            finally:
                in_flight.awaited -= 1
        if self._session.failure is not None:
            raise self._session.failure
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
        """Calls `handler(delivery)` for each delivery, `concurrency` at once, until the consumer is closed, the task is
        cancelled, or SIGTERM comes: then it takes nothing more and lets handlers finish within `grace`.

        When the handler returns, the message is acknowledged; while it works, the lease is extended; when it raises,
        the message is released with `backoff` by its deliveries. `raise timeline.Retry(in_=…)` or
        `timeline.Bury(reason)` says it otherwise. Plain functions run in threads and get a delivery whose methods need
        no await; one that returns a coroutine has failed. When the lease is lost, `d.lost` is set and an async handler
        is cancelled. `timeout`: how long one call may take.
        """
        await run_handlers(self, self.take, handler, concurrency, backoff, timeout, grace)

    def _settle_failed(self, frame: DeliveredFrame, index: int, error: TimelineError) -> None:
        if self.on_settle_error is None:
            return
        try:
            self.on_settle_error(Delivery(self, frame, index, 0.0), error)
        except Exception:
            log.exception("on_settle_error failed")
