"""Reads that may be long: scans, what a holder has, counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sqlalchemy import and_, literal_column, select
from sqlalchemy.dialects import postgresql as dialect

from timeline.columns import Int64, Ragged
from timeline.model import Rows, State, Topic, buckets_of
from timeline.storage_plugins.contract import Page, ScanFilter
from timeline.storage_plugins.postgresql.connections import Connection
from timeline.storage_plugins.postgresql.leasing import first_due
from timeline.storage_plugins.postgresql.rows import Part, whole
from timeline.storage_plugins.postgresql.schema import NOTHING
from timeline.storage_plugins.postgresql.statements import CONTENTS, FREE, HELD
from timeline.storage_plugins.sql import DEAD, TAGGED, filter_of, message
from timeline.storage_plugins.sql.rows import cursor_at, place_after

LOOKED_AT = 20_000
"""Rows that one page of a filtered scan looks at, at most: it may be empty and not the last."""
PAGE_BYTES = 1024 * 1024
LARGEST_ID = b"\xff" * 256


def filtered(where: ScanFilter, now_ms: int, first: int) -> tuple[str, list[Any]]:
    """The filter's conditions on `m` as text whose parameters count from `$first`, and those."""
    conditions = and_(*filter_of(where, now_ms))
    named = dialect.dialect(paramstyle="named")  # type: ignore[no-untyped-call]
    statement = select(literal_column("1")).where(conditions).compile(dialect=named)
    text = str(statement).split("WHERE", 1)[1].replace(f"{message.name}.", "m.")
    values: list[Any] = []
    for name in sorted(statement.params, key=len, reverse=True):
        text = text.replace(f":{name}", f"${first + len(values)}")
        values.append(statement.params[name])
    return f"({text})", values


async def _page(connection: Connection, part: Part, payload: bool) -> Rows:
    """The rows of a page, with their content when asked for."""
    rows = part.rows
    if payload:
        contents = await connection.fetch(CONTENTS, part.numbers) if part.numbers else []
        rows.payloads = Ragged.of([payload or b"" for payload, _ in contents])
        rows.headers = Ragged.of([headers or b"" for _, headers in contents])
    return rows


def _fitting(part: Part) -> Part:
    """The first messages of `part` whose content stays near PAGE_BYTES, at least one."""
    count = int(np.searchsorted(np.cumsum(part.sizes), PAGE_BYTES, "right"))
    return part if count >= len(part) else part.take(np.arange(max(1, count)))


async def scan(
    connection: Connection, topic: Topic, key: int, now_ms: int, where: ScanFilter, cursor: bytes, limit: int,
    payload: bool,
) -> Page:  # fmt: skip
    """`Store.scan`: a page of the walk over (bucket, id), along the tag's or the dead letters' index where that
    serves."""
    limit = max(1, limit)
    if where.ids is not None:
        return await _scan_ids(connection, topic, key, now_ms, where, cursor, limit, payload)
    walked = "m.topic = $1 AND (m.bucket, m.id) > ($2, $3)"
    asked: list[Any] = [key, *place_after(cursor)]
    if where.tag:
        walked += f" AND {TAGGED.replace(chr(120) + chr(39) * 2, NOTHING)} AND m.tag = $4"
        asked.append(where.tag)
    elif where.states == {State.DEAD}:
        walked += f" AND {DEAD}"
    order = "ORDER BY m.bucket, m.id"
    edge_sql = f"SELECT m.bucket, m.id FROM timeline.message AS m WHERE {walked} {order} LIMIT 1 OFFSET {LOOKED_AT - 1}"
    edge = await connection.fetchrow(edge_sql, *asked)
    if edge is not None:
        walked += f" AND (m.bucket, m.id) <= (${len(asked) + 1}, ${len(asked) + 2})"
        asked += edge
    conditions, values = filtered(where, now_ms, len(asked) + 1)
    last = f"LIMIT ${len(asked) + len(values) + 1}"
    sql = f"SELECT {whole()} FROM timeline.message AS m WHERE {walked} AND {conditions} {order} {last}"
    found = Part.of(await connection.fetch(sql, *asked, *values, limit))
    part = _fitting(found) if payload else found
    if len(part) < len(found) or len(found) == limit:
        onward: bytes | None = cursor_at(part.buckets[-1], part.rows.ids[-1])
    else:
        onward = cursor_at(*edge) if edge is not None else None
    return Page(await _page(connection, part, payload), onward)


