"""What the metrics of a broker say of its schedules."""

from __future__ import annotations

import pytest

from tests.broker.machines import TOPIC, Machine, Town, town
from tests.broker.schedules.villages import START_MS, change, schedule


def counted(machine: Machine, outcome: str) -> float | None:
    """How many occurrences had this outcome."""
    found: float | None = machine.node.metrics.registry.get_sample_value(
        "timeline_schedule_occurrences_total", {"topic": TOPIC, "outcome": outcome}
    )
    return found


def states(there: Town, machine: Machine) -> dict[str, float | None]:
    """How many schedules are in each state."""
    names = ("active", "paused", "ended", "waiting")
    return {name: there.gauge(machine, "timeline_schedules", topic=TOPIC, state=name) for name in names}


@pytest.mark.slow
def test_metrics_say_what_was_produced_and_which_schedules_there_are() -> None:
    with town() as there:

        async def story() -> None:
            machine = await there.broker("b1")
            await there.create_topic()
            assert counted(machine, "missed") == 0, "it begins before something is missed"
            await schedule(there, "minutes", every="1m")
            await schedule(there, "days", every="1d")
            await schedule(there, "never", every="1d", end=START_MS + 1_000)
            await schedule(there, "paused", every="1m", paused=True)
            await schedule(there, "deleted", every="1d")
            await change(there, "delete", "deleted")
            await there.timer.wait(100)
            assert (counted(machine, "produced"), counted(machine, "missed")) == (4, 0)  # two minutes ahead
            assert states(there, machine) == {"active": 2, "paused": 1, "ended": 1, "waiting": 0}
            last_s = there.gauge(machine, "timeline_schedule_last_timestamp_seconds", topic=TOPIC)
            next_s = there.gauge(machine, "timeline_schedule_next_timestamp_seconds", topic=TOPIC)
            now_s = there.true_s()
            assert last_s is not None and now_s - 101 < last_s <= now_s
            assert next_s is not None and now_s < next_s < now_s + 180
            assert there.gauge(machine, "timeline_schedule_overdue_seconds", topic=TOPIC) == 0
            await there.ask(lambda client: client.drop_topic(TOPIC))
            await there.timer.wait(100)

        there.run(story())


@pytest.mark.slow
def test_a_topic_that_is_gone_has_no_gauges_of_schedules() -> None:
    with town() as there:

        async def story() -> None:
            machine = await there.broker("b1")
            await there.create_topic()
            await schedule(there, "days", every="1d")
            await there.timer.wait(100)
            assert states(there, machine)["active"] == 1
            await change(there, "delete", "days")
            await there.ask(lambda client: client.drop_topic(TOPIC))
            await there.timer.wait(100)
            assert set(states(there, machine).values()) == {None}

        there.run(story())
