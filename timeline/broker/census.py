"""The census: how a topic's consumers are and what they have, looked at some at a time, again and again."""

from __future__ import annotations

from collections import Counter

from timeline.broker.roster import Consumer, Health
from timeline.metrics import Metrics

CONSUMERS_AT_ONCE, TOPICS_AT_ONCE = 100, 20
"""Looked at between two pauses, which takes 0.1 to 0.3 ms. All at once, 5,000 consumers made what came due meanwhile 15
to 20 ms late, four times a second (`/design-docs/decisions.md`)."""
AILING = (Health.SILENT, Health.STALLED, Health.SET_ASIDE)


class Census:
    """Of one topic at one look."""

    def __init__(self) -> None:
        self._ailing: Counter[Health] = Counter()
        self._healthy = self._in_flight = self._credit = 0

    def count(self, consumer: Consumer, health: Health) -> None:
        """One more, of this `health`."""
        self._in_flight += consumer.in_flight
        if health is Health.HEALTHY:
            self._healthy += 1
            self._credit += max(0, consumer.credit_messages)
        else:
            self._ailing[health] += 1

    def show(self, metrics: Metrics, topic: str) -> None:
        """Sets the topic's gauges."""
        metrics.topic_gauge("timeline_consumers", topic, self._healthy, Health.HEALTHY.value)
        for health in AILING:
            metrics.topic_gauge("timeline_consumers", topic, self._ailing[health], health.value)
        metrics.topic_gauge("timeline_leases_in_flight", topic, self._in_flight)
        metrics.topic_gauge("timeline_credit_messages", topic, self._credit)
