"""Topic records, and the small number by which rows name their topic."""

from __future__ import annotations

from typing import Any

from timeline.model import Topic
from timeline.storage_plugins.contract import TopicConflict
from timeline.storage_plugins.postgresql.connections import Connection
from timeline.storage_plugins.records import check_update, same_settings
from timeline.storage_plugins.sql import settings_text, topic_of

_RECORD = "SELECT uid, name, settings, revision, created_ms FROM timeline.topic"


async def key_of(connection: Connection, topic: Topic, keep: bool = False) -> int | None:
    """The topic's key, None when it was dropped. `keep`: nobody drops it before this transaction ends."""
    held = " FOR KEY SHARE" if keep else ""
    key: int | None = await connection.fetchval(f"SELECT key FROM timeline.topic WHERE uid = $1{held}", topic.uid)
    return key


async def all_topics(connection: Connection) -> list[Topic]:
    """All records, by name."""
    return sorted((_topic(record) for record in await connection.fetch(_RECORD)), key=lambda topic: topic.name)


def _topic(record: Any) -> Topic:
    return topic_of(*record)


async def _standing(connection: Connection, name: str) -> Topic | None:
    record = await connection.fetchrow(f"{_RECORD} WHERE name = $1 FOR UPDATE", name)
    return None if record is None else _topic(record)


async def create(connection: Connection, topic: Topic) -> Topic:
    """The record that stands."""
    made = await connection.fetchval(
        "INSERT INTO timeline.topic (uid, name, settings, revision, created_ms) VALUES ($1, $2, $3, $4, $5) "
        "ON CONFLICT (name) DO NOTHING RETURNING key",
        *(topic.uid, topic.name, settings_text(topic), topic.revision, topic.created_ms),
    )
    if made is not None:
        return topic
    standing = await _standing(connection, topic.name)
    if standing is None:
        raise TopicConflict(f"topic {topic.name!r} was dropped at this very moment: create it again", id=topic.name)
    return same_settings(standing, topic)


async def update(connection: Connection, topic: Topic) -> Topic:
    """The record with its next revision."""
    changed = check_update(await _standing(connection, topic.name), topic)
    await connection.execute(
        "UPDATE timeline.topic SET settings = $1, revision = $2, created_ms = $3 WHERE uid = $4",
        *(settings_text(changed), changed.revision, changed.created_ms, changed.uid),
    )
    return changed


async def drop(connection: Connection, topic: Topic) -> bool:
    """Removes the record; its rows are the sweep's. False when no such record stood."""
    sql = "DELETE FROM timeline.topic WHERE name = $1 AND uid = $2 RETURNING key"
    key = await connection.fetchval(sql, topic.name, topic.uid)
    if key is not None:
        await connection.execute("INSERT INTO timeline.dropped (key) VALUES ($1)", key)
    return key is not None
