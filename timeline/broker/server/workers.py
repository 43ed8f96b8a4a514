"""`timeline serve --workers N`: N equal brokers as processes behind one port, kept running.

Each worker accepts connections on the shared port; the system spreads them (SO_REUSEPORT). It also has a port of its
own, which it advertises, and is a member of the cluster like any other broker.

The supervisor carries no messages. It restarts workers that end, and ends all when it is told to. With `local://` it
tells them of each other. Workers drain when their standard input ends, because then the supervisor is gone. Their
settings come the same way, and so does news of the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from timeline.broker.server.gateway_process import GRACE_SHARE, address_of, gateway_for
from timeline.broker.server.process import RestartDelay, check_free
from timeline.child import send_signal
from timeline.clock import Clock
from timeline.config import ServeConfig, joined, split_address
from timeline.sync import Membership, make_membership
from timeline.sync.workers import BEAT_S, TOPICS, Message, WorkerMembership, WorkerRegistry

log = logging.getLogger("timeline.broker")

COMMAND = (sys.executable, "-P", "-m", "timeline", "serve", "--worker")
END_S = 10.0
"""How much longer than the grace a worker may take to end before it is killed."""
LOOK_EVERY_S = 1.0


MOST_UNSENT_BYTES = 1 << 20
LINE_BYTES = 1 << 26


@dataclass(slots=True)
class Started:
    """A worker that serves."""

    name: str
    pid: int
    listen: str
    metrics: str
    store_open: bool


@dataclass(slots=True)
class _Place:
    """One of the N workers.

    - `process`: what runs in it now.
    - `serves`: what it said once it served. `opened`: its store is open, too.
    - `behind`: it did not read what it was sent, and has missed something.
    """

    config: ServeConfig
    process: asyncio.subprocess.Process | None = None
    serves: Started | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    behind: bool = False

    @property
    def name(self) -> str:
        return self.config.name

    def tell(self, message: dict[str, Any]) -> None:
        """Send it a line. The line is lost if it has not read much that came before."""
        if self.process is None or self.process.stdin is None or self.process.stdin.is_closing():
            return
        if self.process.stdin.transport.get_write_buffer_size() < MOST_UNSENT_BYTES:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
        else:
            self.behind = True


class Supervisor:
    """Runs `config.workers` workers. `config` is checked. `announce` is called with the addresses of gRPC and HTTP
    once all of them listen. If their stores open later, it is called once more."""

    def __init__(
        self,
        config: ServeConfig,
        announce: Callable[[str, str, list[Started]], None],
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._config, self._announce, self._command = config, announce, command
        self._clock = Clock()
        self._registry = WorkerRegistry()
        self._places: list[_Place] = []
        self._stopping = asyncio.Event()
        self._code = 0

    async def run(self) -> int:
        """Run until SIGTERM or SIGINT. Return the exit code: 0, or that of a worker that could not serve at all.

        Raise OSError, its `filename` the address, if the shared port is taken. Raise Invalid if the gateway lacks a
        package.
        """
        with _reserved(self._config.listen) as listen:
            config = dataclasses.replace(self._config, listen=listen)
            gateway = gateway_for(config)
            # The workers drain once the gateway has ended.
            drain_ms = config.grace_ms if gateway is None else int(config.grace_ms * (1 - GRACE_SHARE))
            each = dataclasses.replace(config, grace_ms=drain_ms)
            self._places = [_Place(_config_of(each, at)) for at in range(config.workers)]
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._stopping.set)
            keeping: list[asyncio.Task[None]] = []
            looking = loop.create_task(self._look())
            try:
                if gateway is not None:
                    gateway.start()
                # The first by itself: what is wrong with the store or the settings is then said once.
                for place in self._places:
                    keeping.append(loop.create_task(self._keep(place)))
                    if place is self._places[0]:
                        await self._first_of(place.ready.wait(), self._stopping.wait())
                await self._first_of(self._all("ready"), self._stopping.wait())
                if not self._stopping.is_set():
                    late = not self._tell_started(listen, address_of(gateway))
                    await self._first_of(self._all("opened"), self._stopping.wait())
                    if late and not self._stopping.is_set():
                        self._tell_started(listen, address_of(gateway))
                    await self._stopping.wait()
            finally:
                if gateway is not None:
                    await gateway.stop()
                await self._end_all(keeping)
                looking.cancel()
        return self._code

    def _tell_started(self, listen: str, http: str) -> bool:
        """Announce the workers. Return whether all of them have their store open."""
        started = [place.serves for place in self._places if place.serves is not None]
        self._announce(listen, http, started)
        return all(one.store_open for one in started)

    async def _all(self, event: Literal["ready", "opened"]) -> None:
        for place in self._places:
            await (place.ready if event == "ready" else place.opened).wait()

    @staticmethod
    async def _first_of(*waits: Any) -> None:
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def _keep(self, place: _Place) -> None:
        """Keep a worker running in `place`, until all is to end."""
        delay = RestartDelay()
        while not self._stopping.is_set():
            delay.begins()
            try:
                code = await self._run_one(place)
            except OSError as cannot:
                log.error("worker %s cannot be started: %s", place.name, cannot)
                code = -1
            if self._registry.gone(place.name):
                self._tell_all()
            if self._stopping.is_set():
                return
            if not place.ready.is_set() and code > 0:
                # It never served, and has said why: the next one would say the same.
                self._code = self._code or code
                self._stopping.set()
                return
            backoff_s = delay.after_end()
            log.error("worker %s ended with code %d: another begins in %.1f s", place.name, code, backoff_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff_s)

    async def _run_one(self, place: _Place) -> int:
        """Run one process from start to end. Return its exit code."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        pipe = asyncio.subprocess.PIPE
        # In a session of its own: Ctrl-C in the terminal reaches only us, and we end it in order.
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True, limit=LINE_BYTES
        )
        assert process.stdin is not None and process.stdout is not None
        place.process, place.behind = process, False
        try:
            process.stdin.write(settings_line(place.config))
            if self._stopping.is_set():  # it was told before this one was there
                send_signal(process, signal.SIGTERM)
            while line := await process.stdout.readline():
                message = _message(line)
                if message is None:
                    log.warning("worker %s printed %r", place.name, line[:200])  # some package it uses did
                else:
                    self._hear(place, message)
            return await process.wait()
        finally:
            place.process, place.serves = None, None
            process.stdin.close()
            if process.returncode is None:
                send_signal(process, signal.SIGKILL)
                await process.wait()

    def _hear(self, place: _Place, message: dict[str, Any]) -> None:
        if message["say"] == "serves":
            assert place.process is not None
            listen, metrics, store_open = message["listen"], message["metrics"], message["store_open"]
            place.serves = Started(place.name, place.process.pid, listen, metrics, store_open)
            place.ready.set()
            if store_open:
                place.opened.set()
            return
        told, news = self._registry.hear(place.name, message, self._clock.monotonic_ms())
        if told is None and news:
            self._tell_all()
        elif told is not None:
            for other in self._places if news else (place,):
                if not news or other is not place:
                    other.tell(told)
        if place.behind:  # it speaks: so it reads, too
            place.behind = False
            place.tell(self._registry.state)
            place.tell(TOPICS)

    def _tell_all(self) -> None:
        state = self._registry.state
        for place in self._places:
            place.tell(state)

    async def _look(self) -> None:
        """Notice silent workers. Others dispatch their buckets."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            silent = self._registry.fall_silent(self._clock.monotonic_ms())
            if silent:
                log.warning("workers are silent, and get no buckets until they report again: %s", ", ".join(silent))
                self._tell_all()

    async def _end_all(self, keeping: list[asyncio.Task[None]]) -> None:
        """Let all workers drain, and kill those that do not end."""
        self._stopping.set()
        for place in self._places:
            if place.process is not None:
                send_signal(place.process, signal.SIGTERM)
        if keeping:
            _, late = await asyncio.wait(keeping, timeout=self._config.grace_ms / 1000.0 + END_S)
            for task in late:
                log.error("a worker did not end in time: it is killed")
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)


def _message(line: bytes) -> dict[str, Any] | None:
    """Return what a worker says. None: it is no message."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and "say" in message else None


