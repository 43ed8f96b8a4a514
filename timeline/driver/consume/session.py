"""A consumer's session: one Consume stream after another, with the same session id and tokens."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from timeline.clock import Clock
from timeline.driver.consume.broker_clock import BrokerClock
from timeline.driver.consume.in_flight import SETTLING, DeliveredFrame, InFlight
from timeline.driver.consume.settler import UNSEEN, Settler, SettleRequest
from timeline.driver.produce.request_queue import wait_until_set
from timeline.driver.tasks import end, keep, run_until_first
from timeline.driver.transport.channel import (
    REFUSALS,
    ClientContext,
    Deadline,
    OpenedStream,
    named_trouble,
    refusal,
    send_within,
)
from timeline.errors import Invalid, NotFound, Superseded, TimelineError, Unavailable
from timeline.model import PAYLOAD_DAMAGED, LeavingReason, Operation, Status, payload_sums
from timeline.wire import (
    Beat,
    Credit,
    Deliver,
    Fault,
    Frame,
    Hello,
    Leaving,
    Settled,
    TransportError,
    UnknownFrame,
    Welcome,
    decode,
    encode,
)


@dataclass(slots=True)
class Outage:
    """The time between a consumer's streams. An outage is logged twice, however many attempts fail: as a warning, so
    that programs without logging show it, too."""

    subscription: Subscription
    clock: Clock
    since_ms: float | None = field(default=None, init=False)
    told: bool = field(default=False, init=False)

    def dismissed(self) -> None:
        """Note that its broker told it to leave. An outage counts from now, if no other broker is there."""
        if self.since_ms is None:
            self.since_ms = self.clock.monotonic_ms()

    def begins(self, why: str) -> None:
        """Note that no broker is there. `why` names the address."""
        self.dismissed()
        if not self.told:
            self.told = True
            log.warning("consumer %s of %s lost its broker, and tries to reach one: %s", *self._who, why)

    def over(self, address: str) -> None:
        """Note that the broker at `address` has welcomed the consumer."""
        if self.told and self.since_ms is not None:
            took_s = (self.clock.monotonic_ms() - self.since_ms) / 1000.0
            log.warning("consumer %s of %s has a broker again, at %s, after %.1f s", *self._who, address, took_s)
        self.since_ms, self.told = None, False

    @property
    def _who(self) -> tuple[str, str]:
        return self.subscription.consumer, self.subscription.topic


SILENT_HEARTBEATS = 3
SILENT = "the broker says nothing"
CONNECTING_MS = 500.0
"""How long a first connection may take before it counts as failed, unless an attempt fails earlier."""


@dataclass(slots=True)
class Subscription:
    """The request of a consumer. `lease_ms` 0: the topic's."""

    topic: str
    consumer: str
    session: int
    lease_ms: int


class ConsumeStream:
    """The state of one stream. Times are monotonic."""

    def __init__(self, opened: OpenedStream, now_ms: float) -> None:
        self.stream, self.address = opened.stream, opened.address
        self.hello_ms = self.heard_ms = self.beat_ms = now_ms
        self.welcome: Welcome | None = None
        self.over = False
        self.leaving: Leaving | None = None
        self.leave_by_ms = float("inf")
        self.fault: TransportError | None = None
        self.echoes: dict[int, float] = {}
        self.farewell = False
        """Whether we told the broker that we take nothing more."""
        self.heard_out = False
        """Whether a draining broker has got the frames that had gathered when it said so."""

    def silent_at_ms(self, timeout_ms: float) -> float:
        """Return when to give up a silent broker."""
        if self.welcome is None:
            return self.hello_ms + timeout_ms
        return self.heard_ms + SILENT_HEARTBEATS * self.welcome.heartbeat_ms

    @property
    def dismissed(self) -> bool:
        """Whether the broker said, without our asking, that this stream ends."""
        return self.leaving is not None and not self.farewell

    @property
    def hears(self) -> bool:
        """Whether the broker takes frames now. A draining one still reads, once, the frames that had gathered when it
        said so. Another broker could take them only later, perhaps after this process has ended."""
        if self.welcome is None or self.leaving is None or self.farewell:
            return self.welcome is not None
        return not self.heard_out and self.leaving.reason is LeavingReason.DRAINING


