"""What people do to a schedule: create, edit, pause, resume, delete, trigger and backfill it, and see what comes.

An edit is a record with the next number. It says which ids the look at it cancels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from timeline.errors import Invalid, Throttled
from timeline.recurrence import Occurrence
from timeline.recurrence.rules import MOST_COUNT
from timeline.schedules.looks import AHEAD_MS, MOST_PUTS, YEAR_MS, ScheduledMessage, due_of, first_of, message_of
from timeline.schedules.record import (
    TRIGGER,
    DecidedOccurrence,
    KeptOccurrence,
    OccurrenceKey,
    QueuedSpan,
    RenamedSpan,
    ScheduleRecord,
    occurrence_id,
    shown_time,
)
from timeline.schedules.specification import TIMING, Overlap, Specification

MOST_BACKFILLED = 10_000
MOST_SLICES = 200
"""A call about one schedule gives up after this many thousand excluded times in a row."""
SHOWN_SLICES, LISTED_SLICES = 30, 1
"""As many where only next times are shown, and where there may be many schedules. A slice takes 20 to 250 ms."""
MOST_AHEAD_MS = 5 * YEAR_MS
"""Nor is a next time looked for further ahead, if that many times are excluded before."""
_MOST_RENAMED, _MOST_CANCELLING = 500, 5_000
_RULES = tuple(name for name in TIMING if name not in ("end_ms", "count"))


@dataclass(frozen=True)
class Edit:
    """A record to put, due at `due_ms`, if its id is absent. The look at it cancels what its `cancelling` names; the
    editor may do so before, for promptness."""

    record: ScheduleRecord
    due_ms: int


def created(specification: Specification, now_ms: int, number: int = 1) -> Edit:
    """Return the first record of a schedule. `number`: above 1 if there was a schedule of this name before: then ids
    of the first minutes may be remembered, and are not used."""
    renamed = (RenamedSpan(now_ms, now_ms + 2 * AHEAD_MS, number),) if number > 1 else ()
    record = ScheduleRecord(
        specification,
        number=number,
        revised=number,
        created_ms=now_ms,
        edited_ms=now_ms,
        begun_ms=now_ms,
        position_ms=now_ms,
        sequence=_counted(specification, now_ms),
        renamed=renamed,
    )
    return Edit(record, _due(record, now_ms))


def edited(record: ScheduleRecord, now_ms: int, specification: Specification, keep: bool = False) -> Edit:
    """Return the record of the next revision. The new specification decides from now on. Occurrences that are put and
    that lie ahead are replaced if they still occur, else cancelled. `keep`: they stay, and it decides what follows
    them. Raise Throttled if too many edits wait for a look."""
    edit = _kept(record, now_ms, specification) if keep else _renewed(record, now_ms, specification, False)
    made = dataclasses.replace(edit.record, specification=specification, ended=False)
    return dataclasses.replace(edit, record=made, due_ms=_due(made, now_ms))


def deleted(record: ScheduleRecord, now_ms: int, keep: bool = False) -> Edit:
    """Return the last record of a schedule. Occurrences that are put and lie ahead are cancelled, or stay. What waits
    in a queue is dropped."""
    said = record.specification
    edit = _kept(record, now_ms, said) if keep else _renewed(record, now_ms, said, True)
    made = dataclasses.replace(edit.record, deleted=True, queue=())
    return dataclasses.replace(edit, record=made, due_ms=now_ms)


def triggered(record: ScheduleRecord, at_ms: int, now_ms: int) -> ScheduledMessage:
    """Return a message to put at once, outside the schedule's times. `at_ms`: the time in its id. Its number is 0."""
    id = occurrence_id(record.specification.name, at_ms, TRIGGER)
    message = message_of(record, id, DecidedOccurrence(at_ms, 0))
    expires_ms = message.expires_ms and message.expires_ms - message.due_ms + now_ms
    return dataclasses.replace(message, due_ms=now_ms, expires_ms=expires_ms, replace=False, stands=False)


