"""Brokers whose clocks are wrong, drift or jump, among others, in virtual time: nothing is early, and nothing stands
still."""

from __future__ import annotations

import logging

import pytest

import timeline
from tests.broker.machines import HOUR_S, Machine, Town, town
from timeline.broker.drift import RETURN_MS, Trust
from timeline.clock import ALONE_MS, CRITICAL_MS, SLEW, WARN_MS, Clock
from timeline.model import LateCause

pytestmark = pytest.mark.slow

GRAIN_MS = 0.01
"""Floats of seconds since 1970."""
LOOK_S = 0.25
MEASURE_S = 1.0


async def three(made: Town) -> tuple[Machine, Machine, Machine]:
    """Three brokers with true clocks, a topic, and a consumer at each."""
    first, second, third = [await made.broker(name) for name in ("b1", "b2", "b3")]
    await made.create_topic()
    for machine in (first, second, third):
        made.consume(f"at-{machine.name}", machine.address)
    await made.timer.wait(1.0)
    return first, second, third


def quarantined(machine: Machine) -> bool:
    return machine.node.not_ready.startswith("quarantined")


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S, 0.7])
def test_a_wall_that_jumps_at_one_of_three_is_noticed_within_a_second_and_makes_nothing_early(step_s: float) -> None:
    async def story(made: Town) -> None:
        stepped, *others = await three(made)
        await made.put([1.0, 2.0, 3.0, 30.0, 1_800.0, 3_000.0] * 10)
        stepped.away_s += step_s
        await made.until(lambda: stepped.node.clock.step_ms != 0, within_s=1.0)
        assert made.gauge(stepped, "timeline_clock_step_seconds") in (0.0, pytest.approx(step_s, abs=0.01))
        await made.until(lambda: len(made.received) == 40, within_s=31.0)
        await made.timer.wait(ALONE_MS / 1_000 * 2)
        # Others contradict it, for as long as it lasts.
        assert stepped.node.clock.step_ms == pytest.approx(step_s * 1_000, abs=1.0)
        assert not any(quarantined(machine) for machine in (stepped, *others))
        assert all(-100.0 < one.early_ms <= GRAIN_MS for one in made.received)
        assert {one.consumer for one in made.received} == {"at-b1", "at-b2", "at-b3"}, "it goes on with the others"
        stepped.away_s = 0.0
        await made.until(lambda: stepped.node.clock.step_ms == 0, within_s=1.0)

    with town() as made:
        made.run(story(made))


@pytest.mark.parametrize("away_s", [HOUR_S, -HOUR_S])
def test_a_broker_that_starts_with_a_wrong_clock_waits_until_it_is_set(away_s: float) -> None:
    async def story(made: Town) -> None:
        await three(made)
        wrong = await made.broker("b4", away_s=away_s)
        assert quarantined(wrong), "it has looked before it served"
        assert "3,600.000 s" in wrong.node.not_ready and "chrony" in wrong.node.not_ready
        made.consume("at-b4", wrong.address)
        await made.put([0.5, 1.0, 1_800.0, 3_000.0] * 5)
        with pytest.raises(timeline.Unavailable, match="quarantined"):
            await made.put([1.0], wrong.address)
        await made.until(lambda: len(made.received) == 10 and "at-b4" in made.refused, within_s=8.0)
        assert "quarantined" in made.refused["at-b4"]
        assert wrong.node.clocks.trust is Trust.QUARANTINED
        assert made.gauge(wrong, "timeline_quarantined") == 1
        assert made.gauge(wrong, "timeline_clock_median_offset_seconds") == pytest.approx(-away_s, abs=0.01)
        assert made.gauge(wrong, "timeline_clocks_compared") == 4
        assert wrong.node.membership.hosting(wrong.node.catalog.all()[0].uid).keys() == {"b1", "b2", "b3"}
        # Somebody sets it: the others confirm that, and the broker is back some seconds after.
        wrong.away_s = 0.0
        took_s = await made.until(lambda: not wrong.node.not_ready, within_s=30.0)
        assert RETURN_MS / 1_000 <= took_s <= RETURN_MS / 1_000 + 4 * LOOK_S
        made.consume("at-b4", wrong.address)
        await made.until(lambda: "b4" in wrong.node.membership.hosting(wrong.node.catalog.all()[0].uid), within_s=5.0)
        await made.put([0.1] * 200)
        await made.until(lambda: len(made.received) == 210, within_s=5.0)
        assert "at-b4" in {one.consumer for one in made.received}
        assert all(one.early_ms <= GRAIN_MS for one in made.received)

    with town() as made:
        made.run(story(made))


