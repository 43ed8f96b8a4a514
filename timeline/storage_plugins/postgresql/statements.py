"""The hot statements, tuned by hand: a batch of puts, leases or settles is one statement and one round trip.

Tables are named as in schema `timeline`; the connection puts in the schema of the URL. `$1` is the topic's uid where a
statement finds the key by itself, so that rows of a topic that another broker dropped are never seen; else the key.

How they are kept from reading more than they answer, whatever the planner believes of the tables' sizes: arrays go in
through `unnest`; each message is looked up by a LATERAL of its own (`OFFSET 0` keeps it one); what is changed is joined
by its place on disk (`ctid`) and by nothing that an index could serve, for which there is one plan alone once
sequential scans are disabled. A plain join lets a planner whose statistics lag behind compare everything with
everything: 28 s for 5,000 acks. Tests look at the plans.
"""

from __future__ import annotations

from timeline.storage_plugins.postgresql.rows import whole
from timeline.storage_plugins.postgresql.schema import NOTHING
from timeline.storage_plugins.sql import FREE as _FREE
from timeline.storage_plugins.sql import HELD as _HELD

FREE, HELD = _FREE.replace("x''", NOTHING), _HELD.replace("x''", NOTHING)
CONTENT_OF = """LEFT JOIN LATERAL (
  SELECT c.payload, c.headers FROM timeline.payload AS c WHERE c.row = {}.row OFFSET 0) AS p ON true"""
"""The content `p` of the rows of a table; NULL where it is gone."""
TOPIC = "(SELECT key FROM timeline.topic WHERE uid = $1)"

PUT = """
WITH standing AS MATERIALIZED (SELECT key FROM timeline.topic WHERE uid = $1 FOR KEY SHARE), stored AS (
  INSERT INTO timeline.message (row, topic, bucket, id, birth, due_ms, scheduled_ms, put_ms, asked_ms, expires_ms,
    payload_sum, payload_bytes, headers_bytes, grp, tag)
  SELECT a.row, standing.key, a.bucket, a.id, a.birth, a.due_ms, a.due_ms, $2, $2, a.expires_ms, a.payload_sum,
    a.size, length(a.headers), a.grp, a.tag
  FROM standing, unnest($3::int8[], $4::int8[], $5::bytea[], $6::int8[], $7::int8[], $8::int8[], $9::int8[],
    $10::int8[], $12::bytea[], $13::bytea[], $14::bytea[])
    AS a(row, bucket, id, birth, due_ms, expires_ms, payload_sum, size, headers, grp, tag)
  ON CONFLICT (topic, bucket, id) DO NOTHING RETURNING row
), kept AS (
  INSERT INTO timeline.payload (row, payload, headers)
  SELECT b.row, b.payload, b.headers FROM unnest($3::int8[], $11::bytea[], $12::bytea[]) AS b(row, payload, headers)
  WHERE (b.row IN (SELECT stored.row FROM stored)) IS TRUE
)
SELECT count(*), CASE WHEN count(*) < cardinality($3) THEN array_agg(stored.row) END FROM stored
"""
"""All that is new; answers how many rows were stored, and which where not all were. The record is locked against a
drop: no row outlives it."""

OR_REPLACED = """ON CONFLICT (topic, id) DO UPDATE SET birth = excluded.birth, version = excluded.version,
    payload_sum = excluded.payload_sum, last_op = excluded.last_op, settled_ms = excluded.settled_ms"""
_HOLDING = f"""
  FROM unnest($2::int8[], $3::bytea[], $4::int8[], $5::int8[], $6::bytea[]) WITH ORDINALITY
    AS a(bucket, id, birth, version, holder, n), LATERAL (
    SELECT m.ctid AS place FROM timeline.message AS m
    WHERE m.topic = {TOPIC} AND m.bucket = a.bucket AND m.id = a.id OFFSET 0) AS f
  WHERE a.holder != {NOTHING}
"""
_STILL = "m.ctid = f.place AND m.birth = f.birth AND m.version = f.version AND m.holder = f.holder AND m.died_ms = 0"
"""What is asked again of the row as it stands by the time it is locked: then `ctid` alone is not looked at again."""

