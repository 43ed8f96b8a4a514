"""The tools of a check: a store, fresh topics, short ways to ask and to expect.

Times are explicit; a check moves on by naming later ones. Births and operation ids count up, so that a run repeats
itself. Topic names and uids are random, so that runs may share a server.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, TypeAlias, TypeVar

import numpy as np

from timeline.columns import ColumnBatch, Field, Ragged
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
MOST_STEPS = 3_000
LEFT_OUT = object()
EVERY_STATE = frozenset((State.WAITING, State.AVAILABLE, State.LEASED, State.DEAD))
SETTINGS = {field.name for field in fields(TopicSettings)}

MakeStore: TypeAlias = Callable[[], Store]
Many: TypeAlias = Any
"""One value for all, or a sequence with one each."""
Call: TypeAlias = Puts | Settles | Mutations

B = TypeVar("B", bound=ColumnBatch)
Step = TypeVar("Step", Page, TagStep)


class StoreViolation(AssertionError):
    """A promise is broken. The text says what was found."""


def expect(holds: object, found: str) -> None:
    """Raise StoreViolation with what was `found` unless it `holds`."""
    if not holds:
        raise StoreViolation(found)


def expect_equal(found: object, wanted: object, what: str) -> None:
    """Raise StoreViolation unless both are equal. `what` names them."""
    if found != wanted:
        raise StoreViolation(f"{what}: {_short(found)} where {_short(wanted)} must be")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 600 else f"{text[:600]}…"


def statuses(answers: Answers) -> list[Status]:
    """Return the statuses as words."""
    return [Status.of(int(code)) for code in answers.status]


SHORT = {"group": "groups", "tag": "tags", "payload": "payloads", "holder": "holders", "reason": "reasons"}
"""Arguments that are called otherwise than their columns."""


def batch_of(kind: type[B], count: int, **values: Many) -> B:
    """Return `count` messages, blank but for these columns: one value for all, or a sequence with one each."""
    given = {SHORT.get(name, name): value for name, value in values.items()}
    names = {field.name: field for field in kind.columns}
    return kind.filled(count, **{name: _column(names[name], value, count) for name, value in given.items()})


def _column(field: Field, value: Many, count: int) -> Any:
    if field.kind == "numbers":
        return np.array(np.broadcast_to(np.asarray(value, dtype=field.dtype), (count,)))
    if field.kind == "strings" and not isinstance(value, Ragged):
        return Ragged.repeat(value, count) if isinstance(value, bytes) else Ragged.of(list(value))
    return value


def named(count: int, prefix: str = "m") -> list[bytes]:
    """Return ids whose order as bytes is that of their numbers."""
    return [f"{prefix}-{number:06}".encode() for number in range(count)]


async def sent(store: Store, topic: Topic, now_ms: int, call: Call) -> Answers:
    """Put, settle or mutate."""
    if isinstance(call, Puts):
        return await store.put(topic, now_ms, call)
    if isinstance(call, Settles):
        return await store.settle(topic, now_ms, call)
    return await store.mutate(topic, now_ms, call)


def named_call(call: Call, at: int = 0) -> str:
    """Return the name of a call, for people: that of its message `at`."""
    if isinstance(call, Mutations):
        return call.operation.name.lower()
    if isinstance(call, Puts) or not len(call):
        return "put" if isinstance(call, Puts) else "settle"
    return Operation(int(call.operation[at])).name.lower()


class Trial:
    """One check's store and topics. `async with` opens the store; leaving it drops the topics and closes it."""

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
        """Close the store and open another one on the same data."""
        await self.store.close()
        self.store = self.make()
        self.opened = await self.store.open()

    def number(self) -> int:
        """Return a birth or operation id that was not used before."""
        self._counter += 1
        return self._counter

    def numbers(self, count: int) -> Any:
        """Return `count` of them."""
        self._counter += count
        return np.arange(self._counter - count + 1, self._counter + 1, dtype=np.uint64)

    # ── topics ──

    def record(self, **settings: Any) -> Topic:
        """Return a topic record under a new name."""
        name = f"check-{secrets.token_hex(8)}"
        return Topic(name, 1 + secrets.randbits(62), TopicSettings(**settings).check(), created_ms=T0)

    async def topic(self, **settings: Any) -> Topic:
        """Create a topic, which is dropped at the end."""
        record = await self.store.create_topic(self.record(**settings))
        self._topics.append(record)
        return record

    async def topic_with(self, ids: Sequence[bytes], due_ms: Many = T0, **more: Any) -> Topic:
        """Create a topic and put messages into it. `more`: its settings, and arguments of `put`."""
        topic = await self.topic(**{name: value for name, value in more.items() if name in SETTINGS})
        await self.stored(topic, ids, due_ms, **{name: value for name, value in more.items() if name not in SETTINGS})
        return topic

    def drop_later(self, topic: Topic) -> None:
        """Drop a topic at the end that the check made by itself."""
        self._topics.append(topic)

    # ── messages ──

    def puts(self, ids: Sequence[bytes], due_ms: Many = T0, **columns: Many) -> Puts:
        """Return a batch to put."""
        plain = {"payload": b"payload", "headers": b"", "tag": b"", "group": b"default", "expires_ms": 0}
        values = {"birth": self.numbers(len(ids)), "move": False, "replace": False, **plain, **columns}
        puts = batch_of(Puts, len(ids), ids=ids, due_ms=due_ms, payload_sum=0, **values)
        puts.payload_sum = payload_sums(puts.payloads, puts.headers)
        return puts

    def settles(self, operation: Many, rows: Rows, **columns: Many) -> Settles:
        """Return settles of `rows` with their own tokens, unless other ones are given."""
        tokens = {"ids": rows.ids, "birth": rows.birth, "version": rows.version, "holders": rows.holders}
        given = {SHORT.get(name, name): value for name, value in columns.items()}
        values = tokens | {"op": self.numbers(len(rows)), "time_ms": 0, "unseen": False, "reasons": b""} | given
        return batch_of(Settles, len(rows), operation=operation, **values)

    def mutations(self, operation: Operation, ids: Sequence[bytes], due_ms: Many = 0, **columns: Many) -> Mutations:
        """Return moves, cancels, revives or purges."""
        plain = {"group": b"default", "if_version": 0, "leased": False}
        values = {"op": self.numbers(len(ids)), **plain, **columns}
        return batch_of(Mutations, len(ids), operation=operation, ids=ids, due_ms=due_ms, **values)

    async def send(self, topic: Topic, call: Call, now_ms: int = T0, *, wanted: Many = None) -> Answers:
        """Put, settle or mutate. `wanted`: the status that every message must answer, of which there must be one; or
        a list with a status each."""
        answers = await sent(self.store, topic, now_ms, call)
        if wanted is not None:
            each = [wanted] * max(1, len(call)) if isinstance(wanted, Status) else wanted
            expect_equal(statuses(answers), each, f"statuses of a {named_call(call)} at T0 + {now_ms - T0}")
        return answers

    async def put(
        self,
        topic: Topic,
        ids: Sequence[bytes],
        due_ms: Many = T0,
        *,
        now_ms: int = T0,
        wanted: Many = None,
        **columns: Many,
    ) -> Answers:
        """Put messages. `columns`: those of `Puts`. `wanted`: see `send`."""
        return await self.send(topic, self.puts(ids, due_ms, **columns), now_ms, wanted=wanted)

    async def stored(self, topic: Topic, ids: Sequence[bytes], due_ms: Many = T0, **more: Any) -> None:
        """Put what must be stored."""
        await self.put(topic, ids, due_ms, **more, wanted=Status.OK if ids else None)

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
        wanted: int | Sequence[bytes] | None = None,
        next_due_ms: Any = LEFT_OUT,
    ) -> LeasedRows:
        """Lease for one worker, or for `grants`. `wanted`: how many must be leased, or which ids, in any order.
        `next_due_ms`: what must be answered."""
        if grants is None:
            grants = [Grant(holder, count, lease_ms, max_bytes, alone)]
        leased = await self.store.lease_due(topic, buckets, now_ms, due_before_ms, grants, overdue_ms)
        if isinstance(wanted, int):
            expect_equal(len(leased.rows), wanted, f"number leased at T0 + {now_ms - T0}")
        elif wanted is not None:
            expect_equal(sorted(leased.rows.ids), sorted(wanted), f"ids leased at T0 + {now_ms - T0}")
        if next_due_ms is not LEFT_OUT:
            expect_equal(leased.next_due_ms, next_due_ms, f"next_due_ms of a lease at T0 + {now_ms - T0}")
        return leased

    async def settle(
        self, topic: Topic, operation: Many, rows: Rows, *, now_ms: int = T0, wanted: Many = None, **columns: Many
    ) -> Answers:
        """Settle `rows`, with their own tokens unless others are given. `columns`: those of `Settles`."""
        return await self.send(topic, self.settles(operation, rows, **columns), now_ms, wanted=wanted)

    async def mutate(
        self,
        topic: Topic,
        operation: Operation,
        ids: Sequence[bytes],
        due_ms: Many = 0,
        *,
        now_ms: int = T0,
        wanted: Many = None,
        **columns: Many,
    ) -> Answers:
        """Move, cancel, revive or purge. `columns`: those of `Mutations`."""
        return await self.send(topic, self.mutations(operation, ids, due_ms, **columns), now_ms, wanted=wanted)

    async def by_tag(
        self, topic: Topic, operation: Operation, tag: bytes, *, now_ms: int = T0, limit: int = 7, **more: Any
    ) -> dict[Status, int]:
        """Do a whole tag operation in chunks of `limit`, and return how many answered what."""
        wanted = {"group": b"default", "started_ms": now_ms, "op": self.number(), **more}
        mutation = TagMutation(operation=operation, tag=tag, **wanted)
        return await tag_counts(self.store, topic, now_ms, mutation, limit)

    async def scan(
        self,
        topic: Topic,
        *,
        now_ms: int = T0,
        limit: int = 1000,
        payload: bool = False,
        wanted: Sequence[bytes] | None = None,
        **where: Any,
    ) -> Rows:
        """Return all rows that match, read page by page. `wanted`: which ids these must be, in any order."""
        found: list[Rows] = []
        which = ScanFilter(**where)
        async for part in walked(lambda cursor: self.store.scan(topic, now_ms, which, cursor, limit, payload)):
            expect(len(part.rows) <= limit, f"a page of at most {limit} rows has {len(part.rows)}")
            found.append(part.rows)
        rows = Rows.concat(found)
        if wanted is not None:
            expect_equal(sorted(rows.ids), sorted(wanted), f"ids of a scan in pages of {limit}: {where or 'all'}")
        return rows

    async def everything(self, topic: Topic, *, now_ms: int = T0) -> dict[bytes, dict[str, Any]]:
        """Return each row, dead letters too, with all of its fields and its payload, by id."""
        return by_id(await self.scan(topic, now_ms=now_ms, payload=True, states=EVERY_STATE))

    async def row(self, topic: Topic, id: bytes, *, now_ms: int = T0) -> dict[str, Any]:
        """Return the fields of the message under `id`, which must be there."""
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


