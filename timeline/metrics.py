"""A broker's metrics for Prometheus. Names carry their unit; label sets are bounded.

`CATALOG` lists every metric; a test compares it with the documentation. Batches are observed as columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

LATENESS_BUCKETS_S = (
    0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0,
)  # fmt: skip
STORE_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
REST = "…"
"""The label of all topics that are not shown by name."""
TOPICS_SHOWN = 200
LEASE_ENDS = ("acked", "released", "buried", "unseen", "ran_out")
BURIALS = ("consumer", "max_deliveries")
"""Causes that are shown from the start; others once they occur."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """One metric. `fold`: how a gauge's values of the topics that are not shown by name become one. `always`: False for
    a gauge that is absent until somebody knows its value."""

    kind: str
    help: str
    labels: tuple[str, ...]
    fold: Callable[[float, float], float] = float.__add__
    always: bool = True


def counter(help: str, *labels: str) -> Declaration:
    """Declare what only grows."""
    return Declaration("counter", help, labels)


def gauge(
    help: str, *labels: str, fold: Callable[[float, float], float] = float.__add__, always: bool = True
) -> Declaration:
    """Declare a value that rises and falls."""
    return Declaration("gauge", help, labels, fold, always)


def histogram(help: str, *labels: str) -> Declaration:
    """Declare a distribution."""
    return Declaration("histogram", help, labels)


def _sooner(one: float, other: float) -> float:
    """Return the earlier of two times, 0 being none."""
    return min(one, other) if one and other else one or other


CATALOG: dict[str, Declaration] = {
    "timeline_delivery_lateness_seconds": histogram(
        "From due to push, of deliveries that were not redeliveries after a lease ran out", "topic"
    ),
    "timeline_deliveries_total": counter("Messages pushed to consumers", "topic"),
    "timeline_redeliveries_total": counter("Messages leased again after a lease ran out", "topic"),
    "timeline_operations_total": counter(
        "Answers given to producers and consumers, by operation and status", "operation", "status"
    ),
    "timeline_late_acks_total": counter("Acks that counted after their lease had run out", "topic"),
    "timeline_buried_total": counter("Messages that became dead letters, by cause", "topic", "cause"),
    "timeline_expired_total": counter("Messages removed because they passed their expiry", "topic"),
    "timeline_leases_ended_total": counter(
        "Leases that ended, by cause: acked, released, buried, unseen (returned), ran_out (leased again since)",
        "topic",
        "cause",
    ),
    "timeline_stranded_total": counter(
        "Overdue messages that a sweep over all buckets had to find: no broker dispatched their bucket in time", "topic"
    ),
    "timeline_schedule_occurrences_total": counter(
        "Occurrences of schedules: produced in time, caught_up after an outage, missed, skipped (the one before was "
        "unfinished), or failed (refused by the topic)",
        "topic",
        "outcome",
    ),
    "timeline_schedules": gauge(
        "Recurring schedules by state: active, waiting (for the occurrence before), paused, ended", "topic", "state"
    ),
    "timeline_schedule_last_timestamp_seconds": gauge(
        "When an occurrence of a schedule was last put, Unix time; 0 when none was", "topic", fold=max
    ),
    "timeline_schedule_next_timestamp_seconds": gauge(
        "The time of the next occurrence that is not put yet, Unix time; 0 when none follows", "topic", fold=_sooner
    ),
    "timeline_schedule_overdue_seconds": gauge(
        "How long the time of an occurrence is over that is not put", "topic", fold=max
    ),
    "timeline_messages_depth": gauge(
        "Messages without a live lease, by state: available (due) and waiting (to come)", "topic", "state"
    ),
    "timeline_expected_messages": gauge(
        "Messages that come due within so long from now: 1m, 10m, 1h, 24h", "topic", "within"
    ),
    "timeline_expected_peak_messages": gauge("Messages that come due in the busiest minute of the next ten", "topic"),
    "timeline_overdue_seconds": gauge(
        "How long the earliest message that waits for nothing but a delivery has been due; 0 when none is",
        "topic",
        fold=max,
    ),
    "timeline_topic_rate_limit": gauge(
        "Deliveries a second that the topic permits; 0 without a limit", "topic", fold=max
    ),
    "timeline_buckets": gauge("Buckets of the topic that this broker dispatches", "topic"),
    "timeline_next_due_timestamp_seconds": gauge(
        "When the next message comes due, Unix time; 0 when none is pending", "topic", fold=_sooner
    ),
    "timeline_leases_in_flight": gauge("Messages in flight: leased by consumers, and not settled", "topic"),
    "timeline_consumers": gauge(
        "Consumers connected, by health: healthy, silent, stalled, set_aside", "topic", "health"
    ),
    "timeline_credit_messages": gauge("Messages that healthy consumers have room for", "topic"),
    "timeline_store_call_seconds": histogram("How long store calls took", "call"),
    "timeline_store_calls_total": counter("Store calls by outcome", "call", "outcome"),
    "timeline_store_info": gauge("Always 1; the server that keeps the messages, in words", "server"),
    "timeline_store_warnings": gauge("Settings of the store's server that weaken what it promises"),
    "timeline_store_free_bytes": gauge("Free bytes on the disk of the store, if it can tell", always=False),
    "timeline_store_size_bytes": gauge("Room in all where the store keeps its data, where it can tell", always=False),
    "timeline_intake_bytes": gauge("Payload bytes of puts waiting for the store"),
    "timeline_outbox_bytes": gauge("Payload bytes waiting to be pushed to consumers"),
    "timeline_throttled_total": counter("Messages answered THROTTLED, by what was full", "bound"),
    "timeline_frames_refused_total": counter("Frames that failed verification", "method"),
    "timeline_access_refused_total": counter(
        "Calls refused for who called, by cause, and long calls that ended for it", "cause"
    ),
    "timeline_certificate_expires_timestamp_seconds": gauge(
        "When the certificate of this broker expires, Unix time", always=False
    ),
    "timeline_task_crashes_total": counter("Background tasks that ended by an error (a bug: see the log)", "task"),
    "timeline_etcd_up": gauge("1 while etcd confirms what this broker believes; always with local://"),
    "timeline_clock_step_seconds": gauge("Jump of the wall clock noticed and not followed yet"),
    "timeline_clock_offset_seconds": gauge(
        "By how much another clock is ahead of this broker's, by kind: broker, store, client (the worst consumer)",
        "kind",
        "peer",
    ),
    "timeline_clock_error_seconds": gauge("By how much that offset may be wrong, either way", "kind", "peer"),
    "timeline_clock_median_offset_seconds": gauge(
        "By how much the median of all clocks that are known is ahead of this broker's"
    ),
    "timeline_clock_median_error_seconds": gauge("By how much that may be wrong, either way"),
    "timeline_clocks_compared": gauge("Clocks that the median is of, this broker's and the store's among them"),
    "timeline_quarantined": gauge("1 while this broker leases nothing because its clock is wrong"),
    "timeline_clients_adrift": gauge("Consumers whose clocks are 50 ms off this broker's, or more"),
    "timeline_cluster_brokers": gauge("Brokers that this one believes to be there, itself too"),
    "timeline_hints_total": counter(
        "Hints between brokers of what comes due or who connected: sent, received, or dropped (a sweep finds messages)",
        "outcome",
    ),
    "timeline_journal_events_total": counter("Events handed to the journal"),
    "timeline_journal_dropped_total": counter("Events that the journal could not take: they are missing in it"),
    "timeline_journal_restarts_total": counter("The journal's process had ended, and was started again"),
    "timeline_ready": gauge("1 while the broker serves"),
    "timeline_broker_info": gauge("Always 1; the broker's name and version", "name", "version"),
}


def counters(catalog: Mapping[str, Declaration], registry: CollectorRegistry) -> dict[str, Counter]:
    """Register the counters of a catalog; by name."""
    return {
        name: Counter(name.removesuffix("_total"), declared.help, declared.labels, registry=registry)
        for name, declared in catalog.items()
        if declared.kind == "counter"
    }


class ColumnHistogram(Collector):
    """A histogram that takes whole columns at once: one `searchsorted` per batch instead of a call per message.

    `counts`: by label value, how many were at most each of `bounds_s` and above the one before. The last counts those
    above all bounds.
    """

    def __init__(self, name: str, label: str, bounds_s: Iterable[float], registry: CollectorRegistry) -> None:
        self._name, self._label = name, label
        self.bounds_s = np.array(list(bounds_s))
        self.counts: dict[str, npt.NDArray[np.int64]] = {}
        self._sums: dict[str, float] = {}
        registry.register(self)

    def observe(self, value: str, seconds: npt.NDArray[np.float64]) -> None:
        """Count each of `seconds` under label value `value`."""
        counts = self.counts.setdefault(value, np.zeros(len(self.bounds_s) + 1, dtype=np.int64))
        counts += np.bincount(np.searchsorted(self.bounds_s, seconds), minlength=len(counts))
        self._sums[value] = self._sums.get(value, 0.0) + float(seconds.sum())

    def describe(self) -> Iterable[Metric]:
        return [HistogramMetricFamily(self._name, CATALOG[self._name].help, labels=[self._label])]

    def collect(self) -> Iterator[Metric]:
        """Called by scrapers' threads while the event loop goes on. A series may come or go meanwhile."""
        family = HistogramMetricFamily(self._name, CATALOG[self._name].help, labels=[self._label])
        names = [*(repr(float(bound)) for bound in self.bounds_s), "+Inf"]
        for value, counts in list(self.counts.items()):
            family.add_metric(
                [value], list(zip(names, np.cumsum(counts).tolist(), strict=True)), self._sums.get(value, 0.0)
            )
        yield family

    def forget(self, value: str) -> None:
        """Drop the series of `value`."""
        self.counts.pop(value, None)
        self._sums.pop(value, None)


