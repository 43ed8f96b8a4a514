"""Reads that lock nothing: scans, what a holder holds, counts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from timeline.columns import Int64, Ragged
from timeline.model import Rows, State, Topic, buckets_of
from timeline.storage_plugins.contract import Page, ScanFilter
from timeline.storage_plugins.mysql import statements
from timeline.storage_plugins.mysql.connections import Session
from timeline.storage_plugins.mysql.statements import DEAD, FREE, HELD, WHOLE, hexed
from timeline.storage_plugins.sql.rows import Part, cursor_at, place_after

LOOKED_AT = 20_000
"""Rows that one page of a filtered scan looks at, at most: it may be empty and not the last."""
PAGE_BYTES = 1024 * 1024
COUNTS_AT_ONCE = 100


def conditions(where: ScanFilter, now_ms: int) -> str:
    """A scan's filter, but for its ids."""
    meaning = {
        State.DEAD: f"m.kind = {DEAD}",
        State.LEASED: f"(m.kind = {HELD} AND m.due_ms > {now_ms})",
        State.WAITING: f"(m.kind = {FREE} AND m.due_ms > {now_ms})",
        State.AVAILABLE: f"(m.kind <> {DEAD} AND m.due_ms <= {now_ms})",
    }
    if where.states:
        asked = " OR ".join(meaning[state] for state in sorted(where.states) if state in meaning) or "1 = 0"
    else:
        asked = f"m.kind <> {DEAD}"
    text = f"({asked})"
    if where.tag:
        text += f" AND m.tag = {hexed(where.tag)}"
    if where.due_from_ms:
        text += f" AND m.due_ms >= {where.due_from_ms}"
    if where.due_to_ms:
        text += f" AND m.due_ms < {where.due_to_ms}"
    return text


def page(session: Session, part: Part, payload: bool) -> Rows:
    """The rows of a page, with their content when asked for."""
    if payload:
        part.rows.payloads, part.rows.headers, _ = statements.contents(session, part.numbers, part.sizes.tolist())
    return part.rows


def walk(key: int, tag: bytes, cursor: bytes) -> str:
    """What a walk over (bucket, id) has still before it, as all that follows FROM: of one tag, or of all messages."""
    bucket, id = place_after(cursor)
    w = walked(tag)
    beyond = f"{w}.bucket >= {bucket} AND ({w}.bucket > {bucket} OR {w}.id > {hexed(id)})"
    if tag:
        joined = "tagged AS w FORCE INDEX (PRIMARY) STRAIGHT_JOIN message AS m ON m.`row` = w.`row`"
        return f"{joined} WHERE w.topic = {key} AND w.tag = {hexed(tag)} AND {beyond}"
    return f"message AS m FORCE INDEX (message_id) WHERE m.topic = {key} AND {beyond}"


def walked(tag: bytes) -> str:
    """The table that says where a walk is; `message` itself is m."""
    return "w" if tag else "m"


def scan(
    session: Session, topic: Topic, key: int, now_ms: int, where: ScanFilter, cursor: bytes, limit: int, payload: bool
) -> Page:
    """`Store.scan`: a page of the walk over (bucket, id), along the tag's index where that serves."""
    limit = min(max(1, limit), statements.LEASED_AT_ONCE)
    if where.ids is not None:
        return _scan_ids(session, topic, key, now_ms, where, cursor, limit, payload)
    source, w = walk(key, where.tag, cursor), walked(where.tag)
    edge = session.rows(
        f"SELECT {w}.bucket, {w}.id FROM {source} ORDER BY {w}.bucket, {w}.id LIMIT 1 OFFSET {LOOKED_AT - 1}"
    )
    if edge:
        bucket, id = edge[0]
        source += f" AND {w}.bucket <= {bucket} AND ({w}.bucket < {bucket} OR {w}.id <= {hexed(id)})"
    filtered = f"{source} AND {conditions(where, now_ms)} ORDER BY {w}.bucket, {w}.id LIMIT {limit}"
    whole = Part.of(WHOLE.read(session, WHOLE.first(filtered)))
    part = whole.fitting(PAGE_BYTES) if payload else whole
    onward: bytes | None = cursor_at(*edge[0]) if edge else None
    if len(part) < len(whole) or len(whole) == limit:
        onward = _cursor(topic, part.rows.ids[-1])
    return Page(page(session, part, payload), onward)