log = logging.getLogger("timeline.driver")

BEAT_SHARE = 0.9
"""The share of the heartbeat after which the next one is sent."""
FRAMES_OUTSTANDING = 64
LEAST_RHYTHM_MS = 5.0
PARTING_MS = 1_000.0
QUIET_TIMEOUT_MS = 10_000.0
LAST_MS = 2_000.0
"""How long a program waits for the answers to its last acks if it ends without closing its client."""
HELD_UP_MS = 500.0
"""How much longer it waits for an event loop of another thread."""

_started: weakref.WeakSet[ConsumerSession] = weakref.WeakSet()


class ConsumerSession:
    """Keeps a consumer connected. It delivers into `in_flight`, sends the frames of `settler`, gives credit, sends
    heartbeats, and extends the leases of waiting messages.

    `arrived` is called when there is a message to hand out, or when none will come; then `failure` says why.
    """

    def __init__(
        self,
        context: ClientContext,
        subscription: Subscription,
        in_flight: InFlight,
        settler: Settler,
        clock: BrokerClock,
    ) -> None:
        self._context, self.subscription = context, subscription
        self._in_flight, self.settler, self._clock = in_flight, settler, clock
        self.arrived: Callable[[], None] = lambda: None
        self.failure: TimelineError | None = None
        self.welcome: Welcome | None = None
        self.closing = False
        self.taking = True
        """False: messages that still arrive are returned unseen, and no credit is given."""
        self.stopped_taking = asyncio.Event()
        self._returned = asyncio.Event()
        """Set: nothing is on its way to this session, and the broker has back what it does not take."""
        self._task: asyncio.Task[None] | None = None
        self._outage = Outage(subscription, context.clock)
        self._echo = 0
        self._talking = False
        """Whether a broker has welcomed this session and is there."""
        self._given_up = False
        """Whether the caller of `stop` waits no longer."""
        self._pid = os.getpid()
        self._since_ms = 0.0
        self._welcomed_ms = float("-inf")

    @property
    def lease_ms(self) -> float:
        """How long its leases last, ms. Before the broker says it: the lease that was asked for."""
        return float(self.welcome.lease_ms) if self.welcome is not None else float(self.subscription.lease_ms or 30_000)

    @property
    def welcomed(self) -> bool:
        """Whether a broker has ever welcomed this session."""
        return self.welcome is not None

    def unreached(self) -> Unavailable | None:
        """Return why no broker has welcomed this session. None if one has, or if the first attempt has only begun."""
        begun_ms = self._context.clock.monotonic_ms() - self._since_ms
        if self.welcomed or (begun_ms < CONNECTING_MS and not self._context.channel.failing):
            return None
        return self._context.channel.unreached()

    def start(self) -> None:
        """Connect and stay connected, in a task of its own. Raise Superseded after another session took the id."""
        if isinstance(self.failure, Superseded):
            raise self.failure.with_traceback(None)
        if self._task is None:
            self.failure = None
            self._since_ms = self._context.clock.monotonic_ms()
            _started.add(self)
            self._task = keep(self._run(), f"consuming {self.subscription.topic}")

    async def _run(self) -> None:
        try:
            await run_until_first(self._stay_connected(), self._keep_time())
        except asyncio.CancelledError:
            if not self._given_up:
                await self._send_last()
            raise
        except TimelineError as error:
            self.failure = error
        except Exception as error:  # a mistake of ours: callers must not wait for ever
            log.exception("the consumer of %s failed", self.subscription.topic)
            self.failure = Unavailable(f"the consumer failed: {error!r}")
        self._task = None
        if self.failure is not None:
            self.settler.gather(QUIET_TIMEOUT_MS, at_once=True)
            self.settler.queue.broke()
            gone = isinstance(self.failure, NotFound)  # with its topic, and so is what was being settled
            self.settler.queue.refuse_all(Status.NOT_FOUND if gone else Status.UNAVAILABLE, self.failure.reason)
            if gone or isinstance(self.failure, Superseded):  # or another session has it
                self._in_flight.lose_all()
        self.arrived()

    async def _send_last(self) -> None:
        """Send the acks of `ack_soon` when the event loop ends and the consumer was not closed. They need a new stream:
        the old one was cancelled, too."""
        if not self.settler.unanswered or self._pid != os.getpid():
            return
        failed = self._in_flight.stats.settle_errors
        self.closing = True
        self.settler.queue.broke()
        self.settler.gather(LAST_MS, at_once=True)
        self.stop_taking()
        with contextlib.suppress(TimelineError, TimeoutError):
            async with asyncio.timeout(LAST_MS / 1000.0):
                await run_until_first(self._stay_connected(), self._keep_time())
        self.settler.queue.drop()
        self._warn_of_lost(self._in_flight.stats.settle_errors - failed)

    def left_behind(self) -> asyncio.AbstractEventLoop | None:
        """Return the event loop of a consumer that was not closed and has unanswered acks; else None."""
        task = self._task
        if task is None or task.done() or not self.settler.unanswered or self._pid != os.getpid():
            return None
        return task.get_loop()

    async def _end(self, timeout_ms: float) -> None:
        """Stop when the program ends, and log the acks that were not taken."""
        failed = self._in_flight.stats.settle_errors
        await self.stop(timeout_ms)
        self._warn_of_lost(self._in_flight.stats.settle_errors - failed)

    def _warn_of_lost(self, count: int) -> None:
        if count:
            log.warning(
                "The program ended before %d acks of %s were answered. Their messages may be delivered again. "
                "Close the client, or the consumer, before the program ends.",
                count,
                self.subscription.topic,
            )

    async def _stay_connected(self) -> None:
        context = self._context
        while not self.closing or self.settler.queue.busy:
            try:
                opened = await context.channel.open("Consume", Deadline.after(context.clock, context.timeout_ms))
            except Unavailable:
                if self.welcome is None and not self.closing:
                    raise  # never connected
                if not self.closing:
                    self._outage.begins(context.channel.unreached().reason)
                continue
            stream = ConsumeStream(opened, context.clock.monotonic_ms())
            await self._converse(stream)
            self._conclude(stream)

    async def _converse(self, stream: ConsumeStream) -> None:
        reader: asyncio.Task[None] | None = None
        try:
            stream.hello_ms = self._context.clock.monotonic_ms()
            await self._send(stream, encode(self._hello()))
            reader = asyncio.get_running_loop().create_task(self._read(stream))
            while not stream.over:
                self.settler.queue.work.clear()
                await self._send_all(stream)
                if self._parted(stream):
                    break
                if stream.farewell and stream.leaving is not None and not self.settler.busy:
                    self._returned.set()
                if not stream.over and not self.settler.queue.work.is_set():
                    await self._wait(stream)
            if self.closing and not stream.over:
                await self._part(stream, reader)
        except TransportError as fault:
            stream.fault = stream.fault or fault
        finally:
            self._talking = False
            self._returned.set()
            stream.stream.cancel()
            if reader is not None:
                await end(reader)

    def _parted(self, stream: ConsumeStream) -> bool:
        """Return whether the stream is done: told to leave, or closing, and everything is answered."""
        queue = self.settler.queue
        if stream.dismissed:
            return not (queue.outstanding or stream.hears)
        # Once the broker confirms our leaving, everything that it sent before has arrived.
        return self.closing and stream.leaving is not None and not self.settler.busy

    def _awaits_parting(self, stream: ConsumeStream) -> bool:
        """Return whether the broker is leaving, or has not confirmed our leaving yet."""
        if stream.farewell:
            return self.closing and stream.leaving is None
        return stream.leaving is not None

    async def _part(self, stream: ConsumeStream, reader: asyncio.Task[None]) -> None:
        """End the stream in order: the broker then closes its half."""
        await stream.stream.close()
        await asyncio.wait({reader}, timeout=PARTING_MS / 1000.0)

    def _hello(self) -> Hello:
        ids, birth, version = self._in_flight.tokens(self._context.clock.monotonic_ms())
        credit = self._in_flight.credit
        messages, nbytes = credit.room()
        return Hello(
            topic=self.subscription.topic,
            consumer=self.subscription.consumer,
            session=self.subscription.session,
            lease_ms=self.subscription.lease_ms,
            credit_messages=messages if self.taking else 0,
            credit_bytes=nbytes if self.taking else 0,
            ids=ids,
            birth=birth,
            version=version,
            room_messages=credit.messages,
            room_bytes=credit.bytes,
        )

    async def _send(self, stream: ConsumeStream, data: bytes) -> None:
        """Send a frame. Give up a silent broker, as `_wait` does."""
        clock, timeout_ms = self._context.clock, self._context.timeout_ms
        await send_within(stream.stream, data, lambda: stream.silent_at_ms(timeout_ms) - clock.monotonic_ms(), SILENT)

    async def _send_all(self, stream: ConsumeStream) -> None:
        if not stream.hears:
            return
        now_ms, last = self._context.clock.monotonic_ms(), stream.dismissed
        stream.heard_out = last
        # Before messages are returned, or we would get them again.
        if not (self.taking or stream.farewell or last):
            stream.farewell = True
            stream.leave_by_ms = now_ms + PARTING_MS
            await self._send(stream, encode(Leaving(LeavingReason.DRAINING, "the consumer takes nothing more")))
        queue, patience_ms = self.settler.queue, max(QUIET_TIMEOUT_MS, self.lease_ms)
        while not stream.over and len(queue.outstanding) < FRAMES_OUTSTANDING:
            # A broker settles a topic's frames one after the other. A second frame would only wait there.
            form = last or not queue.outstanding
            self.settler.gather(patience_ms, at_once=queue.can_go(form) or not self.taking or last)
            taken = queue.next(form=form)
            if taken is None:
                break
            request, batch = taken
            try:
                data = encode(self.settler.frame(request, batch))
            except Invalid as bad:
                self.settler.unsent(request, Status.INVALID, bad.reason)
                continue
            await self._send(stream, data)
        credit = self._in_flight.credit
        if credit.owed and self.taking and not last:
            await self._send(stream, encode(Credit(*credit.take_owed(), room_messages=credit.take_room())))
        if stream.welcome is None:
            return
        dry = self.taking and not last and self._in_flight.runs_dry()
        if dry or now_ms - stream.beat_ms >= stream.welcome.heartbeat_ms * BEAT_SHARE:
            await self._beat(stream, now_ms)

    async def _beat(self, stream: ConsumeStream, now_ms: float) -> None:
        self._echo += 1
        stream.echoes[self._echo] = now_ms
        if len(stream.echoes) > SILENT_HEARTBEATS * 4:
            stream.echoes.pop(next(iter(stream.echoes)))
        stream.beat_ms = now_ms
        self._context.clock.observe()
        ahead_ms, error_ms = self._clock.ahead(self._context.clock.now_at(now_ms), now_ms) or (0.0, -1.0)
        await self._send(stream, encode(Credit(echo=self._echo, ahead_ms=ahead_ms, error_ms=error_ms)))

    async def _keep_time(self) -> None:
        """Drop ended leases, extend buffered messages, and end overdue unawaited settles, with or without a broker."""
        while True:
            await asyncio.sleep(self._rhythm_ms / 1000.0)
            now_ms = self._context.clock.monotonic_ms()
            self._in_flight.sweep(now_ms)
            self.settler.expire(now_ms)
            if not self._talking:
                self.settler.queue.forget_unwanted()
                continue
            if self._in_flight.credit.owed:
                self.settler.queue.work.set()
            self.settler.extend(self._in_flight.to_extend(now_ms, self.lease_ms), self.lease_ms)

    @property
    def _rhythm_ms(self) -> float:
        heartbeat_ms = self.welcome.heartbeat_ms if self.welcome is not None else 100
        return max(LEAST_RHYTHM_MS, min(heartbeat_ms / 2, self.lease_ms / 10))

    async def _wait(self, stream: ConsumeStream) -> None:
        """Wait until there is something to send, or the next tick. Give up a silent broker."""
        now_ms = self._context.clock.monotonic_ms()
        left_ms = stream.silent_at_ms(self._context.timeout_ms) - now_ms
        if self._awaits_parting(stream):
            left_ms = min(left_ms, stream.leave_by_ms - now_ms)
        if left_ms <= 0:
            stream.fault = TransportError(Fault.DEADLINE, SILENT)
            stream.over = True
            return
        wait_ms = min(left_ms, self._rhythm_ms)
        if stream.welcome is not None and not stream.dismissed:
            beat_at_ms = stream.beat_ms + stream.welcome.heartbeat_ms * BEAT_SHARE
            wait_ms = min(wait_ms, max(LEAST_RHYTHM_MS, beat_at_ms - now_ms))
        await wait_until_set(self.settler.queue.work, wait_ms)

    async def _read(self, stream: ConsumeStream) -> None:
        try:
            while (data := await stream.stream.receive()) is not None:
                stream.heard_ms = self._context.clock.monotonic_ms()
                try:
                    frame = decode(data)
                except UnknownFrame:
                    continue  # of a newer minor version
                self._take(stream, frame)
        except TransportError as fault:
            stream.fault = fault
        except Invalid as bad:
            stream.fault = TransportError(Fault.BROKEN, f"the broker sent what cannot be read: {bad.reason}")
        finally:
            stream.over = True
            self.settler.queue.work.set()

    def _take(self, stream: ConsumeStream, frame: Frame) -> None:
        now_ms = stream.heard_ms
        if isinstance(frame, Deliver):
            self._clock.arrived(now_ms, frame.pushed_ms)
            self._deliver(frame, now_ms)
        elif isinstance(frame, Settled):
            self._clock.arrived(now_ms, frame.now_ms)
            self.settler.answered(frame)
            self.settler.queue.work.set()
        elif isinstance(frame, Beat):
            sent_ms = stream.echoes.pop(frame.echo, None)
            if sent_ms is not None:
                self._timed(sent_ms, frame.now_ms, now_ms)
        elif isinstance(frame, Welcome):
            if self.welcome is not None and self.welcome.broker != frame.broker:
                self._clock.another()
            stream.welcome = self.welcome = frame
            self._welcomed_ms = now_ms
            self._timed(stream.hello_ms, frame.now_ms, now_ms)
            self._context.channel.worked(stream.address)
            self._context.channel.learn(frame.brokers)
            self._talking = True
            self._outage.over(stream.address)
            self.settler.queue.work.set()
        elif isinstance(frame, Leaving):
            stream.leaving, stream.leave_by_ms = frame, now_ms + PARTING_MS
            self.settler.queue.work.set()

    def _timed(self, sent_ms: float, broker_ms: int, now_ms: float) -> None:
        """Compare our clock with the time that the broker said."""
        self._clock.sent(sent_ms, broker_ms, now_ms)
        ahead = self._clock.ahead(self._context.clock.now_at(now_ms), now_ms)
        if ahead is not None and self.welcome is not None:
            self._context.drift.note(self.welcome.broker, *ahead)

    def _deliver(self, deliver: Deliver, now_ms: float) -> None:
        ends = self._clock.monotonic_ms(0.0) + deliver.lease_until_ms.astype(np.float64)
        frame = DeliveredFrame(deliver, ends)
        frame.extend_at_ms = now_ms + (frame.earliest_ms - now_ms) / 2
        self._in_flight.arrive(frame)
        sums = payload_sums(deliver.payloads, deliver.headers)
        bad = np.flatnonzero(sums != deliver.payload_sum)
        if len(bad):
            self._in_flight.stats.damaged += len(bad)
            frame.mark(bad, SETTLING)
            log.error("%d messages of %s arrived damaged and are buried", len(bad), self.subscription.topic)
            asked = SettleRequest(Operation.BURY, reason=PAYLOAD_DAMAGED)
            self.settler.unawaited([(frame, bad)], asked, timeout_ms=QUIET_TIMEOUT_MS)
        if not self.taking:
            self.hand_back()
        self.arrived()

    def stop_taking(self) -> None:
        """Return the waiting messages unseen, and those that still arrive."""
        self.taking = False
        self.stopped_taking.set()
        self.hand_back()
        self.settler.queue.work.set()

    async def returned(self) -> None:
        """Return once the broker has back, after `stop_taking`, what waited here or was on its way, or is gone."""
        if not self.taking and self._talking:
            await self._returned.wait()

    def hand_back(self) -> None:
        """Return all waiting messages unseen."""
        taken = self._in_flight.take_waiting()
        if taken:
            self._in_flight.stats.released_unseen += sum(len(at) for _, at in taken)
            self.settler.unawaited(taken, UNSEEN, timeout_ms=QUIET_TIMEOUT_MS, told=False)

    def _conclude(self, stream: ConsumeStream) -> None:
        """Decide whether and where to continue when the stream is over. Raise if not at all."""
        channel, leaving, fault = self._context.channel, stream.leaving, stream.fault
        if stream.farewell and leaving is not None and leaving.reason is LeavingReason.DRAINING:
            leaving = None  # the broker confirms our own
        self.settler.queue.broke()
        if self.closing and fault is None and leaving is None:
            return
        self._in_flight.stats.reconnects += 1
        if leaving is not None:
            log.info("the broker at %s says to leave: %s %s", stream.address, leaving.reason.name, leaving.text)
            if leaving.reason is LeavingReason.SUPERSEDED:
                raise Superseded(leaving.text)
            if leaving.reason is LeavingReason.TOPIC_DROPPED:
                self._welcomed_ms = float("-inf")  # from now on "no such topic" is believed at once
                raise NotFound(leaving.text or f"topic {self.subscription.topic!r} was dropped")
            if leaving.reason in (LeavingReason.DRAINING, LeavingReason.QUARANTINED):
                channel.leaving(stream.address)
                self._outage.dismissed()
                return
        elif fault is not None and fault.fault in REFUSALS and not self._may_be_news(fault):
            raise refusal(fault)
        fault = fault or TransportError(Fault.BROKEN, "it ended the stream")
        if self.welcome is not None and not self.closing:
            self._outage.begins(named_trouble(stream.address, fault.reason))
        channel.failed(stream.address, fault)
        waited_ms = self._context.clock.monotonic_ms() - self._since_ms
        if self.welcome is None and waited_ms >= self._context.timeout_ms:
            raise channel.unreached()

    def _may_be_news(self, fault: TransportError) -> bool:
        """Return whether the topic may exist, and a new broker has only not read it yet."""
        known_ms = self._context.clock.monotonic_ms() - self._welcomed_ms
        return fault.fault is Fault.NO_TOPIC and known_ms < self._context.timeout_ms

    async def stop(self, timeout_ms: float) -> None:
        """Return the waiting messages, wait for open settles (at most `timeout_ms`), and end the stream in order."""
        self.closing = True
        task = self._task
        self.stop_taking()
        if task is not None:
            self.settler.gather(QUIET_TIMEOUT_MS, at_once=True)
            self.settler.queue.work.set()
            try:
                await asyncio.wait({task}, timeout=timeout_ms / 1000.0)
            except asyncio.CancelledError:
                if task.cancelling():  # the event loop ends: it sends its last acks
                    await asyncio.wait({task})
                else:  # nothing goes on in the background
                    await self._give_up(task)
                raise
            await self._give_up(task)
        else:
            self.settler.queue.drop()

    async def _give_up(self, task: asyncio.Task[None]) -> None:
        self._given_up = True
        await end(task)
        self.settler.queue.drop()


