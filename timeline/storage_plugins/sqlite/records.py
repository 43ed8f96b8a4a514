"""Topic records, and the small number by which rows name their topic."""

from __future__ import annotations

import sqlite3

from timeline.model import Topic
from timeline.storage_plugins.records import check_update, same_settings
from timeline.storage_plugins.sql import settings_text, topic_of
from timeline.storage_plugins.sqlite.writer import Transaction

_RECORD = "SELECT uid, name, settings, revision, created_ms FROM topic"


class Topics:
    """The keys of the topics that stand, by uid. Changed by the writer, read on the event loop, each in one step."""

    def __init__(self) -> None:
        self._keys: dict[int, int] = {}

    def load(self, connection: sqlite3.Connection) -> None:
        """Reads all keys."""
        self._keys = dict(connection.execute("SELECT uid, key FROM topic").fetchall())

    def key(self, topic: Topic) -> int | None:
        """The topic's key; None when it does not stand (any more)."""
        return self._keys.get(topic.uid)

    def add(self, topic: Topic, key: int) -> None:
        self._keys[topic.uid] = key

    def remove(self, topic: Topic) -> None:
        self._keys.pop(topic.uid, None)


def all_topics(connection: sqlite3.Connection) -> list[Topic]:
    """All records, by name."""
    return [topic_of(*record) for record in connection.execute(f"{_RECORD} ORDER BY name").fetchall()]


def _standing(connection: sqlite3.Connection, name: str) -> Topic | None:
    record = connection.execute(f"{_RECORD} WHERE name = ?", (name,)).fetchone()
    return None if record is None else topic_of(*record)


def create(transaction: Transaction, topic: Topic, topics: Topics) -> Topic:
    """The record that stands, and from now on its key is known, whether or not its creator still waits."""
    connection = transaction.connection
    standing = _standing(connection, topic.name)
    if standing is None:
        settings = settings_text(topic)
        connection.execute(
            "INSERT INTO topic (uid, name, settings, revision, created_ms) VALUES (?, ?, ?, ?, ?)",
            (topic.uid, topic.name, settings, topic.revision, topic.created_ms),
        )
        (key,) = connection.execute("SELECT key FROM topic WHERE uid = ?", (topic.uid,)).fetchone()
        topics.add(topic, int(key))
        transaction.undo.append(lambda: topics.remove(topic))
        return topic
    return same_settings(standing, topic)


def update(transaction: Transaction, topic: Topic) -> Topic:
    """The record with its next revision."""
    changed = check_update(_standing(transaction.connection, topic.name), topic)
    transaction.connection.execute(
        "UPDATE topic SET settings = ?, revision = ?, created_ms = ? WHERE uid = ?",
        (settings_text(changed), changed.revision, changed.created_ms, changed.uid),
    )
    return changed


def drop(transaction: Transaction, topic: Topic, topics: Topics) -> bool:
    """Removes the record; its rows are the sweep's. False when no such record stood."""
    connection = transaction.connection
    found = connection.execute("SELECT key FROM topic WHERE name = ? AND uid = ?", (topic.name, topic.uid)).fetchone()
    if found is None:
        return False
    connection.execute("DELETE FROM topic WHERE key = ?", found)
    # Now, not after the commit: a put behind this one in the same transaction must not find the topic.
    topics.remove(topic)
    transaction.undo.append(lambda: topics.add(topic, int(found[0])))
    connection.execute("INSERT INTO dropped (key) VALUES (?)", found)
    return True
