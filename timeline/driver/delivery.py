"""Deliveries, single and in batches that keep their columns, and the consumer that holds their leases.

Both are views on a frame (`consume/in_flight.py`): a field is copied out of it when it is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import zlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Protocol, TypeAlias, overload

import numpy as np

from timeline import tracing
from timeline.columns import Bools, Indexes, Int64, Ragged, UInt32
from timeline.driver.consume.broker_clock import BrokerClock
from timeline.driver.consume.in_flight import DONE, HANDED, DeliveredFrame, InFlight, Stats
from timeline.driver.consume.session import ConsumerSession, Subscription
from timeline.driver.consume.settler import ACK, Settler, SettleRequest, bury_of, release_of, weakly
from timeline.driver.message import Headers, Randomness, about
from timeline.driver.receipts import OK, MessageAnswer, Receipts, error_of
from timeline.driver.tasks import Closing, SharedClose
from timeline.driver.times import Duration, When, as_datetime, duration_ms, grown_ms, shown
from timeline.driver.transport.channel import FORKED, ClientContext
from timeline.errors import Closed, Invalid, LeaseLost, TimelineError
from timeline.model import MAX_DURATION_MS, Operation, decode_headers

log = logging.getLogger("timeline.driver")

Only: TypeAlias = Sequence[int] | Indexes | Bools | None
"""Messages of a batch: their places in it, or a mask. None: all."""


class Token(NamedTuple):
    """The fencing token of a delivery. Opaque: keep it and compare it, but do not interpret it."""

    id: str
    birth: int
    version: int


class Holder(Protocol):
    """The holder of a delivery, as far as its fields need one: a consumer."""

    @property
    def topic(self) -> str: ...
    @property
    def id(self) -> str: ...
    def monotonic_ms(self) -> float: ...


class Delivered:
    """The fields of one delivery; see `Delivery`."""

    __slots__ = ("_consumer", "_frame", "_handed_ms", "_index")

    def __init__(self, consumer: Holder, frame: DeliveredFrame, index: int, handed_ms: float) -> None:
        self._consumer, self._frame, self._index, self._handed_ms = consumer, frame, index, handed_ms

    @property
    def id(self) -> str:
        """The message's id."""
        return self._frame.columns.ids[self._index].decode()

    @property
    def payload(self) -> bytes:
        """The payload, as the producer put it."""
        return self._frame.columns.payloads[self._index]

    @property
    def payload_view(self) -> memoryview:
        """The payload without a copy. It keeps the whole frame alive."""
        return self._frame.columns.payloads.view(self._index)

    @property
    def headers(self) -> dict[str, str]:
        """Its headers."""
        column = self._frame.columns.headers
        return {} if column is None else decode_headers(column[self._index])

    @property
    def tag(self) -> str | None:
        """Its tag, None if it has none."""
        column = self._frame.columns.tags
        return (column[self._index].decode() or None) if column is not None else None

    @property
    def due_ms(self) -> int:
        """When it came due, milliseconds UTC: the scheduled time, or the end of the last lease of a redelivery."""
        return int(self._frame.columns.due_ms[self._index])

    @property
    def due(self) -> datetime:
        """When it came due, an aware datetime in UTC."""
        return as_datetime(self.due_ms)

    @property
    def scheduled_ms(self) -> int:
        """The due time that a person asked for, milliseconds UTC."""
        return int(self._frame.columns.scheduled_ms[self._index])

    @property
    def scheduled(self) -> datetime:
        """The due time that a person asked for, an aware datetime in UTC."""
        return as_datetime(self.scheduled_ms)

    @property
    def lateness(self) -> timedelta:
        """Time from due until this code got it, on this process's clock."""
        return timedelta(milliseconds=self._handed_ms - self.due_ms)

    @property
    def deliveries(self) -> int:
        """The number of its leases, this one included."""
        return int(self._frame.columns.deliveries[self._index])

    @property
    def max_deliveries(self) -> int:
        """The number of deliveries that its topic permits. 0: no limit."""
        return self._frame.columns.max_deliveries

    @property
    def retry_in(self) -> timedelta:
        """How long the topic's retry settings let it wait now: `await d.release(in_=d.retry_in)`. The wait grows with
        its deliveries. It varies by `retry_jitter` from one message to another, and is always this for this lease."""
        columns = self._frame.columns
        first_ms, cap_ms = columns.retry_first_ms, columns.retry_cap_ms
        wait_ms = grown_ms(first_ms, columns.retry_factor_percent / 100, cap_ms, self.deliveries)
        mark = zlib.crc32(self.version.to_bytes(8, "little"), int(columns.birth[self._index]) & 0xFFFFFFFF)
        swing = columns.retry_jitter_percent / 100 * (2.0 * mark / 0xFFFFFFFF - 1.0)
        return timedelta(milliseconds=min(MAX_DURATION_MS, round(wait_ms * (1.0 + swing))))

    @property
    def version(self) -> int:
        """Its version under this lease."""
        return int(self._frame.columns.version[self._index])

    @property
    def lease_until_ms(self) -> int:
        """When the lease ends, milliseconds UTC on the broker's clock. Extensions are included."""
        return int(self._frame.until_ms[self._index])

    @property
    def lease_until(self) -> datetime:
        """When the lease ends, an aware datetime in UTC."""
        return as_datetime(self.lease_until_ms)

    @property
    def token(self) -> Token:
        """(birth, version) of this lease, opaque."""
        return Token(self.id, int(self._frame.columns.birth[self._index]), self.version)

    @property
    def lost(self) -> bool:
        """Whether the lease has ended, or another consumer is known to have the message: stop working on it. After a
        settle: whether the lease was lost before."""
        if self._frame.lost[self._index] or self._frame.state[self._index] == DONE:
            return bool(self._frame.lost[self._index])
        return bool(self._frame.end_ms[self._index] <= self._consumer.monotonic_ms())

    def span(self, expected: tuple[type[BaseException], ...] = ()) -> AbstractContextManager[Any]:
        """Return a context manager for an OpenTelemetry span around the handling of this message: `with d.span(): …`.

        The span belongs to the trace in which the message was put. It is nothing if the program has no tracer provider.
        `c.run` uses it by itself. `expected`: exceptions that are no error.
        """
        by = tracing.tracer()
        if by is None:
            return nullcontext()
        about = {
            "messaging.message.id": self.id,
            "messaging.consumer.group.name": self._consumer.id,
            "timeline.deliveries": self.deliveries,
            "timeline.lateness_ms": self._handed_ms - self.due_ms,
        }
        return tracing.processing(by, self._consumer.topic, self.headers, about, expected)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id!r} version {self.version}, {len(self.payload)} bytes>"


