"""`redis://host:port/db`: the store on Redis or Valkey, one server or a cluster; and its records.

There is a record of the store, with its uuid and its schema's versions, and one per topic. Topic records are fields of
one hash, changed by compare-and-set.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import secrets
from collections.abc import Sequence
from typing import Any

from timeline.columns import Int64
from timeline.model import MAX_PAYLOAD_BYTES, Answers, Topic, TopicSettings
from timeline.storage_plugins.contract import (
    Capabilities,
    Grant,
    LeasedRows,
    Mutations,
    Opened,
    Page,
    Puts,
    ScanFilter,
    Settles,
    Store,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    StoreUnknown,
    Swept,
    TagMutation,
    TagStep,
)
from timeline.storage_plugins.records import check_update, read_settings, same_settings, settings_record, spoilt
from timeline.storage_plugins.redis import changes, leasing, reading, scripts
from timeline.storage_plugins.redis.changes import BucketKeys
from timeline.storage_plugins.redis.server import RedisLocation, Server, check_rights, read_servers
from timeline.storage_plugins.versions import Step, Versions, migrate

log = logging.getLogger("timeline.store")


class RedisStore(Store):
    """The store of `redis://`; see `location` for the URL. Each message of a batch is decided by compare-and-set. If
    only a part of a batch could be written, its other messages answer UNAVAILABLE or UNKNOWN."""

    capabilities = Capabilities(
        durable=True,
        survives_failover=False,
        shared=True,
        payload_limit_bytes=MAX_PAYLOAD_BYTES,
        own_clock=True,
        exact_counts=True,
    )

    def __init__(self, url: str) -> None:
        self._location = RedisLocation.of(url)
        self._server: Server | None = None
        self._opened: Opened | None = None

    async def open(self) -> Opened:
        if self._opened is None:
            server = Server(self._location)
            try:
                await server.connect()
                found = await read_servers(server)
                await check_rights(server)
                uid = await cluster_uid(server)
            except StoreUnknown as error:
                await server.close()
                raise StoreUnavailable(error.reason) from error  # opening may be repeated
            except BaseException:
                await server.close()
                raise
            self._server = server
            server.serves(uid)
            self.capabilities = dataclasses.replace(type(self).capabilities, durable=found.durable)
            self._opened = Opened(uid, found.server, found.warnings)
        return self._opened

    async def inspect(self) -> Opened:
        self._running()
        fresh = Server(self._location)  # new connections, to the server that answers now
        try:
            await fresh.connect()
            found = await read_servers(fresh)
            uid = await known_uid(fresh)
        finally:
            await fresh.close()
        self.capabilities = dataclasses.replace(self.capabilities, durable=found.durable)
        return Opened(uid, found.server, found.warnings)

    async def close(self) -> None:
        server, self._server, self._opened = self._server, None, None
        if server is not None:
            await server.close()

    def _running(self) -> Server:
        if self._server is None:
            raise StoreUnavailable("the store is not open")
        return self._server

    def _keys(self, topic: Topic) -> BucketKeys:
        return BucketKeys(self._running(), topic)

    async def check(self) -> None:
        server = self._running()
        key = f"{self._location.prefix}:check".encode()
        await server.run(scripts.SWAP, [key], (b"written", b"", b"1"))
        await server.run(scripts.SWAP, [key], (b"written", b"1", b""))

    async def migrate(self, contract: bool) -> Versions:
        return await migrated(self._running(), contract)

    async def clock_ms(self) -> float | None:
        server = self._running()
        seconds, micros = await server.ask(server.masters[0], "TIME")
        return int(seconds) * 1000 + int(micros) / 1000

    # ── topics ──

    async def topics(self) -> list[Topic]:
        return await all_topics(self._running())

    async def create_topic(self, topic: Topic) -> Topic:
        return await create_topic(self._running(), topic)

    async def update_topic(self, topic: Topic) -> Topic:
        return await update_topic(self._running(), topic)

    async def drop_topic(self, topic: Topic) -> bool:
        return await drop_topic(self._running(), topic)

    # ── messages ──

    async def put(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        return await changes.put(self._keys(topic), now_ms, puts)

    async def lease_due(
        self,
        topic: Topic,
        buckets: Sequence[int] | None,
        now_ms: int,
        due_before_ms: int,
        grants: Sequence[Grant],
        overdue_ms: int = 0,
    ) -> LeasedRows:
        return await leasing.lease_due(self._keys(topic), buckets, now_ms, due_before_ms, grants, overdue_ms)

    async def settle(self, topic: Topic, now_ms: int, settles: Settles) -> Answers:
        return await changes.settle(self._keys(topic), now_ms, settles)

    async def mutate(self, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
        return await changes.mutate(self._keys(topic), now_ms, mutations)

    async def mutate_tag(self, topic: Topic, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
        return await reading.mutate_tag(self._keys(topic), now_ms, mutation, cursor, limit)

    async def held_by(self, topic: Topic, now_ms: int, holder: bytes, cursor: bytes, limit: int) -> Page:
        return await reading.held_by(self._keys(topic), now_ms, holder, cursor, limit)

    async def scan(
        self, topic: Topic, now_ms: int, where: ScanFilter, cursor: bytes, limit: int, payload: bool
    ) -> Page:
        return await reading.scan(self._keys(topic), now_ms, where, cursor, limit, payload)

    async def count_due(self, topic: Topic, edges_ms: Int64, held: bool = False) -> Int64:
        return await reading.count_due(self._keys(topic), edges_ms, held)

    async def next_due(self, topic: Topic, buckets: Sequence[int] | None, after_ms: int) -> int | None:
        return await reading.next_due(self._keys(topic), buckets, after_ms)

    async def sweep(self, topic: Topic, now_ms: int, limit: int) -> Swept:
        server = self._running()
        left = await dropped_topics(server)
        swept = await reading.sweep(BucketKeys(server, topic), now_ms, limit)
        await clear(server, left)
        return swept


# ── the store's own record ──


@dataclasses.dataclass(slots=True)
class Runs:
    """The tools of half a step: it runs scripts, each on keys of one slot, which may run again without harm. `prefix`:
    the beginning of every key."""

    prefix: bytes
    calls: list[tuple[str, list[bytes], list[Any]]] = dataclasses.field(default_factory=list)

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
    settings, newer, secrets = read_settings(name, told)
    return Topic(name, uid, settings, revision, created_ms, newer, secrets)


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
    """Remove the rows of dropped topics. The rest waits for the next sweep."""
    for uid, buckets in left.items():
        await _clear(server, uid, buckets)
