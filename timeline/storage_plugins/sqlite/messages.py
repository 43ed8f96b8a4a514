"""Changes of messages inside a transaction, and put, which finds nothing in the plain case."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from timeline.columns import Ragged
from timeline.model import Answers, Topic, buckets_of
from timeline.storage_plugins.asks import put_ask
from timeline.storage_plugins.contract import Puts
from timeline.storage_plugins.sql import changes as sql
from timeline.storage_plugins.sql import signed, signed_one
from timeline.storage_plugins.sql.changes import decide_each, firsts_of
from timeline.storage_plugins.sql.rows import CHANGING, Stored, remembered_of, stored_of
from timeline.storage_plugins.sqlite import statements
from timeline.storage_plugins.sqlite.writer import Transaction


class Changes(sql.Changes):
    """What a call changes of this store."""

    __slots__ = ("transaction",)

    def __init__(self, transaction: Transaction, topic: Topic, key: int, now_ms: int) -> None:
        super().__init__(topic, key, now_ms)
        self.transaction = transaction

    def load(self, ids: Sequence[bytes], buckets: Sequence[int]) -> dict[bytes, Stored]:
        connection, settings = self.transaction.connection, self.topic.settings
        standing: dict[bytes, Stored] = {}
        if settings.remember_ms:
            for found in statements.find_remembered(connection, self.key, ids, self.now_ms - settings.remember_ms):
                columns = (found.numbers[name] for name in ("n", "birth", "version", "payload_sum", "last_op"))
                for n, birth, version, payload_sum, last_op in zip(*columns, strict=True):
                    standing[ids[n]] = remembered_of(birth, version, payload_sum, last_op)
        for found in statements.find(connection, self.key, buckets, ids):
            for n, stored in zip(found.numbers["n"], stored_of(found), strict=True):
                standing[ids[n]] = stored
        return standing

    def write(self) -> None:
        connection = self.transaction.connection
        if self.updated:
            rows, after = list(self.updated), list(self.updated.values())
            columns: list[list[object]] = [list(rows)]
            for name in CHANGING:
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
        self.clear()


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
    asked = {at: put_ask(puts, at) for at in left}
    while left:
        changes = Changes(transaction, topic, key, now_ms)
        asks = [asked[at] for at in left]
        rest = decide_each(changes, [ids[at] for at in left], [buckets[at] for at in left], asks, answers, left)
        changes.write()
        left = [left[at] for at in rest]
        stored = _insert(transaction, key, now_ms, puts, ids, buckets, firsts_of(ids, left))
        left = sorted(set(left).difference(stored))
    return answers


def _to_decide(transaction: Transaction, topic: Topic, key: int, now_ms: int, puts: Puts, ids: list[bytes]) -> set[int]:
    """Puts that cannot just be inserted: never deliverable, or under a remembered id."""
    special: set[int] = set()
    late = puts.never_deliverable(now_ms)
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
