"""PostgreSQL's dialect: arrays in, records out; a change stands if the row is still as it was read.

Puts, leases, settles and tag operations are one statement each in the plain case. The rules decide on the rest. The
statement of a tag operation walks the chunk. It changes free, unexpired messages of the asking group that were not done
before, each as it is when it is locked. The others are read, decided by the rules, and changed if no other call was
faster.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from timeline.columns import Indexes, Int64, Ragged, UInt32
from timeline.leases.dealing import turns_of
from timeline.model import Answers, Operation, Status, Topic, buckets_of
from timeline.storage_plugins.asks import cursor_at, place_of
from timeline.storage_plugins.contract import Grant, LeasedRows, Puts, Settles, TagMutation, TagStep
from timeline.storage_plugins.postgresql.schema import ROWS_AT_A_TIME
from timeline.storage_plugins.postgresql.statements import (
    COLUMNS,
    FREE,
    HELD,
    LEASE,
    PACKED,
    PUT,
    STATEMENTS,
    TAGGED,
    TEXTS,
    WORDS,
    Fragments,
    HotStatements,
    whole,
)
from timeline.storage_plugins.sql import NEW, NUMBERS, STRINGS, new_columns, rows_of, signed, signed_one
from timeline.storage_plugins.sql import changes as sql
from timeline.storage_plugins.sql.changes import TagCounts, mutate_tagged
from timeline.storage_plugins.sql.dialect import Changes, LeasedContent, SqlDialect
from timeline.storage_plugins.sql.leasing import LeaseOutcome, earliest
from timeline.storage_plugins.sql.rows import FoundColumns, MessageBatch, changing_columns
from timeline.storage_plugins.sql.statements import Atomic, Plan, Query, Statement

BLOCKS = 16
_BLOCKS = "SELECT array_agg(nextval('timeline.message_row')) FROM generate_series(1, $1::int8)"
_NUMBERS = ("row", "bucket", "headers_bytes", *NUMBERS)


class RowNumbers:
    """Row numbers that no other broker has. They come from the server's sequence in blocks, so that a put needs no
    statement for them."""

    def __init__(self) -> None:
        self._ranges: list[range] = []

    def take(self, count: int) -> Plan[list[int]]:
        """Return `count` of them, each used once."""
        while sum(map(len, self._ranges)) < count:
            firsts = yield Statement(_BLOCKS, (BLOCKS + -(-count // ROWS_AT_A_TIME),), value)
            self._ranges += [range(first, first + ROWS_AT_A_TIME) for first in firsts]
        taken: list[int] = []
        while len(taken) < count:
            block = self._ranges[0]
            part = block[: count - len(taken)]
            taken += part
            self._ranges[0] = block[len(part) :]
            if not self._ranges[0]:
                del self._ranges[0]
        return taken

    def forget(self) -> None:
        """Forget these: a server that lost its last moments in a crash may give them out again."""
        self._ranges.clear()


class NumberedQuery(Query):
    """A statement under construction, with numbered parameters. `$1` is the topic's uid, if it is for rows of one."""

    __slots__ = ("_of_topic",)

    def __init__(self, key: int, of_topic: str) -> None:
        super().__init__(key)
        self._of_topic = of_topic
        if key:
            self._values.append(key)

    def __call__(self, value: Any) -> str:
        self._values.append(value)
        return f"${len(self._values)}"

    @property
    def topic(self) -> str:
        return self._of_topic


