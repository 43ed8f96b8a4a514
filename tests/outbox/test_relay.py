"""The relay sends what was committed, once; in the order of adding; and nothing that is refused holds up the rest."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

import timeline
from tests.driver.broker import Broker
from tests.outbox.conftest import TOPIC, Heard, Shop, made_shop
from tests.servers.fixture import Running
from tests.servers.mysql import MysqlServer
from tests.servers.postgresql import PostgresqlServer
from tests.services import require_service
from timeline import Message, Status, outbox
from timeline.broker.server.calls import Handlers
from timeline.errors import Invalid, Unavailable
from timeline.outbox import database
from timeline.outbox.database import Outbox, OutboxRefused, outbox_url
from timeline.outbox.relay import OutboxRelay
from timeline.wire import Fault, TransportError

PATIENCE_S = 100.0


async def once(shop: Shop, tl: timeline.Timeline) -> Heard:
    """All that waits is relayed."""
    heard = Heard()
    await OutboxRelay(shop.outbox(), tl, heard).run(once=True)
    return heard


@asynccontextmanager
async def relaying(shop: Shop, tl: timeline.Timeline, batch: int = 1_000) -> AsyncIterator[Heard]:
    """A relay at work."""
    heard = Heard()
    relay = OutboxRelay(shop.outbox(), tl, heard, every_ms=10, batch=batch)
    task = asyncio.create_task(relay.run())
    try:
        yield heard
    finally:
        relay.stop()
        async with asyncio.timeout(PATIENCE_S):
            await task


async def until(condition: Any) -> None:
    """Returns once the condition holds, looking at each turn of the loop that something else brings about."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.to_thread(lambda: None)


async def pending(tl: timeline.Timeline, topic: str = TOPIC) -> list[str]:
    """The ids on a topic's timeline."""
    return sorted([message.id async for message in tl.scan(topic)])


async def test_what_was_committed_is_sent_as_it_was_added(shop: Shop, tl: timeline.Timeline) -> None:
    with shop.engine.begin() as connection:
        full = Message(b"\0", in_="1h", id="a", tag="t", headers={"h": "ä"}, expires="2h")
        outbox.add(connection, full, topic=TOPIC, group="ops")
    with shop.engine.connect() as connection:
        outbox.add(connection, Message(b"", in_="1h", id="b"), topic=TOPIC)
        connection.rollback()
    heard = await once(shop, tl)
    assert heard.statuses == {Status.OK: 1} and not heard.warnings and shop.left() == []
    found = await tl.get(TOPIC, "a", payload=True)
    assert found is not None
    assert (found.payload, found.headers, found.tag, found.group) == (b"\0", {"h": "ä"}, "t", "ops")
    assert found.expires_ms is not None and abs(found.expires_ms - found.due_ms - 3_600_000) <= 1
    assert await pending(tl) == ["a"]


class Doorkeeper(Handlers):
    """The handlers of a broker that turns everybody away while `closed`."""

    closed = False

    def service(self, details: Any) -> Any:
        if not Doorkeeper.closed:
            return super().service(details)
        expired = TransportError(Fault.UNAUTHENTICATED, "token 'relay' has expired")
        return grpc.stream_stream_rpc_method_handler(self._turned_away(expired))


@pytest.mark.slow
@pytest.mark.parametrize("ids", [["before"], []], ids=["later", "at its start"])
async def test_no_row_is_rejected_because_the_token_of_the_relay_has_expired(
    sqlite_shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids: list[str]
) -> None:
    door = Broker(f"sqlite:///{tmp_path}/broker.db")
    door.handlers = Doorkeeper
    async with door, timeline.connect(door.address) as tl:
        await tl.create_topic(TOPIC, remember="1h")
        async with relaying(sqlite_shop, tl) as heard:
            sqlite_shop.add(*ids)
            await until(lambda: len(heard.statuses) == len(ids))
            with monkeypatch.context() as patch:
                patch.setattr(Doorkeeper, "closed", True)
                await door.restart()  # which ends the streams of before
                sqlite_shop.add(*(f"{number}" for number in range(5)))
                await until(lambda: any("has expired" in trouble for trouble in heard.troubles))
                assert len(sqlite_shop.left()) == 5
            await until(lambda: not sqlite_shop.left())
            assert not heard.set_aside


