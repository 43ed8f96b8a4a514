"""Topic records and the cluster's uid. Each change is a conditional write; if its answer is lost, it is read back."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from timeline.model import Topic
from timeline.storage_plugins.cassandra.session import CassandraSession, WriteUnknown, in_doubt
from timeline.storage_plugins.cassandra.statements import PARTS
from timeline.storage_plugins.contract import StoreUnavailable, StoreUnknown, TopicConflict
from timeline.storage_plugins.records import check_update, same_settings, settings_text, topic_of

log = logging.getLogger("timeline.store")

KNOWN_S = 1.0
"""How long a topic record that was read is relied on."""
CLEARED_AT_ONCE = 64
"""Buckets whose rows one request deletes."""


def _topic(row: Any) -> Topic:
    return topic_of(row.uid, row.name, row.settings, row.revision, row.created_ms)


async def all_topics(connected: CassandraSession) -> list[Topic]:
    """Return all topics, by name."""
    return sorted(map(_topic, await connected.read("topics")), key=lambda topic: topic.name)


async def standing(connected: CassandraSession, name: str, serial: bool = False) -> Topic | None:
    """Return the topic of a name. `serial`: complete changes under way first."""
    rows = await connected.read("topic", name, serial=serial)
    return _topic(rows[0]) if rows else None


class Records:
    """Topics that stood a moment ago."""

    def __init__(self, connected: CassandraSession) -> None:
        self._connected = connected
        self._until_s: dict[int, float] = {}

    async def stands(self, topic: Topic, lately: bool = True) -> bool:
        """Return whether the topic's record is there. `lately`: it may have been read within KNOWN_S. That is safe: a
        drop removes the buckets too, and a change that meets a bucket without a head asks again."""
        now_s = asyncio.get_running_loop().time()
        if lately and now_s < self._until_s.get(topic.uid, 0):
            return True
        found = await standing(self._connected, topic.name)
        if found is None or found.uid != topic.uid:
            self.forget(topic.uid)
            return False
        self._until_s[topic.uid] = now_s + KNOWN_S
        return True

    def topics(self) -> set[int]:
        """Return the topics that stood when they were last asked for."""
        return set(self._until_s)

    def forget(self, topic: int) -> None:
        """Forget a topic that was dropped."""
        self._until_s.pop(topic, None)


async def create(connected: CassandraSession, topic: Topic) -> Topic:
    """`Store.create_topic`."""
    settings = settings_text(topic)
    values = (topic.name, topic.uid, settings, topic.revision, topic.created_ms)
    try:
        await connected.write([("topic_create", values)])
    except WriteUnknown as doubt:
        stands = await standing(connected, topic.name, serial=True)
        if stands is None:
            raise StoreUnknown(f"the topic may still be created: {doubt}") from doubt
        return same_settings(stands, topic)
    stands = await standing(connected, topic.name, serial=True)
    if stands is None:
        raise TopicConflict(f"topic {topic.name!r} was dropped while it was created", id=topic.name)
    return same_settings(stands, topic)


async def update(connected: CassandraSession, topic: Topic) -> Topic:
    """`Store.update_topic`."""
    changed = check_update(await standing(connected, topic.name), topic)
    values = (settings_text(changed), changed.revision, changed.created_ms, topic.name, topic.uid)
    with in_doubt("the topic may be changed"):
        rows = await connected.write([("topic_update", (*values, topic.revision))])
    if not rows[0][0]:
        check_update(await standing(connected, topic.name, serial=True), topic)
        raise TopicConflict(f"topic {topic.name!r} was changed meanwhile; read it again", id=topic.name)
    return changed


async def drop(connected: CassandraSession, topic: Topic) -> bool:
    """`Store.drop_topic`. Its rows and contents are noted for removal first. If this process ends early, a sweep
    removes them, as it does with what a put under way has left."""
    stands = await standing(connected, topic.name)
    if stands is None or stands.uid != topic.uid:
        return False
    with in_doubt("the topic may be dropped"):
        await connected.write([("dropped_add", (topic.uid, topic.settings.buckets))])
        rows = await connected.write([("topic_drop", (topic.name, topic.uid))])
    if not rows[0][0]:
        return False
    try:
        await _clear(connected, topic.uid, topic.settings.buckets)
    except (WriteUnknown, StoreUnavailable) as left:
        log.warning("the next sweep removes what is left of topic %s: %s", topic.name, left)
    return True


async def _clear(connected: CassandraSession, uid: int, buckets: int) -> None:
    for start in range(0, buckets, CLEARED_AT_ONCE):
        numbers = list(range(start, min(buckets, start + CLEARED_AT_ONCE)))
        await connected.write([("bucket_drop", (uid, numbers))])
        await connected.write([("content_drop", (uid, numbers, list(range(PARTS + 1))))])


async def clear_dropped(connected: CassandraSession) -> bool:
    """Remove the rows of one dropped topic, if there is any. Return whether there was."""
    rows = await connected.read("dropped")
    stand = {topic.uid for topic in await all_topics(connected)} if rows else set()
    gone = next((row for row in rows if row.uid not in stand), None)
    if gone is None:
        return False
    with in_doubt("the rows of a dropped topic may be removed"):
        await _clear(connected, gone.uid, gone.buckets)
        await connected.write([("dropped_remove", (gone.uid,))])
    return True


async def cluster_uid(connected: CassandraSession, fresh: str, version: str) -> str:
    """Return the cluster's uid, made once together with the note of the schema's version."""
    for name, value in (("schema", version), ("oldest", version), ("cluster", fresh)):
        if not await connected.read("meta", name):
            try:
                await connected.write([("meta_add", (name, value))])
            except WriteUnknown as doubt:
                raise StoreUnavailable(f"the cluster's record is not known to be written: {doubt}") from doubt
    return str((await connected.read("meta", "cluster", serial=True))[0].value)


async def probe(connected: CassandraSession) -> None:
    """Raise StoreUnavailable if a write would not work now."""
    try:
        await connected.write([("probe", ("probe", ""))])
    except WriteUnknown as doubt:
        raise StoreUnavailable(str(doubt)) from doubt
