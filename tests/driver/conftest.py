"""A real broker in this process, on a real port, for drivers to meet."""

from __future__ import annotations

from collections.abc import AsyncIterator

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
