"""Why was it late? Each cause comes about for real, and the broker names it."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest

from tests.broker.link import Link, broker, statuses
from tests.broker.slow import SlowStore
from timeline.broker.late import Spans
from timeline.broker.limits import Limits
from timeline.clock import ALONE_MS, Clock
from timeline.model import LateCause, Operation, Status
from timeline.wire import Deliver, Late, LateList, TopicAction, decode_as, encode

pytestmark = pytest.mark.slow

LATE = Limits(late_ms=20)
LONG_MS = 150
"""Long against whatever else may take time on a busy machine meanwhile: the cause is what took most."""


async def passing(link: Link, wait_ms: int = LONG_MS) -> None:
    """Returns when so much time has gone by for the broker."""
    until_ms = link.node.clock.now_ms() + wait_ms
    while link.node.clock.now_ms() < until_ms:
        await link.topic(TopicAction.LIST)


async def answer(link: Link, id: str = "", topic: str = "") -> dict[bytes, LateCause]:
    """What the broker answers, cause by id."""
    told = decode_as(await link.node.service.unary("Late", encode(Late(topic=topic, id=id.encode()))), LateList)
    assert (told.delivered_ms > told.due_ms).all()
    return dict(zip(told.ids.tolist(), map(LateCause, told.cause.tolist()), strict=True))


async def cause_of(link: Link, id: str) -> LateCause:
    """The cause of a late delivery, once there is one: it is noted when the wire has taken it."""
    while (cause := (await answer(link)).get(id.encode())) is None:
        await asyncio.sleep(0)
    return cause


async def test_no_consumer():
    async with broker(limits=LATE) as link:
        await link.put(["a"])
        await passing(link)
        await (await link.consume()).down(Deliver)
        assert await cause_of(link, "a") is LateCause.NO_CONSUMER


async def test_a_consumer_of_which_nothing_is_heard_is_none():
    async with broker(limits=Limits(late_ms=5, heartbeat_ms=5, heartbeats_missed=1)) as link:
        consumer = await link.consume()
        await passing(link, 20)
        await link.put(["a"])
        await passing(link)
        delivered = asyncio.ensure_future(consumer.down(Deliver))
        while not delivered.done():  # one beat lasts 5 ms here, which a busy machine may let pass
            link.beat(consumer)
            await passing(link, 1)
        await delivered
        assert await cause_of(link, "a") is LateCause.NO_CONSUMER


async def test_no_credit():
    async with broker(limits=LATE) as link:
        consumer = await link.consume(credit=1)
        await link.put(["first"])
        first = await consumer.down(Deliver)
        await link.put(["second"])
        await passing(link)
        await link.settle(consumer, first, Operation.ACK)
        await consumer.down(Deliver)
        assert await cause_of(link, "second") is LateCause.NO_CREDIT


async def test_paused():
    async with broker(limits=LATE) as link:
        consumer = await link.consume()
        await link.topic(TopicAction.UPDATE, paused=True)
        await link.put(["a"])
        await passing(link)
        await link.topic(TopicAction.UPDATE, paused=False)
        await consumer.down(Deliver)
        assert await cause_of(link, "a") is LateCause.PAUSED


async def test_rate_limited():
    async with broker(limits=LATE) as link:
        consumer = await link.consume()
        await link.topic(TopicAction.UPDATE, max_rate_per_s=5)
        await link.put(["a", "b"])
        await consumer.down(Deliver)
        second = await consumer.down(Deliver)
        assert await cause_of(link, second.ids[0].decode()) is LateCause.RATE_LIMITED


async def test_produced_late():
    async with broker(limits=LATE) as link:
        consumer = await link.consume()
        await link.put(["a"], in_ms=link.node.clock.now_ms() - 60_000, flags=np.zeros(1, dtype=np.uint8))
        await consumer.down(Deliver)
        assert await cause_of(link, "a") is LateCause.PRODUCED_LATE


async def test_a_lease_that_ran_out():
    async with broker(limits=LATE) as link:
        first = await link.consume("first", lease_ms=10, credit=1)
        await link.put(["a"])
        await first.down(Deliver)
        await passing(link)
        await (await link.consume("second")).down(Deliver)
        assert await cause_of(link, "a") is LateCause.LEASE_RAN_OUT


@pytest.mark.slow
async def test_a_store_that_is_locked_by_somebody_else(tmp_path: Path):
    path = tmp_path / "a.db"
    async with broker(f"sqlite:///{path}", limits=LATE) as link:
        consumer = await link.consume()
        await link.put(["pending"], in_ms=150)
        intruder = sqlite3.connect(path, isolation_level=None)
        intruder.execute("BEGIN IMMEDIATE")
        await passing(link, 150 + LONG_MS)
        intruder.execute("ROLLBACK")
        intruder.close()
        await consumer.down(Deliver)
        assert await cause_of(link, "pending") is LateCause.STORE_SLOW


async def test_a_put_that_the_store_held_up(tmp_path: Path):
    path = tmp_path / "a.db"
    async with broker(f"sqlite:///{path}", limits=LATE) as link:
        await link.consume()
        intruder = sqlite3.connect(path, isolation_level=None)
        intruder.execute("BEGIN IMMEDIATE")
        pipe = link.open("Produce")
        pipe.up(link.puts(["held up"]))
        await passing(link, 10)
        pipe.up(link.puts(["behind it"]))
        await passing(link)
        intruder.execute("ROLLBACK")
        intruder.close()
        assert [statuses(await pipe.down()) for _ in range(2)] == [[Status.OK]] * 2
        assert await cause_of(link, "held up") is LateCause.STORE_SLOW
        assert await cause_of(link, "behind it") is LateCause.STORE_SLOW


@pytest.mark.slow
async def test_a_broker_that_was_stopped(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/a.db"
    async with broker(url, limits=LATE) as link:
        await link.put(["a"], in_ms=20)
        due_ms = link.node.clock.now_ms() + 20
    while time.time() * 1_000 < due_ms + LONG_MS:
        await asyncio.sleep(0)
    async with broker(url, limits=LATE) as link:
        await passing(link, 20)  # its consumers find their way back
        await (await link.consume()).down(Deliver)
        assert await cause_of(link, "a") is LateCause.BROKER_DOWN


async def test_a_clock_that_jumped():
    """The machine's wall clock is set an hour ahead; nobody confirms it, so it is followed after a minute."""
    ahead_s = {"wall": 0.0, "monotonic": 0.0}
    clock = Clock(lambda: time.time() + ahead_s["wall"], lambda: time.monotonic() + ahead_s["monotonic"])
    async with broker(limits=Limits(late_ms=5, observe_every_ms=5), clock=clock) as link:
        await link.put(["a"], in_ms=1_800_000)
        consumer = await link.consume()
        ahead_s["wall"] = 3_600.0
        while clock.step_ms == 0.0:
            await link.topic(TopicAction.LIST)
        ahead_s["monotonic"] = ahead_s["wall"] = ALONE_MS / 1_000.0
        ahead_s["wall"] += 3_600.0
        while clock.step_ms:
            await link.topic(TopicAction.LIST)
        link.beat(consumer)
        await consumer.down(Deliver)
        assert await cause_of(link, "a") is LateCause.CLOCK


