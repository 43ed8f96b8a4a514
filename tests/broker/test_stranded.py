"""What membership believes that others deal, and nobody does: swept, as fast as credit allows."""

from __future__ import annotations

import numpy as np
import pytest

from tests.broker.link import broker, statuses
from timeline.broker.dispatch import dealer
from timeline.broker.limits import Limits
from timeline.columns import Ragged
from timeline.model import Operation, Status
from timeline.wire import Deliver


async def test_what_is_stranded_comes_as_fast_as_credit_in_bytes_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep for which too few bytes of credit are left finds nothing; that is not the end of what is stranded."""
    monkeypatch.setattr(dealer, "FRUITLESS_MS", 1.0)
    async with broker(limits=Limits(sweep_every_ms=3_600_000, stranded_after_ms=1)) as link:
        link.node.membership.buckets = lambda topic_uid, buckets: []  # type: ignore[method-assign]
        ids = [f"m{at}" for at in range(7)]
        past_ms = np.full(len(ids), link.node.clock.now_ms() - 10_000)
        puts = link.puts(ids, payloads=Ragged.of([b"x" * 20] * 7), flags=np.zeros(7, dtype=np.uint8))
        puts.time_ms = past_ms
        pipe = link.open("Produce")
        pipe.up(puts)
        assert statuses(await pipe.down()) == [Status.OK] * 7
        topic = await link.node.catalog.find("t")
        assert topic is not None
        consumer = await link.consume(credit=5, credit_bytes=45, room_messages=5, room_bytes=45)
        link.node.dealers.of(topic)._sweep_at_ms = 0.0
        link.node.dealers.of(topic).wake()
        came: list[bytes] = []
        while len(came) < 7:
            got = await consumer.down(Deliver)
            came += got.ids.tolist()
            assert statuses(await link.settle(consumer, got, Operation.ACK)) == [Status.OK] * len(got.ids)
        assert sorted(came) == [id.encode() for id in ids]
