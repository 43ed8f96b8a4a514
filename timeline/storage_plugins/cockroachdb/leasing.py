"""Where a search for what may be leased begins.

What was deleted stays in CockroachDB's ranges until it is collected (hours, by default), and reading the timeline from
its beginning means reading all of that each time. So a search begins a little before the earliest due that the one
before it left behind. This is an optimisation and nothing else: what another broker puts further back is found by the
next search that begins at the beginning, once a second and with each sweep of the overdue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from timeline.model import Topic

SLACK_MS = 1_000
"""How far back a search reaches beyond that: what other brokers, by other clocks, put as due now."""
WHOLE_EVERY_MS = 1_000
"""How long searches may begin later than at the beginning."""

Place = tuple[int, tuple[int, ...] | None]


@dataclass(slots=True)
class _Floor:
    """`clean_ms`: nothing earlier was left. `whole_ms`: when that was last looked at from the beginning."""

    clean_ms: int
    whole_ms: int


class Floors:
    """The floors of all topics and sets of buckets that are leased from."""

    def __init__(self) -> None:
        self._floors: dict[Place, _Floor] = {}

    def begin_ms(self, topic: Topic, buckets: Sequence[int] | None, now_ms: int) -> int:
        """From which due on to look; -1: from the beginning."""
        floor = self._floors.get(_place(topic, buckets))
        if floor is None or not 0 <= now_ms - floor.whole_ms < WHOLE_EVERY_MS:
            return -1
        return max(-1, floor.clean_ms - SLACK_MS)

    def looked(
        self, topic: Topic, buckets: Sequence[int] | None, now_ms: int, began_ms: int, next_due_ms: int | None
    ) -> None:
        """A search that began at `began_ms` left `next_due_ms` as the earliest."""
        backoff_ms = topic.settings.redelivery_backoff_ms
        clean_ms = now_ms - backoff_ms if next_due_ms is None else min(next_due_ms, now_ms) - backoff_ms
        place = _place(topic, buckets)
        floor = self._floors.get(place)
        if began_ms < 0 or floor is None:
            self._floors[place] = _Floor(clean_ms, now_ms)
        else:
            floor.clean_ms = clean_ms

    def lowered(self, topic: Topic, due_ms: int) -> None:
        """This store wrote something that is due at `due_ms`."""
        for place, floor in list(self._floors.items()):
            if place[0] == topic.uid and due_ms < floor.clean_ms:
                del self._floors[place]

    def forget(self, topic: Topic | None = None) -> None:
        """Begins at the beginning again, of one topic or of all."""
        self._floors = (
            {} if topic is None else {place: floor for place, floor in self._floors.items() if place[0] != topic.uid}
        )


def _place(topic: Topic, buckets: Sequence[int] | None) -> Place:
    return topic.uid, None if buckets is None else tuple(sorted(buckets))
