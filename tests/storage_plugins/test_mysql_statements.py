"""How the statements are carried out, as the server itself tells it: few for a batch, each along its index."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.servers.fixture import Running
from tests.servers.mysql import MysqlServer
from tests.storage_plugins.mysql_calls import database_of, other, run, setting, trial
from timeline.model import Operation, State
from timeline.storage_plugins.conformance.trial import T0, named
from timeline.storage_plugins.contract import Grant, ScanFilter

pytestmark = pytest.mark.servers

HOUR_MS = 3_600_000
COUNT = 1_000


@pytest.fixture
def server(servers: Running) -> MysqlServer:
    return servers.server(MysqlServer)


class Heard:
    """What reached the server while it listened, exchange by exchange."""

    def __init__(self) -> None:
        self.exchanges: list[str] = []

    @property
    def statements(self) -> list[str]:
        """Each by itself: no value of these tests has a semicolon."""
        return [statement for text in self.exchanges for statement in text.split(";")]


@contextmanager
def listening(server: MysqlServer, url: str) -> Iterator[Heard]:
    """What the store says meanwhile; what opens a connection and what other databases hear is left out."""
    heard = Heard()
    with setting(server, "log_output", "'TABLE'"), other(url) as root:
        run(root, "TRUNCATE mysql.general_log", "SET GLOBAL general_log = ON")
        try:
            yield heard
        finally:
            run(root, "SET GLOBAL general_log = OFF")
        said = run(root, "SELECT CONVERT(argument USING utf8mb4) FROM mysql.general_log WHERE command_type = 'Query'")
        plain = ("SET ", "TRUNCATE", "SELECT @@GLOBAL", "ROLLBACK")
        heard.exchanges = [text for (text,) in said if not text.startswith(plain)]


async def test_a_batch_takes_few_exchanges(server: MysqlServer) -> None:
    url = server.url
    async with trial(url) as trying:
        made = await trying.topic()
        await trying.stored(made, [b"before"])
        for call, most in (("put", 2), ("lease", 3), ("idle", 2), ("extend", 2), ("ack", 2), ("move", 2)):
            with listening(server, url) as heard:
                if call == "put":
                    await trying.stored(made, named(COUNT))
                elif call == "lease":
                    leased = await trying.lease(made)
                elif call == "idle":
                    assert not len((await trying.lease(made)).rows)
                elif call == "move":
                    await trying.mutate(made, Operation.MOVE, named(COUNT), due_ms=T0 + HOUR_MS)
                else:
                    operation = Operation.EXTEND if call == "extend" else Operation.ACK
                    part = leased.rows.slice(0, COUNT)
                    answers = await trying.settle(made, operation, part, time_ms=T0 + HOUR_MS)
                    assert not answers.status.any()
            assert len(heard.exchanges) <= most, [text[:80] for text in heard.exchanges]


async def test_a_check_writes_another_value_each_time(server: MysqlServer) -> None:
    """The value comes from here. MariaDB has no RANDOM_BYTES before 10.10."""
    url = server.url
    async with trial(url) as trying:
        with listening(server, url) as heard:
            await trying.store.check()
            await trying.store.check()
    written = [text for text in heard.statements if "'probe'" in text]
    assert len(written) == len(set(written)) == 2
    assert all(
        re.fullmatch(r"REPLACE INTO meta .* VALUES \('probe', '[0-9a-f]{16}'\)", text.strip()) for text in written
    )


async def test_many_consumers_are_one_statement(server: MysqlServer) -> None:
    url = server.url
    async with trial(url) as trying:
        made = await trying.topic()
        await trying.stored(made, named(COUNT))
        grants = [Grant(b"c%d" % number, 10, 30_000, 1 << 20) for number in range(100)]
        with listening(server, url) as heard:
            leased = await trying.lease(made, grants=grants)
        assert len(leased.rows) == COUNT and len(set(leased.rows.holders.tolist())) == 100
        assert sum(text.startswith("UPDATE") for text in heard.statements) == 1


def _plan(connection: object, statement: str) -> list[tuple[str, str | None, int]]:
    """Table, index and rows believed, of each step."""
    steps = run(connection, f"EXPLAIN {statement}")
    return [(str(step[2]), step[5], int(step[8] or 0)) for step in steps]


async def test_hot_statements_go_along_their_indexes(server: MysqlServer) -> None:
    """What they walk is an index, never the table; lookups by id are believed to look at few of the 4,000."""
    url = server.url
    async with trial(url) as trying:
        made = await trying.topic(remember_ms=HOUR_MS)
        await trying.stored(made, named(4_000), T0 + HOUR_MS, tag=b"spring")
        await trying.stored(made, named(50, "due"), tag=b"summer", expires_ms=T0 + 2 * HOUR_MS)
        server.sql(f"ANALYZE TABLE {database_of(url)}.message")
        with listening(server, url) as heard:
            leased = await trying.lease(made, 20, buckets=range(32))
            await trying.settle(made, Operation.EXTEND, leased.rows, time_ms=T0 + HOUR_MS)
            await trying.settle(made, Operation.ACK, leased.rows)
            await trying.mutate(made, Operation.MOVE, named(20), due_ms=T0 + 2 * HOUR_MS)
            await trying.mutate(made, Operation.CANCEL, named(20))
            await trying.stored(made, named(20, "new"))
            await trying.store.scan(made, T0, ScanFilter(tag=b"summer"), b"", 100, True)
            await trying.store.scan(made, T0, ScanFilter(), b"", 100, True)
            await trying.store.held_by(made, T0, b"worker-1", b"", 100)
            await trying.store.next_due(made, None, 0)
            await trying.store.sweep(made, T0 + 3 * HOUR_MS, 100)
        explained = 0
        with other(url) as somebody:
            for statement in heard.statements:
                if not re.match("SELECT|UPDATE|DELETE", statement) or "message" not in statement:
                    continue
                plan = _plan(somebody, statement)
                confirmed = [index for table, index, rows in plan if table == "topic" and rows == 1]
                assert ("EXISTS (SELECT 1 FROM topic" in statement) == (confirmed == ["PRIMARY"]), (statement, plan)
                steps = [step for step in plan if step[0] in ("m", "w", "e", "t", "message")]
                most = 2_000 if " IN (" in statement and " LIMIT " not in statement else 1 << 40
                assert all(index is not None and rows <= most for _, index, rows in steps), (statement[:200], steps)
                explained += len(steps)
        assert explained >= 15


async def test_a_scan_of_dead_letters_is_bounded_by_the_rows_that_it_looks_at(server: MysqlServer) -> None:
    """They have no index in the order of the walk, which is over all messages."""
    url = server.url
    every, dead = frozenset(State), frozenset((State.DEAD,))
    async with trial(url) as trying:
        made = await trying.topic()
        await trying.stored(made, named(20))
        for states, bounded in ((dead, True), (every, False)):
            with listening(server, url) as heard:
                await trying.store.scan(made, T0, ScanFilter(states=states), b"", 5, False)
            assert any("OFFSET" in statement for statement in heard.statements) is bounded, heard.statements


async def test_a_lease_reads_no_more_than_it_answers(server: MysqlServer) -> None:
    """After many were acknowledged: the server's own count of rows read along indexes."""
    url = server.url
    async with trial(url) as trying:
        made = await trying.topic()
        await trying.stored(made, named(4_000), T0 + HOUR_MS)
        for number in range(5):
            await trying.stored(made, named(COUNT, f"old{number}"))
            leased = await trying.lease(made)
            await trying.settle(made, Operation.ACK, leased.rows)
        await trying.stored(made, named(50, "due"))
        counts = (
            f"SELECT SUM(rows_read) FROM information_schema.table_statistics WHERE table_schema = '{database_of(url)}'"
        )
        with setting(server, "userstat", "1"):
            server.sql("FLUSH TABLE_STATISTICS")
            leased = await trying.lease(made)
            await trying.store.check()  # the statistics of a connection are told when its next statement ends
            read = int(server.sql(counts).strip() or 0)
        assert len(leased.rows) == 50 and 50 <= read <= 400, read
