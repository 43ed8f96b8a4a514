"""Clients of a newer minor: kinds of frame that this broker does not know are passed over, on either stream."""

from __future__ import annotations

import pytest

from tests.broker.link import broker, statuses
from tests.broker.newer import UNKNOWN
from timeline.model import Status
from timeline.wire import Beat, Credit, Produced


@pytest.mark.parametrize("method", ["Consume", "Produce"])
async def test_a_frame_that_only_a_newer_minor_knows_is_passed_over(method: str):
    async with broker() as link:
        pipe = await link.consume() if method == "Consume" else link.open("Produce")
        if method == "Produce":
            pipe.up(link.puts(["a"]))
            assert statuses(await pipe.down(Produced)) == [Status.OK]
        pipe.to_broker.put_nowait(UNKNOWN)
        if method == "Produce":
            pipe.up(link.puts(["b"]))
            assert statuses(await pipe.down(Produced)) == [Status.OK]
        else:
            pipe.up(Credit(echo=5))
            assert (await pipe.down(Beat)).echo == 5