def backfill(record: ScheduleRecord, from_ms: int, to_ms: int, now_ms: int) -> tuple[ScheduledMessage, ...]:
    """Return the messages of all occurrences from `from_ms` to before `to_ms`, and before now. Under their ids, so that
    those already produced are not produced again. Their numbers are 0. Raise Invalid for too many."""
    if from_ms >= to_ms:
        raise Invalid("a backfill needs a range: give a to that is after from")
    said = record.specification
    before = _counted(said, from_ms) if said.count else None
    found: list[int] = []
    for at_ms in _times(said, from_ms, min(to_ms, now_ms), before, whole=True):
        if len(found) == MOST_BACKFILLED:
            raise Invalid(f"more than {MOST_BACKFILLED} occurrences lie in this range: backfill it in parts")
        found.append(at_ms)
    return tuple(_backfilled(record, at_ms, now_ms) for at_ms in found)


def _backfilled(record: ScheduleRecord, at_ms: int, now_ms: int) -> ScheduledMessage:
    message = message_of(record, record.occurrence_id(at_ms), DecidedOccurrence(at_ms, 0, True), now_ms)
    return dataclasses.replace(message, replace=False, stands=True)


def upcoming(
    record: ScheduleRecord, now_ms: int, most: int, before_ms: int = 0, slices: int = SHOWN_SLICES
) -> list[int]:
    """Return the times of the next occurrences from now on, put or not. `before_ms`: only those before it. `slices`: it
    gives up after this many thousand excluded times in a row."""
    said = record.specification
    if said.paused or record.deleted or most <= 0:
        return []
    from_ms, before = record.position_ms, record.sequence
    if now_ms < from_ms:
        before = max(0, before - len(list(_times(said, now_ms, from_ms, None, slices))))
        from_ms = now_ms
    elif not said.count:
        from_ms = now_ms
    found: list[int] = []
    for at_ms in _times(said, from_ms, before_ms, before, slices):
        if at_ms >= now_ms:
            found.append(at_ms)
        if len(found) == most:
            break
    return found


def shown(record: ScheduleRecord, now_ms: int, template: bool = True) -> dict[str, Any]:
    """Return a schedule as people see it, for JSON. `template`: whether they see payload and headers."""
    said = record.specification.to_json()
    if not template:
        del said["payload"], said["headers"]
    coming = upcoming(record, now_ms, 1, slices=LISTED_SLICES)
    numbers = {"revision": record.revision, "number": record.number, "next_ms": coming[0] if coming else 0}
    return said | numbers | {"state": record.state()}


def _due(record: ScheduleRecord, now_ms: int) -> int:
    owes = record.decided or record.cancelling
    return now_ms + YEAR_MS if record.specification.paused and not owes else now_ms


def _next(record: ScheduleRecord, now_ms: int, **changes: Any) -> ScheduleRecord:
    number = record.number + 1
    changes |= {"number": number, "revised": number, "revision": record.revision + 1, "edited_ms": now_ms}
    return dataclasses.replace(record, **changes)


def _kept(record: ScheduleRecord, now_ms: int, new: Specification) -> Edit:
    """The next revision, which leaves what is put as it is, and what is decided."""
    old, renewal = record.specification, _Renewal(record, now_ms, new, False)
    goes_on = _same_rules(old, new) and not (old.paused or new.paused or record.ended)
    position_ms = record.position_ms if goes_on else max(record.position_ms, now_ms)
    own = {
        at_ms: KeptOccurrence(record.occurrence_id(at_ms), old.group, due_ms)
        for at_ms in renewal.put
        if (due_ms := due_of(old, at_ms)) > now_ms
    }
    made = _next(
        record,
        now_ms,
        position_ms=position_ms,
        sequence=_sequence(old, new, position_ms, record.sequence),
        begun_ms=record.begun_ms if goes_on else position_ms,
        queue=record.queue if _same_rules(old, new) else tuple(_singly(old, record.queue)),
        standing_until_ms=max(record.standing_until_ms, record.position_ms),
        missed=record.missed + (0 if goes_on else _left_out(record, now_ms)),
        kept=tuple((record.kept_after(now_ms) | own).values()),
        recounted=record.recounted if goes_on else _counts_anew(old, new),
    )
    return Edit(made, now_ms)


