"""The hot statements, tuned by hand: a batch of puts, leases or settles is one statement and one round trip.

Tables are named as in schema `timeline`; the connection puts in the schema of the URL. `$1` is the topic's uid where a
statement finds the key by itself, so that rows of a topic that another broker dropped are never seen; else the key.

How they are kept from reading more than they answer, whatever the planner believes of the tables' sizes: arrays go in
through `unnest`; each message is looked up by a LATERAL of its own (`OFFSET 0` keeps it one); what is changed is joined
by its place on disk (`ctid`) and by nothing that an index could serve, for which there is one plan alone once
sequential scans are disabled. A plain join lets a planner whose statistics lag behind compare everything with
everything: 28 s for 5,000 acks. Tests look at the plans.

What another server says in other words is a named fragment, see `Fragments`.
"""

from __future__ import annotations

from dataclasses import dataclass

from timeline.model import Operation
from timeline.storage_plugins.sql import FREE as _FREE
from timeline.storage_plugins.sql import HELD as _HELD
from timeline.storage_plugins.sql import NUMBERS, STRINGS
from timeline.storage_plugins.sql import TAGGED as _TAGGED
from timeline.storage_plugins.sql.rows import CHANGING

NOTHING = "''::bytea"
FREE, HELD, TAGGED = (predicate.replace("x''", NOTHING) for predicate in (_FREE, _HELD, _TAGGED))
LARGEST_ID = r"'\x" + "ff" * 256 + "'::bytea"
COLUMNS = ("row", "bucket", "headers_bytes", *NUMBERS, *STRINGS.values())
OLD = tuple(name for name in NUMBERS if name != "died_ms")
"""Numbers of a leased row, as they were before."""
PACKED = ("n", "turn", "until_ms", *OLD)
"""Numbers that a lease answers."""
TEXTS = ("id", "grp", "holder", "tag", "payload", "headers")
"""Byte strings that it answers; the holder is the one of a lease that ran out."""


def whole(table: str = "m") -> str:
    """All columns of a message."""
    return ", ".join(f'{table}."{name}"' if name == "row" else f"{table}.{name}" for name in COLUMNS)


@dataclass(frozen=True, slots=True)
class Fragments:
    """What servers that speak PostgreSQL's protocol say each in their own words. `place`: the column by which a row
    that was found is changed. `topic`: the key of the topic whose uid is $1. `of_topic`: the comparison with it.
    `each`: keeps a lookup for each item of an array from being joined. `keeps_record`: locks a topic's record against a
    drop. `claiming`: locks what others pass over. `new_row`: that a row was stored just now. `among`: that a column's
    value is one of those of a query, in braces. `forget`, `forget_dropped`: remove remembered ids, of a topic up to $2
    and of a dropped one, at most so many."""

    place: str = "ctid"
    topic: str = "(SELECT key FROM timeline.topic WHERE uid = $1)"
    of_topic: str = "= (SELECT key FROM timeline.topic WHERE uid = $1)"
    each: str = " OFFSET 0"
    keeps_record: str = " FOR KEY SHARE"
    claiming: str = " FOR UPDATE SKIP LOCKED"
    new_row: str = '(b."row" IN (SELECT stored."row" FROM stored)) IS TRUE'
    among: str = "= ANY(ARRAY({}))"
    forget: str = """
DELETE FROM timeline.remembered WHERE ctid = ANY(ARRAY(
  SELECT r.ctid FROM timeline.remembered AS r
  WHERE r.topic + 0 = (SELECT key FROM timeline.topic WHERE uid = $1) AND r.settled_ms <= $2
  ORDER BY r.topic + 0, r.settled_ms LIMIT $3)) AND settled_ms <= $2
"""
    forget_dropped: str = """
DELETE FROM timeline.remembered WHERE ctid = ANY(ARRAY(
  SELECT r.ctid FROM timeline.remembered AS r WHERE r.topic = $1 ORDER BY r.id LIMIT $2))
"""


OR_REPLACED = """ON CONFLICT (topic, id) DO UPDATE SET birth = excluded.birth, version = excluded.version,
    payload_sum = excluded.payload_sum, last_op = excluded.last_op, settled_ms = excluded.settled_ms"""


