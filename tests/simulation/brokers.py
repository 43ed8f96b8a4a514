"""The brokers of a seed: each a machine with its own clock and its own way to the store, on which one broker process
after the other runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.simulation.gauges import Gauges
from tests.simulation.membership import WrongMembership
from tests.simulation.registry import RegistryMembership
from timeline.clock import Clock
from timeline.errors import TimelineError
from timeline.history import History

if TYPE_CHECKING:
    from tests.simulation.loop import Process, VirtualLoop
    from tests.simulation.store import TroubledStore
    from tests.simulation.world import World
    from timeline.broker.node import Node
    from timeline.sync import Membership

WALL_S = 1_700_000_000.0


class BrokerClock:
    """The clocks of one broker's machine, which may be off, drift, and be set by hand (`step_s`)."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, perfect: bool) -> None:
        self._loop, self._start_s = loop, loop.time()
        self.offset_s = 0.0 if perfect else rng.uniform(-0.2, 0.2)
        self.drift = 0.0 if perfect else rng.uniform(-2e-4, 2e-4)
        self.step_s = 0.0

    def wall_s(self) -> float:
        return self.steady_s() + self.step_s

    def steady_s(self) -> float:
        """The wall clock without its steps, which must not be followed: what the broker goes by."""
        gone_s = self._loop.time() - self._start_s
        return WALL_S + gone_s * (1.0 + self.drift) + self.offset_s

    def monotonic_s(self) -> float:
        gone_s = self._loop.time() - self._start_s
        return self._start_s + gone_s * (1.0 + self.drift)

    def drift_ms(self) -> float:
        """By how much spans of its time may differ from the machine's."""
        return 0.001 + 1_000.0 * abs(self.drift) * (self._loop.time() - self._start_s)

    def off_ms(self) -> float:
        """By how much its wall clock, without its steps, may differ from true time."""
        return self.drift_ms() + 1_000.0 * abs(self.offset_s)


class HistoryClock(Clock):
    """The clock of all histories: the machine's monotonic time, and the wall time that is taken for true."""

    def __init__(self, wall_s: Callable[[], float], monotonic_s: Callable[[], float]) -> None:
        super().__init__(wall_s, monotonic_s)
        self._true_s = wall_s

    def now(self) -> float:
        return self._true_s() * 1_000.0


class Broker:
    """One machine for a broker: `name` and `address` stay, processes come and go."""

    def __init__(self, world: World, name: str, clock: BrokerClock, store: TroubledStore) -> None:
        self.world, self.name, self.clock, self.store = world, name, clock, store
        self.address = f"{name}:9000"
        self.process: Process | None = None
        self.node: Node | None = None
        self.gauges: Gauges | None = None

    async def start(self) -> None:
        """A broker process over the store that is there."""
        world = self.world
        world.incarnations += 1
        number = world.incarnations
        process = self.process = world.process(f"{self.name}.{number}")
        rng = random.Random(f"{world.seed}-broker-{number}")
        self.store.broker = process.name
        node = self.node = process.call(partial(self._make, process, rng))
        self.gauges = Gauges(node, world.occurred)
        await process.run(self._open(node))
        world.network.listen(self.address, process, node.service)

    def _make(self, process: Process, rng: random.Random) -> Any:
        world = self.world
        membership: Membership
        if len(world.brokers) == 1:
            membership = WrongMembership(world.belief)
        else:
            membership = RegistryMembership(world.registry, process, self.name)
        return world.pieces.node(
            store=self.store,
            clock=Clock(self.clock.wall_s, self.clock.monotonic_s),
            membership=membership,
            random_bits=rng.getrandbits,
            name=self.name,
            address=self.address,
            limits=world.limits,
            make_peer=partial(world.network.transport, process),
        )

    async def _open(self, node: Node) -> None:
        while True:
            try:
                await node.start()
                return
            except TimelineError:
                await self.world.timer.wait(0.1)

    def _note_queues(self) -> None:
        if self.gauges is not None:
            self.gauges.note(History("gauges", self.world.history_clock, self.world.events))

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self._note_queues()
            self.process.kill()
            self.world.network.cut(self.process)
            self.process = self.node = None

    async def drain(self) -> None:
        """SIGTERM, and its end."""
        process, node = self.process, self.node
        if process is not None and node is not None:
            self.process = self.node = None
            task = process.run(node.drain(3_000))
            while not task.done() and not process.dead:
                await self.world.timer.wait(0.05)
            self._note_queues()
            process.kill()
            self.world.network.cut(process)
