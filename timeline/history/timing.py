"""S1 never early, S7 moves, S16 no double shift, S10 and S11 no lease again before the last one ended, and that nothing
is handed out after its lease. A life (one birth) at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from timeline.history.record import Event, Values
from timeline.history.story import SCHEDULERS, Story, Violation, met, stored
from timeline.history.tokens import Life, life_of, released_version

MAX_SHIFTS = 5
"""With more bulk shifts than this that may have met a message, every schedule is believed."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A schedule that somebody asked for: due in [low, high] ms, made with `version` (0: not known, so it may be the
    one that stands, whatever the version)."""

    low: float
    high: float
    version: int
    by: Event

    def fits(self, scheduled_ms: float) -> bool:
        return self.low <= scheduled_ms <= self.high


def timing(story: Story) -> Iterator[Violation]:
    """What times promise, for each delivery of the story."""
    for receive in story.receives:
        yield from _early(story, receive)
    for birth, content in story.births.items():
        if not story.forgotten and not story.lives_twice(birth, content):
            life = life_of(story, birth, content)
            yield from _schedules(story, life)
            yield from _leases(story, life)


def is_early(receive: Event, bound_ms: float) -> bool:
    """Whether a delivery reached code before its due or its scheduled time, by more than `bound_ms`."""
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
    """The dues that `event` can have asked for; None when it asked for none."""
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


def _asked(story: Story, life: Life) -> list[Asked]:
    """All that may have scheduled this life, those known by version last among equals."""
    found: list[Asked] = []
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
        found.append(Asked(*window, version, event))
    for event in story.by_tag:
        window = asked_window(story, event) if event.operation == "move_tag" and event.may_have_happened else None
        if window is not None:
            found.append(Asked(*window, 0, event))
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
    story: Story, asked: list[Asked], shifts: list[Event], at: tuple[int, int, float], shown: Event | Values
) -> Iterator[Violation]:
    """Whether the schedule seen with a version is one that was asked for and not replaced since."""
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


def _may_stand(one: Asked, latest: Asked | None) -> bool:
    """Whether what was asked for stands after `latest`: it is that, or it was under way beside it. Repeated on its way,
    a call may then be applied once more after the other: a message remembers its last call only."""
    if latest is None or one is latest:
        return True
    return one.by.invoked <= latest.by.effect_until and latest.by.invoked <= one.by.effect_until


def _taken_over(story: Story, first: Event, second: Event) -> bool:
    """Whether another session of the first one's consumer was there: it may have had the message in between, unseen,
    and have given it back. One that was cut off comes back, and is then told that it was superseded, or supersedes in
    its turn."""
    consumer, mine = first.arguments.get("consumer", ""), first.arguments.get("session", 0)
    if consumer == second.arguments.get("consumer", "") and mine != second.arguments.get("session", 0):
        return True
    sessions = story.declared.sessions.get(consumer, {})
    began = sessions.get(mine, (first.invoked, inf))[0]
    return any(
        session != mine and since <= second.invoked and until >= began for session, (since, until) in sessions.items()
    )


def _may_add(shift: Event, schedulers: list[Event]) -> list[float]:
    """By how much a bulk shift may move a message: once. Where another call for the message came while it went on, its
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
    """The violation in `second` following `first`, if nothing explains it."""
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
    """Those whose answers came before the lease that the consumer knew of had ended. It gives the message up then, does
    not name it when it connects again, and is leased it again: it alone, so that nobody else has it too."""
    known: list[Event] = []
    for event in sorted(extends, key=lambda one: one.returned):
        if event.wall_ms + event.returned - event.invoked <= until_ms:
            known.append(event)
            until_ms = max(until_ms, event.result.get("lease_until_ms", 0))
    return known


def _explained(story: Story, life: Life, first: Event, second: Event) -> bool:
    """A release, a burial that was revived, or another session of the consumer that had it."""
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
