"""The processes that play a day: feeders, which put, move and cancel departures, gates, which take them, and the
runway's inspector, who works by a recurring schedule.

The conductor starts each as `python -m timeline.demo.roles ROLE FOLDER NUMBER …` with pipes. It prints `ready` once it
could begin, and reads the plan when it gets `go`. It ends on SIGTERM, or when the conductor is gone (its standard input
ends), so that no process outlives a demo.
"""

from __future__ import annotations

import asyncio
import math
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
from timeline.demo.plan import CREDIT, HISTORY_SUFFIX, INSPECTOR, PLAN, DayPlan, Filing, gate_name, read_plan
from timeline.demo.processes import GO, READY, when_the_conductor_is_gone
from timeline.errors import TimelineError
from timeline.history import OK, HistoryFile, outcome_of
from timeline.model import encode_headers, payload_sum

OBSERVE_EVERY_S = 0.25
TOGETHER_MS = 20
"""Departures of an airline within this time go in one call."""
SESSION = 1
"""Each life of a gate is a consumer of its own and has one session."""


class Role:
    """A process of the demo that has begun. `stopping` is set on SIGTERM."""

    def __init__(self, folder: Path, name: str, plan: DayPlan, clock: Clock, stopping: asyncio.Event) -> None:
        self.plan = plan
        self.clock = clock
        self.stopping = stopping
        self.history = HistoryFile(folder / f"{name}{HISTORY_SUFFIX}", name, clock)

    async def until(self, real_ms: float) -> bool:
        """Wait until `real_ms`, or for SIGTERM. Return whether the process may go on."""
        wait_s = (real_ms - self.clock.now()) / 1000
        if wait_s > 0:
            try:
                await asyncio.wait_for(self.stopping.wait(), wait_s)
            except TimeoutError:
                return True
        return not self.stopping.is_set()

    async def noted(self, operation: str, values: dict[str, Any], asked: Awaitable[timeline.Receipt | None]) -> None:
        """Await one call on one message, and note it before and after."""
        call = self.history.call(operation, values)
        try:
            answer = await asked
        except TimelineError as error:
            self.history.answer(call, outcome_of(error.code), {"status": error.code, "why": str(error)})
        else:
            more = {} if answer is None else {"version": answer.version, "due_ms": answer.due_ms}
            self.history.answer(call, OK, {"status": "OK", **more})
        self.history.flush()

    def note(self, operation: str, values: dict[str, Any]) -> None:
        """Note something that happens now, so that even a SIGKILL leaves it readable."""
        self.history.note(operation, values)
        self.history.flush()


@asynccontextmanager
async def begun(folder: Path, name: str) -> AsyncIterator[Role]:
    """Print that this process is ready, wait for `go`, and yield the role that it plays."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    print(READY, flush=True)
    if (await asyncio.to_thread(sys.stdin.readline)).strip() != GO:
        sys.exit("the conductor is gone")
    when_the_conductor_is_gone(lambda: os._exit(1))
    clock = Clock()
    role = Role(folder, name, read_plan(folder / PLAN), clock, stopping)
    observing = asyncio.ensure_future(_observe(clock))
    try:
        yield role
    finally:
        observing.cancel()
        role.history.close()


async def _observe(clock: Clock) -> None:
    """Let this process's clock follow the machine's, as the broker's does."""
    while True:
        await asyncio.sleep(OBSERVE_EVERY_S)
        clock.observe()


async def feed(folder: Path, number: int) -> None:
    """Play feeder `number` (from 0): the producers of some airlines."""
    async with (
        begun(folder, f"feeder-{number + 1}") as role,
        timeline.connect(role.plan.address) as client,
        asyncio.TaskGroup() as group,
    ):
        for carrier in role.plan.carriers[number]:
            group.create_task(Airline(role, client.producer(role.plan.topic, group=carrier), carrier).work())


