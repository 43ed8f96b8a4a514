"""Assignment: the same answer everywhere, each bucket dealt, balance, and the least movement that balance allows."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeline.sync.view import SLACK_PERCENT, Assignment, assign

names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12)
topics = st.integers(-(2**63), 2**63 - 1)
clusters = st.dictionaries(names, st.integers(0, 40), max_size=12)
hosts = st.dictionaries(names, st.integers(1, 6), min_size=1, max_size=8)
EXTRA_MOVES = 0.08
"""Share of all buckets that may move beyond those that have to: the price of balance."""


def counts(assignment: Assignment) -> dict[str, int]:
    return {name: len(assignment.of(name)) for name in assignment.brokers}


def moved(before: Assignment, after: Assignment, among: set[str]) -> int:
    """Buckets that changed hands between brokers of `among`, who had no part in the change."""
    return sum(
        was != now and was in among and now in among
        for was, now in zip(
            map(before.owner, range(len(before.owners))), map(after.owner, range(len(after.owners))), strict=True
        )
    )


@pytest.mark.slow
@given(topics, st.integers(1, 300), clusters)
def test_every_bucket_is_dealt_by_one_who_has_consumers(topic: int, buckets: int, weights: dict[str, int]) -> None:
    dealt = assign(topic, buckets, weights)
    living = {name for name, weight in weights.items() if weight}
    assert set(dealt.brokers) == living
    owners = [dealt.owner(bucket) for bucket in range(buckets)]
    assert all(owner in living for owner in owners) if living else set(owners) == {None}
    of = [bucket for name in weights for bucket in dealt.of(name)]
    assert sorted(of) == (list(range(buckets)) if living else [])


@pytest.mark.slow
@given(topics, st.integers(1, 300), clusters, st.randoms(use_true_random=False))
def test_the_answer_does_not_depend_on_who_asks(topic: int, buckets: int, weights: dict[str, int], random) -> None:  # type: ignore[no-untyped-def]
    shuffled = list(weights.items())
    random.shuffle(shuffled)
    first, second = assign(topic, buckets, weights), assign(topic, buckets, dict(shuffled))
    assert first.brokers == second.brokers and np.array_equal(first.owners, second.owners)


@pytest.mark.slow
def test_the_answer_is_the_same_in_every_process() -> None:
    weights = {"b1": 3, "b2": 1, "Ω": 2}
    code = f"from timeline.sync.view import assign; print(assign(77, 64, {weights!r}).owners.tolist())"
    asked = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONHASHSEED": "1"},
        check=True,
    )
    owners = assign(77, 64, weights).owners.tolist()
    assert asked.stdout.strip() == str(owners)
    # Fixed for good: another answer in another version means that brokers of the two disagree while they are upgraded.
    assert "".join(map(str, owners)) == "0202022022021222102000102012000002021100200020200012011200000021"


@pytest.mark.slow
@given(topics, st.integers(64, 100), hosts)
def test_buckets_follow_consumers(topic: int, buckets_a_consumer: int, weights: dict[str, int]) -> None:
    """Within 10 % of a broker's share at 64 buckets for each consumer and more."""
    buckets = buckets_a_consumer * sum(weights.values())
    for name, count in counts(assign(topic, buckets, weights)).items():
        assert abs(count / (buckets_a_consumer * weights[name]) - 1) <= 0.1


@pytest.mark.slow
@given(topics, st.integers(1, 200), clusters)
def test_few_buckets_are_dealt_as_evenly_as_whole_ones_can_be(
    topic: int, buckets: int, weights: dict[str, int]
) -> None:
    for name, count in counts(assign(topic, buckets, weights)).items():
        share = buckets * weights[name] / sum(weights.values())
        assert (
            math.floor(share - share * SLACK_PERCENT / 100) <= count <= math.ceil(share + share * SLACK_PERCENT / 100)
        )


@pytest.mark.slow
@given(topics, st.integers(64, 80), hosts, names, st.integers(1, 4))
def test_who_joins_takes_buckets_and_hardly_any_move_between_others(
    topic: int, each: int, weights: dict[str, int], name: str, weight: int
) -> None:
    without = {other: count for other, count in weights.items() if other != name}
    if not without:
        return
    buckets = each * (sum(without.values()) + weight)
    before, after = assign(topic, buckets, without), assign(topic, buckets, {**without, name: weight})
    assert moved(before, after, set(without)) <= EXTRA_MOVES * buckets
    # The same read backwards: one that leaves.
    kept = sum(before.owner(bucket) == after.owner(bucket) for bucket in range(buckets))
    assert kept >= buckets - len(after.of(name)) - EXTRA_MOVES * buckets


@pytest.mark.slow
@given(topics, hosts)
def test_a_consumer_more_moves_what_it_has_to(topic: int, weights: dict[str, int]) -> None:
    buckets, name = 64 * (sum(weights.values()) + 1), min(weights)
    before, after = assign(topic, buckets, weights), assign(topic, buckets, {**weights, name: weights[name] + 1})
    assert moved(before, after, set(weights) - {name}) <= EXTRA_MOVES * buckets


def test_one_broker_deals_all() -> None:
    dealt = assign(7, 64, {"b1": 3, "b2": 0})
    assert dealt.of("b1") == tuple(range(64)) and dealt.of("b2") == () and dealt.of("nobody") == ()
