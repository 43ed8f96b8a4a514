"""Puts and settles inside a transaction, in the plain case: by columns, where a free id or token and holder decide."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from timeline.columns import Ragged
from timeline.model import Answers, Operation, buckets_of
from timeline.storage_plugins.contract import Puts, Settles
from timeline.storage_plugins.sql import changes as sql
from timeline.storage_plugins.sql import signed, signed_one
from timeline.storage_plugins.sql.changes import likely, settle_by_columns
from timeline.storage_plugins.sql.dialect import Changes
from timeline.storage_plugins.sql.rows import FoundColumns
from timeline.storage_plugins.sql.statements import Plan, Statement
from timeline.storage_plugins.sqlite.dialect import BY_ID, SqliteColumns, SqliteDialect, batches
from timeline.storage_plugins.sqlite.writer import Transaction

_PUT = (
    "row,topic,bucket,id,birth,due_ms,scheduled_ms,put_ms,asked_ms,expires_ms,payload_sum,payload_bytes,"
    "headers_bytes,grp,tag"
)
_PUT_FROM = "column1,?,column2,column3,column4,column5,column5,?,?,column6,column7,column8,column9,column10,column11"


def put(transaction: Transaction, changes: Changes, puts: Puts) -> Plan[Answers]:
    """`Store.put`: all are inserted at once; what meets a message or a remembered id is decided by the rules."""
    ids = puts.ids.tolist()
    remember_ms = changes.topic.settings.remember_ms
    known: list[int] = []
    if remember_ms:
        left = yield from changes.sql.find_remembered(changes.key, ids, changes.now_ms - remember_ms)
        remembered = {id for id, *_ in left}
        known = [at for at, id in enumerate(ids) if id in remembered]
    buckets: list[int] = buckets_of(puts.ids, changes.topic.settings.buckets).tolist()

    def insert(chosen: list[int], in_place: bool) -> Plan[list[int]]:
        return _insert(transaction, changes, puts, ids, buckets, chosen)

    return (yield from sql.put(changes, puts, ids, buckets, likely(puts, changes.now_ms, ids, known), insert))


def _insert(
    transaction: Transaction, changes: Changes, puts: Puts, ids: list[bytes], buckets: list[int], chosen: list[int]
) -> Plan[list[int]]:
    """Insert `chosen` puts with their contents; answer those whose id was not taken."""
    if not chosen:
        return []
    first = transaction.reserve(len(chosen))
    rows = list(range(first, first + len(chosen)))
    whole = len(chosen) == len(ids)
    at = np.array(chosen, dtype=np.intp)

    def numbers(column: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[int]:
        picked: list[int] = (column if whole else column[at]).tolist()
        return picked

    def strings(column: Ragged) -> list[bytes]:
        items = column.tolist()
        return items if whole else [items[index] for index in chosen]

    columns = (
        rows,
        buckets if whole else [buckets[index] for index in chosen],
        ids if whole else [ids[index] for index in chosen],
        signed(puts.birth if whole else puts.birth[at]),
        numbers(puts.due_ms),
        numbers(puts.expires_ms),
        signed(puts.payload_sum if whole else puts.payload_sum[at]),
        numbers(puts.sizes),
        numbers(puts.headers.sizes),
        strings(puts.groups),
        strings(puts.tags),
    )
    stored = 0
    for values, parameters in batches(columns):
        # What is the same for all is no column: each value of one costs 50 ns to bind.
        text = (
            f"INSERT INTO message ({_PUT}) SELECT {_PUT_FROM} FROM {values} WHERE column1 IS NOT NULL "
            "ON CONFLICT (topic, bucket, id) DO NOTHING"
        )
        put_at = (changes.key, changes.now_ms, changes.now_ms)
        stored += yield Statement(text, [*put_at, *parameters], counts=True, writes=True)
    contents: Sequence[Sequence[Any]] = (rows, strings(puts.payloads), strings(puts.headers))
    if stored < len(rows):
        found = yield _ROWS.reading("message WHERE row >= ? AND row < ?", (first, first + len(rows)))
        there = set(found.numbers["row"])
        kept = [index for index, row in enumerate(rows) if row in there]
        chosen = [chosen[index] for index in kept]
        contents = [[column[index] for index in kept] for column in contents]
    for values, parameters in batches(contents):
        text = f"INSERT INTO payload (row, payload, headers) SELECT * FROM {values} WHERE column1 IS NOT NULL"
        yield Statement(text, parameters, writes=True)
    return chosen


_ROWS = SqliteColumns(("row",))
_BY_TOKEN = (
    f"{BY_ID.format(2, 3)} AND m.birth = a.column4 AND m.version = a.column5 AND m.holder = a.column6 "
    "AND m.died_ms = 0 AND m.holder != x''"
)
_SIZED = "a.column1 AS n, m.row AS row, m.payload_bytes + m.headers_bytes AS size"
_HOLDING = SqliteColumns(("n", "row", "size", "due_ms", "payload_sum", "expires_ms"))
_HOLDING_INNER = f"{_SIZED}, m.due_ms AS due_ms, m.payload_sum AS payload_sum, m.expires_ms AS expires_ms"
_ACKED = SqliteColumns(("n", "row", "size", "late"))
_ACKED_INNER = f"{_SIZED}, m.due_ms <= ? AS late"


def settle_plain(
    changes: Changes, settles: Settles, ids: list[bytes], buckets: list[int], answers: Answers
) -> Plan[Collection[int]]:
    """Acks and extends of living messages whose token and holder match; which were done."""
    chosen = np.flatnonzero((settles.operation == Operation.ACK) | (settles.operation == Operation.EXTEND))
    if not len(chosen):
        return ()
    whole = len(chosen) == len(ids)
    at = chosen.tolist()
    columns = (
        at,
        buckets if whole else [buckets[index] for index in at],
        ids if whole else [ids[index] for index in at],
        signed(settles.birth[chosen]),
        settles.version[chosen].tolist(),
        (settles.holders if whole else settles.holders.take(chosen)).tolist(),
    )
    sql = changes.sql
    assert isinstance(sql, SqliteDialect)
    done: list[int] = []
    if bool((settles.operation[chosen] == Operation.ACK).all()) and not changes.topic.settings.remember_ms:
        # Acks alone, where nothing is remembered: what is read back is the least that will do.
        for values, parameters in batches(columns):
            source = f"(SELECT {_ACKED_INNER} FROM {values}{_BY_TOKEN})"
            numbers = (yield _ACKED.reading(source, [changes.now_ms, *parameters, changes.key])).numbers
            answers.late[numbers["n"]] = numbers["late"]
            yield from sql.delete(numbers["row"], numbers["size"])
            done += numbers["n"]
        return done
    for values, parameters in batches(columns):
        source = f"(SELECT {_HOLDING_INNER} FROM {values}{_BY_TOKEN})"
        found = yield _HOLDING.reading(source, [*parameters, changes.key])
        done += yield from _settle_holding(changes, sql, settles, ids, found, answers)
    return done


def _settle_holding(
    changes: Changes, sql: SqliteDialect, settles: Settles, ids: list[bytes], found: FoundColumns, answers: Answers
) -> Plan[list[int]]:
    """Settle what was found to be held by its asker; which were done."""
    columns = {name: np.array(values, dtype=np.int64) for name, values in found.numbers.items()}
    place, ours = columns["n"].astype(np.intp), np.ones(found.count, dtype=np.bool_)
    acks, extends, until_ms = settle_by_columns(
        settles, place, ours, columns["due_ms"], columns["expires_ms"], changes.now_ms, answers
    )
    if acks.any():
        yield from _remove_acked(changes, sql, settles, ids, {name: columns[name][acks].tolist() for name in columns})
    for values, parameters in batches((columns["row"][extends].tolist(), until_ms.tolist())):
        text = f"UPDATE message SET due_ms = a.column2 FROM {values} AS a WHERE message.row = a.column1"
        yield Statement(text, parameters, writes=True)
    done: list[int] = place[acks | extends].tolist()
    return done


def _remove_acked(
    changes: Changes, sql: SqliteDialect, settles: Settles, ids: list[bytes], numbers: dict[str, list[int]]
) -> Plan[None]:
    """Remove acknowledged messages, remembering them where the topic does."""
    yield from sql.delete(numbers["row"], numbers["size"])
    if changes.topic.settings.remember_ms:
        place = numbers["n"]
        births = [signed_one(int(settles.birth[at])) for at in place]
        versions = [int(settles.version[at]) for at in place]
        yield from sql.remember(
            changes, [ids[at] for at in place], births, versions, numbers["payload_sum"], [0] * len(place)
        )
