"""One Consume stream, from hello and welcome to the end.

Deliveries go down. Credit and settles come up. Either side may leave.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import cast

import numpy as np

from timeline.broker.api.access import Deed
from timeline.broker.api.admission import admit_settles, count_answers
from timeline.broker.api.streams import ClientStream, Streams, first_frame
from timeline.broker.api.topics import TopicAccess
from timeline.broker.cluster import ClusterHints
from timeline.broker.dispatch.dealer import Dealer, Dealers
from timeline.broker.dispatch.leased_batch import LeasedBatch, Token, tokens
from timeline.broker.dispatch.roster import ConnectedConsumer, LeaveNotice
from timeline.broker.drift import Offset
from timeline.broker.fairness import host_of
from timeline.broker.runtime import Runtime
from timeline.errors import Invalid
from timeline.metrics import Metrics
from timeline.model import (
    DELIVERED_OUT,
    MAX_HOLDER_BYTES,
    PAYLOAD_DAMAGED,
    PULL_PREFIX,
    Answers,
    LeavingReason,
    Operation,
    Status,
    TopicSettings,
)
from timeline.wire import (
    Beat,
    Credit,
    Deliver,
    Fault,
    Frame,
    Hello,
    Leaving,
    Settle,
    Settled,
    TransportError,
    UnknownFrame,
    Welcome,
    decode,
    decode_as,
    encode,
)
from timeline.wire.frames import credit_counts
from timeline.wording import shown_duration

log = logging.getLogger("timeline.broker")
SHORT_BYTES = 4096
"""A frame up to this size goes ahead of others' if a message was sent for it."""
MOST_EARNED = 1_000
"""Most such frames that a stream may have left, however much was sent to it."""


