"""Tag operations of `postgresql://`: a chunk by one statement, which decides on what it meets as it then stands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from tests.servers.fixture import Running
from tests.servers.postgresql import PostgresqlServer
from timeline.model import Operation, Status
from timeline.storage_plugins import make_store
from timeline.storage_plugins.conformance.trial import T0, Trial, named, statuses
from timeline.storage_plugins.contract import StoreUnknown
from timeline.storage_plugins.postgresql import dialect
from timeline.storage_plugins.postgresql.connections import PostgresqlConnection
from timeline.storage_plugins.postgresql.statements import STATEMENTS
from timeline.storage_plugins.sql import changes
from timeline.storage_plugins.sql.statements import Plan, Statement

pytestmark = pytest.mark.servers


@pytest.fixture
async def trial(servers: Running) -> AsyncIterator[Trial]:
    url = servers.url(PostgresqlServer)
    async with Trial(lambda: make_store(url)) as opened:
        yield opened


async def test_only_what_something_may_refuse_is_left_to_the_rules(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await trial.topic()
    await trial.stored(topic, named(10, "leased"), tag=b"spring")
    await trial.lease(topic)
    await trial.stored(topic, named(10, "plain"), T0 + 60_000, tag=b"spring")
    await trial.stored(topic, named(10, "theirs"), T0 + 60_000, tag=b"spring", group=b"ops")
    await trial.stored(topic, named(10, "short"), T0 + 60_000, tag=b"spring", expires_ms=T0 + 90_000)
    await trial.stored(topic, named(10, "later"), T0 + 60_000, tag=b"spring", now_ms=T0 + 1)
    await trial.stored(topic, named(10, "ran out"), T0, tag=b"spring")
    await trial.lease(topic, lease_ms=1)
    left: list[bytes] = []
    decide_others = dialect.decide_others

    def noted(*asked: Any) -> Plan[None]:
        left.extend(asked[2])
        return decide_others(*asked)

    monkeypatch.setattr(dialect, "decide_others", noted)
    refused = sorted(named(10, "leased") + named(10, "theirs") + named(10, "short"))
    shift: dict[str, Any] = {"by_ms": 30_000, "now_ms": T0 + 1, "started_ms": T0, "limit": 1_000}
    wanted = {Status.OK: 20, Status.LEASED: 10, Status.FORBIDDEN: 10, Status.INVALID: 10}
    assert await trial.by_tag(topic, Operation.MOVE, b"spring", dry_run=True, **shift) == wanted
    assert await trial.by_tag(topic, Operation.MOVE, b"spring", op=7, **shift) == wanted
    assert sorted(left) == sorted(refused * 2)
    left.clear()
    assert await trial.by_tag(topic, Operation.MOVE, b"spring", op=7, **shift) == wanted
    assert sorted(left) == sorted(refused + named(10, "plain") + named(10, "ran out")), "its repeat is for the rules"
    rows = await trial.everything(topic)
    moved = {id for id, row in rows.items() if row["due_ms"] in (T0 + 90_000, T0 + 30_000) and not row["holders"]}
    assert moved == {*named(10, "plain"), *named(10, "ran out")}
    left.clear()
    gone = {Status.OK: 40, Status.FORBIDDEN: 10}
    assert await trial.by_tag(topic, Operation.CANCEL, b"spring", leased=True, **{**shift, "by_ms": 0}) == gone
    assert sorted(left) == named(10, "theirs")
    assert sorted(await trial.everything(topic)) == named(10, "later") + named(10, "theirs")


async def test_a_cancel_leaves_what_the_topic_remembers(trial: Trial) -> None:
    topic = await trial.topic(remember_ms=60_000)
    puts = trial.puts(named(50), T0 + 60_000, tag=b"spring")
    await trial.store.put(topic, T0, puts)
    op = (1 << 64) - 2
    assert await trial.by_tag(topic, Operation.CANCEL, b"spring", op=op) == {Status.OK: 50}
    assert not await trial.everything(topic)
    again = await trial.mutate(topic, Operation.CANCEL, named(50), op=op)
    assert again.repeat.all() and again.settled.all()
    assert (await trial.store.put(topic, T0, puts)).settled.all()


async def test_what_somebody_else_changes_meanwhile_is_decided_as_it_then_stands(
    trial: Trial, servers: Running
) -> None:
    """The statement waits for the one who has a message locked, and does not go by what it saw before that."""
    topic = await trial.topic()
    await trial.stored(topic, [b"cancelled", b"leased", b"moved"], T0 + 60_000, tag=b"spring")
    somebody, watching = [await asyncpg.connect(servers.url(PostgresqlServer)) for _ in range(2)]
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%done AS%'"
    try:
        await somebody.execute("BEGIN")
        changed = "UPDATE timeline.message SET version = version + 1, {} WHERE id = '{}' AND tag = 'spring'"
        await somebody.execute(changed.format("holder = 'w', due_ms = due_ms + 1", "leased"))
        await somebody.execute(changed.format("scheduled_ms = scheduled_ms + 1", "moved"))
        walk = asyncio.create_task(trial.by_tag(topic, Operation.CANCEL, b"spring"))
        while not walk.done() and not await watching.fetchval(waits):
            await asyncio.sleep(0)
        await somebody.execute("COMMIT")
        assert await walk == {Status.OK: 2, Status.LEASED: 1}
        assert list(await trial.everything(topic)) == [b"leased"]
    finally:
        for connection in (somebody, watching):
            await connection.close()


async def test_a_chunk_that_loses_every_race_for_a_message_is_in_doubt(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, races = await trial.topic(), [b"b"]
    await trial.stored(topic, [b"a"], T0 + 60_000, tag=b"spring")
    await trial.stored(topic, [b"b"], T0 + 60_000, tag=b"spring", expires_ms=T0 + 90_000)
    answer = PostgresqlConnection.answer

    async def outrun(connection: PostgresqlConnection, asked: Statement) -> Any:
        while races and asked.text in STATEMENTS.change.values():
            assert statuses(await trial.mutate(topic, Operation.MOVE, [races.pop()], T0 + 70_000)) == [Status.OK]
        return await answer(connection, asked)

    monkeypatch.setattr(PostgresqlConnection, "answer", outrun)
    monkeypatch.setattr(changes, "MOST_LOST", 1)
    with pytest.raises(StoreUnknown, match="changed a message"):
        await trial.by_tag(topic, Operation.CANCEL, b"spring", now_ms=T0 + 95_000)
    assert list(await trial.everything(topic)) == [b"b"]
    assert await trial.by_tag(topic, Operation.CANCEL, b"spring", now_ms=T0 + 95_000) == {Status.EXPIRED: 1}
