"""Transactions of several brokers that meet: who waits, who begins again, and what a call says that came too late."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from typing import TypeVar

import pytest

from tests.servers.fixture import Running
from tests.servers.mysql import MysqlServer
from tests.storage_plugins.mysql_calls import database_of, other, run, trial, until
from timeline.model import Operation, Status
from timeline.storage_plugins.conformance.trial import T0, Trial, expect_equal, named, statuses
from timeline.storage_plugins.contract import StoreUnavailable, StoreUnknown
from timeline.storage_plugins.mysql.connections import MysqlConnections, MysqlLocation, MysqlSession, _Call
from timeline.storage_plugins.mysql.store import MysqlStore

pytestmark = pytest.mark.servers

Result = TypeVar("Result")
HOUR_MS = 3_600_000


@pytest.fixture
def server(servers: Running) -> MysqlServer:
    return servers.server(MysqlServer)


# Not information_schema.innodb_trx: InnoDB renews it only when nobody has read it for 0.1 s, so who asks often is told
# the same for ever.
WAITING = (
    "SELECT 1 FROM information_schema.global_status "
    "WHERE variable_name = 'INNODB_ROW_LOCK_CURRENT_WAITS' AND variable_value > 0"
)


async def _begun(call: Awaitable[Result], server: MysqlServer) -> asyncio.Future[Result]:
    """The call, once it waits for a lock."""
    begun = asyncio.ensure_future(call)
    await until(server, WAITING)
    return begun


async def test_a_put_that_waited_for_a_settle_sees_what_it_remembered(server: MysqlServer) -> None:
    """The id is remembered by a transaction that the put waits for: it was not when the put began."""
    url = server.url
    async with trial(url) as trying:
        made = await trying.topic(remember_ms=HOUR_MS)
        await trying.stored(made, [b"a"], payload=b"first")
        with other(url) as settling:
            run(
                settling,
                "REPLACE INTO remembered (topic, id, birth, version, payload_sum, last_op, settled_ms) "
                f"SELECT topic, id, birth, version, payload_sum, 0, {T0} FROM message",
                "DELETE FROM message",
            )
            put = await _begun(trying.put(made, [b"a", b"b"], payload=b"another"), server)
            settling.commit()
        answers = await put
        expect_equal(statuses(answers), [Status.DUPLICATE, Status.OK], "a put that waited for a settle")
        expect_equal(answers.settled.tolist(), [True, False], "whether it was settled")
        assert len((await trying.lease(made)).rows) == 1


async def test_row_numbers_that_were_given_out_twice_harm_nobody(server: MysqlServer) -> None:
    """As by a replica that took over and had missed a reservation: what has such a number by then stays."""
    url = server.url
    others = named(50)
    async with trial(url) as before:
        made = await before.topic(remember_ms=HOUR_MS)
        await before.stored(made, [b"done"])
        await before.settle(made, Operation.ACK, (await before.lease(made)).rows)
        await before.stored(made, [b"kept"])
        server.sql(f"UPDATE {database_of(url)}.meta SET value = '0' WHERE name = 'rows'")
        async with trial(url) as after:
            await after.stored(made, others, birth=[(1 << 50) + number for number in range(len(others))])
        answers = await before.put(made, [b"done", b"new"])
        expect_equal(statuses(answers), [Status.DUPLICATE, Status.OK], "puts by numbers that others have")
        expect_equal(answers.settled.tolist(), [True, False], "whether they were settled")
        there = await before.everything(made)
        expect_equal(sorted(there), sorted([b"kept", b"new", *others]), "what stands")
        assert {row["payloads"] for row in there.values()} == {b"payload"}


async def test_a_key_that_a_failover_gave_to_another_topic_is_not_used(server: MysqlServer) -> None:
    """As by a replica that took over and had missed the topic's creation: AUTO_INCREMENT counts on from before it."""
    url = server.url
    async with trial(url) as before, trial(url) as after:
        lost = await before.topic()
        await before.stored(lost, [b"lost"])
        database = database_of(url)
        key = int(server.sql(f"SELECT `key` FROM {database}.topic WHERE uid = {lost.uid}"))
        for table in ("topic", "message", "payload"):
            server.sql(f"DELETE FROM {database}.{table}")
        server.sql(f"ALTER TABLE {database}.topic AUTO_INCREMENT = {key}")
        other_one = await after.topic()
        assert int(server.sql(f"SELECT `key` FROM {database}.topic WHERE uid = {other_one.uid}")) == key
        await after.stored(other_one, named(10))
        assert not len((await before.lease(lost)).rows)
        held = (await after.lease(other_one)).rows
        for operation in (Operation.ACK, Operation.EXTEND, Operation.RELEASE):
            before.store._keys[lost.uid] = key  # type: ignore[attr-defined]
            told = await before.settle(lost, operation, held, time_ms=T0 + HOUR_MS)
            assert set(statuses(told)) == {Status.NOT_FOUND}
        assert set(statuses(await before.put(lost, [b"n"]))) == {Status.NOT_FOUND}
        assert set(statuses(await after.settle(other_one, Operation.ACK, held))) == {Status.OK}


