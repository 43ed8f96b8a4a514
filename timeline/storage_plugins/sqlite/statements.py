"""SQLite's statements: batches in, columns out, each in one step.

The interpreter's lock is handed over at every step of a statement, and taken back only when the event loop's thread
lets it go. Measured with a busy main thread: 1,000 messages by `executemany` and a row fetched each cycle at 200
messages/s, the same through the statements here at 4,400. So a batch goes in as one `VALUES` list and comes out as one
row, whose fields are whole columns: a JSON array of numbers, or all byte strings back to back with their lengths.

`VALUES` lists have 2^k rows, padded with NULL, so that few statements are prepared and kept.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from timeline.columns import Ragged
from timeline.storage_plugins.sql import FREE, HELD, NUMBERS, STRINGS
from timeline.storage_plugins.sql.rows import CHANGING, Columns

MOST_ROWS = 1024
"""Rows of one VALUES list: 15 columns each stay below SQLite's 32,766 variables."""


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


# ── writing ──

_PUT = (
    "row,topic,bucket,id,birth,due_ms,scheduled_ms,put_ms,asked_ms,expires_ms,payload_sum,payload_bytes,"
    "headers_bytes,grp,tag"
)
_PUT_FROM = "column1,?,column2,column3,column4,column5,column5,?,?,column6,column7,column8,column9,column10,column11"


def insert_messages(connection: sqlite3.Connection, key: int, now_ms: int, columns: Sequence[Sequence[Any]]) -> int:
    """Inserts new messages of topic `key`, put at `now_ms`: columns row, bucket, id, birth, due_ms, expires_ms,
    payload_sum, payload_bytes, headers_bytes, grp, tag. Those whose id is taken are left out. Returns how many were
    stored. What is the same for all is no column: each value of one costs 50 ns to bind."""
    stored = 0
    for values, parameters in batches(columns):
        stored += connection.execute(
            f"INSERT INTO message ({_PUT}) SELECT {_PUT_FROM} FROM {values} WHERE column1 IS NOT NULL "
            "ON CONFLICT (topic, bucket, id) DO NOTHING",
            [key, now_ms, now_ms, *parameters],
        ).rowcount
    return stored


def insert_payloads(connection: sqlite3.Connection, columns: Sequence[Sequence[Any]]) -> None:
    """Inserts contents: columns row, payload, headers."""
    for values, parameters in batches(columns):
        connection.execute(
            f"INSERT INTO payload (row, payload, headers) SELECT * FROM {values} WHERE column1 IS NOT NULL", parameters
        )


_SET = ", ".join(f"{name} = a.column{at}" for at, name in enumerate(CHANGING, start=2))


def update_messages(connection: sqlite3.Connection, columns: Sequence[Sequence[Any]]) -> None:
    """Sets the changing columns: columns row, then as in CHANGING."""
    for values, parameters in batches(columns):
        connection.execute(f"UPDATE message SET {_SET} FROM {values} AS a WHERE message.row = a.column1", parameters)


def delete_messages(connection: sqlite3.Connection, rows: Sequence[int]) -> None:
    """Removes messages by row; their payloads stay for the sweeping."""
    _by_rows(connection, "DELETE FROM message WHERE row IN (SELECT value FROM json_each(?))", rows)


def delete_payloads(connection: sqlite3.Connection, rows: Sequence[int]) -> None:
    """Removes contents by row."""
    _by_rows(connection, "DELETE FROM payload WHERE row IN (SELECT value FROM json_each(?))", rows)


def _by_rows(connection: sqlite3.Connection, statement: str, rows: Sequence[int]) -> None:
    if rows:
        connection.execute(statement, (json.dumps(rows),))


def remember(connection: sqlite3.Connection, columns: Sequence[Sequence[Any]]) -> None:
    """Notes settled ids: columns topic, id, birth, version, payload_sum, last_op, settled_ms."""
    for values, parameters in batches(columns):
        connection.execute(
            "INSERT OR REPLACE INTO remembered (topic, id, birth, version, payload_sum, last_op, settled_ms) "
            f"SELECT * FROM {values} WHERE column1 IS NOT NULL",
            parameters,
        )


LEASE = (
    "UPDATE message SET due_ms = max(?, due_ms) + ?, holder = ?, version = version + 1, deliveries = deliveries + 1 "
    "WHERE row IN (SELECT value FROM json_each(?))"
)


def lease_each(connection: sqlite3.Connection, columns: Sequence[Sequence[Any]]) -> None:
    """Writes leases: columns row, due_ms, holder."""
    for values, parameters in batches(columns):
        connection.execute(
            "UPDATE message SET due_ms = a.column2, holder = a.column3, version = version + 1, "
            f"deliveries = deliveries + 1 FROM {values} AS a WHERE message.row = a.column1",
            parameters,
        )


