"""The reference store: the smallest complete store, slow and plain. Start a storage plugin from a copy of it.

A topic is a dictionary of messages by id. `leases.decide` decides about each message, and `storage_plugins.asks`
translates between the columns of a call and the rules. Nothing here is fast: a lease sorts the whole topic. The
conformance suite holds other stores to the answers of this one.

To keep the state elsewhere, read `_cluster_uid`, `_topics` and `_rows` in `open`. These calls change them, and must
write them before they return: `create_topic`, `update_topic`, `drop_topic`, `put`, `settle`, `mutate`, `lease_due`,
`mutate_tag`, `sweep`. If the write fails, they undo the change and raise `StoreUnavailable`: nothing happened.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from timeline.columns import Int64, Ragged
from timeline.kinds import kind_of
from timeline.leases import Ask, Decision, Message, deal, decide, state_of
from timeline.leases.table import DELIVERED_OUT, is_expired
from timeline.model import MAX_PAYLOAD_BYTES, ROW_DTYPES, Answers, Operation, Rows, State, Status, Topic, bucket_of
from timeline.storage_plugins.asks import (
    cursor_at,
    fill,
    matches,
    mutation_asks,
    put_asks,
    removal,
    settle_asks,
    tag_ask,
)
from timeline.storage_plugins.contract import (
    PUT_NUMBERS,
    Capabilities,
    Grant,
    LeasedRows,
    Mutations,
    Opened,
    Page,
    Puts,
    ScanFilter,
    Settles,
    Store,
    StoreUnavailable,
    Swept,
    TagMutation,
    TagStep,
)
from timeline.storage_plugins.records import check_update, dropped, same_settings

PAGE_BYTES = 1024 * 1024
_KEPT = tuple(name for name in PUT_NUMBERS if name not in {field.name for field in fields(Message)})
"""The numbers of a put that only pass through: none as yet."""


@dataclass(slots=True)
class ReferenceRow:
    """A message: the part for the rules, and the rest. `settled_ms`: since when only its id is left."""

    id: bytes
    message: Message
    put_ms: int = 0
    tag: bytes = b""
    payload: bytes = b""
    headers: bytes = b""
    payload_bytes: int = 0
    settled_ms: int = 0
    kept: dict[str, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Its bytes in a grant and on a page."""
        return self.payload_bytes + len(self.headers)

    @property
    def lives(self) -> bool:
        """Whether it is neither dead nor settled."""
        return not self.message.remembered and not self.message.died_ms

    def named(self) -> dict[str, Any]:
        """Return its fields as the columns of `Rows` name them."""
        message = self.message
        return {
            **asdict(message),
            **self.kept,
            "ids": self.id,
            "put_ms": self.put_ms,
            "payload_bytes": self.payload_bytes,
            "groups": message.group,
            "holders": message.holder,
            "tags": self.tag,
            "payloads": self.payload,
            "headers": self.headers,
        }


def rows_of(found: Sequence[ReferenceRow], payload: bool) -> Rows:
    """Return messages as columns. A number of theirs that no put has given is 0."""
    named = [row.named() for row in found]
    texts = ("ids", "groups", "holders", "tags", "dead", *(("payloads", "headers") if payload else ()))
    columns: dict[str, Any] = {name: Ragged.of([one[name] for one in named]) for name in texts}
    for name, dtype in ROW_DTYPES.items():
        columns[name] = np.array([one.get(name, 0) for one in named], dtype=dtype)
    return Rows(**columns)