async def test_a_topic_that_is_made_again_under_another_key_is_found_by_it(server: MysqlServer) -> None:
    url = server.url
    async with trial(url) as before, trial(url) as after:
        made = await before.topic()
        await before.stored(made, [b"a"])
        server.sql(f"UPDATE {database_of(url)}.topic SET `key` = `key` + 1000")
        await after.stored(made, named(3))
        with pytest.raises(StoreUnavailable, match="another key since a failover"):
            await before.put(made, [b"b"])
        assert statuses(await before.put(made, [b"b"])) == [Status.OK]
        server.sql(f"UPDATE {database_of(url)}.topic SET `key` = `key` - 1000")
        assert (await before.lease(made)).rows.ids.tolist() == [b"a"]


async def test_a_replace_stores_its_message_though_its_id_is_still_remembered(server: MysqlServer) -> None:
    """Clocks of two brokers differ: one has forgotten the id, and stored a message. For the other it is remembered."""
    async with trial(server.url) as trying:
        made = await trying.topic(remember_ms=HOUR_MS)
        await trying.stored(made, [b"a"])
        await trying.settle(made, Operation.ACK, (await trying.lease(made)).rows)
        await trying.stored(made, [b"a"], payload=b"second", now_ms=T0 + HOUR_MS)
        before_ms = T0 + HOUR_MS - 1
        await trying.stored(made, [b"a"], payload=b"third", replace=True, now_ms=before_ms)
        assert (await trying.row(made, b"a"))["payloads"] == b"third"


async def test_many_replaces_of_one_message_stay_within_their_row_numbers(server: MysqlServer) -> None:
    async with trial(server.url) as trying:
        made, store = await trying.topic(), trying.store
        assert isinstance(store, MysqlStore)
        await trying.stored(made, [b"a"], T0 + HOUR_MS)
        before = store._next_row
        await trying.stored(made, [b"a"] * 20, T0 + HOUR_MS, replace=True)
        ((row,),) = await store._transact(lambda session: session.rows("SELECT `row` FROM message"))
        assert before < row < store._next_row


async def test_a_deadlock_is_tried_again(server: MysqlServer) -> None:
    url = server.url
    deadlocks = "SHOW GLOBAL STATUS LIKE 'Innodb_deadlocks'"
    async with trial(url, timeout_ms=240_000) as trying:  # so that a slow machine's lock wait does not end first
        made = await trying.topic(buckets=1)
        await trying.stored(made, [b"a", b"z", *(b"m%d" % number for number in range(20))], T0 + HOUR_MS)
        before = int(server.sql(deadlocks).split()[1])
        for hour in range(2, 12):
            with other(url) as somebody:
                # Whoever changed fewer rows begins again.
                run(somebody, "UPDATE message SET asked_ms = 1 WHERE id >= 'm'")
                moving = trying.mutate(made, Operation.MOVE, [b"a", b"z"], due_ms=T0 + hour * HOUR_MS)
                move = await _begun(moving, server)
                await asyncio.to_thread(run, somebody, "UPDATE message SET asked_ms = 2 WHERE id = 'a'")
                somebody.commit()
            expect_equal(statuses(await move), [Status.OK, Status.OK], "moves after a deadlock")
            if int(server.sql(deadlocks).split()[1]) > before:
                return
    raise AssertionError("on a slow machine a wait may end before there is a deadlock, but not ten times")


