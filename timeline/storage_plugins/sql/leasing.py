"""A lease by the rules: messages are looked for along the timeline and dealt over the grants. Messages that have
expired, or were delivered too often, are removed or buried on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from timeline.columns import Ragged, UInt32
from timeline.leases import Ask, deal, decide
from timeline.leases.table import DELIVERED_OUT
from timeline.model import Operation, Rows, Status
from timeline.storage_plugins.contract import Grant, LeasedRows
from timeline.storage_plugins.sql.dialect import Changes
from timeline.storage_plugins.sql.rows import FoundColumns, MessageBatch
from timeline.storage_plugins.sql.statements import Plan, Statement

MOST_REMOVED = 10_000
"""Expired and delivered-out messages that one call removes before it stops looking further, so that others need not
wait for it. The rest is due at once (`next_due_ms`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class LeaseOutcome:
    """The leased messages, and the end of the lease that runs out next."""

    leased: LeasedRows
    end_ms: int | None = None

    @property
    def nothing(self) -> bool:
        """Whether nothing was leased or removed."""
        leased = self.leased
        return not (len(leased.rows) or leased.expired or len(leased.buried))


def earliest(times: Iterable[int | None]) -> int | None:
    """Return the earliest time; None if there is none."""
    return min((time for time in times if time is not None), default=None)


class TimelineSearch:
    """Looks for messages that may be leased. Removes or buries those on its way that have expired or were delivered
    out. `after`: the (due, id) beyond which it begins; None: at the beginning."""

    def __init__(
        self, changes: Changes, buckets: Sequence[int] | None, due_before_ms: int, overdue_ms: int,
        after: tuple[int, bytes] | None,
    ) -> None:  # fmt: skip
        now_ms = changes.now_ms
        backoff_ms = changes.topic.settings.redelivery_backoff_ms
        self._changes = changes
        self._buckets = buckets
        self._due_before_ms = due_before_ms
        self._after = after
        self._free_until_ms = now_ms - overdue_ms if overdue_ms else max(now_ms, due_before_ms)
        self._held_until_ms = now_ms - max(backoff_ms, overdue_ms)
        self._expired: list[bytes] = []
        self._buried: list[Rows] = []
        self.expired = 0
        self.buried: list[Rows] = []

    def look(self, held: bool, limit: int) -> Statement:
        """Return the statement that reads the next `limit` messages by (due, id): those without a holder, or those
        with one."""
        sql, changes = self._changes.sql, self._changes
        query = sql.query(changes.key)
        index, predicate = ("message_held", sql.held) if held else ("message_free", sql.free)
        until_ms = self._held_until_ms if held else self._free_until_ms
        source = f"{sql.along(index)} WHERE m.topic {query.topic} AND {predicate} AND m.{sql.due} <= {query(until_ms)}"
        if self._after is not None:
            source += f" AND {sql.beyond(query, (f'm.{sql.due}', 'm.id'), self._after)}"
        source += sql.in_buckets(query, self._buckets)
        source += f" ORDER BY m.{sql.due}, m.id LIMIT {query(limit)}"
        return sql.messages(query, source, not held, sql.passing)

    def first(self, wanted: int, ran_out: bool, begun: FoundColumns | None) -> Plan[MessageBatch]:
        """Return the first `wanted` eligible messages by (due, id). One index has those without a holder, another one
        those whose lease ran out; both are read in order and merged. `ran_out`: whether to look at the second at all.
        `begun`: what the first look has found already."""
        eligible: list[MessageBatch] = []
        left, removed = wanted, 0
        while left and removed < MOST_REMOVED:
            asked = min(left, self._changes.sql.most_rows)
            found = [begun if begun is not None else (yield self.look(False, asked))]
            begun = None
            if ran_out:
                found.append((yield self.look(True, asked)))
            parts = [MessageBatch.of(columns) for columns in found if columns.count]
            if not parts:
                break
            batch = MessageBatch.merged(parts, asked)
            self._after = (int(batch.rows.due_ms[-1]), batch.rows.ids[-1])
            chosen = self._chosen(batch)
            if len(chosen):
                eligible.append(chosen)
            removed += len(batch) - len(chosen)
            left -= len(chosen)
            if len(batch) < asked:
                break
        lost = yield from self._changes.write()
        self.expired = sum(id not in lost for id in self._expired)
        self.buried = [rows for rows in self._buried if rows.ids[0] not in lost]
        return MessageBatch.concat(eligible)

    def ran_out(self, end_ms: int | None) -> bool:
        """Return whether there is a message to lease whose lease ran out, if the first lease ends at `end_ms`. There
        seldom is, and reading all of their columns costs more than reading the first end."""
        return end_ms is not None and end_ms <= self._held_until_ms

    def _chosen(self, batch: MessageBatch) -> MessageBatch:
        """Return the messages of `batch` that may be leased: plain ones by their columns, the others by the rules."""
        now_ms, most = self._changes.now_ms, self._changes.topic.settings.max_deliveries
        rows = batch.rows
        plain = (rows.expires_ms == 0) | (rows.expires_ms > now_ms)
        if most:
            plain &= rows.deliveries < most
        if plain.all():
            return batch
        for at in np.flatnonzero(~plain).tolist():
            plain[at] = self._by_rules(batch.take(np.array([at], dtype=np.intp)))
        return batch.take(np.flatnonzero(plain))

    def _by_rules(self, one: MessageBatch) -> bool:
        """Return whether one message may be leased. Remove it if it expired; bury it if it was delivered out."""
        changes, settings = self._changes, self._changes.topic.settings
        stored = one.only()
        lease = Ask(Operation.LEASE, time_ms=1, holder=b"?", due_before_ms=self._due_before_ms)
        status = decide(stored.message, lease, changes.now_ms, settings).status
        if status is Status.EXPIRED:
            changes.remove(stored)
            self._expired.append(stored.id)
        elif status is Status.DEAD:
            was = stored.message
            ask = Ask(Operation.BURY, 0, was.birth, was.version, was.holder, reason=DELIVERED_OUT)
            decision = decide(was, ask, changes.now_ms, settings)
            if decision.status is Status.OK and decision.message is not None:
                changes.apply(stored, ask, decision)
                died_ms = np.array([decision.message.died_ms], dtype=np.int64)
                dead = Ragged.of([decision.message.dead])
                self._buried.append(dataclasses.replace(one.rows, dead=dead, died_ms=died_ms))
        return status is Status.OK


def lease_due(
    changes: Changes, buckets: Sequence[int] | None, due_before_ms: int, grants: Sequence[Grant], overdue_ms: int,
    due_from_ms: int | None = None,
) -> Plan[LeaseOutcome | None]:  # fmt: skip
    """Return `Store.lease_due`, whatever it meets; None if the topic was dropped. `due_from_ms`: the earliest due time
    to look for."""
    sql, key, now_ms = changes.sql, changes.key, changes.now_ms
    wanted = sum(grant.count for grant in grants)
    after = None if due_from_ms is None else (due_from_ms, b"")
    search = TimelineSearch(changes, buckets, due_before_ms, overdue_ms, after)
    dues = sql.first_dues(key, -1 if due_from_ms is None else due_from_ms - 1, buckets, sql.stands(changes))
    told: Sequence[int | None] | None = None
    begun, ran_out = None, True
    if sql.asks_first:
        if wanted:
            told, begun = yield dues, search.look(False, min(wanted, sql.most_rows))
        else:
            told = yield dues
        assert told is not None
        if not told[2]:
            return None
        ran_out = search.ran_out(told[1])
    eligible = (yield from search.first(wanted, ran_out, begun)) if wanted else MessageBatch.concat([])
    turns = deal(grants, eligible.sizes)
    changed = len(turns) or search.expired or search.buried
    again = dues if not overdue_ms and (changed or told is None) else None
    if len(turns):
        batch = eligible if len(turns) == len(eligible) else eligible.take(np.arange(len(turns)))
        leased, answered = yield from _leased(changes, batch, turns, grants, again)
        told = told if again is None else answered
    else:
        leased = LeasedRows.empty()
        told = told if again is None else (yield again)
    leased.expired = search.expired
    if search.buried:
        leased.buried = Rows.concat(search.buried)
    if overdue_ms or told is None:
        return LeaseOutcome(leased)
    free_ms, end_ms = told[:2]
    leased.next_due_ms = earliest(
        (free_ms, None if end_ms is None else end_ms + changes.topic.settings.redelivery_backoff_ms)
    )
    all_of_them = len(leased.rows) == len(eligible) < wanted and not search.expired and not search.buried
    if sql.passing and all_of_them and leased.next_due_ms is not None:
        # Another call has locked due messages, and may leave them as they are. Not at once: a lock may last.
        leased.next_due_ms = max(leased.next_due_ms, now_ms + 1)
    return LeaseOutcome(leased, end_ms)


def _leased(
    changes: Changes, batch: MessageBatch, turns: UInt32, grants: Sequence[Grant], also: Statement | None
) -> Plan[tuple[LeasedRows, Any]]:
    """Write leases as dealt. Return what was leased, with its content, and the answer of `also`."""
    was, count = batch.rows, len(turns)
    lease_ms = np.array([grant.lease_ms for grant in grants], dtype=np.int64)
    until_ms = np.maximum(was.due_ms, changes.now_ms) + lease_ms[turns]
    content, answered = yield from changes.sql.lease(changes, batch, turns, until_ms, grants, also)
    holders = [grant.holder for grant in grants]
    rows = dataclasses.replace(
        was,
        due_ms=until_ms,
        version=was.version + 1,
        deliveries=was.deliveries + np.uint32(1),
        holders=Ragged.repeat(holders[0], count) if len(grants) == 1 else Ragged.of(holders).take(turns),
    )
    leased = LeasedRows(rows, turns, was.due_ms, was.holders, None)
    if content.done is not None and len(content.done) < count:  # another call was faster at the others
        leased = leased.take(np.array(content.done, dtype=np.intp))
    leased.rows.payloads, leased.rows.headers = content.payloads, content.headers
    leased.damaged = content.gone
    return leased, answered
