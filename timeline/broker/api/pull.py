"""Take and Settle: consuming by single calls, for callers that keep no stream.

Each Take waits on a consumer that all Takes of its topic share. It joins the roster with the first of them, and leaves
when none has come for a while. So a Take writes nothing to the membership.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from timeline.broker.api.access import Deed, Principal
from timeline.broker.api.admission import admit_settles, forbidden, refused
from timeline.broker.api.consume import deliver, note_settles
from timeline.broker.api.topics import TopicAccess
from timeline.broker.cluster import ClusterHints
from timeline.broker.dispatch.dealer import Dealer, Dealers
from timeline.broker.dispatch.leased_batch import LeasedBatch
from timeline.broker.dispatch.pulling import PullConsumer, WaitingTake
from timeline.broker.lanes import Settling
from timeline.broker.runtime import Runtime, wait_within
from timeline.columns import Ragged
from timeline.errors import Invalid
from timeline.model import PULL_PREFIX, Status, Topic
from timeline.wire import Deliver, Fault, Settle, Settled, Take, TransportError, encode, validate_settle
from timeline.wording import no_such_topic, shown_duration

LEAST_WAIT_MS = 20
"""A Take that does not wait has this long, so that the store is asked once."""
ROUND_S = 2.0
"""How much longer it waits for lease calls that are under way or have to begin. What they lease would be released, and
leased again for the next Take. An answer without messages would say that nothing is due."""
MOST_LEASES = 16
"""Different leases that Takes of one topic may ask for besides the topic's. Each has a consumer of its own."""
NAME_BYTES = 200
"""Most of the broker's name in a holder."""


