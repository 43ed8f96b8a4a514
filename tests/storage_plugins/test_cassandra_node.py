"""What can happen to a node of Cassandra of our own: passwords, rights, TLS, too many connections, paused, killed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cassandra import cluster as driver
from cassandra.auth import PlainTextAuthProvider

from tests.servers.cassandra import CassandraServer
from tests.services import require_service
from tests.storage_plugins.outages import usable
from timeline.model import Status
from timeline.storage_plugins import make_store
from timeline.storage_plugins.conformance.trial import Trial, named, statuses
from timeline.storage_plugins.contract import StoreRefused, StoreUnavailable, StoreUnknown

pytestmark = [pytest.mark.servers, pytest.mark.timeout(400), pytest.mark.prove]


@asynccontextmanager
async def _own(folder: Path, **settings: Any) -> AsyncIterator[CassandraServer]:
    require_service("cassandra")
    node = CassandraServer(folder, **settings)
    await asyncio.to_thread(node.start)
    try:
        yield node
    finally:
        await asyncio.to_thread(node.stop)


GUEST = "CREATE ROLE IF NOT EXISTS guest WITH PASSWORD = 'guest' AND LOGIN = true"


def _log_in(node: CassandraServer, statement: str) -> None:
    """Runs a statement as the superuser that a node makes for itself soon after its start."""
    while True:
        who = PlainTextAuthProvider("cassandra", "cassandra")
        session = driver.Cluster(["127.0.0.1"], port=node.port, auth_provider=who, protocol_version=5)
        try:
            session.connect().execute(statement)
            return
        except driver.NoHostAvailable:
            continue
        finally:
            session.shutdown()


async def _looked_at_again(trial: Trial, node: CassandraServer) -> None:
    """Settings that change, a record that is gone, and all as it was."""
    uid, record = trial.opened.cluster_uid, "timeline.meta"
    steps = (
        ("ALTER KEYSPACE timeline WITH durable_writes = false", "ALTER KEYSPACE timeline WITH durable_writes = true"),
        (
            f"DELETE FROM {record} WHERE name = 'cluster'",
            f"INSERT INTO {record} (name, value) VALUES ('cluster', '{uid}')",
        ),
    )
    found = []
    for there, back in steps:
        await asyncio.to_thread(_log_in, node, there)
        found.append(await trial.store.inspect())
        await asyncio.to_thread(_log_in, node, back)
        assert await trial.store.inspect() == trial.opened
    assert "durable_writes = false" in found[0].warnings[-1]
    assert [one.cluster_uid for one in found] == [uid, ""]


@pytest.mark.slow
async def test_passwords_rights_tls_and_a_periodic_commit_log(tmp_path: Path) -> None:
    async with _own(tmp_path, guarded=True, commitlog_sync="periodic") as node:
        await asyncio.to_thread(_log_in, node, GUEST)

        def url(account: str, more: str = "") -> str:
            return node.url.replace("//", f"//{account}@") + more

        with pytest.raises(StoreRefused, match="refuses user 'cassandra'") as refused:
            await make_store(url("cassandra:secret")).open()
        assert "secret" not in str(refused.value)
        with pytest.raises(StoreRefused, match=r"user 'guest' may not .* GRANT"):
            await make_store(url("guest:guest")).open()
        with pytest.raises(StoreUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            await make_store(url("cassandra:cassandra", "&tls=1")).open()
        with pytest.raises(StoreRefused, match=r"ca=.*No such file"):
            await make_store(url("cassandra:cassandra", "&ca=/no/such/file")).open()
        async with Trial(lambda: make_store(url("cassandra:cassandra", f"&ca={node.certificate}"))) as trial:
            assert "commitlog_sync of node 127.0.0.1 is periodic" in trial.opened.warnings[0]
            assert not trial.store.capabilities.durable
            await trial.stored(await trial.topic(), named(10))
            await _looked_at_again(trial, node)
        # Who may read and write, and no more, is not kept out by a table that wants to be altered.
        rights = (("SELECT", "system_views"), ("SELECT", "timeline"), ("MODIFY", "timeline"))
        for right, keyspace in rights:
            await asyncio.to_thread(_log_in, node, f"GRANT {right} ON KEYSPACE {keyspace} TO guest")
        await asyncio.to_thread(_log_in, node, "ALTER TABLE timeline.message WITH read_repair = 'BLOCKING'")
        async with Trial(lambda: make_store(url("guest:guest"))) as trial:
            assert "ALTER TABLE message WITH read_repair = 'NONE'" in trial.opened.warnings[-1]
            await trial.stored(await trial.topic(), named(10))


@pytest.mark.slow
async def test_an_empty_node_at_the_same_address_is_found_to_be_another_store(tmp_path: Path) -> None:
    for name in ("old", "empty"):
        (tmp_path / name).mkdir()
    async with _own(tmp_path / "old") as node, Trial(lambda: make_store(node.url)) as trial:
        await asyncio.to_thread(node.stop)
        empty = CassandraServer(tmp_path / "empty", commitlog_sync="periodic")
        empty.port, empty.storage_port = node.port, node.storage_port
        await asyncio.to_thread(empty.start)
        try:
            found = await trial.store.inspect()
        finally:
            await asyncio.to_thread(empty.stop)
        assert found.cluster_uid == ""
        assert "commitlog_sync of node 127.0.0.1 is periodic" in found.warnings[0]
        await asyncio.to_thread(node.start)
        await usable(trial)
        assert await trial.store.inspect() == trial.opened


@pytest.mark.slow
async def test_connections_exhausted_say_so(tmp_path: Path) -> None:
    few = {"native_transport_max_concurrent_connections": 6}
    async with _own(tmp_path, more=few) as node, Trial(lambda: make_store(node.url)) as trial:
        topic = await trial.topic()
        stores = []
        with pytest.raises(StoreUnavailable, match="native_transport_max_concurrent_connections") as refused:
            for _ in range(6):
                stores.append(make_store(node.url))
                await stores[-1].open()
        assert "no node of Cassandra can be reached" in str(refused.value)
        await trial.stored(topic, named(10))
        for store in stores:
            await store.close()
        again = make_store(node.url)
        await again.open()
        await again.close()


@pytest.mark.slow
async def test_a_node_paused_or_killed_under_load_loses_nothing_that_was_answered(tmp_path: Path) -> None:
    async with _own(tmp_path) as node, Trial(lambda: make_store(node.url + "&timeout_s=2")) as trial:
        topic = await trial.topic(buckets=8)
        answered: list[bytes] = []

        async def produce(worker: str, enough: asyncio.Event) -> str:
            for turn in range(100_000):
                ids = named(50, f"{worker}-{turn}")
                try:
                    answers = await trial.put(topic, ids)
                except (StoreUnavailable, StoreUnknown) as error:
                    return error.code
                told = statuses(answers)
                answered.extend(id for id, status in zip(ids, told, strict=True) if status is Status.OK)
                if set(told) != {Status.OK}:
                    return next(status.name for status in told if status is not Status.OK)
                if len(answered) >= 1_000 * (1 + ("after" in worker)):
                    enough.set()
            return "never hit"

        async def until_hit(name: str, fault: Any) -> set[str]:
            enough = asyncio.Event()
            working = [asyncio.ensure_future(produce(f"{name}-{worker}", enough)) for worker in range(4)]
            await enough.wait()
            fault()
            return set(await asyncio.gather(*working))

        assert await until_hit("before", lambda: node.signal(signal.SIGSTOP)) <= {"UNAVAILABLE", "UNKNOWN"}
        node.signal(signal.SIGCONT)
        await usable(trial)
        assert await until_hit("after", node.kill) <= {"UNAVAILABLE", "UNKNOWN"}
        await asyncio.to_thread(node.start)
        await usable(trial)
        assert set(answered) <= (await trial.everything(topic)).keys()
