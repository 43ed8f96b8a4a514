"""Several brokers on one store, a consumer at each: the cycle, a hot instant, how late single messages are, and what
etcd takes while nothing happens.

Brokers find each other through etcd; producers and consumers are together one process, each consumer with a connection
of its own to its own broker. What the store takes is what the machine was busy with beside them.
"""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timeline
from timeline.bench.figures import BenchReport
from timeline.bench.ledger import Ledger
from timeline.bench.load import STEADY_LEAD_MS, Told, batch_at, batch_sizes, put_steadily
from timeline.bench.processes import (
    TICKS_PER_S,
    CannotMeasure,
    cpu_s,
    resident_bytes,
    start_broker,
    start_serving,
    within,
)
from timeline.bench.profile import Profile
from timeline.bench.scenario import Scenario, Stopwatch, cpu_s_of_self, observed, setting
from timeline.bench.topic import own_topic
from timeline.clock import Clock
from timeline.driver.tasks import end
from timeline.storage_plugins import make_store, shown
from timeline.sync.etcd.url import parse

BATCH = 2_000
WINDOW = 8 * BATCH
JOINED_S = 60.0
LOOK_S = 0.1
LEAD_S_A_MESSAGE = 1 / 10_000
HOUR_S = 3_600.0
SETTLED_S = 10.0
"""After the last change: what was gathered is told, and everybody has listed it again."""
TIMEOUT_S = 5.0
_BYTES = ("etcd_network_client_grpc_received_bytes_total", "etcd_network_client_grpc_sent_bytes_total")
_PROPOSALS, _PUTS = "etcd_server_proposals_applied_total", "etcd_mvcc_put_total"
_LINE = re.compile(r"^(\w+)(?:\{.*\})? ([-+\d.e]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ClusterScenario(Scenario):
    """Cycle, hot instant and lateness of several brokers on one store, and what etcd takes at rest.

    \b
    Example:
      timeline bench cluster --brokers 4
      timeline bench cluster --brokers 2 --store redis://127.0.0.1/0 --sync etcd://127.0.0.1/bench
    """

    # Brokers are members of each other by `sync` (one alone needs none), or know of each other by their supervisor.
    name = "cluster"
    store: str = ""
    sync: str = ""
    brokers: int = setting(2, most=64)
    workers: bool = setting(False, "Brokers as workers of one `serve --workers`, which need no etcd.")
    messages: int = setting(200_000, "In the cycle.")
    burst: int = setting(100_000, "Due in one millisecond.")
    rate: float = setting(1_000.0, "Messages a second, for lateness.")
    seconds: float = setting(20.0, "Of that.", least=0.01)
    payload_bytes: int = 100
    rest_seconds: float = setting(60.0, "To watch etcd for, at rest.", least=0)

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        """All of them, one after the other, on the same brokers."""
        async with own_topic(self.store, self.name) as own, observed() as clock, AsyncExitStack() as stack:
            started = await start_brokers(self, folder, stack)
            clients = [
                await stack.enter_async_context(timeline.Timeline(address, "60s", clock=clock))
                for _, address in started
            ]
            group = _Group([pid for pid, _ in started], clients, clock)
            await joined(clients)
            figures: dict[str, float] = {}
            wrong: list[str] = []
            for part in (self._cycle, self._burst, self._steady):
                topic = f"{own.name}-{part.__name__}"
                await clients[0].create_topic(topic)
                ledger, found = await part(group, topic)
                figures |= found
                wrong += ledger.verdict()
            if self.sync and self.rest_seconds:
                async with group.waiting(topic):
                    figures |= await etcd_at_rest(self.sync, self.rest_seconds)
            figures["broker_resident_mib"] = max(map(resident_bytes, group.pids)) / 1024 / 1024
            return self.report(own, figures, wrong)

    async def _cycle(self, group: _Group, topic: str) -> tuple[Ledger, dict[str, float]]:
        """Put, due, leased, pushed, acked, as fast as it goes; who used how much of the machine meanwhile."""
        ledger = Ledger(self.messages, WINDOW)
        watch = Stopwatch(
            brokers_cpu=lambda: sum(map(cpu_s, group.pids)), clients_cpu=cpu_s_of_self, machine_cpu=_busy_s
        )
        await group.through(topic, ledger, *self._puts(group, topic, self.messages, ledger))
        figures = watch.figures(self.messages)
        del figures["elapsed_s"]
        whole_us = figures.pop("machine_cpu_us_per_message")
        ours_us = figures["brokers_cpu_us_per_message"] + figures["clients_cpu_us_per_message"]
        rest_us = max(0.0, whole_us - ours_us)
        figures["store_and_rest_cpu_us_per_message"] = rest_us
        figures["store_and_rest_share"] = rest_us / max(1e-9, rest_us + ours_us)
        return ledger, figures

    def _puts(self, group: _Group, topic: str, messages: int, ledger: Ledger, due_ms: int = 0) -> list[Awaitable[None]]:
        """A task for each client that puts in batches, due at `due_ms`, or at once; they share the batches."""
        sizes = batch_sizes(messages, BATCH)

        async def put(producer: timeline.Producer) -> None:
            for size in sizes:
                batch = batch_at(size, due_ms or group.clock.now_ms(), self.payload_bytes)
                await ledger.put_batch(producer, batch)

        return [put(client.producer(topic)) for client in group.clients]

    async def _burst(self, group: _Group, topic: str) -> tuple[Ledger, dict[str, float]]:
        """A hot instant, from its due until the last ack is answered."""
        clock = group.clock
        due_ms = clock.now_ms() + STEADY_LEAD_MS + int(1_000 * self.burst * LEAD_S_A_MESSAGE)
        ledger = Ledger(self.burst, self.burst)
        await asyncio.gather(*self._puts(group, topic, self.burst, ledger, due_ms))
        if clock.now_ms() > due_ms - 500:
            raise CannotMeasure(f"{self.burst} messages could not be put before their instant")
        await group.through(topic, ledger)
        drained_s = (clock.now() - due_ms) / 1_000
        first_late_ms = ledger.lateness()["lateness_min_ms"]
        return ledger, {"burst_drained_s": drained_s, "burst_first_late_ms": first_late_ms}

    async def _steady(self, group: _Group, topic: str) -> tuple[Ledger, dict[str, float]]:
        """Single messages at a steady rate, put through each broker in turn, dues fixed beforehand."""
        count = max(1, int(self.rate * self.seconds))
        ledger = Ledger(count, count)
        producers = [client.producer(topic) for client in group.clients]
        start_ms = group.clock.now() + STEADY_LEAD_MS
        puts = put_steadily(producers, count, self.rate, start_ms, group.clock, self.payload_bytes, ledger.admit)
        await group.through(topic, ledger, puts)
        return ledger, ledger.lateness()


class _Group:
    """Processes of brokers, and a client at each broker."""

    def __init__(self, pids: list[int], clients: list[timeline.Timeline], clock: Clock) -> None:
        self.pids, self.clients, self.clock = pids, clients, clock

    async def through(self, topic: str, ledger: Ledger, *work: Awaitable[Any]) -> None:
        """A consumer at each broker, until all is settled."""
        async with AsyncExitStack() as stack:
            takes = []
            for client in self.clients:
                credit = max(BATCH, ledger.window // len(self.clients))
                consumer = await stack.enter_async_context(client.consumer(topic, credit=credit))
                takes.append(ledger.take(consumer, self.clock.now))
            await ledger.through(*takes, *work)

    @asynccontextmanager
    async def waiting(self, topic: str) -> AsyncIterator[None]:
        """A consumer at each broker that waits for what does not come."""
        async with AsyncExitStack() as stack:
            waits = []
            for client in self.clients:
                consumer = await stack.enter_async_context(client.consumer(topic))
                waits.append(asyncio.create_task(consumer.take()))
            try:
                yield
            finally:
                await end(*waits)


def check(asked: ClusterScenario) -> None:
    """Raises CannotMeasure for brokers that could not be a cluster."""
    if asked.brokers > 1 and not (asked.sync or asked.workers):
        raise CannotMeasure(
            "several brokers find each other through etcd: say where it is with --sync etcd://host:port"
        )
    if asked.brokers > 1 and not make_store(asked.store).capabilities.shared:
        raise CannotMeasure(f"{shown(asked.store)} is a store of one broker: choose one that several can share")


async def start_brokers(asked: ClusterScenario, folder: Path, stack: AsyncExitStack) -> list[tuple[int, str]]:
    """Starts them, until `stack` is left; the process and the own address of each. Raises CannotMeasure."""
    check(asked)
    started = []
    if asked.workers:
        child, said = await start_serving(folder, asked.store, "127.0.0.1:0", "--workers", str(asked.brokers))
        stack.push_async_callback(child.end)
        if asked.brokers > 1:
            return [(worker["pid"], worker["listen"]) for worker in said["workers"]]
        return [(child.pid, said["listen"])]
    for number in range(1, asked.brokers + 1):
        options = ("--sync", asked.sync, "--name", f"bench-{number}") if asked.sync else ()
        child, address = await start_broker(folder, asked.store, "127.0.0.1:0", *options)
        stack.push_async_callback(child.end)
        started.append((child.pid, address))
    return started


async def joined(clients: Sequence[timeline.Timeline]) -> None:
    """Returns when every broker believes in all of them. Raises CannotMeasure."""
    word = f", {len(clients)} broker"
    async with within(JOINED_S, "every broker's word that all have joined"):
        while len(clients) > 1:
            told = await clients[0].standing()
            if sum(word in one.sync for one in told.brokers) == len(clients):
                return
            await asyncio.sleep(LOOK_S)


def _busy_s() -> float:
    """Processor time that anything on this machine has used."""
    user, nice, system, _, _, irq, soft = map(int, Path("/proc/stat").read_text(encoding="ascii").split()[1:8])
    return (user + nice + system + irq + soft) / TICKS_PER_S


async def etcd_at_rest(sync: str, seconds: float) -> dict[str, float]:
    """Writes (put or proposed to etcd's log, leases and all) and bytes on the wire to clients, of `seconds` reckoned to
    an hour. Raises CannotMeasure where etcd's counters cannot be read: it asks for certificates, for one."""
    endpoints = parse(sync).endpoints
    await asyncio.sleep(SETTLED_S)
    before = await _counted(endpoints)
    await asyncio.sleep(seconds)
    after = await _counted(endpoints)
    hourly = HOUR_S / seconds
    return {
        "etcd_puts_per_hour": (after[_PUTS] - before[_PUTS]) * hourly,
        "etcd_proposals_per_hour": (after[_PROPOSALS] - before[_PROPOSALS]) * hourly,
        "etcd_client_bytes_per_hour": sum(after[name] - before[name] for name in _BYTES) * hourly,
    }


async def _counted(endpoints: tuple[str, ...]) -> dict[str, float]:
    """What the members counted since they started: bytes of all, and what each of them has, once."""
    found: dict[str, float] = defaultdict(float)
    for endpoint in endpoints:
        text = await asyncio.to_thread(_read, endpoint)
        own: dict[str, float] = defaultdict(float)
        for name, value in _LINE.findall(text):
            own[name] += float(value)
        for name in _BYTES:
            found[name] += own[name]
        for name in (_PROPOSALS, _PUTS):
            found[name] = max(found[name], own[name])
    return found


def _read(endpoint: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=TIMEOUT_S) as answer:
            text: str = answer.read().decode()
    except OSError as cannot:
        raise CannotMeasure(f"what etcd at {endpoint} counts cannot be read: {cannot}") from cannot
    return text
