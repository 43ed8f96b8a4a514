"""MySQL's dialect: a batch goes in as one list of values or one JSON array, and comes out as one row of whole columns.
And puts and settles in the plain case, where a free id, or token and holder, decide.

Byte strings go in as hexadecimal literals, which no character set changes. Each lookup names its index: without that,
the planner may walk the whole table, and lock it.

Why one row: the driver is plain Python. Measured on MariaDB 10.11, 2,000 messages with 17 columns took 13.4 ms of the
driver's processor time as rows, and 0.4 ms as the row that `MysqlColumns` asks for. In all it was 7 instead of 20 ms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from timeline.columns import Ragged
from timeline.model import Answers, Operation
from timeline.storage_plugins.contract import Grant, Puts, Settles, StoreUnavailable
from timeline.storage_plugins.mysql.schema import DEAD, FREE, HELD
from timeline.storage_plugins.sql import NEW, NUMBERS, STRINGS, new_columns, signed
from timeline.storage_plugins.sql import changes as sql
from timeline.storage_plugins.sql.changes import settle_by_columns
from timeline.storage_plugins.sql.dialect import Changes, RowDialect
from timeline.storage_plugins.sql.rows import CHANGING, ColumnsQuery, FoundColumns, FoundMessage, pieces
from timeline.storage_plugins.sql.statements import Plan, Query, Statement

AT_ONCE = 2000
"""The most rows of one statement that writes or looks up."""
LEASED_AT_ONCE = 4000
"""The most rows of one look along the timeline. With the longest ids, groups and holders they fit into the smallest
packet."""
CONTENT_BYTES_AT_ONCE = 4 * 1024 * 1024
"""Content of one statement, give or take one message. Its hexadecimal digits are twice that."""


class MysqlColumns(ColumnsQuery):
    """A SELECT whose result is one row of whole columns. Its number columns are never NULL."""

    def __init__(self, numbers: Sequence[str], strings: Sequence[str] = (), table: str = "m") -> None:
        super().__init__(numbers, strings)
        self._named = {name: f"{table}.`{name}`" for name in (*numbers, *strings)}
        self.inner = ", ".join(self._named.values())

    def over(self, source: str, **computed: str) -> str:
        """Return the statement for `source`: all that may follow FROM, in any order. `computed`: what some columns
        are."""
        named = self._named | computed
        outer = (
            *(f"GROUP_CONCAT({named[name]})" for name in self.numbers),
            *(f"GROUP_CONCAT(LENGTH({named[name]}))" for name in self.strings),
            *(f"GROUP_CONCAT({named[name]} SEPARATOR '')" for name in self.strings),
        )
        return f"SELECT {', '.join(outer)} FROM {source}"

    def first(self, source: str) -> str:
        """Return the statement for a `source` with an order and a limit, which may lock what it returns."""
        return self.over(f"(SELECT {self.inner} FROM {source}) AS m")

    def reading(self, text: str) -> Statement:
        """Return the statement of a text made by `over` or `first`."""
        return Statement(text, (), self.read)

    def read(self, rows: Sequence[Any]) -> FoundColumns:
        found = super().read(rows)
        if any(int(strings.offsets[-1]) != len(strings.data) for strings in found.strings.values()):
            raise StoreUnavailable("The server cut its answer short. Raise max_allowed_packet.")
        return found

    def listing(self, listed: str | bytes | None) -> str:
        # Servers and drivers differ in the type of a list of numbers.
        return f"[{listed.decode() if isinstance(listed, bytes) else listed or ''}]"


WHOLE = MysqlColumns(("row", "headers_bytes", *NUMBERS), tuple(STRINGS.values()))
"""Messages with every column but their content."""
_FREE_ROWS = MysqlColumns(tuple(name for name in WHOLE.numbers if name != "died_ms"), ("id", "grp", "tag"))
"""The same for messages without a holder."""


def parts(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Return the items in parts, each as large as a statement takes."""
    for start in range(0, len(items), AT_ONCE):
        yield items[start : start + AT_ONCE]


