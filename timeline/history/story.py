"""All that is known of one id: its events by kind, its lives, and its course.

An id's life begins with a put that stored it. It ends when the message is acknowledged, cancelled, purged, expired or
replaced; another put then begins the next life. Callers' histories leave gaps: which life a move met, whether a lost
call happened. Nothing here fills them by guessing: a yes to the questions below is certain.

The course is the store's side: how the message stood from each change to the next. It is complete if a history has
`commit` lines (see `commits`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from timeline.history.record import UNKNOWN, Event, Values, described

MOST_TOLD = 60
"""At most this many lines of one id are shown, its first and its last ones."""

SETTLES = ("ack", "extend", "release", "bury")
SCHEDULERS = ("move", "revive")
REMOVERS = ("cancel", "purge")


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
    """The message stood as `standing` from `since` until `until` (monotonic ms); None: there was none. `remembered`: an
    earlier life had been settled by then. `by`: the change that began it."""

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
        """Yield what stood at any moment from when `event` was invoked until it returned."""
        for stretch in self.stretches:
            if stretch.since <= event.returned and stretch.until >= event.invoked:
                yield stretch

    def changed(self, event: Event, *kinds: str) -> Iterator[Event]:
        """Yield the changes of these kinds between when `event` was invoked and when it returned."""
        for change in self.changes:
            if change.arguments["kind"] in kinds and event.invoked <= change.returned <= event.returned:
                yield change

    def met(self, change: Event) -> MessageState | None:
        """Return what stood before `change`."""
        return self.stretches[self.changes.index(change)].standing

    def births(self, birth: int) -> int:
        """Return how often the life `birth` began."""
        return sum(1 for one in self.changes if one.arguments["kind"] == "put" and one.arguments["birth"] == birth)


def expires_by(standing: MessageState, wall_ms: float) -> bool:
    """Return whether the message may have been removed as expired by then. That has no line of its own. A running lease
    and a dead letter outlive expiry."""
    if not standing.expires_ms or standing.dead:
        return False
    return max(standing.expires_ms, standing.due_ms if standing.holder else 0) <= wall_ms


def _after(standing: MessageState | None, change: Values) -> MessageState | None:
    """Return what stands after a change. `commits` judges a change that meets nothing."""
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


@dataclass(slots=True)
class Violation:
    """A broken promise: its name (`S1` to `S16`, `L1`), a sentence, the message, and the lines that show it."""

    invariant: str
    sentence: str
    topic: str = ""
    id: str = ""
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        about = f" {self.topic}/{self.id}" if self.id else ""
        return "\n    ".join([f"{self.invariant}{about}: {self.sentence}", *self.lines])


@dataclass(frozen=True, slots=True)
class Declared:
    """The limits of the run: see `checker.check` for each."""

    durable: bool = True
    clock_bound_ms: float = 0.0
    transit_bound_ms: float | None = None
    liveness_bound_ms: float | None = None
    remember: frozenset[str] = frozenset()
    retention: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()
    last_crash: float = -inf
    sessions: Mapping[str, Mapping[int, tuple[float, float]]] = field(default_factory=dict)
    """Each consumer's sessions, with when each was there: from, until (monotonic ms)."""
    witnessed: bool = False
    """Whether the history has the store's side."""
    settings: Mapping[str, Values] = field(default_factory=dict)
    """Each topic's settings as the history last has them. `lease_ahead_ms`: how long before its due time a message may
    be leased at most."""
    end_wall_ms: float = inf


