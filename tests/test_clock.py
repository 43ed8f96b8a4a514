"""The clock against a machine whose wall and monotonic clocks are ours to set."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeline.clock import ALONE_MS, SLEW, STEP_MS, Clock, StepVerdict

LOOK_MS = 250.0
HOUR_MS = 3_600_000.0
START_MS = 1_700_000_000_000.0
# A float of seconds near 1.7e9 is good to about a quarter of a microsecond.
GRAIN_MS = 0.001


class Machine:
    """A wall clock that can be stepped and drifts, and a monotonic one that does neither."""

    def __init__(self, drift: float = 0.0) -> None:
        self.wall_ms, self.mono_ms, self.drift = START_MS, 5_000.0, drift
        self.clock = Clock(lambda: self.wall_ms / 1000, lambda: self.mono_ms / 1000)

    def passes(self, ms: float) -> None:
        self.mono_ms += ms
        self.wall_ms += ms * (1 + self.drift)

    def watch(self, ms: float, verdict: StepVerdict = StepVerdict.OPEN) -> Iterator[float]:
        """`ms` pass, with a look every 250 ms; how far the wall is ahead of our time after each."""
        for _ in range(round(ms / LOOK_MS)):
            self.passes(LOOK_MS)
            self.clock.observe(lambda _: verdict)
            yield self.wall_ms - self.clock.now()


@pytest.mark.parametrize("step_ms", [HOUR_MS, -HOUR_MS, STEP_MS + 1, -STEP_MS - 1])
def test_a_step_is_noticed_at_the_next_look_and_not_followed_for_a_minute(step_ms: float) -> None:
    machine = Machine()
    machine.wall_ms += step_ms
    before = machine.clock.now()
    passed = 0.0
    for behind_ms in machine.watch(ALONE_MS):
        passed += LOOK_MS
        assert behind_ms == pytest.approx(step_ms, abs=GRAIN_MS)
        assert machine.clock.now() == pytest.approx(before + passed, abs=GRAIN_MS)
        assert machine.clock.step_ms == pytest.approx(step_ms, abs=GRAIN_MS)
    # A minute after it was first seen, which was one look after it happened.
    assert list(machine.watch(LOOK_MS)) == pytest.approx([0.0], abs=GRAIN_MS)
    assert machine.clock.step_ms == 0


@pytest.mark.parametrize("difference_ms", [300.0, -300.0])
def test_what_was_being_slewed_away_rests_while_a_step_stands(difference_ms: float) -> None:
    machine = Machine()
    machine.wall_ms += difference_ms
    list(machine.watch(1_000))
    machine.wall_ms += HOUR_MS
    list(machine.watch(LOOK_MS))
    before = machine.clock.now()
    list(machine.watch(30_000))
    assert machine.clock.now() == pytest.approx(before + 30_000, abs=GRAIN_MS)


@pytest.mark.parametrize("step_ms", [HOUR_MS, -HOUR_MS])
def test_a_confirmed_step_is_followed_at_once(step_ms: float) -> None:
    machine = Machine()
    machine.wall_ms += step_ms
    assert list(machine.watch(LOOK_MS, StepVerdict.CONFIRMED)) == pytest.approx([0.0], abs=GRAIN_MS)
    assert machine.clock.step_ms == 0


@pytest.mark.parametrize("step_ms", [HOUR_MS, -HOUR_MS])
def test_a_step_that_others_deny_is_not_followed_and_begins_anew_once_nobody_does(step_ms: float) -> None:
    machine = Machine()
    machine.wall_ms += step_ms
    assert list(machine.watch(3 * ALONE_MS, StepVerdict.DENIED)) == pytest.approx([step_ms] * 720, abs=GRAIN_MS)
    assert machine.clock.step_ms == pytest.approx(step_ms, abs=GRAIN_MS)
    assert list(machine.watch(ALONE_MS - LOOK_MS))[-1] == pytest.approx(step_ms, abs=GRAIN_MS)
    assert list(machine.watch(LOOK_MS)) == pytest.approx([0.0], abs=GRAIN_MS)


def test_the_verdict_is_asked_of_the_very_step_that_is_followed() -> None:
    """A second jump on top of one that was confirmed is another one."""
    machine = Machine()
    asked: list[float] = []

    def judge(step_ms: float) -> StepVerdict:
        asked.append(step_ms)
        return StepVerdict.CONFIRMED if step_ms < HOUR_MS / 2 else StepVerdict.OPEN

    machine.wall_ms += 2_000
    machine.wall_ms += HOUR_MS
    machine.clock.observe(judge)
    assert asked == pytest.approx([HOUR_MS + 2_000], abs=GRAIN_MS)
    assert machine.clock.step_ms == pytest.approx(HOUR_MS + 2_000, abs=GRAIN_MS)
    machine.wall_ms -= HOUR_MS
    machine.clock.observe(judge)
    assert machine.clock.step_ms == 0
    assert machine.wall_ms - machine.clock.now() == pytest.approx(0.0, abs=GRAIN_MS)


def test_a_step_that_is_taken_back_leaves_no_trace() -> None:
    machine = Machine()
    machine.wall_ms += HOUR_MS
    list(machine.watch(30_000))
    machine.wall_ms -= HOUR_MS
    assert list(machine.watch(LOOK_MS)) == pytest.approx([0.0], abs=GRAIN_MS)
    assert machine.clock.step_ms == 0
    machine.wall_ms += HOUR_MS
    assert all(behind > HOUR_MS / 2 for behind in machine.watch(ALONE_MS))


def test_a_wall_that_jumps_about_is_not_followed_while_it_does() -> None:
    machine = Machine()
    sign = 1
    for _ in range(10):
        machine.wall_ms += sign * HOUR_MS * 3
        sign = -sign
        machine.wall_ms += HOUR_MS
        assert all(abs(behind) > HOUR_MS / 2 for behind in machine.watch(30_000))


@pytest.mark.parametrize("difference_ms", [STEP_MS, 200.0, 3.0, -3.0, -200.0, -STEP_MS])
def test_a_small_difference_is_slewed_away_no_faster_than_allowed(difference_ms: float) -> None:
    machine = Machine()
    machine.wall_ms += difference_ms
    left = abs(difference_ms)
    for behind_ms in machine.watch(abs(difference_ms) / SLEW + 2 * LOOK_MS):
        assert abs(behind_ms) <= left + GRAIN_MS
        assert left - abs(behind_ms) <= SLEW * LOOK_MS + GRAIN_MS
        assert behind_ms * difference_ms >= -GRAIN_MS  # it never swings past the wall
        left = abs(behind_ms)
    assert left <= GRAIN_MS


@pytest.mark.parametrize("drift", [0.0005, -0.0005, 0.004, -0.004])
def test_drift_is_followed(drift: float) -> None:
    machine = Machine(drift)
    furthest = max(abs(behind) for behind in machine.watch(600_000))
    assert furthest <= 2 * abs(drift) * LOOK_MS + GRAIN_MS


def test_a_drift_that_slewing_cannot_follow_becomes_a_step_in_the_end() -> None:
    """A wall that runs 2 % fast is lost at 1.5 % a second; no more than a minute's worth is ever missed."""
    machine = Machine(0.02)
    bound_ms = STEP_MS + 0.02 * (ALONE_MS + 2 * LOOK_MS)
    assert all(-GRAIN_MS <= behind <= bound_ms for behind in machine.watch(600_000))