def test_one_relay_holds_a_file_by_whatever_name(sqlite_shop: Shop, tmp_path: Path) -> None:
    link = tmp_path / "linked.db"
    link.symlink_to(sqlite_shop.url.removeprefix("sqlite:///"))
    first, second = sqlite_shop.outbox(), Outbox(f"sqlite:///{link}")
    assert first.hold()
    assert not second.hold()
    first.close()
    assert second.hold()
    second.close()


async def test_a_relay_that_is_stopped_says_that_something_may_wait(sqlite_shop: Shop, tl: timeline.Timeline) -> None:
    sqlite_shop.add("a")
    relay = OutboxRelay(sqlite_shop.outbox(), tl, Heard())
    relay.stop()
    assert await relay.run(once=True) is False
    assert await OutboxRelay(sqlite_shop.outbox(), tl, Heard()).run(once=True) is True


@pytest.mark.slow
async def test_messages_are_sent_in_the_order_of_adding(shop: Shop, tl: timeline.Timeline, broker: Broker) -> None:
    assert broker.store is not None
    sent: list[bytes] = []
    put = broker.store.put

    async def watched(topic: Any, now_ms: int, puts: Any) -> Any:
        sent.extend(puts.ids)
        return await put(topic, now_ms, puts)

    broker.store.put = watched  # type: ignore[method-assign]
    ids = [f"{number * 7919 % 1000}" for number in range(100)]
    shop.add(*ids)
    heard = Heard()
    await OutboxRelay(shop.outbox(), tl, heard, batch=7).run(once=True)
    assert [id.decode() for id in sent] == ids


async def test_a_transaction_that_commits_late_is_sent_late_and_not_passed_over(
    shop: Shop, tl: timeline.Timeline
) -> None:
    if shop.dialect == "sqlite":
        shop.add("first")  # it has one writer at a time: nobody adds after somebody who has not committed
        assert (await once(shop, tl)).statuses == {Status.OK: 1}
        return
    with shop.engine.connect() as slow:
        outbox.add(slow, Message(b"", in_="1h", id="begun first"), topic=TOPIC)
        shop.add("committed first")
        await once(shop, tl)
        assert await pending(tl) == ["committed first"]
        slow.commit()
    await once(shop, tl)
    assert await pending(tl) == ["begun first", "committed first"]


async def test_what_was_sent_and_not_marked_is_sent_again_and_changes_nothing(
    shop: Shop, tl: timeline.Timeline
) -> None:
    shop.add("a", "b", in_="0s")
    shop.run(f"CREATE TABLE copy_of_rows AS SELECT * FROM {outbox.TABLE}")
    await once(shop, tl)
    async with tl.consumer(TOPIC, id="w") as consumer:
        done = await consumer.take()
        await done.ack()
        await consumer.take()
        columns = "topic, grp, id, payload, in_ms"
        shop.run(f"INSERT INTO {outbox.TABLE} ({columns}) SELECT {columns} FROM copy_of_rows ORDER BY seq")
        shop.run("DROP TABLE copy_of_rows")
        heard = await once(shop, tl)
        assert heard.statuses == {Status.DUPLICATE: 2} and shop.left() == []
        assert [message.id async for message in tl.scan(TOPIC)] == [{"a": "b", "b": "a"}[done.id]]


