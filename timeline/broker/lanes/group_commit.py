"""Group commit: puts and settles on their way to the store, a lane per topic and kind.

While one store call of a lane is in flight, the next batch forms: group commit by pressure, no timer. Peers take turns
in it. If several peers share a store of this process, a batch is small, and a large frame of settles goes in parts. So
no peer waits for all that another one sent. Each frame is answered after the store's commit.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import numpy as np

from timeline.broker.fairness import FairQueue, Quota, RecentPeers
from timeline.broker.lanes.metered_store import MeteredStore
from timeline.broker.runtime import Runtime
from timeline.columns import Bools, Int64, Ragged
from timeline.model import Answers, Operation, Status, Topic
from timeline.storage_plugins.contract import Puts, Settles, StoreError, StoreUnavailable

log = logging.getLogger("timeline.broker")
KIB = 1024
Scheduled: TypeAlias = Callable[[Topic, Ragged, Int64, Bools, int], None]
"""Hears that messages (ids, dues; those `which`) have new due times, or may have. The last argument is the store's
`commit_seq`; 0: unknown."""
B = TypeVar("B", Puts, Settles)


@dataclass(slots=True, eq=False)
class _Waiting(Generic[B]):
    """One frame's part of a lane. `deadline_ms`: monotonic."""

    batch: B
    bytes: int
    peer: str
    deadline_ms: float
    answer: asyncio.Future[Answers]


class GroupCommit(ABC, Generic[B]):
    """The lanes of one kind of batch in one broker. `scheduled` hears what has a new due time, or may have, whether or
    not its sender still waits."""

    lane: ClassVar[str]
    """Its name in metrics and of its tasks."""
    what: ClassVar[str]
    droppable: ClassVar[bool]
    """Whether a batch is not begun if its sender waits no more. A put that was sent again must not be done after the
    answer to the second call."""
    _kind: ClassVar[Any]

    def __init__(self, store: MeteredStore, runtime: Runtime, scheduled: Scheduled, messages: int, bytes_: int) -> None:
        self._store, self._scheduled = store, scheduled
        self._clock, self._limits = runtime.clock, runtime.limits
        self._metrics, self._tasks, self._scheduler = runtime.metrics, runtime.tasks, runtime.scheduler
        self._lanes: dict[int, FairQueue[_Waiting[B]]] = {}
        self._quota = Quota(messages, bytes_)
        self._recent = RecentPeers(runtime.clock.monotonic_ms, runtime.limits.lately_ms)
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def bytes(self) -> int:
        """Bytes that wait for the store."""
        return self._quota.bytes

    @property
    def waiting(self) -> int:
        """Messages that wait for the store."""
        return self._quota.messages

    async def idle(self) -> None:
        """Return when nothing is waiting."""
        await self._idle.wait()

    @abstractmethod
    async def _ask(self, topic: Topic, now_ms: int, batch: B) -> Answers:
        """Return the store's answers."""

    @abstractmethod
    def _tell_due(self, topic: Topic, now_ms: int, batch: B, answers: Answers) -> None:
        """Pass new due times to `scheduled`."""

    def _admits(self, batch: B, size: int, peer: str) -> bool:
        self._recent.seen(peer)
        if self._quota.admits(peer, len(batch), size):
            return True
        self._metrics.count("timeline_throttled_total", self.lane, by=len(batch))
        return False

    @property
    def _shared(self) -> bool:
        """Whether several peers share a store that holds up this process while it works."""
        return self._store.embedded and self._recent.several

    def _push(self, topic: Topic, batch: B, size: int, peer: str, deadline_ms: float) -> asyncio.Future[Answers]:
        """Add an admitted batch to the topic's lane."""
        waiting = _Waiting(batch, size, peer, deadline_ms, asyncio.get_running_loop().create_future())
        self._quota.add(peer, len(batch), size)
        self._idle.clear()
        lane = self._lanes.get(topic.uid)
        if lane is not None:
            lane.push(peer, waiting, len(batch) + size / KIB)
        else:
            lane = self._lanes[topic.uid] = FairQueue()
            self._tasks.spawn(self._run(topic, lane, waiting), f"{self.lane} {topic.name}", finishes=True)
        return waiting.answer

    async def _run(self, topic: Topic, lane: FairQueue[_Waiting[B]], first: _Waiting[B]) -> None:
        """Work a lane until it is empty, from the frame that opened it. The next frame opens a new one."""
        ours = f"{self.what} of topic:{topic.uid}"
        try:
            while True:
                with self._scheduler.work(ours, waits=True):
                    await self._call(topic, self._next_batch(lane, first))
                if not lane:
                    return
                await self._scheduler.take(ours)
                first = lane.pop()
        finally:
            del self._lanes[topic.uid]
            if not self._lanes:
                self._idle.set()

    def _next_batch(self, lane: FairQueue[_Waiting[B]], first: _Waiting[B]) -> list[_Waiting[B]]:
        """Return `first`, and what goes to the store with it."""
        chosen, count, size = [first], len(first.batch), first.bytes
        limits, shared = self._limits, self._shared
        most = limits.shared_batch_messages if shared else limits.store_batch_messages
        most_bytes = limits.shared_batch_bytes if shared else limits.store_batch_bytes
        while lane:
            following = lane.first()
            count, size = count + len(following.batch), size + following.bytes
            if count > most or size > most_bytes:
                break
            chosen.append(lane.pop())
        return chosen

    async def _call(self, topic: Topic, chosen: list[_Waiting[B]]) -> None:
        now_ms = self._clock.monotonic_ms()
        begun: list[_Waiting[B]] = []
        for waiting in chosen:
            if waiting.deadline_ms <= now_ms or (self.droppable and waiting.answer.cancelled()):
                self._answer(waiting, Answers.blank(len(waiting.batch), Status.UNAVAILABLE))
            else:
                begun.append(waiting)
        if not begun:
            return
        ends: list[int] = list(accumulate(len(waiting.batch) for waiting in begun))
        starts = [0, *ends[:-1]]
        try:
            answers = await self._commit(topic, self._kind.concat([waiting.batch for waiting in begun]), starts)
        except Exception as bug:
            # Nobody may wait for ever: neither these frames nor those behind them.
            log.error("%s on topic %r failed and go on", self.what, topic.name, exc_info=bug)
            answers = _failed(ends[-1], starts, Status.UNKNOWN, f"{type(bug).__name__}: {bug}")
            self._metrics.count("timeline_task_crashes_total", self.lane)
        for waiting, start, end in zip(begun, starts, ends, strict=True):
            self._answer(waiting, answers.slice(start, end))

    async def _commit(self, topic: Topic, batch: B, starts: list[int]) -> Answers:
        now_ms = self._clock.now_ms()
        try:
            answers = await self._ask(topic, now_ms, batch)
        except StoreError as trouble:
            status = Status.UNAVAILABLE if isinstance(trouble, StoreUnavailable) else Status.UNKNOWN
            answers = _failed(len(batch), starts, status, trouble.detail)
        self._tell_due(topic, now_ms, batch, answers)
        return answers

    def _answer(self, waiting: _Waiting[B], answers: Answers) -> None:
        self._quota.remove(waiting.peer, len(waiting.batch), waiting.bytes)
        if not waiting.answer.done():
            waiting.answer.set_result(answers)


