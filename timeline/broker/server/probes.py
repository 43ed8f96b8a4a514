"""Health and metrics: gRPC's health service, and a small HTTP port.

The port has `/metrics` for Prometheus, `/healthz` (alive) and `/readyz` (serving, or why not). Both ports answer
without a token. So watchers and requests are bounded, and one that does not read holds up no other.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry, disable_created_metrics, make_wsgi_app

from timeline.config import check_address, is_ipv6, joined

MOST_AT_ONCE = 64
"""Most requests at once. One more ends the oldest connection."""
ROOM_S = 1.0
"""How long that end may take. After it the newest connection is refused instead."""
IDLE_S = 5.0
"""How long a connection may send nothing, or take nothing."""


class _Quiet(WSGIRequestHandler):
    timeout = IDLE_S

    def handle(self) -> None:
        try:
            super().handle()
        except (TimeoutError, ConnectionError):
            self.close_connection = True  # who says nothing, or goes away, is nobody to answer

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape every few seconds is no news."""


class _Threaded(ThreadingMixIn, WSGIServer):
    """One thread per request. A slow scraper holds up no other, and a bound limits threads and descriptors. A client
    that sends its request byte by byte gives way to the next one."""

    daemon_threads = True

    def __init__(self, *asked: Any, **more: Any) -> None:
        self._room = threading.BoundedSemaphore(MOST_AT_ONCE)
        self._served: dict[socket.socket, None] = {}  # in order of arrival
        self._turn = threading.Lock()
        super().__init__(*asked, **more)

    def server_bind(self) -> None:
        """Bind without `HTTPServer`'s question to the name service, which may take long."""
        TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self._end_oldest()
            if not self._room.acquire(timeout=ROOM_S):
                self.shutdown_request(request)
                return
        with self._turn:
            self._served[request] = None
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.release()  # there is no thread for it
            raise

    def _end_oldest(self) -> None:
        with self._turn:
            oldest = next(iter(self._served), None)
            if oldest is not None:
                del self._served[oldest]
                with suppress(OSError):  # it has gone by itself
                    oldest.shutdown(socket.SHUT_RDWR)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def shutdown_request(self, request: Any) -> None:
        """Close it. Before that, take it off the list: its descriptor may soon be another's."""
        with self._turn:
            self._served.pop(request, None)
        super().shutdown_request(request)


class _ThreadedV6(_Threaded):
    address_family = socket.AF_INET6


class MetricsPort:
    """Serves on `listen` ("host:port", or "off") in a thread. `not_ready`: why the broker does not serve."""

    def __init__(self, listen: str, registry: CollectorRegistry, not_ready: Callable[[], str]) -> None:
        self._listen = listen
        self._registry, self._not_ready = registry, not_ready
        self._server: WSGIServer | None = None

    def start(self) -> str:
        """Open the port. Return its address, or "off". Raise OSError, its `filename` the address, if it is taken."""
        if self._listen == "off":
            return "off"
        host, port = check_address("metrics", self._listen, free_port=True, otherwise='or "off"')
        kind = _ThreadedV6 if is_ipv6(host) else _Threaded
        try:
            self._server = make_server(host, port, self._application(), kind, _Quiet)
        except OSError as taken:
            raise OSError(taken.errno, taken.strerror, self._listen) from taken
        threading.Thread(target=self._server.serve_forever, name="probes", daemon=True).start()
        return joined(host, self._server.server_port)

    def stop(self) -> None:
        """Close the port."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _application(self) -> Callable[[dict[str, Any], Any], Iterable[bytes]]:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they make two series of each counter
        metrics = make_wsgi_app(self._registry)

        def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            path = environ.get("PATH_INFO", "/")
            if path == "/metrics":
                scraped: Iterable[bytes] = metrics(environ, start_response)
                return scraped
            if path == "/healthz":
                return _text(start_response, "200 OK", "alive")
            if path == "/readyz":
                why = self._not_ready()
                return _text(start_response, "503 Service Unavailable" if why else "200 OK", why or "ready")
            return _text(start_response, "404 Not Found", "try /metrics, /healthz or /readyz")

        return answer


def _text(start_response: Any, status: str, text: str) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{text}\n".encode()]


MOST_WATCHES = 256


async def _service(data: bytes, context: Any) -> str:
    """Return the service that a request asks for. A deserializer of gRPC's would log a traceback for each request that
    cannot be read."""
    try:
        return str(health_pb2.HealthCheckRequest.FromString(data).service)
    except DecodeError:
        said = "the request cannot be read: send a grpc.health.v1.HealthCheckRequest"
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, said)
        raise  # which abort has done


class HealthService:
    """The health of each service, by name."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()
        self.watches = 0

    def handlers(self) -> Any:
        """Return its methods, for a server."""
        form = {"response_serializer": health_pb2.HealthCheckResponse.SerializeToString}
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(self.Check, **form),
            "Watch": grpc.unary_stream_rpc_method_handler(self.Watch, **form),
        }
        return grpc.method_handlers_generic_handler("grpc.health.v1.Health", methods)

    async def set(self, service: str, status: int) -> None:
        """Set the health of `service`, and tell its watchers."""
        self._statuses[service] = status
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: bytes, context: Any) -> Any:
        """Return the health of the service now."""
        service = await _service(request, context)
        if service not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service here")
        return health_pb2.HealthCheckResponse(status=self._statuses[service])

    async def Watch(self, request: bytes, context: Any) -> None:
        """Send the same, again whenever it changes."""
        service = await _service(request, context)
        if self.watches >= MOST_WATCHES:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MOST_WATCHES} watch already: ask by Check")
        self.watches += 1
        try:
            last = None
            while True:
                changed = self._changed
                status = self._statuses.get(service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
                if status != last:
                    last = status
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                await changed.wait()
        finally:
            self.watches -= 1
