"""The process of `timeline serve`: a node behind gRPC, health, metrics over HTTP, and a drain on SIGTERM.

No other module of the broker knows gRPC's server, sockets, signals and randomness together.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import gc
import logging
import os
import resource
import secrets
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from timeline.broker.catalog import Readiness
from timeline.broker.journal.events import Journal
from timeline.broker.journal.pipe import JournalPipe
from timeline.broker.limits import Limits
from timeline.broker.node import Node
from timeline.broker.server.calls import GrpcPeerChannel, Handlers
from timeline.broker.server.certificates import Certificates
from timeline.broker.server.gatekeeper import LOOK_EVERY_S, Gatekeeper
from timeline.broker.server.gateway_process import GatewayProcess, address_of, gateway_for
from timeline.broker.server.probes import HealthService, MetricsPort
from timeline.broker.server.process import check_free
from timeline.broker.server.workers import WorkerProcess
from timeline.clock import Clock
from timeline.config import ServeConfig, joined, split_address
from timeline.credentials import Credentials
from timeline.errors import Invalid
from timeline.logs import set_up_logs
from timeline.metrics import Metrics
from timeline.storage_plugins import make_store, shown
from timeline.storage_plugins.contract import Opened, Store, StoreUnavailable
from timeline.sync import Membership, make_membership
from timeline.wire import MAX_FRAME_BYTES, SERVICE

log = logging.getLogger("timeline.broker")

REUSE = "grpc.so_reuseport"
OPTIONS = [
    # Bounds each partial frame, which gRPC keeps until it is whole. gRPC cannot bound their sum: see SECURITY.md.
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    (REUSE, 0),
    # A silent connection, in TLS or without, is closed after this time. Until then it costs no more than itself.
    ("grpc.server_handshake_timeout_ms", 10_000),
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
"""Descriptors that connections never get: for the store, logs and metrics. If there are few, half of them."""
FEW_FILES = 1024
UNARY_A_CONNECTION = 1000
"""Calls besides streams that one connection may have open. More wait in its client."""
LONGEST_IN_LINE_S = 300
"""gRPC cancels a call that waits this long to be looked at. Its default of 30 s is shorter than many deadlines."""
RETRY_OPEN_S = 1.0
CALLS_END_S = 1.0
QUIET_TRIES = 30
"""Most tries without a log line."""
LOOK_AT_URL = "if it is up, look at host and port in --store"
SWITCH_S = 0.0005
"""How long a thread keeps the interpreter. A store's threads ask for it after each statement. Beside peers that keep
the event loop busy they waited Python's 5 ms each time, and every lease with them."""
JOIN_SOON_S = 2.0
"""A broker that has not joined its cluster by then says so, and that its port is open."""


LEAST_SHARE = 1 / 6
"""The part of the grace that is left for the drain at least, however long the gateway took to end."""
JOURNAL_LEAST_S = 1.0
"""How long the journal may write at least, if the drain took all the grace."""


def _bounds(config: ServeConfig) -> list[tuple[str, int]]:
    """Return gRPC's own bounds. It accepts as many connections as there are descriptors, and hands all calls on. By
    itself it would break calls off, without a reason, if some thousands come at once."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MOST_FILES if most == resource.RLIM_INFINITY else min(most, MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    calls = config.max_streams + config.max_scans
    connections = max(1, files - min(FILES_OF_OURS, files // 2))
    if files < FEW_FILES:
        log.warning(
            "this process may open %d files, which leaves %d connections: allow it more (ulimit -Hn, LimitNOFILE=)",
            files,
            connections,
        )
    return [
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server.max_pending_requests", calls),
        ("grpc.server.max_pending_requests_hard_limit", 2 * calls),
        ("grpc.server_max_unrequested_time_in_server", LONGEST_IN_LINE_S),
        # A call costs some kB before anybody has looked at its token, and one that is broken off at once does, too. One
        # connection has as many as one host may have streams, and some; the rest of a flood waits where it began.
        ("grpc.max_concurrent_streams", config.max_streams_per_peer + UNARY_A_CONNECTION),
    ]


class _Stopping:
    """Whether a broker was told to end, and how long that has lasted."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self._since_s = 0.0

    def begin(self) -> None:
        """Tell it."""
        self._since_s = self._since_s or asyncio.get_running_loop().time()
        self.event.set()

    @property
    def lasts_s(self) -> float:
        """How long ago that was; 0: it was not told."""
        return asyncio.get_running_loop().time() - self._since_s if self._since_s else 0.0


