"""Moves and cancels by tag, and the sweep. A reading connection looks for the messages; the writer changes a few at a
time, so that leases and settles go in between.

One statement moves or cancels the messages that nothing refuses (free, of the asking group, not expired, not done
before). The rules decide on the others, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from timeline.model import Operation, Status, Topic
from timeline.storage_plugins.asks import cursor_at, place_of
from timeline.storage_plugins.contract import Swept, TagMutation
from timeline.storage_plugins.sql import DEAD, EXPIRES, TAGGED, signed_one
from timeline.storage_plugins.sql.changes import TagCounts, mutate_tagged, remove_found
from timeline.storage_plugins.sql.dialect import Changes, SqlDialect
from timeline.storage_plugins.sql.rows import FoundColumns
from timeline.storage_plugins.sql.statements import Plan, Statement
from timeline.storage_plugins.sqlite.dialect import BY_ROWS, WHOLE, SqliteColumns, SqliteDialect, json_text

_ROWS = SqliteColumns(("row",))

# ── by tag ──

_CHUNK = (
    f"(SELECT row FROM message INDEXED BY message_tag WHERE topic = ? AND {TAGGED} AND tag = ? "
    "AND (bucket, id) > (?, ?) ORDER BY bucket, id LIMIT ?)"
)


def search_tag(key: int, tag: bytes, cursor: bytes, limit: int) -> Plan[tuple[list[int], bytes | None]]:
    """Return the rows of the next messages of the walk over (bucket, id), and its cursor (None: it is done)."""
    while True:
        found = yield _ROWS.reading(_CHUNK, (key, tag, *place_of(cursor), limit))
        rows: list[int] = found.numbers["row"]
        if len(rows) < limit:
            return rows, None
        last = yield Statement("SELECT bucket, id FROM message WHERE row = ?", (rows[-1],), list)
        if last:
            return rows, cursor_at(*last[0])
        # The writer has removed the last one since: look again.


_PLAIN = (
    "died_ms = 0 AND holder = x'' AND grp = ? AND last_op != ? AND (expires_ms = 0 OR expires_ms > max(?, {due})) "
    "AND {due} <= ?"
)
_TO = "CASE WHEN ? THEN ? ELSE max(0, scheduled_ms + ?) END"
"""The due time that a move asks for: the absolute one, or shifted from the scheduled one."""
_AGREEING = SqliteColumns(("row", "payload_bytes", "headers_bytes", "plain", "to_ms"))
_AGREEING_SOURCE = (
    f"(SELECT row, payload_bytes, headers_bytes, {_PLAIN.format(due=_TO)} AS plain, {_TO} AS to_ms FROM message "
    f"WHERE {BY_ROWS} AND +topic = ? AND +tag = ? AND put_ms <= ? "
    "AND (? = 0 OR asked_ms <= ? OR last_op = ?))"
)
"""By row: without the signs the planner walks the whole tag, again for each work."""
_OTHERS = f"(SELECT {WHOLE.inner} FROM message WHERE {BY_ROWS})"
_MOVE = (
    f"UPDATE message SET version = version + 1, due_ms = {_TO}, scheduled_ms = {_TO}, asked_ms = ?, last_op = ? "
    f"WHERE {BY_ROWS}"
)
_REMEMBER = (
    "INSERT OR REPLACE INTO remembered (topic, id, birth, version, payload_sum, last_op, settled_ms) "
    f"SELECT topic, id, birth, version, payload_sum, ?, ? FROM message WHERE {BY_ROWS}"
)


def change_tagged(changes: Changes, mutation: TagMutation, rows: list[int], counts: TagCounts) -> Plan[None]:
    """Do `mutation` on those of `rows` that are still there and were there at its start."""
    now_ms, moves, sql = changes.now_ms, mutation.operation is Operation.MOVE, changes.sql
    assert isinstance(sql, SqliteDialect)
    to = (mutation.due_ms != 0, mutation.due_ms, mutation.by_ms) if moves else (True, 0, 0)
    op = signed_one(mutation.op)
    place = (json_text(rows), changes.key, mutation.tag, mutation.started_ms, to[2], mutation.started_ms, op)
    asked = (mutation.group, op, now_ms, *to, *to, mutation.latest_ms, *to, *place)
    found = yield _AGREEING.reading(_AGREEING_SOURCE, asked)
    columns = {name: np.array(values, dtype=np.int64) for name, values in found.numbers.items()}
    plain = columns["plain"] != 0
    chosen: list[int] = columns["row"][plain].tolist()
    if chosen:
        counts.by_status[Status.OK.code] += len(chosen)
    if chosen and not mutation.dry_run:
        if moves:
            yield Statement(_MOVE, (*to, *to, now_ms, op, json_text(chosen)), writes=True)
            counts.moved(int(columns["to_ms"][plain].min()))
        else:
            if changes.topic.settings.remember_ms:
                yield Statement(_REMEMBER, (op, now_ms, json_text(chosen)), writes=True)
            yield from sql.delete(chosen, (columns["payload_bytes"] + columns["headers_bytes"])[plain].tolist())
    others: list[int] = columns["row"][~plain].tolist()
    if others:  # something may refuse these

        def look(left: list[bytes] | None) -> Plan[Iterable[FoundColumns]]:
            return ((yield WHOLE.reading(_OTHERS, (json_text(others),))),)

        yield from mutate_tagged(changes, mutation, look, counts)


# ── the sweep ──

PAYLOADS_LOOKED_AT = 10_000


@dataclass(frozen=True, slots=True)
class Sweepable:
    """Rows to remove, as a search found them: of expired messages, of dead letters, of payloads without a message.
    `looked_until`: the row up to which payloads were looked at (None: all). `more`: whether there are more of these.
    `faded`: whether there are remembered ids past their time. `dropped`: whether there are rows of dropped topics."""

    expired: list[int]
    dead: list[int]
    orphans: list[int]
    looked_until: int | None
    more: bool
    faded: bool
    dropped: bool

    def __len__(self) -> int:
        return len(self.expired) + len(self.dead) + len(self.orphans)

    def parts(self, count: int) -> Iterator[Sweepable]:
        """Return the rows in parts of at most `count` of a kind."""
        for start in range(0, max(len(self.expired), len(self.dead), len(self.orphans)), count):
            expired, dead, orphans = (rows[start : start + count] for rows in (self.expired, self.dead, self.orphans))
            yield Sweepable(expired, dead, orphans, looked_until=None, more=False, faded=False, dropped=False)


def _rows(source: str, values: Sequence[int]) -> Plan[list[int]]:
    found = yield _ROWS.reading(f"(SELECT row FROM {source} LIMIT ?)", values)
    rows: list[int] = found.numbers["row"]
    return rows


_UNHELD = "(holder = x'' OR due_ms <= ?)"
_EXPIRED = f"message INDEXED BY message_expires WHERE topic = ? AND {EXPIRES} AND expires_ms <= ? AND {_UNHELD}"
_DEAD = f"message INDEXED BY message_died WHERE topic = ? AND {DEAD} AND died_ms <= ?"
_ORPHANED = (
    "SELECT max(row), json_group_array(row) FILTER (WHERE orphan) FROM "
    "(SELECT p.row AS row, m.row IS NULL AS orphan FROM payload AS p LEFT JOIN message AS m ON m.row = p.row "
    "WHERE p.row > ? ORDER BY p.row LIMIT ?)"
)
_FADED = "SELECT 1 FROM remembered INDEXED BY remembered_settled WHERE topic = ? AND settled_ms <= ? LIMIT 1"


def search(topic: Topic, key: int, now_ms: int, limit: int, looked_until: int | None) -> Plan[Sweepable]:
    """Look for up to `limit` of each. `looked_until`: where the search for payloads without a message stopped; None: it
    is done."""
    settings = topic.settings
    expired = yield from _rows(_EXPIRED, (key, now_ms, now_ms, limit))
    dead: list[int] = []
    if settings.dead_retention_ms:
        dead = yield from _rows(_DEAD, (key, now_ms - settings.dead_retention_ms, limit))
    orphans: list[int] = []
    if looked_until is not None:
        ((looked_until, orphaned),) = yield Statement(_ORPHANED, (looked_until, PAYLOADS_LOOKED_AT), list)
        orphans = msgspec.json.decode(orphaned)
        if len(orphans) > limit:
            orphans = orphans[:limit]
            looked_until = orphans[-1]
    more = len(expired) == limit or len(dead) == limit or looked_until is not None
    faded = yield Statement(_FADED, (key, now_ms - settings.remember_ms), list)
    dropped = yield Statement("SELECT 1 FROM dropped LIMIT 1", (), list)
    return Sweepable(expired, dead, orphans, looked_until, more, bool(faded), bool(dropped))


_STILL = f"(SELECT {WHOLE.inner} FROM message WHERE {BY_ROWS} AND "
_STILL_EXPIRED = f"{_STILL}{EXPIRES} AND expires_ms <= ? AND {_UNHELD})"
_STILL_DEAD = f"{_STILL}{DEAD} AND died_ms <= ?)"
_REMOVE_ORPHANS = (
    f"DELETE FROM payload WHERE {BY_ROWS} AND NOT EXISTS (SELECT 1 FROM message WHERE message.row = payload.row)"
)


def remove(changes: Changes, found: Sweepable) -> Plan[Swept]:
    """Remove the rows that were found, if they still are as they were."""
    now_ms, expired, dead, orphans = changes.now_ms, None, None, 0
    if found.expired:
        expired = yield WHOLE.reading(_STILL_EXPIRED, (json_text(found.expired), now_ms, now_ms))
    if found.dead:
        until_ms = now_ms - changes.topic.settings.dead_retention_ms
        dead = yield WHOLE.reading(_STILL_DEAD, (json_text(found.dead), until_ms))
    counts = yield from remove_found(changes, expired, dead)
    if found.orphans:
        orphans = yield Statement(_REMOVE_ORPHANS, (json_text(found.orphans),), counts=True, writes=True)
    return Swept(expired=counts[0], dead_purged=counts[1], orphans=orphans)


def forget(key: int, until_ms: int, sql: SqlDialect, limit: int) -> Plan[int]:
    """Remove at most `limit` ids that were settled up to `until_ms`; return how many."""
    return sql.forget(key, until_ms, limit)
