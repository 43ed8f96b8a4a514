"""How fast: the cycle, single puts, and the loops that people write.

The cycle is put → due → leased → pushed → acked through gRPC, with every id and payload checked. The broker is one
process, producer and consumer together another: two cores, a core each.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import timeline
from timeline.bench.figures import BenchReport, Target, latencies
from timeline.bench.ledger import Arrivals, Ledger, earliest_ahead_ms
from timeline.bench.load import FILL_BATCH, ID_BYTES, PENDING_FROM_MS, Told, batch_at, batch_sizes, ids_of
from timeline.bench.processes import CannotMeasure, Profile, started_module, within
from timeline.bench.scenario import Scenario, Setup, Stopwatch, cpu_s_of_self, set_up, setting
from timeline.bench.stores import scheme
from timeline.driver.consumer import Consumer
from timeline.driver.delivery import Delivery
from timeline.errors import TimelineError

APIS = ("list", "batch", "object", "handlers")
"""Lists of bytes without ids, as most people write it; ready columns with ids; an object each; and handlers."""
PUT_TASKS = 3
ACKS_UNDER_WAY = 8
WINDOW_BATCHES = 8
HANDLERS = 100
API_PER_S = {"list": 400_000.0, "batch": 400_000.0, "object": 80_000.0, "handlers": 15_000.0}
STORE_PER_S = {
    "memory": 400_000.0,
    "redis": 60_000.0,
    "sqlite": 40_000.0,
    "postgresql": 15_000.0,
    "cassandra": 4_000.0,
}
SQLITE_PENDING_PER_S = 20_000.0
JOURNAL_PAIRS = 5
OVERDUE_MS = 1_000
CONCURRENCY = 8
PATIENCE_S = 600.0
CHUNK_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class CycleScenario(Scenario):
    """Put → due → leased → pushed → acked, every id and payload checked.

    \b
    Example:
      timeline bench cycle --messages 1000000
    """

    # `warm_up`: uncounted messages before. `journal`: where the broker keeps its events, empty: nowhere.
    name = "cycle"
    store: str = "memory://"
    api: str = setting("list", "API that the client uses.", choices=APIS)
    messages: int = setting(500_000)
    batch: int = setting(2_000, "Messages per put.", most=100_000)
    pending: int = setting(0, "Other messages that wait meanwhile.", least=0)
    backlog: bool = setting(False, "Put all, and then take them. Else 16,000 are on their way.")
    payload_bytes: int = setting(100, least=16)
    warm_up: int = 20_000
    buckets: int = setting(64, "Buckets of the topic.", most=4096)
    journal: str = ""

    @property
    def targets(self) -> tuple[Target, ...]:
        """Return the lower rate of those asked of the API and of the store. A backlog, and lists in memory, have
        targets relative to peers alone."""
        wanted = STORE_PER_S.get(scheme(self.store))
        if wanted is None or self.backlog or (self.api == "list" and scheme(self.store) == "memory"):
            return ()
        if scheme(self.store) == "sqlite" and self.pending >= 1_000_000:
            wanted = SQLITE_PENDING_PER_S
        return (Target("rate_per_s", min(wanted, API_PER_S[self.api]), least=True),)

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        async with set_up(
            self, folder, told, pending=self.pending, payload_bytes=self.payload_bytes, buckets=self.buckets,
            options=("--journal", self.journal) if self.journal else (),
        ) as setup:  # fmt: skip
            if warm := min(self.warm_up, self.messages):
                await self._turn(setup, warm)
            await setup.sample(profile, "client")
            watch = Stopwatch(broker_cpu=setup.child.cpu_s, client_cpu=cpu_s_of_self)
            ledger = await self._turn(setup, self.messages)
            figures = watch.figures(self.messages)
            figures["broker_resident_mib"] = setup.resident_mib()
            return self.report(setup.own, figures, ledger.verdict())

    async def _turn(self, setup: Setup, messages: int) -> Ledger:
        """Pass messages through the whole cycle, until every ack is answered."""
        window = max(WINDOW_BATCHES * self.batch, 2 * HANDLERS)
        ledger = Ledger(messages, messages if self.backlog else window)
        credit_bytes = max(64 * 1024 * 1024, window * self.payload_bytes)
        consumer = setup.client.consumer(setup.topic, credit=min(window, 1_000_000), credit_bytes=credit_bytes)
        sizes, producer = batch_sizes(messages, self.batch), setup.producer()

        async def put(batch: timeline.Batch) -> None:
            (await producer.produce_many(_GIVEN[self.api](batch), timeout="60s")).raise_failed()

        puts = [ledger.put_each(sizes, self.payload_bytes, put) for _ in range(PUT_TASKS)]
        try:
            if self.backlog:
                await asyncio.gather(*puts)
                puts = []
            await ledger.through(_WORK[self.api](consumer, ledger), *puts)
        finally:
            await consumer.aclose()
        if consumer.stats.settle_errors:
            ledger.wrong.append(f"{consumer.stats.settle_errors} acks failed")
        return ledger


async def measured(
    what: str, asked: CycleScenario, turn: Callable[[int], Awaitable[Ledger]], **cpu: Callable[[], float]
) -> BenchReport:
    """Do the work of a cycle by `turn`, first with uncounted messages.

    Report the rate of `what`, and the processor time that `cpu` counts.
    """
    if warm := min(asked.warm_up, asked.messages):
        await turn(warm)
    watch = Stopwatch(**cpu)
    ledger = await turn(asked.messages)
    return BenchReport(what, asdict(asked), watch.figures(asked.messages), wrong=ledger.verdict())


def _messages(batch: timeline.Batch) -> list[timeline.Message]:
    """Return one object per message, as people's code makes them."""
    rows = zip(batch.payloads, ids_of(batch), batch.time_ms.tolist(), strict=True)
    return [timeline.Message(payload, at=at, id=id.decode()) for payload, id, at in rows]


