"""A streaming query that ends between Spark's note of the next micro-batch and its word that the last one is done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

import timeline
from tests.driver.broker import Broker
from timeline.pipeline import holders
from timeline.pipeline.options import Options
from timeline.pipeline.schema import read_schema
from timeline.pipeline.streaming import TimelineStreamReader

pytestmark = pytest.mark.slow


def _reader(broker: Broker) -> TimelineStreamReader:
    return TimelineStreamReader(Options(broker.address, "t", partitions=1), read_schema(False))


def _read(reader: TimelineStreamReader, start: Any, end: Any) -> set[str]:
    parts = reader.partitions(start, end)
    return {id for part in parts for rows in reader.read(part) for id in rows.column("id").to_pylist()}


async def _there(broker: Broker) -> set[str]:
    async with timeline.connect(broker.address) as tl:
        return {one.id async for one in tl.scan("t")}


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    one = Broker()
    await one.start()
    yield one
    await one.stop()


async def test_what_was_done_when_a_query_ended_is_acknowledged_by_the_next(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holders, "MORE_MS", 60_000.0)  # what is due is there: each batch is full before that
    ids = {f"m{at:02d}" for at in range(30)}
    async with timeline.connect(broker.address) as tl:
        await tl.create_topic("t")
        async with tl.producer("t") as p:
            (await p.produce_many(timeline.Batch([b"x"] * 30, at=1_700_000_000_000, ids=sorted(ids)))).raise_failed()

    def ends_early() -> tuple[set[str], Any, Any]:
        query = _reader(broker)
        start = query.initialOffset()
        first = query.latestOffset(start, ReadMaxRows(10))
        done = _read(query, start, first)
        second = query.latestOffset(first, ReadMaxRows(10))
        query.stop()  # Spark noted the second batch, and did not come to commit the first
        return done, first, second

    def goes_on(first: Any, second: Any) -> set[str]:
        query = _reader(broker)
        try:
            query.partitions(first, second)
            third = query.latestOffset(second, ReadMaxRows(20))
            query.commit(second)
            return _read(query, second, third)
        finally:
            query.stop()

    done, first, second = await asyncio.to_thread(ends_early)
    assert len(done) == 10 and await _there(broker) == ids, "read, and not acknowledged"
    assert await asyncio.to_thread(goes_on, first, second) == ids - done
    assert await _there(broker) == ids - done