async def tag_counts(store: Store, topic: Topic, now_ms: int, mutation: TagMutation, limit: int) -> dict[Status, int]:
    """Return how many messages answered what to a whole tag operation, asked in chunks of `limit`."""
    total: dict[Status, int] = {}
    async for step in walked(lambda cursor: store.mutate_tag(topic, now_ms, mutation, cursor, limit)):
        expect(sum(step.counts.values()) <= limit, f"a chunk of at most {limit} counted {step.counts}")
        for code, count in step.counts.items():
            total[Status.of(code)] = total.get(Status.of(code), 0) + count
    return {status: count for status, count in total.items() if count}


def plain(rows: Rows) -> Iterator[dict[str, Any]]:
    """Yield each row as its columns' plain values by name."""
    names = [field.name for field in Rows.columns if getattr(rows, field.name) is not None]
    for values in zip(*(getattr(rows, name).tolist() for name in names), strict=True):
        yield dict(zip(names, values, strict=True))


def by_id(rows: Rows) -> dict[bytes, dict[str, Any]]:
    """Return rows as plain values, by id."""
    found: dict[bytes, dict[str, Any]] = {}
    for row in plain(rows):
        expect(row["ids"] not in found, f"{row['ids']!r} is there twice")
        found[row["ids"]] = row
    return found