moves = st.lists(
    st.tuples(
        st.floats(0, 5_000),
        st.one_of(st.just(0.0), st.floats(-STEP_MS / 2, STEP_MS / 2)),
        st.booleans(),
    ),
    max_size=40,
)


@pytest.mark.slow
@given(moves, st.floats(-0.001, 0.001))
def test_while_no_step_is_followed_it_never_runs_back_nor_faster_than_allowed(
    moves: list[tuple[float, float, bool]], drift: float
) -> None:
    """Looked at as often as one likes, just before and just after each look at the wall."""
    machine = Machine(drift)
    clock = machine.clock
    last_ms, last_mono_ms = clock.now(), machine.mono_ms
    for ms, nudge_ms, look in moves:
        machine.wall_ms += nudge_ms
        for part in (ms / 2, ms / 2):
            machine.passes(part)
            if look and abs(machine.wall_ms - clock.now()) <= STEP_MS:
                before = clock.now()
                clock.observe()
                assert clock.now() == pytest.approx(before, abs=GRAIN_MS)
            now_ms, elapsed_ms = clock.now(), machine.mono_ms - last_mono_ms
            assert (1 - SLEW) * elapsed_ms - GRAIN_MS <= now_ms - last_ms <= (1 + SLEW) * elapsed_ms + GRAIN_MS
            last_ms, last_mono_ms = now_ms, machine.mono_ms


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0, 120_000), st.floats(-2 * HOUR_MS, 2 * HOUR_MS)), max_size=6))
def test_it_is_never_ahead_of_every_wall_that_was_shown(steps: list[tuple[float, float]]) -> None:
    """What it says is at most 500 ms past what the wall said, or would say had it not been stepped: nothing is early
    by more than that."""
    machine = Machine()
    shifts = [0.0]
    for ms, step_ms in steps:
        machine.wall_ms += step_ms
        shifts.append(machine.wall_ms - START_MS - (machine.mono_ms - 5_000.0))
        for _ in machine.watch(ms):
            unstepped = START_MS + machine.mono_ms - 5_000.0
            assert machine.clock.now() <= unstepped + max(shifts) + GRAIN_MS
            assert machine.clock.now() >= unstepped + min(shifts) - GRAIN_MS


