"""Messages by id inside a transaction: found, decided by the one table of rules, changed. And put, which finds nothing
in the plain case."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from timeline.columns import Ragged
from timeline.leases import Ask, Decision, Message, decide
from timeline.leases.table import REMEMBERED
from timeline.model import Answers, Operation, Status, Topic, buckets_of
from timeline.storage_plugins.contract import Puts
from timeline.storage_plugins.sql import signed, signed_one
from timeline.storage_plugins.sqlite import statements
from timeline.storage_plugins.sqlite.statements import Columns
from timeline.storage_plugins.sqlite.writer import Transaction

_UNSIGNED = (1 << 64) - 1
_FIELDS = (
    *("row", "headers_bytes", "payload_bytes", "birth", "last_op", "payload_sum", "version", "due_ms"),
    *("scheduled_ms", "asked_ms", "deliveries", "expires_ms", "died_ms"),
)


@dataclass(frozen=True, slots=True)
class Stored:
    """A message as the rules see it, its row (0: only its id is remembered) and what its content takes."""

    row: int
    message: Message
    size_bytes: int = 0


def stored_of(found: Columns) -> Iterable[Stored]:
    """Aggregated columns as messages."""
    numbers, strings = found.numbers, found.strings
    fields = zip(*(numbers[name] for name in _FIELDS), strings["holder"], strings["grp"], strings["dead"], strict=True)
    for row, headers_bytes, payload_bytes, birth, last_op, payload_sum, *rest in fields:
        version, due_ms, scheduled_ms, asked_ms, deliveries, expires_ms, died_ms, holder, group, dead = rest
        seen = Message(
            birth=birth & _UNSIGNED,
            version=version,
            due_ms=due_ms,
            scheduled_ms=scheduled_ms,
            asked_ms=asked_ms,
            holder=holder,
            deliveries=deliveries,
            last_op=last_op & _UNSIGNED,
            group=group,
            expires_ms=expires_ms,
            payload_sum=payload_sum & _UNSIGNED,
            died_ms=died_ms,
            dead=dead,
        )
        yield Stored(row, seen, payload_bytes + headers_bytes)


@dataclass(slots=True)
class Changes:
    """What a call changes, gathered, then written in a few statements."""

    transaction: Transaction
    topic: Topic
    key: int
    now_ms: int
    updated: dict[int, Message] = field(default_factory=dict)
    removed: list[Stored] = field(default_factory=list)
    remembered: list[tuple[bytes, Message]] = field(default_factory=list)

    def remove(self, id: bytes, stored: Stored, last_op: int = 0, remember: bool = True) -> Stored | None:
        """Removes a message; answers what is left of it on a topic that remembers."""
        self.updated.pop(stored.row, None)
        self.removed.append(stored)
        if not remember or not self.topic.settings.remember_ms:
            return None
        old = stored.message
        left = Message(old.birth, old.version, last_op=last_op, payload_sum=old.payload_sum, remembered=True)
        self.remembered.append((id, left))
        return Stored(0, left)

    def apply(self, stored: Stored | None, id: bytes, ask: Ask, decision: Decision) -> Stored | None:
        """Notes what `decision` changes of `stored`; answers what then stands under the id."""
        if stored is None or not stored.row:
            return stored
        if decision.message is None:
            if decision.status not in (Status.OK, Status.EXPIRED):
                return stored
            last_op = ask.op if ask.operation is Operation.CANCEL else 0
            keeps = decision.status is Status.EXPIRED or ask.operation in REMEMBERED
            return self.remove(id, stored, last_op if decision.status is Status.OK else 0, keeps)
        if decision.message is not stored.message:
            self.updated[stored.row] = decision.message
            return Stored(stored.row, decision.message, stored.size_bytes)
        return stored

    def write(self) -> None:
        """Writes all that was noted, and starts afresh."""
        connection = self.transaction.connection
        if self.updated:
            rows, after = list(self.updated), list(self.updated.values())
            columns: list[list[object]] = [list(rows)]
            for name in statements.CHANGING:
                values: list[object] = [getattr(message, name) for message in after]
                columns.append([signed_one(m.last_op) for m in after] if name == "last_op" else values)
            statements.update_messages(connection, columns)
        if self.removed:
            gone = [stored.row for stored in self.removed]
            statements.delete_messages(connection, gone)
            self.transaction.orphan(gone, [stored.size_bytes for stored in self.removed])
        if self.remembered:
            count = len(self.remembered)
            left = [message for _, message in self.remembered]
            statements.remember(
                connection,
                (
                    [self.key] * count,
                    [id for id, _ in self.remembered],
                    [signed_one(message.birth) for message in left],
                    [message.version for message in left],
                    [signed_one(message.payload_sum) for message in left],
                    [signed_one(message.last_op) for message in left],
                    [self.now_ms] * count,
                ),
            )
        self.updated, self.removed, self.remembered = {}, [], []


def load(changes: Changes, ids: Sequence[bytes], buckets: Sequence[int]) -> dict[bytes, Stored]:
    """What stands under `ids`: messages, and remembered ids within the topic's time."""
    connection, settings = changes.transaction.connection, changes.topic.settings
    standing: dict[bytes, Stored] = {}
    if settings.remember_ms:
        for found in statements.find_remembered(connection, changes.key, ids, changes.now_ms - settings.remember_ms):
            columns = (found.numbers[name] for name in ("n", "birth", "version", "payload_sum", "last_op"))
            for n, birth, version, payload_sum, last_op in zip(*columns, strict=True):
                left = Message(
                    birth & _UNSIGNED,
                    version,
                    last_op=last_op & _UNSIGNED,
                    payload_sum=payload_sum & _UNSIGNED,
                    remembered=True,
                )
                standing[ids[n]] = Stored(0, left)
    for found in statements.find(connection, changes.key, buckets, ids):
        for n, stored in zip(found.numbers["n"], stored_of(found), strict=True):
            standing[ids[n]] = stored
    return standing