class Delivery(Delivered):
    """One message, leased to this consumer until `lease_until`.

    Settle it with `ack`, `release` or `bury`. They return after the broker's answer, or raise it. Fenced: another
    consumer has leased it since. NotFound: it was cancelled, or settled before. Unavailable and Unknown are as for any
    call. An ack after the lease ran out still counts if the message has not changed since.
    """

    __slots__ = ()

    _consumer: LeaseHolder

    async def ack(self, *, timeout: Duration | None = None) -> None:
        """Acknowledge the message: it is done, and is deleted."""
        await self._consumer.settle_one(self._frame, self._index, ACK, timeout)

    def ack_soon(self) -> None:
        """Acknowledge without waiting. The ack is sent within 20 ms, together with others.

        A failure goes to `consumer.on_settle_error`. The ack is also sent when the program ends without closing its
        client.
        """
        self._consumer.ack_soon(self._frame, self._index)

    async def extend(self, more: Duration | None = None, *, timeout: Duration | None = None) -> datetime:
        """Extend the lease to at least `more` from now (default: the consumer's lease), at most the topic's max_lease.
        Return its new end. Raise LeaseLost if it has ended already."""
        with about(self.id):
            asked = self._consumer.extension(more)
        if self.lost:
            raise LeaseLost("", id=self.id)
        return as_datetime((await self._consumer.settle_one(self._frame, self._index, asked, timeout)).due_ms)

    async def release(
        self, *, in_: Duration | None = None, at: When | None = None, reason: str = "", timeout: Duration | None = None
    ) -> None:
        """Return the message to the timeline: due at once, after `in_` from the broker's now, or at the time `at`. A
        message whose expiry is not after that time is removed, and Expired is raised."""
        with about(self.id):
            asked = release_of(in_, at, reason)
        await self._consumer.settle_one(self._frame, self._index, asked, timeout)

    async def bury(self, reason: str, *, timeout: Duration | None = None) -> None:
        """Make it a dead letter with a reason (≤ 1 KiB)."""
        with about(self.id):
            asked = bury_of(reason)
        await self._consumer.settle_one(self._frame, self._index, asked, timeout)


