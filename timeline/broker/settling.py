"""Settling: acks, extensions, releases and burials on their way to the store, ahead of queued puts.

While one store call of a topic is in flight the next batch forms: group commit by pressure, no timer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import numpy as np

from timeline.broker.limits import Limits
from timeline.broker.metered import MeteredStore
from timeline.broker.tasks import Tasks
from timeline.columns import Ragged
from timeline.model import Answers, Status, Topic
from timeline.storage_plugins.contract import Settles, StoreError, StoreUnavailable

Waiting = tuple[Settles, "asyncio.Future[Answers]"]


class Settling:
    """The queue of settles of one broker, a lane a topic."""

    def __init__(self, store: MeteredStore, now_ms: Callable[[], int], limits: Limits, tasks: Tasks) -> None:
        self._store = store
        self._now_ms = now_ms
        self._limits = limits
        self._tasks = tasks
        self._lanes: dict[int, deque[Waiting]] = {}
        self._waiting = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def settle(self, topic: Topic, settles: Settles) -> Answers:
        """The store's answers. Trouble of the store is a status: UNAVAILABLE or UNKNOWN for each; past the bound on
        what may wait, THROTTLED."""
        if len(settles) == 0:
            return Answers.blank(0)
        if self._waiting + len(settles) > self._limits.settles_waiting:
            return Answers.blank(len(settles), Status.THROTTLED)
        future: asyncio.Future[Answers] = asyncio.get_running_loop().create_future()
        self._waiting += len(settles)
        self._idle.clear()
        lane = self._lanes.get(topic.uid)
        if lane is None:
            lane = self._lanes[topic.uid] = deque()
            lane.append((settles, future))
            self._tasks.spawn(self._run(topic, lane), f"settling {topic.name}")
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
                self._waiting -= start
        finally:
            del self._lanes[topic.uid]
            if not self._lanes:
                self._idle.set()

    async def _call(self, topic: Topic, parts: list[Settles]) -> Answers:
        together = concat(parts)
        try:
            return await self._store.settle(topic, self._now_ms(), together)
        except StoreError as trouble:
            nothing = isinstance(trouble, StoreUnavailable)
            return Answers.blank(len(together), Status.UNAVAILABLE if nothing else Status.UNKNOWN)

    async def idle(self) -> None:
        """Returns when nothing is waiting."""
        await self._idle.wait()


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