def listed(numbers: Sequence[int]) -> str:
    """Return numbers as SQL lists them; for none, a list that matches nothing."""
    return ",".join(map(str, numbers)) or "NULL"


def hexed(value: bytes) -> str:
    """Return bytes as a literal."""
    return f"x'{value.hex()}'"


_KINDS = {"holder": "VARCHAR(510)", "dead": "VARCHAR(2048)"}
_CHANGED = ", ".join(f"{name} {_KINDS.get(name, 'BIGINT')} PATH '$[{at}]'" for at, name in enumerate(CHANGING, 1))
_SET = ", ".join(f"m.{name} = {f'UNHEX(a.{name})' if name in _KINDS else f'a.{name}'}" for name in CHANGING)


_DELETE = (
    "DELETE m FROM JSON_TABLE(%s, '$[*]' COLUMNS (r BIGINT PATH '$')) AS a "
    "STRAIGHT_JOIN {table} AS m FORCE INDEX (PRIMARY) ON m.`row` = a.r"
)
"""`WHERE row IN (…)` is a little faster. But if the list is a fifth of the table, the server reads and locks all of it.
Two brokers that acknowledge would then wait for each other for ever."""


_LEASE_EACH = (
    "UPDATE JSON_TABLE(%s, '$[*]' COLUMNS (r BIGINT PATH '$[0]', due_ms BIGINT PATH '$[1]', "
    "holder VARCHAR(510) PATH '$[2]')) AS a STRAIGHT_JOIN message AS m ON m.`row` = a.r "
    "SET m.due_ms = a.due_ms, m.holder = UNHEX(a.holder), m.version = m.version + 1, m.deliveries = m.deliveries + 1"
)


def by_id(key: int, places: Sequence[tuple[int, bytes]]) -> str:
    """Return messages by (bucket, id), as all that follows FROM: for each bucket the list of its ids. A join to a JSON
    table takes the server twice the processor time; (bucket, id) IN (…) is in between."""
    by_bucket: dict[int, list[str]] = {}
    for bucket, id in places:
        by_bucket.setdefault(bucket, []).append(hexed(id))
    asked = " OR ".join(f"(m.bucket = {bucket} AND m.id IN ({','.join(ids)}))" for bucket, ids in by_bucket.items())
    return f"message AS m FORCE INDEX (message_id) WHERE m.topic = {key} AND ({asked})"


_CONTENT = MysqlColumns(("row",), ("payload", "headers"), "p")


class LiteralQuery(Query):
    """A statement under construction. Its text has the values."""

    def __call__(self, value: Any) -> str:
        return hexed(value) if isinstance(value, bytes) else str(value)


