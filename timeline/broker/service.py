"""What `timeline serve` runs: a node behind gRPC, with health, metrics over HTTP, and an end on SIGTERM.

The only module of the broker that knows gRPC, sockets, signals and randomness.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import resource
import secrets
import signal
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from timeline.broker import logs
from timeline.broker.begun import Begun
from timeline.broker.gateway import Gateway
from timeline.broker.limits import Limits
from timeline.broker.node import Node
from timeline.broker.ports import check_free
from timeline.broker.probes import Probes
from timeline.clock import Clock
from timeline.config import ServeConfig
from timeline.metrics import Metrics
from timeline.storage_plugins import make_store, shown
from timeline.storage_plugins.contract import StoreUnavailable
from timeline.sync import make_membership
from timeline.wire import MAX_FRAME_BYTES, METHODS, SERVICE, Fault, TransportError

log = logging.getLogger("timeline.broker")

STATUS_OF = {
    Fault.REFUSED_FRAME: grpc.StatusCode.INVALID_ARGUMENT,
    Fault.WRONG_VERSION: grpc.StatusCode.FAILED_PRECONDITION,
    Fault.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Fault.NOT_READY: grpc.StatusCode.UNAVAILABLE,
    Fault.NO_TOPIC: grpc.StatusCode.NOT_FOUND,
    Fault.BROKEN: grpc.StatusCode.ABORTED,
    Fault.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
}
NOT_READY_TRAILER = (("timeline-not-ready", "1"),)
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.so_reuseport", 0),
    # A window that stays as it is: one that grows with what arrives let a flood of puts take hundreds of MiB unread.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 2 * 1024 * 1024),
    # Frames are not compressed: a thousandth of a frame's bytes would make the whole frame here, before anybody looks.
    ("grpc.per_message_decompression", 0),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
]
MOST_FILES = 1 << 20
FILES_OF_OURS = 256
"""Descriptors that connections never get: for the store, logs and metrics."""
RETRY_OPEN_S = 1.0


class _ServerStream:
    """A two-way gRPC call as a `wire.Stream`.

    gRPC goes on with a write whose caller was cancelled, and sends no status beside it: the call would neither go on
    nor end. So a write goes on by itself, and whoever ends the call waits for it (`let_go`).
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._task = asyncio.current_task()
        self._writing: Begun | None = None
        self.closed = self.given_up = False

    async def send(self, frame: bytes) -> None:
        self._writing = Begun(self._context.write(frame))
        try:
            await self._writing.wait()
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as over:
            raise TransportError(Fault.BROKEN, str(over)) from over

    async def receive(self) -> bytes | None:
        try:
            data = await self._context.read()
        except (grpc.RpcError, grpc.aio.BaseError) as over:
            raise TransportError(Fault.BROKEN, str(over)) from over
        return None if data is grpc.aio.EOF else data

    @property
    def writing(self) -> bool:
        """Whether gRPC holds something that the peer has not taken."""
        return self._writing is not None and not self._writing.over

    async def let_go(self) -> None:
        """Returns when gRPC holds nothing more: the peer has taken it, or has ended the call or its connection. There
        is no way to break a call off from here, `abort` neither: it waits behind what is being written."""
        if self._writing is not None:
            try:
                await self._writing.wait()
            except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
                pass  # taken or not, it is over

    async def close(self) -> None:
        """Ends the call in order: its handler stops where it stands and answers OK."""
        self.closed = True
        self._stop()

    def cancel(self) -> None:
        """Its handler stops where it stands; should the peer ever read on, it is told why."""
        self.given_up = True
        self._stop()

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """All methods of the service, bytes in and bytes out."""

    def __init__(self, service: Gateway, stall_ms: int) -> None:
        self._service, self._stall_s = service, stall_ms / 1000.0
        self._stalled = TransportError(Fault.DEADLINE, f"what was sent here was not taken for {stall_ms} ms")
        kinds = {
            "unary_unary": (grpc.unary_unary_rpc_method_handler, self._unary),
            "unary_stream": (grpc.unary_stream_rpc_method_handler, self._unary_stream),
            "stream_stream": (grpc.stream_stream_rpc_method_handler, self._stream),
        }
        self._handlers = {}
        for method, kind in METHODS.items():
            make, serve = kinds[kind]
            self._handlers[f"/{SERVICE}/{method}"] = make(serve(method))

    def service(self, details: Any) -> Any:
        return self._handlers.get(details.method)

    def _unary(self, method: str) -> Callable[[bytes, Any], Any]:
        async def serve(frame: bytes, context: Any) -> bytes:
            try:
                return await self._service.unary(method, frame, context.peer())
            except TransportError as fault:
                await _abort(context, fault)
                raise AssertionError("abort raises") from fault

        return serve

    def _unary_stream(self, method: str) -> Callable[[bytes, Any], Any]:
        async def serve(frame: bytes, context: Any) -> None:
            stream = _ServerStream(context)
            try:
                async with aclosing(self._service.unary_stream(method, frame)) as pages:
                    async for page in pages:
                        async with asyncio.timeout(self._stall_s):
                            await stream.send(page)
            except TimeoutError:
                log.info("a scan of %s does not take its pages: it ends", context.peer())
                await self._refuse(context, stream, self._stalled)
            except TransportError as fault:
                await self._refuse(context, stream, fault)

        return serve

    def _stream(self, method: str) -> Callable[[Any, Any], Any]:
        async def serve(_: Any, context: Any) -> None:
            stream = _ServerStream(context)
            try:
                await self._service.stream(method, stream, context.peer())
            except TransportError as fault:
                await self._refuse(context, stream, fault)
            except asyncio.CancelledError:
                if stream.given_up:
                    await self._refuse(context, stream, self._stalled)
                elif not stream.closed:
                    raise

        return serve

    async def _refuse(self, context: Any, stream: _ServerStream, fault: TransportError) -> None:
        """Ends a call with its reason, once gRPC holds nothing of it; until then it counts as a stream."""
        if fault.fault is Fault.BROKEN:
            return  # there is nobody to hear it
        if stream.writing:
            with self._service.streams.kept(context.peer()):
                await stream.let_go()
        await _abort(context, fault)


