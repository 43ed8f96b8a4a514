"""The check of every measurement: each id comes once, with its own payload, never before its due time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

import timeline
from timeline.bench.figures import latencies
from timeline.bench.load import ID_BYTES, batch_at, ids_of
from timeline.bench.processes import CannotMeasure
from timeline.clock import Clock
from timeline.columns import Ragged
from timeline.driver.delivery import DeliveryBatch
from timeline.errors import TimelineError

STALLED_S = 60.0
"""If nothing is put, delivered or settled for this long, what is missing is lost."""


Put = Callable[[timeline.Batch], Awaitable[object]]


def by(producer: timeline.Producer) -> Put:
    """Return a call that puts a batch with `producer`, and raises if any of it is refused."""

    async def put(batch: timeline.Batch) -> None:
        (await producer.produce_many(batch, timeout="60s")).raise_failed()

    return put


class Arrivals:
    """The ids that came, of `count` that another process puts. `all` is set when each of them came."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.doubled = 0
        self.all = asyncio.Event()
        self._ids: set[str | bytes] = set()

    @property
    def missing(self) -> int:
        return self.count - len(self._ids)

    def add(self, id: str | bytes) -> bool:
        """Note an id. Return whether it came for the first time."""
        if id in self._ids:
            self.doubled += 1
            return False
        self._ids.add(id)
        if len(self._ids) == self.count:
            self.all.set()
        return True


class Ledger:
    """Ids in flight: `total` in all, at most `window` at once, so that putting never runs far ahead of settling.

    `late_ms` has the lateness of what `take` got.
    """

    def __init__(self, total: int, window: int) -> None:
        self.total, self.window = total, window
        self.put = self.delivered = self.settled = 0
        self.wrong: list[str] = []
        self.late_ms: list[npt.NDArray[np.float64]] = []
        self._acking: set[asyncio.Task[None]] = set()
        self.finished = asyncio.Event()
        self._waiting: set[bytes] = set()
        self._room = asyncio.Event()
        self._clock = Clock()

    async def admit(self, ids: list[bytes]) -> None:
        """Note ids that are put next. Wait while too many are in flight."""
        while self.put + len(ids) - self.settled > max(self.window, len(ids)):
            self._room.clear()
            await self._room.wait()
        self.put += len(ids)
        self._waiting.update(ids)

    def met(self, ids: list[bytes]) -> None:
        """Note ids that were handed to the consumer's code."""
        before = len(self._waiting)
        self._waiting.difference_update(ids)
        if before - len(self._waiting) != len(ids):
            self.wrong.append(f"{len(ids) - before + len(self._waiting)} deliveries were doubled or never put")
        self.delivered += len(ids)

    def met_with(self, ids: Ragged, payloads: Ragged) -> None:
        """Note ids likewise, and check each payload."""
        listed = ids.tolist()
        self.met(listed)
        if [payload[:ID_BYTES] for payload in payloads.tolist()] != listed:
            self.wrong.append("a payload was handed out with another message's id")

    def early(self, ahead_ms: float) -> None:
        """Note a delivery that came `ahead_ms` before its due time."""
        self.wrong.append(f"handed out {ahead_ms:.3f} ms before its due")

    def settle(self, count: int, failed: int = 0) -> None:
        """Note answered acks."""
        if failed:
            self.wrong.append(f"{failed} acks were refused")
        self.settled += count
        self._room.set()
        if self.settled >= self.total:
            self.finished.set()

    def unsettled(self, count: int, error: Exception) -> None:
        """Note acks that failed and are not repeated."""
        self.wrong.append(f"acks failed: {error}")
        self.settle(count, count)

    async def put_each(self, sizes: Iterable[int], size_bytes: int, put: Put, at_ms: int = 0) -> None:
        """Call `put` with batches of these sizes, due at `at_ms` or at once. Several tasks may share the sizes."""
        for size in sizes:
            batch = batch_at(size, at_ms or self._clock.now_ms(), size_bytes)
            await self.admit(ids_of(batch))
            await put(batch)

    async def take(self, consumer: timeline.Consumer, now: Callable[[], float]) -> None:
        """Take batches. Acknowledge each without waiting for the answer before the next."""
        async for batch in consumer.batches():
            late_ms = now() - batch.due_ms.astype(np.float64)
            self.late_ms.append(late_ms)
            if late_ms.min() < 0:
                self.early(-float(late_ms.min()))
            self.met_with(batch.ids, batch.payloads)
            task = asyncio.create_task(self.ack(batch))
            self._acking.add(task)
            task.add_done_callback(self._acking.discard)

    async def ack(self, batch: DeliveryBatch) -> None:
        """Acknowledge a batch, and note the answer."""
        try:
            receipts = await batch.ack(timeout="60s")
        except TimelineError as error:
            self.unsettled(len(batch), error)
        else:
            self.settle(len(batch), len(receipts.failed) if receipts.status_codes.any() else 0)

    def lateness(self) -> dict[str, float]:
        """Return percentiles of `late_ms`. Raises CannotMeasure if it is empty."""
        if not self.late_ms:
            raise CannotMeasure("nothing was delivered")
        return latencies(np.concatenate(self.late_ms))

    async def through(self, *work: Awaitable[Any], stalled_s: float = STALLED_S) -> None:
        """Run `work` until all is settled, or nothing more comes for `stalled_s`; then cancel it.

        A stall is noted as wrong. Raises what any of the work raised.
        """
        tasks = [asyncio.ensure_future(one) for one in work]
        finished = asyncio.ensure_future(self._finished(stalled_s))
        waiting: set[asyncio.Future[Any]] = {*tasks, finished}
        try:
            while not finished.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    one.result()
        finally:
            for one in (*tasks, finished):
                one.cancel()
            await asyncio.gather(*tasks, finished, return_exceptions=True)

    async def _finished(self, stalled_s: float) -> None:
        while not self.finished.is_set():
            before = self.put, self.delivered, self.settled
            try:
                await asyncio.wait_for(self.finished.wait(), stalled_s)
            except TimeoutError:
                if before == (self.put, self.delivered, self.settled):
                    self.wrong.append(f"nothing more came for {stalled_s:g} s: {self.settled} of {self.total} settled")
                    return

    def verdict(self) -> list[str]:
        """Return all that was wrong, each kind once."""
        lost = [f"{len(self._waiting)} messages were never delivered"] if self._waiting else []
        return list(dict.fromkeys([*self.wrong, *lost]))


def earliest_ahead_ms(due_ms: Iterable[int] | np.ndarray, handed_ms: float) -> float:
    """Return by how much the earliest of a batch came before its due time; not positive if none did."""
    return float(np.max(np.asarray(due_ms)) - handed_ms)
