"""Mutate calls: what one operation asks of messages that are there, a few calls at once, each repeated until it is
answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from timeline.columns import Ragged
from timeline.driver.produce.request_batch import Columns, Parcel
from timeline.driver.produce.request_queue import Line, refusal_of
from timeline.driver.tasks import end, hold, let_go
from timeline.driver.transport.channel import Deadline
from timeline.driver.transport.client_context import Link
from timeline.errors import Forbidden, Invalid, NotFound, TimelineError
from timeline.model import Operation, Status
from timeline.wire import Mutate, Mutated, decode_as, encode

log = logging.getLogger("timeline.driver")

CALLS_ABOARD = 4
ID_OVERHEAD_BYTES = 48
SPARE_MS = 50.0


class Changing:
    """The line of one operation of a producer: parcels go as Mutate calls."""

    def __init__(self, link: Link, topic: str, group: str, operation: Operation) -> None:
        self._link, self._topic, self._group, self._operation = link, topic, group, operation
        self.line = Line(self._build, link.clock, link.random, link.trouble)
        self._runner: asyncio.Task[None] | None = None
        self._under_way: set[asyncio.Task[None]] = set()

    def _build(self, entries: Sequence[Any]) -> tuple[Columns, Operation, int]:
        count = len(entries)
        ids, times, flags, versions, ops = zip(*entries, strict=True)
        columns: Columns = {
            "ids": Ragged.of(list(ids)),
            "time_ms": np.fromiter(times, np.int64, count),
            "flags": np.fromiter(flags, np.uint8, count),
            "if_version": np.fromiter(versions, np.int64, count),
            "op": np.fromiter(ops, np.uint64, count),
        }
        return columns, self._operation, columns["ids"].nbytes + ID_OVERHEAD_BYTES * count

    def start(self) -> None:
        """Runs the line from now on, in a task of its own, which nothing ends but `stop` and `let_go`."""
        if self._runner is None:
            self._runner = hold(self._run(), f"mutating {self._topic}")

    async def _run(self) -> None:
        try:
            await self._carry()
        except Exception as error:  # a mistake of ours: whoever calls must not wait for ever
            log.exception("the changes of %s failed", self._topic)
            self._runner = None
            self.line.broke()
            self.line.refuse_all(Status.UNAVAILABLE, f"the producer failed: {error!r}")

    async def _carry(self) -> None:
        line = self.line
        while True:
            await line.work.wait()
            line.work.clear()
            while len(self._under_way) < CALLS_ABOARD and (taken := line.next()) is not None:
                request, parcel = taken
                parcel.aboard = False  # until it is sent, which the channel says
                task = asyncio.get_running_loop().create_task(self._call(request, parcel))
                self._under_way.add(task)
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self.line.work.set()

    async def _call(self, request: int, parcel: Parcel) -> None:
        line = self.line
        try:
            data = await self._asked(parcel)
        except (Invalid, NotFound, Forbidden) as bad:
            line.refused(request, refusal_of(len(parcel), Status(bad.code), bad.reason))
            return
        except TimelineError as trouble:
            parcel.verdict_detail = trouble.reason
            line.back(request, sent=False)
            return
        except Exception as error:  # a mistake of ours: whoever calls must not wait for it until the deadline
            log.exception("a change of %s failed", self._topic)
            parcel.unsure = parcel.unsure or parcel.aboard
            line.refused(request, refusal_of(len(parcel), Status.UNAVAILABLE, f"the producer failed: {error!r}"))
            return
        try:
            mutated = decode_as(data, Mutated)
            line.answer(request, mutated.answers, mutated.retry_after_ms)
        except Invalid as bad:
            log.error("a broker sent what cannot be read: %s", bad.reason)
            parcel.unsure = True  # it was asked, and what came of it is not known
            line.back(request, sent=False)

    async def _asked(self, parcel: Parcel) -> bytes:
        link = self._link
        # A little before the callers give up, so that they learn whether it was ever sent.
        spare_ms = min(SPARE_MS, (parcel.sink.deadline_ms - link.clock.monotonic_ms()) / 4)
        deadline = Deadline(link.clock, parcel.sink.deadline_ms - spare_ms)

        def frame(timeout_ms: int) -> bytes:
            asked = self._topic, self._group, self._operation
            return encode(Mutate(*asked, timeout_ms=timeout_ms, **parcel.columns))

        return await link.channel.unary("Mutate", frame, deadline, parcel, writes=True)

    def let_go(self) -> None:
        """Nobody can ask anything of it any more: it ends by itself."""
        let_go(self._runner, *self._under_way)

    async def stop(self) -> None:
        """Ends at once; who still waits is told what is known."""
        tasks = [*self._under_way, *([self._runner] if self._runner is not None else [])]
        self._runner = None
        await end(*tasks)
        self.line.drop()