class ConsumeStream:
    """Serves one consumer's stream on one topic."""

    def __init__(
        self,
        client: ClientStream,
        runtime: Runtime,
        topics: TopicAccess,
        dealers: Dealers,
        cluster: ClusterHints,
        streams: Streams,
    ) -> None:
        self._stream, self._peer, self._caller = client.stream, client.peer, client.caller
        self._clock, self._limits, self._metrics = runtime.clock, runtime.limits, runtime.metrics
        self._tasks, self._scheduler = runtime.tasks, runtime.scheduler
        self._topics, self._dealers, self._cluster, self._streams = topics, dealers, cluster, streams
        self._settling: set[asyncio.Task[None]] = set()
        self._requests = asyncio.Semaphore(runtime.limits.requests_per_stream)
        self._over = False
        self._consumer: ConnectedConsumer | None = None
        self._earned = 0
        """Short frames that may go ahead of others': one more for each message sent here. One less for each frame that
        came, and for each further settle in it."""

    @property
    def sending_since_ms(self) -> float | None:
        """Since when the consumer has not taken what is being sent."""
        return self._consumer.sending_since_ms if self._consumer is not None else None

    def abort(self) -> None:
        """End it at once, whether or not it is still on the roster."""
        assert self._consumer is not None
        log.info("consumer %r does not take what is sent: its stream ends", self._consumer.id.decode())
        self._stream.cancel()

    async def serve(self) -> None:
        """Run the stream. Messages that were not sent when it ends are released unseen."""
        data = await first_frame(self._stream, self._limits.hello_ms)
        if data is None:
            return
        hello = decode_as(data, Hello)
        topic = await self._topics.find(hello.topic, self._caller, Deed.CONSUME)
        self._topics.check_ready()  # since the stream was opened: nobody would tell this one to leave
        dealer = self._dealers.of(topic)
        consumer = self._consumer = self._admitted(hello, dealer)
        sender = self._tasks.spawn(self._send_all(consumer, dealer), f"sending to {hello.consumer}")
        before, resuming = dealer.roster.join(consumer), None
        try:
            if before is not None:
                self._take_over(before, consumer, dealer)
            self._cluster.joined(topic, consumer.joined)
            consumer.push(self._welcome(consumer, dealer))
            in_hand = tokens(hello.ids, hello.birth, hello.version)
            resuming = self._tasks.spawn(self._resume(consumer, dealer, in_hand), f"resuming {hello.consumer}")
            del data, hello, in_hand  # it may be much, and is not asked for again
            await self._receive_all(consumer, dealer, resuming)
            await asyncio.wait((resuming,))
            # The consumer has said its last word: it is dealt nothing more, and what it asked is still answered.
            dealer.part_with(consumer, consumer.withdraw())
            await asyncio.gather(*self._settling)
            consumer.finish()
            await asyncio.wait((sender,))  # which is not cancelled with this task
        finally:
            dealer.part_with(consumer, consumer.withdraw())
            self._over = True
            if resuming is not None:
                resuming.cancel()
            if consumer.sending_since_ms is None:
                sender.cancel()  # else it ends behind its write, which must not be cut off: see `wire.Stream.send`
            for task in self._settling:
                task.cancel()

    def _admitted(self, hello: Hello, dealer: Dealer) -> ConnectedConsumer:
        most_ms = dealer.topic.settings.max_lease_ms
        if not 0 <= hello.lease_ms <= most_ms:
            raise Invalid(f"lease must be at most the topic's max_lease, {shown_duration(most_ms)}")
        id = hello.consumer.encode()
        if not 1 <= len(id) <= MAX_HOLDER_BYTES:
            raise Invalid(f"a consumer's id is 1 to {MAX_HOLDER_BYTES} bytes")
        if hello.consumer.startswith(PULL_PREFIX):
            raise Invalid(f"ids that begin with {PULL_PREFIX!r} are for brokers: give the consumer another id")
        bearer = self._caller.name
        there = dealer.roster.consumers.get(id)
        if there is not None and there.bearer != bearer:
            # Whatever session it shows: a session id is no secret, a token is.
            raise TransportError(Fault.FORBIDDEN, f"consumer {hello.consumer!r:.80} is connected with another token")
        return ConnectedConsumer(
            id=id,
            session=hello.session,
            bearer=bearer,
            host=host_of(self._peer),
            joined_ms=self._clock.now_ms(),
            lease_ms=hello.lease_ms or dealer.topic.settings.lease_ms,
            heartbeat_ms=self._streams.heartbeat_ms,
            credit_messages=hello.credit_messages,
            credit_bytes=hello.credit_bytes,
            room_messages=hello.room_messages,
            room_bytes=hello.room_bytes,
            limits=self._limits,
            heard_ms=self._clock.monotonic_ms(),
            wake=dealer.wake,
            trickled=dealer.trickled,
            outboxes=dealer.outboxes,
        )

    def _welcome(self, consumer: ConnectedConsumer, dealer: Dealer) -> Welcome:
        return Welcome(
            broker=self._cluster.name,
            now_ms=self._clock.now_ms(),
            lease_ms=consumer.lease_ms,
            max_lease_ms=dealer.topic.settings.max_lease_ms,
            max_payload_bytes=dealer.topic.settings.max_payload_bytes,
            heartbeat_ms=consumer.heartbeat_ms,
            brokers=self._cluster.addresses(),
        )

    def _take_over(self, before: ConnectedConsumer, consumer: ConnectedConsumer, dealer: Dealer) -> None:
        """End the other stream that had this id. The same session has connected again: its old stream is over. Another
        session took the id: the old stream learns so and must not come back."""
        if before.session == consumer.session:
            unsent = before.leave(LeavingReason.STALLED, "this session connected again")
        else:
            log.info("consumer %r was taken over by another session from %s", consumer.id.decode(), self._peer)
            unsent = before.superseded()
        dealer.part_with(before, unsent)

    async def _resume(self, consumer: ConnectedConsumer, dealer: Dealer, in_hand: set[Token]) -> None:
        """Give it what it held and has not in hand, then deal to it. Its frames are read meanwhile: a slow store takes
        longer to look that up than a consumer waits for an answer."""
        try:
            with dealer.coming_back:
                await dealer.resume(consumer, in_hand, self._peer)
        except Exception:
            self._stream.cancel()  # it would never be dealt to
            raise
        dealer.admit(consumer)

    async def _receive_all(self, consumer: ConnectedConsumer, dealer: Dealer, resuming: asyncio.Task[None]) -> None:
        scheduler, monotonic_ms = self._scheduler, self._clock.monotonic_ms
        while (data := await self._stream.receive()) is not None:
            await consumer.room()
            consumer.heard(monotonic_ms())
            # A settle of what was sent, most likely. Where others flood it would wait for milliseconds, the next one
            # behind it, and a consumer soon have no credit left.
            short = len(data) <= SHORT_BYTES
            ahead = await scheduler.take(self._peer, len(data), ahead=self._earned > 0 and short)
            self._earned = max(0, self._earned - 1)
            try:
                with scheduler.work(self._peer, ahead):
                    frame = decode(data)
            except UnknownFrame:
                continue  # of a newer minor: not for us
            if isinstance(frame, Credit):
                if frame.room_messages:
                    consumer.resize(frame.room_messages, frame.messages)
                consumer.add_credit(frame.messages, frame.bytes)
                if frame.error_ms >= 0:
                    consumer.clock = Offset.about(frame.ahead_ms, frame.error_ms)
                if not frame.messages and not frame.bytes and not frame.room_messages:
                    dealer.ran_dry()
                    consumer.push(Beat(self._clock.now_ms(), frame.echo))
            elif isinstance(frame, Settle):
                self._earned = max(0, self._earned + 1 - max(1, len(frame.operation)))
                await self._requests.acquire()
                task = self._tasks.spawn(self._settle(frame, consumer, dealer, ahead), "answering a settle")
                self._settling.add(task)
                task.add_done_callback(self._settled)
            elif isinstance(frame, Leaving):
                # It takes nothing more: once it reads the same word back, it knows all that was sent to it.
                await asyncio.wait((resuming,))
                dealer.part_with(consumer, consumer.leave(frame.reason, frame.text))
            else:
                raise Invalid(f"a consumer sends Credit, Settle and Leaving, not {type(frame).__name__}")

    def _settled(self, task: asyncio.Task[None]) -> None:
        self._settling.discard(task)
        self._requests.release()

    async def _settle(self, frame: Settle, consumer: ConnectedConsumer, dealer: Dealer, ahead: bool) -> None:
        topic = dealer.topic
        with self._scheduler.work(self._peer, ahead):
            refusals, settles = admit_settles(frame, topic, consumer.id, self._clock.now())
        credit = frame.credit_messages, frame.credit_bytes
        # With a backlog the lease begins beside the settle. A store may do both in one transaction.
        loan = consumer.lend(*credit) if dealer.behind and any(credit) and not consumer.has_step else None
        counts = False
        try:
            answers = await dealer.settling.settle(topic, settles, self._peer) if len(settles) else None
            whole = refusals.merge(answers)
            counts = credit_counts(frame.operation, whole.status)
            consumer.push(Settled(frame.request, whole, self._clock.now_ms()))
        finally:
            if loan is not None:
                dealer.own_settles.release_unseen(consumer.repay(loan, *credit, counts))
        if counts and loan is None:
            consumer.add_credit(*credit)
        if (whole.status == Status.OK.code).any():
            consumer.settled()  # it is healthy
        note_settles(self._metrics, topic.name, frame, whole)

    async def _send_all(self, consumer: ConnectedConsumer, dealer: Dealer) -> None:
        """Write the stream; nothing else does. A batch becomes a frame in the moment it is sent, so that its times are
        true. Messages whose lease has ended meanwhile are left out, and lose no delivery."""
        clock = self._clock
        while not self._over and (item := await consumer.next()) is not None:
            batch: LeasedBatch | None = None
            if isinstance(item, LeasedBatch):
                now_ms = clock.now_ms()
                alive = item.rows.due_ms > now_ms
                if not alive.all():
                    ended, item = item.where(~alive), item.where(alive)
                    consumer.refund(ended)
                    dealer.own_settles.release_unseen([ended])
                if len(item) == 0:
                    continue
                batch = item
                self._earned = min(MOST_EARNED, self._earned + len(item))
                frame: Frame = deliver(item, now_ms, dealer.topic.settings)
            elif isinstance(item, LeaveNotice):
                frame = Leaving(item.reason, item.text)
            else:
                frame = cast(Frame, item)
            consumer.sending_since_ms = clock.monotonic_ms()
            try:
                await self._stream.send(encode(frame))
            except TransportError:
                return  # the stream is over: its reader sees that too, and ends
            finally:
                consumer.sent(clock.monotonic_ms())
            if batch is not None:
                # Now, not when it was queued: what waits for a slow reader is late.
                dealer.lateness.note(dealer.topic, consumer.id, batch, clock.now_ms())
            if isinstance(frame, Leaving) and frame.reason is not LeavingReason.DRAINING:
                await self._stream.close()
                return


