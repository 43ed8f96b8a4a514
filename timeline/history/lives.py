"""Callers' view of each life (one birth) of an id: what was put, asked, answered and handed out.

The checks: S1 never early. S2 versions. S3 one writer per version. S4 fencing. S5 late acks. S6 no resurrection. S7
moves. S8 no loss. S9 no phantom. S10, S11 no lease before the last one ended. S16 no double shift.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from timeline.history.record import Event, Values
from timeline.history.story import SCHEDULERS, Story, Violation, met, stored

MAX_SHIFTS = 5
"""With more bulk shifts than this that may have met a message, every schedule is believed."""
NEEDS_IT = ("move", "extend", "release", "bury", "revive", "get")
"""Operations that, answered NOT_FOUND, say that the message was gone and cannot have removed it themselves."""


@dataclass(slots=True)
class Made:
    """A version that was certainly made, between `after` and `before` (monotonic ms). `by` showed it."""

    version: int
    after: float
    before: float
    by: Event


@dataclass(slots=True)
class Life:
    """All that is certain about one birth."""

    birth: int
    content: int | None
    receives: list[Event]
    settles: list[Event]
    mutations: list[Event]
    made: list[Made]
    row: Values | None


def life_of(story: Story, birth: int, content: int | None) -> Life:
    """Collect what is certain about the life `birth` of a story."""
    receives = [event for event in story.receives if event.arguments["birth"] == birth]
    settles = [event for event in story.settles if event.arguments["birth"] == birth]
    sole = [event for event in story.mutations if event.happened and story.sole(event, birth, content)]
    storers = story.storers_of(birth, content)
    made = [Made(event.arguments["version"], -inf, event.returned, event) for event in receives]
    if len(storers) == 1 and stored(storers[0]):
        made.append(Made(1, storers[0].invoked, storers[0].returned, storers[0]))
    for event in (event for event in sole if event.operation in SCHEDULERS):
        if event.result.get("version"):
            made.append(Made(event.result["version"], event.invoked, event.returned, event))
    for event in settles:
        if event.operation == "release" and event.happened:
            made.append(Made(released_version(event), event.invoked, event.returned, event))
    made.sort(key=lambda one: one.version)
    row = next((row for row in story.rows if row["birth"] == birth), None)
    return Life(birth, content, receives, settles, sole, made, row)


def released_version(release: Event) -> int:
    """Return the version that a release made: one more than its token's."""
    return int(release.arguments["version"]) + 1


def lives(story: Story) -> Iterator[Violation]:
    """Judge a story as callers saw it: first as a whole, then life by life."""
    yield from _phantoms(story)
    for receive in story.receives:
        yield from _early(story, receive)
    if story.forgotten:
        return
    yield from _overwritten(story)
    yield from _lost(story)
    yield from _not_found(story)
    for birth, content in story.births.items():
        if not story.lives_twice(birth, content):
            life = life_of(story, birth, content)
            for judge in (_versions, _fencing, _after_the_end, _schedules, _leases):
                yield from judge(story, life)


def _versions(story: Story, life: Life) -> Iterator[Violation]:
    received: dict[int, Event] = {}
    for event in life.receives:
        version = event.arguments["version"]
        if version in received:
            yield story.violation("S2", f"version {version} was handed to code twice", received[version], event)
        received[version] = event
    asked: dict[int, Event] = {}
    latest: Made | None = None
    for made in life.made:
        if latest is not None and made.before < latest.after and made.version > latest.version:
            sentence = f"version {made.version} was there before {latest.version} was made"
            yield story.violation("S2", sentence, latest.by, made.by)
        if latest is None or made.after > latest.after:
            latest = made
        if made.by.operation != "receive":
            if made.version in asked:
                sentence = f"two operations both made version {made.version}"
                yield story.violation("S3", sentence, asked[made.version], made.by)
            asked[made.version] = made.by
    if life.row is not None and life.made and life.made[-1].version > life.row["version"]:
        sentence = f"the store ends at version {life.row['version']}, below one that was made"
        yield story.violation("S2", sentence, life.made[-1].by, life.row)


