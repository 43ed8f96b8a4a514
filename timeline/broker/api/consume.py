"""One Consume stream: hello and welcome, then deliveries down, credit and settles up, until either side leaves."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from timeline.broker.api.access import ANYBODY, Deed, Principal
from timeline.broker.api.admission import admit_settles
from timeline.broker.api.streams import first_frame
from timeline.broker.clocks.drift import Offset
from timeline.broker.dispatch.leased_batch import LeasedBatch, content_sizes
from timeline.broker.dispatch.roster import ConnectedConsumer, grants_for
from timeline.columns import Ragged
from timeline.errors import Invalid
from timeline.leases import deal
from timeline.model import (
    DELIVERED_OUT,
    MAX_HOLDER_BYTES,
    PAYLOAD_DAMAGED,
    Answers,
    LeavingReason,
    Operation,
    Rows,
    Status,
    Topic,
)
from timeline.storage_plugins.contract import Settles, StoreError
from timeline.wire import (
    Beat,
    Credit,
    Fault,
    Frame,
    Hello,
    Leaving,
    Settle,
    Settled,
    Stream,
    TransportError,
    UnknownFrame,
    Welcome,
    decode,
    decode_as,
    encode,
)
from timeline.wire.frames import credit_counts
from timeline.wording import no_such_topic, shown_duration

if TYPE_CHECKING:
    from timeline.broker.dispatch.dealer import Dealer
    from timeline.broker.node import Node

log = logging.getLogger("timeline.broker")
Token = tuple[bytes, int, int]
SHORT_BYTES = 4096
"""A frame up to so long goes ahead of others' where a message was sent for it."""
MOST_EARNED = 1_000
"""So many such frames may a stream have left at most, whatever was sent to it."""
SUPERSEDED = (
    "another session connected under this consumer id: give each consumer an id of its own (a forked child, too), or "
    "none, and they share the messages"
)


