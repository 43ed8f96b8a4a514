"""MySQL's dialect: a batch goes in as one list of values or one JSON array, never a statement a message, and comes out
as one row of whole columns.

Byte strings travel in as hexadecimal literals, which no character set touches. Each lookup names its index: left to
itself the planner may walk the whole table, and lock it.

Why one row: the driver is plain Python. Measured on MariaDB 10.11, 2,000 messages with 17 columns: 13.4 ms of the
driver's processor time as rows, 0.4 ms as the row that `MysqlColumns` asks for, and 7 instead of 20 ms in all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from timeline.columns import Int64, Ragged, UInt32
from timeline.leases import Message
from timeline.storage_plugins.contract import Grant, StoreUnavailable
from timeline.storage_plugins.mysql.schema import DEAD, FREE, HELD
from timeline.storage_plugins.sql import NUMBERS, STRINGS, signed_one
from timeline.storage_plugins.sql.dialect import Changes, LeasedContent, SqlDialect
from timeline.storage_plugins.sql.leasing import MANY_GRANTS
from timeline.storage_plugins.sql.rows import (
    CHANGING,
    FoundColumns,
    MessageBatch,
    changing_columns,
    columns_of,
    without_holder,
)
from timeline.storage_plugins.sql.statements import Plan, Query, Statement

AT_ONCE = 2000
"""Rows of one statement that writes or looks up."""
LEASED_AT_ONCE = 4000
"""Rows of one look along the timeline: with the longest ids, groups and holders they stay below the smallest packet."""
CONTENT_BYTES_AT_ONCE = 4 * 1024 * 1024
"""Content of one statement, give or take one message: as hexadecimal digits it is twice that."""


class MysqlColumns:
    """A SELECT whose result is one row of whole columns. `numbers`: integer columns that are never NULL. `strings`:
    byte-string columns."""

    def __init__(self, numbers: Sequence[str], strings: Sequence[str] = (), table: str = "m") -> None:
        self.numbers, self._strings = tuple(numbers), tuple(strings)
        self._named = {name: f"{table}.`{name}`" for name in (*numbers, *strings)}
        self.inner = ", ".join(self._named.values())
        self.outer = self._outer(self._named)

    def _outer(self, named: dict[str, str]) -> str:
        return ", ".join(
            (
                *(f"GROUP_CONCAT({named[name]})" for name in self.numbers),
                *(f"GROUP_CONCAT(LENGTH({named[name]}))" for name in self._strings),
                *(f"GROUP_CONCAT({named[name]} SEPARATOR '')" for name in self._strings),
            )
        )

    def over(self, source: str, **computed: str) -> str:
        """The statement for `source`: all that may follow FROM, in any order. `computed`: what some columns are."""
        return f"SELECT {self._outer(self._named | computed)} FROM {source}"

    def first(self, source: str) -> str:
        """The statement for a `source` in an order and with a limit, which may lock what it answers."""
        return f"SELECT {self.outer} FROM (SELECT {self.inner} FROM {source}) AS m"

    def reading(self, text: str) -> Statement:
        """The statement of a text made by `over` or `first`."""
        return Statement(text, (), self.read)

    def read(self, rows: Sequence[Any]) -> FoundColumns:
        """What such a statement found."""
        row = rows[0]
        listed = len(self.numbers) + len(self._strings)
        lists: list[list[int]] = json.loads(f"[{','.join(f'[{text or str()}]' for text in map(_text, row[:listed]))}]")
        found = columns_of(self.numbers, self._strings, lists, row[listed:])
        if any(int(strings.offsets[-1]) != len(strings.data) for strings in found.strings.values()):
            raise StoreUnavailable("the server cut its answer short: raise max_allowed_packet")
        return found


def _text(listed: str | bytes | None) -> str:
    """A list of numbers as text: servers and drivers differ in what they call it."""
    return listed.decode() if isinstance(listed, bytes) else listed or ""


WHOLE = MysqlColumns(("row", "headers_bytes", *NUMBERS), tuple(STRINGS.values()))
"""Messages with every column but their content."""
_FREE_ROWS = MysqlColumns(tuple(name for name in WHOLE.numbers if name != "died_ms"), ("id", "grp", "tag"))
"""The same of messages that nobody holds."""


def parts(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """The items, as many at a time as a statement takes."""
    for start in range(0, len(items), AT_ONCE):
        yield items[start : start + AT_ONCE]


def listed(numbers: Sequence[int]) -> str:
    """Numbers as SQL lists them; a list that holds nothing for none."""
    return ",".join(map(str, numbers)) or "NULL"


def hexed(value: bytes) -> str:
    """Bytes as a literal."""
    return f"x'{value.hex()}'"


_KINDS = {"holder": "VARCHAR(510)", "dead": "VARCHAR(2048)"}
_CHANGED = ", ".join(f"{name} {_KINDS.get(name, 'BIGINT')} PATH '$[{at}]'" for at, name in enumerate(CHANGING, 1))
_SET = ", ".join(f"m.{name} = {f'UNHEX(a.{name})' if name in _KINDS else f'a.{name}'}" for name in CHANGING)


_DELETE = (
    "DELETE m FROM JSON_TABLE(%s, '$[*]' COLUMNS (r BIGINT PATH '$')) AS a "
    "STRAIGHT_JOIN {table} AS m FORCE INDEX (PRIMARY) ON m.`row` = a.r"
)
"""`WHERE row IN (…)` is a little quicker, but where the list is a fifth of the table the server reads, and locks, all
of it: two who acknowledge then wait for each other for ever."""


_LEASE_EACH = (
    "UPDATE JSON_TABLE(%s, '$[*]' COLUMNS (r BIGINT PATH '$[0]', due_ms BIGINT PATH '$[1]', "
    "holder VARCHAR(510) PATH '$[2]')) AS a STRAIGHT_JOIN message AS m ON m.`row` = a.r "
    "SET m.due_ms = a.due_ms, m.holder = UNHEX(a.holder), m.version = m.version + 1, m.deliveries = m.deliveries + 1"
)


def by_id(key: int, places: Sequence[tuple[int, bytes]]) -> str:
    """Messages by (bucket, id), as all that follows FROM: for each bucket the list of its ids. Joined to a JSON table
    instead, the server takes twice the processor time for the lookup; (bucket, id) IN (…) is in between."""
    by_bucket: dict[int, list[str]] = {}
    for bucket, id in places:
        by_bucket.setdefault(bucket, []).append(hexed(id))
    asked = " OR ".join(f"(m.bucket = {bucket} AND m.id IN ({','.join(ids)}))" for bucket, ids in by_bucket.items())
    return f"message AS m FORCE INDEX (message_id) WHERE m.topic = {key} AND ({asked})"


_CONTENT = MysqlColumns(("row",), ("payload", "headers"), "p")


class LiteralQuery(Query):
    """A statement under construction, whose values stand in its text."""

    def __call__(self, value: Any) -> str:
        return hexed(value) if isinstance(value, bytes) else str(value)


class MysqlDialect(SqlDialect):
    """The dialect; it lies in a transaction, which locks what it looks up."""

    free = f"m.kind = {FREE}"
    held = f"m.kind = {HELD}"
    dead = f"m.kind = {DEAD}"
    due = died = "place_ms"
    locked = " FOR UPDATE"
    passing = claiming = " FOR UPDATE SKIP LOCKED"
    unless_named = "ON DUPLICATE KEY UPDATE name = name"
    most_rows = LEASED_AT_ONCE
    keeps_keys = True

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
        return query.reading(columns.first(source + lock), _read_free if free else WHOLE.read)

    def find(self, key: int, places: Sequence[tuple[int, bytes]], lock: bool) -> Plan[Iterable[FoundColumns]]:
        # In the index's order, so that two who lock the same ones wait for each other rather than for ever.
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

    def change(self, changes: Changes) -> Plan[set[bytes]]:
        columns = [[changes.met[id].row for id in changes.updated], *changing_columns(list(changes.updated.values()))]
        for part in parts(sorted(zip(*columns, strict=True))):
            rows = [[value.hex() if isinstance(value, bytes) else value for value in row] for row in part]
            text = (
                f"UPDATE JSON_TABLE(%s, '$[*]' COLUMNS (r BIGINT PATH '$[0]', {_CHANGED})) AS a "
                f"STRAIGHT_JOIN message AS m ON m.`row` = a.r SET {_SET}"
            )
            yield Statement(text, (json.dumps(rows),), writes=True)
        removed = changes.removed.values()
        marked = any(stored.tagged or stored.message.expires_ms for stored in removed)
        yield from self.delete([stored.row for stored in removed], marked)
        yield from self.remember(changes, list(changes.remembered.items()))
        return set()

    def delete(self, rows: Sequence[int], marked: bool) -> Plan[None]:
        """Remove messages by row, and their contents; and, where some of them are `marked`, what stands beside them."""
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

    def remember(self, changes: Changes, left: Sequence[tuple[bytes, Message]]) -> Plan[None]:
        """Note settled ids."""
        for part in parts(left):
            values = ",".join(
                f"({changes.key},x'{id.hex()}',{signed_one(old.birth)},{old.version},{signed_one(old.payload_sum)},"
                f"{signed_one(old.last_op)},{changes.now_ms})"
                for id, old in part
            )
            text = "REPLACE INTO remembered (topic, id, birth, version, payload_sum, last_op, settled_ms) VALUES "
            yield Statement(text + values, writes=True)

    def contents(self, numbers: Sequence[int], sizes: Sequence[int]) -> Plan[tuple[Ragged, Ragged, list[int]]]:
        found: list[FoundColumns] = []
        for statement in _contents(numbers, sizes):
            found.append((yield statement))
        return _in_order(numbers, found)

    def lease(
        self, changes: Changes, batch: MessageBatch, turns: UInt32, until_ms: Int64, grants: Sequence[Grant],
        also: Statement | None,
    ) -> Plan[tuple[LeasedContent, Any]]:  # fmt: skip
        numbers = batch.numbers
        if len(grants) > MANY_GRANTS:
            holders = [grants[turn].holder.hex() for turn in turns.tolist()]
            for part in parts(list(zip(numbers, until_ms.tolist(), holders, strict=True))):
                yield Statement(_LEASE_EACH, (json.dumps(part),), writes=True)
        else:
            whose = np.array(numbers, dtype=np.int64)
            for index, grant in enumerate(grants):
                for part in parts(whose[turns == index].tolist()):
                    text = (
                        f"UPDATE message SET due_ms = GREATEST({changes.now_ms}, due_ms) + {grant.lease_ms}, "
                        f"holder = {hexed(grant.holder)}, version = version + 1, deliveries = deliveries + 1 "
                        f"WHERE `row` IN ({listed(part)})"
                    )
                    yield Statement(text, writes=True)
        first, *others = _contents(numbers, batch.sizes.tolist())
        answered = None
        if also is None:
            found = [(yield first)]
        else:  # In one exchange with the leases ahead of it and the contents behind it.
            answered, columns = yield (also, first)
            found = [columns]
        for statement in others:
            found.append((yield statement))
        payloads, headers, gone = _in_order(numbers, found)
        return LeasedContent(payloads, headers, tuple(gone)), answered

    def delete_some(self, key: int, limit: int) -> Plan[int]:
        rows = yield Statement(f"SELECT `row` FROM message WHERE topic = {key} LIMIT {limit}", (), list)
        yield from self.delete([row for (row,) in rows], marked=True)
        return len(rows)

    def forget(self, key: int, until_ms: int | None, limit: int) -> Plan[int]:
        until = "" if until_ms is None else f" AND settled_ms <= {until_ms}"
        text = f"DELETE FROM remembered WHERE topic = {key}{until} LIMIT {limit}"
        removed: int = yield Statement(text, counts=True, writes=True)
        return removed

    def still_stands(self, key: int) -> Plan[bool]:
        rows = yield Statement(f"SELECT {self.stands(key)}", (), list)
        return bool(rows[0][0])

    def stands(self, key: int) -> str:
        return f"EXISTS (SELECT 1 FROM topic WHERE `key` = {key})"


def _read_free(rows: Sequence[Any]) -> FoundColumns:
    return without_holder(_FREE_ROWS.read(rows))


def _contents(numbers: Sequence[int], sizes: Sequence[int]) -> Iterator[Statement]:
    """The statements that read contents by row."""
    start = 0
    while start < len(numbers):
        stop, room = start + 1, CONTENT_BYTES_AT_ONCE - sizes[start]
        while stop < len(numbers) and stop - start < LEASED_AT_ONCE and sizes[stop] <= room:
            room -= sizes[stop]
            stop += 1
        yield _CONTENT.reading(_CONTENT.over(f"payload AS p WHERE p.`row` IN ({listed(sorted(numbers[start:stop]))})"))
        start = stop


def _in_order(numbers: Sequence[int], found: Sequence[FoundColumns]) -> tuple[Ragged, Ragged, list[int]]:
    """Payloads and headers in the order of the rows, and the indexes of those that are gone."""
    place = {row: at for at, row in enumerate(row for columns in found for row in columns.numbers["row"])}
    absent = len(place)
    gone = [at for at, row in enumerate(numbers) if row not in place]
    order = np.array([place.get(row, absent) for row in numbers], dtype=np.intp)
    payloads, headers = (
        Ragged.concat([*(columns.strings[name] for columns in found), Ragged.of([b""])]).take(order)
        for name in ("payload", "headers")
    )
    return payloads, headers, gone


__all__ = ["DEAD", "FREE", "HELD"]
