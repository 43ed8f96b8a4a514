"""A producer or a consumer as a process of its own: it works against a real broker, writes its history, and says on
standard output how far it is, a JSON object a line.

    python -m tests.faults.worker produce --address HOST:PORT --history FILE --name p1 --count 10000
    python -m tests.faults.worker consume --address HOST:PORT --history FILE --name c1 --window 100

A producer puts `--rate` messages a second (0: as fast as it can), until it has put `--count` of them or is told by a
line on its standard input that it is enough. A consumer keeps `--window` deliveries unsettled while it can, so that
leases are always out, or, with `--handle-ms`, settles each after a time of its own, of up to that. A line on its
standard input makes it settle everything from then on. An end of standard input ends either.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from typing import Any, Protocol

import timeline
from timeline.clock import Clock
from timeline.history import FAIL, UNKNOWN, HistoryFile, outcome_of
from timeline.model import payload_sum

TOPIC = "departures"
BATCH = 250
CREDIT_BYTES = 17
"""About what a message of its credit comes to: now the one, now the other is what a consumer runs out of."""
SPREAD_MS = 4_000


def say(**what: Any) -> None:
    """One line of progress."""
    print(json.dumps(what), flush=True)


def judged(error: timeline.TimelineError) -> tuple[str, dict[str, str]]:
    """(outcome, result) of an error. A lease that is lost or a client that was closed leaves open what happened."""
    outcome = UNKNOWN if error.code in ("LEASE_LOST", "CLOSED", "SUPERSEDED") else outcome_of(error.code)
    return outcome, {"status": error.code}


class Produce:
    """Puts in batches, moves one message in ten and cancels one in twenty."""

    def __init__(self, asked: argparse.Namespace, history: HistoryFile) -> None:
        self.asked, self.history = asked, history
        self.rng = random.Random(asked.name)
        self.clock = history.clock
        self.sent = 0
        self.enough = asyncio.Event()

    async def work(self) -> None:
        async with (
            timeline.connect(self.asked.address, timeout="30s") as client,
            client.producer(TOPIC, group=self.asked.name) as producer,
        ):
            under_way: set[asyncio.Task[None]] = set()
            loop = asyncio.get_running_loop()
            due_s, enough = loop.time(), loop.create_task(self.enough.wait())
            while self.sent < self.asked.count:
                if self.asked.rate:
                    await asyncio.wait({enough}, timeout=max(0.0, due_s - loop.time()))
                    due_s += BATCH / self.asked.rate
                first, self.sent = self.sent, min(self.asked.count, self.sent + BATCH)
                under_way.add(asyncio.create_task(self._batch(producer, first, self.sent)))
                if len(under_way) >= 4:
                    _, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.gather(*under_way)
            enough.cancel()
        say(done=True)

    async def _batch(self, producer: Any, first: int, end: int) -> None:
        now_ms = self.clock.now_ms()
        ids = [f"{self.asked.name}-{number}" for number in range(first, end)]
        dues = [now_ms + self.rng.randrange(-200, SPREAD_MS) for _ in ids]
        payloads = [f"payload of {id}".encode() for id in ids]
        noted = [
            {"topic": TOPIC, "id": id, "group": self.asked.name, "due_ms": due_ms, "sum": payload_sum(payload)}
            for id, due_ms, payload in zip(ids, dues, payloads, strict=True)
        ]
        batch = timeline.Batch(payloads=payloads, at=dues, ids=ids)
        await self._many("put", noted, producer.produce_many(batch))
        picked = self.rng.sample(range(len(ids)), len(ids) // 10)
        moved_ms = self.clock.now_ms() + self.rng.randrange(SPREAD_MS)
        moves = [{"topic": TOPIC, "id": ids[at], "group": self.asked.name, "due_ms": moved_ms} for at in picked]
        await self._many("move", moves, producer.move_many([ids[at] for at in picked], at=moved_ms))
        cancels = [{"topic": TOPIC, "id": ids[at], "group": self.asked.name} for at in picked[::2]]
        await self._many("cancel", cancels, producer.cancel_many([ids[at] for at in picked[::2]]))
        say(put=end - first)

    async def _many(self, operation: str, noted: list[dict[str, Any]], call: Any) -> None:
        started = self.history.call(operation, noted)
        try:
            receipts = await call
        except timeline.TimelineError as error:
            outcome, result = judged(error)
            self.history.answer(started, outcome, [result] * len(noted))
            return
        results = [
            {"status": str(one.status), "version": one.version, "due_ms": one.due_ms, "settled": one.settled}
            for one in receipts
        ]
        self.history.answer(started, [outcome_of(one["status"]) for one in results], results)

    def finish(self) -> None:
        """It is enough."""
        self.asked.count = self.sent
        self.enough.set()


class Consume:
    """Receives, holds a window of deliveries, acknowledges the oldest, now and then extends or releases one."""

    def __init__(self, asked: argparse.Namespace, history: HistoryFile) -> None:
        self.asked, self.history = asked, history
        self.rng = random.Random(asked.name)
        self.held: dict[int, tuple[Any, dict[str, Any]]] = {}
        """By the number of the delivery, the oldest first."""
        self.window = asked.window
        self.settling: set[asyncio.Task[None]] = set()
        self.received = self.settled = self.again = 0
        self.lost_before = 0
        self.given_up: set[tuple[str, int]] = set()
        self.consumer: Any = None

    def finish(self) -> None:
        """From now on nothing is held back."""
        self.window = self.asked.handle_ms = 0
        self._settle_oldest()

    async def work(self) -> None:
        mine = {"topic": TOPIC, "consumer": self.asked.name, "session": self.asked.session}
        credit = self.asked.window * 2 + 50
        credit_bytes = credit * CREDIT_BYTES
        self.history.note("consume", {**mine, "credit": credit, "credit_bytes": credit_bytes})
        async with (
            timeline.connect(self.asked.address, timeout="30s") as client,
            client.consumer(TOPIC, id=self.asked.name, credit=credit, credit_bytes=credit_bytes) as consumer,
        ):
            self.consumer = consumer
            async for delivery in consumer:
                self._receive(delivery)
                if self.asked.handle_ms:
                    handled_s = self.rng.random() * self.asked.handle_ms / 1_000.0
                    asyncio.get_running_loop().call_later(handled_s, self._settle_soon, self.received)
                else:
                    self._settle_oldest()
                if self.received % 100 == 0:
                    self._tell()
        self.history.note("parted", mine)
        say(done=True)

    def _tell(self) -> None:
        self.history.flush()
        say(received=self.received, settled=self.settled, held=len(self.held), again=self.again)

    def _receive(self, delivery: Any) -> None:
        self.received += 1
        self.again += delivery.deliveries > 1
        noted = {
            "topic": TOPIC,
            "id": delivery.id,
            "consumer": self.asked.name,
            "birth": delivery.token.birth,
            "version": delivery.version,
        }
        self._note_lost()
        credit = self.consumer._in_flight.credit
        seen = {
            "session": self.asked.session,
            "in_hand": [credit.held_messages, credit.held_bytes],
            "size": len(delivery.payload),
            "due_ms": delivery.due_ms,
            "scheduled_ms": delivery.scheduled_ms,
            "lease_until_ms": delivery.lease_until_ms,
            "sum": payload_sum(delivery.payload),
            "deliveries": delivery.deliveries,
        }
        self.history.note("receive", {**noted, **seen})
        self.held[self.received] = delivery, noted

    def _note_lost(self) -> None:
        """What the driver has given up counts as its own no more."""
        if self.consumer.stats.lost == self.lost_before:
            return
        self.lost_before = self.consumer.stats.lost
        for delivery, noted in self.held.values():
            if delivery.lost and (token := (delivery.id, delivery.version)) not in self.given_up:
                self.given_up.add(token)
                self.history.note("lost", noted)

    def _settle_oldest(self) -> None:
        while len(self.held) > self.window:
            self._settle_soon(next(iter(self.held)))

    def _settle_soon(self, number: int) -> None:
        """Settles a delivery, unless that was done meanwhile."""
        if number not in self.held:
            return
        task = asyncio.get_running_loop().create_task(self._settle(*self.held.pop(number)))
        self.settling.add(task)
        task.add_done_callback(self._was_settled)

    def _was_settled(self, task: asyncio.Task[None]) -> None:
        self.settling.discard(task)
        self.settled += 1
        if not self.held and not self.settling:
            self._tell()

    async def _settle(self, delivery: Any, noted: dict[str, Any]) -> None:
        draw = self.rng.random()
        if draw < 0.03 and (self.window or self.asked.handle_ms):
            await self._one("release", {**noted, "in_ms": 200}, delivery.release(in_="200ms"))
            return
        if draw < 0.08:
            await self._one("extend", {**noted, "more_ms": 5_000}, delivery.extend("5s"), delivery)
        await self._one("ack", noted, delivery.ack())

    async def _one(self, operation: str, noted: dict[str, Any], call: Any, extended: Any = None) -> None:
        started = self.history.call(operation, noted)
        try:
            await call
        except timeline.TimelineError as error:
            outcome, result = judged(error)
            self.history.answer(started, outcome, result)
            return
        until = {} if extended is None else {"lease_until_ms": extended.lease_until_ms}
        self.history.answer(started, "ok", {"status": "OK", **until})


class Worker(Protocol):
    """What a process does until it is done. `finish`: it should hold nothing back, or do no more."""

    def __init__(self, asked: argparse.Namespace, history: HistoryFile) -> None: ...
    async def work(self) -> None: ...
    def finish(self) -> None: ...


async def run(made: type[Worker], asked: argparse.Namespace) -> None:
    """Works until done, or until standard input ends."""
    history = HistoryFile(asked.history, f"{asked.name}.{asked.session}", Clock())
    worker = made(asked, history)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    running = loop.create_task(worker.work())
    say(started=True)
    listening = loop.create_task(_listen(reader, worker))
    await asyncio.wait({running, listening}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        await running
    running.cancel()
    listening.cancel()
    await asyncio.gather(running, listening, return_exceptions=True)
    history.close()


async def _listen(reader: asyncio.StreamReader, worker: Worker) -> None:
    while await reader.readline():
        worker.finish()


def options() -> argparse.ArgumentParser:
    """What every worker is told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--history", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--session", type=int, default=1)
    parser.add_argument("--window", type=int, default=100)
    parser.add_argument("--handle-ms", type=int, default=0)
    return parser


def main() -> None:
    parser = options()
    parser.add_argument("what", choices=("produce", "consume"))
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--rate", type=int, default=0)
    asked = parser.parse_args()
    asyncio.run(run(Produce if asked.what == "produce" else Consume, asked))


__all__ = ["FAIL", "TOPIC"]

if __name__ == "__main__":
    main()
