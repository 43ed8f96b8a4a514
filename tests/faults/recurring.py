"""A crowd of recurring schedules of several kinds. An oracle walks their rules plainly, and a ledger compares that with
what consumers got. As a process, this is such a consumer:

    python -m tests.faults.recurring --address HOST:PORT --history FILE --name c1
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import timeline
from tests.faults.worker import TOPIC, options, run, say
from timeline.history import Event, HistoryFile
from timeline.recurrence import Recurrence
from timeline.schedules import CatchUp, Overlap, Specification

CREDIT = 2_000
KINDS: tuple[dict[str, Any], ...] = (
    {"every_ms": 1_000},
    {"every_ms": 1_500, "jitter_ms": 400},
    {"cron": "*/2 * * * * *", "zone": "America/New_York"},
    {"cron": ("*/3 * * * * *", "*/5 * * * * *"), "zone": "Europe/Berlin"},
    {"rrule": "FREQ=SECONDLY;INTERVAL=2", "zone": "Asia/Kolkata"},
    {"every_ms": 1_000, "exclude": "cron:*/4 * * * * *"},
    {"every_ms": 2_500, "overlap": Overlap.QUEUE},
    {"cron": "1-59/3 * * * * *", "headers": {"number": "{sequence}"}},
)
"""Their hundredth occurrences lie 100 s to 300 s after the first. The records of those that queue are looked at for
each occurrence, the others' about each minute."""


def crowd_of(schedules: int, occurrences: int, begin_ms: int) -> Iterator[Specification]:
    """Yield schedules of all kinds in turn, which begin within a second from `begin_ms` on."""
    for number in range(schedules):
        yield Specification(
            TOPIC,
            f"s{number}",
            start_ms=begin_ms + number * 37 % 1_000,
            count=occurrences,
            payload=b"{sequence} {occurrence}",
            catch_up=CatchUp.ALL,
            **KINDS[number % len(KINDS)],
        )


@dataclass(frozen=True, slots=True)
class Expected:
    """An occurrence as it must come: due at `at_ms`, or up to the schedule's jitter later."""

    at_ms: int
    jitter_ms: int
    payload: bytes


def expected(said: Specification, created_ms: int) -> Iterator[tuple[str, Expected]]:
    """Yield ids and occurrences of a schedule: its rule, walked from its start. Those before its making are counted
    and not produced."""
    rule = Recurrence(
        said.cron, said.every_ms, said.rrule, said.exclude, said.start_ms, count=said.count, zone=said.zone
    )
    for number, one in enumerate(rule.occurrences(said.start_ms), start=1):
        if one.at_ms < created_ms:
            continue
        precise = "milliseconds" if one.at_ms % 1_000 else "seconds"
        time = datetime.fromtimestamp(one.at_ms / 1_000, UTC).replace(tzinfo=None).isoformat(timespec=precise)
        yield f"{said.name}@{time}Z", Expected(one.at_ms, said.jitter_ms, f"{number} {time}Z".encode())


def judged(wanted: dict[str, Expected], events: Iterable[Event], clock_bound_ms: float) -> Counter[str]:
    """Compare what was received with the oracle. Return what is wrong, by kind, with one example of each."""
    wrong: Counter[str] = Counter()
    example: dict[str, str] = {}
    births: dict[str, set[int]] = defaultdict(set)

    def note(kind: str, id: str) -> None:
        wrong[example.setdefault(kind, f"{kind}, as {id}")] += 1

    for event in events:
        if event.operation != "receive":
            continue
        got = event.arguments
        births[got["id"]].add(got["birth"])
        one = wanted.get(got["id"])
        if one is None:
            note("nobody asked for it", got["id"])
            continue
        if not one.at_ms <= got["scheduled_ms"] <= one.at_ms + one.jitter_ms:
            note("due at another time", got["id"])
        if event.wall_ms < got["due_ms"] - clock_bound_ms:
            note("early", got["id"])
        if got["payload"] != one.payload.decode():
            note("another payload", got["id"])
    for id in wanted.keys() - births.keys():
        note("never came", id)
    for id, each in births.items():
        if len(each) > 1:
            note("produced more than once", id)
    return wrong


def received_ids(events: Iterable[Event]) -> set[str]:
    return {event.arguments["id"] for event in events if event.operation == "receive"}


class Tally:
    """Receives, writes down and acknowledges."""

    def __init__(self, asked: Any, history: HistoryFile) -> None:
        self.asked, self.history = asked, history
        self.received = self.again = 0
        self.acking: set[asyncio.Task[None]] = set()

    def finish(self) -> None:
        """It holds nothing back anyway."""

    async def work(self) -> None:
        async with (
            timeline.connect(self.asked.address, timeout="30s") as client,
            client.consumer(TOPIC, id=self.asked.name, credit=CREDIT) as consumer,
        ):
            async for batch in consumer.batches():
                self.history.notes("receive", [noted(one) for one in batch])
                self.history.flush()
                self.received += len(batch)
                self.again += int((batch.deliveries > 1).sum())
                say(received=self.received, again=self.again)
                task = asyncio.create_task(self._ack(batch))
                self.acking.add(task)
                task.add_done_callback(self.acking.discard)

    async def _ack(self, batch: timeline.DeliveryBatch) -> None:
        try:
            await batch.ack()
        except timeline.TimelineError as error:  # they come again
            self.history.note("lost", {"count": len(batch), "status": error.code})


def noted(one: timeline.Delivery) -> dict[str, Any]:
    return {
        "id": one.id,
        "birth": one.token.birth,
        "due_ms": one.due_ms,
        "scheduled_ms": one.scheduled_ms,
        "deliveries": one.deliveries,
        "payload": one.payload.decode(),
    }


if __name__ == "__main__":
    asyncio.run(run(Tally, options().parse_args()))
