"""What a look at a schedule does: it puts the occurrences that the record names, decides the next ones, and says when
to look again.

A decision stands in a record before anything is put. So a look only puts what its record names, whatever the time is,
and a repeat after a crash decides nothing otherwise. All functions are pure: the time is an argument.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from timeline.model import MAX_TIME_MS, Status
from timeline.recurrence import Occurrence
from timeline.recurrence.recurrence import SLICE
from timeline.schedules.record import (
    DecidedOccurrence,
    OccurrenceKey,
    QueuedSpan,
    ScheduleRecord,
    birth_of,
    schedule_of,
    shown_time,
)
from timeline.schedules.specification import CatchUp, Overlap, Specification

AHEAD_MS = 120_000
"""Occurrences are put so long before their time."""
LEAD_MS = 60_000
"""A look comes so long before the first occurrence that is not put: an outage shorter than this makes nothing late."""
LATE_MS = 15_000
"""An occurrence is missed if its due time is over for longer than this when it is decided."""
MOST_PUTS, MOST_PUT_BYTES = 1_000, 16 * 1024 * 1024
"""What one look puts, at most."""
MOST_STEPS = 5_000
"""Times that one look walks through, at most: some 0.3 s."""
DAY_MS, YEAR_MS = 86_400_000, 366 * 86_400_000
"""A look comes each day, because a zone's rules may change; at a schedule that waits for an edit, each year."""
OVERLAP_LEAD_MS = 1_000
"""Where occurrences may not overlap, each one is decided so long before its time, or a tenth of the time until the next
one."""
LEAST_WAIT_MS, MOST_WAIT_MS = 50, 5_000
"""How long a queue waits until it asks again whether the message before is finished: a quarter of how long it has
waited."""
REMEMBER_MARGIN_MS = 600_000
"""A topic remembers ids for the catch-up window and this, so that nothing is put again after it was settled."""
NAMED_MS = 35 * DAY_MS
"""New names of cancelled occurrences are kept this long at least. A backfill needs them while the topic remembers the
old ones. A topic may remember for longer than the schedule asks for."""
UNSURE = (Status.THROTTLED, Status.UNAVAILABLE, Status.UNKNOWN)
_AGAIN = (*UNSURE, Status.NOT_FOUND)
"""NOT_FOUND: the topic was dropped, and this broker has not read so yet."""
_STANDS = (Status.EXISTS, Status.LEASED, Status.DEAD, Status.FORBIDDEN)
_OCCURRENCE, _SEQUENCE = "{occurrence}", "{sequence}"


@dataclass(frozen=True, slots=True)
class ScheduledMessage:
    """A message to put for an occurrence; tag and group are those of the specification. `replace`: put it in the place
    of what stands under its id. `stands`: an earlier revision may have put it, so that nothing is wrong if it did."""

    id: str
    at_ms: int
    due_ms: int
    expires_ms: int
    birth: int
    payload: bytes
    headers: Mapping[str, str]
    caught_up: bool = False
    replace: bool = False
    stands: bool = False

    def is_there(self, status: Status) -> bool:
        """Return whether it is in its topic, or was, by the answer to its put."""
        return status in (Status.OK, Status.DUPLICATE) or (self.stands and status in _STANDS)


