"""Puts and settles inside a transaction, in the plain case: by columns, where a free id or token and holder decide."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from timeline.leases import Message
from timeline.model import Answers, Operation, buckets_of
from timeline.storage_plugins.contract import Puts, Settles, StoreUnavailable
from timeline.storage_plugins.mysql.dialect import (
    CONTENT_BYTES_AT_ONCE,
    HELD,
    MysqlColumns,
    MysqlDialect,
    by_id,
    parts,
)
from timeline.storage_plugins.sql import changes as sql
from timeline.storage_plugins.sql import signed
from timeline.storage_plugins.sql.changes import likely, settle_by_columns
from timeline.storage_plugins.sql.dialect import Changes
from timeline.storage_plugins.sql.rows import FoundColumns, remembered_of
from timeline.storage_plugins.sql.statements import Plan, Statement

Reserve = Callable[[int], int]


class NumbersTaken(StoreUnavailable):
    """Row numbers that this process had reserved are others': a server took over that had missed the reservation."""


# ── put ──


def put(changes: Changes, puts: Puts, reserve: Reserve) -> Plan[Answers]:
    """`Store.put`: all are inserted at once; what meets a message or a remembered id is decided by the rules."""
    ids = puts.ids.tolist()
    buckets: list[int] = buckets_of(puts.ids, changes.topic.settings.buckets).tolist()

    def insert(chosen: list[int], in_place: bool) -> Plan[list[int]]:
        return _insert(changes, puts, ids, buckets, chosen, reserve)

    return (yield from sql.put(changes, puts, ids, buckets, likely(puts, changes.now_ms, ids), insert))


def _insert(
    changes: Changes, puts: Puts, ids: list[bytes], buckets: list[int], chosen: list[int], reserve: Reserve
) -> Plan[list[int]]:
    """Insert `chosen` puts with their contents; answer those whose id was neither taken nor remembered."""
    count = len(chosen)
    if not count:
        return []
    first = reserve(count)
    at = np.array(chosen, dtype=np.intp)
    columns = (
        range(first, first + count),
        [buckets[index] for index in chosen],
        [ids[index] for index in chosen],
        signed(puts.birth[at]),
        puts.due_ms[at].tolist(),
        puts.expires_ms[at].tolist(),
        signed(puts.payload_sum[at]),
        puts.sizes[at].tolist(),
        puts.headers.sizes[at].tolist(),
        [puts.groups[index] for index in chosen],
        [puts.tags[index] for index in chosen],
    )
    # In the index's order: two batches that share ids then wait for each other instead of locking each other out.
    rows = sorted(zip(*columns, strict=True), key=lambda row: row[1:3])
    stored = yield from _insert_messages(changes, rows)
    there = set(range(first, first + count))
    if stored < count:
        text = f"SELECT `row`, birth FROM message WHERE `row` >= {first} AND `row` < {first + count}"
        found = yield Statement(text, (), list)
        ours = {row: birth for row, _, _, birth, *_ in rows}
        there = {row for row, birth in found if birth == ours[row]}
        if len(there) < len(found):
            raise NumbersTaken("row numbers were given out twice: this server had missed a reservation")
    if changes.topic.settings.remember_ms:
        there -= yield from _take_back(changes, [row[:3] for row in rows if row[0] in there])
    yield from _mark(changes.key, [row for row in rows if row[0] in there])
    kept = [(row, index) for row, index in zip(range(first, first + count), chosen, strict=True) if row in there]
    yield from _insert_payloads([(row, puts.payloads[index], puts.headers[index]) for row, index in kept])
    return [index for _, index in kept]


def _insert_messages(changes: Changes, rows: Sequence[tuple[Any, ...]]) -> Plan[int]:
    """Insert new messages: row, bucket, id, birth, due_ms, expires_ms, payload_sum, payload_bytes, headers_bytes, grp,
    tag. Those whose id is taken are left out. How many were stored."""
    key, now_ms, stored = changes.key, changes.now_ms, 0
    for part in parts(rows):
        values = ",".join(
            f"({row},{key},{bucket},x'{id.hex()}',{birth},1,{due},{due},{now_ms},{now_ms},{expires},{check},{size},"
            f"{headers},x'{group.hex()}',x'{tag.hex()}')"
            for row, bucket, id, birth, due, expires, check, size, headers, group, tag in part
        )
        text = (
            "INSERT INTO message (`row`, topic, bucket, id, birth, version, due_ms, scheduled_ms, put_ms, asked_ms, "
            f"expires_ms, payload_sum, payload_bytes, headers_bytes, grp, tag) VALUES {values} "
            "ON DUPLICATE KEY UPDATE `row` = `row`"
        )
        stored += yield Statement(text, counts=True, writes=True)
    return stored


def _take_back(changes: Changes, rows: list[tuple[int, int, bytes]]) -> Plan[set[int]]:
    """Remove those of the rows (row, bucket, id) just inserted whose id is remembered; answer their numbers.

    Asked after the insert, never before: an insert waits for whoever is settling the same id, and what that one
    remembered is seen only then. While our row stands nobody else settles the id."""
    after_ms = changes.now_ms - changes.topic.settings.remember_ms
    left = yield from changes.sql.find_remembered(changes.key, [id for _, _, id in rows], after_ms)
    remembered = {id for id, *_ in left}
    back = {row for row, _, id in rows if id in remembered}
    assert isinstance(changes.sql, MysqlDialect)
    yield from changes.sql.delete(sorted(back), marked=False)
    return back


