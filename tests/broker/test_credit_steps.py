"""How often a broker leases for a consumer that settles one message after the other, and that no step of credit delays
what it could have. In virtual time, with the driver and with plain frames."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

import timeline
from tests.broker.link import Link, Pipe, broker
from tests.broker.machines import TOPIC, Town, town
from tests.simulation.loop import Process, Timer, VirtualLoop
from timeline.broker.limits import Limits
from timeline.clock import Clock
from timeline.columns import Ragged
from timeline.model import Operation
from timeline.storage_plugins.contract import LeasedRows
from timeline.storage_plugins.memory import MemoryStore
from timeline.wire import Beat, Credit, Deliver

BACKLOG = 3_000
AT_ONCE_S = 0.02
"""What the simulated wire takes there and back."""
WAIT_S = Limits().step_wait_ms / 1_000


class Counting(MemoryStore):
    """Counts its leases."""

    def __init__(self) -> None:
        super().__init__(cluster_uid="0" * 32)
        self.leases = 0
        self.answers = asyncio.Event()
        """Clear: leases are made, and not answered."""
        self.answers.set()

    async def lease_due(self, *asked: Any) -> LeasedRows:
        self.leases += 1
        leased = await super().lease_due(*asked)
        await self.answers.wait()
        return leased


def counted(made: Town) -> list[int]:
    """Has the town's store note how many each of its leases gave."""
    given: list[int] = []
    lease = made.store.lease_due

    async def noted(*asked: Any) -> LeasedRows:
        leased = await lease(*asked)
        given.append(len(leased.rows))
        return leased

    made.store.lease_due = noted  # type: ignore[method-assign, assignment]
    return given


def told(story: Callable[[Town, Any], Awaitable[None]], credit: int = 100, credit_bytes: int = 1 << 20) -> None:
    """Tells a story of one broker, and of one consumer's code, which has the consumer."""

    async def all_of_it(made: Town) -> None:
        await made.broker("b1")
        await made.create_topic()
        process = Process(made.loop, "c")

        async def work() -> None:
            client = made.client(process)
            async with client, client.consumer(TOPIC, id="c", credit=credit, credit_bytes=credit_bytes) as consumer:
                await story(made, consumer)

        await process.run(work())

    with town() as made:
        made.run(all_of_it(made))


