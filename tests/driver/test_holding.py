"""Scans by bucket and by holder, births made again, and holders that take and settle in bulk."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import timeline
from tests.driver.broker import Broker
from timeline.driver.transport.grpc_transport import GrpcStream
from timeline.model import Operation, Rows, Status, bucket_of


async def held(tl: timeline.Timeline, holder: str, payload: bool = False) -> Rows:
    return Rows.concat([page.rows async for page in tl.scan_pages("t", holder=holder, payload=payload)])


async def test_a_scan_of_some_buckets_has_just_these(tl: timeline.Timeline) -> None:
    ids = [f"m{at}" for at in range(3_000)]
    async with tl.producer("t") as p:
        (await p.produce_many(timeline.Batch([b"x"] * 3_000, in_="1h", ids=ids))).raise_failed()
    parts = []
    for buckets in ((0, 7), (7, 8), (8, 64)):
        found = {one async for page in tl.scan_pages("t", buckets=buckets) for one in page.rows.ids.tolist()}
        assert found == {id.encode() for id in ids if buckets[0] <= bucket_of(id.encode(), 64) < buckets[1]}
        parts.append(found)
    assert sum(map(len, parts)) == 3_000 and all(parts)


@pytest.mark.slow
async def test_a_holder_takes_in_bulk_and_settles_what_it_is_found_to_hold(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p:
        (await p.produce_many(timeline.Batch([b"x"] * 500, in_=0))).raise_failed()
        await p.produce(b"later", in_="1h", id="later")
    async with tl.holding("t", "batch/1", lease="5m") as holding:
        assert await holding.lease(300, first_ms=5_000, more_ms=200) == 300
    rows = await held(tl, "batch/1", payload=True)
    assert len(rows) == 300 and rows.payloads is not None and rows.payloads.tolist() == [b"x"] * 300
    assert (await held(tl, "batch/1")).payloads is None
    assert not len(await held(tl, "batch/2"))
    async with tl.holding("t", "batch/1") as holding:
        assert await holding.settle(Operation.EXTEND, rows.slice(0, 10), time_ms=600_000) == {Status.OK: 10}
        assert await holding.settle(Operation.ACK, rows) == {Status.OK: 300}
        assert await holding.settle(Operation.ACK, rows) == {Status.NOT_FOUND: 300}
        assert await holding.lease(1_000, first_ms=5_000, more_ms=200) == 200
        rest = await held(tl, "batch/1")
        assert await holding.settle(Operation.BURY, rest, reason=b"damaged") == {Status.OK: 200}
    assert [m.id async for m in tl.scan("t")] == ["later"]


async def test_who_says_hello_under_the_name_ends_the_other_and_finds_what_it_had(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p:
        (await p.produce_many(timeline.Batch([b"x"] * 20, in_=0))).raise_failed()
    async with tl.holding("t", "b") as first:
        assert await first.lease(20, first_ms=5_000, more_ms=100) == 20
    async with tl.holding("t", "b") as one, tl.holding("t", "b"):
        with pytest.raises(timeline.Superseded):
            await one.lease(20, first_ms=60_000, more_ms=100)
    assert len(await held(tl, "b")) == 20


async def test_the_very_same_batch_made_again_is_recognised_by_its_births(tl: timeline.Timeline) -> None:
    def batch(births: int) -> timeline.Batch:
        made = timeline.Batch([b"x"] * 3, in_="1h", ids=["a", "b", "c"])
        made.births = np.arange(births, births + 3, dtype=np.uint64)
        return made

    async with tl.producer("t") as p:
        first = await p.produce_many(batch(1))
        again = await p.produce_many(batch(1))
        other = await p.produce_many(batch(7))
    assert first.counts == again.counts == {Status.OK: 3} and other.counts == {Status.DUPLICATE: 3}
    assert (first.repeats.tolist(), again.repeats.tolist(), other.repeats.tolist()) == (
        [False] * 3,
        [True] * 3,
        [False] * 3,
    )
    assert not other.settled.any()


async def test_a_broker_that_reads_no_more_is_given_up(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(stream: GrpcStream, frame: bytes) -> None:
        await asyncio.Event().wait()

    async with timeline.connect(broker.address, timeout="100ms") as tl:
        await tl.create_topic("t", timeout="10s")
        async with tl.holding("t", "b") as holding:
            monkeypatch.setattr(GrpcStream, "send", never)
            with pytest.raises(timeline.Unavailable, match=r"the broker took nothing for 0\.1 s"):
                await holding.lease(1, first_ms=0, more_ms=0)
