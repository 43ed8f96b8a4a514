"""What becomes a dead letter is counted by its cause, and what expires is counted whoever finds it."""

from __future__ import annotations

import numpy as np

from tests.broker.link import Link, broker, statuses
from timeline.columns import Ragged
from timeline.model import Operation, Status
from timeline.wire import Deliver, PutFlag, Settle, Settled

HOUR_MS = 3_600_000


def counted(link: Link, name: str, **labels: str) -> float:
    return link.node.metrics.registry.get_sample_value(name, {"topic": "t", **labels}) or 0.0


async def test_burials_that_consumers_ask_for_are_counted_by_what_a_person_can_do_about_them():
    reasons = [
        b"",
        b"no such user",
        b"max_deliveries",
        b"max_deliveries: ValueError: 7",
        b"payload damaged",
        b"maximal",
    ]
    async with broker() as link:
        consumer = await link.consume()
        count = len(reasons)
        await link.put([f"m{at}" for at in range(count)])
        got = await consumer.down(Deliver)
        assert len(got.birth) == count
        consumer.up(
            Settle(
                request=1,
                ids=got.ids,
                birth=got.birth,
                version=got.version,
                operation=np.full(count, Operation.BURY, dtype=np.uint8),
                time_ms=np.zeros(count, dtype=np.int64),
                flags=np.zeros(count, dtype=np.uint8),
                op=np.arange(1, count + 1, dtype=np.uint64),
                reasons=Ragged.of(reasons),
                credit_messages=count,
                credit_bytes=0,
            )
        )
        assert statuses(await consumer.down(Settled)) == [Status.OK] * count
        causes = ("consumer", "max_deliveries", "payload damaged")
        assert [counted(link, "timeline_buried_total", cause=cause) for cause in causes] == [3, 2, 1]


async def test_a_release_past_its_expiry_counts_as_expired():
    async with broker() as link:
        consumer = await link.consume()
        expires_ms = np.array([HOUR_MS])
        flags = np.array([PutFlag.IN | PutFlag.EXPIRES_IN], dtype=np.uint8)
        await link.put(["a"], expires_ms=expires_ms, flags=flags)
        got = await consumer.down(Deliver)
        assert statuses(await link.settle(consumer, got, Operation.RELEASE, 2 * HOUR_MS)) == [Status.EXPIRED]
        assert counted(link, "timeline_expired_total") == 1


async def test_what_a_cancel_finds_expired_counts_as_such():
    async with broker() as link:
        flags = np.array([PutFlag.IN | PutFlag.EXPIRES_IN], dtype=np.uint8)
        assert statuses(await link.put(["a"], expires_ms=np.array([20]), flags=flags)) == [Status.OK]
        until_ms = link.node.clock.now_ms() + 21  # the expiry was rounded up
        while link.node.clock.now_ms() < until_ms:
            link.node.clock.observe()
        assert statuses(await link.mutate(Operation.CANCEL, ["a"])) == [Status.EXPIRED]
        assert counted(link, "timeline_expired_total") == 1


async def test_a_put_under_an_expired_id_stores_and_counts_it_as_expired():
    async with broker() as link:
        flags = np.array([PutFlag.IN | PutFlag.EXPIRES_IN], dtype=np.uint8)
        for in_ms in (0, HOUR_MS):
            assert statuses(await link.put(["a"], in_ms, expires_ms=np.array([in_ms + 20]), flags=flags)) == [Status.OK]
            until_ms = link.node.clock.now_ms() + 21  # the expiry was rounded up
            while link.node.clock.now_ms() < until_ms:
                link.node.clock.observe()
        assert counted(link, "timeline_expired_total") == 1


async def test_an_ack_after_its_lease_ran_out_counts_and_is_counted():
    async with broker() as link:
        consumer = await link.consume(credit=1, lease_ms=10)
        await link.put(["a"])
        got = await consumer.down(Deliver)
        while link.node.clock.now_ms() <= int(got.lease_until_ms[0]):
            link.node.clock.observe()
        settled = await link.settle(consumer, got, Operation.ACK)
        assert statuses(settled) == [Status.OK] and settled.answers.late.tolist() == [1]
        assert counted(link, "timeline_late_acks_total") == 1
