"""A gate: a consumer that boards departures when they come due and acks them when they have left. Now and then one
crashes with departures in hand, as kill -9 would have it, and their leases have to come back."""

from __future__ import annotations

import asyncio
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import timeline
from timeline.demo.part import Part, begun, play
from timeline.demo.plan import CREDIT, Crash
from timeline.model import encode_headers, payload_sum

SESSION = 1
"""Each life of a gate is a consumer of its own and has one session."""


def gate_name(number: int, life: int = 1) -> str:
    """The consumer id of gate `number` (from 0) in its `life` (from 1): a gate that comes back after a crash is another
    consumer, so that what the dead one had in hand comes back by its lease alone."""
    return f"gate-{number + 1}" + (f".{life}" if life > 1 else "")


async def board(arguments: list[str]) -> None:
    """`FOLDER NUMBER LIFE`: plays gate NUMBER of the plan in FOLDER."""
    folder, number, life = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    name = gate_name(number, life)
    async with begun(folder, name) as part:
        crashes = [crash for crash in part.plan.crashes if crash.gate == number]
        crash = crashes[life - 1] if life <= len(crashes) else None
        async with timeline.connect(part.plan.address) as client:
            lease = timedelta(milliseconds=part.plan.lease_ms)
            async with client.consumer(part.plan.topic, id=name, lease=lease, credit=CREDIT) as consumer:
                await Gate(part, consumer, name, crash).work()


class Gate:
    """One life of a gate."""

    def __init__(self, part: Part, consumer: timeline.Consumer, name: str, crash: Crash | None) -> None:
        self.part = part
        self.consumer = consumer
        self.name = name
        self.crash = crash

    async def work(self) -> None:
        """Takes departures until told to stop, then lets those that board leave."""
        values = {"topic": self.part.plan.topic, "consumer": self.name, "session": SESSION, "credit": CREDIT}
        self.part.history.note("consume", values)
        self.part.history.flush()
        stopping = asyncio.create_task(self._stop_when_told())
        async with asyncio.TaskGroup() as boarding:
            async for delivery in self.consumer:
                self._note_received(delivery)
                self._crash_when_planned()
                boarding.create_task(self._board(delivery))
        stopping.cancel()

    async def _stop_when_told(self) -> None:
        await self.part.stopping.wait()
        self.consumer.stop_taking()

    async def _board(self, delivery: timeline.Delivery) -> None:
        await asyncio.sleep(self.part.plan.boarding_ms / 1000)
        await self.part.noted("ack", self._about(delivery), delivery.ack())

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
        self.part.history.note("receive", values)
        self.part.history.flush()

    def _about(self, delivery: timeline.Delivery) -> dict[str, Any]:
        return {
            "topic": self.part.plan.topic,
            "id": delivery.id,
            "consumer": self.name,
            "session": SESSION,
            "birth": delivery.token.birth,
            "version": delivery.version,
        }

    def _crash_when_planned(self) -> None:
        """Dies on the spot, as by kill -9, with at least the departure that has just come in hand."""
        if self.crash is not None and self.part.clock.now() >= self.crash.after_ms:
            self.part.history.note("fault", {"what": "crash", "consumer": self.name})
            self.part.history.flush()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    play(board)
