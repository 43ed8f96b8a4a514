"""Several brokers on one store with a consumer at each: how fast, how late, etcd at rest, and a broker that is killed.

Brokers find each other through etcd, or are workers of one `serve`. Producers and consumers are together one process.
Each consumer has a connection of its own to its own broker, and hears of the others from it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import urllib.request
import zlib
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timeline
from timeline.bench.figures import BenchReport, Target, latencies
from timeline.bench.ledger import Arrivals, Ledger, by
from timeline.bench.load import Told, batch_at, batch_sizes, ids_of, observed
from timeline.bench.processes import TICKS_PER_S, CannotMeasure, Profile, cpu_s, resident_bytes, serving, within
from timeline.bench.scenario import Scenario, Stopwatch, cpu_s_of_self, setting
from timeline.bench.stores import OwnTopic, own_topic
from timeline.clock import Clock
from timeline.driver.consumer import Consumer
from timeline.driver.delivery import DeliveryBatch
from timeline.driver.producer import Producer
from timeline.driver.tasks import end
from timeline.errors import TimelineError
from timeline.storage_plugins import make_store, shown
from timeline.sync.etcd.client import location_of

BATCH = 2_000
WINDOW = 8 * BATCH
JOINED_S = 60.0
LOOK_S = 0.1
LEAD_S_PER_MESSAGE = 1 / 10_000
STEADY_LEAD_MS = 3_000
TICK_S = 0.02
HOUR_S = 3_600.0
SETTLED_S = 10.0
"""After the last change: every broker has reported what it gathered, and listed all others again."""
TIMEOUT_S = 5.0
BUCKETS = 64
LEASE = "10s"
DELIVERED_S = 60.0
AGAIN_S = 6.0
"""The membership's TTL of 5 s, and one more."""
_BYTES = ("etcd_network_client_grpc_received_bytes_total", "etcd_network_client_grpc_sent_bytes_total")
_PROPOSALS, _PUTS = "etcd_server_proposals_applied_total", "etcd_mvcc_put_total"
_LINE = re.compile(r"^(\w+)(?:\{.*\})? ([-+\d.e]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Brokers:
    """Brokers that know each other, and a client at each."""

    own: OwnTopic
    pids: list[int]
    addresses: list[str]
    clients: list[timeline.Timeline]
    clock: Clock
    stack: AsyncExitStack

    async def client(self, *addresses: str) -> timeline.Timeline:
        """Return a client of the brokers at `addresses`."""
        return await self.stack.enter_async_context(timeline.Timeline(list(addresses), "60s", clock=self.clock))

    async def joined(self) -> None:
        """Wait until every broker counts all of them as members. Raises CannotMeasure."""
        word = f", {len(self.clients)} broker"
        async with within(JOINED_S, "every broker's report that all have joined"):
            while len(self.clients) > 1:
                status = await self.clients[0].standing()
                if sum(word in one.sync for one in status.brokers) == len(self.clients):
                    return
                await asyncio.sleep(LOOK_S)

    @asynccontextmanager
    async def consumers(self, topic: str, credit: int = BATCH) -> AsyncIterator[list[Consumer]]:
        """Open a consumer at each broker."""
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(client.consumer(topic, credit=credit)) for client in self.clients]

    async def through(self, topic: str, ledger: Ledger, *work: Awaitable[Any]) -> None:
        """Run a consumer at each broker, until all is settled."""
        async with self.consumers(topic, max(BATCH, ledger.window // len(self.clients))) as consumers:
            await ledger.through(*(ledger.take(consumer, self.clock.now) for consumer in consumers), *work)


@asynccontextmanager
async def together(asked: ClusterScenario | FailoverScenario, folder: Path) -> AsyncIterator[Brokers]:
    """Start the brokers of a scenario, and wait until they have joined. Raises CannotMeasure."""
    workers = isinstance(asked, ClusterScenario) and asked.workers
    async with own_topic(asked.store, asked.name) as own, observed() as clock, AsyncExitStack() as stack:
        if asked.brokers > 1 and not (asked.sync or workers):
            raise CannotMeasure("several brokers find each other through etcd: give it with --sync etcd://host:port")
        if asked.brokers > 1 and not make_store(asked.store).capabilities.shared:
            raise CannotMeasure(f"{shown(asked.store)} is a store of one broker: choose one that several can share")
        commands: list[tuple[str, ...]] = [("--workers", str(asked.brokers))]
        if not workers:
            names = [f"bench-{number}" for number in range(1, asked.brokers + 1)]
            commands = [("--sync", asked.sync, "--name", name) if asked.sync else () for name in names]
        started: list[tuple[int, str]] = []
        for options in commands:
            child, ready = await stack.enter_async_context(serving(folder, asked.store, *options))
            several = [(worker["pid"], worker["listen"]) for worker in ready.get("workers", ())]
            started += several or [(child.pid, ready["listen"])]
        pids, addresses = [pid for pid, _ in started], [address for _, address in started]
        brokers = Brokers(own, pids, addresses, [], clock, stack)
        brokers.clients.extend([await brokers.client(address) for address in addresses])
        await brokers.joined()
        yield brokers


async def put_steadily(
    producers: Sequence[Producer],
    count: int,
    rate_per_s: float,
    start_ms: float,
    clock: Clock,
    size_bytes: int,
    noted: Callable[[list[bytes]], Awaitable[None]] | None = None,
) -> None:
    """Put `count` messages from `start_ms` on at fixed due times, each by a call of its own STEADY_LEAD_MS ahead.

    The producers take turns. `noted` gets each id beforehand.
    """
    calls: set[asyncio.Task[Any]] = set()
    done = 0
    while done < count:
        due = min(count, int((clock.now() + STEADY_LEAD_MS - start_ms) * rate_per_s / 1_000) + 1)
        for number in range(done, due):
            due_ms = int(start_ms + number * 1_000 / rate_per_s)
            batch = batch_at(1, due_ms, size_bytes)
            if noted is not None:
                await noted(ids_of(batch))
            # The driver gathers calls for single messages.
            put = producers[number % len(producers)].produce(batch.payloads[0], at=due_ms, id=ids_of(batch)[0].decode())
            call = asyncio.create_task(put)
            calls.add(call)
            call.add_done_callback(calls.discard)
        done = max(done, due)
        await asyncio.sleep(TICK_S)
    await asyncio.gather(*calls)


@dataclass(frozen=True, slots=True)
class ClusterScenario(Scenario):
    """Cycle, hot instant and lateness of several brokers on one store. Then what etcd takes at rest.

    \b
    Example:
      timeline bench cluster --brokers 4
      timeline bench cluster --brokers 2 \\
        --store redis://127.0.0.1/0 --sync etcd://127.0.0.1/bench
    """

    # One broker alone needs no `sync`.
    name = "cluster"
    store: str = ""
    sync: str = ""
    brokers: int = setting(2, most=64)
    workers: bool = setting(False, "Brokers as workers of one `serve --workers`, which need no etcd.")
    messages: int = setting(200_000, "Messages of the cycle.")
    window: int = setting(WINDOW, "Messages of the cycle that are on their way, over all brokers.")
    burst: int = setting(100_000, "Messages due in one millisecond.")
    rate: float = setting(1_000.0, "Messages per second, for lateness.")
    seconds: float = setting(20.0, "Length of the lateness run.", least=0.01)
    payload_bytes: int = 100
    rest_seconds: float = setting(60.0, "Time to watch etcd at rest.", least=0)

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        """Run all parts, one after the other, on the same brokers."""
        async with together(self, folder) as group:
            figures: dict[str, float] = {}
            wrong: list[str] = []
            for part in (self._cycle, self._burst, self._steady):
                topic = f"{group.own.name}-{part.__name__}"
                await group.clients[0].create_topic(topic)
                ledger, found = await part(group, topic)
                figures |= found
                wrong += ledger.verdict()
            if self.sync and self.rest_seconds:
                async with group.consumers(topic) as consumers:
                    waits = [asyncio.create_task(consumer.take()) for consumer in consumers]
                    try:
                        figures |= await etcd_at_rest(self.sync, self.rest_seconds)
                    finally:
                        await end(*waits)
            figures["broker_resident_mib"] = max(map(resident_bytes, group.pids)) / 2**20
            return self.report(group.own, figures, wrong)

    async def _cycle(self, group: Brokers, topic: str) -> tuple[Ledger, dict[str, float]]:
        """Measure the cycle, and who used how much of the machine meanwhile."""
        ledger = Ledger(self.messages, self.window)
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

    def _puts(
        self, group: Brokers, topic: str, messages: int, ledger: Ledger, due_ms: int = 0
    ) -> list[Awaitable[None]]:
        """Return a task per client that puts its part in batches, due at `due_ms`, or at once."""
        sizes, producers = batch_sizes(messages, BATCH), [client.producer(topic) for client in group.clients]
        return [ledger.put_each(sizes, self.payload_bytes, by(producer), due_ms) for producer in producers]

    async def _burst(self, group: Brokers, topic: str) -> tuple[Ledger, dict[str, float]]:
        """Measure a hot instant, from its due time until the last ack is answered."""
        clock = group.clock
        due_ms = clock.now_ms() + STEADY_LEAD_MS + int(1_000 * self.burst * LEAD_S_PER_MESSAGE)
        ledger = Ledger(self.burst, self.burst)
        await asyncio.gather(*self._puts(group, topic, self.burst, ledger, due_ms))
        if clock.now_ms() > due_ms - 500:
            raise CannotMeasure(f"{self.burst} messages could not be put before their instant")
        await group.through(topic, ledger)
        drained_s = (clock.now() - due_ms) / 1_000
        first_late_ms = ledger.lateness()["lateness_min_ms"]
        return ledger, {"burst_drained_s": drained_s, "burst_first_late_ms": first_late_ms}

    async def _steady(self, group: Brokers, topic: str) -> tuple[Ledger, dict[str, float]]:
        """Measure single messages at a steady rate, put through each broker in turn."""
        count = max(1, int(self.rate * self.seconds))
        ledger = Ledger(count, count)
        producers = [client.producer(topic) for client in group.clients]
        start_ms = group.clock.now() + STEADY_LEAD_MS
        puts = put_steadily(producers, count, self.rate, start_ms, group.clock, self.payload_bytes, ledger.admit)
        await group.through(topic, ledger, puts)
        return ledger, ledger.lateness()


def _busy_s() -> float:
    """Return the processor time that anything on this machine has used."""
    user, nice, system, _, _, irq, soft = map(int, Path("/proc/stat").read_text(encoding="ascii").split()[1:8])
    return (user + nice + system + irq + soft) / TICKS_PER_S


async def etcd_at_rest(sync: str, seconds: float) -> dict[str, float]:
    """Return etcd's writes, and its bytes to and from clients, of `seconds` extrapolated to an hour.

    Puts are keys written; proposals are entries of its log, leases included. Raises CannotMeasure if etcd's counters
    cannot be read, for example because it requires certificates.
    """
    endpoints = location_of(sync).endpoints
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
    """Return the members' counters: the sum of bytes, and once what every member counts."""
    found: dict[str, float] = defaultdict(float)
    for endpoint in endpoints:
        own: dict[str, float] = defaultdict(float)
        for name, value in _LINE.findall(await asyncio.to_thread(_read, endpoint)):
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
        raise CannotMeasure(f"the counters of etcd at {endpoint} cannot be read: {cannot}") from cannot
    return text


@dataclass(frozen=True, slots=True)
class FailoverScenario(Scenario):
    """A broker of several is killed -9 under load: how long until its buckets are delivered again.

    \b
    Example:
      timeline bench failover --brokers 3
    """

    # Single messages come due at a steady rate, put by a client that knows all brokers. The broker that delivered a
    # bucket last before the kill is the one that had it. What the killed one had leased waits for its lease's end, as
    # it must: that is a figure of its own, the latest of all.
    name = "failover"
    store: str = ""
    sync: str = ""
    brokers: int = setting(3, least=2, most=64)
    rate: float = setting(1_000.0, "Messages per second.")
    before_s: float = setting(8.0, "Seconds until one is killed.")
    after_s: float = setting(12.0, "Seconds after that.")
    payload_bytes: int = 100

    @property
    def targets(self) -> tuple[Target, ...]:
        return (Target("delivered_again_s", AGAIN_S),)

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        """Kill the last of the brokers, and wait until everything is delivered."""
        if self.brokers < 2:
            raise CannotMeasure("one broker alone has no other to take over its buckets: use 2 or more")
        async with together(self, folder) as group:
            clock, topic = group.clock, group.own.name
            await group.clients[0].create_topic(topic, buckets=BUCKETS, lease=LEASE)
            seen = _Seen(int(self.rate * (self.before_s + self.after_s)), clock)
            takes = [asyncio.create_task(seen.take(one, topic, number)) for number, one in enumerate(group.clients)]
            group.stack.push_async_callback(end, *takes)
            start_ms = clock.now() + STEADY_LEAD_MS
            producer = (await group.client(*group.addresses)).producer(topic)
            putting = asyncio.create_task(
                put_steadily([producer], seen.count, self.rate, start_ms, clock, self.payload_bytes)
            )
            group.stack.push_async_callback(end, putting)
            killed = self.brokers - 1
            await asyncio.sleep((start_ms - clock.now()) / 1_000 + self.before_s)
            killed_ms = clock.now()
            os.kill(group.pids[killed], signal.SIGKILL)
            await putting
            wrong = []
            try:
                async with asyncio.timeout(DELIVERED_S):
                    await seen.all.wait()
            except TimeoutError:
                wrong.append(f"{seen.missing} of {seen.count} messages were never delivered")
            figures = seen.figures(killed, killed_ms)
            if min(at_ms - due_ms for _, due_ms, at_ms, _ in seen.rows) < 0:
                wrong.append("a message was handed out before its due")
            return self.report(group.own, figures, wrong)


class _Seen(Arrivals):
    """Deliveries. `rows`: each message's bucket, due time, first delivery, and the broker of that."""

    def __init__(self, count: int, clock: Clock) -> None:
        super().__init__(count)
        self.rows: list[tuple[int, float, float, int]] = []
        self._clock = clock
        self._refused = 0

    async def take(self, client: timeline.Timeline, topic: str, broker: int) -> None:
        """Take what `broker` delivers."""
        async with client.consumer(topic, credit=BATCH) as consumer:
            async for batch in consumer.batches():
                self._note(batch, broker)
                try:
                    self._refused += len((await batch.ack(timeout="60s")).failed)
                except TimelineError:
                    self._refused += len(batch)

    def _note(self, batch: DeliveryBatch, broker: int) -> None:
        now = self._clock.now()
        for id, due_ms in zip(batch.ids.tolist(), batch.due_ms.tolist(), strict=True):
            if self.add(id):
                self.rows.append((zlib.crc32(id) % BUCKETS, due_ms, now, broker))

    def figures(self, killed: int, killed_ms: float) -> dict[str, float]:
        """Return the figures. Raises CannotMeasure if the killed broker had no bucket."""
        had: dict[int, int] = {}
        first: dict[int, float] = {}
        for bucket, due_ms, at_ms, broker in self.rows:
            if at_ms < killed_ms:
                had[bucket] = broker
            elif due_ms > killed_ms:
                first.setdefault(bucket, at_ms)
        mine = [bucket for bucket, broker in had.items() if broker == killed]
        again_ms = [first[bucket] - killed_ms for bucket in mine if bucket in first]
        if not again_ms:
            raise CannotMeasure("the killed broker delivered no bucket: measure for longer")
        others = [at_ms - due_ms for bucket, due_ms, at_ms, _ in self.rows if due_ms > killed_ms and bucket not in mine]
        return {
            "buckets_of_the_killed": len(mine),
            "delivered_again_first_s": min(again_ms) / 1_000,
            "delivered_again_s": max(again_ms) / 1_000,
            **latencies(others or [0.0], "others_late"),
            "late_max_ms": max(at_ms - due_ms for _, due_ms, at_ms, _ in self.rows),
            "delivered_twice": self.doubled,
            "acks_refused": self._refused,
        }
