"""How a broker stands, as it says itself: load, lateness, who is connected; also while it does not serve."""

from __future__ import annotations

from tests.broker.link import broker, stands
from timeline.broker.limits import Limits
from timeline.model import MAX_TIME_MS, Operation
from timeline.wire import BrokerStatus, Deliver, Health, TopicAction


def depths(told: BrokerStatus) -> list[tuple[bytes, int, int]]:
    """Topic, how many are due, how many to come."""
    loads = told.topics
    return list(zip(loads.topics.tolist(), loads.available.tolist(), loads.waiting.tolist(), strict=True))


async def test_a_topic_says_what_it_bears_and_who_is_there():
    async with broker(limits=Limits(count_every_ms=1)) as link:
        await link.topic(TopicAction.CREATE, "quiet")
        before_ms = link.node.clock.now_ms()
        await link.put(["a", "b", "c"], in_ms=3_600_000)
        consumer = await link.consume("worker-1", credit=5)
        await link.put(["now"], in_ms=0)
        got = await consumer.down(Deliver)
        told = await stands(link)
        while (b"t", 0, 3) not in depths(told):
            await link.topic(TopicAction.LIST)
            told = await stands(link)
        at = told.topics.topics.tolist().index(b"t")
        assert sorted(told.topics.topics.tolist()) == [b"quiet", b"t"]
        numbers = {
            name: int(getattr(told.topics, name)[at])
            for name in ("available", "consumers", "in_flight", "credit", "delivered", "redelivered")
        }
        assert numbers == {
            "available": 0, "consumers": 1, "in_flight": 1, "credit": 4, "delivered": 1, "redelivered": 0,
        }  # fmt: skip
        assert told.topics.next_due_ms[at] >= before_ms and told.topics.counted_ms[at] >= before_ms
        assert told.consumers.topics.tolist() == [b"t"] and told.consumers.consumers.tolist() == [b"worker-1"]
        assert told.consumers.health.tolist() == [Health.HEALTHY]
        assert (told.consumers.credit_messages.tolist(), told.consumers.in_flight.tolist()) == ([4], [1])
        assert (told.broker, told.trouble) == (link.node.name, "")
        assert before_ms - 60_000 < told.started_ms <= told.now_ms
        await link.settle(consumer, got, Operation.ACK, credit_messages=1)
        assert (await stands(link)).consumers.in_flight.tolist() == [0]


async def test_lateness_is_counted_by_its_bounds():
    async with broker() as link:
        consumer = await link.consume()
        await link.put(["a", "b"], in_ms=0)
        taken = 0
        while taken < 2:
            taken += len((await consumer.down(Deliver)).birth)
        told = (await stands(link)).lateness
        assert set(told.topics.tolist()) == {b"t"} and told.counts.sum() == 2
        assert told.up_to_ms.tolist() == sorted(told.up_to_ms.tolist()) and told.up_to_ms[-1] == MAX_TIME_MS
        assert len((await stands(link, "none")).lateness.counts) == 0


async def test_one_topic_and_few_consumers_can_be_asked_for():
    async with broker() as link:
        await link.topic(TopicAction.CREATE, "other")
        for name in ("a", "b", "c"):
            await link.consume(name)
        await link.consume("d", topic="other")
        told = await stands(link, "t", limit=2)
        assert told.topics.topics.tolist() == [b"t"] and told.topics.consumers.tolist() == [3]
        assert told.consumers.consumers.tolist() == [b"a", b"b"]
        assert len((await stands(link)).consumers.consumers) == 4
        assert len((await stands(link, "nobody's")).topics.topics) == 0


async def test_a_broker_that_is_not_ready_says_why():
    async with broker() as link:
        link.node.store.down = "disk full"
        assert (await stands(link)).trouble == "the store is down: disk full"


async def test_a_dropped_topic_is_told_of_no_more():
    async with broker(limits=Limits(count_every_ms=1)) as link:
        await link.put(["a"], in_ms=3_600_000)
        while not link.node.counts.depths:
            await link.topic(TopicAction.LIST)
        await link.drop()
        assert len((await stands(link)).topics.topics) == 0
        assert link.node.counts.depths == {}


async def test_credit_of_those_that_nobody_hears_of_is_no_room():
    async with broker() as link:
        for name, credit in (("well", 5), ("ill", 7)):
            await link.consume(name, credit=credit)
        next(iter(link.node.dealers)).roster.consumers[b"ill"].heard_ms = -1e9
        await link.node._look_over()
        shown = link.node.metrics.registry.get_sample_value("timeline_credit_messages", {"topic": "t"})
        assert shown == (await stands(link)).topics.credit[0] == 5
