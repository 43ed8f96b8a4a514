"""What a relay counts, for Prometheus: on an HTTP port of its own, when it is given one."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from timeline.config import check_address, joined
from timeline.outbox.rows import Waiting

CATALOG: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "timeline_relay_sent_total": (
        "counter",
        "Messages of the outbox that are on their timeline, by status: OK, or DUPLICATE (they were before)",
        ("topic", "status"),
    ),
    "timeline_relay_refused_total": ("counter", "Messages that were set aside, by status", ("topic", "status")),
    "timeline_relay_waiting": ("gauge", "Messages that wait in the outbox", ()),
    "timeline_relay_set_aside": ("gauge", "Messages that were set aside and nobody has dealt with", ()),
    "timeline_relay_oldest_seconds": ("gauge", "How long the message that waits longest has waited", ()),
    "timeline_relay_trouble": ("gauge", "1 while the database, a broker or a topic keeps messages waiting", ()),
}
MOST_TOPICS = 200
"""Past so many topics the rest are summed under the label `…`."""


class Figures:
    """All metrics of one relay, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._topics: set[str] = set()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        for name, (kind, sentence, labels) in CATALOG.items():
            if kind == "counter":
                self._counters[name] = Counter(name.removesuffix("_total"), sentence, labels, registry=self.registry)
            else:
                self._gauges[name] = Gauge(name, sentence, labels, registry=self.registry)

    def serve(self, listen: str) -> tuple[str, Callable[[], None]]:
        """Opens `listen` ("host:port"); answers its address and what closes it. Raises OSError, the address its
        `filename`, when it is taken."""
        host, port = check_address("metrics", listen, free_port=True, otherwise='or "off"')
        try:
            server, _ = start_http_server(port, addr=host or "0.0.0.0", registry=self.registry)
        except OSError as taken:
            raise OSError(taken.errno, taken.strerror, listen) from taken

        def close() -> None:
            server.shutdown()
            server.server_close()

        return joined(host, server.server_port), close

    def sent(self, topic: str, status: str, count: int) -> None:
        self._counters["timeline_relay_sent_total"].labels(self._label(topic), status).inc(count)

    def refused(self, topic: str, status: str) -> None:
        self._counters["timeline_relay_refused_total"].labels(self._label(topic), status).inc()

    def trouble(self, some: bool) -> None:
        self._gauges["timeline_relay_trouble"].set(float(some))

    def counted(self, found: Waiting, oldest_s: float) -> None:
        self._gauges["timeline_relay_waiting"].set(found.waiting)
        self._gauges["timeline_relay_set_aside"].set(found.set_aside)
        self._gauges["timeline_relay_oldest_seconds"].set(oldest_s)

    def _label(self, topic: str) -> str:
        if topic in self._topics or len(self._topics) < MOST_TOPICS:
            self._topics.add(topic)
            return topic
        return "…"
