"""Tasks that run twice, at once or one after the other, as Spark's speculation and retries have it, and queries that go
on where one ended: nothing doubles, nothing is lost, and no row is acknowledged that nobody read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

import timeline
from tests.driver.broker import Broker
from timeline.driver.transport.grpc_transport import GrpcStream
from timeline.errors import Invalid
from timeline.model import Operation
from timeline.pipeline.source.columns import read_schema
from timeline.pipeline.source.options import SourceOptions
from timeline.pipeline.source.streaming import LATE_MS, HolderPartition, TimelineStreamReader, gather, held, settle_all
from timeline.pipeline.source.writing import SeenBirths, WritePlan, WriteTask
from timeline.wire import Fault, Produced, TransportError, decode

pytestmark = pytest.mark.slow

LATER_US = 1_930_000_000_000_000


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    one = Broker()
    await one.start()
    async with timeline.connect(one.address) as tl:
        await tl.create_topic("t", max_lease="1h")
    yield one
    await one.stop()


def batches(count: int, size: int) -> Iterator[pa.RecordBatch]:
    for start in range(0, count, size):
        payloads = [b"p%d" % at for at in range(start, min(start + size, count))]
        due = pa.array([LATER_US + at for at in range(len(payloads))], pa.timestamp("us", tz="UTC"))
        yield pa.RecordBatch.from_arrays([due, pa.array(payloads, pa.binary())], ["due", "payload"])


def plan(broker: Broker, **options: Any) -> WritePlan:
    return WritePlan(SourceOptions(broker.address, "t", **options), "run", 0, True)


async def test_two_tries_of_one_task_at_once_and_one_that_died_put_each_row_once(broker: Broker) -> None:
    def died() -> None:
        task = WriteTask(plan(broker), 3)
        for rows in islice(batches(3_000, 100), 12):
            task._put(rows)
        task._connection._background.close()  # as when its process is killed: nothing is flushed

    await asyncio.to_thread(died)
    tries = [asyncio.to_thread(WriteTask(plan(broker), 3).write, batches(3_000, 100)) for _ in range(2)]
    done = await asyncio.gather(*tries)
    async with timeline.connect(broker.address) as tl:
        found = [m.payload async for m in tl.scan("t", payload=True)]
    assert sorted(payload or b"" for payload in found) == sorted(b"p%d" % at for at in range(3_000))
    assert [one.put + one.there for one in done] == [3_000, 3_000]
    assert [one.collapsed for one in done] == [0, 0], "another try's rows are not taken for identical ones"
    again = await asyncio.to_thread(WriteTask(plan(broker), 4).write, batches(100, 100))
    assert again.collapsed == 100, "those of another part of the table are"


async def test_a_row_whose_id_belongs_to_another_group_is_rejected_with_the_remedy(broker: Broker) -> None:
    async with timeline.connect(broker.address) as tl, tl.producer("t", group="ops") as p:
        await p.produce(b"theirs", at=LATER_US // 1_000, id="a")
    due = pa.array([LATER_US], pa.timestamp("us", tz="UTC"))
    row = pa.RecordBatch.from_arrays([due, pa.array(["mine"]), pa.array(["a"])], ["due", "payload", "id"])
    with pytest.raises(Invalid, match=r"1 × FORBIDDEN: .*for the group that owns them \(option group, --group NAME\)"):
        await asyncio.to_thread(WriteTask(plan(broker), 0).write, iter([row]))


def share(broker: Broker, now_ms: int, again: bool = False) -> HolderPartition:
    return HolderPartition("t", "spark/q/1/0", 50, 600_000, now_ms + 5_000, again)


async def ids_of(tl: timeline.Timeline) -> set[bytes]:
    return {id async for page in held(tl, "t", "spark/q/1/0", payload=True) for id in page.rows.ids.tolist()}


async def test_whatever_tries_there_are_all_read_what_is_acknowledged(broker: Broker) -> None:
    now_ms = int(datetime.now(UTC).timestamp() * 1000)
    async with timeline.connect(broker.address, timeout="30s") as tl:
        async with tl.producer("t") as p:
            (await p.produce_many(timeline.Batch([b"x"] * 120, in_=0))).raise_failed()
        # The first try and a copy of it at once: who comes second takes over, and leases nothing.
        await asyncio.gather(*(gather(tl, share(broker, now_ms), first) for first in (True, False, False)))
        first = await ids_of(tl)
        assert first, "the copies waited for the first try, which might have come yet"
        for again in (False, True):
            await gather(tl, share(broker, now_ms, again), True)
            assert await ids_of(tl) == first, "a try that finds rows leases none"
        assert await settle_all(tl, "t", "spark/q/1/0", Operation.EXTEND, 600_000) == len(first)
        assert await settle_all(tl, "t", "spark/q/1/0", Operation.ACK) == len(first)
        assert await settle_all(tl, "t", "spark/q/1/0", Operation.ACK) == 0
        left = {m.id.encode() async for m in tl.scan("t")}
        assert len(left) == 120 - len(first) and not left & first


async def test_where_there_are_several_brokers_another_try_waits_until_nobody_can_lease(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert broker.node is not None
    monkeypatch.setattr(broker.node.cluster, "addresses", lambda: (broker.address, "127.0.0.1:1"))
    async with timeline.connect(broker.address, timeout="30s") as tl:
        async with tl.producer("t") as p:
            await p.produce(b"x", in_=0, id="a")
        now_ms = int(datetime.now(UTC).timestamp() * 1000)
        await gather(tl, share(broker, now_ms), True)
        assert await ids_of(tl) == {b"a"}
        over_ms = now_ms + 400
        await gather(tl, replace(share(broker, now_ms), lease_by_ms=over_ms - LATE_MS), False)
        pages = [page async for page in tl.scan_pages("t")]
        assert pages[0].now_ms >= over_ms, "what is there might not be all: at another broker the first try goes on"


async def test_a_batch_that_is_read_again_or_comes_too_late_leases_nothing(broker: Broker) -> None:
    now_ms = int(datetime.now(UTC).timestamp() * 1000)
    async with timeline.connect(broker.address, timeout="30s") as tl:
        async with tl.producer("t") as p:
            await p.produce(b"x", in_=0, id="a")
        await gather(tl, share(broker, now_ms - 60_000, again=True), True)
        await gather(tl, share(broker, now_ms - 60_000), True)
        assert await ids_of(tl) == set()
        await gather(tl, share(broker, now_ms), True)
        assert await ids_of(tl) == {b"a"}


async def test_a_batch_whose_leases_ran_out_is_nobodys_and_comes_again(broker: Broker) -> None:
    """As where a job is started again from its checkpoint after a long while."""
    async with timeline.connect(broker.address, timeout="30s") as tl:
        async with tl.producer("t") as p:
            (await p.produce_many(timeline.Batch([b"x"] * 20, in_=0))).raise_failed()
        now_ms = int(datetime.now(UTC).timestamp() * 1000)
        await gather(tl, replace(share(broker, now_ms), lease_ms=1_000), True)
        first = await ids_of(tl)
        assert len(first) == 20
        while await ids_of(tl):
            pass  # until the leases have run out
        await gather(tl, share(broker, now_ms - 60_000, again=True), True)
        assert await ids_of(tl) == set(), "what ran out is not leased for a batch that is read again"
        assert await settle_all(tl, "t", "spark/q/1/0", Operation.ACK) == 0, "nor is it acknowledged by its commit"
        now_ms = int(datetime.now(UTC).timestamp() * 1000)
        await gather(tl, replace(share(broker, now_ms), holder="spark/q/2/0"), True)
        pages = [page.rows async for page in held(tl, "t", "spark/q/2/0", payload=False)]
        assert {id for rows in pages for id in rows.ids.tolist()} == first
        assert await settle_all(tl, "t", "spark/q/2/0", Operation.ACK) == 20


def test_a_second_occurrence_is_told_from_the_first_however_many_there_are() -> None:
    seen, wanted = SeenBirths(), set()
    random = np.random.default_rng(5)
    for _ in range(60):
        keys = random.integers(0, 4_000, size=random.integers(1, 300)).astype(np.uint64)
        again = seen.again(keys)
        for key, found in zip(keys.tolist(), again.tolist(), strict=True):
            assert found == (key in wanted)
            wanted.add(key)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({}, "no topic is named"),
        ({"topic": "t", "adresses": "b:1"}, "no option 'adresses': did you mean addresses"),
        ({"topic": "t", "addresses": "b"}, "host:port"),
        ({"topic": "t", "timeout": "soon"}, "timeout must be"),
        ({"topic": "t", "maxRejects": "-1"}, "maxRejects must be a whole number"),
        ({"topic": "t", "payload": "yes"}, "payload must be true or false"),
        ({"topic": "t", "state": "gone"}, "state must be some of waiting"),
        ({"topic": "t", "ifExists": "skip"}, "ifExists must be 'move' or 'replace'"),
        ({"topic": "t", "buckets": "7-3"}, "buckets must be A-B"),
        ({"topic": "t", "past": "later"}, "past must be"),
    ],
)
def test_an_option_that_cannot_be_meant_is_named(asked: dict[str, str], sentence: str) -> None:
    with pytest.raises(Invalid, match=sentence):
        SourceOptions.of(asked)


def test_options_are_written_as_anybody_writes_them() -> None:
    told = SourceOptions.of({"TOPIC": "t", "max_rejects": "3", "rejectspath": "file:///x", "checkpointLocation": "y"})
    assert (told.topic, told.max_rejects, told.rejects_path, told.addresses) == ("t", 3, "file:///x", "localhost:9000")


def _reader(broker: Broker) -> TimelineStreamReader:
    return TimelineStreamReader(SourceOptions(broker.address, "t", partitions=1), read_schema(False))


def _read(reader: TimelineStreamReader, start: Any, end: Any) -> set[str]:
    parts = reader.partitions(start, end)
    return {id for part in parts for rows in reader.read(part) for id in rows.column("id").to_pylist()}


async def _there(broker: Broker) -> set[str]:
    async with timeline.connect(broker.address) as tl:
        return {one.id async for one in tl.scan("t")}


async def test_what_was_done_when_a_query_ended_is_acknowledged_by_the_next(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "timeline.pipeline.source.streaming.MORE_MS", 60_000.0
    )  # what is due is there: each batch is full before that
    ids = {f"m{at:02d}" for at in range(30)}
    async with timeline.connect(broker.address) as tl, tl.producer("t") as p:
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


async def test_a_row_whose_id_is_taken_is_rejected_though_the_first_answer_was_lost(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver cannot know what became of the first call. A second one tells."""
    receive, lost = GrpcStream.receive, [True]

    async def losing(stream: GrpcStream) -> bytes | None:
        frame = await receive(stream)
        if lost and frame is not None and isinstance(decode(frame), Produced):
            lost.pop()
            raise TransportError(Fault.BROKEN, "the answer was lost")
        return frame

    async with timeline.connect(broker.address) as tl, tl.producer("t") as p:
        await p.produce(b"theirs", at=LATER_US // 1_000, id="a")
        monkeypatch.setattr(GrpcStream, "receive", losing)
        due = pa.array([LATER_US] * 2, pa.timestamp("us", tz="UTC"))
        rows = pa.RecordBatch.from_arrays([due, pa.array(["mine"] * 2), pa.array(["a", "b"])], ["due", "payload", "id"])
        done = await asyncio.to_thread(WriteTask(plan(broker, max_rejects=1), 0).write, iter([rows]))
        assert not lost and (done.put + done.there, done.rejected.total()) == (1, 1)
        assert next(iter(done.rejected)).startswith("EXISTS: ")
        assert sorted([m.id async for m in tl.scan("t")]) == ["a", "b"]
