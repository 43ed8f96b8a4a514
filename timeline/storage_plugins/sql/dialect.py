"""The differences between the SQL stores: fragments of statements, how batches travel, and statements tuned by hand.
And what a call changes, for them to write. The modules beside this one have the logic that uses both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from timeline.columns import Int64, Ragged, UInt32
from timeline.leases import Ask, Decision, Message
from timeline.model import Topic
from timeline.storage_plugins.asks import removal
from timeline.storage_plugins.contract import Grant
from timeline.storage_plugins.sql import DEAD, EXPIRES, FREE, HELD, TAGGED
from timeline.storage_plugins.sql.rows import (
    FoundColumns,
    FoundMessage,
    MessageBatch,
    changing_columns,
    remembered_columns,
    remembered_of,
    stored_of,
)
from timeline.storage_plugins.sql.statements import Plan, Query, Statement

MANY_GRANTS = 8
"""Up to so many grants, each is written by a statement of its own. More are written by one with a due time and holder
for each row."""


@dataclass(frozen=True, slots=True)
class LeasedContent:
    """Content of the leased messages, and the indexes of those whose content is gone. `done`: which were leased at all
    (None: all)."""

    payloads: Ragged
    headers: Ragged
    gone: tuple[int, ...]
    done: Sequence[int] | None = None


class SqlDialect(ABC):
    """The base: SQL as SQLite has it, with partial indexes and comparisons of rows."""

    free: ClassVar[str] = FREE
    held: ClassVar[str] = HELD
    dead: ClassVar[str] = DEAD
    tagged: ClassVar[str] = TAGGED
    expires: ClassVar[str] = EXPIRES
    due: ClassVar[str] = "due_ms"
    """The column by which the timeline is indexed."""
    died: ClassVar[str] = "died_ms"
    locked: ClassVar[str] = ""
    """The clause that locks the rows that a SELECT returns."""
    passing: ClassVar[str] = ""
    """The same, skipping rows that others have locked."""
    claiming: ClassVar[str] = ""
    """The same, for a dropped topic whose rows are removed."""
    unless_named: ClassVar[str] = "ON CONFLICT (name) DO NOTHING"
    most_rows: ClassVar[int] = 1 << 62
    """The most rows of one look."""
    asks_first: ClassVar[bool] = True
    """Whether a lease asks when the next lease runs out, before it looks among those that have run out."""

    walks_dead: ClassVar[bool] = True
    """Whether dead letters have an index in the order of a walk."""

    def query(self, key: int = 0) -> Query:
        """Return a statement under construction, for rows of the topic `key`."""
        return Query(key)

    def text(self, text: str) -> Any:
        """Return a text as a value."""
        return text

    def quoted(self, name: str) -> str:
        """Return the name of a column that is a word of the grammar."""
        return name

    @abstractmethod
    def table(self, name: str) -> str:
        """Return the name of a table as statements have it."""

    @abstractmethod
    def along(self, index: str) -> str:
        """Return table `message` as m, read along an index."""

    def beyond(self, query: Query, columns: tuple[str, str], place: tuple[int, bytes]) -> str:
        """Return the condition that two columns are beyond a place in their order."""
        return f"({', '.join(columns)}) > ({query(place[0])}, {query(place[1])})"

    def up_to(self, query: Query, columns: tuple[str, str], place: tuple[int, bytes]) -> str:
        """Return the condition that two columns are not beyond a place in their order."""
        return f"({', '.join(columns)}) <= ({query(place[0])}, {query(place[1])})"

    @abstractmethod
    def in_buckets(self, query: Query, buckets: Sequence[int] | None) -> str:
        """Return ` AND` and the condition on these buckets."""

    def walk(self, query: Query, tag: bytes, dead: bool, after: tuple[int, bytes]) -> tuple[str, str]:
        """Return what is left of a walk over (bucket, id), as all that follows FROM, and the table whose `bucket` and
        `id` say its place. It walks one tag, dead letters, or all messages."""
        source = f"{self.along('message_tag' if tag else 'message_dead' if dead else 'message_id')} WHERE m.topic "
        source += query.topic
        if tag:
            source += f" AND {self.tagged} AND m.tag = {query(tag)}"
        elif dead:
            source += f" AND {self.dead}"
        return f"{source} AND {self.beyond(query, ('m.bucket', 'm.id'), after)}", "m"

    def expired(self, query: Query, now_ms: int) -> str:
        """Return the expired messages without a live lease, as all that follows FROM."""
        return (
            f"{self.along('message_expires')} WHERE m.topic {query.topic} AND {self.expires} "
            f"AND m.expires_ms <= {query(now_ms)} AND (m.holder = {query(b'')} OR m.due_ms <= {query(now_ms)}) "
            "ORDER BY m.expires_ms"
        )

    @abstractmethod
    def messages(self, query: Query, source: str, free: bool = False, lock: str = "") -> Statement:
        """Return the statement that reads whole messages from `source`, all that follows FROM. `free`: they have no
        holder."""

    @abstractmethod
    def find(self, key: int, places: Sequence[tuple[int, bytes]], lock: bool) -> Plan[Iterable[FoundColumns]]:
        """Return messages by (bucket, id), in any order. `lock`: they stay as they are until the transaction ends, if
        this store has one."""

    @abstractmethod
    def find_remembered(self, key: int, ids: Sequence[bytes], after_ms: int) -> Plan[list[tuple[Any, ...]]]:
        """Return ids settled after `after_ms`: id, birth, version, payload_sum, last_op."""

    @abstractmethod
    def change(self, changes: Changes) -> Plan[set[bytes]]:
        """Write what was noted; return the ids of which nothing was written, because another call came first."""

    @abstractmethod
    def contents(self, numbers: Sequence[int], sizes: Sequence[int]) -> Plan[tuple[Ragged, Ragged, list[int]]]:
        """Return payloads and headers by row, of about `sizes` bytes each, in order, and the indexes of those that are
        gone."""

    @abstractmethod
    def lease(
        self, changes: Changes, batch: MessageBatch, turns: UInt32, until_ms: Int64, grants: Sequence[Grant],
        also: Statement | None,
    ) -> Plan[tuple[LeasedContent, Any]]:  # fmt: skip
        """Write leases as dealt, and read what was leased. Return that, and the answer of `also`, asked after them."""

    @abstractmethod
    def delete_some(self, key: int, limit: int) -> Plan[int]:
        """Remove messages of a dropped topic, with their content; return how many."""

    @abstractmethod
    def forget(self, key: int, until_ms: int | None, limit: int) -> Plan[int]:
        """Remove at most `limit` ids that were settled up to `until_ms` (None: whenever); return how many."""

    def first_dues(self, key: int, after_ms: int, buckets: Sequence[int] | None, stands: str = "1") -> Statement:
        """Return the statement that reads the earliest due times after `after_ms`, of messages without and with a
        holder, and whether the condition `stands` holds."""
        query = self.query(key)
        asked = [
            f"(SELECT m.{self.due} FROM {self.along(index)} WHERE m.topic {query.topic} AND {predicate} "
            f"AND m.{self.due} > {query(after_ms)}{self.in_buckets(query, buckets)} "
            f"ORDER BY m.{self.due}, m.id LIMIT 1)"
            for index, predicate in (("message_free", self.free), ("message_held", self.held))
        ]
        return query.reading(f"SELECT {', '.join(asked)}, {stands}", _only)

    @property
    def first_due_of_each(self) -> str:
        """The query for each topic's uid and its earliest due times, of messages without and with a holder."""
        # A limit, so that no planner joins the tables and reads all messages.
        asked = (
            f"(SELECT m.{self.due} FROM {self.along(index)} WHERE m.topic = t.{self.quoted('key')} AND {predicate} "
            f"ORDER BY m.{self.due}, m.id LIMIT 1)"
            for index, predicate in (("message_free", self.free), ("message_held", self.held))
        )
        return f"SELECT t.uid, {', '.join(asked)} FROM {self.table('topic')} AS t"

    def still_stands(self, key: int) -> Plan[bool]:
        """Return whether the topic was not dropped."""
        yield from ()
        return True

    def stands(self, changes: Changes) -> str:
        """Return the condition that the key of `changes` is the topic's, if a call may come with another key."""
        return "1"

    def has_key(self, changes: Changes) -> Plan[bool]:
        """Return whether `stands` holds."""
        yield from ()
        return True


