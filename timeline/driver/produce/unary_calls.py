"""A queue whose batches go as single calls, several at once."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod

from timeline.driver.produce.request_queue import QueueRunner, RequestBatch, RequestQueue
from timeline.driver.receipts import UNAVAILABLE, MessageAnswer
from timeline.driver.transport.channel import Deadline
from timeline.driver.transport.client_context import ClientContext
from timeline.errors import Forbidden, Invalid, NotFound, TimelineError
from timeline.model import Answers, Status

log = logging.getLogger("timeline.driver")

CALLS_OUTSTANDING = 4
SPARE_MS = 50.0


class UnaryCalls(QueueRunner):
    """Sends each batch of a queue as a call of `method`, to whatever broker is there."""

    method: str

    def __init__(self, context: ClientContext, queue: RequestQueue, name: str, about: str) -> None:
        super().__init__(queue, name, about)
        self._context = context

    @abstractmethod
    def frame(self, batch: RequestBatch, timeout_ms: int) -> bytes:
        """Return the frame of a call. `timeout_ms`: how long it may take."""

    @abstractmethod
    def answers(self, data: bytes) -> tuple[Answers, int]:
        """Return the answers in a frame, and how long the broker asks to wait, in ms. Raise Invalid."""

    async def carry(self) -> None:
        queue = self.queue
        while True:
            await queue.work.wait()
            queue.work.clear()
            while len(self._under_way) < CALLS_OUTSTANDING and (taken := queue.next()) is not None:
                request, batch = taken
                batch.outstanding = False  # the channel says when it is sent
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
            queue.refused(request, Status(bad.code), bad.reason)
            return
        except TimelineError as trouble:
            batch.verdict = MessageAnswer(UNAVAILABLE, detail=trouble.reason, trouble=trouble)
            queue.back(request, sent=False)
            return
        except Exception as error:  # a mistake of ours: callers must not wait until the deadline
            log.exception("%s failed", self._about)
            batch.unsure = batch.unsure or batch.outstanding
            queue.refused(request, Status.UNAVAILABLE, f"the call failed: {error!r}")
            return
        try:
            queue.answer(request, *self.answers(data))
        except Invalid as bad:
            log.error("a broker sent what cannot be read: %s", bad.reason)
            batch.unsure = True  # the broker may have done it
            queue.back(request, sent=False)

    async def _asked(self, batch: RequestBatch) -> bytes:
        context = self._context
        # End a little before the callers give up, so that they learn whether it was sent.
        spare_ms = min(SPARE_MS, (batch.sink.deadline_ms - context.clock.monotonic_ms()) / 4)
        deadline = Deadline(context.clock, batch.sink.deadline_ms - spare_ms)

        def frame(timeout_ms: int) -> bytes:
            batch.sent_ms = context.clock.monotonic_ms()
            return self.frame(batch, timeout_ms)

        return await context.channel.unary(self.method, frame, deadline, batch, writes=True)
