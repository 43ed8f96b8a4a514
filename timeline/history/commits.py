"""What the store's own side says, where a history has it: each change with the version it made (S3), never over a lease
that runs (S11), before its due (S7) or after the end (S6), and each call once (S16).

A `commit` line's arguments: `topic id birth version kind due_ms holder now_ms op` as the message stands afterwards,
`kind` being put, lease, regrant, extend, release, bury, move, revive, or for what is gone ack, cancel, purge, expire,
replace (by a put whose birth is `op`, and whose own line follows); of a put also `group sum size expires_ms`, of a
lease `was_due_ms` and `due_before_ms`, of a release `unseen`, of a cancel `leased`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from timeline.history.course import Standing, Stretch, expires_by
from timeline.history.record import Event
from timeline.history.story import Story, Violation

MAKERS = ("put", "lease", "regrant", "release", "move", "revive")
ONCE = ("release", "move", "revive")
HOLDERS = ("regrant", "extend", "release", "ack", "bury")
RAISE = ("revive", "purge")
"""What is for dead letters alone."""


def commits(story: Story) -> Iterator[Violation]:
    """Whether the store's changes, in the order it made them, follow the rules."""
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
    """A call repeated changes nothing. A message remembers its last such call only: one repeated after another came
    between is new to it."""
    kind, op = event.arguments["kind"], event.arguments.get("op", 0)
    if kind == "put":
        calls.clear()
    if kind not in ONCE or not op:
        return
    if op in calls:
        yield story.violation("S16", f"one {kind} was applied twice", calls[op], event)
    calls.clear()
    calls[op] = event


def _stored(story: Story, before: Stretch, event: Event) -> Iterator[Violation]:
    """A put meets nothing, but for what expired or outlived its retention, which goes without a line of its own. It
    may have been on its way to the store while somebody whose `now` was later removed that."""
    if before.standing is None or story.topic in story.declared.retention:
        return
    if not expires_by(before.standing, max(event.arguments["now_ms"], event.wall_ms + story.declared.clock_bound_ms)):
        yield story.violation("S3", "stored over a message that was there", before.by, event)


def _met(story: Story, before: Stretch, standing: Standing, event: Event) -> Iterator[Violation]:
    """The version that the change made, or met, and whose the message was."""
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
    if spares and _leased(story, standing, values["now_ms"]):
        yield story.violation("S3", f"{kind} of what {standing.holder!r} had under a lease", *shown)
    if kind == "extend" and values["due_ms"] < standing.due_ms:
        yield story.violation("S11", "an extend made the lease shorter", *shown)
    if kind == "lease":
        yield from _lease(story, standing, before.by, event)


def _lease(story: Story, standing: Standing, made: Event | None, event: Event) -> Iterator[Violation]:
    values, until_ms, bound_ms = event.arguments, standing.due_ms, story.declared.clock_bound_ms
    now_ms = values["now_ms"]
    if values.get("was_due_ms", until_ms) != until_ms:
        sentence = f"leased as due at {values['was_due_ms']}, where {until_ms} stood"
        yield story.violation("S3", sentence, made, event)
    ahead_ms = now_ms + story.declared.settings.get(story.topic, {}).get("lease_ahead_ms", inf)
    if _leased(story, standing, now_ms):
        yield story.violation("S11", f"leased {until_ms - now_ms} ms before the last lease ended", made, event)
    elif not standing.holder and max(now_ms, min(values.get("due_before_ms", 0), ahead_ms)) + bound_ms < until_ms:
        yield story.violation("S7", f"leased {until_ms - now_ms} ms before its due", made, event)


def _leased(story: Story, standing: Standing, now_ms: float) -> bool:
    """Whether a lease certainly ran at `now_ms`."""
    return bool(standing.holder) and not standing.dead and now_ms + story.declared.clock_bound_ms < standing.due_ms