async def serve(
    config: ServeConfig,
    version: str,
    announce: Callable[[str, str, str, bool], None],
    worker: WorkerProcess | None = None,
) -> None:
    """Run a broker until SIGTERM or SIGINT, then drain it. `config` is checked (`ServeConfig.check`).

    - `announce` is called once the port is open, with the addresses of gRPC, metrics and HTTP, and whether the store is
      open. If it was not, `announce` is called again once it is.
    - `worker`: this process is one of several behind the port. It also has and advertises a port of its own.

    If the store cannot be reached, the broker stays up, not ready, and tries again. Raise StoreRefused if the store
    cannot be used as configured. Raise OSError if a port is taken; its `filename` is the address. Raise Invalid if the
    gateway lacks a package.
    """
    set_up_logs(config.log_level, config.log_format, config.name if worker is not None else "")
    metrics, clock, stopping = Metrics(config.metrics_topics), Clock(), _Stopping()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.begin)
    server = grpc.aio.server(options=_options(config, shared=worker is not None))
    gate = Gatekeeper(config.tokens, clock.now_ms, metrics)
    files = config.tls_cert, config.tls_key, config.client_ca
    certificates = Certificates(*files, clock.now_ms) if config.tls_cert else None
    make_peer = _peer_factory(config)
    config = _listening(server, config, certificates, shared=worker is not None)
    membership = worker.membership if worker is not None else make_membership(config.sync)
    store = _store_for(config)
    pipe = await _journal(config, metrics, clock)
    journal = None if pipe is None else Journal(pipe.carry, clock.now_ms)
    node = _node(config, version, store, clock, membership, metrics, make_peer, journal)
    server.add_generic_rpc_handlers((Handlers(node.service, node.limits.stall_ms, gate),))
    health = HealthService()
    server.add_generic_rpc_handlers((health.handlers(),))
    port = MetricsPort(config.metrics, metrics.registry, lambda: node.not_ready)
    watching = (partial(_watch_health, health, node.readiness), partial(_watch_files, gate, certificates, metrics))
    gateway: GatewayProcess | None = None
    try:
        gateway = gateway_for(config) if worker is None else None
        if gateway is not None:
            gateway.start()
        if worker is not None:
            await worker.start(stopping.begin)
        metrics_at = port.start()
        opened = partial(announce, config.advertise if worker else config.listen, metrics_at, address_of(gateway))
        await _run(server, node, config, stopping.event, watching, opened, metrics_at, gateway)
    finally:
        port.stop()
        if gateway is not None:
            await gateway.stop()
        if worker is not None:
            await worker.stop()
        if pipe is not None:
            await pipe.close(max(JOURNAL_LEAST_S, config.grace_ms / 1000.0 - stopping.lasts_s))
    log.info("stopped")


def _node(
    config: ServeConfig,
    version: str,
    store: Store,
    clock: Clock,
    membership: Membership,
    metrics: Metrics,
    make_peer: Callable[[str], GrpcPeerChannel],
    journal: Journal | None,
) -> Node:
    return Node(
        store=store,
        clock=clock,
        membership=membership,
        random_bits=secrets.randbits,
        name=config.name,
        address=config.advertise,
        version=version,
        limits=_limits(config),
        metrics=metrics,
        store_shown=shown(config.store),
        make_peer=make_peer,
        journal=journal,
        off_loop=asyncio.to_thread,
    )


