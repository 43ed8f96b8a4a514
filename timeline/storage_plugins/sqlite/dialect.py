"""SQLite's dialect: batches in, columns out, each in one step. And puts and settles in the plain case,
where a free id, or token and holder, decide.

The interpreter's lock is released at every step of a statement, and taken back only when the event loop's thread
releases it. Beside a busy main thread, `executemany` and a fetch of each row did 200 messages/s in batches of 1,000.
The statements here did 4,400. So a batch goes in as one `VALUES` list and comes out as one row, whose
fields are whole columns: a JSON array of numbers, or all byte strings back to back with their lengths.

`VALUES` lists have 2^k rows, padded with NULL, so that few statements are prepared and kept. Byte strings are bound as
`bytearray`: Python's module first looks for an adapter of each `bytes`, which takes 470 ns instead of 120 and a copy.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import msgspec
import numpy as np

from timeline.columns import Ragged
from timeline.model import Answers, Operation
from timeline.storage_plugins.contract import Grant, Puts, Settles
from timeline.storage_plugins.sql import NEW, NUMBERS, STRINGS, new_columns, signed
from timeline.storage_plugins.sql import changes as sql
from timeline.storage_plugins.sql.changes import settle_by_columns
from timeline.storage_plugins.sql.dialect import Changes, RowDialect
from timeline.storage_plugins.sql.rows import CHANGING, ColumnsQuery, FoundColumns, FoundMessage, pieces
from timeline.storage_plugins.sql.statements import Plan, Query, Result, Statement, drive

MOST_ROWS = 1024
"""Rows of one VALUES list. With up to 31 columns they stay below SQLite's 32,766 variables."""
WORTH_A_COPY = 8192
"""Longer byte strings are bound as they are: copying them would take longer than looking for an adapter."""
MOST_BYTES = 64 * 1024 * 1024
"""Content that one statement reads, unless a single one is larger."""


def json_text(numbers: Sequence[int]) -> str:
    """Return numbers as a JSON array."""
    return str(msgspec.json.encode(numbers), "ascii")


def _all_same(column: Sequence[Any]) -> bool:
    return column.count(column[0]) == len(column)


@lru_cache(maxsize=512)
def _values(width: int, rows: int) -> str:
    row = f"({','.join('?' * width)})"
    return f"(VALUES {','.join([row] * rows)})"


