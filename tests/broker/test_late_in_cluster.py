"""Why a message is late, where several brokers answer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.machines import TOPIC, town
from tests.simulation.loop import Process
from timeline.driver.late import Cause


@pytest.mark.parametrize("addresses", ["b1:9000,b2:9000", "b2:9000,b1:9000"])
def test_a_broker_without_a_consumer_knows_no_better_than_one_with_a_busy_one(addresses: str) -> None:
    with town() as there:
        causes: list[Cause] = []

        async def story() -> None:
            await there.broker("b1")
            await there.broker("b2")
            await there.create_topic()
            process = Process(there.loop, "busy")
            client = there.client(process, "b1:9000")

            async def work() -> None:
                async with client, client.consumer(TOPIC, credit=1) as consumer:
                    await consumer.take()
                    await there.timer.wait(60)

            there._consuming.append(process.run(work()))
            await there.timer.wait(2)
            await there.put([0.0])
            await there.timer.wait(1)

            async def ask(asking: Any) -> None:
                async with asking.producer(TOPIC) as producer:
                    await producer.produce(b"", in_=0, id="late")
                await there.timer.wait(1)
                causes.append((await asking.why(TOPIC, "late")).cause)

            await there.ask(ask, addresses)

        there.run(story())
        assert causes == [Cause.NO_CREDIT]