class MysqlDialect(RowDialect):
    """The dialect. It works in a transaction, which locks what it looks up."""

    free = f"m.kind = {FREE}"
    held = f"m.kind = {HELD}"
    dead = f"m.kind = {DEAD}"
    due = died = "place_ms"
    locked = " FOR UPDATE"
    passing = claiming = " FOR UPDATE SKIP LOCKED"
    unless_named = "ON DUPLICATE KEY UPDATE name = name"
    most_rows = LEASED_AT_ONCE
    walks_dead = False

    def query(self, key: int = 0) -> Query:
        return LiteralQuery(key)

    def text(self, text: str) -> bytes:
        return text.encode()

    def quoted(self, name: str) -> str:
        return f"`{name}`"

    def table(self, name: str) -> str:
        return name

    def along(self, index: str) -> str:
        return f"message AS m FORCE INDEX ({'message_id' if index == 'message_id' else 'message_due'})"

    def beyond(self, query: Query, columns: tuple[str, str], place: tuple[int, bytes]) -> str:
        (first, second), (number, id) = columns, place
        return f"{first} >= {number} AND ({first} > {number} OR {second} > {hexed(id)})"

    def up_to(self, query: Query, columns: tuple[str, str], place: tuple[int, bytes]) -> str:
        (first, second), (number, id) = columns, place
        return f"{first} <= {number} AND ({first} < {number} OR {second} <= {hexed(id)})"

    def in_buckets(self, query: Query, buckets: Sequence[int] | None) -> str:
        return "" if buckets is None else f" AND m.bucket IN ({listed(buckets)})"

    def walk(self, query: Query, tag: bytes, dead: bool, after: tuple[int, bytes]) -> tuple[str, str]:
        if not tag:
            return super().walk(query, tag, False, after)
        joined = "tagged AS w FORCE INDEX (PRIMARY) STRAIGHT_JOIN message AS m ON m.`row` = w.`row`"
        beyond = self.beyond(query, ("w.bucket", "w.id"), after)
        return f"{joined} WHERE w.topic {query.topic} AND w.tag = {hexed(tag)} AND {beyond}", "w"

    def expired(self, query: Query, now_ms: int) -> str:
        return (
            "expiring AS e FORCE INDEX (PRIMARY) STRAIGHT_JOIN message AS m ON m.`row` = e.`row` "
            f"WHERE e.topic {query.topic} AND e.expires_ms <= {now_ms} "
            f"AND (m.kind = {FREE} OR (m.kind = {HELD} AND m.due_ms <= {now_ms})) ORDER BY e.expires_ms"
        )

    def messages(self, query: Query, source: str, free: bool = False, lock: str = "") -> Statement:
        columns = _FREE_ROWS if free else WHOLE
        return query.reading(columns.first(source + lock), columns.read_free if free else columns.read)

    def find(self, key: int, places: Sequence[tuple[int, bytes]], lock: bool) -> Plan[Iterable[FoundColumns]]:
        # In the index's order: two calls that lock the same messages then wait, but never for each other.
        found: list[FoundColumns] = []
        for part in parts(sorted(set(places))):
            found.append((yield WHOLE.reading(WHOLE.over(by_id(key, part)) + (self.locked if lock else ""))))
        return found

    def find_remembered(self, key: int, ids: Sequence[bytes], after_ms: int) -> Plan[list[tuple[Any, ...]]]:
        found: list[tuple[Any, ...]] = []
        for part in parts(list(dict.fromkeys(ids))):
            text = (
                f"SELECT id, birth, version, payload_sum, last_op FROM remembered WHERE topic = {key} "
                f"AND id IN ({','.join(map(hexed, part))}) AND settled_ms > {after_ms}"
            )
            found += yield Statement(text, (), list)
        return found

    def update(self, columns: Sequence[Sequence[Any]]) -> Plan[None]:
        for part in parts(sorted(zip(*columns, strict=True))):
            rows = [[value.hex() if isinstance(value, bytes) else value for value in row] for row in part]
            text = (
                f"UPDATE JSON_TABLE(%s, '$[*]' COLUMNS (r BIGINT PATH '$[0]', {_CHANGED})) AS a "
                f"STRAIGHT_JOIN message AS m ON m.`row` = a.r SET {_SET}"
            )
            yield Statement(text, (json.dumps(rows),), writes=True)

    def remove(self, removed: Sequence[FoundMessage]) -> Plan[None]:
        marked = any(stored.tagged or stored.message.expires_ms for stored in removed)
        return self.delete([stored.row for stored in removed], marked)

    def delete(self, rows: Sequence[int], marked: bool) -> Plan[None]:
        """Remove messages by row, with their contents. `marked`: some of them have rows in the tables beside."""
        for part in parts(sorted(rows)):
            if marked:
                chosen = f"IN ({listed(part)})"
                text = (
                    "DELETE t FROM message AS m STRAIGHT_JOIN tagged AS t ON t.topic = m.topic AND t.tag = m.tag "
                    f"AND t.bucket = m.bucket AND t.id = m.id WHERE m.`row` {chosen} AND m.tag <> x''"
                )
                yield Statement(text, writes=True)
                text = (
                    "DELETE e FROM message AS m STRAIGHT_JOIN expiring AS e ON e.topic = m.topic "
                    f"AND e.expires_ms = m.expires_ms AND e.`row` = m.`row` WHERE m.`row` {chosen} AND m.expires_ms > 0"
                )
                yield Statement(text, writes=True)
            for table in ("message", "payload"):
                yield Statement(_DELETE.format(table=table), (json.dumps(part),), writes=True)

    def remember(self, changes: Changes, ids: Sequence[bytes], *columns: Sequence[int]) -> Plan[None]:
        text = "REPLACE INTO remembered (topic, id, birth, version, payload_sum, last_op, settled_ms) VALUES "
        for part in parts(list(zip(ids, *columns, strict=True))):
            values = (f"({changes.key},x'{id.hex()}',{listed(numbers)},{changes.now_ms})" for id, *numbers in part)
            yield Statement(text + ",".join(values), writes=True)

    def reading_contents(self, numbers: Sequence[int], sizes: Sequence[int]) -> Iterator[Statement]:
        for piece in pieces(sizes, CONTENT_BYTES_AT_ONCE, LEASED_AT_ONCE):
            yield _CONTENT.reading(_CONTENT.over(f"payload AS p WHERE p.`row` IN ({listed(sorted(numbers[piece]))})"))

    def contents_of(self, numbers: Sequence[int], found: Sequence[FoundColumns]) -> tuple[Ragged, Ragged, list[int]]:
        place = {row: at for at, row in enumerate(row for columns in found for row in columns.numbers["row"])}
        gone = [at for at, row in enumerate(numbers) if row not in place]
        order = np.array([place.get(row, len(place)) for row in numbers], dtype=np.intp)
        payloads, headers = (
            Ragged.concat([*(columns.strings[name] for columns in found), Ragged.of([b""])]).take(order)
            for name in ("payload", "headers")
        )
        return payloads, headers, gone

    def lease_for(self, grant: Grant, now_ms: int, numbers: Sequence[int]) -> Plan[None]:
        for part in parts(numbers):
            text = (
                f"UPDATE message SET due_ms = GREATEST({now_ms}, due_ms) + {grant.lease_ms}, "
                f"holder = {hexed(grant.holder)}, version = version + 1, deliveries = deliveries + 1 "
                f"WHERE `row` IN ({listed(part)})"
            )
            yield Statement(text, writes=True)

    def lease_each(self, columns: tuple[Sequence[int], Sequence[int], Sequence[bytes]]) -> Plan[None]:
        numbers, until_ms, holders = columns
        for part in parts(list(zip(numbers, until_ms, [holder.hex() for holder in holders], strict=True))):
            yield Statement(_LEASE_EACH, (json.dumps(part),), writes=True)

    def delete_some(self, key: int, limit: int) -> Plan[int]:
        rows = yield Statement(f"SELECT `row` FROM message WHERE topic = {key} LIMIT {limit}", (), list)
        yield from self.delete([row for (row,) in rows], marked=True)
        return len(rows)

    def forget(self, key: int, until_ms: int | None, limit: int) -> Plan[int]:
        until = "" if until_ms is None else f" AND settled_ms <= {until_ms}"
        text = f"DELETE FROM remembered WHERE topic = {key}{until} LIMIT {limit}"
        removed: int = yield Statement(text, counts=True, writes=True)
        return removed

    def stands(self, changes: Changes) -> str:
        # By uid too: a server that took over may have missed the topic's creation, and given its key to another topic.
        return f"EXISTS (SELECT 1 FROM topic WHERE `key` = {changes.key} AND uid = {changes.topic.uid})"

    def has_key(self, changes: Changes) -> Plan[bool]:
        rows = yield Statement(f"SELECT {self.stands(changes)}", (), list)
        return bool(rows[0][0])