@pytest.mark.slow
def test_messages_on_their_way_to_a_run_that_ends_are_not_left_leased() -> None:
    """The program ends right after it, without closing its consumer. It is told to end at many moments."""
    with town() as made:

        async def end_after(wait_s: float, topic: str) -> None:
            await made.ask(lambda client: client.create_topic(topic, lease="1h"))

            async def fill(client: Any) -> None:
                async with client.producer(topic) as producer:
                    (await producer.produce_many(timeline.Batch([b""] * 300, in_=0))).raise_failed()

            await made.ask(fill)
            process = Process(made.loop, f"c.{topic}")
            handled: list[str] = []

            async def work() -> None:
                consumer = made.client(process).consumer(topic, id="c")
                asyncio.get_running_loop().call_later(wait_s, consumer.stop_taking)

                async def handler(d: timeline.Delivery) -> None:
                    handled.append(d.id)

                await consumer.run(handler, concurrency=8)

            await process.run(work())
            process.kill()
            made.network.cut(process)

            async def left(client: Any) -> None:
                rest = {message.id: message.state async for message in client.scan(topic)}
                assert len(rest) == 300 - len(handled) and "leased" not in rest.values()

            await made.ask(left)

        async def story() -> None:
            await made.broker("b1")
            for at in range(20):
                await end_after(0.02 + at * 0.003, f"t{at}")

        made.run(story())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("credit", "credit_bytes", "most"),
    [
        (100, 1 << 20, BACKLOG // 25),
        pytest.param(16, 1 << 20, BACKLOG // 4, marks=pytest.mark.prove),
        pytest.param(1_000, 1 << 20, BACKLOG // 64, marks=pytest.mark.prove),
        (1_000, 100, BACKLOG // 25),
    ],
)
def test_a_backlog_is_leased_in_steps(credit: int, credit_bytes: int, most: int) -> None:
    async def story(made: Town, consumer: Any) -> None:
        await made.put([-1.0] * BACKLOG)
        given = counted(made)
        for _ in range(BACKLOG):
            await (await consumer.take()).ack()
        assert sum(given) == BACKLOG
        assert len(given) <= most + 10

    told(story, credit, credit_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("credit", [1, 2, 7])
def test_little_credit_comes_back_at_once(credit: int) -> None:
    async def story(made: Town, consumer: Any) -> None:
        await made.put([-1.0] * 100)
        taken = [await consumer.take() for _ in range(credit)]
        for _ in range(100 - credit):
            await taken.pop(0).ack()
            since_s = made.gone_s
            taken.append(await consumer.take())
            assert made.gone_s - since_s < AT_ONCE_S

    told(story, credit)


@pytest.mark.slow
@pytest.mark.parametrize(("credit", "credit_bytes"), [(100, 1 << 20), (1_000, 100)])
def test_a_consumer_that_runs_dry_is_served_at_once(credit: int, credit_bytes: int) -> None:
    """All its credit is with its code, which gives back one and waits for the next."""

    async def story(made: Town, consumer: Any) -> None:
        await made.put([-1.0] * 300)
        taken = [await consumer.take() for _ in range(100)]
        for _ in range(50):
            await taken.pop(0).ack()
            since_s = made.gone_s
            taken.append(await consumer.take())
            assert made.gone_s - since_s < AT_ONCE_S
        for _ in range(50):
            taken.pop(0).ack_soon()
            since_s = made.gone_s
            taken.append(await consumer.take())
            assert made.gone_s - since_s < 2 * AT_ONCE_S  # an ack that nobody waits for gathers

    told(story, credit, credit_bytes)


@pytest.mark.slow
def test_what_is_due_goes_out_on_little_credit() -> None:
    async def story(made: Town, consumer: Any) -> None:
        await made.put([-1.0] * 90)
        taken = [await consumer.take() for _ in range(90)]
        for _ in range(30):
            await taken.pop(0).ack()
            await made.put([0.0, 0.03])
            for _ in range(2):
                taken.append(d := await consumer.take())
                assert made.true_ms() - d.due_ms < 1_000 * AT_ONCE_S
            await taken.pop(0).ack()

    told(story)


@pytest.mark.prove
@pytest.mark.slow
def test_several_share_a_backlog_as_before() -> None:
    async def story(made: Town) -> None:
        await made.broker("b1")
        await made.create_topic()
        counts = dict.fromkeys(("c1", "c2", "c3"), 0)
        await made.put([-1.0] * BACKLOG)

        async def work(name: str, process: Process) -> None:
            async with made.client(process) as client, client.consumer(TOPIC, id=name, credit=50) as consumer:
                while sum(counts.values()) < BACKLOG - 200:
                    d = await consumer.take()
                    counts[name] += 1
                    await d.ack()

        given = counted(made)
        processes = {name: Process(made.loop, name) for name in counts}
        await asyncio.gather(*(process.run(work(name, process)) for name, process in processes.items()))
        assert max(counts.values()) < 1.2 * min(counts.values())
        assert len(given) < BACKLOG / 10

    with town() as made:
        made.run(story(made))


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop(random.Random(5))
    asyncio.set_event_loop(made)
    yield made
    made.finish()
    asyncio.set_event_loop(None)


async def _with_backlog(link: Link, credit: int) -> tuple[Pipe, Deliver]:
    await link.put([f"m{n}" for n in range(1_000)])
    pipe = await link.consume(credit=credit)
    got: Deliver = await pipe.down(Deliver)
    assert len(got.birth) == credit
    return pipe, got


def test_a_driver_that_gives_one_credit_after_the_other_is_not_leased_for_one_by_one(loop: VirtualLoop) -> None:
    async def story() -> None:
        store = Counting()
        async with broker(store, clock=Clock(loop.time, loop.time)) as link:
            pipe, _ = await _with_backlog(link, 100)
            before, came = store.leases, 0
            for _ in range(500):
                pipe.up(Credit(1, 10))
                await asyncio.sleep(0)
            while came < 500:
                came += len((await pipe.down(Deliver)).birth)
            assert store.leases - before <= 500 / 25 + 2

    loop.run_until_complete(story())


def test_less_than_a_step_waits_for_a_moment_and_an_empty_credit_ends_that(loop: VirtualLoop) -> None:
    async def story() -> None:
        async with broker(Counting(), clock=Clock(loop.time, loop.time)) as link:
            pipe, _ = await _with_backlog(link, 100)
            since_s = loop.time()
            pipe.up(Credit(3, 30))
            assert len((await pipe.down(Deliver)).birth) == 3
            assert loop.time() - since_s == pytest.approx(WAIT_S, abs=0.001)
            since_s = loop.time()
            pipe.up(Credit(2, 20))
            link.beat(pipe)
            assert len((await pipe.down(Deliver)).birth) == 2
            assert loop.time() == since_s

    loop.run_until_complete(story())


def test_an_empty_credit_while_a_lease_is_under_way_is_not_forgotten(loop: VirtualLoop) -> None:
    async def story() -> None:
        store = Counting()
        async with broker(store, clock=Clock(loop.time, loop.time)) as link:
            pipe, _ = await _with_backlog(link, 100)
            store.answers.clear()
            before = store.leases
            pipe.up(Credit(25, 250))
            while store.leases == before:
                await asyncio.sleep(0)
            pipe.up(Credit(1, 10))
            link.beat(pipe)
            await pipe.down(Beat)
            store.answers.set()
            since_s = loop.time()
            came = 0
            while came < 26:
                came += len((await pipe.down(Deliver)).birth)
            assert loop.time() == since_s

    loop.run_until_complete(story())


def test_heartbeats_do_not_look_again_for_what_is_larger_than_the_credit_left(loop: VirtualLoop) -> None:
    async def story() -> None:
        store = Counting()
        async with broker(store, clock=Clock(loop.time, loop.time)) as link:
            await link.put(["first"], payloads=Ragged.of([b"x" * 60]))
            pipe = await link.consume(credit_bytes=100)
            await pipe.down(Deliver)
            await link.put(["second"], payloads=Ragged.of([b"x" * 60]))
            timer = Timer(loop)
            before, since_s = store.leases, loop.time()
            for _ in range(100):
                link.beat(pipe)
                await pipe.down(Beat)
                await timer.wait(0.001)
            assert store.leases - before <= 2 + (loop.time() - since_s) / 0.1

    loop.run_until_complete(story())


def test_a_settle_that_ends_all_in_flight_is_a_step(loop: VirtualLoop) -> None:
    async def story() -> None:
        async with broker(Counting(), clock=Clock(loop.time, loop.time)) as link:
            pipe, got = await _with_backlog(link, 100)
            since_s = loop.time()
            await link.settle(pipe, got, Operation.ACK)
            assert len((await pipe.down(Deliver)).birth) == 100
            assert loop.time() == since_s

    loop.run_until_complete(story())
