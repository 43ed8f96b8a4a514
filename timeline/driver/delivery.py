"""What a consumer is handed, a delivery or a batch of them that keeps its columns; and who holds their leases.

Both are views on a frame (`consume/in_flight.py`): nothing is copied out of it until somebody asks for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias, overload

import numpy as np

from timeline import tracing
from timeline.columns import Bools, Indexes, Int64, Ragged, UInt32
from timeline.driver.consume.broker_clock import BrokerClock
from timeline.driver.consume.in_flight import DONE, HANDED, DeliveredFrame, InFlight, Stats
from timeline.driver.consume.session import ConsumerSession, Subscription
from timeline.driver.consume.settler import Settler, bury_reason, release_reason, release_time, weakly
from timeline.driver.message import Headers, Ids, Randomness, about
from timeline.driver.produce.request_batch import OK, MessageAnswer, error_of
from timeline.driver.receipts import Receipts
from timeline.driver.times import Duration, When, as_datetime, duration_ms
from timeline.driver.transport.client_context import FORKED, ClientContext
from timeline.errors import Closed, Invalid, LeaseLost, TimelineError
from timeline.model import Operation, decode_headers

log = logging.getLogger("timeline.driver")

Only: TypeAlias = Sequence[int] | Indexes | Bools | None
"""Which messages of a batch: their places in it, or a mask; None: all."""


class Token(NamedTuple):
    """What fences a delivery's settles. Opaque: keep it, compare it, read nothing into it."""

    id: str
    birth: int
    version: int