def _cursor(topic: Topic, id: bytes) -> bytes:
    return cursor_at(int(buckets_of(Ragged.of([id]), topic.settings.buckets)[0]), id)


def _scan_ids(
    session: Session, topic: Topic, key: int, now_ms: int, where: ScanFilter, cursor: bytes, limit: int, payload: bool
) -> Page:
    """The same along the ids asked for: a page looks at `limit` of them."""
    distinct = Ragged.of(list(dict.fromkeys(where.ids or ())))
    places = sorted(zip(buckets_of(distinct, topic.settings.buckets).tolist(), distinct, strict=True))
    places = [place for place in places if place > place_after(cursor)]
    asked = places[:limit]
    rows: list[int] = []
    for found in statements.find(session, key, asked, lock=False):
        rows += found.numbers["row"]
    chosen = f"m.`row` IN ({statements.listed(rows)}) AND {conditions(where, now_ms)} ORDER BY m.bucket, m.id"
    whole = Part.of(WHOLE.read(session, WHOLE.first(f"message AS m WHERE {chosen} LIMIT {limit}")))
    part = whole.fitting(PAGE_BYTES) if payload else whole
    onward: bytes | None = None
    if len(part) < len(whole):
        onward = _cursor(topic, part.rows.ids[-1])
    elif len(places) > limit:
        onward = cursor_at(*places[limit - 1])
    return Page(page(session, part, payload), onward)


def held_by(session: Session, key: int, now_ms: int, holder: bytes, cursor: bytes, limit: int) -> Page:
    """`Store.held_by`: along the leases by their end. An extend only moves a lease on in this order."""
    if not holder:
        return Page(Rows.empty(payload=True), None)
    due_ms, id = now_ms, b"\xff" * 256
    if cursor:
        due_ms, id = max((due_ms, id), (int.from_bytes(cursor[:8], "big"), cursor[8:]))
    limit = min(max(1, limit), statements.LEASED_AT_ONCE)
    source = (
        f"message AS m FORCE INDEX (message_due) WHERE m.topic = {key} AND m.kind = {HELD} "
        f"AND m.place_ms >= {due_ms} AND (m.place_ms > {due_ms} OR m.id > {hexed(id)}) AND m.holder = {hexed(holder)} "
        f"ORDER BY m.place_ms, m.id LIMIT {limit}"
    )
    whole = Part.of(WHOLE.read(session, WHOLE.first(source)))
    part = whole.fitting(PAGE_BYTES)
    onward = None
    if len(part) < len(whole) or len(whole) == limit:
        onward = int(part.rows.due_ms[-1]).to_bytes(8, "big") + part.rows.ids[-1]
    return Page(page(session, part, True), onward)


def count_due(session: Session, key: int, edges_ms: Int64) -> Int64:
    """`Store.count_due`: a range of the index for each step."""
    edges: Sequence[int] = edges_ms.tolist()
    steps = list(itertools.pairwise(edges))
    counts: list[int] = []
    for start in range(0, len(steps), COUNTS_AT_ONCE):
        asked = ", ".join(
            f"(SELECT COUNT(*) FROM message FORCE INDEX (message_due) WHERE topic = {key} AND kind = {FREE} "
            f"AND place_ms >= {low} AND place_ms < {high})"
            for low, high in steps[start : start + COUNTS_AT_ONCE]
        )
        counts += session.rows(f"SELECT {asked}")[0]
    return np.array(counts, dtype=np.int64)
