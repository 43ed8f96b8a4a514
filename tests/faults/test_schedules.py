"""Recurring schedules while brokers are killed and the store ends: each occurrence is produced once, at its time. An
oracle, which walks the rules plainly, judges consumers' ledgers. Each fault shows first that it hit something."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import timeline
from tests.faults.cluster import ClusterMachine
from tests.faults.machine import CLOCK_BOUND_MS, PATIENCE_S, Machine
from tests.faults.recurring import Expected, crowd_of, expected, judged, received_ids
from tests.faults.worker import TOPIC
from tests.servers.etcd import EtcdServer
from tests.servers.fixture import Running
from tests.servers.postgresql import PostgresqlServer
from timeline.history import Event, read_history
from timeline.model import State
from timeline.schedules import Specification
from timeline.schedules.record import SCHEDULES_TOPIC
from timeline.storage_plugins import make_store
from timeline.storage_plugins.conformance.trial import walked
from timeline.storage_plugins.contract import ScanFilter

pytestmark = [pytest.mark.processes, pytest.mark.slow]

CREATED_AT_ONCE = 16
FEW_FAULTS = 3
"""So few may find no occurrence in a consumer's hands."""
START_MS = 25_000
"""For a broker to start again while schedules are made. On a busy machine that took 12 s."""
MS_EACH = 60
"""For each schedule to make, before the first of their occurrences."""


class Recurring:
    """A crowd of schedules at the brokers of a machine, two consumers, and the oracle."""

    def __init__(self, made: Machine, schedules: int, occurrences: int) -> None:
        self.made, self.schedules, self.total = made, schedules, schedules * occurrences
        self.occurrences = occurrences
        self.wanted: dict[str, Expected] = {}
        """All that must come, by the oracle."""
        self.hit: list[tuple[str, int, int]] = []
        """Of each fault, how many looks at schedules it cut off, and how many occurrences were in consumers' hands."""

    async def begin(self) -> None:
        """A topic and two consumers."""
        await self.made.create_topic(remember="2h")
        for name in ("c1", "c2"):
            child = await self.made.start_worker("", name, module="tests.faults.recurring")
            self.made.consumers[name] = child

    async def create(self) -> None:
        """Makes the schedules, whatever happens to brokers meanwhile."""
        room = asyncio.Semaphore(CREATED_AT_ONCE)
        async with timeline.connect(self.made.address, timeout="100s") as client, asyncio.TaskGroup() as group:

            async def create(said: Specification) -> None:
                async with room:
                    made = await client.create_schedule(said)
                self.wanted.update(expected(said, made.state.created_ms))

            begin_ms = self.made.faults.clock.now_ms() + START_MS + MS_EACH * self.schedules
            for said in crowd_of(self.schedules, self.occurrences, begin_ms):
                group.create_task(create(said))

    async def looked_at(self) -> None:
        """Returns while a broker looks at a schedule."""
        async with asyncio.timeout(PATIENCE_S), timeline.connect(self.made.address, timeout="30s") as client:
            while True:
                with suppress(timeline.NotFound, timeline.Unavailable):
                    if [one async for one in client.scan(SCHEDULES_TOPIC, state="leased", limit=1)]:
                        return

    async def note_leases(self, fault: str) -> None:
        """Notes what is under lease in the store, of schedules and of occurrences, now that the fault is there."""
        store = make_store(self.made.store)
        await store.open()
        try:
            now_ms, counts = self.made.faults.clock.now_ms(), {SCHEDULES_TOPIC: 0, TOPIC: 0}
            where = ScanFilter(frozenset({State.LEASED}))
            for topic in await store.topics():
                walk = partial(store.scan, topic, now_ms, where, limit=1_000, payload=False)
                counts[topic.name] = sum([len(page.rows) async for page in walked(walk)])
        finally:
            await store.close()
        self.hit.append((fault, counts[SCHEDULES_TOPIC], counts[TOPIC]))
        assert self.received < self.total, f"all was over when this came: {fault}"

    @property
    def received(self) -> int:
        return sum(child.told.get("received", 0) for child in self.made.consumers.values())

    async def until_received(self, share: float) -> None:
        """Returns once consumers have received this share of all occurrences."""
        while self.received < share * self.total:
            await self.news()

    async def news(self) -> None:
        """Returns when a consumer tells something."""
        for child in self.made.consumers.values():
            child.news.clear()
        async with asyncio.timeout(PATIENCE_S):
            await self.made.news()

    async def all_came(self) -> None:
        """Returns once all was received."""
        ids = set(self.wanted)
        await self.until_received(len(ids) / self.total)
        while True:
            for child in self.made.consumers.values():
                child.news.clear()
            missing = ids - received_ids(read_history(self.made.folder.glob("c?.*.jsonl")))
            if not missing:
                return
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self.made.news()
            except TimeoutError:
                pytest.fail(f"{len(missing)} of {len(ids)} never came, as {min(missing)}; hit: {self.hit}")

    async def over(self) -> None:
        """Returns once every schedule has ended and nothing is left to come. They counted what they produced."""
        async with timeline.connect(self.made.address, timeout="100s") as client, client.consumer("ticks") as ticks:
            while True:
                found = [one async for one in client.schedules(TOPIC)]
                left = [one async for one in client.scan(TOPIC, limit=1)]
                ended = [one.state for one in found if one.status == "ended"]
                if not left and len(ended) == self.schedules:
                    break
                async with asyncio.timeout(PATIENCE_S), client.producer("ticks") as producer:
                    await producer.produce(b"", in_="200ms")
                    tick = await ticks.take()
                    assert tick is not None
                    await tick.ack()
        assert sum(one.produced + one.caught_up for one in ended) == len(self.wanted)
        assert not any(one.missed or one.skipped or one.failed for one in ended)

    async def judge(self) -> None:
        """Everything came, as the rules say, and each fault hit something."""
        assert len(self.wanted) >= 0.9 * self.total, "a schedule that is made after its start has the fewer"
        await self.all_came()
        await self.over()
        await self.made.stop()
        wrong = judged(self.wanted, read_history(self.made.folder.glob("c?.*.jsonl")), CLOCK_BOUND_MS)
        print("", f"{len(self.wanted)} occurrences", *self.hit, sep="\n")
        assert not wrong, wrong
        assert sum(looks for _, looks, _ in self.hit) > 0
        if len(self.hit) > FEW_FAULTS:
            assert sum(held for _, _, held in self.hit) > 0
            assert sum(child.told.get("again", 0) for child in self.made.consumers.values()) > 0


