"""A memory store whose calls can be held up or refused by name, and are counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

from timeline.storage_plugins.contract import StoreUnavailable
from timeline.storage_plugins.memory import MemoryStore


class SlowStore(MemoryStore):
    """`hold(call)`: such calls happen, but answer only after `release`. `refuse`: calls of these names fail. `shared`:
    as if other brokers could have opened it, too."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.capabilities = replace(self.capabilities, shared=shared)
        self.calls: Counter[str] = Counter()
        self.turns = 0
        self.refuse: set[str] = set()
        self._held: dict[str, asyncio.Event] = {}
        self._arrived: dict[str, asyncio.Event] = {}

    def hold(self, call: str) -> None:
        self._held[call], self._arrived[call] = asyncio.Event(), asyncio.Event()

    async def arrived(self, call: str) -> None:
        """Returns when a call of that name is held up."""
        await self._arrived[call].wait()

    def release(self, call: str) -> None:
        self._held.pop(call).set()

    async def _through(self, call: str, work: Any) -> Any:
        self.calls[call] += 1
        if call in self.refuse:
            work.close()
            raise StoreUnavailable(f"{call} is refused by the test")
        answer = await work
        if (gate := self._held.get(call)) is not None:
            self._arrived[call].set()
            await gate.wait()
        return answer

    async def topics(self) -> Any:
        return await self._through("topics", super().topics())

    async def put(self, *arguments: Any) -> Any:
        return await self._through("put", super().put(*arguments))

    async def settle(self, *arguments: Any) -> Any:
        return await self._through("settle", super().settle(*arguments))

    async def mutate(self, *arguments: Any) -> Any:
        return await self._through("mutate", super().mutate(*arguments))

    async def lease_due(self, *arguments: Any) -> Any:
        return await self._through("lease_due", super().lease_due(*arguments))

    async def scan(self, *arguments: Any) -> Any:
        return await self._through("scan", super().scan(*arguments))

    async def check(self) -> None:
        if "check" in self.refuse:
            raise StoreUnavailable("check is refused by the test")
        await super().check()


class InTurn(SlowStore):
    """One that does its calls one after the other and says so."""

    tells_commit_seq = True

    async def put(self, *arguments: Any) -> Any:
        return await self._through("put", self._turn(MemoryStore.put(self, *arguments)))

    async def lease_due(self, *arguments: Any) -> Any:
        return await self._through("lease_due", self._turn(MemoryStore.lease_due(self, *arguments)))

    async def _turn(self, work: Any) -> Any:
        answer = await work
        self.turns += 1
        answer.commit_seq = self.turns
        return answer
