"""What a story of a schedule must have come to, by a plain walk of its rules."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import takewhile

from tests.schedules.world import Committed, World
from timeline.schedules import CatchUp, Overlap, Specification
from timeline.schedules.looks import LATE_MS, due_of
from timeline.schedules.record import ScheduleRecord

NEVER = 2**62


@dataclass
class Revision:
    """A specification, the times that it decides (`from_ms` to before `until_ms`), and when all that it drops was
    cancelled or replaced (`done_ms`)."""

    specification: Specification
    record: ScheduleRecord
    before: ScheduleRecord | None
    made_ms: int
    from_ms: int
    until_ms: int
    done_ms: int
    keep: bool


def walked(said: Specification, from_ms: int, until_ms: int) -> list[int]:
    """The times of occurrences, whatever their count."""
    found = (one.at_ms for one in said.recurrence.occurrences(from_ms, -(10**9)))
    return list(takewhile(lambda at_ms: at_ms < until_ms, found)) if from_ms < until_ms else []


def queued_in(record: ScheduleRecord) -> set[int]:
    """The times of all that waits in a record's queue. A span of one needs no rule."""
    found: set[int] = set()
    for span in record.queue:
        alone = span.until_ms == span.from_ms + 1
        times = [span.from_ms] if alone else walked(record.specification, span.from_ms, span.until_ms)
        found |= set(times)
    return found


def _begin(one: Committed, keeps: set[int]) -> int:
    """When an edit's rules begin to decide: at the edit, if they are others, else where the ones before it had come. If
    those were to decide only after what they kept, at the edit, too: it drops what they kept."""
    before = one.before
    if before is not None and one.record.number not in keeps and before.begun_ms > one.now_ms:
        return one.now_ms
    goes_on = (
        before is not None
        and one.record.begun_ms == before.begun_ms
        and not (before.specification.paused or one.record.specification.paused)
    )
    return one.record.position_ms if goes_on or one.record.number in keeps else one.record.begun_ms


def revisions(world: World, keeps: set[int]) -> list[Revision]:
    """The revisions that came to be, in order."""
    edits = [one for one in world.history if one.edit]
    last = max(world.history, key=lambda one: one.record.number).record
    found: list[Revision] = []
    for place, one in enumerate(edits):
        later = [_begin(other, keeps) for other in edits[place + 1 :]]
        until_ms = min([*later, last.position_ms])
        number, said = one.record.number, one.record.specification
        # Where occurrences may not overlap, new rules decide at the look at the edit, and the next one replaces.
        renews = said.overlap is not Overlap.ALLOW and one.before and one.record.begun_ms != one.before.begun_ms
        carried_out = [when for other, when in world.carried_out_ms.items() if other >= number + bool(renews)]
        ended = [world.ended_ms.get(other, NEVER) for other in range(1, number + 1)]
        done_ms = max([min(carried_out, default=NEVER), *ended])
        from_ms = _begin(one, keeps)
        keep = number in keeps
        found.append(Revision(said, one.record, one.before, one.now_ms, from_ms, until_ms, done_ms, keep))
    return found


def judge_decision(one: Committed) -> None:
    """What a look decided, by the time at which it did: what is missed and what is caught up."""
    before = one.before
    if one.edit or before is None or before.specification.paused:
        return
    said, now_ms = before.specification, one.now_ms
    times = walked(said, before.position_ms, one.record.position_ms)

    def is_missed(at_ms: int) -> bool:
        due_ms = due_of(said, at_ms)
        return due_ms + LATE_MS < now_ms or (0 < said.expires_ms <= now_ms - due_ms)

    late = [at_ms for at_ms in times if is_missed(at_ms)]
    fit = [
        at_ms
        for at_ms in late
        if due_of(said, at_ms) >= now_ms - said.window_ms and not 0 < said.expires_ms <= now_ms - due_of(said, at_ms)
    ]
    following = next(said.recurrence.occurrences(one.record.position_ms, -(10**9)), None)
    put_off = following is not None and is_missed(following.at_ms)
    caught = {CatchUp.NONE: [], CatchUp.ALL: fit, CatchUp.LATEST: [] if put_off else fit[-1:]}[said.catch_up]
    assert one.record.missed - before.missed == len(late) - len(caught), "missed"
    assert one.record.sequence - before.sequence == len(times), "sequence"
    if said.overlap is Overlap.ALLOW and not before.queue:
        right = sorted({*times} - {*late} | {*caught})
        assert [entry.at_ms for entry in one.record.decided] == right, "decided"
        assert [entry.at_ms for entry in one.record.decided if entry.caught_up] == caught, "caught up"


