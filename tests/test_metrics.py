"""The catalog of metrics, and gauges of topics: those past the cap are one, and alerts' counters begin at 0."""

from __future__ import annotations

import numpy as np
from prometheus_client import generate_latest

from timeline.metrics import BURIALS, CATALOG, LEASE_ENDS, REST, Metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    found: float | None = metrics.registry.get_sample_value(name, labels)
    return found


def test_topics_past_the_cap_are_summed_and_of_times_and_bounds_the_worst_is_shown() -> None:
    metrics = Metrics(topics_shown=1)
    for topic, messages, next_due, overdue in (("a", 1, 50, 9), ("b", 10, 0, 3), ("c", 100, 70, 7), ("d", 1000, 60, 0)):
        metrics.topic_gauge("timeline_messages_depth", topic, messages, "waiting")
        metrics.topic_gauge("timeline_next_due_timestamp_seconds", topic, next_due)
        metrics.topic_gauge("timeline_overdue_seconds", topic, overdue)
    assert value(metrics, "timeline_messages_depth", topic="a", state="waiting") == 1
    assert value(metrics, "timeline_messages_depth", topic=REST, state="waiting") == 1110
    assert value(metrics, "timeline_next_due_timestamp_seconds", topic=REST) == 60
    assert value(metrics, "timeline_overdue_seconds", topic=REST) == 7
    assert value(metrics, "timeline_messages_depth", topic="b", state="waiting") is None


def test_a_topic_that_is_dropped_leaves_nothing_and_makes_room() -> None:
    metrics = Metrics(topics_shown=1)
    for topic, messages in (("a", 1), ("b", 10), ("c", 100)):
        metrics.topic_gauge("timeline_messages_depth", topic, messages, "waiting")
    metrics.forget_topic("c")
    assert value(metrics, "timeline_messages_depth", topic=REST, state="waiting") == 10
    metrics.forget_topic("a")
    assert value(metrics, "timeline_messages_depth", topic="a", state="waiting") is None
    metrics.topic_gauge("timeline_messages_depth", "b", 11, "waiting")
    assert value(metrics, "timeline_messages_depth", topic="b", state="waiting") == 11
    assert value(metrics, "timeline_messages_depth", topic=REST, state="waiting") is None


def test_counters_that_alerts_watch_begin_at_nothing() -> None:
    """A server takes a counter that appears with its first event for one that has not grown."""
    metrics = Metrics(topics_shown=1)
    for topic in ("a", "b"):
        label = metrics.topic(topic)
        for cause in LEASE_ENDS:
            assert value(metrics, "timeline_leases_ended_total", topic=label, cause=cause) == 0
        for cause in BURIALS:
            assert value(metrics, "timeline_buried_total", topic=label, cause=cause) == 0
    metrics.store_call("put", "OK", 1.0)
    assert value(metrics, "timeline_store_calls_total", call="put", outcome="UNAVAILABLE") == 0


def test_the_topic_is_the_first_label_of_whatever_has_one() -> None:
    assert all(one.labels[0] == "topic" for one in CATALOG.values() if "topic" in one.labels)


def test_every_metric_of_the_catalog_is_exposed_and_topics_are_capped() -> None:
    metrics = Metrics(topics_shown=1)
    assert metrics.topic("first") == "first"
    assert metrics.topic("second") == "…"
    metrics.lateness.observe("first", np.array([0.0005, 0.004, 7.0]))
    text = generate_latest(metrics.registry).decode()
    for name in [name for name, one in CATALOG.items() if not one.always]:
        assert name not in text
        metrics.gauge(name, 1.0)
    text = generate_latest(metrics.registry).decode()
    for name, one in CATALOG.items():
        assert f"# TYPE {name.removesuffix('_total') if one.kind == 'counter' else name}" in text or name in text
        assert all(label.isidentifier() for label in one.labels)
    assert 'timeline_delivery_lateness_seconds_bucket{le="0.001",topic="first"} 1.0' in text
    assert 'timeline_delivery_lateness_seconds_count{topic="first"} 3.0' in text
    metrics.forget_topic("first")
    assert 'topic="first"' not in generate_latest(metrics.registry).decode()


def test_a_scrape_may_come_while_a_series_comes_or_goes() -> None:
    """It runs in a thread of its own: between the two notes of a batch, and between the two of a series forgotten."""
    metrics = Metrics()

    class Meanwhile(dict):
        def items(self):
            for item in list(super().items()):
                metrics.lateness.forget(item[0])
                yield item

    metrics.lateness.observe("first", np.array([0.0005]))
    metrics.lateness.counts = Meanwhile(metrics.lateness.counts)
    assert 'timeline_delivery_lateness_seconds_count{topic="first"} 1.0' in generate_latest(metrics.registry).decode()
    assert 'topic="first"' not in generate_latest(metrics.registry).decode()