async def test_a_lock_that_is_held_long_is_waited_for_again(server: MysqlServer) -> None:
    url = server.url
    timeouts = (
        "SELECT variable_value FROM information_schema.global_status WHERE variable_name = 'INNODB_ROW_LOCK_WAITS'"
    )
    async with trial(url, timeout_ms=16_000) as trying:
        made = await trying.topic()
        await trying.stored(made, [b"a"], T0 + HOUR_MS)
        before = int(server.sql(timeouts))
        with other(url) as somebody:
            run(somebody, "UPDATE message SET asked_ms = 1")
            move = await _begun(trying.mutate(made, Operation.MOVE, [b"a"], due_ms=T0 + 2 * HOUR_MS), server)
            # It gave up waiting once, and waits again.
            await until(server, f"{timeouts} HAVING variable_value > {before + 1}")
            somebody.commit()
        expect_equal(statuses(await move), [Status.OK], "a move of what somebody held long")


async def test_leases_pass_over_what_others_have_locked(server: MysqlServer) -> None:
    url = server.url
    async with trial(url) as trying:
        made = await trying.topic(buckets=1)
        await trying.stored(made, [b"a", b"b"])
        with other(url) as somebody:
            run(somebody, "UPDATE message SET asked_ms = 1 WHERE id = 'a'")
            assert (await trying.lease(made)).rows.ids.tolist() == [b"b"]
            # Soon again, for what is passed over; what is due and left for want of credit would be told as due.
            assert (await trying.lease(made)).next_due_ms == T0 + 1
            assert (await trying.lease(made, 0)).next_due_ms == T0
        gone = f"SELECT 1 FROM information_schema.processlist WHERE id = {somebody.thread_id()} HAVING COUNT(*) = 0"
        await until(server, gone)
        assert (await trying.lease(made)).rows.ids.tolist() == [b"a"]


async def test_a_call_past_its_deadline_did_nothing_before_its_commit(server: MysqlServer) -> None:
    url = server.url
    async with trial(url):
        pass  # makes the tables, which may take longer
    async with trial(url, pool=2, timeout_ms=3_000) as trying:
        made = await trying.topic()
        with other(url) as somebody:
            run(somebody, "LOCK TABLES topic WRITE, message WRITE")
            calls = [trying.put(made, [b"%d" % number]) for number in range(4)]
            answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(answer) for answer in answers] == [StoreUnavailable] * 4
        assert all("3000 ms" in str(answer) for answer in answers)
        await _works_again(trying)
        assert not len((await trying.lease(made)).rows)


async def test_a_call_past_its_deadline_is_unknown_once_its_commit_was_sent(server: MysqlServer) -> None:
    url = server.url
    async with trial(url):
        pass  # makes the tables, which may take longer
    async with trial(url, timeout_ms=3_000) as trying:
        made = await trying.topic()
        with other(url) as somebody:
            run(somebody, *(f"BACKUP STAGE {stage}" for stage in ("START", "FLUSH", "BLOCK_DDL", "BLOCK_COMMIT")))
            # The call's own deadline and the connection's end at the same time: either may say it.
            with pytest.raises(StoreUnknown, match=r"no answer within 3000 ms|the commit's answer was lost.*timed out"):
                await trying.put(made, [b"a"])
            run(somebody, "BACKUP STAGE END")
        await _works_again(trying)
        again = await trying.put(made, [b"a"])
        assert statuses(again)[0] in (Status.OK, Status.DUPLICATE)


REFUSED = "SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'a deadlock'"


