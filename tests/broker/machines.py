"""Several brokers over one store, each on a machine with clocks of its own, in virtual time and with real drivers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import timeline
from tests.simulation.loop import Process, Timer, VirtualLoop
from tests.simulation.wire import Network
from timeline.broker.limits import Limits
from timeline.broker.node import Node
from timeline.clock import Clock
from timeline.storage_plugins.memory import MemoryStore
from timeline.sync import JoinState, Member, Membership, MembershipChange, MembershipState
from timeline.sync.view import View

WALL_S = 1_700_000_000.0
HOUR_S = 3_600.0
TOPIC = "t"


class Lasting(MemoryStore):
    """A store that outlives its brokers, on a machine with a clock of its own where `clock` is given."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        super().__init__(cluster_uid="0" * 32)
        self._clock = clock
        self.capabilities = replace(MemoryStore.capabilities, own_clock=clock is not None, shared=True)

    async def close(self) -> None:
        """A broker lets go."""

    async def clock_ms(self) -> float | None:
        return None if self._clock is None else self._clock() * 1_000.0


class Register:
    """Who is there and hosts what; told to all at once."""

    def __init__(self) -> None:
        self.joined: dict[str, Registered] = {}
        self.hosting: dict[int, dict[str, int]] = {}

    def tell(self) -> None:
        members = [one.member for one in self.joined.values() if one.member is not None]
        for one in self.joined.values():
            # Copies, as each listing of a register is: a view compares them with what it was told before.
            if one.view.learn(members, {uid: dict(counts) for uid, counts in self.hosting.items()}):
                one.say(MembershipChange.MEMBERS)


class Registered(Membership):
    """One broker's part in a register."""

    def __init__(self, register: Register) -> None:
        self._register, self.view = register, View()
        self.member: Member | None = None
        self._callbacks: list[Callable[[MembershipChange], None]] = []

    def say(self, change: MembershipChange) -> None:
        for callback in self._callbacks:
            callback(change)

    async def start(self, member: Member, cluster_uid: str) -> None:
        self.member = member
        self.view.join(member)
        self._register.joined[member.name] = self
        self._register.tell()

    async def stop(self) -> None:
        if self.member is not None:
            del self._register.joined[self.member.name]
            for counts in self._register.hosting.values():
                counts.pop(self.member.name, None)
            self._register.tell()

    @property
    def state(self) -> MembershipState:
        return MembershipState(JoinState.JOINED if self.member else JoinState.APART)

    def on_change(self, callback: Callable[[MembershipChange], None]) -> None:
        self._callbacks.append(callback)

    def members(self) -> Sequence[Member]:
        return self.view.members()

    def host(self, topic_uid: int, topic: str, consumers: Collection[bytes]) -> None:
        if self.view.host(topic_uid, len(consumers)) and self.member is not None:
            self._register.hosting.setdefault(topic_uid, {})[self.member.name] = len(consumers)
            self._register.tell()

    def hosting(self, topic_uid: int) -> Mapping[str, int]:
        return self.view.hosting(topic_uid)

    def buckets(self, topic_uid: int, buckets: int) -> Sequence[int] | None:
        return self.view.buckets(topic_uid, buckets)

    def owner(self, topic_uid: int, bucket: int, buckets: int) -> Member | None:
        return self.view.owner(topic_uid, bucket, buckets)

    def topics_changed(self) -> None:
        for one in self._register.joined.values():
            if one is not self:
                one.say(MembershipChange.TOPICS)


class Machine:
    """A machine's clocks: the wall may be off by `away_s`, and goes by a pace of its own. Both may be changed."""

    def __init__(self, town: Town, name: str, away_s: float, pace: float) -> None:
        self.town, self.name, self.away_s, self.pace = town, name, away_s, pace
        self.process: Process | None = None
        self.node: Node = None  # type: ignore[assignment]  # until it runs

    @property
    def address(self) -> str:
        return f"{self.name}:9000"

    def wall_s(self) -> float:
        return self.town.true_s() + self.away_s + self.pace * self.town.gone_s

    def monotonic_s(self) -> float:
        """Since this machine was started, which is another time for each."""
        return self.town.gone_s + 1_000.0 * (1 + len(self.name))


@dataclass(frozen=True, slots=True)
class Received:
    """A delivery: how long before its due it was in code's hands, in ms of the true time, negative: after; and who was
    told of it, when."""

    id: str
    early_ms: float
    consumer: str
    at_s: float


