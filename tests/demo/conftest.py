"""A small day: some of the default day's flights, late, cancelled and on time among them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from timeline.demo.flights import DEFAULT_DAY, Flight, flights_of
from timeline.demo.plan import DayPlan, WebhookPlan, make_plan

NOW_MS = 1_700_000_000_000


@pytest.fixture
def flights() -> list[Flight]:
    """Every tenth flight of the default day: 98 of them."""
    return flights_of(DEFAULT_DAY)[::10]


@pytest.fixture
def plan(flights: list[Flight]) -> DayPlan:
    """Those flights at 600× real time, long ago."""
    plan = make_plan(flights, DEFAULT_DAY, NOW_MS, "localhost:9000")
    return replace(plan, webhook=WebhookPlan("localhost:9080", "whsec_MDEyMzQ1Njc4OWFiY2RlZg=="))