def _config_of(config: ServeConfig, at: int) -> ServeConfig:
    """Return the settings of the worker at `at`: a name of its own, and the next port for metrics."""
    metrics = config.metrics
    if metrics != "off":
        host, port = split_address(metrics)
        metrics = joined(host, port + at if port else 0)
    return dataclasses.replace(config, name=f"{config.name}-{at + 1}", metrics=metrics, workers=1, http="off")


@contextlib.contextmanager
def _reserved(listen: str) -> Any:
    """Hold the address, so that only workers of ours can have its port meanwhile. Raise OSError."""
    check_free(listen)
    host, port = split_address(listen)
    kind, *_, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    with socket.socket(kind, socket.SOCK_STREAM) as held:
        # Bound and not listening: it keeps the port, and gets no connection.
        # Connections of an earlier broker here may not be quite over, and are no reason to wait.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            held.bind(address)
        except OSError as taken:
            raise OSError(taken.errno, taken.strerror, listen) from taken
        yield joined(host, held.getsockname()[1])


class WorkerProcess:
    """This process as a worker. `config`: its own settings."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self._local = config.sync.startswith("local://")
        self.membership: Membership = WorkerMembership(self.tell) if self._local else make_membership(config.sync)
        self._out: asyncio.WriteTransport | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, supervisor_gone: Callable[[], None]) -> None:
        """Start to listen and to talk. `supervisor_gone` is called once standard input ends."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=LINE_BYTES)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
        # A file of its own, since the transport closes it: the command flushes standard output at its end.
        out = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
        self._out, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, out)
        self._tasks = [loop.create_task(self._hear(reader, supervisor_gone)), loop.create_task(self._beat())]

    async def stop(self) -> None:
        """Listen no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._out is not None:
            self._out.close()

    def tell(self, message: Message) -> None:
        """Send a line to the supervisor. It is lost if the supervisor does not read, or is gone."""
        if self._out is not None and self._out.get_write_buffer_size() < MOST_UNSENT_BYTES:
            self._out.write(json.dumps(message).encode() + b"\n")

    async def _hear(self, reader: asyncio.StreamReader, supervisor_gone: Callable[[], None]) -> None:
        try:
            while line := await reader.readline():
                if isinstance(self.membership, WorkerMembership):
                    self.membership.hear(json.loads(line))
            log.warning("the supervisor is gone: this worker drains")
        except Exception:
            log.exception("what the supervisor says cannot be followed: it drains, and another takes its place")
        if isinstance(self.membership, WorkerMembership):
            self.membership.lost()
        supervisor_gone()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self.tell({"say": "beat"})


def settings_from_supervisor() -> ServeConfig:
    """Return the settings in the first line of standard input. Raise ValueError if it is not a supervisor's."""
    # Unbuffered, byte by byte: what comes behind the line is the event loop's to read.
    line = bytearray()
    descriptor = sys.stdin.fileno()
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            raise ValueError("standard input ended before the settings")
        line += byte
    return ServeConfig(**json.loads(line))


def settings_line(config: ServeConfig) -> bytes:
    """Return the line for `settings_from_supervisor`."""
    said: dict[str, Any] = dataclasses.asdict(config)
    return json.dumps(said).encode() + b"\n"
