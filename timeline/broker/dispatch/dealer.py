"""The dealer of one topic: sleeps until exactly the next due, leases what its consumers have credit for, pushes.

One loop leases: `_obstacle` says what keeps it from dealing now, `_round` leases and deals once. What was leased ahead
of its time has a timer of its own, so that no store call stands between a message and its due.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from timeline.broker.dispatch.leased_batch import (
    LeaseAheadBuffer,
    LeasedBatch,
    Token,
    content_sizes,
    ran_out,
    tokens,
    unsound_rows,
)
from timeline.broker.dispatch.roster import ConnectedConsumer, Outboxes, Roster, grants_for
from timeline.broker.dispatch.rounds import LeaseAhead, NextDue, RateLimit
from timeline.broker.lanes.group_commit import Settling
from timeline.broker.lanes.metered_store import MeteredStore
from timeline.broker.runtime import Runtime, Tasks, Underway
from timeline.broker.status.late import TopicLateness
from timeline.columns import Bools
from timeline.leases import deal
from timeline.model import DELIVERED_OUT, LateCause, LeavingReason, Operation, Rows, Status, Topic
from timeline.storage_plugins.contract import Grant, LeasedRows, Settles, StoreError

log = logging.getLogger("timeline.broker")
FIRST_RETRY_MS = 20.0
LAST_RETRY_MS = 1_000.0
FRUITLESS_MS = 100.0
TRIES = 5
FIRST_WAIT_MS = 20.0
WAIT_FACTOR = 3.0
UNSURE = (Status.UNAVAILABLE.code, Status.UNKNOWN.code, Status.THROTTLED.code)


class OwnSettles:
    """Settles that a broker makes itself, on one topic: leases that nobody's code has seen go back, and what cannot be
    delivered is buried. `settled` is set while none is under way: whoever must see their effect waits
    for it. A call counts from when it is made, not from when its task starts."""

    def __init__(
        self, settling: Settling, tasks: Tasks, random_bits: Callable[[int], int], topic: Callable[[], Topic]
    ) -> None:
        self._settling, self._tasks, self._random_bits, self._topic = settling, tasks, random_bits, topic
        self._under_way = Underway()
        self.settled = self._under_way.none

    def release_unseen(self, batches: list[LeasedBatch]) -> None:
        """Returns leases that no person's code has seen."""
        for batch in batches:
            if len(batch):
                self._begin(batch.unseen(self._random_bits), "handing back")

    def bury(self, batch: LeasedBatch, reason: bytes) -> None:
        """Makes dead letters of what cannot be delivered."""
        self._begin(batch.settles(Operation.BURY, self._random_bits, reason=reason), "burying")

    def _begin(self, settles: Settles, why: str) -> None:
        self._under_way.begin()
        self._tasks.spawn(self._settle(settles), why)

    async def _settle(self, settles: Settles) -> None:
        """Tries again while the outcome is not known, since operation ids make that harmless. What cannot be settled
        runs out by its lease."""
        try:
            wait_ms = FIRST_WAIT_MS
            for left in reversed(range(TRIES)):
                answers = await self._settling.settle(self._topic(), settles)
                if not left or not np.isin(answers.status, UNSURE).any():
                    break
                await asyncio.sleep(wait_ms / 1000.0)
                wait_ms *= WAIT_FACTOR
        finally:
            self._under_way.end()


