"""The store's side of a history: its changes judged by the rules, and all answers judged by its changes.

Changes: each has the version it made (S3). None is over a running lease (S11), before its due time (S7), after the end
(S6), or the second of one call (S16).

Answers: an OK has its change (S8). Every change has a call of its own (S9, S16). A refusal has its reason (S3, S4, S5).
Code receives what was leased (S9). The dump is where the changes lead.

A `commit` line has the arguments `topic id birth version kind due_ms holder now_ms op`, as the message stands
afterwards. Kinds: put, lease, regrant, extend, release, bury, move, revive; for a message that is gone ack, cancel,
purge, expire, replace. A replace is by a put whose birth is `op` and whose own line follows. Some kinds have more
arguments: a put `group sum size expires_ms`, a lease `was_due_ms due_before_ms`, a release `unseen`, a cancel `leased`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

from timeline.history.lives import asked_window
from timeline.history.record import Event
from timeline.history.story import SETTLES, Course, CourseStretch, MessageState, Story, Violation, expires_by, met

MAKERS = ("put", "lease", "regrant", "release", "move", "revive")
ONCE = ("release", "move", "revive")
HOLDERS = ("regrant", "extend", "release", "ack", "bury")
RAISE = ("revive", "purge")
"""These kinds are for dead letters alone."""

CHANGES = {
    "put": ("put", "move"), "move": ("move",), "cancel": ("cancel",), "revive": ("revive",), "purge": ("purge",),
    "ack": ("ack",), "extend": ("extend",), "release": ("release",), "bury": ("bury",),
}  # fmt: skip
"""The changes that each operation may make."""
ASKED = {
    "put": ("put",), "move": ("move", "move_tag", "put"), "cancel": ("cancel", "cancel_tag"), "revive": ("revive",),
    "purge": ("purge",), "ack": ("ack",), "replace": ("put",),
}  # fmt: skip
"""The operations that may have asked for a change. Drivers and brokers extend, release and bury of their own accord."""
ENDED = ("release", "ack", "bury")
"""How a holder, or the broker for it, ends a lease."""


def commits(story: Story) -> Iterator[Violation]:
    """Judge whether the store's changes, in the order it made them, follow the rules."""
    if story.forgotten or not story.commits:
        return
    calls: dict[int, Event] = {}
    for before, event in zip(story.course.stretches, story.course.changes, strict=False):
        standing, kind = before.standing, event.arguments["kind"]
        yield from _once(story, event, calls)
        if kind == "put":
            yield from _stored(story, before, event)
        elif standing is None:
            yield story.violation("S6", f"{kind} of a message that was not there", event)
        elif event.arguments["birth"] != standing.birth:
            yield story.violation("S4", f"{kind} met another life of the id", before.by, event)
        else:
            yield from _met(story, before, standing, event)


def _once(story: Story, event: Event, calls: dict[int, Event]) -> Iterator[Violation]:
    """A repeated call changes nothing. A message remembers its last such call only: one repeated after another is new
    to it."""
    kind, op = event.arguments["kind"], event.arguments.get("op", 0)
    if kind == "put":
        calls.clear()
    if kind not in ONCE or not op:
        return
    if op in calls:
        yield story.violation("S16", f"one {kind} was applied twice", calls[op], event)
    calls.clear()
    calls[op] = event


def _stored(story: Story, before: CourseStretch, event: Event) -> Iterator[Violation]:
    """A put meets nothing, except a message that expired or outlived its retention. Such a message goes without a line
    of its own. Another process with a later `now` may have removed it while the put was on its way."""
    if before.standing is None or story.topic in story.declared.retention:
        return
    if not expires_by(before.standing, max(event.arguments["now_ms"], event.wall_ms + story.declared.clock_bound_ms)):
        yield story.violation("S3", "stored over a message that was there", before.by, event)