# ── put ──

Reserve = Callable[[int], int]
_INSERTED = (*NEW, "scheduled_ms", "topic", "put_ms", "asked_ms")
_HEXED = frozenset(STRINGS.values())
_IDS, _EXPIRES, _TAGS = NEW.index("id"), NEW.index("expires_ms"), NEW.index("tag")


class NumbersTaken(StoreUnavailable):
    """Row numbers that this process had reserved are taken: the server that took over had missed the reservation."""


def put(changes: Changes, puts: Puts, reserve: Reserve) -> Plan[Answers]:
    """Do `Store.put`: new messages are inserted at once. `reserve`: returns the first of so many new row numbers."""
    return sql.put(changes, puts, partial(_insert, changes, reserve))


def _insert(
    changes: Changes, reserve: Reserve, puts: Puts, buckets: list[int], in_place: bool
) -> Plan[Collection[int]]:
    """Insert puts with their contents; return those whose id was neither taken nor remembered."""
    count = len(puts)
    first = reserve(count)
    numbers = range(first, first + count)
    columns = [
        [item.hex() for item in column] if name in _HEXED else column
        for name, column in zip(NEW, new_columns(puts, numbers, buckets), strict=True)
    ]
    # In the index's order: two batches that share ids then wait, but never for each other.
    rows = sorted(zip(*columns, puts.due_ms.tolist(), strict=True), key=lambda row: row[1:3])
    stored = yield from _insert_messages(changes, rows)
    there = set(numbers)
    if stored < count:
        text = f"SELECT `row`, birth FROM message WHERE `row` >= {first} AND `row` < {first + count}"
        found = yield Statement(text, (), list)
        births = signed(puts.birth)
        there = {row for row, birth in found if birth == births[row - first]}
        if len(there) < len(found):
            raise NumbersTaken("Row numbers were given out twice. This server had missed a reservation.")
    if changes.topic.settings.remember_ms and not in_place:
        there -= yield from _take_back(changes, [row for row in rows if row[0] in there])
    yield from _mark(changes.key, [row for row in rows if row[0] in there])
    kept = [at for at, row in enumerate(numbers) if row in there]
    yield from _insert_payloads([(first + at, puts.payloads[at], puts.headers[at]) for at in kept])
    return kept


