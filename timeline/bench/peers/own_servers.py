"""Peers that are servers of their own. A client of lines drives them: many commands at once, then all the answers.

Each is driven in several ways, and the quickest counts. A connection works in rounds: a window of puts, as many takes,
as many acknowledgements. Or there are two that work so, or of which one puts and the other takes. The payloads are
those of the cycle, and each is checked to come out once. Then messages with due times a hundredth of a second apart
show how late it hands them out.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from timeline.bench.figures import BenchReport, latencies
from timeline.bench.ledger import Ledger
from timeline.bench.load import ID_BYTES, batch_at, batch_sizes, ids_of, meant_of, observed, payload_of
from timeline.bench.peers.trials import LATE_S, due_times, quickest
from timeline.bench.processes import CannotMeasure, Measured, started, within
from timeline.bench.scenario import cpu_s_of_self
from timeline.bench.scenarios.throughput import CycleScenario, measured
from timeline.clock import Clock

HOST = "127.0.0.1"
WINDOWS = (100, 500, 2_000)
SYNCED_MESSAGES = 30_000
CONNECT_TRIES = 200


@dataclass(frozen=True, slots=True)
class Way:
    """How a peer is driven."""

    connections: int
    window: int
    rounds: bool

    def __str__(self) -> str:
        shape = ("one connection", "two connections")[self.connections - 1]
        parted = "" if self.rounds else ", of which one puts"
        return f"{shape}{parted}, windows of {self.window:,}"


SHAPES = ((1, True), (2, True), (2, False))
WAYS = tuple(Way(connections, window, rounds) for connections, rounds in SHAPES for window in WINDOWS)


class PeerConnection(asyncio.Protocol, ABC):
    """A connection to a peer. `lost` fails when the peer ends it. An answer that is none raises CannotMeasure."""

    name: str
    transport: asyncio.Transport

    def __init__(self) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parts: list[bytes] = []
        self._missing = 0
        self._answered = asyncio.Event()

    @abstractmethod
    async def begin(self, sets_times: bool) -> None:
        """Prepare it. `sets_times`: `put_at` will be called."""

    @abstractmethod
    async def put(self, payloads: list[bytes]) -> None:
        """Put messages that are due at once."""

    @abstractmethod
    async def put_at(self, payloads: list[bytes], due_ms: list[int], now_ms: int) -> None:
        """Put messages that are due later, never early."""

    @abstractmethod
    async def take(self, count: int) -> list[bytes]:
        """Wait for so many messages, and return their payloads."""

    @abstractmethod
    async def ack(self) -> None:
        """Acknowledge what was taken last."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_exception(CannotMeasure(f"{self.name} ended a connection: {error or 'it closed it'}"))

    async def ask(self, commands: bytes, lines: int) -> list[bytes]:
        """Send commands, and return the lines of their answers. A payload of ours is a line."""
        self._missing += lines
        self._answered.clear()
        self.transport.write(commands)
        await self._answered.wait()
        told, self._parts = b"".join(self._parts).split(b"\r\n"), []
        return told[:-1]

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        self._missing -= data.count(b"\n")
        if self._missing <= 0:
            self._answered.set()

    def check(self, lines: Iterable[bytes], word: bytes) -> None:
        """Raise CannotMeasure unless each line begins with a word."""
        wrong = next((line for line in lines if not line.startswith(word)), None)
        if wrong is not None:
            raise CannotMeasure(f"{self.name} answered {wrong[:80]!r}")


@dataclass(frozen=True, slots=True)
class OwnServer:
    """A peer. `kinds`: how it is started, and what that is worth. `synced`: the kind that syncs before each answer.
    `less`: what it does not do. `running`: runs a kind of it, and yields its process and its port."""

    name: str
    kinds: dict[str, str]
    synced: str
    less: str
    running: Callable[[str, Path], AbstractAsyncContextManager[tuple[Measured, int]]]
    connection: Callable[[str], PeerConnection]


@asynccontextmanager
async def program(
    name: str, folder: Path, path: str, port: int, *arguments: str
) -> AsyncIterator[tuple[Measured, int]]:
    """Run a program inside the context, and yield its process and its port when it listens. Raise CannotMeasure."""
    async with started(name, folder, path, *arguments) as child:
        await _listening(child, port)
        yield child, port


