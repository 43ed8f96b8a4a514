"""The sweep: searched along indexes on a reading connection, removed in small transactions."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

from timeline.model import Topic
from timeline.storage_plugins.contract import Swept
from timeline.storage_plugins.sql import DEAD, EXPIRES
from timeline.storage_plugins.sql.rows import stored_of
from timeline.storage_plugins.sqlite import statements
from timeline.storage_plugins.sqlite.messages import Changes
from timeline.storage_plugins.sqlite.writer import Transaction

PAYLOADS_LOOKED_AT = 10_000


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found to be removed: rows of expired messages, of dead letters, of payloads without a message;
    the row up to which payloads were looked at (None: all were); whether there is more of these; whether there are
    remembered ids past their time (`faded`), and rows of topics that were dropped."""

    expired: list[int]
    dead: list[int]
    orphans: list[int]
    looked_until: int | None
    more: bool
    faded: bool
    dropped: bool

    def __len__(self) -> int:
        return len(self.expired) + len(self.dead) + len(self.orphans)

    def parts(self, count: int) -> Iterator[Found]:
        """The rows in parts of at most `count` of a kind."""
        for start in range(0, max(len(self.expired), len(self.dead), len(self.orphans)), count):
            expired, dead, orphans = (rows[start : start + count] for rows in (self.expired, self.dead, self.orphans))
            yield Found(expired, dead, orphans, looked_until=None, more=False, faded=False, dropped=False)


def _rows(connection: sqlite3.Connection, source: str, parameters: tuple[object, ...]) -> list[int]:
    rows: list[int] = json.loads(
        connection.execute(
            f"SELECT json_group_array(row) FROM (SELECT row FROM {source} LIMIT ?)", parameters
        ).fetchone()[0]
    )
    return rows


def search(
    connection: sqlite3.Connection, topic: Topic, key: int, now_ms: int, limit: int, looked_until: int | None
) -> Found:
    """Looks for up to `limit` of each. `looked_until`: where looking for payloads without a message stopped, None when
    that is done."""
    expired = _rows(
        connection,
        f"message INDEXED BY message_expires WHERE topic = ? AND {EXPIRES} AND expires_ms <= ? AND {_UNHELD}",
        (key, now_ms, now_ms, limit),
    )
    dead: list[int] = []
    if topic.settings.dead_retention_ms:
        dead = _rows(
            connection,
            f"message INDEXED BY message_died WHERE topic = ? AND {DEAD} AND died_ms <= ?",
            (key, now_ms - topic.settings.dead_retention_ms, limit),
        )
    orphans: list[int] = []
    if looked_until is not None:
        passed = (
            "(SELECT p.row AS row, m.row IS NULL AS orphan FROM payload AS p LEFT JOIN message AS m ON m.row = p.row "
            "WHERE p.row > ? ORDER BY p.row LIMIT ?)"
        )
        last, orphaned = connection.execute(
            f"SELECT max(row), json_group_array(row) FILTER (WHERE orphan) FROM {passed}",
            (looked_until, PAYLOADS_LOOKED_AT),
        ).fetchone()
        looked_until = last
        orphans = json.loads(orphaned)
        if len(orphans) > limit:
            orphans = orphans[:limit]
            looked_until = orphans[-1]
    more = len(expired) == limit or len(dead) == limit or looked_until is not None
    faded = connection.execute(
        "SELECT 1 FROM remembered INDEXED BY remembered_settled WHERE topic = ? AND settled_ms <= ? LIMIT 1",
        (key, now_ms - topic.settings.remember_ms),
    ).fetchone()
    dropped = connection.execute("SELECT 1 FROM dropped LIMIT 1").fetchone()
    return Found(expired, dead, orphans, looked_until, more, faded is not None, dropped is not None)


_UNHELD = "(holder = x'' OR due_ms <= ?)"
_STILL_EXPIRED = statements.WHOLE.over(
    f"(SELECT {statements.WHOLE.inner} FROM message WHERE row IN (SELECT value FROM json_each(?)) "
    f"AND {EXPIRES} AND expires_ms <= ? AND {_UNHELD})"
)
_STILL_DEAD = statements.WHOLE.over(
    f"(SELECT {statements.WHOLE.inner} FROM message WHERE row IN (SELECT value FROM json_each(?)) "
    f"AND {DEAD} AND died_ms <= ?)"
)


def remove(transaction: Transaction, topic: Topic, key: int, now_ms: int, found: Found) -> Swept:
    """Removes what was found, as far as it still is so."""
    connection, settings = transaction.connection, topic.settings
    changes = Changes(transaction, topic, key, now_ms)
    expired = dead = orphans = 0
    if found.expired:
        columns = statements.WHOLE.read(connection, _STILL_EXPIRED, (json.dumps(found.expired), now_ms, now_ms))
        for id, stored in zip(columns.strings["id"], stored_of(columns), strict=True):
            changes.remove(id, stored)
            expired += 1
    if found.dead:
        until_ms = now_ms - settings.dead_retention_ms
        columns = statements.WHOLE.read(connection, _STILL_DEAD, (json.dumps(found.dead), until_ms))
        for id, stored in zip(columns.strings["id"], stored_of(columns), strict=True):
            changes.remove(id, stored, remember=False)
            dead += 1
    changes.write()
    if found.orphans:
        orphans = connection.execute(
            "DELETE FROM payload WHERE row IN (SELECT value FROM json_each(?)) "
            "AND NOT EXISTS (SELECT 1 FROM message WHERE message.row = payload.row)",
            (json.dumps(found.orphans),),
        ).rowcount
    return Swept(expired=expired, dead_purged=dead, orphans=orphans)


def forget(transaction: Transaction, key: int, until_ms: int, limit: int) -> int:
    """Removes ids that were settled up to `until_ms`, at most `limit`; says how many."""
    return transaction.connection.execute(
        "DELETE FROM remembered WHERE topic = ? AND id IN (SELECT id FROM remembered INDEXED BY remembered_settled "
        "WHERE topic = ? AND settled_ms <= ? LIMIT ?)",
        (key, key, until_ms, limit),
    ).rowcount


def remove_dropped(transaction: Transaction, limit: int) -> int:
    """Removes rows of dropped topics, at most `limit`, and says how many; fewer when nothing is left of any."""
    connection = transaction.connection
    removed = 0
    while removed < limit and (first := connection.execute("SELECT key FROM dropped LIMIT 1").fetchone()) is not None:
        (key,) = first
        columns = statements.Aggregate(("row", "payload_bytes", "headers_bytes"))
        source = f"(SELECT {columns.inner} FROM message INDEXED BY message_id WHERE topic = ? LIMIT ?)"
        found = columns.read(connection, columns.over(source), (key, limit - removed)).numbers
        sizes = [sum(size) for size in zip(found["payload_bytes"], found["headers_bytes"], strict=True)]
        statements.delete_messages(connection, found["row"])
        transaction.orphan(found["row"], sizes)
        removed += len(sizes)
        removed += connection.execute(
            "DELETE FROM remembered WHERE topic = ? AND id IN (SELECT id FROM remembered WHERE topic = ? LIMIT ?)",
            (key, key, limit - removed),
        ).rowcount
        if removed < limit:
            connection.execute("DELETE FROM dropped WHERE key = ?", first)
    return removed


__all__ = ["Found", "forget", "remove", "remove_dropped", "search"]
