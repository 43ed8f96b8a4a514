"""Producers of the simulation: real drivers in simulated processes, doing anything the API allows, and noting what they
did and what came of it."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from timeline.errors import Closed, LeaseLost, Superseded, TimelineError
from timeline.history import OK, UNKNOWN, History, outcome_of
from timeline.model import encode_headers, payload_sum

if TYPE_CHECKING:
    from tests.simulation.loop import Process, Timer
    from tests.simulation.world import World

IDS = 26
TAGS = ("red", "blue")
FAR_MS = 3_600_000
LEAST_BY_THEN = 270
"""Producers go on until so much was done: with what is delivered and settled afterwards every seed does 300 operations
and more, whatever its size."""
CERTAIN = ("TOO_LARGE",)
"""With these no sending of the call happened, whatever stood. INVALID may be about the message: due past its expiry."""
NOTHING = ("UNAVAILABLE", "THROTTLED")
"""With these, too, no earlier sending of the call happened; but one that the wire itself brings a second time may."""


def judged(error: TimelineError) -> tuple[str, str]:
    """(outcome, status) of an error that a call ended with."""
    if isinstance(error, Closed | LeaseLost | Superseded):
        return UNKNOWN, error.code
    return outcome_of(error.code), error.code


class Actor:
    """A process with a client of its own."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.rng = random.Random(f"{world.seed}-{name}")
        self.process: Process = world.process(name)
        self.timer: Timer = world.timer
        self.history = History(name, world.history_clock, world.events)
        self.client: Any = world.client(self.process, self.rng)

    def _told(self, told: dict[str, Any], invoked: float) -> dict[str, Any]:
        """The result of a call, with the note that it may have been sent again: where it failed, after it was done and
        its answer lost; where it went well, after any answer that left it unsure."""
        store, network, name = self.world.store, self.world.network, self.process.name
        lost_s = network.repeated.get(name, 0.0)
        if told["status"] not in NOTHING:
            well = outcome_of(told["status"]) == OK
            unsure_s = store.lost.unknown_s if well else store.lost.answer_s
            lost_s = max(lost_s, network.answers_lost.get(name, 0.0), unsure_s)
        if lost_s * 1_000.0 < invoked or told["status"] in CERTAIN:
            return told
        return {**told, "repeated": True, **({"lingers": True} if len(self.world.brokers) > 1 else {})}

    async def noted(
        self,
        operation: str,
        arguments: dict[str, Any],
        call: Callable[[], Awaitable[Any]],
        told: Callable[[Any], dict[str, Any]],
    ) -> Any:
        """Makes a call and notes it, with the status it got. None when it failed."""
        started = self.history.call(operation, arguments)
        try:
            answer = await call()
        except TimelineError as error:
            outcome, status = judged(error)
            self.history.answer(started, outcome, self._told({"status": status}, started[0].invoked))
            return None
        result = self._told(told(answer), started[0].invoked)
        self.history.answer(started, outcome_of(result["status"]), result)
        return answer


def receipt(answer: Any) -> dict[str, Any]:
    """What a receipt says, for the history."""
    told = {"status": str(answer.status), "version": answer.version, "due_ms": answer.due_ms}
    return {**told, "settled": True} if answer.settled else told