class Delivered:
    """The fields of one delivery; see `Delivery`."""

    __slots__ = ("_consumer", "_frame", "_handed_ms", "_index")

    def __init__(self, consumer: LeaseHolder, frame: DeliveredFrame, index: int, handed_ms: float) -> None:
        self._consumer, self._frame, self._index, self._handed_ms = consumer, frame, index, handed_ms

    @property
    def id(self) -> str:
        """The message's id."""
        return self._frame.columns.ids[self._index].decode()

    @property
    def payload(self) -> bytes:
        """What the producer put."""
        return self._frame.columns.payloads[self._index]

    @property
    def payload_view(self) -> memoryview:
        """The same without a copy; it keeps the whole frame alive."""
        return self._frame.columns.payloads.view(self._index)

    @property
    def headers(self) -> dict[str, str]:
        """Its headers."""
        column = self._frame.columns.headers
        return {} if column is None else decode_headers(column[self._index])

    @property
    def tag(self) -> str | None:
        """Its tag, None when it has none."""
        column = self._frame.columns.tags
        return (column[self._index].decode() or None) if column is not None else None

    @property
    def due_ms(self) -> int:
        """When it came due, milliseconds UTC: what was scheduled, or, delivered again, when its last lease ran out."""
        return int(self._frame.columns.due_ms[self._index])

    @property
    def due(self) -> datetime:
        """The same as an aware datetime in UTC."""
        return as_datetime(self.due_ms)

    @property
    def scheduled_ms(self) -> int:
        """The due time that a person asked for, milliseconds UTC."""
        return int(self._frame.columns.scheduled_ms[self._index])

    @property
    def scheduled(self) -> datetime:
        """The same as an aware datetime in UTC."""
        return as_datetime(self.scheduled_ms)

    @property
    def lateness(self) -> timedelta:
        """From due until it was handed to this code, on this process's clock."""
        return timedelta(milliseconds=self._handed_ms - self.due_ms)

    @property
    def deliveries(self) -> int:
        """How often it was leased, this time included."""
        return int(self._frame.columns.deliveries[self._index])

    @property
    def version(self) -> int:
        """Its version under this lease."""
        return int(self._frame.columns.version[self._index])

    @property
    def lease_until_ms(self) -> int:
        """When the lease ends, as last extended; milliseconds UTC on the broker's clock."""
        return int(self._frame.until_ms[self._index])

    @property
    def lease_until(self) -> datetime:
        """The same as an aware datetime in UTC."""
        return as_datetime(self.lease_until_ms)

    @property
    def token(self) -> Token:
        """(birth, version) of this lease, opaque."""
        return Token(self.id, int(self._frame.columns.birth[self._index]), self.version)

    @property
    def lost(self) -> bool:
        """Whether the lease has ended, or somebody else is known to have the message: stop working on it. Once it is
        settled, whether it was lost by then: there is no lease to lose any more."""
        if self._frame.lost[self._index] or self._frame.state[self._index] == DONE:
            return bool(self._frame.lost[self._index])
        return bool(self._frame.end_ms[self._index] <= self._consumer.monotonic_ms())

    def span(self, expected: tuple[type[BaseException], ...] = ()) -> AbstractContextManager[Any]:
        """`with d.span():` a span of OpenTelemetry around the handling of this message, in the trace that it was put
        in; nothing where the program has no tracer provider. `c.run` does it by itself. `expected`: exceptions that say
        no error."""
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

    Settle it with one of `ack`, `release`, `bury`, which return after the broker's answer or raise it: Fenced when
    somebody else has leased it since, NotFound when it is gone (cancelled, or settled before), Unavailable, Unknown.
    An ack after the lease ran out still counts if nobody has touched the message since.
    """

    __slots__ = ()

    async def ack(self, *, timeout: Duration | None = None) -> None:
        """It is done: the message is deleted."""
        await self._consumer.settle_one(self._frame, self._index, Operation.ACK, timeout=timeout)

    def ack_soon(self) -> None:
        """The same without waiting: goes within 20 ms, with others, or with the next settle that is awaited; a failure
        goes to `consumer.on_settle_error`. At the end of a program that does not close its client, it is still sent."""
        self._consumer.ack_soon(self._frame, self._index)

    async def extend(self, more: Duration | None = None, *, timeout: Duration | None = None) -> datetime:
        """The lease lasts at least `more` from now (the consumer's lease by default), at most the topic's max_lease.
        Answers its new end. Raises LeaseLost when it has ended already."""
        with about(self.id):
            more_ms = self._consumer.more_ms(more)
        if self.lost:
            raise LeaseLost("", id=self.id)
        settle = self._consumer.settle_one
        return as_datetime((await settle(self._frame, self._index, Operation.EXTEND, more_ms, timeout=timeout)).due_ms)

    async def release(
        self,
        *,
        in_: Duration | None = None,
        at: When | None = None,
        reason: str = "",
        timeout: Duration | None = None,
    ) -> None:
        """Gives it back, due again at once, `in_` a while from the broker's now, or `at` a time."""
        with about(self.id):
            asked = *release_time(in_, at), release_reason(reason)
        await self._consumer.settle_one(self._frame, self._index, Operation.RELEASE, *asked, timeout=timeout)

    async def bury(self, reason: str, *, timeout: Duration | None = None) -> None:
        """Makes it a dead letter with a reason (≤ 1 KiB)."""
        with about(self.id):
            said = bury_reason(reason)
        await self._consumer.settle_one(self._frame, self._index, Operation.BURY, reason=said, timeout=timeout)


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
        """Headers, one dict per message, decoded when it is asked for: `b.headers[0]`."""
        return Headers(self._optional(self._frame.columns.headers))

    @property
    def tags(self) -> Ragged:
        """Tags, as a column of bytes (UTF-8); empty where there is none."""
        return self._optional(self._frame.columns.tags)

    @property
    def due_ms(self) -> Int64:
        """When each came due, milliseconds UTC."""
        return self._numbers(self._frame.columns.due_ms)

    @property
    def scheduled_ms(self) -> Int64:
        """The due that a person asked for."""
        return self._numbers(self._frame.columns.scheduled_ms)

    @property
    def versions(self) -> Int64:
        """Versions under these leases."""
        return self._numbers(self._frame.columns.version)

    @property
    def deliveries(self) -> UInt32:
        """How often each was leased."""
        column = self._frame.columns.deliveries
        return column if self._at is None else column[self._at]

    @property
    def lease_until_ms(self) -> Int64:
        """When each lease ends, on the broker's clock."""
        return self._numbers(self._frame.until_ms)

    @property
    def handed_ms(self) -> float:
        """When the batch was handed out: milliseconds UTC on this process's clock."""
        return self._handed_ms

    @property
    def leased_ms(self) -> int:
        """When the broker's store call that leased them returned, on the broker's clock."""
        return self._frame.columns.leased_ms

    @property
    def pushed_ms(self) -> int:
        """When the broker made their frame, on its clock."""
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
        """Indexes into the frame of the messages that `only` names."""
        if only is None:
            return np.arange(len(self._frame)) if self._at is None else self._at
        asked = np.asarray(only).reshape(-1)
        if asked.dtype == np.bool_:
            if len(asked) != len(self):
                raise Invalid(f"only= is a mask of {len(asked)} for a batch of {len(self)}: one True or False each")
            asked = np.flatnonzero(asked)
        elif len(asked) and asked.dtype.kind not in "iu":
            raise Invalid(f"only= takes places in the batch, whole numbers, or a mask, not {only!r:.60}")
        places = asked.astype(np.intp)
        if len(places) and (int(places.min()) < 0 or int(places.max()) >= len(self)):
            raise IndexError(f"only= names places outside of the batch of {len(self)}")
        return places if self._at is None else self._at[places]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)}>"


