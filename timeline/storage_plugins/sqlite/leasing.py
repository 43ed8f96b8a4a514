"""Leases and settles inside a transaction: the hot half of a message's way."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from timeline.columns import Indexes, Int64, Ragged, UInt32
from timeline.leases import Ask, Message, deal, decide
from timeline.leases.table import DELIVERED_OUT
from timeline.model import Answers, Operation, Rows, Status, Topic, buckets_of
from timeline.storage_plugins.contract import Grant, Leased, Settles
from timeline.storage_plugins.sql import rows_of, signed, signed_one
from timeline.storage_plugins.sqlite import statements
from timeline.storage_plugins.sqlite.messages import Changes, Stored, decide_each
from timeline.storage_plugins.sqlite.statements import Columns
from timeline.storage_plugins.sqlite.writer import Transaction

MANY_GRANTS = 8
"""Up to so many grants each is written by a statement of its own, beyond by one with a due and holder for each row."""
MOST_REMOVED = 10_000
"""Expired and delivered-out messages that one call removes before it stops looking further, so that it does not hold up
everybody; what is left is due at once (`next_due_ms`)."""


@dataclass(slots=True)
class Part:
    """Messages with their row numbers and the bytes of their content."""

    rows: Rows
    numbers: list[int]
    sizes: Int64

    @classmethod
    def of(cls, found: Columns) -> Part:
        """Aggregated columns as a part."""
        rows = rows_of_columns(found)
        headers_bytes = np.array(found.numbers["headers_bytes"], dtype=np.int64)
        return cls(rows, found.numbers["row"], rows.payload_bytes.astype(np.int64) + headers_bytes)

    def __len__(self) -> int:
        return len(self.numbers)

    def stored(self) -> Stored:
        """Its only message, for the rules."""
        rows = self.rows
        seen = Message(
            birth=int(rows.birth[0]),
            version=int(rows.version[0]),
            due_ms=int(rows.due_ms[0]),
            scheduled_ms=int(rows.scheduled_ms[0]),
            asked_ms=int(rows.asked_ms[0]),
            holder=rows.holders[0],
            deliveries=int(rows.deliveries[0]),
            last_op=int(rows.last_op[0]),
            group=rows.groups[0],
            expires_ms=int(rows.expires_ms[0]),
            payload_sum=int(rows.payload_sum[0]),
            died_ms=int(rows.died_ms[0]),
            dead=rows.dead[0],
        )
        return Stored(self.numbers[0], seen, int(self.sizes[0]))

    def take(self, indexes: Indexes) -> Part:
        """The messages at `indexes`, in that order."""
        return Part(self.rows.take(indexes), [self.numbers[at] for at in indexes.tolist()], self.sizes[indexes])

    @classmethod
    def concat(cls, parts: list[Part]) -> Part:
        """The parts one after the other."""
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls(Rows.empty(), [], np.zeros(0, dtype=np.int64))
        return cls(
            Rows.concat([part.rows for part in parts]),
            [number for part in parts for number in part.numbers],
            np.concatenate([part.sizes for part in parts]),
        )


def rows_of_columns(found: Columns) -> Rows:
    """Aggregated columns of whole messages as `Rows`."""
    named = {"id": "ids", "grp": "groups", "holder": "holders", "tag": "tags", "dead": "dead"}
    return rows_of(found.numbers, {named[name]: column for name, column in found.strings.items()})


def lease_due(
    transaction: Transaction,
    topic: Topic,
    key: int,
    buckets: Sequence[int] | None,
    now_ms: int,
    due_before_ms: int,
    grants: Sequence[Grant],
    overdue_ms: int,
) -> Leased:
    """`Store.lease_due`."""
    search = _Search(Changes(transaction, topic, key, now_ms), buckets, due_before_ms, overdue_ms)
    eligible = search.first(sum(grant.count for grant in grants))
    leased = _lease(transaction, now_ms, grants, eligible)
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


class _Search:
    """Looks for what may be leased, and removes or buries what it meets that has expired or was delivered out."""

    def __init__(self, changes: Changes, buckets: Sequence[int] | None, due_before_ms: int, overdue_ms: int) -> None:
        self._changes = changes
        self._buckets = buckets
        self._overdue_ms = overdue_ms
        self._due_before_ms = due_before_ms
        self.expired = 0
        self.buried: list[Rows] = []

    def first(self, wanted: int) -> Part:
        """The first `wanted` eligible messages by (due, id). What nobody holds comes from one index, what a lease
        that ran out left from another; both are read in order and merged."""
        changes, settings = self._changes, self._changes.topic.settings
        connection, now_ms = changes.transaction.connection, changes.now_ms
        until: tuple[tuple[bool, int], ...] = (
            (False, now_ms - self._overdue_ms if self._overdue_ms else max(now_ms, self._due_before_ms)),
            (True, now_ms - max(settings.redelivery_backoff_ms, self._overdue_ms)),
        )
        ran_out_ms = statements.first_due(connection, changes.key, True, -1, self._buckets)
        if ran_out_ms is None or ran_out_ms > until[1][1]:
            until = until[:1]  # No lease ran out, as is most often so: asking for all of their columns costs more.
        eligible: list[Part] = []
        after: tuple[int, bytes] | None = None
        left, removed = wanted, 0
        while left and removed < MOST_REMOVED:
            found = [
                Part.of(columns)
                for held, until_ms in until
                if (
                    columns := statements.timeline_part(
                        connection, changes.key, held, until_ms, after, left, self._buckets
                    )
                ).count
            ]
            if not found:
                break
            part = _merged(found, left)
            after = (int(part.rows.due_ms[-1]), part.rows.ids[-1])
            chosen = self._chosen(part)
            if len(chosen):
                eligible.append(chosen)
            removed += len(part) - len(chosen)
            exhausted = len(part) < left
            left -= len(chosen)
            if exhausted:
                break
        changes.write()
        return Part.concat(eligible)

    def _chosen(self, part: Part) -> Part:
        """What of `part` may be leased. Plain messages by a glance at the columns, the others by the rules."""
        now_ms, most = self._changes.now_ms, self._changes.topic.settings.max_deliveries
        rows = part.rows
        plain = (rows.expires_ms == 0) | (rows.expires_ms > now_ms)
        if most:
            plain &= rows.deliveries < most
        if plain.all():
            return part
        for at in np.flatnonzero(~plain).tolist():
            plain[at] = self._by_rules(part, at)
        return part.take(np.flatnonzero(plain))

    def _by_rules(self, part: Part, at: int) -> bool:
        """Whether one message may be leased; removes it when it expired, buries it when it was delivered out."""
        changes, settings = self._changes, self._changes.topic.settings
        one = part.take(np.array([at], dtype=np.intp))
        stored = one.stored()
        ask = Ask(Operation.LEASE, time_ms=1, holder=b"?", due_before_ms=self._due_before_ms)
        status = decide(stored.message, ask, changes.now_ms, settings).status
        if status is Status.EXPIRED:
            changes.remove(one.rows.ids[0], stored)
            self.expired += 1
        elif status is Status.DEAD:
            message = stored.message
            bury = Ask(
                Operation.BURY,
                birth=message.birth,
                version=message.version,
                holder=message.holder,
                reason=DELIVERED_OUT,
            )
            decision = decide(message, bury, changes.now_ms, settings)
            if decision.status is Status.OK and decision.message is not None:
                changes.apply(stored, one.rows.ids[0], bury, decision)
                buried = dataclasses.replace(one.rows, dead=Ragged.of([decision.message.dead]))
                buried.died_ms = np.array([decision.message.died_ms], dtype=np.int64)
                self.buried.append(buried)
        return status is Status.OK


def _merged(parts: list[Part], limit: int) -> Part:
    """The first `limit` of the parts together, by (due, id)."""
    if len(parts) == 1:
        return parts[0]
    joined = Part.concat(parts)
    due_ms, ids = joined.rows.due_ms.tolist(), joined.rows.ids.tolist()
    order = sorted(range(len(joined)), key=lambda at: (due_ms[at], ids[at]))
    return joined.take(np.array(order[:limit], dtype=np.intp))


def _lease(transaction: Transaction, now_ms: int, grants: Sequence[Grant], eligible: Part) -> Leased:
    """Deals the eligible over the grants and writes the leases."""
    turns = deal(grants, eligible.sizes)
    if len(turns) < len(eligible):
        eligible = eligible.take(np.arange(len(turns)))
    rows = eligible.rows
    if not len(turns):
        return Leased(Rows.empty(payload=True), turns, rows.due_ms, rows.holders, None)
    lease_ms = np.array([grant.lease_ms for grant in grants], dtype=np.int64)
    due_ms = np.maximum(rows.due_ms, now_ms) + lease_ms[turns]
    _write_leases(transaction, now_ms, grants, turns, eligible.numbers, due_ms)
    payloads, headers, gone = statements.contents(transaction.connection, eligible.numbers, eligible.sizes.tolist())
    holders = [grant.holder for grant in grants]
    held = dataclasses.replace(
        rows,
        due_ms=due_ms,
        version=rows.version + 1,
        deliveries=rows.deliveries + np.uint32(1),
        holders=Ragged.repeat(holders[0], len(turns)) if len(grants) == 1 else Ragged.of(holders).take(turns),
        payloads=payloads,
        headers=headers,
    )
    return Leased(held, turns, rows.due_ms, rows.holders, None, damaged=tuple(gone))


def _write_leases(
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
        asks = [_ask(settles, at) for at in left]
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


def _ask(settles: Settles, at: int) -> Ask:
    return Ask(
        Operation(int(settles.operation[at])),
        time_ms=int(settles.time_ms[at]),
        birth=int(settles.birth[at]),
        version=int(settles.version[at]),
        holder=settles.holders[at],
        op=int(settles.op[at]),
        unseen=bool(settles.unseen[at]),
        reason=settles.reasons[at],
    )
