"""What a client is told of how brokers stand."""

from __future__ import annotations

from datetime import timedelta

import pytest

import timeline
from tests.driver.broker import Broker
from timeline.driver.brokers import LatenessHistogram
from timeline.errors import Invalid, Unavailable
from timeline.wire import Health


async def test_load_consumers_and_lateness(tl: timeline.Timeline, broker: Broker) -> None:
    async with tl.producer("t") as p, tl.consumer("t", id="worker-1", credit=10) as c:
        await p.produce(b"x", in_=0)
        delivery = await c.take()
        assert delivery is not None
        told = await tl.standing("t")
        (one,) = told.brokers
        (frame,) = one.topics
        assert (frame.topic, frame.consumers, frame.in_flight, frame.credit) == ("t", 1, 1, 9)
        assert (frame.delivered, frame.redelivered) == (1, 0)
        (consumer,) = one.consumers
        assert (consumer.topic, consumer.id, consumer.health) == ("t", "worker-1", Health.HEALTHY)
        assert (consumer.credit, consumer.in_flight) == (9, 1)
        assert one.lateness["t"].total == 1
        assert (one.address, one.broker, one.version, one.trouble) == (broker.address, "b1", "test", "")
        assert told.unreachable == {}
        await delivery.ack()


async def test_who_does_not_answer_is_named(broker: Broker) -> None:
    nobody = "127.0.0.1:1"
    async with timeline.connect([broker.address, nobody]) as tl:
        told = await tl.standing()
        assert [one.address for one in told.brokers] == [broker.address]
        assert told.unreachable.keys() == {nobody}
        with pytest.raises(Invalid):
            await tl.standing("a\nb")
    async with timeline.connect(nobody) as tl:
        with pytest.raises(Unavailable, match=nobody):
            await tl.standing()


def test_a_sync_client_is_told_the_same(served: str) -> None:
    with timeline.connect_sync(served) as tl:
        tl.create_topic("t")
        assert [frame.topic for frame in tl.standing("t").brokers[0].topics] == ["t"]


BOUNDS = (1, 10, None)


def test_percentiles_are_bounds_that_were_kept() -> None:
    late = LatenessHistogram(BOUNDS, (98, 1, 1))
    assert [late.at_most(share) for share in (0.5, 0.98, 0.99, 1.0)] == [
        timedelta(milliseconds=1), timedelta(milliseconds=1), timedelta(milliseconds=10), timedelta.max,
    ]  # fmt: skip
    assert LatenessHistogram(BOUNDS, (0, 0, 0)).at_most(0.5) is None
    assert LatenessHistogram(BOUNDS, (0, 0, 0)).share_within(10) is None
    kept = [late.share_within(ms) for ms in (1, 5, 10, 10_000)]
    assert kept == [0.98, 0.98, 0.99, 0.99], "what may have been later does not count"


def test_what_came_since_and_what_came_together() -> None:
    before, now = LatenessHistogram(BOUNDS, (5, 1, 0)), LatenessHistogram(BOUNDS, (7, 1, 2))
    assert now.since(before).counts == (2, 0, 2)
    assert before.since(now) is before  # fewer than before: the broker has started anew
    assert now.since(LatenessHistogram((5, None), (1, 1))) is now
    assert now.plus(before).counts == (12, 2, 2)
