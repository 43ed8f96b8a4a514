"""The plans that a server makes of our statements, as it runs them: what they read is what they need, whatever it
believes of the tables' sizes."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.servers.postgresql import PostgresqlServer
from tests.services import require_service
from timeline.model import Operation, Topic
from timeline.storage_plugins import make_store
from timeline.storage_plugins.conformance.trial import T0, Trial, named
from timeline.storage_plugins.contract import Grant
from timeline.storage_plugins.postgresql.store import WHOLE_EVERY_MS

pytestmark = pytest.mark.servers

ROWS = 100_000
BATCH = 300
GONE_BATCHES, GONE_AT_ONCE = 20, 1_000
MOST_READ = 4 * BATCH
"""Rows that a node may come by, over all its loops: some times what a call is about, nothing that grows with ROWS."""
TABLES = {"message", "payload", "remembered"}
_PLAN = re.compile(r"plan:\n((?:\t.*\n)+)")
_FILL = """
INSERT INTO {schema}.message (row, topic, bucket, id, birth, due_ms, scheduled_ms, put_ms, asked_ms, expires_ms,
  payload_sum, payload_bytes, headers_bytes, grp, tag)
SELECT -n, key, n % 64, convert_to('other-' || n, 'UTF8'), n, $1::int8 + 60000 + n * 1000, $1, $1, $1, 0, 0, 7, 0,
  'default', ''