def _mark(key: int, rows: Sequence[tuple[Any, ...]]) -> Plan[None]:
    """Note in the tables beside `message` what new ones, as `_insert_messages` has them, have of tags and expiries."""
    for part in parts([row for row in rows if row[10]]):
        values = ",".join(f"({key},x'{row[10].hex()}',{row[1]},x'{row[2].hex()}',{row[0]})" for row in part)
        yield Statement(f"INSERT INTO tagged (topic, tag, bucket, id, `row`) VALUES {values}", writes=True)
    for part in parts([row for row in rows if row[5]]):
        values = ",".join(f"({key},{row[5]},{row[0]})" for row in part)
        yield Statement(f"INSERT INTO expiring (topic, expires_ms, `row`) VALUES {values}", writes=True)


def _insert_payloads(rows: Sequence[tuple[int, bytes, bytes]]) -> Plan[None]:
    """Insert contents: row, payload, headers."""
    values: list[str] = []
    room = CONTENT_BYTES_AT_ONCE
    for at, (row, payload, headers) in enumerate(rows, 1):
        values.append(f"({row},x'{payload.hex()}',x'{headers.hex()}')")
        room -= len(payload) + len(headers)
        if room <= 0 or at == len(rows):
            text = f"INSERT INTO payload (`row`, payload, headers) VALUES {','.join(values)}"
            yield Statement(text, writes=True)
            values, room = [], CONTENT_BYTES_AT_ONCE


# ── settle ──

_HELD = MysqlColumns(("row", "birth", "version", "due_ms", "expires_ms", "payload_sum", "marked"), ("id", "holder"))
"""What living messages that somebody holds say of their token. `marked`: whether something stands beside it."""
_MARKED = "m.tag <> x'' OR m.expires_ms > 0"
_EXTEND = (
    "UPDATE JSON_TABLE(%s, '$[*]' COLUMNS (r BIGINT PATH '$[0]', due_ms BIGINT PATH '$[1]')) AS a "
    "STRAIGHT_JOIN message AS m ON m.`row` = a.r SET m.due_ms = a.due_ms"
)


def settle_plain(
    changes: Changes, settles: Settles, ids: list[bytes], buckets: list[int], answers: Answers
) -> Plan[Collection[int]]:
    """Acks and extends of living messages whose token and holder match; which were done."""
    sql = changes.sql
    assert isinstance(sql, MysqlDialect)
    plain = (settles.operation == Operation.ACK) | (settles.operation == Operation.EXTEND)
    chosen = np.flatnonzero(plain).tolist()
    at_of = {ids[at]: at for at in chosen}
    done: list[int] = []
    acked: list[int] = []
    left: list[tuple[bytes, Message]] = []
    marked = False
    for part in parts(sorted((buckets[at], ids[at]) for at in chosen)):
        source = f"{by_id(changes.key, part)} AND m.kind = {HELD} AND {sql.stands(changes.key)} FOR UPDATE"
        found = yield _HELD.reading(_HELD.over(source, marked=_MARKED))
        place = np.array([at_of[id] for id in found.strings["id"].tolist()], dtype=np.intp)
        acks = yield from _settle_held(changes, settles, found, place, answers, done)
        acked += np.array(found.numbers["row"], dtype=np.int64)[acks].tolist()
        marked |= bool(np.array(found.numbers["marked"], dtype=np.int64)[acks].any())
        if changes.topic.settings.remember_ms:
            for at in np.flatnonzero(acks).tolist():
                of = int(place[at])
                token = int(settles.birth[of]), int(settles.version[of])
                left.append((ids[of], remembered_of(ids[of], *token, found.numbers["payload_sum"][at], 0).message))
    yield from sql.delete(acked, marked)
    yield from sql.remember(changes, left)
    return done


def _settle_held(
    changes: Changes, settles: Settles, found: FoundColumns, place: np.ndarray[tuple[int], np.dtype[np.intp]],
    answers: Answers, done: list[int],
) -> Plan[np.ndarray[tuple[int], np.dtype[np.bool_]]]:  # fmt: skip
    """Settle what was found, each the settle at its `place`, where token and holder match; which of it was
    acknowledged. Adds to `done`."""
    columns = {name: np.array(values, dtype=np.int64) for name, values in found.numbers.items()}
    theirs = settles.holders.take(place).tolist()
    ours = np.array([a == b for a, b in zip(found.strings["holder"].tolist(), theirs, strict=True)], dtype=np.bool_)
    ours &= columns["birth"].view(np.uint64) == settles.birth[place]
    ours &= columns["version"] == settles.version[place]
    acks, extends, until_ms = settle_by_columns(
        settles, place, ours, columns["due_ms"], columns["expires_ms"], changes.now_ms, answers
    )
    for part in parts(list(zip(columns["row"][extends].tolist(), until_ms.tolist(), strict=True))):
        yield Statement(_EXTEND, (json.dumps(part),), writes=True)
    done += place[acks | extends].tolist()
    return acks
