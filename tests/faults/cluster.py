"""Several brokers as real processes on one store, members of each other through etcd; workers, faults, the judge."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import inf
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

import timeline
from tests.faults.machine import CERTAIN, PATIENCE_S, Child, Machine
from tests.faults.worker import TOPIC
from tests.servers.process import free_port
from timeline.history import FAIL, Event, Verdict
from timeline.wire import SERVICE

RATE = 1_000
"""Messages a second that each of two producers puts."""
PUTS = 20_000
"""So many a run has at least, and"""
OUT = 100
"""so many leases are out when a fault strikes."""
ENDS = ("crash", "stop", "drain", "cut")
HELD_BACK = ("stop", "cut")
"""Faults under which what was sent may wait, and be done once they are over."""
EVERYTHING = "everything"
"""Stands for all brokers, where what they lean on is gone."""
OVER = ("start", "continue", "mend")


@dataclass(frozen=True, slots=True)
class Figures:
    """What a fault cost, until the next one: the longest time without any delivery, the latest of first deliveries, and
    how many were delivered again."""

    fault: str
    silent_ms: float
    latest_ms: float
    redelivered: int


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
        self.more: tuple[str, ...] = ()
        """More options of each broker."""
        self.inside: dict[str, Sequence[str]] = {}
        """What runs a broker that does not run as it is."""
        self.brokers: dict[str, Child] = {}
        self._done: list[Event] = []

    async def start_named(self, name: str) -> None:
        """The broker `name`, ready: it has joined."""
        flags = ["--store", self.store, "--sync", self.sync, "--listen", self.places[name], "--name", name]
        more = ["--metrics", "off", "--json", "--grace", "20s", *self.more]
        log, command = self.folder / f"{name}.log", ("-m", "timeline", "serve", *flags, *more)
        child = self.brokers[name] = await Child.start(name, log, *command, inside=self.inside.get(name, ()))
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

    async def believed(self, asked: str, count: int, standing: str = "") -> None:
        """Returns when the broker `asked` believes that there are so many, and stands so with them: asked when a
        consumer tells something."""
        word = f", {count} broker"
        async with asyncio.timeout(PATIENCE_S), timeline.connect(self.places[asked], timeout="2s") as client:
            while True:
                said = []
                with suppress(timeline.Unavailable):  # it is busy
                    said = [one.sync for one in (await client.standing()).brokers if one.broker == asked]
                if any(word in one and one.startswith(standing) for one in said):
                    return
                for child in self.consumers.values():
                    child.news.clear()
                await self.news()

    async def begin(
        self, lease: str, rate: int = RATE, handle_ms: int = 0, remember: str = "0s", brokers: int = 3
    ) -> None:
        """So many brokers, a topic, a consumer at each broker, which learns of the others there, and two producers."""
        await asyncio.gather(*(self.start_named(name) for name in list(self.places)[:brokers]))
        async with timeline.connect(self.address, timeout="30s") as client:
            topic = await client.create_topic(TOPIC, lease=lease, remember=remember)
        self.faults.note("topic", {"name": TOPIC, "settings": {"remember_ms": topic.settings.remember_ms}})
        window = rate * handle_ms // 1_000 or 120
        workers = [
            self.start_consumer(f"c{number}", window, handle_ms, address)
            for number, address in enumerate(list(self.places.values())[:brokers], start=1)
        ]
        producers = [self.start_producer(name, 1_000_000, rate) for name in ("p1", "p2")]
        await asyncio.gather(*workers, *producers)
        await self.work_on()

    async def work_on(self, more: int = 1_000, each: bool = True) -> None:
        """Returns when producers have put so many messages more, consumers have received so many more, and each of them
        (unless `each` is False) has received some since."""
        put, got = self._told(self.producers, "put"), self._told(self.consumers, "received")
        before = {name: child.told.get("received", 0) for name, child in self.consumers.items()}
        async with asyncio.timeout(PATIENCE_S):
            while self._told(self.producers, "put") < put + more or self._told(self.consumers, "received") < got + more:
                await self._told_more()
        for name, child in self.consumers.items() if each else ():
            await child.until(lambda told, name=name: told.get("received", 0) > before[name])  # type: ignore[misc]

    def _told(self, children: dict[str, Child], what: str) -> int:
        return sum(child.told.get(what, 0) for child in children.values())

    async def _told_more(self) -> None:
        """Returns when a worker tells something."""
        children = [*self.consumers.values(), *self.producers.values()]
        for child in children:
            assert not child.told.get("ended"), f"{child.name} ended, having told {child.told}"
            child.news.clear()
        waiting = [asyncio.create_task(child.news.wait()) for child in children]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()

    async def enough(self, puts: int = PUTS) -> None:
        """Once `puts` messages were put, producers end, and all that was put is settled."""
        async with asyncio.timeout(PATIENCE_S):
            while self._told(self.producers, "put") < puts:
                await self._told_more()
        for producer in self.producers.values():
            producer.tell()
        await self.drained()

    async def stop(self) -> None:
        for child in self.consumers.values():
            child.hang_up()
        for child in self.consumers.values():
            assert await child.wait() == 0
        await asyncio.gather(*(self.drain(name) for name in list(self.brokers)))
        self._done = super()._read()

    def _read(self) -> list[Event]:
        """All that is done is read once."""
        return self._done or super()._read()

    def _gone(self, kinds: Sequence[str]) -> list[tuple[float, float]]:
        """When a broker was away for such a reason: from, until (monotonic ms)."""
        spans: list[tuple[float, float]] = []
        faults = self.faults_noted()
        for name in self.places:
            mine = [event for event in faults if event.arguments.get("process") in (name, EVERYTHING)]
            for first, then in pairwise([*mine, None]):
                if first is not None and first.arguments["what"] in kinds:
                    spans.append((first.invoked, then.invoked if then is not None else inf))
        return spans

    def faults_noted(self) -> list[Event]:
        return [event for event in self._read() if event.operation == "fault"]

    def history(self) -> list[Event]:
        """What all processes did. A call that failed while a broker was away may have been done before its answer
        was lost, and says so. One that was made while a broker could not go on may have been sent to it, given up, and
        answered by another: what was sent first is done later, perhaps."""
        events = self._read()
        gone, held_back = self._gone(ENDS), self._gone(HELD_BACK)
        for event in events:
            if event.operation in ("receive", "fault", "topic") or event.result.get("status") in CERTAIN:
                continue
            if any(event.invoked <= until and event.returned >= since for since, until in held_back):
                event.result.update(repeated=True, lingers=True)
            elif event.outcome == FAIL and any(
                event.invoked <= until and event.returned >= since for since, until in gone
            ):
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

    def figures(self) -> list[Figures]:
        """What each fault cost."""
        events = self._read()
        receives = sorted((event for event in events if event.operation == "receive"), key=lambda one: one.invoked)
        last_put = max(event.invoked for event in events if event.operation == "put")
        faults = [event for event in self.faults_noted() if event.arguments["what"] not in OVER]
        faults = [event for event in faults if event.invoked < last_put]
        costs = []
        for fault, then in pairwise([*faults, None]):
            assert fault is not None
            until = then.invoked if then is not None else last_put
            mine = [event for event in receives if fault.invoked <= event.invoked <= until]
            gaps = [after.invoked - before.invoked for before, after in pairwise(mine)]
            late = [event.wall_ms - event.arguments["due_ms"] for event in mine if event.arguments["deliveries"] == 1]
            name = " ".join(str(event) for event in fault.arguments.values())
            again = sum(event.arguments["deliveries"] > 1 for event in mine)
            costs.append(Figures(name, round(max(gaps, default=0.0), 1), round(max(late, default=0.0), 1), again))
        return costs


async def judged(made: ClusterMachine, record: Callable[[str, object], None]) -> Verdict:
    """Everything is settled, the histories hold, and each fault hit something. What they cost is told as JSON."""
    await made.enough()
    await made.stop()
    verdict = await made.judge()
    figures = [asdict(one) for one in made.figures()]
    record("figures", json.dumps(figures))
    print("", json.dumps(verdict.counts), *(json.dumps(one) for one in figures), sep="\n")
    assert verdict.holds, verdict.summary()
    assert verdict.counts["put"] >= PUTS
    assert verdict.counts["early"] == verdict.counts["lost"] == verdict.counts["doubled"] == 0
    last_put = max(event.invoked for event in made.history() if event.operation == "put")
    for fault in made.faults_noted():
        if fault.arguments["what"] not in OVER and fault.invoked < last_put:
            assert made.leases_out(fault.invoked) >= OUT
    return verdict
