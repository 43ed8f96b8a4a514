"""What differs between the SQL stores: fragments of statements, how batches travel, statements tuned by hand; and what
a call changes, for them to write. The logic that uses both is in the modules beside this one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from timeline.columns import Int64, Ragged, UInt32
from timeline.leases import Ask, Decision, Message
from timeline.model import Topic
from timeline.storage_plugins.asks import removal
from timeline.storage_plugins.contract import Grant
from timeline.storage_plugins.sql import DEAD, EXPIRES, FREE, HELD, TAGGED
from timeline.storage_plugins.sql.rows import FoundColumns, FoundMessage, MessageBatch, remembered_of, stored_of
from timeline.storage_plugins.sql.statements import Plan, Query, Statement


@dataclass(frozen=True, slots=True)
class LeasedContent:
    """Content of what was leased, the indexes of those whose content is gone, and which were leased at all (None:
    all)."""

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
    """Along which column the timeline is indexed."""
    died: ClassVar[str] = "died_ms"
    locked: ClassVar[str] = ""
    """What locks the rows that a SELECT answers."""
    passing: ClassVar[str] = ""
    """The same, where what others have locked is passed over."""
    claiming: ClassVar[str] = ""
    """The same for a dropped topic whose rows are removed."""
    unless_named: ClassVar[str] = "ON CONFLICT (name) DO NOTHING"
    most_rows: ClassVar[int] = 1 << 62
    """Rows of one look, at most."""
    asks_first: ClassVar[bool] = True
    """Whether a lease asks when the next lease runs out before it looks among those that have."""

    keeps_keys: ClassVar[bool] = False
    """Whether the key that a call goes by may be the one of a topic that was dropped since."""

    def query(self, key: int = 0) -> Query:
        """A statement to be made, for rows of the topic `key`."""
        return Query(key)

    def text(self, text: str) -> Any:
        """A text as a value."""
        return text

    def quoted(self, name: str) -> str:
        """A column's name that is a word of the grammar."""
        return name

    @abstractmethod
    def table(self, name: str) -> str:
        """A table of ours."""

    @abstractmethod
    def along(self, index: str) -> str:
        """Table `message` as m, read along an index."""

    def beyond(self, query: Query, columns: tuple[str, str], place: tuple[int, bytes]) -> str:
        """That two columns are beyond a place in their order."""
        return f"({', '.join(columns)}) > ({query(place[0])}, {query(place[1])})"

    def up_to(self, query: Query, columns: tuple[str, str], place: tuple[int, bytes]) -> str:
        """That two columns are not beyond a place in their order."""
        return f"({', '.join(columns)}) <= ({query(place[0])}, {query(place[1])})"

    @abstractmethod
    def in_buckets(self, query: Query, buckets: Sequence[int] | None) -> str:
        """` AND` the condition that asks for these buckets."""

    def walk(self, query: Query, tag: bytes, dead: bool, after: tuple[int, bytes]) -> tuple[str, str]:
        """What a walk over (bucket, id) has still before it, as all that follows FROM, and the table whose `bucket` and
        `id` say where it is: of one tag, of dead letters, or of all messages."""
        source = f"{self.along('message_tag' if tag else 'message_dead' if dead else 'message_id')} WHERE m.topic "
        source += query.topic
        if tag:
            source += f" AND {self.tagged} AND m.tag = {query(tag)}"
        elif dead:
            source += f" AND {self.dead}"
        return f"{source} AND {self.beyond(query, ('m.bucket', 'm.id'), after)}", "m"

    def expired(self, query: Query, now_ms: int) -> str:
        """Messages that have expired by now and that nobody holds, as all that follows FROM."""
        return (
            f"{self.along('message_expires')} WHERE m.topic {query.topic} AND {self.expires} "
            f"AND m.expires_ms <= {query(now_ms)} AND (m.holder = {query(b'')} OR m.due_ms <= {query(now_ms)}) "
            "ORDER BY m.expires_ms"
        )

    @abstractmethod
    def messages(self, query: Query, source: str, free: bool = False, lock: str = "") -> Statement:
        """Whole messages from `source`, all that follows FROM; `free`: of messages that nobody holds."""

    @abstractmethod
    def find(self, key: int, places: Sequence[tuple[int, bytes]], lock: bool) -> Plan[Iterable[FoundColumns]]:
        """Messages by (bucket, id), in any order. `lock`: they stay so until the transaction ends, where this store has
        one."""

    @abstractmethod
    def find_remembered(self, key: int, ids: Sequence[bytes], after_ms: int) -> Plan[list[tuple[Any, ...]]]:
        """Ids settled after `after_ms`: id, birth, version, payload_sum, last_op."""

    @abstractmethod
    def change(self, changes: Changes) -> Plan[set[bytes]]:
        """Write what was noted; answer the ids of which nothing was written, because somebody else came first."""

    @abstractmethod
    def contents(self, numbers: Sequence[int], sizes: Sequence[int]) -> Plan[tuple[Ragged, Ragged, list[int]]]:
        """Payloads and headers by row, of about `sizes` bytes each, in order; the indexes of those that are gone."""

    @abstractmethod
    def lease(
        self, changes: Changes, batch: MessageBatch, turns: UInt32, until_ms: Int64, grants: Sequence[Grant],
        also: Statement | None,
    ) -> Plan[tuple[LeasedContent, Any]]:  # fmt: skip
        """Write leases, as dealt, and read what was leased. Answer that, and what `also` answers, asked after them."""

    @abstractmethod
    def delete_some(self, key: int, limit: int) -> Plan[int]:
        """Remove messages of a dropped topic, with their content; how many."""

    @abstractmethod
    def forget(self, key: int, until_ms: int | None, limit: int) -> Plan[int]:
        """Remove ids that were settled up to `until_ms` (None: whenever), at most `limit`; how many."""

    def first_dues(self, key: int, after_ms: int, buckets: Sequence[int] | None) -> Statement:
        """The earliest due > `after_ms` of what nobody holds, and of what has a holder; whether the topic stands."""
        query = self.query(key)
        asked = [
            f"(SELECT m.{self.due} FROM {self.along(index)} WHERE m.topic {query.topic} AND {predicate} "
            f"AND m.{self.due} > {query(after_ms)}{self.in_buckets(query, buckets)} "
            f"ORDER BY m.{self.due}, m.id LIMIT 1)"
            for index, predicate in (("message_free", self.free), ("message_held", self.held))
        ]
        return query.reading(f"SELECT {', '.join(asked)}, {self.stands(key)}", _only)

    def still_stands(self, key: int) -> Plan[bool]:
        """Whether the topic was not dropped."""
        yield from ()
        return True

    def stands(self, key: int) -> str:
        """The condition that the topic was not dropped, where its key alone does not say so."""
        return "1"


class Changes:
    """What a call changes, gathered by id, then written in few statements. `key`: the number that rows carry for the
    topic. `met`: what was read; a change stands only where the row is still so."""

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
        """What stands under `ids`: messages, and remembered ids within the topic's time. Those are looked for last:
        whoever settled a message in between has left its id there by then."""
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
        """Remove a message; answer what is left of it on a topic that remembers."""
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
        """Note what `decision` changes of `stored`; answer what then stands under the id."""
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
        """Only the removals under `ids`, which this is without from now on."""
        taken = Changes(self.sql, self.topic, self.key, self.now_ms)
        for id in ids:
            taken.met[id], taken.removed[id] = self.met[id], self.removed.pop(id)
            self.remembered.pop(id, None)
        return taken

    def write(self) -> Plan[set[bytes]]:
        """Write all that was noted, and start afresh; answer the ids of which nothing was written, because somebody
        else came first."""
        lost: set[bytes] = set()
        if self.updated or self.removed:
            lost = yield from self.sql.change(self)
        self.met, self.updated, self.removed, self.remembered = {}, {}, {}, {}
        return lost


def _only(rows: Sequence[Any]) -> Any:
    return rows[0]