def _renewed(record: ScheduleRecord, now_ms: int, new: Specification, ends: bool) -> Edit:
    """The next revision, which decides again what lies ahead."""
    old, renewal = record.specification, _Renewal(record, now_ms, new, ends)
    again, cancelled = renewal.again(), renewal.cancelled()
    position_ms, sequence = renewal.reached()
    dropped = (key for at_ms in cancelled for key in renewal.keys(at_ms))
    cancelling = tuple(dict.fromkeys((*record.cancelling, *dropped)))
    if len(cancelling) > _MOST_CANCELLING:
        raise Throttled("edits of this schedule come faster than brokers carry them out", retry_after_ms=1_000)
    spans = _spans(sorted(renewal.pending), renewal.pending.difference(cancelled), record.number + 1, renewal.from_ms)
    made = _next(
        record,
        now_ms,
        begun_ms=min(record.begun_ms, renewal.from_ms) if renewal.goes_on else renewal.from_ms,
        position_ms=position_ms,
        sequence=sequence,
        cancelling=cancelling,
        decided=(*(one for one in record.decided if one.at_ms not in renewal.pending), *again),
        queue=record.queue if _same_rules(old, new) and not renewal.gone else (),
        renamed=(*record.renamed, *spans)[-_MOST_RENAMED:],
        kept=(),
        recounted=False,
        standing_until_ms=renewal.reach_ms,
        replacing=True,
        last_id="" if record.last_ms in renewal.pending else record.last_id,
        **renewal.counts(),
    )
    return Edit(made, now_ms)


