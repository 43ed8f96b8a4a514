"""One broker, put together from its parts, with a dealer for each topic in use.

`timeline serve` runs it behind gRPC, and the simulation behind its own network: nothing here knows which. `start` →
serve through `service` → `drain` (release, send streams away) or `stop` (at once, as a crash).

This is the composition root: the only module that sees all of a broker's parts. Each of them takes what it uses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from timeline.broker.api.gateway import Gateway
from timeline.broker.api.mutate import MutateHandler
from timeline.broker.api.produce import ProduceStream, PutHandler
from timeline.broker.api.pull import PullHandler
from timeline.broker.api.read import ReadHandler
from timeline.broker.api.topics import TopicAccess
from timeline.broker.catalog import JOINING, Catalog, Readiness
from timeline.broker.clocks import Clocks
from timeline.broker.cluster import ClusterHints, MembershipLog, PeerFactory
from timeline.broker.dispatch.dealer import Dealer, Dealers
from timeline.broker.dispatch.roster import Outboxes
from timeline.broker.fairness import CooperativePace, LoopScheduler, rest
from timeline.broker.journal.events import Journal
from timeline.broker.lanes import Intake, MeteredStore, Settling
from timeline.broker.late import LatenessCauses, LateRing, TopicLateness, Traces
from timeline.broker.limits import Limits
from timeline.broker.runtime import FINISH_S, OffLoop, Runtime, Tasks, on_loop
from timeline.broker.schedules.handler import ScheduleHandler
from timeline.broker.schedules.records import ScheduleStore
from timeline.broker.schedules.runner import ScheduleRunner
from timeline.broker.schedules.survey import ScheduleSurvey
from timeline.broker.status import EMPTY_SWEPT, ConsumerCounts, MessageCounts, StatusReporter, TopicRounds
from timeline.clock import Clock
from timeline.metrics import Metrics
from timeline.model import LateCause, LeavingReason, Topic
from timeline.storage_plugins.contract import Opened, Store, StoreError, StoreUnavailable
from timeline.sync import JoinState, Member, Membership, MembershipChange

log = logging.getLogger("timeline.broker")
DRAINING = "the broker is draining: use another one, or wait until it is back"


class Node:
    """A broker.

    - `store` is not open yet. `store_shown`: where it is, in words that hold no secret.
    - `random_bits(n)` gives n random bits.
    - `make_peer` makes the channel to another broker's address.
    - `service` answers the wire.
    - `readiness` says whether it serves now.
    - `off_loop` calls what may take long beside the event loop.
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
        off_loop: OffLoop = on_loop,
    ) -> None:
        self.name, self.address, self.version = name, address, version
        self.clock, self.membership = clock, membership
        self.limits, self.metrics = limits or Limits(), metrics or Metrics()
        self.tasks, self.scheduler = Tasks(self._crashed), LoopScheduler(clock.monotonic_ms)
        runtime = self._runtime = Runtime(clock, self.limits, self.metrics, self.tasks, self.scheduler, off_loop)
        changed = asyncio.Event()
        self.store = MeteredStore(store, runtime, changed.set, lambda uid: self.counts.used(uid), journal)
        self.readiness = Readiness(self.store, membership, changed)
        self.dealers = Dealers(self._dealer_of, self.tasks)
        self.cluster = ClusterHints(runtime, membership, name, make_peer, self.dealers.hint, self.dealers.supersede)
        self._membership_log = MembershipLog(membership, name)
        self.catalog = Catalog(self.store, clock, random_bits, self._topic_changed, self.cluster.alone)
        self.intake = Intake(self.store, runtime, self.cluster.scheduled)
        self.settling = Settling(self.store, runtime, self.cluster.scheduled)
        self.outboxes = Outboxes(self.limits.outboxes_bytes, self.dealers.wake)
        self.clocks = Clocks(
            runtime, store, membership.members, self.dealers.consumers, self.cluster.peers, self._trust_changed
        )
        self._to_sweep = TopicRounds(EMPTY_SWEPT)
        self.counts = MessageCounts(runtime, self.catalog, self.store, self.cluster, self._to_sweep)
        self._consumers = ConsumerCounts(runtime, self.dealers)
        self.late, self._traces = LateRing(self.limits.late_kept), Traces(name)
        self._random_bits = random_bits
        self._store_down_since_ms: float | None = None
        self._opening_ms = 0
        """When the store was opened. Until then this broker was down, whenever its process began."""
        self.puts = PutHandler(runtime, self.catalog, self.readiness, self.intake, self._traces)
        self._records = ScheduleStore(runtime, self.catalog, self.store, self.cluster, self.intake, random_bits)
        self.schedules = ScheduleRunner(runtime, self._records, self.readiness, self.dealers, random_bits, name)
        self.service = self._gateway(version, store_shown)
        self.metrics.gauge("timeline_etcd_up", 1)  # it is not asked before the store is open

    def _gateway(self, version: str, store_shown: str) -> Gateway:
        runtime, readiness, store = self._runtime, self.readiness, self.store
        topics = TopicAccess(self.catalog, readiness, self.membership.topics_changed)
        status = StatusReporter(
            runtime,
            version=version,
            store_shown=store_shown,
            readiness=readiness,
            store=store,
            catalog=self.catalog,
            dealers=self.dealers,
            counts=self.counts,
            cluster=self.cluster,
        )
        return Gateway(
            runtime,
            topics,
            puts=self.puts,
            pulls=PullHandler(runtime, topics, self.dealers, self.cluster, self.settling, self._random_bits),
            mutations=MutateHandler(runtime, topics, store, self.cluster),
            schedules=ScheduleHandler(runtime, topics, self._records),
            reads=ReadHandler(runtime, topics, readiness, store, self.dealers, self.late, self.counts),
            status=status,
            dealers=self.dealers,
            cluster=self.cluster,
        )

    @property
    def not_ready(self) -> str:
        """Why it does not serve. Empty: it does."""
        return self.readiness.not_ready

    async def start(self) -> Opened:
        """Open and join. Raise what these raise."""
        opened = await self.open()
        await self.join(opened)
        return opened

    async def open(self) -> Opened:
        """Open the store and read the topics. Raise StoreRefused or StoreUnavailable."""
        self._opening_ms = self.clock.now_ms()
        self.readiness.started_ms = self.readiness.started_ms or self._opening_ms
        opened = await self.store.open()
        await self.catalog.refresh()
        return opened

    async def join(self, opened: Opened) -> None:
        """Join the cluster, which may take until others can be asked, and serve from then on. May be cancelled.

        Raise MembershipRefused.
        """
        self.readiness.say(JOINING)
        self.metrics.gauge("timeline_etcd_up", 0)
        self.membership.on_change(self._cluster_changed)
        await self.membership.start(Member(self.name, self.address, self.version), opened.cluster_uid)
        self._membership_log.look(self.catalog.all())
        await self.clocks.measure()  # before it leases anything by a clock that may be wrong
        self.readiness.say("")
        self.schedules.start()
        self.metrics.gauge("timeline_broker_info", 1, self.name, self.version)
        self.tasks.spawn(self._every(self.limits.observe_every_ms, self._observe), "clock")
        self.tasks.spawn(self._every(self.limits.observe_every_ms, self._look_over), "consumers")
        self.tasks.spawn(self._every(self.limits.clocks_every_ms, self.clocks.measure), "clocks of others")
        self.tasks.spawn(self._every(self.limits.check_every_ms, self._check_store), "store check")
        self.tasks.spawn(self._every(self.limits.inspect_every_ms, self._inspect_store), "store settings")
        self.tasks.spawn(self._every(self.limits.catalog_every_ms, self.catalog.refresh), "catalog")
        self.tasks.spawn(self._every(self.limits.sweep_every_ms, self._sweep), "sweep")
        self.tasks.spawn(self.counts.survey(), "counting")
        self.tasks.spawn(ScheduleSurvey(self._runtime, self._records).run(), "counting schedules")
        for counting in (self.counts.near, self.counts.far):
            self.tasks.spawn(self._every(self.limits.count_every_ms, counting), "counting")

    async def drain(self, grace_ms: float) -> None:
        """Drain: not ready → lease no more → release what was not pushed → ask streams to leave → settle what is in
        flight → close. Take at most `grace_ms`. Handlers keep their leases."""
        self.readiness.say(DRAINING)
        finish = True
        try:
            shares = min(self.limits.hand_back_ms, grace_ms / 4), min(self.limits.drain_streams_ms, grace_ms / 2)
            await asyncio.wait_for(self._drain(*shares), grace_ms / 1000.0)
        except TimeoutError:
            log.warning("did not drain within %d ms: closing all the same", grace_ms)
            finish = False
        await self.stop(finish=finish)

    async def _drain(self, hand_back_ms: float, streams_ms: float) -> None:
        self._stand_back(LateCause.PAUSED)
        await self._dismiss(LeavingReason.DRAINING, DRAINING, hand_back_ms)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + streams_ms / 1000.0
        while len(self.service.streams) and loop.time() < until_s:
            await self.service.streams.ended(until_s - loop.time())
        await self.service.idle()
        await self.schedules.idle()
        await self.intake.idle()
        await self.settling.idle()
        # A consumer that was just coming back has been given what it held: that goes back, too.
        await asyncio.gather(*(dealer.quiet() for dealer in self.dealers))

    async def stop(self, *, finish: bool = True) -> None:
        """End everything at once. Unsettled leases run out. `finish`: wait a moment for calls of the store to end."""
        self.readiness.say(self.readiness.state or "the broker has stopped")
        await self.tasks.cancel(FINISH_S if finish else 0.0)
        try:
            await self.cluster.peers.close()
            await self.membership.stop()
        finally:
            await self.store.store.close()

    def _stand_back(self, cause: LateCause) -> None:
        """Lease and push nothing from this moment. `cause`: the cause of lateness from now on."""
        self.stand()  # first of all: others deal its buckets from now on
        self.dealers.stop_leasing(cause)

    async def _dismiss(self, reason: LeavingReason, text: str, hand_back_ms: float) -> None:
        """After `_stand_back`: ask producers to leave, and consumers once what was not pushed to them is released."""
        for stream in self.service.streams.of(ProduceStream):
            # Not awaited: a producer that does not read holds up no other.
            self.tasks.spawn(stream.leave(text, reason), "parting with a producer")
        await self.dealers.dismiss(reason, text, hand_back_ms)

    def _trust_changed(self) -> None:
        """Stop or resume work by this broker's clock. In quarantine its buckets and connections go to others."""
        why = self.readiness.quarantined = self.clocks.quarantined
        if why:
            self._stand_back(LateCause.CLOCK)
            self.tasks.spawn(self._dismiss(LeavingReason.QUARANTINED, why, self.limits.hand_back_ms), "parting")
        else:
            for dealer in self.dealers:
                dealer.lease_again(LateCause.CLOCK)
        self.readiness.changed.set()

    def _topic_changed(self, before: Topic | None, after: Topic | None, made: bool) -> None:
        if before is not None and (after is None or after.uid != before.uid):
            self._forget(before)
        if after is None:
            return
        if before is None or after.uid != before.uid:
            self.counts.add(after, made)
            self._to_sweep.add(after.uid, empty=True)  # until it is counted
            self._consumers.add(after)
        self.dealers.update(after)
        self.schedules.topic_changed(after)

    def _dealer_of(self, topic: Topic) -> Dealer:
        since_ms = min(self.clock.now_ms(), max(self._opening_ms, topic.created_ms))
        causes = LatenessCauses(since_ms, self.store.slow)
        dealer = Dealer(
            topic,
            runtime=self._runtime,
            store=self.store,
            settling=self.settling,
            lateness=TopicLateness(causes, self.late, self.metrics, self.limits, self._traces, self.store.journal),
            outboxes=self.outboxes,
            random_bits=self._random_bits,
            buckets=self.cluster.buckets,
            hosts=self.cluster.host,
        )
        if self.clocks.quarantined:
            dealer.stop_leasing(LateCause.CLOCK)
        return dealer

    def _forget(self, topic: Topic) -> None:
        """The topic was dropped."""
        self.dealers.drop(topic)
        self.cluster.host(topic, ())
        self.counts.forget(topic.uid)
        self._to_sweep.remove(topic.uid)
        self.metrics.forget_topic(topic.name)

    def _cluster_changed(self, change: MembershipChange) -> None:
        """Brokers came or went, a topic's record changed, or this broker's own standing did."""
        self.readiness.changed.set()
        if MembershipChange.TOPICS in change:
            self.tasks.spawn(self._read_topics(), "catalog")
        if MembershipChange.MEMBERS in change:
            self.cluster.changed()
            taken_over = self._membership_log.look(self.catalog.all())
            if taken_over is not None:
                self.counts.restart()
                self.dealers.note_taken_over(taken_over)
            self.dealers.look()

    async def _read_topics(self) -> None:
        try:
            await self.catalog.hinted()
        except StoreError as trouble:
            log.warning("topics cannot be read again yet: %s", trouble)

    def _crashed(self, name: str, error: BaseException) -> None:
        self.metrics.count("timeline_task_crashes_total", name.split(" ")[0])

    async def _every(self, period_ms: int, work: Callable[[], object]) -> None:
        """Call `work` again and again. Trouble in one round is logged, and the next one comes all the same."""
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
                log.exception("%s failed and goes on", work)
                self._crashed(work.__name__, error)

    def _observe(self) -> None:
        """Look at the wall clock, whether this broker can dispatch, and all measures that need no store."""
        before_ms = self.clock.now_ms()
        self.clocks.look()
        after_ms = self.clock.now_ms()
        if abs(after_ms - before_ms) > self.limits.late_ms:
            log.warning("the clock jumped by %d ms: what came due in between is late by it", after_ms - before_ms)
            for dealer in self.dealers:
                dealer.clock_jumped(before_ms, after_ms)
        self.stand()
        if not (self.readiness.state or self.readiness.quarantined):
            self.schedules.start()  # again, after it was sent away
        self._measure()

    async def _look_over(self) -> None:
        pace = CooperativePace()
        await self.service.streams.abort_stalled(self.clock.monotonic_ms(), pace)
        await self._consumers.look(pace)

    def stand(self) -> None:
        """Tell the membership whether this broker can dispatch. While it cannot, it hosts no healthy consumers."""
        mono_ms = self.clock.monotonic_ms()
        if not self.store.down or self.store.full:
            self._store_down_since_ms = None
        elif self._store_down_since_ms is None:
            self._store_down_since_ms = mono_ms
        since_ms = self._store_down_since_ms
        cut_off = since_ms is not None and mono_ms - since_ms >= self.limits.withdraw_after_ms
        if self.cluster.stand(mono_ms, not (self.readiness.state or cut_off or self.clocks.quarantined)):
            for dealer in self.dealers:
                dealer.rehost()

    async def _check_store(self) -> None:
        """While the store is down, ask whether it is back, and still the one that was opened. Then dispatch at once."""
        if not self.store.down:
            return
        try:
            await self.store.inspect()
            await self.store.call("check", self.store.store.check())
        except StoreUnavailable:
            return
        log.info("the store is back")
        self.stand()
        self.dealers.look()

    async def _inspect_store(self) -> None:
        """Ask the store again: settings change while a server runs, and a quick restart is no outage."""
        if not self.store.down:
            with suppress(StoreUnavailable):
                await self.store.inspect()

    async def _sweep(self) -> None:
        """Remove what is over, in each topic. Raise the last trouble in the end."""
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
            if self.counts.rounds.is_empty(uid):
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
        """Set the gauges that need no store."""
        self.metrics.gauge("timeline_ready", 0 if self.not_ready else 1)
        self.metrics.gauge("timeline_clock_step_seconds", self.clock.step_ms / 1000.0)
        self.metrics.gauge("timeline_intake_bytes", self.intake.bytes)
        self.metrics.gauge("timeline_outbox_bytes", self.outboxes.bytes)
        self.metrics.gauge("timeline_cluster_brokers", len(self.membership.members()))
        confirmed = self.membership.state.join_state is JoinState.JOINED
        self.metrics.gauge("timeline_etcd_up", 1 if confirmed else 0)
