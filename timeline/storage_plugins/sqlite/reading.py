"""Reads that may be long, on connections of their own: they never hold up a lease, each sees the last commit."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

import numpy as np
from sqlalchemy import and_, literal_column, select
from sqlalchemy.dialects import sqlite as sqlite_dialect

from timeline.columns import Int64, Ragged
from timeline.model import Rows, State, Topic, buckets_of
from timeline.storage_plugins.contract import Page, ScanFilter
from timeline.storage_plugins.sql import DEAD, FREE, HELD, TAGGED, compiled, filter_of, message
from timeline.storage_plugins.sql.rows import Columns, Part, cursor_at, place_after
from timeline.storage_plugins.sqlite import statements

DIALECT = sqlite_dialect.dialect()
LOOKED_AT = 20_000
"""Rows that one page of a filtered scan looks at, at most: it may be empty and not the last."""
PAGE_BYTES = 1024 * 1024


def _page(connection: sqlite3.Connection, part: Part, payload: bool) -> Rows:
    """The rows of a page, with their content when asked for."""
    if not payload:
        return part.rows
    rows = part.rows
    rows.payloads, rows.headers, _ = statements.contents(connection, part.numbers, part.sizes.tolist())
    return rows


def scan(
    connection: sqlite3.Connection,
    topic: Topic,
    key: int,
    now_ms: int,
    where: ScanFilter,
    cursor: bytes,
    limit: int,
    payload: bool,
) -> Page:
    """`Store.scan`: a page of the walk over (bucket, id), along the tag's or the dead letters' index where that
    serves."""
    conditions = filter_of(where, now_ms)
    limit = max(1, limit)
    if where.ids is not None:
        return _scan_ids(connection, topic, key, conditions, where.ids, cursor, limit, payload)
    index, walked = "message_id", ["topic = ?"]
    parameters: list[Any] = [key]
    if where.tag:
        index, walked = "message_tag", ["topic = ?", TAGGED, "tag = ?"]
        parameters.append(where.tag)
    elif where.states == {State.DEAD}:
        index, walked = "message_dead", ["topic = ?", DEAD]
    after = place_after(cursor)
    source = f"message INDEXED BY {index} WHERE {' AND '.join(walked)} AND (bucket, id) > (?, ?)"
    edge = connection.execute(
        f"SELECT bucket, id FROM {source} ORDER BY bucket, id LIMIT 1 OFFSET ?", (*parameters, *after, LOOKED_AT - 1)
    ).fetchone()
    if edge is not None:
        source += " AND (bucket, id) <= (?, ?)"
    filtered, values = _text(conditions)
    found = statements.WHOLE.read(
        connection,
        statements.WHOLE.over(
            f"(SELECT {statements.WHOLE.inner} FROM {source} AND {filtered} ORDER BY bucket, id LIMIT ?)"
        ),
        [*parameters, *after, *(edge or ()), *values, limit],
    )
    part = Part.of(found)
    whole = part
    if payload:
        part = whole.fitting(PAGE_BYTES)
    if len(part) < len(whole) or found.count == limit:
        after_id = part.rows.ids[-1]
        onward: bytes | None = cursor_at(int(buckets_of(Ragged.of([after_id]), topic.settings.buckets)[0]), after_id)
    else:
        onward = cursor_at(*edge) if edge is not None else None
    return Page(_page(connection, part, payload), onward)


def _text(conditions: Sequence[Any]) -> tuple[str, list[Any]]:
    """Core conditions on `message` as text for SQLite, and their parameters."""
    statement, values = compiled(select(literal_column("1")).where(and_(*conditions)), DIALECT)
    return f"({statement.split('WHERE', 1)[1].replace(f'{message.name}.', '')})", values


def _scan_ids(
    connection: sqlite3.Connection,
    topic: Topic,
    key: int,
    conditions: Sequence[Any],
    ids: Ragged,
    cursor: bytes,
    limit: int,
    payload: bool,
) -> Page:
    """The same along the ids asked for: a page looks at `limit` of them."""
    distinct = Ragged.of(list(dict.fromkeys(ids.tolist())))
    places = sorted(zip(buckets_of(distinct, topic.settings.buckets).tolist(), distinct, strict=True))
    places = [place for place in places if place > place_after(cursor)]
    whole = _of_places(connection, key, conditions, places[:limit])
    part = whole.fitting(PAGE_BYTES) if payload else whole
    onward: bytes | None = None
    if len(part) < len(whole):
        last = part.rows.ids[-1]
        onward = next(cursor_at(bucket, id) for bucket, id in places if id == last)
    elif len(places) > limit:
        onward = cursor_at(*places[limit - 1])
    return Page(_page(connection, part, payload), onward)


def _of_places(
    connection: sqlite3.Connection, key: int, conditions: Sequence[Any], places: Sequence[tuple[int, bytes]]
) -> Part:
    """Messages by (bucket, id), in that order, as far as they match."""
    filtered, values = _text(conditions)
    parts: list[Part] = []
    for found in statements.find(connection, key, [bucket for bucket, _ in places], [id for _, id in places]):
        source = f"message WHERE row IN (SELECT value FROM json_each(?)) AND {filtered} ORDER BY bucket, id"
        chosen = statements.WHOLE.over(f"(SELECT {statements.WHOLE.inner} FROM {source})")
        parts.append(Part.of(statements.WHOLE.read(connection, chosen, [json.dumps(found.numbers["row"]), *values])))
    return Part.concat(parts)


_HELD_ROWS = statements.WHOLE.over(
    f"(SELECT {statements.WHOLE.inner} FROM message INDEXED BY message_held "
    f"WHERE topic = ? AND {HELD} AND (due_ms, id) > (?, ?) AND holder = ? ORDER BY due_ms, id LIMIT ?)"
)


def held_by(connection: sqlite3.Connection, key: int, now_ms: int, holder: bytes, cursor: bytes, limit: int) -> Page:
    """`Store.held_by`: along the leases by their end. An extend only moves a lease on in this order, so that none is
    passed over."""
    if not holder:
        return Page(Rows.empty(payload=True), None)
    after = (now_ms, b"\xff" * 256)
    if cursor:
        after = max(after, (int.from_bytes(cursor[:8], "big"), cursor[8:]))
    limit = max(1, limit)
    found: Columns = statements.WHOLE.read(connection, _HELD_ROWS, (key, *after, holder, limit))
    whole = Part.of(found)
    part = whole.fitting(PAGE_BYTES)
    onward = None
    if len(part) < len(whole) or found.count == limit:
        onward = int(part.rows.due_ms[-1]).to_bytes(8, "big") + part.rows.ids[-1]
    return Page(_page(connection, part, True), onward)


def count_due(connection: sqlite3.Connection, key: int, edges_ms: Int64) -> Int64:
    """`Store.count_due`: a range of the index for each step."""
    counts: list[int] = []
    if len(edges_ms) > 1:
        for values, parameters in statements.batches((edges_ms[:-1].tolist(), edges_ms[1:].tolist())):
            row = connection.execute(
                "SELECT json_group_array((SELECT count(*) FROM message INDEXED BY message_free WHERE topic = ? "
                f"AND {FREE} AND due_ms >= a.column1 AND due_ms < a.column2)) FROM {values} AS a "
                "WHERE a.column1 IS NOT NULL",
                [key, *parameters],
            ).fetchone()
            counts += json.loads(row[0])
    return np.array(counts, dtype=np.int64)


def next_due(connection: sqlite3.Connection, key: int, buckets: Sequence[int] | None, after_ms: int) -> int | None:
    """`Store.next_due`."""
    times = (statements.first_due(connection, key, held, after_ms, buckets) for held in (False, True))
    return min((time for time in times if time is not None), default=None)
