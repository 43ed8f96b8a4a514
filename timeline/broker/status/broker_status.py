"""How a broker stands: what its topics bear, how late deliveries were, who is connected. Answers StatusRequest."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from timeline.broker.dispatch.roster import ConsumerHealth
from timeline.columns import Int64, Ragged
from timeline.model import MAX_BATCH, MAX_TIME_MS, Topic
from timeline.wire import MAX_COUNT, BrokerStatus, Consumers, Health, LatenessCounts, StatusRequest, TopicLoads

if TYPE_CHECKING:
    from timeline.broker.dispatch.dealer import Dealer
    from timeline.broker.node import Node

HEALTH = {
    ConsumerHealth.HEALTHY: Health.HEALTHY,
    ConsumerHealth.SILENT: Health.SILENT,
    ConsumerHealth.STALLED: Health.STALLED,
    ConsumerHealth.SET_ASIDE: Health.SET_ASIDE,
}
"""Those that are on a roster; one that is gone is told of no more."""


@dataclass(frozen=True, slots=True)
class Depth:
    """What the store counted of a topic at `counted_ms`: messages nobody holds, due and to come, and when the next one
    comes due (0: none is pending)."""

    available: int = 0
    waiting: int = 0
    next_due_ms: int = 0
    counted_ms: int = 0


_UNCOUNTED = Depth()


def standing(node: Node, asked: StatusRequest, sees: Callable[[str], bool]) -> BrokerStatus:
    """How `node` stands now, without asking its store; of topics that `sees` permits."""
    dealers = [
        dealer
        for dealer in node.dealers
        if (not asked.topic or dealer.topic.name == asked.topic) and sees(dealer.topic.name)
    ]
    one = node.catalog.known(asked.topic)
    asked_for = node.catalog.all() if not asked.topic else [one] if one is not None else []
    topics = [topic for topic in asked_for if sees(topic.name)][:MAX_BATCH]
    return BrokerStatus(
        broker=node.name,
        version=node.version,
        now_ms=node.clock.now_ms(),
        started_ms=node.started_ms,
        trouble=node.not_ready,
        store=node.store_shown,
        store_ms=node.store.lease_p99_ms or 0.0,
        topics=_loads(node, topics, dealers),
        lateness=_lateness(node, asked.topic, sees),
        consumers=_consumers(node, dealers, asked.limit),
        sync=node.cluster.shown(),
        warnings=node.store.warnings,
    )


def _loads(node: Node, topics: list[Topic], dealers: list[Dealer]) -> TopicLoads:
    mono_ms = node.clock.monotonic_ms()
    depths = [node.depths.get(topic.uid, _UNCOUNTED) for topic in topics]
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
        dealt=_longs([_dealt(node, topic) for topic in topics]),
    )


def _dealt(node: Node, topic: Topic) -> int:
    """How many buckets of the topic are this broker's."""
    many = topic.settings.buckets
    mine = node.membership.buckets(topic.uid, many)
    return many if mine is None else len(mine)


def _lateness(node: Node, topic: str, sees: Callable[[str], bool]) -> LatenessCounts:
    """The histogram of lateness; topics past those that metrics show by name are summed under the name they have
    there."""
    histogram = node.metrics.lateness
    bounds_ms = [round(bound_s * 1000) for bound_s in histogram.bounds_s.tolist()] + [MAX_TIME_MS]
    found = {name: counts for name, counts in histogram.counts.items() if (not topic or name == topic) and sees(name)}
    return LatenessCounts(
        topics=Ragged.of([name.encode() for name in found for _ in bounds_ms]),
        up_to_ms=_longs(bounds_ms * len(found)),
        counts=_longs([count for counts in found.values() for count in counts.tolist()]),
    )


def _consumers(node: Node, dealers: list[Dealer], limit: int) -> Consumers:
    """At most `limit` of those connected: what is not well first, then who has most in hand."""
    mono_ms = node.clock.monotonic_ms()
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
    """Counts and times; cut to what a frame may say, since credit adds up without a limit."""
    return np.array([min(value, MAX_COUNT) for value in values], dtype=np.int64)
