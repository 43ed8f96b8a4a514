"""Where a look for messages to lease begins.

Leased and deleted messages stay in an index until they are collected: about a minute until PostgreSQL's vacuum, hours
in CockroachDB. A look from the beginning of the timeline passes all of them each time. So a look begins a little before
the earliest due time that the one before it left. Likewise it looks for the next lease to run out from the end of the
one before. This is only an optimisation. The next look from the beginning finds messages that another broker wrote
further back. A look that found nothing begins there again. So do the first look of each second and each sweep of
overdue messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from timeline.model import Topic

SLACK_MS = 1_000
"""How far before that a look begins: other brokers, by other clocks, put messages as due now."""
WHOLE_EVERY_MS = 1_000
"""How long looks may skip the beginning."""
NEVER_MS = 1 << 62

Place = tuple[int, tuple[int, ...] | None]


@dataclass(slots=True)
class Floor:
    """`due_ms`: the earliest due time of a message to lease. `end_ms`: the earliest end of a running lease. `whole_ms`:
    the time of the last look from the beginning."""

    due_ms: int
    end_ms: int
    whole_ms: int = 0

    def lower(self, due_ms: int, end_ms: int) -> None:
        """Note an earlier due time or end of a lease."""
        self.due_ms, self.end_ms = min(self.due_ms, due_ms), min(self.end_ms, end_ms)

    def holds(self, now_ms: int) -> bool:
        """Return whether the next look may begin here."""
        return 0 <= now_ms - self.whole_ms < WHOLE_EVERY_MS


class Look:
    """A look under way: for messages due at `due_ms` or later, and for leases that end at `end_ms` or later; -1: from
    the beginning."""

    def __init__(self, floors: ScanFloors, place: Place, now_ms: int) -> None:
        self.place = place
        self._floors, self._now_ms = floors, now_ms
        self.due_ms = self.end_ms = -1
        if (floor := floors.standing.get(place)) and floor.holds(now_ms):
            self.due_ms, self.end_ms = floor.due_ms, floor.end_ms
        self.missed = Floor(now_ms, NEVER_MS, now_ms)
        """The earliest times written during the look, which may not have seen them."""

    def __enter__(self) -> Look:
        self._floors.under_way.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._floors.under_way.discard(self)

    def begins_again(self) -> bool:
        """Start again from the beginning; return False if this look did."""
        partial = self.due_ms >= 0
        self.due_ms = self.end_ms = -1
        return partial

    def left(self, next_due_ms: int | None, end_ms: int | None, backoff_ms: int) -> None:
        """Note the end of the look. `next_due_ms`: the earliest due time that is left, where a lease that runs out
        counts from `backoff_ms` after its end. `end_ms`: the end of the next lease to run out."""
        new = self.missed
        new.lower(NEVER_MS if next_due_ms is None else next_due_ms, NEVER_MS if end_ms is None else end_ms)
        new.due_ms = max(-1, new.due_ms - backoff_ms - SLACK_MS)
        standing = self._floors.standing
        if self.due_ms < 0:
            for place in [place for place, floor in standing.items() if not floor.holds(self._now_ms)]:
                del standing[place]
            standing[self.place] = new
        elif floor := standing.get(self.place):  # else another call has removed it
            floor.due_ms, floor.end_ms = new.due_ms, new.end_ms


class ScanFloors:
    """The floors of all topics and sets of buckets, and the looks under way."""

    def __init__(self) -> None:
        self.standing: dict[Place, Floor] = {}
        self.under_way: set[Look] = set()

    def look(self, topic: Topic, buckets: Sequence[int] | None, now_ms: int) -> Look:
        """Return a look into these buckets, to be entered as a context."""
        return Look(self, (topic.uid, None if buckets is None else tuple(sorted(buckets))), now_ms)

    def lower(self, topic: Topic, due_ms: int = NEVER_MS, end_ms: int = NEVER_MS) -> None:
        """Note that this store may have written a message due at `due_ms` (-1: not known), or a lease that ends at
        `end_ms`."""
        for place, floor in self.standing.items():
            if place[0] == topic.uid:
                floor.lower(due_ms, end_ms)
        for look in self.under_way:
            if look.place[0] == topic.uid:
                look.missed.lower(due_ms, end_ms)

    def forget(self) -> None:
        """Forget all floors: the next looks begin at the beginning."""
        self.standing.clear()
