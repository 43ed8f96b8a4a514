"""What calls ask of a bucket of Cassandra goes together, and is judged on what stands when it goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.servers.cassandra import CassandraServer
from tests.servers.fixture import Running
from timeline.model import Operation, Status
from timeline.storage_plugins import make_store
from timeline.storage_plugins.cassandra.bucket import PASSED, Buckets, Head
from timeline.storage_plugins.cassandra.desk import FEW, SPREAD, SPREAD_OF_FEW
from timeline.storage_plugins.conformance.trial import T0, Trial, by_id, named, statuses

pytestmark = [pytest.mark.servers, pytest.mark.timeout(400)]


async def _waits(bucket: Any, parts: int) -> None:
    """Returns once so many parts of calls wait for the bucket."""
    while len(bucket.waiting) < parts:
        await asyncio.sleep(0)


@asynccontextmanager
async def _held(trial: Trial, topic: Any) -> AsyncIterator[tuple[Any, list[int]]]:
    """The one bucket of a topic, locked as if a change of it were under way, and how many statements each conditional
    batch since then had."""
    desk: Any = trial.store._desk  # type: ignore[attr-defined]
    [bucket] = desk.buckets.of(topic.uid, [0])
    connected, sent = desk.partition.connected, list[int]()
    plain = connected.write

    async def write(statements: Any) -> Any:
        if statements[0][0] == "claim":
            sent.append(len(statements))
        return await plain(statements)

    connected.write = write
    async with bucket.lock:
        yield bucket, sent


async def test_a_lease_goes_with_the_puts_and_settles_that_wait_for_its_bucket(servers: Running) -> None:
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        topic = await trial.topic(buckets=1)
        await trial.stored(topic, named(4))
        first = (await trial.lease(topic, 2)).rows
        async with _held(trial, topic) as (bucket, sent):
            calls = [asyncio.ensure_future(trial.settle(topic, Operation.ACK, first))]
            await _waits(bucket, 1)
            calls.append(asyncio.ensure_future(trial.put(topic, named(3, "new"))))
            await _waits(bucket, 2)
            lease = asyncio.ensure_future(trial.lease(topic, 10, holder=b"other"))
            await _waits(bucket, 3)
        acked, put = await asyncio.gather(*calls)
        leased = (await lease).rows
        assert len(sent) == 1
        assert set(statuses(acked)) == set(statuses(put)) == {Status.OK}
        # What was put by the same batch was not known to be due when the lease was chosen.
        assert sorted(leased.ids.tolist()) == sorted(set(named(4)) - set(first.ids.tolist()))
        assert sorted((await trial.lease(topic, 10)).rows.ids.tolist()) == named(3, "new")


async def test_two_leases_that_chose_the_same_do_not_both_get_it(servers: Running) -> None:
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        topic = await trial.topic(buckets=1)
        await trial.stored(topic, named(6))
        await trial.lease(topic, 1)
        async with _held(trial, topic) as (bucket, sent):
            calls = [asyncio.ensure_future(trial.lease(topic, 4, holder=holder)) for holder in (b"one", b"two")]
            await _waits(bucket, 2)
        ends = [leased.rows for leased in await asyncio.gather(*calls)]
        assert len(sent) == 2
        assert sorted(map(len, ends)) == [1, 4]
        one, two = (rows.ids.tolist() for rows in ends)
        assert set(one).isdisjoint(two)
        held = by_id(await trial.scan(topic))
        assert {held[id]["holders"] for id in one} == {b"one"} and {held[id]["holders"] for id in two} == {b"two"}
        assert {row["version"] for row in held.values()} == {2}


async def test_what_was_moved_or_cancelled_since_it_was_chosen_is_not_leased(servers: Running) -> None:
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        topic = await trial.topic(buckets=1)
        ids = named(4)
        await trial.stored(topic, ids)
        await trial.lease(topic, 1)
        moved, gone, kept = ids[1], ids[2], ids[3]
        async with _held(trial, topic) as (bucket, _):
            calls = [asyncio.ensure_future(trial.mutate(topic, Operation.MOVE, [moved], due_ms=T0 + 60_000))]
            await _waits(bucket, 1)
            calls.append(asyncio.ensure_future(trial.mutate(topic, Operation.CANCEL, [gone])))
            await _waits(bucket, 2)
            lease = asyncio.ensure_future(trial.lease(topic, 10))
            await _waits(bucket, 3)
        assert [statuses(answers) for answers in await asyncio.gather(*calls)] == [[Status.OK], [Status.OK]]
        leased = await lease
        assert leased.rows.ids.tolist() == [kept]
        assert by_id(await trial.scan(topic))[moved]["due_ms"] == T0 + 60_000


async def test_what_is_overdue_no_more_is_not_for_a_sweep(servers: Running) -> None:
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        topic = await trial.topic(buckets=1)
        ids = named(3)
        await trial.stored(topic, ids)
        await trial.lease(topic, 1)
        now_ms = T0 + 10_000
        async with _held(trial, topic) as (bucket, _):
            move = asyncio.ensure_future(trial.mutate(topic, Operation.MOVE, ids[1:2], due_ms=now_ms, now_ms=now_ms))
            await _waits(bucket, 1)
            lease = asyncio.ensure_future(trial.lease(topic, 10, now_ms=now_ms, overdue_ms=2_000))
            await _waits(bucket, 2)
        assert statuses(await move) == [Status.OK]
        assert (await lease).rows.ids.tolist() == ids[2:]


async def test_what_another_broker_put_is_seen_by_the_next_lease(servers: Running) -> None:
    url = servers.url(CassandraServer)
    async with Trial(lambda: make_store(url)) as trial, Trial(lambda: make_store(url)) as other:
        topic = await trial.topic(buckets=1)
        await trial.stored(topic, named(2), T0 + 10_000)
        assert not len((await trial.lease(topic, 10)).rows)
        for turn in range(3):
            ids = named(2, f"turn{turn}")
            assert set(statuses(await other.put(topic, ids))) == {Status.OK}
            assert sorted((await trial.lease(topic, 10)).rows.ids.tolist()) == ids


def test_a_head_that_was_read_before_a_change_of_ours_is_no_news() -> None:
    [bucket] = Buckets().of(1, [0])
    assert not bucket.current(Head())
    bucket.meet(Head(7))
    for number in (8, 9):
        bucket.became(Head(number), {}, {})
    assert all(bucket.current(Head(number)) for number in (7, 8, 9))
    assert not bucket.current(Head(10))
    for number in range(100, 101 + PASSED):
        bucket.became(Head(number), {}, {})
    assert not bucket.current(Head(9))


async def test_small_batches_wait_for_company_and_large_ones_do_not(servers: Running) -> None:
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        desk: Any = trial.store._desk  # type: ignore[attr-defined]
        few, many = desk.turn(FEW - 1), desk.turn(FEW)
        assert few is not many
        assert few._value == SPREAD_OF_FEW < many._value == SPREAD
        topic = await trial.topic(buckets=1)
        [bucket] = desk.buckets.of(topic.uid, [0])
        for _ in range(SPREAD_OF_FEW):
            await few.acquire()
        small = asyncio.ensure_future(trial.put(topic, named(1)))
        await _waits(bucket, 1)
        more = asyncio.ensure_future(trial.put(topic, named(2, "more")))
        await _waits(bucket, 2)
        wide = await trial.topic(buckets=1)
        assert set(statuses(await trial.put(wide, named(FEW)))) == {Status.OK}
        assert not small.done() and not more.done()
        for _ in range(SPREAD_OF_FEW):
            few.release()
        assert set(statuses(await small) + statuses(await more)) == {Status.OK}
