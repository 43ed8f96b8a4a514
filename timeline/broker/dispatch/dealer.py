"""The dealer of one topic. It sleeps until exactly the next due time, leases for consumers with credit, and pushes.

One loop leases: `_obstacle` says why it cannot now, `_round` leases and deals once. Messages leased ahead of their time
have a timer of their own, so that no store call stands between a message and its due time.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

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
from timeline.broker.dispatch.roster import ConnectedConsumer, JoinedConsumer, Outboxes, Roster, grants_for
from timeline.broker.dispatch.rounds import DueRate, LeaseAhead, NextDue, RateLimit
from timeline.broker.lanes import MeteredStore, Settling
from timeline.broker.late import TopicLateness
from timeline.broker.runtime import Runtime, Tasks, Underway, wait_within
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
    """Settles that a broker makes itself, on one topic.

    Leases that no handler has seen are released, and messages that cannot be delivered are buried. `settled` is set
    while none is under way; wait for it to see their effect. A call counts from when it is made, not from when its task
    starts.
    """

    def __init__(
        self, settling: Settling, tasks: Tasks, random_bits: Callable[[int], int], topic: Callable[[], Topic]
    ) -> None:
        self._settling, self._tasks, self._random_bits, self._topic = settling, tasks, random_bits, topic
        self._under_way = Underway()
        self.settled = self._under_way.none

    def release_unseen(self, batches: list[LeasedBatch]) -> None:
        """Return leases that no handler has seen."""
        for batch in batches:
            if len(batch):
                self._begin(batch.settles(Operation.RELEASE, self._random_bits, unseen=True), "handing back")

    def bury(self, batch: LeasedBatch, reason: bytes) -> None:
        """Make dead letters of messages that cannot be delivered."""
        self._begin(batch.settles(Operation.BURY, self._random_bits, reason=reason), "burying")

    def _begin(self, settles: Settles, why: str) -> None:
        self._under_way.begin()
        self._tasks.spawn(self._settle(settles), why)

    async def _settle(self, settles: Settles) -> None:
        """Settle, and try again while the outcome is not known: operation ids make that harmless. After the last try
        the leases run out."""
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
    """Dispatches one topic. `topic` is replaced when its record changes. `buckets` says which buckets are ours. `hosts`
    hears which healthy consumers are here."""

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
        self._buckets, self._hosts, self.outboxes = buckets, hosts, outboxes
        self._held = LeaseAheadBuffer[ConnectedConsumer]()
        self._rate, self._due_rate = RateLimit(), DueRate()
        self._ahead = LeaseAhead(runtime.limits, store.store.capabilities.lease_ahead_ms)
        self._wake = asyncio.Event()
        self._next = NextDue()
        self._never_ahead_ms: int | None = None
        self._held_timer: asyncio.TimerHandle | None = None
        self._retry_ms = self._retry_at_ms = 0.0
        self._sweep_at_ms = runtime.clock.monotonic_ms() + runtime.limits.sweep_every_ms
        self._swept = False
        self._stranded_until_ms = self._fruitless_until_ms = 0.0
        self.behind = False
        """Whether the last round for our own buckets left something due: there is more than credit."""
        self._step_until_ms = 0.0
        """Until then the rest waits for a step of credit."""
        self._lone = False
        """Whether the next round is for one message alone: it was larger than each share of the round before."""
        self._largest_share = 0
        """In bytes, of that round."""
        self._dry = False
        """Whether a consumer has said since the last round began that it may have no work left."""
        self._stopped: LateCause | None = None
        self._causes = lateness.causes
        self._causes.now(LateCause.NO_CONSUMER, self._causes.started_ms)
        self.task: asyncio.Task[None] | None = None
        self.own_settles = OwnSettles(settling, runtime.tasks, random_bits, lambda: self.topic)
        self.coming_back = Underway()
        """Consumers that are being given what they hold."""
        self._between_rounds = asyncio.Event()
        self._between_rounds.set()
        self._asleep = False
        self._told_asleep: list[asyncio.Event] = []

    def wake(self) -> None:
        """There is more credit, or a consumer is healthy again."""
        self._fruitless_until_ms = self._step_until_ms = 0.0
        self._wake.set()

    def ran_dry(self) -> None:
        """A consumer may have no work left. Its credit is as before, so larger messages stay where they are."""
        self._dry = True
        self._step_until_ms = 0.0
        self._wake.set()

    def trickled(self) -> None:
        """There is a little more credit. Use it for what is due now; a backlog waits for a step of credit."""
        self._fruitless_until_ms = 0.0
        if not self.behind or self._step_until_ms <= self._clock.monotonic_ms():
            self._wake.set()

    def hint(self, due_ms: int, commit_seq: int = 0) -> None:
        """A message was put, moved or released to `due_ms`, in the commit `commit_seq` (0: unknown)."""
        if self._next.hint(due_ms, commit_seq):
            self.behind = False
            self._wake.set()

    def update(self, topic: Topic) -> None:
        """Take the changed record of the topic."""
        before, self.topic = self.topic.settings, topic
        if topic.settings.paused or topic.settings.lease_ahead_ms != before.lease_ahead_ms:
            self._free_held()
        self.look()

    def look(self) -> None:
        """Our due messages may have changed (settings, buckets, a store that is back). A round finds out."""
        self._next.look()
        self.behind = False
        self._retry_at_ms = 0.0
        self.wake()

    def note_taken_over(self) -> None:
        """Note that a broker is gone, and its buckets are ours. Until a sweep looked, they may have had no dealer."""
        now_ms, limits = self._clock.now_ms(), self._limits
        self._causes.span(LateCause.NO_BROKER, now_ms - limits.sweep_every_ms - limits.stranded_after_ms, now_ms)

    async def resume(self, consumer: ConnectedConsumer, in_hand: set[Token], peer: str) -> None:
        """Grant again to a consumer the leases of its id beyond the tokens in hand, at version + 1. No other consumer
        may have them until they run out."""
        await self.own_settles.settled.wait()
        try:
            async for rows in self._store.held(self.topic, self._clock.now_ms(), consumer.id):
                listed = zip(rows.ids.tolist(), rows.birth.tolist(), rows.version.tolist(), strict=True)
                missing = np.array([at for at, token in enumerate(listed) if token not in in_hand], dtype=np.intp)
                sizes = content_sizes(rows)[missing]
                while len(missing):
                    grants = grants_for([consumer], self._limits, len(missing))
                    count = len(deal(grants, sizes)) or len(deal([consumer.lone_grant], sizes[:1]))
                    await consumer.room_for_batches()
                    if consumer.gone:
                        return  # it is for the broker that it goes to
                    if not count:
                        return  # no credit for more: the rest comes back when its lease runs out
                    # A store may walk leases by their end: what is granted again here lies ahead on the same walk.
                    in_hand |= await self._regrant(rows.take(missing[:count]), consumer, peer)
                    missing, sizes = missing[count:], sizes[count:]
        except StoreError as trouble:
            log.warning("cannot look up what consumer %r holds: %s", consumer.id.decode(), trouble)

    async def _regrant(self, rows: Rows, consumer: ConnectedConsumer, peer: str) -> set[Token]:
        """Lease `rows` again and give them to their holder. Return their new tokens."""
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
        """Other consumers of the topic are healthy than before, so our buckets may have changed."""
        self._hosts(self.topic, self.roster.well)
        self.look()

    def admit(self, consumer: ConnectedConsumer) -> None:
        """Start to deal to `consumer`, and host it. Ignore it if another has its id by now."""
        if not self.roster.knows(consumer):
            return
        consumer.deal()
        self.roster.well.add(consumer.id)
        self._hosts(self.topic, self.roster.well)
        self.look()

    async def run(self) -> None:
        """Deal until cancelled. An error of ours is logged and the loop goes on: a topic never stands still."""
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
                    log.exception("dealer of topic %r failed and goes on", self.topic.name)
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
        """Sleep until something changes, at most `wait_ms`."""
        if not self._wake.is_set():
            self._asleep = True
            for event in self._told_asleep:
                event.set()
            self._told_asleep.clear()
            try:
                await (self._wake.wait() if wait_ms == math.inf else wait_within(self._wake, wait_ms / 1000.0))
            finally:
                self._asleep = False
        self._wake.clear()

    def tell_asleep(self, event: asyncio.Event) -> None:
        """Set `event` once nothing can be leased at that moment: no lease call is under way, and none has to begin."""
        if self._asleep and not self._wake.is_set():
            event.set()
        else:
            self._told_asleep.append(event)

    def _wait_ms(self) -> float:
        """Return how long until there is something to lease. 0: now. Record the present cause of lateness."""
        mono_ms, now = self._clock.monotonic_ms(), self._clock.now()
        cause, wait_ms = self._obstacle(mono_ms)
        until_step_ms = self._step_until_ms - mono_ms
        if self.behind and until_step_ms > 0:
            cause, wait_ms = cause or LateCause.NO_CREDIT, min(wait_ms or until_step_ms, until_step_ms)
        self._causes.now(cause, int(now))
        if wait_ms is not None:
            return wait_ms
        until_sweep_ms, due_ms = max(self._sweep_at_ms - mono_ms, until_step_ms), self._next.at_ms
        if due_ms is None or until_sweep_ms <= 0 or self._deals_nothing():
            return max(0.0, until_sweep_ms)
        lead_ms = self._ahead.lead_ms(self.topic.settings, self._store.lease_lead_ms)
        lead_ms = lead_ms if due_ms != self._never_ahead_ms and self.roster.any_ahead(mono_ms) else 0
        return min(until_sweep_ms, due_ms - lead_ms - now)

    def _deals_nothing(self) -> bool:
        """Return whether all buckets are others'."""
        mine = self._buckets(self.topic)
        return mine is not None and not len(mine)

    def _obstacle(self, mono_ms: float) -> tuple[LateCause | None, float | None]:
        """Return why it cannot lease now, and how long to wait for that at most. (None, None): it can."""
        if self._stopped is not None or self.topic.settings.paused:
            return self._stopped or LateCause.PAUSED, float(self._limits.sweep_every_ms)
        if mono_ms < self._retry_at_ms:
            return LateCause.STORE_SLOW, self._retry_at_ms - mono_ms
        if not self.roster.consumers:
            return LateCause.NO_CONSUMER, math.inf
        if not self.roster.any_ready(mono_ms):
            recovers_ms = self.roster.recovers_at_ms(mono_ms)
            wait_ms = min(self._limits.heartbeat_ms, (recovers_ms or mono_ms + self._limits.heartbeat_ms) - mono_ms)
            cause = LateCause.NO_CREDIT if self.roster.anybody(mono_ms) else LateCause.NO_CONSUMER
            return cause, max(1.0, float(wait_ms))
        if mono_ms < self._fruitless_until_ms:
            return LateCause.NO_CREDIT, self._fruitless_until_ms - mono_ms
        rate_wait_ms = self._rate.wait_ms(self.topic.settings.max_rate_per_s, mono_ms)
        if rate_wait_ms > 0:
            return LateCause.RATE_LIMITED, rate_wait_ms
        return None, None

    async def _round(self) -> None:
        """Lease once for all consumers with credit, and deal."""
        mono_ms = self._clock.monotonic_ms()
        topic, (consumers, early) = self.topic, self._served(mono_ms)
        most = self._ahead.most(self._next.at_ms, self._clock.now_ms())
        most = self._rate.allowance(topic.settings.max_rate_per_s, mono_ms, most)
        grants = grants_for(consumers, self._limits, most, early)
        consumers = consumers[: len(grants)]
        # If credit came back during the round before, a share may be large enough now.
        self._lone = self._lone and not any(grant.alone or grant.max_bytes > self._largest_share for grant in grants)
        if self._lone and grants and (one := self.roster.widest(mono_ms)) is not None:
            consumers, grants = [one], [one.lone_grant]
        self._between_rounds.clear()
        self._dry = False
        for consumer in consumers:
            consumer.loan_revoked = False
        try:
            leased, done_ms, swept = await self._lease(topic, grants, mono_ms, self._window_ms(consumers, early))
            self._rate.took(topic.settings.max_rate_per_s, len(leased.rows))
            self._due_rate.took(len(leased.rows), mono_ms)
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
        """Let the next round wait for a step of credit if there is more than credit.

        Otherwise each ack of a consumer that takes one message after another would lease one. `stranded`: the round
        found messages of others' buckets.
        """
        mono_ms = self._clock.monotonic_ms()
        self._step_until_ms = 0.0
        if (self.behind or stranded) and not self._dry and not self.roster.any_step(mono_ms):
            self._step_until_ms = mono_ms + self._limits.step_wait_ms

    def _served(self, mono_ms: float) -> tuple[list[ConnectedConsumer], bool]:
        """Return the consumers of a round, and whether it begins ahead of a due time."""
        consumers, due_ms = self.roster.ready(mono_ms), self._next.at_ms
        if due_ms is None or due_ms <= self._clock.now_ms():
            return consumers, False
        able = [consumer for consumer in consumers if consumer.credit_ahead > 0]
        return able or consumers, bool(able)

    def _window_ms(self, consumers: list[ConnectedConsumer], early: bool) -> int:
        """Return how far ahead of its due time a round may lease.

        A round that is not early leases for all the credit of Takes, and a message ahead of its time needs a Take of
        its own. So it goes as far as messages come due for half of the Takes that are left.
        """
        window_ms = self._ahead.window_ms(self.topic.settings, self._store.lease_lead_ms)
        takes = [one.credit_ahead for one in consumers if one.credit_ahead < one.credit_messages]
        if early or not takes or not window_ms:
            return window_ms
        return min(window_ms, self._due_rate.time_ms((min(takes) - 1) / 2))

    async def _lease(
        self, topic: Topic, grants: list[Grant], mono_ms: float, window_ms: int
    ) -> tuple[LeasedRows, int, bool]:
        """Call the store once, for what is due within `window_ms`. Return its answer, when it came, and whether the
        call swept buckets of others. Note the next due time."""
        now_ms = self._clock.now_ms()
        buckets, overdue_ms = self._buckets(topic), 0
        self._swept = mono_ms >= self._sweep_at_ms and not self._swept
        if self._swept:
            self._sweep_at_ms = mono_ms + self._limits.sweep_every_ms
            if buckets is not None:
                # A sweep looks into every bucket, whatever membership believes: nothing is stranded.
                buckets, overdue_ms = None, self._limits.stranded_after_ms
        self._next.ask()
        until_ms = now_ms + window_ms
        leased = await self._store.lease_due(topic, buckets, now_ms, until_ms, grants, overdue_ms)
        done_ms = self._clock.now_ms()
        self._retry_ms = 0.0
        if not overdue_ms:
            self._next.told(leased.next_due_ms, leased.commit_seq)
            self.behind = leased.next_due_ms is not None and leased.next_due_ms <= now_ms
            self._note_fruitless(leased, now_ms, until_ms, mono_ms, max((one.max_bytes for one in grants), default=0))
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

    def _note_fruitless(self, leased: LeasedRows, now_ms: int, until_ms: int, mono_ms: float, most_bytes: int) -> None:
        """Note until when not to ask again, after a round that leased nothing. `most_bytes`: of its grants."""
        self._never_ahead_ms, lone, self._lone = None, self._lone, False
        if len(leased.rows) or leased.expired or len(leased.buried) or leased.next_due_ms is None:
            return
        if leased.next_due_ms <= now_ms:
            # The next message is larger than each share of the round. It may fit all the credit of one consumer.
            one = self.roster.widest(mono_ms)
            self._lone = not lone and one is not None and (one.idle or one.credit_bytes > most_bytes)
            self._largest_share = most_bytes
            if not self._lone:  # wait for more credit in bytes
                self._fruitless_until_ms = mono_ms + FRUITLESS_MS
        elif leased.next_due_ms <= until_ms:
            # The store refused it: its lease is about to run out, and cannot be leased again ahead of that.
            self._never_ahead_ms = leased.next_due_ms

    def _account(self, leased: LeasedRows, mono_ms: float) -> None:
        """Count what else the round met, and mark consumers whose leases ran out."""
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
        """Give each consumer its rows, at once if they are due, else at their due time."""
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
        """Give the rows that are `mine`. Bury those that cannot be delivered."""
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
        """Push what is due, and hold the rest until it is due.

        If the consumer is gone or has not the credit, or the topic was stopped or paused since, release all unseen.
        """
        if consumer.gone or consumer.over_credit or self._stopped is not None or self.topic.settings.paused:
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
        """Set the timer for the earliest message held."""
        if self._held_timer is not None:
            self._held_timer.cancel()
        due_ms = self._held.next_due_ms()
        if due_ms is not None:
            wait_s = max(0.0, due_ms - self._clock.now()) / 1000.0
            self._held_timer = asyncio.get_running_loop().call_later(wait_s, self._push_due)

    def _push_due(self) -> None:
        """Push messages leased ahead that are due now."""
        try:
            for consumer, batch in self._held.due(self._clock.now_ms()):
                self.give(consumer, batch)
        finally:
            self._set_timer()

    def _push(self, consumer: ConnectedConsumer, batch: LeasedBatch) -> None:
        """Queue `batch`, which is due, for its consumer."""
        for part in batch.frames(self._limits.deliver_messages, self._limits.deliver_bytes):
            consumer.push(part)

    def clock_jumped(self, before_ms: int, after_ms: int) -> None:
        """The clock went from one to the other in no time."""
        self._causes.jumped(before_ms, after_ms)
        self._set_timer()
        self.look()

    async def quiet(self) -> None:
        """Return when no lease call is under way and all unseen leases are released."""
        await self._between_rounds.wait()
        await self.coming_back.none.wait()
        await self.own_settles.settled.wait()

    def part_with(self, consumer: ConnectedConsumer, unsent: list[LeasedBatch]) -> None:
        """Forget `consumer`, and release what was not sent to it."""
        self.roster.leave(consumer)
        self._hosts(self.topic, self.roster.well)
        self.own_settles.release_unseen(self._held.of(consumer) + unsent)
        self._wake.set()

    def stop_leasing(self, cause: LateCause = LateCause.PAUSED) -> None:
        """Lease no more, and release what was leased ahead. `cause`: the cause of lateness from now on."""
        self._stopped = self._stopped if self._stopped is LateCause.PAUSED else cause  # a drain never ends
        self._free_held()
        self._wake.set()

    def lease_again(self, cause: LateCause) -> None:
        """End `stop_leasing` for `cause`."""
        if self._stopped is cause:
            self._stopped = None
            self.look()

    def _free_held(self) -> None:
        """Release what was leased ahead of its time, and return the credit for it."""
        for consumer, batch in self._held.everything():
            consumer.refund(batch)
            self.own_settles.release_unseen([batch])

    def withdraw(self) -> None:
        """Push nothing more to any consumer of the topic. Release what was not pushed."""
        for consumer in list(self.roster.consumers.values()):
            self.own_settles.release_unseen(self._held.of(consumer) + consumer.withdraw())

    def dismiss(self, reason: LeavingReason, text: str) -> None:
        """Send all consumers of the topic away, and release what was not pushed."""
        for consumer in list(self.roster.consumers.values()):
            self.own_settles.release_unseen(self._held.of(consumer) + consumer.leave(reason, text))
        self._wake.set()


