"""Two consumers with one id: the later one takes over, whichever broker it connects to."""

from __future__ import annotations

import pytest

import timeline
from tests.broker.machines import TOPIC, Registered, Town, town
from tests.simulation.loop import Process
from timeline.broker.dispatch.roster import JoinedConsumer
from timeline.sync import Member

B1, B2 = "b1:9000", "b2:9000"


async def begin(there: Town) -> None:
    """Two brokers, and a topic."""
    for name in ("b1", "b2"):
        await there.broker(name)
    await there.create_topic(lease="30s")


class Twins:
    """Consumers with the id "worker". `received`: who got which message. `errors`: who ended with what."""

    def __init__(self, there: Town) -> None:
        self._there = there
        self.received: list[str] = []
        self.errors: list[tuple[str, str]] = []

    def start(self, name: str, address: str) -> None:
        process = Process(self._there.loop, name)
        client = self._there.client(process, address)

        async def work() -> None:
            try:
                async with client, client.consumer(TOPIC, id="worker", credit=4) as consumer:
                    async for _ in consumer:
                        self.received.append(name)
            except timeline.TimelineError as error:
                self.errors.append((name, error.code))

        self._there._consuming.append(process.run(work()))


@pytest.mark.parametrize("second", [B1, B2])
def test_the_later_one_takes_over_at_whatever_broker(second: str) -> None:
    with town() as there:
        twins = Twins(there)

        async def story() -> None:
            await begin(there)
            twins.start("first", B1)
            await there.timer.wait(2)
            await there.put([0.0, 0.0])
            await there.timer.wait(2)
            assert twins.received == ["first"] * 2
            twins.start("second", second)
            await there.timer.wait(2)
            assert twins.errors == [("first", "SUPERSEDED")]
            twins.received.clear()
            await there.put([0.0] * 2)
            await there.timer.wait(2)
            assert twins.received == ["second"] * 2

        there.run(story())
        assert twins.errors == [("first", "SUPERSEDED")]


def test_of_two_that_come_at_the_same_time_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Membership does not know yet who hosts the topic."""
    monkeypatch.setattr(Registered, "hosting", lambda membership, uid: {})
    with town() as there:
        twins = Twins(there)

        async def story() -> None:
            await begin(there)
            twins.start("first", B1)
            twins.start("second", B2)
            await there.timer.wait(5)

        there.run(story())
        assert [code for _, code in twins.errors] == ["SUPERSEDED"]


def test_a_broker_that_comes_hears_of_those_that_connected_before_it_came() -> None:
    """It may have the earlier session still: the two did not know each other."""
    told: list[tuple[str, int | JoinedConsumer]] = []
    with town() as there:

        async def story() -> None:
            cluster = (await there.broker("b1")).node.cluster
            await there.create_topic(lease="30s")
            there.consume("worker", B1)
            await there.timer.wait(2)
            tell = cluster.peers.tell

            def noted(member: Member, uid: int, news: int | JoinedConsumer) -> None:
                told.append((member.name, news))
                tell(member, uid, news)

            cluster.peers.tell = noted  # type: ignore[method-assign]
            await there.broker("b2")
            await there.timer.wait(2)

        there.run(story())
        joined = [(name, news.id) for name, news in told if isinstance(news, JoinedConsumer)]
        assert joined == [("b2", b"worker")]


def test_only_a_later_session_with_the_same_token_takes_over() -> None:
    here = JoinedConsumer(b"w", 7, "ops", 1_000)
    assert JoinedConsumer(b"w", 3, "ops", 1_001).supersedes(here)
    assert JoinedConsumer(b"w", 8, "ops", 1_000).supersedes(here)
    for other in (
        JoinedConsumer(b"w", 3, "ops", 1_000),
        JoinedConsumer(b"w", 8, "ops", 999),
        JoinedConsumer(b"w", 7, "ops", 1_001),
        JoinedConsumer(b"w", 8, "web", 1_001),
        JoinedConsumer(b"v", 8, "ops", 1_001),
    ):
        assert not other.supersedes(here)
    assert not JoinedConsumer(b"w", 8, "", 1_001).supersedes(JoinedConsumer(b"w", 0, "", 0)), "it is a broker's own"
