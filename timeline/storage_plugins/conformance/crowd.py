"""Callers of several brokers on one store at once, judged by the history checker.

Each caller notes what it asks and what it is answered, as the processes of a real run do. Time is a count of calls and
answers. A call whose outcome is unknown is sent again word for word until its answer is definite, as drivers do. A call
of which nothing happened is given up. So the same crowd runs against stores whose connection breaks at every turn.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import numpy as np

from timeline.clock import Clock
from timeline.history import FAIL, UNKNOWN, Event, History, Verdict, check, outcome_of
from timeline.leases import Message, state_of
from timeline.model import Answers, Operation, Rows, Status, Topic, payload_sum
from timeline.storage_plugins.conformance.trial import (
    EVERY_STATE,
    PLENTY,
    T0,
    Call,
    StoreViolation,
    Trial,
    expect,
    named_call,
    plain,
    sent,
    walked,
)
from timeline.storage_plugins.contract import Grant, Puts, ScanFilter, Settles, Store, StoreUnavailable, StoreUnknown

MOST_TRIES = 200
"""A call that is unknown this often in a row will not be answered."""
LONGEST_LEASE_MS = 60
AHEAD_MS = 40

T = TypeVar("T")


class Ticks(Clock):
    """A clock that counts calls and answers, in milliseconds from T0."""

    def __init__(self) -> None:
        self.at = 0
        super().__init__(lambda: T0 / 1000, lambda: 0.0)

    def now(self) -> float:
        return float(T0 + self.at)

    def monotonic_ms(self) -> float:
        return float(self.at)

    def tick(self, by_ms: int = 1) -> int:
        """Return the next instant, in milliseconds UTC."""
        self.at += by_ms
        return T0 + self.at


def _arguments(call: Call, at: int) -> dict[str, Any]:
    """Return what a history says of message `at` of a call."""
    id = call.ids[at].decode()
    if isinstance(call, Settles):
        token = {"birth": int(call.birth[at]), "version": int(call.version[at])}
        asked = {"due_ms": int(call.time_ms[at])} if call.operation[at] == Operation.RELEASE else {}
        return {"id": id, "consumer": call.holders[at].decode(), **token, **asked}
    values = {"id": id, "group": call.groups[at].decode()}
    if isinstance(call, Puts):
        content = {"sum": int(call.payload_sum[at]), "birth": int(call.birth[at])}
        return {**values, "due_ms": int(call.due_ms[at]), "move": bool(call.move[at]), **content}
    asked = {"due_ms": int(call.due_ms[at])} if call.operation is Operation.MOVE else {}
    return {**values, "leased": bool(call.leased[at]), **asked}


class CrowdCaller:
    """One caller: a name, a store, and a history."""

    def __init__(self, scene: Crowd, name: str, store: Store, seed: int) -> None:
        self.scene, self.name, self.store = scene, name, store
        self.rng = random.Random(f"{seed}-{name}")
        self.history = History(name, scene.clock, scene.events)

    async def ask(self, call: Call) -> Answers | None:
        """Send a call, note what was asked and answered, and repeat it while the outcome is unknown. Return None if
        nothing happened."""
        scene, repeated = self.scene, False
        now_ms = scene.clock.tick()
        noted = [
            self.history.call(named_call(call, at), {"topic": scene.topic.name, **_arguments(call, at)})[0]
            for at in range(len(call))
        ]
        for _ in range(MOST_TRIES):
            try:
                answers = await sent(self.store, scene.topic, now_ms, call)
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
        raise StoreViolation(f"a {named_call(call)} was not answered in {MOST_TRIES} attempts")

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


class CrowdProducer(CrowdCaller):
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
        """Put `ids`, each with a payload of its own."""
        rng = self.rng
        payloads = [f"{self.name} {rng.getrandbits(32)}".encode() * rng.randint(1, 5) for _ in ids]
        due_ms, move = self._dues(len(ids)), [rng.random() < 0.2 for _ in ids]
        return await self.ask(self.scene.trial.puts(ids, due_ms, payload=payloads, move=move))

    async def mutate(self, operation: Operation, ids: list[bytes]) -> Answers | None:
        """Move or cancel `ids`."""
        due_ms, leased = self._dues(len(ids)), [self.rng.random() < 0.2 for _ in ids]
        return await self.ask(self.scene.trial.mutations(operation, ids, due_ms, leased=leased))


class CrowdWorker(CrowdCaller):
    """Leases, then extends, releases or acknowledges some of its messages, some of them too late."""

    had: Rows | None = None

    async def act(self) -> None:
        """Lease, and perhaps settle."""
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
        """Lease up to `count` and note each as received. Return None when no answer came; such leases run out."""
        scene = self.scene
        now_ms = scene.clock.tick()
        grant = Grant(self.name.encode(), count, self.rng.randint(5, LONGEST_LEASE_MS), PLENTY)
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
        """Settle `rows` with their tokens."""
        time_ms = self.scene.clock.now_ms() + self.rng.randint(0, LONGEST_LEASE_MS)
        return await self.ask(self.scene.trial.settles(operation, rows, time_ms=time_ms))


@asynccontextmanager
async def brokers(trial: Trial, count: int) -> AsyncIterator[list[Store]]:
    """Yield the stores of `count` brokers: openings of their own if the store is shared, else the same one."""
    if not trial.store.capabilities.shared:
        yield [trial.store] * count
        return
    async with AsyncExitStack() as open_stores:
        stores = [trial.store]
        for _ in range(count - 1):
            store = trial.make()
            open_stores.push_async_callback(store.close)
            await store.open()
            stores.append(store)
        yield stores


class Crowd:
    """Callers on one topic. `stores`: one for each broker."""

    def __init__(self, trial: Trial, topic: Topic, stores: Sequence[Store], seed: int = 0) -> None:
        self.trial, self.topic, self.stores, self.seed = trial, topic, stores, seed
        self.clock = Ticks()
        self.events: list[Event] = []
        self.ids = [f"{letter}{number}".encode() for letter in ("m", "M") for number in range(30)]
        self.unknown = 0
        self.unavailable = 0
        self.served = asyncio.Event()
        """Clear while the server is known to be down: no attempts are used up then."""
        self.served.set()
        told = {"name": topic.name, "settings": {"remember_ms": topic.settings.remember_ms}}
        History("suite", self.clock, self.events).note("topic", told)

    async def run(self, rounds: int) -> None:
        """Run two workers and two producers for each store, `rounds` calls each."""
        callers: list[CrowdWorker | CrowdProducer] = []
        for at, store in enumerate(self.stores):
            for number in range(2):
                callers.append(CrowdWorker(self, f"worker-{at}-{number}", store, self.seed))
                callers.append(CrowdProducer(self, f"producer-{at}-{number}", store, self.seed))
        await asyncio.gather(*(self._calls(caller, rounds) for caller in callers))

    async def settle_all(self) -> None:
        """Lease and acknowledge all that is left, as it comes due and leases run out."""
        worker = CrowdWorker(self, "worker-last", self.stores[0], self.seed)
        for _ in range(MOST_TRIES):
            self.clock.tick(LONGEST_LEASE_MS + AHEAD_MS)
            rows = await worker.lease(100_000)
            if rows is not None and len(rows):
                await worker.settle(Operation.ACK, rows)
            elif rows is not None and await self._answered(self._next_due) is None:
                return
        raise StoreViolation(f"what was put was not all leased and acknowledged in {MOST_TRIES} attempts")

    async def judge(self) -> Verdict:
        """Return the checker's verdict on the whole history and the store's present state."""
        store, now_ms = self.stores[0], self.clock.now_ms()
        rows = await self._answered(lambda: dump_store(store, [self.topic], now_ms))
        return check(self.events, rows, end_wall_ms=self.clock.now())

    async def expect_kept(self, *wanted: tuple[str, str]) -> None:
        """Raise StoreViolation when a promise was broken, or when one of the `wanted` (operation, status) never
        came."""
        verdict = await self.judge()
        if not verdict.holds:
            raise StoreViolation(f"what was answered breaks promises: {verdict.summary()}")
        missing = [pair for pair in wanted if not verdict.statuses[pair]]
        if missing:
            raise StoreViolation(
                f"never answered, which must come in such a crowd: {missing}; {dict(verdict.statuses)}"
            )

    async def _next_due(self) -> int | None:
        return await self.stores[0].next_due(self.topic, None, 0)

    async def _answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the answer to a question that changes nothing, asked until it comes."""
        for _ in range(MOST_TRIES):
            try:
                return await ask()
            except StoreUnavailable:
                self.unavailable += 1
                await self.served.wait()
            except StoreUnknown:
                self.unknown += 1
        raise StoreViolation(f"a question was not answered in {MOST_TRIES} attempts")

    async def _calls(self, caller: CrowdWorker | CrowdProducer, rounds: int) -> None:
        for _ in range(rounds):
            await caller.act()
            await asyncio.sleep(0)  # a store that never waits lets the others have their turn, too


