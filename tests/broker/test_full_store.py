"""A store without room, seen through a broker: puts are refused; who reads is answered, and what makes room is done as
far as the store can."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.broker.link import Link, broker, statuses
from tests.broker.watched import look, psql, put
from tests.servers.disk import remount, small_disk
from tests.servers.fixture import Running
from tests.servers.mysql import MysqlServer
from tests.servers.postgresql import PostgresqlServer
from tests.servers.redis import RedisServer
from tests.services import require_service
from timeline.broker.limits import Limits
from timeline.columns import Ragged
from timeline.model import Operation, Status
from timeline.storage_plugins.contract import StoreFull
from timeline.storage_plugins.memory import MemoryStore
from timeline.wire import (
    Deliver,
    Fault,
    Forecast,
    Forecasted,
    Late,
    LateList,
    TopicAction,
    TransportError,
    decode_as,
    encode,
)

FAR_MS = 3_600_000
BATCH = 40
QUIET = Limits(check_every_ms=FAR_MS)
"""The test looks when it wants to."""


class Roomless(MemoryStore):
    """Takes no puts while `full`."""

    full = False

    async def put(self, *asked: Any) -> Any:
        if self.full:
            raise StoreFull("no room is left: make some")
        return await super().put(*asked)


async def test_a_full_store_takes_no_puts_and_whatever_else_it_can() -> None:
    store = Roomless()
    async with broker(store, QUIET) as link:
        consumer = await link.consume()
        await link.put(["now"])
        got = await consumer.down(Deliver)
        await link.put(["later"], FAR_MS)
        store.full = True
        told = await put(link, "more")
        assert told.status.tolist() == [Status.UNAVAILABLE.code] and "no room is left" in told.details[0]
        assert link.node.not_ready == "the store takes no puts: no room is left: make some"
        assert await link.ids() == [b"later", b"now"]
        assert (await link.topic(TopicAction.LIST)).status == Status.OK.code
        assert statuses(await link.settle(consumer, got, Operation.ACK)) == [Status.OK]
        await consumer.close()
        other = await link.consume("c2")
        assert statuses(await link.mutate(Operation.MOVE, ["later"])) == [Status.OK]
        assert (await other.down(Deliver)).ids.tolist() == [b"later"]
        store.full = False
        assert await look(link) == ""
        assert statuses(await link.put(["more"])) == [Status.OK]


class Spent(MemoryStore):
    """Refuses everything that changes a message or a topic, while `spent`."""

    spent = False

    def _refuse(self) -> None:
        if self.spent:
            raise StoreFull("its disk is full")

    async def put(self, *asked: Any) -> Any:
        self._refuse()
        return await super().put(*asked)

    async def mutate(self, *asked: Any) -> Any:
        self._refuse()
        return await super().mutate(*asked)

    async def create_topic(self, *asked: Any) -> Any:
        self._refuse()
        return await super().create_topic(*asked)


async def test_the_stores_reason_is_told_without_a_second_code() -> None:
    store = Spent()
    async with broker(store, QUIET) as link:
        await link.put(["later"], FAR_MS)
        store.spent = True
        put_told = await put(link, "more")
        assert (put_told.status.tolist(), put_told.details[0]) == ([Status.UNAVAILABLE.code], "its disk is full")
        cancelled = (await link.mutate(Operation.CANCEL, ["later"])).answers
        assert (cancelled.status.tolist(), cancelled.details[0]) == ([Status.UNAVAILABLE.code], "its disk is full")
        with pytest.raises(TransportError) as refused:
            await link.topic(TopicAction.CREATE, "other")
        assert refused.value.reason == "its disk is full"


async def test_a_broker_of_a_full_store_keeps_its_buckets() -> None:
    """All brokers have the same store: each would leave them to the others."""
    store = Roomless()
    async with broker(store, Limits(check_every_ms=FAR_MS, withdraw_after_ms=0)) as link:
        consumer = await link.consume()
        (dealer,) = link.node.dealers
        while not link.node.membership.hosting(dealer.topic.uid):
            await asyncio.sleep(0)  # until its leases are looked up
        store.full = True
        await put(link, "more")
        link.node.stand()
        assert link.node.membership.hosting(dealer.topic.uid) == {"b1": 1}
        link.node.store.full = False  # as where it does not answer
        link.node.stand()
        assert not link.node.membership.hosting(dealer.topic.uid)
        await consumer.close()


async def fill(link: Link) -> set[bytes]:
    """Ids that were put until the store had no room."""
    stored: set[bytes] = set()
    for number in range(10_000):
        ids = [f"fill-{number:05}-{at:02}" for at in range(BATCH)]
        payloads = Ragged.of([os.urandom(900) for _ in ids])
        told = await link.node.puts.put(link.puts(ids, FAR_MS, payloads=payloads), "test")
        stored.update(id.encode() for id, code in zip(ids, told.status.tolist(), strict=True) if code == Status.OK.code)
        if Status.UNAVAILABLE.code in told.status.tolist():
            return stored
    raise AssertionError("it never filled up")


async def reads(link: Link, stored: set[bytes]) -> None:
    """All that reads is answered, whatever the broker says of itself."""
    assert set(await link.ids()) == stored
    assert [topic.name for topic in (await link.topic(TopicAction.LIST)).topics] == ["t"]
    unary = link.node.service.unary
    counted = decode_as(await unary("Forecast", encode(Forecast("t", 2 * FAR_MS, FAR_MS))), Forecasted)
    assert counted.counts.sum() >= len(stored) - 2
    assert decode_as(await unary("Late", encode(Late(0, "t", b"first"))), LateList).now_ms


async def makes_room(link: Link, consumer: Any, got: Deliver, stored: set[bytes]) -> None:
    """What frees room is done, and nothing else is needed for it."""
    assert statuses(await link.settle(consumer, got, Operation.ACK)) == [Status.OK]
    gone = [id.decode() for id in sorted(stored)[:BATCH]]
    assert statuses(await link.mutate(Operation.CANCEL, gone)) == [Status.OK] * BATCH
    stored -= {id.encode() for id in gone} | {b"now"}
    await reads(link, stored)


async def begun(link: Link) -> tuple[Any, Deliver, set[bytes]]:
    """A consumer, what it was delivered, and what there is once nothing more can be put."""
    consumer = await link.consume(lease_ms=FAR_MS)  # which lasts until a slow disk is full
    await link.put(["now"])
    got = await consumer.down(Deliver)
    stored = await fill(link) | {b"now"}
    assert link.node.not_ready.startswith("the store takes no puts: ") and link.node.readiness.no_calls == ""
    await reads(link, stored)
    return consumer, got, stored


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "32m") as folder:
        yield folder


@pytest.mark.servers
async def test_sqlite_on_a_full_disk(disk: Path) -> None:
    async with broker(f"sqlite:///{disk}/a.db", QUIET) as link:
        consumer, got, stored = await begun(link)
        await makes_room(link, consumer, got, stored)
        remount(disk, "size=128m")
        assert await look(link) == ""
        assert statuses(await link.put(["after"])) == [Status.OK]


@pytest.mark.servers
async def test_redis_on_a_full_disk(tmp_path: Path, disk: Path) -> None:
    """It writes nothing at all."""
    require_service("redis")
    server = RedisServer(tmp_path / "redis", "--dir", str(disk)).start()
    try:
        async with broker(server.url, QUIET) as link:
            consumer, got, stored = await begun(link)
            told = await link.settle(consumer, got, Operation.ACK)
            assert statuses(told) == [Status.UNAVAILABLE] and "No space left" in told.answers.details[0]
            assert statuses(await link.mutate(Operation.CANCEL, ["now"])) == [Status.LEASED]
            with pytest.raises(TransportError) as refused:
                await link.drop()
            assert refused.value.fault is Fault.NOT_READY
            await reads(link, stored)
            remount(disk, "size=256m")
            while await look(link):
                pass
            assert statuses(await link.settle(consumer, got, Operation.ACK)) == [Status.OK]
    finally:
        server.stop()


@pytest.mark.servers
async def test_redis_without_memory(tmp_path: Path) -> None:
    require_service("redis")
    server = RedisServer(tmp_path / "redis", "--maxmemory", "24mb").start()
    try:
        async with broker(server.url, QUIET) as link:
            consumer, got, stored = await begun(link)
            await makes_room(link, consumer, got, stored)
            refused = 0  # puts, though the last look found room: Redis' own use of its memory varies
            while (full := await look(link)) or statuses(await link.put(["after"])) != [Status.OK]:
                refused += not full
                gone = [id.decode() for id in sorted(stored)[:BATCH]]
                assert statuses(await link.mutate(Operation.CANCEL, gone)) == [Status.OK] * BATCH
                stored -= {id.encode() for id in gone}
            assert refused <= 10 and await link.ids() == sorted({*stored, b"after"})
    finally:
        server.stop()


@pytest.mark.servers
async def test_postgresql_on_a_full_disk(servers: Running, disk: Path) -> None:
    server = servers.server(PostgresqlServer)
    disk.parent.chmod(0o711)
    for folder in disk.parents[1:4]:
        os.chmod(folder, 0o711)
    (disk / "space").mkdir()
    shutil.chown(disk / "space", "postgres")
    psql(server, f"CREATE TABLESPACE cramped LOCATION '{disk}/space'")
    try:
        psql(server, "CREATE DATABASE cramped TABLESPACE cramped")
        url = server.url.rpartition("/")[0] + "/cramped?pool=2"
        async with broker(url, QUIET) as link:
            # All connections are there beforehand: a new one may have to write a file of the server's own.
            await asyncio.gather(*(link.node.store.store.clock_ms() for _ in range(8)))
            await makes_room(link, *await begun(link))
            remount(disk, "size=128m")
            assert await look(link) == ""
            assert statuses(await link.put(["after"])) == [Status.OK]
    finally:
        psql(server, "DROP DATABASE IF EXISTS cramped")
        psql(server, "DROP TABLESPACE cramped")


@pytest.mark.prove
@pytest.mark.servers
@pytest.mark.slow
async def test_mariadb_on_a_full_disk(tmp_path: Path) -> None:
    require_service("mysql")
    with small_disk(tmp_path / "disk", "220m") as disk:
        for folder in (disk, *disk.parents[:4]):
            os.chmod(folder, 0o755)
        server = MysqlServer(disk / "mysql", "--innodb-log-file-size=32M").start()
        try:
            async with broker(server.url, QUIET) as link:
                await makes_room(link, *await begun(link))
                remount(disk, "size=400m")
                assert await look(link) == ""
                assert statuses(await link.put(["after"])) == [Status.OK]
        finally:
            server.stop()
