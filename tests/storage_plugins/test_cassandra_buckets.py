"""What a process knows of Cassandra's buckets: room for many topics, and each topic's without a look at the others'."""

from __future__ import annotations

from typing import Any

from timeline.storage_plugins.cassandra.bucket import KNOWN_ENTRIES, MOST_OF_ONE, Buckets
from timeline.storage_plugins.cassandra.statements import DEAD, EXPIRES


class Elsewhere:
    """A topic that nobody may compare with another."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise AssertionError("another topic's bucket was looked at")


def test_a_sweep_of_a_topic_looks_at_no_other_topics_buckets():
    buckets = Buckets()
    mine, other = buckets.of(1, [2, 0]), buckets.of(2, [0])
    assert [bucket.number for bucket in mine] == [0, 2]
    mine[1].tombstones.update({DEAD: 5, EXPIRES: 4})
    unasked: Any = Elsewhere()
    other[0].topic = unasked
    assert buckets.with_tombstones(1, 5) == [(mine[1], DEAD)]


def test_what_is_forgotten_leaves_its_room_to_others():
    buckets = Buckets()
    [first] = buckets.of(1, [0])
    assert first.room == MOST_OF_ONE
    buckets.of(2, range(2 * KNOWN_ENTRIES // MOST_OF_ONE))
    assert buckets.of(1, [0])[0] is first and first.room < MOST_OF_ONE
    buckets.forget(2)
    assert buckets.of(1, [0])[0].room == MOST_OF_ONE
    assert buckets.with_tombstones(2, 0) == []
