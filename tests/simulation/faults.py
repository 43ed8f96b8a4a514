"""What goes wrong in a seed, and when it is mended."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from timeline.history import History

if TYPE_CHECKING:
    from tests.simulation.brokers import Broker
    from tests.simulation.world import World

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
        self._locks = {broker.name: asyncio.Lock() for broker in world.brokers}
        """Held by whatever starts or ends a broker, or keeps one from being started (a stepped clock)."""
        self._several = len(world.brokers) > 1

    def _note(self, what: str, **more: object) -> None:
        self.world.occurred[what] += 1
        self._log.note("fault", {"what": what, **more})

    async def strike(self) -> None:
        """The first phase. A tenth of the seeds has no fault at all."""
        world, rng = self.world, self.rng
        phase_s = world.size.faults_s
        until_s = world.loop.time() + phase_s
        faultless = rng.random() < 0.1
        if not faultless:
            world.network.loss_chance, world.network.repeat_chance = LOST, REPEATED
        kinds: list[Callable[[], Awaitable[None]]] = [
            self._crash_broker, self._crash_broker, self._drain_broker, self._pause_broker, self._crash_consumer,
            self._pause_consumer, self._supersede, self._crash_producer, self._bad_wire, self._one_way,
            self._bad_store, self._store_down, self._slow_store, self._step_clock, self._wrong_membership,
            self._wrong_membership,
        ]  # fmt: skip
        if len(world.brokers) > 1:
            kinds = [one for one in kinds if one != self._wrong_membership]
            kinds += [
                self._crash_broker, self._pause_broker, self._bad_events, self._bad_events, self._etcd_down,
                self._etcd_cut, self._etcd_emptied, self._ghost, self._deaf_peers, self._deaf_peers,
            ]  # fmt: skip
        if world.pullers:
            kinds += [self._crash_puller, self._crash_puller]
        chosen = rng.sample(kinds, rng.randrange(1, 7)) if not faultless else []
        at = sorted(rng.uniform(0.2, phase_s - 3.0) for _ in chosen)
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
        network = world.network
        for broker in world.brokers:
            broker.store.trouble.mend()
            broker.clock.step_s = 0.0
        registry = world.registry
        registry.slowest_s, registry.loss, registry.down = 0.01, 0.0, False
        registry.cut.clear()
        network.deaf = 0.0
        network.slowest_s, network.cut_chance = 0.002, 0.0
        network.loss_chance = network.repeat_chance = 0.0
        for producer in world.producers:
            for task in producer.process.tasks:
                while not task.done() and not producer.process.dead:
                    await world.timer.wait(0.1)
        await world.start_broker()
        world.restart_consumers()
        admin = world.client(world.process("healer"), random.Random(f"{world.seed}-healer"))
        for topic in world.topics:
            await admin.resume_topic(topic, timeout="5s")  # brokers look once a second whether the store is back
        await admin.aclose()
        world.healed = True
        self._log.note("healed", {})

    def _one(self) -> Broker:
        """Whichever broker."""
        return self.rng.choice(self.world.brokers)

    async def _crash_broker(self) -> None:
        broker = self._one()
        async with self._locks[broker.name]:
            self._note("crash", process="broker")
            broker.kill()
            await self.world.timer.wait(self.rng.choice((0.02, 0.5, 2.5, 7.0) if self._several else (0.02, 0.5, 2.5)))
            await broker.start()

    async def _drain_broker(self) -> None:
        broker = self._one()
        async with self._locks[broker.name]:
            self._note("drain", process="broker")
            await broker.drain()
            await self.world.timer.wait(self.rng.choice((0.0, 0.3)))
            await broker.start()

    async def _pause_broker(self) -> None:
        process = self._one().process
        if process is not None:
            self._note("pause broker")
            process.pause()
            await self.world.timer.wait(self.rng.choice((0.2, 1.0, 3.0, 7.0) if self._several else (0.2, 1.0, 3.0)))
            process.resume()

    async def _crash_consumer(self) -> None:
        world, id = self.world, self.rng.choice(list(self.world.consumers))
        self._note("crash consumer", process=id)
        world.kill(world.consumers[id])
        await world.timer.wait(self.rng.choice((0.05, 0.7, 2.5)))
        world.start_consumer(id)

    async def _crash_puller(self) -> None:
        """Between take and settle, if it takes something within three seconds."""
        world, id = self.world, self.rng.choice(list(self.world.pullers))
        for _ in range(150):
            if world.pullers[id].handling:
                break
            await world.timer.wait(0.02)
        self._note("crash puller", process=id)
        world.occurred["crash between take and settle"] += bool(world.pullers[id].handling)
        world.kill(world.pullers[id])
        await world.timer.wait(self.rng.choice((0.05, 0.7, 2.5)))
        world.start_puller(id)

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
        actors = [*world.consumers.values(), *world.producers, *world.pullers.values()]
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
        trouble = self._one().store.trouble
        self._note("bad store")
        trouble.refused, trouble.lost_before, trouble.lost_after = (
            rng.random() * 0.3,
            rng.random() * 0.2,
            rng.random() * 0.3,
        )
        await world.timer.wait(rng.uniform(0.5, 3.0))
        trouble.refused = trouble.lost_before = trouble.lost_after = 0.0

    async def _store_down(self) -> None:
        struck = self.world.brokers if self.rng.random() < 0.5 else [self._one()]
        self._note("store down")
        for broker in struck:
            broker.store.trouble.down = True
        await self.world.timer.wait(self.rng.uniform(0.2, 4.0 if self._several else 2.0))
        for broker in struck:
            broker.store.trouble.down = False

    async def _slow_store(self) -> None:
        trouble = self._one().store.trouble
        self._note("slow store")
        trouble.slowest_s = self.rng.choice((0.2, 2.0))
        await self.world.timer.wait(self.rng.uniform(0.5, 3.0))
        trouble.slowest_s = 0.004

    async def _step_clock(self) -> None:
        broker = self._one()
        async with self._locks[broker.name]:
            self._note("clock step")
            broker.clock.step_s = self.rng.choice((-HOUR_S, HOUR_S, 2.0, -2.0))
            await self.world.timer.wait(self.rng.uniform(1.0, 6.0))
            broker.clock.step_s = 0.0

    async def _wrong_membership(self) -> None:
        """Some buckets, or all, are said to be dealt by others. Now and then for ever: then the sweep has to do."""
        world, rng = self.world, self.rng
        self._note("wrong membership")
        others = rng.choice((frozenset({0}), frozenset({1, 2}), frozenset({0, 1, 2})))
        world.belief.change(others, told=rng.random() < 0.7)
        if rng.random() < 0.7:
            await world.timer.wait(rng.uniform(0.5, 6.0))
            world.belief.change(frozenset(), told=rng.random() < 0.7)

    # ── what several brokers may meet besides ──

    async def _bad_events(self) -> None:
        """Events of the membership come late, or not at all."""
        world, rng = self.world, self.rng
        self._note("bad events")
        world.registry.slowest_s, world.registry.loss = rng.choice((0.2, 2.0)), rng.choice((0.1, 0.5))
        await world.timer.wait(rng.uniform(1.0, 6.0))
        world.registry.slowest_s, world.registry.loss = 0.01, 0.0

    async def _etcd_down(self) -> None:
        self._note("etcd down")
        self.world.registry.down = True
        await self.world.timer.wait(self.rng.uniform(0.5, 8.0))
        self.world.registry.down = False

    async def _etcd_cut(self) -> None:
        """One broker does not reach it, for longer than its lease perhaps."""
        name = self._one().name
        self._note("etcd cut")
        self.world.registry.cut.add(name)
        await self.world.timer.wait(self.rng.uniform(0.5, 8.0))
        self.world.registry.cut.discard(name)

    async def _etcd_emptied(self) -> None:
        self._note("etcd emptied")
        self.world.registry.forget()

    async def _ghost(self) -> None:
        """A broker that is not there is believed to be: its buckets are nobody's. Now and then to the end of faults."""
        world, rng = self.world, self.rng
        self._note("ghost")
        topics = await world.store.inner.topics()
        world.registry.haunt([topic.uid for topic in topics], rng.choice((1, 2, 6)))
        if rng.random() < 0.7:
            await world.timer.wait(rng.uniform(1.0, 6.0))
            world.registry.haunt((), 0)

    async def _deaf_peers(self) -> None:
        """No broker hears of what others take in."""
        world = self.world
        self._note("deaf peers")
        world.network.deaf = self.rng.choice((0.5, 1.0))
        await world.timer.wait(self.rng.uniform(1.0, 8.0))
        world.network.deaf = 0.0
