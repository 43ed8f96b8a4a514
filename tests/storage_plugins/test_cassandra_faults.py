"""What a real Cassandra does to its store: refused, gone, paused, killed; and what a lease reads after many acks."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from typing import Any

import pytest
from cassandra import cluster as driver

from tests.servers.cassandra import CassandraServer
from tests.servers.fixture import Running
from tests.storage_plugins.cassandra_tombstones import TracedSession, acknowledge, traced_lease
from timeline.columns import Ragged
from timeline.model import Operation, State, Status, buckets_of
from timeline.storage_plugins import make_store
from timeline.storage_plugins.asks import READ_AGAIN_MS
from timeline.storage_plugins.cassandra.bucket import MOST_OF_ONE, SEEN_BEYOND_MS
from timeline.storage_plugins.cassandra.session import Tombstoned, WriteUnknown, older
from timeline.storage_plugins.cassandra.statements import FREE
from timeline.storage_plugins.conformance.trial import T0, Trial, by_id, named, statuses
from timeline.storage_plugins.contract import StoreRefused, StoreUnavailable, StoreUnknown, Swept
from timeline.storage_plugins.versions import Versions

pytestmark = [pytest.mark.servers, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("cassandra://localhost", "needs a keyspace"),
        ("cassandra://localhost:port/timeline", "needs host"),
        ("cassandra:///timeline", "needs host"),
        ("cassandra://localhost/timeline?replicas=3", "knows no option 'replicas'"),
        ("cassandra://localhost/timeline?replication=many", "no number"),
        ("cassandra://localhost/timeline?timeout_s=0", "timeout_s from 0.1"),
        ("cassandra://localhost/timeline?tls=yes", "tls=1 or tls=0"),
        ("cassandra://ops:a[b@localhost/timeline", "percent-encoded"),
    ],
)
def test_a_url_that_makes_no_sense_is_refused(url: str, why: str) -> None:
    with pytest.raises(StoreRefused, match=why):
        make_store(url)


def test_versions_before_4_1_are_too_old() -> None:
    found = [older(version) for version in ("3.11.17", "2.2.19", "4.0.0", "4.1-beta1", "5.0.9", "10.0")]
    assert found == [True, True, True, False, False, False]


def test_a_missing_driver_names_the_extra() -> None:
    """In a process of its own, in which the driver cannot be imported."""
    said = (
        "import sys\n"
        "sys.modules['cassandra'] = None\n"
        "from timeline.storage_plugins import make_store\n"
        "try:\n"
        "    make_store('cassandra://localhost/timeline')\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("PluginRefused") and "pip install 'timeline-scheduler[cassandra]'" in done.stdout


def _in_keyspace(url: str, keyspace: str) -> str:
    return re.sub(r"/\w+\?", f"/{keyspace}?", url)


async def test_a_missing_keyspace_is_refused_with_what_creates_it(servers: Running) -> None:
    url = servers.url(CassandraServer).partition("?")[0] + "_absent"
    with pytest.raises(StoreRefused, match=r"CREATE KEYSPACE IF NOT EXISTS \w+_absent WITH replication"):
        await make_store(url).open()


async def test_a_node_that_is_not_there_is_unavailable(servers: Running) -> None:
    url = re.sub(r":\d+/", ":1/", servers.url(CassandraServer))
    store = make_store(url)
    with pytest.raises(StoreUnavailable, match="no node of Cassandra can be reached"):
        await store.open()
    await store.close()


async def test_an_opening_that_is_cancelled_leaves_no_session(servers: Running) -> None:
    url = servers.url(CassandraServer)
    before = set(driver._clusters_for_shutdown)
    store = make_store(url)
    opening = asyncio.ensure_future(store.open())
    while driver._clusters_for_shutdown == before:
        await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    while driver._clusters_for_shutdown - before:
        await asyncio.sleep(0)
    await store.open()
    await store.close()
    assert driver._clusters_for_shutdown == before


async def test_data_of_a_newer_timeline_is_refused(servers: Running) -> None:
    url = _in_keyspace(servers.url(CassandraServer), "timeline_newer")
    store: Any = make_store(url)
    await store.open()
    assert (await store.migrate(contract=True)) == Versions(1, 1)
    for name in ("schema", "oldest"):
        await store._context.partition.connected.write([("probe", (name, "999"))])
    try:
        with pytest.raises(StoreRefused, match="schema has version 999"):
            await make_store(url).open()
    finally:
        session = store._context.partition.connected.session
        await asyncio.to_thread(session.execute, "DROP KEYSPACE timeline_newer")
        await store.close()


async def test_a_table_that_reads_repaired_is_repaired_by_reads_no_more(servers: Running) -> None:
    """One that was made by a Timeline that did not say so yet."""
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        topic = await trial.topic()
        await trial.stored(topic, named(3))
        session = trial.store._context.partition.connected.session  # type: ignore[attr-defined]

        def repairs(change: str = "") -> str:
            if change:
                session.execute(f"ALTER TABLE message WITH read_repair = '{change}'")
            query = "SELECT read_repair FROM system_schema.tables WHERE keyspace_name = %s AND table_name = 'message'"
            told = session.execute(query, (session.keyspace,))
            return str(told.one().read_repair)

        assert await asyncio.to_thread(repairs, "BLOCKING") == "BLOCKING"
        async with Trial(lambda: make_store(servers.url(CassandraServer))) as later:
            assert await asyncio.to_thread(repairs) == "NONE"
            assert (await later.everything(topic)).keys() == set(named(3))
        await trial.stored(topic, [b"after"])


async def test_what_is_left_of_dropped_topics_is_cleared(servers: Running) -> None:
    """Rows and contents that a put brought late are gone after the next sweep, and so is the note of the topic."""
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        store: Any = trial.store
        connected = store._context.partition.connected
        for note in await connected.read("dropped"):
            await connected.write([("dropped_remove", (note.uid,))])
        gone, stays = await trial.topic(buckets=3), await trial.topic(buckets=3)
        await trial.stored(gone, named(20), payload=b"x" * 40_000)
        assert await store.drop_topic(gone)
        late = (gone.uid, 1, 2, b"late", 7, 8, 9, b"payload", b"")
        await connected.write([("content_store", late)])
        await trial.store.sweep(stays, 0, 100)
        for part in range(5):
            for bucket in range(3):
                place = (gone.uid, bucket, part)
                assert not await connected.read("content_walk", *place, b"", -(1 << 63), -(1 << 63), 10)
        assert not await connected.read("dropped")
        assert not await connected.read("walk", gone.uid, 1, b"", 10)


async def test_a_topic_that_another_broker_dropped_is_kept_in_mind_no_longer(servers: Running) -> None:
    url = servers.url(CassandraServer)
    async with Trial(lambda: make_store(url)) as trial, Trial(lambda: make_store(url)) as other:
        topic = await trial.topic(buckets=2)
        await trial.stored(topic, named(20))
        await trial.store.sweep(topic, T0, 100)
        store: Any = trial.store
        assert topic.uid in store._context.buckets._known
        assert await other.store.drop_topic(topic)
        assert set(statuses(await trial.put(topic, named(1, "late")))) == {Status.NOT_FOUND}
        assert topic.uid not in store._context.buckets._known
        assert topic.uid not in store._context.looking


async def test_what_another_broker_dropped_is_forgotten_when_topics_are_listed(servers: Running) -> None:
    """A broker that only hears of a drop never names the topic again, but lists the topics."""
    url = servers.url(CassandraServer)
    async with Trial(lambda: make_store(url)) as trial, Trial(lambda: make_store(url)) as other:
        stays = await trial.topic(buckets=1)
        await trial.stored(stays, [b"stays"])
        context: Any = trial.store._context  # type: ignore[attr-defined]
        [kept] = context.buckets.of(stays.uid, [0])
        gone = [await trial.topic(buckets=64) for _ in range(3)]
        for topic in gone:
            await trial.lease(topic, wanted=0)
            await trial.store.sweep(topic, T0, 100)
            context.buckets.of(topic.uid, range(64))
            assert await other.store.drop_topic(topic)
        context.tombstoned.add((gone[0].uid, 0, False))
        assert context.buckets.of(stays.uid, [0]) == [kept] and kept.room < MOST_OF_ONE
        assert stays.uid in {topic.uid for topic in await trial.store.topics()}
        assert context.buckets.of(stays.uid, [0]) == [kept] and kept.room == MOST_OF_ONE
        assert kept.head is not None and kept.messages.keys() == {b"stays"}
        known = context.records.topics() | context.buckets.topics() | context.looking.keys()
        assert not known & {topic.uid for topic in gone} and not context.tombstoned


async def test_a_topic_that_is_created_while_topics_are_listed_is_kept_in_mind(servers: Running) -> None:
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        context: Any = trial.store._context  # type: ignore[attr-defined]
        connected, made = context.partition.connected, []
        plain = connected.read

        async def read(name: str, *values: Any, **more: Any) -> Any:
            rows = await plain(name, *values, **more)
            if name == "topics":
                made.append(await trial.topic_with([b"early"], buckets=1))
            return rows

        connected.read = read
        told = await trial.store.topics()
        del connected.read
        assert made and made[0].uid not in {topic.uid for topic in told}
        assert context.buckets.of(made[0].uid, [0])[0].messages.keys() == {b"early"}


async def test_what_was_done_before_a_failure_is_not_denied(servers: Running) -> None:
    """A lease that can read no content has leased all the same, and returns it unseen. A topic whose rows cannot go is
    dropped."""
    url = _in_keyspace(servers.url(CassandraServer), "timeline_torn")
    async with Trial(lambda: make_store(url)) as trial:
        topic = await trial.topic(buckets=2)
        await trial.stored(topic, named(4), payload=b"x" * 4_000)
        session = trial.store._context.partition.connected.session  # type: ignore[attr-defined]
        await asyncio.to_thread(session.execute, "DROP TABLE payload")
        with pytest.raises(StoreUnknown, match="a part of it was done"):
            await trial.lease(topic)
        rows = by_id(await trial.scan(topic)).values()
        assert {(row["version"], row["holders"], row["deliveries"]) for row in rows} == {(3, b"", 0)}
        assert {(row["due_ms"], row["scheduled_ms"]) for row in rows} == {(T0 + READ_AGAIN_MS, T0)}
        await trial.stored(topic, [b"small"])
        await trial.lease(topic, wanted=[b"small"], next_due_ms=T0 + READ_AGAIN_MS)
        with pytest.raises(StoreUnavailable, match="payload"):
            await trial.scan(topic, payload=True)
        assert await trial.store.drop_topic(topic)
        await asyncio.to_thread(session.execute, "DROP KEYSPACE timeline_torn")
        trial._topics.clear()


class Deaf:
    """Contents of some buckets that cannot be read, and buckets that cannot change, at the session of a store."""

    def __init__(self, trial: Trial) -> None:
        self._connected: Any = trial.store._context.partition.connected  # type: ignore[attr-defined]
        self._read, self._write = self._connected.read, self._connected.write
        self._connected.read, self._connected.write = self.read, self.write
        self.contents: set[int] = set()
        self.claims: set[int] = set()
        self.reads: set[str] = set()

    async def read(self, name: str, *values: Any, **more: Any) -> Any:
        if name in self.reads or (name == "content_find" and values[1] in self.contents):
            raise StoreUnavailable("ReadFailure: not now")
        return await self._read(name, *values, **more)

    async def write(self, statements: Any) -> Any:
        name, values = statements[0]
        if name == "claim" and values[4] in self.claims:
            raise StoreUnavailable("not now")
        return await self._write(statements)


async def test_what_cannot_be_read_now_goes_back_unseen_and_rests(servers: Running) -> None:
    """The others are answered, however often, and what went back is never buried for it."""
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        topic, ids, large = await trial.topic(buckets=4, max_deliveries=2), named(40), b"p" * 2_000
        numbers = buckets_of(Ragged.of(ids), 4).tolist()
        small = ids[numbers.index(1)]
        unread = [id for id, number in zip(ids, numbers, strict=True) if number == 1 and id != small]
        await trial.stored(topic, ids, payload=[b"s" if id == small else large for id in ids])
        fault = Deaf(trial)
        fault.contents = {1}
        leased = await trial.lease(topic, wanted=sorted(set(ids) - set(unread)), next_due_ms=T0 + READ_AGAIN_MS)
        assert leased.rows.payloads is not None and not leased.damaged
        assert len(leased.grant) == len(leased.was_due_ms) == len(leased.prior_holders) == len(leased.rows)
        told = dict(zip(leased.rows.ids, leased.rows.payloads, strict=True))
        assert told == {id: b"s" if id == small else large for id in ids if id not in unread}
        for turn in range(1, 5):
            now_ms = T0 + turn * READ_AGAIN_MS
            rows = [by_id(await trial.scan(topic))[id] for id in unread]
            assert {(row["holders"], row["deliveries"], row["due_ms"], row["scheduled_ms"]) for row in rows} == {
                (b"", 0, now_ms, T0)
            }
            await trial.lease(topic, now_ms=now_ms - 1, wanted=0)
            with pytest.raises(StoreUnknown, match="ReadFailure"):
                await trial.lease(topic, now_ms=now_ms)
        fault.contents = set()
        again = await trial.lease(topic, now_ms=T0 + 5 * READ_AGAIN_MS, wanted=unread)
        assert again.rows.payloads is not None and set(again.rows.payloads) == {large}
        assert set(again.rows.deliveries.tolist()) == {1} and not len(again.buried)


async def test_what_expires_soon_rests_no_longer_than_it_lives(servers: Running) -> None:
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        topic = await trial.topic(buckets=1)
        expires = [0, T0 + 500, T0 + READ_AGAIN_MS, T0 + 90_000]
        await trial.stored(topic, named(4), payload=b"p" * 2_000, expires_ms=expires)
        await trial.stored(topic, [b"small"])
        Deaf(trial).contents = {0}
        await trial.lease(topic, wanted=[b"small"], next_due_ms=T0 + 499)
        there = by_id(await trial.scan(topic))
        dues = [there[id]["due_ms"] for id in named(4)]
        assert dues == [T0 + READ_AGAIN_MS, T0 + 499, T0 + READ_AGAIN_MS - 1, T0 + READ_AGAIN_MS]


async def test_what_cannot_be_given_back_keeps_nobody_waiting(servers: Running) -> None:
    """It stays leased until its lease runs out; what could be read is answered."""
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        topic = await trial.topic(buckets=1)
        await trial.stored(topic, [b"large", b"small"], payload=[b"p" * 2_000, b"s"])
        fault = Deaf(trial)
        plain = fault.read

        async def read(name: str, *values: Any, **more: Any) -> Any:
            if name == "content_find":
                fault.claims = {0}
            return await plain(name, *values, **more)

        fault._connected.read, fault.contents = read, {0}
        await trial.lease(topic, lease_ms=50, wanted=[b"small"])
        fault._connected.read, fault.claims, fault.contents = plain, set(), set()
        await trial.lease(topic, now_ms=T0 + 51, wanted=[b"large", b"small"])


async def test_a_sweep_that_fails_midway_tells_what_it_removed(servers: Running) -> None:
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        topic, ids = await trial.topic(buckets=4), named(40)
        numbers = buckets_of(Ragged.of(ids), 4).tolist()
        await trial.stored(topic, ids, expires_ms=T0 + 100)
        fault = Deaf(trial)
        fault.claims = {2}
        before = sum(number < 2 for number in numbers)
        assert await trial.store.sweep(topic, T0 + 200, 100) == Swept(expired=before, more=True)
        with pytest.raises(StoreUnavailable, match="not now"):
            await trial.store.sweep(topic, T0 + 200, 100)
        fault.claims, fault.reads = set(), {"content_walk"}
        assert await trial.store.sweep(topic, T0 + 200, 100) == Swept(expired=len(ids) - before, more=True)
        with pytest.raises(StoreUnavailable, match="not now"):
            await trial.store.sweep(topic, T0 + 200, 100)
        fault.reads = set()
        assert await trial.store.sweep(topic, T0 + 200, 100) == Swept()


async def test_a_lease_reads_no_more_than_it_returns_after_much_was_acked(servers: Running) -> None:
    """No flush, no compaction, gc_grace_seconds as it is: no trace of what was acknowledged is read."""
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        topic = await trial.topic(buckets=1)
        await acknowledge(trial, topic, 3_000, 1_500)
        reads = await traced_lease(trial, topic)
    assert reads, "nothing was traced"
    # Ten messages are there, and a read counts the partition's static row.
    assert all(tombstones == 0 and live <= 11 for live, tombstones in reads), reads


async def test_a_walk_comes_past_more_traces_than_cassandra_reads(servers: Running) -> None:
    """The tests' node reads past 5,000, one as it comes past 100,000."""
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        topic = await trial.topic(buckets=1)
        await acknowledge(trial, topic, 6_000, 500)
        with pytest.raises(StoreUnavailable, match="TOMBSTONES"):
            await trial.store._context.partition.connected.read("walk", topic.uid, 0, b"", 1)  # type: ignore[attr-defined]
        await trial.stored(topic, named(30), [T0 + 10 * (at % 7) for at in range(30)], tag=b"t", payload=b"p" * 2_000)
        held = (await trial.lease(topic, 5, now_ms=T0)).rows
        dead = (await trial.lease(topic, 1, now_ms=T0 + 10)).rows
        await trial.settle(topic, Operation.BURY, dead, now_ms=T0 + 10)
        for limit in (7, 1_000):
            there = by_id(await trial.scan(topic, now_ms=T0 + 10, limit=limit, payload=True, states=frozenset(State)))
            assert sorted(there) == named(30) and {row["payloads"] for row in there.values()} == {b"p" * 2_000}
        assert set(by_id(await trial.scan(topic, tag=b"t"))) == set(named(30)) - set(dead.ids.tolist())
        page = await trial.store.held_by(topic, T0 + 20, held.holders[0], b"", 100)
        assert sorted(page.rows.ids.tolist()) == sorted(held.ids.tolist())


