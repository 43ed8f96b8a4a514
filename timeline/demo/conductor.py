"""The conductor: plays one day from the first process to the summary."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import timeline
from timeline.clock import Clock
from timeline.demo.flights import DEFAULT_DAY, Flight, flights_of
from timeline.demo.picture import DayPicture
from timeline.demo.plan import (
    DEFAULT_SPEED,
    GATES,
    HISTORY_SUFFIX,
    LEASE_MS,
    PLAN,
    TOPIC,
    DayPlan,
    check_speed,
    gate_name,
    make_plan,
)
from timeline.demo.processes import CannotPlay, DemoChild, DemoProcesses
from timeline.demo.servers import ETCD, REDIS, missing, start_etcd, start_redis
from timeline.demo.summary import Summary, summarize
from timeline.history import read_history
from timeline.model import encode_headers, payload_sum

TICK_S = 0.1
OVERTIME_MS = 20_000
"""How long after the last due the day may still go on before what is missing counts as lost."""
AGAIN_S = 1.0
"""How long a crashed gate stays away."""
SCANNED = ("id", "birth", "version", "due_ms", "scheduled_ms", "deliveries", "group", "expires_ms", "died_ms")
"""What the checker wants to know of a message that is still there, besides."""
BROKERS = 2
"""Of a cluster; the last of them is killed when half of the departures are out."""
REMEMBER = "1h"
"""A cluster's topic remembers what was settled: whatever a driver had asked of the broker that dies, and asks again of
the other, is answered for certain."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What a person asks of a demo. `store`: a URL, empty for an SQLite file of its own, or a Redis of its own where
    `cluster` asks for two brokers over three members of etcd. `keep`: leave the folder with histories, logs and store
    behind."""

    day: dt.date = DEFAULT_DAY
    speed: float = DEFAULT_SPEED
    data: str | None = None
    store: str = ""
    keep: bool = False
    cluster: bool = False


class Viewer(Protocol):
    """Who watches: a board, or somebody who prints lines."""

    def watch(self, picture: DayPicture, now_ms: float) -> None:
        """Called about ten times a second while the day goes by."""

    def say(self, text: str) -> None:
        """Something worth a line before or after the day."""


@dataclass(frozen=True, slots=True)
class Played:
    """A day that has been played, and where its files are (None: gone)."""

    summary: Summary
    plan: DayPlan
    folder: Path | None
    killed: str = ""
    """The broker that was, in a cluster."""


async def conduct(options: DemoOptions, viewer: Viewer) -> Played:
    """Plays a day and judges it; every process has ended when it returns or raises. Raises Invalid for a day, file or
    speed that cannot be played, CannotPlay when a process cannot be started or a broker dies unasked."""
    check_speed(options.speed)
    if options.cluster and (absent := missing(*([ETCD] if options.store else [ETCD, REDIS]))):
        raise CannotPlay(absent)
    flights = flights_of(options.day, options.data)
    this = asyncio.current_task()
    assert this is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Whoever ends the demo, or closes its terminal, ends all of its processes too.
        asyncio.get_running_loop().add_signal_handler(number, this.cancel)
    with _folder(options.keep) as folder:
        processes = DemoProcesses(folder)
        conductor = Conductor(options, flights, folder, processes, viewer)
        try:
            summary, plan = await conductor.play()
        finally:
            await processes.kill()
        killed = conductor.killed.name if conductor.killed is not None else ""
        return Played(summary, plan, folder if options.keep else None, killed)


@contextlib.contextmanager
def _folder(keep: bool) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="timeline-demo-"))
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder)


class Conductor:
    """One day on its way."""

    def __init__(
        self, options: DemoOptions, flights: list[Flight], folder: Path, processes: DemoProcesses, viewer: Viewer
    ) -> None:
        self.options = options
        self.flights = flights
        self.folder = folder
        self.processes = processes
        self.viewer = viewer
        self.clock = Clock()
        self.troubles: list[str] = []
        self.brokers: list[DemoChild] = []
        self.killed: DemoChild | None = None
        self.lives = [1] * GATES
        self.gates: list[DemoChild | None] = [None] * GATES
        self.returning: set[asyncio.Task[None]] = set()

    async def play(self) -> tuple[Summary, DayPlan]:
        """The whole day; what it came to."""
        address = await (self._cluster() if self.options.cluster else self._broker())
        # In a store that somebody else may use, a topic of our own; it goes when the day is over.
        topic = TOPIC if not self.options.store else f"demo-{TOPIC}-{self.clock.now_ms()}"
        async with timeline.connect(address, timeout="10s") as client:
            await self._create(client, topic)
            plan, feeders = await self._begin(address, topic)
            await self._watch(plan, feeders)
            await self._close(feeders)
            rows = await self._scan(client, topic)
            end_wall_ms = self.clock.now()
            if self.options.store and not self.options.keep:
                await client.drop_topic(topic)
        for broker in self.brokers:
            code = await broker.end()
            if code:
                self.troubles.append(f"the {broker.name} ended with code {code} on SIGTERM: {broker.last_words()}")
        if self.options.cluster and self.killed is None:
            self.troubles.append("no broker was killed, so nothing was shown about that")
        histories = sorted(self.folder.glob(f"*{HISTORY_SUFFIX}"))
        return summarize(plan, read_history(histories), rows, end_wall_ms, self.troubles), plan

    async def _broker(self) -> str:
        """One broker; its address."""
        self.viewer.say("opening: a broker, airlines' feeders and gates, each a process of its own …")
        store = self.options.store or f"sqlite:///{self.folder / 'timeline.db'}"
        broker, address = await self.processes.broker(store)
        self.brokers = [broker]
        return address

    async def _cluster(self) -> str:
        """Brokers that find each other through etcd; their addresses."""
        self.viewer.say(
            f"opening: etcd's members, {BROKERS} brokers, airlines' feeders and gates, each a process of its own …"
        )
        sync = await start_etcd(self.processes)
        store = self.options.store or await start_redis(self.processes)
        names = [f"broker-{number}" for number in range(1, BROKERS + 1)]
        opened = await asyncio.gather(
            *(self.processes.broker(store, name, "--sync", sync, "--name", name) for name in names)
        )
        self.brokers = [broker for broker, _ in opened]
        return ",".join(address for _, address in opened)

    async def _create(self, client: timeline.Timeline, topic: str) -> None:
        """The day's topic; the first call tells whether the broker can use its store at all."""
        settings = {"remember": REMEMBER} if self.options.cluster else {}
        lease = dt.timedelta(milliseconds=LEASE_MS)
        creating = asyncio.ensure_future(client.create_topic(topic, lease=lease, **settings))
        broker = self.brokers[0]
        dying = asyncio.ensure_future(broker.process.wait())
        await asyncio.wait((creating, dying), return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            creating.cancel()
            raise CannotPlay(f"the broker ended with code {broker.process.returncode}: {broker.last_words()}")
        dying.cancel()
        creating.result()

    async def _begin(self, address: str, topic: str) -> tuple[DayPlan, list[DemoChild]]:
        """Starts everybody; the day's clock starts when all of them are ready."""
        now_ms = self.clock.now_ms()
        feeder_count = len(make_plan(self.flights, self.options.day, now_ms, address, self.options.speed).carriers)
        feeders = [await self.processes.role(f"feeder-{n + 1}", "feeder", n) for n in range(feeder_count)]
        gates = [await self.processes.role(gate_name(n), "gate", n, 1) for n in range(GATES)]
        self.gates = [*gates]
        await self.processes.ready(*feeders, *gates)
        self.clock.observe()
        plan = make_plan(self.flights, self.options.day, self.clock.now_ms(), address, self.options.speed, topic=topic)
        plan.write(self.folder / PLAN)
        for child in (*gates, *feeders):
            await child.go()
        return plan, feeders

    async def _watch(self, plan: DayPlan, feeders: list[DemoChild]) -> None:
        """Lets the day go by until every flight has left or is cancelled, or time is up."""
        picture = DayPicture(plan, self.folder)
        until_ms = plan.last_due_ms + 2 * plan.lease_ms + OVERTIME_MS
        while not picture.done and self.clock.now() < until_ms:
            await asyncio.sleep(TICK_S)
            self.clock.observe()
            picture.refresh()
            picture.presume(self.clock.now())
            self.viewer.watch(picture, self.clock.now())
            if self.options.cluster and self.killed is None and 2 * picture.settled >= len(picture.departures):
                await self._kill_a_broker(picture)
            for broker in self.brokers:
                if not broker.running:
                    code = broker.process.returncode
                    raise CannotPlay(f"the {broker.name} died with code {code}: {broker.last_words()}")
            for feeder in feeders:
                if feeder.process.returncode:
                    raise CannotPlay(f"{feeder.name} died with code {feeder.process.returncode}: {feeder.last_words()}")
            self._look_after_gates(plan)

    async def _kill_a_broker(self, picture: DayPicture) -> None:
        """kill -9; the others have all of its work from then on."""
        self.killed = self.brokers.pop()
        picture.say(self.clock.now(), "crash", f"{self.killed.name} is killed; {self.brokers[0].name} goes on")
        await self.killed.kill()

    def _look_after_gates(self, plan: DayPlan) -> None:
        """A gate that has crashed comes back after a while, as another consumer."""
        for number, gate in enumerate(self.gates):
            if gate is None or gate.running:
                continue
            planned = sum(crash.gate == number for crash in plan.crashes) >= self.lives[number]
            if gate.process.returncode != -signal.SIGKILL or not planned:
                self.troubles.append(
                    f"{gate.name} ended with code {gate.process.returncode}, unplanned: {gate.last_words()}"
                )
            self.gates[number] = None
            self.lives[number] += 1
            task = asyncio.create_task(self._reopen(number, self.lives[number]))
            self.returning.add(task)
            task.add_done_callback(self.returning.discard)

    async def _reopen(self, number: int, life: int) -> None:
        await asyncio.sleep(AGAIN_S)
        gate = await self.processes.role(gate_name(number, life), "gate", number, life)
        try:
            await self.processes.ready(gate)
            await gate.go()
        except (CannotPlay, ConnectionError) as trouble:
            self.troubles.append(f"{gate.name} could not come back: {trouble}")
        else:
            self.gates[number] = gate

    async def _close(self, feeders: list[DemoChild]) -> None:
        """Ends gates and feeders in order, so that their histories are whole."""
        if self.returning:
            await asyncio.gather(*self.returning)
        for child in [*feeders, *(gate for gate in self.gates if gate is not None)]:
            code = await child.end()
            if code:
                self.troubles.append(f"{child.name} ended with code {code}: {child.last_words()}")

    async def _scan(self, client: timeline.Timeline, topic: str) -> list[dict[str, Any]]:
        """What is still on the timeline, as the checker takes it."""
        rows = []
        async for row in client.scan(topic, payload=True):
            headers = encode_headers(row.headers) if row.headers else b""
            told: dict[str, Any] = {name: getattr(row, name) for name in SCANNED}
            told |= {name: getattr(row, name) or "" for name in ("holder", "tag", "dead")}
            sums = {"sum": row.payload_sum, "read_sum": payload_sum(row.payload or b"", headers)}
            rows.append({"topic": topic, **told, **sums, "state": str(row.state)})
        return rows
