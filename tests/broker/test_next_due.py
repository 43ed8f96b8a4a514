"""When the next message is due: what a round is told, and hints that come beside it."""

from __future__ import annotations

from timeline.broker.dispatch.rounds import NextDue


def test_the_soonest_of_what_was_told_and_hinted_counts() -> None:
    due = NextDue()
    assert due.at_ms == 0, "a first round has to find out"
    due.ask()
    due.told(None, 0)
    assert due.at_ms is None
    assert due.hint(500, 0) and not due.hint(600, 0) and due.hint(400, 0)
    assert due.at_ms == 400
    due.ask()
    due.told(900, 0)
    assert due.at_ms == 900, "the round saw what was hinted before it"


def test_a_hint_beside_a_round_outlives_what_the_round_is_told() -> None:
    due = NextDue()
    due.ask()
    due.hint(700, 0)
    due.told(None, 0)
    assert due.at_ms == 700
    due.ask()
    due.look()
    due.told(None, 0)
    assert due.at_ms == 0


def test_what_a_round_saw_by_its_turn_needs_no_hint() -> None:
    due = NextDue()
    due.ask()
    due.hint(700, 4)
    due.told(None, 5)
    assert due.at_ms is None
    assert not due.hint(700, 5) and due.at_ms is None
    assert due.hint(700, 6) and due.at_ms == 700
    due.ask()
    due.hint(650, 7)
    due.hint(800, 0)
    due.told(None, 9)
    assert due.at_ms == 650, "one of them did not say in which turn"


def test_a_round_without_an_answer_is_made_again() -> None:
    due = NextDue()
    due.ask()
    due.told(9_000, 0)
    due.ask()
    due.not_told(100)
    assert due.at_ms == 100
    due.told(None, 0)
    due.not_told(100)
    assert due.at_ms == 0
