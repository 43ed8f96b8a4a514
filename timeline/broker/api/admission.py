"""Admission: each message of a Produce, Mutate or Settle frame is judged, and its times are made absolute.

A batch never fails because one message in it does. A refused message gets its status and a sentence. The rest go on as
the same columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from timeline.columns import Bools, ColumnBatch, Indexes, Int64, UInt8
from timeline.metrics import Metrics
from timeline.model import MAX_TIME_MS, Answers, Operation, Status, Topic, payload_sums
from timeline.storage_plugins.contract import Mutations, Puts, Settles
from timeline.wire.frames import Mutate, MutateFlag, Produce, PutFlag, Settle, SettleFlag
from timeline.wire.validate import Judgement, validate_mutate, validate_produce, validate_settle
from timeline.wording import shown_duration

B = TypeVar("B", bound=ColumnBatch)

BEYOND_EXPIRY = "expires must lie after the due time and after now; a length, such as 30m, counts from now"
_INVALID = bytes([Status.INVALID.code])


@dataclass(slots=True)
class Refusals:
    """The messages of a frame that are refused, with status and reason."""

    count: int
    reasons: Judgement

    def where(self, bad: Bools, why: str) -> None:
        """Refuse as INVALID all where `bad`, for one reason. A message that is INVALID already keeps its own."""
        for index in np.flatnonzero(bad).tolist():
            if index not in self.reasons or self.reasons[index][0] is not Status.INVALID:
                self.reasons[index] = (Status.INVALID, why)

    def beyond_horizon(self, due_ms: Int64, topic: Topic, now: float) -> None:
        """Refuse all whose due lies beyond the topic's horizon."""
        if (beyond := due_ms > latest_ms(topic, now)).any():
            self.where(beyond, beyond_horizon(topic))

    @property
    def _admitted(self) -> Indexes:
        keep = np.ones(self.count, dtype=np.bool_)
        keep[list(self.reasons)] = False
        return np.flatnonzero(keep)

    def rest(self, batch: B) -> B:
        """Return the messages of `batch` that are not refused."""
        return batch.take(self._admitted) if self.reasons else batch

    def merge(self, answers: Answers | None) -> Answers:
        """Return the answers for the whole frame: refusals, and `answers` (of the admitted, in order) for the rest."""
        if answers is not None and _INVALID in answers.status.tobytes():
            # The one thing that a store finds INVALID in what was admitted: the rules know of no other.
            for index in np.flatnonzero(answers.status == Status.INVALID.code).tolist():
                answers.details.setdefault(index, BEYOND_EXPIRY)
        if not self.reasons:
            return Answers.blank(0) if answers is None else answers  # None: nothing was asked
        whole = Answers.blank(self.count)
        for index, (status, why) in self.reasons.items():
            whole.status[index] = status.code
            whole.details[index] = why
        if answers is not None and len(answers):
            whole.assign(self._admitted, answers)
        return whole


def admit_puts(frame: Produce, topic: Topic, now: float) -> tuple[Refusals, Puts]:
    """Judge a Produce at `now`, ms UTC with fractions. A relative due rounds up, so that nothing is early."""
    count = len(frame.birth)
    refusals = Refusals(count, validate_produce(frame, topic.settings.max_payload_bytes))
    due_ms = _absolute(frame.time_ms, (frame.flags & PutFlag.IN) != 0, now)
    expires_ms = np.zeros(count, dtype=np.int64)
    if frame.expires_ms is not None:
        relative = (frame.flags & PutFlag.EXPIRES_IN) != 0
        expires_ms = np.where(frame.expires_ms == 0, 0, _absolute(frame.expires_ms, relative, now))
        late = (expires_ms != 0) & (expires_ms <= due_ms)
        # A relative due may have passed a fixed expiry since an earlier sending of this put, which was in time: the
        # store knows whether it is a repeat, and refuses it otherwise.
        late &= relative | ((frame.flags & PutFlag.IN) == 0)
        refusals.where(late, BEYOND_EXPIRY)
    refusals.beyond_horizon(due_ms, topic, now)
    puts = Puts.of(
        frame,
        due_ms=due_ms,
        expires_ms=expires_ms,
        groups=frame.group.encode(),
        payload_sum=payload_sums(frame.payloads, frame.headers),
        move=(frame.flags & PutFlag.MOVE) != 0,
        replace=(frame.flags & PutFlag.REPLACE) != 0,
    )
    return refusals, refusals.rest(puts)