def decide_each(
    changes: Changes, ids: Sequence[bytes], buckets: Sequence[int], asks: Sequence[Ask], answers: Answers,
    places: Sequence[int],
) -> list[int]:  # fmt: skip
    """Decides `asks` in order, each on what the ones before left, notes their changes and fills `answers` at `places`.
    Answers the indexes where a put met nothing: the caller stores those (and only a put can)."""
    standing = load(changes, ids, buckets)
    settings, now_ms = changes.topic.settings, changes.now_ms
    for at, (id, ask) in enumerate(zip(ids, asks, strict=True)):
        stored = standing.get(id)
        decision = decide(stored.message if stored else None, ask, now_ms, settings)
        if stored is None and decision.status is Status.OK:
            return list(range(at, len(ids)))
        left = changes.apply(stored, id, ask, decision)
        if left is None:
            standing.pop(id, None)
        else:
            standing[id] = left
        fill(answers, places[at], decision)
    return []


def fill(answers: Answers, at: int, decision: Decision) -> None:
    """Writes a decision as answer `at`."""
    answers.status[at] = decision.status.code
    if decision.message is not None:
        answers.version[at] = decision.message.version
        answers.due_ms[at] = decision.message.due_ms
    answers.settled[at] = decision.settled
    answers.late[at] = decision.late
    answers.repeat[at] = decision.repeat


