"""Puts, leases, settles and tag operations, in the plain case by one statement each; what is not plain is for the
rules.

Of a tag operation, what nothing refuses (not leased, of the asking group, not expired, not done before) is changed by
the statement that walks the chunk, which decides on each message as it stands when it is locked; only the others are
read, decided by the rules, and changed where nobody was faster.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from timeline.columns import Indexes, Int64, Ragged
from timeline.leases.dealing import turns_of
from timeline.model import Answers, Operation, Status, Topic, buckets_of
from timeline.storage_plugins.contract import Grant, LeasedRows, Puts, Settles, TagMutation, TagStep
from timeline.storage_plugins.postgresql.dialect import PostgresqlDialect, RowNumbers
from timeline.storage_plugins.postgresql.statements import LEASE, PACKED, TEXTS
from timeline.storage_plugins.sql import NUMBERS, rows_of, signed, signed_one
from timeline.storage_plugins.sql import changes as sql
from timeline.storage_plugins.sql.changes import TagCounts, likely, mutate_tagged
from timeline.storage_plugins.sql.dialect import Changes
from timeline.storage_plugins.sql.leasing import LeaseOutcome, earliest
from timeline.storage_plugins.sql.rows import FoundColumns, cursor_at, place_after
from timeline.storage_plugins.sql.statements import Atomic, Plan, Statement


class PostgresqlPut:
    """One put."""

    def __init__(self, changes: Changes, puts: Puts, numbers: RowNumbers) -> None:
        self._changes, self._puts, self._numbers = changes, puts, numbers
        self._ids = puts.ids.tolist()
        self._buckets: list[int] = buckets_of(puts.ids, changes.topic.settings.buckets).tolist()
        assert isinstance(changes.sql, PostgresqlDialect)
        self._statements = changes.sql.statements

    def answers(self) -> Plan[Answers]:
        """`Store.put`."""
        chosen = likely(self._puts, self._changes.now_ms, self._ids)
        return sql.put(self._changes, self._puts, self._ids, self._buckets, chosen, self._store)

    def _store(self, chosen: list[int], in_place: bool) -> Plan[list[int]]:
        """Store those of `chosen` whose id is neither taken nor remembered; answer which."""
        if not chosen:
            return []
        remembers = bool(self._changes.topic.settings.remember_ms) and not in_place
        insert = self._insert_unremembered if remembers else self._insert
        stored: list[int] = yield Atomic(partial(insert, chosen), single=not remembers)
        return stored

    def _insert_unremembered(self, chosen: list[int]) -> Plan[list[int]]:
        """The same in a transaction, where ids are remembered. An id is looked for among those once its place is taken:
        nobody can settle it by then without our seeing it."""
        changes = self._changes
        stored = yield from self._insert(chosen)
        if not stored:
            return []
        after_ms = changes.now_ms - changes.topic.settings.remember_ms
        left = yield from changes.sql.find_remembered(changes.key, [self._ids[at] for at in stored], after_ms)
        known = {id for id, *_ in left}
        if not known:
            return stored
        again = [at for at in stored if self._ids[at] in known]
        asked = (changes.key, [self._buckets[at] for at in again], [self._ids[at] for at in again])
        yield Statement(self._statements.remove_new, asked, writes=True)
        return [at for at in stored if self._ids[at] not in known]

    def _insert(self, chosen: list[int]) -> Plan[list[int]]:
        """Store those of `chosen` whose id is not taken; answer which."""
        puts = self._puts
        rows = yield from self._numbers.take(len(chosen))
        at = np.array(chosen, dtype=np.intp)
        asked = (
            self._changes.key,
            self._changes.now_ms,
            rows,
            [self._buckets[index] for index in chosen],
            [self._ids[index] for index in chosen],
            signed(puts.birth[at]),
            puts.due_ms[at].tolist(),
            puts.expires_ms[at].tolist(),
            signed(puts.payload_sum[at]),
            puts.sizes[at].tolist(),
            puts.payloads.take(at).tolist(),
            puts.headers.take(at).tolist(),
            puts.groups.take(at).tolist(),
            puts.tags.take(at).tolist(),
        )
        ((count, stored),) = yield Statement(self._statements.put, asked, list, writes=True)
        if count == len(chosen):
            return chosen
        kept = set(stored or ())
        return [index for index, row in zip(chosen, rows, strict=True) if row in kept]


# ── settle ──

_PLAIN = (Operation.ACK, Operation.EXTEND, Operation.RELEASE)


def settle_plain(
    changes: Changes, settles: Settles, ids: list[bytes], buckets: list[int], answers: Answers
) -> Plan[Collection[int]]:
    """Settles whose token and holder match, by a statement for each operation; which were done."""
    done: list[int] = []
    for operation in _PLAIN:
        chosen = np.flatnonzero(settles.operation == operation)
        if len(chosen):
            done += yield from _settle_all(changes, settles, operation, chosen, answers)
    return done


def _settle_all(
    changes: Changes, settles: Settles, operation: Operation, chosen: Indexes, answers: Answers
) -> Plan[list[int]]:
    """Settle `chosen`, all of one operation, by one statement where token and holder match; answer which it did."""
    assert isinstance(changes.sql, PostgresqlDialect)
    statements, settings, now_ms = changes.sql.statements, changes.topic.settings, changes.now_ms
    # In one order for everybody, so that calls that meet on the same messages wait, and never for each other.
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
"""Of payloads and headers that one lease reads together; what is left is due at once (`next_due_ms`)."""


def lease_plain(
    topic: Topic, buckets: Sequence[int] | None, now_ms: int, due_before_ms: int, grants: Sequence[Grant],
    overdue_ms: int, due_from_ms: int, end_from_ms: int,
) -> Plan[LeaseOutcome | None]:  # fmt: skip
    """`Store.lease_due` by one statement; None where what was met is for the rules, and nothing was done.
    `due_from_ms`: nothing is looked for that was due before; `end_from_ms`: what runs out next does
    not do so before."""
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
    found = yield Statement(LEASE[several], asked, _first, writes=True)
    if not found["plain"]:
        return None
    leased = leased_of(found, grants)
    # A lease that ran out and was found, but not given again, ended before those that still run.
    ends_ms = [found["held_ms"], found["next_held_ms"], int(leased.rows.due_ms.min()) if len(leased.rows) else None]
    if not overdue_ms:
        times = [found["free_ms"], found["next_free_ms"]]
        times += [None if end is None else end + backoff_ms for end in ends_ms]
        if found["passed"] > 0 or found["fitting"] > len(leased.rows):
            # Somebody else is at some of them, and may leave them as they are. Not at once: a lock may last.
            times.append(now_ms + 1)
        leased.next_due_ms = earliest(times)
    return LeaseOutcome(leased, earliest(ends_ms))


def _first(rows: Sequence[Any]) -> Any:
    return rows[0]


def numbers_of(packed: bytes | None) -> Int64:
    """A column of numbers that came as one byte string."""
    return np.frombuffer(packed or b"", dtype=">i8").astype(np.int64)


def strings_of(data: bytes | None, lengths: bytes | None) -> tuple[Ragged, tuple[int, ...]]:
    """A column of byte strings that came as one, and the indexes of those that are not there at all."""
    sizes = np.frombuffer(lengths or b"", dtype=">i4").astype(np.int64)
    missing = tuple(np.flatnonzero(sizes < 0).tolist())
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(np.maximum(sizes, 0), out=offsets[1:])
    return Ragged(data or b"", offsets), missing


def leased_of(found: Any, grants: Sequence[Grant]) -> LeasedRows:
    """What `LEASE` leased, in the order of the deal; without `next_due_ms`."""
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
    return leased if bool((order[1:] > order[:-1]).all()) else _sorted(leased, np.argsort(order))


def _sorted(leased: LeasedRows, order: Indexes) -> LeasedRows:
    """The same in another order: no server promises that of its aggregates."""
    place = {int(old): new for new, old in enumerate(order)}
    return LeasedRows(
        leased.rows.take(order),
        leased.grant[order],
        leased.was_due_ms[order],
        leased.prior_holders.take(order),
        None,
        damaged=tuple(sorted(place[at] for at in leased.damaged)),
    )


# ── by tag ──

TAGGED_AT_ONCE = 2_000
"""Messages of one statement: it has them locked until it is done, and others want the server, too."""


def mutate_tag(changes: Changes, mutation: TagMutation, cursor: bytes, limit: int) -> Plan[TagStep]:
    """`Store.mutate_tag`."""
    assert isinstance(changes.sql, PostgresqlDialect)
    limit = min(limit, TAGGED_AT_ONCE)
    moves, dry_run = mutation.operation is Operation.MOVE, mutation.dry_run
    remembers = bool(changes.topic.settings.remember_ms) and not moves and not dry_run
    asked: list[Any] = [changes.key, mutation.tag, *place_after(cursor), limit, mutation.started_ms]
    asked += [mutation.group, changes.now_ms]
    op = signed_one(mutation.op)
    asked += [op, mutation.due_ms, mutation.by_ms, mutation.latest_ms] if moves else [mutation.leased]
    if remembers:
        asked.append(op)
    statement = changes.sql.statements.by_tag[mutation.operation, dry_run, remembers]
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
    """What something may refuse: by the rules; where somebody was faster, the message is read again."""

    def look(left: list[bytes] | None) -> Plan[Iterable[FoundColumns]]:
        asked = ids if left is None else left
        buckets = buckets_of(Ragged.of(asked), changes.topic.settings.buckets).tolist()
        return changes.sql.find(changes.key, list(zip(buckets, asked, strict=True)), False)

    return mutate_tagged(changes, mutation, look, counts)