async def _run(
    server: Any,
    node: Node,
    config: ServeConfig,
    stopping: asyncio.Event,
    watching: Iterable[Callable[[], Coroutine[Any, Any, None]]],
    announce: Callable[[bool], None],
    metrics_at: str,
    gateway: GatewayProcess | None,
) -> None:
    """Serve until told to stop, then drain. The gateway ends first: its requests under way need the broker."""
    ours = asyncio.all_tasks()
    await server.start()

    def opened(store_open: bool) -> None:
        # All objects of now live to the end. A full collection would walk them, and stop deliveries for some 25 ms.
        gc.collect()
        gc.freeze()
        sys.setswitchinterval(SWITCH_S)
        announce(store_open)

    tasks = [asyncio.ensure_future(watch()) for watch in watching]
    try:
        if await _open(node, stopping, opened):
            where = {"listen": config.listen, "metrics": metrics_at, "broker": node.name}
            log.info(node.not_ready or "ready", extra=where)
            await stopping.wait()
            began_s, grace_ms = asyncio.get_running_loop().time(), config.grace_ms
            if gateway is not None:
                await gateway.stop()
                took_ms = int((asyncio.get_running_loop().time() - began_s) * 1000.0)
                grace_ms = max(int(config.grace_ms * LEAST_SHARE), config.grace_ms - took_ms)
            log.info("draining", extra={"grace_ms": grace_ms})
            await node.drain(grace_ms)
    finally:
        for task in tasks:
            task.cancel()
        await server.stop(1.0)
        await _calls_ended(ours)


def _limits(config: ServeConfig) -> Limits:
    return Limits(
        intake_bytes=config.max_inflight_bytes,
        outboxes_bytes=config.max_outbox_bytes,
        streams=config.max_streams,
        streams_per_peer=config.max_streams_per_peer,
        scans=config.max_scans,
    )


def _peer_factory(config: ServeConfig) -> Callable[[str], GrpcPeerChannel]:
    """Return the maker of channels to other brokers. Raise Invalid if its files cannot be used."""
    credentials = Credentials(
        tls=bool(config.tls_cert),
        ca=config.tls_ca,
        cert=config.tls_cert,
        key=config.tls_key,
        token_file=config.token_file,
    ).check()
    return partial(GrpcPeerChannel, credentials=credentials)


async def _calls_ended(ours: set[asyncio.Task[Any]]) -> None:
    """Return when nothing runs but `ours`. Calls whose peer does not read need some more turns of the loop after the
    server has stopped. If the loop's end cuts one off, gRPC prints a traceback."""
    if calls := asyncio.all_tasks() - ours:
        await asyncio.wait(calls, timeout=CALLS_END_S)


def _store_for(config: ServeConfig) -> Store:
    """Return the store. Where there may be several brokers, it must be one that they can share. Raise Invalid."""
    store = make_store(config.store)
    if not config.sync.startswith("local://") and not store.capabilities.shared:
        raise Invalid(
            f"{shown(config.store)} is a store of one broker, and {config.sync.partition('://')[0]}:// is for several. "
            "docs/stores.md lists the stores that several brokers can share. Choose one of these, or --sync local://"
        )
    return store


async def _journal(config: ServeConfig, metrics: Metrics, clock: Clock) -> JournalPipe | None:
    """Return the journal's carrier, if there is a journal. Raise Invalid if it cannot be written."""
    if not config.journal:
        return None
    return await JournalPipe.start(config.journal, config.name, f"{secrets.randbits(32):08x}", clock.now_ms, metrics)


def _options(config: ServeConfig, shared: bool) -> list[tuple[str, int]]:
    """Return gRPC's options. `shared`: other processes listen on the same port."""
    return [*(option for option in OPTIONS if option[0] != REUSE), (REUSE, int(shared)), *_bounds(config)]