def _fencing(story: Story, life: Life) -> Iterator[Violation]:
    for use in life.settles:
        version = use.arguments["version"]
        if use.happened and not _may_have_been_gone(story, use):
            later = [made for made in life.made if made.version > version and made.before < use.invoked]
            if later:
                sentence = f"{use.operation} with version {version} worked after version {later[0].version} was there"
                yield story.violation("S4", sentence, later[0].by, use)
        if use.result.get("status") != "FENCED":
            continue
        for other in life.settles:
            if (
                other.happened
                and not _may_have_been_gone(story, other)
                and other.arguments["version"] == version
                and other.arguments.get("consumer") == use.arguments.get("consumer")
                and other.invoked > use.returned
            ):
                sentence = f"version {version} was fenced off, then accepted"
                yield story.violation("S5", sentence, use, other)
        row = life.row
        if row and row["version"] == version and row["holder"] == use.arguments.get("consumer") and not row["died_ms"]:
            yield story.violation("S5", f"version {version} was fenced off, yet it is the one the store has", use, row)


def _may_have_been_gone(story: Story, use: Event) -> bool:
    """Return whether an ack may count as done only because it was repeated and found nothing: something else ended the
    message before."""
    if use.operation != "ack":
        return False
    return any(start <= use.returned and event is not use for start, _, event in story.removers())


def _after_the_end(story: Story, life: Life) -> Iterator[Violation]:
    for ack in (event for event in life.settles if event.operation == "ack" and event.happened):
        for receive in life.receives if not _may_have_been_gone(story, ack) else ():
            if receive.arguments["version"] > ack.arguments["version"]:
                yield story.violation("S6", "delivered again though its ack counted", ack, receive)
        yield from _used_after(story, life, ack)
    for end in life.mutations:
        if end.operation not in ("cancel", "purge"):
            continue
        for receive in life.receives:
            if receive.invoked > end.returned and _granted_after(story, end, receive):
                yield story.violation("S6", f"delivered after its {end.operation} was answered OK", end, receive)
        yield from _used_after(story, life, end)
    revived = any(event.operation == "revive" and event.may_have_happened for event in story.mutations)
    for bury in (event for event in life.settles if event.operation == "bury" and event.happened):
        for receive in life.receives:
            if receive.arguments["version"] > bury.arguments["version"] and not revived:
                yield story.violation("S6", "delivered though it was buried and nobody revived it", bury, receive)


def _used_after(story: Story, life: Life, end: Event) -> Iterator[Violation]:
    for use in life.settles:
        if use is not end and use.happened and use.invoked > end.returned and use.operation != "ack":
            yield story.violation("S6", f"{use.operation} worked on what {end.operation} had removed", end, use)
    if life.row is not None:
        yield story.violation("S6", f"{end.operation} was answered OK, yet the store still has it", end, life.row)


def _granted_after(story: Story, end: Event, receive: Event) -> bool:
    """Return whether the lease of `receive` was certainly granted after `end`. A lease from before that still runs
    would have stopped a cancel that spares leases."""
    if end.arguments.get("leased"):
        return False
    ended_wall_ms = end.wall_ms + (end.returned - end.invoked)
    until = receive.arguments.get("lease_until_ms", 0)
    return bool(until > ended_wall_ms + story.declared.clock_bound_ms)


@dataclass(frozen=True, slots=True)
class AskedSchedule:
    """A schedule that somebody asked for: due in [low, high] ms. `version`: the one it made; 0: unknown, so that it may
    stand at any version."""

    low: float
    high: float
    version: int
    by: Event

    def fits(self, scheduled_ms: float) -> bool:
        return self.low <= scheduled_ms <= self.high


def is_early(receive: Event, bound_ms: float) -> bool:
    """Return whether a delivery reached code before its due or its scheduled time, by more than `bound_ms`."""
    due_ms = max(receive.arguments["due_ms"], receive.arguments["scheduled_ms"])
    return bool(receive.wall_ms + bound_ms < due_ms)


def _early(story: Story, receive: Event) -> Iterator[Violation]:
    declared = story.declared
    if is_early(receive, declared.clock_bound_ms):
        due_ms = max(receive.arguments["due_ms"], receive.arguments["scheduled_ms"])
        yield story.violation("S1", f"delivered {due_ms - receive.wall_ms:.3f} ms before it was due", receive)
    until_ms, allowed = receive.arguments.get("lease_until_ms"), declared.transit_bound_ms
    if allowed is None or until_ms is None:
        return
    over_ms = receive.wall_ms - until_ms
    if over_ms > allowed + declared.clock_bound_ms:
        yield story.violation("S6", f"handed out {over_ms:.1f} ms after its lease had ended", receive)