class ConsumeStream:
    """Serves one consumer's stream on one topic."""

    def __init__(self, node: Node, stream: Stream, peer: str, caller: Principal = ANYBODY) -> None:
        self._node, self._stream, self._peer, self._caller = node, stream, peer, caller
        self._settling: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(node.limits.requests_per_stream)
        self._consumer: ConnectedConsumer | None = None
        self._earned = 0
        """So many short frames may go ahead of others': one for each message sent here, less one for each frame that
        came, and for each further settle in it."""

    @property
    def sending_since_ms(self) -> float | None:
        """Since when the consumer has not taken what is being sent."""
        return self._consumer.sending_since_ms if self._consumer is not None else None

    def abort(self) -> None:
        """Ends it at once, whether or not it is still on the roster."""
        assert self._consumer is not None
        log.info("consumer %r does not take what is sent: its stream ends", self._consumer.id.decode())
        self._stream.cancel()

    async def serve(self) -> None:
        """Runs the stream; what was not sent when it ends goes back."""
        data = await first_frame(self._stream, self._node.limits.hello_ms)
        if data is None:
            return
        hello = decode_as(data, Hello)
        why = self._caller.refusal(Deed.CONSUME, hello.topic)
        if why:
            raise TransportError(Fault.FORBIDDEN, why)
        topic = await self._node.topic(hello.topic)
        if topic is None:
            raise TransportError(Fault.NO_TOPIC, no_such_topic(hello.topic))
        if self._node.no_calls:  # since the stream was opened: nobody would tell this one to leave
            raise TransportError(Fault.NOT_READY, self._node.no_calls)
        dealer = self._node.dealer(topic)
        consumer = self._consumer = self._admitted(hello, topic, dealer)
        sender = self._node.tasks.spawn(self._send_all(consumer, dealer), f"sending to {hello.consumer}")
        before = dealer.roster.join(consumer)
        try:
            if before is not None:
                self._take_over(before, consumer, dealer)
            consumer.push(self._welcome(consumer, topic))
            with dealer.coming_back:
                await self._resume(hello, consumer, dealer, topic)
            del data, hello  # what was in hand then may be much, and is not asked for again
            dealer.admit(consumer)
            await self._receive_all(consumer, dealer, topic)
            # The consumer has said its last word: it is dealt nothing more, and what it asked is still answered.
            dealer.part_with(consumer, consumer.withdraw())
            await asyncio.gather(*self._settling)
            consumer.finish()
            await sender
        finally:
            dealer.part_with(consumer, consumer.withdraw())
            sender.cancel()
            for task in self._settling:
                task.cancel()

    def _admitted(self, hello: Hello, topic: Topic, dealer: Dealer) -> ConnectedConsumer:
        settings = topic.settings
        if not 0 <= hello.lease_ms <= settings.max_lease_ms:
            raise Invalid(f"lease must be at most the topic's max_lease, {shown_duration(settings.max_lease_ms)}")
        id = hello.consumer.encode()
        if not 1 <= len(id) <= MAX_HOLDER_BYTES:
            raise Invalid(f"a consumer's id is 1 to {MAX_HOLDER_BYTES} bytes")
        bearer = self._caller.identity.name
        there = dealer.roster.consumers.get(id)
        if there is not None and there.bearer != bearer:
            # Whatever session it shows: a session id is no secret, a token is.
            raise TransportError(Fault.FORBIDDEN, f"consumer {hello.consumer!r:.80} is connected with another token")
        return ConnectedConsumer(
            id=id,
            bearer=bearer,
            session=hello.session,
            lease_ms=hello.lease_ms or settings.lease_ms,
            credit_messages=hello.credit_messages,
            credit_bytes=hello.credit_bytes,
            room_messages=hello.room_messages,
            room_bytes=hello.room_bytes,
            limits=self._node.limits,
            heartbeat_ms=self._node.limits.heartbeat_of(len(self._node.service.streams)),
            heard_ms=self._node.clock.monotonic_ms(),
            wake=dealer.wake,
            trickled=dealer.trickled,
            outboxes=self._node.outboxes,
        )

    def _welcome(self, consumer: ConnectedConsumer, topic: Topic) -> Welcome:
        return Welcome(
            broker=self._node.name,
            now_ms=self._node.clock.now_ms(),
            lease_ms=consumer.lease_ms,
            max_lease_ms=topic.settings.max_lease_ms,
            max_payload_bytes=topic.settings.max_payload_bytes,
            heartbeat_ms=consumer.heartbeat_ms,
            brokers=self._node.cluster.addresses(),
        )

    def _take_over(self, before: ConnectedConsumer, consumer: ConnectedConsumer, dealer: Dealer) -> None:
        """Another stream had this id. The same session reconnected: the old stream is just over. Another session: the
        old one is told so and must not come back."""
        if before.session == consumer.session:
            unsent = before.leave(LeavingReason.STALLED, "this session connected again")
        else:
            log.info("consumer %r was taken over by another session from %s", consumer.id.decode(), self._peer)
            unsent = before.leave(LeavingReason.SUPERSEDED, SUPERSEDED)
        dealer.part_with(before, unsent)

    async def _resume(self, hello: Hello, consumer: ConnectedConsumer, dealer: Dealer, topic: Topic) -> None:
        """What the id holds beyond the tokens in hand is leased again at version + 1 and pushed: nobody else may have
        it until its lease runs out."""
        node = self._node
        await dealer.back.settled.wait()
        in_hand = _tokens(hello)
        try:
            async for rows in node.store.held(topic, node.clock.now_ms(), consumer.id):
                tokens = zip(rows.ids.tolist(), rows.birth.tolist(), rows.version.tolist(), strict=True)
                missing = np.array([at for at, token in enumerate(tokens) if token not in in_hand], dtype=np.intp)
                sizes = content_sizes(rows)[missing]
                room = deal(grants_for([consumer], node.limits, len(missing)), sizes) if len(missing) else missing
                await consumer.room_for_batches()
                if consumer.gone:
                    return  # it is for the broker that it goes to
                if len(room):
                    # A store may walk leases by their end: what is let again here lies ahead on the same walk.
                    in_hand |= await self._regrant(rows.take(missing[: len(room)]), consumer, dealer, topic)
                if len(room) < len(missing):
                    return  # no credit for more: the rest comes back when its lease runs out
        except StoreError as trouble:
            log.warning("cannot look up what consumer %r holds: %s", consumer.id.decode(), trouble)

    async def _regrant(self, rows: Rows, consumer: ConnectedConsumer, dealer: Dealer, topic: Topic) -> set[Token]:
        """Leases `rows` again and gives them to their holder; answers their new tokens."""
        node, count = self._node, len(rows)
        end_ms = node.clock.now_ms() + consumer.lease_ms
        none = np.zeros(count, dtype=np.uint64)
        settles = Settles(
            ids=rows.ids,
            birth=rows.birth,
            version=rows.version,
            holders=rows.holders,
            operation=np.full(count, Operation.REGRANT, dtype=np.uint8),
            time_ms=np.full(count, end_ms, dtype=np.int64),
            op=none,
            unseen=np.zeros(count, dtype=np.bool_),
            reasons=Ragged.repeat(b"", count),
        )
        answers = await node.settling.settle(topic, settles, self._peer)
        good = np.flatnonzero(answers.status == Status.OK.code)
        if len(good) == 0:
            return set()
        rows = rows.take(good)
        rows.version, rows.due_ms = answers.version[good], answers.due_ms[good]
        rows.deliveries = rows.deliveries + np.uint32(1)
        batch = LeasedBatch(rows, rows.scheduled_ms, np.ones(len(rows), dtype=np.bool_), node.clock.now_ms())
        dealer.give_again(consumer, batch)
        return _tokens(rows)

    async def _receive_all(self, consumer: ConnectedConsumer, dealer: Dealer, topic: Topic) -> None:
        turns = self._node.turns
        while (data := await self._stream.receive()) is not None:
            await consumer.room()
            consumer.heard(self._node.clock.monotonic_ms())
            # A settle of what was sent, most likely. Where others flood it would wait for milliseconds, the next one
            # behind it, and a consumer soon have no credit left.
            short = len(data) <= SHORT_BYTES
            ahead = await turns.take(self._peer, len(data), ahead=self._earned > 0 and short)
            self._earned = max(0, self._earned - 1)
            try:
                with turns.work(self._peer, ahead):
                    frame = decode(data)
            except UnknownFrame:
                continue  # of a newer minor: not for us
            if isinstance(frame, Credit):
                consumer.add_credit(frame.messages, frame.bytes)
                if frame.error_ms >= 0:
                    consumer.clock = Offset.about(frame.ahead_ms, frame.error_ms)
                if not frame.messages and not frame.bytes:
                    dealer.ran_dry()
                    consumer.push(Beat(self._node.clock.now_ms(), frame.echo))
            elif isinstance(frame, Settle):
                self._earned = max(0, self._earned + 1 - max(1, len(frame.operation)))
                await self._room.acquire()
                task = self._node.tasks.spawn(self._settle(frame, consumer, topic, ahead), "answering a settle")
                self._settling.add(task)
                task.add_done_callback(self._settled)
            elif isinstance(frame, Leaving):
                # It takes nothing more: once it reads the same word back, it knows all that was sent to it.
                dealer.part_with(consumer, consumer.leave(frame.reason, frame.text))
            else:
                raise Invalid(f"a consumer sends Credit, Settle and Leaving, not {type(frame).__name__}")

    def _settled(self, task: asyncio.Task[None]) -> None:
        self._settling.discard(task)
        self._room.release()

    async def _settle(self, frame: Settle, consumer: ConnectedConsumer, topic: Topic, ahead: bool) -> None:
        node = self._node
        topic = node.current(topic)
        with node.turns.work(self._peer, ahead):
            refusals, settles = admit_settles(frame, topic, consumer.id, node.clock.now())
        answers = await node.settling.settle(topic, settles, self._peer) if len(settles) else None
        whole = refusals.merge(answers)
        if credit_counts(frame.operation, whole.status):
            consumer.add_credit(frame.credit_messages, frame.credit_bytes)
        consumer.push(Settled(frame.request, whole, node.clock.now_ms()))
        self._note(frame, whole, consumer, topic)

    def _note(self, frame: Settle, answers: Answers, consumer: ConnectedConsumer, topic: Topic) -> None:
        """Counts what was answered; a consumer that settles is well."""
        node = self._node
        good = answers.status == Status.OK.code
        if good.any():
            consumer.settled()
        operations = set(frame.operation.tobytes())
        for operation in operations:
            node.count(Operation(operation), answers.status[frame.operation == operation])
        if answers.late.any():
            node.metrics.count("timeline_late_acks_total", node.metrics.topic(topic.name), by=int(answers.late.sum()))
        if Operation.BURY not in operations:
            return
        buried = np.flatnonzero(good & (frame.operation == Operation.BURY))
        if len(buried):
            reasons = frame.reasons.take(buried).tolist() if frame.reasons is not None else [b""] * len(buried)
            for cause, count in Counter(map(_buried_for, reasons)).items():
                node.metrics.count("timeline_buried_total", node.metrics.topic(topic.name), cause, by=count)

    async def _send_all(self, consumer: ConnectedConsumer, dealer: Dealer) -> None:
        """The stream's one writer. A batch becomes a frame in the moment it is sent, so that its times are true, and
        loses what its lease has left meanwhile."""
        node = self._node
        while (item := await consumer.next()) is not None:
            frame: Frame
            if isinstance(item, LeasedBatch):
                now_ms = node.clock.now_ms()
                alive = item.rows.due_ms > now_ms
                if not alive.all():
                    consumer.refund(item.where(~alive))
                    item = item.where(alive)
                if len(item) == 0:
                    continue
                self._earned = min(MOST_EARNED, self._earned + len(item))
                frame = item.deliver(now_ms, dealer.topic.settings.max_deliveries)
            else:
                frame = item
            consumer.sending_since_ms = node.clock.monotonic_ms()
            try:
                await self._stream.send(encode(frame))
            except TransportError:
                return  # the stream is over: its reader sees that too, and ends
            finally:
                consumer.sent(node.clock.monotonic_ms())
            if isinstance(item, LeasedBatch):
                # Now, not when it was queued: what waits for a slow reader is late.
                sent_ms = node.clock.now_ms()
                dealer.lateness.note(dealer.topic, consumer.id, item, sent_ms)
                node.traces.delivered(dealer.topic.name, consumer.id, item, sent_ms)
            if isinstance(frame, Leaving) and frame.reason is not LeavingReason.DRAINING:
                await self._stream.close()
                return


def _buried_for(reason: bytes) -> str:
    """The metric's cause of a burial that a consumer asked for. Deliveries that are used up count as such whether the
    last lease ran out or its handler failed, and a damaged payload whoever found it."""
    if reason.partition(b":")[0] == DELIVERED_OUT:
        return DELIVERED_OUT.decode()
    return PAYLOAD_DAMAGED.decode() if reason == PAYLOAD_DAMAGED else "consumer"


def _tokens(of: Hello | Rows) -> set[Token]:
    """(id, birth, version) of each."""
    return set(zip(of.ids.tolist(), of.birth.tolist(), of.version.tolist(), strict=True))
