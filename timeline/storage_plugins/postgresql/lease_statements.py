"""The statements that lease: everything at once in the plain case, step by step within a transaction elsewhere."""

from __future__ import annotations

from timeline.storage_plugins.postgresql.rows import OLD, PACKED, TEXTS, whole
from timeline.storage_plugins.postgresql.statements import CONTENT_OF, FREE, HELD, TOPIC

_BUCKETS = "($4::int8[] IS NULL OR m.bucket = ANY($4))"
_FROM = "$12::int8"
LARGEST_ID = r"'\x" + "ff" * 256 + "'::bytea"


def _eligible(name: str, predicate: str, until: str) -> str:
    return f"""{name} AS MATERIALIZED (
  SELECT m.ctid AS place, {whole()} FROM timeline.message AS m
  WHERE m.topic = {TOPIC} AND {predicate} AND m.due_ms BETWEEN {_FROM} AND {until} AND {_BUCKETS}
  ORDER BY m.due_ms, m.id LIMIT $5 FOR UPDATE SKIP LOCKED
)"""


def _onward(name: str, predicate: str, until: str, least: str) -> str:
    """What lies behind `name`: how many were passed over because somebody else is at them, and the next due that is
    not before `least`. That is one bound with the end of what was found: of two, an index begins at either."""
    whose = f"m.topic = {TOPIC} AND {predicate} AND {_BUCKETS}"
    return f"""{name}_end AS MATERIALIZED (
  SELECT due_ms, id FROM (SELECT due_ms, id FROM {name} OFFSET $5 - 1 LIMIT 1) AS last
  UNION ALL SELECT {until}, {LARGEST_ID} WHERE (SELECT count(*) FROM {name}) < $5
), {name}_next AS MATERIALIZED (
  SELECT greatest(due_ms, {least} - 1) AS due_ms, CASE WHEN due_ms >= {least} THEN id ELSE {LARGEST_ID} END AS id
  FROM {name}_end
), {name}_onward AS MATERIALIZED (
  SELECT (SELECT count(*) FROM timeline.message AS m WHERE {whose} AND m.due_ms >= {_FROM}
        AND (m.due_ms, m.id) <= ((SELECT due_ms FROM {name}_end), (SELECT id FROM {name}_end)))
      - (SELECT count(*) FROM {name}) AS passed,
    (SELECT m.due_ms FROM timeline.message AS m WHERE {whose}
        AND (m.due_ms, m.id) > ((SELECT due_ms FROM {name}_next), (SELECT id FROM {name}_next))
      ORDER BY m.due_ms, m.id LIMIT 1) AS next_ms
)"""


def _packed() -> str:
    """The leased as columns: each number column one byte string of big-endian numbers, each column of strings one of
    all strings after one another and one of their lengths (-1: the content is gone)."""
    numbers = [f"string_agg(int8send(l.{name}), ''::bytea) AS {name}" for name in PACKED]
    strings = []
    for name in TEXTS:
        table = "p" if name in ("payload", "headers") else "l"
        lengths = f"length({table}.{name})"
        strings.append(f"string_agg({table}.{name}, ''::bytea) AS {name}")
        strings.append(f"string_agg(int4send(coalesce({lengths}, -1)), ''::bytea) AS {name}_lengths")
    return ",\n    ".join((*numbers, *strings))


_BYTES = "(e.payload_bytes + e.headers_bytes)::int4"
_DEALT = {
    # In one pass, for the only grant.
    False: f"""
    SELECT b.* FROM (
      SELECT e.*, 1::int8 AS turn, row_number() OVER due AS n,
        sum({_BYTES}) OVER (due ROWS UNBOUNDED PRECEDING) AS taken
      FROM (SELECT * FROM free UNION ALL SELECT * FROM held) AS e WINDOW due AS (ORDER BY e.due_ms, e.id)
    ) AS b WHERE b.n <= $5""",
    # Whose turn it is has to be known before its bytes are counted.
    True: """
    SELECT c.*, sum(c.bytes) OVER (PARTITION BY c.turn ORDER BY c.n ROWS UNBOUNDED PRECEDING) AS taken FROM (
      SELECT b.*, (($11::int4[])[b.n])::int8 AS turn, (b.payload_bytes + b.headers_bytes)::int4 AS bytes FROM (
        SELECT e.*, row_number() OVER (ORDER BY e.due_ms, e.id) AS n
        FROM (SELECT * FROM free UNION ALL SELECT * FROM held) AS e
      ) AS b WHERE b.n <= $5
    ) AS c""",
}


