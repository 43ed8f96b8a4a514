"""Who calls in a crowd: producers that put, move and cancel, workers that lease and settle. Each notes what it does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from timeline.clock import Clock
from timeline.columns import Ragged
from timeline.history import FAIL, UNKNOWN, Event, History, outcome_of
from timeline.model import Answers, Operation, Rows, Status, Topic, payload_sum
from timeline.storage_plugins.conformance.trial import T0, Trial, Violation, column, ragged
from timeline.storage_plugins.contract import (
    Grant,
    Mutations,
    Settles,
    Store,
    StoreUnavailable,
    StoreUnknown,
)

MOST_TRIES = 200
"""A call that is unknown so often in a row is not going to be answered."""
LONGEST_LEASE_MS = 60
AHEAD_MS = 40
GROUP = "default"

T = TypeVar("T")


class Ticks(Clock):
    """A clock that counts what happens, in milliseconds from T0."""

    def __init__(self) -> None:
        self.at = 0
        super().__init__(lambda: T0 / 1000, lambda: 0.0)

    def now(self) -> float:
        return float(T0 + self.at)

    def monotonic_ms(self) -> float:
        return float(self.at)

    def tick(self, by_ms: int = 1) -> int:
        """The next instant, in milliseconds UTC."""
        self.at += by_ms
        return T0 + self.at


class Scene(Protocol):
    """What callers share."""

    trial: Trial
    topic: Topic
    clock: Ticks
    events: list[Event]
    ids: list[bytes]
    unknown: int
    unavailable: int
    served: asyncio.Event


class Caller:
    """One caller: a name, a store, and a history."""

    def __init__(self, scene: Scene, name: str, store: Store, seed: int) -> None:
        self.scene, self.name, self.store = scene, name, store
        self.rng = random.Random(f"{seed}-{name}")
        self.history = History(name, scene.clock, scene.events)

    async def ask(
        self, operations: Sequence[str], arguments: list[dict[str, Any]], call: Callable[[int], Awaitable[Answers]]
    ) -> Answers | None:
        """Calls, notes what was asked and answered, repeats while the outcome is unknown; None when nothing happened.
        `call` is handed the time of each attempt."""
        scene, repeated = self.scene, False
        now_ms = scene.clock.tick()
        noted = [
            self.history.call(operation, {"topic": scene.topic.name, **one})[0]
            for operation, one in zip(operations, arguments, strict=True)
        ]
        for _ in range(MOST_TRIES):
            try:
                answers = await call(now_ms)
            except StoreUnknown:
                scene.unknown += 1
                repeated, now_ms = True, scene.clock.tick()
                continue
            except StoreUnavailable:
                scene.unavailable += 1
                now_ms = scene.clock.tick()
                if repeated:  # what came before may have happened: only an answer ends it
                    await scene.served.wait()
                    continue
                self.history.answer(noted, FAIL)
                return None
            scene.clock.tick()
            for at, event in enumerate(noted):
                self._answered(event, answers, at, repeated)
            return answers
        raise Violation(f"{operations[0] if operations else 'a call'} was not answered in {MOST_TRIES} attempts")

    def _answered(self, event: Event, answers: Answers, at: int, repeated: bool) -> None:
        status = Status.of(int(answers.status[at]))
        if repeated and status is Status.NOT_FOUND and event.operation == "ack":
            status = Status.OK
        unsure = repeated and status is Status.NOT_FOUND and event.operation in ("cancel", "purge")
        result: dict[str, Any] = {
            "status": str(status),
            "version": int(answers.version[at]),
            "due_ms": int(answers.due_ms[at]),
            "settled": bool(answers.settled[at]),
            "late": bool(answers.late[at]),
        }
        if event.operation == "extend":
            result["lease_until_ms"] = int(answers.due_ms[at])
        if repeated:
            result["repeated"] = True
        self.history.answer([event], UNKNOWN if unsure else outcome_of(str(status)), result)


class Producer(Caller):
    """Puts, moves and cancels ids that others use too."""

    async def act(self) -> None:
        """One call."""
        rng = self.rng
        chosen = rng.choices(self.scene.ids, k=rng.randint(1, 12))
        kind = rng.choices(("put", "move", "cancel"), (5, 3, 1))[0]
        if kind == "put":
            await self.put(chosen)
        else:
            await self.mutate(Operation.MOVE if kind == "move" else Operation.CANCEL, chosen)

    def _dues(self, count: int) -> list[int]:
        now_ms = self.scene.clock.now_ms()
        return [now_ms + self.rng.randint(-10, AHEAD_MS) for _ in range(count)]

    async def put(self, ids: list[bytes]) -> Answers | None:
        """Puts `ids`, each with a payload of its own."""
        rng, count = self.rng, len(ids)
        payloads = [f"{self.name} {rng.getrandbits(32)}".encode() * rng.randint(1, 5) for _ in ids]
        due_ms, move = self._dues(count), [rng.random() < 0.2 for _ in ids]
        puts = self.scene.trial.puts(ids, due_ms, payload=payloads, move=move)
        arguments = [
            {
                "id": id.decode(),
                "group": GROUP,
                "due_ms": due_ms[at],
                "sum": int(puts.payload_sum[at]),
                "move": move[at],
                "birth": int(puts.birth[at]),
            }
            for at, id in enumerate(ids)
        ]
        return await self.ask(["put"] * count, arguments, lambda now_ms: self.store.put(self.scene.topic, now_ms, puts))

    async def mutate(self, operation: Operation, ids: list[bytes]) -> Answers | None:
        """Moves or cancels `ids`."""
        count = len(ids)
        due_ms, leased = self._dues(count), [self.rng.random() < 0.2 for _ in ids]
        mutations = Mutations(
            operation=operation,
            ids=Ragged.of(ids),
            groups=ragged(GROUP.encode(), count),
            due_ms=column(due_ms, count, np.int64),
            if_version=column(0, count, np.int64),
            leased=column(leased, count, np.bool_),
            op=self.scene.trial.numbers(count),
        )
        name = operation.name.lower()
        arguments = [
            {"id": id.decode(), "group": GROUP, "leased": leased[at]}
            | ({"due_ms": due_ms[at]} if operation is Operation.MOVE else {})
            for at, id in enumerate(ids)
        ]
        return await self.ask(
            [name] * count, arguments, lambda now_ms: self.store.mutate(self.scene.topic, now_ms, mutations)
        )


class Worker(Caller):
    """Leases, then extends, releases or acknowledges some of what it has or had, some of it too late."""

    had: Rows | None = None

    async def act(self) -> None:
        """A lease and perhaps a settle."""
        rng, rows = self.rng, await self.lease(self.rng.randint(1, 12))
        if rng.random() < 0.2:
            self.scene.clock.tick(rng.randint(1, LONGEST_LEASE_MS))
        await asyncio.sleep(0)
        if self.had is not None and rng.random() < 0.3:
            rows, self.had = self.had, rows
        elif rows is not None and len(rows):
            self.had = rows
        if rows is None or not len(rows) or rng.random() < 0.2:
            return
        operation = rng.choice((Operation.ACK, Operation.ACK, Operation.RELEASE, Operation.EXTEND))
        await self.settle(operation, rows.take(np.arange(rng.randint(1, len(rows)))))

    async def lease(self, count: int) -> Rows | None:
        """Leases up to `count` and notes each as received; None when no answer came (whatever was leased runs out)."""
        scene = self.scene
        now_ms = scene.clock.tick()
        grant = Grant(self.name.encode(), count, self.rng.randint(5, LONGEST_LEASE_MS), 1 << 40)
        try:
            leased = await self.store.lease_due(scene.topic, None, now_ms, 0, [grant])
        except StoreUnknown:
            scene.unknown += 1
            return None
        except StoreUnavailable:
            scene.unavailable += 1
            return None
        scene.clock.tick()
        rows = leased.rows
        for at, id in enumerate(rows.ids.tolist()):
            content = payload_sum(rows.payloads[at], rows.headers[at]) if rows.payloads and rows.headers else 0
            self.history.note(
                "receive",
                {
                    "topic": scene.topic.name,
                    "id": id.decode(),
                    "consumer": self.name,
                    "session": 1,
                    "birth": int(rows.birth[at]),
                    "version": int(rows.version[at]),
                    "due_ms": int(leased.was_due_ms[at]),
                    "scheduled_ms": int(rows.scheduled_ms[at]),
                    "lease_until_ms": int(rows.due_ms[at]),
                    "sum": content,
                    "size": int(rows.payload_bytes[at]),
                    "deliveries": int(rows.deliveries[at]),
                },
            )
        return rows

    async def settle(self, operation: Operation, rows: Rows) -> Answers | None:
        """Settles `rows` with their tokens."""
        count, now_ms = len(rows), self.scene.clock.now_ms()
        time_ms = now_ms + self.rng.randint(0, LONGEST_LEASE_MS)
        settles = Settles(
            ids=rows.ids,
            birth=rows.birth,
            version=rows.version,
            holders=rows.holders,
            operation=column(operation, count, np.uint8),
            time_ms=column(time_ms, count, np.int64),
            op=self.scene.trial.numbers(count),
            unseen=column(False, count, np.bool_),
            reasons=ragged(b"", count),
        )
        arguments = [
            {"id": id.decode(), "consumer": self.name, "birth": birth, "version": version}
            | ({"due_ms": time_ms} if operation is Operation.RELEASE else {})
            for id, birth, version in zip(rows.ids.tolist(), rows.birth.tolist(), rows.version.tolist(), strict=True)
        ]
        return await self.ask(
            [operation.name.lower()] * count,
            arguments,
            lambda at_ms: self.store.settle(self.scene.topic, at_ms, settles),
        )
