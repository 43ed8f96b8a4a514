"""Topic records: a field of one hash each, compared and set."""

from __future__ import annotations

import dataclasses
import json

from timeline.model import Topic, TopicSettings
from timeline.storage_plugins.records import check_update, same_settings
from timeline.storage_plugins.redis import scripts
from timeline.storage_plugins.redis.changes import Keys
from timeline.storage_plugins.redis.server import Server

GONE_MS = 7 * 86_400_000
"""So long a dropped topic's buckets refuse the puts of a broker that has not heard of it."""


def text_of(topic: Topic) -> bytes:
    """A record as it stands in the hash."""
    return json.dumps(dataclasses.asdict(topic), sort_keys=True).encode()


def topic_of(text: bytes) -> Topic:
    """The reverse; settings that this version does not know are left out, missing ones have defaults."""
    record = json.loads(text)
    known = {field.name for field in dataclasses.fields(TopicSettings)}
    settings = {name: value for name, value in record["settings"].items() if name in known}
    return Topic(record["name"], record["uid"], TopicSettings(**settings), record["revision"], record["created_ms"])


def key_of(server: Server) -> bytes:
    """The hash of all records."""
    return f"{server.location.prefix}:topics".encode()


async def all_topics(server: Server) -> list[Topic]:
    """All records, by name."""
    key = key_of(server)
    return sorted(map(topic_of, await server.at(key, "HVALS", key)), key=lambda topic: topic.name)


async def _raw(server: Server, name: str) -> bytes:
    key = key_of(server)
    found: bytes | None = await server.at(key, "HGET", key, name.encode())
    return found or b""


def _known(raw: bytes) -> Topic | None:
    return topic_of(raw) if raw else None


async def _swap(server: Server, name: str, old: bytes, new: bytes) -> bytes:
    stands: bytes = await server.run(scripts.SWAP, [key_of(server)], (name.encode(), old, new))
    return stands


async def create(server: Server, topic: Topic) -> Topic:
    """The record that stands."""
    text = text_of(topic)
    stands = await _swap(server, topic.name, b"", text)
    return topic if stands == text else same_settings(topic_of(stands), topic)


async def update(server: Server, topic: Topic) -> Topic:
    """The record with its next revision."""
    raw = await _raw(server, topic.name)
    changed = check_update(_known(raw), topic)
    stands = await _swap(server, topic.name, raw, text_of(changed))
    return changed if stands == text_of(changed) else check_update(_known(stands), topic)


async def drop(server: Server, topic: Topic) -> bool:
    """Removes the record, then the rows. False when no such record stood."""
    raw = await _raw(server, topic.name)
    if not raw or topic_of(raw).uid != topic.uid:
        return False
    while await _swap(server, topic.name, raw, b"") != b"":
        raw = await _raw(server, topic.name)
        if not raw or topic_of(raw).uid != topic.uid:
            return False
    await Keys(server, topic).each(scripts.DROP, None, GONE_MS)
    return True


__all__ = ["all_topics", "create", "drop", "update"]
