"""What a consumer is handed: a delivery, or a batch of them that keeps its columns.

Both are views on a frame (`in_flight.py`): nothing is copied out of the frame until somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, overload

import numpy as np

from timeline import tracing
from timeline.columns import Bools, Indexes, Int64, Ragged, UInt32
from timeline.driver.consume.in_flight import DONE, DeliveredFrame
from timeline.driver.message import Headers
from timeline.driver.receipts import Receipts
from timeline.driver.times import Duration, When, as_datetime
from timeline.errors import Invalid
from timeline.model import decode_headers

if TYPE_CHECKING:
    from timeline.driver.consumer import Consumer

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

    def __init__(self, consumer: Consumer, frame: DeliveredFrame, index: int, handed_ms: float) -> None:
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
        await self._consumer.ack_one(self, timeout)

    def ack_soon(self) -> None:
        """The same without waiting: goes within 20 ms, with others, or with the next settle that is awaited; a failure
        goes to `consumer.on_settle_error`. At the end of a program that does not close its client, it is still sent."""
        self._consumer.ack_soon(self._frame, self._index)

    async def extend(self, more: Duration | None = None, *, timeout: Duration | None = None) -> datetime:
        """The lease lasts at least `more` from now (the consumer's lease by default), at most the topic's max_lease.
        Answers its new end. Raises LeaseLost when it has ended already."""
        return await self._consumer.extend_one(self, more, timeout)

    async def release(
        self,
        *,
        in_: Duration | None = None,
        at: When | None = None,
        reason: str = "",
        timeout: Duration | None = None,
    ) -> None:
        """Gives it back, due again at once, `in_` a while from the broker's now, or `at` a time."""
        await self._consumer.release_one(self, in_, at, reason, timeout)

    async def bury(self, reason: str, *, timeout: Duration | None = None) -> None:
        """Makes it a dead letter with a reason (≤ 1 KiB)."""
        await self._consumer.bury_one(self, reason, timeout)


class Deliveries:
    """The columns of a batch of deliveries; see `DeliveryBatch`."""

    def __init__(self, consumer: Consumer, frame: DeliveredFrame, at: Indexes | None, handed_ms: float) -> None:
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
        return await self._consumer.ack_many(self._frame, self.indexes(only), timeout)

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
        return await self._consumer.extend_many(self._frame, self.indexes(only), more, timeout)

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
        return await self._consumer.release_many(self._frame, self.indexes(only), in_, at, reason, timeout)

    async def bury(self, reason: str, only: Only = None, *, timeout: Duration | None = None) -> Receipts:
        """Makes them dead letters."""
        return await self._consumer.bury_many(self._frame, self.indexes(only), reason, timeout)