class Deliveries:
    """The columns of a batch of deliveries; see `DeliveryBatch`."""

    def __init__(self, consumer: LeaseHolder, frame: DeliveredFrame, at: Indexes | None, handed_ms: float) -> None:
        self._consumer, self._frame, self._at, self._handed_ms = consumer, frame, at, handed_ms

    @property
    def ids(self) -> Ragged:
        """Ids, as a column of bytes (UTF-8)."""
        return self._ragged(self._frame.columns.ids)

    @property
    def payloads(self) -> Ragged:
        """Payloads, as a column of bytes."""
        return self._ragged(self._frame.columns.payloads)

    @property
    def headers(self) -> Headers:
        """Headers, one dict per message, decoded on access: `b.headers[0]`."""
        return Headers(self._optional(self._frame.columns.headers))

    @property
    def tags(self) -> Ragged:
        """Tags, as a column of bytes (UTF-8). Empty: no tag."""
        return self._optional(self._frame.columns.tags)

    @property
    def due_ms(self) -> Int64:
        """When each came due, milliseconds UTC."""
        return self._numbers(self._frame.columns.due_ms)

    @property
    def scheduled_ms(self) -> Int64:
        """The due times that a person asked for, milliseconds UTC."""
        return self._numbers(self._frame.columns.scheduled_ms)

    @property
    def versions(self) -> Int64:
        """Versions under these leases."""
        return self._numbers(self._frame.columns.version)

    @property
    def deliveries(self) -> UInt32:
        """The number of leases of each."""
        column = self._frame.columns.deliveries
        return column if self._at is None else column[self._at]

    @property
    def lease_until_ms(self) -> Int64:
        """When each lease ends, milliseconds UTC on the broker's clock."""
        return self._numbers(self._frame.until_ms)

    @property
    def handed_ms(self) -> float:
        """When this code got the batch, milliseconds UTC on this process's clock."""
        return self._handed_ms

    @property
    def leased_ms(self) -> int:
        """When the store call that leased them returned, milliseconds UTC on the broker's clock."""
        return self._frame.columns.leased_ms

    @property
    def pushed_ms(self) -> int:
        """When the broker made their frame, milliseconds UTC on its clock."""
        return self._frame.columns.pushed_ms

    def __len__(self) -> int:
        return len(self._frame) if self._at is None else len(self._at)

    def _ragged(self, column: Ragged) -> Ragged:
        return column if self._at is None else column.take(self._at)

    def _optional(self, column: Ragged | None) -> Ragged:
        return Ragged.repeat(b"", len(self)) if column is None else self._ragged(column)

    def _numbers(self, column: Int64) -> Int64:
        return column if self._at is None else column[self._at]

    def _index(self, place: int) -> int:
        if place < 0:
            place += len(self)
        if not 0 <= place < len(self):
            raise IndexError(place)
        return place if self._at is None else int(self._at[place])

    def indexes(self, only: Only) -> Indexes:
        """Return the messages `only` as indexes into the frame."""
        if only is None:
            return np.arange(len(self._frame)) if self._at is None else self._at
        asked = np.asarray(only).reshape(-1)
        if asked.dtype == np.bool_:
            if len(asked) != len(self):
                raise Invalid(f"only= is a mask of {len(asked)} for a batch of {len(self)}: one True or False each")
            asked = np.flatnonzero(asked)
        elif len(asked) and asked.dtype.kind not in "iu":
            raise Invalid(f"only= takes places in the batch, whole numbers, or a mask, not {shown(only)}")
        places = asked.astype(np.intp)
        if len(places) and (int(places.min()) < 0 or int(places.max()) >= len(self)):
            raise IndexError(f"only= names places outside of the batch of {len(self)}")
        return places if self._at is None else self._at[places]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)}>"