def _listening(server: Any, config: ServeConfig, certificates: Certificates | None, shared: bool) -> ServeConfig:
    """Open `listen`, and in a worker a port of its own. Return the settings with the real ports. Raise OSError with the
    system's reason and the address as its file name."""
    if not shared:
        check_free(config.listen)
        return config.bound(_bind(server, config.listen, certificates))
    config = config.bound(_bind(server, config.listen, certificates))
    host, _ = split_address(config.listen)
    reached, _ = split_address(config.advertise)
    own = _bind(server, joined(host, 0), certificates)
    return dataclasses.replace(config, advertise=joined(reached, own))


def _bind(server: Any, listen: str, certificates: Certificates | None) -> int:
    """Open a port and return it. gRPC neither says why it cannot nor keeps silent on standard error, so single brokers
    call `check_free` before."""
    try:
        if certificates is not None:
            return int(server.add_secure_port(listen, certificates.credentials()))
        return int(server.add_insecure_port(listen))
    except RuntimeError as taken:
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), listen) from taken


async def _open(node: Node, stopping: asyncio.Event, announce: Callable[[bool], None]) -> bool:
    """Start the node. Try again while the store cannot be reached, and wait for the cluster. Return False if told to
    stop.

    It announces once the first try is over: a refused broker never looks like one that serves. If the store was not
    open then, it announces again once it is.
    """
    said, tries, next_word = False, 0, 1
    while not stopping.is_set():
        try:
            opened = await node.open()
        except StoreUnavailable as trouble:
            tries += 1
            why = node.store.down = trouble.reason or trouble.advice
            if tries >= next_word:  # the 1st, 2nd, 4th, 8th …: it is tried each second, and said ever more rarely
                next_word = tries + min(tries, QUIET_TRIES)
                hint = f"; {LOOK_AT_URL}" if node.store.store.capabilities.shared else ""
                log.warning("not ready yet: the store cannot be used: %s. It is tried again%s", why, hint)
            if not said:
                said = True
                announce(False)
            try:
                await asyncio.wait_for(stopping.wait(), RETRY_OPEN_S)
            except TimeoutError:
                continue
        else:
            node.store.down = ""
            if await _join(node, opened, stopping, announce):
                return True
            break
    await node.stop()
    return False


async def _join(node: Node, opened: Opened, stopping: asyncio.Event, announce: Callable[[bool], None]) -> bool:
    """Join the cluster. Return False if told to stop meanwhile. Announce that the store is open."""
    joining = asyncio.ensure_future(node.join(opened))
    told = asyncio.ensure_future(stopping.wait())
    try:
        done, _ = await asyncio.wait({joining, told}, timeout=JOIN_SOON_S, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            log.warning("not ready yet: %s", node.not_ready)
            announce(True)
            await asyncio.wait({joining, told}, return_when=asyncio.FIRST_COMPLETED)
        if not joining.done():
            return False
        await joining
        if done:
            announce(True)
        return True
    finally:
        told.cancel()
        joining.cancel()
        await asyncio.gather(told, joining, return_exceptions=True)


async def _watch_health(health: HealthService, readiness: Readiness) -> None:
    """Keep the gRPC health service as ready as the broker."""
    said: object = None
    while True:
        readiness.changed.clear()
        serving = health_pb2.HealthCheckResponse
        now = serving.NOT_SERVING if readiness.not_ready else serving.SERVING
        if now != said:
            said = now
            for name in ("", SERVICE):
                await health.set(name, now)
        await readiness.changed.wait()


async def _watch_files(gate: Gatekeeper, certificates: Certificates | None, metrics: Metrics) -> None:
    """Read tokens and certificate again when they change."""
    while True:
        try:
            gate.look()
            if certificates is not None:
                certificates.look()
                expires_s = certificates.loaded.pair.expires_ms / 1000.0
                metrics.gauge("timeline_certificate_expires_timestamp_seconds", expires_s)
        except Exception:
            log.exception("the tokens or the certificate could not be looked at; once more soon")
            metrics.count("timeline_task_crashes_total", "files")
        await asyncio.sleep(LOOK_EVERY_S)