def _met(story: Story, before: CourseStretch, standing: MessageState, event: Event) -> Iterator[Violation]:
    """Check the version that the change made or met, and the holder."""
    values, shown = event.arguments, (before.by, event)
    kind, version = values["kind"], values["version"]
    if kind in MAKERS and version != standing.version + 1:
        yield story.violation("S3", f"{kind} made version {version} of {standing.version}", *shown)
    elif kind in ("extend", "bury", "ack", "replace") and version != standing.version:
        yield story.violation("S4", f"{kind} with version {version} worked where {standing.version} stood", *shown)
    if kind in HOLDERS and values.get("holder", standing.holder) != standing.holder:
        sentence = f"{kind} by {values['holder']!r} worked where {standing.holder!r} had it"
        yield story.violation("S4", sentence, *shown)
    if standing.dead and kind not in RAISE:
        yield story.violation("S6", f"{kind} of a dead letter", *shown)
    elif kind in RAISE and not standing.dead:
        yield story.violation("S3", f"{kind} of what is no dead letter", *shown)
    spares = kind in ("move", "replace") or (kind == "cancel" and not values.get("leased", True))
    if spares and _under_lease(story, standing, values["now_ms"]):
        yield story.violation("S3", f"{kind} of what {standing.holder!r} had under a lease", *shown)
    if kind == "extend" and values["due_ms"] < standing.due_ms:
        yield story.violation("S11", "an extend made the lease shorter", *shown)
    if kind == "lease":
        yield from _lease(story, standing, before.by, event)


def _lease(story: Story, standing: MessageState, made: Event | None, event: Event) -> Iterator[Violation]:
    values, until_ms, bound_ms = event.arguments, standing.due_ms, story.declared.clock_bound_ms
    now_ms = values["now_ms"]
    if values.get("was_due_ms", until_ms) != until_ms:
        sentence = f"leased as due at {values['was_due_ms']}, where {until_ms} stood"
        yield story.violation("S3", sentence, made, event)
    ahead_ms = now_ms + story.declared.settings.get(story.topic, {}).get("lease_ahead_ms", inf)
    if _under_lease(story, standing, now_ms):
        yield story.violation("S11", f"leased {until_ms - now_ms} ms before the last lease ended", made, event)
    elif not standing.holder and max(now_ms, min(values.get("due_before_ms", 0), ahead_ms)) + bound_ms < until_ms:
        yield story.violation("S7", f"leased {until_ms - now_ms} ms before its due", made, event)


def _under_lease(story: Story, standing: MessageState, now_ms: float) -> bool:
    """Return whether a lease certainly ran at `now_ms`."""
    return bool(standing.holder) and not standing.dead and now_ms + story.declared.clock_bound_ms < standing.due_ms


def answers(story: Story) -> Iterator[Violation]:
    """Judge whether answers, deliveries and the dump agree with the store's changes."""
    if story.forgotten or not story.declared.witnessed:
        return
    course = story.course
    yield from _remembered(story, course)
    yield from _asked(story, course)
    for event in (*story.puts, *story.mutations, *story.settles, *story.reads):
        if event.returned < inf:
            yield from _answer(story, course, event)
    for receive in story.receives:
        yield from _granted(story, course, receive)
    yield from _dump(story, course)


# ── answers ──


def _answer(story: Story, course: Course, event: Event) -> Iterator[Violation]:
    operation, status = event.operation, str(event.result.get("status", ""))
    if event.happened and operation in CHANGES and not met(event):
        changes = list(course.changed(event, *CHANGES[operation]))
        if any(_is_of(course, event, change) for change in changes) or _by_repeat(story, course, event):
            return
        others = [change for change in changes if _is_of(course, event, change, whatever=True)]
        if others:
            sentence = f"{operation} asked for version {event.arguments['if_version']} and met another"
            yield story.violation("S3", sentence, *others, event)
        else:
            yield story.violation("S8", f"{operation} was answered {status}, and the store did nothing", event)
        return
    justified = REASONS.get(status)
    if justified is None or operation == "topic":
        return
    if not any(
        justified(story, stretch, event) and not _refused_before(story, stretch, event, status)
        for stretch in course.during(event)
    ):
        shown = [stretch.by for stretch in course.during(event)]
        invariant = {"FENCED": "S5", "NOT_FOUND": "S8"}.get(status, "S3")
        if operation in SETTLES and status in ("LEASED", "DEAD", "EXISTS"):
            invariant = "S4"
        yield story.violation(invariant, f"{operation} was answered {status}, which nothing explains", *shown, event)