async def dump_store(store: Store, topics: Iterable[Topic], now_ms: int) -> list[dict[str, Any]]:
    """Return every message that `store` still has, dead letters too, as the checker wants it: `topic id birth version
    due_ms scheduled_ms holder deliveries group tag expires_ms sum read_sum dead died_ms state`. `read_sum`: the
    checksum of the payload and headers as they are read now."""
    return [row for topic in topics for row in await _dump_of(store, topic, now_ms)]


async def _dump_of(store: Store, topic: Topic, now_ms: int) -> list[dict[str, Any]]:
    dumped: list[dict[str, Any]] = []
    where = ScanFilter(EVERY_STATE)
    async for page in walked(lambda cursor: store.scan(topic, now_ms, where, cursor, 1_000, payload=True)):
        read = page.rows.payloads is not None and page.rows.headers is not None
        expect(read or not len(page.rows), "a scan that asked for payloads came without them")
        for row in plain(page.rows):
            stands = Message(0, 0, row["due_ms"], holder=row["holders"], died_ms=row["died_ms"])
            numbers = ("birth", "version", "due_ms", "scheduled_ms", "deliveries", "expires_ms", "died_ms")
            dumped.append(
                {
                    "topic": topic.name,
                    "id": row["ids"].decode(),
                    **{name: row[name] for name in numbers},
                    "holder": row["holders"].decode(),
                    "group": row["groups"].decode(),
                    "tag": row["tags"].decode(),
                    "sum": row["payload_sum"],
                    "read_sum": payload_sum(row["payloads"], row["headers"]),
                    "dead": row["dead"].decode(),
                    "state": str(state_of(stands, now_ms)),
                }
            )
    return dumped
