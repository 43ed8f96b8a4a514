"""The look over all consumers: by turns, and with those that go meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest

from tests.broker.link import Link, Pipe, broker
from timeline.broker.limits import Limits
from timeline.broker.node import Node
from timeline.broker.tasks import by_turns

SELDOM = Limits(observe_every_ms=3_600_000)


async def test_others_have_a_turn_between_some_and_the_next():
    loop, there = asyncio.get_running_loop(), dict.fromkeys(range(7))
    seen: list[list[int]] = []
    between: list[list[int]] = []
    async for some in by_turns(there, 3):
        assert len(between) == len(seen)
        seen.append(some)
        there[len(there)] = None
        loop.call_soon(between.append, some)
    assert seen == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Looks stop behind each that they have looked at until this is set."""
    told = asyncio.Event()

    async def one_by_one(all_: Iterable[Any], _: int) -> AsyncIterator[list[Any]]:
        for one in list(all_):
            yield [one]
            await told.wait()

    monkeypatch.setattr("timeline.broker.node.by_turns", one_by_one)
    return told


async def come(link: Link, *names: str) -> list[Pipe]:
    """They are connected and dealt to."""
    pipes = [await link.consume(name) for name in names]
    while not link.node.dealers[0].roster.well.issuperset(name.encode() for name in names):
        await asyncio.sleep(0)
    return pipes


def shown(node: Node, health: str) -> float | None:
    return node.metrics.registry.get_sample_value("timeline_consumers", {"topic": "t", "health": health})


async def test_who_is_silent_is_not_among_the_well_until_it_is_heard_again():
    async with broker(limits=SELDOM) as link:
        await come(link, "steady", "moody")
        roster = link.node.dealers[0].roster
        roster.consumers[b"moody"].heard_ms = -1e9
        await link.node._observe()
        assert roster.well == {b"steady"}
        assert (shown(link.node, "healthy"), shown(link.node, "silent")) == (1, 1)
        roster.consumers[b"moody"].heard(link.node.clock.monotonic_ms())
        await link.node._observe()
        assert roster.well == {b"steady", b"moody"}
        assert (shown(link.node, "healthy"), shown(link.node, "silent")) == (2, 0)


async def test_who_leaves_or_comes_in_the_middle_of_a_look(go_on: asyncio.Event):
    async with broker(limits=SELDOM) as link:
        pipes = await come(link, "c0", "c1", "c2")
        roster = link.node.dealers[0].roster
        look = asyncio.create_task(link.node._observe())
        await asyncio.sleep(0)  # the first of three has been looked at
        before = roster.consumers[b"c2"]
        await link.consume("c2", session=2)  # another has its name from now on
        while not roster.consumers[b"c2"].dealing:
            await asyncio.sleep(0)
        assert roster.consumers[b"c2"] is not before
        await come(link, "late")
        await pipes[1].close()
        while b"c1" in roster.consumers:
            await asyncio.sleep(0)
        go_on.set()
        await look
        assert roster.well == {b"c0", b"c2", b"late"}
        assert shown(link.node, "healthy") == 1, "of those that were there from its beginning to their turn"


async def test_a_topic_that_is_dropped_in_the_middle_of_a_look_has_no_gauges(go_on: asyncio.Event):
    async with broker(limits=SELDOM) as link:
        await come(link, "a", "b")
        look = asyncio.create_task(link.node._observe())
        await asyncio.sleep(0)
        await link.drop()
        go_on.set()
        await look
        assert shown(link.node, "healthy") is None
