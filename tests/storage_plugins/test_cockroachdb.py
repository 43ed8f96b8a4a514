"""What is CockroachDB's own of its plugin: words, retries, where looks begin; refusals and unknown outcomes."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator

import asyncpg
import pytest

from tests.servers.cockroachdb import CockroachServer
from tests.servers.fixture import Running
from tests.storage_plugins.cockroach_stand_in import StandInStore, golden, store
from tests.storage_plugins.cockroach_statements import written_out
from tests.storage_plugins.sqlite_calls import NOW_MS, grant, puts, topic
from timeline.storage_plugins import sql
from timeline.storage_plugins.cockroachdb import schema
from timeline.storage_plugins.cockroachdb.store import STATEMENTS, CockroachStore, location_of
from timeline.storage_plugins.contract import StoreRefused, StoreUnavailable, StoreUnknown
from timeline.storage_plugins.postgresql.connections import PostgresqlConnection
from timeline.storage_plugins.postgresql.pool import judged
from timeline.storage_plugins.postgresql.store import SLACK_MS, WHOLE_EVERY_MS
from timeline.storage_plugins.versions import Versions

WRITE = "python -m tests.storage_plugins.cockroach_statements writes the golden file"


# ── words ──


def test_the_golden_file_is_current() -> None:
    assert written_out() <= golden(), WRITE


def test_no_statement_of_the_golden_file_says_what_cockroachdb_has_not() -> None:
    every = golden()
    foreign = re.compile(r"ctid|SKIP LOCKED|KEY SHARE|pg_advisory|LISTEN|NOTIFY|int8send|ANY\(ARRAY|OFFSET 0\b|nextval")
    assert len(every) > 60
    assert not [text for text in every if foreign.search(text)]
    both = [text for text in every if "UPDATE timeline.message" in text and "DELETE FROM timeline.message" in text]
    assert not both, "CockroachDB takes no statement that updates and deletes rows of one table"
    hashed = {name for text in every if "USING HASH" in text for name in re.findall(r"EXISTS (\w+) ON", text)}
    assert hashed == schema.HASHED
    assert all("USING HASH WITH (bucket_count = 16)" in text for text in every if "USING HASH" in text)


def test_arrays_of_rows_are_joined_and_what_an_insert_selects_has_its_type() -> None:
    removed = STATEMENTS.remove_new
    assert 'DELETE FROM timeline.payload WHERE "row" IN (SELECT gone."row" FROM gone)' in removed
    assert removed.count("(") == removed.count(")")
    assert "a.due_ms, $2::int8, $2::int8\n" in STATEMENTS.put
    assert "gone.payload_sum, 0, $7::int8\n" in STATEMENTS.ack[True]


# ── where a look begins ──


@pytest.mark.servers
async def test_what_another_broker_puts_far_back_is_found_by_the_next_whole_look(servers: Running) -> None:
    url = servers.url(CockroachServer)
    one, two = store(url), store(url)
    await one.open()
    await two.open()
    t = await one.create_topic(topic(f"floors-{secrets.token_hex(4)}"))

    async def leased(at_ms: int, overdue_ms: int = 0) -> list[bytes]:
        found = await one.lease_due(t, None, at_ms, at_ms, [grant(10)], overdue_ms)
        return found.rows.ids.tolist()

    await two.put(t, NOW_MS, puts([b"first"]))
    assert await leased(NOW_MS) == [b"first"]
    # By another broker, and further back than clocks may differ: not looked for yet, but for a sweep of the overdue.
    await two.put(t, NOW_MS, puts([b"back", b"too"], due_ms=NOW_MS - SLACK_MS - 5_000))
    await two.put(t, NOW_MS, puts([b"now"], due_ms=NOW_MS - SLACK_MS // 2))
    assert await leased(NOW_MS + 1) == [b"now"]
    await two.put(t, NOW_MS, puts([b"swept"], due_ms=NOW_MS - SLACK_MS - 9_000))
    assert b"swept" in await leased(NOW_MS + 2, overdue_ms=SLACK_MS + 8_000)
    assert sorted(await leased(NOW_MS + WHOLE_EVERY_MS)) == [b"back", b"too"]
    # By another broker, where nothing else is found: at once.
    await two.put(t, NOW_MS, puts([b"alone"], due_ms=NOW_MS - SLACK_MS - 5_000))
    assert await leased(NOW_MS + WHOLE_EVERY_MS + 1) == [b"alone"]
    # By this one: at once.
    await one.put(t, NOW_MS, puts([b"own"], due_ms=NOW_MS - SLACK_MS - 5_000))
    await one.put(t, NOW_MS, puts([b"now again"], due_ms=NOW_MS))
    assert sorted(await leased(NOW_MS + WHOLE_EVERY_MS + 2)) == [b"now again", b"own"]
    await one.close()
    await two.close()


# ── URLs ──


@pytest.mark.parametrize(
    ("url", "dsn"),
    [
        ("cockroachdb://root@h/d", "postgresql://root@h:26257/d?target_session_attrs=any"),
        (
            "cockroachdb://a,b/d?sslmode=disable",
            "postgresql://a:26257,b:26257/d?sslmode=disable&target_session_attrs=any",
        ),
        ("cockroachdb://root@h:1/d", "postgresql://root@h:1/d?target_session_attrs=any"),
    ],
)
def test_a_url(url: str, dsn: str) -> None:
    assert location_of(url).dsn == dsn


def test_a_url_that_makes_no_sense_says_what_does() -> None:
    with pytest.raises(StoreRefused, match="'nope' is no option of cockroachdb://; known are"):
        CockroachStore("cockroachdb://root:secret@h/d?nope=1")
    assert location_of("cockroachdb://root:secret@h/d").shown == "cockroachdb://…@h:26257/d"


# ── retries ──


def error(state: str) -> asyncpg.PostgresError:
    found: asyncpg.PostgresError = asyncpg.PostgresError.new({"C": state, "M": "said"})
    return found


def test_an_answer_that_the_server_does_not_know_is_unknown() -> None:
    assert isinstance(judged(error("40003"), doubtful=True), StoreUnknown)
    assert isinstance(judged(error("40001"), doubtful=True), StoreUnavailable)


@pytest.fixture
async def opened(servers: Running) -> AsyncIterator[StandInStore]:
    mine = StandInStore(servers.server(CockroachServer).url + "?schema=retries")
    await mine.open()
    yield mine
    await mine.close()


@pytest.mark.servers
async def test_transactions_that_make_each_other_impossible_are_done_again(opened: StandInStore) -> None:
    """Write skew, for real: each of two reads both rows and changes one; without retries one would be refused."""
    connections = opened._connections
    both = asyncio.Barrier(2)
    tries = 0

    async def prepare(connection: PostgresqlConnection) -> None:
        await connection.execute("INSERT INTO timeline.meta (name, value) VALUES ('x', '1'), ('y', '1')")

    async def skew(connection: PostgresqlConnection, mine: str) -> int:
        nonlocal tries
        tries += 1
        rows = await connection.fetch("SELECT value FROM timeline.meta WHERE name IN ('x', 'y') ORDER BY name")
        if tries <= 2:
            await both.wait()
        total = sum(int(record["value"]) for record in rows)
        await connection.execute("UPDATE timeline.meta SET value = $1 WHERE name = $2", str(total), mine)
        return total

    await connections.transact(prepare)
    found = await asyncio.gather(
        *(connections.transact(lambda connection, mine=mine: skew(connection, mine)) for mine in ("x", "y"))  # type: ignore[misc]
    )
    assert sorted(found) == [2, 3], "as if one had come after the other"
    assert tries > 2, "one of them was done again"  # and once more, if the other had not quite committed


@pytest.mark.servers
async def test_what_is_impossible_for_ever_is_given_up_and_nothing_happened(opened: StandInStore) -> None:
    tries = 0

    async def impossible(connection: PostgresqlConnection) -> None:
        nonlocal tries
        tries += 1
        await connection.execute("DO $$ BEGIN RAISE EXCEPTION 'restart transaction' USING ERRCODE = '40001'; END $$")

    connections = opened._connections
    type(connections).tries, before = 3, type(connections).tries
    try:
        with pytest.raises(StoreUnavailable, match="restart transaction"):
            await connections.transact(impossible)
    finally:
        type(connections).tries = before
    assert tries == 3


# ── servers that are refused ──


@pytest.mark.servers
async def test_postgresql_is_not_taken_for_cockroachdb(servers: Running) -> None:
    mine = CockroachStore(servers.server(CockroachServer).url)
    with pytest.raises(
        StoreRefused, match=r"this is no CockroachDB but PostgreSQL .*; for PostgreSQL write postgresql://"
    ):
        await mine.open()
    await mine.close()


@pytest.mark.servers
async def test_a_server_that_is_too_old_is_refused(servers: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.storage_plugins.cockroach_stand_in.VERSION", "CockroachDB CCL v22.1.9 (x86_64)")
    mine = StandInStore(servers.server(CockroachServer).url)
    with pytest.raises(StoreRefused, match=r"CockroachDB 22\.1 is too old: 23\.2 or newer is needed"):
        await mine.open()
    await mine.close()


@pytest.mark.servers
async def test_a_schema_of_a_newer_version_is_refused(servers: Running) -> None:
    url = servers.server(CockroachServer).url + "?schema=newer"
    mine = StandInStore(url)
    await mine.open()
    newer = "UPDATE timeline.meta SET value = '9' WHERE name = 'schema_version'"
    await mine._connections.use(lambda connection: connection.execute(newer), writes=True)
    await mine.close()
    with pytest.raises(StoreRefused, match="the store's schema has version 9"):
        await StandInStore(url).open()


@pytest.mark.servers
async def test_the_next_version_expands_first_and_contracts_later(
    servers: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def expand(execute: sql.Executes) -> None:
        execute("ALTER TABLE message ADD COLUMN IF NOT EXISTS extra BIGINT NOT NULL DEFAULT 0")

    def contract(execute: sql.Executes) -> None:
        execute("ALTER TABLE message DROP COLUMN IF EXISTS extra")

    url = servers.server(CockroachServer).url + "?schema=versions"
    old, new = StandInStore(url), StandInStore(url)
    await old.open()
    t = await old.create_topic(topic("t"))
    then = 2 + len(sql.MIGRATIONS)
    monkeypatch.setattr(sql, "MIGRATIONS", (*sql.MIGRATIONS, sql.Migration(expand, contract)))
    await new.open()
    assert await new.migrate(contract=False) == Versions(then, then - 1)
    await old.put(t, NOW_MS, puts([b"beside the new one"]))
    assert len((await new.lease_due(t, None, NOW_MS, NOW_MS, [grant(10)])).rows) == 1
    assert await new.migrate(contract=True) == Versions(then, then)
    await old.close()
    await new.close()


@pytest.mark.servers
async def test_brokers_that_open_at_once_make_one_schema(servers: Running) -> None:
    url = servers.server(CockroachServer).url + "?schema=at_once"
    stores = [StandInStore(url) for _ in range(4)]
    opened = await asyncio.gather(*(store.open() for store in stores))
    assert len({one.cluster_uid for one in opened}) == 1
    assert opened[0].server.startswith("CockroachDB 23.2, cockroachdb://")
    await asyncio.gather(*(store.close() for store in stores))


@pytest.mark.servers
async def test_a_server_that_is_not_there_and_a_database_that_is_not(servers: Running) -> None:
    with pytest.raises(StoreUnavailable):
        await CockroachStore("cockroachdb://root@127.0.0.1:1/d").open()
    url = servers.server(CockroachServer).url.removesuffix("postgres") + "nowhere"
    with pytest.raises(StoreRefused, match="there is no such database"):
        await StandInStore(url).open()


@pytest.mark.servers
async def test_missing_rights_are_told(servers: Running) -> None:
    url = servers.server(CockroachServer).url
    poor = url.replace("postgres@", "poor_of_cockroachdb@")
    owner = StandInStore(f"{url}?schema=of_the_rich")
    await owner.open()
    await owner._connections.use(lambda rich: rich.raw.execute("CREATE ROLE poor_of_cockroachdb LOGIN"), writes=True)
    for name in ("of_the_rich", "of_the_poor"):
        with pytest.raises(StoreRefused, match=f"this user may not create or use schema '{name}': GRANT CREATE ON"):
            await StandInStore(f"{poor}?schema={name}").open()
    granted = "GRANT CREATE ON DATABASE postgres TO poor_of_cockroachdb"
    await owner._connections.use(lambda rich: rich.raw.execute(granted), writes=True)
    await owner.close()
    mine = StandInStore(f"{poor}?schema=of_the_poor")
    assert (await mine.open()).cluster_uid
    await mine.close()
