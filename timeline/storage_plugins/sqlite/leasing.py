"""Leases and settles inside a transaction: the hot half of a message's way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from timeline.columns import Indexes, Int64, UInt32
from timeline.model import Answers, Operation, Rows, Topic, buckets_of
from timeline.storage_plugins.asks import settle_ask
from timeline.storage_plugins.contract import Grant, LeasedRows, Settles
from timeline.storage_plugins.sql import signed, signed_one
from timeline.storage_plugins.sql.changes import decide_each
from timeline.storage_plugins.sql.dealing import MANY_GRANTS, lease
from timeline.storage_plugins.sql.rows import Columns, Part
from timeline.storage_plugins.sql.search import Search
from timeline.storage_plugins.sqlite import statements
from timeline.storage_plugins.sqlite.messages import Changes
from timeline.storage_plugins.sqlite.writer import Transaction


def lease_due(
    transaction: Transaction,
    topic: Topic,
    key: int,
    buckets: Sequence[int] | None,
    now_ms: int,
    due_before_ms: int,
    grants: Sequence[Grant],
    overdue_ms: int,
) -> LeasedRows:
    """`Store.lease_due`."""
    search = _Search(Changes(transaction, topic, key, now_ms), buckets, due_before_ms, overdue_ms)
    eligible = search.first(sum(grant.count for grant in grants))
    leased = lease(
        eligible,
        grants,
        now_ms,
        partial(_write, transaction, now_ms, grants),
        partial(statements.contents, transaction.connection),
    )
    if not overdue_ms:
        leased.next_due_ms = _next_lease_ms(transaction, topic, key, buckets)
    leased.expired = search.expired
    leased.buried = Rows.concat(search.buried)
    return leased


def _next_lease_ms(transaction: Transaction, topic: Topic, key: int, buckets: Sequence[int] | None) -> int | None:
    """The earliest time at which more may become leasable."""
    free = statements.first_due(transaction.connection, key, False, -1, buckets)
    held = statements.first_due(transaction.connection, key, True, -1, buckets)
    if held is not None:
        held += topic.settings.redelivery_backoff_ms
    return min((time for time in (free, held) if time is not None), default=None)


class _Search(Search[Changes]):
    """The search for what may be leased, along this store's indexes."""

    def look(self, held: bool, until_ms: int, after: tuple[int, bytes] | None, limit: int) -> Part:
        changes = self.changes
        return Part.of(
            statements.timeline_part(
                changes.transaction.connection, changes.key, held, until_ms, after, limit, self.buckets
            )
        )

    def first_held_ms(self) -> int | None:
        return statements.first_due(self.changes.transaction.connection, self.changes.key, True, -1, self.buckets)


def _write(
    transaction: Transaction, now_ms: int, grants: Sequence[Grant], turns: UInt32, numbers: list[int], due_ms: Int64
) -> None:
    connection = transaction.connection
    if len(grants) > MANY_GRANTS:
        holders = [grants[turn].holder for turn in turns.tolist()]
        statements.lease_each(connection, (numbers, due_ms.tolist(), holders))
        return
    whose = np.array(numbers, dtype=np.int64)
    for index, grant in enumerate(grants):
        mine = numbers if len(grants) == 1 else whose[turns == index].tolist()
        if mine:
            connection.execute(statements.LEASE, (now_ms, grant.lease_ms, grant.holder, json.dumps(mine)))


def settle(transaction: Transaction, topic: Topic, key: int, now_ms: int, settles: Settles) -> Answers:
    """`Store.settle`. Acks and extends whose token matches are done by columns, everything else by the rules."""
    count = len(settles)
    answers = Answers.blank(count)
    ids = settles.ids.tolist()
    buckets = buckets_of(settles.ids, topic.settings.buckets).tolist()
    changes = Changes(transaction, topic, key, now_ms)
    left = list(range(count))
    if len(set(ids)) == count:
        plain = (settles.operation == Operation.ACK) | (settles.operation == Operation.EXTEND)
        chosen = np.flatnonzero(plain)
        if len(chosen):
            done = _settle_plain(changes, settles, ids, buckets, chosen, answers)
            left = [] if len(done) == count else sorted(set(left).difference(done))
    if left:
        asks = [settle_ask(settles, at) for at in left]
        decide_each(changes, [ids[at] for at in left], [buckets[at] for at in left], asks, answers, left)
        changes.write()
    return answers


def _settle_plain(
    changes: Changes, settles: Settles, ids: list[bytes], buckets: list[int], chosen: Indexes, answers: Answers
) -> list[int]:
    """Acks and extends of living messages whose token and holder match. Answers which were done."""
    connection, now_ms = changes.transaction.connection, changes.now_ms
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
    if bool((settles.operation[chosen] == Operation.ACK).all()) and not changes.topic.settings.remember_ms:
        return _ack_plain(changes, columns, answers)
    done: list[int] = []
    for found in statements.find_holding(connection, changes.key, columns):
        place = np.array(found.numbers["n"], dtype=np.intp)
        due_ms = np.array(found.numbers["due_ms"], dtype=np.int64)
        late = due_ms <= now_ms
        acks = settles.operation[place] == Operation.ACK
        if acks.any():
            done += place[acks].tolist()
            answers.late[place[acks]] = late[acks]
            _remove_acked(changes, settles, ids, found, np.flatnonzero(acks))
        expires_ms = np.array(found.numbers["expires_ms"], dtype=np.int64)
        extends = ~acks & ~(late & (expires_ms > 0) & (expires_ms <= now_ms))
        if extends.any():
            row = np.array(found.numbers["row"], dtype=np.int64)[extends]
            where = place[extends]
            until_ms = np.maximum(due_ms[extends], settles.time_ms[where])
            statements.extend(connection, (row.tolist(), until_ms.tolist()))
            answers.version[where] = settles.version[where]
            answers.due_ms[where] = until_ms
            done += where.tolist()
    return done


def _ack_plain(changes: Changes, columns: Sequence[Sequence[Any]], answers: Answers) -> list[int]:
    """A batch of acks alone, where nothing is remembered: what is read back is the least that will do."""
    done: list[int] = []
    for found in statements.find_acked(changes.transaction.connection, changes.key, changes.now_ms, columns):
        numbers = found.numbers
        answers.late[numbers["n"]] = numbers["late"]
        statements.delete_messages(changes.transaction.connection, numbers["row"])
        changes.transaction.orphan(numbers["row"], numbers["size"])
        done += numbers["n"]
    return done


def _remove_acked(changes: Changes, settles: Settles, ids: list[bytes], found: Columns, chosen: Indexes) -> None:
    """Removes the acknowledged messages at `chosen`, remembering them where the topic does."""
    numbers = {name: np.array(column, dtype=np.int64)[chosen].tolist() for name, column in found.numbers.items()}
    transaction = changes.transaction
    statements.delete_messages(transaction.connection, numbers["row"])
    transaction.orphan(numbers["row"], numbers["size"])
    if changes.topic.settings.remember_ms:
        place, count = numbers["n"], len(numbers["n"])
        statements.remember(
            transaction.connection,
            (
                [changes.key] * count,
                [ids[at] for at in place],
                [signed_one(int(settles.birth[at])) for at in place],
                [int(settles.version[at]) for at in place],
                numbers["payload_sum"],
                [0] * count,
                [changes.now_ms] * count,
            ),
        )
