"""The status of a broker: what the store has of each topic, how its consumers are, and how late deliveries were.

It serves people, metrics and autoscalers, and answers status and Ping.

The store is asked for a bounded share of its time, and never for long: many messages are counted in parts. Those due
within ten minutes are counted by the minute, and often. Later ones may be most of the store, so they are counted as
often as their cost allows. Topics take turns; those without messages are looked at seldom.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from timeline.broker.catalog import Catalog, Readiness
from timeline.broker.cluster import ClusterHints
from timeline.broker.dispatch.dealer import Dealer, Dealers
from timeline.broker.dispatch.roster import ConnectedConsumer, ConsumerHealth
from timeline.broker.fairness import CooperativePace, SharedPace
from timeline.broker.lanes import MeteredStore
from timeline.broker.runtime import Runtime
from timeline.clock import Clock
from timeline.columns import Int64, Ragged
from timeline.metrics import Metrics
from timeline.model import MAX_BATCH, MAX_TIME_MS, Topic
from timeline.storage_plugins.contract import DiskSpace, StoreError, TellsDiskSpace
from timeline.wire import (
    MAX_COUNT,
    BrokerStatus,
    Consumers,
    Health,
    LatenessCounts,
    Ping,
    Pong,
    StatusRequest,
    TopicLoads,
)

MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000
NEAR_MINUTES = 10
PART = 10_000
"""A part has about so many messages at first, and never aims at fewer: SQLite counts them in 1.4 ms."""
MOST_PART = 100 * PART
PART_MS = 1.0
"""A part may grow until it takes so long."""
FIRST_STEP_MS = 1_000
"""How long the first part is, where nothing is known."""
GROWTH = 8
"""The next part is at most this many times as large as the one before, or as long where nothing is known."""
ROUND_TRIPS = 8
"""The shortest one of so many counts."""
EMPTY_COUNTED = 50
"""Topics without messages that one round counts, in turn."""
EMPTY_SWEPT = 10
"""The same of a sweep, which finds remembered ids that are over, and dead letters past their retention."""


class TopicRounds:
    """Topics, by uid, that a broker looks at again and again.

    Each round has those that may have messages, and `at_once` of the others in turn, which another broker may have
    filled. So ten thousand empty topics cost no more than fifty.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._stocked: dict[int, None] = {}
        self._empty: OrderedDict[int, None] = OrderedDict()

    def add(self, uid: int, empty: bool) -> None:
        """Add a topic that was not looked at yet. `empty`: take it for empty all the same."""
        if empty:
            self._empty[uid] = None
        else:
            self._stocked[uid] = None

    def remove(self, uid: int) -> None:
        """The topic was dropped."""
        self._stocked.pop(uid, None)
        self._empty.pop(uid, None)

    @property
    def stocked(self) -> list[int]:
        """The topics that may have messages."""
        return list(self._stocked)

    def begin(self) -> list[int]:
        """Return the topics of the next round."""
        turn = [self._empty.popitem(last=False)[0] for _ in range(min(self._at_once, len(self._empty)))]
        self._empty.update(dict.fromkeys(turn))
        return [*self._stocked, *turn]

    def empty(self, uid: int) -> None:
        """Take the topic for empty. Call it before the look: changes during the look make it `used` again."""
        if uid in self._stocked:
            del self._stocked[uid]
            self._empty[uid] = None

    def used(self, uid: int) -> bool:
        """Note that the topic may have messages. Return whether it was taken for empty."""
        if uid not in self._empty:
            return False
        del self._empty[uid]
        self._stocked[uid] = None
        return True

    def is_empty(self, uid: int) -> bool:
        """Return whether the topic is taken for empty."""
        return uid in self._empty

    def restart(self) -> None:
        """Put all topics into the next round, because knowledge of some may be lost."""
        self._stocked.update(self._empty)
        self._empty.clear()


@dataclass(frozen=True, slots=True)
class Depth:
    """The store's count of a topic at `counted_ms`: messages without a live lease, due and to come. `next_due_ms`: 0 if
    none is pending."""

    available: int = 0
    waiting: int = 0
    next_due_ms: int = 0
    counted_ms: int = 0