class _Renewal:
    """An edit that decides again what lies ahead. It does so at once. The next look may come after an outage: it could
    not know what was delivered meanwhile, and would count that as missed.

    `from_ms`: the time of the edit. `put`: the occurrences of the old revision that may be put and may lie ahead.
    `pending`: these, and those of the revisions before it. `goes_on`: both revisions have the same rules, so that
    whatever was not decided before stays to be decided.
    """

    def __init__(self, record: ScheduleRecord, now_ms: int, new: Specification, ends: bool) -> None:
        self._record, self._old, self._new, self._now_ms = record, record.specification, new, now_ms
        self.gone = ends or new.paused
        self.goes_on = _same_rules(self._old, new) and not (self._old.paused or record.ended or self.gone)
        self._alone = new.overlap is not Overlap.ALLOW
        # Occurrences are put no further ahead. If they are further than that, the clock was set back: they are over.
        self.from_ms = from_ms = max(now_ms, record.last_ms + 1 - 2 * AHEAD_MS)
        self.reach_ms = max(record.position_ms, record.standing_until_ms)
        self._past = _jittered(record, from_ms, now_ms)
        self._undone = _between(self._old, max(from_ms, record.begun_ms), record.position_ms)
        self._kept = record.kept_after(now_ms)
        self._decided = {one.at_ms for one in record.decided}
        # The revision before this one may not have come to replace or to put again what it had cancelled.
        standing = _between(self._old, from_ms, self.reach_ms)
        self.put = {*self._past, *self._undone, *(at_ms for at_ms in self._decided if at_ms >= from_ms)}
        self.pending = {*self.put, *standing, *self._kept}
        kept = {at_ms for at_ms in self._kept if at_ms >= from_ms}
        ahead = _between(self._old, from_ms, record.position_ms) if record.recounted else self._undone | kept
        begin_ms = min(from_ms, record.position_ms)
        self._before = _sequence(self._old, new, begin_ms, max(0, record.sequence - len(ahead)))
        until_ms = record.position_ms if self.goes_on else self.reach_ms
        times = list(_times(new, from_ms, until_ms, self._before)) if from_ms < until_ms and not self.gone else []
        self._fit = {at_ms: self._before + place for place, at_ms in enumerate(times, 1)}
        """What the new revision has ahead: times and numbers."""

    def again(self) -> list[DecidedOccurrence]:
        """Return what the next look puts, or puts again."""
        fit = {at_ms: number for at_ms, number in self._past.items() if self._stays_past(at_ms)}
        if not self._alone:
            fit |= self._fit
        elif self.goes_on:  # each one waits for the one before it: no other one is put
            put = {*self._decided, self._record.last_ms}
            fit |= {at_ms: number for at_ms, number in self._fit.items() if at_ms in put}
        return [DecidedOccurrence(at_ms, fit[at_ms]) for at_ms in sorted(fit)]

    def cancelled(self) -> list[int]:
        """Return the pending occurrences that do not stay under their ids. What is due may be delivered: it stays."""
        same = (self._old.group, self._old.overlap) == (self._new.group, self._new.overlap)
        stays = {at_ms for at_ms in self.pending if at_ms in self._fit or self._stays_past(at_ms)} if same else set()
        stays = {at_ms for at_ms in stays if len(self.keys(at_ms)) == 1}
        later = {at_ms for at_ms in self.pending if at_ms in self._kept or due_of(self._old, at_ms) > self._now_ms}
        return sorted(later - stays)

    def keys(self, at_ms: int) -> tuple[OccurrenceKey, ...]:
        """Return the messages that may be on the timeline for the pending occurrence of a time, each once."""
        own, kept = OccurrenceKey(self._record.occurrence_id(at_ms), self._old.group), self._kept.get(at_ms)
        return tuple(dict.fromkeys((own, OccurrenceKey(kept.id, kept.group) if kept else own)))

    def reached(self) -> tuple[int, int]:
        """Return the position of the new revision, and how many were decided before it."""
        left = [at_ms for at_ms in self._undone if at_ms not in self._fit] if self.goes_on else []
        if left:  # a count or an end that came nearer, and may move again
            return min(left), self._before + len(self._fit)
        if self.goes_on:
            return self._record.position_ms, self._before + len(self._fit)
        if self._alone or self.gone:
            return self.from_ms, self._before
        return max(self.from_ms, self.reach_ms), self._before + len(self._fit)

    def counts(self) -> dict[str, int]:
        """Return the counts without what is decided again, and with what nobody decides."""
        record, undone = self._record, {*self._past, *self._undone, *self._kept} - self._decided
        missed = record.missed + (0 if self.goes_on else _left_out(record, self.from_ms))
        if self._old.overlap is Overlap.ALLOW:
            return {"produced": max(0, record.produced - len(undone)), "missed": missed}
        put = len(undone & {record.last_ms})
        skips = self._old.overlap is Overlap.SKIP and not self.goes_on
        skipped = len(undone) - put if skips else 0
        produced, skipped = max(0, record.produced - put), max(0, record.skipped - skipped)
        return {"produced": produced, "skipped": skipped, "missed": missed}

    def _stays_past(self, at_ms: int) -> bool:
        """Return whether an occurrence that waits for its jitter alone still occurs."""
        if at_ms not in self._past or self.gone or (self._alone and not self.goes_on):
            return False
        return bool(_between(self._new, at_ms, at_ms + 1))


def _left_out(record: ScheduleRecord, before_ms: int) -> int:
    """Return how many occurrences before a time no look has decided. An outage cost them, if the next revision decides
    only from that time on."""
    said = record.specification
    if said.paused or record.position_ms >= before_ms:
        return 0
    return sum(1 for _ in islice(_times(said, record.position_ms, before_ms, record.sequence), MOST_COUNT))


def _between(said: Specification, from_ms: int, before_ms: int) -> set[int]:
    """Return the times of occurrences in a range, however many are counted."""
    return set(_times(said, from_ms, before_ms, None)) if from_ms < before_ms else set()


