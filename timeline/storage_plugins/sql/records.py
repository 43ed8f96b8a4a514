"""Topic records: made, changed and dropped, each in a transaction of its own."""

from __future__ import annotations

from timeline.model import Topic
from timeline.storage_plugins.contract import TopicConflict
from timeline.storage_plugins.records import check_update, same_settings, settings_text, topic_of
from timeline.storage_plugins.sql.dialect import SqlDialect
from timeline.storage_plugins.sql.statements import Plan

_COLUMNS = "uid, name, settings, revision, created_ms"


def all_topics(sql: SqlDialect) -> Plan[list[Topic]]:
    """All records, by name."""
    records = yield sql.query().rows(f"SELECT {_COLUMNS} FROM {sql.table('topic')}")
    return sorted((topic_of(*record) for record in records), key=lambda topic: topic.name)


def _standing(sql: SqlDialect, name: str) -> Plan[Topic | None]:
    query = sql.query()
    records = yield query.rows(
        f"SELECT {_COLUMNS} FROM {sql.table('topic')} WHERE name = {query(sql.text(name))}{sql.locked}"
    )
    return topic_of(*records[0]) if records else None


def create(sql: SqlDialect, topic: Topic) -> Plan[Topic]:
    """The record that stands."""
    query = sql.query()
    values = (topic.uid, sql.text(topic.name), sql.text(settings_text(topic)), topic.revision, topic.created_ms)
    yield query.running(
        f"INSERT INTO {sql.table('topic')} ({_COLUMNS}) VALUES ({', '.join(map(query, values))}) {sql.unless_named}"
    )
    standing = yield from _standing(sql, topic.name)
    if standing is None:
        raise TopicConflict(f"topic {topic.name!r} was dropped at this very moment: create it again", id=topic.name)
    return same_settings(standing, topic)


def update(sql: SqlDialect, topic: Topic) -> Plan[Topic]:
    """The record with its next revision."""
    changed = check_update((yield from _standing(sql, topic.name)), topic)
    query = sql.query()
    yield query.running(
        f"UPDATE {sql.table('topic')} SET settings = {query(sql.text(settings_text(changed)))}, revision = "
        f"{query(changed.revision)}, created_ms = {query(changed.created_ms)} WHERE uid = {query(changed.uid)}"
    )
    return changed


def drop(sql: SqlDialect, topic: Topic) -> Plan[bool]:
    """Remove the record; its rows are the sweep's. False when no such record stood."""
    query, table = sql.query(), sql.table("topic")
    keys = yield query.rows(
        f"SELECT {sql.quoted('key')} FROM {table} WHERE name = {query(sql.text(topic.name))} "
        f"AND uid = {query(topic.uid)}{sql.locked}"
    )
    if not keys:
        return False
    query = sql.query()
    yield query.running(f"DELETE FROM {table} WHERE uid = {query(topic.uid)}")
    query = sql.query()
    yield query.running(f"INSERT INTO {sql.table('dropped')} ({sql.quoted('key')}) VALUES ({query(keys[0][0])})")
    return True
