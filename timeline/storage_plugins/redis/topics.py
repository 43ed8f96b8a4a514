"""Topic records: a field of one hash each, compared and set."""

from __future__ import annotations

import json
import logging

from timeline.model import Topic, TopicSettings
from timeline.storage_plugins.contract import StoreError
from timeline.storage_plugins.records import check_update, read_settings, same_settings, settings_record, spoilt
from timeline.storage_plugins.redis import scripts
from timeline.storage_plugins.redis.changes import Keys
from timeline.storage_plugins.redis.server import Server

log = logging.getLogger("timeline.store")

GONE_MS = 7 * 86_400_000
"""So long a dropped topic's buckets refuse the puts of a broker that has not heard of it."""


def text_of(topic: Topic) -> bytes:
    """A record as it stands in the hash. The uid is text: many readers of JSON round numbers of 64 bits. Records of
    earlier versions have a number."""
    record = {"name": topic.name, "uid": str(topic.uid), "revision": topic.revision, "created_ms": topic.created_ms}
    return json.dumps({**record, "settings": settings_record(topic)}, sort_keys=True).encode()


def topic_of(text: bytes) -> Topic:
    """The reverse. Raises StoreRefused for what no Timeline wrote."""
    try:
        record = json.loads(text)
        name, uid, told = str(record["name"]), int(record["uid"]), record["settings"]
        revision, created_ms = int(record["revision"]), int(record["created_ms"])
    except (ArithmeticError, KeyError, RecursionError, TypeError, ValueError) as bad:
        raise spoilt("", f"{text!r:.80} is none") from bad
    settings, newer = read_settings(name, told)
    return Topic(name, uid, settings, revision, created_ms, newer)


def key_of(server: Server) -> bytes:
    """The hash of all records."""
    return f"{server.location.prefix}:topics".encode()


async def all_topics(server: Server) -> list[Topic]:
    """All records, by name."""
    key = key_of(server)
    known, texts = server.records, await server.at(key, "HVALS", key)
    server.records = {text: known.get(text) or topic_of(text) for text in texts}
    return sorted(server.records.values(), key=lambda topic: topic.name)


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
    """Removes the record, then the rows. False when no such record stood. That the rows are to go is noted first: a
    sweep sees to it should this call not get that far."""
    raw = await _raw(server, topic.name)
    if not raw or topic_of(raw).uid != topic.uid:
        return False
    await server.run(scripts.SWAP, [_notes(server)], (b"%d" % topic.uid, b"", b"%d" % topic.settings.buckets))
    while await _swap(server, topic.name, raw, b"") != b"":
        raw = await _raw(server, topic.name)
        if not raw or topic_of(raw).uid != topic.uid:
            return False
    await _clear(server, topic.uid, topic.settings.buckets)
    return True


def _notes(server: Server) -> bytes:
    """The hash of dropped topics whose rows may be there: uid → buckets."""
    return f"{server.location.prefix}:dropped".encode()


async def _clear(server: Server, uid: int, buckets: int) -> None:
    try:
        await Keys(server, Topic("", uid, TopicSettings(buckets=buckets))).each(scripts.DROP, None, GONE_MS)
        await server.run(scripts.SWAP, [_notes(server)], (b"%d" % uid, b"%d" % buckets, b""))
    except StoreError as left:
        log.warning("what is left of a dropped topic waits for a sweep: %s", left)


async def dropped(server: Server) -> dict[int, int]:
    """Topics whose drop did not get as far as their rows: uid → buckets."""
    key = _notes(server)
    noted = await server.at(key, "HGETALL", key)
    stand = {topic.uid for topic in await all_topics(server)} if noted else set()
    told = zip(map(int, noted[::2]), map(int, noted[1::2]), strict=True)
    return {uid: buckets for uid, buckets in told if uid not in stand}


async def clear(server: Server, left: dict[int, int]) -> None:
    """Removes what is left of `dropped` topics; what cannot be removed now waits for the next sweep."""
    for uid, buckets in left.items():
        await _clear(server, uid, buckets)


__all__ = ["all_topics", "clear", "create", "drop", "dropped", "update"]