class Airline:
    """One airline's producer. It puts departures ahead of their time, and moves or cancels each when announced."""

    def __init__(self, role: Role, producer: timeline.Producer, carrier: str) -> None:
        self.role = role
        self.producer = producer
        self.carrier = carrier

    async def work(self) -> None:
        """Put all of the day in order of time, each followed by its notice."""
        filings = [filing for filing in self.role.plan.filings if filing.flight.carrier == self.carrier]
        filings.sort(key=lambda filing: (filing.put_ms, filing.flight.id))
        async with self.producer, asyncio.TaskGroup() as notices:
            for _, together in groupby(filings, key=lambda filing: filing.put_ms // TOGETHER_MS):
                batch = list(together)
                if not await self.role.until(batch[-1].put_ms):
                    return
                await self._put(batch)
                for filing in batch:
                    if filing.notice_ms:
                        notices.create_task(self._notice(filing))

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
            results = [{"status": str(one.status), "version": one.version, "due_ms": one.due_ms} for one in receipts]
            history.answer(call, [outcome_of(str(one.status)) for one in receipts], results)
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
    """Play gate `number` (from 0) in its `life` (from 1): a consumer that boards departures when they are due.

    It acknowledges them when they have left. On SIGTERM it takes no more, and lets those that board leave. In some
    lives it kills itself with departures in flight, and their leases have to come back.
    """
    name = gate_name(number, life)
    async with begun(folder, name) as role:
        plan = role.plan
        crashes = [crash.after_ms for crash in plan.crashes if crash.gate == number]
        crash_ms = crashes[life - 1] if life <= len(crashes) else math.inf
        mine = {"topic": plan.topic, "consumer": name, "session": SESSION}

        async def leave(delivery: timeline.Delivery, about: dict[str, Any]) -> None:
            await asyncio.sleep(plan.boarding_ms / 1000)
            await role.noted("ack", about, delivery.ack())

        lease = timedelta(milliseconds=plan.lease_ms)
        async with (
            timeline.connect(plan.address) as client,
            client.consumer(plan.topic, id=name, lease=lease, credit=CREDIT) as consumer,
        ):
            role.note("consume", {**mine, "credit": CREDIT})
            stopping = asyncio.create_task(stop_when_told(role, consumer))
            async with asyncio.TaskGroup() as boarding:
                async for delivery in consumer:
                    about = {**mine, "id": delivery.id, "birth": delivery.token.birth, "version": delivery.version}
                    role.note("receive", {**about, **_received(delivery)})
                    if role.clock.now() >= crash_ms:
                        role.note("fault", {"what": "crash", "consumer": name})
                        os.kill(os.getpid(), signal.SIGKILL)
                    boarding.create_task(leave(delivery, about))
            stopping.cancel()


async def stop_when_told(role: Role, consumer: timeline.Consumer) -> None:
    """Let the consumer take no more after SIGTERM."""
    await role.stopping.wait()
    consumer.stop_taking()


async def inspect(folder: Path) -> None:
    """Play the inspector of the runway: a consumer of what the schedule produces. Each message is one inspection."""
    async with begun(folder, INSPECTOR) as role:
        assert role.plan.inspections is not None
        async with (
            timeline.connect(role.plan.address) as client,
            client.consumer(role.plan.inspections.topic, id=INSPECTOR) as consumer,
        ):
            stopping = asyncio.create_task(stop_when_told(role, consumer))
            async for delivery in consumer:
                role.note("inspect", {"id": delivery.id, "scheduled_ms": delivery.scheduled_ms})
                await delivery.ack()
            stopping.cancel()


def _received(delivery: timeline.Delivery) -> dict[str, Any]:
    headers = encode_headers(delivery.headers) if delivery.headers else b""
    times = {name: getattr(delivery, name) for name in ("due_ms", "scheduled_ms", "lease_until_ms")}
    return {**times, "sum": payload_sum(delivery.payload, headers), "deliveries": delivery.deliveries}


def main() -> None:
    role, folder, *numbers = sys.argv[1:]
    roles: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {"feeder": feed, "gate": board, INSPECTOR: inspect}
    asyncio.run(roles[role](Path(folder), *map(int, numbers)))


if __name__ == "__main__":
    main()