def batches(columns: Sequence[Sequence[Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Return equally long columns as VALUES lists with their parameters, MOST_ROWS at a time. In a row beyond the last,
    column1 is NULL."""
    width, count = len(columns), len(columns[0])
    for start in range(0, count, MOST_ROWS):
        size = min(count - start, MOST_ROWS)
        rows = 1 << (size - 1).bit_length()
        parameters: list[Any] = [0] * (rows * width)
        parameters[size * width :: width] = [None] * (rows - size)
        for at, column in enumerate(columns):
            part = column if size == count else column[start : start + size]
            short = isinstance(part[0], bytes) and len(part[0]) < WORTH_A_COPY
            parameters[at : size * width : width] = map(bytearray, part) if short else part
        yield _values(width, rows), parameters


class SqliteColumns(ColumnsQuery):
    """A SELECT whose result is one row of whole columns. NULL in a number column reads as None."""

    def __init__(self, numbers: Sequence[str], strings: Sequence[str] = ()) -> None:
        super().__init__(numbers, strings)
        self.inner = ", ".join((*numbers, *strings))
        self.outer = ", ".join(
            (
                *(f"json_group_array({name})" for name in numbers),
                *(f"json_group_array(length({name}))" for name in strings),
                # Bytes pass through group_concat as they are, NUL included: it only knows lengths.
                *(f"CAST(group_concat({name}, '') AS BLOB)" for name in strings),
            )
        )

    def over(self, source: str) -> str:
        """Return the statement for `source`: all that may follow FROM, which has the columns in the wanted order."""
        return f"SELECT {self.outer} FROM {source}"

    def reading(self, source: str, values: Sequence[Any]) -> Statement:
        """Return the statement that reads these columns of `source`, all that may follow FROM."""
        return Statement(self.over(source), values, self.read)


WHOLE = SqliteColumns(("row", "headers_bytes", *NUMBERS), tuple(STRINGS.values()))
"""Messages with every column but their content."""

_FREE_ROWS = SqliteColumns(
    ("row", "headers_bytes", *(name for name in NUMBERS if name != "died_ms")), ("id", "grp", "tag")
)

BY_ID = (
    " AS a CROSS JOIN message AS m INDEXED BY message_id ON m.topic = ? AND m.bucket = a.column{} AND m.id = a.column{}"
)
"""Messages by id. In the braces: the columns of a VALUES list that have bucket and id."""
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
    """Return what statements answer."""
    return [_answer(connection, statement) for statement in asked]


def _answer(connection: sqlite3.Connection, asked: Statement) -> Any:
    cursor = connection.execute(asked.text, asked.values)
    if asked.read is not None:
        return asked.read(cursor.fetchall())
    return cursor.rowcount if asked.counts else None


def read(connection: sqlite3.Connection, plan: Plan[Result]) -> Result:
    """Run a plan that only reads."""
    return drive(plan, partial(answers, connection))


class SqliteDialect(RowDialect):
    """The dialect. `orphan` takes the rows and sizes of payloads whose messages are gone."""

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
        return f" AND m.bucket IN (SELECT value FROM json_each({query(json_text(list(buckets)))}))"

    def messages(self, query: Query, source: str, free: bool = False, lock: str = "") -> Statement:
        columns = _FREE_ROWS if free else WHOLE
        text = columns.over(f"(SELECT {columns.inner} FROM {source})")
        return query.reading(text, columns.read_free if free else columns.read)

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

    def update(self, columns: Sequence[Sequence[Any]]) -> Plan[None]:
        for listed, parameters in batches(columns):
            text = f"UPDATE message SET {_SET} FROM {listed} AS a WHERE message.row = a.column1"
            yield Statement(text, parameters, writes=True)

    def remove(self, removed: Sequence[FoundMessage]) -> Plan[None]:
        return self.delete([stored.row for stored in removed], [stored.size_bytes for stored in removed])

    def delete(self, numbers: list[int], sizes: list[int]) -> Plan[None]:
        """Remove messages by row. Their payloads, of `sizes` bytes, are removed in an idle moment."""
        if numbers:
            yield Statement(f"DELETE FROM message WHERE {BY_ROWS}", (json_text(numbers),), writes=True)
            if self._orphan is not None:
                self._orphan(numbers, sizes)

    def remember(self, changes: Changes, ids: Sequence[bytes], *columns: Sequence[int]) -> Plan[None]:
        count = len(ids)
        for values, parameters in batches(([changes.key] * count, ids, *columns, [changes.now_ms] * count)):
            text = (
                "INSERT OR REPLACE INTO remembered (topic, id, birth, version, payload_sum, last_op, settled_ms) "
                f"SELECT * FROM {values} WHERE column1 IS NOT NULL"
            )
            yield Statement(text, parameters, writes=True)

    def reading_contents(self, numbers: Sequence[int], sizes: Sequence[int]) -> Iterator[Statement]:
        for piece in pieces(sizes, MOST_BYTES):
            yield _CONTENT.reading(_CONTENT_SOURCE, (json_text(numbers[piece]),))

    def contents_of(self, numbers: Sequence[int], found: Sequence[FoundColumns]) -> tuple[Ragged, Ragged, list[int]]:
        if not found:
            return Ragged.of([]), Ragged.of([]), []
        payloads, headers = (Ragged.concat([part.strings[name] for part in found]) for name in ("payload", "headers"))
        there = (there for part in found for there in part.numbers["there"])
        return payloads, headers, [at for at, one in enumerate(there) if not one]

    def lease_for(self, grant: Grant, now_ms: int, numbers: Sequence[int]) -> Plan[None]:
        yield Statement(_LEASE, (now_ms, grant.lease_ms, grant.holder, json_text(numbers)), writes=True)

    def lease_each(self, columns: tuple[Sequence[int], Sequence[int], Sequence[bytes]]) -> Plan[None]:
        for values, parameters in batches(columns):
            text = (
                "UPDATE message SET due_ms = a.column2, holder = a.column3, version = version + 1, "
                f"deliveries = deliveries + 1 FROM {values} AS a WHERE message.row = a.column1"
            )
            yield Statement(text, parameters, writes=True)

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


# ── put ──

_ROWS = SqliteColumns(("row",))
_CONSTANT = ("expires_ms", "headers_bytes", "grp", "tag")
"""Columns of NEW that are mostly the same for all of a batch. Then they are bound once: a byte string in each row costs
0.3 µs."""


@lru_cache(maxsize=1 << len(_CONSTANT))
def _inserting(constants: tuple[str, ...]) -> str:
    """Return the statement that inserts messages from a VALUES list without the columns `constants`."""
    listed = [name for name in NEW if name not in constants]
    source = {name: f"column{at}" for at, name in enumerate(listed, 1)}
    source["scheduled_ms"] = source["due_ms"]
    source |= dict.fromkeys(("topic", "put_ms", "asked_ms", *constants), "?")
    return (
        f"INSERT INTO message ({','.join(source)}) SELECT {','.join(source.values())} FROM {{}} "
        "WHERE column1 IS NOT NULL ON CONFLICT (topic, bucket, id) DO NOTHING"
    )


def put(reserve: Callable[[int], int], changes: Changes, puts: Puts) -> Plan[Answers]:
    """Do `Store.put`: new messages are inserted at once. `reserve`: returns the first of so many new row numbers."""
    remember_ms = changes.topic.settings.remember_ms
    known: list[int] = []
    if remember_ms:
        ids = puts.ids.tolist()
        left = yield from changes.sql.find_remembered(changes.key, ids, changes.now_ms - remember_ms)
        remembered = {id for id, *_ in left}
        known = [at for at, id in enumerate(ids) if id in remembered]
    return (yield from sql.put(changes, puts, partial(_insert, reserve, changes), known))


def _insert(
    reserve: Callable[[int], int], changes: Changes, puts: Puts, buckets: list[int], in_place: bool
) -> Plan[Collection[int]]:
    """Insert puts with their contents; return those whose id was not taken."""
    if not len(puts):
        return ()
    first = reserve(len(puts))
    rows = range(first, first + len(puts))
    stored = 0
    columns = dict(zip(NEW, new_columns(puts, rows, buckets), strict=True))
    constants = tuple(name for name in _CONSTANT if _all_same(columns[name]))
    same = [changes.key, changes.now_ms, changes.now_ms, *(columns.pop(name)[0] for name in constants)]
    for values, parameters in batches(tuple(columns.values())):
        text = _inserting(constants).format(values)
        stored += yield Statement(text, [*same, *parameters], counts=True, writes=True)
    kept: Sequence[int] = range(len(puts))
    contents: list[Sequence[Any]] = [rows, puts.payloads.tolist()]
    if puts.headers.nbytes:
        contents.append(puts.headers.tolist())
    if stored < len(puts):
        found = yield _ROWS.reading("message WHERE row >= ? AND row < ?", (first, rows.stop))
        kept = [row - first for row in sorted(found.numbers["row"])]
        contents = [[column[at] for at in kept] for column in contents]
    for values, parameters in batches(contents):
        headers = "column3" if puts.headers.nbytes else "x''"
        text = (
            f"INSERT INTO payload (row, payload, headers) SELECT column1, column2, {headers} FROM {values} "
            "WHERE column1 IS NOT NULL"
        )
        yield Statement(text, parameters, writes=True)
    return kept


# ── settle ──

_BY_TOKEN = (
    f"{BY_ID.format(2, 3)} AND m.birth = a.column4 AND m.version = a.column5 AND m.died_ms = 0 AND m.holder != x'' "
    "AND m.holder = "
)
_MATCHED = "a.column1 AS n, m.row AS row, m.payload_bytes + m.headers_bytes AS size"
_HOLDING = SqliteColumns(("n", "row", "size", "due_ms", "payload_sum", "expires_ms"))
_HOLDING_INNER = f"{_MATCHED}, m.due_ms AS due_ms, m.payload_sum AS payload_sum, m.expires_ms AS expires_ms"
_ACKED = SqliteColumns(("n", "row", "size", "late"))
_ACKED_INNER = f"{_MATCHED}, m.due_ms <= ? AS late"


def settle_plain(
    changes: Changes, settles: Settles, ids: list[bytes], buckets: list[int], answers: Answers
) -> Plan[Collection[int]]:
    """Do acks and extends of living messages whose token and holder match; return which were done."""
    chosen = np.flatnonzero((settles.operation == Operation.ACK) | (settles.operation == Operation.EXTEND))
    if not len(chosen):
        return ()
    whole = len(chosen) == len(ids)
    at = chosen.tolist()
    columns: list[Sequence[Any]] = [
        at,
        buckets if whole else [buckets[index] for index in at],
        ids if whole else [ids[index] for index in at],
        signed(settles.birth[chosen]),
        settles.version[chosen].tolist(),
    ]
    holders = (settles.holders if whole else settles.holders.take(chosen)).tolist()
    same: list[Any] = [changes.key]
    if _all_same(holders):
        by_token = f"{_BY_TOKEN}?"
        same.append(holders[0])
    else:
        by_token = f"{_BY_TOKEN}a.column6"
        columns.append(holders)
    dialect = changes.sql
    assert isinstance(dialect, SqliteDialect)
    done: list[int] = []
    if bool((settles.operation[chosen] == Operation.ACK).all()) and not changes.topic.settings.remember_ms:
        # Acks alone, on a topic that remembers nothing, need the fewest columns.
        for values, parameters in batches(columns):
            source = f"(SELECT {_ACKED_INNER} FROM {values}{by_token})"
            numbers = (yield _ACKED.reading(source, [changes.now_ms, *parameters, *same])).numbers
            answers.late[numbers["n"]] = numbers["late"]
            yield from dialect.delete(numbers["row"], numbers["size"])
            done += numbers["n"]
        return done
    for values, parameters in batches(columns):
        source = f"(SELECT {_HOLDING_INNER} FROM {values}{by_token})"
        found = yield _HOLDING.reading(source, [*parameters, *same])
        done += yield from _settle_holding(changes, dialect, settles, ids, found, answers)
    return done


def _settle_holding(
    changes: Changes, dialect: SqliteDialect, settles: Settles, ids: list[bytes], found: FoundColumns, answers: Answers
) -> Plan[list[int]]:
    """Settle messages whose token and holder match; return which settles were done."""
    columns = {name: np.array(values, dtype=np.int64) for name, values in found.numbers.items()}
    place, ours = columns["n"].astype(np.intp), np.ones(found.count, dtype=np.bool_)
    acks, extends, until_ms = settle_by_columns(
        settles, place, ours, columns["due_ms"], columns["expires_ms"], changes.now_ms, answers
    )
    if acks.any():
        yield from dialect.delete(columns["row"][acks].tolist(), columns["size"][acks].tolist())
        if changes.topic.settings.remember_ms:
            at = place[acks]
            tokens = signed(settles.birth[at]), signed(settles.version[at])
            acked, sums = [ids[index] for index in at.tolist()], signed(columns["payload_sum"][acks])
            yield from dialect.remember(changes, acked, *tokens, sums, [0] * len(acked))
    for values, parameters in batches((columns["row"][extends].tolist(), until_ms.tolist())):
        text = f"UPDATE message SET due_ms = a.column2 FROM {values} AS a WHERE message.row = a.column1"
        yield Statement(text, parameters, writes=True)
    done: list[int] = place[acks | extends].tolist()
    return done
