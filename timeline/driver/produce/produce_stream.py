"""The Produce stream. It is open while there is something to put, and pipelines frames by request number. When it
breaks, the next stream carries the outstanding frames again."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import numpy as np

from timeline.columns import Bools, Int64
from timeline.driver.produce.request_queue import (
    Columns,
    QueueRunner,
    RequestBatch,
    RequestQueue,
    calls_of,
    wait_until_set,
)
from timeline.driver.tasks import PARTING_S, end
from timeline.driver.transport.channel import (
    DENIALS,
    NOTHING_HAPPENED,
    ClientContext,
    Deadline,
    OpenedStream,
    send_within,
)
from timeline.errors import Closed, Forbidden, Invalid, TimelineError
from timeline.model import Answers, Operation, Status
from timeline.wire import Fault, Leaving, Ping, Produce, Produced, PutFlag, TransportError, UnknownFrame, decode, encode
from timeline.wire.frames import REPLACE_MINOR
from timeline.wire.verify import minor_of

log = logging.getLogger("timeline.driver")

FRAMES_OUTSTANDING = 16
BYTES_OUTSTANDING = 16 * 1024 * 1024
SINGLES_OUTSTANDING = 4
WORTH_A_FRAME = 16
GATHER_MS = 5.0
"""Single calls gather while a frame waits for its answer, up to GATHER_MS or WORTH_A_FRAME calls. Then they go as well,
while fewer than SINGLES_OUTSTANDING frames wait."""
OVERHEAD_BYTES = 48
CAREFUL_FRAMES = 16
SILENT = "no answer in time"


PUT_COLUMNS = tuple(field for field in Produce.columns if field.kind != "whole")


def put_sizes(columns: Columns) -> Int64:
    """Return about how many bytes each message takes in a frame."""
    sizes = columns["payloads"].sizes + OVERHEAD_BYTES
    for field in PUT_COLUMNS:
        if field.kind == "strings" and field.name != "payloads" and columns[field.name] is not None:
            sizes = sizes + columns[field.name].sizes
    whole: Int64 = sizes
    return whole


@dataclass(slots=True)
class _Conversation:
    """The state of one stream. `minor`: the wire's minor version at the broker; -1: not asked for yet."""

    over: bool = False
    leaving: bool = False
    minor: int = -1
    fault: TransportError | None = None