async def test_what_is_refused_is_set_aside_with_its_reason_and_the_rest_goes_on(
    shop: Shop, tl: timeline.Timeline
) -> None:
    await tl.create_topic("small", max_payload_bytes=10, remember="1h")
    async with tl.producer(TOPIC) as producer:
        await producer.produce(b"mine", in_="1h", id="taken")
    shop.add("good-1")
    with shop.engine.begin() as connection:
        outbox.add(connection, Message(b"x" * 11, in_="1h", id="large"), topic="small")
        outbox.add(connection, Message(b"fits", in_="1h", id="fits"), topic="small")
        outbox.add(connection, Message(b"other", in_="1h", id="taken"), topic=TOPIC)
        outbox.add(connection, Message(b"", at=timeline.local("2400-01-01", "09:00", "UTC"), id="far"), topic=TOPIC)
    columns = f"INSERT INTO {outbox.TABLE} (topic, grp, id, payload, due_ms, headers) VALUES "
    for values in (
        f"('{TOPIC}', 'default', 'seconds', '', 1700000000, NULL)",
        f"('{TOPIC}', 'default', 'headers', '', 4000000000000, '[1]')",
        f"('{TOPIC}', 'default', '', '', 4000000000000, NULL)",
        f"('{TOPIC}', '', 'no group', '', 4000000000000, NULL)",
        "('no\tname', 'default', 'bad topic', '', 4000000000000, NULL)",
    ):
        shop.run((columns + values).replace("\t", "\x01"))
    shop.add("good-2")
    heard = await once(shop, tl)
    assert heard.statuses == {Status.OK: 3}
    assert await pending(tl) == ["good-1", "good-2", "taken"]
    asked = {id: (status, reason) for id, status, reason in heard.set_aside}
    assert {id: str(status) for id, (status, _) in asked.items()} == {
        "large": "TOO_LARGE", "taken": "EXISTS", "far": "INVALID", "seconds": "INVALID", "headers": "INVALID",
        "": "INVALID", "no group": "INVALID", "bad topic": "INVALID",
    }  # fmt: skip
    assert "if_exists" not in asked["taken"][1] and "an id of its own" in asked["taken"][1]
    assert "looks like seconds" in asked["seconds"][1] and "printable characters" in asked["bad topic"][1]

    found = shop.outbox()
    listed = found.set_aside(100)
    assert [row.id for row in listed] == shop.left()
    large = next(row for row in listed if row.id == "large")
    assert (
        large.reason.startswith("TOO_LARGE: ")
        and large.refused_ms > 0
        and (large.topic, large.group) == ("small", "default")
    )
    assert (found.waiting().waiting, found.waiting().set_aside) == (0, 8)
    await tl.update_topic("small", max_payload_bytes=11)
    assert found.retry([large.seq, 10**9]) == 1
    assert found.purge(None) == 7
    found.close()
    assert (await once(shop, tl)).statuses == {Status.OK: 1}
    assert await pending(tl, "small") == ["fits", "large"]


async def test_whatever_sqlite_takes_for_a_value_holds_up_nobody(sqlite_shop: Shop, tl: timeline.Timeline) -> None:
    """Its columns take values of any type: texts and bytes are one another's, what is no number is set aside."""
    for values in (
        f"'{TOPIC}', 'text', 'grüße', 3600000, NULL",
        f"'{TOPIC}', 'number', 42, 3600000, NULL",
        f"'{TOPIC}', CAST('bytes' AS BLOB), x'00ff', 3600000, NULL",
        f"'{TOPIC}', CAST('soon' AS BLOB), '', 'soon', NULL",
        f"'{TOPIC}', 'deep', '', 3600000, '{'[' * 100_000}'",
        f"'{TOPIC}', 'list', '', 3600000, CAST('[1]' AS BLOB)",
        f"'{TOPIC}', CAST(x'66ff' AS TEXT), '', 3600000, NULL",
        "CAST(x'fe' AS TEXT), 'topic', '', 3600000, NULL",
        f"'{TOPIC}', 'header', '', 3600000, CAST(x'fd' AS BLOB)",
    ):
        sqlite_shop.run(f"INSERT INTO {outbox.TABLE} (topic, id, payload, in_ms, headers) VALUES ({values})")
    heard = await once(sqlite_shop, tl)
    assert heard.statuses == {Status.OK: 3}
    refused = ["soon", "deep", "list", r"f\xff", "topic", "header"]
    assert {id: str(status) for id, status, _ in heard.set_aside} == dict.fromkeys(refused, "INVALID")
    found = {message.id: message.payload async for message in tl.scan(TOPIC, payload=True)}
    assert found == {"text": "grüße".encode(), "number": b"42", "bytes": b"\x00\xff"}
    listed = sqlite_shop.outbox()
    assert [row.id for row in listed.set_aside(10)] == refused
    assert listed.set_aside(10)[3].reason == "INVALID: id: not text in UTF-8"
    listed.close()