class Town:
    """All machines. `store_clock`: the store has a clock of its own, ahead of the true time by `store_away_s`."""

    def __init__(self, store_clock: bool = False, limits: Limits | None = None) -> None:
        self.loop = VirtualLoop(random.Random(3))
        self.timer = Timer(self.loop)
        self._start_s = self.loop.time()
        self.network = Network(self.loop, random.Random(4))
        self.store_away_s = 0.0
        self.store = Lasting((lambda: self.true_s() + self.store_away_s) if store_clock else None)
        self.register, self.limits = Register(), limits
        self.machines: dict[str, Machine] = {}
        self.received: list[Received] = []
        self._consuming: list[asyncio.Task[Any]] = []
        self.refused: dict[str, str] = {}
        """Why a consumer could not connect, by its name."""

    @property
    def gone_s(self) -> float:
        return self.loop.time() - self._start_s

    def true_s(self) -> float:
        return WALL_S + self.gone_s

    def true_ms(self) -> float:
        return self.true_s() * 1_000.0

    async def broker(self, name: str, away_s: float = 0.0, pace: float = 0.0) -> Machine:
        """Another broker, started."""
        machine = self.machines[name] = Machine(self, name, away_s, pace)
        await self.start(machine)
        return machine

    async def start(self, machine: Machine) -> None:
        process = machine.process = Process(self.loop, machine.name)

        def make() -> Node:
            return Node(
                store=self.store,
                clock=Clock(machine.wall_s, machine.monotonic_s),
                membership=Registered(self.register),
                random_bits=random.Random(machine.name).getrandbits,
                name=machine.name,
                address=machine.address,
                limits=self.limits,
                make_peer=partial(self.network.transport, process),
            )

        machine.node = process.call(make)
        self.network.listen(machine.address, process, machine.node.service)
        await process.run(machine.node.start())

    def kill(self, machine: Machine) -> None:
        """kill -9; the others notice at once."""
        assert machine.process is not None
        machine.process.kill()
        self.network.cut(machine.process)
        membership = self.register.joined.pop(machine.name)
        membership.member = None
        for counts in self.register.hosting.values():
            counts.pop(machine.name, None)
        self.register.tell()

    def client(self, process: Process, addresses: str = "", clock: Clock | None = None) -> Any:
        where = addresses or ",".join(machine.address for machine in self.machines.values())
        wall = clock or Clock(self.true_s, self.loop.time)
        make = partial(self.network.transport, process)
        rng = random.Random(process.name)
        return process.call(lambda: timeline.Timeline(where, 5.0, transport_factory=make, clock=wall, random=rng))

    async def ask(self, work: Callable[[Any], Coroutine[Any, Any, Any]], addresses: str = "") -> Any:
        """What `work` does with a client of its own."""
        process = Process(self.loop, f"client.{self.loop.time()}")

        async def run() -> Any:
            async with self.client(process, addresses) as client:
                return await work(client)

        return await process.run(run())

    async def create_topic(self, **settings: Any) -> None:
        await self.ask(lambda client: client.create_topic(TOPIC, **settings))

    async def put(self, after_s: Sequence[float], addresses: str = "") -> None:
        """Messages that are due so long from now by the true time."""
        now_ms = self.true_ms()

        async def work(client: Any) -> None:
            async with client.producer(TOPIC) as producer:
                due = [int(now_ms + 1_000 * each) for each in after_s]
                ids = [f"m{now_ms:.0f}-{at}" for at in range(len(due))]
                batch = timeline.Batch(payloads=[b"p"] * len(due), at=due, ids=ids)
                (await producer.produce_many(batch)).raise_failed()

        await self.ask(work, addresses)

    def consume(self, name: str, addresses: str = "", clock: Clock | None = None) -> None:
        """A consumer that acknowledges all it gets."""
        process = Process(self.loop, name)
        client = self.client(process, addresses, clock)

        async def work() -> None:
            try:
                await receive()
            except timeline.Unavailable as refused:
                self.refused[name] = str(refused)

        async def receive() -> None:
            async with client, client.consumer(TOPIC, id=name, credit=50) as consumer:
                async for delivery in consumer:
                    early_ms = delivery.due_ms - self.true_ms()
                    self.received.append(Received(delivery.id, early_ms, name, self.gone_s))
                    delivery.ack_soon()

        self._consuming.append(process.run(work()))

    def run(self, story: Coroutine[Any, Any, None]) -> None:
        """Tells a story to its end, and ends all that takes part in it; no task may have failed on the way."""
        self.loop.run_until_complete(self._told(story))
        assert not self.loop.failures

    async def _told(self, story: Coroutine[Any, Any, None]) -> None:
        try:
            await story
        finally:
            for task in self._consuming:
                task.cancel()
            await asyncio.gather(*self._consuming, return_exceptions=True)
            for machine in self.machines.values():
                if machine.process is not None and not machine.process.dead:
                    await machine.process.run(machine.node.stop())

    async def until(self, condition: Callable[[], bool], within_s: float) -> float:
        """Waits until it is so; after how long. Fails when that takes longer."""
        since_s = self.loop.time()
        while not condition():
            assert self.loop.time() - since_s < within_s, "it never came"
            await self.timer.wait(0.01)
        return self.loop.time() - since_s

    def gauge(self, machine: Machine, name: str, **labels: str) -> float | None:
        """A gauge of its broker."""
        value: float | None = machine.node.metrics.registry.get_sample_value(name, labels)
        return value


@contextmanager
def town(store_clock: bool = False, limits: Limits | None = None) -> Iterator[Town]:
    """A town, and the end of it."""
    made = Town(store_clock, limits)
    asyncio.set_event_loop(made.loop)
    try:
        yield made
    finally:
        made.loop.finish()
        asyncio.set_event_loop(None)