@dataclass(slots=True)
class Story:
    """The events and dump rows of one (topic, id), each list by time of invocation."""

    topic: str
    id: str
    declared: Declared
    puts: list[Event] = field(default_factory=list)
    mutations: list[Event] = field(default_factory=list)
    settles: list[Event] = field(default_factory=list)
    receives: list[Event] = field(default_factory=list)
    reads: list[Event] = field(default_factory=list)
    commits: list[Event] = field(default_factory=list)
    by_tag: list[Event] = field(default_factory=list)
    rows: list[Values] = field(default_factory=list)
    _storers: list[Event] | None = None
    _course: Course | None = None

    def add(self, event: Event) -> None:
        """File an event under its kind."""
        operation = event.operation
        if operation == "receive":
            self.receives.append(event)
        elif operation == "put":
            self.puts.append(event)
        elif operation in SETTLES:
            self.settles.append(event)
        elif operation == "commit":
            self.commits.append(event)
        elif operation in ("move", "cancel", "revive", "purge"):
            self.mutations.append(event)
        else:
            self.reads.append(event)

    @property
    def storers(self) -> list[Event]:
        """Puts that began a life, or may have. A put that met another put of the same content did not."""
        if self._storers is None:
            found: list[Event] = []
            for put in self.puts:
                if not put.may_have_happened:
                    continue
                again = bool(put.result.get("repeated"))  # then it may have met itself
                if met(put) and not again and any(self._may_meet(one, put) for one in self.puts if one is not put):
                    continue
                found.append(put)
            self._storers = found
        return self._storers

    def _may_meet(self, other: Event, put: Event) -> bool:
        alike = other.arguments.get("sum") == put.arguments.get("sum")
        return alike and other.may_have_happened and other.invoked < put.returned and not met(other)

    def storers_of(self, birth: int, content: int | None) -> list[Event]:
        """Return the storers that may have begun the life `birth`. `content`: the checksum of its payload; None: not
        seen."""
        named = [put for put in self.storers if put.arguments.get("birth") == birth]
        if named:
            return named
        return [
            put
            for put in self.storers
            if put.arguments.get("birth") is None and content in (None, put.arguments.get("sum", content))
        ]

    @property
    def births(self) -> dict[int, int | None]:
        """Each life that was seen by its birth, with its content's checksum if that was seen."""
        seen: dict[int, int | None] = {}
        for event in self.settles:
            seen.setdefault(event.arguments["birth"], None)
        for event in self.receives:
            seen[event.arguments["birth"]] = event.arguments.get("sum")
        for row in self.rows:
            seen[row["birth"]] = row["sum"]
        return seen

    def span(self, storer: Event) -> tuple[float, float]:
        """Return the monotonic ms between which the life that `storer` began can have been there."""
        if storer.outcome == UNKNOWN:
            return storer.invoked, inf
        ends = [put.returned for put in self.storers if stored(put) and put.invoked > storer.returned]
        return storer.invoked, min(ends, default=inf)

    def sole(self, event: Event, birth: int, content: int | None) -> bool:
        """Return whether `event`, which names no life, can only have met the life `birth`."""
        storers = self.storers
        if len(storers) == 1:
            return True
        met_by = []
        for storer in storers:
            start, end = self.span(storer)
            if start <= event.effect_until and event.invoked <= end:
                met_by.append(storer)
        mine = self.storers_of(birth, content)
        return len(met_by) == 1 and len(mine) == 1 and met_by[0] is mine[0]

    def removers(self, storer: Event | None = None) -> Iterator[tuple[float, float, Event | None]]:
        """Yield (from, until, event) of each possible end of the life that `storer` began; None: of any life. Times in
        monotonic ms. Expiry, retention and a dropped topic have no event."""
        for event in self.settles:
            gone = event.operation == "ack" and event.may_have_happened
            # A release past the expiry removes the message; its answer may have got lost.
            past = event.operation == "release" and not event.happened and event.may_have_happened and self.expiries
            if (gone or past or expired(event)) and self._concerns(event, storer):
                yield event.invoked, event.effect_until, event
        for event in self.mutations:
            if (event.operation in REMOVERS and event.may_have_happened) or expired(event):
                yield event.invoked, event.effect_until, event
        for event in self.reads:
            if expired(event):
                yield event.invoked, event.effect_until, event
        for event in self.puts:
            if event.arguments.get("replace") and event.may_have_happened and event is not storer:
                yield event.invoked, event.effect_until, event
        for event in self.by_tag:
            if event.may_have_happened and (event.operation == "cancel_tag" or self.expiries):
                yield event.invoked, event.effect_until, event
        for put in self.puts if storer is None else [storer]:
            at = expiry(put, self.declared.clock_bound_ms)
            if at < inf:
                yield put.invoked + max(0.0, at - put.wall_ms), inf, None
        if self.topic in self.declared.dropped or self.topic in self.declared.retention:
            yield -inf, inf, None

    @property
    def course(self) -> Course:
        """The message as the store's side tells it."""
        if self._course is None:
            self._course = Course(self.commits)
        return self._course

    @property
    def remembers(self) -> bool:
        """Whether the topic remembers ids that were settled."""
        return self.topic in self.declared.remember

    @property
    def expiries(self) -> bool:
        return any(expiry(put, 0.0) < inf for put in self.puts)

    def _concerns(self, settle: Event, storer: Event | None) -> bool:
        if storer is None:
            return True
        return storer in self.storers_of(settle.arguments["birth"], self.births.get(settle.arguments["birth"]))

    def lives_twice(self, birth: int, content: int | None) -> bool:
        """Return whether one put of this life may have stored it again after it was settled (the documented
        doubling)."""
        if self.commits:
            return self.course.births(birth) > 1
        ends = self.removers()
        if self.remembers:
            # What was acknowledged, cancelled or expired is remembered, what was purged or replaced is not.
            ends = (end for end in ends if end[2] is not None and end[2].operation in ("purge", "put"))
        first_end = min((start for start, _, _ in ends), default=inf)
        return first_end < inf and any(put.effect_until >= first_end for put in self.storers_of(birth, content))

    @property
    def forgotten(self) -> bool:
        """Whether a store that is not durable may have lost something of this id in a crash."""
        if self.declared.durable:
            return False
        return any(put.invoked <= self.declared.last_crash for put in self.puts)

    def told(self, faults: Iterable[Event] = ()) -> list[str]:
        """Return all that was done with the id, and `faults`, as lines for people by time; then the store's last
        state."""
        events = [*self.puts, *self.mutations, *self.settles, *self.receives, *self.reads, *self.commits, *self.by_tag]
        ordered = sorted((*events, *faults), key=lambda event: (event.invoked, event.number))
        lines = [*map(described, ordered), *map(described, self.rows)]
        if len(lines) > MOST_TOLD:
            half = MOST_TOLD // 2
            lines[half:-half] = [f"… and {len(lines) - MOST_TOLD} more"]
        return lines

    def violation(self, invariant: str, sentence: str, *shown: Event | Values | None) -> Violation:
        """Return a violation about this id, with the lines that show it."""
        lines = tuple(described(line) for line in shown if line is not None)
        return Violation(invariant, sentence, self.topic, self.id, lines)


