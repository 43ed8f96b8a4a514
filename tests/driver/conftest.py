"""A real broker in this process, on a real port, for drivers to meet."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

import timeline
from tests.driver.broker import Broker


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    """A broker on the memory store."""
    running = Broker()
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
async def tl(broker: Broker) -> AsyncIterator[timeline.Timeline]:
    """A client of it, with a topic `t`."""
    async with timeline.connect(broker.address, timeout="10s") as client:
        await client.create_topic("t", lease="30s")
        yield client


@pytest.fixture
def served() -> Iterator[str]:
    """A broker in a thread of its own; answers its address."""
    broker, loop = Broker(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(broker.start(), loop).result(10)
    yield broker.address
    asyncio.run_coroutine_threadsafe(broker.stop(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