def _insert_messages(changes: Changes, rows: Sequence[tuple[Any, ...]]) -> Plan[int]:
    """Insert new messages, rows of NEW and `scheduled_ms`, unless their id is taken; return how many were stored."""
    given = ["x'%s'" if name in _HEXED else "%d" for name in (*NEW, "scheduled_ms")]
    one = f"({','.join(given)},{changes.key},{changes.now_ms},{changes.now_ms})"
    names = ", ".join(f"`{name}`" for name in _INSERTED)
    stored = 0
    for part in parts(rows):
        values = ",".join([one % row for row in part])
        text = f"INSERT INTO message ({names}) VALUES {values} ON DUPLICATE KEY UPDATE `row` = `row`"
        stored += yield Statement(text, counts=True, writes=True)
    return stored


def _take_back(changes: Changes, rows: list[tuple[Any, ...]]) -> Plan[set[int]]:
    """Remove those of the rows just inserted whose id is remembered; return their numbers.

    The question comes after the insert, never before. An insert waits for a call that settles the same id, and then
    sees what that one remembered. While our row stands, no other call can settle the id."""
    after_ms = changes.now_ms - changes.topic.settings.remember_ms
    left = yield from changes.sql.find_remembered(changes.key, [bytes.fromhex(row[_IDS]) for row in rows], after_ms)
    remembered = {id.hex() for id, *_ in left}
    back = {row[0] for row in rows if row[_IDS] in remembered}
    assert isinstance(changes.sql, MysqlDialect)
    yield from changes.sql.delete(sorted(back), marked=False)
    return back