async def _abort(context: Any, fault: TransportError) -> None:
    trailers = NOT_READY_TRAILER if fault.fault is Fault.NOT_READY else ()
    await context.abort(STATUS_OF.get(fault.fault, grpc.StatusCode.UNKNOWN), fault.reason, trailers)


def _bounds(config: ServeConfig) -> list[tuple[str, int]]:
    """gRPC's own bounds. It accepts connections as far as descriptors go, and hands every call on to be answered: by
    itself it would break calls off, without a reason, where some thousands come at once."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MOST_FILES if most == resource.RLIM_INFINITY else min(most, MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    calls = config.max_streams + config.max_scans
    return [
        ("grpc.max_allowed_incoming_connections", max(1, files - FILES_OF_OURS)),
        ("grpc.server.max_pending_requests", 2 * calls),
        ("grpc.server.max_pending_requests_hard_limit", 4 * calls),
    ]


async def serve(config: ServeConfig, version: str, announce: Callable[[str, str], None] | None = None) -> None:
    """Runs a broker until SIGTERM or SIGINT, then drains it. `config` is checked (`ServeConfig.check`). `announce` is
    called with the addresses of gRPC and of metrics once the port is open.

    A store that cannot be reached keeps the broker up and not ready, trying again. Raises StoreRefused when the store
    cannot be used as configured, OSError when a port cannot be had, whose `filename` is the address.
    """
    logs.set_up(config.log_level, config.log_format)
    metrics = Metrics(config.metrics_topics)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    server = grpc.aio.server(options=OPTIONS + _bounds(config))
    config = config.bound(_bind(server, config.listen))
    node = Node(
        store=make_store(config.store),
        clock=Clock(),
        membership=make_membership(config.sync),
        random_bits=secrets.randbits,
        name=config.name,
        address=config.advertise,
        version=version,
        limits=Limits(
            intake_bytes=config.max_inflight_bytes,
            outboxes_bytes=config.max_outbox_bytes,
            streams=config.max_streams,
            streams_per_peer=config.max_streams_per_peer,
            scans=config.max_scans,
        ),
        metrics=metrics,
        store_shown=shown(config.store),
    )
    server.add_generic_rpc_handlers((_Handlers(node.service, node.limits.stall_ms),))
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    probes = Probes(config.metrics, node)
    try:
        probes_at = probes.start()
        await server.start()

        def opened() -> None:
            # What stands now stands to the end. Walking all of it, as each full collection would, stops every delivery
            # for some 25 ms.
            gc.collect()
            gc.freeze()
            if announce is not None:
                announce(config.listen, probes_at)

        watching = asyncio.ensure_future(_watch_health(servicer, node))
        try:
            if await _open(node, stopping, opened):
                log.info("ready", extra={"listen": config.listen, "metrics": probes_at, "broker": node.name})
                await stopping.wait()
                log.info("draining", extra={"grace_ms": config.grace_ms})
                await node.drain(config.grace_ms)
        finally:
            watching.cancel()
            await server.stop(1.0)
    finally:
        probes.stop()
    log.info("stopped")


def _bind(server: Any, listen: str) -> int:
    """Opens `listen` for gRPC; the port. Raises OSError with the system's reason and `listen` as its file name.

    gRPC neither says why a port cannot be had nor keeps its own words off standard error: so it is asked for before.
    """
    check_free(listen)
    try:
        return int(server.add_insecure_port(listen))
    except RuntimeError as taken:
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), listen) from taken


async def _open(node: Node, stopping: asyncio.Event, announce: Callable[[], None]) -> bool:
    """Starts the node, trying again while the store is out of reach; False when told to stop meanwhile. Announces once
    the first try is over, so that a store that is refused never looks like a broker that serves."""
    tries = 0
    while not stopping.is_set():
        try:
            await node.start()
        except StoreUnavailable as trouble:
            log.warning("the store cannot be reached yet: %s", trouble)
            tries += 1
            if tries == 1:
                announce()
            node.store.down = trouble.reason
            try:
                await asyncio.wait_for(stopping.wait(), RETRY_OPEN_S)
            except TimeoutError:
                continue
        else:
            if tries == 0:
                announce()
            return True
    await node.stop()
    return False


async def _watch_health(servicer: Any, node: Node) -> None:
    """Keeps the gRPC health service saying what the node says of itself."""
    said: object = None
    while True:
        node.readiness.clear()
        serving = health_pb2.HealthCheckResponse
        now = serving.NOT_SERVING if node.not_ready else serving.SERVING
        if now != said:
            said = now
            for name in ("", SERVICE):
                await servicer.set(name, now)
        await node.readiness.wait()