class DeliveryBatch(Deliveries, Sequence[Delivery]):
    """Deliveries that arrived together: a sequence of `Delivery`, made when asked for, and their columns.

    Settle all of them or some, by their places or by a mask: `await b.ack()`, `await b.ack(only=[0, 2])`,
    `await b.ack(only=b.deliveries == 1)`. Answers Receipts in the order asked for; a message that cannot be settled
    fails alone (`.failed`). Raises only when the call itself failed.
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
        """They are done: the messages are deleted."""
        return await self._consumer.settle_many(self._frame, self.indexes(only), Operation.ACK, timeout=timeout)

    def ack_soon(self, only: Only = None) -> None:
        """The same without waiting; failures go to `consumer.on_settle_error`."""
        self._consumer.ack_all_soon(self._frame, self.indexes(only))

    async def extend(
        self,
        more: Duration | None = None,
        only: Only = None,
        *,
        timeout: Duration | None = None,
    ) -> Receipts:
        """The leases last at least `more` from now."""
        at, more_ms = self.indexes(only), self._consumer.more_ms(more)
        return await self._consumer.settle_many(self._frame, at, Operation.EXTEND, more_ms, timeout=timeout)

    async def release(
        self,
        only: Only = None,
        *,
        in_: Duration | None = None,
        at: When | None = None,
        reason: str = "",
        timeout: Duration | None = None,
    ) -> Receipts:
        """Gives them back, due again at once, `in_` a while from now, or `at` a time."""
        where, asked = self.indexes(only), (*release_time(in_, at), release_reason(reason))
        return await self._consumer.settle_many(self._frame, where, Operation.RELEASE, *asked, timeout=timeout)

    async def bury(self, reason: str, only: Only = None, *, timeout: Duration | None = None) -> Receipts:
        """Makes them dead letters."""
        at, said = self.indexes(only), bury_reason(reason)
        return await self._consumer.settle_many(self._frame, at, Operation.BURY, reason=said, timeout=timeout)


CREDIT_MESSAGES = 100


class ConsumerId:
    """What a consumer is called: as asked, or, where nobody asked, by a name that is made, and in a forked child made
    anew: under its parent's, the two would supersede each other."""

    def __init__(self, asked: str | None, ids: Ids) -> None:
        self._asked, self._ids = asked, ids
        self._pid, self._made = 0, ""

    @property
    def text(self) -> str:
        """What it is in this process."""
        if self._asked is not None:
            return self._asked
        if self._pid != os.getpid():
            self._made = f"consumer-{self._ids.make().decode()}"
            self._pid = os.getpid()  # last: another thread that sees it takes what was made
        return self._made


