"""The consumer: deliveries of one topic, pushed to it when they are due, one by one or in batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Self, overload

import numpy as np

from timeline.columns import Indexes
from timeline.driver.consume.broker_clock import BrokerClock
from timeline.driver.consume.credit import check_credit
from timeline.driver.consume.in_flight import HANDED, DeliveredFrame, InFlight, Stats
from timeline.driver.consume.session import ConsumerSession
from timeline.driver.consume.settler import Settler, bury_reason, release_reason, release_time, weakly
from timeline.driver.consume.subscription import Subscription
from timeline.driver.delivery import Delivered, Delivery, DeliveryBatch
from timeline.driver.message import about
from timeline.driver.produce.ids import ConsumerId, Randomness
from timeline.driver.produce.request_batch import OK, MessageAnswer, error_of
from timeline.driver.receipts import Receipts
from timeline.driver.times import Duration, When, as_datetime, duration_ms
from timeline.driver.transport.client_context import FORKED, ClientContext
from timeline.errors import Closed, Invalid, LeaseLost, TimelineError
from timeline.model import MAX_BATCH, Operation

if TYPE_CHECKING:
    from timeline.driver.backoff import Backoff
    from timeline.driver.consume.handlers import Handler

log = logging.getLogger("timeline.driver")

CREDIT_MESSAGES = 100
CREDIT_BYTES = 16 * 1024 * 1024
MAX_CREDIT = MAX_BATCH
"""What is in hand must fit into one Hello."""
YIELD_EVERY = 128
"""Deliveries handed out of a full buffer without letting other tasks run."""


class Consumer:
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

    closed = True
    """Until it is made: one that could not be has nothing to end."""

    def __init__(
        self,
        context: ClientContext,
        topic: str,
        id: str | None,
        lease_ms: int,
        credit: int | None,
        credit_bytes: int,
    ) -> None:
        self.topic, self._id = topic, ConsumerId(id, context.ids)
        self.on_settle_error: Callable[[Delivery, TimelineError], object] | None = None
        self.closed = False
        self._context = context
        self._lease_ms = lease_ms
        self._credit_asked = credit
        self._credit_bytes = credit_bytes
        self._event = asyncio.Event()
        self._epoch = -1
        self._since_yield = 0
        self._assemble(credit or CREDIT_MESSAGES)

    def _assemble(self, credit: int) -> None:
        context = self._context
        clock = BrokerClock()
        self._in_flight = InFlight(credit, self._credit_bytes)
        self._settler = Settler(context, self._in_flight, clock, weakly(self._settle_failed))
        subscription = Subscription(self.topic, self.id, context.ids.number(), self._lease_ms)
        self._session = ConsumerSession(context, subscription, self._in_flight, self._settler, clock)
        self._session.arrived = self._event.set

    @property
    def id(self) -> str:
        """Its name; one that was made is another in a forked child."""
        return self._id.text

    @property
    def stats(self) -> Stats:
        """Counters since it was made."""
        return self._in_flight.stats

    @property
    def lease_ms(self) -> float:
        """What its leases last."""
        return self._session.lease_ms

    def monotonic_ms(self) -> float:
        """The monotonic clock that its leases are held against."""
        return self._context.clock.monotonic_ms()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Sends what is still to be settled, hands back what nobody took, and leaves. What your code has stays leased
        until its lease ends."""
        if self.closed:
            return
        self.closed = True
        self._event.set()
        if self._epoch == self._context.epoch:
            await self._session.stop(self._context.timeout_ms)

    def __del__(self) -> None:
        """One that was never closed and that nobody holds any more, nor anything that it delivered: what it would keep
        and extend for nobody goes back."""
        if not self.closed and self._epoch == self._context.epoch and self._context.here:
            self._context.part(self._session)

    def open(self, credit: int | None = None) -> None:
        """Connects in the background, as the first use does. `credit`: what to use when none was asked for."""
        if self.closed:
            raise Closed("the consumer was closed: make another with tl.consumer(…)")
        self._context.check()
        if self._epoch != self._context.epoch:
            # First use, or a child process: what the parent has in hand is the parent's.
            self._epoch = self._context.epoch
            self._context.leave_behind(self._session, self._settler)
            self._event = asyncio.Event()
            self._assemble(self._credit_asked or credit or CREDIT_MESSAGES)
        self._session.start()

    def stop_taking(self) -> None:
        """Hands back what nobody took, and takes nothing more; what is in hand can still be settled."""
        self._session.stop_taking()
        self._event.set()

    @property
    def taking(self) -> bool:
        """Whether it still takes messages."""
        return self._session.taking and not self.closed

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
        from timeline.driver.consume.handlers import run_handlers

        await run_handlers(self, handler, concurrency, backoff, timeout, grace)

    async def stopped_taking(self, workers: set[asyncio.Task[None]]) -> None:
        """Returns once it takes nothing more, or one of `workers` has ended."""
        stopped = asyncio.ensure_future(self._session.stopped_taking.wait())
        try:
            await asyncio.wait({stopped, *workers}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()

    def settle_failed(self, delivery: Delivery, error: TimelineError) -> None:
        """Counts and tells a settle that nobody waited for."""
        self.stats.settle_errors += 1
        log.warning("%r was not settled: %s", delivery.id, error)
        self._settle_failed(delivery._frame, delivery._index, error)

    def _settle_failed(self, frame: DeliveredFrame, index: int, error: TimelineError) -> None:
        if self.on_settle_error is None:
            return
        try:
            self.on_settle_error(Delivery(self, frame, index, 0.0), error)
        except Exception:
            log.exception("on_settle_error failed")

    # What deliveries and batches ask for.

    def _check_open(self) -> None:
        if self.closed:
            raise Closed("the consumer was closed: what it had in hand comes back when its leases end")
        self._context.check()
        if self._epoch != self._context.epoch:
            raise Closed(FORKED)
        self._session.start()

    async def _one(
        self, d: Delivered, operation: Operation, time_ms: int, flags: int, reason: bytes, timeout: Duration | None
    ) -> MessageAnswer:
        self._check_open()
        frame, index = d._frame, d._index
        patience_ms = self._context.patience_ms(timeout)
        answer = await self._settler.one(frame, index, operation, time_ms, flags, reason, patience_ms)
        if answer.status != OK:
            raise error_of(answer.status, frame.columns.ids[index].decode(), answer.detail)
        return answer

    async def ack_one(self, d: Delivered, timeout: Duration | None) -> None:
        """See Delivery.ack."""
        await self._one(d, Operation.ACK, 0, 0, b"", timeout)

    async def extend_one(self, d: Delivered, more: Duration | None, timeout: Duration | None) -> datetime:
        """See Delivery.extend."""
        with about(d.id):
            more_ms = self._more_ms(more)
        if d.lost:
            raise LeaseLost("", id=d.id)
        answer = await self._one(d, Operation.EXTEND, more_ms, 0, b"", timeout)
        return as_datetime(answer.due_ms)

    async def release_one(
        self, d: Delivered, in_: Duration | None, at: When | None, reason: str, timeout: Duration | None
    ) -> None:
        """See Delivery.release."""
        with about(d.id):
            time_ms, flags, said = *release_time(in_, at), release_reason(reason)
        await self._one(d, Operation.RELEASE, time_ms, flags, said, timeout)

    async def bury_one(self, d: Delivered, reason: str, timeout: Duration | None) -> None:
        """See Delivery.bury."""
        with about(d.id):
            said = bury_reason(reason)
        await self._one(d, Operation.BURY, 0, 0, said, timeout)

    def ack_soon(self, frame: DeliveredFrame, index: int) -> None:
        """See Delivery.ack_soon."""
        self._check_open()
        self._settler.soon(frame, index)

    def ack_all_soon(self, frame: DeliveredFrame, at: Indexes) -> None:
        """See DeliveryBatch.ack_soon."""
        self._check_open()
        self._settler.soon_all(frame, at)

    async def _many(
        self,
        frame: DeliveredFrame,
        at: Indexes,
        operation: Operation,
        time_ms: int,
        flags: int,
        reason: bytes,
        timeout: Duration | None,
    ) -> Receipts:
        self._check_open()
        patience_ms = self._context.patience_ms(timeout)
        answers = await self._settler.many(frame, at, operation, time_ms, flags, reason, patience_ms)
        whole = len(at) == len(frame) and bool((at == np.arange(len(frame))).all())
        return Receipts(frame.columns.ids if whole else frame.columns.ids.take(at), answers)

    async def ack_many(self, frame: DeliveredFrame, at: Indexes, timeout: Duration | None) -> Receipts:
        """See DeliveryBatch.ack."""
        return await self._many(frame, at, Operation.ACK, 0, 0, b"", timeout)

    async def extend_many(
        self, frame: DeliveredFrame, at: Indexes, more: Duration | None, timeout: Duration | None
    ) -> Receipts:
        """See DeliveryBatch.extend."""
        return await self._many(frame, at, Operation.EXTEND, self._more_ms(more), 0, b"", timeout)

    async def release_many(
        self,
        frame: DeliveredFrame,
        at: Indexes,
        in_: Duration | None,
        when: When | None,
        reason: str,
        timeout: Duration | None,
    ) -> Receipts:
        """See DeliveryBatch.release."""
        time_ms, flags = release_time(in_, when)
        return await self._many(frame, at, Operation.RELEASE, time_ms, flags, release_reason(reason), timeout)

    async def bury_many(self, frame: DeliveredFrame, at: Indexes, reason: str, timeout: Duration | None) -> Receipts:
        """See DeliveryBatch.bury."""
        return await self._many(frame, at, Operation.BURY, 0, 0, bury_reason(reason), timeout)

    def _more_ms(self, more: Duration | None) -> int:
        return int(self.lease_ms) if more is None else duration_ms(more, "more", least_ms=1)

    @property
    def random(self) -> Randomness:
        """The client's randomness."""
        return self._context.random

    def extend_at_ms(self, d: Delivered) -> float:
        """When (monotonic) its lease is to be extended: a third of a lease from now, and no later than at half of what
        is left. That is less where it has waited in the buffer while no broker was there to extend it."""
        now_ms, third_ms = self.monotonic_ms(), self.lease_ms / 3
        if d._frame.earliest_ms - now_ms < 2 * third_ms:
            third_ms = max(0.0, min(third_ms, (float(d._frame.end_ms[d._index]) - now_ms) / 2))
        return now_ms + third_ms

    def extend_quietly(self, deliveries: Sequence[Delivered]) -> None:
        """Extends leases without waiting, together: the outcome shows in each `d.lost` and `d.lease_until`."""
        self._check_open()
        parts: dict[DeliveredFrame, list[int]] = {}
        for d in deliveries:
            parts.setdefault(d._frame, []).append(d._index)
        self._settler.extend([(frame, np.array(at)) for frame, at in parts.items()], self.lease_ms)

    def patience_s(self, d: Delivered) -> float:
        """How long a settle is worth trying that no person's code waits for: while its lease lasts, and at least as
        long as the client's timeout."""
        left_ms = float(d._frame.end_ms[d._index]) - self.monotonic_ms()
        return max(self._context.timeout_ms, left_ms) / 1000.0

    def holds_or_lost(self, d: Delivered) -> bool:
        """Whether no settle of it is on its way, or done by this code."""
        return self.holds(d) or bool(d._frame.lost[d._index])

    def holds(self, d: Delivered) -> bool:
        """Whether a delivery is with this code, and not settled yet."""
        return d._frame.state[d._index] == HANDED