class TopicGauges(Collector):
    """The gauges with a value for each topic. `shown(topic)`: its label.

    Topics that are not shown by name are folded into one, `REST`, when a scraper asks. Times and bounds fold by the
    worst value, all others by their sum.
    """

    def __init__(self, names: Iterable[str], shown: Callable[[str], str], registry: CollectorRegistry) -> None:
        self._shown = shown
        self._names = tuple(names)
        self._values: dict[str, dict[tuple[str, ...], float]] = {}
        """By topic: the values by the gauge's name and the labels after the topic's."""
        self._rest: dict[tuple[str, ...], float] = {}
        """Values of 0 that fold into REST, so that its series are always there."""
        registry.register(self)

    def set(self, name: str, topic: str, value: float, *labels: str) -> None:
        """Set gauge `name` for `topic`. `labels`: those after the topic's."""
        key = (name, *labels)
        if value or self._shown(topic) != REST:
            self._values.setdefault(topic, {})[key] = value
            return
        # A 0 changes nothing that it is folded into: ten thousand empty topics need not keep theirs.
        self._rest[key] = 0.0
        if (values := self._values.get(topic)) is not None:
            values.pop(key, None)

    def _family(self, name: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, CATALOG[name].help, labels=CATALOG[name].labels)

    def describe(self) -> Iterable[Metric]:
        return [self._family(name) for name in self._names]

    def collect(self) -> Iterator[Metric]:
        """Called by scrapers' threads while the event loop goes on. A series may come or go meanwhile."""
        folded: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in self._names}
        for topic, values in [("", self._rest), *self._values.copy().items()]:
            label = self._shown(topic)
            for (name, *more), value in values.copy().items():
                known, key = folded[name], (label, *more)
                fold = CATALOG[name].fold
                known[key] = fold(known[key], float(value)) if key in known else float(value)
        for name, found in folded.items():
            family = self._family(name)
            for key, value in found.items():
                family.add_metric(key, value)
            yield family

    def forget(self, topic: str) -> None:
        """Drop the series of `topic`."""
        self._values.pop(topic, None)


