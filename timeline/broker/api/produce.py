"""One Produce stream: frames of puts in, frames of answers out, many under way at once, answered as they finish."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import TYPE_CHECKING

from timeline.broker.api.access import ANYBODY, Deed, Principal
from timeline.broker.api.admission import admit_puts, forbidden, refused
from timeline.broker.api.streams import first_frame
from timeline.model import MAX_PAYLOAD_BYTES, Answers, LeavingReason, Operation, Status
from timeline.storage_plugins.contract import StoreError
from timeline.wire import (
    Leaving,
    Produce,
    Produced,
    Stream,
    TransportError,
    UnknownFrame,
    decode_as,
    encode,
    validate_produce,
)
from timeline.wording import no_such_topic

if TYPE_CHECKING:
    from timeline.broker.node import Node


class ProduceStream:
    """Serves one stream until either side ends it. Reads on only while fewer than `requests_per_stream` of fewer
    than `stream_bytes` are under way, so that a flood waits in its own socket."""

    def __init__(self, node: Node, stream: Stream, peer: str, caller: Principal = ANYBODY) -> None:
        self._node, self._stream, self._peer, self._caller = node, stream, peer, caller
        self._room = asyncio.Semaphore(node.limits.requests_per_stream)
        self._bytes = 0
        self._freed = asyncio.Event()
        self._sending = asyncio.Lock()
        self._under_way: set[asyncio.Task[None]] = set()
        self._leaving = False
        self.sending_since_ms: float | None = None

    def abort(self) -> None:
        """Ends it at once."""
        self._stream.cancel()

    async def serve(self) -> None:
        """Runs the stream."""
        data = await first_frame(self._stream, self._node.limits.hello_ms)
        try:
            while data is not None:
                await self._take(data)
                del data
                data = await self._stream.receive()
            await asyncio.gather(*self._under_way)
        finally:
            for task in self._under_way:
                task.cancel()

    async def _take(self, data: bytes) -> None:
        turns = self._node.turns
        await turns.take(self._peer, len(data))
        try:
            with turns.work(self._peer):
                frame = decode_as(data, Produce)
        except UnknownFrame:
            return  # of a newer minor: not for us
        size = len(data)
        del data  # what waits for room is kept once
        while self._bytes and self._bytes + size > self._node.limits.stream_bytes:
            self._freed.clear()
            await self._freed.wait()
        await self._room.acquire()
        self._bytes += size
        task = self._node.tasks.spawn(self._answer(frame, size), "answering a put")
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _answer(self, frame: Produce, size: int) -> None:
        try:
            answers, request = await put(self._node, frame, self._peer, self._caller), frame.request
            del frame  # its payloads must not wait for a producer who does not read
            wait_ms = self._node.limits.throttle_ms if _asks_to_wait(answers) else 0
            await self._send(Produced(request, answers, wait_ms))
        finally:
            self._room.release()
            self._bytes -= size
            self._freed.set()

    async def leave(self, text: str, reason: LeavingReason = LeavingReason.DRAINING) -> None:
        """Tells the producer to go elsewhere; what is under way is still answered."""
        if not self._leaving:
            self._leaving = True
            await self._send(Leaving(reason, text))

    async def _send(self, frame: Produced | Leaving) -> None:
        async with self._sending:
            self.sending_since_ms = self._node.clock.monotonic_ms()
            with contextlib.suppress(TransportError):  # the stream is over: its reader sees that too, and ends
                await self._stream.send(encode(frame))
            self.sending_since_ms = None


def _asks_to_wait(answers: Answers) -> bool:
    return bool(((answers.status == Status.THROTTLED.code) | (answers.status == Status.UNAVAILABLE.code)).any())


async def put(node: Node, frame: Produce, peer: str, caller: Principal = ANYBODY) -> Answers:
    """Puts a frame's messages, which came from `peer`, as `caller`; a definite answer each."""
    count = len(frame.birth)
    started_ms = node.clock.monotonic_ms()
    why = caller.refusal(Deed.PUT, frame.topic, frame.group)
    if why:
        denied = forbidden(count, validate_produce(frame, MAX_PAYLOAD_BYTES), why)
        node.count(Operation.PUT, denied.status)
        return denied
    if node.not_ready:
        return refused(count, Status.UNAVAILABLE, node.not_ready)
    try:
        topic = await node.topic(frame.topic)
    except StoreError as trouble:
        return refused(count, Status.UNAVAILABLE, str(trouble))
    if topic is None:
        return refused(count, Status.NOT_FOUND, no_such_topic(frame.topic))
    with node.turns.work(peer):
        refusals, puts = admit_puts(frame, topic, node.clock.now())
    answers, begin_ms = None, node.clock.now()
    if len(puts):
        deadline_ms = started_ms + frame.timeout_ms if frame.timeout_ms else math.inf
        answers = await node.intake.put(topic, puts, deadline_ms, peer)
    whole = refusals.merge(answers)
    node.count(Operation.PUT, whole.status)
    node.traces.stored(topic.name, frame.ids, frame.headers, whole, begin_ms, node.clock.now())
    return whole
