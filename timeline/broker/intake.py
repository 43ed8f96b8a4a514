"""Intake: puts on their way to the store.

While one store call is in flight the next batch forms (group commit by pressure, no timer); each put is answered after
the store's commit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from timeline.broker.admission import Scheduled, perhaps_done, starts
from timeline.broker.limits import Limits
from timeline.broker.metered import MeteredStore
from timeline.broker.tasks import Tasks
from timeline.columns import Ragged
from timeline.metrics import Metrics
from timeline.model import Answers, Status, Topic
from timeline.storage_plugins.contract import Puts, StoreError, StoreUnavailable


@dataclass(slots=True)
class _Waiting:
    topic: Topic
    puts: Puts
    bytes: int
    deadline_ms: float
    answer: asyncio.Future[Answers]


class Intake:
    """The queue of puts of one broker. `deadline_ms` is monotonic: what did not start by then is not put.
    `scheduled(topic, ids, due_ms, which, turn)` is told of what was stored, or may have been, whether or not its
    producer still waits, and of what is due at once while it is on its way to a store that does things in turn."""

    def __init__(
        self, store: MeteredStore, clock_ms: Callable[[], int], monotonic_ms: Callable[[], float],
        limits: Limits, metrics: Metrics, tasks: Tasks, scheduled: Scheduled,
    ) -> None:  # fmt: skip
        self._store, self._now_ms, self._monotonic_ms = store, clock_ms, monotonic_ms
        self._limits, self._metrics, self._tasks, self._scheduled = limits, metrics, tasks, scheduled
        self._queue: deque[_Waiting] = deque()
        self._messages = 0
        self.bytes = 0
        self._running = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def put(self, topic: Topic, puts: Puts, deadline_ms: float) -> Answers:
        """The store's answers; THROTTLED at once when too much is waiting, UNAVAILABLE or UNKNOWN by what the store
        can say when it fails."""
        size = puts.payloads.nbytes + puts.headers.nbytes + puts.ids.nbytes
        if self._messages and (
            self._messages + len(puts) > self._limits.intake_messages or self.bytes + size > self._limits.intake_bytes
        ):
            self._metrics.count("timeline_throttled_total", "intake", by=len(puts))
            return Answers.blank(len(puts), Status.THROTTLED)
        waiting = _Waiting(topic, puts, size, deadline_ms, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._messages += len(puts)
        self.bytes += size
        if not self._running:
            self._running = True
            self._idle.clear()
            self._tasks.spawn(self._run(), "intake", finishes=True)
        return await waiting.answer

    async def idle(self) -> None:
        """Returns when nothing is waiting."""
        await self._idle.wait()

    async def _run(self) -> None:
        try:
            while self._queue:
                by_topic: dict[int, list[_Waiting]] = {}
                for waiting in self._next_batch():
                    by_topic.setdefault(waiting.topic.uid, []).append(waiting)
                if len(by_topic) == 1:
                    await self._call(*by_topic.values())
                else:
                    await asyncio.gather(*(self._call(batch) for batch in by_topic.values()))
        finally:
            self._running = False
            self._idle.set()

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        messages = size = 0
        while self._queue:
            first = self._queue[0]
            messages, size = messages + len(first.puts), size + first.bytes
            full = messages > self._limits.store_batch_messages or size > self._limits.store_batch_bytes
            if batch and full:
                break
            batch.append(self._queue.popleft())
        return batch

    async def _call(self, batch: list[_Waiting]) -> None:
        now_ms = self._monotonic_ms()
        started = [waiting for waiting in batch if waiting.deadline_ms > now_ms]
        for waiting in batch:
            if waiting.deadline_ms <= now_ms:
                self._answer(waiting, Answers.blank(len(waiting.puts), Status.UNAVAILABLE))
        if not started:
            return
        answers = await self._put(started[0].topic, [waiting.puts for waiting in started])
        start = 0
        for waiting in started:
            self._answer(waiting, answers.part(start, start + len(waiting.puts)))
            start += len(waiting.puts)

    async def _put(self, topic: Topic, parts: list[Puts]) -> Answers:
        puts, now_ms = concat(parts), self._now_ms()
        if self._store.in_turn and (now := puts.due_ms <= now_ms).any():
            # The dealer wakes once the put is in line, and the lease that it calls for is committed with it.
            self._scheduled(topic, puts.ids, puts.due_ms, now, 0)
        try:
            answers = await self._store.put(topic, now_ms, puts)
        except StoreError as trouble:
            nothing = isinstance(trouble, StoreUnavailable)
            answers = Answers.blank(len(puts), Status.UNAVAILABLE if nothing else Status.UNKNOWN)
            answers.details = dict.fromkeys(starts(parts), str(trouble))
        self._scheduled(topic, puts.ids, puts.due_ms, perhaps_done(answers), answers.turn)
        return answers

    def _answer(self, waiting: _Waiting, answers: Answers) -> None:
        self._messages -= len(waiting.puts)
        self.bytes -= waiting.bytes
        if not waiting.answer.done():
            waiting.answer.set_result(answers)


def concat(parts: list[Puts]) -> Puts:
    """The parts one after the other."""
    if len(parts) == 1:
        return parts[0]
    return Puts(
        ids=Ragged.concat([part.ids for part in parts]),
        birth=np.concatenate([part.birth for part in parts]),
        due_ms=np.concatenate([part.due_ms for part in parts]),
        expires_ms=np.concatenate([part.expires_ms for part in parts]),
        groups=Ragged.concat([part.groups for part in parts]),
        tags=Ragged.concat([part.tags for part in parts]),
        payload_sum=np.concatenate([part.payload_sum for part in parts]),
        payloads=Ragged.concat([part.payloads for part in parts]),
        headers=Ragged.concat([part.headers for part in parts]),
        move=np.concatenate([part.move for part in parts]),
    )