async def _listening(child: Measured, port: int) -> None:
    for _ in range(CONNECT_TRIES):
        try:
            _, writer = await asyncio.open_connection(HOST, port)
        except ConnectionRefusedError:
            if child.process.returncode is not None:
                break
            await asyncio.sleep(0.02)
        else:
            writer.close()
            return
    raise CannotMeasure(f"{child.name} does not listen: {child.last_words()}")


async def run_own_server(server: OwnServer, asked: CycleScenario, kind: str, folder: Path) -> BenchReport:
    """Do the cycle's work with a peer that is started as `kind`, in the way that is quickest in a trial. Raise
    CannotMeasure."""
    if kind == server.synced:  # a sync each is so slow that fewer messages show as much
        asked = replace(asked, messages=min(asked.messages, SYNCED_MESSAGES), warm_up=0)
    async with server.running(kind, folder) as (child, port):

        async def measure(some: CycleScenario, way: Way) -> BenchReport:
            cpu = {"server_cpu": child.cpu_s, "client_cpu": cpu_s_of_self}
            return await measured(f"{server.name} {kind}", some, partial(_turn, server, kind, some, port, way), **cpu)

        # Of a backlog, all is put before the first is taken: rounds have no meaning there.
        ways = [way for way in WAYS if not asked.backlog or way.connections == 1 or not way.rounds]
        _, report = await quickest(server.name, ways, asked, measure)
        report.figures |= latencies(await _late_ms(server, kind, port))
    report.notes = [server.kinds[kind], server.less, *report.notes]
    return report


@asynccontextmanager
async def _connected(
    server: OwnServer, kind: str, port: int, sets_times: bool = False
) -> AsyncIterator[PeerConnection]:
    made = partial(server.connection, kind)
    transport, connection = await asyncio.get_running_loop().create_connection(made, HOST, port)
    try:
        await connection.begin(sets_times)
        yield connection
    finally:
        connection.lost.cancel()
        transport.close()


async def _turn(server: OwnServer, kind: str, asked: CycleScenario, port: int, way: Way, messages: int) -> Ledger:
    ledger = Ledger(messages, messages if asked.backlog else way.connections * way.window)
    sizes = [*batch_sizes(messages, way.window)]
    shared = iter(sizes)
    clock = Clock()

    async def put(by: PeerConnection, size: int) -> None:
        batch = batch_at(size, clock.now_ms(), asked.payload_bytes)
        await ledger.admit(ids_of(batch))
        await by.put(batch.payloads.tolist())

    async def take(by: PeerConnection, size: int) -> None:
        ledger.met([payload[:ID_BYTES] for payload in await by.take(size)])
        await by.ack()
        ledger.settle(size)

    async def put_all(by: PeerConnection) -> None:
        for size in sizes:
            await put(by, size)

    async def take_all(by: PeerConnection) -> None:
        for size in sizes:
            await take(by, size)

    async def rounds(by: PeerConnection) -> None:
        for size in shared:
            await put(by, size)
            await take(by, size)

    async def both(one: PeerConnection, other: PeerConnection) -> None:
        if asked.backlog:
            await put_all(one)
            await take_all(other)
        elif way.rounds:
            await asyncio.gather(*map(rounds, dict.fromkeys((one, other))))
        else:
            await asyncio.gather(put_all(one), take_all(other))

    async with _connected(server, kind, port) as one:
        if way.connections == 1:
            await ledger.through(both(one, one), one.lost)
        else:
            async with _connected(server, kind, port) as other:
                await ledger.through(both(one, other), one.lost, other.lost)
    return ledger


async def _late_ms(server: OwnServer, kind: str, port: int) -> list[float]:
    """Return how late messages with due times of their own are handed out. Raise CannotMeasure."""
    late_ms: list[float] = []
    async with (
        observed() as clock,
        _connected(server, kind, port, sets_times=True) as one,
        _connected(server, kind, port) as other,
        within(LATE_S, f"the messages of {server.name}"),
    ):
        now_ms = clock.now_ms()
        due_ms = due_times(now_ms)
        await one.put_at([*map(payload_of, due_ms)], due_ms, now_ms)
        while len(late_ms) < len(due_ms):
            (payload,) = await other.take(1)
            late_ms.append(clock.now() - meant_of(payload))
            await other.ack()
    return late_ms
