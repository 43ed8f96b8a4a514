"""The processes that play a day: feeders, which put, move and cancel departures, and gates, which take them.

The conductor starts each as `python -m timeline.demo.roles ROLE FOLDER NUMBER …` with pipes. It prints `ready` once it
could begin, reads the plan when it is told `go`, and ends on SIGTERM, or by itself when the conductor is gone (its
standard input ends), so that nothing outlives a demo.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import timeline
from timeline.clock import Clock
from timeline.demo.plan import CREDIT, GO, HISTORY_SUFFIX, PLAN, READY, Crash, DayPlan, Filing, gate_name, read_plan
from timeline.errors import TimelineError
from timeline.history import OK, HistoryFile, outcome_of
from timeline.model import encode_headers, payload_sum

OBSERVE_EVERY_S = 0.25
TOGETHER_MS = 20
"""Departures of an airline that are to be put within so long go in one call."""
SESSION = 1
"""Each life of a gate is a consumer of its own and has one session."""


class Role:
    """A process of the demo that has been told to begin. `stopping` is set on SIGTERM."""

    def __init__(self, folder: Path, name: str, plan: DayPlan, clock: Clock, stopping: asyncio.Event) -> None:
        self.plan = plan
        self.clock = clock
        self.stopping = stopping
        self.history = HistoryFile(folder / f"{name}{HISTORY_SUFFIX}", name, clock)

    async def until(self, real_ms: float) -> bool:
        """Returns at `real_ms`, or when told to stop; whether it may go on."""
        wait_s = (real_ms - self.clock.now()) / 1000
        if wait_s > 0:
            try:
                await asyncio.wait_for(self.stopping.wait(), wait_s)
            except TimeoutError:
                return True
        return not self.stopping.is_set()

    async def noted(self, operation: str, values: dict[str, Any], asked: Awaitable[timeline.Receipt | None]) -> bool:
        """Awaits one call on one message and notes it before and after; whether it was answered OK."""
        call = self.history.call(operation, values)
        try:
            answer = await asked
        except TimelineError as error:
            self.history.answer(call, outcome_of(error.code), {"status": error.code, "why": str(error)})
            done = False
        else:
            told = {} if answer is None else {"version": answer.version, "due_ms": answer.due_ms}
            self.history.answer(call, OK, {"status": "OK", **told})
            done = True
        self.history.flush()
        return done


@asynccontextmanager
async def begun(folder: Path, name: str) -> AsyncIterator[Role]:
    """Says that this process is ready, waits for the word, and gives the role it plays."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    words = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(words), sys.stdin)
    print(READY, flush=True)
    if (await words.readline()).decode().strip() != GO:
        sys.exit("the conductor is gone")
    clock = Clock()
    role = Role(folder, name, read_plan(folder / PLAN), clock, stopping)
    behind = [asyncio.ensure_future(_observe(clock)), asyncio.ensure_future(_orphaned(words))]
    try:
        yield role
    finally:
        for task in behind:
            task.cancel()
        role.history.close()


async def _observe(clock: Clock) -> None:
    """Keeps this process's clock with the machine's, as the broker does with its own."""
    while True:
        await asyncio.sleep(OBSERVE_EVERY_S)
        clock.observe()


async def _orphaned(words: asyncio.StreamReader) -> None:
    """Ends the process at once when the conductor has died."""
    while await words.read(1024):
        pass
    os._exit(1)


async def feed(folder: Path, number: int) -> None:
    """Play feeder `number` (from 0): the producers of some airlines."""
    async with begun(folder, f"feeder-{number + 1}") as role:
        carriers = role.plan.carriers[number]
        async with timeline.connect(role.plan.address) as client, asyncio.TaskGroup() as group:
            for carrier in carriers:
                producer = client.producer(role.plan.topic, group=carrier)
                group.create_task(Airline(role, producer, carrier).work())


