"""What a check works with: a store, fresh topics, short ways to ask, and `expect`.

Times are explicit; a check moves on by naming later ones. Births and operation ids count up, so that a run repeats
itself; only topic names and uids are random, so that runs may share a server.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from timeline.columns import Ragged
from timeline.model import Answers, Operation, Rows, State, Status, Topic, TopicSettings, payload_sums
from timeline.storage_plugins.contract import (
    Grant,
    LeasedRows,
    Mutations,
    Page,
    Puts,
    ScanFilter,
    Settles,
    Store,
    TagMutation,
    TagStep,
)

T0 = 1_750_000_000_000
"""When checks begin, in milliseconds UTC."""
PLENTY = 1 << 40
WORKER = b"worker-1"

MakeStore: TypeAlias = Callable[[], Store]
Many: TypeAlias = Any
"""One value for all, or a sequence with one each."""


Step = TypeVar("Step", Page, TagStep)
MOST_STEPS = 3_000


class StoreViolation(AssertionError):
    """Something that must hold does not; the text says what was seen."""


def expect(holds: object, found: str) -> None:
    """Raises StoreViolation with what was `found` unless it `holds`."""
    if not holds:
        raise StoreViolation(found)


def expect_equal(found: object, wanted: object, what: str) -> None:
    """Raises StoreViolation unless both are the same; `what` names them."""
    if found != wanted:
        raise StoreViolation(f"{what}: {_short(found)} where {_short(wanted)} must be")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 600 else f"{text[:600]}…"


def statuses(answers: Answers) -> list[Status]:
    """The statuses as words."""
    return [Status.of(int(code)) for code in answers.status]


def ragged(values: Many, count: int) -> Ragged:
    """A column of `count` byte strings."""
    return Ragged.repeat(values, count) if isinstance(values, bytes) else Ragged.of(list(values))


def column(values: Many, count: int, dtype: Any) -> Any:
    """A column of `count` numbers."""
    return np.array(np.broadcast_to(np.asarray(values, dtype=dtype), (count,)))


def named(count: int, prefix: str = "m") -> list[bytes]:
    """Ids whose order as bytes is that of their numbers."""
    return [f"{prefix}-{number:06}".encode() for number in range(count)]


class Trial:
    """One check's store and topics. `async with` opens the store; leaving drops the topics and closes it."""

    def __init__(self, make: MakeStore) -> None:
        self.make = make
        self.store = make()
        self._topics: list[Topic] = []
        self._counter = 1 << 40

    async def __aenter__(self) -> Trial:
        self.opened = await self.store.open()
        return self

    async def __aexit__(self, kind: object, found: BaseException | None, trace: object) -> None:
        try:
            for topic in self._topics:
                await self.store.drop_topic(topic)
        except Exception as trouble:
            if found is None:
                raise
            # What the check found comes first: this may well follow from it.
            found.add_note(f"Then dropping the check's topics raised {type(trouble).__name__}: {trouble}")
        finally:
            await self.store.close()

    async def reopen(self) -> None:
        """Closes the store and opens another one on the same data."""
        await self.store.close()
        self.store = self.make()
        self.opened = await self.store.open()

    def number(self) -> int:
        """A birth or operation id that was not used before."""
        self._counter += 1
        return self._counter

    def numbers(self, count: int) -> Any:
        """`count` of them."""
        self._counter += count
        return np.arange(self._counter - count + 1, self._counter + 1, dtype=np.uint64)

    # ── topics ──

    def record(self, **settings: Any) -> Topic:
        """A topic record under a name nobody has."""
        name = f"check-{secrets.token_hex(8)}"
        return Topic(name, 1 + secrets.randbits(62), TopicSettings(**settings).check(), created_ms=T0)

    async def topic(self, **settings: Any) -> Topic:
        """A fresh topic, dropped at the end."""
        record = await self.store.create_topic(self.record(**settings))
        self._topics.append(record)
        return record

    def drop_later(self, topic: Topic) -> None:
        """Drops a topic at the end that the check made by itself."""
        self._topics.append(topic)

    # ── messages ──

    def puts(
        self,
        ids: Sequence[bytes],
        due_ms: Many = T0,
        *,
        birth: Many = None,
        expires_ms: Many = 0,
        group: Many = b"default",
        tag: Many = b"",
        payload: Many = b"payload",
        headers: Many = b"",
        move: Many = False,
        replace: Many = False,
    ) -> Puts:
        """A batch to put."""
        count = len(ids)
        payloads, encoded = ragged(payload, count), ragged(headers, count)
        return Puts(
            ids=Ragged.of(list(ids)),
            birth=self.numbers(count) if birth is None else column(birth, count, np.uint64),
            due_ms=column(due_ms, count, np.int64),
            expires_ms=column(expires_ms, count, np.int64),
            groups=ragged(group, count),
            tags=ragged(tag, count),
            payload_sum=payload_sums(payloads, encoded),
            payloads=payloads,
            headers=encoded,
            move=column(move, count, np.bool_),
            replace=column(replace, count, np.bool_),
        )

    async def put(
        self, topic: Topic, ids: Sequence[bytes], due_ms: Many = T0, *, now_ms: int = T0, **more: Any
    ) -> Answers:
        """Puts and answers."""
        return await self.store.put(topic, now_ms, self.puts(ids, due_ms, **more))

    async def stored(self, topic: Topic, ids: Sequence[bytes], due_ms: Many = T0, **more: Any) -> None:
        """Puts what must be stored."""
        answers = await self.put(topic, ids, due_ms, **more)
        expect_equal(set(statuses(answers)), {Status.OK} if ids else set(), "statuses of puts of new ids")

    async def lease(
        self,
        topic: Topic,
        count: int = 100_000,
        *,
        now_ms: int = T0,
        holder: bytes = WORKER,
        lease_ms: int = 30_000,
        max_bytes: int = PLENTY,
        alone: bool = False,
        due_before_ms: int = 0,
        buckets: Sequence[int] | None = None,
        grants: Sequence[Grant] | None = None,
        overdue_ms: int = 0,
    ) -> LeasedRows:
        """Leases for one worker, or for `grants`."""
        if grants is None:
            grants = [Grant(holder, count, lease_ms, max_bytes, alone)]
        return await self.store.lease_due(topic, buckets, now_ms, due_before_ms, grants, overdue_ms)

    async def settle(
        self,
        topic: Topic,
        operation: Many,
        rows: Rows,
        *,
        now_ms: int = T0,
        time_ms: Many = 0,
        op: Many = None,
        unseen: Many = False,
        reason: Many = b"",
        holder: Many = None,
        version: Many = None,
        birth: Many = None,
    ) -> Answers:
        """Settles `rows` with their own tokens unless told otherwise."""
        count = len(rows)
        settles = Settles(
            ids=rows.ids,
            birth=rows.birth if birth is None else column(birth, count, np.uint64),
            version=rows.version if version is None else column(version, count, np.int64),
            holders=rows.holders if holder is None else ragged(holder, count),
            operation=column(operation, count, np.uint8),
            time_ms=column(time_ms, count, np.int64),
            op=self.numbers(count) if op is None else column(op, count, np.uint64),
            unseen=column(unseen, count, np.bool_),
            reasons=ragged(reason, count),
        )
        return await self.store.settle(topic, now_ms, settles)

    async def mutate(
        self,
        topic: Topic,
        operation: Operation,
        ids: Sequence[bytes],
        due_ms: Many = 0,
        *,
        now_ms: int = T0,
        group: Many = b"default",
        if_version: Many = 0,
        leased: Many = False,
        op: Many = None,
    ) -> Answers:
        """Moves, cancels, revives or purges."""
        count = len(ids)
        mutations = Mutations(
            operation=operation,
            ids=Ragged.of(list(ids)),
            groups=ragged(group, count),
            due_ms=column(due_ms, count, np.int64),
            if_version=column(if_version, count, np.int64),
            leased=column(leased, count, np.bool_),
            op=self.numbers(count) if op is None else column(op, count, np.uint64),
        )
        return await self.store.mutate(topic, now_ms, mutations)

    async def by_tag(
        self, topic: Topic, operation: Operation, tag: bytes, *, now_ms: int = T0, limit: int = 7, **more: Any
    ) -> dict[Status, int]:
        """A whole tag operation in chunks of `limit`: how many answered what."""
        wanted = {"group": b"default", "started_ms": now_ms, "op": self.number(), **more}
        mutation = TagMutation(operation=operation, tag=tag, **wanted)
        total: dict[Status, int] = {}

        async def chunk(cursor: bytes) -> TagStep:
            return await self.store.mutate_tag(topic, now_ms, mutation, cursor, limit)

        async for step in walked(chunk):
            expect(sum(step.counts.values()) <= limit, f"a chunk of at most {limit} counted {step.counts}")
            for code, count in step.counts.items():
                total[Status.of(code)] = total.get(Status.of(code), 0) + count
        return {status: count for status, count in total.items() if count}

    async def scan(
        self, topic: Topic, *, now_ms: int = T0, limit: int = 1000, payload: bool = False, **where: Any
    ) -> Rows:
        """All rows that match, page by page."""
        found: list[Rows] = []

        async def page(cursor: bytes) -> Page:
            return await self.store.scan(topic, now_ms, ScanFilter(**where), cursor, limit, payload)

        async for part in walked(page):
            expect(len(part.rows) <= limit, f"a page of at most {limit} rows has {len(part.rows)}")
            found.append(part.rows)
        return Rows.concat(found)

    async def everything(self, topic: Topic, *, now_ms: int = T0) -> dict[bytes, dict[str, Any]]:
        """Each row there is, dead letters too, with all of its fields and its payload, by id."""
        states = frozenset((State.WAITING, State.AVAILABLE, State.LEASED, State.DEAD))
        return by_id(await self.scan(topic, now_ms=now_ms, payload=True, states=states))

    async def row(self, topic: Topic, id: bytes, *, now_ms: int = T0) -> dict[str, Any]:
        """The fields of the message under `id`, which must be there."""
        found = (await self.everything(topic, now_ms=now_ms)).get(id)
        if found is None:
            raise StoreViolation(f"{id!r} is not in the store")
        return found


async def walked(step: Callable[[bytes], Awaitable[Step]]) -> AsyncIterator[Step]:
    """Yield the steps of a walk, `step(cursor)` each, until one has no cursor. Raise StoreViolation when none comes."""
    cursor = b""
    for _ in range(MOST_STEPS):
        taken = await step(cursor)
        yield taken
        if taken.cursor is None:
            return
        cursor = taken.cursor
    raise StoreViolation(f"a walk did not end within {MOST_STEPS:,} steps")


def by_id(rows: Rows) -> dict[bytes, dict[str, Any]]:
    """Rows as a dictionary of plain values."""
    names = [field.name for field in dataclasses.fields(Rows) if getattr(rows, field.name) is not None]
    columns = [getattr(rows, name).tolist() for name in names]
    found: dict[bytes, dict[str, Any]] = {}
    for values in zip(*columns, strict=True):
        row = dict(zip(names, values, strict=True))
        expect(row["ids"] not in found, f"{row['ids']!r} is there twice")
        found[row["ids"]] = row
    return found
