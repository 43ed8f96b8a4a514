"""The credit of `Consumer.run`, which follows the speed of its handlers. In virtual time, with a broker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import timeline
from tests.broker.machines import TOPIC, Machine, Town, town
from tests.simulation.loop import Process, Timer
from timeline.broker.dispatch.roster import ConnectedConsumer
from timeline.driver.delivery import CREDIT_MESSAGES

BACKLOG = 2_000
CONCURRENCY = 8


class Run:
    """A consumer that runs a handler. Each call takes `work_s`, which a test changes as it goes on."""

    def __init__(
        self, made: Town, name: str, work_s: float = 0.0, concurrency: int = CONCURRENCY, **asked: Any
    ) -> None:
        self.work_s = work_s
        self.begun: list[str] = []
        self.handled: list[str] = []
        process = self.process = Process(made.loop, name)
        self.consumer: Any = None

        async def handler(d: timeline.Delivery) -> None:
            self.begun.append(d.id)
            if self.work_s:
                await Timer(made.loop).wait(self.work_s)
            self.handled.append(d.id)

        async def work() -> None:
            async with made.client(process) as client, client.consumer(TOPIC, id=name, **asked) as self.consumer:
                await self.consumer.run(handler, concurrency)

        self.task = process.run(work())

    async def end(self) -> None:
        self.consumer.stop_taking()
        await self.task


def seen(machine: Machine, name: str) -> ConnectedConsumer:
    """What the broker knows of a consumer."""
    return next(dealer.roster.consumers[name.encode()] for dealer in machine.node.dealers)


def told(story: Callable[[Town, Machine], Awaitable[None]], **settings: Any) -> None:
    """Tells a story of one broker with a backlog."""

    async def all_of_it(made: Town) -> None:
        machine = await made.broker("b1")
        await made.create_topic(**settings)
        await made.put([-1.0] * BACKLOG)
        await story(made, machine)

    with town() as made:
        made.run(all_of_it(made))


@pytest.mark.slow
def test_quick_handlers_get_credit_and_the_broker_knows_how_much() -> None:
    async def story(made: Town, machine: Machine) -> None:
        run = Run(made, "c")
        await made.until(lambda: len(run.handled) == BACKLOG, within_s=60)
        assert run.consumer.credit == CREDIT_MESSAGES
        at_broker = seen(machine, "c")
        await made.until(lambda: at_broker.idle, within_s=1)
        assert at_broker.room_messages == at_broker.credit_messages == CREDIT_MESSAGES
        await run.end()

    told(story)


@pytest.mark.slow
def test_handlers_that_become_slow_give_back_what_waits_and_others_get_it() -> None:
    async def story(made: Town, machine: Machine) -> None:
        slow = Run(made, "slow", work_s=0.001)
        await made.until(lambda: slow.consumer is not None and slow.consumer.credit == CREDIT_MESSAGES, within_s=10)
        slow.work_s = 300.0
        other = Run(made, "other")
        await made.until(lambda: len(slow.handled) + len(other.handled) == BACKLOG - CONCURRENCY, within_s=10)
        assert slow.consumer.credit == 2 * CONCURRENCY
        at_broker = seen(machine, "slow")
        assert at_broker.room_messages == 2 * CONCURRENCY and at_broker.in_flight == CONCURRENCY
        slow.work_s = 0.0
        await made.until(lambda: len({*slow.handled, *other.handled}) == BACKLOG, within_s=3_600)
        await made.until(lambda: at_broker.idle, within_s=1)
        await slow.end()
        await other.end()
        assert len(slow.handled) + len(other.handled) == BACKLOG

    told(story, lease="1h")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("max_deliveries", "credit"), [(2, 2 * CONCURRENCY), (3, CREDIT_MESSAGES), (0, CREDIT_MESSAGES)]
)
def test_messages_with_few_deliveries_left_come_one_for_each_handler_ahead(max_deliveries: int, credit: int) -> None:
    """If one of them kills the process, those beside it lose a delivery."""

    async def story(made: Town, _: Machine) -> None:
        run = Run(made, "c")
        await made.until(lambda: len(run.handled) == BACKLOG, within_s=60)
        assert run.consumer.credit == credit
        await run.end()

    told(story, max_deliveries=max_deliveries)


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [CONCURRENCY, 40])
def test_the_credit_of_quick_handlers_shrinks_when_such_messages_come(concurrency: int) -> None:
    async def story(made: Town, _: Machine) -> None:
        dies = Run(made, "dies", work_s=3_600.0, concurrency=concurrency)
        await made.until(lambda: len(dies.begun) == concurrency, within_s=10)
        dies.process.kill()
        made.network.cut(dies.process)
        run = Run(made, "c", concurrency=concurrency)
        await made.until(lambda: len(run.handled) == BACKLOG - 2 * concurrency, within_s=10)
        assert run.consumer.credit == CREDIT_MESSAGES
        await made.until(lambda: len(run.handled) == BACKLOG, within_s=60)  # their leases have run out
        await made.until(lambda: run.consumer.credit == 2 * concurrency, within_s=1)
        await run.end()

    told(story, max_deliveries=3)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{"credit": 5}, {"credit": 40}])
def test_credit_that_the_caller_chose_stays(asked: dict[str, int]) -> None:
    async def story(made: Town, machine: Machine) -> None:
        run = Run(made, "c", **asked)
        await made.until(lambda: len(run.handled) == BACKLOG, within_s=60)
        assert run.consumer.credit == seen(machine, "c").room_messages == asked["credit"]
        await run.end()

    told(story)


def test_slow_handlers_keep_the_credit_of_one_message_more_for_each() -> None:
    async def story(made: Town, machine: Machine) -> None:
        run = Run(made, "c", work_s=1.0)
        await made.until(lambda: len(run.handled) > 80, within_s=60)
        assert run.consumer.credit == seen(machine, "c").room_messages == 2 * CONCURRENCY
        await run.end()

    told(story)


@pytest.mark.slow
def test_credit_given_for_quick_handlers_outlives_its_broker() -> None:
    """A new broker is told of all of it in the first frame."""

    async def story(made: Town, machine: Machine) -> None:
        run = Run(made, "c")
        await made.until(lambda: run.consumer is not None and run.consumer.credit == CREDIT_MESSAGES, within_s=10)
        made.kill(machine)
        await made.start(machine)
        await made.until(lambda: len(set(run.handled)) == BACKLOG, within_s=60)
        at_broker = seen(machine, "c")
        await made.until(lambda: at_broker.idle, within_s=1)
        assert at_broker.room_messages == at_broker.credit_messages == CREDIT_MESSAGES
        await run.end()

    told(story)
