"""`produce_iter` on what raises in its middle: what came before is put, and told, first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import timeline
from tests.driver.broker import Broker
from timeline import Message


class Torn(Exception):
    """A program's own."""


def torn(count: int) -> Iterator[Message]:
    """Messages of a file that is broken behind them."""
    for n in range(count):
        yield Message(b"", in_="1h", id=f"m{n}")
    raise Torn(count)


async def torn_slowly(count: int) -> AsyncIterator[Message]:
    for message in torn(count):
        yield message


def mixed(count: int) -> Iterator[Any]:
    for n in range(count):
        yield Message(b"", in_="1h", id=f"m{n}")
    yield "no message"


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 100, 2_500])
@pytest.mark.parametrize(
    ("source", "raised"), [(torn, Torn), (torn_slowly, Torn), (mixed, timeline.Invalid)], ids=lambda one: one.__name__
)
async def test_what_came_before_the_break_is_put_and_told(
    tl: timeline.Timeline, source: Any, raised: type[Exception], count: int
) -> None:
    told: list[str] = []
    async with tl.producer("t") as p:
        with pytest.raises(raised):
            async for receipt in p.produce_iter(source(count)):
                assert receipt.ok
                told.append(receipt.id)
    assert told == [f"m{n}" for n in range(count)]
    assert {m.id async for m in tl.scan("t")} == set(told)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "raised"), [(torn, Torn), (mixed, timeline.Invalid)], ids=lambda one: one.__name__)
def test_the_same_without_await(served: str, source: Any, raised: type[Exception]) -> None:
    with timeline.connect_sync(served, timeout="10s") as tl:
        tl.create_topic("t")
        told: list[str] = []
        with pytest.raises(raised):
            for receipt in tl.producer("t").produce_iter(source(2_300)):
                told.append(receipt.id)
        assert told == [f"m{n}" for n in range(2_300)]
        assert {m.id for m in tl.scan("t")} == set(told)
        with pytest.raises(timeline.Invalid, match="not an asynchronous one"):
            list(tl.producer("t").produce_iter(torn_slowly(1)))  # type: ignore[arg-type]


async def test_what_is_no_iterable_is_refused(tl: timeline.Timeline, broker: Broker) -> None:
    for given in (None, 5, Message(b"", in_=0)):
        with pytest.raises(timeline.Invalid, match="produce_iter takes an iterable"):
            _ = [r async for r in tl.producer("t").produce_iter(given)]  # type: ignore[arg-type]


class Unawaited:
    """Says that it is asynchronous, and hands out what nobody can await, after one message."""

    def __init__(self) -> None:
        self._given = 0

    def __aiter__(self) -> Unawaited:
        return self

    def __anext__(self) -> Any:
        self._given += 1
        return _one() if self._given == 1 else 5


async def _one() -> Message:
    return Message(b"", in_="1h", id="m0")


async def test_a_source_that_cannot_be_awaited_is_told_behind_what_it_gave(tl: timeline.Timeline) -> None:
    told: list[str] = []
    async with tl.producer("t") as p:
        with pytest.raises(timeline.Invalid, match="whose __anext__ is awaited; it gave 5"):
            async for receipt in p.produce_iter(Unawaited()):
                told.append(receipt.id)
    assert told == ["m0"]