@dataclass(slots=True)
class _Counted:
    """Counts of one topic. `near`: what is due, then each of the next minutes. `far`: the rest of the hour, then of the
    day, then later; None: not counted yet. `near_cuts` and `far_cuts`: where the next counts of these are to be cut."""

    near: Int64 = field(default_factory=lambda: np.zeros(1 + NEAR_MINUTES, dtype=np.int64))
    far: Int64 | None = None
    next_due_ms: int = 0
    counted_ms: int = 0
    near_cuts: list[int] = field(default_factory=list)
    far_cuts: list[int] = field(default_factory=list)


class MessageCounts:
    """Counts the store's messages, and sets the gauges and `depths`, by topic's uid.

    `rounds`: the topics that it counts; those without a living message are empty. `to_sweep` hears of topics that have
    messages.
    """

    def __init__(
        self,
        runtime: Runtime,
        catalog: Catalog,
        store: MeteredStore,
        cluster: ClusterHints,
        to_sweep: TopicRounds,
    ) -> None:
        self._clock, self._metrics = runtime.clock, runtime.metrics
        self._catalog, self._store, self._cluster, self._to_sweep = catalog, store, cluster, to_sweep
        self.in_parts = CountsInParts(store, runtime.clock)
        self._near_pace, self._far_pace = SharedPace(runtime.clock), SharedPace(runtime.clock)
        self.rounds = TopicRounds(EMPTY_COUNTED)
        self.depths: dict[int, Depth] = {}
        self._counted: dict[int, _Counted] = {}
        """Counts of topics that are not empty."""

    def add(self, topic: Topic, empty: bool) -> None:
        """Add a topic. `empty`: it was made just now."""
        self.rounds.add(topic.uid, empty)
        if empty:
            self._tell_empty(topic, self._clock.now_ms())

    def used(self, uid: int) -> None:
        """Note that messages of the topic may have changed."""
        self._to_sweep.used(uid)
        if self.rounds.used(uid) and not self.depths.get(uid, Depth()).next_due_ms:
            self.depths.pop(uid, None)  # nothing, as counted: that is not known any more

    def restart(self) -> None:
        """Count each topic again: a broker is gone, and with it what it knew of topics used through it."""
        self.rounds.restart()
        depths = self.depths
        for uid in [uid for uid, depth in depths.items() if not depth.next_due_ms]:
            del depths[uid]

    def forget(self, uid: int) -> None:
        """The topic was dropped."""
        self.rounds.remove(uid)
        self._counted.pop(uid, None)
        self.depths.pop(uid, None)

    async def survey(self) -> None:
        """If the broker knows nothing of many topics yet, find out in one call which are empty, if the store can tell.
        Otherwise ten thousand empty topics would be counted one by one after a start, for minutes."""
        uids = [uid for uid in self.rounds.stocked if uid not in self.depths]
        if len(uids) <= EMPTY_COUNTED:
            return
        now_ms = self._clock.now_ms()
        for uid in uids:
            self.rounds.empty(uid)
        empty: set[int] = set()
        try:
            dues = await self._store.call("next_dues", self._store.store.next_dues())
            empty = set() if dues is None else {uid for uid in uids if uid not in dues}
        except StoreError:
            pass  # they are counted one by one
        finally:
            for uid in uids:
                if uid not in empty:  # or it is not known
                    self._to_sweep.used(uid)
                    self.rounds.used(uid)
        pace = CooperativePace()
        for some in pace.some(empty):
            for uid in some:
                topic = self._catalog.of(uid)
                if topic is not None and self.rounds.is_empty(uid):  # not dropped, nor used, meanwhile
                    self._tell_empty(topic, now_ms)
            await pace.did(len(some))

    async def near(self) -> None:
        """Measure the room left. Then count, for each topic, what is due now and within ten minutes."""
        await self.survey()
        await self._turns([self._room, *(partial(self._near, uid) for uid in self.rounds.begin())])

    async def far(self) -> None:
        """Count, for each topic, what comes due later."""
        await self._turns([partial(self._far, uid) for uid in self._counted])

    def cuts(self, uid: int) -> list[int]:
        """Return where a count of the topic is to be cut, as far as that is known."""
        counted = self._counted.get(uid, _Counted())
        return sorted(counted.near_cuts + counted.far_cuts)

    async def _turns(self, counts: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """Count one after the other, in spite of trouble. Raise the last trouble in the end."""
        trouble: StoreError | None = None
        for count in counts:
            try:
                await count()
            except StoreError as error:
                trouble = error
        if trouble is not None:
            raise trouble

    async def _near(self, uid: int) -> None:
        pace, found = self._near_pace, True
        async with pace.turn():
            if (topic := self._catalog.of(uid)) is None:
                return  # dropped meanwhile
            self.rounds.empty(uid)
            try:
                next_due = await self.in_parts.next_due(topic)
                found = next_due is not None
            finally:
                if found:  # or it is not known
                    self._to_sweep.used(uid)
                    self.rounds.used(uid)
        if next_due is None:
            self._counted.pop(uid, None)
            if self._catalog.of(uid) is not None and self.rounds.is_empty(uid):  # not dropped, nor used, meanwhile
                self._tell_empty(topic, self._clock.now_ms())
            return
        now_ms = self._clock.now_ms()
        edges = now_ms + 1 + MINUTE_MS * np.arange(-1, NEAR_MINUTES + 1, dtype=np.int64)
        edges[0] = min(next_due, now_ms)
        near, cuts = await self.in_parts.count(topic, edges, self.cuts(uid), pace)
        if next_due <= now_ms:
            async with pace.turn():
                near[0] += await count_lapsed(self._store, topic, now_ms)
        if (topic := self._catalog.of(uid)) is None:
            return  # its series are gone and stay so
        counted = self._counted.setdefault(uid, _Counted())
        counted.near, counted.near_cuts = near, cuts
        counted.next_due_ms, counted.counted_ms = next_due, now_ms
        self._tell(topic, counted)

    async def _far(self, uid: int) -> None:
        topic = self._catalog.of(uid)
        if topic is None:
            return
        start_ms = self._clock.now_ms() + 1
        ends = [start_ms + NEAR_MINUTES * MINUTE_MS, start_ms + HOUR_MS, start_ms + DAY_MS, MAX_TIME_MS + 1]
        edges = np.array(ends, dtype=np.int64)
        far, cuts = await self.in_parts.count(topic, edges, self.cuts(uid), self._far_pace)
        topic, counted = self._catalog.of(uid), self._counted.get(uid)
        if topic is not None and counted is not None:  # not dropped, nor emptied, meanwhile
            counted.far, counted.far_cuts = far, cuts
            self._tell(topic, counted)

    def _tell_empty(self, topic: Topic, now_ms: int) -> None:
        self._tell(topic, _Counted(far=np.zeros(3, dtype=np.int64), counted_ms=now_ms))

    def _tell(self, topic: Topic, counted: _Counted) -> None:
        """Set the gauges, and the topic's depth. Those of what comes later stay as they are until that is counted."""
        metrics = self._metrics
        available, minutes = int(counted.near[0]), counted.near[1:]
        ten_minutes = int(minutes.sum())
        expected = {"1m": int(minutes[0]), "10m": ten_minutes}
        if counted.far is not None:
            hour, day, later = counted.far.tolist()
            waiting = ten_minutes + hour + day + later
            self.depths[topic.uid] = Depth(available, waiting, counted.next_due_ms, counted.counted_ms)
            metrics.topic_gauge("timeline_messages_depth", topic.name, waiting, "waiting")
            expected |= {"1h": ten_minutes + hour, "24h": ten_minutes + hour + day}
        for within, count in expected.items():
            metrics.topic_gauge("timeline_expected_messages", topic.name, count, within)
        metrics.topic_gauge("timeline_expected_peak_messages", topic.name, int(minutes.max()))
        metrics.topic_gauge("timeline_messages_depth", topic.name, available, "available")
        metrics.topic_gauge("timeline_next_due_timestamp_seconds", topic.name, counted.next_due_ms / 1000.0)
        metrics.topic_gauge("timeline_overdue_seconds", topic.name, _overdue_ms(topic, counted) / 1000.0)
        metrics.topic_gauge("timeline_topic_rate_limit", topic.name, topic.settings.max_rate_per_s)
        metrics.topic_gauge("timeline_buckets", topic.name, self._cluster.dealt(topic))

    async def _room(self) -> None:
        """How much room is left where the store keeps its data, if it can tell."""
        store = self._store.store
        room: DiskSpace | None = None
        if isinstance(store, TellsDiskSpace):
            async with self._near_pace.turn():
                room = await self._store.call("room", store.room())
        if room is not None:
            self._metrics.gauge("timeline_store_free_bytes", room.free_bytes)
            self._metrics.gauge("timeline_store_size_bytes", room.size_bytes)


class CountsInParts:
    """Counts many messages of a store a part at a time, so that others need not wait long.

    A part aims at `PART` messages, or at as many as the store counts in `PART_MS` or in two round trips, if these are
    more. So a store that is far away, or counts by an index alone, is not asked a thousand times.
    """

    def __init__(self, store: MeteredStore, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._part = PART
        self._round_trips_ms: deque[float] = deque(maxlen=ROUND_TRIPS)

    async def next_due(self, topic: Topic) -> int | None:
        """Return `Store.next_due` of all buckets. That is cheap, so it shows how long a round trip takes."""
        began_ms = self._clock.monotonic_ms()
        next_due = await self._store.call("next_due", self._store.store.next_due(topic, None, -1))
        self._round_trips_ms.append(self._clock.monotonic_ms() - began_ms)
        return next_due

    async def count(
        self, topic: Topic, edges_ms: Int64, cuts: Sequence[int], pace: SharedPace
    ) -> tuple[Int64, list[int]]:
        """Return `Store.count_due`, and where to cut the next count.

        `cuts`: of counts before, in order. A part that has grown is counted at once, and is cut next time. Where there
        are no cuts, steps grow or shrink by what they find."""
        counts = np.zeros(len(edges_ms) - 1, dtype=np.int64)
        low_ms, end_ms = int(edges_ms[0]), int(edges_ms[-1])
        step_ms, found_before, next_cuts = FIRST_STEP_MS, self._part, list[int]()
        round_trip_ms, worked_ms = min(self._round_trips_ms, default=0.0), 0.0
        while low_ms < end_ms:
            after = bisect_right(cuts, low_ms)
            high_ms = min(cuts[after] if after < len(cuts) else low_ms + step_ms, end_ms)
            first, last = np.searchsorted(edges_ms, low_ms, "right"), np.searchsorted(edges_ms, high_ms, "left")
            edges = np.concatenate(([low_ms], edges_ms[first:last], [high_ms]))
            async with pace.turn(round_trip_ms):
                began_ms = self._clock.monotonic_ms()
                of_part = await self._store.call("count_due", self._store.store.count_due(topic, edges))
                worked_ms += max(0.0, self._clock.monotonic_ms() - began_ms - round_trip_ms)
            counts[first - 1 : last] += of_part
            self._adapt(int(counts.sum()), worked_ms, max(PART_MS, 2 * round_trip_ms))
            found = int(of_part.sum())
            step_ms = max(1, int((high_ms - low_ms) * min(GROWTH, self._part / max(1, found))))
            if next_cuts and found_before + found <= self._part:
                next_cuts[-1] = high_ms
                found_before += found
            else:
                pieces = max(GROWTH, found // self._part) if found >= 2 * self._part else 1
                pieces = min(pieces, high_ms - low_ms)
                next_cuts += [low_ms + (high_ms - low_ms) * piece // pieces for piece in range(1, pieces + 1)]
                found_before = found
            low_ms = high_ms
        return counts, next_cuts

    def _adapt(self, found: int, worked_ms: float, part_ms: float) -> None:
        """Let a part have as many messages as take `part_ms`, where `found` took `worked_ms`."""
        if found >= PART:
            many = found * part_ms / worked_ms if worked_ms else float("inf")
            self._part = max(PART, int(min(GROWTH * self._part, many, MOST_PART)))


async def count_lapsed(store: MeteredStore, topic: Topic, now_ms: int) -> int:
    """Return how many messages still have a holder though their lease ran out. They are available, too."""
    until_now = np.array([0, now_ms + 1], dtype=np.int64)
    return int((await store.call("count_due", store.store.count_due(topic, until_now, held=True)))[0])


def _overdue_ms(topic: Topic, counted: _Counted) -> int:
    """Return how long the earliest deliverable message has been due. A pause holds up all. Messages that had a holder
    may wait for the topic's backoff first."""
    settings = topic.settings
    if not counted.next_due_ms or settings.paused:
        return 0
    return max(0, counted.counted_ms - counted.next_due_ms - settings.redelivery_backoff_ms)


AILING = (ConsumerHealth.SILENT, ConsumerHealth.STALLED, ConsumerHealth.SET_ASIDE)
TOPIC = 10
"""A topic's gauges take as long as this many consumers."""


class ConsumerCounts:
    """Health and credit of a broker's consumers, looked up again and again."""

    def __init__(self, runtime: Runtime, dealers: Dealers) -> None:
        self._clock, self._metrics, self._dealers = runtime.clock, runtime.metrics, dealers

    def add(self, topic: Topic) -> None:
        """Set the gauges of a topic that had no consumer here yet."""
        _Tally().show(self._metrics, topic.name)

    async def look(self, pace: CooperativePace) -> None:
        """Tell the membership which consumers fell silent, stalled or recovered. Set the gauges of all."""
        for dealer in self._dealers:
            await self._look_at(dealer, pace)

    async def _look_at(self, dealer: Dealer, pace: CooperativePace) -> None:
        tally, changed = _Tally(), False
        for some in pace.some(dealer.roster.consumers):
            changed |= dealer.roster.recount(some, self._clock.monotonic_ms(), tally.count)
            await pace.did(len(some))
        if dealer in self._dealers:  # its topic may have been dropped meanwhile
            if changed:
                dealer.rehost()
            tally.show(self._metrics, dealer.topic.name)
        await pace.did(TOPIC)


class _Tally:
    """Sums over one topic's consumers."""

    def __init__(self) -> None:
        self._ailing: Counter[ConsumerHealth] = Counter()
        self._healthy = self._in_flight = self._credit = 0

    def count(self, consumer: ConnectedConsumer, health: ConsumerHealth) -> None:
        """Count one more, of this `health`."""
        self._in_flight += consumer.in_flight
        if health is ConsumerHealth.HEALTHY:
            self._healthy += 1
            self._credit += max(0, consumer.credit_messages)
        else:
            self._ailing[health] += 1

    def show(self, metrics: Metrics, topic: str) -> None:
        """Set the topic's gauges."""
        metrics.topic_gauge("timeline_consumers", topic, self._healthy, ConsumerHealth.HEALTHY.value)
        for health in AILING:
            metrics.topic_gauge("timeline_consumers", topic, self._ailing[health], health.value)
        metrics.topic_gauge("timeline_leases_in_flight", topic, self._in_flight)
        metrics.topic_gauge("timeline_credit_messages", topic, self._credit)


HEALTH = {
    ConsumerHealth.HEALTHY: Health.HEALTHY,
    ConsumerHealth.SILENT: Health.SILENT,
    ConsumerHealth.STALLED: Health.STALLED,
    ConsumerHealth.SET_ASIDE: Health.SET_ASIDE,
}
"""Health of consumers on a roster. Those that are gone are left out."""


_UNCOUNTED = Depth()


class StatusReporter:
    """Status of one broker, without a call of its store. `store_shown`: where the store is, without secrets."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        version: str,
        store_shown: str,
        readiness: Readiness,
        store: MeteredStore,
        catalog: Catalog,
        dealers: Dealers,
        counts: MessageCounts,
        cluster: ClusterHints,
    ) -> None:
        self._clock, self._metrics = runtime.clock, runtime.metrics
        self._version, self._store_shown = version, store_shown
        self._readiness, self._store, self._catalog = readiness, store, catalog
        self._dealers, self._counts, self._cluster = dealers, counts, cluster

    def pong(self, ping: Ping) -> Pong:
        """Answer a Ping, with two readings of this broker's clock."""
        clock, cluster = self._clock, self._cluster
        now = clock.now()
        return Pong(ping.sent_ms, now, clock.now(), cluster.name, self._version, cluster.addresses(), clock.step_ms)

    def answer(self, asked: StatusRequest, sees: Callable[[str], bool]) -> BrokerStatus:
        """Answer a StatusRequest, for topics that `sees` permits."""
        dealers = [
            dealer
            for dealer in self._dealers
            if (not asked.topic or dealer.topic.name == asked.topic) and sees(dealer.topic.name)
        ]
        one = self._catalog.known(asked.topic)
        asked_for = self._catalog.all() if not asked.topic else [one] if one is not None else []
        topics = [topic for topic in asked_for if sees(topic.name)][:MAX_BATCH]
        mono_ms = self._clock.monotonic_ms()
        return BrokerStatus(
            broker=self._cluster.name,
            version=self._version,
            now_ms=self._clock.now_ms(),
            started_ms=self._readiness.started_ms,
            trouble=self._readiness.not_ready,
            store=self._store_shown,
            store_ms=self._store.lease_p99_ms or 0.0,
            topics=self._loads(topics, dealers, mono_ms),
            lateness=_lateness(self._metrics, asked.topic, sees),
            consumers=_consumers(dealers, asked.limit, mono_ms),
            sync=self._cluster.shown(),
            warnings=self._store.warnings,
        )

    def _loads(self, topics: list[Topic], dealers: list[Dealer], mono_ms: float) -> TopicLoads:
        depths = [self._counts.depths.get(topic.uid, _UNCOUNTED) for topic in topics]
        place = {topic.uid: at for at, topic in enumerate(topics)}
        ours = [(place[dealer.topic.uid], dealer) for dealer in dealers if dealer.topic.uid in place]

        def dealt(value: Callable[[Dealer], int]) -> Int64:
            """A column of what dealers know: 0 where a topic has none here."""
            column = np.zeros(len(topics), dtype=np.int64)
            for at, dealer in ours:
                column[at] = min(value(dealer), MAX_COUNT)
            return column

        return TopicLoads(
            topics=Ragged.of([topic.name.encode() for topic in topics]),
            available=_longs([depth.available for depth in depths]),
            waiting=_longs([depth.waiting for depth in depths]),
            next_due_ms=_longs([depth.next_due_ms for depth in depths]),
            counted_ms=_longs([depth.counted_ms for depth in depths]),
            consumers=dealt(lambda dealer: len(dealer.roster.consumers)),
            in_flight=dealt(lambda dealer: sum(one.in_flight for one in dealer.roster.consumers.values())),
            credit=dealt(lambda dealer: sum(one.open_credit(mono_ms) for one in dealer.roster.consumers.values())),
            delivered=dealt(lambda dealer: dealer.lateness.delivered),
            redelivered=dealt(lambda dealer: dealer.lateness.redelivered),
            buckets=_longs([topic.settings.buckets for topic in topics]),
            dealt=_longs([self._cluster.dealt(topic) for topic in topics]),
        )


def _lateness(metrics: Metrics, topic: str, sees: Callable[[str], bool]) -> LatenessCounts:
    """Return the histogram of lateness. Topics beyond those that metrics name are summed under one name."""
    histogram = metrics.lateness
    bounds_ms = [round(bound_s * 1000) for bound_s in histogram.bounds_s.tolist()] + [MAX_TIME_MS]
    found = {name: counts for name, counts in histogram.counts.items() if (not topic or name == topic) and sees(name)}
    return LatenessCounts(
        topics=Ragged.of([name.encode() for name in found for _ in bounds_ms]),
        up_to_ms=_longs(bounds_ms * len(found)),
        counts=_longs([count for counts in found.values() for count in counts.tolist()]),
    )


def _consumers(dealers: list[Dealer], limit: int, mono_ms: float) -> Consumers:
    """Return at most `limit` connected consumers: unhealthy ones first, then those with most in flight."""
    connected = [
        (dealer.topic.name, one, HEALTH[health])
        for dealer in dealers
        for one in dealer.roster.consumers.values()
        if (health := one.health(mono_ms)) in HEALTH
    ]
    chosen = heapq.nsmallest(
        limit, connected, key=lambda row: (row[2] is Health.HEALTHY, -row[1].in_flight, row[0], row[1].id)
    )
    return Consumers(
        topics=Ragged.of([topic.encode() for topic, _, _ in chosen]),
        consumers=Ragged.of([one.id for _, one, _ in chosen]),
        health=np.array([health for _, _, health in chosen], dtype=np.uint8),
        credit_messages=_longs([max(0, one.credit_messages) for _, one, _ in chosen]),
        credit_bytes=_longs([max(0, one.credit_bytes) for _, one, _ in chosen]),
        in_flight=_longs([one.in_flight for _, one, _ in chosen]),
    )


def _longs(values: list[int]) -> Int64:
    """Return counts and times, cut to what a frame may say: credit adds up without a limit."""
    return np.array([min(value, MAX_COUNT) for value in values], dtype=np.int64)
