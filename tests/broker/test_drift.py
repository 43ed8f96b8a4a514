"""Rules about clocks, held against worlds whose true times are known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from timeline.broker.drift import (
    CLOCKS,
    FRESH_MS,
    RETURN_MS,
    SAMPLES,
    TRANSITIONS,
    WANDER,
    ClockFinding,
    ClockJudgement,
    ClockSamples,
    Offset,
    Trust,
    Witness,
    compare,
    find,
    judge_step,
    sample,
)
from timeline.clock import ALONE_MS, CRITICAL_MS, STEP_MS, StepVerdict

START_MS = 1_700_000_000_000.0
HOUR_MS = 3_600_000.0
travels = st.floats(0.0, 5_000.0)
aways = st.floats(-HOUR_MS, HOUR_MS)


# ── one exchange ──


@given(aways, travels, travels, travels)
def test_the_truth_lies_within_the_error_of_an_exchange(
    away_ms: float, there_ms: float, held_ms: float, back_ms: float
) -> None:
    """Whatever the ways there and back take, and whatever the other does in between."""
    sent_ms = 5_000.0
    less_ours_ms = START_MS + away_ms
    received_ms = sent_ms + there_ms + less_ours_ms
    answered_ms = received_ms + held_ms
    arrived_ms = sent_ms + there_ms + held_ms + back_ms
    got = sample(sent_ms, received_ms, answered_ms, arrived_ms)
    assert got is not None
    assert abs(got.less_ours_ms - less_ours_ms) <= got.error_ms
    assert got.error_ms <= (there_ms + back_ms) / 2 + WANDER * (arrived_ms - sent_ms) + 0.01


@pytest.mark.parametrize(
    ("received_ms", "answered_ms"),
    [(START_MS + 5, START_MS + 4), (START_MS, START_MS + 20), (START_MS, START_MS - 1e6)],
)
def test_an_exchange_that_cannot_have_been_says_nothing(received_ms: float, answered_ms: float) -> None:
    """The other's clock was set while it answered."""
    assert sample(1_000.0, received_ms, answered_ms, 1_010.0) is None


# ── a window of them ──


class Clockwork:
    """Another clock, which goes by its own pace, and exchanges with it."""

    def __init__(self, away_ms: float, pace: float) -> None:
        self.now_ms, self.away_ms, self.pace = 5_000.0, away_ms, pace
        self.window = ClockSamples()

    @property
    def less_ours_ms(self) -> float:
        return START_MS + self.away_ms + self.pace * self.now_ms

    def exchange(self, after_ms: float, there_ms: float, back_ms: float) -> None:
        self.now_ms += after_ms
        sent_ms = self.now_ms
        self.now_ms += there_ms
        read_ms = self.now_ms + self.less_ours_ms
        self.now_ms += back_ms
        got = sample(sent_ms, read_ms, read_ms, self.now_ms)
        if got is not None:
            self.window.take(got)


exchanges = st.lists(st.tuples(st.floats(0.0, 9_000.0), travels, travels), min_size=1, max_size=2 * SAMPLES)
paces = st.floats(-WANDER * 0.99, WANDER * 0.99)


@pytest.mark.slow
@given(aways, paces, exchanges, st.floats(0.0, FRESH_MS - 1))
def test_the_best_of_a_window_holds_the_truth_and_is_no_worse_than_the_newest(
    away_ms: float, pace: float, made: list[tuple[float, float, float]], later_ms: float
) -> None:
    other = Clockwork(away_ms, pace)
    for after_ms, there_ms, back_ms in made:
        other.exchange(after_ms, there_ms, back_ms)
        newest_ms = (there_ms + back_ms) * (0.5 + WANDER)
        best = other.window.best(other.now_ms)
        assert best is not None and best.error_at(other.now_ms) <= newest_ms + 0.01
    assert other.window.set_at_ms is None, "it was never set, and was not taken to be"
    other.now_ms += later_ms
    assert other.window.fresh(other.now_ms) and not other.window.fresh(other.now_ms + FRESH_MS + 1)
    ours_ms = START_MS + other.now_ms
    offset = other.window.offset(other.now_ms, ours_ms)
    assert offset is not None
    true_ms = other.now_ms + other.less_ours_ms - ours_ms
    assert offset.low_ms - 0.01 <= true_ms <= offset.high_ms + 0.01
    assert offset.sure_ms <= abs(true_ms) + 0.01


