"""Stores with one mistake each, everything else being the real thing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from timeline.columns import Ragged
from timeline.model import Answers, Operation, Rows, Status, Topic, bucket_of
from timeline.storage_plugins.contract import (
    LeasedRows,
    Mutations,
    Puts,
    ScanFilter,
    Settles,
    StoreUnavailable,
    TagMutation,
    TagStep,
)
from timeline.storage_plugins.memory import MemoryStore

OK = Status.OK.code


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

    async def lease_due(self, topic: Topic, buckets: Sequence[int] | None, *asked: Any) -> LeasedRows:
        mine = range(topic.settings.buckets) if buckets is None else buckets
        seen = [bucket for bucket in mine if await self._above(topic, bucket)]
        leased = await super().lease_due(topic, seen, *asked)
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

    async def lease_due(self, topic: Topic, buckets: Sequence[int] | None, now_ms: int, *asked: Any) -> LeasedRows:
        ghosts, self._ghosts = self._ghosts, []
        for where, puts in ghosts:
            await super().put(where, now_ms, puts)
        return await super().lease_due(topic, buckets, now_ms, *asked)


def _as_put(rows: Rows, at: int) -> Puts:
    assert rows.payloads is not None and rows.headers is not None
    return Puts.of(rows.take(np.array([at])), payload_bytes=None)


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
        self._numbered = 1 << 40

    def _fresh(self) -> int:
        self._numbered += 1
        return self._numbered

    async def mutate(self, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
        ops = np.array([self._fresh() for _ in range(len(mutations))], dtype=np.uint64)
        return await super().mutate(topic, now_ms, dataclasses.replace(mutations, op=ops))

    async def mutate_tag(self, topic: Topic, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
        return await super().mutate_tag(topic, now_ms, dataclasses.replace(mutation, op=self._fresh()), cursor, limit)


class RefusesLateAcks(_Planted):
    """Answers FENCED to an ack after the lease ran out, though nobody has touched the message since."""

    async def settle(self, topic: Topic, now_ms: int, settles: Settles) -> Answers:
        there = await self.standing(topic, now_ms, settles.ids)
        late = [id in there and there[id][0].due_ms[there[id][1]] <= now_ms for id in settles.ids.tolist()]
        birth = np.where(np.array(late, dtype=np.bool_) & (settles.operation == Operation.ACK), 1, settles.birth)
        return await super().settle(topic, now_ms, dataclasses.replace(settles, birth=birth.astype(np.uint64)))


class MovesNothing(_Planted):
    """Answers a move as done, and leaves the message where it stands."""

    async def mutate(self, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
        if mutations.operation is not Operation.MOVE:
            return await super().mutate(topic, now_ms, mutations)
        there = await self.standing(topic, now_ms, mutations.ids)
        asked = mutations.due_ms
        kept = [
            there[id][0].due_ms[there[id][1]] if id in there else asked[at]
            for at, id in enumerate(mutations.ids.tolist())
        ]
        stays = dataclasses.replace(mutations, due_ms=np.array(kept, dtype=np.int64))
        answers = await super().mutate(topic, now_ms, stays)
        answers.due_ms = np.where(answers.status == OK, asked, answers.due_ms)
        return answers


class DeniesPuts(_Planted):
    """Now and then says of a put that nothing happened, when it had."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    async def put(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        answers = await super().put(topic, now_ms, puts)
        self._calls += 1
        if self._calls % 10 == 0:
            raise StoreUnavailable("it says")
        return answers


class SweepsNothing(_Planted):
    """Finds nothing where membership says that others deal."""

    async def lease_due(self, topic: Topic, buckets: Sequence[int] | None, *asked: Any) -> LeasedRows:
        overdue_ms = asked[-1]
        return await super().lease_due(topic, [] if overdue_ms else buckets, *asked)


