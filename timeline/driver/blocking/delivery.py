"""Deliveries for plain threads: the same words without await."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar, overload

from timeline.driver.blocking.background import blocking, in_loop
from timeline.driver.delivery import Delivered, Deliveries, Delivery, DeliveryBatch

T = TypeVar("T")


class Run(Protocol):
    """Runs a coroutine in the client's event loop, from another thread, and returns what it returns."""

    def __call__(self, asked: Coroutine[Any, Any, T], /) -> T: ...


class SyncDelivery(Delivered):
    """One message, leased to this consumer; see `Delivery`. For the thread that was handed it."""

    __slots__ = ("_run", "_target")

    _target: Delivery
    _run: Run

    @classmethod
    def of(cls, delivery: Delivery, run: Run) -> SyncDelivery:
        """`delivery` for another thread than its loop's."""
        made = cls(delivery._consumer, delivery._frame, delivery._index, delivery._handed_ms)
        made._target, made._run = delivery, run
        return made

    ack = blocking(Delivery.ack)
    ack_soon = in_loop(Delivery.ack_soon)
    extend = blocking(Delivery.extend)
    release = blocking(Delivery.release)
    bury = blocking(Delivery.bury)


class SyncDeliveryBatch(Deliveries, Sequence[SyncDelivery]):
    """Deliveries that arrived together; see `DeliveryBatch`."""

    _target: DeliveryBatch
    _run: Run

    @classmethod
    def of(cls, batch: DeliveryBatch, run: Run) -> SyncDeliveryBatch:
        """`batch` for another thread than its loop's."""
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
