"""The cost of recurring schedules: many at rest, and how late their occurrences are beside ordinary messages.

Records of schedules are put directly into the store, while no broker has it open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np

import timeline
from timeline.bench.figures import BenchReport, Target, latencies
from timeline.bench.load import Told, observed, random_numbers
from timeline.bench.processes import CannotMeasure, Measured, Profile, broker, within
from timeline.bench.scenario import Scenario, setting
from timeline.bench.scenarios.lateness import at_rest
from timeline.bench.stores import opened, own_topic, put_overdue, scheme
from timeline.clock import Clock
from timeline.columns import Ragged
from timeline.model import Status, payload_sums
from timeline.schedules import Specification
from timeline.schedules.edits import created
from timeline.schedules.looks import plan
from timeline.schedules.record import SCHEDULES_GROUP, SCHEDULES_TOPIC, ScheduleRecord
from timeline.storage_plugins.contract import Puts, Store

DAY_MS = 86_400_000
REMEMBER = "2h"
"""Of the topic: the window of a schedule, and more."""
FILL_BATCH = 1_000
OVERDUE_BYTES = 100
STARTS = 3
FIRST_DELIVERY_S, ARRIVAL_S = 300.0, 120.0
CREDIT = 20_000
PERIOD_MS = 1_000
LEAD_MS, LEAD_STARTS, LEAD_MS_PER_PUT = 8_000, 3.0, 0.6
"""From the broker's start until the first occurrence, so that all are put by then: some starts of a broker, and time to
put."""
MOMENTS = 3
"""Moments of each kind, in turn: of messages due at one time, those go first that were put first. So both kinds at one
moment would compare when they were put."""
APART_MS = 5_000
"""Between moments, and before the first of them."""
SPREAD, MOMENT = "spread", "moment"
KINDS = OCCURRENCE, ORDINARY = ("occurrence", "ordinary")


@dataclass(frozen=True, slots=True)
class SchedulesScenario(Scenario):
    """Recurring schedules: many at rest, and how late occurrences are beside ordinary messages of the same due times.

    \b
    Example:
      timeline bench schedules --schedules 1000 --moment 1000 --seconds 10
    """

    # First starts of a broker without schedules, then with those at rest, then one run: an ordinary message is put for
    # each occurrence, due at the same time. Those are spread first. Then come moments with many of either kind.
    name = "schedules"
    store: str = "sqlite://"
    schedules: int = setting(100_000, "Schedules at rest.")
    spread: int = setting(250, "Schedules with an occurrence each second.")
    seconds: int = setting(90, "Time that these occur for.")
    moment: int = setting(10_000, "Schedules that occur at the same moments.")
    rest_seconds: float = setting(30.0, "Time to watch the broker at rest.", least=0.1)
    payload_bytes: int = 100

    @property
    def targets(self) -> tuple[Target, ...]:
        ratios = (Target(f"{part}_{short}_ratio", 1.1) for part in (SPREAD, MOMENT) for short in ("p50", "p99"))
        return (Target("start_more_s", 5.0), Target("at_rest_percent", 2.0), *ratios)

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        """Measure starts, rest and lateness. Raises CannotMeasure for a store in memory, and for one with schedules."""
        if scheme(self.store) == "memory":
            raise CannotMeasure("memory:// keeps nothing over a restart: give a store that does, such as sqlite://")
        async with own_topic(self.store, self.name) as own, self._records(own.name, folder):
            bare = [await self._start(own.name, folder) for _ in range(STARTS)]
            now_ms = Clock().now_ms()
            await self._fill(rested(own.name, self.schedules, now_ms), told)
            with_them = [await self._start(own.name, folder) for _ in range(STARTS)]
            figures = {
                "start_bare_s": median(run["start_s"] for run in bare),
                "start_s": median(run["start_s"] for run in with_them),
                "at_rest_bare_percent": median(run["at_rest_percent"] for run in bare),
                "at_rest_percent": median(run["at_rest_percent"] for run in with_them),
                "broker_resident_mib": max(run["broker_resident_mib"] for run in with_them),
            }
            figures["start_more_s"] = figures["start_s"] - figures["start_bare_s"]
            late, wrong = await self._lateness(own.name, folder, figures["start_s"])
        return self.report(own, {**figures, **late}, wrong)

    @asynccontextmanager
    async def _records(self, topic: str, folder: Path) -> AsyncIterator[None]:
        """Create the topic, and let a broker create that of schedules, which is dropped again."""
        async with opened(self.store) as store:
            if any(one.name == SCHEDULES_TOPIC for one in await store.topics()):
                raise CannotMeasure(f"{self.store} has schedules: give a store without any")
        async with broker(folder, self.store) as (_, address), timeline.connect(address, timeout="60s") as client:
            await client.create_topic(topic, remember=REMEMBER)
            made = await client.schedule(topic, "first", every="1d", paused=True)
            await made.delete()
        try:
            yield
        finally:
            async with opened(self.store) as store:
                for one in await store.topics():
                    if one.name == SCHEDULES_TOPIC:
                        await store.drop_topic(one)

    async def _fill(self, records: Iterable[tuple[ScheduleRecord, int]], told: Told | None = None) -> None:
        async with opened(self.store) as store:
            coming = iter(records)
            while some := list(islice(coming, FILL_BATCH)):
                await put_records(store, some)
                if told is not None:
                    told(len(some))

    async def _start(self, topic: str, folder: Path) -> dict[str, float]:
        """Start a broker with one message overdue. Return when that came, and the processor time at rest afterwards."""
        await put_overdue(self.store, topic, OVERDUE_BYTES)
        clock = Clock()
        start_ms = clock.monotonic_ms()
        async with broker(folder, self.store) as (child, address), timeline.connect(address, timeout="60s") as client:
            async with client.consumer(topic, credit=1) as consumer, within(FIRST_DELIVERY_S, "the first delivery"):
                delivery = await consumer.take()
                start_s = (clock.monotonic_ms() - start_ms) / 1000
                assert delivery is not None
                await delivery.ack()
            return {"start_s": start_s, **await _rest(child, self.rest_seconds)}

    async def _lateness(self, topic: str, folder: Path, start_s: float) -> tuple[dict[str, float], list[str]]:
        """Measure both kinds of message in one run. `start_s`: about what a broker takes to start. Return the figures,
        and what was wrong."""
        async with observed() as clock:
            now_ms = clock.now_ms()
            at_once = self.spread * min(self.seconds, 120) + MOMENTS * self.moment
            lead_ms = int(LEAD_MS + LEAD_STARTS * start_s * 1000 + at_once * LEAD_MS_PER_PUT)
            due = DuePlan(now_ms + lead_ms, self.spread, self.seconds, self.moment)
            await self._fill(due.records(topic, self.payload_bytes, now_ms))
            async with (
                broker(folder, self.store) as (_, address),
                timeline.connect(address, timeout="60s") as client,
                client.consumer(topic, credit=CREDIT) as consumer,
            ):
                arrivals = _Arrivals(clock, due)
                taking = asyncio.ensure_future(arrivals.take(consumer))
                await _put_ordinary(client.producer(topic), due, self.payload_bytes)
                behind_ms = clock.now_ms() - due.begin_ms
                patience_s = (due.end_ms - clock.now_ms()) / 1000 + ARRIVAL_S
                await asyncio.wait({taking}, timeout=patience_s)
                if not taking.done():
                    taking.cancel()
                    raise CannotMeasure(f"{arrivals.missing} of {arrivals.wanted} messages never came")
                taking.result()
        wrong = arrivals.wrong
        if behind_ms > 0:
            wrong.append(f"ordinary messages were put {behind_ms} ms after the first was due")
        return arrivals.figures(), wrong


async def _rest(child: Measured, seconds: float) -> dict[str, float]:
    used = await at_rest(child, seconds)
    return {"at_rest_percent": used * 100, "broker_resident_mib": child.resident_bytes() / 2**20}


def rested(topic: str, count: int, now_ms: int) -> Iterator[tuple[ScheduleRecord, int]]:
    """Yield records of monthly schedules that were looked at before, and when each is looked at next: within a day."""
    looks = random_numbers(count) % np.uint64(DAY_MS)
    for number, after_ms in enumerate(looks.tolist()):
        said = Specification(
            topic, f"rest-{number}", cron=(f"{number % 60} {number // 60 % 24} 28 * *",), payload=b"rest"
        )
        record = created(said, now_ms).record
        look = plan(record, now_ms)
        yield look.successor or record, min(look.due_ms, now_ms + 60_000 + after_ms)


async def put_records(store: Store, records: Sequence[tuple[ScheduleRecord, int]]) -> None:
    """Put records, each with the time of its look, into a store that this process has open. Raises CannotMeasure."""
    topic = next(one for one in await store.topics() if one.name == SCHEDULES_TOPIC)
    puts = Puts.blank(len(records))
    puts.ids = Ragged.of([record.id.encode() for record, _ in records])
    puts.birth = random_numbers(len(records)) | np.uint64(1)
    puts.due_ms = np.array([due_ms for _, due_ms in records], dtype=np.int64)
    puts.groups = Ragged.repeat(SCHEDULES_GROUP.encode(), len(records))
    puts.tags = Ragged.of([record.tag.encode() for record, _ in records])
    puts.payloads = Ragged.of([record.encode() for record, _ in records])
    puts.payload_sum = payload_sums(puts.payloads, None)
    answers = await store.put(topic, Clock().now_ms(), puts)
    if (answers.status != Status.OK.code).any():
        raise CannotMeasure("the store refused some of the schedules")


@dataclass(frozen=True, slots=True)
class DuePlan:
    """The due times of a run: `spread` each second from `begin_ms` on, for `seconds`; then moments of `moment` each."""

    begin_ms: int
    spread: int
    seconds: int
    moment: int

    @property
    def moment_ms(self) -> int:
        """Return the first moment of occurrences."""
        return self.begin_ms + self.seconds * PERIOD_MS + 2 * APART_MS

    @property
    def warm_ms(self) -> int:
        """Return the moment before, of ordinary messages. It is not measured: the first one has all caches to fill."""
        return self.moment_ms - APART_MS

    @property
    def end_ms(self) -> int:
        """Return the last moment, of ordinary messages."""
        return self.moment_ms + (2 * MOMENTS - 1) * APART_MS

    def records(self, topic: str, payload_bytes: int, now_ms: int) -> Iterator[tuple[ScheduleRecord, int]]:
        """Yield the records of schedules that were created just now, and their first looks."""
        payload = b"." * payload_bytes
        for number in range(self.spread):
            start_ms = self.begin_ms + number * PERIOD_MS // self.spread
            yield _first(topic, f"{SPREAD}-{number}", PERIOD_MS, start_ms, self.seconds, payload, now_ms)
        for number in range(self.moment):
            yield _first(topic, f"{MOMENT}-{number}", 2 * APART_MS, self.moment_ms, MOMENTS, payload, now_ms)

    def dues(self) -> Iterator[int]:
        """Yield the due times of all ordinary messages in order."""
        for second in range(self.seconds):
            for number in range(self.spread):
                yield self.begin_ms + second * PERIOD_MS + number * PERIOD_MS // self.spread
        yield from [self.warm_ms] * self.moment
        for number in range(MOMENTS):
            yield from [self.moment_ms + (2 * number + 1) * APART_MS] * self.moment


def _first(
    topic: str, name: str, every_ms: int, start_ms: int, count: int, payload: bytes, now_ms: int
) -> tuple[ScheduleRecord, int]:
    said = Specification(topic, name, every_ms=every_ms, start_ms=start_ms, count=count, payload=payload)
    edit = created(said, now_ms)
    return edit.record, edit.due_ms


async def _put_ordinary(producer: timeline.Producer, due: DuePlan, payload_bytes: int) -> None:
    """Put an ordinary message for each occurrence."""
    dues = due.dues()
    while some := list(islice(dues, FILL_BATCH)):
        batch = timeline.Batch(payloads=[b"." * payload_bytes] * len(some), at=some)
        (await producer.produce_many(batch, timeout="60s")).raise_failed()


class _Arrivals:
    """Deliveries of a run, and how late each was by `clock`."""

    def __init__(self, clock: Clock, due: DuePlan) -> None:
        self._clock, self._due = clock, due
        self.wanted = 2 * (due.spread * due.seconds + due.moment * MOMENTS) + due.moment
        self.wrong: list[str] = []
        self._ids: set[str] = set()
        self._late_ms: dict[tuple[str, str], list[float]] = {
            (part, kind): [] for part in (SPREAD, MOMENT) for kind in KINDS
        }

    @property
    def missing(self) -> int:
        """Return how many have not come."""
        return self.wanted - len(self._ids)

    async def take(self, consumer: timeline.Consumer) -> None:
        """Note all that come, until none is missing."""
        async for d in consumer:
            handed_ms = self._clock.now()
            part = MOMENT if d.due_ms >= self._due.moment_ms else SPREAD
            kind = OCCURRENCE if "@" in d.id else ORDINARY
            if d.due_ms != self._due.warm_ms:
                self._late_ms[part, kind].append(handed_ms - d.due_ms)
            if d.id in self._ids:
                self.wrong.append(f"{d.id} was delivered twice")
            self._ids.add(d.id)
            d.ack_soon()
            if not self.missing:
                return

    def figures(self) -> dict[str, float]:
        """Return the lateness of each kind, and the ratios. What came early is noted as wrong."""
        found: dict[str, float] = {}
        for (part, kind), late_ms in self._late_ms.items():
            found |= latencies(late_ms, f"{part}_{kind}")
            if min(late_ms) < 0:
                self.wrong.append(f"handed out {-min(late_ms):.3f} ms before its due: {part}, {kind}")
        for part in (SPREAD, MOMENT):
            for short in ("p50", "p99"):
                one, other = (found[f"{part}_{kind}_{short}_ms"] for kind in KINDS)
                found[f"{part}_{short}_ratio"] = one / other
        return found
