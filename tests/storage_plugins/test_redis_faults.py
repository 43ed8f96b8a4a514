"""What a real Redis does to its store when it is set up badly, dies, fills up, or stops taking writes."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.servers.process import free_port
from tests.servers.redis import RedisServer
from tests.services import require_service
from timeline.model import Operation, Status
from timeline.storage_plugins import make_store
from timeline.storage_plugins.conformance.trial import T0, Trial, named, statuses
from timeline.storage_plugins.contract import StoreRefused, StoreUnavailable, StoreUnknown
from timeline.storage_plugins.redis import scripts
from timeline.storage_plugins.redis import server as redis_server
from timeline.storage_plugins.redis.server import Broken, RedisLocation, RedisPool
from timeline.storage_plugins.redis.server import Server as Connections

pytestmark = pytest.mark.servers

Start = Callable[..., RedisServer]

PATIENT = "?wait_replicas=1&wait_ms=60000&timeout_ms=90000"
"""For calls that a slow replica must confirm."""
HASTY = "?wait_replicas=1&wait_ms=50"
"""For calls that no replica confirms."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start("--option", "value")`: a Redis of the test's own."""
    require_service("redis")
    started: list[RedisServer] = []

    def make(*settings: str) -> RedisServer:
        server = RedisServer(tmp_path / f"redis-{len(started)}", *settings)
        started.append(server)
        return server.start()

    yield make
    for server in started:
        server.stop()


async def _tell(server: RedisServer, *command: object) -> object:
    """One command, past the store."""
    location = RedisLocation.of(server.url)
    connections = Connections(location)
    try:
        return await connections.ask(location.addresses[0], *command)
    finally:
        await connections.close()


async def _refusal(url: str) -> str:
    store = make_store(url)
    with pytest.raises(StoreRefused) as refused:
        await store.open()
    await store.close()
    return str(refused.value)


async def test_wrong_password(start: Start) -> None:
    server = start("--requirepass", "right")
    for user in ("", ":wrong@"):
        said = await _refusal(f"redis://{user}127.0.0.1:{server.port}/0")
        assert "password" in said
        assert "wrong@" not in said
    store = make_store(f"redis://:right@127.0.0.1:{server.port}/0")
    assert (await store.open()).server.startswith("redis 7")
    await store.close()


async def test_user_without_all_rights_is_refused_with_what_they_are(start: Start) -> None:
    server = start()
    url = f"redis://clerk:right@127.0.0.1:{server.port}/0"
    await _tell(server, "ACL", "SETUSER", "clerk", "on", ">right", "~*", "+@all", "-zadd", "-unlink")
    said = await _refusal(url)
    assert "does not let user clerk run ZADD, UNLINK on keys timeline:*" in said
    await _tell(server, "ACL", "SETUSER", "clerk", "reset", "on", ">right", *said.partition(", or ")[2].split())
    await _tell(server, "ACL", "SETUSER", "clerk", "~timeline:*")
    async with Trial(lambda: make_store(url)) as trial:
        topic = await trial.topic()
        await trial.stored(topic, named(20), tag=b"t")
        leased = await trial.lease(topic)
        assert set(statuses(await trial.settle(topic, Operation.ACK, leased.rows))) == {Status.OK}
        assert not await trial.everything(topic)


async def test_connection_that_is_being_made_when_the_store_closes_is_closed(start: Start) -> None:
    location = RedisLocation.of(start().url)
    pool = RedisPool(location, location.addresses[0], None)
    asking = asyncio.ensure_future(pool.exchange([("PING",)]))
    await asyncio.sleep(0)
    pool.close()
    with pytest.raises(Broken, match="the store was closed"):
        await asking
    assert not pool._idle


async def test_database_that_is_not_there(start: Start) -> None:
    assert "no such database" in await _refusal(f"redis://127.0.0.1:{start().port}/99")


