"""The sweep and the operations by tag: found along an index, changed by row."""

from __future__ import annotations

from timeline.model import Topic
from timeline.storage_plugins.contract import Swept, TagMutation, TagStep
from timeline.storage_plugins.mysql import statements
from timeline.storage_plugins.mysql.connections import Session
from timeline.storage_plugins.mysql.messages import Changes
from timeline.storage_plugins.mysql.reading import walk
from timeline.storage_plugins.mysql.statements import DEAD, FREE, HELD, WHOLE
from timeline.storage_plugins.sql import STRINGS
from timeline.storage_plugins.sql.changes import mutate_tagged
from timeline.storage_plugins.sql.rows import Stored, cursor_at, stored_of

_CHUNK = statements.Aggregate(("bucket", *WHOLE.numbers), tuple(STRINGS.values()))


def mutate_tag(
    session: Session, topic: Topic, key: int, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int
) -> TagStep:
    """`Store.mutate_tag`: a chunk of the walk over the tag's index, decided by the rules."""
    limit = min(max(1, limit), statements.LEASED_AT_ONCE)
    found = _CHUNK.read(
        session, _CHUNK.first(f"{walk(key, mutation.tag, cursor)} ORDER BY w.bucket, w.id LIMIT {limit} FOR UPDATE")
    )
    onward = cursor_at(found.numbers["bucket"][-1], found.strings["id"][-1]) if found.count == limit else None
    columns = (found.strings["id"], stored_of(found), found.numbers["put_ms"])
    there = (
        (id, stored)
        for id, stored, put_ms in zip(*columns, strict=True)
        if mutation.meets(put_ms, stored.message.asked_ms, stored.message.last_op)
    )
    counts, earliest_ms = mutate_tagged(Changes(session, topic, key, now_ms), mutation, there)
    return TagStep(dict(counts), onward, earliest_ms)


def sweep(session: Session, topic: Topic, key: int, now_ms: int, limit: int) -> Swept:
    """`Store.sweep`. Contents go with their messages, in one transaction: there are no orphans."""
    limit, settings = min(max(1, limit), statements.LEASED_AT_ONCE), topic.settings
    changes = Changes(session, topic, key, now_ms)
    expired = _found(
        session,
        "expiring AS e FORCE INDEX (PRIMARY) STRAIGHT_JOIN message AS m ON m.`row` = e.`row` "
        f"WHERE e.topic = {key} AND e.expires_ms <= {now_ms} "
        f"AND (m.kind = {FREE} OR (m.kind = {HELD} AND m.due_ms <= {now_ms}))",
        limit,
    )
    for id, stored in expired:
        changes.remove(id, stored)
    dead = []
    if settings.dead_retention_ms:
        until_ms = now_ms - settings.dead_retention_ms
        where = f"m.topic = {key} AND m.kind = {DEAD} AND m.place_ms <= {until_ms}"
        dead = _found(session, f"message AS m FORCE INDEX (message_due) WHERE {where}", limit)
        for id, stored in dead:
            changes.remove(id, stored, remember=False)
    changes.write()
    forgotten = session.execute(
        f"DELETE FROM remembered WHERE topic = {key} AND settled_ms <= {now_ms - settings.remember_ms} LIMIT {limit}"
    )
    removed = _remove_dropped(session, limit)
    more = limit in (len(expired), len(dead), forgotten) or removed >= limit
    return Swept(expired=len(expired), forgotten=forgotten, dead_purged=len(dead), more=more)


def _found(session: Session, source: str, limit: int) -> list[tuple[bytes, Stored]]:
    found = WHOLE.read(session, WHOLE.first(f"{source} LIMIT {limit} FOR UPDATE SKIP LOCKED"))
    return list(zip(found.strings["id"].tolist(), stored_of(found), strict=True))


def _remove_dropped(session: Session, limit: int) -> int:
    """Removes rows of dropped topics, at most `limit`, and says how many."""
    removed = 0
    for (key,) in session.rows("SELECT `key` FROM dropped FOR UPDATE SKIP LOCKED"):
        rows = [
            row for (row,) in session.rows(f"SELECT `row` FROM message WHERE topic = {key} LIMIT {limit - removed}")
        ]
        statements.delete(session, rows)
        removed += len(rows)
        if removed < limit:
            removed += session.execute(f"DELETE FROM remembered WHERE topic = {key} LIMIT {limit - removed}")
        if removed >= limit:
            break
        session.execute(f"DELETE FROM dropped WHERE `key` = {key}")
    return removed