def asked_window(story: Story, event: Event) -> tuple[float, float] | None:
    """Return the due times that `event` can have asked for; None when it asked for none."""
    arguments, bound_ms = event.arguments, story.declared.clock_bound_ms
    if arguments.get("due_ms") is not None:
        low, high = float(arguments["due_ms"]), float(arguments["due_ms"]) + 0.999
    elif arguments.get("in_ms") is not None:
        in_ms = float(arguments["in_ms"])
        low = event.wall_ms + in_ms - bound_ms - 1
        high = event.wall_ms + (event.effect_until - event.invoked) + in_ms + bound_ms + 1
    else:
        return None
    if event.operation == "release":
        high = max(high, event.wall_ms + (event.effect_until - event.invoked) + bound_ms)
    return low, high


def _asked(story: Story, life: Life) -> list[AskedSchedule]:
    """Return all that may have scheduled this life."""
    found: list[AskedSchedule] = []
    storers = story.storers_of(life.birth, life.content)
    for event in (*story.puts, *story.mutations, *life.settles):
        if not event.may_have_happened or event.operation not in ("put", "release", *SCHEDULERS):
            continue
        if event.operation == "put" and event not in storers and not event.arguments.get("move"):
            continue
        window = asked_window(story, event)
        if window is None:
            continue
        known = event.happened and not (event.operation == "put" and met(event))
        version = event.result.get("version", 0) if known else 0
        if event.operation == "put":
            version = 1 if len(storers) == 1 and event in storers and stored(event) else 0
        elif event.operation == "release":
            version = released_version(event) if event.happened else 0
        elif not story.sole(event, life.birth, life.content):
            version = 0
        found.append(AskedSchedule(*window, version, event))
    for event in story.by_tag:
        window = asked_window(story, event) if event.operation == "move_tag" and event.may_have_happened else None
        if window is not None:
            found.append(AskedSchedule(*window, 0, event))
    return found


def _schedules(story: Story, life: Life) -> Iterator[Violation]:
    asked = _asked(story, life)
    shifts = [event for event in story.by_tag if event.arguments.get("by_ms") and event.may_have_happened]
    for receive in life.receives:
        values = receive.arguments
        at = values["version"], values["scheduled_ms"], receive.returned
        yield from _schedule(story, asked, shifts, at, receive)
    if life.row is not None and not life.row["died_ms"]:
        at = life.row["version"] + 1, life.row["scheduled_ms"], inf
        yield from _schedule(story, asked, shifts, at, life.row)


def _schedule(
    story: Story, asked: list[AskedSchedule], shifts: list[Event], at: tuple[int, int, float], shown: Event | Values
) -> Iterator[Violation]:
    """Check that the schedule seen with a version was asked for and not replaced since."""
    version, scheduled_ms, when = at
    before = [one for one in asked if one.by.invoked <= when]
    latest = max((one for one in before if 0 < one.version < version), key=lambda one: one.version, default=None)
    standing = [one for one in before if not 0 < one.version < version or _may_stand(one, latest)]
    shifts = [event for event in shifts if event.invoked <= when]
    if not standing or len(shifts) > MAX_SHIFTS:
        return
    sums = {0.0}
    for event in shifts:
        sums |= {total + by_ms for total in sums for by_ms in _may_add(event, [one.by for one in before] + shifts)}
    if any(one.fits(scheduled_ms - total) for one in standing for total in sums):
        return
    twice = {total + event.arguments["by_ms"] for total in sums for event in shifts}
    sources = [latest.by if latest is not None else standing[0].by, *shifts]
    if any(one.fits(scheduled_ms - total) for one in standing for total in twice):
        yield story.violation("S16", "a bulk shift was applied to it twice", *sources, shown)
    elif scheduled_ms < min(one.low for one in standing) and (latest is None or latest.by.operation == "put"):
        yield story.violation("S1", f"scheduled at {scheduled_ms}, before what was asked", *sources, shown)
    else:
        yield story.violation("S7", f"scheduled at {scheduled_ms}, which is not what was asked last", *sources, shown)