@dataclass(frozen=True)
class Look:
    """What a look at a record does. First cancel `cancel`, each as its group, but not what is leased. Put the
    `messages` of the look `after` that. If it `must_repeat`, release the record to soon. Else put the record
    `completed`, due at `due_ms`, if its id is absent. Then end this record.

    `successor` None: nothing changes. Release the record to `due_ms`, or end it if it is `over`.
    """

    messages: tuple[ScheduledMessage, ...]
    successor: ScheduleRecord | None
    due_ms: int
    now_ms: int
    over: bool = False
    cancel: tuple[OccurrenceKey, ...] = ()

    def after(self, delivered: Collection[str]) -> Look:
        """Return the rest of the look. `delivered`: ids of `cancel` that consumers have or had. Their occurrences keep
        them, since under other ids they would be produced twice."""
        ids = {found[1]: id for id in delivered if (found := schedule_of(id)) is not None}
        if not ids:
            return self
        messages = tuple(dataclasses.replace(one, id=ids.get(one.at_ms, one.id)) for one in self.messages)
        successor = self.successor
        for at_ms, id in ids.items():  # later edits must find them under these ids
            successor = successor and successor.keeping(at_ms, id)
        return dataclasses.replace(self, messages=messages, successor=successor)

    def must_repeat(self, statuses: Sequence[Status]) -> bool:
        """Return whether the look must be repeated, by the answers to `messages`."""
        return any(status in _AGAIN for status in statuses)

    def completed(self, statuses: Sequence[Status]) -> ScheduleRecord | None:
        """Return the successor with its counts, by the answers to `messages`. None: nothing changes."""
        if self.successor is None:
            return None
        counts = {"produced": 0, "caught_up": 0, "missed": 0, "failed": 0}
        last: ScheduledMessage | None = None
        for message, status in zip(self.messages, statuses, strict=True):
            if message.is_there(status):
                counts["caught_up" if message.caught_up else "produced"] += 1
                last = message
            elif 0 < message.expires_ms <= self.now_ms:
                counts["missed"] += 1
            else:
                counts["failed"] += 1
        changes: dict[str, Any] = {name: getattr(self.successor, name) + count for name, count in counts.items()}
        if last is not None:
            changes |= {"last_ms": last.at_ms, "last_id": last.id, "last_put_ms": self.now_ms}
        return dataclasses.replace(self.successor, **changes)


def watched(record: ScheduleRecord) -> str:
    """Return the id of the message that the look must ask about: whether it is in the topic and no dead letter. Empty:
    none."""
    alone = record.specification.overlap is not Overlap.ALLOW
    return record.last_id if alone and not record.decided and not record.deleted else ""


def plan(record: ScheduleRecord, now_ms: int, unfinished: bool = False) -> Look:
    """Return what the look at a record does. `unfinished`: whether the message that it watches is unfinished. A rule
    that gives nothing for years may take a second, once per process."""
    messages = tuple(_messages(record))
    owes = bool(messages or record.cancelling)
    over, successor = record.deleted, None
    due_ms = now_ms
    if record.deleted:
        pass
    elif record.specification.paused or (record.ended and not record.queue):
        successor = _follow(record, now_ms) if owes else None
        due_ms = now_ms + YEAR_MS
    else:
        decision = _Decision(record, now_ms, unfinished or bool(record.decided))
        decision.decide()
        successor = _follow(record, now_ms, **decision.changes()) if owes or decision.tells_news else None
        due_ms = decision.due_ms()
    return Look(messages, successor, due_ms, now_ms, over, record.cancelling)


def _follow(record: ScheduleRecord, now_ms: int, **changes: Any) -> ScheduleRecord:
    """Return the next record, without the names that nobody can ask for any more, and what is no longer kept."""
    oldest_ms = now_ms - max(NAMED_MS, record.specification.window_ms + REMEMBER_MARGIN_MS)
    renamed = tuple(span for span in record.renamed if span.until_ms > oldest_ms)
    done: dict[str, Any] = {"decided": (), "cancelling": ()}
    kept = tuple(record.kept_after(now_ms).values())
    return dataclasses.replace(record, number=record.number + 1, renamed=renamed, kept=kept, **done | changes)


