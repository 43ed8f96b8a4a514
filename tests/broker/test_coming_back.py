"""A consumer that connects again while the store takes long to look up what it holds. In virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import timeline
from tests.broker.machines import TOPIC, Town, town
from tests.simulation.loop import Process

LOOK_UP_S = 30.0
"""Five times as long as a consumer waits for a silent broker, and less than a lease."""


def _slow(made: Town) -> list[float]:
    """Let the store take LOOK_UP_S to look up leases. Return when it was asked."""
    asked, look_up = [], made.store.held_by

    async def slowly(*given: Any) -> Any:
        asked.append(made.gone_s)
        await made.timer.wait(LOOK_UP_S)
        return await look_up(*given)

    made.store.held_by = slowly  # type: ignore[method-assign]
    return asked


def test_its_acks_are_answered_and_its_stream_stays() -> None:
    async def story(made: Town) -> None:
        await made.broker("b1")
        await made.create_topic(lease="10m")
        await made.put([-1.0] * 20)
        process = Process(made.loop, "c")

        async def work() -> None:
            client = made.client(process)
            async with client, client.consumer(TOPIC, id="c", credit=10) as consumer:
                coming = aiter(consumer)
                held = [await anext(coming) for _ in range(10)]
                asked = _slow(made)
                made.network.cut(process)
                await made.until(lambda: len(asked) == 1, 10.0)
                since_s = made.gone_s
                for d in held[:5]:
                    await d.ack()
                assert made.gone_s - since_s < 1.0, "acks waited for the look-up"
                following = asyncio.ensure_future(anext(coming))
                await made.timer.wait(LOOK_UP_S - 5.0)
                assert not following.done(), "it was dealt more before its leases were known"
                for d in held[5:]:
                    await d.ack()
                rest = [await following, *[await anext(coming) for _ in range(9)]]
                assert {d.deliveries for d in rest} == {1}
                assert not {d.id for d in rest} & {d.id for d in held}
                assert (len(asked), consumer.stats.reconnects) == (1, 1)
                for d in rest:
                    await d.ack()

        await process.run(work())

    with town() as made:
        made.run(story(made))


def test_what_it_has_not_in_hand_is_granted_again() -> None:
    """It is a new process, which has nothing in hand."""

    async def story(made: Town) -> None:
        await made.broker("b1")
        await made.create_topic(lease="10m")
        await made.put([-1.0] * 20)
        first, second = Process(made.loop, "first"), Process(made.loop, "second")

        async def take() -> None:
            consumer = made.client(first).consumer(TOPIC, id="c", credit=20)
            async for _ in consumer:
                return

        await first.run(take())
        first.kill()
        _slow(made)
        made.network.cut(first)
        seen: list[timeline.Delivery] = []

        async def come_back() -> None:
            async with made.client(second) as client, client.consumer(TOPIC, id="c", credit=20) as consumer:
                async for d in consumer:
                    seen.append(d)
                    await d.ack()
                    if len(seen) == 20:
                        return

        await second.run(come_back())
        assert sorted(d.deliveries for d in seen) == [2] * 20
        assert len({d.id for d in seen}) == 20

    with town() as made:
        made.run(story(made))
