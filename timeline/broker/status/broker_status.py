"""The status of a broker: load of its topics, lateness, consumers. Answers status and Ping."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from timeline.broker.catalog import Catalog, Readiness
from timeline.broker.cluster import ClusterHints
from timeline.broker.dispatch.dealer import Dealer, Dealers
from timeline.broker.dispatch.roster import ConsumerHealth
from timeline.broker.lanes.metered_store import MeteredStore
from timeline.broker.runtime import Runtime
from timeline.broker.status.counts import Depth, MessageCounts
from timeline.columns import Int64, Ragged
from timeline.metrics import Metrics
from timeline.model import MAX_BATCH, MAX_TIME_MS, Topic
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