def met(put: Event) -> bool:
    """Return whether a put was answered DUPLICATE: its message was there already."""
    return put.result.get("status") == "DUPLICATE"


def stored(put: Event) -> bool:
    """Return whether a put certainly stored a new message. An answer with a later version means that the put was
    repeated and met itself; a put that moves may have done just that."""
    if not put.happened or met(put):
        return False
    return not put.arguments.get("move") or put.result.get("version", 1) == 1


def expired(event: Event) -> bool:
    """Return whether an answer says that the message was found expired, and removed."""
    return event.result.get("status") == "EXPIRED"


def expiry(put: Event, bound_ms: float) -> float:
    """Return the earliest true wall time at which a broker may find the put's message expired; infinity without an
    expiry. A relative expiry is counted by one broker's clock, and another's may find it."""
    arguments = put.arguments
    if not put.may_have_happened:
        return inf
    if arguments.get("expires_in_ms"):
        return put.wall_ms + float(arguments["expires_in_ms"]) - 2 * bound_ms - 1
    return float(arguments["expires_ms"]) - bound_ms if arguments.get("expires_ms") else inf


def sort_out(events: Iterable[Event], rows: Iterable[Values], declared: Declared) -> list[Story]:
    """Return the stories of all ids in events and dump."""
    stories: dict[tuple[str, str], Story] = {}
    tagged: list[Event] = []

    def story(values: dict[str, Any]) -> Story:
        key = values.get("topic", ""), values["id"]
        found = stories.get(key)
        if found is None:
            found = stories[key] = Story(key[0], key[1], declared)
        return found

    for event in events:
        if "id" in event.arguments:
            story(event.arguments).add(event)
        elif event.operation in ("move_tag", "cancel_tag") and not event.arguments.get("dry_run"):
            tagged.append(event)
    for row in rows:
        story(row).rows.append(row)
    if tagged:
        for one in stories.values():
            tags = {(put.arguments.get("tag", ""), put.arguments.get("group", "default")) for put in one.puts}
            one.by_tag = [
                event
                for event in tagged
                if event.arguments.get("topic", "") == one.topic
                and (event.arguments["tag"], event.arguments.get("group", "default")) in tags
            ]
    return list(stories.values())