class Dealers:
    """The dealers of one broker, by topic's uid: of each topic that had a consumer here. `make` makes one."""

    def __init__(self, make: Callable[[Topic], Dealer], tasks: Tasks) -> None:
        self._make, self._tasks = make, tasks
        self._dealers: dict[int, Dealer] = {}

    def __iter__(self) -> Iterator[Dealer]:
        return iter(list(self._dealers.values()))

    def __contains__(self, dealer: Dealer) -> bool:
        return self._dealers.get(dealer.topic.uid) is dealer

    def of(self, topic: Topic) -> Dealer:
        """Return the dealer of `topic`, which the catalog has. It begins on first use."""
        dealer = self._dealers.get(topic.uid)
        if dealer is None:
            dealer = self._dealers[topic.uid] = self._make(topic)
            dealer.task = self._tasks.spawn(dealer.run(), f"dealer of {topic.name}")
        return dealer

    def consumers(self) -> Iterator[ConnectedConsumer]:
        """Yield all consumers connected here."""
        for dealer in self:
            yield from dealer.roster.consumers.values()

    def hint(self, topic_uid: int, due_ms: int, commit_seq: int = 0) -> bool:
        """Note that a message of the topic is due at `due_ms`, in a bucket of ours. `commit_seq`: see `Store`.

        Return whether the topic has a dealer here. A new one looks for itself.
        """
        dealer = self._dealers.get(topic_uid)
        if dealer is not None:
            dealer.hint(due_ms, commit_seq)
        return dealer is not None

    def supersede(self, topic_uid: int, joined: JoinedConsumer) -> None:
        """End the stream of an earlier session of a consumer that has connected to another broker."""
        dealer = self._dealers.get(topic_uid)
        here = None if dealer is None else dealer.roster.consumers.get(joined.id)
        if dealer is not None and here is not None and joined.supersedes(here.joined):
            log.info("consumer %r was taken over by a session at another broker", joined.id.decode())
            dealer.part_with(here, here.superseded())

    def update(self, topic: Topic) -> None:
        """Pass on the topic's changed record."""
        if (dealer := self._dealers.get(topic.uid)) is not None:
            dealer.update(topic)

    def drop(self, topic: Topic) -> None:
        """End the dealer of a dropped topic."""
        dealer = self._dealers.pop(topic.uid, None)
        if dealer is not None:
            dealer.dismiss(LeavingReason.TOPIC_DROPPED, f"topic {topic.name!r} was dropped")
            if dealer.task is not None:
                dealer.task.cancel()

    def wake(self) -> None:
        """Wake all dealers: there is room for more."""
        for dealer in self._dealers.values():
            dealer.wake()

    def look(self) -> None:
        """Have all dealers look for what is due."""
        for dealer in self._dealers.values():
            dealer.look()

    def note_taken_over(self, topic_uids: Iterable[int]) -> None:
        """Buckets of these topics came from a broker that is gone."""
        for uid in topic_uids:
            if (dealer := self._dealers.get(uid)) is not None:
                dealer.note_taken_over()

    def stop_leasing(self, cause: LateCause) -> None:
        """Lease and push nothing from this moment. Release what was not pushed. `cause`: the cause of lateness from now
        on."""
        for dealer in self:
            dealer.stop_leasing(cause)
            dealer.withdraw()

    async def dismiss(self, reason: LeavingReason, text: str, hand_back_ms: float) -> None:
        """After `stop_leasing`: send each topic's consumers away once unpushed leases are released.

        Another broker leases again to a consumer what it holds there and does not have in hand. Leases still on their
        way back would be delivered once more, to no handler. A store that does not answer delays a topic's consumers by
        at most `hand_back_ms`, and no other topic's. Leases that it refuses to take back run out.
        """
        await asyncio.gather(*(_dismiss(dealer, reason, text, hand_back_ms) for dealer in self))


async def _dismiss(dealer: Dealer, reason: LeavingReason, text: str, hand_back_ms: float) -> None:
    try:
        async with asyncio.timeout(hand_back_ms / 1000.0):
            await dealer.quiet()
    except TimeoutError:
        name = dealer.topic.name
        log.warning("topic %r: unpushed leases are not released after %d ms. Consumers leave now", name, hand_back_ms)
    dealer.dismiss(reason, text)