def _may_stand(one: AskedSchedule, latest: AskedSchedule | None) -> bool:
    """Return whether a schedule stands after `latest`: it is that one, or was under way beside it. If it was repeated,
    it may have been applied once more after the other: a message remembers its last call only."""
    if latest is None or one is latest:
        return True
    return one.by.invoked <= latest.by.effect_until and latest.by.invoked <= one.by.effect_until


def _taken_over(story: Story, first: Event, second: Event) -> bool:
    """Return whether another session of the first one's consumer was there. It may have had the message in between,
    unseen, and have returned it. A session that was cut off comes back: then it is superseded, or supersedes in its
    turn."""
    consumer, mine = first.arguments.get("consumer", ""), first.arguments.get("session", 0)
    if consumer == second.arguments.get("consumer", "") and mine != second.arguments.get("session", 0):
        return True
    sessions = story.declared.sessions.get(consumer, {})
    began = sessions.get(mine, (first.invoked, inf))[0]
    return any(
        session != mine and since <= second.invoked and until >= began for session, (since, until) in sessions.items()
    )


def _may_add(shift: Event, schedulers: list[Event]) -> list[float]:
    """Return by how much a bulk shift may move a message: once. If another call for the message came meanwhile, its
    repeat may be new to the message, which remembers its last call only."""
    by_ms = float(shift.arguments["by_ms"])
    between = (
        other is not shift and other.invoked <= shift.effect_until and other.effect_until >= shift.invoked
        for other in schedulers
    )
    return [by_ms, 2 * by_ms] if any(between) else [by_ms]


def _leases(story: Story, life: Life) -> Iterator[Violation]:
    """Between two deliveries of one life the first one's lease ended, or something else explains the second."""
    ordered = sorted(life.receives, key=lambda event: (event.arguments["version"], event.invoked))
    for first, second in pairwise(ordered):
        found = unexplained(story, life, first, second)
        if found is not None:
            yield found


def unexplained(story: Story, life: Life, first: Event, second: Event) -> Violation | None:
    """Return the violation in `second` following `first`, if nothing explains it."""
    low, high = first.arguments["version"], second.arguments["version"]
    if low == high or _explained(story, life, first, second):
        return None
    granted_until_ms = first.arguments.get("lease_until_ms", 0)
    extends = [
        event
        for event in life.settles
        if event.operation == "extend"
        and event.happened
        and event.arguments["version"] == low
        and event.returned < second.invoked
    ]
    if _same_session(first, second):
        extends = _in_time(granted_until_ms, extends)
    until_ms = max((event.result.get("lease_until_ms", 0) for event in extends), default=0)
    now_ms, bound_ms = second.wall_ms, story.declared.clock_bound_ms
    if now_ms + bound_ms < granted_until_ms:
        text = f"delivered again {granted_until_ms - now_ms:.1f} ms before its lease ended, and nothing explains it"
        return story.violation("S10", text, first, second)
    if now_ms + bound_ms < until_ms:
        text = f"delivered again {until_ms - now_ms:.1f} ms before the end to which its lease was extended"
        return story.violation("S11", text, first, *extends[-1:], second)
    return None


def _same_session(first: Event, second: Event) -> bool:
    names = ("consumer", "session")
    return all(first.arguments.get(name) == second.arguments.get(name) for name in names)


def _in_time(until_ms: float, extends: list[Event]) -> list[Event]:
    """Return those whose answers came before the end of the lease that the consumer knew of. At that end it gives the
    message up and does not name it when it reconnects. It may then lease it again itself."""
    known: list[Event] = []
    for event in sorted(extends, key=lambda one: one.returned):
        if event.wall_ms + event.returned - event.invoked <= until_ms:
            known.append(event)
            until_ms = max(until_ms, event.result.get("lease_until_ms", 0))
    return known


def _explained(story: Story, life: Life, first: Event, second: Event) -> bool:
    """Look for a release, a burial that was revived, or another session of the consumer that had it."""
    low, high = first.arguments["version"], second.arguments["version"]
    if _taken_over(story, first, second):
        return True
    if any(
        event.operation in ("release", "bury") and event.may_have_happened and low <= event.arguments["version"] < high
        for event in life.settles
    ):
        return True
    revives = (event for event in story.mutations if event.operation == "revive" and event.may_have_happened)
    return any(event.invoked <= second.invoked and event.effect_until >= first.invoked for event in revives)


