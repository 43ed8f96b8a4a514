"""The hot statements, tuned by hand: a batch of puts, leases or settles is one statement and one round trip.

Tables are named as in schema `timeline`; the connection replaces that by the schema of the URL. `$1` is the topic's uid
if a statement finds the key by itself, so that it never sees rows of a dropped topic; else the key.

The statements must not read more than they return, whatever the planner believes of the tables' sizes. Arrays go in
through `unnest`. Each message is looked up by a LATERAL of its own (`OFFSET 0` keeps it one). Changes join rows by
their place on disk (`ctid`) and by nothing that an index could serve: without sequential scans, that has one plan
alone. A plain join lets a planner with old statistics compare everything with everything: 28 s for 5,000 acks. Tests
check the plans.

A fragment that differs on another server has a name, see `Fragments`.
"""

from __future__ import annotations

from dataclasses import dataclass

from timeline.model import Operation
from timeline.storage_plugins.sql import FREE as _FREE
from timeline.storage_plugins.sql import HELD as _HELD
from timeline.storage_plugins.sql import NEW, NUMBERS, STRINGS
from timeline.storage_plugins.sql import TAGGED as _TAGGED
from timeline.storage_plugins.sql.rows import CHANGING

NOTHING = "''::bytea"
FREE, HELD, TAGGED = (predicate.replace("x''", NOTHING) for predicate in (_FREE, _HELD, _TAGGED))
LARGEST_ID = r"'\x" + "ff" * 256 + "'::bytea"
COLUMNS = ("row", "bucket", "headers_bytes", *NUMBERS, *STRINGS.values())
PUT = (*(name for name in NEW if name != "headers_bytes"), "payload", "headers")
"""The arrays of a put, in the order of its parameters, from $3 on."""
_ARRAYS = dict.fromkeys((*STRINGS.values(), "payload", "headers"), "bytea[]")
OLD = tuple(name for name in NUMBERS if name != "died_ms")
"""Numbers of a leased row as they were before."""
PACKED = ("n", "turn", "until_ms", *OLD)
"""Numbers that a lease returns."""
TEXTS = ("id", "grp", "holder", "tag", "payload", "headers")
"""Byte strings that a lease returns. The holder is that of a lease that ran out."""


def quoted(name: str) -> str:
    """Return a column's name, quoted if it is a word of the grammar."""
    return f'"{name}"' if name == "row" else name


def whole(table: str = "m") -> str:
    """Return all columns of a message."""
    return ", ".join(f"{table}.{quoted(name)}" for name in COLUMNS)


@dataclass(frozen=True, slots=True)
class Fragments:
    """The fragments that differ between servers with PostgreSQL's protocol.

    `place`: the column by which a row that was found is changed. `topic`: the key of the topic whose uid is $1.
    `of_topic`: the comparison with it. `each`: stops a lookup per item of an array from becoming a join.
    `keeps_record`: locks a topic's record against a drop. `claiming`: locks rows that others skip. `new_row`: the
    condition that this statement has stored a row. `among`: the condition that a value is among those of the query in
    braces. `forget`, `forget_dropped`: remove remembered ids, of a topic up to $2 and of a dropped one, with a
    limit."""

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