async def test_what_went_with_the_commit_is_repeated_after_a_deadlock(server: MysqlServer) -> None:
    """A statement that waits for the commit and is refused then: of this try nothing happened, of the next one all."""
    connections, tries = MysqlConnections(MysqlLocation.of(server.url)), []

    def act(session: MysqlSession) -> None:
        tries.append(session)
        session.execute("CREATE TABLE IF NOT EXISTS counted (number INT)")
        session.later("INSERT INTO counted VALUES (1)")
        session.later(REFUSED if len(tries) == 1 else "INSERT INTO counted VALUES (2)")
        session.later("INSERT INTO counted VALUES (3)")

    try:
        await connections.transact(act)
        found = await connections.transact(lambda session: session.rows("SELECT number FROM counted ORDER BY number"))
    finally:
        await asyncio.to_thread(connections.close)
    assert len(tries) == 2 and [number for (number,) in found] == [1, 2, 3]


async def test_what_went_with_the_commit_and_is_wrong_is_said_and_nothing_of_it_happened(server: MysqlServer) -> None:
    connections = MysqlConnections(MysqlLocation.of(server.url))

    def act(session: MysqlSession) -> None:
        session.execute("CREATE TABLE IF NOT EXISTS wronged (number INT)")
        session.later("INSERT INTO wronged VALUES (1)")
        session.later("INSERT INTO nowhere VALUES (2)")

    try:
        with pytest.raises(StoreUnavailable, match="nowhere"):
            await connections.transact(act)
        assert not await connections.transact(lambda session: session.rows("SELECT number FROM wronged"))
    finally:
        await asyncio.to_thread(connections.close)


async def test_answers_come_to_whom_they_are_for(server: MysqlServer) -> None:
    """Statements that went together, and one too long for that; and none is formatted twice."""
    connections = MysqlConnections(MysqlLocation.of(server.url))

    def act(session: MysqlSession) -> list[object]:
        asked = [session.later("SELECT %s, '%%'", (number,)) for number in range(3)]
        plain = session.later("SELECT '%s;%d'")
        long = session.later("SELECT LENGTH(%s)", ("x" * (2 << 20),))
        return [later.answered()[0][0] for later in (*asked, plain, long)]

    try:
        found = await connections.transact(act)
    finally:
        await asyncio.to_thread(connections.close)
    assert found == [(0, "%"), (1, "%"), (2, "%"), ("%s;%d",), (2 << 20,)]


async def test_a_call_that_no_connection_was_free_for_says_so(server: MysqlServer) -> None:
    busy = MysqlConnections(MysqlLocation.of(f"{server.url}?pool=2&timeout_ms=1000"))
    begun, over = threading.Semaphore(0), threading.Event()

    def hold(session: MysqlSession) -> None:
        begun.release()
        over.wait()

    holding = [asyncio.ensure_future(busy.transact(hold)) for _ in range(2)]
    try:
        for _ in holding:
            await asyncio.to_thread(begun.acquire)
        with pytest.raises(StoreUnavailable, match="none of 2 connections was free within 1000 ms: raise pool"):
            await busy.transact(_number)
    finally:
        over.set()
        await asyncio.gather(*holding, return_exceptions=True)
        await asyncio.to_thread(busy.close)


async def test_a_call_that_is_given_up_when_it_is_over_cuts_nobody_elses_connection(server: MysqlServer) -> None:
    connections, call = MysqlConnections(MysqlLocation.of(server.url)), _Call()
    try:
        await asyncio.wrap_future(connections._threads.submit(connections._transact, _number, call))
        (kept,) = connections._wires
        call.give_up()
        await asyncio.to_thread(kept.ping, reconnect=False)
    finally:
        await asyncio.to_thread(connections.close)


def _number(session: MysqlSession) -> int:
    """The connection's own."""
    return int(session.rows("SELECT CONNECTION_ID()")[0][0])


async def _works_again(trying: Trial) -> None:
    """Its threads are free: those whose calls were given up, too."""
    for _ in range(100):
        try:
            await trying.store.check()
            await asyncio.gather(*(trying.store.check() for _ in range(4)))
            return
        except (StoreUnavailable, StoreUnknown):
            continue
    raise AssertionError("the store never worked again")