class Producer(Actor):
    """Puts, moves, cancels and all the rest, on both topics, as one of two groups."""

    def __init__(self, world: World, name: str, group: str) -> None:
        super().__init__(world, name)
        self.group = group
        self.count = 0
        self.producers: dict[str, Any] = {}
        self.last_payload: dict[str, bytes] = {}
        self.recent: dict[str, deque[str]] = {topic: deque(maxlen=6) for topic in world.topics}

    async def work(self, calls: int) -> None:
        """Makes so many calls, or more where the seed has done too little by then, some at once, some after a while."""
        for topic in self.world.topics:
            self.producers[topic] = self.client.producer(topic, group=self.group)
        under_way: list[asyncio.Task[Any]] = []
        many = self.world.size.many
        acts = [(self.put, 40), (self.put_many, many), (self.flood, 2), (self.move, 16), (self.cancel, 9),
                (self.by_tag, 5), (self.revive, 6), (self.purge, 4), (self.look, 8), (self.misuse, 4),
                (self.settings, 2)]  # fmt: skip
        weights = [weight for _, weight in acts]
        while calls > 0 or self.world.operations < LEAST_BY_THEN:
            calls -= 1
            act = self.rng.choices(acts, weights)[0][0]
            topic = self.rng.choice(self.world.topics)
            under_way.append(asyncio.get_running_loop().create_task(act(topic)))
            if self.rng.random() < 0.7:
                await self.timer.wait(self.rng.expovariate(1.0) * self.world.pace_s)
        await asyncio.gather(*under_way)
        for producer in self.producers.values():
            await producer.aclose()
        await self.client.aclose()

    def _id(self) -> str:
        return f"id{self.rng.randrange(IDS):02}"

    def _known(self, topic: str) -> str:
        """Rather an id that this producer has put of late."""
        recent = self.recent[topic]
        return self.rng.choice(recent) if recent and self.rng.random() < 0.7 else self._id()

    def _time(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """A time to ask for: (arguments of the call, of the history)."""
        draw = self.rng.random()
        if draw < 0.25:
            in_ms = self.rng.choice((0, 1, 250, 700, self.rng.randrange(4_000)))
            return {"in_": f"{in_ms}ms"}, {"in_ms": in_ms}
        ahead_ms = FAR_MS if draw > 0.93 else self.rng.randrange(-300, 5_000)
        due_ms = int(self.world.true_clock.now()) + ahead_ms
        return {"at": due_ms}, {"due_ms": due_ms}

    def _message(self, topic: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """A message to put: (arguments of the call, of the history)."""
        id, (when, noted) = self._id(), self._time()
        self.count += 1
        self.recent[topic].append(id)
        payload = f"{self.name}:{self.count}".encode()
        if self.rng.random() < 0.08:
            payload = self.last_payload.get(topic + id, payload)
        self.last_payload[topic + id] = payload
        call: dict[str, Any] = {"payload": payload, "id": id, **when}
        headers = {"k": "v"} if self.rng.random() < 0.2 else {}
        if headers:
            call["headers"] = headers
        noted = {
            "topic": topic,
            "id": id,
            "group": self.group,
            "sum": payload_sum(payload, encode_headers(headers)),
            **noted,
        }
        if self.rng.random() < 0.35:
            call["tag"] = noted["tag"] = self.rng.choice(TAGS)
        if self.rng.random() < 0.15:
            life_ms = self.rng.choice((100, 500, self.rng.randrange(200, 4_000)))
            if "due_ms" in noted:
                call["expires"] = noted["expires_ms"] = noted["due_ms"] + life_ms
            else:
                noted["expires_in_ms"] = noted["in_ms"] + life_ms
                call["expires"] = f"{noted['expires_in_ms']}ms"
        return call, noted

    async def put(self, topic: str) -> None:
        call, noted = self._message(topic)
        draw = self.rng.random()
        if draw < 0.28:
            how = "move" if draw < 0.2 else "replace"
            call["if_exists"], noted[how] = how, True
        await self.noted("put", noted, lambda: self.producers[topic].produce(**call), receipt)

    async def put_many(self, topic: str) -> None:
        pairs = [self._message(topic) for _ in range(self.rng.randrange(2, 6))]
        messages = [self.world.message(**call) for call, _ in pairs]
        started = self.history.call("put", [noted for _, noted in pairs])
        try:
            answers = await self.producers[topic].produce_many(messages)
        except TimelineError as error:
            outcome, status = judged(error)
            self.history.answer(started, outcome, [{"status": status}] * len(started))
            return
        told = [self._told(receipt(one), started[0].invoked) for one in answers]
        self.history.answer(started, [outcome_of(one["status"]) for one in told], told)

    async def flood(self, topic: str) -> None:
        """More puts at once than a narrow broker lets wait."""
        await asyncio.gather(*(self.put_many(topic) for _ in range(6)))

    async def move(self, topic: str) -> None:
        id, (when, noted) = self._known(topic), self._time()
        extra = {"if_version": self.rng.randrange(1, 4)} if self.rng.random() < 0.15 else {}
        noted = {"topic": topic, "id": id, "group": self.group, **noted, **extra}
        await self.noted("move", noted, lambda: self.producers[topic].move(id, **when, **extra), receipt)

    async def cancel(self, topic: str) -> None:
        id = self._known(topic)
        extra: dict[str, Any] = {"leased": True} if self.rng.random() < 0.3 else {}
        if self.rng.random() < 0.15:
            extra["if_version"] = self.rng.randrange(1, 4)
        noted = {"topic": topic, "id": id, "group": self.group, **extra}
        await self.noted("cancel", noted, lambda: self.producers[topic].cancel(id, **extra), receipt)

    async def by_tag(self, topic: str) -> None:
        tag, producer = self.rng.choice(TAGS), self.producers[topic]
        noted: dict[str, Any] = {"topic": topic, "tag": tag, "group": self.group}
        if self.rng.random() < 0.2:
            noted["dry_run"] = True
        dry = {"dry_run": True} if noted.get("dry_run") else {}
        if self.rng.random() < 0.4:
            await self.noted("cancel_tag", noted, lambda: producer.cancel_tag(tag, **dry), _counted)
        elif self.rng.random() < 0.5:
            by_ms = self.rng.choice((500, 1_500))
            call = {"by": f"{by_ms}ms", **dry}
            await self.noted("move_tag", {**noted, "by_ms": by_ms}, lambda: producer.move_tag(tag, **call), _counted)
        else:
            due_ms = int(self.world.true_clock.now()) + self.rng.randrange(4_000)
            call = {"at": due_ms, **dry}
            await self.noted("move_tag", {**noted, "due_ms": due_ms}, lambda: producer.move_tag(tag, **call), _counted)

    async def revive(self, topic: str) -> None:
        id = await self._dead(topic) or self._id()
        due_ms = int(self.world.true_clock.now()) + self.rng.randrange(2_000)
        noted = {"topic": topic, "id": id, "group": self.group, "due_ms": due_ms}
        await self.noted(
            "revive", noted, lambda: self.producers[topic].revive([id], at=due_ms), lambda all: receipt(all[0])
        )

    async def purge(self, topic: str) -> None:
        id = await self._dead(topic) or self._id()
        noted = {"topic": topic, "id": id, "group": self.group}
        await self.noted("purge", noted, lambda: self.producers[topic].purge([id]), lambda all: receipt(all[0]))

    async def _dead(self, topic: str) -> str | None:
        try:
            found = [str(one.id) async for one in self.client.dead(topic)]
        except TimelineError:
            return None
        return self.rng.choice(found) if found else None

    async def look(self, topic: str) -> None:
        id = self._known(topic)

        def told(found: Any) -> dict[str, Any]:
            return {"status": "NOT_FOUND" if found is None else "OK"}

        await self.noted("get", {"topic": topic, "id": id}, lambda: self.client.get(topic, id), told)

    async def misuse(self, topic: str) -> None:
        """What must be refused, and change nothing."""
        id, now_ms = self._id(), int(self.world.true_clock.now())
        noted = {"topic": topic, "id": id, "group": self.group, "sum": 1, "due_ms": now_ms}
        call: dict[str, Any] = {"payload": b"x", "id": id, "at": now_ms}
        if self.rng.random() < 0.5:
            call["payload"] = b"x" * 5_000
        else:
            call["at"] = noted["due_ms"] = now_ms + 30 * 366 * 86_400_000
        await self.noted("put", noted, lambda: self.producers[topic].produce(**call), receipt)

    async def settings(self, topic: str) -> None:
        """Pauses a topic's deliveries for a while."""
        for paused in (True, False):
            call = self.client.pause_topic if paused else self.client.resume_topic
            noted = {"name": topic, "settings": {"paused": paused}}
            await self.noted("topic", noted, lambda call=call: call(topic), lambda _: {"status": "OK"})
            await self.timer.wait(self.rng.random() * 2)


def _counted(answer: Any) -> dict[str, Any]:
    return {"status": "OK", "counts": {str(status): many for status, many in answer.counts.items()}}
