"""What is noted of each request: metrics for Prometheus, one log line, and its trace. Of webhooks: metrics."""

from __future__ import annotations

import logging
from typing import Any

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from timeline.clock import Clock
from timeline.gateway.routes.verbs import as_called, verb_apart
from timeline.metrics import REST, TOPICS_SHOWN, Declaration, counter, counters, gauge, histogram

log = logging.getLogger("timeline.gateway.requests")

UNMATCHED = "none"
QUIET = ("/healthz", "/readyz", "/metrics")
"""Paths whose calls are no news."""
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
CATALOG: dict[str, Declaration] = {
    "timeline_gateway_requests_total": counter("Requests that were answered", "method", "route", "status"),
    "timeline_gateway_request_seconds": histogram(
        "Time from a request to the end of its answer", "method", "route", "status"
    ),
    "timeline_gateway_requests_in_flight": gauge("Requests under way"),
    "timeline_gateway_streams": gauge("Event streams that are open"),
    "timeline_gateway_webhooks_total": counter(
        "Webhooks that were sent, by what became of the message", "topic", "effect"
    ),
    "timeline_gateway_webhook_seconds": histogram("Time from sending a webhook to its answer", "topic"),
    "timeline_gateway_circuits_open": gauge("Hosts and single receivers to which no webhook goes, because they failed"),
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
            labels = method, route, str(status)
            made = self._requests.labels(*labels), self._seconds.labels(*labels)
            self._requests_of[key] = made
        made[0].inc()
        made[1].observe(seconds)

    def refused(self, status: int, peer: str) -> None:
        """Note and log what is no request of HTTP."""
        self.request("OTHER", UNMATCHED, status, 0.0)
        log.info("request", extra={"method": "OTHER", "route": UNMATCHED, "status": status, "peer": peer})

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


class Observed:
    """An ASGI application that counts, times and logs each request of the one inside. It also leaves percent signs in
    paths, so that a message's id may have a slash."""

    def __init__(self, inside: ASGIApp, metrics: GatewayMetrics) -> None:
        self._inside, self._metrics, self._clock = inside, metrics, Clock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._inside(scope, receive, send)
            return
        scope["path"] = verb_apart((scope["raw_path"] or b"/").decode("latin-1"))
        began_ms = self._clock.monotonic_ms()
        status = 0
        sent_bytes = 0

        async def sending(message: Message) -> None:
            nonlocal status, sent_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                sent_bytes += len(message.get("body", b""))
            await send(message)

        self._metrics.in_flight.inc()
        try:
            await self._inside(scope, receive, sending)
        finally:
            self._metrics.in_flight.dec()
            self._note(scope, status, sent_bytes, self._clock.monotonic_ms() - began_ms)

    def _note(self, scope: Any, status: int, sent_bytes: int, took_ms: float) -> None:
        method, route = scope["method"], as_called(scope.get("path_template") or UNMATCHED)
        if method not in ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"):
            method = "OTHER"
        self._metrics.request(method, route, status, took_ms / 1000.0)
        if not log.isEnabledFor(logging.INFO) or (route in QUIET and status < 400):
            return
        peer = scope.get("client")
        fields: dict[str, Any] = {
            "method": method,
            "route": route,
            "path": as_called(scope["path"])[:512],
            "status": status,
            "took_ms": round(took_ms, 3),
            "sent_bytes": sent_bytes,
            "peer": peer[0] if peer else "",
        }
        trace = next((value for name, value in scope["headers"] if name == b"traceparent"), b"")
        if trace:
            fields["traceparent"] = trace[:64].decode("latin-1")
        log.info("request", extra=fields)
