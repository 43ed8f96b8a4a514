"""Reads that lock nothing: scans, what a holder has, counts, the next due time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from timeline.columns import Int64, Ragged
from timeline.model import Rows, State, Topic, buckets_of
from timeline.storage_plugins.asks import LIVING, cursor_at, matches, place_of
from timeline.storage_plugins.contract import Page, ScanFilter
from timeline.storage_plugins.sql.dialect import SqlDialect
from timeline.storage_plugins.sql.leasing import earliest
from timeline.storage_plugins.sql.rows import LARGEST_ID, MessageBatch, cursor_after, stored_of
from timeline.storage_plugins.sql.statements import Plan, Query

LOOKED_AT = 20_000
"""The most rows that one page of a filtered scan looks at. The page may be empty and not the last."""
PAGE_BYTES = 1024 * 1024
COUNTS_AT_ONCE = 100


def _conditions(query: Query, where: ScanFilter, now_ms: int) -> str:
    """Return a scan's filter on message m, without its ids. It compares with values only: a text that equals an index's
    predicate would let the planner prefer that index to the one of the walk."""

    def meaning(state: State) -> str:
        if state is State.DEAD:
            return f"m.died_ms != {query(0)}"
        alive = f"m.died_ms = {query(0)}"
        if state is State.AVAILABLE:
            return f"({alive} AND m.due_ms <= {query(now_ms)})"
        held = f"m.holder {'!=' if state is State.LEASED else '='} {query(b'')}"
        return f"({alive} AND {held} AND m.due_ms > {query(now_ms)})"

    if where.states:
        known = {*LIVING, State.DEAD} & where.states
        text = " OR ".join(meaning(state) for state in sorted(known)) or "1 = 0"
    else:
        text = f"m.died_ms = {query(0)}"
    text = f"({text})"
    if where.tag:
        text += f" AND m.tag = {query(where.tag)}"
    if where.due_from_ms:
        text += f" AND m.due_ms >= {query(where.due_from_ms)}"
    if where.due_to_ms:
        text += f" AND m.due_ms < {query(where.due_to_ms)}"
    return text


def _matches_all(sql: SqlDialect, where: ScanFilter) -> bool:
    """Return whether every row of the walk matches, so that the page's limit bounds it by itself."""
    dead = sql.walks_dead and where.states == {State.DEAD} and not where.tag
    return (dead or where.states >= {*LIVING, State.DEAD}) and not (where.due_from_ms or where.due_to_ms)


def _page(sql: SqlDialect, batch: MessageBatch, payload: bool) -> Plan[Rows]:
    """Return the rows of a page, with their content if asked for."""
    if payload:
        contents = yield from sql.contents(batch.numbers, batch.sizes.tolist())
        batch.rows.payloads, batch.rows.headers, _ = contents
    return batch.rows


def scan(
    sql: SqlDialect, topic: Topic, key: int, now_ms: int, where: ScanFilter, cursor: bytes, limit: int, payload: bool
) -> Plan[Page]:
    """Return a page of `Store.scan`, a walk over (bucket, id), along the index of the tag or of dead letters if that
    serves."""
    limit = min(max(1, limit), sql.most_rows)
    if where.ids is not None:
        return (yield from _scan_ids(sql, topic, key, now_ms, where, where.ids, cursor, limit, payload))
    query = sql.query(key)
    source, walked = sql.walk(query, where.tag, where.states == {State.DEAD}, place_of(cursor))
    place = (f"{walked}.bucket", f"{walked}.id")
    order = f"ORDER BY {', '.join(place)}"
    edge = None
    if not _matches_all(sql, where):
        edges = yield query.rows(f"SELECT {', '.join(place)} FROM {source} {order} LIMIT 1 OFFSET {LOOKED_AT - 1}")
        if edges:
            edge = tuple(edges[0])
            source += f" AND {sql.up_to(query, place, edge)}"
    source += f" AND {_conditions(query, where, now_ms)} {order} LIMIT {query(limit)}"
    whole = MessageBatch.of((yield sql.messages(query, source)))
    batch = whole.fitting(PAGE_BYTES) if payload else whole
    onward = cursor_at(*edge) if edge is not None else None
    if len(batch) < len(whole) or len(whole) == limit:
        onward = cursor_after(topic, batch.rows.ids[-1])
    return Page((yield from _page(sql, batch, payload)), onward)