async def test_a_topic_that_is_not_there_and_named_in_bytes_holds_up_nobody(
    sqlite_shop: Shop, tl: timeline.Timeline
) -> None:
    columns = f"INSERT INTO {outbox.TABLE} (topic, id, payload, in_ms) VALUES "
    sqlite_shop.run(f"{columns} (CAST('nowhere' AS BLOB), 'waits', '', 3600000)")
    sqlite_shop.add("sent")
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(Unavailable, match="no topic 'nowhere'"):
            await once(sqlite_shop, tl)
    assert sqlite_shop.left() == ["waits"] and await pending(tl) == ["sent"]


@pytest.mark.slow
async def test_messages_of_a_topic_that_is_not_there_wait_for_it_and_hold_up_no_other(
    shop: Shop, tl: timeline.Timeline
) -> None:
    shop.add(*(f"early-{number}" for number in range(5)), topic="later")
    shop.add("a")
    async with relaying(shop, tl, batch=2) as heard:
        await until(lambda: heard.statuses.get(Status.OK) == 1)
        assert any(trouble.startswith("there is no topic 'later'") for trouble in heard.troubles)
        await tl.create_topic("later")
        await until(lambda: heard.statuses.get(Status.OK) == 6)
        await until(lambda: heard.troubles[-1] == "")
        assert [said for said in heard.warnings if "Topic later does not remember ids" in said]
    assert shop.left() == []
    with pytest.raises(Unavailable, match="there is no topic 'never'"):
        shop.add("b", topic="never")
        shop.add("c")
        await once(shop, tl)
    assert shop.left() == ["b"]


@pytest.mark.slow
async def test_a_broker_that_is_away_is_waited_for(shop: Shop, tl: timeline.Timeline, broker: Broker) -> None:
    await broker.stop()
    shop.add("a", "b")
    async with timeline.connect(broker.address, timeout="1s") as other, relaying(shop, other) as heard:
        await until(lambda: heard.troubles)
        assert shop.left() == ["a", "b"]
        await broker.start()
        async with timeline.connect(broker.address) as again:
            await again.create_topic(TOPIC, remember="1h")
        # What was sent and not answered in time is DUPLICATE.
        await until(lambda: sum(heard.statuses.get(one, 0) for one in (Status.OK, Status.DUPLICATE)) == 2)
        await until(lambda: heard.troubles[-1] == "")
    assert shop.left() == []


@pytest.mark.servers
@pytest.mark.parametrize("kind", ["postgresql", "mysql"])
async def test_several_relays_share_a_table_and_send_nothing_twice(
    kind: str, request: pytest.FixtureRequest, tl: timeline.Timeline
) -> None:
    shop: Shop = request.getfixturevalue("shared_shop")
    assert shop.dialect == kind
    async with relaying(shop, tl, batch=50) as one, relaying(shop, tl, batch=50) as two:
        await until(lambda: one.counts and two.counts)  # both are at work
        with shop.engine.begin() as connection:
            outbox.add_many(connection, (Message(b"", in_="1h", id=f"{n}") for n in range(2_000)), topic=TOPIC)
        await until(lambda: sum(one.statuses.values()) + sum(two.statuses.values()) >= 2_000)
    assert one.statuses.keys() | two.statuses.keys() == {Status.OK}
    assert shop.left() == []


@pytest.fixture
def shared_shop(kind: str, request: pytest.FixtureRequest) -> Any:
    from tests.servers.mysql import MysqlServer

    servers = request.getfixturevalue("servers")
    yield from made_shop(servers.url(PostgresqlServer if kind == "postgresql" else MysqlServer))


