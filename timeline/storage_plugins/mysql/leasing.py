"""Leases inside a transaction: what is due is locked, dealt and written; what others have locked is passed over."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from timeline.columns import Int64, UInt32
from timeline.model import Rows, Topic
from timeline.storage_plugins.contract import Grant, LeasedRows
from timeline.storage_plugins.mysql import statements
from timeline.storage_plugins.mysql.connections import Later, Session
from timeline.storage_plugins.mysql.messages import Changes
from timeline.storage_plugins.mysql.statements import Reading
from timeline.storage_plugins.sql.dealing import MANY_GRANTS, lease
from timeline.storage_plugins.sql.rows import Part
from timeline.storage_plugins.sql.search import Search


def lease_due(
    session: Session, topic: Topic, key: int, buckets: Sequence[int] | None, now_ms: int, due_before_ms: int,
    grants: Sequence[Grant], overdue_ms: int,
) -> LeasedRows | None:  # fmt: skip
    """`Store.lease_due`; None where the topic was dropped."""
    wanted = sum(grant.count for grant in grants)
    search = _Search(Changes(session, topic, key, now_ms), buckets, due_before_ms, overdue_ms)
    first = partial(statements.first_dues, session, key, -1, buckets)
    asked = first()
    search.begin(wanted)
    (free, held, stands), *_ = asked.answered()[0]
    if not stands:
        return None
    search.first_held = held
    eligible = search.first(wanted)
    left: list[Later] = []

    def write(turns: UInt32, numbers: list[int], due_ms: Int64) -> None:
        _write(session, now_ms, grants, turns, numbers, due_ms)
        if not overdue_ms:
            left.append(first())  # In one exchange with the leases ahead of it and the contents behind it.

    leased = lease(eligible, grants, now_ms, write, partial(statements.contents, session))
    if not overdue_ms:
        if not left and (search.expired or search.buried):
            left.append(first())
        if left:
            (free, held, _), *_ = left[0].answered()[0]
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
    first_held: int | None = None
    _begun: Reading | None = None

    def begin(self, wanted: int) -> None:
        """Asks for what is looked for first, in one exchange with whatever else is asked."""
        if wanted:
            self._begun = self._asked(False, self.free_until_ms, None, min(wanted, self.at_once))

    def look(self, held: bool, until_ms: int, after: tuple[int, bytes] | None, limit: int) -> Part:
        if held or after is not None or self._begun is None:
            return Part.of(self._asked(held, until_ms, after, limit)())
        begun, self._begun = self._begun, None
        return Part.of(begun())

    def _asked(self, held: bool, until_ms: int, after: tuple[int, bytes] | None, limit: int) -> Reading:
        session, key = self.changes.session, self.changes.key
        return statements.timeline_part(session, key, held, until_ms, after, limit, self.buckets)

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