def _is_of(course: Course, event: Event, change: Event, whatever: bool = False) -> bool:
    """Return whether `change` is the one that `event` was answered OK for. `whatever`: to any version."""
    asked, did = event.arguments, change.arguments
    if event.operation in SETTLES:
        version = asked["version"] + (event.operation == "release")
        return (did["birth"], did["version"]) == (asked["birth"], version)
    if not _names(event, did["version"]) or (
        event.operation == "put" and did["kind"] == "move" and not asked.get("move")
    ):
        return False
    met_one = course.met(change)
    return whatever or not asked.get("if_version") or met_one is None or met_one.version == asked["if_version"]


def _names(event: Event, version: int) -> bool:
    """Return whether the answer may mean the change that made `version`. A repeated call is answered by the present
    state."""
    told = event.result.get("version")
    return not told or told == version or (bool(event.result.get("repeated")) and told > version)


def _by_repeat(story: Story, course: Course, event: Event) -> bool:
    """Return whether a call, sent again after a lost answer, was OK because it found things done. An ack finds nothing.
    A bury finds a dead letter with its token, which the broker may have buried."""
    stretches = list(course.during(event))
    if event.operation == "ack":
        return bool(event.result.get("repeated")) and any(_gone(story, one, event) for one in stretches)
    if event.operation == "bury":
        token = event.arguments["birth"], event.arguments["version"]
        standing = [one.standing for one in stretches if one.standing is not None and one.standing.dead]
        return token in [(one.birth, one.version) for one in standing]
    return False


Reason = Callable[[Story, CourseStretch, Event], bool]


def _gone(story: Story, stretch: CourseStretch, event: Event) -> bool:
    return stretch.standing is None or _may_have_expired(story, stretch.standing, event)


def _may_have_expired(story: Story, standing: MessageState, event: Event) -> bool:
    """Return whether the message may have been removed past its expiry before `event` returned. That has no line of its
    own. A running lease and a dead letter outlive expiry."""
    wall_ms = event.wall_ms + (event.returned - event.invoked) + story.declared.clock_bound_ms
    return expires_by(standing, wall_ms)


def _fenced(story: Story, stretch: CourseStretch, event: Event) -> bool:
    standing, asked = stretch.standing, event.arguments
    if standing is None:
        return False
    if event.operation in SETTLES:
        token = standing.birth, standing.version, standing.holder
        return token != (asked["birth"], asked["version"], asked.get("consumer"))
    return asked.get("if_version", 0) not in (0, standing.version)


def _leased(story: Story, stretch: CourseStretch, event: Event) -> bool:
    standing = stretch.standing
    return bool(
        standing is not None
        and standing.holder
        and not standing.dead
        and standing.due_ms > event.wall_ms - story.declared.clock_bound_ms
    )


def _dead(story: Story, stretch: CourseStretch, event: Event) -> bool:
    return stretch.standing is not None and stretch.standing.dead


def _exists(story: Story, stretch: CourseStretch, event: Event) -> bool:
    standing = stretch.standing
    if standing is None:
        return False
    return not standing.dead if event.operation in ("revive", "purge") else standing.sum != event.arguments.get("sum")


def _forbidden(story: Story, stretch: CourseStretch, event: Event) -> bool:
    return stretch.standing is not None and stretch.standing.group != event.arguments.get("group", "default")


def _duplicate(story: Story, stretch: CourseStretch, event: Event) -> bool:
    if event.result.get("settled"):
        return story.remembers and (
            stretch.remembered or (stretch.standing is not None and _may_have_expired(story, stretch.standing, event))
        )
    standing, asked = stretch.standing, event.arguments
    return standing is not None and standing.sum == asked.get("sum") and not asked.get("replace")


