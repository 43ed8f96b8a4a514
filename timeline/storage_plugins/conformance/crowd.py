"""Several brokers' worth of callers on one store at once, and the history checker as their judge.

Each caller notes what it asks and what it is answered, as the processes of a real run do. Time is a count of what
happens: it goes on with every call and every answer. A call whose outcome is unknown is sent again word for word until
its answer is definite, as drivers do; one of which nothing happened is given up. So the same crowd runs against stores
whose connection breaks at every turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

from timeline.history import Event, History, Verdict, check
from timeline.model import Operation, Topic
from timeline.storage_plugins.conformance.callers import (
    AHEAD_MS,
    LONGEST_LEASE_MS,
    MOST_TRIES,
    Producer,
    Ticks,
    Worker,
)
from timeline.storage_plugins.conformance.trial import Trial, Violation
from timeline.storage_plugins.contract import Store, StoreUnavailable, StoreUnknown
from timeline.storage_plugins.dump import dump_store

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