def _phantoms(story: Story) -> Iterator[Violation]:
    first_seen: dict[int, Event] = {}
    for receive in story.receives:
        first_seen.setdefault(receive.arguments["birth"], receive)
    lives_of: dict[int, set[int]] = {}
    for birth, receive in first_seen.items():
        candidates = story.storers_of(birth, receive.arguments.get("sum"))
        if not any(put.invoked <= receive.returned for put in candidates):
            yield story.violation(
                "S9", "delivered, but no put can have stored it with this payload", receive, *story.puts
            )
        elif len(candidates) == 1:
            lives_of.setdefault(id(candidates[0]), set()).add(birth)
    for put in story.storers:
        if len(lives_of.get(id(put), ())) > 1:
            births = lives_of[id(put)]
            shown = [receive for birth, receive in first_seen.items() if birth in births]
            yield story.violation("S9", "one put has lived under two births", put, *shown)
    for receive in story.receives:
        seen, first = receive.arguments.get("sum"), first_seen[receive.arguments["birth"]]
        if seen != first.arguments.get("sum"):
            yield story.violation("S9", "one message was delivered with two payloads", first, receive)
    for row in story.rows:
        if not story.storers_of(row["birth"], row["sum"]):
            yield story.violation("S9", "the store has a message that no put can have stored", row, *story.puts)
        if row.get("read_sum", row["sum"]) != row["sum"]:
            yield story.violation("S13", "the payload that the store has is not the one its checksum is of", row)
    if len(story.rows) > 1:
        yield story.violation("S3", "the store has one id twice", *story.rows)


def _overwritten(story: Story) -> Iterator[Violation]:
    """Between two puts that both stored, something must have ended the first life."""
    stored_puts = [put for put in story.storers if stored(put)]
    for second in stored_puts[1:]:
        before = [put for put in stored_puts if put.returned < second.invoked]
        if not before:
            continue
        first = max(before, key=lambda put: put.returned)
        between = (start <= second.returned and first.invoked <= until for start, until, _ in story.removers(first))
        if not any(between):
            yield story.violation(
                "S3", "a second put stored its message while the first was still there", first, second
            )


def _lost(story: Story) -> Iterator[Violation]:
    """The last message that was certainly there is in the dump, or something may have ended it."""
    certain = [put for put in story.puts if put.happened and not put.result.get("settled")]
    if not certain or story.rows:
        return
    last = max(certain, key=lambda put: put.returned)
    whose = last if stored(last) else None
    ends = story.removers(whose)
    if not any(
        until >= last.invoked and (by is not None or _expired_before_dump(story, start, last))
        for start, until, by in ends
    ):
        sentence = "put was acknowledged, nothing ended its message, and the store has it no more"
        yield story.violation("S8", sentence, last, *story.receives[-2:], *story.settles[-2:])


def _expired_before_dump(story: Story, start: float, put: Event) -> bool:
    """Return whether an expiry that began at `start`, counted from `put` by the wall clock, came before the dump. Ends
    with lines of their own did: another process's clock may have drifted."""
    return put.wall_ms + (start - put.invoked) <= story.declared.end_wall_ms if start > -inf else True


def _not_found(story: Story) -> Iterator[Violation]:
    """NOT_FOUND is an answer only if the message may have been gone."""
    asked = [
        event
        for event in (*story.mutations, *story.settles, *story.reads)
        if event.operation in NEEDS_IT and event.result.get("status") == "NOT_FOUND"
    ]
    if not asked:
        return
    for event in asked:
        there = [put for put in story.puts if put.returned < event.invoked and put.happened and not _settled(put)]
        if not there:
            continue
        last = max(there, key=lambda put: put.returned)
        if "birth" in event.arguments and last not in story.storers_of(event.arguments["birth"], None):
            continue
        whose = last if stored(last) else None
        removers = story.removers(whose)
        if not any(start <= event.returned and until >= last.invoked for start, until, _ in removers):
            yield story.violation("S8", f"{event.operation} found nothing, though nothing ended it", last, event)


def _settled(put: Event) -> bool:
    return bool(put.result.get("settled"))