class PullHandler:
    """Takes and Settles of one broker."""

    def __init__(
        self,
        runtime: Runtime,
        topics: TopicAccess,
        dealers: Dealers,
        cluster: ClusterHints,
        settling: Settling,
        random_bits: Callable[[int], int],
    ) -> None:
        self._clock, self._limits, self._metrics = runtime.clock, runtime.limits, runtime.metrics
        self._tasks = runtime.tasks
        self._topics, self._dealers, self._settling = topics, dealers, settling
        self._broker, self._random_bits, self._prefix = cluster, random_bits, ""
        self._consumers: dict[tuple[int, int], PullConsumer] = {}
        """By topic and asked lease (0: the topic's)."""

    async def take(self, asked: Take, caller: Principal) -> bytes:
        """Return a Deliver frame: messages as soon as there are some, or none after the wait.

        The caller must send it at once. If the caller is cancelled before, the messages are released unseen. Raise
        Invalid, TransportError or StoreError.
        """
        topic = await self._topics.find(asked.topic, caller, Deed.CONSUME)
        self._topics.check_ready()
        most_ms = topic.settings.max_lease_ms
        if asked.lease_ms > most_ms:
            raise Invalid(f"lease must be at most the topic's max_lease, {shown_duration(most_ms)}")
        dealer = self._dealers.of(topic)
        consumer = self._consumer(dealer, asked.lease_ms)
        take = WaitingTake(asked.max_messages, asked.max_bytes)
        consumer.wait(take)
        try:
            try:
                await wait_within(take.over, max(LEAST_WAIT_MS, asked.wait_ms) / 1000.0)
                if not (take.batches or consumer.gone):
                    take.over.clear()
                    dealer.tell_asleep(take.over)
                    await wait_within(take.over, ROUND_S)
            finally:
                consumer.end(take, self._clock.monotonic_ms())
            if not take.batches and consumer.dropped:
                raise TransportError(Fault.NO_TOPIC, no_such_topic(asked.topic))
            return self._answer(take.batches, consumer, dealer)
        except BaseException:
            dealer.own_settles.release_unseen(take.batches)
            raise

    def _answer(self, batches: list[LeasedBatch], consumer: PullConsumer, dealer: Dealer) -> bytes:
        """Return the frame. Messages whose lease has ended meanwhile are left out, and lose no delivery."""
        now_ms, topic = self._clock.now_ms(), dealer.topic
        ended = [batch.where(over) for batch in batches if (over := batch.rows.due_ms <= now_ms).any()]
        if ended:
            dealer.own_settles.release_unseen(ended)
            batches = [alive for batch in batches if len(alive := batch.where(batch.rows.due_ms > now_ms))]
        if not batches:
            return encode(_nothing(now_ms, consumer.id.decode()))
        frame = deliver(LeasedBatch.concat(batches), now_ms, topic.settings)
        frame.holder = consumer.id.decode()
        data = encode(frame)
        sent_ms = self._clock.now_ms()
        for batch in batches:
            dealer.lateness.note(topic, consumer.id, batch, sent_ms)
        return data

    def _consumer(self, dealer: Dealer, lease_ms: int) -> PullConsumer:
        """Return the consumer of all Takes with this lease. The first Take brings it onto the roster."""
        usual_ms = dealer.topic.settings.lease_ms
        lease_ms = 0 if lease_ms == usual_ms else lease_ms
        key = dealer.topic.uid, lease_ms
        consumer = self._consumers.get(key)
        if consumer is None or consumer.gone:
            if lease_ms:
                self._check_leases(dealer.topic)
            now_ms = self._clock.monotonic_ms()
            consumer = self._consumers[key] = PullConsumer(
                id=self._holder(lease_ms),
                session=0,
                lease_ms=lease_ms or usual_ms,
                heartbeat_ms=self._limits.heartbeat_ms,
                credit_messages=0,
                credit_bytes=0,
                limits=self._limits,
                heard_ms=now_ms,
                wake=dealer.wake,
                trickled=dealer.trickled,
                outboxes=dealer.outboxes,
                release=dealer.own_settles.release_unseen,
                emptied_ms=now_ms,
            )
            dealer.roster.join(consumer)
            dealer.admit(consumer)
            self._tasks.spawn(self._keep(consumer, dealer, key), f"takes of {dealer.topic.name}")
        consumer.lease_ms = lease_ms or usual_ms
        return consumer

    def _check_leases(self, topic: Topic) -> None:
        """Raise TransportError(OVERLOADED) if Takes of the topic ask for too many leases that are not the topic's. A
        consumer that no Take waits for leaves then, so that a repeat of the call finds room."""
        others = [one for (uid, lease_ms), one in self._consumers.items() if uid == topic.uid and lease_ms > 0]
        if len(others) >= MOST_LEASES:
            if idle := [one for one in others if not one.takes]:
                longest = min(idle, key=lambda one: one.emptied_ms)
                longest.emptied_ms = float("-inf")
                longest.ended.set()
            raise TransportError(
                Fault.OVERLOADED,
                f"Takes of topic {topic.name!r} use {MOST_LEASES} different leases here, all that they may: "
                "ask for the topic's lease (lease_ms 0)",
            )

    def _holder(self, lease_ms: int) -> bytes:
        """Return the consumer's id. Another start of this broker makes another one."""
        if not self._prefix:
            name = self._broker.name.encode()[:NAME_BYTES].decode(errors="ignore")
            self._prefix = f"{PULL_PREFIX}{name}:{self._random_bits(32):08x}"
        return f"{self._prefix}:{lease_ms}".encode() if lease_ms else self._prefix.encode()

    async def _keep(self, consumer: PullConsumer, dealer: Dealer, key: tuple[int, int]) -> None:
        """Take the consumer off the roster when it must leave, or no Take has waited for a while."""
        limits, monotonic_ms = self._limits, self._clock.monotonic_ms
        try:
            idle_ms = 0.0
            while not consumer.gone and idle_ms < limits.pull_idle_ms:
                if idle_ms >= limits.pull_yield_ms and not self._broker.all_ours(dealer.topic):
                    break
                consumer.ended.clear()
                await wait_within(consumer.ended, min(limits.pull_yield_ms, limits.pull_idle_ms) / 1000.0)
                idle_ms = 0.0 if consumer.takes else monotonic_ms() - consumer.emptied_ms
        finally:
            dealer.part_with(consumer, consumer.withdraw())
            if self._consumers.get(key) is consumer:
                del self._consumers[key]

    async def settle(self, asked: Settle, caller: Principal, peer: str) -> Settled:
        """Settle messages of any holder. Return a definite answer for each. Raise Invalid or StoreError."""
        if not asked.topic or not asked.holder:
            raise Invalid("a Settle without a stream names its topic and its holder, as the Deliver had it")
        count = len(asked.birth)
        why = caller.refusal(Deed.CONSUME, asked.topic)
        if why:
            answers = forbidden(count, validate_settle(asked), why)
        elif (topic := await self._topics.catalog.find(asked.topic)) is None:
            answers = refused(count, Status.NOT_FOUND, no_such_topic(asked.topic))
        else:
            refusals, settles = admit_settles(asked, topic, asked.holder.encode(), self._clock.now())
            done = await self._settling.settle(topic, settles, peer) if len(settles) else None
            answers = refusals.merge(done)
        note_settles(self._metrics, asked.topic, asked, answers)
        return Settled(asked.request, answers, self._clock.now_ms())


def _nothing(now_ms: int, holder: str) -> Deliver:
    """Return a Deliver without messages."""
    longs, numbers, nothing = np.zeros(0, np.int64), np.zeros(0, np.uint64), Ragged.of([])
    return Deliver(
        leased_ms=now_ms,
        pushed_ms=now_ms,
        ids=nothing,
        birth=numbers,
        version=longs,
        due_ms=longs,
        scheduled_ms=longs,
        lease_until_ms=longs,
        deliveries=np.zeros(0, np.uint32),
        payload_sum=numbers,
        payloads=nothing,
        holder=holder,
    )
