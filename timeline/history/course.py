"""The course of one id as the store's side tells it: how the message stood from each change to the next.

Where a history has `commit` lines (see `commits`), nothing about a message has to be guessed: what stood when is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf

from timeline.history.record import Event, Values

SETTLED = ("ack", "cancel", "expire")
"""Ends after which a topic that remembers keeps the id."""
ENDS = (*SETTLED, "purge", "replace")


@dataclass(frozen=True, slots=True)
class MessageState:
    """A message as one change left it. Times in ms UTC on the broker's clock; `expires_ms` 0 is none."""

    birth: int
    version: int
    due_ms: int
    scheduled_ms: int
    holder: str
    group: str
    sum: int | None
    expires_ms: int
    size: int = 0
    dead: bool = False


@dataclass(frozen=True, slots=True)
class CourseStretch:
    """From `since` until `until` (monotonic ms) the message stood as `standing` says, or (None) there was none.
    `remembered`: an earlier life had been settled by then. `by`: the change that began it."""

    since: float
    until: float
    standing: MessageState | None
    remembered: bool
    by: Event | None


class Course:
    """All stretches of one id, in order, the first from the beginning of time."""

    def __init__(self, commits: Iterable[Event]) -> None:
        changes = sorted(commits, key=lambda event: (event.returned, event.number))
        self.changes = changes
        self.stretches: list[CourseStretch] = []
        since, standing, remembered, by = -inf, None, False, None
        for event in changes:
            self.stretches.append(CourseStretch(since, event.returned, standing, remembered, by))
            since, by = event.returned, event
            vanished = standing is not None and event.arguments["kind"] == "put"
            remembered = remembered or vanished or event.arguments["kind"] in SETTLED
            standing = _after(standing, event.arguments)
        self.stretches.append(CourseStretch(since, inf, standing, remembered, by))

    def during(self, event: Event) -> Iterator[CourseStretch]:
        """What stood at any moment from when `event` was invoked until it returned."""
        for stretch in self.stretches:
            if stretch.since <= event.returned and stretch.until >= event.invoked:
                yield stretch

    def changed(self, event: Event, *kinds: str) -> Iterator[Event]:
        """The changes of these kinds between when `event` was invoked and when it returned."""
        for change in self.changes:
            if change.arguments["kind"] in kinds and event.invoked <= change.returned <= event.returned:
                yield change

    def met(self, change: Event) -> MessageState | None:
        """What stood when `change` was made."""
        return self.stretches[self.changes.index(change)].standing

    def births(self, birth: int) -> int:
        """How often the life `birth` began."""
        return sum(1 for one in self.changes if one.arguments["kind"] == "put" and one.arguments["birth"] == birth)


def expires_by(standing: MessageState, wall_ms: float) -> bool:
    """Whether the message may have been removed as expired by then: that goes without a line of its own. A lease that
    runs and a dead letter outlive expiry."""
    if not standing.expires_ms or standing.dead:
        return False
    return max(standing.expires_ms, standing.due_ms if standing.holder else 0) <= wall_ms


def _after(standing: MessageState | None, change: Values) -> MessageState | None:
    """What stands after a change. `commits` says what is wrong with one that meets nothing."""
    kind, due_ms, version = change["kind"], change["due_ms"], change["version"]
    if kind == "put":
        return MessageState(
            birth=change["birth"],
            version=version,
            due_ms=due_ms,
            scheduled_ms=due_ms,
            holder="",
            group=change.get("group", "default"),
            sum=change.get("sum"),
            expires_ms=change.get("expires_ms", 0),
            size=change.get("size", 0),
        )
    if standing is None or kind in ENDS:
        return None
    if kind in ("lease", "regrant"):
        return replace(standing, version=version, due_ms=due_ms, holder=change["holder"])
    if kind == "extend":
        return replace(standing, due_ms=due_ms)
    if kind == "bury":
        return replace(standing, dead=True)
    scheduled_ms = standing.scheduled_ms if change.get("unseen") else due_ms
    return replace(standing, version=version, due_ms=due_ms, scheduled_ms=scheduled_ms, holder="", dead=False)
