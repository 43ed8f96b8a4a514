"""How far a machine's clock is off its broker's, as a driver reckons it, and what it says of that."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeline.clock import WARN_MS
from timeline.driver.consume.broker_clock import BrokerClock, Drift

START_MS = 1_700_000_000_000.0
travels = st.floats(0.0, 3_000.0)


@pytest.mark.slow
@given(
    st.floats(-3_600_000.0, 3_600_000.0),
    st.floats(-3_600_000.0, 3_600_000.0),
    st.lists(st.tuples(st.floats(1.0, 5_000.0), travels, travels), min_size=1, max_size=20),
)
def test_the_truth_lies_within_what_is_said(
    broker_away_ms: float, ours_away_ms: float, beats: list[tuple[float, float, float]]
) -> None:
    """Whatever the ways there and back take; a broker says whole milliseconds, rounded down."""
    clock, mono_ms = BrokerClock(), 5_000.0
    assert clock.ahead(START_MS, mono_ms) is None
    for rest_ms, there_ms, back_ms in beats:
        mono_ms += rest_ms
        sent_ms = mono_ms
        broker_ms = int((sent_ms + there_ms + START_MS + broker_away_ms) // 1)
        mono_ms += there_ms + back_ms
        clock.sent(sent_ms, broker_ms, mono_ms)
        ahead = clock.ahead(mono_ms + START_MS + ours_away_ms, mono_ms)
        assert ahead is not None
        ahead_ms, error_ms = ahead
        assert abs(ahead_ms - (ours_away_ms - broker_away_ms)) <= error_ms + 0.01
        assert error_ms <= (there_ms + back_ms + 1) / 2 + 0.01


def test_a_machine_that_is_off_is_told_once_and_once_more_when_it_is_set(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "timeline.driver")
    drift = Drift()
    for ahead_ms, error_ms in ((0.0, 0.5), (49.0, 0.5), (-300.0, 280.0), (60.0, 15.0)):
        drift.note("b1", ahead_ms, error_ms)
    assert not caplog.records, "what is not sure is not said"
    for _ in range(3):
        drift.note("b1", -WARN_MS - 1, 0.5)
        drift.note("b1", -WARN_MS * 0.6, 0.5)
    drift.note("b1", 2.0, 0.5)
    drift.note("b1", 2.0, 0.5)
    assert [(record.levelname, record.message.partition(":")[0]) for record in caplog.records] == [
        ("WARNING", "this machine's clock is 0.051 s (give or take 0.001 s) behind broker b1's"),
        ("INFO", "this machine's clock is set"),
    ]