class HotStatements:
    """The statements in a server's own words."""

    def __init__(self, words: Fragments) -> None:
        self._words = words
        self.put = self._put()
        self.ack = {remembers: self._ack(remembers) for remembers in (False, True)}
        self.extend = self._extend()
        self.release = self._release()
        self.find = self._find()
        self.find_remembered = self._find_remembered()
        self.change = {
            (updates, removes, remembers): self._change(updates, removes, remembers)
            for updates, removes in ((True, False), (False, True), (True, True))
            for remembers in (False, True)
            if removes or not remembers
        }
        self.contents = self._contents()
        self.remove_new = self._remove_new()
        self.lease_each = self._lease_each()
        self.by_tag = {
            (operation, dry_run, remembers): self._by_tag(operation, dry_run, remembers)
            for operation in (Operation.MOVE, Operation.CANCEL)
            for dry_run in (False, True)
            for remembers in (False, True)
            if not remembers or (operation is Operation.CANCEL and not dry_run)
        }
        self.forget, self.forget_dropped = words.forget, words.forget_dropped
        self.rows_of_dropped = self._rows_of_dropped()

    def _place_of(self, item: str) -> str:
        """Where on disk the message is that an array's item names, by a lookup of its own."""
        words = self._words
        return f"""LATERAL (
    SELECT x.{words.place} AS place FROM timeline.message AS x
    WHERE x.topic {words.of_topic} AND x.bucket = {item}.bucket AND x.id = {item}.id{words.each}) AS f"""

    def content_of(self, table: str) -> str:
        """The content `p` of the rows of a table; NULL where it is gone."""
        each = self._words.each
        return f"""LEFT JOIN LATERAL (
  SELECT c.payload, c.headers FROM timeline.payload AS c WHERE c."row" = {table}."row"{each}) AS p ON true"""

    def _without_content(self, table: str) -> str:
        """Removes the contents of the rows of a table."""
        chosen = self._words.among.format(f'SELECT {table}."row" FROM {table}')
        return f'DELETE FROM timeline.payload WHERE "row" {chosen}'

    def _put(self) -> str:
        """All that is new; answers how many rows were stored, and which where not all were. The record is locked
        against a drop: no row outlives it."""
        words = self._words
        return f"""
WITH standing AS MATERIALIZED (SELECT key FROM timeline.topic WHERE uid = $1{words.keeps_record}), stored AS (
  INSERT INTO timeline.message ("row", topic, bucket, id, birth, due_ms, scheduled_ms, put_ms, asked_ms, expires_ms,
    payload_sum, payload_bytes, headers_bytes, grp, tag)
  SELECT a."row", standing.key, a.bucket, a.id, a.birth, a.due_ms, a.due_ms, $2::int8, $2::int8, a.expires_ms,
    a.payload_sum, a.size, length(a.headers), a.grp, a.tag
  FROM standing, unnest($3::int8[], $4::int8[], $5::bytea[], $6::int8[], $7::int8[], $8::int8[], $9::int8[],
    $10::int8[], $12::bytea[], $13::bytea[], $14::bytea[])
    AS a("row", bucket, id, birth, due_ms, expires_ms, payload_sum, size, headers, grp, tag)
  ON CONFLICT (topic, bucket, id) DO NOTHING RETURNING "row"
), kept AS (
  INSERT INTO timeline.payload ("row", payload, headers)
  SELECT b."row", b.payload, b.headers FROM unnest($3::int8[], $11::bytea[], $12::bytea[]) AS b("row", payload, headers)
  WHERE {words.new_row}
)
SELECT count(*), CASE WHEN count(*) < cardinality($3) THEN array_agg(stored."row") END FROM stored
"""

    def _holding(self) -> str:
        words = self._words
        return f"""found AS MATERIALIZED (SELECT f.place, a.birth, a.version, a.holder, a.n
  FROM unnest($2::int8[], $3::bytea[], $4::int8[], $5::int8[], $6::bytea[]) WITH ORDINALITY
    AS a(bucket, id, birth, version, holder, n), LATERAL (
    SELECT m.{words.place} AS place FROM timeline.message AS m
    WHERE m.topic {words.of_topic} AND m.bucket = a.bucket AND m.id = a.id{words.each}) AS f
  WHERE a.holder != {NOTHING}
)"""

    def _still(self) -> str:
        """What is asked again of the row as it stands by the time it is locked: then `ctid` alone is not looked at
        again."""
        return (
            f"m.{self._words.place} = f.place AND m.birth = f.birth AND m.version = f.version AND m.holder = f.holder "
            "AND m.died_ms = 0"
        )

    def _ack(self, remembers: bool) -> str:
        """Acks, by whether the topic remembers: those whose token and holder match are gone; answers which, and their
        dues."""
        kept = ""
        if remembers:
            kept = f""", kept AS (
  INSERT INTO timeline.remembered (topic, id, birth, version, payload_sum, last_op, settled_ms)
  SELECT {self._words.topic}, gone.id, gone.birth, gone.version, gone.payload_sum, 0, $7::int8 FROM gone
  {OR_REPLACED}
)"""
        return f"""
WITH {self._holding()}, gone AS (
  DELETE FROM timeline.message AS m USING found AS f WHERE {self._still()}
  RETURNING f.n, m."row", m.due_ms, m.id, m.birth, m.version, m.payload_sum
), content AS ({self._without_content("gone")}){kept}
SELECT array_agg(gone.n - 1), array_agg(gone.due_ms) FROM gone
"""

    def _extend(self) -> str:
        """Extends of what is held by its asker and has not expired; answers which, and until when."""
        return f"""
WITH {self._holding()}
UPDATE timeline.message AS m SET due_ms = greatest(m.due_ms, ($7::int8[])[f.n])
FROM found AS f WHERE {self._still()} AND (m.due_ms > $8 OR m.expires_ms = 0 OR m.expires_ms > $8)
RETURNING f.n - 1, m.due_ms
"""

    def _release(self) -> str:
        """Releases, `unseen` ones too, of what never expires; answers which, and their dues."""
        op, due, unseen = "($8::int8[])[f.n]", "greatest(($7::int8[])[f.n], $10)", "($9::bool[])[f.n]"
        return f"""
WITH {self._holding()}
UPDATE timeline.message AS m SET version = m.version + 1, holder = {NOTHING}, last_op = {op},
  due_ms = CASE WHEN {unseen} THEN greatest(m.scheduled_ms, $10) ELSE {due} END,
  scheduled_ms = CASE WHEN {unseen} THEN m.scheduled_ms ELSE {due} END,
  asked_ms = CASE WHEN {unseen} THEN m.asked_ms ELSE $10 END,
  deliveries = CASE WHEN {unseen} THEN greatest(m.deliveries - 1, 0) ELSE m.deliveries END
FROM found AS f WHERE {self._still()} AND m.expires_ms = 0 AND (m.last_op != {op} OR {op} = 0)
RETURNING f.n - 1, m.due_ms
"""

    def _find(self) -> str:
        """By id."""
        words = self._words
        return f"""
SELECT f.*, a.n FROM unnest($2::int8[], $3::bytea[]) WITH ORDINALITY AS a(bucket, id, n), LATERAL (
  SELECT {whole()} FROM timeline.message AS m
  WHERE m.topic {words.of_topic} AND m.bucket = a.bucket AND m.id = a.id{words.each}
) AS f
"""

    def _find_remembered(self) -> str:
        """`+ 0`, here and where the same index is meant to be used: none but the one of (topic, id) serves then."""
        return f"""
SELECT f.* FROM unnest($2::bytea[]) AS a(id), LATERAL (
  SELECT r.id, r.birth, r.version, r.payload_sum, r.last_op FROM timeline.remembered AS r
  WHERE r.topic {self._words.of_topic} AND r.id = a.id AND r.settled_ms + 0 > $3{self._words.each}) AS f
"""

    def _change(self, updates: bool, removes: bool, remembers: bool) -> str:
        """Writes what was decided of messages as they were read: an update or a removal stands where birth, version,
        due and time of death are still the same. Answers the places in the batch of those that were written.

        $2 … $7 bucket, id, birth, version, due, time of death as read; $8 whether it is removed; then, where there are
        `updates`, what stands afterwards; then, where there are `remembers`, now, whether the id is remembered, and the
        operation that its remains carry.
        """
        columns = ["bucket int8", "id bytea", "birth int8", "version int8", "due_ms int8", "died_ms int8"]
        columns.append("removed bool")
        columns += [f"new_{name} {'bytea' if name in ('holder', 'dead') else 'int8'}" for name in CHANGING if updates]
        at = {column.partition(" ")[0]: number for number, column in enumerate(columns, 2)}
        now = len(columns) + 2
        if remembers:
            columns += ["remembered bool", "left_op int8"]
            at |= {"remembered": now + 1, "left_op": now + 2}
        arrays = ", ".join(f"${at[name]}::{kind}[]" for name, kind in (column.split() for column in columns))
        same = (
            f"m.{self._words.place} = f.place AND m.birth = f.birth AND m.version = f.version AND m.due_ms = f.due_ms "
            "AND m.died_ms = f.died_ms"
        )
        parts = [
            f"""found AS MATERIALIZED (
  SELECT f.place, a.* FROM unnest({arrays}) WITH ORDINALITY AS a({", ".join(at)}, n), {self._place_of("a")}
)"""
        ]
        if updates:
            parts.append(f"""changed AS (
  UPDATE timeline.message AS m SET {", ".join(f"{name} = f.new_{name}" for name in CHANGING)}
  FROM found AS f WHERE {same} AND NOT f.removed RETURNING f.n
)""")
        if removes:
            kept = ", f.remembered, f.left_op" if remembers else ""
            parts.append(f"""gone AS (
  DELETE FROM timeline.message AS m USING found AS f WHERE {same} AND f.removed
  RETURNING f.n, m."row", m.id, m.birth, m.version, m.payload_sum{kept}
), content AS ({self._without_content("gone")})""")
        if remembers:
            parts.append(f"""kept AS (
  INSERT INTO timeline.remembered (topic, id, birth, version, payload_sum, last_op, settled_ms)
  SELECT {self._words.topic}, gone.id, gone.birth, gone.version, gone.payload_sum, gone.left_op, ${now}::int8 FROM gone
  WHERE gone.remembered {OR_REPLACED}
)""")
        done = [f"SELECT n FROM {name}" for name, on in (("changed", updates), ("gone", removes)) if on]
        return f"WITH {', '.join(parts)} SELECT array_agg(done.n - 1) FROM ({' UNION ALL '.join(done)}) AS done"

    def _contents(self) -> str:
        return f"""
SELECT p.payload, p.headers FROM unnest($1::int8[]) WITH ORDINALITY AS a("row", n) {self.content_of("a")} ORDER BY a.n
"""

    def _remove_new(self) -> str:
        """What this very transaction has put."""
        place = self._words.place
        new = f"""
  SELECT f.place FROM unnest($2::int8[], $3::bytea[]) AS a(bucket, id), {self._place_of("a")}"""
        return f"""
WITH gone AS (DELETE FROM timeline.message WHERE {place} {self._words.among.format(new)} RETURNING "row"
) {self._without_content("gone")}
"""

    def _lease_each(self) -> str:
        """Leases of what is still as it was read; answers which, with their content."""
        return f"""
WITH found AS MATERIALIZED (
  SELECT f.place, a.* FROM unnest($2::int8[], $3::bytea[], $4::int8[], $5::int8[], $6::int8[], $7::int8[], $8::bytea[])
    WITH ORDINALITY AS a(bucket, id, birth, version, due_ms, until_ms, holder, n), {self._place_of("a")}
), leased AS (
  UPDATE timeline.message AS m SET due_ms = f.until_ms, holder = f.holder, version = m.version + 1,
    deliveries = m.deliveries + 1
  FROM found AS f WHERE m.{self._words.place} = f.place AND m.birth = f.birth AND m.version = f.version
    AND m.due_ms = f.due_ms AND m.died_ms = 0
  RETURNING f.n, m."row"
)
SELECT l.n - 1, p.payload, p.headers FROM leased AS l {self.content_of("l")} ORDER BY l.n
"""

    def _rows_of_dropped(self) -> str:
        place = self._words.place
        some = f"""
    SELECT m.{place} FROM timeline.message AS m WHERE m.topic = $1 ORDER BY m.bucket, m.id LIMIT $2"""
        return f"""
WITH gone AS (
  DELETE FROM timeline.message WHERE {place} {self._words.among.format(some)} RETURNING "row"
), content AS ({self._without_content("gone")})
SELECT count(*) FROM gone
"""

    # ── by tag ──

    def _by_tag(self, operation: Operation, dry_run: bool, remembers: bool) -> str:
        """The next messages of the walk over (bucket, id), and the operation on those that nothing refuses: the last
        one's place, how many there are, how many were done, the earliest due among those, and the ids of the others
        that were there at the start. No record where the walk is done.

        $2 tag, $3, $4 bucket and id of the last one before, $5 how many, $6 when the operation started, $7 group, $8
        now. A move: $9 its operation id, $10 and $11 the due or the shift, $12 the latest due. A cancel: $9 whether
        leased ones too, $10 its operation id.
        """
        words, moves = self._words, operation is Operation.MOVE
        # Not leased. No partial index serves what is said so; see the module.
        free = "(length(m.holder) = 0 OR m.due_ms <= $8::int8)"
        to = "CASE WHEN $10::int8 != 0 THEN $10::int8 ELSE greatest(0, m.scheduled_ms + $11::int8) END"
        of_chunk = f"m.{words.place} = f.place AND m.put_ms <= $6::int8 AND m.grp = $7::bytea AND m.died_ms = 0"
        unrefused = f"{of_chunk} AND ({free} OR $9::bool) AND (m.expires_ms = 0 OR m.expires_ms > $8::int8)"
        if moves:
            unrefused = (
                f"{of_chunk} AND {free} AND m.last_op != $9::int8 AND {to} <= $12::int8 "
                "AND ($11::int8 = 0 OR m.asked_ms <= $6::int8) "
                f"AND (m.expires_ms = 0 OR m.expires_ms > greatest($8::int8, {to}))"
            )
        if dry_run:
            done = f"""done AS MATERIALIZED (
  SELECT f.id, m.due_ms FROM chunk AS f, timeline.message AS m WHERE {unrefused}
)"""
        elif moves:
            done = f"""done AS (
  UPDATE timeline.message AS m SET version = m.version + 1, due_ms = {to}, scheduled_ms = {to},
    asked_ms = $8::int8, holder = {NOTHING}, last_op = $9::int8
  FROM chunk AS f WHERE {unrefused} RETURNING f.id, m.due_ms
)"""
        else:
            done = f"""done AS (
  DELETE FROM timeline.message AS m USING chunk AS f WHERE {unrefused}
  RETURNING m."row", m.id, m.birth, m.version, m.payload_sum, m.due_ms
), content AS ({self._without_content("done")})"""
        if remembers:
            done += f""", kept AS (
  INSERT INTO timeline.remembered (topic, id, birth, version, payload_sum, last_op, settled_ms)
  SELECT {words.topic}, done.id, done.birth, done.version, done.payload_sum, $10::int8, $8::int8 FROM done
  {OR_REPLACED}
)"""
        return f"""
WITH chunk AS MATERIALIZED (
  SELECT m.{words.place} AS place, m.bucket, m.id, m.put_ms FROM timeline.message AS m
  WHERE m.topic {words.of_topic} AND {TAGGED} AND m.tag = $2 AND (m.bucket, m.id) > ($3, $4)
  ORDER BY m.bucket, m.id LIMIT $5
), {done}
SELECT l.bucket, l.id, (SELECT count(*) FROM chunk) AS met, (SELECT count(*) FROM done) AS done,
  (SELECT min(done.due_ms) FROM done) AS earliest_ms,
  ARRAY(SELECT c.id FROM chunk AS c WHERE c.put_ms <= $6::int8 EXCEPT SELECT done.id FROM done) AS others
FROM chunk AS l ORDER BY l.bucket DESC, l.id DESC LIMIT 1
"""


