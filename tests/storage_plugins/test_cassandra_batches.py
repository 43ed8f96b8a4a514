"""What calls ask of a bucket of Cassandra goes together, and is judged on what stands when it goes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from tests.servers.cassandra import CassandraServer
from tests.servers.fixture import Running
from timeline.columns import Ragged
from timeline.model import Operation, Status, buckets_of
from timeline.storage_plugins import make_store
from timeline.storage_plugins.cassandra.bucket import PASSED, Bucket, Buckets, Head
from timeline.storage_plugins.cassandra.changes import FEW, SPREAD_OF_FEW
from timeline.storage_plugins.cassandra.session import WriteUnknown
from timeline.storage_plugins.conformance.trial import T0, Trial, by_id, named, statuses
from timeline.storage_plugins.contract import StoreUnavailable, StoreUnknown

pytestmark = [pytest.mark.servers, pytest.mark.timeout(400)]


async def _asked(bucket: Any, *calls: Coroutine[Any, Any, Any]) -> list[asyncio.Future[Any]]:
    """Begins calls, each once the one before waits for the bucket."""
    begun: list[asyncio.Future[Any]] = []
    async with asyncio.timeout(60):
        for call in calls:
            waiting = len(bucket.waiting)
            begun.append(asyncio.ensure_future(call))
            while len(bucket.waiting) == waiting:
                await asyncio.sleep(0)
    return begun


@asynccontextmanager
async def _held(trial: Trial, topic: Any, number: int = 0) -> AsyncIterator[tuple[Any, list[int]]]:
    """A bucket of a topic, locked as if a change of it were under way, and how many statements each conditional batch
    since then had."""
    context: Any = trial.store._context  # type: ignore[attr-defined]
    [bucket] = context.buckets.of(topic.uid, [number])
    connected, sent = context.partition.connected, list[int]()
    plain = connected.write

    async def write(statements: Any) -> Any:
        if statements[0][0] == "claim":
            sent.append(len(statements))
        return await plain(statements)

    connected.write = write
    async with bucket.lock:
        yield bucket, sent


@pytest.mark.prove
async def test_a_lease_goes_with_the_puts_and_settles_that_wait_for_its_bucket(servers: Running) -> None:
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        topic = await trial.topic(buckets=1)
        await trial.stored(topic, named(4))
        first = (await trial.lease(topic, 2)).rows
        async with _held(trial, topic) as (bucket, sent):
            *calls, lease = await _asked(
                bucket,
                trial.settle(topic, Operation.ACK, first),
                trial.put(topic, named(3, "new")),
                trial.lease(topic, 10, holder=b"other"),
            )
            assert (bucket.asked, bucket.leases) == (2 + 3 + 2, 1)
        acked, put = await asyncio.gather(*calls)
        leased = (await lease).rows
        assert len(sent) == 1
        assert set(statuses(acked)) == set(statuses(put)) == {Status.OK}
        # What was put by the same batch was not known to be due when the lease was chosen.
        assert sorted(leased.ids.tolist()) == sorted(set(named(4)) - set(first.ids.tolist()))
        assert sorted((await trial.lease(topic, 10)).rows.ids.tolist()) == named(3, "new")
        assert (bucket.asked, bucket.leases) == (0, 0)


async def test_calls_that_are_cancelled_leave_nothing_asked_and_no_turn_taken(servers: Running) -> None:
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        topic = await trial.topic(buckets=4)
        context: Any = trial.store._context  # type: ignore[attr-defined]
        dice = random.Random(5)
        for turn in range(6):
            calls = [asyncio.ensure_future(trial.put(topic, named(6, f"{turn}-{at}"))) for at in range(20)]
            calls += [asyncio.ensure_future(trial.lease(topic, 20, holder=b"%d" % at)) for at in range(4)]
            for _ in range(dice.randrange(60)):
                await asyncio.sleep(0)
            for call in dice.sample(calls, 12):
                call.cancel()
            ends = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(end) for end in ends if isinstance(end, BaseException)} <= {
                asyncio.CancelledError,
                StoreUnknown,
            }
        async with _held(trial, topic) as (bucket, _):
            id = next(id for id in named(40) if buckets_of(Ragged.of([id]), 4).tolist() == [0])
            [put] = await _asked(bucket, trial.put(topic, [id]))
            put.cancel()
            await asyncio.wait([put])
        buckets = context.buckets.of(topic.uid, range(4))
        assert {(bucket.asked, bucket.leases, len(bucket.waiting)) for bucket in buckets} == {(0, 0, 0)}
        assert not any(bucket.lock.locked() for bucket in buckets)
        assert context.slots._under_way == {True: 0, False: 0} and not context.slots._line
        await trial.stored(topic, named(30, "after"))


async def test_leases_that_wait_while_their_topic_is_dropped_do_not_go_in_circles(servers: Running) -> None:
    """Each with what it had read of the bucket before undid what the one before it had learnt."""
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        topic = await trial.topic(buckets=1)
        await trial.stored(topic, named(40))
        async with _held(trial, topic) as (bucket, _):
            puts = [trial.put(topic, named(2, f"{at}")) for at in range(5)]
            leases = [asyncio.ensure_future(trial.lease(topic, 2, holder=b"%d" % at)) for at in range(10)]
            calls = await _asked(bucket, *puts)
            assert await trial.store.drop_topic(topic)
            connected: Any = trial.store._context.partition.connected  # type: ignore[attr-defined]
            plain, reads = connected.read, Counter[str]()

            async def read(name: str, *values: Any, serial: bool = False) -> Any:
                reads[name] += 1
                return await plain(name, *values, serial=serial)

            connected.read = read
        for answers in await asyncio.gather(*calls):
            assert set(statuses(answers)) <= {Status.NOT_FOUND}
        assert not any(len(leased.rows) for leased in await asyncio.gather(*leases))
        assert reads["timeline"] <= len(leases), reads


async def test_two_leases_that_chose_the_same_do_not_both_get_it(servers: Running) -> None:
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        topic = await trial.topic(buckets=1)
        await trial.stored(topic, named(6))
        await trial.lease(topic, 1)
        async with _held(trial, topic) as (bucket, sent):
            calls = await _asked(bucket, *(trial.lease(topic, 4, holder=holder) for holder in (b"one", b"two")))
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
            *calls, lease = await _asked(
                bucket,
                trial.mutate(topic, Operation.MOVE, [moved], due_ms=T0 + 60_000),
                trial.mutate(topic, Operation.CANCEL, [gone]),
                trial.lease(topic, 10),
            )
        assert [statuses(answers) for answers in await asyncio.gather(*calls)] == [[Status.OK], [Status.OK]]
        leased = await lease
        assert leased.rows.ids.tolist() == [kept]
        assert by_id(await trial.scan(topic))[moved]["due_ms"] == T0 + 60_000


async def test_a_lease_that_loses_what_it_chose_gets_what_else_is_due(servers: Running) -> None:
    """To answer nothing would mean that nothing fits into its credit."""
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        topic = await trial.topic(buckets=2)
        ids = named(40)
        numbers = buckets_of(Ragged.of(ids), 2).tolist()
        early = next(id for id, number in zip(ids, numbers, strict=True) if number == 0)
        late = next(id for id, number in zip(ids, numbers, strict=True) if number == 1)
        await trial.stored(topic, [early, late], [T0 - 20, T0 - 10])
        assert not len((await trial.lease(topic, 0)).rows)
        async with _held(trial, topic, 0) as (bucket, _):
            cancel, lease = await _asked(bucket, trial.mutate(topic, Operation.CANCEL, [early]), trial.lease(topic, 1))
        assert statuses(await cancel) == [Status.OK]
        assert (await lease).rows.ids.tolist() == [late]


async def test_another_life_of_an_id_is_leased_only_where_it_fits(servers: Running) -> None:
    url = servers.url(CassandraServer)
    async with Trial(lambda: make_store(url)) as trial, Trial(lambda: make_store(url)) as other:
        topic = await trial.topic(buckets=1)
        [id] = named(1)
        await trial.stored(topic, [id])
        assert not len((await trial.lease(topic, 0)).rows)
        async with _held(trial, topic) as (bucket, _):
            [lease] = await _asked(bucket, trial.lease(topic, 1, max_bytes=1_000))
            await other.mutate(topic, Operation.CANCEL, [id])
            await other.stored(topic, [id], payload=b"x" * 5_000)
        assert not len((await lease).rows)
        assert by_id(await trial.scan(topic))[id]["version"] == 1
        assert len((await trial.lease(topic, 1, max_bytes=10_000)).rows) == 1


async def test_what_comes_onto_one_timeline_while_the_other_is_read_is_found(servers: Running) -> None:
    """A read that finds no row learns from none that the bucket has changed since its head was read."""
    url = servers.url(CassandraServer)
    async with Trial(lambda: make_store(url)) as trial, Trial(lambda: make_store(url)) as other:
        topic = await trial.topic(buckets=1)
        [id] = named(1)
        await trial.stored(topic, [id])
        held = (await trial.lease(topic, 1, lease_ms=1_000)).rows
        connected: Any = other.store._context.partition.connected  # type: ignore[attr-defined]
        plain, now_ms, released = connected.read, T0 + 5_000, list[Status]()

        async def read(name: str, *values: Any, serial: bool = False) -> Any:
            if name == "timeline" and not released:
                answers = await trial.settle(topic, Operation.RELEASE, held, now_ms=now_ms, time_ms=now_ms)
                released.extend(statuses(answers))
            return await plain(name, *values, serial=serial)

        connected.read = read
        assert (await other.lease(topic, 1, now_ms=now_ms)).rows.ids.tolist() == [id]
        assert released == [Status.OK]


async def test_what_was_leased_of_one_bucket_is_kept_where_another_fails(servers: Running) -> None:
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        topic = await trial.topic(buckets=2)
        ids = named(20)
        await trial.stored(topic, ids)
        numbers = buckets_of(Ragged.of(ids), 2).tolist()
        connected: Any = trial.store._context.partition.connected  # type: ignore[attr-defined]
        plain = connected.write

        async def write(statements: Any) -> Any:
            if statements[0][0] == "claim" and statements[0][1][4] == 1:
                raise StoreUnavailable("not now")
            return await plain(statements)

        connected.write = write
        leased = await trial.lease(topic)
        there = [id for id, number in zip(ids, numbers, strict=True) if number == 0]
        assert sorted(leased.rows.ids.tolist()) == there
        assert leased.next_due_ms is not None and leased.next_due_ms <= T0
        with pytest.raises(StoreUnavailable):
            await trial.lease(topic)
        del connected.write
        assert sorted((await trial.lease(topic)).rows.ids.tolist()) == sorted(set(ids) - set(there))


async def test_a_lease_that_is_not_known_to_be_made_is_not_returned(servers: Running) -> None:
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        topic = await trial.topic(buckets=1)
        await trial.stored(topic, named(2))
        await trial.lease(topic, 0)
        async with _held(trial, topic) as (bucket, _):
            connected: Any = trial.store._context.partition.connected  # type: ignore[attr-defined]
            plain = connected.write

            async def write(statements: Any) -> Any:
                await plain(statements)
                raise WriteUnknown("nobody knows")

            async def unread(*_: Any, **__: Any) -> Any:
                raise StoreUnavailable("nor that")

            put, lease = await _asked(bucket, trial.put(topic, named(1, "new")), trial.lease(topic))
            connected.write, read, connected.read = write, connected.read, unread
        for call in (put, lease):
            with pytest.raises(StoreUnknown):
                await call
        connected.write, connected.read = plain, read
        assert {row["version"] for row in by_id(await trial.scan(topic)).values()} == {1, 2}


async def test_what_is_overdue_no_more_is_not_for_a_sweep(servers: Running) -> None:
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        topic = await trial.topic(buckets=1)
        ids = named(3)
        await trial.stored(topic, ids)
        await trial.lease(topic, 1)
        now_ms = T0 + 10_000
        async with _held(trial, topic) as (bucket, _):
            move, lease = await _asked(
                bucket,
                trial.mutate(topic, Operation.MOVE, ids[1:2], due_ms=now_ms, now_ms=now_ms),
                trial.lease(topic, 10, now_ms=now_ms, overdue_ms=2_000),
            )
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
    bucket.meet(Head(10))
    assert bucket.current(Head(10)) and not bucket.current(Head(8))
    for number in range(100, 101 + PASSED):
        bucket.became(Head(number), {}, {})
    assert not bucket.current(Head(10)) and bucket.current(Head(100))


async def test_small_batches_wait_for_company_and_large_ones_do_not(servers: Running) -> None:
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        context: Any = trial.store._context  # type: ignore[attr-defined]
        topic = await trial.topic(buckets=1)
        [bucket] = context.buckets.of(topic.uid, [0])
        async with AsyncExitStack() as taken:
            for number in range(SPREAD_OF_FEW):
                await taken.enter_async_context(context.slots.slot(Bucket(0, number)))
            small, more = await _asked(bucket, trial.put(topic, named(1)), trial.put(topic, named(2, "more")))
            wide = await trial.topic(buckets=1)
            assert set(statuses(await trial.put(wide, named(FEW)))) == {Status.OK}
            assert not small.done() and not more.done()
            enough = asyncio.ensure_future(trial.put(topic, named(FEW, "enough")))
            for put in (small, more, enough):
                assert set(statuses(await put)) == {Status.OK}