class PostgresqlDialect(SqlDialect):
    """The dialect. A call's key of a topic is its uid: statements find the key by themselves. `apart`: no statement may
    update and delete rows of one table. `leases_at_once`: a lease is one statement in the plain case."""

    free, held, tagged = FREE, HELD, TAGGED
    locked = " FOR UPDATE"
    asks_first = False
    apart = False
    leases_at_once = True
    words: Fragments = WORDS
    statements: HotStatements = STATEMENTS

    @property
    def claiming(self) -> str:  # type: ignore[override]
        return self.words.claiming

    def query(self, key: int = 0) -> Query:
        return NumberedQuery(key, self.words.of_topic)

    def table(self, name: str) -> str:
        return f"timeline.{name}"

    def along(self, index: str) -> str:
        return "timeline.message AS m"

    def in_buckets(self, query: Query, buckets: Sequence[int] | None) -> str:
        asked = query(None if buckets is None else list(buckets))
        return f" AND ({asked}::int8[] IS NULL OR m.bucket = ANY({asked}))"

    def messages(self, query: Query, source: str, free: bool = False, lock: str = "") -> Statement:
        return query.reading(f"SELECT {whole()} FROM {source}{lock}", columns_of_records)

    def find(self, key: int, places: Sequence[tuple[int, bytes]], lock: bool) -> Plan[Iterable[FoundColumns]]:
        asked = (key, [bucket for bucket, _ in places], [id for _, id in places])
        found = yield Statement(self.statements.find, asked, columns_of_records)
        return (found,)

    def find_remembered(self, key: int, ids: Sequence[bytes], after_ms: int) -> Plan[list[tuple[Any, ...]]]:
        found: list[tuple[Any, ...]] = yield Statement(self.statements.find_remembered, (key, ids, after_ms), list)
        return found

    def change(self, changes: Changes) -> Plan[set[bytes]]:
        if self.apart and changes.updated and changes.removed:
            lost = yield from self._change(changes, list(changes.updated))
            return lost | (yield from self._change(changes, list(changes.removed)))
        return (yield from self._change(changes, [*changes.updated, *changes.removed]))

    def _change(self, changes: Changes, chosen: list[bytes]) -> Plan[set[bytes]]:
        """Write the changes of the `chosen` by one statement."""
        bucket = dict(zip(chosen, buckets_of(Ragged.of(chosen), changes.topic.settings.buckets).tolist(), strict=True))
        ids = sorted(chosen, key=lambda id: (bucket[id], id))
        was = [changes.met[id].message for id in ids]
        after = [changes.updated.get(id, message) for id, message in zip(ids, was, strict=True)]
        updates = any(id in changes.updated for id in ids)
        removes = any(id in changes.removed for id in ids)
        remembers = removes and bool(changes.remembered)
        asked: list[Any] = [
            changes.key,
            [bucket[id] for id in ids],
            ids,
            [signed_one(message.birth) for message in was],
            [message.version for message in was],
            [message.due_ms for message in was],
            [message.died_ms for message in was],
            [id in changes.removed for id in ids],
        ]
        if updates:
            asked += changing_columns(after)
        if remembers:
            left = [changes.remembered.get(id) for id in ids]
            asked += [
                changes.now_ms,
                [left_one is not None for left_one in left],
                [0 if left_one is None else signed_one(left_one.last_op) for left_one in left],
            ]
        done = yield Statement(self.statements.change[updates, removes, remembers], asked, value, writes=True)
        return set(ids).difference(ids[at] for at in done or ())

    def contents(self, numbers: Sequence[int], sizes: Sequence[int]) -> Plan[tuple[Ragged, Ragged, list[int]]]:
        found = (yield Statement(self.statements.contents, (numbers,), list)) if numbers else []
        return _contents(found)

    def lease(
        self, changes: Changes, batch: MessageBatch, turns: UInt32, until_ms: Int64, grants: Sequence[Grant],
        also: Statement | None,
    ) -> Plan[tuple[LeasedContent, Any]]:  # fmt: skip
        rows = batch.rows
        asked = (
            changes.key,
            buckets_of(rows.ids, changes.topic.settings.buckets).tolist(),
            rows.ids.tolist(),
            signed(rows.birth),
            rows.version.tolist(),
            rows.due_ms.tolist(),
            until_ms.tolist(),
            [grants[turn].holder for turn in turns.tolist()],
        )
        found = yield Statement(self.statements.lease_each, asked, list, writes=True)
        payloads, headers, gone = _contents([record[1:] for record in map(tuple, found)])
        content = LeasedContent(payloads, headers, tuple(gone), [record[0] for record in found])
        return content, None if also is None else (yield also)

    def delete_some(self, key: int, limit: int) -> Plan[int]:
        removed: int = yield Statement(self.statements.rows_of_dropped, (key, limit), value, writes=True)
        return removed

    def forget(self, key: int, until_ms: int | None, limit: int) -> Plan[int]:
        text, asked = self.statements.forget_dropped, [key, limit]
        if until_ms is not None:
            text, asked = self.statements.forget, [key, until_ms, limit]
        removed: int = yield Statement(text, asked, counts=True, writes=True)
        return removed

    def still_stands(self, key: int) -> Plan[bool]:
        rows = yield Statement("SELECT key FROM timeline.topic WHERE uid = $1", (key,), list)
        return bool(rows)


