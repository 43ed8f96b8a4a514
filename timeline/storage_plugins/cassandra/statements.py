"""The tables, and every statement on them.

`message` has one partition per bucket. A message but for its id and content is packed into `fields` (see `rows.py`): a
column for each field costs client and server several times as much. `kind` says what a row is:

    HEAD     one row; `last` is the number of the batch that changed the bucket last, `floor_free` and `floor_held` are
             where reads of the two timelines begin (static columns, which come with every row)
    MESSAGE  a message under its id, or what is left of a settled one; small content in columns beside `fields`, which
             no lease, move or extend writes or reads
    FREE     the timeline of messages without holder: (due, id)
    HELD     the timeline of leases by their end: (due, id)
    TAG      (tag, id)          EXPIRES  (expiry, id)
    DEAD     (when it died, id)  KEPT     (when it was settled, id)

Reads repair nothing (`read_repair`, see Cassandra's documentation of CREATE TABLE); hints and repairs do. A batch
changes a partition as a whole. A read that met replicas with and without the batch would repair only the rows that it
asked for: `last` without the rest, so that what is there would seem gone.

`payload` has larger content by (id, birth, attempt). The attempt is a random number of the put call. So no content is
written again where one was deleted, and the clocks of two coordinators cannot hide one behind the other.
"""

from __future__ import annotations

HEAD, MESSAGE, FREE, HELD, TAG, EXPIRES, DEAD, KEPT = range(8)
SWEPT = (EXPIRES, DEAD, KEPT)
"""Indexes that a sweep reads, from their beginning."""

TABLES = {
    "meta": "CREATE TABLE IF NOT EXISTS meta (name text PRIMARY KEY, value text)",
    "topic": "CREATE TABLE IF NOT EXISTS topic (one int, name text, uid bigint, settings text, revision bigint, "
    "created_ms bigint, PRIMARY KEY ((one), name))",
    "dropped": "CREATE TABLE IF NOT EXISTS dropped (one int, uid bigint, buckets int, PRIMARY KEY ((one), uid))",
    "message": "CREATE TABLE IF NOT EXISTS message (topic bigint, bucket int, kind tinyint, at bigint, id blob, "
    "last bigint static, floor_free bigint static, floor_held bigint static, "
    "fields blob, payload blob, headers blob, PRIMARY KEY ((topic, bucket), kind, at, id)) WITH read_repair = 'NONE'",
    "payload": "CREATE TABLE IF NOT EXISTS payload (topic bigint, bucket int, part int, id blob, birth bigint, "
    "attempt bigint, put_ms bigint, payload blob, headers blob, "
    "PRIMARY KEY ((topic, bucket, part), id, birth, attempt))",
}

_BUCKET = "topic = ? AND bucket = ?"
_PLACE = f"{_BUCKET} AND kind = ? AND at = ? AND id = ?"
_HEAD = "last, floor_free, floor_held"
_COLUMNS = "topic, bucket, kind, at, id, fields, payload, headers"
_MESSAGES = f"{_BUCKET} AND kind = {MESSAGE} AND at = 0"