class RowDialect(SqlDialect):
    """The base of a store whose transaction holds what it has found: changes are written by the numbers of rows."""

    def change(self, changes: Changes) -> Plan[set[bytes]]:
        if changes.updated:
            numbers = [changes.met[id].row for id in changes.updated]
            yield from self.update([numbers, *changing_columns(list(changes.updated.values()))])
        if changes.removed:
            yield from self.remove(list(changes.removed.values()))
        if changes.remembered:
            yield from self.remember(changes, *remembered_columns(changes.remembered))
        return set()

    @abstractmethod
    def update(self, columns: Sequence[Sequence[Any]]) -> Plan[None]:
        """Write messages by row: row, then the columns of CHANGING."""

    @abstractmethod
    def remove(self, removed: Sequence[FoundMessage]) -> Plan[None]:
        """Remove messages with their content."""

    @abstractmethod
    def remember(self, changes: Changes, ids: Sequence[bytes], *columns: Sequence[int]) -> Plan[None]:
        """Note settled ids. `columns`: birth, version, payload_sum, last_op."""

    def contents(self, numbers: Sequence[int], sizes: Sequence[int]) -> Plan[tuple[Ragged, Ragged, list[int]]]:
        found: list[FoundColumns] = []
        for statement in self.reading_contents(numbers, sizes):
            found.append((yield statement))
        return self.contents_of(numbers, found)

    @abstractmethod
    def reading_contents(self, numbers: Sequence[int], sizes: Sequence[int]) -> Iterator[Statement]:
        """Return the statements that read contents by row."""

    @abstractmethod
    def contents_of(self, numbers: Sequence[int], found: Sequence[FoundColumns]) -> tuple[Ragged, Ragged, list[int]]:
        """Return `contents` from what these statements found."""

    def lease(
        self, changes: Changes, batch: MessageBatch, turns: UInt32, until_ms: Int64, grants: Sequence[Grant],
        also: Statement | None,
    ) -> Plan[tuple[LeasedContent, Any]]:  # fmt: skip
        if len(grants) > MANY_GRANTS:
            holders = [grants[turn].holder for turn in turns.tolist()]
            yield from self.lease_each((batch.numbers, until_ms.tolist(), holders))
        else:
            whose = np.array(batch.numbers, dtype=np.int64)
            for index, grant in enumerate(grants):
                mine = batch.numbers if len(grants) == 1 else whose[turns == index].tolist()
                if mine:
                    yield from self.lease_for(grant, changes.now_ms, mine)
        first, *others = self.reading_contents(batch.numbers, batch.sizes.tolist())
        answered = None
        if also is None:
            found = [(yield first)]
        else:  # one exchange with the leases before it and the contents after it
            answered, columns = yield (also, first)
            found = [columns]
        for statement in others:
            found.append((yield statement))
        payloads, headers, gone = self.contents_of(batch.numbers, found)
        return LeasedContent(payloads, headers, tuple(gone)), answered

    @abstractmethod
    def lease_for(self, grant: Grant, now_ms: int, numbers: Sequence[int]) -> Plan[None]:
        """Lease messages by row, all for one grant."""

    @abstractmethod
    def lease_each(self, columns: tuple[Sequence[int], Sequence[int], Sequence[bytes]]) -> Plan[None]:
        """Lease messages by row, until when, and for whom."""


