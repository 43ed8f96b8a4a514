"""No bytes crash, hang or over-allocate the reader, or come out as values that are out of range."""

from __future__ import annotations

import collections
import random
import sys
import tracemalloc
from typing import Any

import pytest

from tests.fuzz.corpus import edges_of, inputs
from tests.fuzz.target import examine_bounded
from tests.wire.examination import allowed_bytes, examine, judged
from tests.wire.mutants import MUTATIONS, good_frames, mutants
from tests.wire.plain_rules import out_of_range
from tests.wire.samples import SAMPLES
from timeline.wire import encode

FAST_SEEDS = range(3)
SLOW_SEEDS = range(100, 120)
CASES = 5_000
SURVIVED, REFUSED = "survived", "refused"


def fuzz(seed: int, count: int) -> collections.Counter[str]:
    outcome: collections.Counter[str] = collections.Counter()
    for name, data in mutants(seed, count):
        try:
            survived = examine(data)
        except Exception as crash:
            raise AssertionError(f"{name}: {data.hex()}") from crash
        outcome[SURVIVED if survived else REFUSED] += 1
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("seed", FAST_SEEDS)
def test_mutants_are_refused_or_in_range(seed: int) -> None:
    outcome = fuzz(seed, CASES)
    # Both ways out are taken, or the mutants are too tame or too wild to show anything.
    assert outcome[REFUSED] > CASES // 10
    assert outcome[SURVIVED] > CASES // 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOW_SEEDS)
def test_many_more_mutants_are_refused_or_in_range(seed: int) -> None:
    outcome = fuzz(seed, CASES)
    assert min(outcome[REFUSED], outcome[SURVIVED]) > CASES // 20


@pytest.mark.slow
def test_what_long_hunts_came_upon_is_refused_or_in_range() -> None:
    seen = list(inputs())
    assert len(seen) > 1_000
    assert len(set().union(*map(edges_of, seen[::10]))) > 200  # it still leads through the decoder
    for data in seen:
        examine_bounded(data)


def test_good_frames_pass_the_plain_rules() -> None:
    for frame, data in zip(SAMPLES, good_frames(), strict=False):
        result = judged(data)
        assert result is not None
        assert not out_of_range(*result), frame


def _peak_bytes(data: bytes) -> int:
    """What judging a frame allocates at most at once."""
    tracemalloc.start()
    judged(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def _stays_within(data: bytes, bytes_allowed: int) -> bool:
    """Whether judging a frame allocates less than that. What it allocates is the same each time; what another thread of
    this process does meanwhile is not, and counted with it: so what is over is looked at again."""
    return any(_peak_bytes(data) < bytes_allowed for _ in range(3))


@pytest.mark.slow
def test_memory_stays_within_a_few_frames() -> None:
    judged(good_frames()[0])
    for name, data in mutants(7, 1_500):
        assert _stays_within(data, allowed_bytes(data)), name


def test_work_is_bounded_by_the_frame() -> None:
    """Counted in calls, not by a clock: some per field, and per message no more than a few when one is to blame."""
    steps = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal steps
        if event in ("call", "c_call"):
            steps += 1

    for name, data in mutants(11, 1_500):
        steps = 0
        sys.setprofile(count)
        try:
            judged(data)
        finally:
            sys.setprofile(None)
        assert steps < 600 + len(data), name


@pytest.mark.slow
def test_a_vector_of_claimed_length_is_not_allocated() -> None:
    """Lengths of gigabytes in a frame of some hundred bytes."""
    for data in good_frames():
        for at in range(8, len(data) - 3, 4):
            claimed = data[:at] + b"\xff\xff\xff\x3f" + data[at + 4 :]
            assert _stays_within(claimed, allowed_bytes(data)), at


def test_tables_and_vectors_that_lie_upon_each_other_are_safe() -> None:
    """Every offset of a frame leads, one after the other, to every other place of it."""
    data = encode(SAMPLES[2])
    survived = 0
    for at in range(20, len(data) - 3, 4):
        for target in range(at + 4, len(data), 4):
            aliased = data[:at] + (target - at).to_bytes(4, "little") + data[at + 4 :]
            result = judged(aliased)
            if result is not None:
                survived += 1
                assert not out_of_range(*result)
    assert survived


def test_every_mutation_changes_something() -> None:
    data = good_frames()[0]
    for mutation in MUTATIONS:
        changed = set()
        for seed in range(20):
            mutant = bytearray(data)
            mutation(mutant, random.Random(seed))
            changed.add(bytes(mutant))
        assert len(changed - {data}) > 5, mutation