def extend(connection: sqlite3.Connection, columns: Sequence[Sequence[Any]]) -> None:
    """Sets dues: columns row, due_ms."""
    for values, parameters in batches(columns):
        connection.execute(
            f"UPDATE message SET due_ms = a.column2 FROM {values} AS a WHERE message.row = a.column1", parameters
        )


# ── reading ──


class Aggregate:
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

    def read(self, connection: sqlite3.Connection, statement: str, parameters: Sequence[Any]) -> Columns:
        """Runs a statement made by `over`."""
        row = connection.execute(statement, parameters).fetchone()
        listed = len(self._numbers) + len(self._strings)
        # One text for all: parsing each by itself costs more than its numbers where there are few.
        lists: list[list[int]] = json.loads(f"[{','.join(row[:listed])}]")
        numbers = dict(zip(self._numbers, lists, strict=False))
        strings: dict[str, Ragged] = {}
        for at, name in enumerate(self._strings, start=len(self._numbers)):
            sizes = np.array([size or 0 for size in lists[at]], dtype=np.int64)
            offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
            np.cumsum(sizes, out=offsets[1:])
            strings[name] = Ragged(row[at + len(self._strings)] or b"", offsets)
        count = len(next(iter(numbers.values())))
        return Columns(numbers, strings, count)


WHOLE = Aggregate(("row", "headers_bytes", *NUMBERS), tuple(STRINGS.values()))
"""Messages with every column but their content."""

_FREE_ROWS = Aggregate(("row", "headers_bytes", *(name for name in NUMBERS if name != "died_ms")), ("id", "grp", "tag"))

_BY_ID = (
    " AS a CROSS JOIN message AS m INDEXED BY message_id ON m.topic = ? AND m.bucket = a.column2 AND m.id = a.column3"
)
_FOUND = Aggregate(("n", "row", "headers_bytes", *NUMBERS), tuple(STRINGS.values()))
_FOUND_INNER = "a.column1 AS n, " + ", ".join(f"m.{name} AS {name}" for name in _FOUND.inner.split(", ")[1:])

_HOLDING = Aggregate(("n", "row", "size", "due_ms", "payload_sum", "expires_ms"))
_HOLDING_INNER = "a.column1 AS n, m.row AS row, m.payload_bytes + m.headers_bytes AS size, " + ", ".join(
    f"m.{name} AS {name}" for name in ("due_ms", "payload_sum", "expires_ms")
)
_ACKED = Aggregate(("n", "row", "size", "late"))
_ACKED_INNER = "a.column1 AS n, m.row AS row, m.payload_bytes + m.headers_bytes AS size, m.due_ms <= ? AS late"
_TOKEN = "m.birth = a.column4 AND m.version = a.column5 AND m.holder = a.column6 AND m.died_ms = 0 AND m.holder != x''"


def find(connection: sqlite3.Connection, key: int, buckets: Sequence[int], ids: Sequence[bytes]) -> Iterator[Columns]:
    """Messages by id; column `n` is the place in `ids`."""
    for values, parameters in batches((range(len(ids)), buckets, ids)):
        source = f"(SELECT {_FOUND_INNER} FROM {values}{_BY_ID})"
        yield _FOUND.read(connection, _FOUND.over(source), [*parameters, key])


def find_holding(connection: sqlite3.Connection, key: int, columns: Sequence[Sequence[Any]]) -> Iterator[Columns]:
    """Living messages whose token and holder match: columns n, bucket, id, birth, version, holder."""
    for values, parameters in batches(columns):
        source = f"(SELECT {_HOLDING_INNER} FROM {values}{_BY_ID} AND {_TOKEN})"
        yield _HOLDING.read(connection, _HOLDING.over(source), [*parameters, key])


def find_acked(
    connection: sqlite3.Connection, key: int, now_ms: int, columns: Sequence[Sequence[Any]]
) -> Iterator[Columns]:
    """The same, but only what an ack of a topic that does not remember needs to know."""
    for values, parameters in batches(columns):
        source = f"(SELECT {_ACKED_INNER} FROM {values}{_BY_ID} AND {_TOKEN})"
        yield _ACKED.read(connection, _ACKED.over(source), [now_ms, *parameters, key])


_REMEMBERED = Aggregate(("n", "birth", "version", "payload_sum", "last_op"))