class Changes:
    """The changes of a call: gathered by id, then written in few statements. `key`: the number that rows carry for the
    topic. `met`: what was read; a change stands only if the row is still the same."""

    __slots__ = ("key", "met", "now_ms", "remembered", "removed", "sql", "topic", "updated")

    def __init__(self, sql: SqlDialect, topic: Topic, key: int, now_ms: int) -> None:
        self.sql = sql
        self.topic = topic
        self.key = key
        self.now_ms = now_ms
        self.met: dict[bytes, FoundMessage] = {}
        self.updated: dict[bytes, Message] = {}
        self.removed: dict[bytes, FoundMessage] = {}
        self.remembered: dict[bytes, Message] = {}

    def load(self, ids: Sequence[bytes], buckets: Sequence[int]) -> Plan[dict[bytes, FoundMessage]]:
        """Return what stands under `ids`: messages, and remembered ids within the topic's time. Those are looked for
        last: a call that settled a message in between has left its id there by then."""
        standing: dict[bytes, FoundMessage] = {}
        for found in (yield from self.sql.find(self.key, list(zip(buckets, ids, strict=True)), True)):
            standing.update((stored.id, stored) for stored in stored_of(found))
        remember_ms = self.topic.settings.remember_ms
        if remember_ms and len(standing) < len(ids):
            rest = [id for id in ids if id not in standing]
            for left in (yield from self.sql.find_remembered(self.key, rest, self.now_ms - remember_ms)):
                stored = remembered_of(*left)
                standing[stored.id] = stored
        return standing

    def remove(self, stored: FoundMessage, last_op: int = 0, remember: bool = True) -> FoundMessage | None:
        """Remove a message; return what is left of it on a topic that remembers."""
        self.met.setdefault(stored.id, stored)
        self.updated.pop(stored.id, None)
        self.removed[stored.id] = stored
        if not remember or not self.topic.settings.remember_ms:
            return None
        was = stored.message
        left = Message(was.birth, was.version, last_op=last_op, payload_sum=was.payload_sum, remembered=True)
        self.remembered[stored.id] = left
        return FoundMessage(stored.id, 0, left)

    def apply(self, stored: FoundMessage | None, ask: Ask, decision: Decision) -> FoundMessage | None:
        """Note what `decision` changes of `stored`; return what then stands under the id."""
        if stored is None or not stored.row:
            return stored
        gone = removal(ask, decision)
        if gone is not None:
            return self.remove(stored, *gone)
        if decision.message is not None and decision.message is not stored.message:
            self.met.setdefault(stored.id, stored)
            self.updated[stored.id] = decision.message
            return FoundMessage(stored.id, stored.row, decision.message, stored.size_bytes, stored.tagged)
        return stored

    def apart(self, ids: Collection[bytes]) -> Changes:
        """Take the removals under `ids` out of these changes, and return them."""
        taken = Changes(self.sql, self.topic, self.key, self.now_ms)
        for id in ids:
            taken.met[id], taken.removed[id] = self.met[id], self.removed.pop(id)
            self.remembered.pop(id, None)
        return taken

    def write(self) -> Plan[set[bytes]]:
        """Write all that was noted, and start afresh. Return the ids of which nothing was written, because another call
        came first."""
        lost: set[bytes] = set()
        if self.updated or self.removed:
            lost = yield from self.sql.change(self)
        self.met, self.updated, self.removed, self.remembered = {}, {}, {}, {}
        return lost


def _only(rows: Sequence[Any]) -> Any:
    return rows[0]
