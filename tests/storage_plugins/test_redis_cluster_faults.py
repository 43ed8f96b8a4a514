"""What a real Redis Cluster does to its store: slots that move, a node that dies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.servers.fixture import Running
from tests.servers.redis_cluster import RedisClusterServer
from timeline.model import Operation, Status, Topic
from timeline.storage_plugins import make_store
from timeline.storage_plugins.conformance.trial import T0, Trial, by_id, named, statuses
from timeline.storage_plugins.contract import Grant, StoreUnavailable, StoreUnknown, TagMutation
from timeline.storage_plugins.redis.changes import BucketKeys, put
from timeline.storage_plugins.redis.leasing import lease_due
from timeline.storage_plugins.redis.server import Address, RedisLocation, Server, slot_of

pytestmark = pytest.mark.servers


@pytest.fixture
async def nodes(servers: Running) -> AsyncIterator[Server]:
    """The cluster, past the store."""
    server = Server(RedisLocation.of(servers.server(RedisClusterServer).url))
    await server.connect()
    yield server
    await server.close()


async def _places(nodes: Server, topic: Topic) -> tuple[int, Address, Address]:
    """The slot of the topic's only bucket, the node that has it, and another."""
    slot = slot_of(BucketKeys(nodes, topic).base(0))
    for first, last, (_, port, *_rest) in await nodes.ask(nodes.masters[0], "CLUSTER", "SLOTS"):
        if first <= slot <= last:
            source = ("127.0.0.1", int(port))
    return slot, source, next(address for address in nodes.masters if address != source)


async def _set_slot(nodes: Server, node: Address, slot: int, *state: Any) -> None:
    assert await nodes.ask(node, "CLUSTER", "SETSLOT", slot, *state) == b"OK"


async def test_messages_move_with_their_slot(servers: Running, nodes: Server) -> None:
    """Half moved, a bucket is UNAVAILABLE and keeps all that it has; moved, it is found where it is."""
    async with Trial(lambda: make_store(servers.url(RedisClusterServer))) as trial:
        topic = await trial.topic(buckets=1)
        await trial.stored(topic, named(50), tag=b"t")
        leased = (await trial.lease(topic, 10)).rows
        slot, source, target = await _places(nodes, topic)
        ids = {node: (await nodes.ask(node, "CLUSTER", "MYID")).decode() for node in (source, target)}
        await _set_slot(nodes, target, slot, "IMPORTING", ids[source])
        await _set_slot(nodes, source, slot, "MIGRATING", ids[target])
        keys = sorted(await nodes.ask(source, "CLUSTER", "GETKEYSINSLOT", slot, 100))
        assert len(keys) >= 4
        for number, key in enumerate(keys):
            with pytest.raises(StoreUnavailable, match="TRYAGAIN"):
                await trial.put(topic, named(1, f"n{number}"))
            with pytest.raises(StoreUnavailable, match="TRYAGAIN"):
                await trial.settle(topic, Operation.ACK, leased)
            assert await nodes.ask(source, "MIGRATE", *target, key, 0, 10_000) == b"OK"
        for node in (target, source):
            await _set_slot(nodes, node, slot, "NODE", ids[target])
        assert set(statuses(await trial.settle(topic, Operation.ACK, leased))) == {Status.OK}
        await trial.stored(topic, named(5, "n"))
        rows = await trial.lease(topic)
        assert len(rows.rows) == 45
        assert set(rows.rows.payloads or ()) == {b"payload"}


async def test_dead_node_takes_its_buckets_with_it_until_it_is_back(servers: Running) -> None:
    cluster = servers.server(RedisClusterServer)
    async with Trial(lambda: make_store(cluster.url)) as trial:
        topic = await trial.topic()
        await trial.stored(topic, named(1_000))
        leased = (await trial.lease(topic, 500)).rows
        dead = cluster.nodes[2]
        dead.kill()
        try:
            found = set(statuses(await trial.put(topic, named(500, "n"))))
        except (StoreUnavailable, StoreUnknown):
            found = {Status.UNAVAILABLE}
        assert found & {Status.UNAVAILABLE, Status.UNKNOWN}
        with pytest.raises(StoreUnavailable):
            await trial.lease(topic)
        cluster.start()
        # What was left open is done again, as a broker's callers do.
        again = set(statuses(await trial.put(topic, named(500, "n"))))
        assert again <= {Status.OK, Status.DUPLICATE}
        assert set(statuses(await trial.settle(topic, Operation.ACK, leased))) == {Status.OK}
        assert len(await trial.everything(topic, now_ms=T0)) == 1_000