class LeaseHolder:
    """The part of a consumer that its deliveries and its handlers use. See `Consumer`."""

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
        self.closed = False
        self._context = context
        self._lease_ms = lease_ms
        self._credit_asked = credit
        self._credit_bytes = credit_bytes
        self._event = asyncio.Event()
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

    async def stopped_taking(self, workers: set[asyncio.Task[None]]) -> None:
        """Return once it takes nothing more, or one of `workers` has ended."""
        stopped = asyncio.ensure_future(self._session.stopped_taking.wait())
        try:
            await asyncio.wait({stopped, *workers}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()

    def _settle_failed(self, frame: DeliveredFrame, index: int, error: TimelineError) -> None:
        """A settle that nobody waits for was refused."""

    def _check_open(self) -> None:
        if self.closed:
            raise Closed("the consumer was closed: what it had in hand comes back when its leases end")
        self._context.check()
        if self._epoch != self._context.epoch:
            raise Closed(FORKED)
        self._session.start()

    async def settle_one(
        self,
        frame: DeliveredFrame,
        index: int,
        operation: Operation,
        time_ms: int = 0,
        flags: int = 0,
        reason: bytes = b"",
        *,
        timeout: Duration | None,
    ) -> MessageAnswer:
        """Settle or extend one message. Raise what the broker has against it."""
        self._check_open()
        patience_ms = self._context.patience_ms(timeout)
        answer = await self._settler.one(frame, index, operation, time_ms, flags, reason, patience_ms)
        if answer.status != OK:
            raise error_of(answer.status, frame.columns.ids[index].decode(), answer.detail, trouble=answer.trouble)
        return answer

    async def settle_many(
        self,
        frame: DeliveredFrame,
        at: Indexes,
        operation: Operation,
        time_ms: int = 0,
        flags: int = 0,
        reason: bytes = b"",
        *,
        timeout: Duration | None,
    ) -> Receipts:
        """Settle or extend the messages `at` of a frame."""
        self._check_open()
        patience_ms = self._context.patience_ms(timeout)
        answers = await self._settler.many(frame, at, operation, time_ms, flags, reason, patience_ms)
        whole = len(at) == len(frame) and bool((at == np.arange(len(frame))).all())
        return Receipts(frame.columns.ids if whole else frame.columns.ids.take(at), answers)

    def ack_soon(self, frame: DeliveredFrame, index: int) -> None:
        """Acknowledge one message without waiting."""
        self._check_open()
        self._settler.soon(frame, index)

    def ack_all_soon(self, frame: DeliveredFrame, at: Indexes) -> None:
        """Acknowledge the messages `at` of a frame without waiting."""
        self._check_open()
        self._settler.soon_all(frame, at)

    def more_ms(self, more: Duration | None) -> int:
        """Return for how long an extension asks."""
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

    def extend_unawaited(self, deliveries: Iterable[Delivered]) -> None:
        """Extend leases without waiting, together: the outcome shows in each `d.lost` and `d.lease_until`."""
        self._check_open()
        parts: dict[DeliveredFrame, list[int]] = {}
        for d in deliveries:
            parts.setdefault(d._frame, []).append(d._index)
        self._settler.extend([(frame, np.array(at)) for frame, at in parts.items()], self.lease_ms)

    def patience_s(self, d: Delivered) -> float:
        """Return how long a settle is worth trying that no user's code waits for: while its lease lasts, and at least
        as long as the client's timeout."""
        left_ms = float(d._frame.end_ms[d._index]) - self.monotonic_ms()
        return max(self._context.timeout_ms, left_ms) / 1000.0

    def holds(self, d: Delivered) -> bool:
        """Whether a delivery is with this code, and not settled yet."""
        return d._frame.state[d._index] == HANDED

    def settle_failed(self, d: Delivered, error: TimelineError) -> None:
        """Count and tell a settle that nobody waited for."""
        self.stats.settle_errors += 1
        log.warning("%r was not settled: %s", d.id, error)
        self._settle_failed(d._frame, d._index, error)
