"""Faults for real: processes are killed, stopped and drained under load, and every promise still holds.

Each test shows first that the fault hit something: messages were being put, and at least a hundred leases were out.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.machine import LEASE_MS, Machine, machine
from tests.servers.postgresql_pair import Pair, open_folder

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

PUTS = 20_000
OUT = 100


async def _under_load(made: Machine) -> None:
    """Returns when messages are being put and leases are out, in the middle of it."""
    for producer in made.producers.values():
        await producer.until(lambda told: told.get("put", 0) >= 3_000)
    for consumer in made.consumers.values():
        await consumer.until(lambda told: told.get("held", 0) >= OUT)
    assert not any("done" in producer.told for producer in made.producers.values())


async def _judge(made: Machine, fault: str) -> None:
    """Everything is settled, and the histories hold; the fault landed while leases were out and puts were coming."""
    await made.drained()
    await made.stop()
    verdict = await made.judge()
    assert verdict.holds, verdict.summary()
    assert verdict.counts["put"] >= PUTS
    assert verdict.counts["early"] == verdict.counts["lost"] == verdict.counts["doubled"] == 0
    events = made.history()
    # What a driver had in hand is told with each delivery, and was held to the consumer's credit.
    assert all("in_hand" in event.arguments for event in events if event.operation == "receive")
    assert sum("credit" in event.arguments for event in events if event.operation == "consume") >= 2
    landed = next(event for event in events if event.operation == "fault" and event.arguments["what"] == fault)
    assert made.leases_out(landed.invoked) >= OUT
    puts = [event for event in events if event.operation == "put"]
    assert any(event.invoked < landed.invoked for event in puts)
    assert any(event.returned > landed.invoked for event in puts)


async def test_broker_killed(tmp_path: Path) -> None:
    async with machine(tmp_path) as made:
        await _under_load(made)
        assert made.broker is not None
        made.note("crash", process="broker")
        made.broker.signal(signal.SIGKILL)
        assert await made.broker.wait() == -signal.SIGKILL
        await made.start_broker()
        await _judge(made, "crash")


@pytest.mark.prove
async def test_consumer_killed(tmp_path: Path) -> None:
    async with machine(tmp_path) as made:
        await _under_load(made)
        made.note("kill consumer", process="c1")
        made.consumers["c1"].signal(signal.SIGKILL)
        assert await made.consumers.pop("c1").wait() == -signal.SIGKILL
        await made.start_consumer("c3")
        await _judge(made, "kill consumer")
        assert (await made.judge()).counts["redelivered"] > 0, "the leases of the dead consumer came back"


@pytest.mark.prove
async def test_producer_killed(tmp_path: Path) -> None:
    async with machine(tmp_path) as made:
        await _under_load(made)
        made.note("kill producer", process="p1")
        made.producers["p1"].signal(signal.SIGKILL)
        assert await made.producers["p1"].wait() == -signal.SIGKILL
        await made.start_producer("p3")
        await _judge(made, "kill producer")


@pytest.mark.prove
async def test_consumer_stopped_past_its_lease(tmp_path: Path) -> None:
    async with machine(tmp_path) as made:
        await _under_load(made)
        made.note("stop consumer", process="c1")
        stopped = made.consumers["c1"]
        stopped.signal(signal.SIGSTOP)
        # Its leases run out and go to the other one: once that is seen, it goes on.
        other = made.consumers["c2"]
        await other.until(lambda told: told.get("again", 0) >= OUT)
        stopped.signal(signal.SIGCONT)
        made.note("continue consumer", process="c1", lease_ms=LEASE_MS)
        await _judge(made, "stop consumer")


@pytest.mark.prove
async def test_broker_drained(tmp_path: Path) -> None:
    async with machine(tmp_path) as made:
        await _under_load(made)
        assert made.broker is not None
        made.note("drain", process="broker")
        made.broker.signal(signal.SIGTERM)
        assert await made.broker.wait() == 0
        await made.start_broker()
        await _judge(made, "drain")


@pytest.mark.servers
@pytest.mark.prove
async def test_primary_of_the_store_killed(tmp_path: Path, require_service: Callable[[str], None]) -> None:
    """Its standby is promoted, and broker, producers and consumers go on as they are. It dies with commits that wait
    for the standby: they happen, and nobody hears so."""
    require_service("postgresql")
    with open_folder() as folder:
        pair = Pair(folder)
        try:
            pair.start()
            async with machine(tmp_path, pair.url) as made:
                await _under_load(made)
                made.note("primary killed", process="store")
                await pair.kill_amid_commits()
                await pair.promote()
                made.note("start", process="store")
                await _judge(made, "primary killed")
        finally:
            pair.stop()