def deliver(batch: LeasedBatch, pushed_ms: int, settings: TopicSettings) -> Deliver:
    """Return the frame that brings a batch to its consumer. `settings` are the topic's."""
    rows = batch.rows
    assert rows.payloads is not None and rows.headers is not None
    return Deliver.of(
        rows,
        leased_ms=batch.leased_ms,
        pushed_ms=pushed_ms,
        due_ms=batch.was_due_ms,
        lease_until_ms=rows.due_ms,
        headers=rows.headers if rows.headers.nbytes else None,
        tags=rows.tags if rows.tags.nbytes else None,
        max_deliveries=settings.max_deliveries,
        retry_first_ms=settings.retry_first_ms,
        retry_factor_percent=settings.retry_factor_percent,
        retry_cap_ms=_retry_cap_ms(settings),
        retry_jitter_percent=settings.retry_jitter_percent,
    )


def _retry_cap_ms(settings: TopicSettings) -> int:
    """Return the longest wait after a failure that the topic's horizon allows, its jitter included."""
    return min(settings.retry_cap_ms, settings.horizon_ms * 100 // (100 + settings.retry_jitter_percent))


def note_settles(metrics: Metrics, topic: str, frame: Settle, answers: Answers) -> None:
    """Count the answers to settles."""
    operations = set(frame.operation.tobytes())
    for operation in operations:
        count_answers(metrics, Operation(operation), answers.status[frame.operation == operation])
    if answers.late.any():
        metrics.count("timeline_late_acks_total", metrics.topic(topic), by=int(answers.late.sum()))
    if Operation.BURY not in operations:
        return
    buried = np.flatnonzero((answers.status == Status.OK.code) & (frame.operation == Operation.BURY))
    if len(buried):
        reasons = frame.reasons.take(buried).tolist() if frame.reasons is not None else [b""] * len(buried)
        for cause, count in Counter(map(_buried_for, reasons)).items():
            metrics.count("timeline_buried_total", metrics.topic(topic), cause, by=count)


def _buried_for(reason: bytes) -> str:
    """Return the metric's cause of a burial that a consumer asked for.

    Used-up deliveries count as such whether the last lease ran out or its handler failed. So does a damaged payload,
    whether broker or consumer found it.
    """
    if reason.partition(b":")[0] == DELIVERED_OUT:
        return DELIVERED_OUT.decode()
    return PAYLOAD_DAMAGED.decode() if reason == PAYLOAD_DAMAGED else "consumer"