class HotStatements:
    """The statements for one kind of server."""

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
        """Return the lookup of the place on disk of the message that an array's item names."""
        words = self._words
        return f"""LATERAL (
    SELECT x.{words.place} AS place FROM timeline.message AS x
    WHERE x.topic {words.of_topic} AND x.bucket = {item}.bucket AND x.id = {item}.id{words.each}) AS f"""

    def content_of(self, table: str) -> str:
        """Return the join of the content `p` of a table's rows; NULL: it is gone."""
        each = self._words.each
        return f"""LEFT JOIN LATERAL (
  SELECT c.payload, c.headers FROM timeline.payload AS c WHERE c."row" = {table}."row"{each}) AS p ON true"""

    def _without_content(self, table: str) -> str:
        """Return the DELETE of the contents of a table's rows."""
        chosen = self._words.among.format(f'SELECT {table}."row" FROM {table}')
        return f'DELETE FROM timeline.payload WHERE "row" {chosen}'

    def _put(self) -> str:
        """Store new messages; return how many, and which if not all. The record is locked against a drop, so that no
        row outlives it.

        $2 now; from $3 on the arrays of PUT."""
        words = self._words
        given = {name: f"${at}::{_ARRAYS.get(name, 'int8[]')}" for at, name in enumerate(PUT, 3)}
        said = {name: f"a.{quoted(name)}" for name in PUT if name not in ("payload", "headers")}
        said |= {"topic": "standing.key", "headers_bytes": "length(a.headers)", "scheduled_ms": "a.due_ms"}
        said |= {"put_ms": "$2::int8", "asked_ms": "$2::int8"}
        taken = [name for name in PUT if name != "payload"]
        return f"""
WITH standing AS MATERIALIZED (SELECT key FROM timeline.topic WHERE uid = $1{words.keeps_record}), stored AS (
  INSERT INTO timeline.message ({", ".join(map(quoted, said))})
  SELECT {", ".join(said.values())}
  FROM standing, unnest({", ".join(given[name] for name in taken)})
    AS a({", ".join(map(quoted, taken))})
  ON CONFLICT (topic, bucket, id) DO NOTHING RETURNING "row"
), kept AS (
  INSERT INTO timeline.payload ("row", payload, headers)
  SELECT b."row", b.payload, b.headers
  FROM unnest({given["row"]}, {given["payload"]}, {given["headers"]}) AS b("row", payload, headers)
  WHERE {words.new_row}
)
SELECT count(*), CASE WHEN count(*) < cardinality($3) THEN array_agg(stored."row") END FROM stored
"""

    def _remember(self, table: str, last_op: str, settled_ms: str, where: str = "") -> str:
        """Return the INSERT of what is left of the messages in a table."""
        return f"""
  INSERT INTO timeline.remembered (topic, id, birth, version, payload_sum, last_op, settled_ms)
  SELECT {self._words.topic}, {table}.id, {table}.birth, {table}.version, {table}.payload_sum, {last_op}, {settled_ms}
  FROM {table}{where}
  ON CONFLICT (topic, id) DO UPDATE SET birth = excluded.birth, version = excluded.version,
    payload_sum = excluded.payload_sum, last_op = excluded.last_op, settled_ms = excluded.settled_ms
"""

    def _holding(self) -> str:
        return f"""found AS MATERIALIZED (SELECT f.place, a.birth, a.version, a.holder, a.n
  FROM unnest($2::int8[], $3::bytea[], $4::int8[], $5::int8[], $6::bytea[]) WITH ORDINALITY
    AS a(bucket, id, birth, version, holder, n), {self._place_of("a")}
  WHERE a.holder != {NOTHING}
)"""

    def _still(self) -> str:
        """Return the conditions that are checked again once the row is locked. `ctid` alone is not checked again."""
        return (
            f"m.{self._words.place} = f.place AND m.birth = f.birth AND m.version = f.version AND m.holder = f.holder "
            "AND m.died_ms = 0"
        )

    def _ack(self, remembers: bool) -> str:
        """Delete acknowledged messages whose token and holder match; return which, and their due times. `remembers`:
        whether the topic does."""
        kept = f", kept AS ({self._remember('gone', '0', '$7::int8')})" if remembers else ""
        return f"""
WITH {self._holding()}, gone AS (
  DELETE FROM timeline.message AS m USING found AS f WHERE {self._still()}
  RETURNING f.n, m."row", m.due_ms, m.id, m.birth, m.version, m.payload_sum
), content AS ({self._without_content("gone")}){kept}
SELECT array_agg(gone.n - 1), array_agg(gone.due_ms) FROM gone
"""

    def _extend(self) -> str:
        """Extend leases of their holders that have not expired; return which, and until when."""
        return f"""
WITH {self._holding()}
UPDATE timeline.message AS m SET due_ms = greatest(m.due_ms, ($7::int8[])[f.n])
FROM found AS f WHERE {self._still()} AND (m.due_ms > $8 OR m.expires_ms = 0 OR m.expires_ms > $8)
RETURNING f.n - 1, m.due_ms
"""

    def _release(self) -> str:
        """Release messages that never expire, `unseen` ones too; return which, and their due times."""
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
        """Find messages by id."""
        words = self._words
        return f"""
SELECT f.*, a.n FROM unnest($2::int8[], $3::bytea[]) WITH ORDINALITY AS a(bucket, id, n), LATERAL (
  SELECT {whole()} FROM timeline.message AS m
  WHERE m.topic {words.of_topic} AND m.bucket = a.bucket AND m.id = a.id{words.each}
) AS f
"""

    def _find_remembered(self) -> str:
        """Find remembered ids. `+ 0`, here and elsewhere, leaves the planner the index of (topic, id) alone."""
        return f"""
SELECT f.* FROM unnest($2::bytea[]) AS a(id), LATERAL (
  SELECT r.id, r.birth, r.version, r.payload_sum, r.last_op FROM timeline.remembered AS r
  WHERE r.topic {self._words.of_topic} AND r.id = a.id AND r.settled_ms + 0 > $3{self._words.each}) AS f
"""

    def _change(self, updates: bool, removes: bool, remembers: bool) -> str:
        """Write changes of messages that were read: an update or a removal stands if birth, version, due time and time
        of death are still the same. Return the places in the batch of those that were written.

        $2 … $7 bucket, id, birth, version, due time, time of death as read; $8 whether it is removed. Then, for
        `updates`, the columns afterwards; then, for `remembers`, now, whether the id is remembered, and the operation
        that its remains carry.
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
            left = self._remember("gone", "gone.left_op", f"${now}::int8", " WHERE gone.remembered")
            parts.append(f"kept AS ({left})")
        done = [f"SELECT n FROM {name}" for name, on in (("changed", updates), ("gone", removes)) if on]
        return f"WITH {', '.join(parts)} SELECT array_agg(done.n - 1) FROM ({' UNION ALL '.join(done)}) AS done"

    def _contents(self) -> str:
        return f"""