class IgnoresVersions(_Planted):
    """Moves and cancels whatever version is there."""

    async def mutate(self, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
        any_version = dataclasses.replace(mutations, if_version=np.zeros(len(mutations), dtype=np.int64))
        return await super().mutate(topic, now_ms, any_version)


class LeasesByOldDues(_Planted):
    """Leases by the due that it read before a move: what was moved to later goes out when it would have been due."""

    def __init__(self) -> None:
        super().__init__()
        self._read: dict[tuple[int, bytes], int] = {}

    async def mutate(self, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
        there = await self.standing(topic, now_ms, mutations.ids)
        answers = await super().mutate(topic, now_ms, mutations)
        if mutations.operation is Operation.MOVE:
            for at in np.flatnonzero(answers.status == OK).tolist():
                rows, row = there[mutations.ids[at]]
                self._read[topic.uid, mutations.ids[at]] = int(rows.due_ms[row])
        return answers

    async def lease_due(self, topic: Topic, buckets: Sequence[int] | None, now_ms: int, *asked: Any) -> LeasedRows:
        for (uid, id), due_ms in list(self._read.items()):
            if uid == topic.uid and due_ms <= now_ms:
                del self._read[uid, id]
                for rows, row in (await self.standing(topic, now_ms, Ragged.of([id]))).values():
                    await super().mutate(topic, now_ms, _moved(rows, row, due_ms))
        return await super().lease_due(topic, buckets, now_ms, *asked)


def _moved(rows: Rows, at: int, due_ms: int) -> Mutations:
    one = rows.take(np.array([at]))
    zero = np.zeros(1, dtype=np.int64)
    return Mutations(
        operation=Operation.MOVE,
        ids=one.ids,
        groups=one.groups,
        due_ms=zero + due_ms,
        if_version=zero,
        leased=np.zeros(1, dtype=np.bool_),
        op=np.ones(1, dtype=np.uint64),
    )


class MixesPayloads(_Planted):
    """A put that is refused leaves its payload with the message that is there."""

    def __init__(self) -> None:
        super().__init__()
        self._wrong: dict[tuple[int, bytes], bytes] = {}

    async def put(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        answers = await super().put(topic, now_ms, puts)
        for at, id in enumerate(puts.ids.tolist()):
            if answers.status[at] == Status.EXISTS.code:
                self._wrong[topic.uid, id] = puts.payloads[at]
            elif answers.status[at] == OK:
                self._wrong.pop((topic.uid, id), None)
        return answers

    async def scan(self, topic: Topic, *asked: Any, **named: Any) -> Any:
        page = await super().scan(topic, *asked, **named)
        self._mix(topic, page.rows)
        return page

    async def lease_due(self, topic: Topic, *asked: Any, **named: Any) -> LeasedRows:
        leased = await super().lease_due(topic, *asked, **named)
        self._mix(topic, leased.rows)
        return leased

    def _mix(self, topic: Topic, rows: Rows) -> None:
        if rows.payloads is not None:
            payloads = zip(rows.ids.tolist(), rows.payloads.tolist(), strict=True)
            rows.payloads = Ragged.of([self._wrong.get((topic.uid, id), payload) for id, payload in payloads])


class TrustsMembership(_Planted):
    """In buckets that membership gives to a broker alone it leases by what it read up to two seconds ago, and compares
    no version: whoever else has leased it since had no right to."""

    def __init__(self) -> None:
        super().__init__()
        self._leased: dict[tuple[int, bytes], tuple[int, bytes]] = {}

    async def lease_due(
        self, topic: Topic, buckets: Sequence[int] | None, now_ms: int, due_before_ms: int, grants: Any, *asked: Any
    ) -> LeasedRows:
        if buckets is not None:
            mine = {grant.holder for grant in grants}
            for (uid, id), (when_ms, holder) in list(self._leased.items()):
                here = uid == topic.uid and bucket_of(id, topic.settings.buckets) in buckets
                if here and holder not in mine and 0 <= now_ms - when_ms < 2_000:
                    await self._forget_lease(topic, now_ms, id)
        leased = await super().lease_due(topic, buckets, now_ms, due_before_ms, grants, *asked)
        for id, holder in zip(leased.rows.ids.tolist(), leased.rows.holders.tolist(), strict=True):
            self._leased[topic.uid, id] = now_ms, holder
        return leased

    async def _forget_lease(self, topic: Topic, now_ms: int, id: bytes) -> None:
        for rows, row in (await self.standing(topic, now_ms, Ragged.of([id]))).values():
            one = rows.take(np.array([row]))
            if one.holders[0] and int(one.due_ms[0]) > now_ms:
                await super().settle(topic, now_ms, _released(one, now_ms))


def _released(one: Rows, now_ms: int) -> Settles:
    return Settles(
        ids=one.ids,
        birth=one.birth,
        version=one.version,
        holders=one.holders,
        operation=np.full(1, Operation.RELEASE, dtype=np.uint8),
        time_ms=np.full(1, now_ms, dtype=np.int64),
        op=np.ones(1, dtype=np.uint64),
        unseen=np.zeros(1, dtype=np.bool_),
        reasons=Ragged.of([b""]),
    )