@pytest.mark.slow
@given(aways, exchanges, st.floats(60.0, HOUR_MS), st.booleans())
def test_a_clock_that_was_set_is_noticed_at_the_next_exchange(
    away_ms: float, made: list[tuple[float, float, float]], step_ms: float, back: bool
) -> None:
    other = Clockwork(away_ms, 0.0)
    for after_ms, there_ms, back_ms in made:
        other.exchange(after_ms, there_ms % 5, back_ms % 5)
    assert other.window.steady(other.now_ms)
    other.away_ms += -step_ms if back else step_ms
    other.exchange(1_000.0, 1.0, 1.0)
    best = other.window.best(other.now_ms)
    assert best is not None and abs(best.less_ours_ms - other.less_ours_ms) <= best.error_at(other.now_ms) + 0.01
    if step_ms > 2 * (5 + WANDER * 2 * SAMPLES * 10_000.0):
        assert not other.window.steady(other.now_ms)
        assert other.window.steady(other.now_ms + ALONE_MS + 1)


def test_an_empty_window_says_nothing() -> None:
    window = ClockSamples()
    assert window.best(0.0) is None and window.offset(0.0, START_MS) is None
    assert not window.fresh(0.0) and window.steady(0.0)


# ── among many ──


def middles(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]


def seen(true_ms: Sequence[float], errors_ms: Sequence[float], shares: Sequence[float]) -> list[Offset]:
    """What was measured of clocks that are ahead by `true_ms`: off by a share of its error, each."""
    return [
        Offset.about(true + share * error, error) for true, error, share in zip(true_ms, errors_ms, shares, strict=True)
    ]


worlds = st.integers(0, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(-3_000.0, 3_000.0), min_size=n, max_size=n),
        st.lists(st.floats(0.0, 400.0), min_size=n, max_size=n),
        st.lists(st.floats(-1.0, 1.0), min_size=n, max_size=n),
    )
)


@pytest.mark.slow
@given(worlds)
def test_the_median_lies_within_its_range_and_nothing_is_sure_that_is_not_true(
    world: tuple[list[float], list[float], list[float]],
) -> None:
    true_ms, errors_ms, shares = world
    compared = compare(seen(true_ms, errors_ms, shares))
    lower_ms, upper_ms = middles([0.0, *true_ms])
    assert compared.clocks == len(true_ms) + 1
    assert compared.lower.low_ms - 1e-6 <= lower_ms <= compared.lower.high_ms + 1e-6
    assert compared.upper.low_ms - 1e-6 <= upper_ms <= compared.upper.high_ms + 1e-6
    assert compared.median in (compared.lower, compared.upper)
    assert compared.outvoted_ms <= max(0.0, lower_ms, -upper_ms) + 1e-6
    assert compared.median.sure_ms <= max(abs(lower_ms), abs(upper_ms)) + 1e-6
    assert compared.outvoted_ms <= compared.median.sure_ms


@pytest.mark.slow
@given(worlds)
@example(([-CRITICAL_MS, CRITICAL_MS], [0.0, 0.0], [0.0, 0.0]))
def test_nobody_is_outvoted_who_is_with_half_of_all(world: tuple[list[float], list[float], list[float]]) -> None:
    """Quarantine must never empty a cluster most of which agrees."""
    true_ms, errors_ms, shares = world
    finding = find(compare(seen(true_ms, errors_ms, shares)))
    every = [0.0, *true_ms]
    with_us = sum(abs(one) < CRITICAL_MS for one in every)
    if 2 * with_us >= len(every) or len(every) < CLOCKS:
        assert finding is not ClockFinding.OUTVOTED
    if len(every) == 1:
        assert finding is ClockFinding.ALONE


