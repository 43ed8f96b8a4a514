"""How late deliveries are, noted one by one and many at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from tests.broker.columns import make_leased
from timeline.broker.late import LatenessCauses, LateRing, LateRows, TopicLateness, Traces
from timeline.broker.limits import Limits
from timeline.metrics import Metrics
from timeline.model import Topic, TopicSettings


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.one_of(st.integers(-3, 120), st.sampled_from([0, 1, 2, 3, 5, 10, 20, 50, 51])),
            st.integers(0, 60),
            st.booleans(),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_a_message_is_noted_alone_as_it_is_among_others(dealt: list[tuple[int, int, bool]]):
    """Of each: how late it is, by how much it was scheduled before it was due last, whether it is leased again."""
    whole = make_leased([10_000 - late_ms for late_ms, _, _ in dealt])
    whole.rows.scheduled_ms = whole.was_due_ms - np.array([before_ms for _, before_ms, _ in dealt])
    whole.again = np.array([again for _, _, again in dealt])
    told = []
    for batches in ([whole], [whole.slice(at, at + 1) for at in range(len(whole))]):
        metrics, ring = Metrics(), LateRing(100)
        lateness = TopicLateness(LatenessCauses(0), ring, metrics, Limits(), Traces("b1"))
        for batch in batches:
            lateness.note(Topic("t", 1, TopicSettings()), b"c", batch, 10_000)
        found = LateRows.concat([LateRows.blank(0), *ring.since(0, {1: "t"})])
        late = sorted(zip(found.ids, found.due_ms.tolist(), found.cause.tolist(), strict=True))
        exposed = [line for line in generate_latest(metrics.registry).decode().splitlines() if 'topic="t"' in line]
        counts = [line for line in exposed if "_sum" not in line and "_created" not in line]
        told.append((lateness.delivered, lateness.redelivered, late, counts))
        sums = [float(line.split()[1]) for line in exposed if "_sum" in line]
        seconds = [max(0, late_ms + before_ms) / 1000.0 for late_ms, before_ms, again in dealt if not again]
        assert sums == ([pytest.approx(sum(seconds))] if seconds else [])
    assert told[0] == told[1]
    assert told[0][0] == len(dealt)
