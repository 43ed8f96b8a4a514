"""Where a look for what may be leased begins.

What was leased or deleted stays in an index until it is collected, by PostgreSQL's vacuum within a minute or so, by
CockroachDB within hours; and reading the timeline from its beginning means passing all of that each time. So a look
begins a little before the earliest due that the one before it left behind, and the next lease to run out is looked for
from the end of the one that was the next before. This is an optimisation and nothing else: what another broker writes
further back is found by the next look from the beginning: one that found nothing begins there again, and so does the
first of each second, and each sweep of the overdue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from timeline.model import Topic

SLACK_MS = 1_000
"""How far back a look reaches beyond that: what other brokers, by other clocks, put as due now."""
WHOLE_EVERY_MS = 1_000
"""How long looks may begin later than at the beginning."""
NEVER_MS = 1 << 62

Place = tuple[int, tuple[int, ...] | None]


@dataclass(slots=True)
class Floor:
    """`due_ms`: nothing that is due earlier may be leased. `end_ms`: no lease that runs ends earlier. `whole_ms`: when
    that was last looked at from the beginning."""

    due_ms: int
    end_ms: int
    whole_ms: int = 0

    def lower(self, due_ms: int, end_ms: int) -> None:
        """Something is due, or a lease ends, so early."""
        self.due_ms, self.end_ms = min(self.due_ms, due_ms), min(self.end_ms, end_ms)

    def holds(self, now_ms: int) -> bool:
        """Whether the next look may begin here."""
        return 0 <= now_ms - self.whole_ms < WHOLE_EVERY_MS


class Look:
    """A look, while it is under way: into what is due at `due_ms` and later, and for leases that end at `end_ms` and
    later; -1: from the beginning."""

    def __init__(self, floors: ScanFloors, place: Place, now_ms: int) -> None:
        self.place = place
        self._floors, self._now_ms = floors, now_ms
        self.due_ms = self.end_ms = -1
        if (floor := floors.standing.get(place)) and floor.holds(now_ms):
            self.due_ms, self.end_ms = floor.due_ms, floor.end_ms
        self.missed = Floor(now_ms, NEVER_MS, now_ms)
        """What was written meanwhile: it may not have been seen."""

    def __enter__(self) -> Look:
        self._floors.under_way.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._floors.under_way.discard(self)

    def begins_again(self) -> bool:
        """Has it begin at the beginning; False where it did."""
        partial = self.due_ms >= 0
        self.due_ms = self.end_ms = -1
        return partial

    def left(self, next_due_ms: int | None, end_ms: int | None, backoff_ms: int) -> None:
        """It is done, and left `next_due_ms` as the earliest due, counting what a lease leaves that runs out from
        `backoff_ms` after its end; `end_ms` is the end of the next lease to run out."""
        new = self.missed
        new.lower(NEVER_MS if next_due_ms is None else next_due_ms, NEVER_MS if end_ms is None else end_ms)
        new.due_ms = max(-1, new.due_ms - backoff_ms - SLACK_MS)
        standing = self._floors.standing
        if self.due_ms < 0:
            for place in [place for place, floor in standing.items() if not floor.holds(self._now_ms)]:
                del standing[place]
            standing[self.place] = new
        elif floor := standing.get(self.place):  # else it is forgotten
            floor.due_ms, floor.end_ms = new.due_ms, new.end_ms


class ScanFloors:
    """The floors of all topics and sets of buckets that are leased from, and the looks under way."""

    def __init__(self) -> None:
        self.standing: dict[Place, Floor] = {}
        self.under_way: set[Look] = set()

    def look(self, topic: Topic, buckets: Sequence[int] | None, now_ms: int) -> Look:
        """A look into these buckets, to be entered as a context."""
        return Look(self, (topic.uid, None if buckets is None else tuple(sorted(buckets))), now_ms)

    def lower(self, topic: Topic, due_ms: int = NEVER_MS, end_ms: int = NEVER_MS) -> None:
        """This store wrote, or may have written, what is due at `due_ms` (-1: nobody knows when), or a lease that ends
        at `end_ms`."""
        for place, floor in self.standing.items():
            if place[0] == topic.uid:
                floor.lower(due_ms, end_ms)
        for look in self.under_way:
            if look.place[0] == topic.uid:
                look.missed.lower(due_ms, end_ms)

    def forget(self) -> None:
        """Begins at the beginning again."""
        self.standing.clear()
