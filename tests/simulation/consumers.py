"""Consumers of the simulation: they settle in every way there is, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from tests.simulation.actors import Actor, judged
from timeline.errors import TimelineError
from timeline.history import outcome_of
from timeline.model import encode_headers, payload_sum

if TYPE_CHECKING:
    from tests.simulation.world import World


class Receiver(Actor):
    """Takes messages of one topic, and settles them beside its work."""

    def __init__(self, world: World, id: str, topic: str) -> None:
        world.incarnations += 1
        super().__init__(world, f"{id}.{world.incarnations}")
        self.id, self.topic = id, topic
        self.handling: set[asyncio.Task[None]] = set()

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.handling.add(task)
        task.add_done_callback(self.handling.discard)

    def _told_of(self, delivery: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """A delivery for the history: what names it, and what else was seen of it."""
        birth, version = self.world.token(delivery)
        headers = encode_headers(dict(delivery.headers))
        named = {"topic": self.topic, "id": delivery.id, "birth": birth, "version": version}
        seen = {
            "due_ms": delivery.due_ms,
            "scheduled_ms": delivery.scheduled_ms,
            "lease_until_ms": delivery.lease_until_ms,
            "sum": payload_sum(delivery.payload, headers),
            "size": len(delivery.payload) + len(headers),
            "deliveries": delivery.deliveries,
        }
        return named, seen

    async def _ack_together(self, noted: list[dict[str, Any]], call: Callable[[], Awaitable[Any]]) -> None:
        started = self.history.call("ack", noted)
        try:
            receipts = await call()
        except TimelineError as error:
            outcome, status = judged(error)
            told = [self._told({"status": status}, started[0].invoked)] * len(noted)
            self.history.answer(started, outcome, told)
            return
        told = [self._told({"status": str(one.status)}, started[0].invoked) for one in receipts]
        self.history.answer(started, [outcome_of(one["status"]) for one in told], told)


class Consumer(Receiver):
    """Receives one topic and settles in every way there is, or not at all."""

    def __init__(self, world: World, id: str, topic: str) -> None:
        super().__init__(world, id, topic)
        self.session = world.incarnations
        self.in_hand: list[tuple[Any, dict[str, Any]]] = []

    async def work(self) -> None:
        """Receives until told to stop, or superseded."""
        extra: dict[str, Any] = {"credit": self.rng.choice((2, 5, 20))}
        if self.rng.random() < 0.35:
            extra["credit_bytes"] = self.rng.choice((10, 45, 100))
        noted = {"topic": self.topic, "consumer": self.id, "session": self.session, **extra}
        self.history.note("consume", noted)
        if self.rng.random() < 0.3:
            extra["lease"] = "1s"
        try:
            async with self.client.consumer(self.topic, id=self.id, **extra) as consumer:
                if self.rng.random() < 0.3:
                    await self._by_batches(consumer)
                else:
                    await self._one_by_one(consumer)
        except TimelineError as error:
            self.world.occurred[f"consumer ended: {error.code}"] += 1
        self.parted()

    def parted(self) -> None:
        """Notes that its session is over."""
        self.history.note("parted", {"consumer": self.id, "session": self.session})

    async def _one_by_one(self, consumer: Any) -> None:
        async for delivery in consumer:
            self._handle_soon(delivery, self._received(delivery))
            await self._dawdle()

    async def _dawdle(self) -> None:
        """Leaves the loop now and then only: what waits in the driver's buffer is part of the test. Sometimes for
        longer than a lease, which the driver has to extend then."""
        draw = self.rng.random()
        if draw < 0.03 and not self.world.healed:
            await self.timer.wait(0.5 + self.rng.random() * 2.5)
        elif draw < 0.3:
            await self.timer.wait(self.rng.random() * 0.05)

    async def _by_batches(self, consumer: Any) -> None:
        """Some batches are acknowledged as a whole, the others message by message."""
        async for batch in consumer.batches():
            noted = [self._received(delivery) for delivery in batch]
            if self.rng.random() < 0.5:
                self._soon(self._ack_batch(batch, noted))
                continue
            for delivery, token in zip(batch, noted, strict=True):
                self._handle_soon(delivery, token)

    async def _ack_batch(self, batch: Any, noted: list[dict[str, Any]]) -> None:
        tokens = {id(token) for token in noted}
        self.in_hand = [(before, token) for before, token in self.in_hand if id(token) not in tokens]
        await self._ack_together(noted, batch.ack)

    def _handle_soon(self, delivery: Any, noted: dict[str, Any]) -> None:
        self._soon(self._handle(delivery, noted))

    def _received(self, delivery: Any) -> dict[str, Any]:
        named, seen = self._told_of(delivery)
        noted = {**named, "consumer": self.id, "session": self.session}
        credit = delivery._consumer._in_flight.credit
        seen["in_hand"] = [credit.held_messages, credit.held_bytes]
        for before, token in self.in_hand:
            if before.lost:
                self.history.note("lost", token)
        self.in_hand = [(before, token) for before, token in self.in_hand if not before.lost]
        self.in_hand.append((delivery, noted))
        self.history.note("receive", {**noted, **seen})
        return noted

    async def _handle(self, delivery: Any, noted: dict[str, Any]) -> None:
        draw = self.rng.random() * (0.45 if self.world.healed else 1.0)
        if draw < 0.04:  # its answer goes to nobody: it may count at any time
            self.in_hand = [(before, token) for before, token in self.in_hand if token is not noted]
            self.history.call("ack", noted)
            delivery.ack_soon()
        elif draw < 0.4:
            await self._ack(delivery, noted)
        elif draw < 0.6:
            await self.timer.wait(self.rng.random())
            await self._ack(delivery, noted)
        elif draw < 0.72:
            for _ in range(self.rng.choice((1, 2, 3))):
                await self._extend(delivery, noted)
                await self.timer.wait(self.rng.random() * 2)
            await self._ack(delivery, noted)
        elif draw < 0.82:
            await self._release(delivery, noted)
        elif draw < 0.88:
            await self._bury(delivery, noted)
        elif draw < 0.95:  # past its lease, then late
            ended_s = (delivery.lease_until_ms - self.world.history_clock.now()) / 1_000.0
            just_over = self.rng.random() < 0.5
            await self.timer.wait(ended_s + self.rng.random() * 0.3 if just_over else 1.0 + self.rng.random() * 3)
            late = self.rng.choice((self._ack, self._ack, self._ack, self._release, self._bury, self._extend))
            await late(delivery, noted)
            if self.rng.random() < 0.3:
                await self._ack(delivery, noted)
        # else: never settled at all

    async def _ack(self, delivery: Any, noted: dict[str, Any]) -> None:
        await self._settle("ack", noted, delivery.ack)

    async def _bury(self, delivery: Any, noted: dict[str, Any]) -> None:
        await self._settle("bury", noted, lambda: delivery.bury("no good"))

    async def _extend(self, delivery: Any, noted: dict[str, Any]) -> None:
        more_ms = self.rng.choice((500, 2_000, 4_000))

        def told(answer: Any) -> dict[str, Any]:
            return {"status": "OK", "lease_until_ms": delivery.lease_until_ms}

        await self.noted("extend", {**noted, "more_ms": more_ms}, lambda: delivery.extend(f"{more_ms}ms"), told)

    async def _release(self, delivery: Any, noted: dict[str, Any]) -> None:
        if self.rng.random() < 0.5:
            in_ms = self.rng.choice((0, 300, 1_000))
            await self._settle("release", {**noted, "in_ms": in_ms}, lambda: delivery.release(in_=f"{in_ms}ms"))
        else:
            due_ms = int(self.world.true_clock.now()) + self.rng.randrange(-100, 1_500)
            await self._settle("release", {**noted, "due_ms": due_ms}, lambda: delivery.release(at=due_ms))

    async def _settle(self, operation: str, noted: dict[str, Any], call: Callable[[], Awaitable[Any]]) -> None:
        def told(answer: Any) -> dict[str, Any]:
            result = {"status": "OK"}
            for name in ("version", "late"):
                if getattr(answer, name, None):
                    result[name] = getattr(answer, name)
            return result

        self.in_hand = [(before, token) for before, token in self.in_hand if token is not noted]
        await self.noted(operation, noted, call, told)