class ReferenceStore(Store):
    """A store in this process. `url` is not looked at."""

    capabilities = Capabilities(
        durable=False,
        survives_failover=False,
        shared=False,
        payload_limit_bytes=MAX_PAYLOAD_BYTES,
        own_clock=False,
        exact_counts=True,
        every_kind=True,
    )

    def __init__(self, url: str = "") -> None:
        self._cluster_uid = secrets.token_hex(16)
        self._open = False
        self._topics: dict[str, Topic] = {}
        self._rows: dict[int, dict[bytes, ReferenceRow]] = {}
        """By the topic's uid, then by the message's id."""

    async def open(self) -> Opened:
        self._open = True
        return Opened(self._cluster_uid, "this process's memory")

    async def inspect(self) -> Opened:
        await self.check()
        return await self.open()

    async def close(self) -> None:
        self._open = False
        self._topics.clear()
        self._rows.clear()

    async def check(self) -> None:
        if not self._open:
            raise StoreUnavailable("the store is not open")

    # ── topics ──

    async def topics(self) -> list[Topic]:
        await self.check()
        return [self._topics[name] for name in sorted(self._topics)]

    async def create_topic(self, topic: Topic) -> Topic:
        await self.check()
        if topic.name in self._topics:
            return same_settings(self._topics[topic.name], topic)
        self._topics[topic.name] = topic
        self._rows[topic.uid] = {}
        return topic

    async def update_topic(self, topic: Topic) -> Topic:
        await self.check()
        self._topics[topic.name] = check_update(self._topics.get(topic.name), topic)
        return self._topics[topic.name]

    async def drop_topic(self, topic: Topic) -> bool:
        await self.check()
        standing = self._topics.get(topic.name)
        if standing is None or standing.uid != topic.uid:
            return False
        del self._topics[topic.name], self._rows[topic.uid]
        return True

    # ── one message ──

    def rows(self, topic: Topic) -> dict[bytes, ReferenceRow]:
        """Return the topic's messages by id; none when it was dropped. Raise StoreUnavailable when it is not open."""
        if not self._open:
            raise StoreUnavailable("the store is not open")
        return self._rows.get(topic.uid, {})

    def decide(self, topic: Topic, id: bytes, ask: Ask, now_ms: int) -> Decision:
        """Decide `ask` for the message under `id`, and do it; a put of a new message is left to the caller."""
        rows, settings = self.rows(topic), topic.settings
        row = rows.get(id)
        if row is not None and row.message.remembered and row.settled_ms <= now_ms - settings.remember_ms:
            row = None
        decision = decide(row.message if row else None, ask, now_ms, settings)
        if row is None:
            return decision
        gone = removal(ask, decision)
        if gone is not None:
            last_op, remembers = gone
            self.remove(topic, row, now_ms, remembers, last_op)
        elif decision.status is Status.OK and decision.message is not None and not decision.born:
            row.message = decision.message
        return decision

    def remove(self, topic: Topic, row: ReferenceRow, now_ms: int, remembers: bool = True, last_op: int = 0) -> None:
        """Remove a message. Its id stays, where the call and the topic remember it."""
        rows, message = self._rows[topic.uid], row.message
        del rows[row.id]
        if remembers and topic.settings.remember_ms:
            left = Message(
                message.birth, message.version, last_op=last_op, payload_sum=message.payload_sum, remembered=True
            )
            rows[row.id] = ReferenceRow(row.id, left, settled_ms=now_ms)

    # ── many messages ──

    async def put(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        answers, rows = Answers.blank(len(puts)), self.rows(topic)
        if topic.uid not in self._rows:
            return dropped(topic, len(puts))
        for at, ask in enumerate(put_asks(puts)):
            id = puts.ids[at]
            decision = self.decide(topic, id, ask, now_ms)
            if decision.born and decision.message is not None:
                content = puts.payloads[at], puts.headers[at], int(puts.sizes[at])
                kept = {name: int(getattr(puts, name)[at]) for name in _KEPT}
                rows[id] = ReferenceRow(id, decision.message, now_ms, puts.tags[at], *content, kept=kept)
            fill(answers, at, decision)
        return answers

    async def settle(self, topic: Topic, now_ms: int, settles: Settles) -> Answers:
        return self._each(topic, now_ms, settles.ids, settle_asks(settles))

    async def mutate(self, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
        return self._each(topic, now_ms, mutations.ids, mutation_asks(mutations))

    def _each(self, topic: Topic, now_ms: int, ids: Ragged, asks: Sequence[Ask]) -> Answers:
        answers = Answers.blank(len(ids))
        self.rows(topic)
        if topic.uid not in self._rows:
            return dropped(topic, len(ids))
        for at, ask in enumerate(asks):
            fill(answers, at, self.decide(topic, ids[at], ask, now_ms))
        return answers

    async def lease_due(
        self,
        topic: Topic,
        buckets: Sequence[int] | None,
        now_ms: int,
        due_before_ms: int,
        grants: Sequence[Grant],
        overdue_ms: int = 0,
    ) -> LeasedRows:
        wanted, ahead_ms = sum(grant.count for grant in grants), 0 if overdue_ms else due_before_ms
        chosen: list[ReferenceRow] = []
        buried: list[ReferenceRow] = []
        expired = 0
        for row in self.in_order(topic, buckets):
            if len(chosen) == wanted:
                break
            if overdue_ms and row.message.due_ms > now_ms - overdue_ms:
                continue
            ask = Ask(Operation.LEASE, time_ms=1, holder=b"?", due_before_ms=ahead_ms)
            status = decide(row.message, ask, now_ms, topic.settings).status
            if status is Status.OK:
                chosen.append(row)
            elif status is Status.EXPIRED:
                self.remove(topic, row, now_ms)
                expired += 1
            elif status is Status.DEAD and row.message.due_ms <= now_ms:
                row.message = replace(row.message, dead=DELIVERED_OUT, died_ms=max(1, now_ms))
                buried.append(row)
        dealt = deal(grants, np.array([row.size for row in chosen], dtype=np.int64))
        chosen = chosen[: len(dealt)]
        before = [row.message for row in chosen]
        for row, index in zip(chosen, dealt.tolist(), strict=True):
            ask = Ask(Operation.LEASE, grants[index].lease_ms, holder=grants[index].holder, due_before_ms=ahead_ms)
            self.decide(topic, row.id, ask, now_ms)
        return LeasedRows(
            rows=rows_of(chosen, payload=True),
            grant=dealt,
            was_due_ms=np.array([message.due_ms for message in before], dtype=np.int64),
            prior_holders=Ragged.of([message.holder for message in before]),
            next_due_ms=min((self.leasable_ms(topic, row) for row in self.in_order(topic, buckets)), default=None),
            expired=expired,
            buried=rows_of(buried, payload=False),
        )

    def in_order(self, topic: Topic, buckets: Sequence[int] | None) -> list[ReferenceRow]:
        """Return what lives in `buckets`, in the order in which the topic's kind leases it."""
        kind, count = kind_of(topic.settings), topic.settings.buckets
        there = [row for row in self.rows(topic).values() if row.lives]
        if buckets is not None:
            there = [row for row in there if bucket_of(row.id, count) in buckets]
        return sorted(there, key=lambda row: kind.order(row.message, row.id))

    def leasable_ms(self, topic: Topic, row: ReferenceRow) -> int:
        """Return when a living message may be leased, its own lease apart."""
        if row.message.holder:
            return kind_of(topic.settings).due_after_expiry(row.message, topic.settings)
        return row.message.due_ms

    # ── walks: by bucket and id; a cursor is the place of the last message that was looked at ──

    def _walk(
        self, topic: Topic, cursor: bytes, limit: int, wanted: Callable[[ReferenceRow], bool], payload: bool = False
    ) -> tuple[list[ReferenceRow], bytes | None]:
        """Return up to `limit` of the messages that are `wanted`, and the next cursor. `payload`: a page of 1 MiB."""
        found: list[ReferenceRow] = []
        room, buckets = PAGE_BYTES, topic.settings.buckets
        rows = [row for row in self.rows(topic).values() if not row.message.remembered and wanted(row)]
        placed = sorted((cursor_at(bucket_of(row.id, buckets), row.id), row) for row in rows)
        for place, row in placed:
            if place <= cursor:
                continue
            if found and (len(found) >= limit or (payload and row.size > room)):
                return found, cursor
            found.append(row)
            room, cursor = room - row.size, place
        return found, None

    async def scan(
        self, topic: Topic, now_ms: int, where: ScanFilter, cursor: bytes, limit: int, payload: bool
    ) -> Page:
        ids = None if where.ids is None else set(where.ids.tolist())

        def wanted(row: ReferenceRow) -> bool:
            return matches(where, row.message, row.tag, now_ms) and (ids is None or row.id in ids)

        found, after = self._walk(topic, cursor, limit, wanted, payload)
        return Page(rows_of(found, payload), after)

    async def held_by(self, topic: Topic, now_ms: int, holder: bytes, cursor: bytes, limit: int) -> Page:
        def wanted(row: ReferenceRow) -> bool:
            return row.message.holder == holder and state_of(row.message, now_ms) is State.LEASED

        found, after = self._walk(topic, cursor, limit, wanted, payload=True)
        return Page(rows_of(found, payload=True), after)

    async def mutate_tag(self, topic: Topic, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
        def wanted(row: ReferenceRow) -> bool:
            message = row.message
            return row.tag == mutation.tag != b"" and mutation.meets(row.put_ms, message.asked_ms, message.last_op)

        found, after = self._walk(topic, cursor, limit, wanted)
        counts: dict[int, int] = {}
        moved: list[int] = []
        for row in found:
            ask, status = tag_ask(mutation, row.message), Status.INVALID
            if ask is not None and mutation.dry_run:
                status = decide(row.message, ask, now_ms, topic.settings).status
            elif ask is not None:
                decision = self.decide(topic, row.id, ask, now_ms)
                status = decision.status
                if status is Status.OK and decision.message is not None:
                    moved.append(decision.message.due_ms)
            counts[status.code] = counts.get(status.code, 0) + 1
        return TagStep(counts, after, min(moved, default=None))

    # ── counts and sweeps ──

    async def count_due(self, topic: Topic, edges_ms: Int64, held: bool = False) -> Int64:
        living = [row.message for row in self.rows(topic).values() if row.lives]
        due_ms = [message.due_ms for message in living if bool(message.holder) is held]
        places = np.searchsorted(edges_ms, np.array(due_ms, dtype=np.int64), "right")
        return np.bincount(places, minlength=len(edges_ms) + 1)[1 : max(1, len(edges_ms))].astype(np.int64)

    async def next_due(self, topic: Topic, buckets: Sequence[int] | None, after_ms: int) -> int | None:
        due_ms = [row.message.due_ms for row in self.in_order(topic, buckets)]
        return min((one for one in due_ms if one > after_ms), default=None)

    async def sweep(self, topic: Topic, now_ms: int, limit: int) -> Swept:
        rows, settings, limit = list(self.rows(topic).values()), topic.settings, max(1, limit)
        forgotten_ms, purged_ms = now_ms - settings.remember_ms, now_ms - settings.dead_retention_ms
        expired = [row for row in rows if not row.message.remembered and is_expired(row.message, now_ms)]
        forgotten = [row for row in rows if row.message.remembered and row.settled_ms <= forgotten_ms]
        dead = [row for row in rows if settings.dead_retention_ms and 0 < row.message.died_ms <= purged_ms]
        for row in expired[:limit]:
            self.remove(topic, row, now_ms)
        for row in forgotten[:limit] + dead[:limit]:
            self.remove(topic, row, now_ms, remembers=False)
        counts = [len(one) for one in (expired, forgotten, dead)]
        removed = [min(count, limit) for count in counts]
        return Swept(expired=removed[0], forgotten=removed[1], dead_purged=removed[2], more=max(counts) > limit)