_ACKED = f"""
WITH found AS MATERIALIZED (SELECT f.place, a.birth, a.version, a.holder, a.n {_HOLDING}), gone AS (
  DELETE FROM timeline.message AS m USING found AS f WHERE {_STILL}
  RETURNING f.n, m.row, m.due_ms, m.id, m.birth, m.version, m.payload_sum
), content AS (DELETE FROM timeline.payload WHERE row = ANY(ARRAY(SELECT gone.row FROM gone)))
"""
_DONE = "SELECT array_agg(gone.n - 1), array_agg(gone.due_ms) FROM gone"
ACK = {
    False: f"{_ACKED}{_DONE}",
    True: f"""{_ACKED}, kept AS (
  INSERT INTO timeline.remembered (topic, id, birth, version, payload_sum, last_op, settled_ms)
  SELECT {TOPIC}, gone.id, gone.birth, gone.version, gone.payload_sum, 0, $7 FROM gone
  {OR_REPLACED}
)
{_DONE}""",
}
"""Acks, by whether the topic remembers: those whose token and holder match are gone; answers which, and their dues."""

EXTEND = f"""
WITH found AS MATERIALIZED (SELECT f.place, a.birth, a.version, a.holder, a.n {_HOLDING})
UPDATE timeline.message AS m SET due_ms = greatest(m.due_ms, ($7::int8[])[f.n])
FROM found AS f WHERE {_STILL} AND (m.due_ms > $8 OR m.expires_ms = 0 OR m.expires_ms > $8)
RETURNING f.n - 1, m.due_ms
"""
"""Extends of what is held by its asker and has not expired; answers which, and until when."""

RELEASE = f"""
WITH found AS MATERIALIZED (SELECT f.place, a.birth, a.version, a.holder, a.n {_HOLDING})
UPDATE timeline.message AS m SET version = m.version + 1, holder = {NOTHING}, last_op = ($8::int8[])[f.n],
  due_ms = CASE WHEN ($9::bool[])[f.n] THEN greatest(m.scheduled_ms, $10) ELSE greatest(($7::int8[])[f.n], $10) END,
  scheduled_ms = CASE WHEN ($9::bool[])[f.n] THEN m.scheduled_ms ELSE greatest(($7::int8[])[f.n], $10) END,
  asked_ms = CASE WHEN ($9::bool[])[f.n] THEN m.asked_ms ELSE $10 END,
  deliveries = CASE WHEN ($9::bool[])[f.n] THEN greatest(m.deliveries - 1, 0) ELSE m.deliveries END
FROM found AS f WHERE {_STILL} AND m.expires_ms = 0 AND (m.last_op != ($8::int8[])[f.n] OR ($8::int8[])[f.n] = 0)
RETURNING f.n - 1, m.due_ms
"""
"""Releases, `unseen` ones too, of what never expires; answers which, and their dues."""

FIND = f"""
SELECT f.*, a.n FROM unnest($2::int8[], $3::bytea[]) WITH ORDINALITY AS a(bucket, id, n), LATERAL (
  SELECT {whole()} FROM timeline.message AS m WHERE m.topic = {TOPIC} AND m.bucket = a.bucket AND m.id = a.id OFFSET 0
) AS f
"""
"""By id."""

FIND_REMEMBERED = f"""
SELECT f.* FROM unnest($2::bytea[]) AS a(id), LATERAL (
  SELECT r.id, r.birth, r.version, r.payload_sum, r.last_op FROM timeline.remembered AS r
  WHERE r.topic = {TOPIC} AND r.id = a.id AND r.settled_ms + 0 > $3 OFFSET 0) AS f
"""
"""`+ 0`, here and where the same index is meant to be used: none but the one of (topic, id) serves then."""

_NEW = ("version", "due_ms", "scheduled_ms", "asked_ms", "holder", "deliveries", "last_op", "died_ms", "dead")


