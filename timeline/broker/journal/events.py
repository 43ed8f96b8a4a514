"""The event journal: what happened to each message, as the columns in which it happened.

The broker's parts hand over columns that they have anyway. That takes a few copies per batch, nothing per message, and
no wait. The carrier (`pipe.py`) may refuse them. Then they are counted as dropped, and deliveries are as fast as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np

from timeline.columns import Bools, Indexes, Int64, Ragged, UInt8
from timeline.model import Answers, Operation, Rows, Status, Topic
from timeline.storage_plugins.contract import LeasedRows, Mutations, Puts, Settles, TagMutation, TagStep

SCHEMA_VERSION = 1


class EventKind(StrEnum):
    """The kinds of event.

    - HANDED_BACK: leased, and released before any handler saw it.
    - RAN_OUT: a lease ended unsettled, found when the message was leased again.
    - REGRANTED: its holder came back in another session.
    - REPLACED: another put took its place.
    - TAG_…: by tag, `count` messages that are not named.
    - TOPIC_DROPPED: all its messages went, too.
    - UNKNOWN: the store did not say what became of a call, which may have changed the message.

    Of the journal itself: STARTED, STOPPED; IDLE, when nothing happened for long; and DROPPED. DROPPED: `count` events
    are missing between `due` and `time`. Without a count the number is unknown, because the broker was killed.
    """

    PUT = "put"
    DELIVERED = "delivered"
    ACKED = "acked"
    EXTENDED = "extended"
    RELEASED = "released"
    HANDED_BACK = "handed_back"
    RAN_OUT = "ran_out"
    REGRANTED = "relet"
    BURIED = "buried"
    MOVED = "moved"
    CANCELLED = "cancelled"
    REVIVED = "revived"
    PURGED = "purged"
    REPLACED = "replaced"
    EXPIRED = "expired"
    TAG_MOVED = "tag_moved"
    TAG_CANCELLED = "tag_cancelled"
    TOPIC_DROPPED = "topic_dropped"
    UNKNOWN = "unknown"
    STARTED = "started"
    IDLE = "idle"
    STOPPED = "stopped"
    DROPPED = "dropped"


Column: TypeAlias = Ragged | np.ndarray[Any, Any] | int | bytes
"""A value for each event of a part, or one for all."""

_OF_SETTLE = {
    Operation.ACK: EventKind.ACKED,
    Operation.EXTEND: EventKind.EXTENDED,
    Operation.RELEASE: EventKind.RELEASED,
    Operation.BURY: EventKind.BURIED,
    Operation.REGRANT: EventKind.REGRANTED,
}
_OF_MUTATION = {
    Operation.MOVE: EventKind.MOVED,
    Operation.CANCEL: EventKind.CANCELLED,
    Operation.REVIVE: EventKind.REVIVED,
    Operation.PURGE: EventKind.PURGED,
}
_OK, _EXPIRED = Status.OK.code, Status.EXPIRED.code
IDLE_MS = 600_000
"""How often an idle broker says so. Readers of the journal know then that it is there."""
EVENT_BYTES = 80
"""About the size of an event beside its id."""


@dataclass(slots=True)
class EventBatch:
    """`count` events of one kind on one topic (empty: of the journal itself) at `time_ms`."""

    kind: EventKind
    topic: str
    time_ms: int
    count: int
    columns: dict[str, Column] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """About its size."""
        ids = self.columns.get("id")
        return self.count * EVENT_BYTES + (ids.nbytes if isinstance(ids, Ragged) else 0)


class Journal:
    """Turns what the broker's parts saw into parts of the journal. `carry` takes them, and never waits."""

    def __init__(self, carry: Callable[[EventBatch], None], now_ms: Callable[[], int]) -> None:
        self._carry, self._now_ms = carry, now_ms

    def answered(self, topic: Topic, asked: Puts | Settles | Mutations, answers: Answers) -> None:
        """The store has answered `asked`."""
        if isinstance(asked, Puts):
            self.put(topic, asked, answers)
        elif isinstance(asked, Settles):
            self.settled(topic, asked, answers)
        else:
            self.mutated(topic, asked, answers)

    def put(self, topic: Topic, puts: Puts, answers: Answers) -> None:
        """The store has answered a put."""
        for kind, expired in ((EventKind.EXPIRED, True), (EventKind.REPLACED, False)):
            gone = {at: one for at, one in answers.displaced.items() if one.expired is expired}
            if gone:
                birth = np.array([one.birth for one in gone.values()], dtype=np.uint64)
                version = np.array([one.version for one in gone.values()], dtype=np.int64)
                ids = puts.ids.take(np.array(list(gone), dtype=np.intp))
                self._tell(kind, topic, None, ids, birth=birth, version=version)
        stored, moved = answers.status == _OK, answers.version > 1
        self._tell(
            EventKind.PUT, topic, stored & ~moved, puts.ids, birth=puts.birth, version=answers.version,
            due=answers.due_ms, group=puts.groups, tag=puts.tags, payload_bytes=puts.sizes,
            payload_sum=puts.payload_sum, expires=puts.expires_ms,
        )  # fmt: skip
        self._tell(  # if_exists="move": of another birth than the call's
            EventKind.MOVED, topic, stored & moved, puts.ids, version=answers.version, due=answers.due_ms,
            group=puts.groups,
        )  # fmt: skip

    def leased(self, topic: Topic, leased: LeasedRows) -> None:
        """The store has leased: which leases had run out, and what was buried or removed on the way."""
        rows, buried = leased.rows, leased.buried
        if leased.prior_holders.nbytes:
            self._tell(
                EventKind.RAN_OUT, topic, leased.prior_holders.sizes > 0, rows.ids, birth=rows.birth,
                version=rows.version - 1, due=leased.was_due_ms, consumer=leased.prior_holders,
            )  # fmt: skip
        self._tell(
            EventKind.BURIED, topic, None, buried.ids, birth=buried.birth, version=buried.version, cause=buried.dead
        )
        self.expired(topic, leased.expired)

    def expired(self, topic: Topic, count: int) -> None:
        """Note that `count` messages had expired and were removed. The store does not say which."""
        if count:
            self._carry(EventBatch(EventKind.EXPIRED, topic.name, self._now_ms(), 1, {"count": count}))

    def delivered(
        self,
        topic: Topic,
        consumer: bytes,
        rows: Rows,
        again: Bools,
        sent_ms: int,
        late_ms: Int64,
        late: Indexes,
        causes: UInt8,
    ) -> None:
        """`rows` are on the wire to `consumer`. Those at `late` are late for the `causes`."""
        count = len(late_ms)
        if not count:
            return
        columns: dict[str, Column] = {
            "id": rows.ids.compact(),
            "birth": rows.birth,
            "version": _folded(rows.version),
            "due": _folded(rows.scheduled_ms),
            "until": _folded(rows.due_ms),
            "deliveries": _folded(rows.deliveries),
            "lateness": _folded(late_ms),
            "again": _folded(again),
            "consumer": consumer,
        }
        if len(late):
            cause = np.full(count, 255, dtype=np.uint8)
            cause[late] = causes
            columns["late_cause"] = cause
        self._carry(EventBatch(EventKind.DELIVERED, topic.name, sent_ms, count, columns))

    def unknown(self, topic: Topic, asked: Puts | Settles | Mutations) -> None:
        """The store has not said what became of `asked`."""
        births = {} if isinstance(asked, Mutations) else {"birth": asked.birth}
        self._tell(EventKind.UNKNOWN, topic, None, asked.ids, **births)

    def settled(self, topic: Topic, settles: Settles, answers: Answers) -> None:
        """The store has answered settles."""
        done = answers.status == _OK
        kinds = {kind: done & (settles.operation == operation) for operation, kind in _OF_SETTLE.items()}
        released, unseen = kinds[EventKind.RELEASED], settles.unseen
        kinds[EventKind.RELEASED], kinds[EventKind.HANDED_BACK] = released & ~unseen, released & unseen
        kinds[EventKind.EXPIRED] = answers.status == _EXPIRED
        for kind, which in kinds.items():
            self._tell(
                kind, topic, which, settles.ids, birth=settles.birth, version=settles.version, due=answers.due_ms,
                again=answers.late, consumer=settles.holders, cause=settles.reasons,
            )  # fmt: skip

    def mutated(self, topic: Topic, mutations: Mutations, answers: Answers) -> None:
        """The store has answered moves, cancels, revives or purges."""
        for kind, code in ((_OF_MUTATION[mutations.operation], _OK), (EventKind.EXPIRED, _EXPIRED)):
            self._tell(
                kind, topic, answers.status == code, mutations.ids, version=answers.version, due=answers.due_ms,
                group=mutations.groups,
            )  # fmt: skip

    def mutated_tag(self, topic: Topic, mutation: TagMutation, step: TagStep) -> None:
        """A chunk of an operation by tag is done."""
        moved = mutation.operation is Operation.MOVE
        count = step.counts.get(_OK, 0)
        if count and not mutation.dry_run:
            kind = EventKind.TAG_MOVED if moved else EventKind.TAG_CANCELLED
            columns: dict[str, Column] = {"count": count, "tag": mutation.tag, "due": mutation.due_ms}
            self._carry(EventBatch(kind, topic.name, self._now_ms(), 1, columns))

    def dropped(self, topic: Topic) -> None:
        """The topic is dropped, with all that lay on it."""
        self._carry(EventBatch(EventKind.TOPIC_DROPPED, topic.name, self._now_ms(), 1))

    def _tell(
        self, kind: EventKind, topic: Topic, which: Bools | None, ids: Ragged, **columns: Ragged | np.ndarray[Any, Any]
    ) -> None:
        """Hand over the columns where `which` (None: all), cut loose from the frames they came in."""
        at: Indexes | slice = slice(None) if which is None or which.all() else np.flatnonzero(which)
        count = len(ids) if isinstance(at, slice) else len(at)
        if not count:
            return
        kept: dict[str, Column] = {"id": _cut(ids, at)}
        for name, column in columns.items():
            if isinstance(column, Ragged):
                if column.nbytes:
                    kept[name] = _same_text(column) or _cut(column, at)
            elif len(column):
                kept[name] = _folded(column[at])
        self._carry(EventBatch(kind, topic.name, self._now_ms(), count, kept))


def _folded(column: np.ndarray[Any, Any]) -> Column:
    """Return a copy, or the one number that fills the column. Fewer bytes cost the broker less."""
    first = column[0]
    return int(first.astype(np.int64)) if (column == first).all() else column.copy()


def _same_text(column: Ragged) -> bytes:
    """Return the one text that fills a column, such as a frame's group or holder. Empty: there are several."""
    count, first = len(column), column[0]
    return first if column.nbytes == count * len(first) and column.compact().data == first * count else b""


def _cut(column: Ragged, at: Indexes | slice) -> Ragged:
    return column.compact() if isinstance(at, slice) else column.take(at)
