"""One broker, put together: store, clock, membership, topics, intake, settling, a dealer for each topic in use.

It is what `timeline serve` runs behind gRPC and what the simulation runs behind its own network: nothing here knows
which. `start` → serve through `service` → `drain` (hand back, tell streams to leave) or `stop` (at once, as a crash).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from timeline.broker.api.gateway import Gateway
from timeline.broker.api.traces import Traces
from timeline.broker.catalog import Catalog
from timeline.broker.clocks.quarantine import watched
from timeline.broker.cluster.hints import ClusterHints
from timeline.broker.cluster.membership_log import MembershipLog
from timeline.broker.cluster.peers import PeerFactory
from timeline.broker.dispatch.dealer import Dealer
from timeline.broker.dispatch.roster import Outboxes
from timeline.broker.drain import part, stand_back
from timeline.broker.fairness.cooperative import EMPTY_SWEPT, TopicRounds, rest
from timeline.broker.fairness.limits import Limits
from timeline.broker.fairness.loop_scheduler import LoopScheduler
from timeline.broker.journal.events import Journal
from timeline.broker.lanes.intake import Intake
from timeline.broker.lanes.metered_store import MeteredStore
from timeline.broker.lanes.settling import Settling
from timeline.broker.status.broker_status import Depth
from timeline.broker.status.consumers import look_over, show_nobody
from timeline.broker.status.counts import Counting
from timeline.broker.status.late import LateRing, Spans
from timeline.broker.tasks import FINISH_S, Tasks
from timeline.clock import Clock
from timeline.columns import UInt8
from timeline.metrics import Metrics
from timeline.model import LateCause, LeavingReason, Operation, Status, Topic
from timeline.storage_plugins.contract import Opened, Store, StoreError, StoreUnavailable
from timeline.sync import JoinState, Member, Membership, MembershipChange

log = logging.getLogger("timeline.broker")
STARTING = "the broker is starting"
JOINING = "the broker waits to join its cluster"
DRAINING = "the broker is draining: use another one, or wait until it is back"


class Node:
    """A broker. `store` is not open yet; `random_bits(n)` gives n random bits; `service` answers the wire.

    `store_shown`: where the store is, in words that hold no secret. `make_peer` makes the way to another broker's
    address. `depths`: by topic's uid, as last counted.
    `not_ready`: why it does not serve now, empty while it does; `readiness` is set whenever that may have changed.
    """

    def __init__(
        self,
        *,
        store: Store,
        clock: Clock,
        membership: Membership,
        random_bits: Callable[[int], int],
        name: str,
        address: str = "",
        version: str = "0",
        limits: Limits | None = None,
        metrics: Metrics | None = None,
        store_shown: str = "",
        make_peer: PeerFactory | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.name, self.address, self.version = name, address, version
        self.store_shown = store_shown
        self.started_ms = 0
        self.depths: dict[int, Depth] = {}
        self.clock, self.membership = clock, membership
        self.limits = limits or Limits()
        self.metrics = metrics or Metrics()
        self.readiness = asyncio.Event()
        self.store = MeteredStore(
            store, clock.monotonic_ms, self.metrics, self._store_took, self.readiness.set, self._used, journal
        )
        self.tasks = Tasks(self._crashed)
        self.late = LateRing(self.limits.late_kept)
        self.cluster = ClusterHints(membership, name, make_peer, self.limits, self.metrics, self.tasks, self.hint)
        self.neighbours = MembershipLog(membership, name)
        self.turns = LoopScheduler(clock.monotonic_ms)
        queued = (self.limits, self.metrics, self.tasks, self.turns, self.cluster.scheduled)
        self.intake = Intake(self.store, clock.now_ms, clock.monotonic_ms, *queued)
        self.settling = Settling(self.store, clock.now_ms, clock.monotonic_ms, *queued)
        self.outboxes = Outboxes(self.limits.outboxes_bytes, self._wake_all)
        self.catalog = Catalog(self.store, clock, random_bits, self._topic_changed, self.cluster.alone)
        self.clocks = watched(self, store)
        self.service = Gateway(self)
        self.counting = Counting(self)
        self._to_sweep = TopicRounds(EMPTY_SWEPT)
        self.traces = Traces(name)
        self._random_bits = random_bits
        self._dealers: dict[int, Dealer] = {}
        self._store_slow = Spans()
        self._state = STARTING
        self._store_down_since_ms: float | None = None

    @property
    def not_ready(self) -> str:
        """Why it does not serve, in words; empty while it does."""
        if self._state == JOINING and self.membership.state.reason:
            return f"{JOINING}: {self.membership.state.reason}"
        if self._state or self.clocks.quarantined or self.store.refused:
            return self._state or self.clocks.quarantined or self.store.refused
        what = "takes no puts" if self.store.full else "is down"
        return f"the store {what}: {self.store.down}" if self.store.down else ""

    @property
    def no_calls(self) -> str:
        """Why it takes no calls, in words: what `not_ready` says, unless the store lacks nothing but room. That takes
        no puts, but answers whoever reads, and may take what frees some."""
        roomless = self.store.full and not (self._state or self.clocks.quarantined or self.store.refused)
        return "" if roomless else self.not_ready

    def _say(self, state: str) -> None:
        self._state = state
        self.readiness.set()

    async def start(self) -> Opened:
        """Opens and joins. Raises what these raise."""
        opened = await self.open()
        await self.join(opened)
        return opened

    async def open(self) -> Opened:
        """Opens the store and reads the topics. Raises StoreRefused or StoreUnavailable."""
        self.started_ms = self.clock.now_ms()
        opened = await self.store.open()
        await self.catalog.refresh()
        return opened

    async def join(self, opened: Opened) -> None:
        """Joins the cluster, which may take until others can be asked, and serves from then on. May be cancelled.
        Raises MembershipRefused."""
        self._say(JOINING)
        self.membership.on_change(self._cluster_changed)
        await self.membership.start(Member(self.name, self.address, self.version), opened.cluster_uid)
        self.neighbours.look(self.catalog.all())
        await self.clocks.measure()  # before it leases anything by a clock that may be wrong
        self._say("")
        self.metrics.gauge("timeline_broker_info", 1, self.name, self.version)
        self.tasks.spawn(self._every(self.limits.observe_every_ms, self._observe), "clock")
        self.tasks.spawn(self._every(self.limits.observe_every_ms, self._look_over), "consumers")
        self.tasks.spawn(self._every(self.limits.clocks_every_ms, self.clocks.measure), "clocks of others")
        self.tasks.spawn(self._every(self.limits.check_every_ms, self._check_store), "store check")
        self.tasks.spawn(self._every(self.limits.inspect_every_ms, self._inspect_store), "store settings")
        self.tasks.spawn(self._every(self.limits.catalog_every_ms, self.catalog.refresh), "catalog")
        self.tasks.spawn(self._every(self.limits.sweep_every_ms, self._sweep), "sweep")
        for counting in (self.counting.near, self.counting.far):
            self.tasks.spawn(self._every(self.limits.count_every_ms, counting), "counting")

    async def drain(self, grace_ms: float) -> None:
        """Not ready → leases no more → hands back what was not pushed → tells streams to leave → lets what is in flight
        be settled → closes. Takes no longer than `grace_ms`. Handlers keep their leases."""
        self._say(DRAINING)
        finish = True
        try:
            await asyncio.wait_for(self._drain(min(self.limits.hand_back_ms, grace_ms / 4)), grace_ms / 1000.0)
        except TimeoutError:
            log.warning("did not drain within %d ms: closing all the same", grace_ms)
            finish = False
        await self.stop(finish=finish)

    async def _drain(self, hand_back_ms: float) -> None:
        stand_back(self)
        await part(self, LeavingReason.DRAINING, DRAINING, hand_back_ms)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self.limits.drain_streams_ms / 1000.0
        while len(self.service.streams) and loop.time() < until_s:
            await self.service.streams.ended(until_s - loop.time())
        await self.service.idle()
        await self.intake.idle()
        await self.settling.idle()
        # A consumer that was just coming back has been given what it held: that goes back, too.
        await asyncio.gather(*(dealer.quiet() for dealer in self.dealers))

    async def stop(self, *, finish: bool = True) -> None:
        """Ends everything at once. What was leased and not settled runs out by its lease. `finish`: waits a moment for
        what is in the middle of a store's call."""
        self._say(self._state or "the broker has stopped")
        await self.tasks.cancel(FINISH_S if finish else 0.0)
        try:
            await self.cluster.peers.close()
            await self.membership.stop()
        finally:
            await self.store.store.close()

    async def topic(self, name: str) -> Topic | None:
        """The topic's record, None when there is none. Raises StoreError when it cannot be looked up."""
        return await self.catalog.find(name)

    def current(self, topic: Topic) -> Topic:
        """The record of `topic` as it stands now (its settings may have changed)."""
        return self.catalog.of(topic.uid) or topic

    @property
    def dealers(self) -> list[Dealer]:
        """All dealers: of each topic that had a consumer here."""
        return list(self._dealers.values())

    def deals(self, dealer: Dealer) -> bool:
        """Whether `dealer` is still one of them."""
        return self._dealers.get(dealer.topic.uid) is dealer

    def dealer(self, topic: Topic) -> Dealer:
        """The dealer of `topic`, which the catalog has: made when it is asked for first."""
        return self._dealers.get(topic.uid) or self._new_dealer(topic)

    def hint(self, topic_uid: int, due_ms: int, commit_seq: int = 0) -> bool:
        """A message of the topic is due at `due_ms` now, in a bucket of ours; `commit_seq`: see `Store`.
        Whether the topic has a dealer here: a new one looks for itself."""
        dealer = self._dealers.get(topic_uid)
        if dealer is not None:
            dealer.hint(due_ms, commit_seq)
        return dealer is not None

    def _store_took(self, took_ms: float) -> None:
        """A call on messages' way took so long: those of other topics may have waited behind it."""
        if took_ms >= self.limits.slow_ms:
            now_ms = self.clock.now_ms()
            self._store_slow.add(now_ms - int(took_ms), now_ms)

    def count(self, operation: Operation, statuses: UInt8) -> None:
        """Counts answers by operation and status."""
        if len(statuses):
            self.metrics.operations(operation.name.lower(), statuses, lambda code: Status.of(code).value)

    def _used(self, uid: int) -> None:
        """Messages of the topic may have changed."""
        if self.stocked(uid):
            self.depths.pop(uid, None)  # nothing, as counted: that is not known any more

    def stocked(self, uid: int) -> bool:
        """The topic may have messages from now on; whether it was taken for empty."""
        self._to_sweep.used(uid)
        return self.counting.rounds.used(uid)

    def _topic_changed(self, before: Topic | None, after: Topic | None, made: bool) -> None:
        if before is not None and (after is None or after.uid != before.uid):
            self._forget(before)
        if after is None:
            return
        if before is None or after.uid != before.uid:
            self.counting.add(after, made)
            self._to_sweep.add(after.uid, empty=True)  # until it is counted
            show_nobody(self.metrics, after.name)
        if (dealer := self._dealers.get(after.uid)) is not None:
            dealer.update(after)

    def _new_dealer(self, topic: Topic) -> Dealer:
        dealer = self._dealers[topic.uid] = Dealer(
            topic,
            since_ms=min(self.clock.now_ms(), max(self.started_ms, topic.created_ms)),
            store=self.store,
            settling=self.settling,
            clock=self.clock,
            limits=self.limits,
            metrics=self.metrics,
            late=self.late,
            random_bits=self._random_bits,
            tasks=self.tasks,
            buckets=self._buckets,
            hosts=self.cluster.host,
            outboxes=self.outboxes,
            store_slow=self._store_slow,
        )
        if self.clocks.quarantined:
            dealer.stop_leasing(LateCause.CLOCK)
        dealer.task = self.tasks.spawn(dealer.run(), f"dealer of {topic.name}")
        return dealer

    def _forget(self, topic: Topic) -> None:
        """The topic was dropped."""
        dealer = self._dealers.pop(topic.uid, None)
        if dealer is not None:
            dealer.dismiss(LeavingReason.TOPIC_DROPPED, f"topic {topic.name!r} was dropped")
            if dealer.task is not None:
                dealer.task.cancel()
        self.cluster.drop(topic)
        self.counting.forget(topic.uid)
        self._to_sweep.remove(topic.uid)
        self.depths.pop(topic.uid, None)
        self.metrics.forget_topic(topic.name)

    def _buckets(self, topic: Topic) -> Sequence[int] | None:
        return self.membership.buckets(topic.uid, topic.settings.buckets)

    def _wake_all(self) -> None:
        for dealer in self._dealers.values():
            dealer.wake()

    def _cluster_changed(self, change: MembershipChange) -> None:
        """Others came or went, or changed a topic's record, or this broker stands otherwise than before."""
        self.readiness.set()
        if MembershipChange.TOPICS in change:
            self.tasks.spawn(self._read_topics(), "catalog")
        if MembershipChange.MEMBERS in change:
            self.cluster.changed()
            if self.neighbours.look(self.catalog.all()):
                self.counting.restart()
            self._look_all()

    async def _read_topics(self) -> None:
        try:
            await self.catalog.hinted()
        except StoreError as trouble:
            log.warning("topics cannot be read again yet: %s", trouble)

    def _look_all(self) -> None:
        for dealer in self._dealers.values():
            dealer.look()

    def _crashed(self, name: str, error: BaseException) -> None:
        self.metrics.count("timeline_task_crashes_total", name.split(" ")[0])

    async def _every(self, period_ms: int, work: Callable[[], object]) -> None:
        """Calls `work` again and again; what goes wrong in one round is logged, and the next one comes all the same."""
        while True:
            await asyncio.sleep(period_ms / 1000.0)
            try:
                done = work()
                if asyncio.iscoroutine(done):
                    await done
            except StoreError as trouble:
                if not self.store.refused:  # that was logged when it began
                    log.warning("store trouble: %s", trouble)
            except Exception as error:
                log.exception("%s stumbled and goes on", work)
                self._crashed(work.__name__, error)

    def _observe(self) -> None:
        """Looks at the wall clock, whether this broker can deal, and whatever needs no store to be measured."""
        before_ms = self.clock.now_ms()
        self.clocks.look()
        after_ms = self.clock.now_ms()
        if abs(after_ms - before_ms) > self.limits.late_ms:
            log.warning("the clock jumped by %d ms: what came due in between is late by it", after_ms - before_ms)
            for dealer in self._dealers.values():
                dealer.clock_jumped(before_ms, after_ms)
        self.stand()
        self._measure()

    async def _look_over(self) -> None:
        await look_over(self)

    def stand(self) -> None:
        """Tells the membership whether this broker can deal: while it cannot, no healthy consumers are here."""
        mono_ms = self.clock.monotonic_ms()
        if not self.store.down or self.store.full:
            self._store_down_since_ms = None
        elif self._store_down_since_ms is None:
            self._store_down_since_ms = mono_ms
        since_ms = self._store_down_since_ms
        cut_off = since_ms is not None and mono_ms - since_ms >= self.limits.withdraw_after_ms
        serving = not (self._state or cut_off or self.clocks.quarantined)
        self.cluster.stand(self._dealers.values(), mono_ms, serving)

    async def _check_store(self) -> None:
        """While the store is down, asks whether it is back, and still the one that was opened; a broker that comes back
        deals at once."""
        if not self.store.down:
            return
        try:
            await self.store.inspect()
            await self.store.call("check", self.store.store.check())
        except StoreUnavailable:
            return
        log.info("the store is back")
        self.stand()
        self._look_all()

    async def _inspect_store(self) -> None:
        """Settings change while a server runs, and one that was quick to come back had no outage."""
        if not self.store.down:
            try:
                await self.store.inspect()
            except StoreUnavailable:
                return

    async def _sweep(self) -> None:
        """Removes what is over, topic by topic, whatever becomes of any. Raises the last trouble in the end."""
        if self.clocks.quarantined:
            return  # what is over by a wrong clock may not be
        trouble: StoreError | None = None
        for uid in self._to_sweep.begin():
            try:
                await self._sweep_topic(uid)
            except StoreError as error:
                trouble = error
        if trouble is not None:
            raise trouble

    async def _sweep_topic(self, uid: int) -> None:
        more = True
        while more and (topic := self.catalog.of(uid)) is not None:
            began_ms, now_ms = self.clock.monotonic_ms(), self.clock.now_ms()
            if self.counting.rounds.is_empty(uid):
                # There may still be ids that are remembered, and dead letters: they are removed in its turn.
                self._to_sweep.empty(uid)
            swept = await self.store.call("sweep", self.store.store.sweep(topic, now_ms, 10_000))
            self.store.expired(topic, swept.expired)
            if self.store.journal is not None:
                self.store.journal.expired(topic, swept.expired)
            more = swept.more
            # A store that never waits must not keep others from their turn.
            await (asyncio.sleep(0) if more else rest(self.clock.monotonic_ms() - began_ms))

    def _measure(self) -> None:
        """Sets the gauges that need no store."""
        self.metrics.gauge("timeline_ready", 0 if self.not_ready else 1)
        self.metrics.gauge("timeline_clock_step_seconds", self.clock.step_ms / 1000.0)
        self.metrics.gauge("timeline_intake_bytes", self.intake.bytes)
        self.metrics.gauge("timeline_outbox_bytes", self.outboxes.bytes)
        self.metrics.gauge("timeline_cluster_brokers", len(self.membership.members()))
        confirmed = self.membership.state.join_state is JoinState.JOINED
        self.metrics.gauge("timeline_etcd_up", 1 if confirmed else 0)
