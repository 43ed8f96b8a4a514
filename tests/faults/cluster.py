"""Several brokers as real processes on one store, members of each other through etcd; workers, faults, the judge."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

import timeline
from tests.faults.machine import CERTAIN, PATIENCE_S, Child, Machine, free_port
from timeline.history import FAIL, Event
from timeline.wire import SERVICE

RATE = 600
"""Messages a second that each of two producers puts."""
ENDS = ("crash", "stop", "drain")


@dataclass(frozen=True, slots=True)
class Figures:
    """What a fault cost: the longest time without any delivery while it lasted and for ten seconds more, deliveries
    again, and the latest delivery, all in the whole run but for the first."""

    silent_ms: float
    redelivered: int
    latest_ms: float


async def serving(address: str) -> None:
    """Returns when the broker there says that it serves."""
    async with asyncio.timeout(PATIENCE_S), grpc.aio.insecure_channel(address) as channel:
        async for told in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE)):
            if told.status == health_pb2.HealthCheckResponse.SERVING:
                return


class ClusterMachine(Machine):
    """Brokers `b1`, `b2`, `b3` on `store`, which find each other by `sync`."""

    def __init__(self, folder: Path, store: str, sync: str, brokers: int = 3) -> None:
        super().__init__(folder)
        self.store, self.sync = store, sync
        self.places = {f"b{number}": f"127.0.0.1:{free_port()}" for number in range(1, brokers + 1)}
        self.address = ",".join(self.places.values())
        self.brokers: dict[str, Child] = {}
        self._done: list[Event] = []

    async def start_named(self, name: str) -> None:
        """The broker `name`, ready: it has joined."""
        flags = ["--store", self.store, "--sync", self.sync, "--listen", self.places[name], "--name", name]
        more = ["--metrics", "off", "--json", "--grace", "20s"]
        log = self.folder / f"{name}.log"
        child = self.brokers[name] = await Child.start(name, log, "-m", "timeline", "serve", *flags, *more)
        self.children.append(child)
        await child.until(lambda told: "listen" in told)
        await serving(self.places[name])
        self.note("start", process=name)

    async def start_all(self) -> None:
        await asyncio.gather(*(self.start_named(name) for name in self.places))

    async def kill(self, *names: str) -> None:
        """kill -9 of these at once."""
        for name in names:
            self.note("crash", process=name)
            self.brokers[name].signal(signal.SIGKILL)
        for name in names:
            assert await self.brokers.pop(name).wait() == -signal.SIGKILL

    async def drain(self, name: str) -> None:
        """SIGTERM, and its end in order."""
        self.note("drain", process=name)
        self.brokers[name].signal(signal.SIGTERM)
        assert await self.brokers.pop(name).wait() == 0

    async def believed(self, asked: str, count: int) -> None:
        """Returns when the broker `asked` believes that there are so many: asked when a consumer tells something."""
        word = f", {count} broker"
        async with asyncio.timeout(PATIENCE_S), timeline.connect(self.places[asked], timeout="1s") as client:
            while True:
                standings = await client.standing()
                if any(word in one.sync for one in standings.brokers if one.broker == asked):
                    return
                for child in self.consumers.values():
                    child.news.clear()
                await self._news()

    async def work_on(self, more: int = 1_000) -> None:
        """Returns when each producer has put so many messages more, and each consumer has received something since."""
        put = {name: child.told.get("put", 0) for name, child in self.producers.items()}
        got = {name: child.told.get("received", 0) for name, child in self.consumers.items()}
        for name, child in self.producers.items():
            await child.until(lambda told, name=name: told.get("put", 0) >= put[name] + more)  # type: ignore[misc]
        for name, child in self.consumers.items():
            await child.until(lambda told, name=name: told.get("received", 0) > got[name])  # type: ignore[misc]

    async def enough(self) -> None:
        """Producers end, and all that was put is settled."""
        for producer in self.producers.values():
            producer.tell()
        await self.drained()

    async def stop(self) -> None:
        for child in self.consumers.values():
            child.hang_up()
            assert await child.wait() == 0
        for name in list(self.brokers):
            await self.drain(name)
        self._done = super()._read()

    def _read(self) -> list[Event]:
        """All that is done is read once."""
        return self._done or super()._read()

    def _gone(self) -> list[tuple[float, float]]:
        """When a broker was away: from, until (monotonic ms)."""
        spans: list[tuple[float, float]] = []
        faults = self.faults_noted()
        for name in self.places:
            mine = [event for event in faults if event.arguments["process"] == name]
            for first, then in pairwise([*mine, None]):
                if first is not None and first.arguments["what"] in ENDS:
                    spans.append((first.invoked, then.invoked if then is not None else inf))
        return spans

    def faults_noted(self) -> list[Event]:
        return [event for event in self._read() if event.operation == "fault"]

    def history(self) -> list[Event]:
        """What all processes did. A call that failed while a broker was away may have been done before its answer
        was lost, and says so."""
        events = self._read()
        gone = self._gone()
        for event in events:
            if event.outcome != FAIL or event.result.get("status") in CERTAIN:
                continue
            if any(event.invoked <= until and event.returned >= since for since, until in gone):
                event.result["repeated"] = True
        return events

    def taken_again(self) -> int:
        """Deliveries again that no release of a consumer explains."""
        released = Counter(
            (event.arguments["id"], event.arguments["birth"])
            for event in self._read()
            if event.operation == "release" and event.may_have_happened
        )
        return sum(
            event.arguments["deliveries"] - 1 > released[event.arguments["id"], event.arguments["birth"]]
            for event in self._read()
            if event.operation == "receive"
        )

    def figures(self) -> Figures:
        """What the faults of this run cost."""
        events = self._read()
        receives = sorted((event for event in events if event.operation == "receive"), key=lambda one: one.invoked)
        first = min((event.invoked for event in events if event.operation == "fault" and _is_end(event)), default=inf)
        last_put = max(event.invoked for event in events if event.operation == "put")
        after = [event for event in receives if first <= event.invoked <= last_put]
        gaps = [then.invoked - before.invoked for before, then in pairwise(after)]
        late = [event.wall_ms - event.arguments["due_ms"] for event in after if event.arguments["deliveries"] == 1]
        again = sum(event.arguments["deliveries"] > 1 for event in receives)
        return Figures(max(gaps, default=0.0), again, max(late, default=0.0))


def _is_end(event: Event) -> bool:
    return event.arguments["what"] in ENDS


@asynccontextmanager
async def cluster_machine(folder: Path, store: str, sync: str, lease: str) -> AsyncIterator[ClusterMachine]:
    """Three brokers, a topic, three consumers and two producers at work."""
    made = ClusterMachine(folder, store, sync)
    try:
        await made.start_all()
        async with timeline.connect(made.address, timeout="30s") as client:
            await client.create_topic("departures", lease=lease)
        for name in ("c1", "c2", "c3"):
            await made.start_consumer(name)
        for name in ("p1", "p2"):
            made.producers[name] = await made._worker("produce", name, "--count", "1000000", "--rate", str(RATE))
        yield made
    finally:
        await made.finish()
