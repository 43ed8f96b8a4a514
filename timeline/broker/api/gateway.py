"""The gateway: frames in, frames out, whatever carries them. Implements `wire.transport.Service`.

It verifies what arrives, finds the topic, asks the node's parts, and turns refusals into a definite answer or one of
the transport's faults; it never lets one caller's trouble reach another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from timeline.broker.api.access import ANYBODY, Deed, Principal
from timeline.broker.api.consume import ConsumeStream
from timeline.broker.api.mutate import Mutating, PendingCall
from timeline.broker.api.produce import ProduceStream
from timeline.broker.api.scan import pages
from timeline.broker.api.streams import Streams
from timeline.broker.fairness.fair_queue import Quota
from timeline.broker.status.broker_status import standing
from timeline.broker.status.late import LateOne, late_list
from timeline.columns import Ragged
from timeline.errors import Invalid
from timeline.model import State, Status, Topic
from timeline.storage_plugins.contract import (
    ScanFilter,
    StoreError,
    StoreUnavailable,
    StoreUnknown,
    TopicConflict,
)
from timeline.wire import (
    Fault,
    Forecast,
    Forecasted,
    Hint,
    Late,
    LateList,
    Mutate,
    MutateTag,
    Ping,
    Pong,
    Scan,
    StatusRequest,
    Stream,
    TopicAction,
    TopicList,
    Topics,
    TransportError,
    WireError,
    WireVersionError,
    decode,
    encode,
)
from timeline.wording import no_such_topic

if TYPE_CHECKING:
    from timeline.broker.node import Node

log = logging.getLogger("timeline.broker")
MAX_STEPS = 10_000
F = TypeVar("F")


class Gateway:
    """One broker's side of the wire."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._under_way: set[asyncio.Task[bytes]] = set()
        self._calls = Quota(node.limits.calls_in_flight, node.limits.calls_bytes)
        self._scans = Quota(node.limits.scans, 0)
        self.streams = Streams(node.limits, node.metrics)
        self._mutating = Mutating(node)

    async def unary(self, method: str, frame: bytes, caller: Principal = ANYBODY, peer: str = "") -> bytes:
        """One frame for one. `caller` (here and below): who asks, and what he may do. `peer`: whence."""
        if method == "Ping":
            return encode(self._ping(self._decoded(method, frame, Ping)))
        if method == "Stand":
            return encode(standing(self._node, self._decoded(method, frame, StatusRequest), caller.sees))
        if method != "Late":  # when the store is down, people ask why
            self._check_ready()
        if method == "Hint":
            return encode(self._node.cluster.hinted(self._decoded(method, frame, Hint)))
        if not self._calls.admits(peer, 1, len(frame)):
            self._node.metrics.count("timeline_throttled_total", "calls")
            raise TransportError(Fault.OVERLOADED, "too many calls at once on this broker: try again later")
        # What has begun runs to its end, whether or not the caller still waits: a move whose caller gave up must still
        # reach the dealer, a topic that was created its catalog. What waits for its turn then has not begun.
        call = PendingCall(self._node.clock.monotonic_ms())
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

    def _over(self, peer: str, bytes_: int, call: PendingCall, task: asyncio.Task[bytes]) -> None:
        """Takes note of what became of it: where the caller has gone, nobody else does."""
        self._under_way.discard(task)
        self._calls.remove(peer, 1, bytes_)
        failed = None if task.cancelled() else task.exception()
        if call.gone and failed is not None and not isinstance(failed, TransportError):
            log.error("a call whose caller has gone failed", exc_info=failed)

    async def idle(self) -> None:
        """Returns when no call is under way."""
        while self._under_way:
            await asyncio.wait(self._under_way)

    async def _call(self, method: str, frame: bytes, caller: Principal, peer: str, call: PendingCall) -> bytes:
        await self._node.turns.take(peer, len(frame))
        call.begun = True
        try:
            with self._node.turns.call(peer):
                return await self._answer(method, frame, caller, call)
        except StoreError as trouble:
            raise _fault_of(trouble) from trouble
        except Invalid as bad:
            raise TransportError(Fault.REFUSED_FRAME, bad.reason) from bad

    async def _answer(self, method: str, data: bytes, caller: Principal, call: PendingCall) -> bytes:
        if method == "Mutate":
            mutation = cast(Mutate | MutateTag, self._decoded(method, data, Mutate, MutateTag))
            if isinstance(mutation, Mutate):
                return encode(await self._mutating.by_ids(mutation, caller, call))
            _check(caller.change_refusal(mutation.topic, mutation.group))
            find = partial(self._topic, mutation.topic, caller, Deed.SEE)
            return encode(await self._mutating.by_tag(mutation, find, caller, call))
        if method == "Forecast":
            return encode(await self._forecast(self._decoded(method, data, Forecast), caller))
        if method == "Topics":
            return encode(await self._topics(self._decoded(method, data, Topics), caller))
        if method == "Late":
            return encode(await self._late(self._decoded(method, data, Late), caller))
        raise TransportError(Fault.REFUSED_FRAME, f"there is no method {method!r}")

    def _check_ready(self) -> None:
        if self._node.no_calls:
            raise TransportError(Fault.NOT_READY, self._node.no_calls)

    def _decoded(self, method: str, data: bytes, *kinds: type[F]) -> F:
        """The frame, verified, when it is of one of `kinds`. A bad one is this caller's trouble alone."""
        try:
            frame = decode(data)
        except WireError as bad:
            raise self._refusal(method, bad) from bad
        if not isinstance(frame, kinds):
            raise self._refusal(method, WireError(f"{method} does not take a {type(frame).__name__}"))
        return frame

    def _refusal(self, method: str, bad: WireError) -> TransportError:
        self._node.metrics.count("timeline_frames_refused_total", method)
        fault = Fault.WRONG_VERSION if isinstance(bad, WireVersionError) else Fault.REFUSED_FRAME
        return TransportError(fault, bad.reason)

    async def stream(self, method: str, stream: Stream, peer: str, caller: Principal = ANYBODY) -> None:
        """Serves a two-way stream until either side ends it."""
        self._check_ready()
        if method not in ("Produce", "Consume"):
            raise TransportError(Fault.REFUSED_FRAME, f"there is no stream {method!r}")
        producing = method == "Produce"
        with self.streams.admit(peer):
            kind = ProduceStream if producing else ConsumeStream
            served = kind(self._node, stream, peer, caller)
            with self.streams.serving(served):
                await self._serve(method, served)

    async def _serve(self, method: str, served: ProduceStream | ConsumeStream) -> None:
        try:
            await served.serve()
        except WireError as bad:
            raise self._refusal(method, bad) from bad
        except Invalid as bad:
            raise TransportError(Fault.REFUSED_FRAME, bad.reason) from bad
        except StoreError as trouble:
            raise _fault_of(trouble) from trouble

    async def unary_stream(
        self, method: str, frame: bytes, caller: Principal = ANYBODY, peer: str = ""
    ) -> AsyncGenerator[bytes, None]:
        """One frame for many: Scan."""
        self._check_ready()
        if method != "Scan":
            raise TransportError(Fault.REFUSED_FRAME, f"there is no method {method!r}")
        if not self._scans.admits(peer, 1, 0):
            self._node.metrics.count("timeline_throttled_total", "scans")
            raise TransportError(
                Fault.OVERLOADED,
                f"{self._scans.messages} scans run on this broker, all that it may or that leave room for others "
                "(max_scans): try again later",
            )
        self._scans.add(peer, 1, 0)
        try:
            asked = self._decoded(method, frame, Scan)
            topic = await self._topic(asked.topic, caller, Deed.READ if asked.payload else Deed.SEE)
            async for page in pages(self._node, topic, asked):
                yield encode(page)
        except StoreError as trouble:
            raise _fault_of(trouble) from trouble
        except Invalid as bad:
            raise TransportError(Fault.REFUSED_FRAME, bad.reason) from None
        finally:
            self._scans.remove(peer, 1, 0)

    async def _topic(self, name: str, caller: Principal, deed: Deed) -> Topic:
        """The topic, where `caller` may do `deed` on it: what is there is nobody else's to know."""
        _check(caller.refusal(deed, name))
        topic = await self._node.topic(name)
        if topic is None:
            raise TransportError(Fault.NO_TOPIC, no_such_topic(name))
        return topic

    async def _late(self, asked: Late, caller: Principal) -> LateList:
        node, now_ms = self._node, self._node.clock.now_ms()
        if asked.topic:
            _check(caller.refusal(Deed.SEE, asked.topic))
        names = {dealer.topic.uid: dealer.topic.name for dealer in node.dealers}
        topics = {uid: name for uid, name in names.items() if caller.sees(name)}
        if asked.topic:
            topics = {uid: name for uid, name in topics.items() if name == asked.topic}
        late = node.late.since(asked.since_ms, topics, asked.id, asked.limit)
        if asked.id and asked.topic and not node.no_calls:
            late = (late + await self._overdue(asked.topic, asked.id, now_ms))[-asked.limit :]
        return late_list(late, node.late.dropped, now_ms)

    async def _overdue(self, name: str, id: bytes, now_ms: int) -> list[LateOne]:
        """The message, when it is due and nobody has it, with what keeps it until now."""
        node = self._node
        topic = await node.topic(name)
        if topic is None:
            return []
        dealer = node.dealer(topic)  # now: once the store has answered, the topic may have been dropped
        where = ScanFilter(frozenset({State.AVAILABLE}), ids=Ragged.of([id]))
        page = await node.store.call("scan", node.store.store.scan(topic, now_ms, where, b"", 1, False))
        return [
            LateOne(name.encode(), id, b"", due_ms, now_ms, dealer.lateness.still(due_ms, now_ms))
            for due_ms in page.rows.due_ms.tolist()
            if now_ms - due_ms > node.limits.late_ms
        ]

    async def _forecast(self, asked: Forecast, caller: Principal) -> Forecasted:
        node = self._node
        topic = await self._topic(asked.topic, caller, Deed.SEE)
        if asked.step_ms < 1 or asked.window_ms < 1:
            raise Invalid("window and step must be at least 1 ms")
        steps = -(-asked.window_ms // asked.step_ms)
        if steps > MAX_STEPS:
            raise Invalid(f"a forecast has at most {MAX_STEPS} steps, not {steps}: ask for a longer step")
        now_ms = node.clock.now_ms()
        edges = now_ms + np.arange(steps + 1, dtype=np.int64) * asked.step_ms
        edges[-1] = min(int(edges[-1]), now_ms + asked.window_ms)
        counted = await node.store.call(
            "count_due", node.store.store.count_due(topic, np.concatenate([np.zeros(1, dtype=np.int64), edges]))
        )
        exact = node.store.store.capabilities.exact_counts
        return Forecasted(edges, counted[1:], int(counted[0]), exact)

    async def _topics(self, asked: Topics, caller: Principal) -> TopicList:
        catalog, missing = self._node.catalog, f"there is no topic {asked.name!r}"
        before = catalog.known(asked.name)
        try:
            if asked.action is TopicAction.LIST:
                await catalog.refresh()
                return TopicList(Status.OK.code, "", tuple(topic for topic in catalog.all() if caller.sees(topic.name)))
            why = caller.refusal(Deed.GOVERN, asked.name)
            if why:
                return TopicList(Status.FORBIDDEN.code, why, ())
            if asked.action is TopicAction.CREATE:
                topic: Topic | None = await catalog.create(asked.name, asked.settings)
            elif asked.action is TopicAction.UPDATE:
                topic = await catalog.update(asked.name, asked.settings, asked.revision)
            else:
                topic = await catalog.drop(asked.name)
        except Invalid as bad:
            return TopicList(Status.INVALID.code, bad.reason, ())
        except TopicConflict as conflict:
            return TopicList(Status.EXISTS.code, conflict.reason, ())
        if topic is None:
            return TopicList(Status.NOT_FOUND.code, missing, ())
        if asked.action is TopicAction.DROP or topic != before:
            self._node.membership.topics_changed()
        return TopicList(Status.OK.code, "", (topic,))

    def _ping(self, ping: Ping) -> Pong:
        node, clock = self._node, self._node.clock
        now = clock.now()
        names = node.name, node.version, node.cluster.addresses()
        return Pong(ping.sent_ms, now, clock.now(), *names, clock.step_ms)


def _check(why: str) -> None:
    """Raises TransportError(FORBIDDEN) for a refusal."""
    if why:
        raise TransportError(Fault.FORBIDDEN, why)


def _fault_of(trouble: StoreError) -> TransportError:
    """What a store's trouble means to the caller of a whole call."""
    if isinstance(trouble, StoreUnavailable):
        return TransportError(Fault.NOT_READY, str(trouble))
    if isinstance(trouble, StoreUnknown):
        return TransportError(Fault.BROKEN, str(trouble))
    return TransportError(Fault.REFUSED_FRAME, str(trouble))