class ProduceStream(QueueRunner):
    """The queue of one producer's puts, and the stream that carries it."""

    def __init__(self, context: ClientContext, topic: str, group: str) -> None:
        self._context, self._topic, self._group = context, topic, group
        queue = RequestQueue(calls_of(Produce, Operation.PUT), context.clock, context.random, context.trouble)
        super().__init__(queue, f"producing {topic}", f"the producer of {topic}")
        self._careful = 0

    async def carry(self) -> None:
        channel = self._context.channel
        while True:
            await self.queue.work.wait()
            if not self.queue.waiting:
                self.queue.work.clear()
                self.queue.next()
                continue
            try:
                opened = await channel.open("Produce", Deadline.after(self._context.clock, self._context.timeout_ms))
            except (Invalid, Forbidden, Closed) as stays:
                status = Status.UNAVAILABLE if isinstance(stays, Closed) else Status(stays.code)
                self.queue.refuse_all(status, stays.reason)
                continue
            except TimelineError:
                self.queue.forget_unwanted()
                continue  # each call has its own deadline, and goes again until then
            conversation = await self._converse(opened)
            self._conclude(opened.address, conversation)

    async def _converse(self, opened: OpenedStream) -> _Conversation:
        state = _Conversation()
        reader = asyncio.get_running_loop().create_task(self._read(opened, state))
        try:
            while not state.over:
                self.queue.work.clear()
                await self._send_all(opened, state)
                if state.leaving and not self.queue.outstanding:
                    break
                if not state.over and not self.queue.work.is_set():
                    await self._wait(state)
        except TransportError as fault:
            state.fault = state.fault or fault
        finally:
            try:
                if not state.over and not self.queue.outstanding:
                    await self._part(opened, reader)
            except (asyncio.CancelledError, Exception):
                await self._cut_off(opened, reader)
                raise
            await self._cut_off(opened, reader)
        return state

    @staticmethod
    async def _cut_off(opened: OpenedStream, reader: asyncio.Task[None]) -> None:
        opened.stream.cancel()
        await end(reader)

    async def _part(self, opened: OpenedStream, reader: asyncio.Task[None]) -> None:
        """Say that no more comes, and give the broker a moment to end the stream."""
        await opened.stream.close()
        await asyncio.wait({reader}, timeout=PARTING_S)

    async def _send_all(self, opened: OpenedStream, state: _Conversation) -> None:
        queue = self.queue
        frames = 1 if self._careful else FRAMES_OUTSTANDING
        while (
            not state.over
            and not state.leaving
            and len(queue.outstanding) < frames
            and queue.outstanding_bytes < BYTES_OUTSTANDING
        ):
            # Frames and commits cost a durable broker, not messages. So single calls go one by one only where they come
            # slower than answers, or not much faster.
            waits = len(queue.outstanding)
            form = waits < SINGLES_OUTSTANDING
            if waits > 0 and form and len(queue.forming) < WORTH_A_FRAME:
                newest_ms = next(reversed(queue.outstanding.values())).sent_ms
                form = newest_ms + GATHER_MS <= self._context.clock.monotonic_ms()
            taken = queue.next(form)
            if taken is None:
                return
            request, batch = taken
            replaces = (batch.columns["flags"] & PutFlag.REPLACE) != 0
            if replaces.any():
                if state.minor < 0:
                    await self._ask_minor(opened, state, request, batch)
                    if batch.outdated:  # a caller gave up, and was told that nothing was sent
                        queue.back(request, sent=False)
                        continue
                if state.minor < REPLACE_MINOR:
                    queue.answer(request, _too_old(batch, replaces))
                    continue
            try:
                data = encode(self._frame(request, batch))
            except Invalid as bad:
                queue.refused(request, Status.INVALID, bad.reason)
                continue
            await send_within(opened.stream, data, self._left_ms, SILENT)

    async def _ask_minor(self, opened: OpenedStream, state: _Conversation, request: int, batch: RequestBatch) -> None:
        """Ask whether the broker knows REPLACE. An older one would ignore it and do a plain put. `batch` waits for the
        answer: nothing of it can have happened before."""
        batch.outstanding = False
        ping = encode(Ping(self._context.clock.now()))
        transport = self._context.channel.transport(opened.address)
        try:
            state.minor = minor_of(await transport.unary("Ping", ping, self._patience_ms / 1000.0))
        except TransportError:
            self.queue.back(request, sent=False)
            raise
        batch.outstanding = True

    def _frame(self, request: int, batch: RequestBatch) -> Produce:
        # A broker that is given up must not do later what another one has done meanwhile.
        left_ms = min(batch.sink.deadline_ms - self._context.clock.monotonic_ms(), self._patience_ms)
        return Produce(
            request=request, topic=self._topic, group=self._group, timeout_ms=max(1, int(left_ms)), **batch.columns
        )

    @property
    def _patience_ms(self) -> float:
        """How long a broker may take to answer. Time is left for another broker, if there is one."""
        return self._context.timeout_ms / (2 if self._context.channel.several else 1)

    def _left_ms(self) -> float:
        """How long the broker may still take to answer the oldest outstanding frame."""
        oldest = next(iter(self.queue.outstanding.values()), None)
        sent_ms = self._context.clock.monotonic_ms() if oldest is None else oldest.sent_ms
        return sent_ms + self._patience_ms - self._context.clock.monotonic_ms()

    async def _wait(self, state: _Conversation) -> None:
        """Wait until there is something to do. Give up a broker that leaves a frame unanswered for too long."""
        if not self.queue.outstanding:
            await self.queue.work.wait()
            return
        left_ms = self._left_ms()
        if left_ms <= 0:
            state.fault = TransportError(Fault.DEADLINE, SILENT)
            state.over = True
            return
        if self.queue.forming and len(self.queue.outstanding) < SINGLES_OUTSTANDING:
            left_ms = min(left_ms, GATHER_MS)
        await wait_until_set(self.queue.work, left_ms)

    async def _read(self, opened: OpenedStream, state: _Conversation) -> None:
        try:
            while (data := await opened.stream.receive()) is not None:
                try:
                    frame = decode(data)
                except UnknownFrame:
                    continue  # of a newer minor version
                if isinstance(frame, Produced):
                    self.queue.answer(frame.request, frame.answers, frame.retry_after_ms)
                    self._context.channel.worked(opened.address)
                    self._careful = max(0, self._careful - 1)
                elif isinstance(frame, Leaving):
                    state.leaving = True
                    self._context.channel.leaving(opened.address)
                self.queue.work.set()
        except TransportError as fault:
            state.fault = fault
        except Invalid as bad:
            state.fault = TransportError(Fault.BROKEN, f"the broker sent what cannot be read: {bad.reason}")
        finally:
            state.over = True
            self.queue.work.set()

    def _conclude(self, address: str, state: _Conversation) -> None:
        """Decide what becomes of the outstanding frames when the stream is over."""
        fault = state.fault
        if not state.leaving and (fault is not None or self.queue.outstanding):
            self._context.channel.failed(address, fault or TransportError(Fault.BROKEN, "it ended the stream"))
        if fault is None:
            self.queue.broke()
        elif fault.fault is Fault.WRONG_VERSION:
            self.queue.refuse_all(Status.INVALID, fault.reason)
        elif fault.fault in DENIALS:
            self.queue.refuse_all(Status.FORBIDDEN, fault.reason)
        elif fault.fault is Fault.REFUSED_FRAME and len(self.queue.outstanding) == 1:
            self.queue.refuse_outstanding(Status.INVALID, fault.reason)
        else:
            if fault.fault is Fault.REFUSED_FRAME:
                self._careful = CAREFUL_FRAMES  # one at a time, to learn which one is refused
            log.info("producing %s: the stream to %s ended: %s", self._topic, address, fault.reason)
            self.queue.broke(sent=fault.fault not in NOTHING_HAPPENED)


def _too_old(batch: RequestBatch, replaces: Bools) -> Answers:
    """Return the answers that a broker without REPLACE should give. The other messages go again without those."""
    answers = Answers.blank(len(batch), Status.UNAVAILABLE)
    # A newer broker may have done an earlier attempt. Then only another newer broker can tell.
    answers.status[replaces] = (Status.UNKNOWN if batch.unsure else Status.INVALID).code
    why = 'this broker is too old for if_exists="replace". Upgrade it to this driver\'s version'
    answers.details = dict.fromkeys(np.flatnonzero(replaces).tolist(), why)
    return answers
