"""Bugs to plant: each is one mistake that a store or a broker could make, everything else being the real thing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from timeline.broker.intake import Intake
from timeline.broker.node import Node
from timeline.columns import Ragged
from timeline.model import Answers, Operation, Rows, State, Status, Topic, bucket_of
from timeline.storage_plugins.contract import Grant, Leased, Mutations, Puts, ScanFilter, Settles, TagMutation, TagStep
from timeline.storage_plugins.memory import MemoryStore

OK = Status.OK.code
ALL = frozenset((State.WAITING, State.AVAILABLE, State.LEASED, State.DEAD))


class _Planted(MemoryStore):
    def __init__(self) -> None:
        super().__init__(cluster_uid="0" * 32)

    async def standing(
        self, topic: Topic, now_ms: int, ids: Ragged, payload: bool = False
    ) -> dict[bytes, tuple[Rows, int]]:
        """What lives under `ids`: id → (rows, index)."""
        page = await self.scan(topic, now_ms, ScanFilter(ids=ids), b"", 100_000, payload)
        return {id: (page.rows, at) for at, id in enumerate(page.rows.ids.tolist())}


class NoFence(_Planted):
    """Settles by id alone: whatever token and holder are named."""

    async def settle(self, topic: Topic, now_ms: int, settles: Settles) -> Answers:
        birth, version, holders = settles.birth.copy(), settles.version.copy(), settles.holders.tolist()[:]
        there = await self.standing(topic, now_ms, settles.ids)
        for at, id in enumerate(settles.ids.tolist()):
            if id in there:
                rows, row = there[id]
                birth[at], version[at] = rows.birth[row], rows.version[row]
                holders[at] = rows.holders[row] or holders[at]
        loose = dataclasses.replace(settles, birth=birth, version=version, holders=Ragged.of(holders))
        return await super().settle(topic, now_ms, loose)


class CursorSkip(_Planted):
    """Takes the last due that it leased in a bucket for a floor: what comes due below it is never found."""

    def __init__(self) -> None:
        super().__init__()
        self._floor: dict[tuple[int, int], int] = {}

    async def lease_due(
        self,
        topic: Topic,
        buckets: Sequence[int] | None,
        now_ms: int,
        due_before_ms: int,
        grants: Sequence[Grant],
        overdue_ms: int = 0,
    ) -> Leased:
        asked = list(range(topic.settings.buckets)) if buckets is None else buckets
        seen = [bucket for bucket in asked if await self._above(topic, bucket)]
        leased = await super().lease_due(topic, seen, now_ms, due_before_ms, grants, overdue_ms)
        for id, due_ms in zip(leased.rows.ids.tolist(), leased.was_due_ms.tolist(), strict=True):
            key = topic.uid, bucket_of(id, topic.settings.buckets)
            self._floor[key] = max(self._floor.get(key, 0), due_ms)
        return leased

    async def _above(self, topic: Topic, bucket: int) -> bool:
        first = await self.next_due(topic, [bucket], -1)
        return first is None or first >= self._floor.get((topic.uid, bucket), 0)


class RoundsDown(_Planted):
    """Keeps dues in whole tenths of a second, rounded down."""

    async def put(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        return await super().put(topic, now_ms, dataclasses.replace(puts, due_ms=puts.due_ms // 100 * 100))


class Resurrects(_Planted):
    """Writes a cancelled message back when it next looks for what is due."""

    def __init__(self) -> None:
        super().__init__()
        self._ghosts: list[tuple[Topic, Puts]] = []

    async def mutate(self, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
        there = await self.standing(topic, now_ms, mutations.ids, payload=True)
        answers = await super().mutate(topic, now_ms, mutations)
        if mutations.operation is Operation.CANCEL:
            for at in np.flatnonzero(answers.status == OK).tolist():
                if mutations.ids[at] in there:
                    self._ghosts.append((topic, _as_put(*there[mutations.ids[at]])))
        return answers

    async def lease_due(
        self,
        topic: Topic,
        buckets: Sequence[int] | None,
        now_ms: int,
        due_before_ms: int,
        grants: Sequence[Grant],
        overdue_ms: int = 0,
    ) -> Leased:
        ghosts, self._ghosts = self._ghosts, []
        for where, puts in ghosts:
            await super().put(where, now_ms, puts)
        return await super().lease_due(topic, buckets, now_ms, due_before_ms, grants, overdue_ms)


def _as_put(rows: Rows, at: int) -> Puts:
    one = rows.take(np.array([at]))
    assert one.payloads is not None and one.headers is not None
    return Puts(
        ids=one.ids,
        birth=one.birth,
        due_ms=one.due_ms,
        expires_ms=one.expires_ms,
        groups=one.groups,
        tags=one.tags,
        payload_sum=one.payload_sum,
        payloads=one.payloads,
        headers=one.headers,
        move=np.zeros(1, dtype=np.bool_),
    )


class IgnoresExtends(_Planted):
    """Answers an extend as it should, and leases again at the end of the lease as it was."""

    async def settle(self, topic: Topic, now_ms: int, settles: Settles) -> Answers:
        extends = settles.operation == Operation.EXTEND
        kept = dataclasses.replace(settles, time_ms=np.where(extends, 0, settles.time_ms))
        answers = await super().settle(topic, now_ms, kept)
        answers.due_ms = np.where(extends & (answers.status == OK), settles.time_ms, answers.due_ms)
        return answers


class ForgetsCalls(_Planted):
    """Does not recognise a call that is sent again."""

    def __init__(self) -> None:
        super().__init__()
        self._made = 1 << 40

    def _fresh(self) -> int:
        self._made += 1
        return self._made

    async def mutate(self, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
        ops = np.array([self._fresh() for _ in range(len(mutations))], dtype=np.uint64)
        return await super().mutate(topic, now_ms, dataclasses.replace(mutations, op=ops))

    async def mutate_tag(self, topic: Topic, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
        return await super().mutate_tag(topic, now_ms, dataclasses.replace(mutation, op=self._fresh()), cursor, limit)


class EagerIntake(Intake):
    """Answers OK for ids that are free, and stores them afterwards; asks the store for all others."""

    async def put(self, topic: Topic, puts: Puts, deadline_ms: float) -> Answers:
        inner = self._store.store.inner  # type: ignore[attr-defined]
        there = await inner.scan(topic, 0, ScanFilter(ALL, ids=puts.ids), b"", 100_000, False)
        if len(there.rows) or topic.settings.remember_ms:
            return await super().put(topic, puts, deadline_ms)
        self._tasks.spawn(self._later(topic, puts, deadline_ms), "eager put")
        answers = Answers.blank(len(puts))
        answers.version[:], answers.due_ms = 1, puts.due_ms.copy()
        return answers

    async def _later(self, topic: Topic, puts: Puts, deadline_ms: float) -> None:
        await super().put(topic, puts, deadline_ms)


class EagerNode(Node):
    """A broker that answers before the commit."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.intake.__class__ = EagerIntake