async def test_evicting_server_is_refused(start: Start) -> None:
    server = start("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    assert "CONFIG SET maxmemory-policy noeviction" in await _refusal(server.url)
    await _tell(server, "CONFIG", "SET", "maxmemory-policy", "noeviction")
    async with Trial(lambda: make_store(server.url)) as trial:
        await trial.store.check()


@pytest.mark.parametrize(
    ("settings", "durable", "warned"),
    [
        (("--appendonly", "no"), False, "keeps no append-only file"),
        (("--appendfsync", "no"), False, "30 seconds"),
        (("--appendfsync", "everysec"), False, "everysec"),
        (("--appendfsync", "always"), True, ""),
    ],
)
async def test_what_may_be_lost_is_said(start: Start, settings: tuple[str, ...], durable: bool, warned: str) -> None:
    server = start(*settings)
    async with Trial(lambda: make_store(server.url)) as trial:
        assert trial.store.capabilities.durable is durable
        assert bool(trial.opened.warnings) is bool(warned)
        assert all(warned in warning for warning in trial.opened.warnings)


async def test_newer_schema_is_refused(start: Start) -> None:
    server = start()
    async with Trial(lambda: make_store(server.url)):
        pass
    await _tell(server, "HSET", "timeline:store", "schema_version", "99")
    await _tell(server, "HDEL", "timeline:store", "oldest_version")
    assert "or a newer one" in await _refusal(server.url)


async def test_replica_is_refused_and_a_master_made_one_is_unavailable(start: Start) -> None:
    master, other = start(), start()
    async with Trial(lambda: make_store(master.url)) as trial:
        topic = await trial.topic()
        await _tell(master, "REPLICAOF", "127.0.0.1", str(other.port))
        with pytest.raises(StoreUnavailable, match=r"READONLY|read only|LOADING|loading"):
            await trial.put(topic, named(10))
        assert "name its master" in await _refusal(master.url)
        await _tell(master, "REPLICAOF", "NO", "ONE")
        await trial.stored(topic, named(10))


async def test_server_without_memory_takes_no_puts_but_acks(start: Start) -> None:
    server = start()
    async with Trial(lambda: make_store(server.url)) as trial:
        topic = await trial.topic()
        await trial.stored(topic, named(10))
        leased = await trial.lease(topic)
        await _tell(server, "CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(StoreUnavailable, match=r"OOM|maxmemory"):
            await trial.put(topic, named(5, "late"))
        with pytest.raises(StoreUnavailable):
            await trial.store.check()
        for _ in range(2):
            assert len(await trial.everything(topic)) == 10
        assert set(statuses(await trial.settle(topic, Operation.ACK, leased.rows))) == {Status.OK}
        await _tell(server, "CONFIG", "SET", "maxmemory", "0")
        await trial.stored(topic, named(5, "late"))
        assert len(await trial.everything(topic)) == 5


async def test_server_that_cannot_save_takes_nothing(start: Start) -> None:
    server = start()
    async with Trial(lambda: make_store(server.url)) as trial:
        topic = await trial.topic()
        (server.folder / "dump.rdb").mkdir()
        await _tell(server, "CONFIG", "SET", "save", "3600 1")
        await _tell(server, "BGSAVE")
        while b"rdb_last_bgsave_status:err" not in await _tell(server, "INFO", "persistence"):  # type: ignore[operator]
            assert server.accepts()
        with pytest.raises(StoreUnavailable, match=r"MISCONF|snapshot"):
            await trial.put(topic, named(3))
        await _tell(server, "CONFIG", "SET", "save", "")
        await trial.stored(topic, named(3))


async def test_killed_server_comes_back_with_what_it_answered(start: Start) -> None:
    server = start()
    async with Trial(lambda: make_store(server.url)) as trial:
        topic = await trial.topic()
        await trial.stored(topic, named(5_000))
        leased = await trial.lease(topic, 1_000)
        server.kill()
        for _ in range(3):
            with pytest.raises((StoreUnavailable, StoreUnknown)):
                await trial.put(topic, named(3, "n"))
        with pytest.raises(StoreUnavailable):
            await make_store(server.url).open()
        server.start()
        assert set(statuses(await trial.settle(topic, Operation.ACK, leased.rows))) == {Status.OK}
        assert len(await trial.everything(topic, now_ms=T0)) == 4_000


async def test_topic_whose_rows_cannot_go_yet_is_dropped_and_a_sweep_sees_to_the_rest(start: Start) -> None:
    server = start()
    await _tell(server, "ACL", "SETUSER", "clerk", "on", ">right", "~*", "&*", "+@all")
    async with Trial(lambda: make_store(f"redis://clerk:right@127.0.0.1:{server.port}/0")) as trial:
        gone, stays = await trial.topic(buckets=3), await trial.topic()
        await trial.stored(gone, named(20))
        await _tell(server, "ACL", "SETUSER", "clerk", "-unlink")
        assert await trial.store.drop_topic(gone)
        await _tell(server, "ACL", "SETUSER", "clerk", "+unlink")
        assert set(statuses(await trial.put(gone, named(20, "late")))) == {Status.OK}, "nothing refuses it yet"
        await trial.store.sweep(stays, T0, 100)
        assert set(statuses(await trial.put(gone, named(20, "later")))) == {Status.NOT_FOUND}
        left = await _tell(server, "KEYS", f"timeline:{{{gone.uid:x}.*")
        assert isinstance(left, list) and all(key.endswith(b":gone") for key in left)
        assert not await _tell(server, "HGETALL", "timeline:dropped")


async def test_settings_of_the_url_are_checked() -> None:
    for url, said in (
        ("redis://host/0?colour=blue", "no setting 'colour'"),
        ("redis://host/zero", "number of a database"),
        ("redis://host:port/0", "a host and a port"),
        ("redis://host/0?timeout_ms=never", "timeout_ms must be a whole number"),
        ("redis://host/0?prefix={a}", "without braces"),
        ("redis://user:hun?ter2@host/0", "%3F"),
        ("redis://user:hun?ter2=x@host/0", "%3F"),
    ):
        with pytest.raises(StoreRefused, match=said) as refused:
            make_store(url)
        assert "ter2" not in str(refused.value)
    location = RedisLocation.of("redis://user:hunter2@host/0?ca=/no/such/file")
    assert location.tls and "hunter2" not in repr(location)
    with pytest.raises(StoreRefused, match=r"ca=/no/such/file: No such file"):
        await make_store("redis://host/0?ca=/no/such/file").open()


async def test_lease_passes_what_may_neither_be_let_nor_buried_in_a_few_calls(start: Start) -> None:
    server = start()
    async with Trial(lambda: make_store(server.url)) as trial:
        topic = await trial.topic(max_deliveries=1)
        await trial.stored(topic, named(1))
        leased = await trial.lease(topic)
        await trial.settle(topic, Operation.RELEASE, leased.rows, time_ms=T0 + 500)
        await trial.stored(topic, named(5, "n"), T0 + 600)
        await _tell(server, "CONFIG", "RESETSTAT")
        ahead = await trial.lease(topic, 3, due_before_ms=T0 + 1_000)
        assert len(ahead.rows) == 3
        assert set(ahead.rows.ids.tolist()) < set(named(5, "n"))
        said = await _tell(server, "INFO", "commandstats")
        assert isinstance(said, bytes)
        calls = int(said.split(b"cmdstat_evalsha:calls=")[1].split(b",")[0])
        assert calls < 10


async def test_what_was_answered_outlives_a_kill_under_load_where_each_write_is_synced(start: Start) -> None:
    server = start("--appendfsync", "always")
    async with Trial(lambda: make_store(server.url)) as trial:
        assert trial.store.capabilities.durable
        topic = await trial.topic()
        answered: set[bytes] = set()
        enough = asyncio.Event()

        async def put(part: int) -> None:
            for turn in range(10_000):
                ids = named(100, f"p{part}-{turn}")
                try:
                    answers = await trial.put(topic, ids)
                except (StoreUnavailable, StoreUnknown):
                    return
                answered.update(id for id, status in zip(ids, statuses(answers), strict=True) if status is Status.OK)
                if len(answered) >= 20_000:
                    enough.set()

        putting = [asyncio.create_task(put(part)) for part in range(4)]
        await enough.wait()
        server.kill()
        await asyncio.gather(*putting)
        server.start()
        there = set(await trial.everything(topic))
        assert len(answered) >= 20_000
        assert not answered - there


async def test_server_that_loads_its_data_is_not_there_yet(start: Start) -> None:
    server = start("--appendonly", "no", "--enable-debug-command", "yes")
    async with Trial(lambda: make_store(server.url)) as trial:
        topic = await trial.topic()
        await trial.stored(topic, named(10))
        await _tell(server, "DEBUG", "POPULATE", "30000")
        await _tell(server, "SAVE")
        server.kill()
        slow = ("--key-load-delay", "2000", "--loading-process-events-interval-bytes", "1024")
        server.settings = (*server.settings, *slow)
        starting = asyncio.create_task(asyncio.to_thread(server.start))
        while not _says(server, b"PING", b"-LOADING"):
            await asyncio.sleep(0)
        with pytest.raises(StoreUnavailable, match="LOADING"):
            await trial.put(topic, named(5, "n"))
        with pytest.raises(StoreUnavailable, match="LOADING"):
            await make_store(server.url).open()
        assert _says(server, b"CONFIG SET key-load-delay 0", b"+OK")
        await starting
        assert len(await trial.everything(topic)) == 10


def _says(server: RedisServer, command: bytes, wanted: bytes) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as asked:
            asked.sendall(command + b"\r\n")
            return asked.recv(64).startswith(wanted)
    except OSError:
        return False


async def test_server_that_is_too_old_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start()
    monkeypatch.setattr(redis_server, "OLDEST", (99, 0))
    assert "upgrade it" in await _refusal(server.url)


async def _pair(start: Start) -> tuple[RedisServer, RedisServer]:
    """A master and its replica, once that is up to date."""
    master, replica = start("--repl-diskless-sync-delay", "0"), start()
    await _tell(replica, "REPLICAOF", "127.0.0.1", str(master.port))
    while b"state=online" not in await _tell(master, "INFO", "replication"):  # type: ignore[operator]
        assert replica.accepts()
    return master, replica


@asynccontextmanager
async def _replicated(start: Start) -> AsyncIterator[tuple[Trial, RedisServer, RedisServer]]:
    """A trial on a master and its replica. Its store waits for the replica, however slow."""
    master, replica = await _pair(start)
    async with Trial(lambda: make_store(master.url + PATIENT)) as trial:
        yield trial, master, replica


@asynccontextmanager
async def _hastily(trial: Trial, master: RedisServer) -> AsyncIterator[None]:
    """Meanwhile the trial's store waits for replicas only for a moment. To open it they must be that fast, once."""
    patient, hasty = trial.store, make_store(master.url + HASTY)
    opened = None
    while opened is None:
        try:
            opened = await hasty.open()
        except StoreUnavailable as slow:
            assert "only 0 of 1 replicas" in slow.reason
    trial.store = hasty
    try:
        yield
    finally:
        trial.store = patient
        await hasty.close()


async def test_write_that_replicas_do_not_confirm_is_unknown(start: Start) -> None:
    async with _replicated(start) as (trial, master, replica):
        topic = await trial.topic()
        await trial.stored(topic, named(10))
        assert len(await trial.everything(topic)) == 10
    replica.signal(signal.SIGSTOP)
    try:
        with pytest.raises(StoreUnavailable, match="only 0 of 1 replicas"):
            await make_store(master.url + HASTY).open()
        connections = Connections(RedisLocation.of(master.url + HASTY))
        with pytest.raises(StoreUnknown, match="only 0 of 1 replicas"):
            await connections.run(scripts.SWAP, [b"a record"], (b"field", b"", b"new"))
        await connections.close()
    finally:
        replica.signal(signal.SIGCONT)


async def test_leases_do_not_wait_for_a_replica_that_is_away(start: Start) -> None:
    """Else their rows would be lost, and messages buried that nobody received. Puts and settles wait as before."""
    async with _replicated(start) as (trial, master, replica):
        topic = await trial.topic(max_deliveries=1)
        await trial.stored(topic, named(10))
        await trial.stored(topic, named(5, "over"), T0, expires_ms=T0 + 1)
        async with _hastily(trial, master):
            replica.signal(signal.SIGSTOP)
            try:
                for _ in range(2):  # a repeat, too, is as safe as it says
                    with pytest.raises(StoreUnknown, match="only 0 of 1 replicas"):
                        await trial.put(topic, named(1, "n"), birth=1)
                leased = await trial.lease(topic, 11, now_ms=T0 + 1, lease_ms=1_000)
                assert len(leased.rows) == 11 and leased.expired == 5
                with pytest.raises(StoreUnknown, match="only 0 of 1 replicas"):
                    await trial.settle(topic, Operation.ACK, leased.rows.take(np.arange(1)))
                again = await trial.lease(topic, 10, now_ms=T0 + 2_000)
                assert len(again.buried) == 10 and not len(again.rows)
            finally:
                replica.signal(signal.SIGCONT)


async def test_lost_lease_is_fenced_and_its_message_is_delivered_again(start: Start) -> None:
    """A failover to a replica that did not have the leases: the messages stand there as before them."""
    async with _replicated(start) as (trial, master, replica):
        topic = await trial.topic(max_deliveries=1)
        await trial.stored(topic, named(10))
        async with _hastily(trial, master):
            await _tell(replica, "REPLICAOF", "NO", "ONE")
            lost = (await trial.lease(topic, 10, holder=b"first")).rows
        assert len(lost) == 10
        async with Trial(lambda: make_store(replica.url)) as after:
            assert set(statuses(await after.settle(topic, Operation.ACK, lost))) == {Status.FENCED}
            again = await after.lease(topic, 10, holder=b"second")
            assert len(again.rows) == 10 and not len(again.buried)
            assert set(statuses(await after.settle(topic, Operation.ACK, lost))) == {Status.FENCED}
            assert set(statuses(await after.settle(topic, Operation.ACK, again.rows))) == {Status.OK}
        await _tell(replica, "REPLICAOF", "127.0.0.1", str(master.port))  # else the topic's drop is unknown
        while b"state=online" not in await _tell(master, "INFO", "replication"):  # type: ignore[operator]
            assert replica.accepts()


async def test_connections_are_bounded(start: Start) -> None:
    location = RedisLocation.of(f"{start().url}?connections=1&timeout_ms=500")
    connections = Connections(location)
    held = [asyncio.create_task(connections.ask(location.addresses[0], "BLPOP", "nothing", "0")) for _ in range(3)]
    ends = await asyncio.gather(*held, return_exceptions=True)
    await connections.close()
    assert all(isinstance(end, StoreUnavailable) for end in ends)
    assert "connections=… in the URL allows more" in str(ends[-1])


async def test_tls(start: Start, tmp_path: Path) -> None:
    require_service("openssl")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    asked = ("-subj", "/CN=redis", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2", "-newkey", "rsa:2048")
    made = ["openssl", "req", "-x509", "-nodes", *asked, "-keyout", str(key), "-out", str(cert)]
    subprocess.run(made, check=True, capture_output=True)
    port = free_port()
    files = ("--tls-cert-file", str(cert), "--tls-key-file", str(key), "--tls-auth-clients", "no")
    start("--tls-port", str(port), *files)
    async with Trial(lambda: make_store(f"redis://127.0.0.1:{port}/0?tls=1&ca={cert}")) as trial:
        topic = await trial.topic()
        await trial.stored(topic, named(10), payload=b"x" * 100_000)
        assert len((await trial.lease(topic)).rows) == 10
    with pytest.raises(StoreUnavailable, match="certificate verify failed"):
        await make_store(f"redis://127.0.0.1:{port}/0?tls=1").open()


async def test_user_who_may_not_ask_for_replicas_is_told(start: Start) -> None:
    server = start()
    await _tell(server, "ACL", "SETUSER", "clerk", "on", ">right", "~*", "&*", "+@all", "-wait")
    url = f"redis://clerk:right@127.0.0.1:{server.port}/0?wait_replicas=1"
    store = make_store(url)
    with pytest.raises(StoreUnavailable, match="does not tell how many replicas"):
        await store.open()
    await store.close()