def admit_mutations(frame: Mutate, topic: Topic, now: float) -> tuple[Refusals, Mutations]:
    """Judge a Mutate at time `now`."""
    count = len(frame.op)
    refusals = Refusals(count, validate_mutate(frame))
    due_ms = _absolute(frame.time_ms, (frame.flags & MutateFlag.IN) != 0, now)
    if frame.operation in (Operation.MOVE, Operation.REVIVE):
        refusals.beyond_horizon(due_ms, topic, now)
    mutations = Mutations.of(
        frame,
        groups=frame.group.encode(),
        due_ms=due_ms,
        leased=(frame.flags & MutateFlag.LEASED) != 0,
    )
    return refusals, refusals.rest(mutations)


def admit_settles(frame: Settle, topic: Topic, holder: bytes, now: float) -> tuple[Refusals, Settles]:
    """Judge a Settle of consumer `holder` at time `now`."""
    count = len(frame.birth)
    refusals = Refusals(count, validate_settle(frame))
    unseen = (frame.flags & SettleFlag.UNSEEN) != 0
    time_ms, operations = frame.time_ms, frame.operation.tobytes()
    if Operation.EXTEND in operations or Operation.RELEASE in operations:  # the others have no time
        extend, release = frame.operation == Operation.EXTEND, frame.operation == Operation.RELEASE
        most_ms = topic.settings.max_lease_ms
        if (unfit := extend & ((time_ms < 1) | (time_ms > most_ms))).any():
            refusals.where(unfit, f"a lease may be extended by 1ms to the topic's max_lease, {shown_duration(most_ms)}")
        time_ms = _absolute(time_ms, (frame.flags & SettleFlag.AT) == 0, now)
        refusals.beyond_horizon(np.where(release & ~unseen, time_ms, 0), topic, now)
    settles = Settles.of(frame, holders=holder, time_ms=time_ms, unseen=unseen)
    return refusals, refusals.rest(settles)


def latest_ms(topic: Topic, now: float) -> int:
    """Return the last due that the horizon allows. It rounds as a relative due does: a due of exactly the horizon is
    fine."""
    return min(MAX_TIME_MS, math.ceil(now) + topic.settings.horizon_ms)


def beyond_horizon(topic: Topic) -> str:
    """Return the reason for a due beyond the horizon."""
    most = shown_duration(topic.settings.horizon_ms)
    setting = "(the topic's setting horizon=, --horizon raises it)"
    return f"the due time lies beyond the topic's horizon, {most} from now {setting}"


def _absolute(time_ms: Int64, relative: Bools, now: float) -> Int64:
    """Return absolute times. A relative one counts from `now`, rounded up. Exactly 0 means now, so that it goes at
    once."""
    if not relative.any():
        return time_ms
    base: Int64 = np.where(time_ms == 0, np.int64(math.floor(now)), np.int64(math.ceil(now)))
    return np.where(relative, np.minimum(time_ms, MAX_TIME_MS) + base, time_ms)


def forbidden(count: int, judged: Judgement, why: str) -> Answers:
    """Return FORBIDDEN for a whole frame. Messages that are INVALID or TOO_LARGE by themselves are that."""
    answers = Answers.blank(count, Status.FORBIDDEN)
    if count:
        answers.details[0] = why
    for index, (status, sentence) in judged.items():
        answers.status[index], answers.details[index] = status.code, sentence
    return answers


def refused(count: int, status: Status, why: str) -> Answers:
    """Return the same refusal for a whole frame."""
    answers = Answers.blank(count, status)
    if count:
        answers.details[0] = why
    return answers


def count_answers(metrics: Metrics, operation: Operation, statuses: UInt8) -> None:
    """Count answers by operation and status."""
    if len(statuses):
        metrics.operations(operation.name.lower(), statuses, lambda code: Status.of(code).value)