def find_remembered(connection: sqlite3.Connection, key: int, ids: Sequence[bytes], after_ms: int) -> Iterator[Columns]:
    """Ids settled after `after_ms`; column `n` is the place in `ids`."""
    for values, parameters in batches((range(len(ids)), ids)):
        source = (
            "(SELECT a.column1 AS n, r.birth AS birth, r.version AS version, r.payload_sum AS payload_sum, "
            f"r.last_op AS last_op FROM {values} AS a CROSS JOIN remembered AS r "
            "ON r.topic = ? AND r.id = a.column2 AND r.settled_ms > ?)"
        )
        yield _REMEMBERED.read(connection, _REMEMBERED.over(source), [*parameters, key, after_ms])


def timeline_part(
    connection: sqlite3.Connection,
    key: int,
    held: bool,
    until_ms: int,
    after: tuple[int, bytes] | None,
    limit: int,
    buckets: Sequence[int] | None,
) -> Columns:
    """The first `limit` messages by (due, id), beyond `after`, up to due `until_ms`: those nobody holds, or those
    with a holder."""
    columns = WHOLE if held else _FREE_ROWS
    conditions = ["topic = ?", HELD if held else FREE, "due_ms <= ?"]
    parameters: list[Any] = [key, until_ms]
    if after is not None:
        conditions.append("(due_ms, id) > (?, ?)")
        parameters += after
    if buckets is not None:
        conditions.append("bucket IN (SELECT value FROM json_each(?))")
        parameters.append(json.dumps(list(buckets)))
    source = (
        f"(SELECT {columns.inner} FROM message INDEXED BY {'message_held' if held else 'message_free'} "
        f"WHERE {' AND '.join(conditions)} ORDER BY due_ms, id LIMIT ?)"
    )
    found = columns.read(connection, columns.over(source), [*parameters, limit])
    if not held:
        nothing = Ragged(b"", np.zeros(found.count + 1, dtype=np.int64))
        found.numbers["died_ms"] = [0] * found.count
        found.strings |= {"holder": nothing, "dead": nothing}
    return found


def first_due(
    connection: sqlite3.Connection, key: int, held: bool, after_ms: int, buckets: Sequence[int] | None
) -> int | None:
    """The earliest due > `after_ms` of messages nobody holds, or of those with a holder."""
    conditions = f"topic = ? AND {HELD if held else FREE} AND due_ms > ?"
    parameters: list[Any] = [key, after_ms]
    if buckets is not None:
        conditions += " AND bucket IN (SELECT value FROM json_each(?))"
        parameters.append(json.dumps(list(buckets)))
    row = connection.execute(
        f"SELECT due_ms FROM message INDEXED BY {'message_held' if held else 'message_free'} "
        f"WHERE {conditions} ORDER BY due_ms LIMIT 1",
        parameters,
    ).fetchone()
    return None if row is None else int(row[0])


_CONTENT = Aggregate(("there",), ("payload", "headers"))
_CONTENT_SQL = _CONTENT.over(
    "(SELECT p.row IS NOT NULL AS there, p.payload AS payload, p.headers AS headers "
    "FROM json_each(?) AS j LEFT JOIN payload AS p ON p.row = j.value ORDER BY j.key)"
)
MOST_BYTES = 64 * 1024 * 1024
"""Content read by one statement, but for a single larger one."""


def contents(
    connection: sqlite3.Connection, rows: Sequence[int], sizes: Sequence[int]
) -> tuple[Ragged, Ragged, list[int]]:
    """Payloads and headers of `rows`, of about `sizes` bytes each, in order, and the indexes of those that are gone."""
    parts: list[tuple[Ragged, Ragged]] = []
    gone: list[int] = []
    start = 0
    while start < len(rows):
        stop, room = start + 1, MOST_BYTES - sizes[start]
        while stop < len(rows) and sizes[stop] <= room:
            room -= sizes[stop]
            stop += 1
        found = _CONTENT.read(connection, _CONTENT_SQL, (json.dumps(rows[start:stop]),))
        parts.append((found.strings["payload"], found.strings["headers"]))
        gone += [start + at for at, there in enumerate(found.numbers["there"]) if not there]
        start = stop
    if not parts:
        return Ragged.of([]), Ragged.of([]), gone
    return Ragged.concat([part[0] for part in parts]), Ragged.concat([part[1] for part in parts]), gone


def rows_between(connection: sqlite3.Connection, first: int, beyond: int) -> list[int]:
    """Which rows of messages there are from `first` to before `beyond`."""
    found = connection.execute(
        "SELECT json_group_array(row) FROM message WHERE row >= ? AND row < ?", (first, beyond)
    ).fetchone()
    rows: list[int] = json.loads(found[0])
    return rows
