"""The simulated network: it connects a driver's `Transport` to a broker's `Service`, late, or not at all.

Frames of a stream arrive in their order (as over TCP), streams and calls overtake each other. A cut connection loses
what was under way in both directions; a one-way cut holds frames back until it is healed or the connection is torn.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import AsyncGenerator
from typing import Any

from tests.simulation.loop import Process, VirtualLoop
from timeline.wire.transport import Fault, Service, TransportError

WINDOW_FRAMES = 16
"""Frames under way in one direction of a stream before its sender waits."""


class Network:
    """All wires. `listen` puts a broker at an address; `quality` says how bad the wires are now."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.listeners: dict[str, tuple[Process, Service]] = {}
        self.connections: list[Connection] = []
        self.occurred: Counter[str] = Counter()
        self.answers_lost: dict[str, float] = {}
        """When each process last lost a connection, and with it perhaps an answer."""
        self.repeated: dict[str, float] = {}
        """When a call of each process was last brought a second time."""
        self.slowest_s = 0.002
        self.cut_chance = 0.0
        self.loss_chance = self.repeat_chance = 0.0
        self.deaf = 0.0
        """Chance that what one broker tells another is lost."""

    def listen(self, address: str, process: Process, service: Service) -> None:
        """`service` answers at `address`, as `process`."""
        self.listeners[address] = process, service

    def delay(self) -> float:
        """Seconds that a frame is under way."""
        return self.rng.random() * self.rng.random() * self.slowest_s

    def chance(self, of: float) -> bool:
        """Whether a thing of that probability happens now."""
        return of > 0 and self.rng.random() < of

    def cut(self, process: Process) -> None:
        """Every connection of `process` breaks, as when it dies."""
        for connection in [one for one in self.connections if process in (one.client, one.server)]:
            connection.tear()
        for address in [address for address, (owner, _) in self.listeners.items() if owner is process]:
            if process.dead:
                del self.listeners[address]

    def hold(self, process: Process, outwards: bool) -> None:
        """A one-way cut: what `process` sends (or what is sent to it) does not arrive until `release`."""
        for connection in self.connections:
            if process in (connection.client, connection.server):
                connection.hold("up" if (connection.client is process) == outwards else "down")

    def release(self, process: Process) -> None:
        """The end of `hold`."""
        for connection in [one for one in self.connections if process in (one.client, one.server)]:
            connection.let_go()

    def transport(self, process: Process, address: str) -> SimulatedTransport:
        """The way of a driver in `process` to `address`."""
        return SimulatedTransport(self, process, address)


class Pipe:
    """One direction of one stream: frames in order, each with its time of arrival."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._under_way: deque[Any] = deque()
        self._arrived: deque[Any] = deque()
        self._last_s = 0.0
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self.held = False
        self.broken: TransportError | None = None

    def put(self, item: Any) -> None:
        """Sends a frame, None (the end, in order) or a TransportError (the end, with a fault)."""
        if self.broken is not None:
            return
        loop = self._network.loop
        self._under_way.append(item)
        at = self._last_s = max(self._last_s, loop.time() + self._network.delay())
        loop.call_at(at, self._arrive)

    def _arrive(self) -> None:
        if not self.held and self._under_way:
            self._arrived.append(self._under_way.popleft())
            _wake(self._reader)

    def let_go(self) -> None:
        """What was held back arrives."""
        self.held = False
        while self._under_way:
            self._arrive()

    def tear(self, fault: TransportError) -> None:
        """What is under way is lost; what arrived can still be read."""
        if self.broken is None:
            self.broken = fault
            self._under_way.clear()
            _wake(self._reader)
            _wake(self._writer)

    @property
    def full(self) -> bool:
        return len(self._under_way) + len(self._arrived) >= WINDOW_FRAMES

    async def room(self) -> None:
        """Returns when another frame may be sent. Raises the fault that ended the pipe."""
        while self.broken is None and self.full:
            self._writer = self._network.loop.create_future()
            await self._writer
        if self.broken is not None:
            raise TransportError(self.broken.fault, "the stream is over")

    async def take(self) -> Any:
        """The next thing that was sent. Raises the fault that ended the pipe, once it is empty."""
        while not self._arrived:
            if self.broken is not None:
                raise TransportError(self.broken.fault, "the stream is over")
            self._reader = self._network.loop.create_future()
            await self._reader
        item = self._arrived.popleft()
        _wake(self._writer)
        return item


class Connection:
    """One stream or call between a driver and a broker; a connection of its own, so that faults hit it alone or all."""

    def __init__(self, network: Network, client: Process, server: Process) -> None:
        self.network, self.client, self.server = network, client, server
        self.up, self.down = Pipe(network), Pipe(network)
        self.serving: asyncio.Task[None] | None = None
        self.ended_in_order = False
        network.connections.append(self)

    def hold(self, direction: str) -> None:
        (self.up if direction == "up" else self.down).held = True

    def let_go(self) -> None:
        for pipe in (self.up, self.down):
            if pipe.held:
                pipe.let_go()

    def tear(self) -> None:
        """The connection is gone: both ends notice, and the broker's handler is cancelled, as gRPC does."""
        self.over()
        self.network.answers_lost[self.client.name] = self.network.loop.time()
        fault = TransportError(Fault.BROKEN, "the connection broke")
        self.up.tear(fault)
        self.down.tear(fault)
        if self.serving is not None and not self.serving.done():
            self.server.call(self.serving.cancel)

    def over(self) -> None:
        """Nothing more will be sent over it."""
        if self in self.network.connections:
            self.network.connections.remove(self)

    def maybe_cut(self) -> None:
        """Where wires are bad, this one may break now."""
        if self.network.chance(self.network.cut_chance):
            self.network.occurred["connection cut"] += 1
            self.network.loop.call_later(self.network.delay(), self.tear)