class DeliveryBatch(Deliveries, Sequence[Delivery]):
    """Deliveries that arrived together: a sequence of `Delivery`, made on access, and their columns.

    Settle all of them, or some by their places or by a mask: `await b.ack()`, `await b.ack(only=[0, 2])`,
    `await b.ack(only=b.deliveries == 1)`. Return Receipts in that order. A message that cannot be settled fails alone
    (`.failed`). Raise only if the call itself failed.
    """

    @overload
    def __getitem__(self, index: int) -> Delivery: ...
    @overload
    def __getitem__(self, index: slice) -> DeliveryBatch: ...
    def __getitem__(self, index: int | slice) -> Delivery | DeliveryBatch:
        if isinstance(index, slice):
            at = self.indexes(range(*index.indices(len(self))))
            return DeliveryBatch(self._consumer, self._frame, at, self._handed_ms)
        return Delivery(self._consumer, self._frame, self._index(index), self._handed_ms)

    async def ack(self, only: Only = None, *, timeout: Duration | None = None) -> Receipts:
        """Acknowledge the messages: they are done, and are deleted."""
        return await self._consumer.settle_many(self._frame, self.indexes(only), ACK, timeout)

    def ack_soon(self, only: Only = None) -> None:
        """Acknowledge without waiting. Failures go to `consumer.on_settle_error`."""
        self._consumer.ack_all_soon(self._frame, self.indexes(only))

    async def extend(
        self, more: Duration | None = None, only: Only = None, *, timeout: Duration | None = None
    ) -> Receipts:
        """Extend the leases to at least `more` from now (default: the consumer's lease)."""
        at, asked = self.indexes(only), self._consumer.extension(more)
        return await self._consumer.settle_many(self._frame, at, asked, timeout)

    async def release(
        self,
        only: Only = None,
        *,
        in_: Duration | None = None,
        at: When | None = None,
        reason: str = "",
        timeout: Duration | None = None,
    ) -> Receipts:
        """Return the messages to the timeline: due at once, after `in_` from now, or at the time `at`."""
        where, asked = self.indexes(only), release_of(in_, at, reason)
        return await self._consumer.settle_many(self._frame, where, asked, timeout)

    async def bury(self, reason: str, only: Only = None, *, timeout: Duration | None = None) -> Receipts:
        """Make the messages dead letters with a reason (≤ 1 KiB)."""
        return await self._consumer.settle_many(self._frame, self.indexes(only), bury_of(reason), timeout)


CREDIT_MESSAGES = 100