def _expired(story: Story, stretch: CourseStretch, event: Event) -> bool:
    return stretch.standing is not None and stretch.standing.expires_ms > 0


def _found(story: Story, stretch: CourseStretch, event: Event) -> bool:
    return event.operation != "get" or stretch.standing is not None


REASONS: dict[str, Reason] = {
    "NOT_FOUND": _gone, "FENCED": _fenced, "LEASED": _leased, "DEAD": _dead, "EXISTS": _exists,
    "FORBIDDEN": _forbidden, "DUPLICATE": _duplicate, "EXPIRED": _expired, "OK": _found,
}  # fmt: skip
"""For each status about the message: whether a stretch explains it."""


def _refused_before(story: Story, stretch: CourseStretch, event: Event, status: str) -> bool:
    """Return whether another refusal goes before this one: FORBIDDEN, then FENCED, then the message's state."""
    if status not in ("FENCED", "LEASED", "DEAD", "EXISTS", "DUPLICATE", "EXPIRED") or event.result.get("settled"):
        return False
    if event.operation not in SETTLES and _forbidden(story, stretch, event):
        return True
    return status != "FENCED" and _fenced(story, stretch, event)


# ── changes ──


def _remembered(story: Story, course: Course) -> Iterator[Violation]:
    """A topic that remembers an id does not store it again."""
    if not story.remembers:
        return
    for before, change in zip(course.stretches, course.changes, strict=False):
        gone = before.standing is not None and expires_by(before.standing, change.arguments["now_ms"])
        if change.arguments["kind"] == "put" and (before.remembered or gone):
            yield story.violation("S9", "stored again though its topic remembers the id", before.by, change)


def _asked(story: Story, course: Course) -> Iterator[Violation]:
    """Each change was asked for by a call that was under way, and each call asked for its own change. A call keeps one
    operation id when it is repeated (a put its birth), so its changes are known by that."""
    wanted: dict[tuple[str, int, int], list[Event]] = {}
    for at, change in enumerate(course.changes):
        values, kind = change.arguments, change.arguments["kind"]
        if kind == "put":
            wanted.setdefault((kind, values["birth"], 0), []).append(change)
        elif kind in ASKED:  # an ack has no id: it changes a message once, for then there is none
            own = (values["op"], 0) if values.get("op") else (0, at)
            wanted.setdefault((kind, *own), []).append(change)
    calls = (*story.puts, *story.mutations, *story.settles, *story.by_tag)
    able = [
        [_call(course, event, key, changes[0]) for event in calls if _may_have_made(story, event, changes)]
        for key, changes in wanted.items()
    ]
    for (kind, *_), changes, callers, found in zip(wanted, wanted.values(), able, _matched(able), strict=True):
        if not found:
            sentence = f"{kind} was done, and " + (
                "each call that asked for it did another" if callers else "nobody asked"
            )
            yield story.violation("S16" if callers else "S9", sentence, *changes)


Call = tuple[int, str, int]


def _call(course: Course, event: Event, key: tuple[str, int, int], change: Event) -> Call:
    """Return the part of a call that a change uses up. A repeated ack may meet the second life of a birth that lived
    twice, under the same token."""
    again = event.result.get("repeated") or not event.happened
    twice = key[0] == "ack" and again and course.births(change.arguments["birth"]) > 1
    return id(event), key[0], key[2] if twice else 0


def _matched(able: list[list[Call]]) -> list[bool]:
    """Return for each change whether it gets a call of its own, if as many as possible do."""
    taken: dict[Call, int] = {}

    def find(at: int, seen: set[Call]) -> bool:
        for call in able[at]:
            if call not in seen:
                seen.add(call)
                if call not in taken or find(taken[call], seen):
                    taken[call] = at
                    return True
        return False

    return [find(at, set()) for at in range(len(able))]


