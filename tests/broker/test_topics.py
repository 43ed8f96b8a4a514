"""Topics: created once, tuned live, dropped for good."""

from __future__ import annotations

from tests.broker.link import broker
from tests.broker.test_node import scan
from timeline.model import Status
from timeline.wire import Leaving, LeavingReason, TopicAction


async def test_topics_are_created_once_and_conflicts_are_named():
    async with broker() as link:
        assert (await link.topic(TopicAction.CREATE)).status == Status.OK.code
        conflict = await link.topic(TopicAction.CREATE, lease_ms=5)
        assert conflict.status == Status.EXISTS.code
        assert "lease" in conflict.detail
        unknown = await link.topic(TopicAction.CREATE, "u", leese_ms=5)
        assert unknown.status == Status.INVALID.code
        assert "lease_ms" in unknown.detail
        fixed = await link.topic(TopicAction.UPDATE, buckets=3)
        assert fixed.status == Status.INVALID.code
        assert (await link.topic(TopicAction.DROP, "nope")).status == Status.NOT_FOUND.code


async def test_a_topic_that_was_tuned_since_is_no_conflict_for_whoever_did_not_ask_for_it():
    async with broker() as link:
        await link.topic(TopicAction.UPDATE, remember_ms=5_000)
        again = await link.topic(TopicAction.CREATE, lease_ms=30_000)
        assert again.status == Status.OK.code
        assert again.topics[0].settings.remember_ms == 5_000
        conflict = await link.topic(TopicAction.CREATE, remember_ms=6_000)
        assert conflict.status == Status.EXISTS.code
        assert "remember_ms is 5000, not 6000" in conflict.detail


async def test_a_dropped_topic_ends_its_streams_and_its_rows_are_never_seen_again():
    async with broker() as link:
        consumer = await link.consume()
        await link.put(["a"], in_ms=3_600_000)
        await link.topic(TopicAction.DROP)
        leaving = await consumer.down(Leaving)
        assert leaving.reason is LeavingReason.TOPIC_DROPPED
        await link.topic(TopicAction.CREATE)
        assert await scan(link) == []