class ClientEnd:
    """A driver's end of a stream."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._closed = False
        self._over: TransportError | None = None
        self._ended = False

    async def send(self, frame: bytes) -> None:
        if self._closed:
            raise TransportError(Fault.BROKEN, "closed")
        await self._connection.up.room()
        self._connection.up.put(frame)
        self._connection.maybe_cut()

    async def receive(self) -> bytes | None:
        if self._over is not None:
            raise self._over
        if self._ended:
            return None
        item = await self._connection.down.take()
        if isinstance(item, TransportError):
            self._over = item
            raise item
        self._ended = item is None
        data: bytes | None = item
        return data

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._connection.up.put(None)

    def cancel(self) -> None:
        self._closed = True
        self._connection.tear()


class ServerEnd:
    """A broker's end of a stream."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def send(self, frame: bytes) -> None:
        await self._connection.down.room()
        self._connection.down.put(frame)
        self._connection.maybe_cut()

    async def receive(self) -> bytes | None:
        data: bytes | None = await self._connection.up.take()
        return data

    async def close(self) -> None:
        self._connection.ended_in_order = True
        self.cancel()

    def cancel(self) -> None:
        if self._connection.serving is not None:
            self._connection.serving.cancel()


class SimulatedTransport:
    """Implements `timeline.wire.transport.Transport` for one process and one address."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self._network, self._process, self._address = network, process, address
        self._mine: list[Connection] = []

    async def _connect(self, timeout_s: float) -> tuple[Connection, Service]:
        """A connection to whoever listens now. Raises UNREACHABLE."""
        await _wait(self._network.loop, min(self._network.delay(), timeout_s))
        found = self._network.listeners.get(self._address)
        if found is None or found[0].dead:
            raise TransportError(Fault.UNREACHABLE, f"nobody listens at {self._address}")
        connection = Connection(self._network, self._process, found[0])
        self._mine = [one for one in self._mine if one in self._network.connections]
        self._mine.append(connection)
        return connection, found[1]

    async def ready(self, timeout_s: float) -> None:
        """Each call connects by itself."""

    async def stream(self, method: str, timeout_s: float) -> ClientEnd:
        connection, service = await self._connect(timeout_s)
        connection.serving = connection.server.run(_serve_stream(connection, service, method, self._process.name))
        return ClientEnd(connection)

    async def unary(self, method: str, frame: bytes, timeout_s: float) -> bytes:
        network = self._network
        if method == "Hint" and network.chance(network.deaf):
            network.occurred["hint lost"] += 1
            await _wait(network.loop, network.delay())
            raise TransportError(Fault.BROKEN, "the wire between the brokers is cut")
        connection, service = await self._connect(timeout_s)
        times = 2 if network.chance(network.repeat_chance) else 1
        connection.serving = connection.server.run(_serve_unary(connection, service, method, times))
        connection.up.put(frame)
        connection.maybe_cut()
        try:
            async with asyncio.timeout(timeout_s):
                item = await connection.down.take()
        except TimeoutError:
            network.occurred["call out of time"] += 1
            connection.tear()
            raise TransportError(Fault.DEADLINE, "no answer in time") from None
        except asyncio.CancelledError:
            connection.tear()
            raise
        connection.over()
        if isinstance(item, TransportError):
            raise item
        answer: bytes = item
        return answer

    async def unary_stream(self, method: str, frame: bytes, timeout_s: float | None) -> AsyncGenerator[bytes, None]:
        connection, service = await self._connect(timeout_s or 10.0)
        connection.serving = connection.server.run(_serve_pages(connection, service, method))
        connection.up.put(frame)
        try:
            while (item := await connection.down.take()) is not None:
                if isinstance(item, TransportError):
                    raise item
                yield item
        finally:
            connection.tear()

    async def close(self) -> None:
        for connection in self._mine:
            connection.tear()


async def _serve_stream(connection: Connection, service: Service, method: str, peer: str) -> None:
    end: TransportError | None = None
    try:
        await service.stream(method, ServerEnd(connection), peer)
    except TransportError as fault:
        end = fault
    except asyncio.CancelledError:
        if not connection.ended_in_order:
            end = TransportError(Fault.BROKEN, "the broker broke the stream off")
    connection.down.put(end)
    connection.up.tear(TransportError(Fault.BROKEN, "the broker ended the stream"))
    connection.over()


async def _serve_unary(connection: Connection, service: Service, method: str, times: int) -> None:
    frame = await connection.up.take()
    network = connection.network
    if times > 1:
        network.occurred["call repeated by the wire"] += 1
        network.repeated[connection.client.name] = network.loop.time()
    answer: Any = None
    for _ in range(times):
        try:
            said: Any = await service.unary(method, frame)
        except TransportError as fault:
            said = fault
        answer = said if answer is None else answer  # nobody hears the second
    if network.chance(network.loss_chance):
        network.occurred["answer lost on the wire"] += 1
        network.loop.call_later(network.delay(), connection.tear)
        return
    connection.down.put(answer)
    connection.maybe_cut()


async def _serve_pages(connection: Connection, service: Service, method: str) -> None:
    frame = await connection.up.take()
    try:
        async for page in service.unary_stream(method, frame):
            await connection.down.room()
            connection.down.put(page)
            connection.maybe_cut()
    except TransportError as fault:
        connection.down.put(fault)
    else:
        connection.down.put(None)


async def _wait(loop: VirtualLoop, seconds: float) -> None:
    future = loop.create_future()
    loop.call_later(seconds, _wake, future)
    await future


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