class _Decision:
    """One walk on from a record's position. Occurrences come in order, and each is produced, queued, skipped or
    missed."""

    def __init__(self, record: ScheduleRecord, now_ms: int, busy: bool) -> None:
        said = record.specification
        self._record, self._said, self._now_ms, self._busy = record, said, now_ms, busy
        self._alone = said.overlap is not Overlap.ALLOW
        self._most = max(1, min(MOST_PUTS, MOST_PUT_BYTES // max(1, len(said.payload))))
        self._position_ms, self._sequence = record.position_ms, record.sequence
        self._missed = self._skipped = 0
        self._decided: list[DecidedOccurrence] = []
        self._queue = list(record.queue)
        self._latest: DecidedOccurrence | None = None
        self._after_latest = False
        """Whether one was decided that comes after `_latest`."""
        self._next_look_ms = 0
        self._cut = self._ended = False

    def decide(self) -> None:
        self._walk()
        if self._latest is not None:
            self._settle_latest()
        most = 1 if self._alone else self._most
        while self._queue and len(self._decided) < most and not (self._alone and self._busy):
            self._take_from_queue()

    @property
    def tells_news(self) -> bool:
        """Whether the next record must say something that this one does not."""
        changed = self._sequence != self._record.sequence or tuple(self._queue) != self._record.queue
        return changed or bool(self._decided) or self._cut or self._ended != self._record.ended

    def changes(self) -> dict[str, Any]:
        """Return the fields in which the next record differs."""
        return {
            "position_ms": self._position_ms,
            "sequence": self._sequence,
            "decided": tuple(self._decided),
            "queue": tuple(self._queue),
            "missed": self._record.missed + self._missed,
            "skipped": self._record.skipped + self._skipped,
            "ended": self._ended,
        }

    def due_ms(self) -> int:
        """Return when to look again."""
        now_ms = self._now_ms
        if self._decided:
            return now_ms
        if self._queue:
            begun_ms = max(self._queue[0].from_ms, self._record.last_put_ms)
            wait_ms = 0 if self._record.decided else (now_ms - begun_ms) // 4
            return now_ms + min(max(wait_ms, LEAST_WAIT_MS), MOST_WAIT_MS)
        if self._ended:
            return now_ms + YEAR_MS
        return min(max(self._next_look_ms, now_ms), now_ms + DAY_MS)

    def _walk(self) -> None:
        """Decide all occurrences whose time has come, within bounds."""
        steps = 0
        coming = _Coming(self._said, self._position_ms, self._sequence)
        while (one := coming.take()) is not None:
            full = steps >= MOST_STEPS or len(self._decided) >= self._most
            if isinstance(one, int):
                if full:
                    self._stop(one)
                    return
                steps += SLICE
                continue
            lead_ms = coming.overlap_lead(one.at_ms) if self._alone else AHEAD_MS
            if one.at_ms > self._now_ms + lead_ms:
                # Up to here nothing follows, but not up to the occurrence: the zone's rules may change before it.
                self._position_ms = max(self._position_ms, min(one.at_ms, self._now_ms + lead_ms))
                self._next_look_ms = one.at_ms - (lead_ms if self._alone else LEAD_MS)
                return
            if full:
                self._stop(one.at_ms)
                return
            steps += 1
            self._sequence += 1
            self._position_ms = one.at_ms + 1
            self._judge(one.at_ms)
        self._ended = True

    def _stop(self, reached_ms: int) -> None:
        """End the walk before all is decided. Another look goes on there, at once if that time is near."""
        self._cut = True
        self._position_ms = max(self._position_ms, reached_ms)
        near = reached_ms <= self._now_ms + AHEAD_MS
        self._next_look_ms = self._now_ms if near else reached_ms - LEAD_MS

    def _judge(self, at_ms: int) -> None:
        one = DecidedOccurrence(at_ms, self._sequence)
        due_ms = due_of(self._said, at_ms)
        expired = 0 < self._said.expires_ms <= self._now_ms - due_ms
        if due_ms + LATE_MS >= self._now_ms and not expired:
            self._after_latest = True
            self._take(one)
        elif self._said.catch_up is CatchUp.NONE or expired or due_ms < self._now_ms - self._said.window_ms:
            self._missed += 1
        elif self._said.catch_up is CatchUp.ALL:
            self._take(one._replace(caught_up=True))
        else:
            self._missed += self._latest is not None
            self._latest, self._after_latest = one._replace(caught_up=True), False

    def _settle_latest(self) -> None:
        """Produce the latest one that was missed, if it is known to be the latest. If the walk ended before, leave it
        for the next one, which begins there."""
        latest, self._latest = self._latest, None
        assert latest is not None
        if self._cut and not self._after_latest and latest.at_ms > self._record.position_ms:
            self._position_ms, self._sequence = latest.at_ms, latest.sequence - 1
        else:
            self._take(latest)

    def _take(self, one: DecidedOccurrence) -> None:
        """Produce it, or do with it what `overlap` says."""
        if self._said.overlap is Overlap.QUEUE:
            self._enqueue(one)
        elif self._alone and (self._busy or self._queue):
            self._skipped += 1
        else:
            self._decided.append(one)
            self._decided.sort()
            self._busy = True

    def _enqueue(self, one: DecidedOccurrence) -> None:
        last = self._queue[-1] if self._queue else None
        # Between a pause, or other rules, and now there are times that were never decided.
        follows = last is not None and last.until_ms > self._record.begun_ms
        if last and follows and (last.before + last.length, last.caught_up) == (one.sequence - 1, one.caught_up):
            self._queue[-1] = last._replace(until_ms=one.at_ms + 1, length=last.length + 1)
        else:
            self._queue.append(QueuedSpan(one.at_ms, one.at_ms + 1, one.sequence - 1, 1, one.caught_up))
            self._queue.sort()

    def _take_from_queue(self) -> None:
        span = self._queue.pop(0)
        at_ms = first_of(self._said, span)
        if at_ms is None:  # the zone's rules have changed
            return
        self._decided.append(DecidedOccurrence(at_ms, span.before + 1, span.caught_up))
        self._busy = True
        if span.length > 1:
            left = span._replace(from_ms=at_ms + 1, before=span.before + 1, length=span.length - 1)
            self._queue.insert(0, left)


class _Coming:
    """A recurrence from a position on, with a look at what follows."""

    def __init__(self, said: Specification, position_ms: int, sequence: int) -> None:
        self._walk: Iterator[Occurrence | int] = said.recurrence.walk(position_ms, sequence)
        self._ahead: list[Occurrence | int | None] = []

    def take(self) -> Occurrence | int | None:
        """Return the next occurrence, or how far the walk has come. None: it is over."""
        return self._ahead.pop() if self._ahead else next(self._walk, None)

    def overlap_lead(self, at_ms: int) -> int:
        """Return how long before it the occurrence at `at_ms` is decided, which was taken last."""
        following = self.take()
        self._ahead.append(following)
        if following is None:
            return OVERLAP_LEAD_MS
        next_ms = following if isinstance(following, int) else following.at_ms
        return min(OVERLAP_LEAD_MS, (next_ms - at_ms) // 10)


def first_of(said: Specification, span: QueuedSpan) -> int | None:
    """Return the time of the first occurrence in a span of the queue."""
    if span.until_ms == span.from_ms + 1:
        return span.from_ms
    walk = said.recurrence.walk(span.from_ms, None)
    first = next((one for one in walk if isinstance(one, Occurrence) or one >= span.until_ms), None)
    return first.at_ms if isinstance(first, Occurrence) and first.at_ms < span.until_ms else None


def due_of(said: Specification, at_ms: int) -> int:
    """Return when an occurrence's message is due: at its time, or later by its jitter, which is always the same."""
    if not said.jitter_ms:
        return at_ms
    digest = hashlib.blake2b(f"{said.key}@{at_ms}".encode(), digest_size=8).digest()
    return at_ms + int.from_bytes(digest, "little") % said.jitter_ms


def filled_in(said: Specification, at_ms: int, sequence: int) -> tuple[bytes, dict[str, str]]:
    """Return payload and headers of the occurrence at a time, with the template filled in."""
    payload, headers = said.payload, dict(said.headers)
    for name, value in ((_OCCURRENCE, shown_time(at_ms)), (_SEQUENCE, str(sequence))):
        payload = payload.replace(name.encode(), value.encode())
        headers = {key: text.replace(name, value) for key, text in headers.items()}
    return payload, headers


def message_of(record: ScheduleRecord, id: str, one: DecidedOccurrence, expires_from_ms: int = 0) -> ScheduledMessage:
    """Return the message of an occurrence, with the template filled in. `expires_from_ms`: the earliest time that its
    expiry counts from."""
    said = record.specification
    due_ms = due_of(said, one.at_ms)
    expires_ms = min(max(due_ms, expires_from_ms) + said.expires_ms, MAX_TIME_MS) if said.expires_ms else 0
    payload, headers = filled_in(said, one.at_ms, one.sequence)
    stands = one.at_ms < record.standing_until_ms
    return ScheduledMessage(
        id,
        one.at_ms,
        due_ms,
        expires_ms,
        birth_of(id, record.revised),
        payload,
        headers,
        one.caught_up,
        replace=stands and record.replacing,
        stands=stands,
    )


def _messages(record: ScheduleRecord) -> Iterator[ScheduledMessage]:
    return (message_of(record, record.occurrence_id(one.at_ms), one) for one in record.decided)
