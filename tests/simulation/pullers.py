"""Callers of the simulation that keep no consumer: they take by single calls, and settle by receipt at any broker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.simulation.consumers import Receiver
from timeline.errors import TimelineError

if TYPE_CHECKING:
    from tests.simulation.world import World


class Puller(Receiver):
    """Takes messages of one topic, again and again. It settles each by its receipt, at whatever broker, or never."""

    def __init__(self, world: World, id: str, topic: str) -> None:
        super().__init__(world, id, topic)
        self.elsewhere: Any = world.client(self.process, self.rng)
        """A second client, which may be at another broker."""

    async def work(self) -> None:
        """Take until killed. A call that fails is made again."""
        rng, world = self.rng, self.world
        while True:
            asked: dict[str, Any] = {"max": rng.choice((1, 2, 10)), "wait": rng.choice((0, "200ms", "1s", "5s"))}
            if rng.random() < 0.3:
                asked["lease"] = "1s"
            if rng.random() < 0.2:
                asked["max_bytes"] = rng.choice((1, 45, 100))
            try:
                taken = await self.client.take(self.topic, **asked)
            except TimelineError as error:
                world.occurred[f"take ended: {error.code}"] += 1
                await self.timer.wait(0.1)
                continue
            world.occurred["message taken"] += len(taken)
            noted = [self._received(delivery) for delivery in taken]
            if len(taken) > 1 and rng.random() < 0.4:
                self._soon(self._ack_all(taken, noted))
            else:
                for delivery, token in zip(taken, noted, strict=True):
                    self._soon(self._handle(delivery, token))
            if rng.random() < 0.3:
                await self.timer.wait(rng.random())

    def _received(self, delivery: Any) -> dict[str, Any]:
        named, seen = self._told_of(delivery)
        noted = {**named, "consumer": delivery._frame.columns.holder}
        self.history.note("receive", {**noted, **seen})
        return noted

    @property
    def _somewhere(self) -> Any:
        """The client that settles."""
        if self.rng.random() < 0.5:
            return self.client
        self.world.occurred["settled elsewhere"] += 1
        return self.elsewhere

    async def _ack_all(self, taken: list[Any], noted: list[dict[str, Any]]) -> None:
        receipts = [delivery.receipt for delivery in taken]
        await self._ack_together(noted, lambda: self._somewhere.settle(receipts, "ack"))

    async def _handle(self, delivery: Any, noted: dict[str, Any]) -> None:
        draw = self.rng.random() * (0.4 if self.world.healed else 1.0)
        if draw < 0.4:
            await self._settle("ack", delivery, noted)
        elif draw < 0.55:
            await self.timer.wait(self.rng.random())
            await self._settle("ack", delivery, noted)
        elif draw < 0.65:
            await self._extend(delivery, noted)
            await self.timer.wait(self.rng.random())
            await self._settle("ack", delivery, noted)
        elif draw < 0.78:
            in_ms = self.rng.choice((0, 300, 1_000))
            await self._settle("release", delivery, {**noted, "in_ms": in_ms}, in_=f"{in_ms}ms")
        elif draw < 0.84:
            await self._settle("bury", delivery, noted, reason="no good")
        elif draw < 0.92:  # past its lease
            await self.timer.wait(1.0 + self.rng.random() * 3)
            await self._settle("ack", delivery, noted)
        # else: never settled at all

    async def _extend(self, delivery: Any, noted: dict[str, Any]) -> None:
        more_ms = self.rng.choice((500, 2_000, 4_000))
        await self._settle("extend", delivery, {**noted, "more_ms": more_ms}, lease=f"{more_ms}ms")

    async def _settle(self, verb: str, delivery: Any, noted: dict[str, Any], **more: Any) -> None:
        def told(receipts: Any) -> dict[str, Any]:
            (one,) = receipts
            result: dict[str, Any] = {"status": str(one.status)}
            if one.ok and verb == "release":
                result["version"] = one.version
            if one.ok and verb == "extend":
                result["lease_until_ms"] = one.due_ms
            return result

        await self.noted(verb, noted, lambda: self._somewhere.settle(delivery.receipt, verb, **more), told)
