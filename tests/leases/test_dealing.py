"""Dealing: against a dealer who goes round the table with one card at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from timeline.leases import deal

ROOM = 1 << 40


@dataclass(frozen=True)
class Hand:
    count: int
    max_bytes: int = ROOM
    alone: bool = False


def dealt(hands: list[Hand], sizes: list[int]) -> list[int]:
    return deal(hands, np.array(sizes, dtype=np.int64)).tolist()


def one_by_one(hands: list[Hand], sizes: list[int]) -> list[int]:
    """Each message goes to the next in turn that has room; when nobody has, that is the end."""
    given_out: list[list[int]] = [[] for _ in hands]
    turns: list[int] = []
    at = 0
    for size in sizes:
        for seat in [*range(at, len(hands)), *range(at)]:
            hand, has = hands[seat], given_out[seat]
            oversize_before = sum(has) > hand.max_bytes
            fits = sum(has) + size <= hand.max_bytes
            if len(has) < hand.count and not oversize_before and (fits or (hand.alone and not has)):
                break
        else:
            return turns
        has.append(size)
        turns.append(seat)
        at = (seat + 1) % len(hands)
    return turns


hands_at_a_table = st.lists(
    st.builds(Hand, st.integers(0, 6), st.one_of(st.just(ROOM), st.integers(0, 40)), st.booleans()), max_size=5
)
message_sizes = st.lists(st.integers(0, 20), max_size=24)


@pytest.mark.slow
@given(hands_at_a_table, message_sizes)
@example([Hand(3, 10, alone=True), Hand(3, 5)], [30, 0, 0, 0, 0])
@example([Hand(2, 10), Hand(2, 10)], [10, 11, 1])
@example([], [1])
@example([Hand(0)], [1])
def test_it_deals_as_one_would_by_hand(hands: list[Hand], sizes: list[int]) -> None:
    assert dealt(hands, sizes) == one_by_one(hands, sizes)


@pytest.mark.slow
@given(hands_at_a_table, message_sizes)
def test_nobody_gets_more_than_was_granted(hands: list[Hand], sizes: list[int]) -> None:
    turns = dealt(hands, sizes)
    assert len(turns) <= len(sizes)
    for seat, hand in enumerate(hands):
        got = [size for size, turn in zip(sizes, turns, strict=False) if turn == seat]
        assert len(got) <= hand.count
        assert sum(got) <= hand.max_bytes or (hand.alone and len(got) == 1)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 60))
def test_counts_differ_by_at_most_one_among_those_with_credit(counts: list[int], messages: int) -> None:
    turns = dealt([Hand(count) for count in counts], [1] * messages)
    assert len(turns) == min(messages, sum(counts))
    got = [turns.count(seat) for seat in range(len(counts))]
    unspent = [has for has, count in zip(got, counts, strict=True) if has < count]
    # Who has credit left has as many as anybody, less one at most.
    assert all(max(got) - has <= 1 for has in unspent)


@pytest.mark.slow
@given(hands_at_a_table, message_sizes, st.integers(0, 24))
def test_what_is_dealt_of_fewer_messages_is_the_beginning_of_what_is_dealt_of_more(
    hands: list[Hand], sizes: list[int], fewer: int
) -> None:
    """So nothing overtakes: a store may read ahead as far as it likes."""
    turns = dealt(hands, sizes)
    assert dealt(hands, sizes[:fewer]) == turns[:fewer]


def test_an_oversize_message_goes_alone_and_only_to_who_has_nothing() -> None:
    assert dealt([Hand(5, 10, alone=True)], [99, 0]) == [0]
    assert dealt([Hand(5, 10, alone=False)], [99]) == []
    assert dealt([Hand(5, 10, alone=True)], [1, 99]) == [0]
    assert dealt([Hand(5, 10, alone=True), Hand(1, 10)], [99, 1, 1]) == [0, 1]


def test_dealing_stops_rather_than_let_a_small_message_overtake_a_large_one() -> None:
    assert dealt([Hand(5, 10), Hand(5, 10)], [4, 4, 7, 1]) == [0, 1]


def test_a_hundred_thousand_by_credit_alone() -> None:
    turns = deal([Hand(40_000), Hand(10), Hand(100_000)], np.full(100_000, 100, dtype=np.int64))
    assert np.bincount(turns).tolist() == [40_000, 10, 59_990]
    assert turns[:4].tolist() == [0, 1, 2, 0]
