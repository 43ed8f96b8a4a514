"""The gateway: frames in, frames out, over any transport. Implements `wire.transport.Service`.

It verifies each frame, lets the broker's parts answer it, and turns refusals into a status or a fault of the transport.
One caller's trouble never reaches another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from timeline.broker.api.access import ANYBODY, Principal
from timeline.broker.api.consume import ConsumeStream
from timeline.broker.api.mutate import MutateHandler, PendingCall
from timeline.broker.api.produce import ProduceStream, PutHandler
from timeline.broker.api.pull import PullHandler
from timeline.broker.api.read import ReadHandler
from timeline.broker.api.streams import ClientStream, Streams
from timeline.broker.api.topics import TopicAccess
from timeline.broker.cluster import ClusterHints
from timeline.broker.dispatch.dealer import Dealers
from timeline.broker.fairness import Quota
from timeline.broker.runtime import Runtime
from timeline.broker.schedules.handler import ScheduleHandler
from timeline.broker.status import StatusReporter
from timeline.errors import Invalid
from timeline.storage_plugins.contract import StoreError, StoreUnavailable, StoreUnknown
from timeline.wire import (
    Fault,
    Forecast,
    Hint,
    Late,
    Mutate,
    MutateTag,
    Ping,
    Produce,
    Scan,
    ScheduleCall,
    Settle,
    StatusRequest,
    Stream,
    Take,
    Topics,
    TransportError,
    WireError,
    WireVersionError,
    decode,
    encode,
)

log = logging.getLogger("timeline.broker")
F = TypeVar("F")
FRAMES_OF: dict[str, tuple[type[Any], ...]] = {
    "Put": (Produce,), "Mutate": (Mutate, MutateTag), "Settle": (Settle,), "Forecast": (Forecast,),
    "Topics": (Topics,), "Late": (Late,), "Schedules": (ScheduleCall,),
}  # fmt: skip
"""Unary methods that take their turn, and their frames."""


class Gateway:
    """One broker's side of the wire."""

    def __init__(
        self,
        runtime: Runtime,
        topics: TopicAccess,
        puts: PutHandler,
        pulls: PullHandler,
        mutations: MutateHandler,
        reads: ReadHandler,
        schedules: ScheduleHandler,
        status: StatusReporter,
        dealers: Dealers,
        cluster: ClusterHints,
    ) -> None:
        self._runtime, self._clock, self._metrics = runtime, runtime.clock, runtime.metrics
        self._scheduler = runtime.scheduler
        self._topics, self._puts, self._mutations, self._reads = topics, puts, mutations, reads
        self._pulls, self._schedules = pulls, schedules
        self._status, self._dealers, self._cluster = status, dealers, cluster
        self._under_way: set[asyncio.Task[bytes]] = set()
        self._calls = Quota(runtime.limits.calls_in_flight, runtime.limits.calls_bytes)
        self._scans = Quota(runtime.limits.scans, 0)
        self.streams = Streams(runtime.limits, runtime.metrics)

    async def unary(self, method: str, frame: bytes, caller: Principal = ANYBODY, peer: str = "") -> bytes:
        """Answer one frame by one. `caller` (here and below): who asks, with its rights. `peer`: where from."""
        if method == "Ping":
            return encode(self._status.pong(self._decoded(method, frame, Ping)))
        if method == "Stand":
            about = self._decoded(method, frame, StatusRequest)
            return encode(self._status.answer(about, lambda topic: caller.lists(topic, about.topic)))
        if method != "Late":  # when the store is down, people ask why
            self._topics.check_ready()
        if method == "Hint":
            return encode(self._cluster.hinted(self._decoded(method, frame, Hint)))
        if method == "Take":
            return await self._take(frame, caller, peer)
        if not self._calls.admits(peer, 1, len(frame)):
            self._metrics.count("timeline_throttled_total", "calls")
            raise TransportError(Fault.OVERLOADED, "too many calls at once on this broker: try again later")
        # A call that has begun runs to its end, even if its caller is gone: a move must still reach the dealer, and a
        # created topic its catalog. A call that still waits for its turn has not begun.
        call = PendingCall(self._clock.monotonic_ms())
        task = asyncio.get_running_loop().create_task(self._call(method, frame, caller, peer, call))
        self._under_way.add(task)
        self._calls.add(peer, 1, len(frame))
        task.add_done_callback(partial(self._over, peer, len(frame), call))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            call.gone = True
            if not call.begun:
                task.cancel()
            raise

    async def _take(self, data: bytes, caller: Principal, peer: str) -> bytes:
        """Answer a Take. It counts as a stream while it waits, and ends with its caller."""
        with self.streams.admit(peer), self._faults("Take"):
            await self._scheduler.take(peer, len(data))
            with self._scheduler.work(peer):
                asked = self._decoded("Take", data, Take)
            return await self._pulls.take(asked, caller)

    def _over(self, peer: str, bytes_: int, call: PendingCall, task: asyncio.Task[bytes]) -> None:
        """Note the end of a call. If its caller has gone, only the log can have its error."""
        self._under_way.discard(task)
        self._calls.remove(peer, 1, bytes_)
        failed = None if task.cancelled() else task.exception()
        if call.gone and failed is not None and not isinstance(failed, TransportError):
            log.error("a call whose caller has gone failed", exc_info=failed)

    async def idle(self) -> None:
        """Return when no call is under way."""
        while self._under_way:
            await asyncio.wait(self._under_way)

    async def _call(self, method: str, frame: bytes, caller: Principal, peer: str, call: PendingCall) -> bytes:
        await self._scheduler.take(peer, len(frame))
        call.begun = True
        with self._faults(method), self._scheduler.work(peer, waits=True):
            return await self._answer(method, frame, caller, peer, call)

    async def _answer(self, method: str, data: bytes, caller: Principal, peer: str, call: PendingCall) -> bytes:
        if method not in FRAMES_OF:
            raise TransportError(Fault.REFUSED_FRAME, f"there is no method {method!r}")
        asked: Any = self._decoded(method, data, *FRAMES_OF[method])
        answer: Any
        match asked:
            case Produce():
                answer = await self._puts.call(asked, peer, caller)
            case Settle():
                answer = await self._pulls.settle(asked, caller, peer)
            case Mutate():
                answer = await self._mutations.by_ids(asked, caller, call)
            case MutateTag():
                answer = await self._mutations.by_tag(asked, caller, call)
            case Forecast():
                answer = await self._reads.forecast(asked, caller)
            case Topics():
                answer = await self._topics.answer(asked, caller)
            case Late():
                answer = await self._reads.late(asked, caller)
            case ScheduleCall():
                answer = await self._schedules.answer(asked, caller, call)
        return encode(answer)

    def _decoded(self, method: str, data: bytes, *kinds: type[F]) -> F:
        """Return the frame, verified, if it is of one of `kinds`. A bad frame is this caller's trouble alone."""
        try:
            frame = decode(data)
        except WireError as bad:
            raise self._refusal(method, bad) from bad
        if not isinstance(frame, kinds):
            raise self._refusal(method, WireError(f"{method} does not take a {type(frame).__name__}"))
        return frame

    def _refusal(self, method: str, bad: WireError) -> TransportError:
        self._metrics.count("timeline_frames_refused_total", method)
        fault = Fault.WRONG_VERSION if isinstance(bad, WireVersionError) else Fault.REFUSED_FRAME
        return TransportError(fault, bad.reason)

    async def stream(self, method: str, stream: Stream, peer: str, caller: Principal = ANYBODY) -> None:
        """Serve a two-way stream until either side ends it."""
        self._topics.check_ready()
        if method not in ("Produce", "Consume"):
            raise TransportError(Fault.REFUSED_FRAME, f"there is no stream {method!r}")
        with self.streams.admit(peer):
            served = self._opened(method, ClientStream(stream, peer, caller))
            with self.streams.serving(served), self._faults(method):
                await served.serve()

    def _opened(self, method: str, client: ClientStream) -> ProduceStream | ConsumeStream:
        if method == "Produce":
            return ProduceStream(client, self._runtime, self._puts)
        return ConsumeStream(client, self._runtime, self._topics, self._dealers, self._cluster, self.streams)

    async def unary_stream(
        self, method: str, frame: bytes, caller: Principal = ANYBODY, peer: str = ""
    ) -> AsyncGenerator[bytes, None]:
        """Answer one frame by many: Scan."""
        self._topics.check_ready()
        if method != "Scan":
            raise TransportError(Fault.REFUSED_FRAME, f"there is no method {method!r}")
        if not self._scans.admits(peer, 1, 0):
            self._metrics.count("timeline_throttled_total", "scans")
            raise TransportError(
                Fault.OVERLOADED,
                f"{self._scans.messages} scans run on this broker, all that it may or that leave room for others "
                "(max_scans): try again later",
            )
        self._scans.add(peer, 1, 0)
        try:
            with self._faults(method):
                async for page in self._reads.scan(self._decoded(method, frame, Scan), caller):
                    yield encode(page)
        finally:
            self._scans.remove(peer, 1, 0)

    @contextmanager
    def _faults(self, method: str) -> Iterator[None]:
        """Raise errors of the block as faults of the transport."""
        try:
            yield
        except WireError as bad:
            raise self._refusal(method, bad) from bad
        except Invalid as bad:
            raise TransportError(Fault.REFUSED_FRAME, bad.reason) from bad
        except StoreError as trouble:
            raise TransportError(_fault_of(trouble), trouble.detail) from trouble


def _fault_of(trouble: StoreError) -> Fault:
    """Return the fault of a whole call for trouble of the store."""
    if isinstance(trouble, StoreUnavailable):
        return Fault.NOT_READY
    return Fault.BROKEN if isinstance(trouble, StoreUnknown) else Fault.REFUSED_FRAME
