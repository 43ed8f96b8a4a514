"""The census: how a broker's consumers are and what they have, looked up again and again."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from timeline.broker.dispatch.roster import ConnectedConsumer, ConsumerHealth
from timeline.broker.fairness.cooperative import CooperativePace
from timeline.metrics import Metrics

if TYPE_CHECKING:
    from timeline.broker.dispatch.dealer import Dealer
    from timeline.broker.node import Node

AILING = (ConsumerHealth.SILENT, ConsumerHealth.STALLED, ConsumerHealth.SET_ASIDE)
TOPIC = 10
"""A topic's gauges take as long as so many consumers."""


async def look_over(node: Node) -> None:
    """Ends streams that do not take what is sent; tells the membership of consumers that fell silent or stalled, or are
    well again; sets the gauges of all of them."""
    pace = CooperativePace()
    await node.service.streams.abort_stalled(node.clock.monotonic_ms(), pace)
    for dealer in node.dealers:
        await _look_at(dealer, node, pace)


async def _look_at(dealer: Dealer, node: Node, pace: CooperativePace) -> None:
    tally, changed = _Tally(), False
    for some in pace.some(dealer.roster.consumers):
        changed |= dealer.roster.recount(some, node.clock.monotonic_ms(), tally.count)
        await pace.did(len(some))
    if node.deals(dealer):  # its topic may have been dropped meanwhile
        if changed:
            node.cluster.rehost(dealer)
        tally.show(node.metrics, dealer.topic.name)
    await pace.did(TOPIC)


def show_nobody(metrics: Metrics, topic: str) -> None:
    """Sets the gauges of a topic that had no consumer here yet."""
    _Tally().show(metrics, topic)


class _Tally:
    """Of one topic's consumers."""

    def __init__(self) -> None:
        self._ailing: Counter[ConsumerHealth] = Counter()
        self._healthy = self._in_flight = self._credit = 0

    def count(self, consumer: ConnectedConsumer, health: ConsumerHealth) -> None:
        """One more, of this `health`."""
        self._in_flight += consumer.in_flight
        if health is ConsumerHealth.HEALTHY:
            self._healthy += 1
            self._credit += max(0, consumer.credit_messages)
        else:
            self._ailing[health] += 1

    def show(self, metrics: Metrics, topic: str) -> None:
        """Sets the topic's gauges."""
        metrics.topic_gauge("timeline_consumers", topic, self._healthy, ConsumerHealth.HEALTHY.value)
        for health in AILING:
            metrics.topic_gauge("timeline_consumers", topic, self._ailing[health], health.value)
        metrics.topic_gauge("timeline_leases_in_flight", topic, self._in_flight)
        metrics.topic_gauge("timeline_credit_messages", topic, self._credit)
