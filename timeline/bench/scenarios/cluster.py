"""Several brokers on one store, a consumer at each: the cycle, a hot instant, how late single messages are, and what
etcd takes while nothing happens.

Brokers find each other through etcd; producers and consumers are together one process, each consumer with a connection
of its own to its own broker. What the store takes is what the machine was busy with beside them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import timeline
from timeline.bench.figures import Report, latencies
from timeline.bench.ledger import Ledger
from timeline.bench.load import batch_at
from timeline.bench.processes import (
    TICKS_PER_S,
    CannotMeasure,
    cpu_s,
    resident_bytes,
    start_broker,
    start_serving,
    within,
)
from timeline.bench.scenarios.at_rest import etcd_at_rest
from timeline.bench.scenarios.cycle import cpu_s_of_self
from timeline.bench.scenarios.lateness import observed
from timeline.bench.topic import own_topic
from timeline.clock import Clock
from timeline.driver.delivery import DeliveryBatch
from timeline.driver.tasks import end
from timeline.errors import TimelineError
from timeline.storage_plugins import make_store, shown

BATCH = 2_000
WINDOW = 8 * BATCH
JOINED_S = 60.0
LOOK_S = 0.1
LEAD_MS = 3_000
LEAD_S_A_MESSAGE = 1 / 10_000
TICK_S = 0.02


@dataclass(frozen=True, slots=True)
class Cluster:
    """What to run: so many `brokers` on `store`, members of each other by `sync` (one alone needs none), or, with
    `workers`, as those of one `serve --workers`, which know of each other by their supervisor. `messages` in
    the cycle, `burst` of them in one millisecond, then `rate` a second for `seconds`, and at last nothing for
    `rest_seconds`, in which etcd's counters are watched (0: not)."""

    store: str
    sync: str = ""
    brokers: int = 2
    workers: bool = False
    messages: int = 200_000
    burst: int = 100_000
    rate: float = 1_000.0
    seconds: float = 20.0
    payload_bytes: int = 100
    rest_seconds: float = 60.0


