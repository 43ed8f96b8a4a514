"""What brokers make of schedules, in virtual time: each occurrence once, at its time, whatever happens to brokers."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.broker.machines import Town, town
from tests.broker.schedules.villages import START_MS, get, late_ms, schedule, times
from timeline.broker.schedules import runner
from timeline.clock import CRITICAL_MS, SLEW
from timeline.schedules.looks import Look
from timeline.schedules.record import ScheduleRecord

pytestmark = pytest.mark.slow


def each_once(there: Town, every_s: int, from_s: int, to_s: int, name: str = "s") -> None:
    """Assert that each occurrence of a period between two times was received once, and none early."""
    first = -(-(START_MS // 1_000 + from_s) // every_s) * every_s - START_MS // 1_000
    found = {at_s: count for at_s, count in times(there, name).items() if from_s <= at_s < to_s}
    assert found == Counter(range(first, to_s, every_s))
    assert all(one.early_ms <= 0 for one in there.received)


def test_each_occurrence_is_received_once_and_at_its_time() -> None:
    with town() as there:

        async def story() -> None:
            await there.broker("b1")
            await there.create_topic()
            there.consume("c")
            await schedule(there, every="10s", payload="{sequence} of {occurrence}")
            await there.timer.wait(605)

        there.run(story())
        each_once(there, 10, 1, 605)
        assert late_ms(there) < 50


@pytest.mark.parametrize(
    "fault", ["kill", *(pytest.param(fault, marks=pytest.mark.prove) for fault in ("drain", "pause"))]
)
def test_another_broker_takes_over(fault: str) -> None:
    with town() as there:

        async def story() -> None:
            first, second = await there.broker("b1"), await there.broker("b2")
            await there.create_topic()
            there.consume("c", second.address)
            for number in range(20):
                await schedule(there, f"s{number}", every="7s")
            await there.timer.wait(100)
            if fault == "kill":
                there.kill(first)
            elif fault == "drain":
                assert first.process is not None
                await first.process.run(first.node.drain(10_000))
            else:
                assert first.process is not None
                first.process.pause()
                await there.timer.wait(100)
                first.process.resume()
            await there.timer.wait(400 if fault == "pause" else 500)
            if fault == "drain" and first.process is not None:
                first.process.kill()  # only now: what its leaving began at the others runs as a part of it here

        there.run(story())
        for number in range(20):
            each_once(there, 7, 9, 600, f"s{number}")


def test_a_message_that_has_expired_holds_up_no_occurrence() -> None:
    """Nobody consumes. Each message expires just before the look that asks about it, and is removed later."""
    with town() as there:

        async def story() -> None:
            await there.broker("b1")
            await there.create_topic()
            await schedule(there, every="1m", overlap="skip", expires="58950ms")
            await there.timer.wait(600)
            state = (await get(there)).state
            assert (state.produced, state.skipped) == (10, 0)

        there.run(story())


def test_a_schedule_that_takes_long_to_plan_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan takes 20 s here, and the leases of the whole batch end after 30."""
    with town() as there:
        plan, begun = runner.plan, []

        def slow(record: ScheduleRecord, now_ms: int, unfinished: bool = False) -> Look:
            if begun and record.specification.name.startswith("slow"):
                there.loop.delay(20.0)
            return plan(record, now_ms, unfinished)

        monkeypatch.setattr(runner, "plan", slow)

        async def story() -> None:
            await there.broker("b1")
            await there.create_topic()
            there.consume("c")
            for number in range(2):
                await schedule(there, f"slow{number}", every="1h")
            await schedule(there, "quick", every="1h")
            begun.append(True)
            await there.timer.wait(2 * 3600)

        there.run(story())
        for name in ("quick", "slow0", "slow1"):
            assert len(times(there, name)) == 2


def test_a_broker_in_quarantine_looks_at_nothing_and_goes_on_afterwards() -> None:
    with town() as there:

        async def story() -> None:
            fast, *others = [await there.broker(name) for name in ("b1", "b2", "b3")]
            await there.create_topic()
            there.consume("c", others[0].address)
            for number in range(6):
                await schedule(there, f"s{number}", every="7s")
            fast.pace = SLEW * 0.8
            await there.until(lambda: bool(fast.node.readiness.quarantined), CRITICAL_MS / (fast.pace * 1_000) + 15)
            await there.timer.wait(150)
            fast.pace = 0.0
            await there.until(lambda: not fast.node.readiness.quarantined, 120)
            await there.timer.wait(5)
            for other in others:
                there.kill(other)
            there.consume("d", fast.address)
            await there.timer.wait(200)

        there.run(story())
        for number in range(6):
            found = times(there, f"s{number}")
            assert set(found.values()) == {1}
            assert sorted(found) == list(range(min(found), max(found) + 1, 7))
            assert max(found) > there.gone_s - 10


def outage(catch_up: str, down_s: int, **said: object) -> tuple[Town, object]:
    """A minute of a schedule, an outage of all brokers, and three minutes more; and the schedule then."""
    found = []
    with town() as there:

        async def story() -> None:
            machine = await there.broker("b1")
            await there.create_topic(remember="1d")
            there.consume("c")
            await schedule(there, every="1m", catch_up=catch_up, **said)
            await there.timer.wait(310)
            there.kill(machine)
            await there.timer.wait(down_s)
            await there.start(machine)
            await there.timer.wait(300)
            found.append(await get(there))

        there.run(story())
    return there, found[0]


def test_an_outage_of_a_minute_makes_nothing_missed() -> None:
    there, found = outage("none", 55)
    each_once(there, 60, 1, 665)
    assert found.state.missed == 0


@pytest.mark.parametrize(("catch_up", "missed", "caught_up"), [("none", 29, 0), ("latest", 28, 1), ("all", 0, 29)])
def test_what_an_outage_missed_is_caught_up_as_asked(catch_up: str, missed: int, caught_up: int) -> None:
    there, found = outage(catch_up, 1_800)
    assert found.state.missed == missed
    assert found.state.caught_up == caught_up
    assert set(times(there).values()) == {1}
    assert sum(times(there).values()) + missed == 40  # one lies ahead


def test_what_is_older_than_the_window_is_missed() -> None:
    _, found = outage("all", 1_800, window="10m")
    assert 9 <= found.state.caught_up <= 11
    assert found.state.caught_up + found.state.missed == 29
