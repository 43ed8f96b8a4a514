"""Leases inside a transaction: what is due is locked, dealt and written; what others have locked is passed over."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from timeline.columns import Ragged
from timeline.leases import Ask, deal, decide
from timeline.leases.table import DELIVERED_OUT
from timeline.model import Operation, Rows, Status, Topic
from timeline.storage_plugins.contract import Grant, Leased
from timeline.storage_plugins.mysql import statements
from timeline.storage_plugins.mysql.connections import Session
from timeline.storage_plugins.mysql.messages import Changes
from timeline.storage_plugins.sqlite.leasing import Part

MOST_REMOVED = 10_000
"""Expired and delivered-out messages that one call removes before it stops looking further."""


def lease_due(
    session: Session, topic: Topic, key: int, buckets: Sequence[int] | None, now_ms: int, due_before_ms: int,
    grants: Sequence[Grant], overdue_ms: int,
) -> Leased:  # fmt: skip
    """`Store.lease_due`."""
    search = _Search(Changes(session, topic, key, now_ms), buckets, due_before_ms, overdue_ms)
    eligible = search.first(sum(grant.count for grant in grants))
    leased = _lease(session, now_ms, grants, eligible)
    if not overdue_ms:
        free, held = statements.first_dues(session, key, -1, buckets)
        if held is not None:
            held += topic.settings.redelivery_backoff_ms
        leased.next_due_ms = min((time for time in (free, held) if time is not None), default=None)
    leased.expired = search.expired
    leased.buried = Rows.concat(search.buried)
    return leased


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
        """The first `wanted` eligible messages by (due, id), of what nobody holds and what leases left."""
        changes, now_ms = self._changes, self._changes.now_ms
        free_ms = now_ms - self._overdue_ms if self._overdue_ms else max(now_ms, self._due_before_ms)
        until = [(False, free_ms)]
        held_ms = now_ms - max(changes.topic.settings.redelivery_backoff_ms, self._overdue_ms)
        if wanted:
            _, ran_out_ms = statements.first_dues(changes.session, changes.key, -1, self._buckets)
            if ran_out_ms is not None and ran_out_ms <= held_ms:
                until.append((True, held_ms))
        eligible: list[Part] = []
        after: tuple[int, bytes] | None = None
        left, removed = wanted, 0
        while left and removed < MOST_REMOVED:
            part = self._part(until, after, left)
            if not len(part):
                break
            after = (int(part.rows.due_ms[-1]), part.rows.ids[-1])
            chosen = part.take(np.array([at for at in range(len(part)) if self._may(part, at)], dtype=np.intp))
            eligible.append(chosen)
            removed += len(part) - len(chosen)
            exhausted = len(part) < left
            left -= len(chosen)
            if exhausted:
                break
        changes.write()
        return Part.concat(eligible)

    def _part(self, until: Sequence[tuple[bool, int]], after: tuple[int, bytes] | None, left: int) -> Part:
        changes = self._changes
        joined = Part.concat(
            [
                Part.of(
                    statements.timeline_part(changes.session, changes.key, held, until_ms, after, left, self._buckets)
                )
                for held, until_ms in until
            ]
        )
        if len(until) == 1:
            return joined
        due_ms, ids = joined.rows.due_ms.tolist(), joined.rows.ids.tolist()
        order = sorted(range(len(joined)), key=lambda at: (due_ms[at], ids[at]))
        return joined.take(np.array(order[:left], dtype=np.intp))

    def _may(self, part: Part, at: int) -> bool:
        """Whether one message may be leased; what is plain by a glance, the others by the rules."""
        most, expires_ms = self._changes.topic.settings.max_deliveries, int(part.rows.expires_ms[at])
        spent = bool(most) and int(part.rows.deliveries[at]) >= most
        if not spent and not 0 < expires_ms <= self._changes.now_ms:
            return True
        return self._by_rules(part.take(np.array([at], dtype=np.intp)))

    def _by_rules(self, one: Part) -> bool:
        changes, settings = self._changes, self._changes.topic.settings
        stored = one.stored()
        message = stored.message
        ask = Ask(Operation.LEASE, time_ms=1, holder=b"?", due_before_ms=self._due_before_ms)
        status = decide(message, ask, changes.now_ms, settings).status
        if status is Status.EXPIRED:
            changes.remove(one.rows.ids[0], stored)
            self.expired += 1
        elif status is Status.DEAD:
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


def _lease(session: Session, now_ms: int, grants: Sequence[Grant], eligible: Part) -> Leased:
    """Deals the eligible over the grants and writes the leases."""
    turns = deal(grants, eligible.sizes)
    eligible = eligible.take(np.arange(len(turns)))
    rows = eligible.rows
    if not len(turns):
        return Leased(Rows.empty(payload=True), turns, rows.due_ms, rows.holders, None)
    lease_ms = np.array([grant.lease_ms for grant in grants], dtype=np.int64)
    whose = np.array(eligible.numbers, dtype=np.int64)
    for index, grant in enumerate(grants):
        statements.lease(session, whose[turns == index].tolist(), now_ms, grant.lease_ms, grant.holder)
    payloads, headers, gone = statements.contents(session, eligible.numbers)
    held = dataclasses.replace(
        rows,
        due_ms=np.maximum(rows.due_ms, now_ms) + lease_ms[turns],
        version=rows.version + 1,
        deliveries=rows.deliveries + np.uint32(1),
        holders=Ragged.of([grant.holder for grant in grants]).take(turns),
        payloads=payloads,
        headers=headers,
    )
    return Leased(held, turns, rows.due_ms, rows.holders, None, damaged=tuple(gone))
