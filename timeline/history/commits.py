"""What the store's own side says, where a history has it: each change with the version it made (S3), never over a lease
that runs (S11), before its due (S7) or after the end (S6), and each call once (S16).

A `commit` line's arguments: `topic id birth version kind due_ms holder now_ms op` as the message stands afterwards,
`kind` being put, lease, relet, extend, release, bury, move, revive, or for what is gone ack, cancel, purge, expire;
of a lease also `was_due_ms` and `due_before_ms`.
"""

from __future__ import annotations

from collections.abc import Iterator

from timeline.history.record import Event
from timeline.history.story import Story, Violation

MAKERS = ("put", "lease", "relet", "release", "move", "revive")
ENDS = ("ack", "cancel", "purge", "expire")
ONCE = ("release", "move", "revive")


def commits(story: Story) -> Iterator[Violation]:
    """Whether the store's changes, in the order it made them, follow the rules."""
    if story.forgotten or not story.commits:
        return
    standing: Event | None = None
    held: Event | None = None
    calls: dict[int, Event] = {}
    ordered = sorted(story.commits, key=lambda event: (event.returned, event.number))
    for event in ordered:
        values = event.arguments
        kind = values["kind"]
        yield from _once(story, event, calls)
        if kind == "put":
            # What expired or outlived its retention goes without a line of its own.
            if standing is not None and not story.expiries and story.topic not in story.declared.retention:
                yield story.violation("S3", "stored over a message that was there", standing, event)
            standing, held = event, None
            continue
        if standing is None:
            yield story.violation("S6", f"{kind} of a message that was not there", event)
            continue
        if values["birth"] != standing.arguments["birth"]:
            yield story.violation("S4", f"{kind} met another life of the id", standing, event)
            continue
        yield from _version(story, standing, event)
        if kind == "lease":
            yield from _lease(story, standing, held, event)
        if kind in ("lease", "relet", "extend"):
            held = event
        elif kind in ("release", "move", "revive", "bury"):
            held = None
        standing = None if kind in ENDS else event


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


def _version(story: Story, standing: Event, event: Event) -> Iterator[Violation]:
    kind, version, before = event.arguments["kind"], event.arguments["version"], standing.arguments["version"]
    if kind in MAKERS and version != before + 1:
        yield story.violation("S3", f"{kind} made version {version} of {before}", standing, event)
    elif kind in ("extend", "bury", "ack") and version != before:
        yield story.violation("S4", f"{kind} with version {version} worked where {before} stood", standing, event)


def _lease(story: Story, standing: Event, held: Event | None, event: Event) -> Iterator[Violation]:
    now_ms, until_ms = event.arguments["now_ms"], standing.arguments["due_ms"]
    bound_ms = story.declared.clock_bound_ms
    if held is not None and now_ms + bound_ms < until_ms:
        yield story.violation("S11", f"leased {until_ms - now_ms} ms before the last lease ended", held, event)
    elif held is None and max(now_ms, event.arguments.get("due_before_ms", 0)) + bound_ms < until_ms:
        yield story.violation("S7", f"leased {until_ms - now_ms} ms before its due", standing, event)
