"""The broker's small HTTP port: `/metrics` for Prometheus, `/healthz` (alive) and `/readyz` (serving, or why not)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app

from timeline.errors import Invalid

if TYPE_CHECKING:
    from timeline.broker.node import Node


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """A scrape every few seconds is no news."""


class _Threaded(ThreadingMixIn, WSGIServer):
    """A slow scraper holds up nobody else."""

    daemon_threads = True


class Probes:
    """Serves on `listen` ("host:port", or "off") in a thread of its own."""

    def __init__(self, listen: str, node: Node) -> None:
        self._listen = listen
        self._node = node
        self._server: WSGIServer | None = None

    def start(self) -> str:
        """Opens the port; answers its address, or "off". Raises OSError, the address its `filename`, when taken."""
        if self._listen == "off":
            return "off"
        host, separator, port = self._listen.rpartition(":")
        if not separator or not port.isdigit():
            raise Invalid(f"metrics must be host:port or off, not {self._listen!r}")
        try:
            self._server = make_server(host, int(port), self._application(), _Threaded, _Quiet)
        except OSError as taken:
            raise OSError(taken.errno, taken.strerror, self._listen) from taken
        threading.Thread(target=self._server.serve_forever, name="probes", daemon=True).start()
        return f"{host}:{self._server.server_port}"

    def stop(self) -> None:
        """Closes the port."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _application(self) -> Callable[[dict[str, Any], Any], Iterable[bytes]]:
        metrics = make_wsgi_app(self._node.metrics.registry)

        def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            path = environ.get("PATH_INFO", "/")
            if path == "/metrics":
                scraped: Iterable[bytes] = metrics(environ, start_response)
                return scraped
            if path == "/healthz":
                return _text(start_response, "200 OK", "alive")
            if path == "/readyz":
                why = self._node.not_ready
                return _text(start_response, "503 Service Unavailable" if why else "200 OK", why or "ready")
            return _text(start_response, "404 Not Found", "try /metrics, /healthz or /readyz")

        return answer


def _text(start_response: Any, status: str, text: str) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{text}\n".encode()]