SELECT p.payload, p.headers FROM unnest($1::int8[]) WITH ORDINALITY AS a("row", n) {self.content_of("a")} ORDER BY a.n
"""

    def _remove_new(self) -> str:
        """Remove messages that this very transaction has put."""
        place = self._words.place
        new = f"""
  SELECT f.place FROM unnest($2::int8[], $3::bytea[]) AS a(bucket, id), {self._place_of("a")}"""
        return f"""
WITH gone AS (DELETE FROM timeline.message WHERE {place} {self._words.among.format(new)} RETURNING "row"
) {self._without_content("gone")}
"""

    def _lease_each(self) -> str:
        """Lease messages that are still as they were read; return which, with their content."""
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
        """Do the operation on the next messages of the walk over (bucket, id) that nothing refuses.

        Return the last one's place, how many there are, and how many were done. Then the earliest due time among those,
        and the ids of the others that were there at the start. No record: the walk is done.

        $2 tag; $3, $4 bucket and id of the last one before; $5 how many; $6 when the operation started; $7 group; $8
        now. A move: $9 its operation id; $10 and $11 the due time or the shift; $12 the latest due time. A cancel: $9
        whether leased ones too; $10 its operation id.
        """
        words, moves = self._words, operation is Operation.MOVE
        # Not leased, said so that no partial index serves it.
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
            done += f", kept AS ({self._remember('done', '$10::int8', '$8::int8')})"
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
    """Return what lies behind `name`: how many messages were skipped because others have locked them, and the next due
    time from `least` on. That and the end of `name` make one bound: with two, an index may begin at either."""
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
    """Return the leased messages as columns. A number column is one byte string of big-endian numbers. A column of
    strings is all strings in one, and their lengths (-1: the content is gone)."""
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
    # For a single grant: one pass.
    False: f"""
    SELECT b.* FROM (
      SELECT e.*, 1::int8 AS turn, row_number() OVER due AS n,
        sum({_BYTES}) OVER (due ROWS UNBOUNDED PRECEDING) AS taken
      FROM (SELECT * FROM free UNION ALL SELECT * FROM held) AS e WINDOW due AS (ORDER BY e.due_ms, e.id)
    ) AS b WHERE b.n <= $5""",
    # The turn of each message must be known before its bytes are counted.
    True: """
    SELECT c.*, sum(c.bytes) OVER (PARTITION BY c.turn ORDER BY c.n ROWS UNBOUNDED PRECEDING) AS taken FROM (
      SELECT b.*, (($11::int4[])[b.n])::int8 AS turn, (b.payload_bytes + b.headers_bytes)::int4 AS bytes FROM (
        SELECT e.*, row_number() OVER (ORDER BY e.due_ms, e.id) AS n
        FROM (SELECT * FROM free UNION ALL SELECT * FROM held) AS e
      ) AS b WHERE b.n <= $5
    ) AS c""",
}


def lease(several: bool) -> str:
    """Return the statement of `Store.lease_due` in the plain case.

    It finds, locks, deals and leases messages, reads their content, and looks up what comes next. `several` grants: the
    n-th message belongs to the grant whose number is the n-th of $11. It leases nothing (`plain` is false) if the rules
    must decide. A message may have expired, or been delivered too often. Bytes may run out among several grants.

    - $2, $3: until which due time to lease messages without a holder, and those whose lease ran out.
    - $4: buckets, or NULL. $5: how many. $6: now. $7: the topic's max_deliveries.
    - $8, $9, $10: lease, holder and bytes of each grant. $11, of a single grant: whether one message may have any size.
    - $12: the due time from which to look. $13: the same for the lease that runs out next.
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
