"""A lease by the rules: what may be leased is looked for along the timeline and dealt over the grants; what has expired
or was delivered out is put away on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from timeline.columns import Ragged
from timeline.leases import Ask, Decision, Message, deal, decide
from timeline.leases.table import DELIVERED_OUT
from timeline.model import Operation, Rows, Status, TopicSettings
from timeline.storage_plugins.contract import Grant, LeasedRows
from timeline.storage_plugins.sql.dialect import Changes, LeasedContent
from timeline.storage_plugins.sql.rows import FoundColumns, MessageBatch
from timeline.storage_plugins.sql.statements import Plan, Statement

MOST_REMOVED = 10_000
"""Expired and delivered-out messages that one call removes before it stops looking further, so that it does not hold up
everybody; what is left is due at once (`next_due_ms`)."""
MANY_GRANTS = 8
"""Up to so many grants each is written by a statement of its own, beyond by one with a due and holder for each row."""


@dataclasses.dataclass(frozen=True, slots=True)
class LeaseOutcome:
    """What was leased, and the end of the lease that runs out next."""

    leased: LeasedRows
    end_ms: int | None = None

    @property
    def nothing(self) -> bool:
        """Whether nothing was leased, nor removed on the way."""
        leased = self.leased
        return not (len(leased.rows) or leased.expired or len(leased.buried))


def earliest(times: Iterable[int | None]) -> int | None:
    """The earliest of the times that there are."""
    return min((time for time in times if time is not None), default=None)


class TimelineSearch:
    """Looks for what may be leased, and removes or buries what it meets that has expired or was delivered out. `after`:
    beyond which (due, id) it begins; None: at the beginning."""

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
        """The first `limit` messages by (due, id) that are still before the search: those nobody holds, or those with a
        holder."""
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
        """The first `wanted` eligible messages by (due, id). What nobody holds comes from one index, what a lease
        that ran out left from another; both are read in order and merged. `ran_out`: whether to look at the second at
        all. `begun`: what the first look has found already."""
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
        """Whether a lease that ended so early, as the first one, leaves something to lease. That is seldom, and asking
        for all of their columns costs more than asking for the first end."""
        return end_ms is not None and end_ms <= self._held_until_ms

    def _chosen(self, batch: MessageBatch) -> MessageBatch:
        """What of `batch` may be leased. Plain messages by a glance at the columns, the others by the rules."""
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
        """Whether one message may be leased; removes it when it expired, buries it when it was delivered out."""
        changes, settings = self._changes, self._changes.topic.settings
        stored = one.only()
        lease = Ask(Operation.LEASE, time_ms=1, holder=b"?", due_before_ms=self._due_before_ms)
        status = decide(stored.message, lease, changes.now_ms, settings).status
        if status is Status.EXPIRED:
            changes.remove(stored)
            self._expired.append(stored.id)
        elif status is Status.DEAD:
            ask, decision = _burial(stored.message, changes.now_ms, settings)
            if decision.status is Status.OK and decision.message is not None:
                changes.apply(stored, ask, decision)
                died_ms = np.array([decision.message.died_ms], dtype=np.int64)
                dead = Ragged.of([decision.message.dead])
                self._buried.append(dataclasses.replace(one.rows, dead=dead, died_ms=died_ms))
        return status is Status.OK


def _burial(message: Message, now_ms: int, settings: TopicSettings) -> tuple[Ask, Decision]:
    """The burial of a message that was delivered out."""
    ask = Ask(
        Operation.BURY,
        birth=message.birth,
        version=message.version,
        holder=message.holder,
        reason=DELIVERED_OUT,
    )
    return ask, decide(message, ask, now_ms, settings)


def lease_due(
    changes: Changes, buckets: Sequence[int] | None, due_before_ms: int, grants: Sequence[Grant], overdue_ms: int,
    due_from_ms: int | None = None,
) -> Plan[LeaseOutcome | None]:  # fmt: skip
    """`Store.lease_due`, whatever is met; None where the topic was dropped. `due_from_ms`: nothing is looked for that
    was due before."""
    sql, key, now_ms = changes.sql, changes.key, changes.now_ms
    wanted = sum(grant.count for grant in grants)
    after = None if due_from_ms is None else (due_from_ms, b"")
    search = TimelineSearch(changes, buckets, due_before_ms, overdue_ms, after)
    dues = sql.first_dues(key, -1 if due_from_ms is None else due_from_ms - 1, buckets)
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
        lease_ms = np.array([grant.lease_ms for grant in grants], dtype=np.int64)
        until_ms = np.maximum(batch.rows.due_ms, now_ms) + lease_ms[turns]
        content, answered = yield from sql.lease(changes, batch, turns, until_ms, grants, again)
        told = answered if again is not None else told
        holders = [grant.holder for grant in grants]
        held = Ragged.repeat(holders[0], len(turns)) if len(grants) == 1 else Ragged.of(holders).take(turns)
        rows = dataclasses.replace(
            batch.rows,
            due_ms=until_ms,
            version=batch.rows.version + 1,
            deliveries=batch.rows.deliveries + np.uint32(1),
            holders=held,
        )
        leased = _leased(content, rows, LeasedRows(rows, turns, batch.rows.due_ms, batch.rows.holders, None))
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
        # Somebody else is at what is due still, and may leave it as it is. Not at once: a lock may last.
        leased.next_due_ms = max(leased.next_due_ms, now_ms + 1)
    return LeaseOutcome(leased, end_ms)


def _leased(content: LeasedContent, rows: Rows, leased: LeasedRows) -> LeasedRows:
    """`leased` with its content, and without what somebody else was faster at."""
    if content.done is not None and len(content.done) < len(rows):
        done = np.array(content.done, dtype=np.intp)
        leased = LeasedRows(
            rows.take(done), leased.grant[done], leased.was_due_ms[done], leased.prior_holders.take(done), None
        )
    leased.rows.payloads, leased.rows.headers = content.payloads, content.headers
    leased.damaged = content.gone
    return leased
