"""The first messages of a topic by due, without reading all of them: a scan comes in no order."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection

import numpy as np

import timeline
from timeline.model import MAX_DURATION_MS, State

STEPS = 1_000
FINEST_MS = 1_000
SOON_MS = 1_000
"""What comes due while the scan begins is available by then."""
SPARE = 1_000
"""So many entries beyond those asked for are kept before the later ones are thrown away."""

Look = Callable[[int | None], AsyncIterator[timeline.StoredMessage]]
"""Begins a scan of what is due before a time in ms (None: of all)."""


def by_due(entry: timeline.StoredMessage) -> tuple[int, str]:
    """The order of a timeline."""
    return entry.due_ms, entry.id


async def earliest(look: Look, limit: int, before_ms: int | None) -> tuple[list[timeline.StoredMessage], bool]:
    """The first `limit` entries by due, of those due before `before_ms`; and whether there are more."""
    kept: list[timeline.StoredMessage] = []
    more = False
    async for entry in look(before_ms):
        kept.append(entry)
        if len(kept) > limit + SPARE:
            kept.sort(key=by_due)
            del kept[limit:]
            more = True
    kept.sort(key=by_due)
    return kept[:limit], more or len(kept) > limit


async def bound_ms(tl: timeline.Timeline, topic: str, limit: int, states: Collection[State]) -> int | None:
    """A time before which more than `limit` messages in `states` (none given: all but dead letters) are due, as early
    as a few counts can tell; None when there are not so many, or nobody can say."""
    if not set(states) <= {State.WAITING, State.AVAILABLE}:
        return None  # leases and dead letters are not counted by due
    waiting, available = (not states or state in states for state in (State.WAITING, State.AVAILABLE))
    window_ms = MAX_DURATION_MS
    while True:
        step_ms = max(1, -(-window_ms // STEPS))
        outlook = await tl.forecast(topic, window_ms / 1000, step_ms / 1000)
        if not outlook.exact:
            return None
        due = outlook.overdue if available else 0
        if due > limit or not waiting:
            return int(outlook.edges_ms[0]) + SOON_MS
        enough = np.flatnonzero(due + np.cumsum(outlook.counts) > limit)
        if not len(enough):
            return None
        first = int(enough[0])
        if first or step_ms <= FINEST_MS:
            return int(outlook.edges_ms[first + 1])
        window_ms = int(outlook.edges_ms[1] - outlook.edges_ms[0])
