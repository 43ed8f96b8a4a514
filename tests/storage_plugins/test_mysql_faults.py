"""What can happen to a MySQL server of our own: killed under load, its disk full, TLS, an old one, odd settings."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.servers.disk import remount, server_folder, small_disk
from tests.servers.mysql import PASSWORD, MysqlServer
from tests.services import require_service
from tests.storage_plugins.mysql_calls import trial
from tests.storage_plugins.outages import fill
from timeline.model import Status
from timeline.storage_plugins import make_store
from timeline.storage_plugins.conformance.crowd import Crowd, brokers
from timeline.storage_plugins.conformance.trial import Trial, statuses
from timeline.storage_plugins.contract import StoreRefused, StoreUnavailable, StoreUnknown

pytestmark = [pytest.mark.servers, pytest.mark.slow, pytest.mark.prove]

SMALL = (
    "--innodb-log-file-size=8M",
    "--innodb-data-file-path=ibdata1:12M:autoextend",
    "--innodb-temp-data-file-path=ibtmp1:2M:autoextend",
    "--aria-log-file-size=8M",
)


@pytest.fixture(scope="module")
def server() -> Iterator[MysqlServer]:
    """A server that tests may harm, with TLS, on a disk of its own."""
    require_service("mysql")
    with server_folder() as folder, small_disk(folder / "disk", "200m") as disk:
        own = MysqlServer(disk / "server", *SMALL, *_keys(folder))
        try:
            yield own.start()
        finally:
            own.stop()


def _keys(folder: Path) -> list[str]:
    """A key and a certificate for 127.0.0.1 that vouches for itself, as the server wants them."""
    place = folder / "keys"
    place.mkdir()
    subject = ["-subj", "/CN=timeline", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    made += ["-keyout", str(place / "key.pem"), "-out", str(place / "ca.pem")]
    subprocess.run(made, check=True, capture_output=True)
    for path in (place, *place.iterdir()):
        shutil.chown(path, MysqlServer.user)
    return [f"--ssl-cert={place / 'ca.pem'}", f"--ssl-key={place / 'key.pem'}"]


def _ca(server: MysqlServer) -> str:
    return str(server.folder.parent.parent / "keys" / "ca.pem")


async def test_a_server_killed_under_load_loses_nothing(server: MysqlServer) -> None:
    """kill -9 while two brokers' callers are at work, and again; what was answered is there."""
    url = server.url
    async with Trial(lambda: make_store(url)) as trying:
        topic = await trying.topic(buckets=4, max_deliveries=0)
        async with brokers(trying, 2) as stores:
            crowd = Crowd(trying, topic, stores, seed=3)
            await crowd.run(5)
            for _ in range(2):
                at_work = asyncio.ensure_future(crowd.run(25))
                told = len(crowd.events)
                while len(crowd.events) < told + 40:
                    await asyncio.wait((at_work,), timeout=0.001)
                crowd.served.clear()
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
                crowd.served.set()
                await at_work
            await crowd.run(5)
            await crowd.settle_all()
            await crowd.expect_kept(("put", "OK"), ("ack", "OK"), ("move", "OK"))
    assert crowd.unknown + crowd.unavailable > 0, "the kills hit nothing"


async def test_tls_is_verified(server: MysqlServer, tmp_path: Path) -> None:
    url = server.url
    ciphers = (
        "SELECT 1 FROM information_schema.global_status WHERE variable_name = 'SSL_ACCEPTS' AND variable_value > 0"
    )
    server.sql(f"ALTER USER 'timeline'@'%' IDENTIFIED BY '{PASSWORD}' REQUIRE SSL")
    try:
        async with trial(url, ca=quote(_ca(server))) as trying:
            await trying.stored(await trying.topic(), [b"a"])
        assert server.sql(ciphers).strip() == "1"
    finally:
        server.sql(f"ALTER USER 'timeline'@'%' IDENTIFIED BY '{PASSWORD}' REQUIRE NONE")
    distrusting = make_store(f"{url}?tls=1")
    with pytest.raises(StoreRefused, match="certificate of the server is not trusted: name in ca="):
        await distrusting.open()
    empty = tmp_path / "ca.pem"
    empty.write_text("")
    with pytest.raises(StoreRefused, match=r"ca: .*holds no certificate"):
        await make_store(f"{url}?ca={quote(str(empty))}").open()


async def test_a_full_disk_is_unavailable_and_loses_nothing(server: MysqlServer) -> None:
    """Depending on what it cannot write, the server refuses ("full") or ends; with room, and started again where it
    ended, it has all that was answered."""
    async with trial(server.url, timeout_ms=5_000) as trying:
        topic = await trying.topic()
        stored, _ = await fill(trying, topic, 10, 64 * 1024)
        assert len(stored) >= 20
        with pytest.raises((StoreUnavailable, StoreUnknown)):
            await trying.stored(topic, [b"more"], payload=os.urandom(8 * 1024 * 1024))
        remount(server.folder.parent, "size=400m")
        await _works(trying, server)
        assert Status.OK in statuses(await trying.put(topic, [b"after"]))
        there: set[bytes] = set()
        while len((leased := await trying.lease(topic, 100)).rows):
            assert not leased.damaged
            there.update(leased.rows.ids.tolist())
        assert {b"after", *stored} <= there


async def _works(trying: Trial, server: MysqlServer) -> None:
    """Returns once the store works again. A server that ends may do so a while after the disk was full: it is started
    again once."""
    ended = False
    for _ in range(200):
        try:
            return await trying.store.check()
        except (StoreUnavailable, StoreUnknown):
            if not (ended or server.accepts()):
                ended = True
                server.kill()
                server.start()
    raise AssertionError("the store never worked again")


async def test_an_old_server_is_refused(server: MysqlServer) -> None:
    """The server itself tells another version."""
    url = server.url
    _restart(server, "--version=10.3.39-MariaDB")
    with pytest.raises(StoreRefused, match=r"MariaDB 10.3.39-MariaDB is too old: MariaDB 10.6 is needed"):
        await make_store(url).open()


async def test_a_binary_log_that_is_not_synced_is_warned_of(server: MysqlServer) -> None:
    _restart(server, "--log-bin=log", "--sync-binlog=0")
    async with trial(server.url) as trying:
        assert any("sync_binlog = 0: a replica may miss" in warning for warning in trying.opened.warnings)
        assert trying.store.capabilities.durable


def _restart(server: MysqlServer, *more: str) -> None:
    server.kill()
    plain = server.settings
    server.settings = (*plain, *more)
    try:
        server.start()
    finally:
        server.settings = plain