async def test_what_is_not_delivered_yet_is_told_with_what_keeps_it():
    async with broker(limits=LATE) as link:
        await link.put(["overdue", "waits"], in_ms=[0, 3_600_000])
        await link.topic(TopicAction.UPDATE, paused=True)
        consumer = await link.consume()
        await passing(link)
        assert await answer(link) == {}
        assert await answer(link, id="overdue", topic="t") == {b"overdue": LateCause.PAUSED}
        assert await answer(link, id="waits", topic="t") == {}
        assert await answer(link, id="absent", topic="t") == {}
        assert await answer(link, id="overdue", topic="absent") == {}
        await link.topic(TopicAction.UPDATE, paused=False)
        await consumer.down(Deliver)
        assert await cause_of(link, "overdue") is LateCause.PAUSED
        assert await answer(link, id="overdue", topic="t") == {b"overdue": LateCause.PAUSED}


async def test_while_the_store_is_down_the_ring_still_answers():
    async with broker(limits=LATE) as link:
        await link.put(["a"])
        await passing(link)
        await (await link.consume()).down(Deliver)
        link.node.store.down = "the disk is full"
        assert await answer(link, id="a", topic="t") == {b"a": LateCause.NO_CONSUMER}


async def test_a_dropped_topics_late_deliveries_are_not_those_of_a_new_one_of_its_name():
    async with broker(limits=LATE) as link:
        await link.put(["a"])
        await passing(link)
        await (await link.consume()).down(Deliver)
        await cause_of(link, "a")
        await link.drop()
        assert await answer(link) == {}
        await link.topic(TopicAction.CREATE)
        assert await answer(link) == await answer(link, topic="t") == await answer(link, id="a", topic="t") == {}


async def test_a_topic_that_is_dropped_while_one_asks_why():
    store = SlowStore()
    async with broker(store, limits=LATE) as link:
        await link.put(["a"])
        await passing(link)
        store.hold("scan")
        asking = asyncio.ensure_future(answer(link, id="a", topic="t"))
        await store.arrived("scan")
        await link.drop()
        store.release("scan")
        assert await asking == {b"a": LateCause.NO_CONSUMER}


async def test_a_slow_call_of_one_topic_is_noted_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[tuple[int, int]] = []
    add = Spans.add

    def counted(spans: Spans, since_ms: int, until_ms: int) -> None:
        noted.append((since_ms, until_ms))
        add(spans, since_ms, until_ms)

    async with broker() as link:
        for number in range(5):
            await link.topic(TopicAction.CREATE, f"other{number}")
        monkeypatch.setattr(Spans, "add", counted)
        link.node.store.took(150.0)
        assert len(noted) == 1, "where each of a thousand topics tells all others, that is a million notes"
        for dealer in link.node.dealers:
            told = dealer._causes._spans[LateCause.STORE_SLOW]
            assert next(reversed(told))[1] == noted[0][1], f"{dealer.topic.name} does not know"
