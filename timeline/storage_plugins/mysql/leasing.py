"""Leases inside a transaction: what is due is locked, dealt and written; what others have locked is passed over."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from timeline.columns import Int64, UInt32
from timeline.model import Rows, Topic
from timeline.storage_plugins.contract import Grant, Leased
from timeline.storage_plugins.mysql import statements
from timeline.storage_plugins.mysql.connections import Session
from timeline.storage_plugins.mysql.messages import Changes
from timeline.storage_plugins.sql.dealing import MANY_GRANTS, lease
from timeline.storage_plugins.sql.rows import Part
from timeline.storage_plugins.sql.search import Search


def lease_due(
    session: Session, topic: Topic, key: int, buckets: Sequence[int] | None, now_ms: int, due_before_ms: int,
    grants: Sequence[Grant], overdue_ms: int,
) -> Leased | None:  # fmt: skip
    """`Store.lease_due`; None where the topic was dropped."""
    free, held, stands = statements.first_dues(session, key, -1, buckets)
    if not stands:
        return None
    search = _Search(Changes(session, topic, key, now_ms), buckets, due_before_ms, overdue_ms)
    search.first_free_ms, search.first_held = free, held
    wanted = sum(grant.count for grant in grants)
    eligible = search.first(wanted)
    leased = lease(
        eligible, grants, now_ms, partial(_write, session, now_ms, grants), partial(statements.contents, session)
    )
    if not overdue_ms:
        if len(leased.rows) or search.expired or search.buried:
            free, held, _ = statements.first_dues(session, key, -1, buckets)
        if held is not None:
            held += topic.settings.redelivery_backoff_ms
        leased.next_due_ms = min((time for time in (free, held) if time is not None), default=None)
        all_of_them = len(leased.rows) == len(eligible) < wanted and not search.expired and not search.buried
        if all_of_them and leased.next_due_ms is not None:
            # Somebody else is at what is due still, and may leave it as it is. Not at once: a lock may last.
            leased.next_due_ms = max(leased.next_due_ms, now_ms + 1)
    leased.expired = search.expired
    leased.buried = Rows.concat(search.buried)
    return leased


class _Search(Search[Changes]):
    """The search for what may be leased, along this store's index."""

    at_once = statements.LEASED_AT_ONCE
    first_free_ms: int | None = None
    first_held: int | None = None

    def look(self, held: bool, until_ms: int, after: tuple[int, bytes] | None, limit: int) -> Part:
        changes = self.changes
        if not held and (self.first_free_ms is None or self.first_free_ms > until_ms):
            return Part.concat([])
        found = statements.timeline_part(changes.session, changes.key, held, until_ms, after, limit, self.buckets)
        return Part.of(found)

    def first_held_ms(self) -> int | None:
        return self.first_held


def _write(
    session: Session, now_ms: int, grants: Sequence[Grant], turns: UInt32, numbers: list[int], due_ms: Int64
) -> None:
    if len(grants) > MANY_GRANTS:
        holders = [grants[turn].holder for turn in turns.tolist()]
        statements.lease_each(session, list(zip(numbers, due_ms.tolist(), holders, strict=True)))
        return
    whose = np.array(numbers, dtype=np.int64)
    for index, grant in enumerate(grants):
        statements.lease(session, whose[turns == index].tolist(), now_ms, grant.lease_ms, grant.holder)