async def test_of_sqlite_one_relays_and_the_next_takes_over(sqlite_shop: Shop, tl: timeline.Timeline) -> None:
    async with relaying(sqlite_shop, tl) as first:
        sqlite_shop.add("a")
        await until(lambda: first.statuses)
        async with relaying(sqlite_shop, tl) as second:
            await until(lambda: second.warnings)
            sqlite_shop.add("b")
            await until(lambda: first.statuses == {Status.OK: 2})
            with pytest.raises(Unavailable, match="SQLite takes one at a time"):
                await once(sqlite_shop, tl)
        assert second.warnings == ["another relay has this outbox: waiting until it ends"]
    async with relaying(sqlite_shop, tl) as third:
        sqlite_shop.add("c")
        await until(lambda: third.statuses == {Status.OK: 1})


async def test_large_payloads_are_taken_a_few_at_a_time(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "TAKEN_BYTES", 25)
    with shop.engine.begin() as connection:
        outbox.add_many(
            connection, (Message(b"x" * size, in_=1, id=f"{size}") for size in (10, 11, 12, 99, 1)), topic=TOPIC
        )
    found = shop.outbox()
    taken: list[list[str]] = []
    while rows := found.take(10):
        taken.append([row.id for row in rows])
        found.settle([row.seq for row in rows], {})
    found.close()
    assert taken == [["10", "11"], ["12"], ["99"], ["1"]]


@pytest.mark.servers
async def test_a_database_that_dies_is_waited_for(tmp_path_factory: Any, tl: timeline.Timeline) -> None:
    require_service("postgresql")
    folder: Path = tmp_path_factory.mktemp("pg")
    for parent in itertools.takewhile(lambda path: path != Path("/tmp"), [folder, *folder.parents]):
        parent.chmod(0o711)
    server = PostgresqlServer(folder / "pg").start()
    try:
        [shop] = list(made_shop(server.url))
        shop.add("a")
        async with relaying(shop, tl) as heard:
            await until(lambda: heard.statuses.get(Status.OK) == 1)
            await asyncio.to_thread(server.kill)
            await until(lambda: heard.troubles)
            assert "cannot be asked" in heard.troubles[0]
            await asyncio.to_thread(server.start)
            shop.engine.dispose()
            shop.add("b")
            await until(lambda: heard.statuses.get(Status.OK) == 2)
            await until(lambda: heard.troubles[-1] == "")
        shop.engine.dispose()
    finally:
        server.stop()


@pytest.mark.servers
def test_a_connection_gives_up_a_machine_that_is_gone(postgresql_shop: Shop) -> None:
    """After the time that the URL says, where it says one."""
    for rest, idle in (("", "30"), ("?keepalives_idle=7", "7")):
        found = Outbox(postgresql_shop.url + rest)
        with found._engine.connect() as connection:
            raw = connection.connection.dbapi_connection
            assert raw is not None
            asked = raw.info.get_parameters()
        found.close()
        assert (asked["tcp_user_timeout"], asked["keepalives_idle"]) == ("60000", idle)


def test_a_table_that_is_not_there_or_too_old_says_how_to_make_it(shop: Shop) -> None:
    shop.run(f"ALTER TABLE {outbox.TABLE} DROP COLUMN tag")
    made = f"'timeline outbox ddl --dialect {shop.dialect}' prints"
    found = shop.outbox()
    with pytest.raises(OutboxRefused, match=f"has no column tag: {made}"):
        found.open()
    shop.run(f"DROP TABLE {outbox.TABLE}")
    with pytest.raises(OutboxRefused, match=f"there is no table {outbox.TABLE} in .*; {made} what creates it"):
        found.open()
    found.close()


@pytest.mark.servers
def test_a_server_that_says_no_is_quoted_and_the_password_is_not(shop: Shop) -> None:
    if shop.dialect == "sqlite":
        return
    read = sa.make_url(shop.url)
    wrong = read.set(database="nowhere").render_as_string(hide_password=False)
    refusal = Unavailable if shop.dialect == "postgresql" else OutboxRefused  # libpq hides the code of a refusal
    with pytest.raises(refusal, match="nowhere"):
        database.Outbox(wrong).open()
    denied = read.set(username="nobody", password="hunter2").render_as_string(hide_password=False)
    with pytest.raises(refusal, match="nobody") as refused:
        database.Outbox(denied).open()
    assert "hunter2" not in str(refused.value)
    with pytest.raises(Unavailable, match="cannot be asked"):
        database.Outbox(read.set(port=1).render_as_string(hide_password=False)).open()