def judge(world: World, keeps: set[int]) -> Counter[str]:
    """Raise AssertionError, which names what is wrong, or return what was seen."""
    seen: Counter[str] = Counter()
    for one in world.history:
        judge_decision(one)
    all_revisions = revisions(world, keeps)
    final = world.newest()
    assert final is not None
    decided_by: dict[int, Revision] = {}
    places = {one.specification.payload.split(b" ")[0]: place for place, one in enumerate(all_revisions)}
    for revision in all_revisions:
        if not revision.specification.paused:
            for at_ms in walked(revision.specification, revision.from_ms, revision.until_ms):
                decided_by[at_ms] = revision
    waiting = [(one.message.at_ms, one.message.payload) for one in world.topic.values() if not one.until_ms]
    delivered = [(one.at_ms, one.payload, one.when_ms) for one in world.delivered]
    everything = delivered + [(at_ms, payload, NEVER - 1) for at_ms, payload in waiting]
    times = Counter(at_ms for at_ms, _, _ in everything)
    for at_ms, payload, when_ms in everything:
        raced = any(
            revision.from_ms <= at_ms and when_ms <= revision.done_ms and revision.before is not None
            for revision in all_revisions
        )
        kept = any(revision.keep and at_ms < revision.from_ms for revision in all_revisions)
        owner = decided_by.get(at_ms)
        seen["raced"] += raced
        if not (raced or kept):
            assert owner is not None, f"phantom at {at_ms}"
            told = [
                place
                for place, one in enumerate(all_revisions)
                if one.made_ms < at_ms and one.done_ms < when_ms and not one.keep
            ]
            by = places.get(payload.split(b" ")[0], -1)
            assert by >= max(told, default=-1), f"payload of an older revision at {at_ms}"
            assert times[at_ms] == 1, f"twice at {at_ms}"
        seen["delivered"] += 1
    judge_what_is_not_there(world, all_revisions, decided_by, set(times), final, seen)
    if not keeps and len(all_revisions) == 1:
        assert final.produced + final.caught_up == len(everything), "produced"
        numbers = [int(payload.split(b" ")[2]) for _, payload, _ in sorted(everything)]
        assert numbers == sorted(set(numbers)), "numbers"
    return seen


def judge_what_is_not_there(
    world: World,
    all_revisions: list[Revision],
    decided_by: dict[int, Revision],
    there: set[int],
    final: ScheduleRecord,
    seen: Counter[str],
) -> None:
    """Each occurrence that was not put is missed, skipped, queued, or was dropped by an edit, and is counted once."""
    queued = queued_in(final)
    dropped: set[int] = set()
    for revision in all_revisions:
        before = revision.before
        if before is None:
            continue
        dropped |= queued_in(before) if revision.record.queue == () else set()
        if revision.specification.paused and before.specification.jitter_ms:
            begin_ms = revision.made_ms - before.specification.jitter_ms
            dropped |= set(walked(before.specification, begin_ms, revision.made_ms))
    absent = set(decided_by) - there - queued - {one.at_ms for one in final.decided}
    counted = final.missed + final.skipped
    seen["absent"] += len(absent)
    assert final.failed == 0, "failed"
    sure = absent - dropped
    slack = len(all_revisions) - 1
    assert len(sure) - slack <= counted <= len(absent) + slack, f"{counted} counted, {len(sure)} not there"
