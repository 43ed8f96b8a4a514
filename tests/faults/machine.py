"""Real processes under test: a broker on SQLite or another store, workers, faults; and the judge at the end."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import timeline
from tests.faults.worker import TOPIC
from tests.servers.process import free_port
from timeline.child import send_signal
from timeline.clock import Clock
from timeline.history import FAIL, Event, HistoryFile, Verdict, check, read_history
from timeline.storage_plugins import make_store
from timeline.storage_plugins.conformance.crowd import dump_store

LEASE_MS = 3_000
CERTAIN = ("UNAVAILABLE", "INVALID", "TOO_LARGE", "THROTTLED")
"""With these, no earlier sending of the call happened either."""
CLOCK_BOUND_MS = 0.2
"""Processes of one machine read one clock; each carries it on by itself (05-time-and-leases.md)."""
PATIENCE_S = 100.0
"""A test that waits longer has failed; nothing is measured by it."""


class Child:
    """A process of ours, its lines of JSON, and its end by id."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self.process, self.name = process, name
        self.told: dict[str, Any] = {}
        """The sum of each number `put`, the last of each other."""
        self.news = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, name: str, log: Path, *command: str, inside: Sequence[str] = ()) -> Child:
        """Python with that command. `inside`: what runs it in its own turn, as in another network."""
        pipe = asyncio.subprocess.PIPE
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *inside, sys.executable, *command, stdin=pipe, stdout=pipe, stderr=errors
            )
        return cls(process, name)

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            for name, value in json.loads(line).items():
                self.told[name] = self.told.get(name, 0) + value if name == "put" else value
            self.news.set()
        self.told["ended"] = 1
        self.news.set()

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Returns once what it told meets the condition. Fails when it ends before."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition(self.told):
                assert not self.told.get("ended"), f"{self.name} ended, having told {self.told}"
                self.news.clear()
                await self.news.wait()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to this process alone."""
        send_signal(self.process, number)

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        async with asyncio.timeout(PATIENCE_S):
            await self._reader
            return await self.process.wait()

    async def finish(self) -> None:
        """Ends it, however it is."""
        if self.process.returncode is None:
            for number in (signal.SIGCONT, signal.SIGKILL):
                self.signal(number)
        await self.wait()

    def tell(self) -> None:
        """A line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")

    def hang_up(self) -> None:
        """The end of its standard input: it should end."""
        assert self.process.stdin is not None
        self.process.stdin.close()


