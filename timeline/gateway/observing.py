"""What is noted of each request: its metrics, one log line, and the trace that it belongs to."""

from __future__ import annotations

import logging
from typing import Any

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from timeline.clock import Clock
from timeline.gateway.metrics import GatewayMetrics

log = logging.getLogger("timeline.gateway.requests")

UNMATCHED = "none"
QUIET = ("/healthz", "/readyz", "/metrics")
"""Paths whose calls are no news."""


class Observed:
    """An ASGI application that counts, times and logs each request of the one inside. It also leaves percent signs in
    paths, so that a message's id may have a slash."""

    def __init__(self, inside: ASGIApp, metrics: GatewayMetrics) -> None:
        self._inside, self._metrics, self._clock = inside, metrics, Clock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._inside(scope, receive, send)
            return
        scope["path"] = (scope["raw_path"] or b"/").decode("latin-1")
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
        method, route = scope["method"], scope.get("path_template") or UNMATCHED
        if method not in ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"):
            method = "OTHER"
        self._metrics.request(method, route, status, took_ms / 1000.0)
        if not log.isEnabledFor(logging.INFO) or (route in QUIET and status < 400):
            return
        peer = scope.get("client")
        fields: dict[str, Any] = {
            "method": method,
            "route": route,
            "path": scope["path"][:512],
            "status": status,
            "took_ms": round(took_ms, 3),
            "sent_bytes": sent_bytes,
            "peer": peer[0] if peer else "",
        }
        trace = next((value for name, value in scope["headers"] if name == b"traceparent"), b"")
        if trace:
            fields["traceparent"] = trace[:64].decode("latin-1")
        log.info("request", extra=fields)