def put(transaction: Transaction, topic: Topic, key: int, now_ms: int, puts: Puts) -> Answers:
    """`Store.put`: all are inserted at once; what meets a message or a remembered id is decided by the rules."""
    count = len(puts)
    answers = Answers.blank(count)
    ids = puts.ids.tolist()
    buckets = buckets_of(puts.ids, topic.settings.buckets).tolist()
    special = _to_decide(transaction, topic, key, now_ms, puts, ids)
    plain = [at for at in range(count) if at not in special] if special else list(range(count))
    inserted = _insert(transaction, key, now_ms, puts, ids, buckets, plain)
    if len(inserted) == count:
        answers.version[:] = 1
        answers.due_ms[:] = puts.due_ms
        return answers
    answers.version[inserted] = 1
    answers.due_ms[inserted] = puts.due_ms[inserted]
    left = sorted(set(range(count)).difference(inserted))
    while left:
        changes = Changes(transaction, topic, key, now_ms)
        asks = [_ask(puts, at) for at in left]
        rest = decide_each(changes, [ids[at] for at in left], [buckets[at] for at in left], asks, answers, left)
        changes.write()
        if rest:  # A message before it in this very batch was found expired, and is gone.
            at = left[rest[0]]
            _insert(transaction, key, now_ms, puts, ids, buckets, [at])
            answers.status[at], answers.version[at], answers.due_ms[at] = Status.OK.code, 1, puts.due_ms[at]
        left = [left[at] for at in rest[1:]]
    return answers


def _to_decide(transaction: Transaction, topic: Topic, key: int, now_ms: int, puts: Puts, ids: list[bytes]) -> set[int]:
    """Puts that cannot just be inserted: due at or after their expiry, or under a remembered id."""
    special: set[int] = set()
    late = (puts.expires_ms > 0) & (puts.expires_ms <= puts.due_ms)
    if late.any():
        special.update(np.flatnonzero(late).tolist())
    if topic.settings.remember_ms:
        after_ms = now_ms - topic.settings.remember_ms
        for found in statements.find_remembered(transaction.connection, key, ids, after_ms):
            special.update(found.numbers["n"])
    if special and len(set(ids)) < len(ids):
        # Of an id that comes again, all are decided, so that each meets what the ones before it left.
        doubtful = {ids[at] for at in special}
        special.update(at for at, id in enumerate(ids) if id in doubtful)
    return special


def _insert(
    transaction: Transaction, key: int, now_ms: int, puts: Puts, ids: list[bytes], buckets: list[int], chosen: list[int]
) -> list[int]:
    """Inserts `chosen` puts with their contents; answers those whose id was not taken."""
    if not chosen:
        return []
    connection, count = transaction.connection, len(chosen)
    first = transaction.reserve(count)
    rows = list(range(first, first + count))
    whole = count == len(ids)
    at = np.array(chosen, dtype=np.intp)

    def numbers(column: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[int]:
        picked: list[int] = (column if whole else column[at]).tolist()
        return picked

    def strings(column: Ragged) -> list[bytes]:
        items = column.tolist()
        return items if whole else [items[index] for index in chosen]

    columns = (
        rows,
        buckets if whole else [buckets[index] for index in chosen],
        ids if whole else [ids[index] for index in chosen],
        signed(puts.birth if whole else puts.birth[at]),
        numbers(puts.due_ms),
        numbers(puts.expires_ms),
        signed(puts.payload_sum if whole else puts.payload_sum[at]),
        numbers(puts.sizes),
        numbers(puts.headers.sizes),
        strings(puts.groups),
        strings(puts.tags),
    )
    contents = (rows, strings(puts.payloads), strings(puts.headers))
    if statements.insert_messages(connection, key, now_ms, columns) == count:
        statements.insert_payloads(connection, contents)
        return chosen
    stored = set(statements.rows_between(connection, first, first + count))
    kept = [index for index, row in enumerate(rows) if row in stored]
    if kept:
        statements.insert_payloads(connection, [[column[index] for index in kept] for column in contents])
    return [chosen[index] for index in kept]


def _ask(puts: Puts, at: int) -> Ask:
    return Ask(
        Operation.PUT,
        time_ms=int(puts.due_ms[at]),
        birth=int(puts.birth[at]),
        group=puts.groups[at],
        payload_sum=int(puts.payload_sum[at]),
        expires_ms=int(puts.expires_ms[at]),
        move=bool(puts.move[at]),
    )