def _mark(key: int, rows: Sequence[tuple[Any, ...]]) -> Plan[None]:
    """Note tags and expiries of new messages in the tables beside `message`."""
    for part in parts([row for row in rows if row[_TAGS]]):
        values = ",".join(f"({key},x'{row[_TAGS]}',{row[1]},x'{row[_IDS]}',{row[0]})" for row in part)
        yield Statement(f"INSERT INTO tagged (topic, tag, bucket, id, `row`) VALUES {values}", writes=True)
    for part in parts([row for row in rows if row[_EXPIRES]]):
        values = ",".join(f"({key},{row[_EXPIRES]},{row[0]})" for row in part)
        yield Statement(f"INSERT INTO expiring (topic, expires_ms, `row`) VALUES {values}", writes=True)


def _insert_payloads(rows: Sequence[tuple[int, bytes, bytes]]) -> Plan[None]:
    """Insert contents: row, payload, headers."""
    for piece in pieces([len(payload) + len(headers) for _, payload, headers in rows], CONTENT_BYTES_AT_ONCE):
        values = ",".join(f"({row},{hexed(payload)},{hexed(headers)})" for row, payload, headers in rows[piece])
        yield Statement(f"INSERT INTO payload (`row`, payload, headers) VALUES {values}", writes=True)


# ── settle ──

_HELD = MysqlColumns(("row", "birth", "version", "due_ms", "expires_ms", "payload_sum", "marked"), ("id", "holder"))
"""The token of a living message with a holder. `marked`: whether it has rows in the tables beside."""
_MARKED = "m.tag <> x'' OR m.expires_ms > 0"
_EXTEND = (
    "UPDATE JSON_TABLE(%s, '$[*]' COLUMNS (r BIGINT PATH '$[0]', due_ms BIGINT PATH '$[1]')) AS a "
    "STRAIGHT_JOIN message AS m ON m.`row` = a.r SET m.due_ms = a.due_ms"
)


def settle_plain(
    changes: Changes, settles: Settles, ids: list[bytes], buckets: list[int], answers: Answers
) -> Plan[Collection[int]]:
    """Do acks and extends of living messages whose token and holder match; return which were done."""
    dialect = changes.sql
    assert isinstance(dialect, MysqlDialect)
    plain = (settles.operation == Operation.ACK) | (settles.operation == Operation.EXTEND)
    chosen = np.flatnonzero(plain).tolist()
    at_of = {ids[at]: at for at in chosen}
    done: list[int] = []
    acked: list[int] = []
    left: list[tuple[bytes, int, int, int, int]] = []
    marked = False
    for part in parts(sorted((buckets[at], ids[at]) for at in chosen)):
        source = f"{by_id(changes.key, part)} AND m.kind = {HELD} AND {dialect.stands(changes)} FOR UPDATE"
        found = yield _HELD.reading(_HELD.over(source, marked=_MARKED))
        columns = {name: np.array(values, dtype=np.int64) for name, values in found.numbers.items()}
        place = np.array([at_of[id] for id in found.strings["id"].tolist()], dtype=np.intp)
        holders = zip(found.strings["holder"].tolist(), settles.holders.take(place).tolist(), strict=True)
        ours = np.array([held == asking for held, asking in holders], dtype=np.bool_)
        ours &= columns["birth"].view(np.uint64) == settles.birth[place]
        ours &= columns["version"] == settles.version[place]
        acks, extends, until_ms = settle_by_columns(
            settles, place, ours, columns["due_ms"], columns["expires_ms"], changes.now_ms, answers
        )
        for some in parts(list(zip(columns["row"][extends].tolist(), until_ms.tolist(), strict=True))):
            yield Statement(_EXTEND, (json.dumps(some),), writes=True)
        done += place[acks | extends].tolist()
        acked += columns["row"][acks].tolist()
        marked |= bool(columns["marked"][acks].any())
        if changes.topic.settings.remember_ms and acks.any():
            tokens = (columns[name][acks].tolist() for name in ("birth", "version", "payload_sum"))
            left += zip(found.strings["id"].take(acks).tolist(), *tokens, [0] * int(acks.sum()), strict=True)
    yield from dialect.delete(acked, marked)
    if left:
        yield from dialect.remember(changes, *zip(*left, strict=True))
    return done
