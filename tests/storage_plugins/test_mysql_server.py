"""What a `mysql://` URL and a server can be like: refused with what mends it, warned of, or worked with."""

from __future__ import annotations

from contextlib import ExitStack

import pymysql
import pytest

from tests.servers.fixture import Running
from tests.servers.mysql import PASSWORD, MysqlServer
from tests.storage_plugins.mysql_calls import database_of, other, run, setting, trial, until
from timeline.storage_plugins import make_store
from timeline.storage_plugins.conformance.trial import named, statuses
from timeline.storage_plugins.contract import StoreRefused, StoreUnavailable
from timeline.storage_plugins.mysql import schema
from timeline.storage_plugins.mysql.connections import MysqlLocation

pytestmark = pytest.mark.servers


@pytest.fixture
def server(servers: Running) -> MysqlServer:
    return servers.server(MysqlServer)


async def _refused(url: str) -> str:
    store = make_store(url)
    with pytest.raises(StoreRefused) as refused:
        await store.open()
    with pytest.raises(StoreUnavailable, match="not open"):
        await store.check()
    await store.close()
    assert PASSWORD not in str(refused.value)
    return refused.value.reason


@pytest.mark.parametrize(
    ("url", "mended"),
    [
        ("mysql://host", "names a host and a database: write mysql://user:password@host:3306/database"),
        ("mysql://host:x/d", "cannot be read"),
        ("mysql://u:secret/#@host/d", "special characters in user or password are percent-encoded in a URL"),
        ("mysql://u:secret@host/d?pol=3", "'pol' is no option of mysql://; known are pool, timeout_ms, tls, ca"),
        ("mysql://u:secret@host/d?pool=1", "pool must be a whole number from 2 to 64, not '1'"),
        ("mysql://u:secret@host/d?tls=yes", "tls must be a whole number from 0 to 1"),
        ("mysql://u:secret@host/d?ca=/nowhere", "ca names a file of certificates; '/nowhere' is none"),
    ],
)
def test_a_wrong_url_is_refused(url: str, mended: str) -> None:
    with pytest.raises(StoreRefused) as refused:
        make_store(url)
    assert mended in refused.value.reason and "secret" not in str(refused.value)


def test_user_and_password_may_stand_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIMELINE_MYSQL_USER", "somebody")
    monkeypatch.setenv("TIMELINE_MYSQL_PASSWORD", "p/w")
    found = MysqlLocation.of("mysql://host/d")
    assert (found.user, found.password, found.port, found.shown) == ("somebody", "p/w", 3306, "host:3306/d")
    assert MysqlLocation.of("mysql://me:p%2Fq@host:1/d").password == "p/q"
    assert "p/w" not in repr(found)


async def test_a_wrong_password_is_refused(server: MysqlServer) -> None:
    reason = await _refused(server.url.replace(PASSWORD, "wrong"))
    assert "user or password is wrong: correct them in the URL" in reason and "wrong@" not in reason


async def test_a_missing_database_is_refused(server: MysqlServer) -> None:
    url = server.url
    assert "no such database: CREATE DATABASE it" in await _refused(f"{url}_not")


async def test_a_database_that_is_gone_has_no_cluster(server: MysqlServer) -> None:
    """As at another, empty server behind the same address."""
    url = server.url
    store = make_store(url)
    await store.open()
    mine = server.sql(f"SELECT id FROM information_schema.processlist WHERE db = '{database_of(url)}'").split()
    server.sql(f"DROP DATABASE {database_of(url)}")
    assert (await store.inspect()).cluster_uid == ""
    for id in mine:
        server.sql(f"KILL {id}")
    assert (await store.inspect()).cluster_uid == ""
    await store.close()


async def test_a_user_without_the_rights_is_refused(server: MysqlServer) -> None:
    url = server.url
    server.sql(f"GRANT SELECT, INSERT ON {database_of(url)}.* TO 'guest'@'%' IDENTIFIED BY '{PASSWORD}'")
    assert "GRANT ALL on this database" in await _refused(url.replace("timeline:", "guest:"))