def value(records: Sequence[Any]) -> Any:
    """Return the only field of the only record."""
    return records[0][0]


def _contents(records: Sequence[Any]) -> tuple[Ragged, Ragged, list[int]]:
    payloads = Ragged.of([payload or b"" for payload, _ in records])
    headers = Ragged.of([headers or b"" for _, headers in records])
    return payloads, headers, [at for at, (payload, _) in enumerate(records) if payload is None]


def columns_of_records(records: Sequence[Any]) -> FoundColumns:
    """Return records of `whole` columns, and perhaps more, as columns."""
    columns: list[Any] = list(zip(*records, strict=True)) if records else [()] * len(COLUMNS)
    named = dict(zip(COLUMNS, columns, strict=False))
    numbers = {name: list(named[name]) for name in _NUMBERS}
    strings = {name: Ragged.of(list(named[name])) for name in STRINGS.values()}
    return FoundColumns(numbers, strings, len(records))


# ── put ──


def put(changes: Changes, puts: Puts, numbers: RowNumbers) -> Plan[Answers]:
    """Do `Store.put`."""
    return sql.put(changes, puts, partial(_store, changes, numbers))


def _store(
    changes: Changes, numbers: RowNumbers, puts: Puts, buckets: list[int], in_place: bool
) -> Plan[Collection[int]]:
    """Store puts whose id is neither taken nor remembered; return which."""
    remembers = bool(changes.topic.settings.remember_ms) and not in_place
    insert = _insert_unremembered if remembers else _insert
    stored: Collection[int] = yield Atomic(partial(insert, changes, numbers, puts, buckets), single=not remembers)
    return stored


def _insert_unremembered(
    changes: Changes, numbers: RowNumbers, puts: Puts, buckets: list[int]
) -> Plan[Collection[int]]:
    """Store puts in a transaction, on a topic that remembers ids. It looks for a remembered id once the put has taken
    its place: from then on, another call cannot settle the id unseen."""
    stored = yield from _insert(changes, numbers, puts, buckets)
    if not stored:
        return ()
    after_ms = changes.now_ms - changes.topic.settings.remember_ms
    left = yield from changes.sql.find_remembered(changes.key, [puts.ids[at] for at in stored], after_ms)
    known = {id for id, *_ in left}
    if not known:
        return stored
    again = [at for at in stored if puts.ids[at] in known]
    asked = (changes.key, [buckets[at] for at in again], [puts.ids[at] for at in again])
    yield Statement(_of(changes).statements.remove_new, asked, writes=True)
    return [at for at in stored if puts.ids[at] not in known]


def _insert(changes: Changes, numbers: RowNumbers, puts: Puts, buckets: list[int]) -> Plan[Collection[int]]:
    """Store puts whose id is not taken; return which."""
    rows = yield from numbers.take(len(puts))
    columns = dict(zip(NEW, new_columns(puts, rows, buckets), strict=True))
    columns |= {"payload": puts.payloads.tolist(), "headers": puts.headers.tolist()}
    asked = (changes.key, changes.now_ms, *(columns[name] for name in PUT))
    ((count, stored),) = yield Statement(_of(changes).statements.put, asked, list, writes=True)
    if count == len(puts):
        return range(count)
    kept = set(stored or ())
    return [at for at, row in enumerate(rows) if row in kept]


def _of(changes: Changes) -> PostgresqlDialect:
    assert isinstance(changes.sql, PostgresqlDialect)
    return changes.sql


# ── settle ──

_PLAIN = (Operation.ACK, Operation.EXTEND, Operation.RELEASE)


def settle_plain(
    changes: Changes, settles: Settles, ids: list[bytes], buckets: list[int], answers: Answers
) -> Plan[Collection[int]]:
    """Do settles whose token and holder match, by a statement for each operation; return which were done."""
    done: list[int] = []
    for operation in _PLAIN:
        chosen = np.flatnonzero(settles.operation == operation)
        if len(chosen):
            done += yield from _settle_all(changes, settles, operation, chosen, answers)
    return done