@pytest.mark.parametrize("prefix", ["m", "a-common-beginning-of-all-the-ids-"])
async def test_a_lease_comes_past_more_cancelled_neighbours_than_cassandra_reads(servers: Running, prefix: str) -> None:
    """All of one due, so that no time tells them apart, and none of them first, so that no range is deleted."""
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        topic = await trial.topic(buckets=1)
        ids = named(6_000, prefix)
        stays = ids[2_500] + b"+"
        await trial.stored(topic, [*ids[:1], stays], T0 + 100)
        for start in range(1, len(ids), 500):
            await trial.stored(topic, ids[start : start + 500], T0 + 100)
        await trial.stored(topic, [b"far"], T0 + 86_400_000)
        await trial.reopen()
        for start in range(1, len(ids), 500):
            cancelled = await trial.mutate(topic, Operation.CANCEL, ids[start : start + 500])
            assert set(statuses(cancelled)) == {Status.OK}
        await trial.reopen()
        with pytest.raises(Tombstoned):
            await trial.store._context.partition.connected.read(  # type: ignore[attr-defined]
                "timeline", topic.uid, 0, FREE, T0, b"", 10
            )
        leased = await trial.lease(topic, 10, now_ms=T0 + 100)
        assert sorted(leased.rows.ids.tolist()) == sorted([ids[0], stays])
        assert set(statuses(await trial.settle(topic, Operation.ACK, leased.rows, now_ms=T0 + 100))) == {Status.OK}
        assert sorted(by_id(await trial.scan(topic))) == [b"far"]
        again = await trial.lease(topic, 10, now_ms=T0 + 200)
        assert (len(again.rows), again.next_due_ms) == (0, T0 + 100 + SEEN_BEYOND_MS)
        last = await trial.lease(topic, 10, now_ms=T0 + 86_400_000)
        assert last.rows.ids.tolist() == [b"far"]