class Machine:
    """Everything that runs in one test, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.store = f"sqlite:///{folder / 'timeline.db'}"
        self.broker: Child | None = None
        self.consumers: dict[str, Child] = {}
        self.producers: dict[str, Child] = {}
        self.children: list[Child] = []
        self.sessions = 0
        self.faults = HistoryFile(folder / "faults.jsonl", "faults", Clock())

    async def start_broker(self) -> None:
        """A broker on the machine's port and file, ready."""
        flags = ["--store", self.store, "--listen", self.address, "--metrics", "off", "--json", "--grace", "20s"]
        self.broker = await Child.start("broker", self.folder / "broker.log", "-m", "timeline", "serve", *flags)
        self.children.append(self.broker)
        await self.broker.until(lambda told: "listen" in told)
        self.note("start", process="broker")

    async def create_topic(self, **settings: Any) -> None:
        async with timeline.connect(self.address, timeout="30s") as client:
            await client.create_topic(TOPIC, lease=LEASE_MS / 1_000, **settings)

    async def start_worker(
        self, what: str, name: str, *flags: str, address: str = "", module: str = "tests.faults.worker"
    ) -> Child:
        """A process of `module`, which does `what`, started."""
        self.sessions += 1
        common = ["--address", address or self.address, "--name", name, "--session", str(self.sessions)]
        history = str(self.folder / f"{name}.{self.sessions}.jsonl")
        command = ["-m", module, *filter(None, [what]), *common, "--history", history, *flags]
        child = await Child.start(name, self.folder / f"{name}.log", *command)
        self.children.append(child)
        await child.until(lambda told: "started" in told)
        return child

    async def start_consumer(self, name: str, window: int = 120, handle_ms: int = 0, address: str = "") -> Child:
        """A consumer at `address`, where one is said."""
        flags = ["--window", str(window), "--handle-ms", str(handle_ms)]
        child = self.consumers[name] = await self.start_worker("consume", name, *flags, address=address)
        return child

    async def start_producer(self, name: str, count: int = 12_000, rate: int = 0) -> Child:
        flags = ["--count", str(count), "--rate", str(rate)]
        child = self.producers[name] = await self.start_worker("produce", name, *flags)
        return child

    def note(self, what: str, **more: Any) -> None:
        """A fault, into the history."""
        self.faults.note("fault", {"what": what, **more})
        self.faults.flush()

    async def drained(self) -> None:
        """Every producer is done and every message settled: consumers are told to hold nothing back, and each time one
        has something to tell the store is looked at. Patience begins anew with each message that is received."""
        for producer in self.producers.values():
            if producer.process.returncode is None:
                await producer.until(lambda told: "done" in told)
        for consumer in self.consumers.values():
            consumer.tell()
        loop, received = asyncio.get_running_loop(), 0
        async with asyncio.timeout(PATIENCE_S) as patience, timeline.connect(self.address, timeout="30s") as client:
            while True:
                if (so_far := sum(child.told.get("received", 0) for child in self.consumers.values())) > received:
                    received = so_far
                    patience.reschedule(loop.time() + PATIENCE_S)
                # Before the look at the store: what is told during it may be the last there is to tell.
                for child in self.consumers.values():
                    child.news.clear()
                if not [row async for row in client.scan(TOPIC, state=("waiting", "available", "leased"), limit=1)]:
                    return
                await self.news()

    async def news(self) -> None:
        """Returns once a consumer has told something."""
        waiting = [asyncio.create_task(child.news.wait()) for child in self.consumers.values()]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()

    async def stop(self) -> None:
        """Workers end, then the broker, in order."""
        for child in self.consumers.values():
            child.hang_up()
            assert await child.wait() == 0
        if self.broker is not None:
            self.broker.signal(signal.SIGTERM)
            assert await self.broker.wait() == 0

    def _read(self) -> list[Event]:
        """The histories of all processes."""
        self.faults.flush()
        return read_history(sorted(self.folder.glob("*.jsonl")))

    def history(self) -> list[Event]:
        """What all processes did. A call that failed and went on while a broker or the store ended and came back may
        have been done before its answer was lost, and says so."""
        events = self._read()
        faults = [event for event in events if event.operation == "fault"]
        for gone in ("broker", "store"):
            for end, start in pairwise(fault for fault in faults if fault.arguments["process"] == gone):
                if start.arguments["what"] != "start":
                    continue
                for event in events:
                    failed = event.outcome == FAIL and event.result.get("status") not in CERTAIN
                    if failed and event.invoked <= start.invoked and event.returned >= end.invoked:
                        event.result["repeated"] = True
        return events

    async def judge(self) -> Verdict:
        """What the checker says of the histories and of what the store's file still has."""
        store = make_store(self.store)
        await store.open()
        try:
            clock = Clock()
            rows = await dump_store(store, await store.topics(), clock.now_ms())
        finally:
            await store.close()
        return check(self.history(), rows, clock_bound_ms=CLOCK_BOUND_MS, end_wall_ms=clock.now())

    def leases_out(self, at: float) -> int:
        """How many deliveries were in code's hands and not settled at monotonic ms `at`, by the histories."""
        settled: set[tuple[str, int, int]] = set()
        received: set[tuple[str, int, int]] = set()
        for event in self._read():
            if event.operation in ("receive", "ack", "release") and event.invoked <= at:
                token = event.arguments["id"], event.arguments["birth"], event.arguments["version"]
                (received if event.operation == "receive" else settled).add(token)
        return len(received - settled)

    async def __aenter__(self) -> Self:
        """What starts in it is ended with it."""
        return self

    async def __aexit__(self, *_: object) -> None:
        for child in self.children:
            await child.finish()
        self.faults.close()


@asynccontextmanager
async def machine(folder: Path, store: str = "") -> AsyncIterator[Machine]:
    """A machine with a broker, a topic, two consumers and two producers at work. `store`: where it is not a file."""
    async with Machine(folder) as made:
        made.store = store or made.store
        await made.start_broker()
        await made.create_topic()
        for name in ("c1", "c2"):
            await made.start_consumer(name)
        for name in ("p1", "p2"):
            await made.start_producer(name, rate=1_500)  # so that they are still at it once both consumers are
        yield made