def _settle_all(
    changes: Changes, settles: Settles, operation: Operation, chosen: Indexes, answers: Answers
) -> Plan[list[int]]:
    """Settle `chosen`, all of one operation, by one statement if token and holder match; return which it did."""
    statements, settings, now_ms = _of(changes).statements, changes.topic.settings, changes.now_ms
    # All calls use one order, so that those that meet on the same messages wait, but never for each other.
    order = chosen
    if len(chosen) > 1:
        ids = settles.ids.take(chosen)
        order = chosen[np.lexsort((np.array(ids.tolist()), buckets_of(ids, settings.buckets)))]
    ids = settles.ids.take(order)
    asked: list[Any] = [
        changes.key,
        buckets_of(ids, settings.buckets).tolist(),
        ids.tolist(),
        signed(settles.birth[order]),
        settles.version[order].tolist(),
        settles.holders.take(order).tolist(),
    ]
    if operation is Operation.ACK:
        remembers = bool(settings.remember_ms)
        if remembers:
            asked.append(now_ms)
        ((at, dues_ms),) = yield Statement(statements.ack[remembers], asked, list, writes=True)
        if at is None:
            return []
        done = order[at]
        answers.late[done] = np.array(dues_ms, dtype=np.int64) <= now_ms
        acked: list[int] = done.tolist()
        return acked
    asked.append(settles.time_ms[order].tolist())
    statement = statements.extend
    if operation is Operation.RELEASE:
        statement = statements.release
        asked += [signed(settles.op[order]), settles.unseen[order].tolist()]
    records = yield Statement(statement, (*asked, now_ms), list, writes=True)
    done = order[[record[0] for record in records]] if records else order[:0]
    answers.due_ms[done] = [record[1] for record in records]
    answers.version[done] = settles.version[done] + (operation is Operation.RELEASE)
    settled: list[int] = done.tolist()
    return settled


# ── lease ──

BYTES_AT_ONCE = 256 * 1024 * 1024
"""Payloads and headers that one lease reads together. The rest is due at once (`next_due_ms`)."""


def lease_plain(
    topic: Topic, buckets: Sequence[int] | None, now_ms: int, due_before_ms: int, grants: Sequence[Grant],
    overdue_ms: int, due_from_ms: int, end_from_ms: int,
) -> Plan[LeaseOutcome | None]:  # fmt: skip
    """Do `Store.lease_due` by one statement. Return None if the rules must decide, and nothing was done. `due_from_ms`:
    the earliest due time to look for. `end_from_ms`: no lease runs out before."""
    settings = topic.settings
    backoff_ms = settings.redelivery_backoff_ms
    several = len(grants) > 1
    wanted = sum(grant.count for grant in grants)
    asked: list[Any] = [
        topic.uid,
        now_ms - overdue_ms if overdue_ms else max(now_ms, due_before_ms),
        now_ms - max(backoff_ms, overdue_ms),
        buckets,
        wanted,
        now_ms,
        settings.max_deliveries,
        [grant.lease_ms for grant in grants],
        [grant.holder for grant in grants],
        [min(grant.max_bytes, BYTES_AT_ONCE) for grant in grants],
        (turns_of(grants, wanted) + np.uint32(1)).tolist() if several else grants[0].alone,
        due_from_ms,
        end_from_ms,
    ]
    (found,) = yield Statement(LEASE[several], asked, list, writes=True)
    if not found["plain"]:
        return None
    leased = leased_of(found, grants)
    # A lease that ran out and was found, but not granted again, ended before those that still run.
    ends_ms = [found["held_ms"], found["next_held_ms"], int(leased.rows.due_ms.min()) if len(leased.rows) else None]
    if not overdue_ms:
        times = [found["free_ms"], found["next_free_ms"]]
        times += [None if end is None else end + backoff_ms for end in ends_ms]
        if found["passed"] > 0 or found["fitting"] > len(leased.rows):
            # Another call has locked some, and may leave them as they are. Not at once: a lock may last.
            times.append(now_ms + 1)
        leased.next_due_ms = earliest(times)
    return LeaseOutcome(leased, earliest(ends_ms))