async def test_a_bucket_that_fails_is_the_status_of_its_messages_alone(servers: Running) -> None:
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        topic = await trial.topic(buckets=4)
        connected: Any = trial.store._context.partition.connected  # type: ignore[attr-defined]
        plain, kinds = connected.write, {1: StoreUnavailable("not now"), 2: WriteUnknown("nobody knows")}

        async def write(statements: Any) -> Any:
            name, values = statements[0]
            if name == "claim" and values[4] in kinds:
                raise kinds[values[4]]
            return await plain(statements)

        connected.write = write
        ids = named(40)
        numbers = buckets_of(Ragged.of(ids), 4).tolist()
        answers = await trial.put(topic, ids, payload=b"p" * 2_000)
        wanted = {1: Status.UNAVAILABLE, 2: Status.UNKNOWN}
        assert statuses(answers) == [wanted.get(number, Status.OK) for number in numbers]
        assert answers.details.keys() == {at for at, number in enumerate(numbers) if number in kinds}
        for number, error in ((1, StoreUnavailable), (2, StoreUnknown)):
            with pytest.raises(error):
                await trial.put(topic, [id for id, its in zip(ids, numbers, strict=True) if its == number])
        del connected.write
        again = await trial.put(topic, ids, payload=b"p" * 2_000)
        assert statuses(again) == [Status.OK if number in kinds else Status.DUPLICATE for number in numbers]
        assert {row["payloads"] for row in by_id(await trial.scan(topic, payload=True)).values()} == {b"p" * 2_000}