@atexit.register
def _end_with_program() -> None:
    """Send the acks of `ack_soon` when the program ends, for consumers that were not closed. They go in the consumers'
    own event loops; if a loop is gone, log the lost acks.

    It runs in the main thread, for all at once: a thousand consumers delay the end no longer than one."""
    left: dict[asyncio.AbstractEventLoop, list[ConsumerSession]] = {}
    for session in list(_started):
        if (loop := session.left_behind()) is not None:
            left.setdefault(loop, []).append(session)
    if not left:
        return
    clock = next(iter(left.values()))[0]._context.clock
    ends_ms = clock.monotonic_ms() + LAST_MS

    async def end_all(sessions: list[ConsumerSession]) -> None:
        rest_ms = max(0.0, ends_ms - clock.monotonic_ms())
        await asyncio.gather(*(session._end(rest_ms) for session in sessions))

    elsewhere = [
        (asyncio.run_coroutine_threadsafe(end_all(sessions), loop), sessions)
        for loop, sessions in left.items()
        if loop.is_running()
    ]
    for loop, sessions in left.items():
        if loop.is_closed():
            for session in sessions:
                session._warn_of_lost(session.settler.unanswered)
        elif not loop.is_running():
            loop.run_until_complete(end_all(sessions))
    for ending, sessions in elsewhere:
        try:
            ending.result(max(0.0, ends_ms - clock.monotonic_ms() + HELD_UP_MS) / 1000.0)
        except TimeoutError:  # something else holds that loop up
            for session in sessions:
                session._warn_of_lost(session.settler.unanswered)
