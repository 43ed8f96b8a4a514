"""Lanes: puts and settles on their way to the store, committed in groups; and the store as the broker uses it.

The store's calls are timed, counted and checked, and its health follows from them. Puts and settles have a lane per
topic and kind. While one store call of a lane is in flight, the next batch forms: group commit by pressure, no timer.
Peers take turns in it. If several peers share a store of this process, a batch is small, and a large frame of settles
goes in parts. So no peer waits for all that another one sent. Each frame is answered after the store's commit.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import numpy as np

from timeline.broker.dispatch.rounds import LeaseTimes
from timeline.broker.fairness import FairQueue, Quota, RecentPeers
from timeline.broker.journal.events import Journal
from timeline.broker.late import Spans
from timeline.broker.runtime import Runtime
from timeline.columns import Bools, ColumnBatch, Int64, Ragged
from timeline.model import Answers, Operation, Rows, Status, Topic
from timeline.storage_plugins.contract import (
    Grant,
    LeasedRows,
    Mutations,
    Opened,
    Page,
    Puts,
    Settles,
    Store,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    StoreUnknown,
    Swept,
    TagStep,
)

log = logging.getLogger("timeline.broker")
T = TypeVar("T")
HELD_PAGE = 500
EXPIRED = bytes([Status.EXPIRED.code])
NOT_FOUND = bytes([Status.NOT_FOUND.code])
ON_THE_WAY = frozenset({"put", "mutate", "lease_due"})
"""Calls that messages wait for."""
ASIDE = frozenset({"count_due", "inspect", "next_dues", "room"})
"""Calls whose trouble is theirs alone. Counting many millions of rows may take longer than a healthy store permits, and
no message waits for it."""
OPEN_AGAIN = "Bring the old one back, and this broker goes on by itself. To accept what is there, restart every broker."
ENDS = {
    Operation.ACK: ("acked", "acked"),
    Operation.RELEASE: ("released", "unseen"),
    Operation.BURY: ("buried", "buried"),
}
"""How each settle ends a lease; second, if no handler saw the message."""

ANSWERS: dict[str, type] = {
    "put": Answers, "settle": Answers, "mutate": Answers, "mutate_tag": TagStep, "lease_due": LeasedRows,
    "held_by": Page, "scan": Page, "count_due": np.ndarray, "sweep": Swept, "topics": list, "create_topic": Topic,
    "update_topic": Topic, "inspect": Opened,
}  # fmt: skip
"""The type of each call's answer. Other calls may answer anything."""


