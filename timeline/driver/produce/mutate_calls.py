"""Mutate calls: what one operation asks of messages that are there, a few calls at once, each repeated until it is
answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from timeline.columns import Ragged
from timeline.driver.produce.request_batch import Columns, RequestBatch
from timeline.driver.produce.request_queue import RequestQueue, refusal_of
from timeline.driver.tasks import cancel, end, keep
from timeline.driver.transport.channel import Deadline
from timeline.driver.transport.client_context import ClientContext
from timeline.errors import Forbidden, Invalid, NotFound, TimelineError
from timeline.model import Operation, Status
from timeline.wire import Mutate, Mutated, decode_as, encode

log = logging.getLogger("timeline.driver")

CALLS_OUTSTANDING = 4
ID_OVERHEAD_BYTES = 48
SPARE_MS = 50.0


class MutateCalls:
    """The queue of one operation of a producer: batches go as Mutate calls."""

    def __init__(self, context: ClientContext, topic: str, group: str, operation: Operation) -> None:
        self._context, self._topic, self._group, self._operation = context, topic, group, operation
        self.queue = RequestQueue(self._build, context.clock, context.random, context.trouble)
        self._runner: asyncio.Task[None] | None = None
        self._under_way: set[asyncio.Task[None]] = set()

    def _build(self, entries: Sequence[Any]) -> tuple[Columns, Operation, int]:
        count = len(entries)
        ids, times, flags, versions, ops = zip(*entries, strict=True)
        columns: Columns = {
            "ids": Ragged.of(list(ids)),
            "time_ms": np.fromiter(times, np.int64, count),
            "flags": np.fromiter(flags, np.uint8, count),
            "if_version": np.fromiter(versions, np.int64, count),
            "op": np.fromiter(ops, np.uint64, count),
        }
        return columns, self._operation, columns["ids"].nbytes + ID_OVERHEAD_BYTES * count

    def start(self) -> None:
        """Runs the queue from now on, in a task of its own, which nothing ends but `stop` and `cancel`."""
        if self._runner is None:
            self._runner = keep(self._run(), f"mutating {self._topic}")

    async def _run(self) -> None:
        try:
            await self._carry()
        except Exception as error:  # a mistake of ours: whoever calls must not wait for ever
            log.exception("the changes of %s failed", self._topic)
            self._runner = None
            self.queue.broke()
            self.queue.refuse_all(Status.UNAVAILABLE, f"the producer failed: {error!r}")

    async def _carry(self) -> None:
        queue = self.queue
        while True:
            await queue.work.wait()
            queue.work.clear()
            while len(self._under_way) < CALLS_OUTSTANDING and (taken := queue.next()) is not None:
                request, batch = taken
                batch.outstanding = False  # until it is sent, which the channel says
                task = asyncio.get_running_loop().create_task(self._call(request, batch))
                self._under_way.add(task)
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self.queue.work.set()

    async def _call(self, request: int, batch: RequestBatch) -> None:
        queue = self.queue
        try:
            data = await self._asked(batch)
        except (Invalid, NotFound, Forbidden) as bad:
            queue.refused(request, refusal_of(len(batch), Status(bad.code), bad.reason))
            return
        except TimelineError as trouble:
            batch.verdict_detail = trouble.reason
            queue.back(request, sent=False)
            return
        except Exception as error:  # a mistake of ours: whoever calls must not wait for it until the deadline
            log.exception("a change of %s failed", self._topic)
            batch.unsure = batch.unsure or batch.outstanding
            queue.refused(request, refusal_of(len(batch), Status.UNAVAILABLE, f"the producer failed: {error!r}"))
            return
        try:
            mutated = decode_as(data, Mutated)
            queue.answer(request, mutated.answers, mutated.retry_after_ms)
        except Invalid as bad:
            log.error("a broker sent what cannot be read: %s", bad.reason)
            batch.unsure = True  # it was asked, and what came of it is not known
            queue.back(request, sent=False)

    async def _asked(self, batch: RequestBatch) -> bytes:
        context = self._context
        # A little before the callers give up, so that they learn whether it was ever sent.
        spare_ms = min(SPARE_MS, (batch.sink.deadline_ms - context.clock.monotonic_ms()) / 4)
        deadline = Deadline(context.clock, batch.sink.deadline_ms - spare_ms)

        def frame(timeout_ms: int) -> bytes:
            asked = self._topic, self._group, self._operation
            return encode(Mutate(*asked, timeout_ms=timeout_ms, **batch.columns))

        return await context.channel.unary("Mutate", frame, deadline, batch, writes=True)

    def cancel(self) -> None:
        """Nobody can ask anything of it any more: it ends by itself."""
        cancel(self._runner, *self._under_way)

    async def stop(self) -> None:
        """Ends at once; who still waits is told what is known."""
        tasks = [*self._under_way, *([self._runner] if self._runner is not None else [])]
        self._runner = None
        await end(*tasks)
        self.queue.drop()