def numbers_of(packed: bytes | None) -> Int64:
    """Return a column of numbers from one byte string."""
    return np.frombuffer(packed or b"", dtype=">i8").astype(np.int64)


def strings_of(data: bytes | None, lengths: bytes | None) -> tuple[Ragged, tuple[int, ...]]:
    """Return a column of byte strings from one, and the indexes of those that are gone."""
    sizes = np.frombuffer(lengths or b"", dtype=">i4").astype(np.int64)
    missing = tuple(np.flatnonzero(sizes < 0).tolist())
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(np.maximum(sizes, 0), out=offsets[1:])
    return Ragged(data or b"", offsets), missing


def leased_of(found: Any, grants: Sequence[Grant]) -> LeasedRows:
    """Return what `LEASE` leased, in the order of the deal, without `next_due_ms`."""
    numbers = {name: numbers_of(found[name]) for name in PACKED}
    texts = {name: strings_of(found[name], found[f"{name}_lengths"]) for name in TEXTS}
    order, count = numbers["n"], len(numbers["n"])
    grant = (numbers["turn"] - 1).astype(np.uint32)
    was_due_ms, prior = numbers["due_ms"], texts["holder"][0]
    numbers |= {
        "due_ms": numbers["until_ms"],
        "version": numbers["version"] + 1,
        "deliveries": numbers["deliveries"] + 1,
        "died_ms": np.zeros(count, dtype=np.int64),
    }
    holders = [one.holder for one in grants]
    rows = rows_of(
        {name: numbers[name] for name in NUMBERS},
        {
            "ids": texts["id"][0],
            "groups": texts["grp"][0],
            "tags": texts["tag"][0],
            "holders": Ragged.repeat(holders[0], count) if len(holders) == 1 else Ragged.of(holders).take(grant),
            "dead": Ragged.repeat(b"", count),
            "payloads": texts["payload"][0],
            "headers": texts["headers"][0],
        },
    )
    leased = LeasedRows(rows, grant, was_due_ms, prior, None, damaged=texts["payload"][1])
    # No server promises the order of its aggregates.
    return leased if bool((order[1:] > order[:-1]).all()) else leased.take(np.argsort(order))


# ── by tag ──

TAGGED_AT_ONCE = 2_000
"""The most messages of one statement, which locks them until it is done."""


def mutate_tag(changes: Changes, mutation: TagMutation, cursor: bytes, limit: int) -> Plan[TagStep]:
    """Do `Store.mutate_tag`."""
    limit = min(limit, TAGGED_AT_ONCE)
    moves, dry_run = mutation.operation is Operation.MOVE, mutation.dry_run
    remembers = bool(changes.topic.settings.remember_ms) and not moves and not dry_run
    asked: list[Any] = [changes.key, mutation.tag, *place_of(cursor), limit, mutation.started_ms]
    asked += [mutation.group, changes.now_ms]
    op = signed_one(mutation.op)
    asked += [op, mutation.due_ms, mutation.by_ms, mutation.latest_ms] if moves else [mutation.leased]
    if remembers:
        asked.append(op)
    statement = _of(changes).statements.by_tag[mutation.operation, dry_run, remembers]
    records = yield Statement(statement, asked, list, writes=not dry_run)
    if not records:
        return TagStep({}, None)
    found, counts = records[0], TagCounts()
    if found["done"]:
        counts.by_status[Status.OK.code] = found["done"]
        if moves and not dry_run:
            counts.moved(found["earliest_ms"])
    if found["others"]:
        yield from decide_others(changes, mutation, found["others"], counts)
    onward = cursor_at(found["bucket"], found["id"]) if found["met"] == limit else None
    return TagStep(dict(counts.by_status), onward, counts.earliest_due_ms)


def decide_others(changes: Changes, mutation: TagMutation, ids: list[bytes], counts: TagCounts) -> Plan[None]:
    """Do `mutation` by the rules on messages that something may refuse. A message that another call changed first is
    read again."""

    def look(left: list[bytes] | None) -> Plan[Iterable[FoundColumns]]:
        asked = ids if left is None else left
        buckets = buckets_of(Ragged.of(asked), changes.topic.settings.buckets).tolist()
        return changes.sql.find(changes.key, list(zip(buckets, asked, strict=True)), False)

    return mutate_tagged(changes, mutation, look, counts)