# ── the lease in one statement, of PostgreSQL alone ──

WORDS = Fragments()
STATEMENTS = HotStatements(WORDS)

_BUCKETS = "($4::int8[] IS NULL OR m.bucket = ANY($4))"
_FROM = "$12::int8"


def _eligible(name: str, predicate: str, until: str) -> str:
    return f"""{name} AS MATERIALIZED (
  SELECT m.ctid AS place, {whole()} FROM timeline.message AS m
  WHERE m.topic {WORDS.of_topic} AND {predicate} AND m.due_ms BETWEEN {_FROM} AND {until} AND {_BUCKETS}
  ORDER BY m.due_ms, m.id LIMIT $5 FOR UPDATE SKIP LOCKED
)"""


def _onward(name: str, predicate: str, until: str, least: str) -> str:
    """What lies behind `name`: how many were passed over because somebody else is at them, and the next due that is
    not before `least`. That is one bound with the end of what was found: of two, an index begins at either."""
    whose = f"m.topic {WORDS.of_topic} AND {predicate} AND {_BUCKETS}"
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
    columns = ", ".join(("f.n", "f.turn", *(f"f.{name}" for name in (*OLD, '"row"', "id", "grp", "holder", "tag"))))
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
  FROM leased AS l {STATEMENTS.content_of("l")}
) AS packed
"""


LEASE = {several: lease(several) for several in (False, True)}
