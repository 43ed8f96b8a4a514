"""How far ahead of their dues messages are leased, and how many at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeline.broker.dispatch.rounds import (
    FEWEST,
    MOST,
    REMEMBERED_MS,
    SHORT_MS,
    USUAL,
    DueRate,
    LeaseAhead,
    LeaseTimes,
)
from timeline.broker.limits import Limits
from timeline.model import TopicSettings

AUTO = TopicSettings()


def test_a_hot_instant_is_leased_ahead_in_growing_rounds():
    limits = Limits(ahead_messages=10, ahead_messages_per_ms=1, lease_messages=500)
    ahead, sizes = LeaseAhead(limits, cap_ms=50), []
    for _ in range(5):
        sizes.append(ahead.most(1_000, now_ms=990))
        ahead.took(sizes[-1], leased=sizes[-1])
    assert sizes == [10, 40, 160, 500, 500]
    ahead.took(500, leased=499)
    assert ahead.most(1_000, now_ms=990) == 10, "a round that did not come back full ends the instant"
    ahead.took(1, leased=1)
    assert ahead.most(1_000, now_ms=990) == 10, "little credit makes no round smaller than the first"
    ahead.took(10, leased=10)
    assert ahead.most(1_000, now_ms=1_000) == ahead.most(None, now_ms=1_000) == 500
    assert ahead.most(1_000, now_ms=990) == 10


def test_how_far_ahead_is_what_the_store_takes_or_what_was_asked_for():
    ahead = LeaseAhead(Limits(), cap_ms=50)
    assert [ahead.lead_ms(AUTO, p99) for p99 in (None, 0.2, 7.0, 7.1, 90.0)] == [50, 1, 7, 8, 40]
    assert [ahead.lead_ms(TopicSettings(lease_ahead_ms=asked), 7.1) for asked in (0, 3, 1_000, 60_000)] == [
        0,
        3,
        750,
        45_000,
    ]
    slow = LeaseAhead(Limits(lease_along_ms=10), cap_ms=1_000)
    assert [slow.lead_ms(AUTO, p99) for p99 in (None, 7.1, 400.0, 3_000.0)] == [1_000, 8, 400, 990]
    assert [slow.window_ms(AUTO, p99) for p99 in (None, 7.1, 400.0, 3_000.0)] == [1_000, 18, 800, 1_000]


def test_a_round_that_has_time_takes_more():
    ahead = LeaseAhead(Limits(ahead_messages=10, ahead_messages_per_ms=2, lease_messages=500), cap_ms=1_000)
    assert [ahead.most(1_000, now_ms) for now_ms in (999, 990, 900, 0)] == [10, 20, 200, 500]
    ahead.took(200, leased=150)
    assert ahead.most(1_000, now_ms=900) == 200, "one that leased all there was"


def test_a_round_takes_along_what_comes_due_soon_after_but_no_more_than_was_asked_for():
    ahead = LeaseAhead(Limits(lease_along_ms=10), cap_ms=50)
    assert [ahead.window_ms(AUTO, p99) for p99 in (None, 0.2, 7.1, 16.5, 45.0)] == [50, 11, 18, 34, 50]
    assert [ahead.window_ms(TopicSettings(lease_ahead_ms=asked), 7.1) for asked in (0, 3, 60_000)] == [0, 3, 60_000]


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from([0.5, 1.0, 1.5, 7.0, 90.0]), st.integers(0, 400)), min_size=1, max_size=400))
def test_the_p99_of_leases_is_that_of_the_last_ones_as_messages_meet_them(leases):
    times, mono_ms, taken = LeaseTimes(), 0.0, []
    for took_ms, after_ms in leases:
        mono_ms += after_ms
        taken.append((mono_ms, took_ms))
        times.took(took_ms, mono_ms)
    while len(taken) > FEWEST and taken[0][0] < mono_ms - REMEMBERED_MS:
        taken.pop(0)
    took = sorted((ms for _, ms in taken), reverse=True)
    longer = [sum(one for one in took if one > ms) for ms in took]
    assert times.p99_ms == min(ms for ms, held_up in zip(took, longer, strict=True) if held_up <= sum(took) * 0.01)


def test_no_more_leases_are_remembered_than_worthwhile():
    times = LeaseTimes()
    times.took(50.0, 0.0)
    for at in range(MOST - 1):
        times.took(1.0, at / 10)
    assert times.p99_ms == 50.0
    times.took(1.0, MOST / 10)
    assert times.p99_ms == 1.0


def test_one_long_lease_in_a_hundred_holds_up_more_than_one_message_in_a_hundred():
    times = LeaseTimes()
    for at in range(200):
        times.took(40.0 if at % 100 == 50 else 2.0, 10.0 * at)
    assert times.p99_ms == 40.0


def test_a_rate_is_kept_by_leasing_no_further_ahead_than_a_moment():
    slow, rated = LeaseAhead(Limits(), cap_ms=1_000), TopicSettings(max_rate_per_s=100)
    assert [slow.lead_ms(rated, p99) for p99 in (None, 7.0, 400.0)] == [SHORT_MS, 7, SHORT_MS - 10]
    assert [slow.window_ms(rated, p99) for p99 in (None, 400.0)] == [SHORT_MS, SHORT_MS]


def test_a_store_that_stood_still_once_is_not_led_by_it():
    times = LeaseTimes()
    assert times.lead_ms is None
    for at in range(100):
        times.took(1_500.0 if at == 50 else 8.0, 60_000.0 * at)
    assert times.p99_ms == 1_500.0
    assert times.lead_ms == pytest.approx(USUAL * (1_500 + 99 * 8.0) / 100)
    assert times.lead_ms < 100
    quick = LeaseTimes()
    for at in range(100):
        quick.took(40.0 if at == 50 else 1.0, 60_000.0 * at)
    assert quick.lead_ms == quick.p99_ms == 40.0
    usual = LeaseTimes()
    for at in range(100):
        usual.took(300.0 + at, 60_000.0 * at)
    assert usual.lead_ms == usual.p99_ms > 390.0


def test_the_due_rate_is_that_of_the_last_rounds():
    due_rate = DueRate()
    assert due_rate.time_ms(3) == 0, "nothing is known"
    for round_ in range(100):
        due_rate.took(5, mono_ms=round_ * 10.0)
    assert due_rate.time_ms(3) in (5, 6)
    for round_ in range(100):
        due_rate.took(1, mono_ms=1_000.0 + round_ * 20.0)
    assert due_rate.time_ms(3) == pytest.approx(60, abs=1)
    assert due_rate.time_ms(-0.5) == 0
