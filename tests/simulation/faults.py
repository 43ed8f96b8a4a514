"""What goes wrong in a seed, and when it is mended."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from timeline.history import History

if TYPE_CHECKING:
    from tests.simulation.world import World

PHASE_S = 14.0
HOUR_S = 3_600.0
LOST, REPEATED = 0.05, 0.03
"""Chance that the answer of a call is lost, so that the driver repeats what was done; and that the wire brings a call
twice."""


class Faults:
    """Strikes a world with some faults, one after the other or at once."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = random.Random(f"{world.seed}-faults")
        self._log = History("faults", world.history_clock, world.events)
        self._broker = asyncio.Lock()
        """Held by whatever starts or ends a broker, or keeps one from being started (a stepped clock)."""

    def _note(self, what: str, **more: object) -> None:
        self.world.occurred[what] += 1
        self._log.note("fault", {"what": what, **more})

    async def strike(self) -> None:
        """The first phase. A tenth of the seeds has no fault at all."""
        world, rng = self.world, self.rng
        until_s = world.loop.time() + PHASE_S
        faultless = rng.random() < 0.1
        if not faultless:
            world.network.loss_chance, world.network.repeat_chance = LOST, REPEATED
        kinds: list[Callable[[], Awaitable[None]]] = [
            self._crash_broker, self._crash_broker, self._drain_broker, self._pause_broker, self._crash_consumer,
            self._pause_consumer, self._supersede, self._crash_producer, self._bad_wire, self._one_way,
            self._bad_store, self._store_down, self._slow_store, self._step_clock, self._wrong_membership,
            self._wrong_membership,
        ]  # fmt: skip
        chosen = rng.sample(kinds, rng.randrange(1, 7)) if not faultless else []
        at = sorted(rng.uniform(0.2, PHASE_S - 3.0) for _ in chosen)
        start_s = world.loop.time()
        striking: list[asyncio.Task[None]] = []
        for when, fault in zip(at, chosen, strict=True):
            await world.timer.wait(start_s + when - world.loop.time())
            striking.append(world.loop.create_task(fault()))
        await asyncio.gather(*striking)
        await world.timer.wait(until_s - world.loop.time())

    async def heal(self) -> None:
        """The end of all faults: everything runs, nothing is lost on the way, nothing new is put."""
        world = self.world
        trouble, network = world.store.trouble, world.network
        trouble.slowest_s, trouble.refused, trouble.lost_before, trouble.lost_after, trouble.down = (
            0.004,
            0,
            0,
            0,
            False,
        )
        network.slowest_s, network.cut_chance = 0.002, 0.0
        network.loss_chance = network.repeat_chance = 0.0
        world.clock.step_s = 0.0
        for producer in world.producers:
            for task in producer.process.tasks:
                while not task.done() and not producer.process.dead:
                    await world.timer.wait(0.1)
        if world.broker is None:
            await world.start_broker()
        for id in list(world.consumers):
            consumer = world.consumers[id]
            if consumer.process.dead or consumer.process.tasks[0].done():
                world.start_consumer(id)
        admin = world.client(world.process("healer"), random.Random(f"{world.seed}-healer"))
        for topic in world.topics:
            await admin.resume_topic(topic)
        await admin.aclose()
        world.healed = True
        self._log.note("healed", {})

    async def _crash_broker(self) -> None:
        async with self._broker:
            world = self.world
            self._note("crash", process="broker")
            world.kill_broker()
            await world.timer.wait(self.rng.choice((0.02, 0.5, 2.5)))
            await world.start_broker()

    async def _drain_broker(self) -> None:
        async with self._broker:
            self._note("drain", process="broker")
            await self.world.drain_broker()
            await self.world.timer.wait(self.rng.choice((0.0, 0.3)))
            await self.world.start_broker()

    async def _pause_broker(self) -> None:
        world = self.world
        broker = world.broker
        if broker is not None:
            self._note("pause broker")
            broker.pause()
            await world.timer.wait(self.rng.choice((0.2, 1.0, 3.0)))
            broker.resume()

    async def _crash_consumer(self) -> None:
        world, id = self.world, self.rng.choice(list(self.world.consumers))
        self._note("crash consumer", process=id)
        world.kill(world.consumers[id])
        await world.timer.wait(self.rng.choice((0.05, 0.7, 2.5)))
        world.start_consumer(id)

    async def _pause_consumer(self) -> None:
        world = self.world
        process = self.rng.choice(list(world.consumers.values())).process
        self._note("pause consumer", process=process.name)
        process.pause()
        await world.timer.wait(self.rng.choice((0.3, 2.2, 4.0)))
        process.resume()

    async def _supersede(self) -> None:
        world, id = self.world, self.rng.choice(list(self.world.consumers))
        self._note("supersede", process=id)
        world.start_consumer(id)

    async def _crash_producer(self) -> None:
        world = self.world
        producer = self.rng.choice(world.producers)
        self._note("crash producer", process=producer.name)
        world.kill(producer)
        world.start_producer(producer.group, 24)

    async def _bad_wire(self) -> None:
        world, rng = self.world, self.rng
        self._note("bad wire")
        network = world.network
        network.slowest_s = rng.choice((0.05, 0.4))
        network.cut_chance = rng.choice((0.0, 0.02, 0.05))
        network.loss_chance = network.repeat_chance = rng.choice((LOST, 0.2))
        await world.timer.wait(rng.uniform(1.0, 4.0))
        network.slowest_s, network.cut_chance = 0.002, 0.0
        network.loss_chance, network.repeat_chance = LOST, REPEATED

    async def _one_way(self) -> None:
        world, rng = self.world, self.rng
        actors = [*world.consumers.values(), *world.producers]
        process = rng.choice([actor.process for actor in actors if not actor.process.dead])
        self._note("one-way cut", process=process.name)
        world.network.hold(process, outwards=rng.random() < 0.5)
        await world.timer.wait(rng.uniform(0.3, 3.0))
        if rng.random() < 0.5:
            world.network.release(process)
        else:
            world.network.cut(process)

    async def _bad_store(self) -> None:
        world, rng = self.world, self.rng
        self._note("bad store")
        trouble = world.store.trouble
        trouble.refused, trouble.lost_before, trouble.lost_after = (
            rng.random() * 0.3,
            rng.random() * 0.2,
            rng.random() * 0.3,
        )
        await world.timer.wait(rng.uniform(0.5, 3.0))
        trouble.refused = trouble.lost_before = trouble.lost_after = 0.0

    async def _store_down(self) -> None:
        self._note("store down")
        self.world.store.trouble.down = True
        await self.world.timer.wait(self.rng.uniform(0.2, 2.0))
        self.world.store.trouble.down = False

    async def _slow_store(self) -> None:
        self._note("slow store")
        self.world.store.trouble.slowest_s = self.rng.choice((0.2, 2.0))
        await self.world.timer.wait(self.rng.uniform(0.5, 3.0))
        self.world.store.trouble.slowest_s = 0.004

    async def _step_clock(self) -> None:
        async with self._broker:
            world = self.world
            self._note("clock step")
            world.clock.step_s = self.rng.choice((-HOUR_S, HOUR_S, 2.0, -2.0))
            await world.timer.wait(self.rng.uniform(1.0, 6.0))
            world.clock.step_s = 0.0

    async def _wrong_membership(self) -> None:
        """Some buckets, or all, are said to be dealt by others. Now and then for ever: then the sweep has to do."""
        world, rng = self.world, self.rng
        self._note("wrong membership")
        others = rng.choice((frozenset({0}), frozenset({1, 2}), frozenset({0, 1, 2})))
        world.belief.change(others, told=rng.random() < 0.7)
        if rng.random() < 0.7:
            await world.timer.wait(rng.uniform(0.5, 6.0))
            world.belief.change(frozenset(), told=rng.random() < 0.7)
