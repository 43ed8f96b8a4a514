"""A topic's limit of messages per second."""

from __future__ import annotations

import pytest

from timeline.broker.dispatch.rounds import RateLimit


def test_rate_is_even_and_bounded():
    rate = RateLimit()
    assert rate.wait_ms(0, 0.0) == 0.0
    assert rate.allowance(100, 0.0, 1_000) == 10
    rate.took(100, 10)
    assert rate.wait_ms(100, 0.0) == pytest.approx(10.0)
    assert rate.allowance(100, 50.0, 1_000) == 5
    assert rate.allowance(100, 60_000.0, 1_000) == 10  # no burst is saved up