class _Crew:
    """Processes of brokers, and a client at each broker. `late_ms`: of what was handed out."""

    def __init__(self, pids: list[int], clients: list[timeline.Timeline], clock: Clock) -> None:
        self.pids, self.clients, self.clock = pids, clients, clock
        self.late_ms: list[npt.NDArray[np.float64]] = []
        self._acking: set[asyncio.Task[None]] = set()

    async def through(self, topic: str, ledger: Ledger, *work: Awaitable[Any]) -> None:
        """A consumer at each broker, until all is settled."""
        self.late_ms.clear()
        async with AsyncExitStack() as stack:
            takes = []
            for client in self.clients:
                credit = max(BATCH, ledger.window // len(self.clients))
                consumer = await stack.enter_async_context(client.consumer(topic, credit=credit))
                takes.append(self._take(consumer, ledger))
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

    async def _take(self, consumer: timeline.Consumer, ledger: Ledger) -> None:
        async for batch in consumer.batches():
            late_ms = self.clock.now() - batch.due_ms.astype(np.float64)
            self.late_ms.append(late_ms)
            if late_ms.min() < 0:
                ledger.early(-float(late_ms.min()))
            ledger.met_with(batch.ids, batch.payloads)
            task = asyncio.create_task(self._ack(batch, ledger))
            self._acking.add(task)
            task.add_done_callback(self._acking.discard)

    async def _ack(self, batch: DeliveryBatch, ledger: Ledger) -> None:
        try:
            receipts = await batch.ack(timeout="60s")
        except TimelineError as error:
            ledger.unsettled(len(batch), error)
        else:
            ledger.settle(len(batch), len(receipts.failed) if receipts.status_codes.any() else 0)

    def lateness(self, name: str) -> dict[str, float]:
        """Of what was handed out since `through` began."""
        if not self.late_ms:
            raise CannotMeasure("nothing was delivered")
        return latencies(np.concatenate(self.late_ms), name)


async def run_cluster(asked: Cluster, folder: Path) -> Report:
    """All of them, one after the other, on the same brokers. Raises CannotMeasure."""
    async with own_topic(asked.store, "cluster") as own, observed() as clock, AsyncExitStack() as stack:
        started = await start_brokers(asked, folder, stack)
        clients = [
            await stack.enter_async_context(timeline.Timeline(address, "60s", clock=clock)) for _, address in started
        ]
        crew = _Crew([pid for pid, _ in started], clients, clock)
        await joined(clients)
        figures: dict[str, float] = {}
        wrong: list[str] = []
        for part in (_cycle, _burst, _steady):
            topic = f"{own.name}-{part.__name__}"
            await clients[0].create_topic(topic)
            found, trouble = await part(crew, asked, topic)
            figures |= found
            wrong += trouble
        if asked.sync and asked.rest_seconds:
            async with crew.waiting(topic):
                figures |= await etcd_at_rest(asked.sync, asked.rest_seconds)
        figures["broker_resident_mib"] = max(map(resident_bytes, crew.pids)) / 1024 / 1024
        return Report("cluster", asdict(asked), figures, (), wrong, store=own.store)


def check(asked: Cluster) -> None:
    """Raises CannotMeasure for brokers that could not be a cluster."""
    if asked.brokers > 1 and not (asked.sync or asked.workers):
        raise CannotMeasure(
            "several brokers find each other through etcd: say where it is with --sync etcd://host:port"
        )
    if asked.brokers > 1 and not make_store(asked.store).capabilities.shared:
        raise CannotMeasure(f"{shown(asked.store)} is a store of one broker: choose one that several can share")


async def start_brokers(asked: Cluster, folder: Path, stack: AsyncExitStack) -> list[tuple[int, str]]:
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


async def _cycle(crew: _Crew, asked: Cluster, topic: str) -> tuple[dict[str, float], list[str]]:
    """Put, due, leased, pushed, acked, as fast as it goes; who used how much of the machine meanwhile."""
    ledger = Ledger(asked.messages, WINDOW)
    clients_s, brokers_s, busy_s = cpu_s_of_self(), [cpu_s(pid) for pid in crew.pids], _busy_s()
    start_ms = crew.clock.monotonic_ms()
    puts = [_puts(client, topic, asked, share, ledger, crew.clock) for client, share in _shares(crew, asked.messages)]
    await crew.through(topic, ledger, *puts)
    elapsed_s = (crew.clock.monotonic_ms() - start_ms) / 1_000
    clients_s = cpu_s_of_self() - clients_s
    used_s = sum(cpu_s(pid) - before for pid, before in zip(crew.pids, brokers_s, strict=True))
    rest_s = max(0.0, _busy_s() - busy_s - clients_s - used_s)
    each = 1e6 / asked.messages
    figures = {
        "rate_per_s": asked.messages / elapsed_s,
        "brokers_cpu_us_per_message": used_s * each,
        "clients_cpu_us_per_message": clients_s * each,
        "store_and_rest_cpu_us_per_message": rest_s * each,
        "store_and_rest_share": rest_s / max(1e-9, rest_s + clients_s + used_s),
    }
    return figures, ledger.verdict()


def _shares(crew: _Crew, messages: int) -> list[tuple[timeline.Timeline, int]]:
    """As many for each client, the rest for the first."""
    each, rest = divmod(messages, len(crew.clients))
    return [(client, each + rest * (not number)) for number, client in enumerate(crew.clients)]


async def _puts(
    client: timeline.Timeline, topic: str, asked: Cluster, messages: int, ledger: Ledger, clock: Clock, due_ms: int = 0
) -> None:
    """Puts so many in batches, due at `due_ms`, or at once."""
    producer = client.producer(topic)
    for start in range(0, messages, BATCH):
        batch = batch_at(min(BATCH, messages - start), due_ms or clock.now_ms(), asked.payload_bytes)
        assert batch.ids is not None
        await ledger.admit(batch.ids.tolist())
        (await producer.produce_many(batch, timeout="60s")).raise_failed()


async def _burst(crew: _Crew, asked: Cluster, topic: str) -> tuple[dict[str, float], list[str]]:
    """A hot instant, from its due until the last ack is answered."""
    due_ms = crew.clock.now_ms() + LEAD_MS + int(1_000 * asked.burst * LEAD_S_A_MESSAGE)
    ledger = Ledger(asked.burst, asked.burst)
    shares = _shares(crew, asked.burst)
    await asyncio.gather(*(_puts(one, topic, asked, share, ledger, crew.clock, due_ms) for one, share in shares))
    if crew.clock.now_ms() > due_ms - 500:
        raise CannotMeasure(f"{asked.burst} messages could not be put before their instant")
    await crew.through(topic, ledger)
    drained_s = (crew.clock.now() - due_ms) / 1_000
    found = crew.lateness("burst_late")
    return {"burst_drained_s": drained_s, "burst_first_late_ms": found["burst_late_min_ms"]}, ledger.verdict()


async def _steady(crew: _Crew, asked: Cluster, topic: str) -> tuple[dict[str, float], list[str]]:
    """Single messages at a steady rate, put through each broker in turn, dues fixed beforehand."""
    count = max(1, int(asked.rate * asked.seconds))
    ledger = Ledger(count, count)
    start_ms = crew.clock.now() + LEAD_MS

    async def put_all() -> None:
        producers = [client.producer(topic) for client in crew.clients]
        calls: set[asyncio.Task[Any]] = set()
        done = 0
        while done < count:
            due = min(count, int((crew.clock.now() + LEAD_MS - start_ms) * asked.rate / 1_000) + 1)
            for number in range(done, due):
                due_ms = int(start_ms + number * 1_000 / asked.rate)
                batch = batch_at(1, due_ms, asked.payload_bytes)
                assert batch.ids is not None
                await ledger.admit(batch.ids.tolist())
                # By the call for one, which the driver gathers.
                put = producers[number % len(producers)].produce(batch.payloads[0], at=due_ms, id=batch.ids[0].decode())
                call = asyncio.create_task(put)
                calls.add(call)
                call.add_done_callback(calls.discard)
            done = max(done, due)
            await asyncio.sleep(TICK_S)
        await asyncio.gather(*calls)

    await crew.through(topic, ledger, put_all())
    return crew.lateness("lateness"), ledger.verdict()


def _busy_s() -> float:
    """Processor time that anything on this machine has used."""
    user, nice, system, _, _, irq, soft = map(int, Path("/proc/stat").read_text(encoding="ascii").split()[1:8])
    return (user + nice + system + irq + soft) / TICKS_PER_S