class LeaseHolder(Closing):
    """The part of a consumer that its deliveries and its handlers use. See `Consumer`."""

    closed = True
    """Until `__init__` is done: a consumer that could not be made has nothing to end."""

    def __init__(
        self, context: ClientContext, topic: str, id: str | None, lease_ms: int, credit: int | None, credit_bytes: int
    ) -> None:
        self.topic, self._id_asked = topic, id
        self._id_made, self._id_pid = "", 0
        self.closed = False
        self._context = context
        self._lease_ms = lease_ms
        self._credit_asked = credit
        self._credit_bytes = credit_bytes
        self._event = asyncio.Event()
        self._closing = SharedClose()
        self._epoch = -1
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
        """Its name. A made name is another one in a forked child: the two would supersede each other."""
        if self._id_asked is not None:
            return self._id_asked
        if self._id_pid != os.getpid():
            self._id_made = f"consumer-{self._context.ids.make().decode()}"
            self._id_pid = os.getpid()  # last: another thread that sees it takes the name that was made
        return self._id_made

    @property
    def stats(self) -> Stats:
        """Counters since the consumer was made."""
        return self._in_flight.stats

    @property
    def lease_ms(self) -> float:
        """How long its leases last, ms."""
        return self._session.lease_ms

    @property
    def welcomed(self) -> bool:
        """Whether a broker has ever taken it."""
        return self._session.welcomed

    def monotonic_ms(self) -> float:
        """Return the monotonic time by which its leases end."""
        return self._context.clock.monotonic_ms()

    async def aclose(self) -> None:
        """Send the last settles, return the buffered messages unseen, and leave.

        Messages in your code stay leased until their leases end.
        """
        first, self.closed = not self.closed, True
        if self._context.elsewhere or 0 <= self._epoch < self._context.epoch:  # others wait for the event there
            if first:
                self._context.leave_behind(self._session, self._settler, self._event)
            return
        self._event.set()
        if self._epoch == self._context.epoch:
            await self._closing.run(self._close)

    async def _close(self) -> None:
        await self._session.stop(self._context.timeout_ms)

    def __del__(self) -> None:
        """Return the messages of a consumer that was never closed, if neither it nor its deliveries are used any
        more."""
        if not self.closed and self._epoch == self._context.epoch and self._context.here:
            self._context.part(self._session)

    def open(self, credit: int | None = None) -> None:
        """Connect in the background, as the first use does. `credit`: the default if no credit was asked for."""
        if self.closed:
            raise self._context.closed_error("the consumer was closed. Make another with tl.consumer(…)")
        self._context.check()
        if self._epoch != self._context.epoch:
            # First use, or a child process: messages in the parent's hands are the parent's.
            stopped, self._epoch = self._epoch < 0 and not self._session.taking, self._context.epoch
            self._context.leave_behind(self._session, self._settler)
            self._event = asyncio.Event()
            self._assemble(self._credit_asked or credit or CREDIT_MESSAGES)
            if stopped:
                self.stop_taking()
        self._session.start()

    @property
    def credit(self) -> int:
        """How many messages it may have leased at once."""
        return self._in_flight.credit.messages

    @property
    def credit_fixed(self) -> bool:
        """Whether the caller chose the credit."""
        return self._credit_asked is not None

    def resize_credit(self, messages: int, most_waiting: int) -> None:
        """Make its credit `messages`, and return all waiting messages unseen if these are more than `most_waiting`."""
        if not self.taking:
            return
        self._in_flight.credit.resize(messages)
        if self._in_flight.waiting > most_waiting:
            self._session.hand_back()
        self._settler.queue.work.set()

    def stop_taking(self) -> None:
        """Take nothing more, and return the buffered messages unseen. Messages in your code can still be settled."""
        self._session.stop_taking()
        self._event.set()

    @property
    def taking(self) -> bool:
        """Whether it still takes messages."""
        return self._session.taking and not self.closed

    async def stopped_taking(self, workers: set[asyncio.Task[None]]) -> None:
        """Return once it takes nothing more, or one of `workers` has ended."""
        stopped = asyncio.ensure_future(self._session.stopped_taking.wait())
        try:
            await asyncio.wait({stopped, *workers}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()

    def _settle_failed(self, frame: DeliveredFrame, index: int, error: TimelineError) -> None:
        """Report an unawaited settle that was refused."""

    def _check_open(self) -> None:
        if self.closed:
            raise self._context.closed_error(
                "the consumer was closed. Its messages are delivered again when their leases end"
            )
        self._context.check()
        if self._epoch != self._context.epoch:
            raise Closed(FORKED)
        self._session.start()

    async def settle_one(
        self, frame: DeliveredFrame, index: int, asked: SettleRequest, timeout: Duration | None
    ) -> MessageAnswer:
        """Settle or extend one message. Raise the broker's refusal."""
        self._check_open()
        answer = await self._settler.one(frame, index, asked, self._context.patience_ms(timeout))
        if answer.status != OK:
            raise error_of(answer.status, frame.columns.ids[index].decode(), answer.detail, trouble=answer.trouble)
        return answer

    async def settle_many(
        self, frame: DeliveredFrame, at: Indexes, asked: SettleRequest, timeout: Duration | None
    ) -> Receipts:
        """Settle or extend the messages `at` of a frame."""
        self._check_open()
        answers = await self._settler.many(frame, at, asked, self._context.patience_ms(timeout))
        whole = len(at) == len(frame) and bool((at == np.arange(len(frame))).all())
        return Receipts(frame.columns.ids if whole else frame.columns.ids.take(at), answers)

    def ack_soon(self, frame: DeliveredFrame, index: int) -> None:
        """Acknowledge one message without waiting."""
        self._check_open()
        self._settler.soon(frame, index)

    def ack_handled(self, d: Delivered) -> None:
        """Acknowledge a message whose handler has returned. It waits only while an earlier frame is unanswered. A
        failure goes to `settle_failed`."""
        try:
            self._check_open()
        except TimelineError as error:
            self.settle_failed(d, error)
        else:
            self._settler.soon(d._frame, d._index, hurried=True)

    async def all_answered(self, within_ms: float) -> None:
        """Return when all unawaited acks are answered, or after `within_ms`. If it takes nothing more, the broker has
        back what was not handed out, too."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_ms / 1000.0):
                await self._settler.acks_answered()
                await self._session.returned()

    def ack_all_soon(self, frame: DeliveredFrame, at: Indexes) -> None:
        """Acknowledge the messages `at` of a frame without waiting."""
        self._check_open()
        self._settler.soon_all(frame, at)

    def extension(self, more: Duration | None) -> SettleRequest:
        """Return the request for an extension by `more` (None: the consumer's lease)."""
        more_ms = int(self.lease_ms) if more is None else duration_ms(more, "more", least_ms=1)
        return SettleRequest(Operation.EXTEND, more_ms)

    @property
    def random(self) -> Randomness:
        """The client's randomness."""
        return self._context.random

    def extend_at_ms(self, d: Delivered) -> float:
        """Return when (monotonic) to extend its lease: a third of a lease from now, or at half of the time left, if
        that is sooner. Less is left if it waited in the buffer while no broker could extend it."""
        now_ms, third_ms = self.monotonic_ms(), self.lease_ms / 3
        if d._frame.earliest_ms - now_ms < 2 * third_ms:
            third_ms = max(0.0, min(third_ms, (float(d._frame.end_ms[d._index]) - now_ms) / 2))
        return now_ms + third_ms

    def extend_unawaited(self, deliveries: Iterable[Delivered]) -> None:
        """Extend leases together without waiting. Each `d.lost` and `d.lease_until` shows the outcome."""
        self._check_open()
        parts: dict[DeliveredFrame, list[int]] = {}
        for d in deliveries:
            parts.setdefault(d._frame, []).append(d._index)
        self._settler.extend([(frame, np.array(at)) for frame, at in parts.items()], self.lease_ms)

    def patience_s(self, d: Delivered) -> float:
        """Return how long to try a settle for which no user's code waits: while its lease lasts, and at least for the
        client's timeout."""
        left_ms = float(d._frame.end_ms[d._index]) - self.monotonic_ms()
        return max(self._context.timeout_ms, left_ms) / 1000.0

    def holds(self, d: Delivered) -> bool:
        """Return whether the user's code has a delivery, and has not settled it yet."""
        return d._frame.state[d._index] == HANDED

    def settle_failed(self, d: Delivered, error: TimelineError) -> None:
        """Count and report a failed settle for which no caller waited."""
        self.stats.settle_errors += 1
        log.warning("%r was not settled: %s", d.id, error)
        self._settle_failed(d._frame, d._index, error)