def _listed(batch: timeline.Batch) -> timeline.Batch:
    """Return the same payloads as people's code has them: a list of bytes. They get ids by default."""
    return timeline.Batch(payloads=batch.payloads.tolist(), in_=0)


_GIVEN: dict[str, Callable[[timeline.Batch], timeline.Batch | list[timeline.Message]]] = {
    "list": _listed,
    "batch": lambda batch: batch,
    "object": _messages,
    "handlers": _messages,
}


async def _by_lists(consumer: Consumer, ledger: Ledger) -> None:
    await _by_batches(consumer, ledger, as_lists=True)


async def _by_batches(consumer: Consumer, ledger: Ledger, as_lists: bool = False) -> None:
    acking: set[asyncio.Task[None]] = set()

    async for batch in consumer.batches():
        if as_lists:
            ledger.met([payload[:ID_BYTES] for payload in batch.payloads.tolist()])
        else:
            ledger.met_with(batch.ids, batch.payloads)
        if (ahead_ms := earliest_ahead_ms(batch.due_ms, batch.handed_ms)) > 0:
            ledger.early(ahead_ms)
        acking.add(asyncio.create_task(ledger.ack(batch)))
        if len(acking) >= ACKS_UNDER_WAY:
            done, acking = await asyncio.wait(acking, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()


def _look(d: Delivery, ledger: Ledger) -> None:
    id = d.id.encode()
    ledger.met([id])
    if not d.payload.startswith(id):
        ledger.wrong.append("a payload was handed out with another message's id")


async def _by_objects(consumer: Consumer, ledger: Ledger) -> None:
    def failed(d: Delivery, error: TimelineError) -> None:
        ledger.wrong.append(f"an ack was refused: {error.code}")

    consumer.on_settle_error = failed
    async for d in consumer:
        _look(d, ledger)
        d.ack_soon()
        ledger.settle(1)


async def _by_handlers(consumer: Consumer, ledger: Ledger) -> None:
    async def handle(d: Delivery) -> None:
        _look(d, ledger)
        await d.ack()
        ledger.settle(1)

    await consumer.run(handle, HANDLERS)


_WORK: dict[str, Callable[[Consumer, Ledger], Awaitable[None]]] = {
    "list": _by_lists,
    "batch": _by_batches,
    "object": _by_objects,
    "handlers": _by_handlers,
}


async def run_journalled(asked: CycleScenario, folder: Path) -> BenchReport:
    """Run the cycle with the event journal and without it, in JOURNAL_PAIRS pairs of alternating order.

    One pair says little, because rates swing by a tenth. The figures are those of the last journalled run. Added are
    the events in its journal, how many all runs dropped, and the journal's cost. The cost is the median, in percent of
    the rate and of the broker's processor time. Raises CannotMeasure.
    """
    rates: list[float] = []
    times: list[float] = []
    dropped, wrong = 0, []
    for number in range(JOURNAL_PAIRS):
        place = folder / f"journal-{number}"
        journalled = replace(asked, journal=f"file://{place}")
        order = (asked, journalled) if number % 2 else (journalled, asked)
        found = {one.journal: await one.run(folder) for one in order}
        plain, report = found[""], found[journalled.journal]
        rates.append(report.figures["rate_per_s"] / plain.figures["rate_per_s"])
        times.append(report.figures["broker_cpu_us_per_message"] / plain.figures["broker_cpu_us_per_message"])
        kinds = _events(place)
        dropped += kinds.pop("dropped", 0)
        wrong += plain.wrong + report.wrong
    report.scenario, report.wrong = "cycle journalled", wrong
    report.figures |= {
        "journal_events": kinds.total(),
        "journal_dropped": dropped,
        "journal_cost_percent": 100 * (1 - median(rates)),
        "journal_broker_cpu_percent": 100 * (median(times) - 1),
    }
    return report


def _events(place: Path) -> Counter[str]:
    """Return how many events of each kind are in a journal."""
    import pyarrow.parquet as pq

    kinds: Counter[str] = Counter()
    for path in place.rglob("*.parquet"):
        table = pq.ParquetFile(path).read(columns=["kind", "count"])
        for kind, count in zip(table.column("kind").to_pylist(), table.column("count").to_pylist(), strict=True):
            kinds[kind] += count or 1
    return kinds


@dataclass(frozen=True, slots=True)
class ProduceScenario(Scenario):
    """Single `await p.produce()` from many tasks.

    \b
    Example:
      timeline bench produce --store sqlite://
    """

    name = "produce"
    store: str = "memory://"
    messages: int = setting(100_000)
    tasks: int = setting(100, "Tasks that put at once.")
    payload_bytes: int = 100

    @property
    def targets(self) -> tuple[Target, ...]:
        return (Target("rate_per_s", 20_000.0, least=True),)

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        async with set_up(self, folder) as setup:
            producer, clock = setup.producer(), setup.clock
            due_ms = clock.now_ms() + PENDING_FROM_MS
            batch = batch_at(self.messages, due_ms, self.payload_bytes)
            todo = list(zip(batch.payloads, [id.decode() for id in ids_of(batch)], strict=True))
            todo.reverse()
            took_ms: list[float] = []

            async def work() -> None:
                while todo:
                    payload, id = todo.pop()
                    asked_ms = clock.monotonic_ms()
                    await producer.produce(payload, at=due_ms, id=id)
                    took_ms.append(clock.monotonic_ms() - asked_ms)

            watch = Stopwatch(broker_cpu=setup.child.cpu_s, client_cpu=cpu_s_of_self)
            await asyncio.gather(*(work() for _ in range(self.tasks)))
            figures = watch.figures(self.messages)
            del figures["elapsed_s"]
            there = await setup.left(window="2h")
        wrong = [] if there == self.messages else [f"{there} of {self.messages} messages are there"]
        return self.report(setup.own, figures | latencies(took_ms, "answer"), wrong)


@dataclass(frozen=True, slots=True)
class LoopScenario(Scenario):
    """Loops over a backlog: one ack after the other, handlers, `timeline consume`, and `ack_soon`.

    \b
    Example:
      timeline bench loop --store memory://
    """

    # The broker is one process. The consumer is this one or, for the command, another.
    name = "loop"
    store: str = "sqlite://"
    messages: int = setting(3_000, "Messages of loops that wait for each answer.")
    many: int = setting(30_000, "Messages of consume and ack_soon.")
    payload_bytes: int = 100

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        """Run each loop over a backlog of its own, one after the other."""
        figures: dict[str, float] = {}
        wrong: list[str] = []
        async with set_up(self, folder) as setup:
            for name, (take, many) in LOOPS.items():
                count = self.many if many else self.messages
                backlog = _Backlog(setup, f"{setup.topic}-{name}", count, folder)
                await backlog.fill(self.payload_bytes)
                watch = Stopwatch(broker_cpu=setup.child.cpu_s)
                async with within(PATIENCE_S, f"the end of the {name} loop"):
                    await take(backlog)
                figures[f"{name}_per_s"] = count / (setup.clock.monotonic_ms() - backlog.began_ms) * 1e3
                figures |= {f"{name}_{each}": value for each, value in watch.costs(count).items()}
                left = await setup.left(backlog.topic, "1h")
                if left or backlog.missing or backlog.doubled:
                    came = f"{count - backlog.missing} of {count} came, {backlog.doubled} twice"
                    wrong.append(f"{name}: {came}, {left} are left")
        return self.report(setup.own, figures, wrong)


class _Backlog(Arrivals):
    """A topic with `count` overdue messages. `began_ms`: when the first one was taken."""

    def __init__(self, setup: Setup, topic: str, count: int, folder: Path) -> None:
        super().__init__(count)
        self.setup, self.topic, self.folder = setup, topic, folder
        self.began_ms = 0.0

    async def fill(self, size_bytes: int) -> None:
        """Create the topic, and put the messages."""
        await self.setup.client.create_topic(self.topic)
        producer = self.setup.client.producer(self.topic)
        for size in batch_sizes(self.count, FILL_BATCH):
            batch = batch_at(size, self.setup.clock.now_ms() - OVERDUE_MS, size_bytes)
            (await producer.produce_many(batch, timeout="60s")).raise_failed()

    def take(self, id: str) -> bool:
        """Note a message. Return whether it is the last one."""
        if not self.began_ms:
            self.began_ms = self.setup.clock.monotonic_ms()
        self.add(id)
        return self.all.is_set()

    def consumer(self) -> timeline.Consumer:
        return self.setup.client.consumer(self.topic)


async def _plain(backlog: _Backlog) -> None:
    async with backlog.consumer() as consumer:
        async for d in consumer:
            last = backlog.take(d.id)
            await d.ack()
            if last:
                return


async def _plain_sync(backlog: _Backlog) -> None:
    await asyncio.to_thread(_plain_in_thread, backlog)


def _plain_in_thread(backlog: _Backlog) -> None:
    with timeline.connect_sync(backlog.setup.address) as client, client.consumer(backlog.topic) as consumer:
        for d in consumer:
            last = backlog.take(d.id)
            d.ack()
            if last:
                return


async def _handlers(backlog: _Backlog) -> None:
    async def handle(d: Delivery) -> None:
        if backlog.take(d.id):
            consumer.stop_taking()

    async with backlog.consumer() as consumer:
        await consumer.run(handle, CONCURRENCY)


async def _ack_soon(backlog: _Backlog) -> None:
    async with backlog.consumer() as consumer:
        async for d in consumer:
            d.ack_soon()
            if backlog.take(d.id):
                return


async def _command(backlog: _Backlog) -> None:
    what = ("consume", backlog.topic, "--count", str(backlog.count), "--address", backlog.setup.address)
    async with started_module("consume", backlog.folder, "timeline", *what) as child:
        assert child.process.stdout is not None
        rest = b""
        while chunk := await child.process.stdout.read(CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                backlog.take(line.split(b"  ")[1].decode())
        if await child.process.wait():
            raise CannotMeasure(f"timeline consume ended with code {child.process.returncode}: {child.last_words()}")


LOOPS: dict[str, tuple[Callable[[_Backlog], Awaitable[None]], bool]] = {
    "plain": (_plain, False),
    "sync": (_plain_sync, False),
    "run": (_handlers, False),
    "consume": (_command, True),
    "ack_soon": (_ack_soon, True),
}
"""Each loop by its name in the figures, and whether it waits for no answer, so that it takes `many`."""
