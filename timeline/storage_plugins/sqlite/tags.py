"""Moves and cancels by tag: looked for on a reading connection, done by the writer a few at a time.

What nothing refuses (free, of the asking group, not expired, not done before) is changed by one statement; a message at
a time is decided by the rules only where something may refuse it.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from timeline.model import Operation, Status, Topic
from timeline.storage_plugins.contract import TagMutation, TagStep
from timeline.storage_plugins.sql import TAGGED, signed_one
from timeline.storage_plugins.sql.changes import mutate_tagged
from timeline.storage_plugins.sql.rows import cursor_at, place_after, stored_of
from timeline.storage_plugins.sqlite import statements
from timeline.storage_plugins.sqlite.messages import Changes
from timeline.storage_plugins.sqlite.writer import Transaction


@dataclass(slots=True)
class Found:
    """Rows of a chunk, and where the walk goes on (None: it is done)."""

    rows: list[int]
    cursor: bytes | None


@dataclass(slots=True)
class Done:
    """What became of a chunk so far."""

    counts: Counter[int] = field(default_factory=Counter)
    earliest_due_ms: int | None = None

    def moved(self, due_ms: int | None) -> None:
        """Something was moved to `due_ms`."""
        times = (due_ms, self.earliest_due_ms)
        self.earliest_due_ms = min((time for time in times if time is not None), default=None)

    def add(self, part: Done) -> None:
        """So much more was done."""
        self.counts += part.counts
        self.moved(part.earliest_due_ms)

    def step(self, cursor: bytes | None) -> TagStep:
        """As the contract says it."""
        return TagStep(dict(self.counts), cursor, self.earliest_due_ms)


_CHUNK = (
    f"FROM message INDEXED BY message_tag WHERE topic = ? AND {TAGGED} AND tag = ? AND (bucket, id) > (?, ?) "
    "ORDER BY bucket, id"
)


def search(connection: sqlite3.Connection, key: int, tag: bytes, cursor: bytes, limit: int) -> Found:
    """The next messages of the walk over (bucket, id)."""
    place = (key, tag, *place_after(cursor))
    listed = connection.execute(f"SELECT json_group_array(row) FROM (SELECT row {_CHUNK} LIMIT ?)", (*place, limit))
    rows: list[int] = json.loads(listed.fetchone()[0])
    if len(rows) < limit:
        return Found(rows, None)
    last = connection.execute("SELECT bucket, id FROM message WHERE row = ?", (rows[-1],)).fetchone()
    return Found(rows, cursor_at(*last))


_PLAIN = (
    "died_ms = 0 AND holder = x'' AND grp = ? AND last_op != ? AND (expires_ms = 0 OR expires_ms > max(?, {due})) "
    "AND {due} <= ?"
)
_TO = "CASE WHEN ? THEN ? ELSE max(0, scheduled_ms + ?) END"
"""The due that a move asks for: the absolute one, or shifted from the scheduled one."""
_AGREEING = statements.Aggregate(("row", "payload_bytes", "headers_bytes", "plain", "to_ms"))
_AGREEING_SQL = _AGREEING.over(
    f"(SELECT row, payload_bytes, headers_bytes, {_PLAIN.format(due=_TO)} AS plain, {_TO} AS to_ms FROM message "
    "WHERE row IN (SELECT value FROM json_each(?)) AND +topic = ? AND +tag = ? AND put_ms <= ? "
    "AND (? = 0 OR asked_ms <= ? OR last_op = ?))"
)
"""By row: without the signs the planner walks the whole tag instead, again for each work."""
_OTHERS_SQL = statements.WHOLE.over(
    f"(SELECT {statements.WHOLE.inner} FROM message WHERE row IN (SELECT value FROM json_each(?)))"
)
_MOVE = (
    f"UPDATE message SET version = version + 1, due_ms = {_TO}, scheduled_ms = {_TO}, asked_ms = ?, last_op = ? "
    "WHERE row IN (SELECT value FROM json_each(?))"
)
_REMEMBER = (
    "INSERT OR REPLACE INTO remembered (topic, id, birth, version, payload_sum, last_op, settled_ms) "
    "SELECT topic, id, birth, version, payload_sum, ?, ? FROM message WHERE row IN (SELECT value FROM json_each(?))"
)


def change(
    transaction: Transaction, topic: Topic, key: int, now_ms: int, mutation: TagMutation, rows: list[int], done: Done
) -> None:
    """Does `mutation` on those of `rows` that are still there and were at its start."""
    moves = mutation.operation is Operation.MOVE
    to = (mutation.due_ms != 0, mutation.due_ms, mutation.by_ms) if moves else (True, 0, 0)
    op = signed_one(mutation.op)
    place = (json.dumps(rows), key, mutation.tag, mutation.started_ms, to[2], mutation.started_ms, op)
    asked = (mutation.group, op, now_ms, *to, *to, mutation.latest_ms, *to, *place)
    found = _AGREEING.read(transaction.connection, _AGREEING_SQL, asked)
    columns = {name: np.array(values, dtype=np.int64) for name, values in found.numbers.items()}
    plain = columns["plain"] != 0
    chosen: list[int] = columns["row"][plain].tolist()
    if chosen:
        done.counts[Status.OK.code] += len(chosen)
    if chosen and not mutation.dry_run:
        if moves:
            parameters = (*to, *to, now_ms, op, json.dumps(chosen))
            transaction.connection.execute(_MOVE, parameters)
            done.moved(int(columns["to_ms"][plain].min()))
        else:
            if topic.settings.remember_ms:
                transaction.connection.execute(_REMEMBER, (op, now_ms, json.dumps(chosen)))
            statements.delete_messages(transaction.connection, chosen)
            transaction.orphan(chosen, (columns["payload_bytes"] + columns["headers_bytes"])[plain].tolist())
    others: list[int] = columns["row"][~plain].tolist()
    if others:  # what something may refuse: by the rules
        found = statements.WHOLE.read(transaction.connection, _OTHERS_SQL, (json.dumps(others),))
        rest = zip(found.strings["id"].tolist(), stored_of(found), strict=True)
        done.add(Done(*mutate_tagged(Changes(transaction, topic, key, now_ms), mutation, rest)))


__all__ = ["Done", "Found", "change", "search"]