class Intake(GroupCommit[Puts]):
    """Puts. Where the store numbers its commits, `scheduled` hears of messages due at once while they are on
    their way."""

    lane, what, droppable, _kind = "intake", "puts", True, Puts

    def __init__(self, store: MeteredStore, runtime: Runtime, scheduled: Scheduled) -> None:
        super().__init__(store, runtime, scheduled, runtime.limits.intake_messages, runtime.limits.intake_bytes)

    async def put(self, topic: Topic, puts: Puts, deadline_ms: float, peer: str = "") -> Answers:
        """Return the store's answers, THROTTLED at once if too much is waiting.

        If the store fails, each is UNAVAILABLE or UNKNOWN. Puts that did not begin by monotonic `deadline_ms` are
        UNAVAILABLE. `peer`: whose they are.
        """
        size = puts.payloads.nbytes + puts.headers.nbytes + puts.ids.nbytes
        if not self._admits(puts, size, peer):
            return Answers.blank(len(puts), Status.THROTTLED)
        return await self._push(topic, puts, size, peer, deadline_ms)

    async def _ask(self, topic: Topic, now_ms: int, batch: Puts) -> Answers:
        if self._store.store.tells_commit_seq and (now := batch.due_ms <= now_ms).any():
            # The dealer wakes once the put is in line, and the lease that it calls for is committed with it.
            self._scheduled(topic, batch.ids, batch.due_ms, now, 0)
        return await self._store.put(topic, now_ms, batch)

    def _tell_due(self, topic: Topic, now_ms: int, batch: Puts, answers: Answers) -> None:
        self._scheduled(topic, batch.ids, batch.due_ms, perhaps_done(answers), answers.commit_seq)


class Settling(GroupCommit[Settles]):
    """Acks, extensions, releases, burials and regrants. They go ahead of queued puts. Each is done even if its sender
    waits no more."""

    lane, what, droppable, _kind = "settling", "settles", False, Settles

    def __init__(self, store: MeteredStore, runtime: Runtime, scheduled: Scheduled) -> None:
        super().__init__(store, runtime, scheduled, runtime.limits.settles_waiting, runtime.limits.settles_bytes)

    async def settle(self, topic: Topic, settles: Settles, peer: str = "") -> Answers:
        """Return the store's answers, THROTTLED at once if too much is waiting. If the store fails, each is UNAVAILABLE
        or UNKNOWN. `peer`: whose they are; empty: this broker's own."""
        if len(settles) == 0:
            return Answers.blank(0)
        if not self._admits(settles, _size(settles), peer):
            return Answers.blank(len(settles), Status.THROTTLED)
        most = self._limits.shared_batch_messages
        if len(settles) <= most or not self._shared:
            return await self._push(topic, settles, _size(settles), peer, math.inf)
        parts = [settles.slice(at, at + most) for at in range(0, len(settles), most)]
        answers = [self._push(topic, part, _size(part), peer, math.inf) for part in parts]
        return Answers.concat([await answer for answer in answers])

    async def _ask(self, topic: Topic, now_ms: int, batch: Settles) -> Answers:
        return await self._store.settle(topic, now_ms, batch)

    def _tell_due(self, topic: Topic, now_ms: int, batch: Settles, answers: Answers) -> None:
        if Operation.RELEASE in batch.operation.tobytes():
            dues_ms = np.where(answers.status == Status.UNKNOWN.code, now_ms, answers.due_ms)
            released = perhaps_done(answers) & (batch.operation == Operation.RELEASE)
            self._scheduled(topic, batch.ids, dues_ms, released, 0)


def _size(settles: Settles) -> int:
    return settles.ids.nbytes + settles.reasons.nbytes


def _failed(count: int, starts: Sequence[int], status: Status, why: str) -> Answers:
    """Return the same status for each. The first of each frame gets the sentence."""
    answers = Answers.blank(count, status)
    answers.details = dict.fromkeys(starts, why)
    return answers


def perhaps_done(answers: Answers) -> Bools:
    """Return which were answered OK, or UNKNOWN."""
    done: Bools = (answers.status == Status.OK.code) | (answers.status == Status.UNKNOWN.code)
    return done
