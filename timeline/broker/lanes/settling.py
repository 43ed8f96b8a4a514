"""Settling: acks, extensions, releases and burials on their way to the store, ahead of queued puts.

While one store call of a topic is in flight the next batch forms: group commit by pressure, no timer. Peers take turns
in it, and where there are several a large frame goes in parts, so that nobody waits for all that another one sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from timeline.broker.api.admission import Scheduled, perhaps_done, starts, stumbled
from timeline.broker.fairness.fair_queue import FairQueue, Quota, RecentPeers
from timeline.broker.fairness.limits import Limits
from timeline.broker.fairness.loop_scheduler import LoopScheduler
from timeline.broker.lanes.metered_store import MeteredStore
from timeline.broker.tasks import Tasks
from timeline.metrics import Metrics
from timeline.model import Answers, Operation, Status, Topic
from timeline.storage_plugins.contract import Settles, StoreError, StoreUnavailable

KIB = 1024


@dataclass(slots=True, eq=False)
class _Frame:
    """Settles of one frame, and the answers to those that are `done`."""

    settles: Settles
    bytes: int
    peer: str
    answer: asyncio.Future[Answers]
    answers: Answers | None = None
    done: int = 0

    def take(self, answers: Answers, start: int) -> bool:
        """Keeps the answers to those from `start` on; whether all are answered."""
        self.done += len(answers)
        if len(answers) == len(self.settles):
            self.answers = answers
            return True
        if self.answers is None:
            self.answers = Answers.blank(len(self.settles))
        self.answers.assign(np.arange(start, start + len(answers)), answers)
        return self.done == len(self.settles)


@dataclass(slots=True, eq=False)
class _Part:
    """Some settles of a frame, from `start` on."""

    frame: _Frame
    settles: Settles
    start: int

    @property
    def bytes(self) -> int:
        return self.settles.ids.nbytes + self.settles.reasons.nbytes


class Settling:
    """The queue of settles of one broker, a lane a topic, in which peers take turns. `scheduled(topic, ids, due_ms,
    which, 0)` is told of what was released, or may have been, whether or not its consumer still waits."""

    def __init__(
        self, store: MeteredStore, now_ms: Callable[[], int], monotonic_ms: Callable[[], float],
        limits: Limits, metrics: Metrics, tasks: Tasks, turns: LoopScheduler, scheduled: Scheduled,
    ) -> None:  # fmt: skip
        self._store, self._now_ms, self._scheduled = store, now_ms, scheduled
        self._limits, self._metrics, self._tasks, self._turns = limits, metrics, tasks, turns
        self._lanes: dict[int, FairQueue[_Part]] = {}
        self._room = Quota(limits.settles_waiting, limits.settles_bytes)
        self._crowd = RecentPeers(monotonic_ms, limits.lately_ms)
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def waiting(self) -> int:
        """Settles that wait for the store."""
        return self._room.messages

    async def settle(self, topic: Topic, settles: Settles, peer: str = "") -> Answers:
        """The store's answers. Trouble of the store is a status: UNAVAILABLE or UNKNOWN for each; past the bound on
        what may wait, THROTTLED. `peer`: whose they are; empty: this broker's own."""
        if len(settles) == 0:
            return Answers.blank(0)
        size = settles.ids.nbytes + settles.reasons.nbytes
        self._crowd.seen(peer)
        if not self._room.admits(peer, len(settles), size):
            self._metrics.count("timeline_throttled_total", "settling", by=len(settles))
            return Answers.blank(len(settles), Status.THROTTLED)
        frame = _Frame(settles, size, peer, asyncio.get_running_loop().create_future())
        self._room.add(peer, len(settles), size)
        self._idle.clear()
        lane = self._lanes.get(topic.uid)
        if lane is None:
            lane = self._lanes[topic.uid] = FairQueue()
            self._tasks.spawn(self._run(topic, lane), f"settling {topic.name}", finishes=True)
        for part in self._parts(frame):
            lane.push(peer, part, len(part.settles) + part.bytes / KIB)
        return await frame.answer

    def _parts(self, frame: _Frame) -> list[_Part]:
        """The frame as it waits: whole, but for one that is large where others settle too."""
        settles, most = frame.settles, self._limits.shared_batch_messages
        if len(settles) <= most or not (self._store.embedded and self._crowd.several):
            return [_Part(frame, settles, 0)]
        return [_Part(frame, settles.slice(at, at + most), at) for at in range(0, len(settles), most)]

    async def _run(self, topic: Topic, lane: FairQueue[_Part]) -> None:
        """Works a lane until it is empty; the next settle opens a new one."""
        ours = f"settles of topic:{topic.uid}"
        try:
            while lane:
                batch = self._next_batch(lane)
                parts = [part.settles for part in batch]
                try:
                    with self._turns.call(ours):
                        answers = await self._call(topic, parts)
                except Exception as bug:
                    answers = stumbled(sum(map(len, parts)), starts(parts), f"settles on topic {topic.name!r}", bug)
                    self._metrics.count("timeline_task_crashes_total", "settling")
                start = 0
                for part in batch:
                    self._answer(part, answers.slice(start, start + len(part.settles)))
                    start += len(part.settles)
                if lane:
                    await self._turns.take(ours)
        finally:
            del self._lanes[topic.uid]
            if not self._lanes:
                self._idle.set()

    def _next_batch(self, lane: FairQueue[_Part]) -> list[_Part]:
        limits, batch = self._limits, [lane.pop()]
        shared = self._store.embedded and self._crowd.several
        most = limits.shared_batch_messages if shared else limits.store_batch_messages
        most_bytes = limits.shared_batch_bytes if shared else limits.store_batch_bytes
        count, size = len(batch[0].settles), batch[0].bytes
        while lane:
            part = lane.first()
            count, size = count + len(part.settles), size + part.bytes
            if count > most or size > most_bytes:
                break
            batch.append(lane.pop())
        return batch

    def _answer(self, part: _Part, answers: Answers) -> None:
        frame = part.frame
        if frame.take(answers, part.start):
            self._room.remove(frame.peer, len(frame.settles), frame.bytes)
            if not frame.answer.done() and frame.answers is not None:
                frame.answer.set_result(frame.answers)

    async def _call(self, topic: Topic, parts: list[Settles]) -> Answers:
        together = Settles.concat(parts)
        now_ms = self._now_ms()
        try:
            answers = await self._store.settle(topic, now_ms, together)
        except StoreError as trouble:
            nothing = isinstance(trouble, StoreUnavailable)
            answers = Answers.blank(len(together), Status.UNAVAILABLE if nothing else Status.UNKNOWN)
            answers.details = dict.fromkeys(starts(parts), str(trouble))
        if Operation.RELEASE in together.operation.tobytes():
            dues_ms = np.where(answers.status == Status.UNKNOWN.code, now_ms, answers.due_ms)
            released = perhaps_done(answers) & (together.operation == Operation.RELEASE)
            self._scheduled(topic, together.ids, dues_ms, released, 0)
        return answers

    async def idle(self) -> None:
        """Returns when nothing is waiting."""
        await self._idle.wait()
