"""Settling: acks, extensions, releases and burials on their way to the store, ahead of queued puts.

While one store call of a topic is in flight the next batch forms: group commit by pressure, no timer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import numpy as np

from timeline.broker.admission import Scheduled, perhaps_done, starts
from timeline.broker.limits import Limits
from timeline.broker.metered import MeteredStore
from timeline.broker.tasks import Tasks
from timeline.columns import Ragged
from timeline.metrics import Metrics
from timeline.model import Answers, Operation, Status, Topic
from timeline.storage_plugins.contract import Settles, StoreError, StoreUnavailable

Waiting = tuple[Settles, "asyncio.Future[Answers]"]


class Settling:
    """The queue of settles of one broker, a lane a topic. `scheduled(topic, ids, due_ms, which, 0)` is told of
    what was released, or may have been, whether or not its consumer still waits."""

    def __init__(
        self, store: MeteredStore, now_ms: Callable[[], int],
        limits: Limits, metrics: Metrics, tasks: Tasks, scheduled: Scheduled,
    ) -> None:  # fmt: skip
        self._store, self._now_ms, self._scheduled = store, now_ms, scheduled
        self._limits, self._metrics, self._tasks = limits, metrics, tasks
        self._lanes: dict[int, deque[Waiting]] = {}
        self._waiting = self._bytes = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def settle(self, topic: Topic, settles: Settles) -> Answers:
        """The store's answers. Trouble of the store is a status: UNAVAILABLE or UNKNOWN for each; past the bound on
        what may wait, THROTTLED."""
        if len(settles) == 0:
            return Answers.blank(0)
        size = _size(settles)
        if self._waiting and (
            self._waiting + len(settles) > self._limits.settles_waiting
            or self._bytes + size > self._limits.settles_bytes
        ):
            self._metrics.count("timeline_throttled_total", "settling", by=len(settles))
            return Answers.blank(len(settles), Status.THROTTLED)
        future: asyncio.Future[Answers] = asyncio.get_running_loop().create_future()
        self._waiting += len(settles)
        self._bytes += size
        self._idle.clear()
        lane = self._lanes.get(topic.uid)
        if lane is None:
            lane = self._lanes[topic.uid] = deque()
            lane.append((settles, future))
            self._tasks.spawn(self._run(topic, lane), f"settling {topic.name}", finishes=True)
        else:
            lane.append((settles, future))
        return await future

    async def _run(self, topic: Topic, lane: deque[Waiting]) -> None:
        """Works a lane until it is empty; the next settle opens a new one."""
        try:
            while lane:
                batch = _next_batch(lane, self._limits.store_batch_messages)
                answers = await self._call(topic, [settles for settles, _ in batch])
                start = 0
                for settles, future in batch:
                    if not future.done():
                        future.set_result(answers.part(start, start + len(settles)))
                    start += len(settles)
                    self._bytes -= _size(settles)
                self._waiting -= start
        finally:
            del self._lanes[topic.uid]
            if not self._lanes:
                self._idle.set()

    async def _call(self, topic: Topic, parts: list[Settles]) -> Answers:
        together = concat(parts)
        now_ms = self._now_ms()
        try:
            answers = await self._store.settle(topic, now_ms, together)
        except StoreError as trouble:
            nothing = isinstance(trouble, StoreUnavailable)
            answers = Answers.blank(len(together), Status.UNAVAILABLE if nothing else Status.UNKNOWN)
            answers.details = dict.fromkeys(starts(parts), str(trouble))
        dues_ms = np.where(answers.status == Status.UNKNOWN.code, now_ms, answers.due_ms)
        released = perhaps_done(answers) & (together.operation == Operation.RELEASE)
        self._scheduled(topic, together.ids, dues_ms, released, 0)
        return answers

    async def idle(self) -> None:
        """Returns when nothing is waiting."""
        await self._idle.wait()


def _size(settles: Settles) -> int:
    return settles.ids.nbytes + settles.reasons.nbytes


def _next_batch(lane: deque[Waiting], most: int) -> list[Waiting]:
    batch = [lane.popleft()]
    count = len(batch[0][0])
    while lane and count + len(lane[0][0]) <= most:
        batch.append(lane.popleft())
        count += len(batch[-1][0])
    return batch


def concat(parts: list[Settles]) -> Settles:
    """The parts one after the other."""
    if len(parts) == 1:
        return parts[0]
    return Settles(
        ids=Ragged.concat([part.ids for part in parts]),
        birth=np.concatenate([part.birth for part in parts]),
        version=np.concatenate([part.version for part in parts]),
        holders=Ragged.concat([part.holders for part in parts]),
        operation=np.concatenate([part.operation for part in parts]),
        time_ms=np.concatenate([part.time_ms for part in parts]),
        op=np.concatenate([part.op for part in parts]),
        unseen=np.concatenate([part.unseen for part in parts]),
        reasons=Ragged.concat([part.reasons for part in parts]),
    )
