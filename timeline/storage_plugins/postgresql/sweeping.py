"""The sweep: what has expired, what was remembered long enough, dead letters past retention, rows of dropped topics."""

from __future__ import annotations

from typing import Any

from timeline.model import Topic
from timeline.storage_plugins.contract import Swept
from timeline.storage_plugins.postgresql.connections import Connection, Steps
from timeline.storage_plugins.postgresql.messages import Changes
from timeline.storage_plugins.postgresql.rows import stored_of, whole
from timeline.storage_plugins.postgresql.schema import NOTHING
from timeline.storage_plugins.postgresql.statements import TOPIC
from timeline.storage_plugins.sql import DEAD, EXPIRES

_EXPIRED = f"""
SELECT {whole()} FROM timeline.message AS m WHERE m.topic = {TOPIC} AND {EXPIRES} AND m.expires_ms <= $2
  AND (m.holder = {NOTHING} OR m.due_ms <= $2) ORDER BY m.expires_ms LIMIT $3
"""
_DEAD = f"""
SELECT {whole()} FROM timeline.message AS m WHERE m.topic = {TOPIC} AND {DEAD} AND m.died_ms <= $2
ORDER BY m.died_ms LIMIT $3
"""
FORGET = f"""
DELETE FROM timeline.remembered WHERE ctid = ANY(ARRAY(
  SELECT r.ctid FROM timeline.remembered AS r WHERE r.topic + 0 = {TOPIC} AND r.settled_ms <= $2
  ORDER BY r.topic + 0, r.settled_ms LIMIT $3)) AND settled_ms <= $2
"""
_DROPPED = "SELECT key FROM timeline.dropped ORDER BY key LIMIT 1 FOR UPDATE SKIP LOCKED"
_ROWS_OF_DROPPED = """
WITH gone AS (
  DELETE FROM timeline.message WHERE ctid = ANY(ARRAY(
    SELECT m.ctid FROM timeline.message AS m WHERE m.topic = $1 ORDER BY m.bucket, m.id LIMIT $2)) RETURNING row
), content AS (DELETE FROM timeline.payload WHERE row = ANY(ARRAY(SELECT gone.row FROM gone)))
SELECT count(*) FROM gone
"""
IDS_OF_DROPPED = """
DELETE FROM timeline.remembered WHERE ctid = ANY(ARRAY(
  SELECT r.ctid FROM timeline.remembered AS r WHERE r.topic = $1 ORDER BY r.id LIMIT $2))
"""


async def sweep(steps: Steps, topic: Topic, now_ms: int, limit: int) -> Swept:
    """`Store.sweep`, but for dropped topics. There are no payloads without their message: one statement writes both."""
    settings = topic.settings
    changes = Changes(topic, now_ms)

    async def look(connection: Connection) -> tuple[list[Any], list[Any]]:
        expired, dead = await connection.fetch(_EXPIRED, topic.uid, now_ms, limit), []
        if settings.dead_retention_ms:
            dead = await connection.fetch(_DEAD, topic.uid, now_ms - settings.dead_retention_ms, limit)
        return expired, dead

    async def forget(connection: Connection) -> int:
        return _count(await connection.execute(FORGET, topic.uid, now_ms - settings.remember_ms, limit))

    expired, dead = await steps.use(look, writes=False)
    for record in expired:
        stored = changes.met[record["id"]] = stored_of(record)
        changes.remove(stored)
    for record in dead:
        stored = changes.met[record["id"]] = stored_of(record)
        changes.remove(stored, remember=False)
    lost = await changes.write(steps)
    forgotten = await steps.use(forget, writes=True)
    gone = [sum(record["id"] not in lost for record in found) for found in (expired, dead)]
    more = limit in (len(expired), len(dead), forgotten)
    return Swept(expired=gone[0], forgotten=forgotten, dead_purged=gone[1], more=more)


async def remove_dropped(connection: Connection, limit: int) -> bool:
    """Removes up to `limit` rows of one dropped topic; whether there may be more."""
    key = await connection.fetchval(_DROPPED)
    if key is None:
        return False
    removed = await connection.fetchval(_ROWS_OF_DROPPED, key, limit)
    if removed < limit:
        removed += _count(await connection.execute(IDS_OF_DROPPED, key, limit - removed))
    if removed < limit:
        await connection.execute("DELETE FROM timeline.dropped WHERE key = $1", key)
    return True


def _count(tag: str) -> int:
    """How many rows a command's tag tells of: `DELETE 3`."""
    return int(tag.rpartition(" ")[2])
