"""The look over all consumers: by turns, and with those that go meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.broker.link import Link, Pipe, broker
from timeline.broker.api.streams import Streams
from timeline.broker.dispatch.roster import Roster
from timeline.broker.fairness import AT_ONCE, CooperativePace
from timeline.broker.limits import Limits
from timeline.broker.node import Node
from timeline.metrics import Metrics
from timeline.wire import TopicAction

SELDOM = Limits(observe_every_ms=3_600_000)


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Looks stop behind each that they have looked at until this is set."""
    told = asyncio.Event()

    async def pause(_: CooperativePace) -> None:
        await told.wait()

    monkeypatch.setattr("timeline.broker.fairness.AT_ONCE", 1)
    monkeypatch.setattr(CooperativePace, "_pause", pause)
    return told


async def test_a_pause_is_longer_than_one_turn_of_the_loop(monkeypatch: pytest.MonkeyPatch):
    loop = asyncio.get_running_loop()
    stands = loop.time()
    with monkeypatch.context() as patch:
        patch.setattr(loop, "time", lambda: stands)
        pausing = asyncio.create_task(CooperativePace().did(AT_ONCE))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not pausing.done()  # as many turns as there may be: it ends by time
    await pausing


async def test_never_more_are_looked_at_between_two_pauses_however_they_are_spread(monkeypatch: pytest.MonkeyPatch):
    looked, pieces = 0, list[int]()
    recount = Roster.recount

    def noted(self: Roster, some: list[bytes], *more: Any) -> bool:
        nonlocal looked
        looked += len(some)
        return recount(self, some, *more)

    async def pause(_: CooperativePace) -> None:
        nonlocal looked
        pieces.append(looked)
        looked = 0

    monkeypatch.setattr("timeline.broker.fairness.AT_ONCE", 4)
    monkeypatch.setattr("timeline.broker.status.TOPIC", 1)
    monkeypatch.setattr(Roster, "recount", noted)
    monkeypatch.setattr(CooperativePace, "_pause", pause)
    async with broker(limits=SELDOM) as link:
        for topic, count in (("t", 9), ("u", 3), ("v", 3)):
            if topic != "t":
                await link.topic(TopicAction.CREATE, topic)
            for at in range(count):
                await link.consume(f"{topic}{at}", topic=topic)
        await link.node._look_over()
    assert sum(pieces) + looked == 15
    assert max([*pieces, looked]) < 2 * 4


async def test_of_two_that_are_stalled_the_one_that_ends_meanwhile_is_left_alone(go_on: asyncio.Event):
    class Stalled:
        sending_since_ms = 0.0

        def abort(self) -> None:
            aborted.append(self)

    aborted = list[Stalled]()
    streams, one, other = Streams(Limits(stall_ms=1), Metrics()), Stalled(), Stalled()
    with streams.serving(one):
        with streams.serving(other):
            go_on.set()
            await streams.abort_stalled(5.0, CooperativePace())
            assert not aborted
            go_on.clear()
            looking = asyncio.create_task(streams.abort_stalled(10.0, CooperativePace()))
            await asyncio.sleep(0)
        assert aborted == [one] and not looking.done()
        go_on.set()
        await looking
    assert aborted == [one]


async def come(link: Link, *names: str) -> list[Pipe]:
    """They are connected and dealt to."""
    pipes = [await link.consume(name) for name in names]
    while not next(iter(link.node.dealers)).roster.well.issuperset(name.encode() for name in names):
        await asyncio.sleep(0)
    return pipes


async def begun(link: Link) -> asyncio.Task[None]:
    """A look at the topic's consumers that has come to its first pause, behind one of those that are there."""
    look = asyncio.create_task(link.node._consumers.look(CooperativePace()))
    await asyncio.sleep(0)
    assert not look.done()
    return look


def shown(node: Node, health: str) -> float | None:
    return node.metrics.registry.get_sample_value("timeline_consumers", {"topic": "t", "health": health})


async def test_who_is_silent_is_not_among_the_well_until_it_is_heard_again():
    async with broker(limits=SELDOM) as link:
        await come(link, "steady", "moody")
        roster = next(iter(link.node.dealers)).roster
        roster.consumers[b"moody"].heard_ms = -1e9
        await link.node._look_over()
        assert roster.well == {b"steady"}
        assert (shown(link.node, "healthy"), shown(link.node, "silent")) == (1, 1)
        roster.consumers[b"moody"].heard(link.node.clock.monotonic_ms())
        await link.node._look_over()
        assert roster.well == {b"steady", b"moody"}
        assert (shown(link.node, "healthy"), shown(link.node, "silent")) == (2, 0)


async def test_who_leaves_or_comes_in_the_middle_of_a_look(go_on: asyncio.Event):
    async with broker(limits=SELDOM) as link:
        pipes = await come(link, "c0", "c1", "c2")
        roster = next(iter(link.node.dealers)).roster
        look = await begun(link)
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
        assert shown(link.node, "healthy") == 2, "of those that were there when it began and at their turn"


async def test_a_topic_that_is_dropped_in_the_middle_of_a_look_has_no_gauges(go_on: asyncio.Event):
    async with broker(limits=SELDOM) as link:
        await come(link, "a", "b")
        look = await begun(link)
        await link.drop()
        assert not look.done()
        go_on.set()
        await look
        assert shown(link.node, "healthy") is None


async def test_one_whose_id_another_took_is_not_hosted_though_the_store_let_it_in_late():
    async with broker(limits=SELDOM) as link:
        await come(link, "w")
        dealer = next(iter(link.node.dealers))
        first = dealer.roster.consumers[b"w"]
        second = await link.consume("w", session=2)
        while not dealer.roster.consumers[b"w"].dealing:
            await asyncio.sleep(0)
        await second.close()
        while b"w" in dealer.roster.consumers:
            await asyncio.sleep(0)
        dealer.admit(first)
        assert not dealer.roster.well
