"""Recurring schedules in the simulation: seeds hold, and mistakes that are planted are found."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.schedules import OUTCOMES, ScheduleWorld, never
from timeline.broker.schedules.records import OccurrenceAnswer, ScheduleStore
from timeline.broker.schedules.runner import ScheduleRunner
from timeline.model import Status, Topic

pytestmark = pytest.mark.slow
FEW, MANY = 6, 150


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No log lines of a thousand faults."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def hold(seeds: range) -> Counter[str]:
    """What occurred in seeds, which all must hold."""
    occurred: Counter[str] = Counter()
    for seed in seeds:
        outcome = ScheduleWorld(seed).run()
        assert outcome.holds, (seed, [str(one) for one in outcome.verdict.violations[:5]])
        occurred += outcome.occurred
    return occurred


def test_some_seeds_of_schedules_hold() -> None:
    hold(range(FEW))


@pytest.mark.prove
@pytest.mark.timeout(1_800)
def test_many_seeds_of_schedules_hold_and_meet_everything() -> None:
    assert never(hold(range(MANY))) == []


def test_what_was_never_met_is_named() -> None:
    met = Counter(dict.fromkeys(OUTCOMES, 1))
    assert never(met) == []
    met["record EXISTS"] = 0
    assert never(met) == ["record EXISTS"]


@contextmanager
def _instead(of: type, name: str, other: Any) -> Iterator[None]:
    kept = getattr(of, name)
    setattr(of, name, other(kept))
    try:
        yield
    finally:
        setattr(of, name, kept)


def cancels_nothing() -> AbstractContextManager[None]:
    """What edits leave over stays on the timeline."""

    def other(_: Any) -> Any:
        async def cancel(_: Any, __: Topic, ids: list[str], *___: Any) -> list[OccurrenceAnswer]:
            return [OccurrenceAnswer(Status.NOT_FOUND)] * len(ids)

        return cancel

    return _instead(ScheduleStore, "cancel", other)


def names_by_chance() -> AbstractContextManager[None]:
    """A repeated look puts another message."""

    def other(put_messages: Any) -> Any:
        async def put(self: Any, topic: Any, asked: Any, *given: Any) -> list[OccurrenceAnswer]:
            named = [(one, replace(message, id=f"{message.id}.{self._random_bits(40)}")) for one, message in asked]
            return list(await put_messages(self, topic, named, *given))

        return put

    return _instead(ScheduleStore, "put_messages", other)


def puts_early() -> AbstractContextManager[None]:
    """Occurrences are due long before their time."""

    def other(put_messages: Any) -> Any:
        async def put(self: Any, topic: Any, asked: Any, *given: Any) -> list[OccurrenceAnswer]:
            early = [(one, replace(message, due_ms=message.due_ms - 2_500)) for one, message in asked]
            return list(await put_messages(self, topic, early, *given))

        return put

    return _instead(ScheduleStore, "put_messages", other)


def looks_at_what_is_over() -> AbstractContextManager[None]:
    """A look asks for no record before or after its own."""

    def other(_: Any) -> Any:
        async def sort_out(self: Any, internal: Any, held: Any) -> Any:
            return held, []

        return sort_out

    return _instead(ScheduleRunner, "_sort_out", other)


@pytest.mark.prove
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("mistake", "broken", "within"),
    [
        pytest.param(cancels_nothing, {"PHANTOM"}, 5, id="nothing is cancelled"),
        pytest.param(names_by_chance, {"TWICE"}, 20, id="named by chance"),
        pytest.param(puts_early, {"EARLY"}, 2, id="put early"),
        pytest.param(looks_at_what_is_over, {"PHANTOM", "TWICE", "MISSING"}, 40, id="looked at what is over"),
    ],
)
def test_a_planted_mistake_is_found(
    mistake: Callable[[], AbstractContextManager[None]], broken: set[str], within: int
) -> None:
    with mistake():
        for seed in range(within):
            found = {one.invariant for one in ScheduleWorld(seed).run().verdict.violations}
            if found & broken:
                return
    pytest.fail(f"not found within {within} seeds")