class Airline:
    """One airline's producer and what it has to do today: puts departures ahead of their time, then moves or cancels
    each when the airline announces that."""

    def __init__(self, role: Role, producer: timeline.Producer, carrier: str) -> None:
        self.role = role
        self.producer = producer
        self.carrier = carrier
        self.filings = [filing for filing in role.plan.filings if filing.flight.carrier == carrier]

    async def work(self) -> None:
        """All of the day: puts in order of time, each followed by its notice."""
        async with self.producer, asyncio.TaskGroup() as notices:
            for _, together in groupby(self._in_order(), key=lambda filing: filing.put_ms // TOGETHER_MS):
                batch = list(together)
                if not await self.role.until(batch[-1].put_ms):
                    return
                await self._put(batch)
                for filing in batch:
                    if filing.notice_ms:
                        notices.create_task(self._notice(filing))

    def _in_order(self) -> list[Filing]:
        return sorted(self.filings, key=lambda filing: (filing.put_ms, filing.flight.id))

    async def _put(self, batch: list[Filing]) -> None:
        messages, notes = [], []
        for filing in batch:
            payload = filing.flight.payload()
            messages.append(timeline.Message(payload, at=filing.due_ms, id=filing.flight.id))
            notes.append(self._about(filing, due_ms=filing.due_ms, sum=payload_sum(payload)))
        history = self.role.history
        call = history.call("put", notes)
        try:
            receipts = await self.producer.produce_many(messages)
        except TimelineError as error:
            history.answer(call, outcome_of(error.code), [{"status": error.code, "why": str(error)}] * len(batch))
        else:
            told = [{"status": str(one.status), "version": one.version, "due_ms": one.due_ms} for one in receipts]
            history.answer(call, [outcome_of(str(one.status)) for one in receipts], told)
        history.flush()

    async def _notice(self, filing: Filing) -> None:
        if not await self.role.until(filing.notice_ms):
            return
        id = filing.flight.id
        if filing.flight.cancelled:
            await self.role.noted("cancel", self._about(filing), self.producer.cancel(id))
        else:
            asked = self.producer.move(id, at=filing.moved_ms)
            await self.role.noted("move", self._about(filing, due_ms=filing.moved_ms), asked)

    def _about(self, filing: Filing, **more: Any) -> dict[str, Any]:
        return {"topic": self.role.plan.topic, "id": filing.flight.id, "group": self.carrier, **more}


async def board(folder: Path, number: int, life: int) -> None:
    """Play gate `number` (from 0) in its `life` (from 1): a consumer, which may crash."""
    name = gate_name(number, life)
    async with begun(folder, name) as role:
        crashes = [crash for crash in role.plan.crashes if crash.gate == number]
        crash = crashes[life - 1] if life <= len(crashes) else None
        async with timeline.connect(role.plan.address) as client:
            lease = timedelta(milliseconds=role.plan.lease_ms)
            async with client.consumer(role.plan.topic, id=name, lease=lease, credit=CREDIT) as consumer:
                await Gate(role, consumer, name, crash).work()


class Gate:
    """One life of a gate: boards departures when they come due, and acks them when they have left. Now and then one
    crashes with departures in hand, as kill -9 would have it, and their leases have to come back."""

    def __init__(self, role: Role, consumer: timeline.Consumer, name: str, crash: Crash | None) -> None:
        self.role = role
        self.consumer = consumer
        self.name = name
        self.crash = crash

    async def work(self) -> None:
        """Takes departures until told to stop, then lets those that board leave."""
        values = {"topic": self.role.plan.topic, "consumer": self.name, "session": SESSION, "credit": CREDIT}
        self.role.history.note("consume", values)
        self.role.history.flush()
        stopping = asyncio.create_task(self._stop_when_told())
        async with asyncio.TaskGroup() as boarding:
            async for delivery in self.consumer:
                self._note_received(delivery)
                self._crash_when_planned()
                boarding.create_task(self._board(delivery))
        stopping.cancel()

    async def _stop_when_told(self) -> None:
        await self.role.stopping.wait()
        self.consumer.stop_taking()

    async def _board(self, delivery: timeline.Delivery) -> None:
        await asyncio.sleep(self.role.plan.boarding_ms / 1000)
        await self.role.noted("ack", self._about(delivery), delivery.ack())

    def _note_received(self, delivery: timeline.Delivery) -> None:
        headers = encode_headers(delivery.headers) if delivery.headers else b""
        values = {
            **self._about(delivery),
            "due_ms": delivery.due_ms,
            "scheduled_ms": delivery.scheduled_ms,
            "lease_until_ms": delivery.lease_until_ms,
            "sum": payload_sum(delivery.payload, headers),
            "deliveries": delivery.deliveries,
        }
        self.role.history.note("receive", values)
        self.role.history.flush()

    def _about(self, delivery: timeline.Delivery) -> dict[str, Any]:
        return {
            "topic": self.role.plan.topic,
            "id": delivery.id,
            "consumer": self.name,
            "session": SESSION,
            "birth": delivery.token.birth,
            "version": delivery.version,
        }

    def _crash_when_planned(self) -> None:
        """Dies on the spot, as by kill -9, with at least the departure that has just come in hand."""
        if self.crash is not None and self.role.clock.now() >= self.crash.after_ms:
            self.role.history.note("fault", {"what": "crash", "consumer": self.name})
            self.role.history.flush()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Read the arguments and play that role."""
    role, folder, *numbers = sys.argv[1:]
    roles: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {"feeder": feed, "gate": board}
    asyncio.run(roles[role](Path(folder), *map(int, numbers)))


if __name__ == "__main__":
    main()