def change(updates: bool, removes: bool, remembers: bool) -> str:
    """Writes what was decided of messages as they were read: an update or a removal stands where birth, version, due
    and time of death are still the same. Answers the places in the batch of those that were written.

    $2 … $7 bucket, id, birth, version, due, time of death as read; $8 whether it is removed; then, where there are
    `updates`, what stands afterwards; then, where there are `remembers`, now, whether the id is remembered, and the
    operation that its remains carry.
    """
    columns = ["bucket int8", "id bytea", "birth int8", "version int8", "due_ms int8", "died_ms int8", "removed bool"]
    columns += [f"new_{name} {'bytea' if name in ('holder', 'dead') else 'int8'}" for name in _NEW if updates]
    at = {column.partition(" ")[0]: number for number, column in enumerate(columns, 2)}
    now = len(columns) + 2
    if remembers:
        columns += ["remembered bool", "left_op int8"]
        at |= {"remembered": now + 1, "left_op": now + 2}
    arrays = ", ".join(f"${at[name]}::{kind}[]" for name, kind in (column.split() for column in columns))
    same = (
        "m.ctid = f.place AND m.birth = f.birth AND m.version = f.version AND m.due_ms = f.due_ms "
        "AND m.died_ms = f.died_ms"
    )
    parts = [
        f"""found AS MATERIALIZED (
  SELECT f.place, a.* FROM unnest({arrays}) WITH ORDINALITY AS a({", ".join(at)}, n), LATERAL (
    SELECT x.ctid AS place FROM timeline.message AS x
    WHERE x.topic = {TOPIC} AND x.bucket = a.bucket AND x.id = a.id OFFSET 0) AS f
)"""
    ]
    if updates:
        parts.append(f"""changed AS (
  UPDATE timeline.message AS m SET {", ".join(f"{name} = f.new_{name}" for name in _NEW)}
  FROM found AS f WHERE {same} AND NOT f.removed RETURNING f.n
)""")
    if removes:
        kept = ", f.remembered, f.left_op" if remembers else ""
        parts.append(f"""gone AS (
  DELETE FROM timeline.message AS m USING found AS f WHERE {same} AND f.removed
  RETURNING f.n, m.row, m.id, m.birth, m.version, m.payload_sum{kept}
), content AS (DELETE FROM timeline.payload WHERE row = ANY(ARRAY(SELECT gone.row FROM gone)))""")
    if remembers:
        parts.append(f"""kept AS (
  INSERT INTO timeline.remembered (topic, id, birth, version, payload_sum, last_op, settled_ms)
  SELECT {TOPIC}, gone.id, gone.birth, gone.version, gone.payload_sum, gone.left_op, ${now} FROM gone
  WHERE gone.remembered {OR_REPLACED}
)""")
    done = " UNION ALL ".join(f"SELECT n FROM {name}" for name, on in (("changed", updates), ("gone", removes)) if on)
    return f"WITH {', '.join(parts)} SELECT array_agg(done.n - 1) FROM ({done}) AS done"


CHANGE = {
    (updates, removes, remembers): change(updates, removes, remembers)
    for updates, removes, remembers in (
        (True, False, False),
        (False, True, False),
        (True, True, False),
        (False, True, True),
        (True, True, True),
    )
}

CONTENTS = f"""
SELECT p.payload, p.headers FROM unnest($1::int8[]) WITH ORDINALITY AS a(row, n) {CONTENT_OF.format("a")} ORDER BY a.n
"""

REMOVE_NEW = f"""
WITH gone AS (DELETE FROM timeline.message WHERE ctid = ANY(ARRAY(
  SELECT f.place FROM unnest($2::int8[], $3::bytea[]) AS a(bucket, id), LATERAL (
    SELECT x.ctid AS place FROM timeline.message AS x
    WHERE x.topic = {TOPIC} AND x.bucket = a.bucket AND x.id = a.id OFFSET 0) AS f)) RETURNING row
) DELETE FROM timeline.payload WHERE row = ANY(ARRAY(SELECT gone.row FROM gone))
"""
"""What this very transaction has put."""