def test_a_clock_that_nobody_looks_after_goes_on_by_the_monotonic_clock() -> None:
    machine = Machine()
    machine.wall_ms += 300
    machine.clock.observe()
    machine.passes(10 * HOUR_MS)
    assert machine.wall_ms - machine.clock.now() == pytest.approx(0, abs=GRAIN_MS)


def test_it_answers_by_how_much_the_wall_was_ahead() -> None:
    machine = Machine()
    assert machine.clock.observe() == pytest.approx(0, abs=GRAIN_MS)
    machine.wall_ms += 80
    assert machine.clock.observe() == pytest.approx(80, abs=GRAIN_MS)
    machine.wall_ms += HOUR_MS
    assert machine.clock.observe() == pytest.approx(HOUR_MS + 80, abs=GRAIN_MS)


def test_now_ms_rounds_down() -> None:
    machine = Machine()
    machine.passes(0.999)
    assert machine.clock.now_ms() == int(START_MS)
    machine.passes(0.002)
    assert machine.clock.now_ms() == int(START_MS) + 1


def test_durations_are_monotonic() -> None:
    machine = Machine()
    machine.wall_ms -= HOUR_MS
    machine.passes(5)
    assert machine.clock.monotonic_ms() == pytest.approx(5_005, abs=GRAIN_MS)


def test_by_default_it_reads_the_machines_clocks() -> None:
    assert Clock.__init__.__defaults__ == (time.time, time.monotonic)
    low = time.monotonic() * 1000
    assert low <= Clock().monotonic_ms() <= time.monotonic() * 1000


class Busy(Machine):
    """A machine on which others have the core for `held_up_ms` after each reading of a clock, but for the first
    `held_up_from`."""

    def __init__(self, held_up_ms: float = 0.0, held_up_from: int = 0) -> None:
        super().__init__()
        self.held_up_ms, self.held_up_from = held_up_ms, held_up_from
        self.clock = Clock(lambda: self.read("wall_ms"), lambda: self.read("mono_ms"))

    def read(self, name: str) -> float:
        value: float = getattr(self, name) / 1000
        self.held_up_from -= 1
        if self.held_up_from < 0:
            self.passes(self.held_up_ms)
        return value


@pytest.mark.parametrize("held_up_ms", [0.25, 1.25, 20.0, 800.0])
@pytest.mark.parametrize("away_ms", [0.0, 0.4, 90.0, -90.0])
def test_a_process_that_is_held_up_while_it_looks_is_neither_early_nor_led_astray(
    held_up_ms: float, away_ms: float
) -> None:
    """Whatever comes between the two clocks is no difference between them."""
    machine = Busy()
    machine.wall_ms += away_ms
    for _ in range(40):
        before_ms = machine.wall_ms - machine.clock.now()
        machine.held_up_ms = held_up_ms
        machine.clock.observe()
        machine.held_up_ms = 0.0
        after_ms = machine.wall_ms - machine.clock.now()
        assert machine.clock.step_ms == 0
        assert after_ms == pytest.approx(before_ms, abs=SLEW * 12 * held_up_ms + GRAIN_MS)
        machine.passes(LOOK_MS)
        behind_ms = machine.wall_ms - machine.clock.now()
        assert min(0.0, away_ms) - GRAIN_MS <= behind_ms <= max(0.0, away_ms) + GRAIN_MS
    list(machine.watch(90.0 / SLEW + 2 * LOOK_MS))
    assert machine.wall_ms - machine.clock.now() == pytest.approx(0.0, abs=GRAIN_MS)


@pytest.mark.parametrize("held_up_from", range(4))
def test_a_clock_that_is_made_while_others_have_the_core_is_not_late_for_it(held_up_from: int) -> None:
    """One undisturbed look of a few is enough: a late clock would soon be followed as a step."""

    class Hiccup(Busy):
        def read(self, name: str) -> float:
            self.held_up_ms = 900.0 if self.held_up_from == 0 else 0.0
            return super().read(name)

    machine = Hiccup(held_up_from=held_up_from)
    assert machine.wall_ms - machine.clock.now() == pytest.approx(0.0, abs=GRAIN_MS)


def test_on_this_machine_it_is_never_ahead_of_a_wall_that_is_read_after_it() -> None:
    """What one process takes for due is due by the clock of any other that looks later."""
    clock = Clock()
    for _ in range(500):
        clock.observe()
        now_ms = clock.now_ms()
        assert now_ms <= time.time() * 1000 + GRAIN_MS