FROM generate_series(1, $2::int8) AS n, {schema}.topic
"""


@pytest.fixture(scope="module")
def told() -> Iterator[PostgresqlServer]:
    """A server that logs each plan with what it came by, and looks at no table by itself."""
    require_service("postgresql")
    folder = Path(tempfile.mkdtemp(prefix="timeline-"))
    folder.chmod(0o711)
    explain = ("log_min_duration=0", "log_format=json", "log_analyze=on", "log_timing=off", "log_buffers=on")
    server = PostgresqlServer(
        folder / "postgresql",
        "shared_preload_libraries=auto_explain",
        "autovacuum=off",
        *(f"auto_explain.{setting}" for setting in explain),
    )
    try:
        yield server.start()
    finally:
        server.stop()
        shutil.rmtree(folder)


async def _ask(server: PostgresqlServer, statement: str, *values: Any) -> None:
    connection = await asyncpg.connect(server.url)
    try:
        await connection.execute(statement, *values)
    finally:
        await connection.close()


async def _every_call(trial: Trial, topic: Topic, name: str) -> None:
    """A batch through every call that is asked often."""
    ids = named(2 * BATCH, name)
    await trial.stored(topic, ids[:BATCH], tag=b"spring")
    await trial.stored(topic, ids[BATCH:], T0 + 30_000)
    await trial.put(topic, ids[:BATCH])
    leased = (await trial.lease(topic, BATCH)).rows
    assert len(leased) == BATCH
    for operation, time_ms in ((Operation.EXTEND, T0 + 50_000), (Operation.RELEASE, T0)):
        assert not (await trial.settle(topic, operation, leased, time_ms=time_ms)).status.any()
    both = [Grant(b"worker-%d" % at, BATCH, 30_000, 1 << 40) for at in range(2)]
    leased = (await trial.lease(topic, grants=both)).rows
    assert len(leased) == BATCH
    assert len((await trial.store.held_by(topic, T0, b"worker-0", b"", BATCH)).rows)
    assert not (await trial.settle(topic, Operation.ACK, leased)).status.any()
    assert (await trial.settle(topic, Operation.ACK, leased)).status.all()
    assert not (await trial.mutate(topic, Operation.MOVE, ids[BATCH:], T0 + 40_000)).status.any()
    assert not (await trial.mutate(topic, Operation.CANCEL, ids[BATCH:])).status.any()
    await trial.stored(topic, named(2 * BATCH, f"{name} tagged"), T0 + 5_000, tag=b"autumn", expires_ms=T0 + 6_000)
    assert sum((await trial.by_tag(topic, Operation.MOVE, b"autumn", by_ms=10, limit=BATCH)).values()) == 2 * BATCH
    assert not len((await trial.lease(topic, BATCH, now_ms=T0 + 7_000)).rows)
    await trial.stored(topic, named(2 * BATCH, f"{name} cancelled"), T0 + 5_000, tag=b"winter")
    for dry_run in (True, False):
        counts = await trial.by_tag(topic, Operation.CANCEL, b"winter", dry_run=dry_run, limit=BATCH)
        assert sum(counts.values()) == 2 * BATCH
    await trial.store.sweep(topic, T0 + 7_000, BATCH)
    await trial.store.next_due(topic, [1, 2, 3], 0)
    await trial.store.next_dues()


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for below in plan.get("Plans", ()):
        yield from _nodes(below)


def _excesses(log: str) -> list[str]:
    """Nodes of the logged plans that come by too much."""
    found = []
    for text in _PLAN.findall(log):
        told = json.loads(text)
        if "typeinfo_tree" in told["Query Text"]:  # asyncpg asks what arrays hold, once per connection
            continue
        for node in _nodes(told["Plan"]):
            removed = sum(count for name, count in node.items() if name.startswith("Rows Removed"))
            came_by = (node["Actual Rows"] + removed) * node["Actual Loops"]
            table = node.get("Relation Name")
            if came_by > MOST_READ or (node["Node Type"] == "Seq Scan" and table in TABLES):
                read = f"{node['Node Type']} {node.get('Index Name', '')} {node.get('Index Cond', '')}"
                what = f"{read} came by {came_by:,}"
                found.append(f"{what} in {' '.join(told['Query Text'].split())[:300]}")
    return found


def _plans_of(server: PostgresqlServer, before: int) -> str:
    log = server.log.read_text(encoding="utf-8")[before:]
    assert log.count("Query Text") > 30, "the server logged no plans"
    return log


@pytest.mark.parametrize("remember_ms", [0, pytest.param(60_000, marks=pytest.mark.prove)])
async def test_statistics_that_are_absent(told: PostgresqlServer, remember_ms: int) -> None:
    """Nobody has looked at the tables yet, or long ago, when they were empty and the plans were made; then they have
    been looked at."""
    name = f"plans_{remember_ms}"
    async with Trial(lambda: make_store(f"{told.url}?schema={name}&timeout_ms=60000&pool=2")) as trial:
        topic = await trial.topic(remember_ms=remember_ms)
        await _ask(told, f"VACUUM ANALYZE {name}.message, {name}.payload, {name}.remembered")
        await _every_call(trial, topic, "empty")
        await _ask(told, _FILL.format(schema=name), T0, ROWS)
        for state in ("looked at when empty", "looked at", "not looked at"):
            if state == "looked at":
                await _ask(told, f"ANALYZE {name}.message, {name}.payload, {name}.remembered")
            if state == "not looked at":
                await _ask(told, f"DELETE FROM pg_statistic WHERE starelid = '{name}.message'::regclass")
                await trial.reopen()
            before = len(told.log.read_text(encoding="utf-8"))
            await _every_call(trial, topic, state)
            assert not _excesses(_plans_of(told, before)), state


async def test_what_is_gone_is_not_read_again_with_each_lease(told: PostgresqlServer) -> None:
    """Nobody has vacuumed: what was leased and acknowledged is in the indexes still, and passed once a second."""
    async with Trial(lambda: make_store(f"{told.url}?schema=gone&timeout_ms=60000&pool=2")) as trial:
        topic = await trial.topic()

        async def cycle(count: int, now_ms: int) -> int:
            await trial.stored(topic, named(count, f"at {now_ms}"), now_ms, now_ms=now_ms)
            before = told.log.stat().st_size
            leased = (await trial.lease(topic, count, now_ms=now_ms)).rows
            assert len(leased) == count
            assert not (await trial.settle(topic, Operation.ACK, leased, now_ms=now_ms)).status.any()
            return _blocks_of_leases(told.log.read_bytes()[before:].decode())

        for at in range(GONE_BATCHES):
            await cycle(GONE_AT_ONCE, T0 + 300 * at)
        after_ms = T0 + 300 * GONE_BATCHES + WHOLE_EVERY_MS
        whole, *others = [await cycle(1, after_ms + 100 * at) for at in range(10)]
        assert len(others) == 9 and max(others) * 5 < whole, (whole, others)


def _blocks_of_leases(log: str) -> int:
    """Blocks that the logged leases looked at."""
    told = [json.loads(text) for text in _PLAN.findall(log)]
    plans = [one["Plan"] for one in told if "dealt AS MATERIALIZED" in one["Query Text"]]
    assert plans, "the server logged no lease"
    return sum(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] for plan in plans)
