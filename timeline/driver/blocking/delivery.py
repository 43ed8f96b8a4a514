"""Deliveries for plain threads: the same words without await."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime
from typing import Any, Protocol, TypeVar, overload

from timeline.driver.delivery import Delivered, Deliveries, Delivery, DeliveryBatch, Only
from timeline.driver.receipts import Receipts
from timeline.driver.times import Duration, When

T = TypeVar("T")


class Run(Protocol):
    """Runs a coroutine in the client's event loop, from another thread, and answers what it answers."""

    def __call__(self, asked: Coroutine[Any, Any, T], /) -> T: ...


class SyncDelivery(Delivered):
    """One message, leased to this consumer; see `Delivery`. For the thread that was handed it."""

    __slots__ = ("_delivery", "_run")

    _delivery: Delivery
    _run: Run

    @classmethod
    def of(cls, delivery: Delivery, run: Run) -> SyncDelivery:
        """`delivery` for another thread than its loop's."""
        made = cls(delivery._consumer, delivery._frame, delivery._index, delivery._handed_ms)
        made._delivery, made._run = delivery, run
        return made

    def ack(self, *, timeout: Duration | None = None) -> None:
        """See Delivery.ack."""
        self._run(self._delivery.ack(timeout=timeout))

    def ack_soon(self) -> None:
        """See Delivery.ack_soon."""
        self._run(_soon(self._delivery.ack_soon))

    def extend(self, more: Duration | None = None, *, timeout: Duration | None = None) -> datetime:
        """See Delivery.extend."""
        return self._run(self._delivery.extend(more, timeout=timeout))

    def release(
        self,
        *,
        in_: Duration | None = None,
        at: When | None = None,
        reason: str = "",
        timeout: Duration | None = None,
    ) -> None:
        """See Delivery.release."""
        self._run(self._delivery.release(in_=in_, at=at, reason=reason, timeout=timeout))

    def bury(self, reason: str, *, timeout: Duration | None = None) -> None:
        """See Delivery.bury."""
        self._run(self._delivery.bury(reason, timeout=timeout))


class SyncDeliveryBatch(Deliveries, Sequence[SyncDelivery]):
    """Deliveries that arrived together; see `DeliveryBatch`."""

    _batch: DeliveryBatch
    _run: Run

    @classmethod
    def of(cls, batch: DeliveryBatch, run: Run) -> SyncDeliveryBatch:
        """`batch` for another thread than its loop's."""
        made = cls(batch._consumer, batch._frame, batch._at, batch._handed_ms)
        made._batch, made._run = batch, run
        return made

    @overload
    def __getitem__(self, index: int) -> SyncDelivery: ...
    @overload
    def __getitem__(self, index: slice) -> SyncDeliveryBatch: ...
    def __getitem__(self, index: int | slice) -> SyncDelivery | SyncDeliveryBatch:
        if isinstance(index, slice):
            return SyncDeliveryBatch.of(self._batch[index], self._run)
        return SyncDelivery.of(self._batch[index], self._run)

    def ack(self, only: Only = None, *, timeout: Duration | None = None) -> Receipts:
        """See DeliveryBatch.ack."""
        return self._run(self._batch.ack(only, timeout=timeout))

    def ack_soon(self, only: Only = None) -> None:
        """See DeliveryBatch.ack_soon."""
        self._run(_soon(lambda: self._batch.ack_soon(only)))

    def extend(
        self,
        more: Duration | None = None,
        only: Only = None,
        *,
        timeout: Duration | None = None,
    ) -> Receipts:
        """See DeliveryBatch.extend."""
        return self._run(self._batch.extend(more, only, timeout=timeout))

    def release(
        self,
        only: Only = None,
        *,
        in_: Duration | None = None,
        at: When | None = None,
        reason: str = "",
        timeout: Duration | None = None,
    ) -> Receipts:
        """See DeliveryBatch.release."""
        return self._run(self._batch.release(only, in_=in_, at=at, reason=reason, timeout=timeout))

    def bury(self, reason: str, only: Only = None, *, timeout: Duration | None = None) -> Receipts:
        """See DeliveryBatch.bury."""
        return self._run(self._batch.bury(reason, only, timeout=timeout))


async def _soon(act: Callable[[], None]) -> None:
    act()