def _of(shop: Shop, user: str, **query: str) -> Outbox:
    """The same outbox, asked for by another user of the server."""
    read = sa.make_url(shop.url).set(username=user, password=user, query=query)
    return database.Outbox(read.render_as_string(hide_password=False))


@pytest.mark.servers
def test_a_postgresql_that_is_full_or_read_only_is_waited_for(postgresql_shop: Shop) -> None:
    """libpq says no code of a refused connection."""
    shop = postgresql_shop
    for user, more in (("crowded", "CONNECTION LIMIT 0"), ("reader", "")):
        shop.run(f"DROP ROLE IF EXISTS {user}")
        shop.run(f"CREATE ROLE {user} LOGIN PASSWORD '{user}' {more}")
    shop.run("ALTER ROLE reader SET default_transaction_read_only = on")
    crowded, reader = _of(shop, "crowded"), _of(shop, "reader")
    with pytest.raises(Unavailable, match="too many connections"):
        crowded.open()
    with pytest.raises(DBAPIError) as failed:
        reader.purge(None)
    reader.close()
    assert isinstance(reader.explained(failed.value), Unavailable), failed.value


@pytest.mark.slow
def test_a_postgresql_that_does_not_answer_in_time_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://nobody@127.0.0.1:{silent.getsockname()[1]}/shop?connect_timeout=2"
        with pytest.raises(Unavailable, match="timeout expired"):
            database.Outbox(url).open()


@pytest.mark.servers
def test_a_locked_user_of_mariadb_is_refused_and_a_read_only_server_is_waited_for(servers: Running) -> None:
    server = servers.server(MysqlServer)
    for shop in made_shop(server.url):
        name = sa.make_url(shop.url).database
        for user, more in (("locked", "ACCOUNT LOCK"), ("plain", "")):
            server.sql(f"CREATE OR REPLACE USER {user} IDENTIFIED BY '{user}' {more}; GRANT ALL ON {name}.* TO {user}")
        with pytest.raises(OutboxRefused, match="locked"):
            _of(shop, "locked").open()
        plain = _of(shop, "plain")
        shop.add("one")
        server.sql("SET GLOBAL read_only = 1")
        try:
            with pytest.raises(DBAPIError) as failed:
                plain.settle([1], {})
        finally:
            server.sql("SET GLOBAL read_only = 0")
            plain.close()
        assert isinstance(plain.explained(failed.value), Unavailable), failed.value


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("shop.db", "the outbox lies in a database of SQL"),
        ("redis://localhost", "the outbox lies in a database of SQL"),
        ("sqlite://", "no other program sees an outbox in memory"),
        ("postgresql://a:b@c:port/d", "cannot be read as a URL"),
        ("postgresql://shop:h@unter2@localhost/shop", "'postgresql://…@localhost/shop' names no host: .* @ is %40"),
        ("postgresql+asyncpg://localhost/shop", "the relay uses psycopg, psycopg2, pg8000 for postgresql"),
        ("sqlite:///nowhere/shop.db", "there is no file nowhere/shop.db"),
    ],
)
def test_a_url_that_cannot_be_meant(url: str, said: str) -> None:
    with pytest.raises((Invalid, OutboxRefused), match=said):
        outbox_url(url)


def test_a_driver_is_chosen_among_those_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outbox_url("postgres://u@h/d").drivername == "postgresql+psycopg"
    assert outbox_url("mariadb://u@h/d").drivername == "mysql+pymysql"
    assert outbox_url("mysql+mysqldb://u@h/d").drivername == "mysql+mysqldb"
    monkeypatch.setattr("timeline.outbox.database.find_spec", lambda name: None)
    with pytest.raises(OutboxRefused, match=r"none is installed: pip install 'psycopg\[binary\]'"):
        outbox_url("postgresql://u@h/d")
