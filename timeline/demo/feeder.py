"""A feeder: the producers of some airlines. Puts each departure ahead of its time, then moves or cancels it when the
airline announces that."""

from __future__ import annotations

import asyncio
from itertools import groupby
from pathlib import Path
from typing import Any

import timeline
from timeline.demo.part import Part, begun, play
from timeline.demo.plan import Filing
from timeline.errors import TimelineError
from timeline.history import outcome_of
from timeline.model import payload_sum

TOGETHER_MS = 20
"""Departures of an airline that are to be put within so long go in one call."""


async def feed(arguments: list[str]) -> None:
    """`FOLDER NUMBER`: plays feeder NUMBER of the plan in FOLDER."""
    folder, number = Path(arguments[0]), int(arguments[1])
    async with begun(folder, f"feeder-{number + 1}") as part:
        carriers = part.plan.carriers[number]
        async with timeline.connect(part.plan.address) as client, asyncio.TaskGroup() as group:
            for carrier in carriers:
                producer = client.producer(part.plan.topic, group=carrier)
                group.create_task(Airline(part, producer, carrier).work())


class Airline:
    """One airline's producer and what it has to do today."""

    def __init__(self, part: Part, producer: timeline.Producer, carrier: str) -> None:
        self.part = part
        self.producer = producer
        self.carrier = carrier
        self.filings = [filing for filing in part.plan.filings if filing.flight.carrier == carrier]

    async def work(self) -> None:
        """All of the day: puts in order of time, each followed by its notice."""
        async with self.producer, asyncio.TaskGroup() as notices:
            for _, together in groupby(self._in_order(), key=lambda filing: filing.put_ms // TOGETHER_MS):
                batch = list(together)
                if not await self.part.until(batch[-1].put_ms):
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
        history = self.part.history
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
        if not await self.part.until(filing.notice_ms):
            return
        id = filing.flight.id
        if filing.flight.cancelled:
            await self.part.noted("cancel", self._about(filing), self.producer.cancel(id))
        else:
            asked = self.producer.move(id, at=filing.moved_ms)
            await self.part.noted("move", self._about(filing, due_ms=filing.moved_ms), asked)

    def _about(self, filing: Filing, **more: Any) -> dict[str, Any]:
        return {"topic": self.part.plan.topic, "id": filing.flight.id, "group": self.carrier, **more}


if __name__ == "__main__":
    play(feed)
