"""Several brokers on one store in virtual time, nothing going wrong but what a test breaks: who deals what, who tells
whom, and where drivers go."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import pytest

import timeline
from tests.simulation.world import World
from timeline.broker.node import Node
from timeline.model import LateCause

T = TypeVar("T")
SOON_MS = 50
"""Far less than any poll or sweep takes."""


class Scene:
    """A world whose brokers run, and clients of its own making."""

    def __init__(self, brokers: int = 2) -> None:
        self.world = World(1, brokers=brokers)
        for broker in self.world.brokers:
            broker.clock.offset_s = broker.clock.drift = 0.0
        self.loop = self.world.loop

    def play(self, scene: Callable[[Scene], Awaitable[T]]) -> T:
        """Runs `scene` once the brokers are up."""

        async def all_of_it() -> T:
            self.loop.create_task(self.world.registry.watch())
            await self.world.start_broker()
            return await scene(self)

        try:
            return self.loop.run_until_complete(all_of_it())
        finally:
            self.loop.finish()

    def client(self, name: str, *brokers: int) -> Any:
        """A client that is given the addresses of these brokers, counted from 1."""
        make = partial(self.world.network.transport, self.world.process(name))
        addresses = [self.world.brokers[number - 1].address for number in brokers]
        clock = self.world.true_clock
        return timeline.Timeline(addresses, 5.0, transport_factory=make, clock=clock, random=random.Random(name))

    def node(self, number: int) -> Node:
        node = self.world.brokers[number - 1].node
        assert node is not None
        return node

    def hints(self, number: int, outcome: str) -> float:
        """How many hints a broker `sent`, `received` or `dropped`."""
        name = "timeline_hints_total"
        return self.node(number).metrics.registry.get_sample_value(name, {"outcome": outcome}) or 0.0

    async def until(self, condition: Callable[[], bool], every_s: float = 0.01) -> None:
        while not condition():
            await self.world.timer.wait(every_s)

    def wait(self, seconds: float) -> Awaitable[None]:
        return self.world.timer.wait(seconds)

    async def take(self, consumer: Any, count: int, after: Callable[[Any], None] = lambda _: None) -> list[Any]:
        """So many deliveries, acknowledged."""
        taken = []
        async for delivery in consumer:
            after(delivery)
            await delivery.ack()
            taken.append(delivery)
            if len(taken) == count:
                break
        return taken

    def late_ms(self, delivery: Any) -> float:
        """How late it is now."""
        return self.world.true_clock.now() - delivery.due_ms


@pytest.mark.slow
def test_what_is_put_through_one_broker_is_dealt_by_another_at_once() -> None:
    async def scene(self: Scene) -> list[float]:
        async with self.client("p", 1) as one, self.client("c", 2) as two:
            await one.create_topic("t", lease="30s")
            producer, consumer = one.producer("t"), two.consumer("t", id="c", credit=100)
            async with producer, consumer:
                late: list[float] = []

                async def put() -> None:
                    await self.until(lambda: bool(self.node(1).membership.hosting(_uid(self, "t"))))
                    for number in range(20):
                        await producer.produce(b"x", id=f"m{number}", in_=("0ms", "200ms")[number % 2])
                        await self.wait(0.3)

                putting = self.loop.create_task(put())
                await self.take(consumer, 20, lambda delivery: late.append(self.late_ms(delivery)))
                await putting
                assert self.hints(1, "sent") >= 10 and self.hints(2, "received") >= 10 and not self.hints(1, "dropped")
                assert not any(dealer.lateness.delivered for dealer in self.node(1).dealers)
                assert not [*self.node(2).late.since(0, {_uid(self, "t"): "t"})]
                return late

    late = Scene().play(scene)
    assert min(late) >= 0 and max(late) < SOON_MS


def _uid(scene: Scene, name: str) -> int:
    topic = scene.node(1).catalog.known(name)
    assert topic is not None
    return topic.uid


def test_what_is_moved_through_one_broker_is_dealt_by_another_at_once() -> None:
    async def scene(self: Scene) -> float:
        async with self.client("p", 1) as one, self.client("c", 2) as two:
            await one.create_topic("t", lease="30s", buckets=2)
            async with one.producer("t") as producer, two.consumer("t", id="c", credit=10) as consumer:
                iterator = aiter(consumer)
                await producer.produce(b"x", id="a", in_="1h")
                taking = self.loop.create_task(anext(iterator))
                await self.wait(1.0)
                await producer.move("a", in_="0ms")
                moved = await taking
                late_ms = self.late_ms(moved)
                await moved.ack()
                return late_ms

    assert Scene().play(scene) < SOON_MS


@pytest.mark.slow
def test_with_hints_cut_the_slow_poll_suffices() -> None:
    async def scene(self: Scene) -> list[float]:
        self.world.network.deaf = 1.0
        async with self.client("p", 1) as one, self.client("c", 2) as two:
            await one.create_topic("t")
            async with one.producer("t") as producer, two.consumer("t", id="c", credit=100) as consumer:
                late: list[float] = []

                async def put() -> None:
                    await self.until(lambda: bool(self.node(1).membership.hosting(_uid(self, "t"))))
                    for number in range(10):
                        await producer.produce(b"x", id=f"m{number}", in_="0ms")
                        await self.wait(1.7)

                putting = self.loop.create_task(put())
                await self.take(consumer, 10, lambda delivery: late.append(self.late_ms(delivery)))
                await putting
                assert self.hints(1, "dropped") >= 5 and not self.hints(2, "received")
                return late

    made = Scene()
    late = made.play(scene)
    assert SOON_MS < max(late) <= made.world.limits.sweep_every_ms + SOON_MS


@pytest.mark.slow
def test_what_is_assigned_to_a_broker_that_is_not_there_is_swept_and_the_cause_is_known() -> None:
    async def scene(self: Scene) -> list[float]:
        async with self.client("p", 1) as one, self.client("c", 2) as two:
            await one.create_topic("t", lease="30s")
            self.world.registry.haunt([_uid(self, "t")], 3)
            async with one.producer("t") as producer, two.consumer("t", id="c", credit=1_000) as consumer:
                await self.wait(1.0)
                await producer.produce_many([self.world.message(payload=b"x", in_=0) for _ in range(200)])
                late: list[float] = []
                await self.take(consumer, 200, lambda delivery: late.append(self.late_ms(delivery)))
                parts = self.node(2).late.since(0, {_uid(self, "t"): "t"})
                causes = Counter(cause for part in parts for cause in part.cause.tolist())
                assert set(causes) == {LateCause.NO_BROKER}
                return late

    made = Scene()
    late = made.play(scene)
    limits = made.world.limits
    assert limits.stranded_after_ms < max(late) <= limits.stranded_after_ms + limits.sweep_every_ms + 1_000


@pytest.mark.slow
def test_what_waited_for_a_killed_broker_has_its_cause() -> None:
    """Its consumers go to another broker at once, which deals its buckets when its membership ends."""

    async def scene(self: Scene) -> list[float]:
        async with self.client("p", 1) as one, self.client("c", 2, 1) as two:
            await one.create_topic("t", lease="30s")
            uid = _uid(self, "t")
            async with one.producer("t") as producer, two.consumer("t", id="c", credit=1_000) as consumer:
                late: list[float] = []
                taking = self.loop.create_task(
                    self.take(consumer, 200, lambda delivery: late.append(self.late_ms(delivery)))
                )
                await self.until(lambda: bool(self.node(1).membership.hosting(uid)))
                assert set(self.node(1).membership.hosting(uid)) == {"broker2"}
                self.world.brokers[1].kill()
                await producer.produce_many([self.world.message(payload=b"x", in_=0) for _ in range(200)])
                await taking
                parts = self.node(1).late.since(0, {uid: "t"})
                causes = Counter(cause for part in parts for cause in part.cause.tolist())
                assert causes[LateCause.NO_BROKER] > 50 and LateCause.UNEXPLAINED not in causes
                return late

    assert 1_000 < max(Scene().play(scene)) <= 6_000


def test_a_topic_made_or_changed_at_one_broker_is_known_to_another() -> None:
    async def scene(self: Scene) -> None:
        async with self.client("p", 1) as one, self.client("c", 2) as two:
            await one.create_topic("t", lease="30s")
            async with two.producer("t") as producer:  # at once: it asks the store itself
                assert (await producer.produce(b"x", id="a", in_="1h")).status == "OK"
            await one.pause_topic("t")
            await self.until(lambda: self.node(2).catalog.all()[0].settings.paused)
            await two.drop_topic("t")
            await self.until(lambda: not self.node(1).catalog.all())

    made = Scene()
    started_s = made.loop.time()
    made.play(scene)
    assert made.loop.time() - started_s < 3.0  # the next reading of all records comes every 15 s


@pytest.mark.slow
def test_deliveries_are_even_over_consumers_wherever_they_are_connected() -> None:
    async def scene(self: Scene) -> Counter[str]:
        got: Counter[str] = Counter()
        places = {"a": 1, "b": 2, "c": 2, "d": 2}
        clients = {name: self.client(name, number) for name, number in places.items()}
        await clients["a"].create_topic("t", lease="30s", buckets=256)

        async def consume(name: str) -> None:
            async with clients[name].consumer("t", id=name, credit=1_000) as consumer:
                async for batch in consumer.batches():
                    got[name] += len(batch)
                    await batch.ack()

        tasks = [self.loop.create_task(consume(name)) for name in places]
        await self.wait(1.0)
        now_ms = self.world.true_clock.now_ms()
        producer = clients["a"].producer("t")
        for start in range(0, 6_000, 500):
            batch = timeline.Batch(
                payloads=[b"x"] * 500, at=now_ms + 1_000 + 2 * start, ids=[f"m{start + at}" for at in range(500)]
            )
            await producer.produce_many(batch)
        await self.until(lambda: sum(got.values()) == 6_000, every_s=0.5)
        for task in tasks:
            task.cancel()
        return got

    got = Scene().play(scene)
    assert all(0.9 * 1_500 <= count <= 1.1 * 1_500 for count in got.values()), got


def test_a_consumer_learns_of_the_others_and_goes_there_when_its_broker_dies() -> None:
    async def scene(self: Scene) -> tuple[Any, Any]:
        async with self.client("p", 2) as producing, self.client("c", 1) as consuming:
            await producing.create_topic("t", lease="2s")
            async with producing.producer("t") as producer, consuming.consumer("t", id="c") as consumer:
                await producer.produce(b"x", id="before", in_=0)
                iterator = aiter(consumer)
                first = await anext(iterator)
                assert consuming._context.channel.known == ["broker1:9000", "broker2:9000"]
                self.world.brokers[0].kill()
                await producer.produce(b"x", id="after", in_=0)
                second = await anext(iterator)
                await first.ack()
                await second.ack()
                return first, second

    first, second = Scene().play(scene)
    assert (first.id, first.deliveries, second.id, second.deliveries) == ("before", 1, "after", 1)


@pytest.mark.slow
def test_a_broker_that_drains_sends_its_consumers_on_with_what_they_have_in_hand() -> None:
    async def scene(self: Scene) -> Counter[str]:
        seen: Counter[str] = Counter()
        async with self.client("p", 1, 2) as producing, self.client("c", 1) as consuming:
            await producing.create_topic("t", lease="30s")
            producer = producing.producer("t")
            batch = timeline.Batch(payloads=[b"x"] * 300, in_="0ms", ids=[f"m{at}" for at in range(300)])
            await producer.produce_many(batch)

            async def consume() -> None:
                async with consuming.consumer("t", id="c", credit=20) as consumer:
                    async for delivery in consumer:
                        assert delivery.deliveries == 1
                        seen[delivery.id] += 1
                        await self.wait(0.01)
                        await delivery.ack()

            task = self.loop.create_task(consume())
            await self.until(lambda: len(seen) >= 100)
            await self.world.brokers[0].drain()
            assert len(seen) < 300
            await self.until(lambda: len(seen) == 300)
            task.cancel()
        return seen

    seen = Scene().play(scene)
    assert max(seen.values()) == 1


def test_questions_are_asked_of_brokers_that_were_only_heard_of() -> None:
    async def scene(self: Scene) -> None:
        async with self.client("q", 1) as asking, self.client("c", 3) as consuming:
            await asking.create_topic("t", buckets=12)
            async with consuming.consumer("t", id="c") as consumer:
                taking = self.loop.create_task(anext(aiter(consumer)))
                await self.until(lambda: bool(self.node(1).membership.hosting(_uid(self, "t"))))
                told = await asking.standing()
                assert [one.broker for one in told.brokers] == ["broker1", "broker2", "broker3"]
                assert [load.dealt for one in told.brokers for load in one.topics] == [0, 0, 12]
                assert [load.consumers for one in told.brokers for load in one.topics] == [0, 0, 1]
                assert {one.sync for one in told.brokers} == {"joined, 3 brokers"}
                self.world.brokers[1].kill()
                assert list((await asking.standing()).unreachable) == ["broker2:9000"]
                assert (await asking.late()).unreachable == ("broker2:9000",)
                taking.cancel()

    Scene(3).play(scene)


def test_the_buckets_of_a_broker_cut_off_from_the_store_go_to_others() -> None:
    async def scene(self: Scene) -> float:
        async with self.client("a", 1) as one, self.client("b", 2) as two:
            await one.create_topic("t", lease="30s")
            async with one.consumer("t", id="a") as first, two.consumer("t", id="b") as second:
                tasks = [self.loop.create_task(anext(aiter(consumer))) for consumer in (first, second)]
                uid = _uid(self, "t")
                await self.until(lambda: len(self.node(2).membership.hosting(uid)) == 2)
                cut_s = self.loop.time()
                self.world.brokers[0].store.trouble.down = True
                await self.until(lambda: list(self.node(2).membership.hosting(uid)) == ["broker2"])
                took_s = self.loop.time() - cut_s
                self.world.brokers[0].store.trouble.down = False
                await self.until(lambda: len(self.node(2).membership.hosting(uid)) == 2)
                for task in tasks:
                    task.cancel()
                return took_s

    assert Scene().play(scene) < 10.0
