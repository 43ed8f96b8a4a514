"""Thousands of topics: what a change of one costs, what they cost at rest, and that idle ones are not forgotten."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.broker.link import Link, broker, statuses
from tests.simulation.loop import in_virtual_time, wait
from timeline.broker.catalog import ALONE_MS, READING_SHARE
from timeline.broker.limits import Limits
from timeline.broker.status import EMPTY_COUNTED
from timeline.clock import Clock
from timeline.columns import Ragged
from timeline.metrics import REST, Metrics
from timeline.model import Status, Topic, TopicSettings
from timeline.storage_plugins.contract import Puts, Store, StoreUnavailable, StoreUnknown
from timeline.storage_plugins.memory import MemoryStore
from timeline.wire import BrokerStatus, Deliver, Late, LateList, StatusRequest, TopicAction, decode_as, encode

HOUR_MS = 3_600_000
MANY = 4 * EMPTY_COUNTED


class Counted(MemoryStore):
    """Counts its calls. `shared`: as if other brokers could have opened it, too."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.capabilities = replace(self.capabilities, shared=shared)
        self.calls: Counter[str] = Counter()
        self.take_s = 0.0
        self.failing = 0
        """How many of the next readings of the records fail."""
        self.unknown: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in Store.__abstractmethods__ - {"open", "close", "check"}:
            return found
        self.calls[name] += 1
        if name == "topics" and self.failing:
            self.failing -= 1
            return self._fail
        return self._slowly(name, found) if self.take_s or name in self.unknown else found

    async def _fail(self) -> None:
        raise StoreUnavailable("the test says so")

    def _slowly(self, name: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def slow(*arguments: Any) -> Any:
            if self.take_s:
                await wait(self.take_s)
            answer = await call(*arguments)
            if name in self.unknown:
                raise StoreUnknown("the answer was lost by the test")
            return answer

        return slow


@asynccontextmanager
async def crowded(store: Counted, count: int) -> AsyncIterator[Link]:
    """A broker in virtual time with topics "t" and so many more, all of them looked at."""
    loop = asyncio.get_running_loop()
    await store.open()
    for at in range(count):
        await store.create_topic(Topic(f"t{at}", 1_000 + at, TopicSettings()))
    async with broker(store, clock=Clock(loop.time, loop.time)) as link:
        while len(link.node.counts.depths) < count + 1:
            await wait(1.0)
        await wait(60.0)
        store.calls.clear()
        yield link


async def put_elsewhere(store: Store, topic: Topic, id: bytes, due_ms: int) -> None:
    """A message that comes through another broker, of which this one hears nothing."""
    ids, groups = Ragged.of([id]), Ragged.of([b"default"])
    puts = Puts.filled(1, ids=ids, birth=np.ones(1, dtype=np.uint64), due_ms=np.array([due_ms]), groups=groups)
    answers = await store.put(topic, 1, puts)
    assert answers.status.tolist() == [Status.OK.code]


# ── a change ──


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
async def test_a_change_of_a_topic_asks_the_store_for_that_topic_alone(shared: bool) -> None:
    store = Counted(shared)
    async with broker(store) as link:
        for at in range(MANY):
            await link.topic(TopicAction.CREATE, f"t{at}")
        store.calls.clear()
        await link.topic(TopicAction.CREATE, "new")
        assert store.calls == {"create_topic": 1}
        changed = await link.topic(TopicAction.UPDATE, "t7", lease_ms=5_000)
        assert changed.topics[0].settings.lease_ms == 5_000
        assert store.calls == {"create_topic": 1, "update_topic": 1}
        assert (await link.drop("t7")).status == Status.OK.code
        assert store.calls == {"create_topic": 1, "update_topic": 1, "drop_topic": 1}


async def test_where_nobody_else_can_change_a_topic_the_records_are_read_once() -> None:
    store = Counted()
    async with broker(store) as link:
        for _ in range(3):
            assert [topic.name for topic in (await link.topic(TopicAction.LIST, "")).topics] == ["t"]
            assert (await link.drop("absent")).status == Status.NOT_FOUND.code
            assert statuses(await link.put(["a"], topic="absent")) == [Status.NOT_FOUND]
        assert store.calls["topics"] == 1


def test_a_topic_that_another_broker_has_just_created_is_found_by_one_that_knows_of_no_other() -> None:
    async def scene() -> None:
        store = Counted(shared=True)
        async with crowded(store, 1) as link:
            loop, find = asyncio.get_running_loop(), link.node.catalog.find
            assert await find("u") is None
            await store.create_topic(Topic("u", 7, TopicSettings()))
            began_s = loop.time()
            topic = await find("u")
            assert topic is not None and topic.uid == 7
            assert loop.time() - began_s <= ALONE_MS / 1000.0

    in_virtual_time(scene)


@pytest.mark.slow
def test_unknown_names_take_a_bounded_share_of_the_time() -> None:
    async def scene() -> None:
        store = Counted(shared=True)
        async with crowded(store, 1) as link:
            store.take_s = 0.05
            began_s = asyncio.get_running_loop().time()
            for at in range(10):
                assert await link.node.catalog.find(f"unknown {at}") is None
            took_s = asyncio.get_running_loop().time() - began_s
            assert store.calls["topics"] * store.take_s <= READING_SHARE * took_s + 2 * store.take_s

    in_virtual_time(scene)


async def test_nobody_is_answered_from_a_reading_that_failed() -> None:
    store = Counted(shared=True)
    async with broker(store) as link:
        await store.create_topic(Topic("u", 7, TopicSettings()))
        store.failing = 1
        both = await asyncio.gather(*[link.node.catalog.find("u") for _ in range(2)], return_exceptions=True)
        failed, found = sorted(both, key=lambda one: isinstance(one, Topic))
        assert isinstance(failed, StoreUnavailable)
        assert isinstance(found, Topic) and found.uid == 7


async def test_a_change_whose_outcome_is_unknown_makes_the_records_be_read_again() -> None:
    store = Counted()
    async with broker(store) as link:
        store.unknown = {"create_topic"}
        with pytest.raises(Exception, match="lost by the test"):
            await link.topic(TopicAction.CREATE, "new")
        store.unknown = set()
        assert statuses(await link.put(["a"], topic="new")) == [Status.OK]


async def test_a_topic_that_another_broker_dropped_and_created_again_is_dropped_and_changed_as_it_stands() -> None:
    store = Counted(shared=True)
    async with broker(store) as link:
        for uid, change in ((77, link.drop), (78, lambda: link.topic(TopicAction.UPDATE, lease_ms=5_000))):
            await link.topic(TopicAction.CREATE)
            known = link.node.catalog.known("t")
            assert known is not None and await store.drop_topic(known)
            await store.create_topic(Topic("t", uid, TopicSettings()))
            answer = await change()
            assert (answer.status, answer.topics[0].uid) == (Status.OK.code, uid)
        await store.drop_topic(Topic("t", 78, TopicSettings()))
        assert (await link.drop()).status == Status.NOT_FOUND.code
        assert link.node.catalog.all() == []


def test_a_broker_that_hears_of_many_changes_spends_a_bounded_share_of_its_time_on_them() -> None:
    async def scene() -> None:
        store = Counted(shared=True)
        async with crowded(store, 0) as link:
            store.take_s = 0.1
            await link.node.catalog.refresh()
            store.calls.clear()
            hints = []
            for _ in range(100):
                hints.append(asyncio.ensure_future(link.node.catalog.hinted()))
                await wait(0.05)
            await asyncio.gather(*hints)
            assert 3 <= store.calls["topics"] <= 8

    in_virtual_time(scene)


# ── a start ──


class Surveyed(Counted):
    """Tells in one call which topics have messages. `look`: what happens during that call."""

    look: Callable[[], Awaitable[object]] | None = None

    async def next_dues(self) -> dict[int, int] | None:
        self.calls["next_dues"] += 1
        found = await super().next_dues()
        if self.look is not None:
            await self.look()
        return found


@pytest.mark.slow
def test_a_restarted_broker_learns_in_one_call_which_topics_are_empty() -> None:
    async def scene() -> None:
        store = Surveyed(shared=True)
        await store.open()
        topics = [Topic(f"t{at}", 1_000 + at, TopicSettings()) for at in range(MANY)]
        for topic in topics:
            await store.create_topic(topic)
        for topic in topics[:2]:
            await put_elsewhere(store, topic, b"a", HOUR_MS)
        loop = asyncio.get_running_loop()
        async with broker(store, clock=Clock(loop.time, loop.time)) as link:
            await wait(link.node.limits.count_every_ms / 2_000)
            assert (store.calls["next_dues"], store.calls["next_due"]) == (1, 0)
            depths = link.node.counts.depths
            assert depths.keys() >= {topic.uid for topic in topics[2:]}
            assert not depths.keys() & {topic.uid for topic in topics[:2]}
            assert all(depth.counted_ms and not depth.next_due_ms for depth in depths.values())
            value = link.node.metrics.registry.get_sample_value
            assert value("timeline_messages_depth", {"topic": "t7", "state": "waiting"}) == 0
            await wait(60.0)
            assert all(depths[topic.uid].next_due_ms == HOUR_MS for topic in topics[:2])
            link.node.counts.restart()  # as when another broker is gone
            await wait(10.0)
            assert store.calls["next_dues"] == 2 and len(depths) == MANY + 1

    in_virtual_time(scene)


def test_a_put_during_the_look_at_all_topics_is_not_taken_for_none() -> None:
    async def scene() -> None:
        store = Surveyed(shared=True)
        await store.open()
        for at in range(MANY):
            await store.create_topic(Topic(f"t{at}", 1_000 + at, TopicSettings()))
        loop = asyncio.get_running_loop()
        async with broker(store, clock=Clock(loop.time, loop.time)) as link:
            await wait(1.0)
            link.node.counts.restart()
            store.look = lambda: link.put(["a"], HOUR_MS, topic="t3")
            await link.node.counts.survey()
            assert 1_003 not in link.node.counts.depths and 1_004 in link.node.counts.depths

    in_virtual_time(scene)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_topics_are_counted_one_by_one_if_the_look_at_all_says_nothing(fails: bool) -> None:
    class Mute(Surveyed):
        async def next_dues(self) -> dict[int, int] | None:
            await super().next_dues()
            if fails:
                raise StoreUnavailable("the test says so")
            return None

    async def scene() -> None:
        store = Mute()
        async with crowded(store, MANY) as link:
            assert len(link.node.counts.depths) == MANY + 1
            assert link.node.not_ready == ""

    in_virtual_time(scene)


# ── at rest ──


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_an_idle_minute_costs_the_same_however_many_topics_there_are(shared: bool) -> None:
    calls = []

    async def scene() -> None:
        for count in (MANY, 3 * MANY):
            store = Counted(shared)
            async with crowded(store, count):
                await wait(60.0)
                calls.append(dict(store.calls))

    in_virtual_time(scene)
    few, more = calls
    assert few.keys() == more.keys()
    assert all(abs(few[name] - more[name]) <= EMPTY_COUNTED for name in few), calls
    assert sum(more.values()) <= 2 * 13 * EMPTY_COUNTED + 60
    assert not {"count_due", "lease_due"} & more.keys()


def test_topics_without_a_consumer_have_no_task_and_wake_nobody() -> None:
    woken = []

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        for count in (0, MANY):
            async with crowded(Counted(), count) as link:
                pipe = await link.consume()
                await pipe.close()
                await wait(0.5)  # a call of the store is a task, too, until the first count is over
                tasks, timers = len(asyncio.all_tasks()), [0]
                call_at = loop.call_at

                def counted(*arguments: Any, at: Any = call_at, counts: list[int] = timers, **more: Any) -> Any:
                    counts[0] += 1
                    return at(*arguments, **more)

                loop.call_at = counted  # type: ignore[method-assign]
                await wait(4.0)
                loop.call_at = call_at  # type: ignore[method-assign]
                woken.append((tasks, timers[0]))

    in_virtual_time(scene)
    (few_tasks, few_timers), (tasks, timers) = woken
    assert tasks == few_tasks
    assert timers <= few_timers + 3 * EMPTY_COUNTED, "one for each empty topic that is looked at, no more"


@pytest.mark.slow
async def test_an_empty_topic_takes_little_memory() -> None:
    async with broker() as link:
        for at in range(MANY):  # what is made once
            await link.topic(TopicAction.CREATE, f"before{at}")
        tracemalloc.start()
        try:
            for at in range(MANY):
                await link.topic(TopicAction.CREATE, f"t{at}")
            taken = tracemalloc.get_traced_memory()[0] / MANY
            for at in range(MANY):
                await link.put(["a"], HOUR_MS, topic=f"t{at}")
            with_one = tracemalloc.get_traced_memory()[0] / MANY
        finally:
            tracemalloc.stop()
    assert taken < 4 * 1024
    assert with_one < 24 * 1024


# ── nobody is forgotten ──


@pytest.mark.prove
@pytest.mark.slow
def test_what_is_put_to_an_idle_topic_is_counted_and_swept_again() -> None:
    async def scene() -> None:
        store = Counted(shared=True)
        async with crowded(store, MANY) as link:
            await link.put(["a"], HOUR_MS, topic="t3", expires_ms=np.array([link.node.clock.now_ms() + 2 * HOUR_MS]))
            assert 1_003 not in link.node.counts.depths, "as counted it had none: that is not known any more"
            await wait(12.0)
            assert link.node.counts.depths[1_003].waiting == 1
            await wait(2 * HOUR_MS / 1000 + 15)
            depth = link.node.counts.depths[1_003]
            assert (depth.waiting, depth.available, depth.next_due_ms) == (0, 0, 0)
            swept = link.node.metrics.registry.get_sample_value("timeline_expired_total", {"topic": "t3"})
            assert swept == 1

    in_virtual_time(scene)


@pytest.mark.slow
def test_what_another_broker_put_to_an_idle_topic_is_counted_in_its_turn() -> None:
    async def scene() -> None:
        store = Counted(shared=True)
        async with crowded(store, MANY) as link:
            topic = await link.node.catalog.find("t5")
            assert topic is not None
            await put_elsewhere(store, topic, b"a", link.node.clock.now_ms() + HOUR_MS)
            rounds = 2 + (MANY + 1) // EMPTY_COUNTED
            await wait(rounds * (link.node.limits.count_every_ms / 1000 + 1))
            assert link.node.counts.depths[topic.uid].waiting == 1

    in_virtual_time(scene)


@pytest.mark.parametrize("when", ["before the consumer", "after the consumer"])
def test_a_message_of_an_idle_topic_that_another_broker_put_is_delivered(when: str) -> None:
    async def scene() -> None:
        store = Counted(shared=True)
        async with crowded(store, MANY) as link:
            topic = await link.node.catalog.find("t9")
            assert topic is not None
            if when == "before the consumer":
                await put_elsewhere(store, topic, b"a", link.node.clock.now_ms())
            pipe = await link.consume(topic="t9")
            if when == "after the consumer":
                await wait(1.0)
                await put_elsewhere(store, topic, b"a", link.node.clock.now_ms())
            began_s = asyncio.get_running_loop().time()
            assert (await pipe.down(Deliver)).ids.tolist() == [b"a"]
            waited_ms = (asyncio.get_running_loop().time() - began_s) * 1000
            assert waited_ms <= (0 if when == "before the consumer" else link.node.limits.sweep_every_ms)

    in_virtual_time(scene)


@pytest.mark.slow
def test_the_first_message_of_an_idle_topic_is_as_punctual_as_any() -> None:
    async def scene() -> None:
        async with crowded(Counted(), MANY) as link:
            first = await link.consume("early", topic="t9")
            await first.close()
            await wait(600.0)
            pipe = await link.consume(topic="t9")
            for id in ("a", "b"):
                link.beat(pipe)
                await link.put([id], 1_500, topic="t9")
                due_s = asyncio.get_running_loop().time() + 1.5
                assert (await pipe.down(Deliver)).ids.tolist() == [id.encode()]
                assert abs(asyncio.get_running_loop().time() - due_s) < 0.002

    in_virtual_time(scene)


async def test_a_topic_that_never_had_a_consumer_still_has_its_place_in_answers() -> None:
    async with broker(limits=Limits(late_ms=-1)) as link:
        await link.put(["a"], 0)
        await asyncio.sleep(0)
        told = decode_as(await link.node.service.unary("Stand", encode(StatusRequest("", 10))), BrokerStatus)
        assert told.topics.topics.tolist() == [b"t"] and told.topics.dealt.tolist() == [64]
        value = link.node.metrics.registry.get_sample_value
        assert value("timeline_consumers", {"topic": "t", "health": "healthy"}) == 0
        assert value("timeline_messages_depth", {"topic": "t", "state": "waiting"}) == 0
        late = decode_as(await link.node.service.unary("Late", encode(Late(topic="t", id=b"a"))), LateList)
        assert late.ids.tolist() == [b"a"], "and 'why' has its answer"


# ── what is shown ──


def test_empty_topics_past_those_shown_by_name_keep_no_gauges_and_their_sum_is_there() -> None:
    metrics = Metrics(topics_shown=2)
    for at in range(50):
        metrics.topic_gauge("timeline_credit_messages", f"t{at}", 0)
        metrics.topic_gauge("timeline_buckets", f"t{at}", 64)
    value = metrics.registry.get_sample_value
    assert value("timeline_credit_messages", {"topic": REST}) == 0
    assert value("timeline_buckets", {"topic": REST}) == 48 * 64
    metrics.topic_gauge("timeline_credit_messages", "t40", 7)
    assert value("timeline_credit_messages", {"topic": REST}) == 7
    metrics.topic_gauge("timeline_credit_messages", "t40", 0)
    assert value("timeline_credit_messages", {"topic": REST}) == 0
    metrics.forget_topic("t0")
    assert value("timeline_credit_messages", {"topic": "t0"}) is None
    assert value("timeline_buckets", {"topic": REST}) == 48 * 64
