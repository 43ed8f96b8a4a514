"""Records in Redis: the store's own, with its uuid and its schema's versions, and one per topic.

Topic records are fields of one hash, changed by compare-and-set.
"""

from __future__ import annotations

import json
import logging
import secrets
from dataclasses import dataclass, field
from typing import Any

from timeline.model import Topic, TopicSettings
from timeline.storage_plugins.contract import StoreError, StoreRefused
from timeline.storage_plugins.records import check_update, read_settings, same_settings, settings_record, spoilt
from timeline.storage_plugins.redis import scripts
from timeline.storage_plugins.redis.changes import BucketKeys
from timeline.storage_plugins.redis.server import Server
from timeline.storage_plugins.versions import Step, Versions, migrate


@dataclass(slots=True)
class Runs:
    """What half a step may do: run scripts, each on keys of one slot, which may run again without harm. `prefix`: the
    beginning of every key."""

    prefix: bytes
    calls: list[tuple[str, list[bytes], list[Any]]] = field(default_factory=list)

    def __call__(self, script: str, keys: list[bytes], args: list[Any]) -> None:
        self.calls.append((script, keys, args))


MIGRATIONS: tuple[Step[Runs], ...] = ()
"""See `versions.migrate`."""


async def known_uid(server: Server) -> str:
    """Return the store's uuid; empty if there is none."""
    key = _store_key(server)
    uid: bytes = await server.at(key, "HGET", key, "cluster_uid") or b""
    return uid.decode()


async def cluster_uid(server: Server) -> str:
    """Return the store's uuid, made once, and migrate its schema. Raise StoreRefused for a newer schema."""
    key = _store_key(server)
    uid = await known_uid(server)
    if not uid:
        newest = str(1 + len(MIGRATIONS))
        for name in ("schema_version", "oldest_version"):
            await server.run(scripts.SWAP, [key], (name.encode(), b"", newest))
        await server.run(scripts.SWAP, [key], (b"cluster_uid", b"", secrets.token_hex(16)))
        uid = await known_uid(server)
    await migrated(server, contract=False)
    return uid


async def migrated(server: Server, contract: bool) -> Versions:
    """Migrate the schema and return its versions. `contract`: remove what only the version before needed. Two brokers
    that migrate at once do the same."""
    key = _store_key(server)
    version, oldest = await server.at(key, "HMGET", key, "schema_version", "oldest_version")
    try:
        found = Versions.of(version or b"", oldest)
    except ValueError as damaged:
        raise StoreRefused(
            f"the store's own record, {key.decode(errors='replace')}, is damaged ({damaged}): restore it"
        ) from damaged
    runs = Runs(server.location.prefix.encode())
    reached = migrate(runs, found, MIGRATIONS, contract=contract)
    for script, keys, args in runs.calls:
        await server.run(script, keys, args)
    await server.run(scripts.SWAP, [key], (b"schema_version", version, str(reached.version)))
    await server.run(scripts.SWAP, [key], (b"oldest_version", oldest or b"", str(reached.oldest)))
    return reached


def _store_key(server: Server) -> bytes:
    return server.location.record


# ── topics ──

log = logging.getLogger("timeline.store")

GONE_MS = 7 * 86_400_000
"""How long a dropped topic's buckets refuse the puts of a broker that does not know of the drop."""


def text_of(topic: Topic) -> bytes:
    """Return a topic's record. The uid is text, as many readers of JSON round numbers of 64 bits. Records of earlier
    versions have a number."""
    record = {"name": topic.name, "uid": str(topic.uid), "revision": topic.revision, "created_ms": topic.created_ms}
    return json.dumps({**record, "settings": settings_record(topic)}, sort_keys=True).encode()


def topic_of(text: bytes) -> Topic:
    """Return the topic of a record. Raise StoreRefused for what no Timeline wrote."""
    try:
        record = json.loads(text)
        name, uid, told = str(record["name"]), int(record["uid"]), record["settings"]
        revision, created_ms = int(record["revision"]), int(record["created_ms"])
    except (ArithmeticError, KeyError, RecursionError, TypeError, ValueError) as bad:
        raise spoilt("", f"{text!r:.80} is none") from bad
    settings, newer = read_settings(name, told)
    return Topic(name, uid, settings, revision, created_ms, newer)


def key_of(server: Server) -> bytes:
    """Return the key of the hash of all records."""
    return f"{server.location.prefix}:topics".encode()


async def all_topics(server: Server) -> list[Topic]:
    """Return all topics, by name."""
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


async def create_topic(server: Server, topic: Topic) -> Topic:
    """`Store.create_topic`."""
    text = text_of(topic)
    stands = await _swap(server, topic.name, b"", text)
    return topic if stands == text else same_settings(topic_of(stands), topic)


async def update_topic(server: Server, topic: Topic) -> Topic:
    """`Store.update_topic`."""
    raw = await _raw(server, topic.name)
    changed = check_update(_known(raw), topic)
    stands = await _swap(server, topic.name, raw, text_of(changed))
    return changed if stands == text_of(changed) else check_update(_known(stands), topic)


async def drop_topic(server: Server, topic: Topic) -> bool:
    """`Store.drop_topic`. The rows are noted for removal first: if this call ends early, a sweep removes them."""
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
    """Return the key of the hash of dropped topics whose rows may be there: uid → buckets."""
    return f"{server.location.prefix}:dropped".encode()


async def _clear(server: Server, uid: int, buckets: int) -> None:
    try:
        await BucketKeys(server, Topic("", uid, TopicSettings(buckets=buckets))).each(scripts.DROP, None, GONE_MS)
        await server.run(scripts.SWAP, [_notes(server)], (b"%d" % uid, b"%d" % buckets, b""))
    except StoreError as left:
        log.warning("the next sweep removes what is left of a dropped topic: %s", left)


async def dropped_topics(server: Server) -> dict[int, int]:
    """Return dropped topics that still have rows: uid → buckets."""
    key = _notes(server)
    noted = await server.at(key, "HGETALL", key)
    stand = {topic.uid for topic in await all_topics(server)} if noted else set()
    told = zip(map(int, noted[::2]), map(int, noted[1::2]), strict=True)
    return {uid: buckets for uid, buckets in told if uid not in stand}


async def clear(server: Server, left: dict[int, int]) -> None:
    """Remove the rows of dropped topics. What cannot be removed now waits for the next sweep."""
    for uid, buckets in left.items():
        await _clear(server, uid, buckets)
