"""What a real broker fires when the clocks of its schedules' zone are set back and forward, with clocks that go fast
under libfaketime. scripts/clock_changes.py shows the same of others beside it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.faults.clock_changes import ONE, TIMELINE, TWO, across
from tests.services import require_service

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

DAYS = {
    # Clocks in New York go from 2:00 EDT to 1:00 EST at 6:00 UTC: 1:30 comes twice.
    datetime(2026, 11, 1, 5, 27, tzinfo=UTC): [(ONE, "1:30 EDT")],
    # And from 2:00 EST to 3:00 EDT at 7:00 UTC: 2:30 is skipped.
    datetime(2026, 3, 8, 6, 27, tzinfo=UTC): [(ONE, "1:30 EST"), (TWO, "3:30 EDT")],
}


@pytest.mark.prove
@pytest.mark.parametrize("begin", DAYS, ids=["fall-back", "spring-forward"])
async def test_a_time_that_comes_twice_fires_once_and_a_skipped_one_an_hour_later(
    begin: datetime, tmp_path: Path
) -> None:
    require_service("faketime")
    fired = await across(TIMELINE, begin, begin + timedelta(minutes=68), tmp_path)
    assert [(one.rule, one.shown) for one in fired] == DAYS[begin]