@pytest.mark.slow
@given(
    st.integers(2, 6),
    st.floats(CRITICAL_MS, HOUR_MS),
    st.floats(0.0, 400.0),
    st.data(),
    st.booleans(),
)
def test_who_is_off_from_all_others_to_one_side_is_outvoted(
    others: int, off_ms: float, error_ms: float, data: st.DataObject, behind: bool
) -> None:
    sign = 1.0 if behind else -1.0
    spread = data.draw(st.lists(st.floats(0.0, 1_000.0), min_size=others, max_size=others))
    sure_ms = off_ms + 2 * error_ms + 1e-6
    measured = [Offset.about(sign * (sure_ms + apart), error_ms) for apart in spread]
    compared = compare(measured)
    assert find(compared) is ClockFinding.OUTVOTED
    assert compared.median.ahead_ms * sign > 0


def test_two_halves_that_disagree_quarantine_nobody_and_warn_everybody() -> None:
    for others in ([0.0, 600.0, 600.0], [600.0], [-600.0], [0.0, 0.0, 600.0, 600.0, 600.0]):
        compared = compare([Offset.about(one, 1.0) for one in others])
        assert find(compared) is ClockFinding.FAR
        assert abs(compared.median.ahead_ms) == 600.0


@pytest.mark.parametrize(
    ("off_ms", "finding"),
    [(0.0, ClockFinding.CLOSE), (24.0, ClockFinding.CLOSE), (26.0, ClockFinding.NEARLY), (49.0, ClockFinding.NEARLY),
     (51.0, ClockFinding.OFF), (249.0, ClockFinding.OFF), (251.0, ClockFinding.FAR), (499.0, ClockFinding.FAR),
     (501.0, ClockFinding.OUTVOTED)],
)  # fmt: skip
@pytest.mark.parametrize("sign", [1, -1])
def test_findings_by_how_far_it_is_off_for_sure(off_ms: float, finding: ClockFinding, sign: int) -> None:
    for error_ms in (0.0, 300.0):
        three = [Offset.about(sign * (off_ms + error_ms), error_ms)] * 2
        assert find(compare(three)) is finding
        two = find(compare(three[:1]))
        assert two is (ClockFinding.FAR if finding is ClockFinding.OUTVOTED else finding), "two never outvote"


# ── the state ──


def test_every_state_is_reached_and_left_and_the_table_says_nothing_that_means_nothing() -> None:
    assert {before for before, _ in TRANSITIONS} == set(Trust) == {after for after, _ in TRANSITIONS.values()}
    for (before, finding), (after, after_ms) in TRANSITIONS.items():
        assert after is not before
        # In is at once, out takes its time.
        if after.quarantined and not before.quarantined:
            assert finding is ClockFinding.OUTVOTED and after_ms == 0.0
        if before.quarantined and not after.quarantined:
            assert (
                before is Trust.RETURNING
                and after_ms == RETURN_MS
                and finding not in (ClockFinding.FAR, ClockFinding.OUTVOTED)
            )
    for trust in Trust:
        outvoted = TRANSITIONS.get((trust, ClockFinding.OUTVOTED), (trust, 0.0))[0]
        assert outvoted is Trust.QUARANTINED, f"{trust}: a clock known to be wrong is never gone by"


findings = st.lists(st.tuples(st.sampled_from(ClockFinding), st.floats(1.0, 3_000.0)), max_size=60)


@pytest.mark.slow
@given(findings)
def test_quarantine_begins_at_once_and_ends_only_after_a_calm_of_some_seconds(
    met: list[tuple[ClockFinding, float]],
) -> None:
    now_ms = 0.0
    conscience = ClockJudgement(now_ms)
    calm_since_ms: float | None = None
    for finding, after_ms in met:
        now_ms += after_ms
        before = conscience.trust
        changed = conscience.meet(finding, now_ms)
        assert changed is (conscience.trust is not before)
        if finding in (ClockFinding.FAR, ClockFinding.OUTVOTED):
            calm_since_ms = None
        elif calm_since_ms is None:
            calm_since_ms = now_ms
        if finding is ClockFinding.OUTVOTED:
            assert conscience.trust is Trust.QUARANTINED
        if before.quarantined and not conscience.trust.quarantined:
            assert calm_since_ms is not None and now_ms - calm_since_ms >= RETURN_MS


