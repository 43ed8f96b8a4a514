"""Several brokers' worth of callers on one store at once, and the history checker as their judge.

Each caller notes what it asks and what it is answered, as the processes of a real run do. Time is a count of what
happens: it goes on with every call and every answer. A call whose outcome is unknown is sent again word for word until
its answer is definite, as drivers do; one of which nothing happened is given up. So the same crowd runs against stores
whose connection breaks at every turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from timeline.history import Event, History, Verdict, check
from timeline.leases import Message, state_of
from timeline.model import Operation, State, Topic, payload_sum
from timeline.storage_plugins.conformance.callers import (
    AHEAD_MS,
    LONGEST_LEASE_MS,
    MOST_TRIES,
    Producer,
    Ticks,
    Worker,
)
from timeline.storage_plugins.conformance.trial import Trial, Violation
from timeline.storage_plugins.contract import ScanFilter, Store, StoreUnavailable, StoreUnknown

T = TypeVar("T")


@asynccontextmanager
async def brokers(trial: Trial, count: int) -> AsyncIterator[list[Store]]:
    """The stores of `count` brokers: openings of their own where the store is shared, else the one there is."""
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
        """Clear while whoever runs the server knows that there is none: attempts are not used up on it."""
        self.served.set()
        told = {"name": topic.name, "settings": {"remember_ms": topic.settings.remember_ms}}
        History("suite", self.clock, self.events).note("topic", told)

    async def run(self, rounds: int) -> None:
        """Two workers and two producers for each store, `rounds` calls each."""
        callers: list[Worker | Producer] = []
        for at, store in enumerate(self.stores):
            for number in range(2):
                callers.append(Worker(self, f"worker-{at}-{number}", store, self.seed))
                callers.append(Producer(self, f"producer-{at}-{number}", store, self.seed))
        await asyncio.gather(*(self._calls(caller, rounds) for caller in callers))

    async def settle_all(self) -> None:
        """Takes and acknowledges all that is left, as it comes due and leases run out."""
        worker = Worker(self, "worker-last", self.stores[0], self.seed)
        for _ in range(MOST_TRIES):
            self.clock.tick(LONGEST_LEASE_MS + AHEAD_MS)
            rows = await worker.lease(100_000)
            if rows is not None and len(rows):
                await worker.settle(Operation.ACK, rows)
            elif rows is not None and await self._answered(self._next_due) is None:
                return
        raise Violation(f"what was put was not all leased and acknowledged in {MOST_TRIES} attempts")

    async def judge(self) -> Verdict:
        """What the checker says of the whole history and of what the store has now."""
        store, now_ms = self.stores[0], self.clock.now_ms()
        rows = await self._answered(lambda: dump_store(store, [self.topic], now_ms))
        return check(self.events, rows, end_wall_ms=self.clock.now())

    async def expect_kept(self, *wanted: tuple[str, str]) -> None:
        """Violation when a promise was broken, or when one of the `wanted` (operation, status) never came."""
        verdict = await self.judge()
        if not verdict.holds:
            raise Violation(f"what was answered breaks promises: {verdict.summary()}")
        missing = [pair for pair in wanted if not verdict.statuses[pair]]
        if missing:
            raise Violation(f"never answered, which must come in such a crowd: {missing}; {dict(verdict.statuses)}")

    async def _next_due(self) -> int | None:
        return await self.stores[0].next_due(self.topic, None, 0)

    async def _answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer to a question that changes nothing, asked until it comes."""
        for _ in range(MOST_TRIES):
            try:
                return await ask()
            except StoreUnavailable:
                self.unavailable += 1
                await self.served.wait()
            except StoreUnknown:
                self.unknown += 1
        raise Violation(f"a question was not answered in {MOST_TRIES} attempts")

    async def _calls(self, caller: Worker | Producer, rounds: int) -> None:
        for _ in range(rounds):
            await caller.act()
            await asyncio.sleep(0)  # a store that never waits lets the others have their turn, too


async def dump_store(store: Store, topics: Iterable[Topic], now_ms: int) -> list[dict[str, Any]]:
    """Every message that `store` still has, dead letters too, as the checker wants it: `topic id birth version due_ms
    scheduled_ms holder deliveries group tag expires_ms sum read_sum dead died_ms state`; `read_sum` is the checksum of
    the payload and headers as they are read now."""
    rows: list[dict[str, Any]] = []
    for topic in topics:
        async for row in _dump_topic(store, topic, now_ms):
            rows.append(row)
    return rows


async def _dump_topic(store: Store, topic: Topic, now_ms: int) -> AsyncIterator[dict[str, Any]]:
    cursor: bytes | None = b""
    everything = ScanFilter(frozenset((State.WAITING, State.AVAILABLE, State.LEASED, State.DEAD)))
    while cursor is not None:
        page = await store.scan(topic, now_ms, everything, cursor, 1_000, payload=True)
        cursor, rows = page.cursor, page.rows
        if len(rows) and (rows.payloads is None or rows.headers is None):
            raise ValueError("a scan that asked for payloads came without them")
        for at in range(len(rows)):
            due_ms, holder, died_ms = int(rows.due_ms[at]), rows.holders[at], int(rows.died_ms[at])
            stands = Message(birth=0, version=0, due_ms=due_ms, holder=holder, died_ms=died_ms)
            yield {
                "topic": topic.name,
                "id": rows.ids[at].decode(),
                "birth": int(rows.birth[at]),
                "version": int(rows.version[at]),
                "due_ms": due_ms,
                "scheduled_ms": int(rows.scheduled_ms[at]),
                "holder": holder.decode(),
                "deliveries": int(rows.deliveries[at]),
                "group": rows.groups[at].decode(),
                "tag": rows.tags[at].decode(),
                "expires_ms": int(rows.expires_ms[at]),
                "sum": int(rows.payload_sum[at]),
                "read_sum": payload_sum(rows.payloads[at], rows.headers[at]) if rows.payloads and rows.headers else 0,
                "dead": rows.dead[at].decode(),
                "died_ms": died_ms,
                "state": str(state_of(stands, now_ms)),
            }