def test_a_clock_that_drifts_warns_and_then_its_broker_gives_its_buckets_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As fast as a clock is followed at most; nothing is earlier than the bound that is declared between machines."""

    async def story(made: Town) -> None:
        *others, fast = await three(made)
        fast.pace = SLEW * 0.8
        await made.put([2.0 * at for at in range(100)])
        await made.until(lambda: fast.node.clocks.trust is Trust.WARNED, within_s=WARN_MS / (fast.pace * 1_000) + 5)
        assert not fast.node.not_ready
        assert [
            record.levelname for record in caplog.records if "ahead of the median of 3 clocks" in record.message
        ] == ["WARNING"]
        await made.until(lambda: quarantined(fast), within_s=CRITICAL_MS / (fast.pace * 1_000) + 5)
        assert not any(machine.node.not_ready for machine in others)
        left_s = made.gone_s
        await made.until(lambda: len(made.received) == 100, within_s=220.0)
        assert max(one.early_ms for one in made.received) <= CRITICAL_MS + 20.0, "S1 between machines"
        # What comes now is dealt by brokers with true clocks.
        late = [one for one in made.received if one.at_s > left_s + 1.0]
        assert late and max(one.early_ms for one in late) <= GRAIN_MS
        assert min(one.early_ms for one in late) > -100.0

    with town() as made, caplog.at_level(logging.INFO, "timeline.broker"):
        made.run(story(made))


def test_where_all_walls_jump_nobody_can_say_and_all_follow_after_a_minute() -> None:
    async def story(made: Town) -> None:
        machines = await three(made)
        await made.put([10.0, 1_800.0])
        for machine in machines:
            machine.away_s += HOUR_S
        # None of the three knows better than the others; no majority of walls that jumped at once makes a truth.
        await made.timer.wait(ALONE_MS / 1_000 - 1.0)
        assert all(machine.node.clock.step_ms == pytest.approx(HOUR_S * 1_000, abs=1.0) for machine in machines)
        assert [one.early_ms <= GRAIN_MS for one in made.received] == [True]
        await made.until(lambda: all(machine.node.clock.step_ms == 0 for machine in machines), within_s=5.0)
        await made.until(lambda: len(made.received) == 2, within_s=30.0)
        assert not any(quarantined(machine) for machine in machines)

    with town() as made:
        made.run(story(made))


def test_a_quarantined_broker_does_not_come_back_because_all_others_have_gone() -> None:
    async def story(made: Town) -> None:
        first, second, _ = await three(made)
        wrong = await made.broker("b4", away_s=HOUR_S)
        await made.put([600.0])
        for machine in (first, second, made.machines["b3"]):
            made.kill(machine)
        await made.timer.wait(500.0)
        assert quarantined(wrong)
        # It is set right, which nobody can confirm: it takes a minute to believe that, and goes on.
        wrong.away_s = 0.0
        await made.until(lambda: not wrong.node.not_ready, within_s=ALONE_MS / 1_000 + RETURN_MS / 1_000 + 2.0)
        made.consume("at-b4", wrong.address)
        await made.until(lambda: len(made.received) == 1, within_s=60.0)
        assert made.received[0].early_ms <= GRAIN_MS

    with town() as made:
        made.run(story(made))


def test_with_the_store_s_clock_two_brokers_suffice_and_one_only_warns() -> None:
    async def story(made: Town) -> None:
        first = await made.broker("b1", away_s=2.0)
        assert first.node.clocks.trust is Trust.WARNED and not first.node.not_ready, "one against one"
        second = await made.broker("b2")
        await made.until(lambda: quarantined(first), within_s=2 * MEASURE_S)
        assert not quarantined(second)
        assert made.gauge(first, "timeline_clock_offset_seconds", kind="store", peer="") == pytest.approx(
            -2.0, abs=0.01
        )
        assert made.gauge(first, "timeline_clock_offset_seconds", kind="broker", peer="b2") == pytest.approx(
            -2.0, abs=0.01
        )

    with town(store_clock=True) as made:
        made.run(story(made))


def test_the_store_s_clock_confirms_a_step_unless_it_jumped_along() -> None:
    async def story(made: Town) -> None:
        alone = await made.broker("b1", away_s=-HOUR_S)
        assert not alone.node.not_ready
        alone.away_s = 0.0
        await made.until(lambda: alone.node.clock.now() == pytest.approx(made.true_ms(), abs=1.0), within_s=1.0)
        # On one machine with its store: both clocks jump, and one is no witness of the other.
        await made.timer.wait(10.0)
        alone.away_s = made.store_away_s = HOUR_S
        await made.timer.wait(ALONE_MS / 1_000 - 2.0)
        assert alone.node.clock.now() == pytest.approx(made.true_ms(), abs=1.0)
        await made.until(lambda: alone.node.clock.step_ms == 0, within_s=5.0)

    with town(store_clock=True) as made:
        made.run(story(made))


def test_lateness_while_quarantined_is_blamed_on_the_clock_and_a_drain_is_not_undone() -> None:
    async def story(made: Town) -> None:
        broker = await made.broker("b1")
        await made.create_topic()
        made.consume("c", broker.address)
        (topic,) = broker.node.catalog.all()
        dealer = broker.node.dealers.of(topic)
        dealer.stop_leasing(LateCause.CLOCK)
        await made.put([0.1])
        await made.timer.wait(2.0)
        assert not made.received
        dealer.lease_again(LateCause.CLOCK)
        await made.until(lambda: len(made.received) == 1, within_s=1.0)
        late = await made.ask(lambda client: client.late(since="1h"))
        assert [one.cause for one in late.deliveries] == [LateCause.CLOCK.name]
        dealer.stop_leasing()
        dealer.stop_leasing(LateCause.CLOCK)
        dealer.lease_again(LateCause.CLOCK)
        await made.put([0.1])
        await made.timer.wait(20.0)
        assert len(made.received) == 1

    with town() as made:
        made.run(story(made))


def test_a_consumer_whose_machine_is_off_is_told_and_its_broker_shows_it(caplog: pytest.LogCaptureFixture) -> None:
    async def story(made: Town) -> None:
        broker = await made.broker("b1")
        await made.create_topic()
        made.consume("true", broker.address)
        made.consume("off", broker.address, Clock(lambda: made.true_s() + 0.2, made.loop.time))
        await made.until(lambda: made.gauge(broker, "timeline_clients_adrift") == 1, within_s=5.0)
        assert made.gauge(broker, "timeline_clock_offset_seconds", kind="client", peer="") == pytest.approx(
            0.2, abs=0.01
        )
        assert made.gauge(broker, "timeline_clock_error_seconds", kind="client", peer="") < 0.01
        await made.timer.wait(20.0)
        said = [record.message for record in caplog.records if "clock" in record.message]
        of_driver = [each for each in said if each.startswith("this machine's clock is 0.200 s")]
        assert len(of_driver) == 1 and "ahead of broker b1's" in of_driver[0], "once"
        of_broker = [each for each in said if each.startswith("consumer 'off'")]
        assert len(of_broker) == 1, "once"

    with town() as made, caplog.at_level(logging.INFO, "timeline"):
        made.run(story(made))