def lease(several: bool) -> str:
    """`Store.lease_due` in the plain case: what may be leased is found, locked, dealt and leased, its content read,
    and what comes next looked up. `several` grants: the n-th message is the grant's whose number is the n-th of $11.
    Nothing is leased (`plain` is false) where a message has expired, or was delivered too often, or where bytes run
    out among several grants: that is for the rules.

    $2, $3 until when what nobody holds, and what a lease that ran out left, may be leased; $4 buckets or NULL; $5 how
    many; $6 now; $7 the topic's max_deliveries; $8, $9, $10 lease, holder, bytes of each grant; $11, of a single
    grant, whether it takes one message of any size; $12 from which due on to look; $13 from where on to look for what
    runs out next.
    """
    room = "d.taken <= ($10::int8[])[d.turn]"
    fits = room if several else f"({room} OR (d.n = 1 AND $11::bool))"
    unfit = f"OR NOT {room}" if several else ""
    columns = ", ".join(("f.n", "f.turn", *(f"f.{name}" for name in (*OLD, "row", "id", "grp", "holder", "tag"))))
    return f"""
WITH {_eligible("free", FREE, "$2::int8")}, {_eligible("held", HELD, "$3::int8")}, dealt AS MATERIALIZED (
  SELECT d.*, {fits} AS fits FROM ({_DEALT[several]}) AS d
), judged AS MATERIALIZED (
  SELECT coalesce(bool_and(
    NOT (d.expires_ms BETWEEN 1 AND $6::int8 OR ($7::int8 > 0 AND d.deliveries >= $7) {unfit})), true) AS plain
  FROM dealt AS d
), leased AS (
  UPDATE timeline.message AS m SET due_ms = greatest(m.due_ms, $6) + ($8::int8[])[f.turn],
    holder = ($9::bytea[])[f.turn], version = m.version + 1, deliveries = m.deliveries + 1
  FROM dealt AS f WHERE m.ctid = f.place AND f.fits AND (SELECT plain FROM judged)
  RETURNING m.due_ms AS until_ms, {columns}
), rest AS MATERIALIZED (
  SELECT min(e.due_ms) FILTER (WHERE e.holder = ''::bytea) AS free_ms,
    min(e.due_ms) FILTER (WHERE e.holder != ''::bytea) AS held_ms
  FROM (SELECT * FROM free UNION ALL SELECT * FROM held) AS e
  WHERE (e.due_ms, e.id) > (SELECT l.due_ms, l.id FROM leased AS l ORDER BY l.n DESC LIMIT 1)
    OR NOT EXISTS (SELECT FROM leased)
), {_onward("free", FREE, "$2::int8", _FROM)}, {_onward("held", HELD, "$3::int8", "$13::int8")}
SELECT judged.plain, (SELECT count(*) FROM dealt WHERE fits) AS fitting, rest.free_ms, rest.held_ms,
  free_onward.passed + held_onward.passed AS passed, free_onward.next_ms AS next_free_ms,
  held_onward.next_ms AS next_held_ms, packed.*
FROM judged, rest, free_onward, held_onward, (
  SELECT {_packed()}
  FROM leased AS l {CONTENT_OF.format("l")}
) AS packed
"""


LEASE = {several: lease(several) for several in (False, True)}


def search(held: bool) -> str:
    """What may be leased, earliest first."""
    return f"""
SELECT {whole()} FROM timeline.message AS m WHERE m.topic = {TOPIC} AND {HELD if held else FREE} AND m.due_ms <= $2
  AND ($3::int8[] IS NULL OR m.bucket = ANY($3)) AND (m.due_ms, m.id) > ($4, $5)
ORDER BY m.due_ms, m.id LIMIT $6
"""


SEARCH = {held: search(held) for held in (False, True)}

LEASE_EACH = f"""
WITH found AS MATERIALIZED (
  SELECT f.place, a.* FROM unnest($2::int8[], $3::bytea[], $4::int8[], $5::int8[], $6::int8[], $7::int8[], $8::bytea[])
    WITH ORDINALITY AS a(bucket, id, birth, version, due_ms, until_ms, holder, n), LATERAL (
    SELECT x.ctid AS place FROM timeline.message AS x
    WHERE x.topic = {TOPIC} AND x.bucket = a.bucket AND x.id = a.id OFFSET 0) AS f
), leased AS (
  UPDATE timeline.message AS m SET due_ms = f.until_ms, holder = f.holder, version = m.version + 1,
    deliveries = m.deliveries + 1
  FROM found AS f WHERE m.ctid = f.place AND m.birth = f.birth AND m.version = f.version AND m.due_ms = f.due_ms
    AND m.died_ms = 0
  RETURNING f.n, m.row
)
SELECT l.n - 1, p.payload, p.headers FROM leased AS l {CONTENT_OF.format("l")} ORDER BY l.n
"""
"""Leases of what is still as it was read; answers which, with their content."""


def _first(held: bool) -> str:
    return f"""(
  SELECT m.due_ms FROM timeline.message AS m WHERE m.topic = {TOPIC} AND {HELD if held else FREE} AND m.due_ms > $2
    AND ($3::int8[] IS NULL OR m.bucket = ANY($3)) ORDER BY m.due_ms, m.id LIMIT 1)"""


FIRST_DUE = f"SELECT {_first(False)}, {_first(True)}"
"""The earliest due after $2 of what nobody holds, and of what is held, in the buckets $3."""