class Dealer:
    """Deals one topic. `topic` is replaced when its record changes; `buckets` says which buckets are ours, `hosts` is
    told which consumers are here and well."""

    def __init__(
        self,
        topic: Topic,
        *,
        runtime: Runtime,
        store: MeteredStore,
        settling: Settling,
        lateness: TopicLateness,
        outboxes: Outboxes,
        random_bits: Callable[[int], int],
        buckets: Callable[[Topic], Sequence[int] | None],
        hosts: Callable[[Topic, Collection[bytes]], None],
    ) -> None:
        self.topic = topic
        self.roster = Roster(runtime.limits)
        self.settling, self.lateness = settling, lateness
        self._store, self._clock, self._limits, self._metrics = store, runtime.clock, runtime.limits, runtime.metrics
        self._buckets, self._hosts, self._outboxes = buckets, hosts, outboxes
        self._held = LeaseAheadBuffer[ConnectedConsumer]()
        self._rate = RateLimit()
        self._ahead = LeaseAhead(runtime.limits, store.store.capabilities.lease_ahead_ms)
        self._wake = asyncio.Event()
        self._next = NextDue()
        self._never_ahead_ms: int | None = None
        self._held_timer: asyncio.TimerHandle | None = None
        self._retry_ms = self._retry_at_ms = 0.0
        self._sweep_at_ms = runtime.clock.monotonic_ms() + runtime.limits.sweep_every_ms
        self._swept = False
        self._stranded_until_ms = self._fruitless_until_ms = 0.0
        self._behind = False
        """Whether the last round for what is ours left something that was due: there is more than credit."""
        self._step_until_ms = 0.0
        """Until then what was left waits for a step of credit."""
        self._dry = False
        """Whether a consumer has said since the last round began that it may have nothing left to do."""
        self._stopped: LateCause | None = None
        self._causes = lateness.causes
        self._causes.now(LateCause.NO_CONSUMER, self._causes.started_ms)
        self.task: asyncio.Task[None] | None = None
        self.own_settles = OwnSettles(settling, runtime.tasks, random_bits, lambda: self.topic)
        self.coming_back = Underway()
        """Consumers that are being given what they hold."""
        self._between_rounds = asyncio.Event()
        self._between_rounds.set()

    def wake(self) -> None:
        """There is more credit, or a consumer is well again."""
        self._fruitless_until_ms = self._step_until_ms = 0.0
        self._wake.set()

    def ran_dry(self) -> None:
        """A consumer may have nothing left to do. It has no more credit than before: what was larger still is."""
        self._dry = True
        self._step_until_ms = 0.0
        self._wake.set()

    def trickled(self) -> None:
        """There is a little more credit: what is due now goes out on it, a backlog waits until there is a step."""
        self._fruitless_until_ms = 0.0
        if not self._behind or self._step_until_ms <= self._clock.monotonic_ms():
            self._wake.set()

    def hint(self, due_ms: int, commit_seq: int = 0) -> None:
        """A message was put, moved or released to `due_ms`, in the commit `commit_seq` (0: it did not say)."""
        if self._next.hint(due_ms, commit_seq):
            self._behind = False
            self._wake.set()

    def update(self, topic: Topic) -> None:
        """The topic's record changed."""
        before, self.topic = self.topic.settings, topic
        if topic.settings.paused or topic.settings.lease_ahead_ms != before.lease_ahead_ms:
            self._free_held()
        self.look()

    def look(self) -> None:
        """What is ours and due may have changed (settings, buckets, a store that is back): a round finds out."""
        self._next.look()
        self._behind = False
        self._retry_at_ms = 0.0
        self.wake()

    def connect(
        self,
        id: bytes,
        session: int,
        bearer: str,
        lease_ms: int,
        heartbeat_ms: int,
        credit: tuple[int, int],
        room: tuple[int, int],
    ) -> ConnectedConsumer:
        """Return a consumer of this topic, which is not on the roster yet. `credit`, `room`: messages and bytes."""
        return ConnectedConsumer(
            id=id,
            session=session,
            bearer=bearer,
            lease_ms=lease_ms or self.topic.settings.lease_ms,
            heartbeat_ms=heartbeat_ms,
            credit_messages=credit[0],
            credit_bytes=credit[1],
            room_messages=room[0],
            room_bytes=room[1],
            limits=self._limits,
            heard_ms=self._clock.monotonic_ms(),
            wake=self.wake,
            trickled=self.trickled,
            outboxes=self._outboxes,
        )

    async def resume(self, consumer: ConnectedConsumer, in_hand: set[Token], peer: str) -> None:
        """Grant again to a consumer what its id holds beyond the tokens in hand, at version + 1: nobody else may have
        it until its lease runs out."""
        await self.own_settles.settled.wait()
        try:
            async for rows in self._store.held(self.topic, self._clock.now_ms(), consumer.id):
                listed = zip(rows.ids.tolist(), rows.birth.tolist(), rows.version.tolist(), strict=True)
                missing = np.array([at for at, token in enumerate(listed) if token not in in_hand], dtype=np.intp)
                sizes = content_sizes(rows)[missing]
                room = deal(grants_for([consumer], self._limits, len(missing)), sizes) if len(missing) else missing
                await consumer.room_for_batches()
                if consumer.gone:
                    return  # it is for the broker that it goes to
                if len(room):
                    # A store may walk leases by their end: what is granted again here lies ahead on the same walk.
                    in_hand |= await self._regrant(rows.take(missing[: len(room)]), consumer, peer)
                if len(room) < len(missing):
                    return  # no credit for more: the rest comes back when its lease runs out
        except StoreError as trouble:
            log.warning("cannot look up what consumer %r holds: %s", consumer.id.decode(), trouble)

    async def _regrant(self, rows: Rows, consumer: ConnectedConsumer, peer: str) -> set[Token]:
        """Lease `rows` again and give them to their holder; return their new tokens."""
        end_ms = self._clock.now_ms() + consumer.lease_ms
        settles = Settles.of(rows, operation=Operation.REGRANT, time_ms=end_ms)
        answers = await self.settling.settle(self.topic, settles, peer)
        good = np.flatnonzero(answers.status == Status.OK.code)
        if len(good) == 0:
            return set()
        rows = rows.take(good)
        rows.version, rows.due_ms = answers.version[good], answers.due_ms[good]
        rows.deliveries = rows.deliveries + np.uint32(1)
        again = np.ones(len(rows), dtype=np.bool_)
        batch = LeasedBatch(rows, rows.scheduled_ms, again, self._clock.now_ms())
        consumer.spend(len(batch), int(batch.sizes.sum()))
        self._give_sound(consumer, batch, again, unsound_rows(rows))
        return tokens(rows.ids, rows.birth, rows.version)

    def rehost(self) -> None:
        """Others of the topic's consumers are well than were: buckets may be ours because of it, or no more."""
        self._hosts(self.topic, self.roster.well)
        self.look()

    def admit(self, consumer: ConnectedConsumer) -> None:
        """From now on `consumer` is dealt to, and buckets are ours because of it; unless another has its id by now."""
        if not self.roster.knows(consumer):
            return
        consumer.deal()
        self.roster.well.add(consumer.id)
        self._hosts(self.topic, self.roster.well)
        self.look()

    async def run(self) -> None:
        """Deals until cancelled. An error of ours is logged and the loop goes on: a topic never stands still."""
        try:
            while True:
                try:
                    wait_ms = self._wait_ms()
                    if wait_ms > 0:
                        await self._sleep(wait_ms)
                    else:
                        await self._round()
                except StoreError as trouble:
                    self._back_off(trouble)
                except Exception:
                    log.exception("dealer of topic %r stumbled and goes on", self.topic.name)
                    self._back_off(None)
        finally:
            if self._held_timer is not None:
                self._held_timer.cancel()

    def _back_off(self, trouble: StoreError | None) -> None:
        self._retry_ms = min(LAST_RETRY_MS, max(FIRST_RETRY_MS, self._retry_ms * 2))
        self._retry_at_ms = self._clock.monotonic_ms() + self._retry_ms
        self._next.not_told(self._clock.now_ms())
        self._causes.now(LateCause.STORE_SLOW, self._clock.now_ms())
        if trouble is not None:
            log.warning("cannot lease on topic %r: %s", self.topic.name, trouble)

    async def _sleep(self, wait_ms: float) -> None:
        """Sleeps until something changes, but no longer than `wait_ms`."""
        if wait_ms == math.inf:
            await self._wake.wait()
        elif not self._wake.is_set():
            timer = asyncio.get_running_loop().call_later(wait_ms / 1000.0, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()
        self._wake.clear()

    def _wait_ms(self) -> float:
        """How long until there is something to lease; 0: now. Says on the way what hinders, for the late ring."""
        mono_ms, now = self._clock.monotonic_ms(), self._clock.now()
        cause, wait_ms = self._obstacle(mono_ms)
        until_step_ms = self._step_until_ms - mono_ms
        if self._behind and until_step_ms > 0:
            cause, wait_ms = cause or LateCause.NO_CREDIT, min(wait_ms or until_step_ms, until_step_ms)
        self._causes.now(cause, int(now))
        if wait_ms is not None:
            return wait_ms
        until_sweep_ms, due_ms = max(self._sweep_at_ms - mono_ms, until_step_ms), self._next.at_ms
        if due_ms is None or until_sweep_ms <= 0 or self._deals_nothing():
            return max(0.0, until_sweep_ms)
        lead_ms = self._ahead.lead_ms(self.topic.settings, self._store.lease_lead_ms)
        lead_ms = 0 if due_ms == self._never_ahead_ms else lead_ms
        return min(until_sweep_ms, due_ms - lead_ms - now)

    def _deals_nothing(self) -> bool:
        """Whether all buckets are others'."""
        mine = self._buckets(self.topic)
        return mine is not None and not len(mine)

    def _obstacle(self, mono_ms: float) -> tuple[LateCause | None, float | None]:
        """What keeps us from leasing, and how long to wait for it at most; (None, None): nothing."""
        if self._stopped is not None or self.topic.settings.paused:
            return self._stopped or LateCause.PAUSED, float(self._limits.sweep_every_ms)
        if mono_ms < self._retry_at_ms:
            return LateCause.STORE_SLOW, self._retry_at_ms - mono_ms
        if not self.roster.consumers:
            return LateCause.NO_CONSUMER, math.inf
        if not self.roster.any_ready(mono_ms) or self._outboxes.full:
            recovers_ms = self.roster.recovers_at_ms(mono_ms)
            wait_ms = min(self._limits.heartbeat_ms, (recovers_ms or mono_ms + self._limits.heartbeat_ms) - mono_ms)
            cause = (
                LateCause.NO_CREDIT if self._outboxes.full or self.roster.anybody(mono_ms) else LateCause.NO_CONSUMER
            )
            return cause, max(1.0, float(wait_ms))
        if mono_ms < self._fruitless_until_ms:
            return LateCause.NO_CREDIT, self._fruitless_until_ms - mono_ms
        rate_wait_ms = self._rate.wait_ms(self.topic.settings.max_rate_per_s, mono_ms)
        if rate_wait_ms > 0:
            return LateCause.RATE_LIMITED, rate_wait_ms
        return None, None

    async def _round(self) -> None:
        """Leases once for whoever has credit, and deals what came."""
        mono_ms = self._clock.monotonic_ms()
        topic, consumers = self.topic, self.roster.ready(mono_ms)
        most = self._ahead.most(self._next.at_ms, self._clock.now_ms())
        most = self._rate.allowance(topic.settings.max_rate_per_s, mono_ms, most)
        grants = grants_for(consumers, self._limits, most)
        consumers = consumers[: len(grants)]
        self._between_rounds.clear()
        self._dry = False
        try:
            leased, done_ms, swept = await self._lease(topic, grants, mono_ms)
            self._rate.took(topic.settings.max_rate_per_s, len(leased.rows))
            self._ahead.took(sum(grant.count for grant in grants), len(leased.rows))
            self._account(leased, mono_ms)
            if len(leased.rows):
                self._deal(leased, consumers, done_ms, swept)
            self._await_step(swept and len(leased.rows) > 0)
        finally:
            self._between_rounds.set()
        # A store that never waits must not keep others from their turn.
        await asyncio.sleep(0)

    def _await_step(self, stranded: bool) -> None:
        """After a round: where more is there than credit, the next one waits for a step of it. Each ack of a consumer
        that takes one message after the other would else lease one. `stranded`: what others deal was found."""
        mono_ms = self._clock.monotonic_ms()
        self._step_until_ms = 0.0
        if (self._behind or stranded) and not self._dry and not self.roster.any_step(mono_ms):
            self._step_until_ms = mono_ms + self._limits.step_wait_ms

    async def _lease(self, topic: Topic, grants: list[Grant], mono_ms: float) -> tuple[LeasedRows, int, bool]:
        """One call of the store, when it returned, and whether it was a sweep of what others deal. Notes what it says
        of the next due."""
        now_ms = self._clock.now_ms()
        buckets, overdue_ms = self._buckets(topic), 0
        self._swept = mono_ms >= self._sweep_at_ms and not self._swept
        if self._swept:
            self._sweep_at_ms = mono_ms + self._limits.sweep_every_ms
            if buckets is not None:
                # A sweep looks into every bucket, whatever membership believes: nothing is stranded.
                buckets, overdue_ms = None, self._limits.stranded_after_ms
        self._next.ask()
        until_ms = now_ms + self._ahead.window_ms(topic.settings, self._store.lease_lead_ms)
        leased = await self._store.lease_due(topic, buckets, now_ms, until_ms, grants, overdue_ms)
        done_ms = self._clock.now_ms()
        self._retry_ms = 0.0
        if not overdue_ms:
            self._next.told(leased.next_due_ms, leased.commit_seq)
            self._behind = leased.next_due_ms is not None and leased.next_due_ms <= now_ms
            self._note_fruitless(leased, now_ms, until_ms, mono_ms)
            return leased, done_ms, False
        # A sweep says nothing of what is ours, and is the time to look at that, too: a hint may have been lost.
        self._next.told(now_ms, 0)
        if len(leased.rows):
            self._sweep_at_ms = mono_ms  # there may be more: again, after a round for what is ours
            self._stranded_until_ms = mono_ms + self._limits.sweep_every_ms
        elif mono_ms < self._stranded_until_ms and not all(grant.alone for grant in grants):
            # There was more a moment ago, and what is next may be larger than the credit in bytes that was left.
            self._sweep_at_ms = mono_ms + FRUITLESS_MS
        return leased, done_ms, True

    def _note_fruitless(self, leased: LeasedRows, now_ms: int, until_ms: int, mono_ms: float) -> None:
        """When a round leased nothing, another like it would not either: say until when not to ask again."""
        self._never_ahead_ms = None
        if len(leased.rows) or leased.expired or len(leased.buried) or leased.next_due_ms is None:
            return
        if leased.next_due_ms <= now_ms:
            # What is due is larger than anybody's credit in bytes: wait for more credit.
            self._fruitless_until_ms = mono_ms + FRUITLESS_MS
        elif leased.next_due_ms <= until_ms:
            # It was asked for and not given: a lease that is about to run out, which nobody may have ahead of its time.
            self._never_ahead_ms = leased.next_due_ms

    def _account(self, leased: LeasedRows, mono_ms: float) -> None:
        """Counts what the round met besides what it leased, and marks consumers whose leases ran out."""
        name = self._metrics.topic(self.topic.name)
        if len(leased.buried):
            self._metrics.count("timeline_buried_total", name, DELIVERED_OUT.decode(), by=len(leased.buried))
            log.warning(
                "topic %r: %d messages delivered too often are dead letters", self.topic.name, len(leased.buried)
            )
        if leased.prior_holders.nbytes:
            prior = zip(leased.prior_holders.tolist(), leased.was_due_ms.tolist(), strict=True)
            ended = sorted((end_ms, holder) for holder, end_ms in prior if holder)
            self._metrics.count("timeline_redeliveries_total", name, by=len(ended))
            for holder, end_ms in {holder: end_ms for end_ms, holder in ended}.items():
                if (consumer := self.roster.consumers.get(holder)) is not None:
                    consumer.lapsed(end_ms, self._clock.now_ms(), mono_ms)

    def _deal(self, leased: LeasedRows, consumers: list[ConnectedConsumer], done_ms: int, swept: bool) -> None:
        """Gives each consumer its rows: now if they are due, else when they are."""
        whole = LeasedBatch(leased.rows, leased.was_due_ms, ran_out(leased), done_ms, stranded=swept)
        sizes = whole.sizes
        counts = np.bincount(leased.grant, minlength=len(consumers))
        spent = np.bincount(leased.grant, weights=sizes, minlength=len(consumers))
        for consumer, count, bytes_ in zip(consumers, counts.tolist(), spent.tolist(), strict=True):
            consumer.spend(count, int(bytes_))
        self.roster.dealt_last(consumers[int(leased.grant[-1])])
        unsound = unsound_rows(leased.rows, leased.damaged)
        for at, consumer in enumerate(consumers):
            if counts[at]:
                self._give_sound(consumer, whole, leased.grant == at, unsound)

    def _give_sound(
        self, consumer: ConnectedConsumer, whole: LeasedBatch, mine: Bools, unsound: dict[bytes, Bools]
    ) -> None:
        """Gives the rows that are `mine`, and buries those among them that cannot be delivered."""
        for reason, rows in unsound.items():
            if (mine & rows).any():
                self._bury(consumer, whole.where(mine & rows), reason)
            mine = mine & ~rows
        if mine.any():
            self.give(consumer, whole.where(mine))

    def _bury(self, consumer: ConnectedConsumer, batch: LeasedBatch, reason: bytes) -> None:
        log.error("topic %r: %d messages with %s are dead letters", self.topic.name, len(batch), reason.decode())
        self._metrics.count(
            "timeline_buried_total", self._metrics.topic(self.topic.name), reason.decode(), by=len(batch)
        )
        self.own_settles.bury(batch, reason)
        consumer.refund(batch)

    def give(self, consumer: ConnectedConsumer, batch: LeasedBatch) -> None:
        """Pushes what is due and holds the rest until it is; hands all back when the consumer is gone, or the topic was
        stopped or paused since it was leased."""
        if consumer.gone or self._stopped is not None or self.topic.settings.paused:
            consumer.refund(batch)
            self.own_settles.release_unseen([batch])
            return
        ahead = batch.was_due_ms > self._clock.now_ms()
        if ahead.any():
            self._held.add(consumer, batch.where(ahead))
            self._set_timer()
            batch = batch.where(~ahead)
        if len(batch):
            self._push(consumer, batch)

    def _set_timer(self) -> None:
        """For the earliest of what is held."""
        if self._held_timer is not None:
            self._held_timer.cancel()
        due_ms = self._held.next_due_ms()
        if due_ms is not None:
            wait_s = max(0.0, due_ms - self._clock.now()) / 1000.0
            self._held_timer = asyncio.get_running_loop().call_later(wait_s, self._push_due)

    def _push_due(self) -> None:
        """Pushes what was leased ahead and is due now."""
        try:
            for consumer, batch in self._held.due(self._clock.now_ms()):
                self.give(consumer, batch)
        finally:
            self._set_timer()

    def _push(self, consumer: ConnectedConsumer, batch: LeasedBatch) -> None:
        """Queues `batch`, which is due, for its consumer."""
        for part in batch.frames(self._limits.deliver_messages, self._limits.deliver_bytes):
            consumer.push(part)

    def clock_jumped(self, before_ms: int, after_ms: int) -> None:
        """The clock went from one to the other in no time."""
        self._causes.jumped(before_ms, after_ms)
        self._set_timer()
        self.look()

    async def quiet(self) -> None:
        """Returns when no lease call is under way and what was to go back has gone back."""
        await self._between_rounds.wait()
        await self.coming_back.none.wait()
        await self.own_settles.settled.wait()

    def part_with(self, consumer: ConnectedConsumer, unsent: list[LeasedBatch]) -> None:
        """`consumer` goes: what was not sent to it goes back."""
        self.roster.leave(consumer)
        self._hosts(self.topic, self.roster.well)
        self.own_settles.release_unseen(self._held.of(consumer) + unsent)
        self._wake.set()

    def stop_leasing(self, cause: LateCause = LateCause.PAUSED) -> None:
        """Leases no more and hands back what was leased ahead. `cause`: what is then to blame for lateness."""
        self._stopped = self._stopped if self._stopped is LateCause.PAUSED else cause  # a drain never ends
        self._free_held()
        self._wake.set()

    def lease_again(self, cause: LateCause) -> None:
        """The end of `stop_leasing` for `cause`."""
        if self._stopped is cause:
            self._stopped = None
            self.look()

    def _free_held(self) -> None:
        """What was leased ahead of its time goes back, and the credit that it took."""
        for consumer, batch in self._held.everything():
            consumer.refund(batch)
            self.own_settles.release_unseen([batch])

    def withdraw(self) -> None:
        """Nothing more is pushed to any consumer of the topic: what was not pushed goes back."""
        for consumer in list(self.roster.consumers.values()):
            self.own_settles.release_unseen(self._held.of(consumer) + consumer.withdraw())

    def dismiss(self, reason: LeavingReason, text: str) -> None:
        """Tells every consumer of the topic to leave and hands back what was not pushed."""
        for consumer in list(self.roster.consumers.values()):
            self.own_settles.release_unseen(self._held.of(consumer) + consumer.leave(reason, text))
        self._wake.set()


class Dealers:
    """The dealers of one broker: of each topic that had a consumer here, by its uid. `make` makes one."""

    def __init__(self, make: Callable[[Topic], Dealer], tasks: Tasks) -> None:
        self._make, self._tasks = make, tasks
        self._dealers: dict[int, Dealer] = {}

    def __iter__(self) -> Iterator[Dealer]:
        return iter(list(self._dealers.values()))

    def __contains__(self, dealer: Dealer) -> bool:
        return self._dealers.get(dealer.topic.uid) is dealer

    def of(self, topic: Topic) -> Dealer:
        """Return the dealer of `topic`, which the catalog has. It begins when it is asked for first."""
        dealer = self._dealers.get(topic.uid)
        if dealer is None:
            dealer = self._dealers[topic.uid] = self._make(topic)
            dealer.task = self._tasks.spawn(dealer.run(), f"dealer of {topic.name}")
        return dealer

    def consumers(self) -> Iterator[ConnectedConsumer]:
        """All that are connected here."""
        for dealer in self:
            yield from dealer.roster.consumers.values()

    def hint(self, topic_uid: int, due_ms: int, commit_seq: int = 0) -> bool:
        """A message of the topic is due at `due_ms` now, in a bucket of ours. `commit_seq`: see `Store`. Return whether
        the topic has a dealer here: a new one looks for itself."""
        dealer = self._dealers.get(topic_uid)
        if dealer is not None:
            dealer.hint(due_ms, commit_seq)
        return dealer is not None

    def update(self, topic: Topic) -> None:
        """The topic's record changed."""
        if (dealer := self._dealers.get(topic.uid)) is not None:
            dealer.update(topic)

    def drop(self, topic: Topic) -> None:
        """The topic was dropped."""
        dealer = self._dealers.pop(topic.uid, None)
        if dealer is not None:
            dealer.dismiss(LeavingReason.TOPIC_DROPPED, f"topic {topic.name!r} was dropped")
            if dealer.task is not None:
                dealer.task.cancel()

    def wake(self) -> None:
        """There is room for more."""
        for dealer in self._dealers.values():
            dealer.wake()

    def look(self) -> None:
        """What is ours and due may have changed, on any topic."""
        for dealer in self._dealers.values():
            dealer.look()

    def stop_leasing(self, cause: LateCause) -> None:
        """From this moment nothing is leased and nothing pushed; what was not pushed goes back. `cause`: what is to
        blame for lateness from now on."""
        for dealer in self:
            dealer.stop_leasing(cause)
            dealer.withdraw()

    async def dismiss(self, reason: LeavingReason, text: str, hand_back_ms: float) -> None:
        """After `stop_leasing`: tell each topic's consumers to leave once what was not pushed is back.

        Another broker leases again to a consumer what it holds there and does not have in hand: what is still on its
        way back by then would have been delivered once more, to nobody's code. A store that does not answer keeps
        nobody for longer than `hand_back_ms`, nor any other topic's consumers at all; what it refuses again and again
        to take back runs out by its lease.
        """
        await asyncio.gather(*(_dismiss(dealer, reason, text, hand_back_ms) for dealer in self))


async def _dismiss(dealer: Dealer, reason: LeavingReason, text: str, hand_back_ms: float) -> None:
    try:
        async with asyncio.timeout(hand_back_ms / 1000.0):
            await dealer.quiet()
    except TimeoutError:
        name = dealer.topic.name
        log.warning("topic %r: what was not pushed is not back after %d ms: consumers leave now", name, hand_back_ms)
    dealer.dismiss(reason, text)