def _jittered(record: ScheduleRecord, before_ms: int, now_ms: int) -> dict[int, int]:
    """Return the occurrences before a time that are put, and due later for their jitter alone: times and numbers."""
    said = record.specification
    before_ms = min(before_ms, record.position_ms)
    begin_ms = max(record.begun_ms, now_ms - said.jitter_ms)
    times = list(_times(said, begin_ms, record.position_ms, None)) if begin_ms < before_ms else []
    first = record.sequence - len(times) + 1
    numbers = {at_ms: max(1, first + place) for place, at_ms in enumerate(times)}
    alone = said.overlap is not Overlap.ALLOW
    return {
        at_ms: number
        for at_ms, number in numbers.items()
        if at_ms < before_ms and due_of(said, at_ms) > now_ms and not (alone and at_ms != record.last_ms)
    }


def _sequence(old: Specification, new: Specification, position_ms: int, sequence: int) -> int:
    """Return how many occurrences of the next revision lie before its position: as many as were decided, unless they
    are counted from another start, or for the first time."""
    return _counted(new, position_ms) if _counts_anew(old, new) else sequence


def _counts_anew(old: Specification, new: Specification) -> bool:
    return new.start_ms != old.start_ms or bool(new.count and not old.count)


def _spans(pending: list[int], stays: set[int], number: int, whole_from_ms: int) -> Iterator[RenamedSpan]:
    """Yield spans of the pending occurrences that do not stay, as few as possible. Before `whole_from_ms` there are
    others between them, which keep their names."""
    begin_ms = last_ms = -1
    for at_ms in pending:
        if begin_ms >= 0 and (at_ms in stays or begin_ms < whole_from_ms):
            yield RenamedSpan(begin_ms, last_ms + 1, number)
            begin_ms = -1
        if at_ms not in stays and begin_ms < 0:
            begin_ms = at_ms
        last_ms = at_ms
    if begin_ms >= 0:
        yield RenamedSpan(begin_ms, last_ms + 1, number)


def _singly(said: Specification, queue: tuple[QueuedSpan, ...]) -> Iterator[QueuedSpan]:
    """Yield each occurrence of a queue as a span of its own, which needs no rule."""
    left = MOST_PUTS
    for span in queue:
        rest: QueuedSpan | None = span
        while rest is not None and left and (at_ms := first_of(said, rest)) is not None:
            left -= 1
            yield QueuedSpan(at_ms, at_ms + 1, rest.before, 1, rest.caught_up)
            more = rest.length > 1
            rest = rest._replace(from_ms=at_ms + 1, before=rest.before + 1, length=rest.length - 1) if more else None


def _same_rules(old: Specification, new: Specification) -> bool:
    return all(getattr(old, name) == getattr(new, name) for name in _RULES)


def _counted(said: Specification, at_ms: int) -> int:
    """Return how many occurrences lie between the start and `at_ms`, if they are counted. Raise Invalid if that takes
    too long."""
    if not said.count or at_ms <= said.start_ms:
        return 0
    return sum(1 for _ in _times(said, said.start_ms, at_ms, 0, whole=True))


def _times(
    said: Specification,
    from_ms: int,
    before_ms: int,
    before: int | None,
    slices: int = MOST_SLICES,
    whole: bool = False,
) -> Iterator[int]:
    """Yield the times of occurrences from `from_ms` to before `before_ms` (0: for ever). It gives up where too many in
    a row are excluded. `whole`: then it raises Invalid."""
    excluded = 0
    for one in said.recurrence.walk(from_ms, before):
        found = isinstance(one, Occurrence)
        at_ms = one.at_ms if isinstance(one, Occurrence) else one
        excluded = 0 if found else excluded + 1
        far = excluded > 1 and slices < MOST_SLICES and at_ms - from_ms > MOST_AHEAD_MS
        if far or (before_ms and at_ms >= before_ms):
            return
        if excluded >= slices:
            if whole:
                raise Invalid(
                    f"{excluded:,} thousand times in a row are excluded before {shown_time(at_ms)}: exclude fewer, "
                    "or give a later start or from"
                )
            return
        if found:
            yield at_ms