def _scan_ids(
    sql: SqlDialect, topic: Topic, key: int, now_ms: int, where: ScanFilter, ids: Ragged, cursor: bytes, limit: int,
    payload: bool,
) -> Plan[Page]:  # fmt: skip
    """Scan the ids asked for: a page looks at `limit` of them."""
    distinct = Ragged.of(list(dict.fromkeys(ids.tolist())))
    places = sorted(zip(buckets_of(distinct, topic.settings.buckets).tolist(), distinct, strict=True))
    places = [place for place in places if place > place_of(cursor)]
    looked = places[:limit]
    parts: list[MessageBatch] = []
    for found in (yield from sql.find(key, looked, False)):
        tags = found.strings["tag"].tolist()
        matching = [at for at, one in enumerate(stored_of(found)) if matches(where, one.message, tags[at], now_ms)]
        parts.append(MessageBatch.of(found).take(np.array(matching, dtype=np.intp)))
    whole = MessageBatch.concat([part for part in parts if len(part)])
    at = {id: place for place, (_, id) in enumerate(looked)}
    found_ids = whole.rows.ids.tolist()
    whole = whole.take(np.array(sorted(range(len(whole)), key=lambda row: at[found_ids[row]]), dtype=np.intp))
    batch = whole.fitting(PAGE_BYTES) if payload else whole
    onward: bytes | None = None
    if len(batch) < len(whole):
        onward = cursor_after(topic, batch.rows.ids[-1])
    elif len(places) > limit:
        onward = cursor_at(*looked[-1])
    return Page((yield from _page(sql, batch, payload)), onward)


def held_by(sql: SqlDialect, key: int, now_ms: int, holder: bytes, cursor: bytes, limit: int) -> Plan[Page]:
    """Return a page of `Store.held_by`, along the leases by their end. An extend moves a lease forward in this order,
    so that the walk misses none."""
    if not holder:
        return Page(Rows.empty(payload=True), None)
    after = (now_ms, LARGEST_ID)
    if cursor:
        after = max(after, (int.from_bytes(cursor[:8], "big"), cursor[8:]))
    limit = min(max(1, limit), sql.most_rows)
    query = sql.query(key)
    source = (
        f"{sql.along('message_held')} WHERE m.topic {query.topic} AND {sql.held} "
        f"AND {sql.beyond(query, (f'm.{sql.due}', 'm.id'), after)} AND m.holder = {query(holder)} "
        f"ORDER BY m.{sql.due}, m.id LIMIT {query(limit)}"
    )
    whole = MessageBatch.of((yield sql.messages(query, source)))
    batch = whole.fitting(PAGE_BYTES)
    onward = None
    if len(batch) < len(whole) or len(whole) == limit:
        onward = int(batch.rows.due_ms[-1]).to_bytes(8, "big") + batch.rows.ids[-1]
    return Page((yield from _page(sql, batch, True)), onward)


def count_due(sql: SqlDialect, key: int, edges_ms: Int64, held: bool) -> Plan[Int64]:
    """Return `Store.count_due`: a range of the index for each step.

    A statement counts COUNTS_AT_ONCE steps. More steps take several statements, each of which sees the store as it is
    by then. A message that is moved meanwhile may count twice, or not at all."""
    steps = list(itertools.pairwise(edges_ms.tolist()))
    index, predicate = ("message_held", sql.held) if held else ("message_free", sql.free)
    counts: list[int] = []
    for start in range(0, len(steps), COUNTS_AT_ONCE):
        query = sql.query(key)
        asked = ", ".join(
            f"(SELECT COUNT(*) FROM {sql.along(index)} WHERE m.topic {query.topic} AND {predicate} "
            f"AND m.{sql.due} >= {query(low)} AND m.{sql.due} < {query(high)})"
            for low, high in steps[start : start + COUNTS_AT_ONCE]
        )
        counts += (yield query.rows(f"SELECT {asked}"))[0]
    return np.array(counts, dtype=np.int64)


def next_due(sql: SqlDialect, key: int, after_ms: int, buckets: Sequence[int] | None) -> Plan[int | None]:
    """Return `Store.next_due`."""
    free_ms, held_ms, _ = yield sql.first_dues(key, after_ms, buckets)
    return earliest((free_ms, held_ms))


def next_dues(sql: SqlDialect) -> Plan[dict[int, int]]:
    """Return `Store.next_dues`: two looks into an index for each topic, in one statement."""
    found = yield sql.query().rows(sql.first_due_of_each)
    dues = {uid: earliest((free_ms, held_ms)) for uid, free_ms, held_ms in found}
    return {uid: due_ms for uid, due_ms in dues.items() if due_ms is not None}