async def _scan_ids(
    connection: Connection, topic: Topic, key: int, now_ms: int, where: ScanFilter, cursor: bytes, limit: int,
    payload: bool,
) -> Page:  # fmt: skip
    """The same along the ids asked for: a page looks at `limit` of them."""
    assert where.ids is not None
    distinct = Ragged.of(list(dict.fromkeys(where.ids.tolist())))
    places = sorted(zip(buckets_of(distinct, topic.settings.buckets).tolist(), distinct, strict=True))
    places = [place for place in places if place > place_after(cursor)]
    looked = places[:limit]
    conditions, values = filtered(where, now_ms, 4)
    sql = (
        "SELECT f.* FROM unnest($2::int8[], $3::bytea[]) AS a(bucket, id), "
        f"LATERAL (SELECT {whole()} FROM timeline.message AS m "
        f"WHERE m.topic = $1 AND m.bucket = a.bucket AND m.id = a.id AND {conditions} OFFSET 0) AS f "
        "ORDER BY f.bucket, f.id"
    )
    asked = ([bucket for bucket, _ in looked], [id for _, id in looked])
    found = Part.of(await connection.fetch(sql, key, *asked, *values))
    part = _fitting(found) if payload else found
    onward = None
    if len(part) < len(found):
        onward = cursor_at(part.buckets[-1], part.rows.ids[-1])
    elif len(places) > limit:
        onward = cursor_at(*looked[-1])
    return Page(await _page(connection, part, payload), onward)


_HELD_ROWS = (
    f"SELECT {whole()} FROM timeline.message AS m WHERE m.topic = $1 AND {HELD} AND (m.due_ms, m.id) > ($2, $3) "
    "AND m.holder = $4 ORDER BY m.due_ms, m.id LIMIT $5"
)


async def held_by(connection: Connection, key: int, now_ms: int, holder: bytes, cursor: bytes, limit: int) -> Page:
    """`Store.held_by`: along the leases by their end. An extend only moves a lease on in this order, so that none is
    passed over."""
    if not holder:
        return Page(Rows.empty(payload=True), None)
    after = (now_ms, LARGEST_ID)
    if cursor:
        after = max(after, (int.from_bytes(cursor[:8], "big"), cursor[8:]))
    limit = max(1, limit)
    found = Part.of(await connection.fetch(_HELD_ROWS, key, *after, holder, limit))
    part = _fitting(found)
    onward = None
    if len(part) < len(found) or len(found) == limit:
        onward = int(part.rows.due_ms[-1]).to_bytes(8, "big") + part.rows.ids[-1]
    return Page(await _page(connection, part, True), onward)


_COUNTS = f"""
SELECT (SELECT count(*) FROM timeline.message AS m
  WHERE m.topic = $1 AND {FREE} AND m.due_ms >= a.low AND m.due_ms < a.high)
FROM unnest($2::int8[], $3::int8[]) WITH ORDINALITY AS a(low, high, n) ORDER BY a.n
"""


async def count_due(connection: Connection, key: int, edges_ms: Int64) -> Int64:
    """`Store.count_due`: a range of the index for each step."""
    if len(edges_ms) < 2:
        return np.zeros(0, dtype=np.int64)
    found = await connection.fetch(_COUNTS, key, edges_ms[:-1].tolist(), edges_ms[1:].tolist())
    return np.array([count for (count,) in found], dtype=np.int64)


async def next_due(connection: Connection, topic: Topic, buckets: Sequence[int] | None, after_ms: int) -> int | None:
    """`Store.next_due`."""
    times = await first_due(connection, topic, after_ms, None if buckets is None else list(buckets))
    return min((time for time in times if time is not None), default=None)
