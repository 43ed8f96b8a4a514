"""SQLite's dialect: batches in, columns out, each in one step.

The interpreter's lock is handed over at every step of a statement, and taken back only when the event loop's thread
lets it go. Measured with a busy main thread: 1,000 messages by `executemany` and a row fetched each cycle at 200
messages/s, the same through the statements here at 4,400. So a batch goes in as one `VALUES` list and comes out as one
row, whose fields are whole columns: a JSON array of numbers, or all byte strings back to back with their lengths.

`VALUES` lists have 2^k rows, padded with NULL, so that few statements are prepared and kept.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from timeline.columns import Int64, Ragged, UInt32
from timeline.storage_plugins.contract import Grant
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
from timeline.storage_plugins.sql.statements import Plan, Query, Result, Statement, drive

MOST_ROWS = 1024
"""Rows of one VALUES list: 15 columns each stay below SQLite's 32,766 variables."""
MOST_BYTES = 64 * 1024 * 1024
"""Content read by one statement, but for a single larger one."""


@lru_cache(maxsize=512)
def _values(width: int, rows: int) -> str:
    row = f"({','.join('?' * width)})"
    return f"(VALUES {','.join([row] * rows)})"


def batches(columns: Sequence[Sequence[Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Equally long columns as VALUES lists and their parameters, MOST_ROWS at a time."""
    width, count = len(columns), len(columns[0])
    for start in range(0, count, MOST_ROWS):
        size = min(count - start, MOST_ROWS)
        rows = 1 << (size - 1).bit_length()
        parameters: list[Any] = [None] * (rows * width)
        for at, column in enumerate(columns):
            parameters[at : size * width : width] = column if size == count else column[start : start + size]
        yield _values(width, rows), parameters


class SqliteColumns:
    """A SELECT whose result is one row of whole columns. `numbers`: integer columns, NULL reads as None. `strings`:
    byte-string columns."""

    def __init__(self, numbers: Sequence[str], strings: Sequence[str] = ()) -> None:
        self._numbers = tuple(numbers)
        self._strings = tuple(strings)
        self.inner = ", ".join((*numbers, *strings))
        self.outer = ", ".join(
            (
                *(f"json_group_array({name})" for name in self._numbers),
                *(f"json_group_array(length({name}))" for name in self._strings),
                # Bytes pass through group_concat as they are, NUL included: it only knows lengths.
                *(f"CAST(group_concat({name}, '') AS BLOB)" for name in self._strings),
            )
        )

    def over(self, source: str) -> str:
        """The statement for `source`: all that may follow FROM, which yields the columns in the wanted order."""
        return f"SELECT {self.outer} FROM {source}"

    def reading(self, source: str, values: Sequence[Any]) -> Statement:
        """The statement that reads these columns of `source`, all that may follow FROM."""
        return Statement(self.over(source), values, self.read)

    def read(self, rows: Sequence[Any]) -> FoundColumns:
        """What a statement made by `over` found."""
        row = rows[0]
        listed = len(self._numbers) + len(self._strings)
        # One text for all: parsing each by itself costs more than its numbers where there are few.
        lists: list[list[int]] = json.loads(f"[{','.join(row[:listed])}]")
        return columns_of(self._numbers, self._strings, lists, row[listed:])


WHOLE = SqliteColumns(("row", "headers_bytes", *NUMBERS), tuple(STRINGS.values()))
"""Messages with every column but their content."""

_FREE_ROWS = SqliteColumns(
    ("row", "headers_bytes", *(name for name in NUMBERS if name != "died_ms")), ("id", "grp", "tag")
)

BY_ID = (
    " AS a CROSS JOIN message AS m INDEXED BY message_id ON m.topic = ? AND m.bucket = a.column{} AND m.id = a.column{}"
)
"""Messages by id; a VALUES list says in which of its columns bucket and id are."""
_FOUND = ", ".join(f"m.{name} AS {name}" for name in WHOLE.inner.split(", "))
_REMEMBERED = SqliteColumns(("n", "birth", "version", "payload_sum", "last_op"))
_REMEMBERED_SOURCE = (
    "(SELECT a.column1 AS n, r.birth AS birth, r.version AS version, r.payload_sum AS payload_sum, "
    "r.last_op AS last_op FROM {} AS a CROSS JOIN remembered AS r "
    "ON r.topic = ? AND r.id = a.column2 AND r.settled_ms > ?)"
)
BY_ROWS = "row IN (SELECT value FROM json_each(?))"
_CONTENT = SqliteColumns(("there",), ("payload", "headers"))
_CONTENT_SOURCE = (
    "(SELECT p.row IS NOT NULL AS there, p.payload AS payload, p.headers AS headers "
    "FROM json_each(?) AS j LEFT JOIN payload AS p ON p.row = j.value ORDER BY j.key)"
)
_SIZED = SqliteColumns(("row", "size"))
_SET = ", ".join(f"{name} = a.column{at}" for at, name in enumerate(CHANGING, start=2))
_LEASE = (
    "UPDATE message SET due_ms = max(?, due_ms) + ?, holder = ?, version = version + 1, deliveries = deliveries + 1 "
    f"WHERE {BY_ROWS}"
)


def answers(connection: sqlite3.Connection, asked: Sequence[Statement]) -> list[Any]:
    """What statements answer."""
    return [_answer(connection, statement) for statement in asked]


def _answer(connection: sqlite3.Connection, asked: Statement) -> Any:
    cursor = connection.execute(asked.text, asked.values)
    if asked.read is not None:
        return asked.read(cursor.fetchall())
    return cursor.rowcount if asked.counts else None


def read(connection: sqlite3.Connection, plan: Plan[Result]) -> Result:
    """Run a plan that only reads."""
    return drive(plan, lambda asked: answers(connection, asked))


class SqliteDialect(SqlDialect):
    """The dialect. `orphan` is told of payloads, by row, and of their sizes, whose messages are gone."""

    __slots__ = ("_orphan",)

    def __init__(self, orphan: Callable[[list[int], list[int]], None] | None = None) -> None:
        self._orphan = orphan

    def table(self, name: str) -> str:
        return name

    def along(self, index: str) -> str:
        return f"message AS m INDEXED BY {index}"

    def in_buckets(self, query: Query, buckets: Sequence[int] | None) -> str:
        if buckets is None:
            return ""
        return f" AND m.bucket IN (SELECT value FROM json_each({query(json.dumps(list(buckets)))}))"

    def messages(self, query: Query, source: str, free: bool = False, lock: str = "") -> Statement:
        columns = _FREE_ROWS if free else WHOLE
        read = _read_free if free else WHOLE.read
        return query.reading(columns.over(f"(SELECT {columns.inner} FROM {source})"), read)

    def find(self, key: int, places: Sequence[tuple[int, bytes]], lock: bool) -> Plan[Iterable[FoundColumns]]:
        found: list[FoundColumns] = []
        for values, parameters in batches(tuple(zip(*places, strict=True)) or ((), ())):
            source = f"(SELECT {_FOUND} FROM {values}{BY_ID.format(1, 2)})"
            found.append((yield WHOLE.reading(source, [*parameters, key])))
        return found

    def find_remembered(self, key: int, ids: Sequence[bytes], after_ms: int) -> Plan[list[tuple[Any, ...]]]:
        left: list[tuple[Any, ...]] = []
        for values, parameters in batches((range(len(ids)), ids)):
            found = yield _REMEMBERED.reading(_REMEMBERED_SOURCE.format(values), [*parameters, key, after_ms])
            at, *columns = found.numbers.values()
            left += zip([ids[n] for n in at], *columns, strict=True)
        return left

    def change(self, changes: Changes) -> Plan[set[bytes]]:
        if changes.updated:
            columns = [[changes.met[id].row for id in changes.updated]]
            columns += changing_columns(list(changes.updated.values()))
            for listed, parameters in batches(columns):
                text = f"UPDATE message SET {_SET} FROM {listed} AS a WHERE message.row = a.column1"
                yield Statement(text, parameters, writes=True)
        if changes.removed:
            removed = changes.removed.values()
            yield from self.delete([stored.row for stored in removed], [stored.size_bytes for stored in removed])
        if changes.remembered:
            left = changes.remembered.values()
            yield from self.remember(
                changes,
                list(changes.remembered),
                [signed_one(message.birth) for message in left],
                [message.version for message in left],
                [signed_one(message.payload_sum) for message in left],
                [signed_one(message.last_op) for message in left],
            )
        return set()

    def delete(self, numbers: list[int], sizes: list[int]) -> Plan[None]:
        """Remove messages by row; their payloads, of `sizes` bytes, stay for an idle moment."""
        if numbers:
            yield Statement(f"DELETE FROM message WHERE {BY_ROWS}", (json.dumps(numbers),), writes=True)
            if self._orphan is not None:
                self._orphan(numbers, sizes)

    def remember(self, changes: Changes, ids: list[bytes], *columns: list[int]) -> Plan[None]:
        """Note settled ids; columns birth, version, payload_sum, last_op."""
        count = len(ids)
        for values, parameters in batches(([changes.key] * count, ids, *columns, [changes.now_ms] * count)):
            text = (
                "INSERT OR REPLACE INTO remembered (topic, id, birth, version, payload_sum, last_op, settled_ms) "
                f"SELECT * FROM {values} WHERE column1 IS NOT NULL"
            )
            yield Statement(text, parameters, writes=True)

    def contents(self, numbers: Sequence[int], sizes: Sequence[int]) -> Plan[tuple[Ragged, Ragged, list[int]]]:
        parts: list[FoundColumns] = []
        gone: list[int] = []
        start = 0
        while start < len(numbers):
            stop, room = start + 1, MOST_BYTES - sizes[start]
            while stop < len(numbers) and sizes[stop] <= room:
                room -= sizes[stop]
                stop += 1
            found = yield _CONTENT.reading(_CONTENT_SOURCE, (json.dumps(numbers[start:stop]),))
            parts.append(found)
            gone += [start + at for at, there in enumerate(found.numbers["there"]) if not there]
            start = stop
        if not parts:
            return Ragged.of([]), Ragged.of([]), gone
        payloads, headers = (Ragged.concat([part.strings[name] for part in parts]) for name in ("payload", "headers"))
        return payloads, headers, gone

    def lease(
        self, changes: Changes, batch: MessageBatch, turns: UInt32, until_ms: Int64, grants: Sequence[Grant],
        also: Statement | None,
    ) -> Plan[tuple[LeasedContent, Any]]:  # fmt: skip
        numbers = batch.numbers
        if len(grants) > MANY_GRANTS:
            holders = [grants[turn].holder for turn in turns.tolist()]
            for values, parameters in batches((numbers, until_ms.tolist(), holders)):
                text = (
                    "UPDATE message SET due_ms = a.column2, holder = a.column3, version = version + 1, "
                    f"deliveries = deliveries + 1 FROM {values} AS a WHERE message.row = a.column1"
                )
                yield Statement(text, parameters, writes=True)
        else:
            whose = np.array(numbers, dtype=np.int64)
            for index, grant in enumerate(grants):
                mine = numbers if len(grants) == 1 else whose[turns == index].tolist()
                if mine:
                    leases = (changes.now_ms, grant.lease_ms, grant.holder, json.dumps(mine))
                    yield Statement(_LEASE, leases, writes=True)
        answered = None if also is None else (yield also)
        payloads, headers, gone = yield from self.contents(numbers, batch.sizes.tolist())
        return LeasedContent(payloads, headers, tuple(gone)), answered

    def delete_some(self, key: int, limit: int) -> Plan[int]:
        sized = "row, payload_bytes + headers_bytes AS size"
        source = f"(SELECT {sized} FROM message INDEXED BY message_id WHERE topic = ? LIMIT ?)"
        found = (yield _SIZED.reading(source, (key, limit))).numbers
        yield from self.delete(found["row"], found["size"])
        return len(found["row"])

    def forget(self, key: int, until_ms: int | None, limit: int) -> Plan[int]:
        chosen, asked = "SELECT id FROM remembered WHERE topic = ?", [key, key]
        if until_ms is not None:
            chosen = "SELECT id FROM remembered INDEXED BY remembered_settled WHERE topic = ? AND settled_ms <= ?"
            asked.append(until_ms)
        text = f"DELETE FROM remembered WHERE topic = ? AND id IN ({chosen} LIMIT ?)"
        removed: int = yield Statement(text, (*asked, limit), counts=True, writes=True)
        return removed


def _read_free(rows: Sequence[Any]) -> FoundColumns:
    return without_holder(_FREE_ROWS.read(rows))