def _may_have_made(story: Story, event: Event, changes: list[Event]) -> bool:
    """Return whether the call may have made all these changes, which carry one operation id."""
    kind = changes[0].arguments["kind"]
    if not event.may_have_happened or event.operation not in ASKED[kind]:
        return False
    if not all(event.invoked <= change.returned <= event.effect_until for change in changes):
        return False
    asked, did = event.arguments, changes[0].arguments
    if kind == "ack":
        token = did["birth"], did["version"], did.get("holder")
        return (asked["birth"], asked["version"], asked.get("consumer")) == token
    if event.operation == "put" and kind in ("move", "replace"):
        return bool(asked.get(kind))
    again = event.result.get("repeated") or not event.happened
    if kind == "put" and (asked.get("sum") != did.get("sum") or ((met(event) or len(changes) > 1) and not again)):
        return False
    versions = [change.arguments["version"] for change in changes]
    if event.happened and kind in ("move", "revive") and not any(_names(event, version) for version in versions):
        return False
    window = asked_window(story, event) if kind in ("put", "move", "revive") else None
    return window is None or all(window[0] <= change.arguments["due_ms"] <= window[1] for change in changes)


# ── deliveries and the dump ──


def _granted(story: Story, course: Course, receive: Event) -> Iterator[Violation]:
    """Code received only what a lease gave to this consumer before, with the schedule of that time."""
    seen = receive.arguments
    token = seen["birth"], seen["version"], seen["consumer"]
    leased = [
        (stretch.by, stretch.standing)
        for stretch in course.stretches
        if stretch.since <= receive.invoked
        and stretch.standing is not None
        and (stretch.standing.birth, stretch.standing.version, stretch.standing.holder) == token
    ]
    over = _over_before(course, token, receive)
    if not leased:
        yield story.violation("S9", "handed out, and the store never leased it so", receive)
    elif over is not None:
        sentence = f"handed out though its lease was over by a {over.arguments['kind']}"
        yield story.violation("S6", sentence, leased[-1][0], over, receive)
    elif all(one.scheduled_ms != seen["scheduled_ms"] for _, one in leased):
        sentence = f"handed out as scheduled at {seen['scheduled_ms']}, which did not stand"
        yield story.violation("S7", sentence, leased[-1][0], receive)
    elif all(one.sum != seen.get("sum") for _, one in leased):
        yield story.violation("S9", "handed out with another payload than was stored", leased[-1][0], receive)


def _over_before(course: Course, token: tuple[int, int, str], receive: Event) -> Event | None:
    """Return the change that certainly ended the lease of `token` before it was received: its holder released, acked or
    buried it. A cancel may meet a delivery under way. So may a repeated ack of a first life that meets the second one
    of the same birth. For leases that ran out see `lives`."""
    over: Event | None = None
    acked = False
    for stretch, by in zip(course.stretches, [*(after.by for after in course.stretches[1:]), None], strict=True):
        if stretch.since >= receive.invoked:
            break
        one = stretch.standing
        if one is not None and not one.dead and (one.birth, one.version, one.holder) == token:
            ended = by is not None and by.returned < receive.invoked and by.arguments["kind"] in ENDED
            ack = by is not None and by.arguments["kind"] == "ack"
            over = by if ended and not (ack and acked and course.births(token[0]) > 1) else None
            acked |= ack
    return over


def _dump(story: Story, course: Course) -> Iterator[Violation]:
    """The store's last state is where its changes led."""
    last = course.stretches[-1]
    if last.standing is None:
        for row in story.rows:
            yield story.violation("S6", "the store has what its own changes had ended", last.by, row)
    elif not story.rows:
        if not expires_by(last.standing, story.declared.end_wall_ms + story.declared.clock_bound_ms):
            yield story.violation("S8", "nothing ended it, and the store has it no more", last.by)
    else:
        row, one = story.rows[0], last.standing
        there = row["birth"], row["version"], row["due_ms"], bool(row["died_ms"])
        if there != (one.birth, one.version, one.due_ms, one.dead):
            yield story.violation("S3", "the store has it otherwise than its changes left it", last.by, row)