def _received(**changed: Any) -> Event:
    got = {"id": "s@1", "birth": 1, "due_ms": 1_000, "scheduled_ms": 1_000, "deliveries": 1, "payload": "1 then"}
    wall_ms = changed.pop("wall_ms", 1_000.0)
    return Event("c1", "receive", got | changed, 0.0, 0.0, wall_ms)


@pytest.mark.parametrize(
    ("events", "wrong"),
    [
        ([_received(), _received(deliveries=2, due_ms=9_000, wall_ms=9_000.0)], None),
        ([], "never came"),
        ([_received(), _received(id="s@2")], "nobody asked for it"),
        ([_received(), _received(birth=2)], "produced more than once"),
        ([_received(wall_ms=999.0)], "early"),
        ([_received(scheduled_ms=1_051)], "due at another time"),
        ([_received(payload="2 then")], "another payload"),
    ],
)
def test_the_ledger_finds_what_is_wrong(events: list[Event], wrong: str | None) -> None:
    found = judged({"s@1": Expected(1_000, 50, b"1 then")}, events, CLOCK_BOUND_MS)
    assert [kind.partition(",")[0] for kind in found] == ([wrong] if wrong else [])


class Killing(Recurring):
    """On SQLite, with one broker: its end is the store's, too."""

    async def kill(self) -> None:
        """kill -9 in the middle of a look, and a new start."""
        await self.looked_at()
        broker = self.made.broker
        assert broker is not None
        self.made.note("crash", process="broker")
        broker.signal(signal.SIGKILL)
        assert await broker.wait() == -signal.SIGKILL
        await self.note_leases("crash")
        await self.made.start_broker()

    async def drain(self) -> None:
        broker = self.made.broker
        assert broker is not None
        self.made.note("drain", process="broker")
        broker.signal(signal.SIGTERM)
        assert await broker.wait() == 0
        await self.note_leases("drain")
        await self.made.start_broker()


async def _on_sqlite(folder: Path, schedules: int, occurrences: int, faults: int) -> None:
    async with Machine(folder) as made:
        await made.start_broker()
        run = Killing(made, schedules, occurrences)
        await run.begin()
        creating = asyncio.create_task(run.create())
        await run.kill()
        await creating
        for number in range(faults):
            await run.until_received((number + 0.5) / faults * 0.9)
            await (run.drain() if number % 4 == 3 else run.kill())
        await run.judge()


@pytest.mark.prove
@pytest.mark.timeout(300)
async def test_no_occurrence_is_lost_or_doubled_by_kills_of_the_broker(tmp_path: Path) -> None:
    await _on_sqlite(tmp_path, schedules=80, occurrences=12, faults=2)


@pytest.mark.prove
@pytest.mark.timeout(1_200)
async def test_a_hundred_thousand_occurrences_through_kills_of_the_broker(tmp_path: Path) -> None:
    await _on_sqlite(tmp_path, schedules=1_000, occurrences=100, faults=8)


@pytest.mark.servers
@pytest.mark.prove
@pytest.mark.timeout(1_200)
async def test_a_hundred_thousand_occurrences_through_kills_of_brokers_and_store(
    servers: Running, tmp_path: Path
) -> None:
    await _on_postgresql(servers, tmp_path, schedules=1_000, occurrences=100)


async def _on_postgresql(servers: Running, folder: Path, schedules: int, occurrences: int) -> None:
    postgresql = servers.server(PostgresqlServer)
    store, sync = f"{postgresql.url}?schema=recurring", f"{servers.url(EtcdServer)}/recurring"
    async with ClusterMachine(folder, store, sync, brokers=2) as made:
        await made.start_all()
        run = Recurring(made, schedules, occurrences)

        async def kill(*names: str) -> None:
            await run.looked_at()
            await made.kill(*names)
            await run.note_leases(f"crash of {', '.join(names)}")
            for name in names:
                await made.start_named(name)

        async def restart(fault: str) -> None:
            await run.looked_at()
            made.note(fault, process="store")
            await asyncio.to_thread(postgresql.kill if fault == "kill" else postgresql.stop)
            await asyncio.to_thread(postgresql.start)
            made.note("start", process="store")
            await run.note_leases(f"{fault} of the store")

        await run.begin()
        creating = asyncio.create_task(run.create())
        await kill("b1")
        await creating
        steps = [("b2",), "kill", ("b1", "b2"), "stop", ("b1",), ("b2",), "kill", ("b1", "b2")]
        for number, step in enumerate(steps):
            await run.until_received((number + 0.5) / len(steps) * 0.9)
            await (restart(step) if isinstance(step, str) else kill(*step))
        await run.judge()