TEXTS: dict[str, str] = {
    # A bucket changes by one batch: this condition, then whatever else.
    "claim": f"UPDATE message SET last = ?, floor_free = ?, floor_held = ? WHERE {_BUCKET} IF last = ?",
    "store": f"INSERT INTO message ({_COLUMNS}) VALUES (?, ?, {MESSAGE}, 0, ?, ?, ?, ?)",
    "store_new": f"INSERT INTO message ({_COLUMNS}) VALUES (?, ?, {MESSAGE}, 0, ?, ?, ?, ?) IF NOT EXISTS",
    "restate": f"INSERT INTO message (topic, bucket, kind, at, id, fields) VALUES (?, ?, {MESSAGE}, 0, ?, ?)",
    "index": "INSERT INTO message (topic, bucket, kind, at, id) VALUES (?, ?, ?, ?, ?)",
    "remove": f"DELETE FROM message WHERE {_PLACE}",
    "cut": f"DELETE FROM message WHERE {_BUCKET} AND kind = ? AND (at, id) >= (?, ?) AND (at, id) < (?, ?)",
    "head": f"SELECT {_HEAD}, id FROM message WHERE {_BUCKET} AND kind = {HEAD} AND at = 0 AND id = 0x",
    "heads": f"SELECT bucket, {_HEAD}, id FROM message WHERE topic = ? AND bucket IN ? AND kind = {HEAD} AND at = 0 "
    "AND id = 0x",
    "find": f"SELECT {_HEAD}, id, fields FROM message WHERE {_MESSAGES} AND id IN ?",
    "find_whole": f"SELECT {_HEAD}, id, fields, payload, headers FROM message WHERE {_MESSAGES} AND id IN ?",
    "walk": f"SELECT id, fields FROM message WHERE {_MESSAGES} AND id > ? LIMIT ?",
    "walk_whole": f"SELECT id, fields, payload, headers FROM message WHERE {_MESSAGES} AND id > ? LIMIT ?",
    "timeline": f"SELECT {_HEAD}, at, id FROM message WHERE {_BUCKET} AND kind = ? AND (at, id) > (?, ?) LIMIT ?",
    "past": f"SELECT {_HEAD}, at, id FROM message WHERE {_BUCKET} AND kind = ? AND (at, id) > (?, ?) "
    "AND (at, id) <= (?, ?) LIMIT ?",
    "firsts": "SELECT bucket FROM message WHERE topic = ? AND bucket IN ? AND kind = ? AND at <= ? "
    "PER PARTITION LIMIT 1",
    "tagged": f"SELECT id FROM message WHERE {_BUCKET} AND kind = {TAG} AND at = 0 AND id > ? AND id < ? LIMIT ?",
    "content_store": "INSERT INTO payload (topic, bucket, part, id, birth, attempt, put_ms, payload, headers) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "content_find": "SELECT id, birth, attempt, payload, headers FROM payload WHERE topic = ? AND bucket = ? "
    "AND part = ? AND id IN ?",
    "content_walk": "SELECT id, birth, attempt, put_ms FROM payload WHERE topic = ? AND bucket = ? AND part = ? "
    "AND (id, birth, attempt) > (?, ?, ?) LIMIT ?",
    "content_remove": "DELETE FROM payload WHERE topic = ? AND bucket = ? AND part = ? AND id = ? AND birth = ? "
    "AND attempt = ?",
    "meta": "SELECT value FROM meta WHERE name = ?",
    "meta_add": "INSERT INTO meta (name, value) VALUES (?, ?) IF NOT EXISTS",
    "probe": "INSERT INTO meta (name, value) VALUES (?, ?)",
    "topics": "SELECT uid, name, settings, revision, created_ms FROM topic WHERE one = 0",
    "topic": "SELECT uid, name, settings, revision, created_ms FROM topic WHERE one = 0 AND name = ?",
    "topic_create": "INSERT INTO topic (one, name, uid, settings, revision, created_ms) VALUES (0, ?, ?, ?, ?, ?) "
    "IF NOT EXISTS",
    "topic_update": "UPDATE topic SET settings = ?, revision = ?, created_ms = ? WHERE one = 0 AND name = ? "
    "IF uid = ? AND revision = ?",
    "topic_drop": "DELETE FROM topic WHERE one = 0 AND name = ? IF uid = ?",
    "dropped_add": "INSERT INTO dropped (one, uid, buckets) VALUES (0, ?, ?)",
    "dropped": "SELECT uid, buckets FROM dropped WHERE one = 0",
    "dropped_remove": "DELETE FROM dropped WHERE one = 0 AND uid = ?",
    "bucket_drop": "DELETE FROM message WHERE topic = ? AND bucket IN ?",
    "content_drop": "DELETE FROM payload WHERE topic = ? AND bucket IN ? AND part IN ?",
}
"""All statements by name. `session.py` prepares them once."""
BATCHED = ("store", "store_new", "restate", "index", "remove", "cut", "content_store", "content_remove")
"""Statements that follow another one in a batch."""

INLINE_BYTES = 1024
"""Content up to this size lies beside its message: one row to write, read and delete, and no partition of its own."""
SMALL_BYTES = 16 * 1024
PARTS = 4
"""Content up to SMALL_BYTES lies in part 0 of its bucket. Larger content is spread over this number of other parts."""


def part_of(size_bytes: int, attempt: int) -> int:
    """Return the part of its bucket that content of this size lies in."""
    return 0 if size_bytes <= SMALL_BYTES else 1 + attempt % PARTS
