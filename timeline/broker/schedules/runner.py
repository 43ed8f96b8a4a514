"""The looks of one broker at schedules: a consumer of the internal topic, in this process.

Each record that it is dealt is due for a look. The look puts the occurrences that the record names, then the next
record, and then ends this one. A crash anywhere repeats the look: what was put answers DUPLICATE.

A record is ended only when the one before it is gone. So while a record is there, the next one is there too if it was
ever put. One scan then tells whether a look still counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from timeline.broker.catalog import Readiness
from timeline.broker.dispatch.dealer import Dealer, Dealers
from timeline.broker.dispatch.leased_batch import LeasedBatch
from timeline.broker.dispatch.roster import OwnConsumer
from timeline.broker.runtime import Runtime, Underway
from timeline.broker.schedules.records import OccurrenceAnswer, ScheduleStore, parts_of, read_record
from timeline.model import Operation, State, Status, Topic
from timeline.schedules.looks import UNSURE, Look, ScheduledMessage, plan, watched
from timeline.schedules.record import SCHEDULES_TOPIC, ScheduleRecord
from timeline.storage_plugins.contract import Settles, StoreError

log = logging.getLogger("timeline.broker")

ROOM_MESSAGES, ROOM_BYTES = 128, 8 * 1024 * 1024
"""Records that this broker looks at, at a time."""
READ_AT_ONCE = 16
PART_MESSAGES = 500
"""Occurrences that one call puts at most."""
FIRST_RETRY_MS, LAST_RETRY_MS = 1_000, 30_000
"""How long a look waits that the store had no time for."""
CHAIN_MS = 50
"""How long a look waits for the record before, if that is not in its batch."""
MISSING_MS = 60_000
"""How long a look waits whose topic is not there, or whose record cannot be read."""
OUTCOMES = ("produced", "caught_up", "missed", "skipped", "failed")
LIVING = (State.WAITING, State.AVAILABLE, State.LEASED)
TRIES, FIRST_WAIT_S = 5, 0.02
MOST_TOLD = 10_000


@dataclass(slots=True, eq=False)
class _Held:
    """A leased record: `operation` and `time_ms` end its lease. `at`: its place in the batch."""

    at: int
    record: ScheduleRecord | None
    operation: Operation = Operation.RELEASE
    time_ms: int = 0
    look: Look | None = None
    answers: list[OccurrenceAnswer] = field(default_factory=list)

    @property
    def known(self) -> ScheduleRecord:
        assert self.record is not None
        return self.record

    @property
    def plan(self) -> Look:
        assert self.look is not None
        return self.look

    def end(self) -> None:
        self.operation, self.time_ms = Operation.ACK, 0

    def release(self, time_ms: int) -> None:
        self.operation, self.time_ms = Operation.RELEASE, time_ms


class ScheduleRunner:
    """Looks at schedules, from `start` until the broker stops. Plans are made off the event loop: one may take a
    second, where a rule gives nothing for years."""

    def __init__(
        self,
        runtime: Runtime,
        store: ScheduleStore,
        readiness: Readiness,
        dealers: Dealers,
        random_bits: Callable[[int], int],
        name: str,
    ) -> None:
        self._clock, self._limits, self._tasks = runtime.clock, runtime.limits, runtime.tasks
        self._metrics = runtime.metrics
        self._store, self._readiness, self._dealers = store, readiness, dealers
        self._random_bits, self._name, self._off_loop = random_bits, name, runtime.off_loop
        self._consumer: OwnConsumer | None = None
        self._started = False
        self._looks = Underway()
        self._retry_ms: dict[str, int] = {}
        """By record's tag, how long a look waited that the store had no time for."""
        self._told: dict[tuple[str, str], None] = {}
        """What was logged and is not over: of which schedule, and about what."""

    def start(self) -> None:
        """Consume the internal topic from now on, as soon as there is one. Again after this broker sent its consumers
        away."""
        self._started = True
        topic = self._store.topic
        if topic is not None and (self._consumer is None or self._consumer.gone):
            self._join(topic)

    def topic_changed(self, topic: Topic) -> None:
        """The record of a topic appeared or changed."""
        if topic.name == SCHEDULES_TOPIC and self._started:
            self.start()

    async def idle(self) -> None:
        """Return when no look is under way."""
        await self._looks.none.wait()

    # ── consuming ──

    def _join(self, topic: Topic) -> None:
        dealer = self._dealers.of(topic)
        consumer = self._consumer = OwnConsumer(
            id=f"schedules:{self._name}:{self._random_bits(32):08x}".encode()[:255],
            session=0,
            lease_ms=topic.settings.lease_ms,
            heartbeat_ms=self._limits.heartbeat_ms,
            credit_messages=ROOM_MESSAGES,
            credit_bytes=ROOM_BYTES,
            limits=self._limits,
            heard_ms=self._clock.monotonic_ms(),
            wake=dealer.wake,
            trickled=dealer.trickled,
            outboxes=dealer.outboxes,
        )
        dealer.roster.join(consumer)
        dealer.admit(consumer)
        self._tasks.spawn(self._consume(consumer, dealer), "schedules")

    async def _consume(self, consumer: OwnConsumer, dealer: Dealer) -> None:
        try:
            while isinstance(batch := await consumer.next(), LeasedBatch):
                self._looks.begin()
                self._tasks.spawn(self._look(batch, consumer, dealer), "looking at schedules")
        finally:
            dealer.part_with(consumer, consumer.withdraw())

    async def _look(self, batch: LeasedBatch, consumer: OwnConsumer, dealer: Dealer) -> None:
        """Look at the records of one batch, and end their leases. What a round ends may set others of the batch free:
        then there is another round."""
        left: list[_Held] = []
        try:
            left = await self._read(batch)
            until_ms = self._clock.monotonic_ms() + int(batch.rows.due_ms.min()) - self._clock.now_ms()
            while left:
                following = await self._look_at(dealer.topic, left, until_ms)
                await self._settle(batch, [one for one in left if one not in following], dealer)
                left = following
        except StoreError as trouble:
            self._tell("", "store", "schedules wait for the store: %s", trouble)
            for one in left:
                if one.record is not None and one.operation is Operation.RELEASE:
                    self._repeat_later(one)
        except Exception:
            log.exception("a look at schedules failed and is repeated")
            self._metrics.count("timeline_task_crashes_total", "schedules")
        finally:
            await self._settle(batch, left, dealer)
            consumer.add_credit(len(batch), int(batch.sizes.sum()))
            self._looks.end()

    async def _read(self, batch: LeasedBatch) -> list[_Held]:
        """Return what is held, to be released a little later unless a look says otherwise."""
        rows, now_ms = batch.rows, self._clock.now_ms()
        assert rows.payloads is not None
        held: list[_Held] = []
        for id, payload in zip(rows.ids.tolist(), rows.payloads.tolist(), strict=True):
            record, at = read_record(id, payload), len(held)
            if isinstance(record, str):
                shown = id.decode(errors="replace")
                self._tell(shown, "record", "the record %r of a schedule cannot be used: %s", shown, record)
                held.append(_Held(at, None, time_ms=now_ms + MISSING_MS))
            else:
                held.append(_Held(at, record, time_ms=now_ms + self._retry_ms.get(record.tag, FIRST_RETRY_MS)))
            if len(held) % READ_AT_ONCE == 0:
                await asyncio.sleep(0)  # so that what is due goes out meanwhile
        return held

    async def _settle(self, batch: LeasedBatch, held: Sequence[_Held], dealer: Dealer) -> None:
        """End the leases, and try again while the outcome is not known. After the last try they run out."""
        if not held:
            return
        op = np.array([self._random_bits(64) | 1 for _ in held], dtype=np.uint64)
        settles = Settles.of(
            batch.rows.take(np.array([one.at for one in held], dtype=np.intp)),
            operation=np.array([one.operation for one in held], dtype=np.uint8),
            time_ms=np.array([one.time_ms for one in held], dtype=np.int64),
            op=op,
        )
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(FIRST_WAIT_S * 3 ** (attempt - 1))
            answers = await dealer.settling.settle(dealer.topic, settles)
            unsure = np.isin(answers.status, [status.code for status in UNSURE])
            if not unsure.any():
                return
            settles = settles.take(unsure)

    # ── looks ──

    async def _look_at(self, internal: Topic, left: list[_Held], until_ms: float) -> list[_Held]:
        """Do the looks. At monotonic `until_ms` the leases end: nothing is begun after that, because another broker may
        be looking at the same records. Return those that wait only for the end of others among them."""
        held = [one for one in left if one.record is not None]
        if self._readiness.quarantined or not held:
            return []  # by a wrong clock nothing is decided
        alone, following = await self._sort_out(internal, held)
        ready = await self._with_topics(alone)
        if not ready:
            return following
        unfinished = await self._unfinished(ready)
        now_ms = self._clock.now_ms()
        await self._off_loop(lambda: self._plan(ready, now_ms, unfinished, until_ms))
        planned_ones = [one for one in ready if one.look is not None]
        await self._cancel(planned_ones)
        await self._put_occurrences(planned_ones, until_ms)
        await self._put_successors(planned_ones, until_ms)
        self._told.pop(("", "store"), None)
        return following

    def _plan(self, ready: Sequence[_Held], now_ms: int, unfinished: set[str], until_ms: float) -> None:
        """Plan the looks, in a thread. Begin no plan after half of what is left of the leases, so that those that took
        long are put in time. The records that are not reached are released, and looked at again at once."""
        end_ms = (self._clock.monotonic_ms() + until_ms) / 2
        for one in ready:
            if self._clock.monotonic_ms() >= end_ms:
                return
            one.look = _planned(one.known, now_ms, one.known.tag in unfinished)
            if one.look is None:
                one.release(now_ms + MISSING_MS)

    async def _sort_out(self, internal: Topic, held: list[_Held]) -> tuple[list[_Held], list[_Held]]:
        """Return the records that are to be looked at: those with no record before them, and none after them. And those
        whose turn comes once the ones that are over are ended."""
        before = {one.known.neighbour_id(-1): one for one in held if one.known.number > 1}
        after = {one.known.neighbour_id(1): one for one in held}
        there = await self._store.there(internal, [*before, *after])
        now_ms = self._clock.now_ms()
        waiting = {one for id, one in before.items() if id in there}
        for one in waiting:
            one.release(now_ms + CHAIN_MS)
        over = {one for id, one in after.items() if id in there} - waiting
        for one in over:
            one.end()
        following: list[_Held] = []
        ending = {one.known.id for one in over}
        for one in sorted(waiting, key=lambda one: one.known.number):
            if one.known.neighbour_id(-1) in ending:
                following.append(one)
                ending.add(one.known.id)
        if others := waiting.difference(following):
            # One that is due already is left alone: moved again and again, it would never count as overdue, which is
            # how a sweep finds what nobody dispatches.
            asleep = await self._store.there(internal, [one.known.neighbour_id(-1) for one in others], {State.WAITING})
            await self._store.wake(sorted(asleep))
        return [one for one in held if one not in waiting and one not in over], following

    async def _with_topics(self, held: Sequence[_Held]) -> list[_Held]:
        """Return those whose topics are there. The others are looked at again later."""
        topics = await self._store.targets(one.known.specification for one in held)
        ready, now_ms = [], self._clock.now_ms()
        for one in held:
            said = one.known.specification
            if topics[said.topic] is not None:
                self._told.pop((one.known.tag, "topic"), None)
                ready.append(one)
            elif one.known.deleted:
                one.end()
            else:
                self._tell(one.known.tag, "topic", "schedule %s waits: there is no topic %r", said.key, said.topic)
                one.release(now_ms + MISSING_MS)
        return ready

    async def _unfinished(self, held: Iterable[_Held]) -> set[str]:
        """Return the tags of the records whose last occurrence is not finished, where that matters."""
        asked: dict[str, dict[str, str]] = defaultdict(dict)
        for one in held:
            if id := watched(one.known):
                asked[one.known.specification.topic][id] = one.known.tag
        tags = set()
        for name, ids in asked.items():
            target = await self._store.target(name)
            if target is not None:
                tags |= {ids[id] for id in await self._store.there(target, list(ids), LIVING)}
        return tags

    async def _cancel(self, held: Sequence[_Held]) -> None:
        """Cancel what edits left over. What consumers have or had instead keeps its id."""
        left: dict[tuple[str, str], list[str]] = defaultdict(list)
        for one in held:
            for id, group in one.plan.cancel:
                left[one.known.specification.topic, group].append(id)
        delivered: set[tuple[str, str]] = set()
        for (name, group), ids in left.items():
            target = await self._store.target(name)
            if target is not None:
                answers = await self._store.cancel(target, ids, group)
                delivered |= {(name, id) for id, answer in zip(ids, answers, strict=True) if _is_delivered(answer)}
        for one in held:
            topic = one.known.specification.topic
            one.look = one.plan.after([id for id, _ in one.plan.cancel if (topic, id) in delivered])

    async def _put_occurrences(self, held: Sequence[_Held], until_ms: float) -> None:
        """Put the occurrences of all, topic by topic, and note the answers."""
        of_topic: dict[str, list[tuple[_Held, ScheduledMessage]]] = defaultdict(list)
        for one in held:
            of_topic[one.known.specification.topic] += [(one, message) for message in one.plan.messages]
        for name, asked in of_topic.items():
            target = await self._store.target(name)
            for part in parts_of(asked, lambda asked: len(asked[1].payload), PART_MESSAGES):
                answers = [OccurrenceAnswer(Status.UNAVAILABLE)] * len(part)
                if target is not None:
                    puts = [(one.known, message) for one, message in part]
                    answers = await self._store.put_messages(target, puts, until_ms)
                for (one, _), answer in zip(part, answers, strict=True):
                    one.answers.append(answer)

    async def _put_successors(self, held: Sequence[_Held], until_ms: float) -> None:
        """Put the records that follow, and end those before them."""
        asked: list[tuple[_Held, ScheduleRecord]] = []
        for one in held:
            statuses = [answer.status for answer in one.answers]
            if one.plan.must_repeat(statuses):
                self._repeat_later(one)
            elif (completed := one.plan.completed(statuses)) is not None:
                asked.append((one, completed))
            elif one.plan.over:
                one.end()
            else:
                one.release(one.plan.due_ms)
        if not asked:
            return
        records = [(completed, one.plan.due_ms) for one, completed in asked]
        answers = await self._store.put_records(records, until_ms)
        for (one, completed), answer in zip(asked, answers, strict=True):
            if answer.status in (Status.OK, Status.DUPLICATE):
                one.end()
                self._count(one, completed)
            elif answer.status is Status.EXISTS:  # an edit came first: the look at it follows, and decides again
                one.end()
            else:
                self._repeat_later(one)

    def _count(self, one: _Held, completed: ScheduleRecord) -> None:
        """Count what one look did, and log what the topic refused."""
        record, said = one.known, one.known.specification
        topic = self._metrics.topic(said.topic)
        for outcome in OUTCOMES:
            if many := getattr(completed, outcome) - getattr(record, outcome):
                self._metrics.count("timeline_schedule_occurrences_total", topic, outcome, by=many)
        self._retry_ms.pop(record.tag, None)
        if completed.failed > record.failed:
            answered = zip(one.plan.messages, one.answers, strict=True)
            refused = next(answer for message, answer in answered if not message.is_there(answer.status))
            why = refused.detail or str(refused.status)
            self._tell(record.tag, "refused", "schedule %s: topic refused an occurrence: %s", said.key, why)
        elif one.answers:
            self._told.pop((record.tag, "refused"), None)

    def _repeat_later(self, one: _Held) -> None:
        """Release the record for a while, longer each time."""
        wait_ms = min(2 * self._retry_ms.get(one.known.tag, FIRST_RETRY_MS // 2), LAST_RETRY_MS)
        self._retry_ms[one.known.tag] = wait_ms
        one.release(self._clock.now_ms() + wait_ms)
        self._tell("", "store", "schedules wait for the store")

    def _tell(self, of: str, kind: str, said: str, *values: object) -> None:
        """Log a warning about a schedule, once until it is over."""
        if (of, kind) not in self._told:
            if len(self._told) >= MOST_TOLD:
                self._told.clear()
            self._told[of, kind] = None
            log.warning(said, *values)


def _is_delivered(cancelled: OccurrenceAnswer) -> bool:
    """Return whether a consumer has or had the message, by the answer to its cancel."""
    return cancelled.status in (Status.LEASED, Status.DEAD) or (
        cancelled.status is Status.NOT_FOUND and cancelled.settled
    )


def _planned(record: ScheduleRecord, now_ms: int, unfinished: bool) -> Look | None:
    """Return the look at a record. None: it cannot be planned, which is logged. It must not stop the others."""
    try:
        return plan(record, now_ms, unfinished)
    except Exception:
        log.exception("the look at schedule %s failed", record.specification.key)
        return None