async def test_a_newer_schema_is_refused(server: MysqlServer) -> None:
    url = server.url
    async with trial(url):
        pass
    server.sql(f"UPDATE {database_of(url)}.meta SET value = '99' WHERE name = 'schema'")
    assert "schema has version 99" in await _refused(url)


async def test_a_migration_by_somebody_else_is_waited_for(server: MysqlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused, a broker that starts beside another one would end for good."""
    url = server.url
    monkeypatch.setattr(schema, "LOCK_S", 0)
    store = make_store(url)
    with other(url) as somebody:
        run(somebody, f"SELECT GET_LOCK({schema.LOCK}, 60)")
        with pytest.raises(StoreUnavailable, match="another process is creating or migrating"):
            await store.open()
    await until(server, f"USE {database_of(url)}; SELECT 1 FROM DUAL WHERE IS_FREE_LOCK({schema.LOCK})")
    await store.open()
    await store.close()


async def test_tables_of_somebody_else_are_left_alone(server: MysqlServer) -> None:
    url = server.url
    server.sql(f"CREATE TABLE {database_of(url)}.message (a INT) ENGINE = InnoDB")
    assert "tables named message that are not Timeline's" in await _refused(url)
    assert server.sql(f"SHOW TABLES IN {database_of(url)}").split() == ["message"]


async def test_a_creation_that_was_cut_short_is_gone_on_with(server: MysqlServer) -> None:
    url = server.url
    async with trial(url) as before:
        uid = before.opened.cluster_uid
    name = database_of(url)
    server.sql(f"DELETE FROM {name}.meta WHERE name = 'schema'; DROP TABLE {name}.payload, {name}.tagged")
    async with trial(url) as again:
        assert again.opened.cluster_uid == uid
        await again.stored(await again.topic(), [b"a"], tag=b"t")


async def test_tables_are_in_innodb_whatever_the_servers_default(server: MysqlServer) -> None:
    url = server.url
    engines = f"SELECT DISTINCT engine FROM information_schema.tables WHERE table_schema = '{database_of(url)}'"
    with setting(server, "default_storage_engine", "Aria"):
        async with trial(url) as trying:
            await trying.stored(await trying.topic(), [b"a"])
        assert server.sql(engines).split() == ["InnoDB"]
    server.sql(f"ALTER TABLE {database_of(url)}.payload ENGINE = Aria")
    assert "not in InnoDB, the only engine that can roll back: payload" in await _refused(url)


async def test_commits_that_are_not_flushed_are_warned_of(server: MysqlServer) -> None:
    url = server.url
    async with trial(url) as trying:
        assert trying.opened.warnings == () and trying.store.capabilities.durable
    with setting(server, "innodb_flush_log_at_trx_commit", "2"):
        async with trial(url) as trying:
            assert "innodb_flush_log_at_trx_commit = 2" in trying.opened.warnings[0]
            assert not trying.store.capabilities.durable


async def test_a_small_packet_is_refused_and_a_large_one_bounds_payloads(server: MysqlServer) -> None:
    url = server.url
    mib = 1024 * 1024
    with setting(server, "max_allowed_packet", str(mib)):
        assert f"max_allowed_packet is {mib}: set it to {16 * mib}" in await _refused(url)
    with setting(server, "max_allowed_packet", str(17 * mib)):
        async with trial(url) as trying:
            assert trying.store.capabilities.payload_limit_bytes == 8 * mib
            made = await trying.topic(max_payload_bytes=8 * mib)
            await trying.stored(made, [b"a"], payload=bytes(8 * mib))
            leased = await trying.lease(made)
            assert leased.rows.payloads is not None and leased.rows.payloads.nbytes == 8 * mib


async def test_a_batch_of_large_headers_fits_the_smallest_packet(server: MysqlServer) -> None:
    url = server.url
    with setting(server, "max_allowed_packet", str(16 * 1024 * 1024)):
        async with trial(url) as trying:
            made = await trying.topic()
            await trying.stored(made, named(3_000), headers=bytes(8 * 1024))
            leased = await trying.lease(made)
            assert leased.rows.headers is not None and leased.rows.headers.nbytes == 3_000 * 8 * 1024


async def test_a_read_only_server_is_refused_and_one_that_becomes_so_is_unavailable(server: MysqlServer) -> None:
    url = server.url
    server.sql(f"GRANT ALL ON {database_of(url)}.* TO 'plain'@'%' IDENTIFIED BY '{PASSWORD}'")
    plain = url.replace("timeline:", "plain:")
    async with trial(plain) as trying:
        made = await trying.topic()
        with setting(server, "read_only", "1"):
            with pytest.raises(StoreUnavailable, match="read-only: name the primary"):
                await trying.put(made, [b"a"])
            assert "read-only" in await _refused(plain)
        await trying.stored(made, [b"a"])


async def test_rights_that_are_given_back_count_without_a_restart(server: MysqlServer) -> None:
    """The server looks rights to a database up when a connection takes it, and goes by that as long as it lives."""
    url = server.url
    server.sql(f"GRANT ALL ON {database_of(url)}.* TO 'poor'@'%' IDENTIFIED BY '{PASSWORD}'")
    async with trial(url.replace("timeline:", "poor:"), pool=2) as trying:
        made = await trying.topic()
        server.sql(f"REVOKE INSERT ON {database_of(url)}.* FROM 'poor'@'%'")
        for id in server.sql("SELECT id FROM information_schema.processlist WHERE user = 'poor'").split():
            server.sql(f"KILL {id}")
        for _ in range(4):
            with pytest.raises(StoreUnavailable, match="GRANT ALL on this database"):
                await trying.put(made, [b"a"])
        server.sql(f"GRANT ALL ON {database_of(url)}.* TO 'poor'@'%'")
        await trying.stored(made, [b"a"])


async def test_exhausted_connections_are_unavailable_until_some_are_free(server: MysqlServer) -> None:
    url = server.url
    async with trial(url):
        pass
    with setting(server, "max_connections", "10"), ExitStack() as others:
        server.sql(f"GRANT ALL ON {database_of(url)}.* TO 'plain'@'%' IDENTIFIED BY '{PASSWORD}'")
        plain = url.replace("timeline:", "plain:")
        with pytest.raises(pymysql.MySQLError, match="Too many connections"):
            for _ in range(20):
                others.enter_context(other(plain))
        store = make_store(plain)
        with pytest.raises(StoreUnavailable, match="too many connections: raise max_connections, or lower pool"):
            await store.open()
        others.close()
        await until(server, "SELECT 1 FROM information_schema.processlist HAVING COUNT(*) < 8")
        await store.open()
        await store.close()


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    store = make_store("mysql://u:secret@127.0.0.1:1/d")
    with pytest.raises(StoreUnavailable) as unavailable:
        await store.open()
    assert "127.0.0.1:1/d" in unavailable.value.reason and "secret" not in str(unavailable.value)


async def test_dead_connections_are_replaced(server: MysqlServer) -> None:
    url = server.url
    async with trial(url) as trying:
        made = await trying.topic()
        await trying.stored(made, [b"a"])
        mine = f"SELECT id FROM information_schema.processlist WHERE db = '{database_of(url)}'"
        killed = server.sql(mine).split()
        assert killed
        for id in killed:
            server.sql(f"KILL {id}")
        await trying.stored(made, [b"b"])
        assert not set(server.sql(mine).split()) & set(killed)
        assert [status.name for status in statuses(await trying.put(made, [b"a", b"b"]))] == ["DUPLICATE"] * 2
        with other(url) as somebody:
            assert run(somebody, "SELECT COUNT(*) FROM message") == [(2,)]
