"""The gateway's metrics for Prometheus: requests by route, webhooks by topic."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from timeline.metrics import REST, TOPICS_SHOWN, Declaration, counter, counters, gauge, histogram

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
CATALOG: dict[str, Declaration] = {
    "timeline_gateway_requests_total": counter("Requests that were answered", "method", "route", "status"),
    "timeline_gateway_request_seconds": histogram("Time from a request to the end of its answer", "method", "route"),
    "timeline_gateway_requests_in_flight": gauge("Requests under way"),
    "timeline_gateway_streams": gauge("Event streams that are open"),
    "timeline_gateway_webhooks_total": counter(
        "Webhooks that were sent, by what became of the message", "topic", "effect"
    ),
    "timeline_gateway_webhook_seconds": histogram("Time from sending a webhook to its answer", "topic"),
    "timeline_gateway_circuits_open": gauge("Hosts to which no webhook goes, because the last ones failed"),
}


class GatewayMetrics:
    """The metrics of one gateway, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._topics: set[str] = set()
        made = counters(CATALOG, self.registry)
        self._requests, self._webhooks = (
            made["timeline_gateway_requests_total"],
            made["timeline_gateway_webhooks_total"],
        )
        self._seconds = self._histogram("timeline_gateway_request_seconds")
        self._requests_of: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self._webhook_seconds = self._histogram("timeline_gateway_webhook_seconds")
        self.in_flight = self._gauge("timeline_gateway_requests_in_flight")
        self.streams = self._gauge("timeline_gateway_streams")
        self.circuits_open = self._gauge("timeline_gateway_circuits_open")

    def _histogram(self, name: str) -> Histogram:
        declared = CATALOG[name]
        return Histogram(name, declared.help, declared.labels, buckets=SECONDS, registry=self.registry)

    def _gauge(self, name: str) -> Gauge:
        return Gauge(name, CATALOG[name].help, registry=self.registry)

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Note a request. `route`: a template, of which there are few."""
        key = method, route, status
        if (made := self._requests_of.get(key)) is None:
            made = self._requests.labels(method, route, str(status)), self._seconds.labels(method, route)
            self._requests_of[key] = made
        made[0].inc()
        made[1].observe(seconds)

    def webhook(self, topic: str, effect: str, seconds: float) -> None:
        """Note a webhook. Topics beyond `TOPICS_SHOWN` are summed."""
        if topic not in self._topics and len(self._topics) >= TOPICS_SHOWN:
            topic = REST
        self._topics.add(topic)
        self._webhooks.labels(topic, effect).inc()
        self._webhook_seconds.labels(topic).observe(seconds)

    def text(self) -> bytes:
        """Return all metrics for Prometheus."""
        return generate_latest(self.registry)