class Metrics:
    """All metrics of one broker in a registry of its own. Topics beyond `topics_shown` are summed under the label
    `REST`, so that a thousand topics do not drown the server."""

    def __init__(self, topics_shown: int = TOPICS_SHOWN) -> None:
        self.registry = CollectorRegistry()
        self._topics_shown = topics_shown
        self._shown: set[str] = set()
        self._rest = False
        self.lateness = ColumnHistogram(
            "timeline_delivery_lateness_seconds", "topic", LATENESS_BUCKETS_S, self.registry
        )
        self._store_seconds = Histogram(
            "timeline_store_call_seconds",
            CATALOG["timeline_store_call_seconds"].help,
            ["call"],
            buckets=STORE_BUCKETS_S,
            registry=self.registry,
        )
        self._counters = counters(CATALOG, self.registry)
        self._calls: dict[str, Histogram] = {}
        self._found: dict[tuple[str, tuple[str, ...]], Counter] = {}
        gauges = {name: declared for name, declared in CATALOG.items() if declared.kind == "gauge"}
        of_topics = [name for name, declared in gauges.items() if "topic" in declared.labels]
        self._topic_gauges = TopicGauges(of_topics, self._label, self.registry)
        self._gauges: dict[str, Gauge] = {}
        for name, declared in gauges.items():
            if declared.always and name not in of_topics:
                self._gauge(name)

    def topic(self, name: str) -> str:
        """Return the label of a topic: from now on its own, where there is room."""
        if name in self._shown:
            return name
        if len(self._shown) < self._topics_shown:
            self._shown.add(name)
            self._begin(name)
            return name
        if not self._rest:
            self._rest = True
            self._begin(REST)
        return REST

    def _label(self, topic: str) -> str:
        return topic if topic in self._shown else REST

    def _begin(self, label: str) -> None:
        """Start at 0 the counters that alerts watch. A counter that appears with its first event looks to a server as
        if it had always been there."""
        for cause in LEASE_ENDS:
            self._series("timeline_leases_ended_total", (label, cause))
        for cause in BURIALS:
            self._series("timeline_buried_total", (label, cause))
        for outcome in ("missed", "failed"):
            self._series("timeline_schedule_occurrences_total", (label, outcome))

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Add to a counter of the catalog."""
        self._series(name, labels).inc(by)

    def gauge(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge of the catalog that has no topic."""
        found = self._gauges.get(name) or self._gauge(name)
        (found.labels(*labels) if labels else found).set(value)

    def topic_gauge(self, name: str, topic: str, value: float, *labels: str) -> None:
        """Set a gauge of the catalog for a topic. `labels`: those after the topic's."""
        self.topic(topic)
        self._topic_gauges.set(name, topic, value, *labels)

    def _gauge(self, name: str) -> Gauge:
        declared = CATALOG[name]
        made = self._gauges[name] = Gauge(name, declared.help, declared.labels, registry=self.registry)
        return made

    def forget(self, name: str, *labels: str) -> None:
        """Drop one series of a gauge."""
        self._gauges[name].remove(*labels)

    def store_call(self, call: str, outcome: str, took_ms: float) -> None:
        """Observe one store call."""
        seconds = self._calls.get(call)
        if seconds is None:
            seconds = self._calls[call] = self._store_seconds.labels(call)
            for trouble in ("UNAVAILABLE", "UNKNOWN"):
                self._series("timeline_store_calls_total", (call, trouble))
        seconds.observe(took_ms / 1000.0)
        self._series("timeline_store_calls_total", (call, outcome)).inc()

    def operations(self, operation: str, statuses: npt.NDArray[np.uint8], names: Callable[[int], str]) -> None:
        """Count answers of one call by status. `names` gives a status code's name."""
        for code, count in enumerate(np.bincount(statuses).tolist()):
            if count:
                self._series("timeline_operations_total", (operation, names(code))).inc(count)

    def _series(self, name: str, labels: tuple[str, ...]) -> Counter:
        """Return a counter of the catalog with its labels, cached: the look-up costs more than counting."""
        series = self._found.get((name, labels))
        if series is None:
            counted = self._counters[name]
            series = self._found[name, labels] = counted.labels(*labels) if labels else counted
        return series

    def forget_topic(self, name: str) -> None:
        """Drop the series of a topic that is gone."""
        self._topic_gauges.forget(name)
        if name not in self._shown:
            return
        self._shown.discard(name)
        self._found.clear()
        self.lateness.forget(name)
        for counted, metric in self._counters.items():
            if "topic" in CATALOG[counted].labels:
                metric.remove_by_labels({"topic": name})
