"""Bugs to plant: each is one mistake that a store, a broker or a driver could make, everything else being the real
thing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tests.simulation.gauges import ROOMY
from timeline.broker import consuming
from timeline.broker.intake import Intake
from timeline.broker.node import Node
from timeline.broker.roster import Consumer, Roster
from timeline.columns import Ragged
from timeline.driver.offset import BrokerClock
from timeline.model import Answers, Operation, Rows, State, Status, Topic, bucket_of
from timeline.storage_plugins.contract import (
    Grant,
    Leased,
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


class NeverSweeps(_Planted):
    """Finds nothing where membership says that others deal."""

    async def lease_due(
        self,
        topic: Topic,
        buckets: Sequence[int] | None,
        now_ms: int,
        due_before_ms: int,
        grants: Sequence[Grant],
        overdue_ms: int = 0,
    ) -> Leased:
        asked = [] if overdue_ms else buckets
        return await super().lease_due(topic, asked, now_ms, due_before_ms, grants, overdue_ms)


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

    async def lease_due(self, topic: Topic, *asked: Any, **named: Any) -> Leased:
        leased = await super().lease_due(topic, *asked, **named)
        self._mix(topic, leased.rows)
        return leased

    def _mix(self, topic: Topic, rows: Rows) -> None:
        if rows.payloads is not None:
            payloads = zip(rows.ids.tolist(), rows.payloads.tolist(), strict=True)
            rows.payloads = Ragged.of([self._wrong.get((topic.uid, id), payload) for id, payload in payloads])


class BottomlessNode(Node):
    """A broker whose intake takes whatever comes."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.intake._limits = ROOMY


@contextmanager
def instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`value` in the place of what `owner` has under `name`, for a while."""
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def same_turn() -> Any:
    """Each dealing round begins with the same consumer."""
    return instead(Roster, "dealt_last", lambda roster, consumer: None)


def leaves_one_out() -> Any:
    """The last in order is never dealt to while there are others."""
    ready = Roster.ready

    def some(roster: Roster, now_ms: float) -> list[Consumer]:
        able = sorted(ready(roster, now_ms), key=lambda consumer: consumer.id)
        return able[:-1] if len(roster.consumers) > 1 else able

    return instead(Roster, "ready", some)


def credit_anyway() -> Any:
    """The credit of a Settle counts whatever was answered."""
    return instead(consuming, "credit_counts", lambda operation, status: True)


def always_idle() -> Any:
    """A message larger than the credit in bytes goes to whoever's turn it is."""
    return instead(Consumer, "idle", property(lambda consumer: True))


def endless_leases() -> Any:
    """A driver that takes leases for longer than they are."""
    ends = BrokerClock.monotonic_ms
    return instead(BrokerClock, "monotonic_ms", lambda clock, broker_ms: ends(clock, broker_ms) + 5_000.0)


def lets_again() -> Any:
    """Whoever reconnects gets again what it has in hand."""
    tokens = consuming._tokens
    return instead(consuming, "_tokens", lambda of: tokens(of) if isinstance(of, Rows) else set())
