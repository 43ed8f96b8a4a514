"""Intake: puts on their way to the store.

While one store call of a topic is in flight the next batch forms (group commit by pressure, no timer), in which peers
take turns; each put is answered after the store's commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from timeline.broker.api.admission import Scheduled, perhaps_done, starts, stumbled
from timeline.broker.fairness.fair_queue import FairQueue, Quota, RecentPeers
from timeline.broker.fairness.limits import Limits
from timeline.broker.fairness.loop_scheduler import LoopScheduler
from timeline.broker.lanes.metered_store import MeteredStore
from timeline.broker.tasks import Tasks
from timeline.metrics import Metrics
from timeline.model import Answers, Status, Topic
from timeline.storage_plugins.contract import Puts, StoreError, StoreUnavailable

KIB = 1024


@dataclass(slots=True, eq=False)
class _Waiting:
    puts: Puts
    bytes: int
    peer: str
    deadline_ms: float
    answer: asyncio.Future[Answers]


class Intake:
    """The queue of puts of one broker, a lane a topic. `deadline_ms` is monotonic: what did not start by then is not
    put, nor is what nobody waits for any more. `scheduled(topic, ids, due_ms, which, commit_seq)` is told of what was
    stored, or may have been, whether or not its producer still waits. A store that numbers its commits has it told of
    what is due at once while that is on its way, too."""

    def __init__(
        self, store: MeteredStore, clock_ms: Callable[[], int], monotonic_ms: Callable[[], float],
        limits: Limits, metrics: Metrics, tasks: Tasks, turns: LoopScheduler, scheduled: Scheduled,
    ) -> None:  # fmt: skip
        self._store, self._now_ms, self._monotonic_ms = store, clock_ms, monotonic_ms
        self._limits, self._metrics, self._tasks = limits, metrics, tasks
        self._turns, self._scheduled = turns, scheduled
        self._lanes: dict[int, FairQueue[_Waiting]] = {}
        self._room = Quota(limits.intake_messages, limits.intake_bytes)
        self._crowd = RecentPeers(monotonic_ms, limits.lately_ms)
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def bytes(self) -> int:
        """Bytes that wait for the store."""
        return self._room.bytes

    @property
    def waiting(self) -> int:
        """Puts that wait for the store."""
        return self._room.messages

    async def put(self, topic: Topic, puts: Puts, deadline_ms: float, peer: str = "") -> Answers:
        """The store's answers; THROTTLED at once when too much is waiting, UNAVAILABLE or UNKNOWN by what the store
        can say when it fails. `peer`: whose they are."""
        size = puts.payloads.nbytes + puts.headers.nbytes + puts.ids.nbytes
        self._crowd.seen(peer)
        if not self._room.admits(peer, len(puts), size):
            self._metrics.count("timeline_throttled_total", "intake", by=len(puts))
            return Answers.blank(len(puts), Status.THROTTLED)
        waiting = _Waiting(puts, size, peer, deadline_ms, asyncio.get_running_loop().create_future())
        self._room.add(peer, len(puts), size)
        self._idle.clear()
        lane = self._lanes.get(topic.uid)
        if lane is None:
            lane = self._lanes[topic.uid] = FairQueue()
            self._tasks.spawn(self._run(topic, lane), f"intake {topic.name}", finishes=True)
        lane.push(peer, waiting, len(puts) + size / KIB)
        return await waiting.answer

    async def idle(self) -> None:
        """Returns when nothing is waiting."""
        await self._idle.wait()

    async def _run(self, topic: Topic, lane: FairQueue[_Waiting]) -> None:
        """Works a lane until it is empty; the next put opens a new one."""
        ours = f"puts of topic:{topic.uid}"
        try:
            while lane:
                with self._turns.call(ours):
                    await self._call(topic, self._next_batch(lane))
                if lane:
                    await self._turns.take(ours)
        finally:
            del self._lanes[topic.uid]
            if not self._lanes:
                self._idle.set()

    def _next_batch(self, lane: FairQueue[_Waiting]) -> list[_Waiting]:
        limits, batch = self._limits, [lane.pop()]
        shared = self._store.embedded and self._crowd.several
        most = limits.shared_batch_messages if shared else limits.store_batch_messages
        most_bytes = limits.shared_batch_bytes if shared else limits.store_batch_bytes
        messages, size = len(batch[0].puts), batch[0].bytes
        while lane:
            messages, size = messages + len(lane.first().puts), size + lane.first().bytes
            if messages > most or size > most_bytes:
                break
            batch.append(lane.pop())
        return batch

    async def _call(self, topic: Topic, batch: list[_Waiting]) -> None:
        now_ms = self._monotonic_ms()
        started: list[_Waiting] = []
        for waiting in batch:
            # Whoever has gone may have sent it again and got an answer: what has not begun must not be done after it.
            if waiting.deadline_ms <= now_ms or waiting.answer.cancelled():
                self._answer(waiting, Answers.blank(len(waiting.puts), Status.UNAVAILABLE))
            else:
                started.append(waiting)
        if not started:
            return
        parts = [waiting.puts for waiting in started]
        try:
            answers = await self._put(topic, parts)
        except Exception as bug:
            answers = stumbled(sum(map(len, parts)), starts(parts), f"puts on topic {topic.name!r}", bug)
            self._metrics.count("timeline_task_crashes_total", "intake")
        start = 0
        for waiting in started:
            self._answer(waiting, answers.slice(start, start + len(waiting.puts)))
            start += len(waiting.puts)

    async def _put(self, topic: Topic, parts: list[Puts]) -> Answers:
        puts, now_ms = Puts.concat(parts), self._now_ms()
        if self._store.tells_commit_seq and (now := puts.due_ms <= now_ms).any():
            # The dealer wakes once the put is in line, and the lease that it calls for is committed with it.
            self._scheduled(topic, puts.ids, puts.due_ms, now, 0)
        try:
            answers = await self._store.put(topic, now_ms, puts)
        except StoreError as trouble:
            nothing = isinstance(trouble, StoreUnavailable)
            answers = Answers.blank(len(puts), Status.UNAVAILABLE if nothing else Status.UNKNOWN)
            answers.details = dict.fromkeys(starts(parts), str(trouble))
        self._scheduled(topic, puts.ids, puts.due_ms, perhaps_done(answers), answers.commit_seq)
        return answers

    def _answer(self, waiting: _Waiting, answers: Answers) -> None:
        self._room.remove(waiting.peer, len(waiting.puts), waiting.bytes)
        if not waiting.answer.done():
            waiting.answer.set_result(answers)