class MeteredStore:
    """A `Store` whose calls are measured, and the store's health.

    - `changed` is called when `down` may have changed.
    - `used(uid)` is called after a call that may have changed messages of a topic.
    - `journal`: hears what happened to messages.
    - `slow`: when calls on messages' way took `slow_ms` or longer. Other topics' messages may have waited for them.
    - `refused`: why the present store must not be used: it is another one, or its settings lose messages. It is asked
      only whether that has changed. Empty: it may be used.
    - `full`: only disk space is missing.
    - `warnings`: sentences on settings that weaken the store.
    """

    def __init__(
        self,
        store: Store,
        runtime: Runtime,
        changed: Callable[[], None],
        used: Callable[[int], object],
        journal: Journal | None = None,
    ) -> None:
        self.store, self.journal = store, journal
        self._clock, self._slow_ms, self._metrics = runtime.clock, runtime.limits.slow_ms, runtime.metrics
        self._changed, self._used = changed, used
        self._down = self.refused = ""
        self.full = False
        self.warnings: tuple[str, ...] = ()
        self._opened: Opened | None = None
        self._server = ""
        self.slow = Spans()
        self._lease_times = LeaseTimes()
        self._under_way: set[asyncio.Task[Any]] = set()

    @property
    def lease_p99_ms(self) -> float | None:
        """99 of 100 messages meet a lease that takes no longer. None until one has been measured."""
        return self._lease_times.p99_ms

    @property
    def lease_lead_ms(self) -> float | None:
        """The time of a lease for leasing ahead. See `LeaseTimes.lead_ms`."""
        return self._lease_times.lead_ms

    @property
    def down(self) -> str:
        """Why the store cannot be used. Empty: it can."""
        return self.refused or self._down

    @down.setter
    def down(self, why: str) -> None:
        """Trouble sets it, and only a `check` that succeeds clears it. On a full disk reads and settles go on, so they
        prove nothing."""
        self._down = why
        self._changed()

    @property
    def embedded(self) -> bool:
        """Whether the store is a part of this process, so that all wait for each call."""
        return not self.store.capabilities.shared

    async def open(self) -> Opened:
        """Open the store. Raise StoreRefused or StoreUnavailable."""
        self._opened = await self.store.open()
        self._found(self._opened.server, self._opened.warnings)
        return self._opened

    async def inspect(self) -> None:
        """Ask the store what `open` asked: whether it is the one that was opened, and its server's settings.

        Raise StoreUnavailable if it does not answer, or must not be used.
        """
        opened = self._opened
        assert opened is not None, "the store was not opened yet"
        try:
            found = await self.call("inspect", self.store.inspect())
        except StoreRefused as weak:
            self._found("", (weak.reason,))
            self._refuse(weak.reason)
        else:
            self._found(found.server, found.warnings)
            self._refuse("" if found.cluster_uid == opened.cluster_uid else _another(opened, found))
        if self.refused:
            raise StoreUnavailable(self.refused)

    def _found(self, server: str, warnings: tuple[str, ...]) -> None:
        """Log the warnings that are new, and set the gauges."""
        for warning in warnings:
            if warning not in self.warnings:
                log.warning("store: %s", warning)
        for warning in self.warnings:
            if warning not in warnings:
                log.info("store: this is over: %s", warning)
        self.warnings = warnings
        self._metrics.gauge("timeline_store_warnings", len(warnings))
        if server and server != self._server:
            if self._server:
                self._metrics.forget("timeline_store_info", self._server)
            self._metrics.gauge("timeline_store_info", 1, server)
            self._server = server

    def _refuse(self, why: str) -> None:
        if why != self.refused:
            if why:
                log.error("the store is not used any more: %s", why)
            self.refused = why
            self._changed()

    async def call(self, name: str, work: Coroutine[Any, Any, T], asked: int = 0) -> T:
        """Await a store call. The caller may be cancelled; a store's call that has begun runs to its end.

        Raise StoreUnavailable, StoreUnknown, or another StoreError that the contract names. An error that a plugin
        should not raise counts as UNKNOWN, because the outcome is unknown. `asked`: see `_flaw_of`.
        """
        task = asyncio.get_running_loop().create_task(self._measured(name, work, asked))
        self._under_way.add(task)
        task.add_done_callback(self._over)
        return await asyncio.shield(task)

    def _over(self, task: asyncio.Task[Any]) -> None:
        """Retrieve the outcome. If the caller was cancelled, nothing else does."""
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()

    async def _measured(self, name: str, work: Coroutine[Any, Any, T], asked: int) -> T:
        if self.refused and name != "inspect":
            work.close()
            raise StoreUnavailable(self.refused)
        started_ms, outcome = self._clock.monotonic_ms(), "OK"
        try:
            answer = await work
            if flaw := _flaw_of(name, answer, asked):
                log.error("the storage plugin %s", flaw)
                raise StoreUnknown(f"the storage plugin {flaw}")
        except StoreError as refused:
            outcome = refused.code
            if isinstance(refused, StoreUnavailable) and name not in ASIDE:
                why = refused.reason or refused.code
                self.full = isinstance(refused, StoreFull)
                if not self._down:
                    what = "takes no puts" if self.full else "is down"
                    log.warning("the store %s, and asked again until it is back: %s", what, why)
                self.down = why
            raise
        except (Exception, asyncio.CancelledError) as broken:
            # One call's trouble must not stop all others. It may be a bug that one frame met, or a cancelled task of
            # the plugin's own.
            task = asyncio.current_task()
            if isinstance(broken, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise
            outcome = "UNKNOWN"
            log.exception("the storage plugin raised what its contract does not allow, in %s", name)
            raise StoreUnknown(f"{type(broken).__name__}: {broken}") from broken
        finally:
            took_ms = self._clock.monotonic_ms() - started_ms
            self._metrics.store_call(name, outcome, took_ms)
            if took_ms >= self._slow_ms and name in ON_THE_WAY:
                self.took(took_ms)
        if name == "check" and self._down:
            self.full = False
            self.down = ""
        return answer

    def took(self, took_ms: float) -> None:
        """Note a slow call on messages' way, which ends now."""
        now_ms = self._clock.now_ms()
        self.slow.add(now_ms - int(took_ms), now_ms)

    async def put(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        """Put messages. The caller must not be cancelled meanwhile: no task stands between, as it does in `call`."""
        work = self._measured("put", self.store.put(topic, now_ms, puts), len(puts))
        answers = await self._answered(topic, puts, work)
        if NOT_FOUND in answers.status.tobytes():
            await self._dropped(answers)
        return answers

    async def _dropped(self, answers: Answers) -> None:
        """Find out why puts found no topic. If this is another store, they are UNAVAILABLE; else the topic was
        dropped."""
        try:
            await self.inspect()
        except StoreUnavailable as trouble:
            gone = answers.status == Status.NOT_FOUND.code
            answers.status[gone] = Status.UNAVAILABLE.code
            answers.details.update(dict.fromkeys(np.flatnonzero(gone).tolist(), trouble.reason))

    async def settle(self, topic: Topic, now_ms: int, settles: Settles) -> Answers:
        """Settle messages. The caller must not be cancelled meanwhile, as for `put`."""
        work = self._measured("settle", self.store.settle(topic, now_ms, settles), len(settles))
        answers = await self._answered(topic, settles, work)
        self._ended(topic, settles, answers)
        return answers

    async def mutate(self, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
        """Move, cancel, revive or purge messages."""
        work = self.call("mutate", self.store.mutate(topic, now_ms, mutations), len(mutations))
        return await self._answered(topic, mutations, work)

    async def _answered(
        self, topic: Topic, asked: Puts | Settles | Mutations, work: Coroutine[Any, Any, Answers]
    ) -> Answers:
        """Return what the store answers, once it is counted and in the journal."""
        try:
            answers = await work
        except StoreUnknown:
            if self.journal is not None and len(asked):
                self.journal.unknown(topic, asked)
            raise
        finally:
            self._used(topic.uid)
        by_puts = sum(gone.expired for gone in answers.displaced.values()) if answers.displaced else 0
        if expired := answers.status.tobytes().count(EXPIRED) + by_puts:
            self.expired(topic, expired)
        if self.journal is not None:
            self.journal.answered(topic, asked, answers)
        return answers

    def _ended(self, topic: Topic, settles: Settles, answers: Answers) -> None:
        """Count the leases that these settles ended, each once."""
        good = (answers.status == Status.OK.code) & (answers.repeat == 0)
        kinds = settles.operation[good].astype(np.intp) * 2 + settles.unseen[good]
        for kind, count in enumerate(np.bincount(kinds).tolist()):
            if count and (ends := ENDS.get(Operation(kind // 2))):
                self._metrics.count(
                    "timeline_leases_ended_total", self._metrics.topic(topic.name), ends[kind % 2], by=count
                )

    def expired(self, topic: Topic, count: int) -> None:
        """Count messages that were removed because they had expired."""
        if count:
            self._metrics.count("timeline_expired_total", self._metrics.topic(topic.name), by=count)

    async def lease_due(
        self,
        topic: Topic,
        buckets: Sequence[int] | None,
        now_ms: int,
        due_before_ms: int,
        grants: Sequence[Grant],
        overdue_ms: int,
    ) -> LeasedRows:
        started_ms = self._clock.monotonic_ms()
        call = self.store.lease_due(topic, buckets, now_ms, due_before_ms, grants, overdue_ms)
        leased = await self.call("lease_due", call, len(grants))
        if len(leased.rows):
            self._used(topic.uid)
            name = self._metrics.topic(topic.name)
            if leased.prior_holders.nbytes:
                ran_out = int(np.count_nonzero(leased.prior_holders.sizes))
                self._metrics.count("timeline_leases_ended_total", name, "ran_out", by=ran_out)
            if overdue_ms:
                self._metrics.count("timeline_stranded_total", name, by=len(leased.rows))
            back_ms = self._clock.monotonic_ms()
            self._lease_times.took(back_ms - started_ms, back_ms)
        self.expired(topic, leased.expired)
        if self.journal is not None:
            self.journal.leased(topic, leased)
        return leased

    async def held(self, topic: Topic, now_ms: int, holder: bytes) -> AsyncIterator[Rows]:
        """Yield what `holder` holds, with payloads, page by page."""
        cursor: bytes | None = b""
        while cursor is not None:
            page = await self.call("held_by", self.store.held_by(topic, now_ms, holder, cursor, HELD_PAGE))
            cursor = page.cursor
            if len(page.rows):
                yield page.rows


def _another(opened: Opened, found: Opened) -> str:
    """Return why the present store is not the one that was opened, and what to do."""
    there = f"cluster {found.cluster_uid}" if found.cluster_uid else "no cluster"
    return (
        f"the store is another one, or has lost its data. This broker opened cluster {opened.cluster_uid}, and finds "
        f"{there} there now. {OPEN_AGAIN}"
    )


def _flaw_of(name: str, answer: object, asked: int) -> str:
    """Return what is wrong with a plugin's answer. Empty: nothing. A wrong answer costs that call alone.

    `asked`: how many messages a put, settle or mutate is about, or how many grants a lease has.
    """
    kind = ANSWERS.get(name, object)
    if not isinstance(answer, kind):
        return f"answered {name} with {answer!r:.80}, not {kind.__name__}"
    if isinstance(answer, Answers):
        given = _length(answer.status)
        return f"gave {given} answers for {asked} messages" if given != asked else _unequal(answer, asked)
    if not isinstance(answer, LeasedRows):
        return ""
    rows, buried, next_due_ms = map(_anything, (answer.rows, answer.buried, answer.next_due_ms))
    if not isinstance(rows, Rows) or not isinstance(buried, Rows):
        return f"leased {rows!r:.80} and buried {buried!r:.80}, not Rows"
    count = _length(rows.ids)
    if _length(answer.grant) != count or _length(answer.was_due_ms) != count:
        return f"leased {count} rows, and said of another number what they were"
    if count and int(answer.grant.max()) >= asked:
        return f"leased for grant {int(answer.grant.max())} of {asked}"
    if next_due_ms is not None and not isinstance(next_due_ms, int | np.integer):
        return f"said {next_due_ms!r:.80} of when more is due"
    return _unequal(rows, count)


def _anything(told: object) -> object:
    """Return `told` without its declared type: a plugin's answer may be anything."""
    return told


def _unequal(batch: ColumnBatch, count: int) -> str:
    """Return which column of `batch` has not `count` items of its type. Empty: none."""
    for field in batch.columns:
        column = getattr(batch, field.name)
        if field.kind in ("numbers", "strings") and not (column is None and field.optional):
            kind = np.ndarray if field.kind == "numbers" else Ragged
            if not isinstance(column, kind) or _length(column) != count:
                return f"answered with a {field.name} of {_length(column)} items for {count} messages"
            if isinstance(column, np.ndarray) and column.dtype.kind not in "biu":
                return f"answered with a {field.name} of {column.dtype}, not integers"
    return ""


def _length(column: object) -> int:
    """Return how many items `column` has. -1: it is no column."""
    return len(column) if isinstance(column, np.ndarray | Ragged) else -1


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


@dataclass(slots=True, eq=False)
class _Lane(Generic[B]):
    """What waits for the store on one topic, and the newest record of the topic that came with it."""

    topic: Topic
    frames: FairQueue[_Waiting[B]]


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
        self._lanes: dict[int, _Lane[B]] = {}
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
            if lane.topic.revision < topic.revision:
                lane.topic = topic
            lane.frames.push(peer, waiting, len(batch) + size / KIB)
        else:
            lane = self._lanes[topic.uid] = _Lane(topic, FairQueue())
            self._tasks.spawn(self._run(lane, waiting), f"{self.lane} {topic.name}", finishes=True)
        return waiting.answer

    async def _run(self, lane: _Lane[B], first: _Waiting[B]) -> None:
        """Work a lane until it is empty, from the frame that opened it. The next frame opens a new one."""
        uid, frames = lane.topic.uid, lane.frames
        ours = f"{self.what} of topic:{uid}"
        try:
            while True:
                with self._scheduler.work(ours, waits=True):
                    await self._call(lane.topic, self._next_batch(frames, first))
                if not frames:
                    return
                await self._scheduler.take(ours)
                first = frames.pop()
        finally:
            del self._lanes[uid]
            if not self._lanes:
                self._idle.set()

    def _next_batch(self, lane: FairQueue[_Waiting[B]], first: _Waiting[B]) -> list[_Waiting[B]]:
        """Return `first`, and what goes to the store with it."""
        chosen, count, size = [first], len(first.batch), first.bytes
        if not lane:
            return chosen
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
