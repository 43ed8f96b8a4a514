"""Who is still to come: every id put is handed out exactly once, with its own payload, never before its due."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

import timeline
from timeline.bench.figures import latencies
from timeline.bench.load import ID_BYTES, ids_of
from timeline.bench.processes import CannotMeasure
from timeline.columns import Ragged
from timeline.driver.delivery import DeliveryBatch
from timeline.errors import TimelineError

STALLED_S = 60.0
"""When nothing has been put, delivered or settled for so long, nothing more comes: what is missing is lost."""


class Ledger:
    """Ids on their way. At most `window` of them, so that putting never runs far ahead of settling; `total` in all.
    `late_ms`: how late what `take` got was handed out."""

    def __init__(self, total: int, window: int) -> None:
        self.total, self.window = total, window
        self.put = self.delivered = self.settled = 0
        self.wrong: list[str] = []
        self.late_ms: list[npt.NDArray[np.float64]] = []
        self._acking: set[asyncio.Task[None]] = set()
        self.finished = asyncio.Event()
        self._waiting: set[bytes] = set()
        self._room = asyncio.Event()

    async def admit(self, ids: list[bytes]) -> None:
        """Notes ids that are about to be put; waits while too many are on their way."""
        while self.put + len(ids) - self.settled > max(self.window, len(ids)):
            self._room.clear()
            await self._room.wait()
        self.put += len(ids)
        self._waiting.update(ids)

    def met(self, ids: list[bytes]) -> None:
        """These were handed to the consumer's code."""
        before = len(self._waiting)
        self._waiting.difference_update(ids)
        if before - len(self._waiting) != len(ids):
            self.wrong.append(f"{len(ids) - before + len(self._waiting)} deliveries were doubled or never put")
        self.delivered += len(ids)

    def met_with(self, ids: Ragged, payloads: Ragged) -> None:
        """The same; also looks at each payload, cut out for the consumer."""
        listed = ids.tolist()
        self.met(listed)
        carried = [payload[:ID_BYTES] for payload in payloads.tolist()]
        if carried != listed:
            self.wrong.append("a payload was handed out with another message's id")

    def early(self, ahead_ms: float) -> None:
        """Something was handed out so long before its due."""
        self.wrong.append(f"handed out {ahead_ms:.3f} ms before its due")

    def settle(self, count: int, failed: int = 0) -> None:
        """The broker has answered so many acks."""
        if failed:
            self.wrong.append(f"{failed} acks were refused")
        self.settled += count
        self._room.set()
        if self.settled >= self.total:
            self.finished.set()

    def unsettled(self, count: int, error: Exception) -> None:
        """So many acks have failed: nothing more comes of them."""
        self.wrong.append(f"acks failed: {error}")
        self.settle(count, count)

    async def put_batch(self, producer: timeline.Producer, batch: timeline.Batch, given: Any = None) -> None:
        """Note a batch, and put it (`given`: in another form)."""
        await self.admit(ids_of(batch))
        (await producer.produce_many(batch if given is None else given, timeout="60s")).raise_failed()

    async def take(self, consumer: timeline.Consumer, now: Callable[[], float]) -> None:
        """Take batches and acknowledge each without waiting for the answer before the next."""
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

    def lateness(self, name: str = "lateness") -> dict[str, float]:
        """Return percentiles of how late what `take` got was. Raises CannotMeasure where that is nothing."""
        if not self.late_ms:
            raise CannotMeasure("nothing was delivered")
        return latencies(np.concatenate(self.late_ms), name)

    async def through(self, *work: Awaitable[Any], stalled_s: float = STALLED_S) -> None:
        """Lets `work` go on until all is settled, or nothing more comes for `stalled_s`, which is noted as wrong; ends
        what is still under way. Raises what any of it raised."""
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
        """What was wrong, at the end."""
        lost = [f"{len(self._waiting)} messages were never delivered"] if self._waiting else []
        return list(dict.fromkeys([*self.wrong, *lost]))


def earliest_ahead_ms(due_ms: Iterable[int] | np.ndarray, handed_ms: float) -> float:
    """By how much the earliest of a batch came before its due; not positive when none did."""
    return float(np.max(np.asarray(due_ms)) - handed_ms)