def test_a_clock_that_wavers_about_a_bound_changes_the_state_once() -> None:
    conscience = ClockJudgement(0.0)
    turns = [conscience.meet(finding, at) for at, finding in enumerate([ClockFinding.NEARLY, ClockFinding.OFF] * 10)]
    assert turns.count(True) == 1 and conscience.trust is Trust.WARNED
    conscience = ClockJudgement(0.0)
    turns = [conscience.meet(finding, at) for at, finding in enumerate([ClockFinding.FAR, ClockFinding.OUTVOTED] * 10)]
    assert turns.count(True) == 2 and conscience.trust is Trust.QUARANTINED, "a warning, then the quarantine"


# ── steps ──

STEP = HOUR_MS
WALL, OURS, NEITHER = (Witness(Offset.about(at, 5.0)) for at in (STEP + 20.0, -20.0, STEP / 2))
SET, VAGUE = Witness(WALL.offset, able=False), Witness(Offset.about(STEP, STEP))


@pytest.mark.parametrize(
    ("store", "peers", "verdict"),
    [
        (None, [], StepVerdict.OPEN),
        (WALL, [], StepVerdict.CONFIRMED),
        (OURS, [], StepVerdict.DENIED),
        (NEITHER, [], StepVerdict.OPEN),
        (SET, [], StepVerdict.OPEN),
        (VAGUE, [], StepVerdict.OPEN),
        (None, [WALL], StepVerdict.CONFIRMED),
        (None, [OURS], StepVerdict.DENIED),
        (None, [SET], StepVerdict.OPEN),
        (None, [WALL, OURS], StepVerdict.CONFIRMED),
        (None, [WALL, NEITHER], StepVerdict.CONFIRMED),
        (None, [WALL, OURS, OURS], StepVerdict.DENIED),
        (None, [WALL, NEITHER, NEITHER], StepVerdict.OPEN),
        (None, [WALL, WALL, OURS, OURS], StepVerdict.CONFIRMED),
        (None, [OURS, SET, SET], StepVerdict.DENIED),
        (None, [SET, SET], StepVerdict.OPEN),
        (OURS, [WALL], StepVerdict.CONFIRMED),
        (OURS, [WALL, OURS, OURS], StepVerdict.DENIED),
        (WALL, [OURS, OURS], StepVerdict.CONFIRMED),
    ],
)
def test_what_others_say_of_a_step(store: Witness | None, peers: list[Witness], verdict: StepVerdict) -> None:
    assert judge_step(STEP, store, peers) is verdict


@pytest.mark.slow
@given(
    st.floats(STEP_MS + 1, HOUR_MS),
    st.booleans(),
    st.lists(st.tuples(st.floats(-STEP_MS, STEP_MS), st.floats(0.0, 100.0)), max_size=5),
)
def test_a_wall_that_alone_jumped_is_never_confirmed_and_one_that_was_set_right_is(
    size_ms: float, back: bool, others: list[tuple[float, float]]
) -> None:
    """Others within 500 ms of the true time, which our clock has kept in one world, and our wall shows in the other."""
    step_ms = -size_ms if back else size_ms
    kept = [Witness(Offset.about(apart * min(1.0, size_ms / 2_000), error)) for apart, error in others]
    right = [Witness(Offset.about(one.offset.ahead_ms + step_ms, one.offset.error_ms)) for one in kept]
    for store in (True, False):
        with_store = store and bool(others)
        split = 1 if with_store else 0
        alone = judge_step(step_ms, kept[0] if with_store else None, kept[split:])
        assert alone is not StepVerdict.CONFIRMED
        mended = judge_step(step_ms, right[0] if with_store else None, right[split:])
        assert mended is not StepVerdict.DENIED
        if others and all(error < abs(step_ms) / 2 for _, error in others):
            assert (alone, mended) == (StepVerdict.DENIED, StepVerdict.CONFIRMED)
        if not others:
            assert alone is mended is StepVerdict.OPEN