@pytest.mark.prove
async def test_a_sweep_meets_no_trace_of_what_went_before(servers: Running) -> None:
    """Else what is remembered would be forgotten no more once a bucket has had a hundred thousand of them."""
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        topic = await trial.topic(buckets=1, remember_ms=1_000)
        await acknowledge(trial, topic, 3_000, 1_500)
        swept = [(await trial.store.sweep(topic, T0 + 1_000, 2_000)).forgotten for _ in range(2)]
        assert swept == [2_000, 1_000]
        traced = TracedSession(trial.store._context.partition.connected)  # type: ignore[attr-defined]
        assert (await trial.store.sweep(topic, T0 + 1_000, 2_000)).forgotten == 0
        reads = await asyncio.to_thread(traced.reads)
    assert reads, "nothing was traced"
    assert max(tombstones for _, tombstones in reads) < 1_000, reads


async def test_a_sweep_meets_no_trace_of_what_was_acknowledged_before_it_expired(servers: Running) -> None:
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        topic = await trial.topic(buckets=1)
        for start in range(2):
            await trial.stored(topic, named(1_500, f"{start}"), T0, expires_ms=T0 + 900)
            leased = await trial.lease(topic, now_ms=T0)
            assert set(statuses(await trial.settle(topic, Operation.ACK, leased.rows, now_ms=T0))) == {Status.OK}
        await trial.stored(topic, [b"stays"], T0 + 600, expires_ms=T0 + 900)
        assert (await trial.store.sweep(topic, T0 + 500, 100)).expired == 0
        traced = TracedSession(trial.store._context.partition.connected)  # type: ignore[attr-defined]
        assert (await trial.store.sweep(topic, T0 + 1_000, 100)).expired == 1
        reads = await asyncio.to_thread(traced.reads)
        assert reads and max(tombstones for _, tombstones in reads) < 1_000, reads
        await trial.stored(topic, [b"early"], T0 + 400, expires_ms=T0 + 800)
        assert (await trial.store.sweep(topic, T0 + 1_000, 100)).expired == 1


async def test_a_sweep_passes_over_what_is_held_and_comes_back_for_it(servers: Running) -> None:
    async with Trial(lambda: make_store(servers.url(CassandraServer))) as trial:
        topic = await trial.topic(buckets=1)
        expires = [T0 + 103, T0 + 104, T0 + 105, T0 + 100, T0 + 101, T0 + 200]
        await trial.stored(topic, named(6), [T0 + at for at in range(6)], expires_ms=expires)
        held = (await trial.lease(topic, 3, now_ms=T0 + 2, lease_ms=5_000)).rows.ids.tolist()
        swept = [await trial.store.sweep(topic, T0 + 300, 1) for _ in range(4)]
        assert [(one.expired, one.more) for one in swept] == [(1, True), (1, True), (1, False), (0, False)]
        assert sorted(await trial.everything(topic, now_ms=T0 + 300)) == held == named(6)[:3]
        assert (await trial.store.sweep(topic, T0 + 5_002, 100)).expired == 3
        assert not await trial.everything(topic, now_ms=T0 + 300)
