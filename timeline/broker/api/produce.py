"""One Produce stream: frames of puts in, frames of answers out. Many are under way at once, each answered when done."""

from __future__ import annotations

import asyncio
import contextlib
import math

from timeline.broker.api.access import ANYBODY, Deed, Principal
from timeline.broker.api.admission import admit_puts, count_answers, forbidden, refused
from timeline.broker.api.streams import ClientStream, first_frame
from timeline.broker.catalog import Catalog, Readiness
from timeline.broker.lanes import Intake
from timeline.broker.late import Traces
from timeline.broker.runtime import Runtime
from timeline.model import MAX_PAYLOAD_BYTES, Answers, LeavingReason, Operation, Status, Topic
from timeline.storage_plugins.contract import StoreError
from timeline.wire import (
    Leaving,
    Produce,
    Produced,
    TransportError,
    UnknownFrame,
    decode_as,
    encode,
    validate_produce,
)
from timeline.wording import no_such_topic


class ProduceStream:
    """Serves one stream until either side ends it.

    It reads on only while fewer than `requests_per_stream` frames and `stream_bytes` are under way. So a flood waits in
    its own socket.
    """

    def __init__(self, client: ClientStream, runtime: Runtime, puts: PutHandler) -> None:
        self._stream, self._peer, self._caller = client.stream, client.peer, client.caller
        self._clock, self._limits = runtime.clock, runtime.limits
        self._tasks, self._scheduler, self._puts = runtime.tasks, runtime.scheduler, puts
        self._room = asyncio.Semaphore(runtime.limits.requests_per_stream)
        self._bytes = 0
        self._freed = asyncio.Event()
        self._sending = asyncio.Lock()
        self._under_way: set[asyncio.Task[None]] = set()
        self._writing: asyncio.Task[None] | None = None
        self._leaving = False
        self.sending_since_ms: float | None = None

    def abort(self) -> None:
        """End it at once."""
        self._stream.cancel()

    async def serve(self) -> None:
        """Run the stream."""
        data = await first_frame(self._stream, self._limits.hello_ms)
        try:
            while data is not None:
                await self._take(data)
                del data
                data = await self._stream.receive()
            if self._under_way:
                done, _ = await asyncio.wait(self._under_way)  # none of which is cancelled with this task
                for task in done:
                    task.result()
        finally:
            for task in self._under_way:
                if task is not self._writing:  # a write must not be cut off: see `wire.Stream.send`
                    task.cancel()

    async def _take(self, data: bytes) -> None:
        await self._scheduler.take(self._peer, len(data))
        try:
            with self._scheduler.work(self._peer):
                frame = decode_as(data, Produce)
        except UnknownFrame:
            return  # of a newer minor: not for us
        size = len(data)
        del data  # what waits for room is kept once
        while self._bytes and self._bytes + size > self._limits.stream_bytes:
            self._freed.clear()
            await self._freed.wait()
        await self._room.acquire()
        self._bytes += size
        task = self._tasks.spawn(self._answer(frame, size), "answering a put")
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _answer(self, frame: Produce, size: int) -> None:
        try:
            answers, request = await self._puts.put(frame, self._peer, self._caller), frame.request
            del frame  # its payloads must not wait for a producer who does not read
            waits = (answers.status == Status.THROTTLED.code) | (answers.status == Status.UNAVAILABLE.code)
            await self._send(Produced(request, answers, self._limits.throttle_ms if waits.any() else 0))
        finally:
            self._room.release()
            self._bytes -= size
            self._freed.set()

    async def leave(self, text: str, reason: LeavingReason = LeavingReason.DRAINING) -> None:
        """Send the producer to another broker. Puts under way are still answered."""
        if not self._leaving:
            self._leaving = True
            await self._send(Leaving(reason, text))

    async def _send(self, frame: Produced | Leaving) -> None:
        async with self._sending:
            self.sending_since_ms = self._clock.monotonic_ms()
            self._writing = asyncio.current_task()
            with contextlib.suppress(TransportError):  # the stream is over: its reader sees that too, and ends
                await self._stream.send(encode(frame))
            self.sending_since_ms = self._writing = None


class PutHandler:
    """Puts of one broker, frame by frame."""

    def __init__(
        self, runtime: Runtime, catalog: Catalog, readiness: Readiness, intake: Intake, traces: Traces
    ) -> None:
        self._clock, self._metrics, self._scheduler = runtime.clock, runtime.metrics, runtime.scheduler
        self._throttle_ms = runtime.limits.throttle_ms
        self._catalog, self._readiness, self._intake, self._traces = catalog, readiness, intake, traces

    async def call(self, frame: Produce, peer: str, caller: Principal) -> Produced:
        """Put a frame's messages, and return the frame that answers it. See `put`."""
        answers = await self.put(frame, peer, caller)
        waits = (answers.status == Status.THROTTLED.code) | (answers.status == Status.UNAVAILABLE.code)
        return Produced(frame.request, answers, self._throttle_ms if waits.any() else 0)

    async def put(self, frame: Produce, peer: str, caller: Principal = ANYBODY) -> Answers:
        """Put a frame's messages, which came from `peer`, as `caller`. Return a definite answer for each."""
        count, clock = len(frame.birth), self._clock
        started_ms = clock.monotonic_ms()
        why = caller.refusal(Deed.PUT, frame.topic, frame.group)
        if why:
            denied = forbidden(count, validate_produce(frame, MAX_PAYLOAD_BYTES), why)
            count_answers(self._metrics, Operation.PUT, denied.status)
            return denied
        if not_ready := self._readiness.not_ready:
            return refused(count, Status.UNAVAILABLE, not_ready)
        try:
            topic = await self._catalog.find(frame.topic)
        except StoreError as trouble:
            return refused(count, Status.UNAVAILABLE, trouble.detail)
        if topic is None:
            return refused(count, Status.NOT_FOUND, no_such_topic(frame.topic))
        with self._scheduler.work(peer):
            refusals, puts = admit_puts(frame, topic, clock.now())
        answers, begin_ms = None, clock.now()
        deadline_ms = started_ms + frame.timeout_ms if frame.timeout_ms else math.inf
        if len(puts):
            answers = await self._intake.put(topic, puts, deadline_ms, peer)
        whole = refusals.merge(answers)
        if Status.NOT_FOUND.code in whole.status.tobytes():
            whole = await self._put_anew(frame, topic, whole, deadline_ms, peer)
        count_answers(self._metrics, Operation.PUT, whole.status)
        if frame.headers is not None:
            self._traces.stored(topic.name, frame.ids, frame.headers, whole, begin_ms, clock.now())
        return whole

    async def _put_anew(self, frame: Produce, topic: Topic, whole: Answers, deadline_ms: float, peer: str) -> Answers:
        """Put a frame into the topic that has the name of `topic` by now, if another broker has dropped it and made it
        again. Return the answers, `whole` if there is none."""
        try:
            await self._catalog.refresh()
        except StoreError as trouble:
            return refused(len(frame.birth), Status.UNAVAILABLE, trouble.detail)
        made = self._catalog.known(topic.name)
        if made is None or made.uid == topic.uid:
            return whole
        with self._scheduler.work(peer):
            refusals, puts = admit_puts(frame, made, self._clock.now())
        return refusals.merge(await self._intake.put(made, puts, deadline_ms, peer) if len(puts) else None)
