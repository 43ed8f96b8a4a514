"""A whole broker in this process, spoken to in frames: delivery, credit, sessions, settling, dead letters, drain."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest

from tests.broker.link import broker, statuses
from tests.broker.machines import Town, town
from timeline.broker.limits import Limits
from timeline.broker.node import Node
from timeline.clock import Clock
from timeline.columns import Ragged
from timeline.metrics import Metrics
from timeline.model import LateCause, LeavingReason, Operation, State, Status
from timeline.storage_plugins.contract import Opened
from timeline.storage_plugins.memory import MemoryStore
from timeline.sync.membership import Member
from timeline.sync.view import LocalMembership
from timeline.wire import (
    Credit,
    Deliver,
    Fault,
    Forecast,
    Forecasted,
    Late,
    LateList,
    Leaving,
    Produce,
    Produced,
    Scan,
    ScanPage,
    SettleFlag,
    TopicAction,
    TransportError,
    decode_as,
    encode,
)


async def test_put_deliver_ack_and_it_is_gone():
    async with broker() as link:
        consumer = await link.consume()
        assert statuses(await link.put(["a", "b"])) == [Status.OK, Status.OK]
        got = await consumer.down(Deliver)
        while len(got.birth) < 2:
            more = await consumer.down(Deliver)
            got.ids = Ragged.concat([got.ids, more.ids])
            got.birth, got.version = np.append(got.birth, more.birth), np.append(got.version, more.version)
            got.payloads = Ragged.concat([got.payloads, more.payloads])
        assert sorted(got.ids) == [b"a", b"b"]
        assert sorted(got.payloads) == [b"pa", b"pb"]
        assert got.version.tolist() == [2, 2]
        assert statuses(await link.settle(consumer, got, Operation.ACK)) == [Status.OK, Status.OK]
        assert await link.ids() == []
        assert statuses(await link.settle(consumer, got, Operation.ACK)) == [Status.NOT_FOUND] * 2


async def test_nothing_is_pushed_before_its_due():
    async with broker() as link:
        consumer = await link.consume()
        await link.put(["later"], in_ms=60)
        got = await consumer.down(Deliver)
        assert got.pushed_ms >= int(got.due_ms[0])
        assert link.node.clock.now_ms() >= int(got.due_ms[0])


async def test_credit_bounds_what_is_in_flight_and_settling_gives_it_back():
    async with broker() as link:
        consumer = await link.consume(credit=2)
        await link.put([f"m{at}" for at in range(5)])
        first = await consumer.down(Deliver)
        taken = len(first.birth)
        while taken < 2:
            taken += len((await consumer.down(Deliver)).birth)
        assert taken == 2
        assert len(await link.ids(State.AVAILABLE)) == 3
        await link.settle(consumer, first, Operation.ACK)
        again = await consumer.down(Deliver)
        assert len(again.birth) <= len(first.birth)


async def test_messages_are_dealt_evenly_over_consumers():
    async with broker() as link:
        consumers = [await link.consume(f"c{at}") for at in range(3)]
        await link.topic(TopicAction.UPDATE, paused=True)
        await link.put([f"m{at:02}" for at in range(30)])
        await link.topic(TopicAction.UPDATE, paused=False)
        counts = []
        for consumer in consumers:
            count = 0
            while count < 10:
                count += len((await consumer.down(Deliver)).birth)
            counts.append(count)
        assert counts == [10, 10, 10]


async def test_release_comes_back_and_extend_moves_the_end_of_the_lease():
    async with broker() as link:
        consumer = await link.consume()
        await link.put(["a"])
        got = await consumer.down(Deliver)
        extended = await link.settle(consumer, got, Operation.EXTEND, 3_600_000, credit=0)
        assert statuses(extended) == [Status.OK]
        assert int(extended.answers.due_ms[0]) > int(got.lease_until_ms[0])
        released = await link.settle(consumer, got, Operation.RELEASE, 0)
        assert statuses(released) == [Status.OK]
        again = await consumer.down(Deliver)
        assert (again.version[0], again.deliveries[0]) == (4, 2)
        assert statuses(await link.settle(consumer, got, Operation.ACK)) == [Status.FENCED]
        too_long = await link.settle(consumer, again, Operation.EXTEND, 13 * 3_600_000, credit=0)
        assert statuses(too_long) == [Status.INVALID]
        assert "max_lease" in too_long.answers.details[0]


async def test_an_unseen_release_takes_the_delivery_back():
    async with broker() as link:
        consumer = await link.consume()
        await link.put(["a"])
        got = await consumer.down(Deliver)
        await link.settle(consumer, got, Operation.RELEASE, 0, flags=SettleFlag.UNSEEN)
        again = await consumer.down(Deliver)
        assert again.deliveries.tolist() == [1]
        assert again.scheduled_ms.tolist() == got.scheduled_ms.tolist()


async def test_the_same_session_keeps_its_tokens_and_gets_the_rest_again():
    async with broker() as link:
        first = await link.consume(session=5)
        await link.put(["kept"])
        kept = await first.down(Deliver)
        await link.put(["lost"])
        lost = await first.down(Deliver)
        second = await link.consume(session=5, in_hand=kept)
        again = await second.down(Deliver)
        assert again.ids.tolist() == [b"lost"]
        assert again.version[0] == lost.version[0] + 1
        assert statuses(await link.settle(second, kept, Operation.ACK)) == [Status.OK]
        assert statuses(await link.settle(second, lost, Operation.ACK)) == [Status.FENCED]
        assert statuses(await link.settle(second, again, Operation.ACK)) == [Status.OK]


async def test_another_session_supersedes_the_first():
    async with broker() as link:
        first = await link.consume(session=1)
        await link.put(["a"])
        got = await first.down(Deliver)
        second = await link.consume(session=2)
        leaving = await first.down(Leaving)
        assert leaving.reason is LeavingReason.SUPERSEDED
        again = await second.down(Deliver)
        assert again.version[0] == got.version[0] + 1


async def test_a_lease_that_ran_out_is_delivered_again_and_its_cause_is_known():
    async with broker() as link:
        first = await link.consume("first", lease_ms=30, credit=1)
        await link.put(["a"])
        got = await first.down(Deliver)
        second = await link.consume("second")
        again = await second.down(Deliver)
        assert again.ids.tolist() == [b"a"]
        assert again.version[0] == got.version[0] + 1
        assert statuses(await link.settle(first, got, Operation.ACK)) == [Status.FENCED]


async def test_what_was_delivered_too_often_becomes_a_dead_letter_and_can_be_revived():
    async with broker() as link:
        await link.topic(TopicAction.UPDATE, max_deliveries=1)
        consumer = await link.consume()
        await link.put(["a"])
        got = await consumer.down(Deliver)
        await link.settle(consumer, got, Operation.RELEASE, 0)
        await link.put(["b"])
        assert (await consumer.down(Deliver)).ids.tolist() == [b"b"]
        assert await link.ids(State.DEAD) == [b"a"]
        assert statuses(await link.mutate(Operation.REVIVE, ["a"])) == [Status.OK]
        assert (await consumer.down(Deliver)).ids.tolist() == [b"a"]
        assert statuses(await link.mutate(Operation.PURGE, ["a"])) == [Status.LEASED]


async def test_bury_keeps_the_reason():
    async with broker() as link:
        consumer = await link.consume()
        await link.put(["a"])
        got = await consumer.down(Deliver)
        assert statuses(await link.settle(consumer, got, Operation.BURY, reason=b"no such user")) == [Status.OK]
        async for data in link.node.service.unary_stream("Scan", encode(Scan("t", states=(State.DEAD,)))):
            assert decode_as(data, ScanPage).rows.dead.tolist() == [b"no such user"]
        assert statuses(await link.put(["a"], payloads=Ragged.of([b"other"]))) == [Status.EXISTS]


async def test_move_and_cancel_answer_definitely():
    async with broker() as link:
        await link.put(["a", "b"], in_ms=3_600_000)
        moved = await link.mutate(Operation.MOVE, ["a", "zz"], 1)
        assert statuses(moved) == [Status.OK, Status.NOT_FOUND]
        assert statuses(await link.mutate(Operation.CANCEL, ["b"], group="other")) == [Status.FORBIDDEN]
        assert statuses(await link.mutate(Operation.CANCEL, ["b", "b"])) == [Status.OK, Status.NOT_FOUND]
        consumer = await link.consume()
        assert (await consumer.down(Deliver)).ids.tolist() == [b"a"]
        assert statuses(await link.mutate(Operation.MOVE, ["a"], 5)) == [Status.LEASED]


async def test_one_bad_message_does_not_harm_its_batch():
    async with broker() as link:
        payloads = Ragged.of([b"", b"x" * (1024 * 1024 + 1), b"", b""])
        answer = await link.put(
            ["ok", "large", "a\0b", "far"], in_ms=[0, 0, 0, 11 * 366 * 86_400_000], payloads=payloads
        )
        assert statuses(answer) == [Status.OK, Status.TOO_LARGE, Status.INVALID, Status.INVALID]
        assert "1048576 bytes" in answer.answers.details[1]
        assert "horizon" in answer.answers.details[3]
        assert await link.ids() == [b"ok"]


async def test_an_unknown_topic_is_not_found_everywhere():
    async with broker() as link:
        assert statuses(await link.put(["a"], topic="nope")) == [Status.NOT_FOUND]
        assert statuses(await link.mutate(Operation.CANCEL, ["a"], topic="nope")) == [Status.NOT_FOUND]
        with pytest.raises(TransportError) as refused:
            await link.node.service.unary("Forecast", encode(Forecast("nope", 1_000, 100)))
        assert refused.value.fault is Fault.NO_TOPIC


async def test_a_bad_frame_is_refused_with_its_reason_and_harms_nobody():
    async with broker() as link:
        with pytest.raises(TransportError) as refused:
            await link.node.service.unary("Mutate", b"no frame at all")
        assert refused.value.fault is Fault.REFUSED_FRAME
        assert statuses(await link.put(["a"])) == [Status.OK]


async def test_pause_stops_deliveries_not_puts_and_resume_says_why_it_was_late():
    async with broker(limits=Limits(late_ms=5)) as link:
        await link.topic(TopicAction.UPDATE, paused=True)
        consumer = await link.consume()
        await link.put(["a"], in_ms=0)
        link.beat(consumer)
        before_ms = link.node.clock.now_ms()
        while link.node.clock.now_ms() < before_ms + 20:
            await link.topic(TopicAction.LIST)
        await link.topic(TopicAction.UPDATE, paused=False)
        assert (await consumer.down(Deliver)).ids.tolist() == [b"a"]
        late = decode_as(await link.node.service.unary("Late", encode(Late())), LateList)
        assert late.ids.tolist() == [b"a"]
        assert LateCause(int(late.cause[0])) is LateCause.PAUSED


def test_a_rate_limit_spreads_deliveries() -> None:
    """In virtual time: ten at once, then a hundred a second."""

    async def story(made: Town) -> None:
        await made.broker("b1")
        await made.create_topic(max_rate_per_s=100)
        await made.put([0.0] * 30)
        made.consume("c")
        await made.until(lambda: len(made.received) == 30, within_s=5.0)

    with town() as made:
        made.run(story(made))
    at_s = [received.at_s for received in made.received]
    assert 0.15 <= at_s[-1] - at_s[0] <= 0.5
    assert sum(moment - at_s[0] < 0.05 for moment in at_s) < 20


async def test_too_many_puts_waiting_are_throttled_with_a_wait():
    async with broker(limits=Limits(intake_messages=3)) as link:
        pipe = link.open("Produce")
        for request in range(1, 41):
            pipe.up(
                Produce(
                    request=request,
                    topic="t",
                    group="default",
                    ids=Ragged.of([b"%d-%d" % (request, at) for at in range(2)]),
                    birth=np.array([request * 2, request * 2 + 1], dtype=np.uint64),
                    time_ms=np.zeros(2, dtype=np.int64),
                    flags=np.ones(2, dtype=np.uint8),
                    payloads=Ragged.of([b"", b""]),
                )
            )
        answers = [await pipe.down(Produced) for _ in range(40)]
        throttled = [answer for answer in answers if statuses(answer)[0] is Status.THROTTLED]
        assert throttled
        assert all(answer.retry_after_ms > 0 for answer in throttled)
        stored = 2 * (40 - len(throttled))
        assert len(await link.ids()) == stored


async def test_forecast_counts_what_is_to_come():
    async with broker() as link:
        await link.put(["a", "b"], in_ms=90_000)
        await link.put(["c"], in_ms=[150_000])
        answer = decode_as(
            await link.node.service.unary("Forecast", encode(Forecast("t", 240_000, 60_000))), Forecasted
        )
        assert answer.counts.tolist() == [0, 2, 1, 0]
        assert (answer.overdue, answer.exact) == (0, True)


async def test_drain_hands_back_what_was_not_pushed_and_still_takes_settles():
    async with broker(limits=Limits(drain_streams_ms=60_000)) as link:
        consumer = await link.consume("slow", credit=50)
        await link.put(["seen"])
        seen = await consumer.down(Deliver)
        consumer.flowing.clear()
        await link.put([f"m{at}" for at in range(10)])
        draining = asyncio.ensure_future(link.node.drain(60_000))
        consumer.flowing.set()
        leaving = await consumer.down(Leaving)
        assert leaving.reason is LeavingReason.DRAINING
        assert statuses(await link.settle(consumer, seen, Operation.ACK)) == [Status.OK]
        await consumer.close()
        await draining
        assert link.node.not_ready


async def test_heartbeats_are_answered_and_credit_adds_up():
    async with broker() as link:
        consumer = await link.consume(credit=0)
        consumer.up(Credit(echo=9))
        beat = await consumer.down()
        assert beat.echo == 9
        await link.put(["a"])
        consumer.up(Credit(messages=1, bytes=100))
        assert (await consumer.down(Deliver)).ids.tolist() == [b"a"]


async def test_what_was_leased_ahead_is_not_early_for_a_session_that_takes_over():
    async with broker() as link:
        await link.topic(TopicAction.UPDATE, lease_ahead_ms=60_000)
        await link.consume(session=1)
        await link.put(["a"], in_ms=150)
        assert await link.ids(State.LEASED) == [b"a"]
        second = await link.consume(session=2)
        got = await second.down(Deliver)
        assert got.pushed_ms >= int(got.scheduled_ms[0])
        assert statuses(await link.settle(second, got, Operation.ACK)) == [Status.OK]


async def test_what_a_consumer_holds_comes_back_only_within_its_credit():
    async with broker() as link:
        first = await link.consume(session=1)
        await link.put(["a", "b", "c"], payloads=Ragged.of([b"x" * 40] * 3))
        taken = 0
        while taken < 3:
            taken += len((await first.down(Deliver)).birth)
        second = await link.consume(session=2, credit=2, credit_bytes=50)
        got = await second.down(Deliver)
        assert len(got.birth) == 1
        assert len(await link.ids(State.LEASED)) == 3


async def test_a_lease_that_ends_in_the_outbox_is_not_sent_and_its_credit_comes_back():
    async with broker() as link:
        consumer = await link.consume(lease_ms=20, credit=2)
        consumer.flowing.clear()
        await link.put(["a"])
        link.beat(consumer)
        before_ms = link.node.clock.now_ms()
        while link.node.clock.now_ms() < before_ms + 60:
            await link.topic(TopicAction.LIST)
        consumer.flowing.set()
        deliveries = [await consumer.down(Deliver), await consumer.down(Deliver)]
        assert [got.ids.tolist() for got in deliveries] == [[b"a"], [b"a"]]
        assert deliveries[0].version[0] < deliveries[1].version[0]
        assert all(got.pushed_ms < int(got.lease_until_ms[0]) for got in deliveries)


async def test_a_frame_that_asks_for_nothing_is_answered():
    async with broker() as link:
        await link.put(["a"])
        consumer = await link.consume()
        got = await consumer.down(Deliver)
        assert statuses(await link.put([])) == statuses(await link.mutate(Operation.CANCEL, [])) == []
        nothing = replace(got, ids=got.ids[:0], birth=got.birth[:0], version=got.version[:0])
        assert statuses(await link.settle(consumer, nothing, Operation.ACK)) == []
        assert statuses(await link.settle(consumer, got, Operation.ACK)) == [Status.OK]


async def test_etcd_counts_as_gone_only_while_a_broker_waits_to_join() -> None:
    """Not while it waits for its store, which may be all that is down."""
    metrics, seen = Metrics(), dict[str, float | None]()

    def note(when: str) -> None:
        seen[when] = metrics.registry.get_sample_value("timeline_etcd_up")

    class WatchedStore(MemoryStore):
        async def open(self) -> Opened:
            note("opens its store")
            return await super().open()

    class WatchedMembership(LocalMembership):
        async def start(self, member: Member, cluster_uid: str) -> None:
            note("joins")
            await super().start(member, cluster_uid)

    node = Node(
        store=WatchedStore(),
        clock=Clock(),
        membership=WatchedMembership(),
        random_bits=random.Random(1).getrandbits,
        name="b1",
        metrics=metrics,
    )
    await node.start()
    await node.stop()
    assert seen == {"opens its store": 1.0, "joins": 0.0}
