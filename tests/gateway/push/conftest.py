"""A real broker, a receiver, and a pusher between them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import timeline
from tests.driver.broker import Broker
from tests.gateway.push.receiver import Receiver, always


@pytest.fixture
async def tl() -> AsyncIterator[timeline.Timeline]:
    """A client of a broker in this process."""
    broker = Broker()
    await broker.start()
    async with timeline.connect(broker.address, timeout="10s") as client:
        yield client
    await broker.stop()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver(always(204))
    await made.start()
    yield made
    await made.stop()