async def test_tag_operation_that_is_done_in_part_is_unknown(servers: Running, nodes: Server) -> None:
    """One master that is full refuses its part; what the others did is not denied, and nothing is done twice."""
    async with Trial(lambda: make_store(servers.url(RedisClusterServer))) as trial:
        topic = await trial.topic()
        await trial.stored(topic, named(300), T0 + 1_000, tag=b"t")
        mutation = TagMutation(Operation.MOVE, b"t", b"default", T0, op=7, due_ms=T0 + 5_000)
        full = nodes.masters[0]
        assert await nodes.ask(full, "CONFIG", "SET", "maxmemory", 1) == b"OK"
        try:
            with pytest.raises(StoreUnknown, match="a part of it was done"):
                await trial.store.mutate_tag(topic, T0, mutation, b"", 1_000)
        finally:
            assert await nodes.ask(full, "CONFIG", "SET", "maxmemory", 0) == b"OK"
        step = await trial.store.mutate_tag(topic, T0, mutation, b"", 1_000)
        assert step.counts == {Status.OK.code: 300} and step.cursor is None
        moved = by_id(await trial.scan(topic)).values()
        assert {(row["due_ms"], row["version"]) for row in moved} == {(T0 + 5_000, 2)}


@asynccontextmanager
async def _read_only(nodes: Server, node: Address) -> AsyncIterator[None]:
    """A master that answers reads and refuses writes: it wants a replica, and has none."""
    assert await nodes.ask(node, "CONFIG", "SET", "min-replicas-to-write", 1) == b"OK"
    try:
        yield
    finally:
        assert await nodes.ask(node, "CONFIG", "SET", "min-replicas-to-write", 0) == b"OK"


async def test_lease_tells_what_it_buried_and_removed_before_a_master_failed(servers: Running, nodes: Server) -> None:
    async with Trial(lambda: make_store(servers.url(RedisClusterServer))) as trial:
        topic = await trial.topic(max_deliveries=1)
        ids = named(300)
        await trial.stored(topic, ids)
        leased = (await trial.lease(topic, wanted=300)).rows
        await trial.settle(topic, Operation.RELEASE, leased, time_ms=T0, wanted=Status.OK)
        await trial.stored(topic, named(300, "e"), expires_ms=T0 + 1)
        async with _read_only(nodes, nodes.masters[0]):
            part = await trial.lease(topic, now_ms=T0 + 1, wanted=0, next_due_ms=T0 + 1)
            assert 0 < len(part.buried) < 300 and 0 < part.expired < 300
            with pytest.raises(StoreUnavailable, match="NOREPLICAS"):
                await trial.lease(topic, now_ms=T0 + 1)
        rest = await trial.lease(topic, now_ms=T0 + 1, wanted=0)
        assert sorted([*part.buried.ids, *rest.buried.ids]) == ids
        assert part.expired + rest.expired == 300


async def test_leases_do_not_wait_for_replicas_that_are_away(servers: Running) -> None:
    url = servers.url(RedisClusterServer)
    async with Trial(lambda: make_store(url)) as trial:
        topic = await trial.topic(max_deliveries=1)
        await trial.stored(topic, named(50))
        without_replicas = Server(RedisLocation.of(f"{url}?wait_replicas=1&wait_ms=50"))
        await without_replicas.connect()
        keys, grants = BucketKeys(without_replicas, topic), [Grant(b"worker", 50, 1_000, 1 << 40)]
        with pytest.raises(StoreUnknown, match="only 0 of 1 replicas"):
            await put(keys, T0, trial.puts(named(5, "n"), T0 + 60_000))
        leased = await lease_due(keys, None, T0, 0, grants, 0)
        assert sorted(leased.rows.ids) == named(50)
        again = await lease_due(keys, None, T0 + 1_000, 0, grants, 0)
        assert sorted(again.buried.ids) == named(50) and not len(again.rows)
        await without_replicas.close()


async def test_sweep_that_is_done_in_part_is_unknown(servers: Running, nodes: Server) -> None:
    async with Trial(lambda: make_store(servers.url(RedisClusterServer))) as trial:
        topic = await trial.topic()
        await trial.stored(topic, named(300), T0, expires_ms=T0 + 1)
        async with _read_only(nodes, nodes.masters[0]):
            with pytest.raises(StoreUnknown, match="a part of it was done"):
                await trial.store.sweep(topic, T0 + 1, 1_000)
            with pytest.raises(StoreUnavailable, match="NOREPLICAS"):
                await trial.store.sweep(topic, T0 + 1, 1_000)
        assert 0 < (await trial.store.sweep(topic, T0 + 1, 1_000)).expired < 300
        assert not await trial.everything(topic)


async def test_a_cluster_whose_record_is_gone_has_no_uuid(servers: Running, nodes: Server) -> None:
    async with Trial(lambda: make_store(servers.url(RedisClusterServer))) as trial:
        record = nodes.location.record
        uid = await nodes.at(record, "HGET", record, "cluster_uid")
        await nodes.at(record, "HDEL", record, "cluster_uid")
        assert (await trial.store.inspect()).cluster_uid == ""
        await nodes.at(record, "HSET", record, "cluster_uid", uid)
        assert await trial.store.inspect() == trial.opened
