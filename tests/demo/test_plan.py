"""The plan of a day: everything in time, shared out, and the same when it is read back."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.demo.conftest import NOW_MS
from timeline.demo.flights import DEFAULT_DAY, MINUTE_MS, Flight, flights_of
from timeline.demo.plan import (
    GATES,
    HOUR_MS,
    LEASE_MS,
    LEAST_PERIOD_MS,
    MAX_SPEED,
    MIN_SPEED,
    NOTICE_REAL_MS,
    DayPlan,
    make_plan,
    read_plan,
)
from timeline.errors import Invalid


@pytest.mark.slow
@pytest.mark.parametrize("speed", [MIN_SPEED, 60.0, 600.0, 6_000.0, MAX_SPEED])
@pytest.mark.parametrize("day", ["2013-03-08", "2013-03-10", "2013-11-03"])
def test_everything_is_in_time_at_every_speed(day: str, speed: float) -> None:
    flights = flights_of(DEFAULT_DAY.fromisoformat(day))
    plan = make_plan(flights, DEFAULT_DAY, NOW_MS, "a:1", speed)
    for filing in plan.filings:
        assert plan.begin_ms <= filing.put_ms < filing.due_ms
        if filing.notice_ms:
            # A put must be answered before its notice, a notice before the departure could be leased.
            assert filing.put_ms + 900 <= filing.notice_ms <= filing.due_ms - NOTICE_REAL_MS
        if filing.flight.late:
            assert filing.moved_ms - filing.due_ms == pytest.approx(filing.flight.delay_min * MINUTE_MS / speed, abs=1)
        assert bool(filing.notice_ms) == (filing.flight.late or filing.flight.cancelled)
        assert bool(filing.moved_ms) == filing.flight.late
    assert plan.boarding_ms < LEASE_MS / 2


def test_real_time_follows_the_days_clock(plan: DayPlan) -> None:
    clock = plan.clock
    for filing in plan.filings:
        assert filing.due_ms == math.ceil(clock.real_ms + (filing.flight.scheduled_ms - clock.day_ms) / 600)
        assert abs(clock.day(filing.due_ms) - filing.flight.scheduled_ms) <= 600
    assert clock.text(plan.filings[0].flight.scheduled_ms) == "05:00"


def test_crashes_are_spread_over_the_day_and_the_gates(plan: DayPlan) -> None:
    assert [crash.gate for crash in plan.crashes] == list(range(GATES))
    times = [crash.after_ms for crash in plan.crashes]
    assert times == sorted(times)
    assert plan.filings[0].due_ms < times[0] and times[-1] < plan.last_due_ms


def test_every_carrier_has_one_feeder(plan: DayPlan, flights: list[Flight]) -> None:
    shared = [carrier for share in plan.carriers for carrier in share]
    assert sorted(shared) == sorted({flight.carrier for flight in flights})
    assert len(plan.carriers) == 3


def test_a_day_of_one_flight_has_one_feeder_and_one_crash() -> None:
    flight = next(flight for flight in flights_of(DEFAULT_DAY) if not flight.cancelled)
    plan = make_plan([flight], DEFAULT_DAY, NOW_MS, "a:1", 6_000)
    assert len(plan.carriers) == 1 and len(plan.crashes) == 1


def test_a_day_of_cancellations_has_no_crash() -> None:
    flights = [flight for flight in flights_of(DEFAULT_DAY) if flight.cancelled]
    assert make_plan(flights, DEFAULT_DAY, NOW_MS, "a:1").crashes == ()


def test_a_plan_reads_back_as_it_was(plan: DayPlan, tmp_path: Path) -> None:
    plan.write(tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan


@pytest.mark.slow
@pytest.mark.parametrize(("speed", "hours"), [(1.0, 1), (600.0, 1), (3_600.0, 1), (3_601.0, 2), (20_000.0, 6)])
def test_the_runway_is_inspected_at_full_hours_of_the_day(flights: list[Flight], speed: float, hours: int) -> None:
    plan = make_plan(flights, DEFAULT_DAY, NOW_MS, "a:1", speed)
    planned = plan.inspections
    assert planned is not None and planned.topic == "inspections"
    assert (planned.hours, len(planned.times)) == (hours, planned.count)
    assert planned.period_ms >= LEAST_PERIOD_MS
    assert planned.times[0] >= plan.begin_ms + 3_000 and planned.times[-1] <= plan.last_due_ms
    assert planned.times[-1] + planned.period_ms > plan.last_due_ms
    if 3_600_000 % speed == 0:
        assert {plan.clock.text(plan.clock.day(at_ms))[3:] for at_ms in planned.times} == {"00"}


def test_a_day_that_is_over_at_once_has_no_inspection(flights: list[Flight]) -> None:
    flight = next(flight for flight in flights if not flight.cancelled and not flight.late)
    late_in_its_hour = replace(flight, scheduled_ms=flight.scheduled_ms // HOUR_MS * HOUR_MS + 50 * MINUTE_MS)
    assert make_plan([late_in_its_hour], DEFAULT_DAY, NOW_MS, "a:1", 60).inspections is None


@pytest.mark.parametrize("speed", [0.0, -600.0, 0.5, 20_001.0, float("inf"), float("nan")])
def test_absurd_speeds_are_refused(flights: list[Flight], speed: float) -> None:
    with pytest.raises(Invalid, match="speed must be from 1 to 20000"):
        make_plan(flights, DEFAULT_DAY, NOW_MS, "a:1", speed)
